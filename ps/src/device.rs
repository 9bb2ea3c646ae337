//! The device of a ps, and how partitions share its memory.
//!
//! Always true here:
//!
//! - A partition is promised the memory of its versions, slots and first checkpoint before it is
//!   opened, or it is not opened. Sums take what is left; those that find nothing lie on the host.
//! - Memory that workers export to this ps lies on the device too, so it is taken like a sum. A
//!   worker whose memory finds no room exchanges its values another way.
//! - A small part of the memory is never promised: operations copy payloads there.
//! - The first failure of a device ends the ps. No value that the device computed since then is
//!   given out.
//! - The host's memory is not counted. Its limits are those of the options.

use std::any::Any;
use std::fmt;
use std::sync::Arc;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use kernels::device::PART_ALIGNMENT;
use kernels::{Device, Opened, Operand, Part, Storage};
use proto::pb;
use proto::tensor::DType;
use tokio_util::sync::CancellationToken;

use crate::error::{Error, Result};
use crate::opening::Place;

/// The part of a device's free memory that is not promised: one in so many bytes.
const UNPROMISED: u64 = 32;

/// A device with its memory. The processor of the host has no limit here.
#[derive(Debug, Default)]
pub(crate) struct DeviceMemory {
    device: Device,
    /// Bytes that partitions and sums may take.
    bytes_max: u64,
    taken: AtomicU64,
    failure: OnceLock<kernels::Error>,
    /// Cancelled when there is a failure.
    failed: CancellationToken,
}

impl DeviceMemory {
    /// Returns the memory of a device: what is free now, and at most `bytes_max`.
    ///
    /// # Errors
    /// The driver does not say what is free, or less than `bytes_max` is.
    pub(crate) fn new(device: Device, bytes_max: Option<u64>) -> Result<Self> {
        let Some((free, total)) = device.memory()? else { return Ok(Self::default()) };
        let most = free - free / UNPROMISED;
        if let Some(asked) = bytes_max.filter(|&asked| asked > most) {
            return Err(Error::DeviceMemory { device: device.to_string(), asked, most, free, total });
        }
        let bytes_max = bytes_max.unwrap_or(most);
        Ok(Self { device, bytes_max, ..Self::default() })
    }

    /// Returns the device.
    pub(crate) const fn device(&self) -> &Device {
        &self.device
    }

    /// Takes memory, if so much is left.
    pub(crate) fn take(&self, bytes: u64) -> bool {
        let room = |taken: u64| taken.checked_add(bytes).filter(|taken| *taken <= self.bytes_max);
        self.taken.fetch_update(Ordering::Relaxed, Ordering::Relaxed, room).is_ok()
    }

    /// Takes memory for the partition of a place.
    ///
    /// # Errors
    /// [`Error::DeviceFull`], with the figures.
    pub(crate) fn promise(&self, place: Place, bytes: u64) -> Result<()> {
        if self.take(bytes) {
            return Ok(());
        }
        let (taken, bytes_max) = (self.taken.load(Ordering::Relaxed), self.bytes_max);
        Err(Error::DeviceFull { place, device: self.device.to_string(), bytes, taken, bytes_max })
    }

    /// Takes memory that has been allocated already, beyond what was promised.
    pub(crate) fn exceed(&self, bytes: u64) {
        self.taken.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Gives memory back.
    pub(crate) fn give_back(&self, bytes: u64) {
        self.taken.fetch_sub(bytes, Ordering::Relaxed);
    }

    /// Opens memory of this device that a worker has exported, and takes it. It may wait for the
    /// device.
    ///
    /// # Errors
    /// The memory cannot be opened, or not so much is left. The reason is for the worker.
    pub(crate) fn open(self: &Arc<Self>, handle: &[u8]) -> Result<Exported, String> {
        let opened = self.device.open(DType::F32, handle).map_err(|error| error.to_string())?;
        let bytes = opened.taken_bytes();
        if !self.take(bytes) {
            let (taken, bytes_max) = (self.taken.load(Ordering::Relaxed), self.bytes_max);
            let device = &self.device;
            return Err(format!(
                "{bytes} bytes find no room on {device}: {taken} of the {bytes_max} bytes of the ps are taken"
            ));
        }
        Ok(Exported { opened, _share: Share { memory: self.clone(), bytes } })
    }

    /// Waits until the device has computed everything that it was told.
    ///
    /// # Errors
    /// The device failed.
    pub(crate) fn settle(&self) -> Result<(), kernels::Error> {
        self.device.settle().inspect_err(|error| self.fails(error))
    }

    /// Keeps the first failure of the device.
    pub(crate) fn fails(&self, error: &kernels::Error) {
        self.failure.get_or_init(|| error.clone());
        self.failed.cancel();
    }

    /// Returns the first failure of the device, when there is one. Dropping the future is harmless.
    pub(crate) async fn failure(&self) -> kernels::Error {
        self.failed.cancelled().await;
        match self.failure.get() {
            Some(error) => error.clone(),
            None => std::future::pending().await,
        }
    }
}

/// Memory of the device that a worker has exported to this ps. Only what a pull offers is written.
#[derive(Debug)]
pub(crate) struct Exported {
    opened: Arc<Opened>,
    /// Given back when the memory is closed: fields are dropped in order.
    _share: Share,
}

impl Exported {
    /// Returns where a region lies. `guard` is dropped after the values.
    ///
    /// # Errors
    /// The region is not inside the memory, or not aligned. A kernel would end the device.
    pub(crate) fn region(
        self: &Arc<Self>,
        region: pb::Region,
        guard: impl Send + 'static,
    ) -> proto::error::Result<Lent> {
        let wrong = || proto::Error::Field {
            message: "Chunk",
            field: "region",
            expected: format!("bytes of {}, from a multiple of {PART_ALIGNMENT} on", self.opened.size()),
            found: format!("{} from {} on", region.bytes, region.offset),
        };
        let (begin, bytes) = inside(region, self.opened.size()).ok_or_else(wrong)?;
        Ok(Lent { exported: self.clone(), begin, bytes, _guard: Box::new(guard) })
    }
}

/// Returns where a region begins in memory of `size` bytes, and how long it is. `None`: it is
/// empty, not inside, or not aligned.
fn inside(region: pb::Region, size: usize) -> Option<(usize, usize)> {
    let begin = usize::try_from(region.offset).ok().filter(|at| at.is_multiple_of(PART_ALIGNMENT))?;
    let bytes = usize::try_from(region.bytes).ok().filter(|&bytes| bytes > 0)?;
    begin.checked_add(bytes).filter(|end| *end <= size).map(|_| (begin, bytes))
}

/// A region of memory of the device that a worker has exported: the values of a push, or room for
/// the answer to a pull.
pub(crate) struct Lent {
    exported: Arc<Exported>,
    begin: usize,
    bytes: usize,
    /// Dropped after the rest.
    _guard: Box<dyn Any + Send>,
}

impl fmt::Debug for Lent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Lent({} bytes)", self.bytes)
    }
}

