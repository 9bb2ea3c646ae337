//! The memory of a partition: versioned weights, sums of gradients, and what an update does to one chunk.
//!
//! Always true here:
//!
//! - A chunk's weights are immutable once they are in an `Arc`. An update reads the buffer of version v and writes v + 1
//!   into another one, so a pull that still streams v is not disturbed.
//! - A buffer goes back to its [`Pool`] when its last reference goes, whoever held it. After the first few steps an update
//!   allocates no buffer.
//! - Gradients stay in the bytes they were received in until they meet another one: a step that comes as one node is
//!   never copied. Received bytes are rarely aligned, so they are read with unaligned loads.

use std::collections::HashMap;
use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use proto::tensor::{DType, Role, Values, add_assign, max_assign};

use crate::optim::norm::Squares;
use crate::optim::{self, Optimizer, Slot, Update, state};

/// Recycled buffers of one partition; clones are the same pool.
#[derive(Clone)]
pub struct Pool(Arc<Free>);

struct Free {
    lists: Mutex<HashMap<(DType, usize), Vec<Values>>>,
    free_bytes: AtomicUsize,
    free_bytes_max: usize,
    allocated: AtomicUsize,
}

impl Pool {
    /// An empty pool that keeps at most `free_bytes_max` for later; more is given back to the system.
    pub fn new(free_bytes_max: usize) -> Self {
        Self(Arc::new(Free {
            lists: Mutex::default(),
            free_bytes: AtomicUsize::new(0),
            free_bytes_max,
            allocated: AtomicUsize::new(0),
        }))
    }

    /// A buffer of `len` elements with any content: zeros, or what it held before.
    pub fn take(&self, dtype: DType, len: usize) -> Buffer {
        let recycled = self.0.lists().get_mut(&(dtype, len)).and_then(Vec::pop);
        let values = match recycled {
            Some(values) => {
                self.0.free_bytes.fetch_sub(values.bytes().len(), Ordering::Relaxed);
                values
            }
            None => {
                self.0.allocated.fetch_add(1, Ordering::Relaxed);
                Values::zeros(dtype, len)
            }
        };
        Buffer { values, pool: self.0.clone() }
    }

    /// Takes memory for a buffer that will be wanted: the system makes its pages now, which costs more than writing to them later.
    pub fn reserve(&self, dtype: DType, len: usize) {
        let mut values = Values::zeros(dtype, len);
        match &mut values {
            Values::F32(values) => values.fill(f32::MIN_POSITIVE),
            Values::I64(values) => values.fill(1),
        }
        self.0.allocated.fetch_add(1, Ordering::Relaxed);
        drop(Buffer { values, pool: self.0.clone() });
    }

    /// Buffers that were allocated because none was free.
    pub fn allocated(&self) -> usize {
        self.0.allocated.load(Ordering::Relaxed)
    }
}

impl Free {
    fn lists(&self) -> MutexGuard<'_, HashMap<(DType, usize), Vec<Values>>> {
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
    values: Values,
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
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let values = std::mem::replace(&mut self.values, Values::F32(Vec::new()));
        let bytes = values.bytes().len();
        if self.pool.free_bytes.fetch_add(bytes, Ordering::Relaxed) + bytes > self.pool.free_bytes_max {
            self.pool.free_bytes.fetch_sub(bytes, Ordering::Relaxed);
            return;
        }
        self.pool.lists().entry((values.dtype(), values.len())).or_default().push(values);
    }
}

impl Deref for Buffer {
    type Target = Values;

    fn deref(&self) -> &Values {
        &self.values
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut Values {
        &mut self.values
    }
}

impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Buffer({:?} x {})", self.dtype(), self.len())
    }
}

/// What a node of the reduction tree says about one chunk; clones share the values.
#[derive(Clone, Debug)]
pub enum Sum {
    /// As it was received.
    Received(Bytes),
    /// Of two nodes that met here.
    Merged(Arc<Buffer>),
}

