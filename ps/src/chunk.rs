//! What happens to one chunk of a partition: gradients are summed, and an update makes the next
//! weights.
//!
//! Always true here:
//!
//! - A chunk's weights are immutable once they are in an `Arc`. An update reads the buffer of
//!   version v and writes v + 1 into another one, so a pull that still streams v is not disturbed.
//! - Gradients stay in the bytes they were received in until they meet another one: a step that
//!   comes as one node is never copied. Received bytes are rarely aligned, so they are read with
//!   unaligned loads.

use std::sync::Arc;

use bytes::Bytes;
use kernels::{Gradient, Measurement, Merge, Operand, Optimizer, Pass, Slot, Squares, Update};
use proto::loss_scale::LossScale;
use proto::tensor::{DType, TensorRole};
use proto::wire::WireType;

use crate::pool::{Buffer, Pool, Use};

/// The weights of one version: a buffer for each chunk of a partition, in the order of their ids.
pub(crate) type Weights = Arc<[Arc<Buffer>]>;

/// What a node of the reduction tree says about one chunk; clones share the values.
#[derive(Clone, Debug)]
pub enum Sum {
    /// The encoded values that a push brought.
    Received(Bytes),
    /// Values that this ps computed: the sum of two nodes, or widened ones.
    Merged(Arc<Buffer>),
}

impl Sum {
    /// Values of a parameter that were received as `wire`, which rounds: as f32 in memory of their
    /// own.
    ///
    /// # Panics
    /// If they end within a value.
    pub fn widened(encoded: &[u8], wire: WireType, pool: &Pool) -> Self {
        let mut values = pool.take(Use::Sum, DType::F32, encoded.len() / wire.size());
        values.decode(encoded, wire);
        Self::Merged(Arc::new(values))
    }

    /// Values that were received as they are, in memory of a device if the pool lies there and has
    /// room.
    ///
    /// # Panics
    /// If they end within a value.
    pub fn staged(values: Bytes, dtype: DType, pool: &Pool) -> Self {
        let mut staged = pool.take(Use::Sum, dtype, values.len() / dtype.size());
        if staged.is_on_host() {
            return Self::Received(values);
        }
        staged.write(Operand::Payload(&values));
        Self::Merged(Arc::new(staged))
    }

    /// Copies values from memory that belongs to another process.
    ///
    /// # Panics
    /// If they lie on a device that failed, and there is room for them on the host only.
    pub fn copied(values: Operand<'_>, dtype: DType, pool: &Pool) -> Self {
        let mut copy = pool.take(Use::Sum, dtype, values.size() / dtype.size());
        copy.write(values);
        Self::Merged(Arc::new(copy))
    }

    /// Computes `left + right` at a node of the tree, for counters the maximum, in memory of its
    /// own: one pass over three buffers.
    ///
    /// # Panics
    /// If the lengths differ.
    pub fn of(left: Operand<'_>, right: Operand<'_>, merge: Merge, pool: &Pool) -> Self {
        let dtype = merge.dtype();
        let mut sum = pool.take(Use::Sum, dtype, left.size() / dtype.size());
        sum.merge_of(left, right, merge);
        Self::Merged(Arc::new(sum))
    }

    /// Computes `self = left + right` at a node of the tree; for counters the maximum. The sum may
    /// lie in the memory of either, as `left + right` and `right + left` have the same bits. Memory
    /// that others read does not change.
    pub fn merge(&mut self, mut right: Self, merge: Merge, pool: &Pool) {
        if let Some(left) = self.alone() {
            return left.merge(right.values(), merge);
        }
        if let Some(sum) = right.alone() {
            sum.merge(self.values(), merge);
            *self = right;
            return;
        }
        *self = Self::of(self.values(), right.values(), merge, pool);
    }

    /// Returns the values for writing, if nobody else has them.
    fn alone(&mut self) -> Option<&mut Buffer> {
        match self {
            Self::Received(_) => None,
            Self::Merged(buffer) => Arc::get_mut(buffer),
        }
    }

