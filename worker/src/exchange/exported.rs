//! Memory of a CUDA device in which gradients lie for a ps on the same device (ADR 58).
//!
//! A push is copied into one *part* of the memory, and the ps reads it there. So the ps copies
//! nothing from the host.
//!
//! Always true here:
//!
//! - A part is written to again only when the ps has answered that push. When the call breaks
//!   instead, the part is lost: it rests until the attachment has ended.
//! - The memory is freed only when the ps has closed it or is gone.
//! - What refuses is said once, and pushes then go through memory of the host.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use bytes::Bytes;
use kernels::device::PART_ALIGNMENT;
use kernels::{Device, Error, Storage};
use proto::pb;
use proto::tensor::{Chunk, DType};

/// Pushes that lie in the memory at once: those on their way, because a ps keeps none. More go
/// through memory of the host.
const PARTS: usize = 4;

/// The device of a worker, for memory that it exports. It is opened when a ps on it is met.
#[derive(Debug)]
pub(super) struct Exporter {
    ordinal: usize,
    /// Folder for compiled kernels.
    cache: Option<PathBuf>,
    device: OnceLock<Result<Device, Error>>,
    has_told: AtomicBool,
}

/// Memory that this worker has exported to one ps.
#[derive(Debug)]
pub(super) struct Exported {
    device: Device,
    storage: Mutex<Storage>,
    part_bytes: usize,
    free: Mutex<Vec<usize>>,
}

/// The place of one push. It goes back when it is dropped, if the ps has answered.
#[derive(Debug)]
pub(super) struct Part {
    exported: Arc<Exported>,
    number: usize,
    /// The ps was told of it and has not answered.
    is_lent: bool,
}

impl Exporter {
    pub(super) const fn new(ordinal: usize, cache: Option<PathBuf>) -> Self {
        Self { ordinal, cache, device: OnceLock::new(), has_told: AtomicBool::new(false) }
    }

    /// Exports memory of the device with this UUID, for pushes of at most `bytes`. Returns it with
    /// the handle for the ps. It may take seconds.
    ///
    /// # Errors
    /// The reason why there is none, for people.
    pub(super) fn export(&self, uuid: &[u8], bytes: usize) -> Result<(Exported, Vec<u8>), String> {
        let opened = || Device::cuda(self.ordinal, self.cache.as_deref());
        let device = self.device.get_or_init(opened).clone().map_err(|error| error.to_string())?;
        if device.uuid().is_none_or(|own| own != uuid) {
            return Err(format!("the ps is on another CUDA device than cuda:{}", self.ordinal));
        }
        let part_bytes = bytes.next_multiple_of(PART_ALIGNMENT);
        let exported = device.exported(DType::F32, PARTS * part_bytes / DType::F32.size());
        let (storage, handle) = exported.map_err(|error| error.to_string())?;
        let free = Mutex::new((0..PARTS).collect());
        Ok((Exported { device, storage: Mutex::new(storage), part_bytes, free }, handle))
    }

    /// Says once why gradients go through memory of the host.
    pub(super) fn told(&self, reason: &str) {
        if !self.has_told.swap(true, Ordering::Relaxed) {
            tracing::info!(reason, "gradients go to a ps of this host through memory of the host");
        }
    }
}

impl Exported {
    /// Takes a part for these chunks. `None`: none is free, or they do not fit.
    pub(super) fn part(self: &Arc<Self>, chunks: &[Chunk]) -> Option<Part> {
        let fits = bytes_of(chunks) <= self.part_bytes;
        let number = fits.then(|| lock(&self.free).pop()).flatten()?;
        Some(Part { exported: self.clone(), number, is_lent: false })
    }
}