impl Sum {
    /// `left + right` at a node of the tree, for counters the maximum, in memory of its own: one pass over three buffers.
    ///
    /// # Panics
    /// If the lengths differ.
    pub fn of(left: &[u8], right: &[u8], dtype: DType, pool: &Pool) -> Self {
        let mut sum = pool.take(dtype, left.len() / dtype.size());
        match &mut *sum {
            Values::F32(sum) => optim::sum::add(left, right, sum),
            counters @ Values::I64(_) => {
                counters.write_bytes(0, left);
                take_up(counters, right);
            }
        }
        Self::Merged(Arc::new(sum))
    }

    /// `self = left + right` at a node of the tree; for counters the maximum. The additions of one chunk may be done in
    /// either's memory, as `left + right` and `right + left` are the same bits; memory that somebody else reads is left alone.
    pub fn merge(&mut self, mut right: Self, dtype: DType, pool: &Pool) {
        if let Some(left) = self.alone() {
            return take_up(left, right.bytes());
        }
        if let Some(sum) = right.alone() {
            take_up(sum, self.bytes());
            *self = right;
            return;
        }
        *self = Self::of(self.bytes(), right.bytes(), dtype, pool);
    }

    /// The values for writing, if nobody else has them.
    fn alone(&mut self) -> Option<&mut Values> {
        match self {
            Self::Received(_) => None,
            Self::Merged(buffer) => Arc::get_mut(buffer).map(DerefMut::deref_mut),
        }
    }

    /// The values as they lie, at any alignment.
    pub fn bytes(&self) -> &[u8] {
        match self {
            Self::Received(bytes) => bytes,
            Self::Merged(buffer) => buffer.bytes(),
        }
    }
}

fn take_up(values: &mut Values, bytes: &[u8]) {
    match values {
        Values::F32(values) => add_assign(values, bytes),
        Values::I64(values) => max_assign(values, bytes),
    }
}

/// A chunk's role and the optimizer's slots beside it: `[slot][element]`.
///
/// Slots change in place unless a checkpoint holds them: then the update writes what follows them into other memory, in the
/// same pass.
#[derive(Debug)]
pub struct Slots {
    role: Role,
    values: Vec<Arc<Buffer>>,
}

impl Slots {
    /// The slots of a chunk of `len` elements before the first step. Only parameters have any.
    pub fn new(role: Role, len: usize, optimizer: &Optimizer, pool: &Pool) -> Self {
        let count = if role == Role::Parameter { optimizer.slots() } else { 0 };
        let slot = |number| {
            let mut slot = pool.take(DType::F32, len);
            slot.as_f32_mut().expect("taken as floats").fill(optimizer.slot_initial(number));
            Arc::new(slot)
        };
        Self { role, values: (0..count).map(slot).collect() }
    }

    /// The slots of a chunk as a checkpoint holds them.
    pub const fn restored(role: Role, values: Vec<Arc<Buffer>>) -> Self {
        Self { role, values }
    }

    /// The values now. As long as somebody holds them they do not change.
    pub fn share(&self) -> impl Iterator<Item = Arc<Buffer>> {
        self.values.iter().cloned()
    }

    /// What the chunk contributes to the norms of a step; only parameters do. Nothing is changed.
    pub fn measure(&self, update: &Update, weights: &Values, sum: &Sum) -> Option<Squares> {
        let (Role::Parameter, Values::F32(weights)) = (self.role, weights) else { return None };
        let slots: Vec<&[f32]> = self.values.iter().map(|slot| floats_in(slot)).collect();
        Some(update.measure(weights, sum.bytes(), &slots))
    }

    /// Applies a step to the chunk: from `weights` and the step's `sum` to `next`, whose content before does not matter.
    pub fn advance(&mut self, step: &Advance<'_>, weights: &Values, sum: &Sum, next: &mut Values) {
        let mut copy = None;
        match (self.role, weights, next) {
            (Role::Parameter, Values::F32(weights), Values::F32(next)) => {
                let mut moved: Vec<_> =
                    self.values.iter_mut().map(|slot| room_beside(slot, step.pool)).collect();
                let slots = self.values.iter_mut().zip(&mut moved).map(|(slot, moved)| match moved {
                    Some(to) => Slot::Moved { from: floats_in(slot), to: floats_in_mut(to) },
                    None => Slot::InPlace(floats_in_mut(Arc::get_mut(slot).expect("nobody else holds it"))),
                });
                step.update.apply_bytes(weights, sum.bytes(), slots.collect(), next);
                for (slot, moved) in self.values.iter_mut().zip(moved) {
                    if let Some(moved) = moved {
                        *slot = Arc::new(moved);
                    }
                }
            }
            (Role::State, _, Values::F32(next)) => {
                state::mean(floats(sum.bytes(), &mut copy, step.pool), step.microbatches.into(), next);
            }
            (Role::Counter, _, next @ Values::I64(_)) => next.write_bytes(0, sum.bytes()),
            (role, weights, next) => {
                panic!("a {role:?} of {:?} weights becomes {:?}", weights.dtype(), next.dtype())
            }
        }
    }
}