    /// Returns the values as they lie.
    pub fn values(&self) -> Operand<'_> {
        match self {
            Self::Received(bytes) => Operand::Payload(bytes),
            Self::Merged(buffer) => Operand::Stored(buffer),
        }
    }
}

/// What a whole step says about one chunk.
#[derive(Clone, Debug)]
pub enum Total {
    /// Added up.
    Sum(Sum),
    /// The two halves of the tree: the update adds them up in its own pass.
    Halves(Sum, Sum),
}

impl Total {
    /// Makes it one sum, for callers that need the sum before the update.
    pub fn add_up(&mut self, dtype: DType, pool: &Pool) {
        if let Self::Halves(left, right) = self {
            *self = Self::Sum(Sum::of(left.values(), right.values(), Merge::root(dtype), pool));
        }
    }

    /// Returns the values, for an operation that adds halves up in its own pass.
    fn gradient(&self) -> Gradient<'_> {
        match self {
            Self::Sum(sum) => Gradient::Sum(sum.values()),
            Self::Halves(left, right) => Gradient::Halves(left.values(), right.values()),
        }
    }

    /// Returns the values, as one sum.
    fn into_sum(mut self, dtype: DType, pool: &Pool) -> Sum {
        self.add_up(dtype, pool);
        match self {
            Self::Sum(sum) => sum,
            Self::Halves(..) => unreachable!("added up"),
        }
    }
}

/// A chunk's role and the optimizer's slots beside it: `[slot][element]`.
///
/// Slots change in place unless a checkpoint holds them: then the update writes what follows them
/// into other memory, in the same pass.
#[derive(Debug)]
pub struct Slots {
    role: TensorRole,
    values: Vec<Arc<Buffer>>,
}

impl Slots {
    /// Returns the slots of a chunk of `len` elements before the first step. Only parameters have
    /// any.
    pub fn new(role: TensorRole, len: usize, optimizer: &Optimizer, pool: &Pool) -> Self {
        let count = if role == TensorRole::Parameter { optimizer.slots() } else { 0 };
        let slot = |number| {
            let mut slot = pool.take(Use::Slot, DType::F32, len);
            slot.fill(optimizer.slot_initial(number));
            Arc::new(slot)
        };
        Self { role, values: (0..count).map(slot).collect() }
    }

    /// Returns the slots of a chunk as a checkpoint holds them.
    pub const fn restored(role: TensorRole, values: Vec<Arc<Buffer>>) -> Self {
        Self { role, values }
    }

    /// Returns the values now. As long as somebody holds them they do not change.
    pub fn share(&self) -> impl Iterator<Item = Arc<Buffer>> {
        self.values.iter().cloned()
    }

    /// Returns what the chunk contributes to the norms of a step; only parameters do. Nothing is
    /// changed.
    ///
    /// # Panics
    /// If the total is not added up.
    pub fn measure(&self, update: &Update, weights: &Buffer, total: &Total) -> Option<Squares> {
        if self.role != TensorRole::Parameter {
            return None;
        }
        let Total::Sum(sum) = total else { panic!("the norm of a sum that is not there") };
        Some(update.measure(weights, sum.values(), self.values.iter().map(|slot| &***slot)))
    }

