//! The memory of a partition: buffers for weights, slots and sums, which are used again.
//!
//! Always true here:
//!
//! - A buffer goes back to its [`Pool`] when its last reference goes, whoever held it. After the
//!   first few steps an update allocates no buffer.
//! - The buffers of a partition on a device lie there. What leaves the ps is a copy on the host,
//!   which the reader holds in place of the buffer. A sum for which the device has no room lies on
//!   the host.

use std::collections::HashMap;
use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use bytes::Bytes;
use kernels::{Device, Error, Storage};
use net::memory::{Memory, REGION_BYTES_MIN};
use proto::tensor::DType;

use crate::device::Taken;

/// How long a buffer of a device may take to come back when the device has no memory for another.
const PATIENCE: Duration = Duration::from_secs(10);

/// Recycled buffers of one partition; clones are the same pool.
#[derive(Clone)]
pub struct Pool(Arc<Free>);

struct Free {
    lists: Mutex<HashMap<Kind, Vec<Storage>>>,
    /// A buffer in a device's promised memory is free again.
    came_back: Condvar,
    free_bytes: AtomicUsize,
    free_bytes_max: usize,
    allocated: AtomicUsize,
    /// Where workers of this host read the weights.
    memory: Option<Memory>,
    /// The device on which weights, slots and sums lie, and what they take there. It is given back
    /// after the lists.
    device: Option<Taken>,
}

/// What a buffer can be used for again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Kind {
    dtype: DType,
    len: usize,
    lies: Lies,
}

/// Where a buffer lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Lies {
    /// In memory of this process.
    Own,
    /// In memory that workers read, and to which the device copies.
    Shared,
    /// In memory of this process that the device copies to.
    Staging,
    /// On the device, in memory that was promised to weights and slots.
    Promised,
    /// On the device, in memory that nobody else has taken.
    Spare,
}

/// What a buffer is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Use {
    /// Weights, which workers read.
    Weights,
    /// State of the optimizer, which nobody else reads.
    Slot,
    /// Sums of gradients, which nobody else reads.
    Sum,
}

impl Pool {
    /// Creates an empty pool that keeps at most `free_bytes_max` for later; more is given back to
    /// the system. Weights lie in `memory`, as far as it has room.
    pub fn new(free_bytes_max: usize, memory: Option<Memory>) -> Self {
        Self::with(free_bytes_max, memory, None)
    }

    /// Creates an empty pool as [`new`](Self::new) does, whose buffers lie on the device of which
    /// `device` has taken memory.
    pub(crate) fn with(free_bytes_max: usize, memory: Option<Memory>, device: Option<Taken>) -> Self {
        Self(Arc::new(Free {
            lists: Mutex::default(),
            came_back: Condvar::new(),
            free_bytes: AtomicUsize::new(0),
            free_bytes_max,
            allocated: AtomicUsize::new(0),
            memory,
            device,
        }))
    }

    /// Returns a buffer of `len` elements with any content: zeros, or what it held before.
    pub fn take(&self, use_of: Use, dtype: DType, len: usize) -> Buffer {
        let lies = match (&self.0.device, use_of) {
            (Some(_), Use::Weights | Use::Slot) => Lies::Promised,
            (Some(_), Use::Sum) => Lies::Spare,
            (None, Use::Weights) => self.0.shared_or(Lies::Own, dtype, len),
            (None, Use::Slot | Use::Sum) => Lies::Own,
        };
        self.0.clone().take(Kind { dtype, len, lies })
    }

    /// Takes memory for a buffer that will be wanted: the system makes its pages now, which costs
    /// more than writing to them later.
    pub fn reserve(&self, use_of: Use, dtype: DType, len: usize) {
        let lies = match use_of {
            Use::Weights => self.0.shared_or(Lies::Own, dtype, len),
            Use::Slot | Use::Sum => Lies::Own,
        };
        let kind = Kind { dtype, len, lies };
        let (kind, mut storage) = self.0.allocate(kind);
        storage.populate();
        drop(Buffer::new(kind, storage, self.0.clone()));
    }

