//! The device of a ps, and how partitions share its memory.
//!
//! Always true here:
//!
//! - A partition is promised the memory of its versions, slots and first checkpoint before it is
//!   opened, or it is not opened. Sums take what is left; those that find nothing lie on the host.
//! - A small part of the memory is never promised: operations copy payloads there.
//! - The first failure of a device ends the ps. No value that the device computed since then is
//!   given out.
//! - The host's memory is not counted. Its limits are those of the options.

use std::sync::Arc;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use kernels::Device;
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