    /// Returns what a device reads of the chunk for the norms of a step; only parameters have any.
    pub fn measurement<'a>(
        &'a self,
        update: Update,
        weights: &'a Buffer,
        total: &'a Total,
    ) -> Option<Measurement<'a>> {
        let slots = self.values.iter().map(|slot| &***slot).collect();
        let gradient = total.gradient();
        self.has_rule().then_some(Measurement { update, weights, gradient, slots })
    }

    /// Returns whether an update rule makes the next weights. Only parameters have one.
    pub fn has_rule(&self) -> bool {
        self.role == TensorRole::Parameter
    }

    /// Returns memory for the next values of each slot that others hold.
    pub fn room(&mut self, pool: &Pool) -> Vec<Option<Buffer>> {
        self.values.iter_mut().map(|slot| room_beside(slot, pool)).collect()
    }

    /// Returns what a device reads and writes of the chunk when a step is applied to it. Slots that
    /// others hold move to their [`room`](Self::room).
    ///
    /// # Panics
    /// If the chunk has no update rule.
    pub fn pass<'a>(
        &'a mut self,
        update: Update,
        weights: &'a Buffer,
        total: &'a Total,
        room: &'a mut [Option<Buffer>],
        next: &'a mut Buffer,
    ) -> Pass<'a> {
        assert!(self.has_rule(), "an update rule for {:?}", self.role);
        let slots = given(&mut self.values, room).collect();
        Pass { update, weights, gradient: total.gradient(), slots, next }
    }

    /// Keeps the slots that have moved.
    pub fn keep(&mut self, moved: Vec<Option<Buffer>>) {
        for (slot, moved) in self.values.iter_mut().zip(moved) {
            if let Some(moved) = moved {
                *slot = Arc::new(moved);
            }
        }
    }

    /// Applies a step to the chunk: from `weights` and the step's `total` to `next`, whose content
    /// before does not matter.
    pub fn advance(&mut self, step: &Advance<'_>, weights: &Buffer, total: Total, next: &mut Buffer) {
        match self.role {
            TensorRole::Parameter => {
                let mut moved = self.room(step.pool);
                let slots = given(&mut self.values, &mut moved);
                match total {
                    Total::Sum(sum) => step.update.apply(weights, sum.values(), slots, next),
                    Total::Halves(left, right) => {
                        step.update.apply_halves(weights, (left.values(), right.values()), slots, next);
                    }
                }
                self.keep(moved);
            }
            TensorRole::State => {
                let sum = total.into_sum(DType::F32, step.pool);
                next.mean_of(sum.values(), step.microbatches.into());
            }
            TensorRole::Counter => next.write(total.into_sum(DType::I64, step.pool).values()),
            TensorRole::Register => register(weights, total, next, step.pool),
            TensorRole::LossScale => scale(weights, false, next),
        }
    }
}

/// Makes the next values of a chunk in a step that overflowed. Gradients and state of such a step
/// count nothing. What a loop wrote in it counts.
pub fn overflowed(role: TensorRole, weights: &Buffer, total: Total, next: &mut Buffer, pool: &Pool) {
    match role {
        TensorRole::Parameter | TensorRole::State | TensorRole::Counter => {
            next.write(Operand::Stored(weights));
        }
        TensorRole::Register => register(weights, total, next, pool),
        TensorRole::LossScale => scale(weights, true, next),
    }
}

/// Makes the next values of a register.
fn register(weights: &Buffer, total: Total, next: &mut Buffer, pool: &Pool) {
    // Microbatches of this step may have seen an older version than `weights`.
    next.write(total.into_sum(DType::I64, pool).values());
    next.merge(Operand::Stored(weights), Merge::Max);
}

/// Returns an integer of a buffer.
fn integer(bytes: &[u8]) -> i64 {
    i64::from_le_bytes(bytes.try_into().expect("eight bytes"))
}

/// Makes the next values of a loss scale. The host computes the two numbers.
fn scale(weights: &Buffer, overflowed: bool, next: &mut Buffer) {
    let elements = weights.read_part(WireType::F32, 0..weights.size());
    let elements = elements.map(|bytes| bytes.chunks_exact(8).map(integer).collect::<Vec<_>>());
    match elements.ok().as_deref().and_then(LossScale::read) {
        Some(scale) => {
            let elements = scale.after(overflowed).elements().map(i64::to_le_bytes);
            next.write(Operand::Payload(elements.as_flattened()));
        }
        // The device has failed, so nobody sees this version; or it is no loss scale of ours.
        None => next.write(Operand::Stored(weights)),
    }
}