    /// Allocates `count` buffers for weights or slots on the device, which training will take.
    ///
    /// # Errors
    /// The device has less memory than it had: another process took some.
    pub(crate) fn reserve_on_device(&self, dtype: DType, len: usize, count: usize) -> Result<(), Error> {
        let Some(taken) = &self.0.device else { return Ok(()) };
        let kind = Kind { dtype, len, lies: Lies::Promised };
        for _ in 0..count {
            let storage = taken.device().zeros(dtype, len)?;
            self.0.allocated.fetch_add(1, Ordering::Relaxed);
            taken.keep(storage.size() as u64);
            self.0.lists().entry(kind).or_default().push(storage);
        }
        Ok(())
    }

    /// Returns whether its buffers lie on a device.
    pub(crate) fn is_on_device(&self) -> bool {
        self.0.device.is_some()
    }

    /// Buffers that were allocated because none was free.
    pub fn allocated(&self) -> usize {
        self.0.allocated.load(Ordering::Relaxed)
    }
}

impl Free {
    fn take(self: Arc<Self>, kind: Kind) -> Buffer {
        let recycled = self.lists().get_mut(&kind).and_then(Vec::pop);
        let recycled = recycled.or_else(|| self.wait_for(kind));
        let (kind, storage) = match recycled {
            Some(storage) => {
                if kind.lies != Lies::Promised {
                    self.free_bytes.fetch_sub(storage.size(), Ordering::Relaxed);
                }
                (kind, storage)
            }
            None => self.allocate(kind),
        };
        Buffer::new(kind, storage, self)
    }

    /// Takes a buffer that a device has no memory for from those that are about to come back: a
    /// partition that has just ended may still hold its own.
    fn wait_for(&self, kind: Kind) -> Option<Storage> {
        let (Lies::Promised, Some(taken)) = (kind.lies, &self.device) else { return None };
        match taken.device().zeros(kind.dtype, kind.len) {
            Ok(storage) => {
                self.allocated.fetch_add(1, Ordering::Relaxed);
                taken.keep(storage.size() as u64);
                return Some(storage);
            }
            Err(Error::OutOfMemory { .. }) => {}
            Err(_) => return None,
        }
        let is_missing = |lists: &mut HashMap<Kind, Vec<Storage>>| lists.get(&kind).is_none_or(Vec::is_empty);
        let waited = self.came_back.wait_timeout_while(self.lists(), PATIENCE, is_missing);
        let (mut lists, _) = waited.unwrap_or_else(PoisonError::into_inner);
        lists.get_mut(&kind).and_then(Vec::pop)
    }

    /// Returns where a buffer lies that workers may read: in memory for them, if it is large and
    /// there is such memory.
    fn shared_or(&self, otherwise: Lies, dtype: DType, len: usize) -> Lies {
        let large = len * dtype.size() >= REGION_BYTES_MIN;
        if large && self.memory.is_some() { Lies::Shared } else { otherwise }
    }

    /// Allocates a buffer. A sum that finds no room on the device lies on the host.
    fn allocate(&self, kind: Kind) -> (Kind, Storage) {
        self.allocated.fetch_add(1, Ordering::Relaxed);
        let Kind { dtype, len, lies } = kind;
        let bytes = len * dtype.size();
        let on_host = || {
            self.device
                .as_ref()
                .map_or_else(|| Storage::zeros(dtype, len), |taken| taken.device().staging(dtype, len))
        };
        match (lies, &self.device) {
            // Nothing has come back, so the device fails, and says what it lacks.
            (Lies::Promised, Some(taken)) => (kind, taken.device().zeros_or_failed(dtype, len)),
            (Lies::Spare, Some(taken)) => {
                if taken.take_for_sum(bytes as u64) {
                    if let Ok(storage) = taken.device().zeros(dtype, len) {
                        return (kind, storage);
                    }
                    taken.give_back_sum(bytes as u64);
                }
                (Kind { lies: Lies::Own, ..kind }, Storage::zeros(dtype, len))
            }
            (Lies::Shared, _) => {
                let Some(region) = self.memory.as_ref().and_then(|memory| memory.take(bytes)) else {
                    return (kind, on_host());
                };
                let device =
                    self.device.as_ref().map_or_else(Device::default, |taken| taken.device().clone());
                (kind, device.locking(dtype, Box::new(region)))
            }
            (Lies::Staging, _) => (kind, on_host()),
            (Lies::Own | Lies::Promised | Lies::Spare, _) => (kind, Storage::zeros(dtype, len)),
        }
    }

