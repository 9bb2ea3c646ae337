//! Memory of a CUDA device in which gradients lie for a ps on the same device, or on one with
//! access to it, and into which the ps copies weights (ADR 58).
//!
//! A push is copied into one *part* of the memory, and the ps reads it there. A pull offers a part,
//! and the ps writes there. So the ps copies nothing from or to the host.
//!
//! Always true here:
//!
//! - A part is used again only when the ps has answered that call. When the call breaks instead,
//!   the part is lost: it rests until the attachment has ended.
//! - The memory is freed only when the ps has closed it or is gone.
//! - What refuses is said once, and values then go through memory of the host.

use std::borrow::Cow;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kernels::device::{Devices, PART_ALIGNMENT};
use kernels::{Device, Error, Storage, values};
use proto::pb;
use proto::placement::CHUNK_LEN;
use proto::tensor::{Chunk, ChunkValues, DType};

/// Pushes and pulls that use the memory at once: those on their way, because a ps keeps none. More
/// go through memory of the host.
const PARTS: usize = 4;

/// Most bytes that cross to the host at once: the largest chunk.
pub(super) const PIECE_BYTES: usize = CHUNK_LEN * DType::I64.size();

/// The device of a worker, for memory that it exports. It is opened when a ps on it is met.
#[derive(Debug)]
pub(super) struct Exporter {
    ordinal: usize,
    /// The open devices of this process.
    devices: Devices,
    has_told: AtomicBool,
}

/// Memory that this worker has exported to one ps.
#[derive(Debug)]
pub(super) struct Exported {
    device: Device,
    storage: Mutex<Storage>,
    part_bytes: usize,
    free: Mutex<Vec<Free>>,
}

/// A part that nobody uses.
#[derive(Debug, Default)]
struct Free {
    number: usize,
    /// Memory of the host to which values of the part were copied.
    piece: Option<Storage>,
}

/// The place of one push, or of the answer to one pull. It goes back when it is dropped, if the ps
/// has answered.
#[derive(Debug)]
pub(super) struct Part {
    exported: Arc<Exported>,
    place: Free,
    /// The ps was told of it and has not answered.
    is_lent: bool,
}

impl Exporter {
    pub(super) const fn new(ordinal: usize, devices: Devices) -> Self {
        Self { ordinal, devices, has_told: AtomicBool::new(false) }
    }

    /// Exports memory to a ps on the device with this UUID, for pushes of at most `bytes`. Returns
    /// it with the handle for the ps. It may take seconds.
    ///
    /// # Errors
    /// The reason why there is none, for people.
    pub(super) fn export(&self, uuid: &[u8], bytes: usize) -> Result<(Exported, Vec<u8>), String> {
        let device = self.devices.cuda(self.ordinal).map_err(|error| error.to_string())?;
        if !device.is_reached_from(uuid) {
            return Err(format!(
                "the ps is on another CUDA device than cuda:{} and has no access to its memory",
                self.ordinal
            ));
        }
        let part_bytes = bytes.next_multiple_of(PART_ALIGNMENT);
        let exported = device.exported(DType::F32, PARTS * part_bytes / DType::F32.size());
        let (storage, handle) = exported.map_err(|error| error.to_string())?;
        Ok((Exported { device, storage: Mutex::new(storage), part_bytes, free: all_free() }, handle))
    }

    /// Says once why gradients and weights go through memory of the host.
    pub(super) fn told(&self, reason: &str) {
        if !self.has_told.swap(true, Ordering::Relaxed) {
            let what = "gradients and weights go to and from a ps of this host through memory of the host";
            tracing::info!(reason, "{what}");
        }
    }
}

impl Exported {
    /// Takes a part for so many bytes. `None`: none is free, or they do not fit.
    pub(super) fn part(self: &Arc<Self>, bytes: usize) -> Option<Part> {
        let fits = bytes <= self.part_bytes;
        let place = fits.then(|| lock(&self.free).pop()).flatten()?;
        Some(Part { exported: self.clone(), place, is_lent: false })
    }
}