/// Memory for what follows a slot, when somebody else holds it.
fn room_beside(slot: &mut Arc<Buffer>, pool: &Pool) -> Option<Buffer> {
    let held = Arc::get_mut(slot).is_none();
    held.then(|| pool.take(DType::F32, slot.len()))
}

fn floats_in(slot: &Buffer) -> &[f32] {
    slot.as_f32().expect("slots are floats")
}

fn floats_in_mut(slot: &mut Buffer) -> &mut [f32] {
    slot.as_f32_mut().expect("slots are floats")
}

/// One step as its chunks see it.
#[derive(Clone, Copy, Debug)]
pub struct Advance<'a> {
    /// The optimizer with the scalars of the step.
    pub update: Update,
    /// M of the step.
    pub microbatches: u32,
    /// For copies of gradients that are not aligned.
    pub pool: &'a Pool,
}

/// The floats in `bytes`: as they lie, when they are aligned, otherwise copied.
fn floats<'a>(bytes: &'a [u8], copy: &'a mut Option<Buffer>, pool: &Pool) -> &'a [f32] {
    if let Ok(floats) = bytemuck::try_cast_slice(bytes) {
        return floats;
    }
    let buffer = copy.insert(pool.take(DType::F32, bytes.len() / 4));
    buffer.write_bytes(0, bytes);
    buffer.as_f32().expect("taken as floats")
}

#[cfg(test)]
mod tests {
    use proto::optimizer::{OptimizerKind, OptimizerSpec};

    use super::*;

    fn floats_of(sum: &Sum) -> Vec<f32> {
        sum.bytes().as_chunks().0.iter().map(|raw| f32::from_le_bytes(*raw)).collect()
    }

    /// Bytes that begin `shift` bytes off alignment.
    fn received(values: &[f32], shift: usize) -> Sum {
        let mut raw = vec![0; shift];
        raw.extend(values.iter().flat_map(|value| value.to_le_bytes()));
        Sum::Received(Bytes::from(raw).slice(shift..))
    }

    #[test]
    fn a_buffer_is_recycled_when_its_last_view_goes() {
        let pool = Pool::new(1 << 20);
        let buffer = Arc::new(pool.take(DType::F32, 8));
        let address = buffer.bytes().as_ptr();
        let view = buffer.view();
        drop(buffer);
        assert_ne!(pool.take(DType::F32, 8).bytes().as_ptr(), address, "it is still being read");
        drop(view);
        let again = [pool.take(DType::F32, 8), pool.take(DType::F32, 8)];
        assert!(again.iter().any(|buffer| buffer.bytes().as_ptr() == address));
        assert_eq!(pool.allocated(), 2);
        assert_ne!(pool.take(DType::F32, 9).len(), 8, "lengths do not mix");
    }

    #[test]
    fn a_pool_keeps_no_more_than_it_may() {
        let pool = Pool::new(100);
        drop([pool.take(DType::F32, 20), pool.take(DType::F32, 20)]);
        drop([pool.take(DType::F32, 20), pool.take(DType::F32, 20)]);
        assert_eq!(pool.allocated(), 3, "one of 80 bytes was kept, the other was not");
    }