/// Applies a step to all chunks of a partition as [`Slots::advance`] does to each. Those that have
/// an update rule are one launch on a device. Returns the next weights.
pub fn advance_all<'a>(
    slots: &mut [Slots],
    steps: impl IntoIterator<Item = Advance<'a>>,
    weights: &[Arc<Buffer>],
    totals: &[Total],
) -> Vec<Buffer> {
    let steps: Vec<_> = steps.into_iter().collect();
    let take = |(step, weights): (&Advance<'_>, &Arc<Buffer>)| {
        step.pool.take(Use::Weights, weights.dtype(), weights.len())
    };
    let mut next: Vec<_> = steps.iter().zip(weights).map(take).collect();
    let mut rooms: Vec<_> = slots.iter_mut().zip(&steps).map(|(slots, step)| slots.room(step.pool)).collect();
    let mut passes = Vec::with_capacity(next.len());
    let chunks = slots.iter_mut().zip(&mut rooms).zip(weights).zip(totals).zip(&mut next);
    for (((((slots, room), weights), total), next), step) in chunks.zip(&steps) {
        if slots.has_rule() {
            passes.push(slots.pass(step.update, weights, total, room, next));
        } else {
            slots.advance(step, weights, total.clone(), next);
        }
    }
    Update::apply_all(1, passes);
    slots.iter_mut().zip(rooms).for_each(|(slots, moved)| slots.keep(moved));
    next
}

/// Returns the slots of a chunk as an update takes them. Those that have `room` move there.
fn given<'a>(slots: &'a mut [Arc<Buffer>], room: &'a mut [Option<Buffer>]) -> impl Iterator<Item = Slot<'a>> {
    slots.iter_mut().zip(room).map(|(slot, room)| match room {
        Some(to) => Slot::Moved { from: &***slot, to: &mut **to },
        None => Slot::InPlace(&mut **Arc::get_mut(slot).expect("nobody else holds it")),
    })
}

/// Returns memory for the next values of a slot, if others hold its current values.
fn room_beside(slot: &mut Arc<Buffer>, pool: &Pool) -> Option<Buffer> {
    let held = Arc::get_mut(slot).is_none();
    held.then(|| pool.take(Use::Slot, DType::F32, slot.len()))
}

/// One step as its chunks see it.
#[derive(Clone, Copy, Debug)]
pub struct Advance<'a> {
    /// The optimizer with the scalars of the step.
    pub update: Update,
    /// M of the step.
    pub microbatches: u32,
    /// The pool for sums of halves and for slots that move.
    pub pool: &'a Pool,
}

#[cfg(test)]
mod tests {
    use kernels::Storage;
    use proto::optimizer::{OptimizerKind, OptimizerSpec};
    use proto::tensor::Values;

    use super::*;

    const PLAIN: Merge = Merge::Sum(WireType::F32);

    fn floats_of(sum: &Sum) -> Vec<f32> {
        match sum {
            Sum::Received(bytes) => bytes.as_chunks().0.iter().map(|raw| f32::from_le_bytes(*raw)).collect(),
            Sum::Merged(buffer) => floats(buffer),
        }
    }

    fn floats(storage: &Storage) -> Vec<f32> {
        storage.bytes().as_chunks().0.iter().map(|raw| f32::from_le_bytes(*raw)).collect()
    }

    fn buffer_of(values: &[f32], pool: &Pool) -> Buffer {
        let mut buffer = pool.take(Use::Sum, DType::F32, values.len());
        buffer.write(Operand::Payload(Values::F32(values.to_vec()).bytes()));
        buffer
    }

    /// Bytes that begin `shift` bytes off alignment.
    fn received(values: &[f32], shift: usize) -> Sum {
        let mut raw = vec![0; shift];
        raw.extend(values.iter().flat_map(|value| value.to_le_bytes()));
        Sum::Received(Bytes::from(raw).slice(shift..))
    }

