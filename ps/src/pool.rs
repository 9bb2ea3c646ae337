//! The memory of a partition: buffers for weights, slots and sums, which are used again.
//!
//! Always true here: a buffer goes back to its [`Pool`] when its last reference goes, whoever held
//! it. After the first few steps an update allocates no buffer.

use std::collections::HashMap;
use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use kernels::Storage;
use net::memory::{Memory, REGION_BYTES_MIN};
use proto::tensor::DType;

/// Recycled buffers of one partition; clones are the same pool.
#[derive(Clone)]
pub struct Pool(Arc<Free>);

struct Free {
    lists: Mutex<HashMap<Kind, Vec<Storage>>>,
    free_bytes: AtomicUsize,
    free_bytes_max: usize,
    allocated: AtomicUsize,
    /// Where workers of this host read the weights.
    memory: Option<Memory>,
}

/// What a buffer can be used for again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Kind {
    dtype: DType,
    len: usize,
    /// Whether it lies in memory that workers read.
    shared: bool,
}

/// What a buffer is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Use {
    /// Weights, which workers read.
    Weights,
    /// Slots and sums, which nobody else does.
    Own,
}

impl Pool {
    /// Creates an empty pool that keeps at most `free_bytes_max` for later; more is given back to
    /// the system. Weights lie in `memory`, as far as it has room.
    pub fn new(free_bytes_max: usize, memory: Option<Memory>) -> Self {
        Self(Arc::new(Free {
            lists: Mutex::default(),
            free_bytes: AtomicUsize::new(0),
            free_bytes_max,
            allocated: AtomicUsize::new(0),
            memory,
        }))
    }

    /// Returns a buffer of `len` elements with any content: zeros, or what it held before.
    pub fn take(&self, use_of: Use, dtype: DType, len: usize) -> Buffer {
        let kind = self.kind(use_of, dtype, len);
        let recycled = self.0.lists().get_mut(&kind).and_then(Vec::pop);
        let storage = match recycled {
            Some(storage) => {
                self.0.free_bytes.fetch_sub(storage.size(), Ordering::Relaxed);
                storage
            }
            None => self.allocate(kind),
        };
        Buffer { kind, storage: Some(storage), pool: self.0.clone() }
    }

    /// Takes memory for a buffer that will be wanted: the system makes its pages now, which costs
    /// more than writing to them later.
    pub fn reserve(&self, use_of: Use, dtype: DType, len: usize) {
        let kind = self.kind(use_of, dtype, len);
        let mut storage = self.allocate(kind);
        storage.populate();
        drop(Buffer { kind, storage: Some(storage), pool: self.0.clone() });
    }

    fn kind(&self, use_of: Use, dtype: DType, len: usize) -> Kind {
        let large = len * dtype.size() >= REGION_BYTES_MIN;
        Kind { dtype, len, shared: large && use_of == Use::Weights && self.0.memory.is_some() }
    }

    fn allocate(&self, kind: Kind) -> Storage {
        self.0.allocated.fetch_add(1, Ordering::Relaxed);
        let Kind { dtype, len, shared } = kind;
        let memory = self.0.memory.as_ref().filter(|_| shared);
        let region = memory.and_then(|memory| memory.take(len * dtype.size()));
        region.map_or_else(|| Storage::zeros(dtype, len), |region| Storage::external(dtype, Box::new(region)))
    }

    /// Buffers that were allocated because none was free.
    pub fn allocated(&self) -> usize {
        self.0.allocated.load(Ordering::Relaxed)
    }
}

impl Free {
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
}

impl Buffer {
    /// Returns the values as bytes to send or to save; no copy in memory of the host. They keep the
    /// buffer from being recycled as long as they live.
    pub fn view(self: &Arc<Self>) -> Bytes {
        Storage::share(self.clone())
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
        self.storage.as_mut().expect("not dropped")
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let Some(storage) = self.storage.take() else { return };
        let bytes = storage.size();
        if self.pool.free_bytes.fetch_add(bytes, Ordering::Relaxed) + bytes > self.pool.free_bytes_max {
            self.pool.free_bytes.fetch_sub(bytes, Ordering::Relaxed);
            return;
        }
        self.pool.lists().entry(self.kind).or_default().push(storage);
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
        let buffer = Arc::new(pool.take(Use::Own, DType::F32, 8));
        let address = buffer.bytes().as_ptr();
        let view = buffer.view();
        drop(buffer);
        assert_ne!(pool.take(Use::Own, DType::F32, 8).bytes().as_ptr(), address, "it is still being read");
        drop(view);
        let again = [pool.take(Use::Own, DType::F32, 8), pool.take(Use::Own, DType::F32, 8)];
        assert!(again.iter().any(|buffer| buffer.bytes().as_ptr() == address));
        assert_eq!(pool.allocated(), 2);
        assert_ne!(pool.take(Use::Own, DType::F32, 9).len(), 8, "lengths do not mix");
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
        let others = [take(Use::Own, REGION_BYTES_MIN), take(Use::Weights, REGION_BYTES_MIN - 4)];
        assert_eq!(others.each_ref().map(shared), [false; 2]);
        drop(weights);
        let allocated = pool.allocated();
        drop([(); 3].map(|()| take(Use::Weights, REGION_BYTES_MIN)));
        assert_eq!(pool.allocated(), allocated, "all were kept");
    }

    #[test]
    fn a_pool_keeps_no_more_than_it_may() {
        let pool = Pool::new(100, None);
        drop([pool.take(Use::Own, DType::F32, 20), pool.take(Use::Own, DType::F32, 20)]);
        drop([pool.take(Use::Own, DType::F32, 20), pool.take(Use::Own, DType::F32, 20)]);
        assert_eq!(pool.allocated(), 3, "one of 80 bytes was kept, the other was not");
    }
}
