//! Restores the chunks of one partition from a checkpoint of any number of partitions.
//!
//! Always true here: a chunk is read from the file of the partition that held it then. Only needed
//! parts of a file are read, and each part is compared with its checksum. A restored partition
//! appears whole, after the last comparison, or not at all.

use std::collections::BTreeMap;
use std::sync::Arc;

use bytes::Bytes;
use futures::{StreamExt, TryStreamExt};
use kernels::Operand;
use proto::checkpoint::data::Section;
use proto::checkpoint::manifest::{Manifest, Needs, oldest};
use proto::checkpoint::{AppliedSteps, Error, MANIFEST, Result};
use proto::ids::{ChunkId, PartitionId, Version};
use proto::parameters::Restore;
use proto::placement::Layout;
use store::data_file::DataFile;
use store::{Folder, Stores, found};

use super::Partition;
use super::dense::Dense;
use crate::checks;
use crate::chunk::{Slots, Weights};
use crate::ledger::Ledger;
use crate::opening::Opening;
use crate::pool::{Buffer, Use};

/// Chunks that are read at once.
const CHUNKS_AT_ONCE: usize = 4;

/// A partition as a checkpoint holds it.
#[derive(Debug)]
struct Restored {
    /// Weights of every version that the next steps are computed from, oldest first.
    weights: Vec<(Version, Weights)>,
    slots: Vec<Slots>,
    applied: AppliedSteps,
}

impl Partition {
    /// Loads the checkpoint that this partition was opened with, or writes down why that cannot be
    /// done. Ends when the partition is closed.
    pub(crate) async fn restore(self: Arc<Self>, stores: Stores, restore: Restore) {
        let place = self.place;
        let loading = async {
            let folder = stores.open(&restore.url)?;
            let manifest = self.manifest(&stores, &folder, restore.version).await?;
            let tell =
                |error: &Error| tracing::warn!(%place, %error, "the checkpoint store fails; trying again");
            stores.patiently(tell, || load(&self.opening, &self.dense, &folder, &manifest)).await
        };
        let loaded = tokio::select! {
            biased;
            () = self.ended.cancelled() => return,
            loaded = loading => loaded,
        };
        match loaded {
            Ok(_) if self.settle().is_err() => {}
            Ok(restored) => {
                tracing::info!(%place, version = %restore.version, "partition restored");
                self.take_over(restored);
            }
            Err(error) => {
                // The master takes an older checkpoint, and tells the job's users.
                tracing::warn!(%place, version = %restore.version, %error, "partition not restored");
                self.state().restore_error = Some(error.to_string());
            }
        }
    }

    /// Reads the manifest, for as long as it takes: while it cannot be read, the store is to blame
    /// and not the checkpoint, and an older checkpoint would be a loss for nothing.
    async fn manifest(&self, stores: &Stores, folder: &Folder, version: Version) -> Result<Manifest> {
        let tell = |error: &Error| {
            tracing::warn!(place = %self.place, %version, %error, "the store cannot be read; waiting for it");
        };
        let manifest = stores.for_as_long_as_it_takes(tell, || found::read(folder, version)).await?;
        let Opening { tensors, plan, spec, .. } = &self.opening;
        manifest.check(&folder.shown(MANIFEST), &Needs { tensors, plan, spec, version })?;
        Ok(manifest)
    }

    /// Takes over what the checkpoint has: it appears whole, and pulls that wait are answered.
    fn take_over(&self, restored: Restored) {
        let Restored { weights, slots, applied } = restored;
        let mut state = self.state();
        self.dense.replace_slots(slots);
        state.ledger = Ledger::restored(self.opening.plan, self.consistency.order, applied);
        for (version, weights) in weights {
            drop(state.versions.insert(version, weights));
        }
        checks::restored(self.opening.address, &state.ledger);
        drop(state);
        self.changed.notify_waiters();
    }
}

async fn load(opening: &Opening, dense: &Dense, folder: &Folder, manifest: &Manifest) -> Result<Restored> {
    let Opening { address, partitions, tensors, spec, .. } = opening;
    let (name, version) = (folder.shown(MANIFEST), manifest.version);
    let applied = manifest.applied(&name, address.partition, *partitions)?;
    let consistency = spec.consistency.resolve();
    let versions = oldest(consistency.order, consistency.delay, version).get()..=version.get();
    let versions: Vec<Version> = versions.map(Version).collect();

    // The tensors are those of the opening, so this is as large as the layout that the partition
    // has already.
    let damaged = |what: String| Error::Damaged { file: name.clone(), what };
    let saved = Layout::new(tensors.clone(), manifest.files.len() as u32)
        .map_err(|error| damaged(error.to_string()))?;
    let members = dense.members();
    let mut needed: BTreeMap<PartitionId, Vec<(usize, ChunkId)>> = BTreeMap::new();
    for (index, &chunk) in members.iter().enumerate() {
        needed.entry(saved.chunk(chunk).partition).or_default().push((index, chunk));
    }
    let mut chunks: Vec<Option<Chunk>> = members.iter().map(|_| None).collect();
    for (partition, wanted) in needed {
        let source = DataFile::open(folder, manifest, partition).await?;
        let mut reading = futures::stream::iter(wanted)
            .map(|(index, chunk)| {
                let (source, versions) = (&source, &versions);
                async move {
                    let sections = versions.iter().map(|&version| Section::Weights(version));
                    let slots = dense.slot_names(chunk).iter().map(|&name| Section::Slot(name.to_owned()));
                    let sections: Vec<Section> = sections.chain(slots).collect();
                    let read = source.read(dense.layout(), chunk, &sections).await?;
                    let buffer = |(number, bytes): (usize, Bytes)| {
                        let use_of = if number < versions.len() { Use::Weights } else { Use::Slot };
                        let mut buffer = dense.take(use_of, chunk);
                        buffer.write(Operand::Payload(&bytes));
                        Arc::new(buffer)
                    };
                    Ok::<_, Error>((index, read.into_iter().enumerate().map(buffer).collect::<Vec<_>>()))
                }
            })
            .buffered(CHUNKS_AT_ONCE);
        while let Some((index, mut read)) = reading.try_next().await? {
            let slots = read.split_off(versions.len());
            chunks[index] = Some(Chunk { weights: read, slots });
        }
    }
    let chunks: Vec<Chunk> = chunks.into_iter().flatten().collect();
    let weights = versions.iter().enumerate();
    let weights = weights
        .map(|(at, &version)| (version, chunks.iter().map(|chunk| chunk.weights[at].clone()).collect()))
        .collect();
    let roles = members.iter().map(|&chunk| dense.layout().tensor_of(chunk).role);
    let slots = roles.zip(chunks).map(|(role, chunk)| Slots::restored(role, chunk.slots)).collect();
    Ok(Restored { weights, slots, applied })
}

/// One chunk as it was read.
struct Chunk {
    /// The weights of each version, oldest first.
    weights: Vec<Arc<Buffer>>,
    slots: Vec<Arc<Buffer>>,
}