    #[test]
    fn sums_are_the_same_wherever_both_halves_come_from() {
        let pool = Pool::new(1 << 20, None);
        let (a, b) = ([1.0, 1e8, -0.1], [0.3, 1.0, 1e-9]);
        let expected: Vec<f32> = a.iter().zip(&b).map(|(a, b)| a + b).collect();
        let zero = [-0.0; 3];
        let merged = |values: &[f32], shift| {
            let mut sum = received(values, shift);
            // Minus zero is neutral for every float, zero included.
            sum.merge(received(&zero, 1), PLAIN, &pool);
            assert!(matches!(sum, Sum::Merged(_)));
            sum
        };
        for shift in 0..5 {
            for mut left in [received(&a, shift), merged(&a, shift)] {
                for right in [received(&b, 3), merged(&b, 3)] {
                    let mut sum = std::mem::replace(&mut left, received(&a, shift));
                    sum.merge(right, PLAIN, &pool);
                    assert_eq!(floats_of(&sum), expected);
                }
            }
        }
    }

    #[test]
    fn rounded_sums_are_the_same_wherever_both_halves_come_from() {
        let pool = Pool::new(1 << 20, None);
        for (wire, expected) in
            [(WireType::Bf16, [1.0, 258.0, 3.0]), (WireType::F16, [1.0 + 1.0 / 1024.0, 257.0, 3.0])]
        {
            // Above the middle of two values of either type; the last one is exact.
            let (a, b) = ([1.0f32, 256.0, 1.0], [0.0009, 1.01, 2.0]);
            let plain = [0, 1, 2].map(|at| a[at] + b[at]);
            let halves = |values: &[f32]| {
                let shared = Arc::new(buffer_of(values, &pool));
                [
                    received(values, 1),
                    Sum::Merged(Arc::new(buffer_of(values, &pool))),
                    Sum::Merged(shared.clone()),
                    Sum::Merged(shared),
                ]
            };
            for mut left in halves(&a) {
                for right in halves(&b) {
                    left.merge(right, Merge::of(TensorRole::Parameter, wire), &pool);
                    assert_eq!(floats_of(&left), expected, "{wire}");
                    left = received(&a, 3);
                }
            }
            let mut total = Total::Halves(received(&a, 1), received(&b, 1));
            total.add_up(DType::F32, &pool);
            let Total::Sum(sum) = total else { panic!("it was added up") };
            assert_eq!(floats_of(&sum), plain, "the sum of a whole step is not rounded");
            let mut state = received(&a, 1);
            state.merge(received(&b, 1), Merge::of(TensorRole::State, wire), &pool);
            assert_eq!(floats_of(&state), plain, "nor is state");
        }
    }

    #[test]
    fn a_sum_that_somebody_reads_is_left_alone() {
        let pool = Pool::new(1 << 20, None);
        let held = Sum::of(received(&[1.0], 1).values(), received(&[2.0], 2).values(), PLAIN, &pool);
        let reader = held.clone();
        for (mut left, right) in [(held.clone(), received(&[4.0], 3)), (received(&[4.0], 3), held)] {
            left.merge(right, PLAIN, &pool);
            assert_eq!(floats_of(&left), [7.0]);
            assert_eq!(floats_of(&reader), [3.0]);
        }
    }

    #[test]
    fn unaligned_gradients_give_the_bits_of_aligned_ones_in_every_role() {
        let pool = Pool::new(1 << 20, None);
        let optimizer = Optimizer::new(&OptimizerSpec::new(OptimizerKind::Adam, 0.1), 10).unwrap();
        let step = Advance { update: optimizer.prepare(0, 0.5), microbatches: 3, pool: &pool };
        let weights = buffer_of(&[1.0, 2.0, 3.0], &pool);
        for role in [TensorRole::Parameter, TensorRole::State] {
            let next = [0, 1, 2, 3].map(|shift| {
                let mut slots = Slots::new(role, 3, &optimizer, &pool);
                let mut next = buffer_of(&[f32::NAN; 3], &pool);
                slots.advance(&step, &weights, Total::Sum(received(&[0.5, -3.0, 41.0], shift)), &mut next);
                floats(&next)
            });
            assert!(next.iter().all(|other| *other == next[0]), "{role:?}: {next:?}");
        }
        let (before, mut next) = (pool.take(Use::Sum, DType::I64, 1), pool.take(Use::Sum, DType::I64, 1));
        let largest = 17i64.to_le_bytes();
        let sum = Sum::Received(Bytes::copy_from_slice(&largest));
        Slots::new(TensorRole::Counter, 1, &optimizer, &pool).advance(
            &step,
            &before,
            Total::Sum(sum),
            &mut next,
        );
        assert_eq!(*next.bytes(), largest);
    }

