//! The memory of a partition: buffers for weights, slots and sums, which are used again.
//!
//! Always true here: a buffer goes back to its [`Pool`] when its last reference goes, whoever held it. After the first few steps an update
//! allocates no buffer.

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use net::memory::{Memory, REGION_BYTES_MIN, Region};
use proto::tensor::{DType, Values};

/// Recycled buffers of one partition; clones are the same pool.
#[derive(Clone)]
pub struct Pool(Arc<Free>);

struct Free {
    lists: Mutex<HashMap<Kind, Vec<Block>>>,
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
    /// In memory that workers read.
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

/// Memory for one chunk.
#[derive(Debug)]
enum Block {
    Heap(Values),
    Shared(Region),
}

impl Block {
    fn new(kind: Kind, memory: Option<&Memory>) -> Self {
        let Kind { dtype, len, shared } = kind;
        let region = memory.filter(|_| shared).and_then(|memory| memory.take(len * dtype.size()));
        region.map_or_else(|| Self::Heap(Values::zeros(dtype, len)), Self::Shared)
    }

    fn bytes(&self) -> &[u8] {
        match self {
            Self::Heap(values) => values.bytes(),
            Self::Shared(region) => region,
        }
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        match self {
            Self::Heap(values) => values.bytes_mut(),
            Self::Shared(region) => region,
        }
    }
}

impl Pool {
    /// An empty pool that keeps at most `free_bytes_max` for later; more is given back to the system. Weights lie in `memory`, as far
    /// as it has room.
    pub fn new(free_bytes_max: usize, memory: Option<Memory>) -> Self {
        Self(Arc::new(Free {
            lists: Mutex::default(),
            free_bytes: AtomicUsize::new(0),
            free_bytes_max,
            allocated: AtomicUsize::new(0),
            memory,
        }))
    }

    /// A buffer of `len` elements with any content: zeros, or what it held before.
    pub fn take(&self, use_of: Use, dtype: DType, len: usize) -> Buffer {
        let kind = self.kind(use_of, dtype, len);
        let recycled = self.0.lists().get_mut(&kind).and_then(Vec::pop);
        let block = match recycled {
            Some(block) => {
                self.0.free_bytes.fetch_sub(block.bytes().len(), Ordering::Relaxed);
                block
            }
            None => self.allocate(kind),
        };
        Buffer { kind, block: Some(block), pool: self.0.clone() }
    }

    /// Takes memory for a buffer that will be wanted: the system makes its pages now, which costs more than writing to them later.
    pub fn reserve(&self, use_of: Use, dtype: DType, len: usize) {
        let kind = self.kind(use_of, dtype, len);
        let mut block = self.allocate(kind);
        block.bytes_mut().fill(1);
        drop(Buffer { kind, block: Some(block), pool: self.0.clone() });
    }

    fn kind(&self, use_of: Use, dtype: DType, len: usize) -> Kind {
        let large = len * dtype.size() >= REGION_BYTES_MIN;
        Kind { dtype, len, shared: large && use_of == Use::Weights && self.0.memory.is_some() }
    }

    fn allocate(&self, kind: Kind) -> Block {
        self.0.allocated.fetch_add(1, Ordering::Relaxed);
        Block::new(kind, self.0.memory.as_ref())
    }

    /// Buffers that were allocated because none was free.
    pub fn allocated(&self) -> usize {
        self.0.allocated.load(Ordering::Relaxed)
    }
}

impl Free {
    fn lists(&self) -> MutexGuard<'_, HashMap<Kind, Vec<Block>>> {
        self.lists.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let free_bytes = self.0.free_bytes.load(Ordering::Relaxed);
        f.debug_struct("Pool").field("free_bytes", &free_bytes).finish_non_exhaustive()
    }
}

/// Values of one chunk in memory of a [`Pool`].
pub struct Buffer {
    kind: Kind,
    /// There until it is dropped.
    block: Option<Block>,
    pool: Arc<Free>,
}

impl Buffer {
    /// The values as bytes to send; no copy. They keep the buffer from being recycled as long as they live.
    pub fn view(self: &Arc<Self>) -> Bytes {
        struct View(Arc<Buffer>);
        impl AsRef<[u8]> for View {
            fn as_ref(&self) -> &[u8] {
                self.0.bytes()
            }
        }
        Bytes::from_owner(View(self.clone()))
    }

    /// Element type.
    pub const fn dtype(&self) -> DType {
        self.kind.dtype
    }

    /// Number of elements.
    pub const fn len(&self) -> usize {
        self.kind.len
    }

    /// Whether there are none.
    pub const fn is_empty(&self) -> bool {
        self.kind.len == 0
    }

    /// The elements as the little-endian bytes that they are in memory.
    pub fn bytes(&self) -> &[u8] {
        self.block.as_ref().expect("not dropped").bytes()
    }

    /// The bytes of the elements, for writing.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        self.block.as_mut().expect("not dropped").bytes_mut()
    }

    /// The floats.
    ///
    /// # Panics
    /// If they are integers.
    pub fn floats(&self) -> &[f32] {
        assert_eq!(self.dtype(), DType::F32, "taken as integers");
        // Blocks lie on multiples of their element's size.
        bytemuck::cast_slice(self.bytes())
    }

    /// The floats, for writing.
    ///
    /// # Panics
    /// If they are integers.
    pub fn floats_mut(&mut self) -> &mut [f32] {
        assert_eq!(self.dtype(), DType::F32, "taken as integers");
        bytemuck::cast_slice_mut(self.bytes_mut())
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let Some(block) = self.block.take() else { return };
        let bytes = block.bytes().len();
        if self.pool.free_bytes.fetch_add(bytes, Ordering::Relaxed) + bytes > self.pool.free_bytes_max {
            self.pool.free_bytes.fetch_sub(bytes, Ordering::Relaxed);
            return;
        }
        self.pool.lists().entry(self.kind).or_default().push(block);
    }
}

impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Buffer({:?} x {})", self.dtype(), self.len())
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
        let shared = |buffer: &Buffer| memory.find(buffer.bytes()).is_some();
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