    fn lists(&self) -> MutexGuard<'_, HashMap<Kind, Vec<Storage>>> {
        self.lists.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let free_bytes = self.0.free_bytes.load(Ordering::Relaxed);
        f.debug_struct("Pool").field("free_bytes", &free_bytes).finish_non_exhaustive()
    }
}

/// Storage of one chunk that goes back to its [`Pool`].
pub struct Buffer {
    kind: Kind,
    /// The memory; `None` only while it is dropped.
    storage: Option<Storage>,
    pool: Arc<Free>,
    /// The copy on the host of weights that lie on a device, once somebody pulled them.
    copy: Mutex<Option<Arc<Self>>>,
}

impl Buffer {
    const fn new(kind: Kind, storage: Storage, pool: Arc<Free>) -> Self {
        Self { kind, storage: Some(storage), pool, copy: Mutex::new(None) }
    }

    /// Returns the values as bytes to send or to save; no copy in memory of the host. They keep the
    /// buffer from being recycled as long as they live. Values on a device are copied once, and the
    /// buffer keeps the copy for the next caller; the bytes hold the copy alone.
    ///
    /// # Errors
    /// The values lie on a device that failed.
    pub fn view(self: &Arc<Self>) -> Result<Bytes, Error> {
        if self.is_on_host() {
            return Ok(Storage::share(self.clone()));
        }
        Self::view_all(std::slice::from_ref(self)).map(|mut views| views.remove(0))
    }

    /// Returns the values of the chunks of a version, each as [`view`](Self::view) does. The device
    /// is waited for once.
    ///
    /// # Errors
    /// The values lie on a device that failed.
    pub fn view_all(version: &[Arc<Self>]) -> Result<Vec<Bytes>, Error> {
        // Other callers take the locks in this order too.
        let mut kept: Vec<_> = version.iter().map(|buffer| buffer.copy()).collect();
        let lacks = |(buffer, kept): (&Arc<Self>, _)| Self::lacks_copy(buffer, kept).then(|| buffer.clone());
        let lacking: Vec<_> = version.iter().zip(kept.iter().map(|kept| &**kept)).filter_map(lacks).collect();
        let mut copies = Self::copied(&lacking)?.into_iter();
        let view = |(buffer, kept): (&Arc<Self>, &mut MutexGuard<'_, Option<Arc<Self>>>)| {
            if Self::lacks_copy(buffer, kept) {
                **kept = copies.next();
            }
            Storage::share(kept.as_ref().unwrap_or(buffer).clone())
        };
        Ok(version.iter().zip(&mut kept).map(view).collect())
    }

    /// Returns a buffer with the values on the host: this one, or a copy if it lies on a device.
    ///
    /// # Errors
    /// The values lie on a device that failed.
    pub(crate) fn on_host(self: &Arc<Self>) -> Result<Arc<Self>, Error> {
        Self::on_host_all(std::slice::from_ref(self)).map(|mut buffers| buffers.remove(0))
    }

    /// Returns buffers with the values on the host, each as [`on_host`](Self::on_host) does. The
    /// device is waited for once.
    ///
    /// # Errors
    /// The values lie on a device that failed.
    pub(crate) fn on_host_all(buffers: &[Arc<Self>]) -> Result<Vec<Arc<Self>>, Error> {
        let kept: Vec<_> = buffers.iter().map(|buffer| buffer.copy().clone()).collect();
        let lacks = |(buffer, kept): (&Arc<Self>, _)| Self::lacks_copy(buffer, kept).then(|| buffer.clone());
        let lacking: Vec<_> = buffers.iter().zip(&kept).filter_map(lacks).collect();
        let mut copies = Self::copied(&lacking)?.into_iter();
        let on_host = |(buffer, kept): (&Arc<Self>, Option<Arc<Self>>)| {
            let copy = if Self::lacks_copy(buffer, &kept) { copies.next() } else { kept };
            copy.unwrap_or_else(|| buffer.clone())
        };
        Ok(buffers.iter().zip(kept).map(on_host).collect())
    }

    /// Returns whether a buffer lies on a device and has no copy on the host.
    fn lacks_copy(&self, kept: &Option<Arc<Self>>) -> bool {
        kept.is_none() && !self.is_on_host()
    }

    /// Returns what readers of the values hold: the buffer, or its copy on the host.
    pub(crate) fn held_by_readers(self: &Arc<Self>) -> Weak<Self> {
        Arc::downgrade(self.copy().as_ref().unwrap_or(self))
    }