    #[test]
    fn sums_are_the_same_wherever_both_halves_come_from() {
        let pool = Pool::new(1 << 20);
        let (a, b) = ([1.0, 1e8, -0.1], [0.3, 1.0, 1e-9]);
        let expected: Vec<f32> = a.iter().zip(&b).map(|(a, b)| a + b).collect();
        let zero = [-0.0; 3];
        let merged = |values: &[f32], shift| {
            let mut sum = received(values, shift);
            // Minus zero is neutral for every float, zero included.
            sum.merge(received(&zero, 1), DType::F32, &pool);
            assert!(matches!(sum, Sum::Merged(_)));
            sum
        };
        for shift in 0..5 {
            for mut left in [received(&a, shift), merged(&a, shift)] {
                for right in [received(&b, 3), merged(&b, 3)] {
                    let mut sum = std::mem::replace(&mut left, received(&a, shift));
                    sum.merge(right, DType::F32, &pool);
                    assert_eq!(floats_of(&sum), expected);
                }
            }
        }
    }

    #[test]
    fn a_sum_that_somebody_reads_is_left_alone() {
        let pool = Pool::new(1 << 20);
        let held = Sum::of(received(&[1.0], 1).bytes(), received(&[2.0], 2).bytes(), DType::F32, &pool);
        let reader = held.clone();
        for (mut left, right) in [(held.clone(), received(&[4.0], 3)), (received(&[4.0], 3), held)] {
            left.merge(right, DType::F32, &pool);
            assert_eq!(floats_of(&left), [7.0]);
            assert_eq!(floats_of(&reader), [3.0]);
        }
    }

    #[test]
    fn unaligned_gradients_give_the_bits_of_aligned_ones_in_every_role() {
        let pool = Pool::new(1 << 20);
        let optimizer = Optimizer::new(&OptimizerSpec::new(OptimizerKind::Adam, 0.1), 10).unwrap();
        let step = Advance { update: optimizer.prepare(0, 0.5), microbatches: 3, pool: &pool };
        let weights = Values::F32(vec![1.0, 2.0, 3.0]);
        for role in [Role::Parameter, Role::State] {
            let next = [0, 1, 2, 3].map(|shift| {
                let mut slots = Slots::new(role, 3, &optimizer, &pool);
                let mut next = Values::F32(vec![f32::NAN; 3]);
                slots.advance(&step, &weights, &received(&[0.5, -3.0, 41.0], shift), &mut next);
                next
            });
            assert!(next.iter().all(|other| *other == next[0]), "{role:?}: {next:?}");
        }
        let mut next = Values::I64(vec![0]);
        let largest = Sum::Received(Bytes::from(17i64.to_le_bytes().to_vec()));
        Slots::new(Role::Counter, 1, &optimizer, &pool).advance(
            &step,
            &Values::I64(vec![5]),
            &largest,
            &mut next,
        );
        assert_eq!(next, Values::I64(vec![17]));
    }

    #[test]
    fn slots_that_somebody_holds_move_once_and_then_change_in_place() {
        let pool = Pool::new(1 << 20);
        let optimizer = Optimizer::new(&OptimizerSpec::new(OptimizerKind::Adam, 0.1), 10).unwrap();
        let step = Advance { update: optimizer.prepare(0, 0.5), microbatches: 1, pool: &pool };
        let weights = Values::F32(vec![1.0, 2.0]);
        let mut next = weights.clone();
        let mut slots = Slots::new(Role::Parameter, 2, &optimizer, &pool);
        let mut alone = Slots::new(Role::Parameter, 2, &optimizer, &pool);
        slots.advance(&step, &weights, &received(&[0.5, 3.0], 0), &mut next);
        alone.advance(&step, &weights, &received(&[0.5, 3.0], 0), &mut next);
        let held: Vec<_> = slots.share().collect();
        let before: Vec<Values> = held.iter().map(|slot| Values::clone(slot)).collect();
        let allocated = pool.allocated();
        for _ in 0..3 {
            slots.advance(&step, &weights, &received(&[1.5, -3.0], 1), &mut next);
            alone.advance(&step, &weights, &received(&[1.5, -3.0], 1), &mut next);
        }
        assert!(
            held.iter().zip(&before).all(|(held, before)| ***held == *before),
            "a checkpoint's do not change"
        );
        let same = |(one, other): (Arc<Buffer>, Arc<Buffer>)| **one == **other;
        assert!(slots.share().zip(alone.share()).all(same), "holding them does not reach the values");
        // Other memory for each slot, once; gradients that are not aligned are read where they are.
        assert_eq!(pool.allocated(), allocated + 2);
    }
}