impl Part {
    /// Copies the values of a push into the part, from the host or within the device. They are
    /// there when this returns.
    ///
    /// # Errors
    /// The device failed. It does nothing any more.
    ///
    /// # Panics
    /// If values lie on a device that is not one of this crate's.
    pub(super) fn write<'a>(&self, chunks: impl IntoIterator<Item = &'a ChunkValues>) -> Result<(), Error> {
        let mut storage = lock(&self.exported.storage);
        let mut at = self.begin();
        for values in chunks {
            match values {
                ChunkValues::Host(values) => storage.place(at, values),
                ChunkValues::Device { memory, bytes } => {
                    let from = values::storage(memory.as_ref()).expect("storage of a device");
                    storage.place_part(at, from, bytes.clone());
                }
            }
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

    /// Returns the whole part, for the answer to a pull. The ps is told.
    pub(super) fn offer(&mut self) -> pb::Region {
        self.is_lent = true;
        pb::Region { offset: self.begin() as u64, bytes: self.exported.part_bytes as u64 }
    }

    /// Copies bytes that the ps has written, from the byte `begin` of the memory on, to the host.
    /// It waits for them.
    ///
    /// # Panics
    /// If they are not inside the memory, or more than [`PIECE_BYTES`].
    ///
    /// # Errors
    /// The device failed. It does nothing any more.
    pub(super) fn fetch(&mut self, begin: usize, bytes: usize) -> Result<(), Error> {
        let device = &self.exported.device;
        let allocate = || device.staging(DType::F32, PIECE_BYTES / DType::F32.size());
        let piece = self.place.piece.get_or_insert_with(allocate);
        piece.receive_part(&lock(&self.exported.storage), begin, bytes)
    }

    /// Hands out the memory, for reading what the ps has written to the part.
    pub(super) fn with_memory<T>(&self, read: impl FnOnce(&Storage) -> T) -> T {
        read(&lock(&self.exported.storage))
    }

    /// Waits until the device has read what it was told to read.
    ///
    /// # Errors
    /// The device failed. It does nothing any more.
    pub(super) fn settle(&self) -> Result<(), Error> {
        self.exported.device.settle()
    }

    /// Returns the bytes that were fetched last, and whatever lies behind them.
    pub(super) fn fetched(&self) -> Cow<'_, [u8]> {
        self.place.piece.as_ref().map(Storage::bytes).unwrap_or_default()
    }

    /// The ps has answered: it uses the part no more.
    pub(super) fn answered(&mut self) {
        self.is_lent = false;
    }

    fn begin(&self) -> usize {
        self.place.number * self.exported.part_bytes
    }
}

impl Drop for Part {
    fn drop(&mut self) {
        if !self.is_lent {
            lock(&self.exported.free).push(std::mem::take(&mut self.place));
        }
    }
}

/// Returns the bytes of a part that chunks take.
pub(super) fn bytes_of(chunks: &[Chunk]) -> usize {
    chunks.iter().map(|chunk| chunk.values.len().next_multiple_of(PART_ALIGNMENT)).sum()
}

/// Returns all parts.
fn all_free() -> Mutex<Vec<Free>> {
    Mutex::new((0..PARTS).map(|number| Free { number, piece: None }).collect())
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
        Arc::new(Exported { device: Device::default(), storage, part_bytes, free: all_free() })
    }

    fn chunks(lengths: &[usize]) -> Vec<Chunk> {
        let chunk = |(id, &bytes): (u32, &usize)| Chunk {
            id: ChunkId(id),
            role: TensorRole::Parameter,
            values: vec![id as u8 + 1; bytes].into(),
        };
        (0..).zip(lengths).map(chunk).collect()
    }

    #[test]
    fn chunks_lie_one_after_the_other_where_the_ps_is_told() {
        let (exported, chunks) = (exported(1024), chunks(&[260, 8, 256]));
        assert_eq!(bytes_of(&chunks), 512 + 256 + 256);
        let mut part = exported.part(bytes_of(&chunks)).unwrap();
        part.write(chunks.iter().map(|chunk| &chunk.values)).unwrap();
        let base = part.begin() as u64;
        let mut lend = part.lend();
        for (chunk, offset) in chunks.iter().zip([0, 512, 768]) {
            let region = lend(chunk.values.len());
            assert_eq!((region.offset, region.bytes), (base + offset, chunk.values.len() as u64));
            let begin = region.offset as usize;
            let storage = lock(&exported.storage);
            assert_eq!(&storage.bytes()[begin..begin + chunk.values.len()], chunk.values.host());
        }
    }

    #[test]
    fn a_part_rests_until_the_ps_has_answered() {
        let exported = exported(256);
        let mut parts: Vec<_> = (0..PARTS).map(|_| exported.part(256).unwrap()).collect();
        assert!(exported.part(256).is_none(), "all are in use");
        let _ = parts[0].lend();
        parts[0].answered();
        let _ = parts[1].lend();
        let _ = parts[2].offer();
        parts.truncate(3);
        drop(parts);
        assert_eq!(lock(&exported.free).len(), PARTS - 2, "a push and a pull have no answer");
        assert!(exported.part(257).is_none(), "it does not fit");
    }

    #[test]
    fn what_was_written_into_an_offered_part_is_fetched() {
        let exported = exported(512);
        let mut part = exported.part(0).unwrap();
        assert!(part.fetched().is_empty());
        let pb::Region { offset, bytes } = part.offer();
        assert_eq!((offset, bytes), (part.begin() as u64, 512));
        let begin = offset as usize + 256;
        lock(&exported.storage).place(begin, &[1, 2, 3, 4]);
        part.fetch(begin, 4).unwrap();
        assert_eq!(part.fetched()[..4], [1, 2, 3, 4]);
        part.answered();
        let number = part.place.number;
        drop(part);
        let again = exported.part(0).unwrap();
        assert!(again.place.number == number && again.place.piece.is_some(), "its memory is used again");
    }

    #[test]
    fn without_a_device_the_reason_is_said() {
        let refused = Exporter::new(usize::MAX, Devices::default()).export(&[0; 16], 8).unwrap_err();
        assert!(refused.contains("CUDA"), "{refused}");
    }
}