    /// Copies buffers from their device to the host. The device is waited for once.
    fn copied(buffers: &[Arc<Self>]) -> Result<Vec<Arc<Self>>, Error> {
        let room = |buffer: &Arc<Self>| {
            let Kind { dtype, len, .. } = buffer.kind;
            let lies = buffer.pool.shared_or(Lies::Staging, dtype, len);
            buffer.pool.clone().take(Kind { dtype, len, lies })
        };
        let mut copies: Vec<_> = buffers.iter().map(room).collect();
        let pairs = copies.iter_mut().zip(buffers).map(|(copy, of)| (&mut **copy, &***of));
        Storage::receive_all(pairs.collect())?;
        Ok(copies.into_iter().map(Arc::new).collect())
    }

    fn copy(&self) -> MutexGuard<'_, Option<Arc<Self>>> {
        self.copy.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Deref for Buffer {
    type Target = Storage;

    fn deref(&self) -> &Storage {
        self.storage.as_ref().expect("not dropped")
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut Storage {
        // What is written makes a copy an old one.
        *self.copy.get_mut().unwrap_or_else(PoisonError::into_inner) = None;
        self.storage.as_mut().expect("not dropped")
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let Some(storage) = self.storage.take() else { return };
        let bytes = storage.size();
        // What was promised stays with the partition.
        if self.kind.lies != Lies::Promised
            && self.pool.free_bytes.fetch_add(bytes, Ordering::Relaxed) + bytes > self.pool.free_bytes_max
        {
            self.pool.free_bytes.fetch_sub(bytes, Ordering::Relaxed);
            drop(storage);
            if let (Lies::Spare, Some(taken)) = (self.kind.lies, &self.pool.device) {
                taken.give_back_sum(bytes as u64);
            }
            return;
        }
        self.pool.lists().entry(self.kind).or_default().push(storage);
        if self.kind.lies == Lies::Promised {
            self.pool.came_back.notify_one();
        }
    }
}

impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Buffer({:?} x {})", self.kind.dtype, self.kind.len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_buffer_is_recycled_when_its_last_view_goes() {
        let pool = Pool::new(1 << 20, None);
        let buffer = Arc::new(pool.take(Use::Sum, DType::F32, 8));
        let address = buffer.bytes().as_ptr();
        let view = buffer.view().unwrap();
        drop(buffer);
        assert_ne!(pool.take(Use::Sum, DType::F32, 8).bytes().as_ptr(), address, "it is still being read");
        drop(view);
        let again = [pool.take(Use::Sum, DType::F32, 8), pool.take(Use::Sum, DType::F32, 8)];
        assert!(again.iter().any(|buffer| buffer.bytes().as_ptr() == address));
        assert_eq!(pool.allocated(), 2);
        assert_ne!(pool.take(Use::Sum, DType::F32, 9).len(), 8, "lengths do not mix");
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn weights_lie_in_memory_for_others_as_long_as_it_has_room() {
        let memory = Memory::with_bytes(2 * REGION_BYTES_MIN).unwrap();
        let pool = Pool::new(1 << 20, Some(memory.clone()));
        let take = |use_of, bytes: usize| pool.take(use_of, DType::F32, bytes / 4);
        let shared = |buffer: &Buffer| memory.find(&buffer.bytes()).is_some();
        let weights = [(); 3].map(|()| take(Use::Weights, REGION_BYTES_MIN));
        assert_eq!(weights.each_ref().map(shared), [true, true, false], "two have room");
        let others = [take(Use::Sum, REGION_BYTES_MIN), take(Use::Weights, REGION_BYTES_MIN - 4)];
        assert_eq!(others.each_ref().map(shared), [false; 2]);
        drop(weights);
        let allocated = pool.allocated();
        drop([(); 3].map(|()| take(Use::Weights, REGION_BYTES_MIN)));
        assert_eq!(pool.allocated(), allocated, "all were kept");
    }

    #[test]
    fn a_pool_keeps_no_more_than_it_may() {
        let pool = Pool::new(100, None);
        drop([pool.take(Use::Sum, DType::F32, 20), pool.take(Use::Sum, DType::F32, 20)]);
        drop([pool.take(Use::Sum, DType::F32, 20), pool.take(Use::Sum, DType::F32, 20)]);
        assert_eq!(pool.allocated(), 3, "one of 80 bytes was kept, the other was not");
    }
}