    #[test]
    fn all_chunks_at_once_give_the_bits_of_one_after_the_other() {
        let pool = Pool::new(1 << 20, None);
        let optimizer = Optimizer::new(&OptimizerSpec::new(OptimizerKind::Adam, 0.1), 10).unwrap();
        let roles = [TensorRole::Parameter, TensorRole::State, TensorRole::Parameter];
        let slots = || roles.map(|role| Slots::new(role, 2, &optimizer, &pool));
        let (mut alone, mut together) = (slots(), slots());
        let mut weights = [1.0, 2.0, 3.0].map(|value| Arc::new(buffer_of(&[value, -value], &pool)));
        let mut held = Vec::new();
        for number in 0..4 {
            let total = |at: f32| {
                let [left, right] = [0.3, 0.7].map(|factor| received(&[factor * at, number as f32], 1));
                if at > 1.0 { Total::Halves(left, right) } else { Total::Sum(left) }
            };
            let totals = [1.0, 2.0, 3.0].map(total);
            let steps = [0, 1, 2].map(|chunk| {
                let update = optimizer.prepare(number, 0.5 / (chunk + 1) as f32);
                Advance { update, microbatches: 3, pool: &pool }
            });
            // What a checkpoint holds moves.
            held.clear();
            held.extend(together.iter().take(usize::from(number > 0)).flat_map(Slots::share));
            let before: Vec<_> = held.iter().map(|slot| floats(slot)).collect();
            let next = advance_all(&mut together, steps, &weights, &totals);
            let now: Vec<_> = held.iter().map(|slot| floats(slot)).collect();
            assert_eq!(now, before, "a checkpoint's do not change");
            for chunk in 0..3 {
                let mut expected = buffer_of(&[f32::NAN; 2], &pool);
                alone[chunk].advance(&steps[chunk], &weights[chunk], totals[chunk].clone(), &mut expected);
                assert_eq!(floats(&next[chunk]), floats(&expected), "step {number}, chunk {chunk}");
                let slots = [&alone, &together]
                    .map(|slots| slots[chunk].share().map(|slot| floats(&slot)).collect::<Vec<_>>());
                assert_eq!(slots[0], slots[1], "step {number}, chunk {chunk}");
            }
            weights = next.into_iter().map(Arc::new).collect::<Vec<_>>().try_into().unwrap();
        }
    }

    #[test]
    fn a_register_keeps_what_a_step_wrote_that_the_microbatches_have_not_seen() {
        let pool = Pool::new(1 << 20, None);
        let optimizer = Optimizer::new(&OptimizerSpec::new(OptimizerKind::Sgd, 0.1), 10).unwrap();
        let step = Advance { update: optimizer.prepare(0, 0.5), microbatches: 2, pool: &pool };
        let integers = |values: [i64; 3]| Bytes::copy_from_slice(bytemuck::bytes_of(&values));
        let mut before = pool.take(Use::Sum, DType::I64, 3);
        before.write(Operand::Payload(&integers([5, 1, -4])));
        let halves =
            || Total::Halves(Sum::Received(integers([2, 3, -7])), Sum::Received(integers([4, 0, -9])));
        for (role, expected) in [(TensorRole::Register, [5, 3, -4]), (TensorRole::Counter, [4, 3, -7])] {
            let mut next = pool.take(Use::Sum, DType::I64, 3);
            Slots::new(role, 3, &optimizer, &pool).advance(&step, &before, halves(), &mut next);
            assert_eq!(*next.bytes(), integers(expected), "{role:?}");
        }
    }