impl Part {
    /// Copies the values of a push into the part. They are there when this returns.
    ///
    /// # Errors
    /// The device failed. It does nothing any more.
    pub(super) fn write<'a>(&self, chunks: impl IntoIterator<Item = &'a Bytes>) -> Result<(), Error> {
        let mut storage = lock(&self.exported.storage);
        let mut at = self.begin();
        for values in chunks {
            storage.place(at, values);
            at += values.len().next_multiple_of(PART_ALIGNMENT);
        }
        drop(storage);
        self.exported.device.settle()
    }

    /// Returns where chunks of so many bytes lie, in the order in which they were written. The ps
    /// is told.
    pub(super) fn lend(&mut self) -> impl FnMut(usize) -> pb::Region + Send + use<> {
        self.is_lent = true;
        let mut at = self.begin();
        move |bytes| {
            let offset = at as u64;
            at += bytes.next_multiple_of(PART_ALIGNMENT);
            pb::Region { offset, bytes: bytes as u64 }
        }
    }

    /// The ps has answered: it reads the part no more.
    pub(super) fn answered(&mut self) {
        self.is_lent = false;
    }

    fn begin(&self) -> usize {
        self.number * self.exported.part_bytes
    }
}

impl Drop for Part {
    fn drop(&mut self) {
        if !self.is_lent {
            lock(&self.exported.free).push(self.number);
        }
    }
}

/// Returns the bytes of a part that chunks take.
pub(super) fn bytes_of(chunks: &[Chunk]) -> usize {
    chunks.iter().map(|chunk| chunk.values.len().next_multiple_of(PART_ALIGNMENT)).sum()
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use proto::ids::ChunkId;
    use proto::tensor::TensorRole;

    use super::*;

    /// Memory as of a device, on the host.
    fn exported(part_bytes: usize) -> Arc<Exported> {
        let storage = Mutex::new(Storage::zeros(DType::F32, PARTS * part_bytes / 4));
        let free = Mutex::new((0..PARTS).collect());
        Arc::new(Exported { device: Device::default(), storage, part_bytes, free })
    }

    fn chunks(lengths: &[usize]) -> Vec<Chunk> {
        let chunk = |(id, &bytes): (u32, &usize)| Chunk {
            id: ChunkId(id),
            role: TensorRole::Parameter,
            values: Bytes::from(vec![id as u8 + 1; bytes]),
        };
        (0..).zip(lengths).map(chunk).collect()
    }

    #[test]
    fn chunks_lie_one_after_the_other_where_the_ps_is_told() {
        let (exported, chunks) = (exported(1024), chunks(&[260, 8, 256]));
        assert_eq!(bytes_of(&chunks), 512 + 256 + 256);
        let mut part = exported.part(&chunks).unwrap();
        part.write(chunks.iter().map(|chunk| &chunk.values)).unwrap();
        let base = part.begin() as u64;
        let mut lend = part.lend();
        for (chunk, offset) in chunks.iter().zip([0, 512, 768]) {
            let region = lend(chunk.values.len());
            assert_eq!((region.offset, region.bytes), (base + offset, chunk.values.len() as u64));
            let begin = region.offset as usize;
            let storage = lock(&exported.storage);
            assert_eq!(storage.bytes()[begin..begin + chunk.values.len()], chunk.values);
        }
    }

    #[test]
    fn a_part_rests_until_the_ps_has_answered() {
        let (exported, chunks) = (exported(256), chunks(&[256]));
        let mut parts: Vec<_> = (0..PARTS).map(|_| exported.part(&chunks).unwrap()).collect();
        assert!(exported.part(&chunks).is_none(), "all are in use");
        let _ = parts[0].lend();
        parts[0].answered();
        let _ = parts[1].lend();
        parts.truncate(2);
        drop(parts);
        assert_eq!(lock(&exported.free).len(), PARTS - 1, "one push has no answer");
        assert!(exported.part(&self::chunks(&[257])).is_none(), "it does not fit");
    }

    #[test]
    fn without_a_device_the_reason_is_said() {
        let refused = Exporter::new(usize::MAX, None).export(&[0; 16], 8).unwrap_err();
        assert!(refused.contains("CUDA"), "{refused}");
    }
}
