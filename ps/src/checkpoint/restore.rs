//! From a checkpoint of any number of partitions to the chunks of one partition.
//!
//! A chunk is looked up in the file of the partition that held it then. Only what is needed is read, and all that is read is compared
//! with its checksum.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use futures::{StreamExt, TryStreamExt};
use proto::checkpoint::data::{Partition, Section};
use proto::checkpoint::manifest::{File, Manifest, Needs, oldest};
use proto::checkpoint::store::{Folder, Stores};
use proto::checkpoint::{AppliedSteps, Error, MANIFEST, Result};
use proto::ids::{ChunkId, PartitionId, Version};
use proto::parameters::Restore;
use proto::placement::Layout;
use proto::tensor::Role;

use super::again;
use crate::chunk::{Buffer, Pool, Slots};
use crate::model::{Model, Opening, Weights};

/// Largest manifest that makes sense: it lists the tensors of a model.
const MANIFEST_BYTES_MAX: u64 = 256 << 20;

/// Bytes of a file that are read at first: most headers are shorter.
const HEAD_BYTES: u64 = 256 << 10;

/// Chunks that are read at once.
const CHUNKS_AT_ONCE: usize = 4;

/// A partition as a checkpoint holds it.
#[derive(Debug)]
pub(crate) struct Restored {
    /// Weights of every version that the next steps are computed from, oldest first.
    pub(crate) weights: Vec<(Version, Weights)>,
    pub(crate) slots: Vec<Slots>,
    pub(crate) applied: AppliedSteps,
}

/// Loads the checkpoint that a partition was opened with, or writes down why that cannot be done.
pub(crate) async fn run(model: Arc<Model>, stores: Stores, restore: Restore) {
    let loading = async {
        let mut attempt = 0;
        loop {
            let loaded = match stores.open(&restore.url) {
                Ok(folder) => load(&model, &folder, restore.version).await,
                Err(error) => Err(error),
            };
            match loaded.as_ref().err().and_then(|error| again(attempt, error)) {
                Some(wait) => tokio::time::sleep(wait).await,
                None => return loaded,
            }
            attempt += 1;
        }
    };
    let ended = model.ended().clone();
    let loaded = tokio::select! {
        biased;
        () = ended.cancelled() => return,
        loaded = loading => loaded,
    };
    let place = model.place();
    match loaded {
        Ok(restored) => {
            tracing::info!(%place, version = %restore.version, "partition restored");
            model.restored(restored);
        }
        Err(error) => {
            tracing::error!(%place, version = %restore.version, %error, "partition not restored");
            model.restore_failed(error.to_string());
        }
    }
}