    #[test]
    fn halves_give_the_bits_of_their_sum_in_every_role() {
        let pool = Pool::new(1 << 20, None);
        let optimizer = Optimizer::new(&OptimizerSpec::new(OptimizerKind::Adam, 0.1), 10).unwrap();
        let step = Advance { update: optimizer.prepare(0, 0.5), microbatches: 3, pool: &pool };
        let values = |seed: usize| -> Vec<f32> {
            (0..5000).map(|at| ((at * 7 + seed) % 1013) as f32 * 0.37 - 100.0).collect()
        };
        let weights = buffer_of(&values(1), &pool);
        for role in [TensorRole::Parameter, TensorRole::State] {
            let (left, right) = (received(&values(2), 1), received(&values(3), 2));
            let mut sum = left.clone();
            sum.merge(right.clone(), PLAIN, &pool);
            let next = [Total::Sum(sum), Total::Halves(left, right)].map(|total| {
                let mut slots = Slots::new(role, 5000, &optimizer, &pool);
                let mut next = buffer_of(&[f32::NAN; 5000], &pool);
                slots.advance(&step, &weights, total, &mut next);
                let slots: Vec<_> = slots.share().map(|slot| floats(&slot)).collect();
                (floats(&next), slots)
            });
            assert!(next[0] == next[1], "{role:?}");
        }
        let largest = |value: i64| Sum::Received(Bytes::copy_from_slice(&value.to_le_bytes()));
        let (before, mut next) = (pool.take(Use::Sum, DType::I64, 1), pool.take(Use::Sum, DType::I64, 1));
        let halves = Total::Halves(largest(4), largest(17));
        Slots::new(TensorRole::Counter, 1, &optimizer, &pool).advance(&step, &before, halves, &mut next);
        assert_eq!(*next.bytes(), 17i64.to_le_bytes());
    }

    #[test]
    fn slots_that_somebody_holds_move_once_and_then_change_in_place() {
        let pool = Pool::new(1 << 20, None);
        let optimizer = Optimizer::new(&OptimizerSpec::new(OptimizerKind::Adam, 0.1), 10).unwrap();
        let step = Advance { update: optimizer.prepare(0, 0.5), microbatches: 1, pool: &pool };
        let weights = buffer_of(&[1.0, 2.0], &pool);
        let mut next = buffer_of(&[0.0; 2], &pool);
        let mut slots = Slots::new(TensorRole::Parameter, 2, &optimizer, &pool);
        let mut alone = Slots::new(TensorRole::Parameter, 2, &optimizer, &pool);
        slots.advance(&step, &weights, Total::Sum(received(&[0.5, 3.0], 0)), &mut next);
        alone.advance(&step, &weights, Total::Sum(received(&[0.5, 3.0], 0)), &mut next);
        let held: Vec<_> = slots.share().collect();
        let before: Vec<_> = held.iter().map(|slot| floats(slot)).collect();
        let allocated = pool.allocated();
        for _ in 0..3 {
            slots.advance(&step, &weights, Total::Sum(received(&[1.5, -3.0], 1)), &mut next);
            alone.advance(&step, &weights, Total::Sum(received(&[1.5, -3.0], 1)), &mut next);
        }
        assert!(
            held.iter().zip(&before).all(|(held, before)| floats(held) == *before),
            "a checkpoint's do not change"
        );
        let same = |(one, other): (Arc<Buffer>, Arc<Buffer>)| one.bytes() == other.bytes();
        assert!(slots.share().zip(alone.share()).all(same), "holding them does not reach the values");
        // Other memory for each slot, once; gradients that are not aligned are read where they are.
        assert_eq!(pool.allocated(), allocated + 2);
    }
}
