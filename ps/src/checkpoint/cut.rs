//! A partition at one version: references of its weights and slots, and its ledger.

use std::sync::Arc;

use bytes::Bytes;
use kernels::Storage;
use proto::checkpoint::data::{Entry, Partition, Section};
use proto::checkpoint::{ALIGNED, AppliedSteps, file_name, file_stem};
use proto::ids::{PartitionId, Version};
use proto::placement::Layout;

use crate::chunk::{Slots, Weights};
use crate::pool::Buffer;

/// A partition between two updates.
#[derive(Debug)]
pub(crate) struct Cut {
    header: Partition,
    /// The values of the header's entries.
    values: Vec<Arc<Buffer>>,
}

/// The beginning of a file, with the checksums of all that follows.
#[derive(Debug)]
pub(crate) struct Header {
    partition: Partition,
    bytes: Bytes,
    crc32c: u32,
}

impl Cut {
    /// References of `weights` (oldest version first, the last is the one that is saved) and of the
    /// slots beside the last.
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
        // What a disk takes as it lies comes first, because it must lie on multiples of `ALIGNED`
        // in the file too; then integers, on multiples of 8.
        order.sort_by_key(|&index| {
            let size = layout.tensor_of(members[index]).dtype().size();
            (!(layout.chunk(members[index]).len * size).is_multiple_of(ALIGNED), std::cmp::Reverse(size))
        });
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

    /// Returns the version that is saved.
    pub(crate) const fn version(&self) -> Version {
        self.header.version
    }

    /// Returns the cut with all values on the host. Those that lie on a device are copied.
    ///
    /// # Errors
    /// The device failed, with the version that was to be saved.
    pub(crate) fn on_host(self) -> Result<Self, (Version, kernels::Error)> {
        let version = self.version();
        // Each reference to the device's memory goes as soon as there is a copy.
        let values = self.values.into_iter().map(|buffer| buffer.on_host());
        let values = values.collect::<Result<_, _>>().map_err(|error| (version, error))?;
        Ok(Self { values, ..self })
    }

    /// Bytes of all values.
    pub(crate) fn data_bytes(&self) -> u64 {
        self.header.data_bytes()
    }

    /// Returns the values after the header, in order; no copy. They lie on the host.
    pub(crate) fn values(&self) -> impl Iterator<Item = Bytes> {
        self.values.iter().map(|buffer| Storage::share(buffer.clone()))
    }

    /// Bytes of the header.
    pub(crate) fn header_bytes(&self) -> usize {
        self.header.encode().len()
    }

    /// Returns how the name of its file begins.
    pub(crate) fn file_stem(&self) -> String {
        file_stem(self.header.partition, self.header.partitions)
    }

    /// Returns the header, with the checksum of each of the values.
    pub(crate) fn header(&self, checksums: &[u32]) -> Header {
        let mut partition = self.header.clone();
        for (entry, &crc32c) in partition.entries.iter_mut().zip(checksums) {
            entry.crc32c = crc32c;
        }
        let bytes = partition.encode();
        Header { crc32c: crc32c::crc32c(&bytes), bytes, partition }
    }

    /// Works out the checksums of the values: here, unless these are more than `inline_bytes_max`.
    pub(crate) async fn checksums(self: &Arc<Self>, inline_bytes_max: usize) -> Vec<u32> {
        let cut = self.clone();
        let work = move || cut.values.iter().map(|values| crc32c::crc32c(&values.bytes())).collect();
        if self.header.data_bytes() <= inline_bytes_max as u64 {
            return work();
        }
        let working = tokio::task::spawn_blocking(work);
        working.await.expect("checksums do not panic and are not cancelled")
    }
}

impl Header {
    /// Returns the name of the file that the header begins.
    pub(crate) fn file_name(&self) -> String {
        file_name(self.partition.partition, self.partition.partitions, self.crc32c)
    }

    /// Returns the checksum of the header.
    pub(crate) const fn crc32c(&self) -> u32 {
        self.crc32c
    }

    /// Returns the header's bytes as the file stores them.
    pub(crate) const fn bytes(&self) -> &Bytes {
        &self.bytes
    }

    /// Returns the size of the file in bytes.
    pub(crate) fn file_bytes(&self) -> u64 {
        self.bytes.len() as u64 + self.partition.data_bytes()
    }

    /// Returns which steps are applied.
    pub(crate) const fn applied(&self) -> &AppliedSteps {
        &self.partition.applied
    }
}