async fn load(model: &Model, folder: &Folder, version: Version) -> Result<Restored> {
    let Opening { address, partitions, tensors, plan, spec, .. } = model.opening();
    let name = folder.shown(MANIFEST);
    let manifest = Manifest::decode(&name, &folder.read(MANIFEST, MANIFEST_BYTES_MAX).await?)?;
    manifest.check(&name, &Needs { tensors, plan, spec, version })?;
    let applied = manifest.applied(&name, address.partition, *partitions)?;
    let consistency = spec.consistency.resolve();
    let versions = oldest(consistency.order, consistency.delay, version).get()..=version.get();
    let versions: Vec<Version> = versions.map(Version).collect();

    // The tensors are those of the opening, so this is as large as the layout that the partition has already.
    let damaged = |what: String| Error::Damaged { file: name.clone(), what };
    let saved = Layout::new(tensors.clone(), manifest.files.len() as u32)
        .map_err(|error| damaged(error.to_string()))?;
    let members = model.layout().members(address.partition);
    let mut needed: BTreeMap<PartitionId, Vec<(usize, ChunkId)>> = BTreeMap::new();
    for (index, &chunk) in members.iter().enumerate() {
        needed.entry(saved.chunk(chunk).partition).or_default().push((index, chunk));
    }
    let mut chunks: Vec<Option<Chunk>> = members.iter().map(|_| None).collect();
    for (partition, wanted) in needed {
        let source = Source::open(folder, &manifest, partition).await?;
        let mut reading = futures::stream::iter(wanted)
            .map(|(index, chunk)| {
                let (source, versions) = (&source, &versions);
                async move {
                    let role = model.layout().tensor_of(chunk).role;
                    let sections = versions.iter().map(|&version| Section::Weights(version));
                    let slots: &[&str] =
                        if role == Role::Parameter { model.optimizer().slot_names() } else { &[] };
                    let slots = slots.iter().map(|&name| Section::Slot(name.to_owned()));
                    let sections: Vec<Section> = sections.chain(slots).collect();
                    source
                        .read(model.layout(), chunk, &sections, model.pool())
                        .await
                        .map(|read| (index, read))
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
    let roles = members.iter().map(|&chunk| model.layout().tensor_of(chunk).role);
    let slots = roles.zip(chunks).map(|(role, chunk)| Slots::restored(role, chunk.slots)).collect();
    Ok(Restored { weights, slots, applied })
}

/// What was read of one chunk.
struct Chunk {
    /// By version, oldest first.
    weights: Vec<Arc<Buffer>>,
    slots: Vec<Arc<Buffer>>,
}

/// A data file whose header was read and compared.
struct Source<'a> {
    folder: &'a Folder,
    file: &'a File,
    header: Partition,
    /// Index of each entry, and where its values lie.
    entries: HashMap<String, (usize, Range<u64>)>,
}

impl<'a> Source<'a> {
    async fn open(folder: &'a Folder, manifest: &'a Manifest, partition: PartitionId) -> Result<Self> {
        let file = &manifest.files[partition.index()];
        let name = folder.shown(&file.name);
        let found_bytes = folder.size(&file.name).await?;
        if found_bytes != file.bytes {
            return Err(Error::Truncated { file: name, expected_bytes: file.bytes, found_bytes });
        }
        let head = read_one(folder, file, 0..HEAD_BYTES.min(file.bytes)).await?;
        let header_bytes = Partition::header_bytes(&name, file.bytes, &head)?;
        let header = match head.get(..header_bytes as usize) {
            Some(header) => Bytes::copy_from_slice(header),
            None => read_one(folder, file, 0..header_bytes).await?,
        };
        let found = crc32c::crc32c(&header);
        let damaged = |what: String| Error::Damaged { file: name.clone(), what };
        if found != file.crc32c {
            return Err(damaged(format!("checksum {found:08x} of its header, expected {:08x}", file.crc32c)));
        }
        let header = Partition::decode(&name, file.bytes, &header)?;
        let is = (header.version, header.partition, header.partitions as usize, &header.applied);
        let should = (manifest.version, partition, manifest.files.len(), &file.applied);
        if is != should {
            return Err(damaged(format!("it is {is:?}, the manifest expects {should:?}")));
        }
        let mut at = header_bytes;
        let mut entries = HashMap::with_capacity(header.entries.len());
        for (index, entry) in header.entries.iter().enumerate() {
            let range = at..at + entry.bytes();
            at = range.end;
            entries.insert(entry.name(), (index, range));
        }
        Ok(Self { folder, file, header, entries })
    }

    /// The values of a chunk in these sections.
    async fn read(
        &self,
        layout: &Layout,
        chunk: ChunkId,
        sections: &[Section],
        pool: &Pool,
    ) -> Result<Vec<Arc<Buffer>>> {
        let (spec, tensor) = (layout.chunk(chunk), layout.tensor_of(chunk));
        let damaged = |what: String| Error::Damaged { file: self.folder.shown(&self.file.name), what };
        let mut wanted = Vec::with_capacity(sections.len());
        for section in sections {
            let name = format!("{section}/{}@{}", tensor.name, spec.offset);
            let found = self.entries.get(&name).map(|(index, range)| (&self.header.entries[*index], range));
            let fits = found.filter(|(entry, _)| (entry.dtype, entry.len) == (tensor.dtype(), spec.len));
            let (entry, range) = fits
                .ok_or_else(|| damaged(format!("no entry `{name}` of {} {:?}", spec.len, tensor.dtype())))?;
            wanted.push((entry, range.clone()));
        }
        let ranges: Vec<_> = wanted.iter().map(|(_, range)| range.clone()).collect();
        let read = self.folder.ranges(&self.file.name, &ranges).await?;
        let mut buffers = Vec::with_capacity(read.len());
        for ((entry, range), bytes) in wanted.into_iter().zip(read) {
            let (found, expected) = (crc32c::crc32c(&bytes), entry.crc32c);
            if found != expected {
                let name = entry.name();
                return Err(damaged(format!(
                    "checksum {found:08x} of `{name}` at {range:?}, expected {expected:08x}"
                )));
            }
            let mut buffer = pool.take(entry.dtype, entry.len);
            buffer.write_bytes(0, &bytes);
            buffers.push(Arc::new(buffer));
        }
        Ok(buffers)
    }
}

async fn read_one(folder: &Folder, file: &File, range: Range<u64>) -> Result<Bytes> {
    let read = folder.ranges(&file.name, std::slice::from_ref(&range)).await?;
    Ok(read.into_iter().next().unwrap_or_default())
}