impl Lent {
    /// Returns the number of bytes.
    pub(crate) const fn len(&self) -> usize {
        self.bytes
    }

    /// Returns the values, which have this type.
    ///
    /// # Panics
    /// If the bytes end within a value.
    pub(crate) fn values(&self, dtype: DType) -> Part {
        self.exported.opened.part(dtype, self.begin, self.bytes)
    }

    /// Copies values to the region, from its byte `at` on. They are there when the device has been
    /// waited for. Returns where they lie in the memory.
    ///
    /// # Panics
    /// If they are not inside the region, or `at` is not aligned.
    pub(crate) fn write(&self, at: usize, values: &Storage) -> pb::Region {
        let (begin, bytes) = (self.begin + at, values.size());
        assert!(at + bytes <= self.bytes, "{bytes} bytes from {at} on, of {}", self.bytes);
        self.exported.opened.part(values.dtype(), begin, bytes).write(Operand::Stored(values));
        pb::Region { offset: begin as u64, bytes: bytes as u64 }
    }
}

/// Memory of a device that is taken until this is dropped.
#[derive(Debug)]
struct Share {
    memory: Arc<DeviceMemory>,
    bytes: u64,
}

impl Drop for Share {
    fn drop(&mut self) {
        self.memory.give_back(self.bytes);
    }
}

/// Memory of a device that one pool has taken. It is given back when the pool and all its buffers
/// are gone.
#[derive(Debug)]
pub(crate) struct Taken {
    memory: Arc<DeviceMemory>,
    /// Bytes for versions and slots that were promised.
    promised: AtomicU64,
    /// Bytes for versions and slots that were allocated.
    kept: AtomicU64,
    /// Bytes for sums that were allocated.
    sums: AtomicU64,
}

impl Taken {
    /// Takes `bytes` for the versions and slots of a partition.
    ///
    /// # Errors
    /// [`Error::DeviceFull`].
    pub(crate) fn promised(memory: Arc<DeviceMemory>, place: Place, bytes: u64) -> Result<Self> {
        memory.promise(place, bytes)?;
        let (kept, sums) = (AtomicU64::new(0), AtomicU64::new(0));
        Ok(Self { memory, promised: AtomicU64::new(bytes), kept, sums })
    }

    /// Returns the device.
    pub(crate) fn device(&self) -> &Device {
        self.memory.device()
    }

    /// Counts memory that was allocated for a version or a slot.
    pub(crate) fn keep(&self, bytes: u64) {
        let kept = self.kept.fetch_add(bytes, Ordering::Relaxed) + bytes;
        let promised = self.promised.fetch_max(kept, Ordering::Relaxed);
        self.memory.exceed(kept.saturating_sub(promised));
    }

    /// Takes memory for a sum, if so much is left.
    pub(crate) fn take_for_sum(&self, bytes: u64) -> bool {
        let taken = self.memory.take(bytes);
        if taken {
            self.sums.fetch_add(bytes, Ordering::Relaxed);
        }
        taken
    }

    /// Gives the memory of a sum back.
    pub(crate) fn give_back_sum(&self, bytes: u64) {
        self.sums.fetch_sub(bytes, Ordering::Relaxed);
        self.memory.give_back(bytes);
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        let Self { memory, promised, sums, .. } = self;
        memory.give_back(*promised.get_mut() + *sums.get_mut());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn regions_that_are_not_inside_or_not_aligned_are_none() {
        let found = |offset, bytes| inside(pb::Region { offset, bytes }, 1024);
        assert_eq!(found(0, 1024), Some((0, 1024)));
        assert_eq!(found(768, 5), Some((768, 5)));
        for (offset, bytes) in [(0, 0), (0, 1025), (1024, 1), (1280, 1), (100, 4), (u64::MAX - 255, 512)] {
            assert_eq!(found(offset, bytes), None, "{bytes} bytes from {offset} on");
        }
    }

    #[test]
    fn a_share_is_given_back_when_it_is_dropped() {
        let memory = Arc::new(DeviceMemory { bytes_max: 10, ..DeviceMemory::default() });
        assert!(memory.take(8));
        let share = Share { memory: memory.clone(), bytes: 8 };
        assert!(!memory.take(3));
        drop(share);
        assert!(memory.take(3));
    }
}
