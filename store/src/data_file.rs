//! Reads data files. Everything that is read is compared with its checksum.

use std::collections::HashMap;
use std::ops::Range;

use bytes::Bytes;
use proto::checkpoint::data::{Entry, Partition, Section};
use proto::checkpoint::manifest::{File, Manifest};
use proto::checkpoint::{Error, MANIFEST, Result};
use proto::ids::{ChunkId, PartitionId};
use proto::placement::Layout;
use proto::tensor::{TensorSpec, Values};

use crate::stores::Folder;

/// Bytes of a file that are read first. Most headers are shorter.
const HEAD_BYTES: u64 = 256 << 10;

/// A data file with a header that matches the manifest.
#[derive(Debug)]
pub struct DataFile<'a> {
    folder: &'a Folder,
    file: &'a File,
    header: Partition,
    /// Index of each entry in the header, and byte range of its values in the file.
    entries: HashMap<String, (usize, Range<u64>)>,
}

impl<'a> DataFile<'a> {
    /// Opens the file of a partition.
    ///
    /// # Errors
    /// The file is missing, has another length than in the manifest, is damaged, or cannot be read
    /// now.
    ///
    /// # Panics
    /// If the manifest has no such partition.
    pub async fn open(folder: &'a Folder, manifest: &'a Manifest, partition: PartitionId) -> Result<Self> {
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

    /// Reads the values of a chunk in these sections, in the order of `sections`.
    ///
    /// # Errors
    /// The file lacks one of them, they are damaged, or they cannot be read now.
    pub async fn read(&self, layout: &Layout, chunk: ChunkId, sections: &[Section]) -> Result<Vec<Bytes>> {
        let (spec, tensor) = (layout.chunk(chunk), layout.tensor_of(chunk));
        let mut wanted = Vec::with_capacity(sections.len());
        for section in sections {
            let name = format!("{section}/{}@{}", tensor.name, spec.offset);
            let found = self.entries.get(&name).map(|(index, range)| (&self.header.entries[*index], range));
            let fits = found.filter(|(entry, _)| (entry.dtype, entry.len) == (tensor.dtype(), spec.len));
            let (entry, range) = fits.ok_or_else(|| {
                self.damaged(format!("no entry `{name}` of {} {:?}", spec.len, tensor.dtype()))
            })?;
            wanted.push((entry, range.clone()));
        }
        self.read_entries(&wanted).await
    }

    /// Reads the whole file and compares it with its checksums.
    ///
    /// # Errors
    /// The first damaged entry, or the file cannot be read now.
    pub async fn verify(&self) -> Result<()> {
        for entry in &self.header.entries {
            let (_, range) = &self.entries[&entry.name()];
            self.read_entries(&[(entry, range.clone())]).await?;
        }
        Ok(())
    }

    async fn read_entries(&self, wanted: &[(&Entry, Range<u64>)]) -> Result<Vec<Bytes>> {
        let ranges: Vec<_> = wanted.iter().map(|(_, range)| range.clone()).collect();
        let read = self.folder.ranges(&self.file.name, &ranges).await?;
        for ((entry, range), bytes) in wanted.iter().zip(&read) {
            let (found, expected) = (crc32c::crc32c(bytes), entry.crc32c);
            if found != expected {
                let name = entry.name();
                return Err(self.damaged(format!(
                    "checksum {found:08x} of `{name}` at {range:?}, expected {expected:08x}"
                )));
            }
        }
        Ok(read)
    }

    fn damaged(&self, what: String) -> Error {
        Error::Damaged { file: self.folder.shown(&self.file.name), what }
    }
}

/// Reads the weights of a checkpoint at its version: all tensors, in the manifest's order.
///
/// # Errors
/// A file is missing, damaged, or cannot be read now.
pub async fn weights(folder: &Folder, manifest: &Manifest) -> Result<Vec<Values>> {
    let damaged =
        |error: proto::Error| Error::Damaged { file: folder.shown(MANIFEST), what: error.to_string() };
    let mut files = Vec::with_capacity(manifest.files.len());
    for partition in (0..manifest.files.len() as u32).map(PartitionId) {
        files.push(DataFile::open(folder, manifest, partition).await?);
    }
    // Checked before memory is taken: the store knows the length of the files, but the manifest may
    // claim any size of the tensors.
    let expected = bytes_of(&manifest.tensors);
    let found = files.iter().fold(0u64, |sum, file| sum.saturating_add(file.header.data_bytes()));
    if expected.is_none_or(|expected| expected > found) {
        let what = format!("its tensors have {} bytes, its files {found}", expected.unwrap_or(u64::MAX));
        return Err(Error::Damaged { file: folder.shown(MANIFEST), what });
    }
    let layout = Layout::new(manifest.tensors.clone(), manifest.files.len() as u32).map_err(damaged)?;
    let mut values: Vec<Values> = manifest.tensors.iter().map(TensorSpec::zeros).collect();
    for (partition, file) in (0..).map(PartitionId).zip(&files) {
        for &chunk in layout.members(partition) {
            let read = file.read(&layout, chunk, &[Section::Weights(manifest.version)]).await?;
            let place = layout.chunk(chunk);
            read.iter().for_each(|bytes| values[place.tensor].write_bytes(place.offset, bytes));
        }
    }
    Ok(values)
}

/// Returns the bytes of these tensors, or `None` if the sum overflows.
fn bytes_of(tensors: &[TensorSpec]) -> Option<u64> {
    let bytes = |tensor: &TensorSpec| {
        let size = tensor.dtype().size() as u64;
        tensor.shape.iter().try_fold(size, |bytes, &size| bytes.checked_mul(size as u64))
    };
    tensors.iter().try_fold(0, |sum: u64, tensor| sum.checked_add(bytes(tensor)?))
}

async fn read_one(folder: &Folder, file: &File, range: Range<u64>) -> Result<Bytes> {
    let read = folder.ranges(&file.name, std::slice::from_ref(&range)).await?;
    Ok(read.into_iter().next().unwrap_or_default())
}
