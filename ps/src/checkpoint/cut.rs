//! A partition at one version: references of its weights and slots, and its ledger. Sealed, it knows its checksums.

use std::sync::Arc;

use bytes::Bytes;
use proto::checkpoint::AppliedSteps;
use proto::checkpoint::data::{Entry, Partition, Section};
use proto::checkpoint::file_name;
use proto::ids::{PartitionId, Version};
use proto::placement::Layout;

use super::INLINE_BYTES_MAX;
use crate::chunk::{Buffer, Slots};
use crate::model::Weights;

/// A partition between two updates.
#[derive(Debug)]
pub(crate) struct Cut {
    header: Partition,
    /// The values of the header's entries.
    values: Vec<Arc<Buffer>>,
}

/// A cut with its header as it is written.
#[derive(Debug)]
pub(crate) struct Sealed {
    cut: Cut,
    header: Bytes,
    crc32c: u32,
}

impl Cut {
    /// References of `weights` (oldest version first, the last is the one that is saved) and of the slots beside the last.
    pub(crate) fn new(
        layout: &Layout,
        partition: PartitionId,
        weights: &[(Version, Weights)],
        slots: &[Slots],
        slot_names: &[&str],
        applied: AppliedSteps,
    ) -> Self {
        let (version, _) = weights.last().expect("the version that is saved");
        let members = layout.members(partition);
        let mut order: Vec<usize> = (0..members.len()).collect();
        // Integers first, so that they lie on multiples of 8.
        order.sort_by_key(|&index| std::cmp::Reverse(layout.tensor_of(members[index]).dtype().size()));
        let (mut entries, mut values) = (Vec::new(), Vec::new());
        for index in order {
            let (chunk, tensor) = (layout.chunk(members[index]), layout.tensor_of(members[index]));
            let weights =
                weights.iter().map(|(version, weights)| (Section::Weights(*version), weights[index].clone()));
            let names = slot_names.iter().map(|name| Section::Slot((*name).to_owned()));
            for (section, buffer) in weights.chain(names.zip(slots[index].share())) {
                let (tensor, dtype) = (tensor.name.clone(), buffer.dtype());
                entries.push(Entry {
                    section,
                    tensor,
                    offset: chunk.offset,
                    dtype,
                    len: chunk.len,
                    crc32c: 0,
                });
                values.push(buffer);
            }
        }
        let partitions = layout.partitions() as u32;
        Self { header: Partition { version: *version, partition, partitions, applied, entries }, values }
    }

    /// The version that is saved.
    pub(crate) const fn version(&self) -> Version {
        self.header.version
    }

    /// Works out the checksums.
    pub(crate) async fn seal(self) -> Sealed {
        if self.header.data_bytes() <= INLINE_BYTES_MAX {
            return self.seal_now();
        }
        let sealing = tokio::task::spawn_blocking(move || self.seal_now());
        sealing.await.expect("checksums do not panic and are not cancelled")
    }

    fn seal_now(mut self) -> Sealed {
        for (entry, values) in self.header.entries.iter_mut().zip(&self.values) {
            entry.crc32c = crc32c::crc32c(values.bytes());
        }
        let header = self.header.encode();
        Sealed { crc32c: crc32c::crc32c(&header), header, cut: self }
    }
}

impl Sealed {
    /// Name of its file.
    pub(crate) fn file_name(&self) -> String {
        file_name(self.cut.header.partition, self.cut.header.partitions, self.crc32c)
    }

    /// Checksum of the header.
    pub(crate) const fn crc32c(&self) -> u32 {
        self.crc32c
    }

    /// Size of the file.
    pub(crate) fn bytes(&self) -> u64 {
        self.header.len() as u64 + self.cut.header.data_bytes()
    }

    /// Which steps are applied.
    pub(crate) const fn applied(&self) -> &AppliedSteps {
        &self.cut.header.applied
    }

    /// The file in pieces; no copy.
    pub(crate) fn pieces(&self) -> impl Iterator<Item = Bytes> {
        std::iter::once(self.header.clone()).chain(self.cut.values.iter().map(Buffer::view))
    }
}
