//! The dense tensors of a partition as a list of chunks, in the order of their ids: no other file
//! of a partition takes the list apart.
//!
//! Always true here:
//!
//! - Weights, sums, totals, slots and updates are lists of equal length: the entries at one index
//!   belong to one chunk.
//! - Chunks are independent of each other. Threads share them out, and their number does not reach
//!   the bits.
//! - Nothing here knows a step's place in time, an era or a lock of the partition: the callers
//!   decide when.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use bytes::Bytes;
use kernels::device::PART_ALIGNMENT;
use kernels::{Merge, Operand, Optimizers, Squares, Update, Updates, parallel};
use net::memory::Memory;
use proto::checkpoint::AppliedSteps;
use proto::convert::ChunkCheck;
use proto::ids::{ChunkId, PartitionId, Version};
use proto::pb;
use proto::placement::Layout;
use proto::tensor::{Chunk, DType, TensorRole};
use proto::tree::{Node, StepNode};
use proto::wire::WireType;
use tokio_util::sync::CancellationToken;

use super::push::Payload;
use crate::checkpoint::Cut;
use crate::chunk::{self, Advance, Slots, Sum, Total, Weights, advance_all};
use crate::config::Options;
use crate::device::{DeviceMemory, Lent, Taken};
use crate::error::{Error, Result};
use crate::opening::{Opening, Place};
use crate::pool::{Buffer, Pool, Use};

/// A partition of this size or more is written past the caches: when its last chunk has been
/// written, its first is in none any more.
const STREAMED_BYTES_MIN: usize = 16 << 20;

/// What a node says about each chunk of the partition.
pub(super) type Sums = Vec<Sum>;

/// What a node says, with the number of its records.
#[derive(Clone, Debug)]
pub(super) struct Summed {
    pub(super) samples: u64,
    pub(super) sums: Sums,
}

/// What a whole step says about each chunk of the partition.
pub(super) type Totals = Vec<Total>;

/// The update of each chunk of the partition.
pub(super) type ChunkUpdates = Vec<Update>;

/// What the parameter chunks of one partition contribute to the norms of a step, in the order of
/// their ids.
pub(super) type Measured = Arc<[Squares]>;

/// The chunks of one partition: where they lie in the model, the memory for their values, and the
/// optimizers with their slots.
#[derive(Debug)]
pub(super) struct Dense {
    partition: PartitionId,
    layout: Layout,
    /// Bytes of the weights, and in memory of each push.
    bytes: usize,
    /// What the job exchanges: the sums below the root of a step's tree are rounded to it.
    wire: WireType,
    optimizers: Optimizers,
    /// Whether the job has a loss scale.
    is_scaled: bool,
    threads: usize,
    pool: Pool,
    /// The one update at a time takes the lock; empty until version 0.
    slots: Mutex<Vec<Slots>>,
}

impl Dense {
    /// Returns the chunks of a partition, without weights. Those that workers of this host may read
    /// will lie in `memory`. Those of a device lie there: in the memory of an equal partition
    /// `before`, or in new memory for what is `kept`.
    ///
    /// # Errors
    /// The tensors cannot be placed, the partition is larger than `options` allow, the optimizer is
    /// no valid one for them, or the device has too little memory.
    pub(super) fn new(
        opening: &Opening,
        options: &Options,
        memory: Option<Memory>,
        device: &Arc<DeviceMemory>,
        kept: Kept,
        before: Option<&Self>,
    ) -> Result<Self> {
        let (place, partition) = (Place::from(opening.address), opening.address.partition);
        let layout = Layout::new(opening.tensors.clone(), opening.partitions)?;
        let bytes = layout.partition_bytes(partition);
        let bytes_max = options.partition_bytes_max;
        if bytes as u64 > bytes_max {
            return Err(Error::PartitionTooLarge { place, bytes: bytes as u64, bytes_max });
        }
        let optimizers = Optimizers::new(&opening.spec.optimizer, &opening.tensors, opening.plan.steps())
            .map_err(|invalid| proto::Error::Invalid(invalid.violations))?;
        let slots_saved = opening.spec.checkpoint.as_ref().map_or(0, |_| optimizers.slots());
        // The next version, a few sums in progress, and what a checkpoint holds.
        let free_bytes_max = (4 + slots_saved) * bytes;
        let pool = if device.device().is_host() {
            Pool::new(free_bytes_max, memory)
        } else if let Some(before) = before {
            before.pool.clone()
        } else {
            let buffers = kept.buffers(&layout, partition, optimizers.slots());
            let promised =
                buffers.iter().map(|(dtype, len, count)| (dtype.size() * len * count) as u64).sum();
            let taken = Taken::promised(device.clone(), place, promised)?;
            let pool = Pool::with(free_bytes_max, memory, Some(taken));
            for (dtype, len, count) in buffers {
                let reserved = pool.reserve_on_device(dtype, len, count);
                reserved.map_err(|error| Error::DeviceShort { place, error })?;
            }
            pool
        };
        Ok(Self {
            partition,
            layout,
            bytes,
            wire: opening.spec.exchange.dtype,
            optimizers,
            is_scaled: opening.is_scaled(),
            threads: parallel::threads_for(bytes, options.threads),
            pool,
            slots: Mutex::default(),
        })
    }

    /// Returns whether the values lie on a device.
    pub(super) fn is_on_device(&self) -> bool {
        self.pool.is_on_device()
    }

    /// Bytes of the weights, and in memory of each push.
    pub(super) const fn bytes(&self) -> usize {
        self.bytes
    }

    /// Bytes of a push or a pull whose parameters travel as `wire`.
    pub(super) fn bytes_in(&self, wire: WireType) -> usize {
        self.layout.partition_bytes_in(self.partition, wire)
    }

    /// Returns which tensor of the model is where.
    pub(super) const fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Ids of the chunks, increasing.
    pub(super) fn members(&self) -> &[ChunkId] {
        self.layout.members(self.partition)
    }

    /// Checks the chunks of a push, which come in any order.
    pub(super) fn check_push(&self) -> ChunkCheck<'_> {
        ChunkCheck::new("push to", &self.layout, self.partition)
    }

    /// Returns the sum of the chunk at `place`, which came in a push. Values that travelled as a
    /// `wire` that rounds are widened. Those of a node whose `sibling` is here become those of
    /// their parent, which is the node named beside the sibling's sums. Values in memory that a
    /// worker has exported are read there, and nothing keeps them.
    pub(super) fn arrived(
        &self,
        place: usize,
        values: Payload,
        wire: WireType,
        sibling: Option<&(StepNode, Sums)>,
    ) -> Sum {
        let role = self.layout.tensor_of(self.members()[place]).role;
        let wire = wire.of(role);
        let sibling = sibling.map(|(parent, sibling)| {
            let merge = match parent.node == Node::root(parent.of) {
                true => Merge::root(role.dtype()),
                false => Merge::of(role, self.wire),
            };
            (&sibling[place], merge)
        });
        let mut sum = match values {
            Payload::Exported(lent) => {
                let values = lent.values(role.dtype());
                return self.read(Operand::Stored(&values), role.dtype(), sibling);
            }
            Payload::Device(values) => {
                return self.read(Operand::Stored(&values), role.dtype(), sibling);
            }
            Payload::Host(values) if wire.rounds() => Sum::widened(&values, wire, &self.pool),
            Payload::Host(values) if self.is_on_device() => Sum::staged(values, role.dtype(), &self.pool),
            Payload::Host(values) => Sum::Received(values),
        };
        if let Some((sibling, merge)) = sibling {
            sum.merge(sibling.clone(), merge, &self.pool);
        }
        sum
    }

    /// Returns the sum of values that the device reads where they lie and that nothing keeps: with
    /// those of their sibling, or alone.
    fn read(&self, values: Operand<'_>, dtype: DType, sibling: Option<(&Sum, Merge)>) -> Sum {
        match sibling {
            Some((sibling, merge)) => Sum::of(values, sibling.values(), merge, &self.pool),
            None => Sum::copied(values, dtype, &self.pool),
        }
    }

    /// Returns the sums of a node below the root, from those of its halves.
    pub(super) fn merge(&self, mut left: Sums, right: Sums) -> Sums {
        let chunks = self.members().iter().zip(left.iter_mut().zip(right));
        parallel::for_each(self.threads, chunks, |(&id, (left, right))| {
            left.merge(right, Merge::of(self.layout.tensor_of(id).role, self.wire), &self.pool);
        });
        left
    }

    /// Weights of version 0 and the slots beside them. The values are copied.
    pub(super) fn initial(&self, values: &[Sum]) -> (Weights, Vec<Slots>) {
        let weights = self.members().iter().zip(values).map(|(&id, values)| {
            let mut buffer = self.take(Use::Weights, id);
            buffer.write(values.values());
            Arc::new(buffer)
        });
        let slots = self.members().iter().map(|&id| {
            let (role, chunk) = (self.layout.tensor_of(id).role, self.layout.chunk(id));
            Slots::new(role, chunk.len, self.optimizers.of(chunk.tensor), &self.pool)
        });
        (weights.collect(), slots.collect())
    }

    /// Puts the slots beside the version that the caller is about to show.
    pub(super) fn replace_slots(&self, slots: Vec<Slots>) {
        *self.slots() = slots;
    }

    /// Names of the slots beside a chunk.
    pub(super) fn slot_names(&self, chunk: ChunkId) -> &'static [&'static str] {
        match self.layout.tensor_of(chunk).role {
            TensorRole::Parameter => self.optimizers.slot_names(),
            TensorRole::State | TensorRole::Counter | TensorRole::Register | TensorRole::LossScale => &[],
        }
    }

    /// Returns memory for the values of a chunk, or for a slot beside it, with any content.
    pub(super) fn take(&self, use_of: Use, chunk: ChunkId) -> Buffer {
        self.pool.take(use_of, self.layout.tensor_of(chunk).dtype(), self.layout.chunk(chunk).len)
    }

    /// Returns the chunks of a version as a pull answers them: they share its memory, or that of
    /// its copy on the host.
    ///
    /// # Errors
    /// The version lies on a device that failed.
    pub(super) fn share(&self, weights: &Weights) -> Result<Vec<Chunk>, kernels::Error> {
        let chunk = |(&id, values): (&ChunkId, Bytes)| {
            let role = self.layout.tensor_of(id).role;
            Chunk { id, role, values: values.into() }
        };
        if self.is_on_device() {
            let views = Buffer::view_all(weights)?;
            return Ok(self.members().iter().zip(views).map(chunk).collect());
        }
        let chunks = self.members().iter().zip(weights.iter());
        chunks.map(|(id, buffer)| Ok(chunk((id, buffer.view()?)))).collect()
    }

    /// Returns the chunks of a version where they lie on the device. `None`: they do not.
    pub(super) fn there(&self, weights: &Weights) -> Option<Vec<(ChunkId, Arc<Buffer>)>> {
        if weights.iter().any(|buffer| buffer.is_on_host()) {
            return None;
        }
        Some(self.members().iter().copied().zip(weights.iter().cloned()).collect())
    }

    /// Copies a version into memory that a worker has exported, chunk after chunk. Returns where
    /// the chunks lie once the device has been waited for. `None`: nothing was copied, because the
    /// version does not lie on the device, or finds no room.
    pub(super) fn place(&self, weights: &Weights, to: &Lent) -> Option<Vec<pb::Chunk>> {
        let begins = begins(weights.iter().map(|buffer| buffer.size()), to.len())?;
        if weights.iter().any(|buffer| buffer.is_on_host()) {
            return None;
        }
        let chunk = |((id, buffer), at): ((&ChunkId, &Arc<Buffer>), usize)| pb::Chunk {
            id: id.get(),
            values: Bytes::new(),
            region: Some(to.write(at, buffer)),
        };
        Some(self.members().iter().zip(weights.iter()).zip(begins).map(chunk).collect())
    }

    /// Returns the scalars of the updates of weights of `version`, with gradients that are
    /// multiplied by `scale`. `overflows` of the steps before changed no weight.
    pub(super) fn prepare(&self, version: Version, overflows: u64, scale: f32) -> Updates {
        let updates = self.optimizers.prepare(version.get(), overflows, scale);
        if self.bytes < STREAMED_BYTES_MIN { updates } else { updates.past_the_caches() }
    }

    /// Returns the update of each chunk. It may lack norms.
    pub(super) fn of_chunks(&self, updates: &Updates) -> ChunkUpdates {
        updates.of_chunks(&self.layout, self.members())
    }

    /// Returns what this partition contributes to the norms of a step. On the host halves of
    /// `totals` are added up; weights and slots are left as they are.
    pub(super) fn measure(&self, updates: &Updates, weights: &Weights, totals: &mut Totals) -> Measured {
        let slots = self.slots();
        let updates = self.of_chunks(updates);
        if self.is_on_device() {
            let chunks = slots.iter().zip(weights.iter()).zip(&*totals).zip(updates);
            let chunks = chunks
                .filter_map(|(((slots, weights), total), update)| slots.measurement(update, weights, total));
            return Update::measure_all(1, chunks.collect()).into();
        }
        let mut squares = vec![None; slots.len()];
        let chunks = slots.iter().zip(weights.iter()).zip(totals).zip(updates).zip(&mut squares);
        parallel::for_each(self.threads, chunks, |((((slots, weights), total), update), squares)| {
            total.add_up(weights.dtype(), &self.pool);
            *squares = slots.measure(&update, weights, total);
        });
        squares.into_iter().flatten().collect()
    }

    /// Returns how many squares a partition of the job contributes: one for each of its parameter
    /// chunks.
    pub(super) fn squares_of(&self, partition: PartitionId) -> usize {
        parameters(&self.layout, partition).count()
    }

    /// Returns the update of each chunk of this partition, from what all partitions have measured.
    /// `None`: the step overflowed, and the job has a loss scale.
    pub(super) fn with_norms(&self, updates: &Updates, measured: Vec<Measured>) -> Option<ChunkUpdates> {
        let is_finite = measured.iter().all(|squares| squares.iter().all(|squares| squares.is_finite()));
        if self.is_scaled && !is_finite {
            return None;
        }
        let of = |(partition, squares): (u32, Measured)| {
            parameters(&self.layout, PartitionId(partition)).zip(squares.to_vec()).collect::<Vec<_>>()
        };
        let mut squares: Vec<_> = (0..).zip(measured).flat_map(of).collect();
        squares.sort_unstable_by_key(|(id, _)| *id);
        Some(updates.with_norms(&self.layout, &squares, self.members()))
    }

    /// Applies a step of `microbatches`: weights of one version and what the step says in, weights
    /// of the next version out.
    pub(super) fn advance(
        &self,
        updates: ChunkUpdates,
        microbatches: u32,
        weights: &Weights,
        totals: Totals,
    ) -> Weights {
        if self.is_on_device() {
            let steps = updates.into_iter().map(|update| Advance { update, microbatches, pool: &self.pool });
            let next = advance_all(&mut self.slots(), steps, weights, &totals);
            return next.into_iter().map(Arc::new).collect();
        }
        let mut next: Vec<Option<Arc<Buffer>>> = weights.iter().map(|_| None).collect();
        let mut slots = self.slots();
        let chunks = slots.iter_mut().zip(weights.iter()).zip(totals).zip(&mut next).zip(updates);
        // Each chunk's memory is taken when it is needed, and that of its sum is free again before
        // the next chunk needs some.
        parallel::for_each(self.threads, chunks, |((((slots, weights), total), next), update)| {
            let advance = Advance { update, microbatches, pool: &self.pool };
            let mut buffer = self.pool.take(Use::Weights, weights.dtype(), weights.len());
            slots.advance(&advance, weights, total, &mut buffer);
            *next = Some(Arc::new(buffer));
        });
        next.into_iter().map(|next| next.expect("every chunk was worked on")).collect()
    }

    /// Returns a version with its values on the host. Those that lie on a device are copied.
    ///
    /// # Errors
    /// The device failed.
    pub(super) fn on_host(weights: &Weights) -> Result<Weights, kernels::Error> {
        Buffer::on_host_all(weights).map(Weights::from)
    }

    /// Returns weights of the next version that are equal to those of one version: the step has no
    /// records. Slots stay as they are.
    pub(super) fn unchanged(&self, weights: &Weights) -> Weights {
        let copy = |weights: &Arc<Buffer>| {
            let mut next = self.pool.take(Use::Weights, weights.dtype(), weights.len());
            next.write(Operand::Stored(weights));
            Arc::new(next)
        };
        weights.iter().map(copy).collect()
    }

    /// Returns weights of the next version after a step that overflowed: equal to those of one
    /// version, but for the loss scale and what a loop wrote. Slots stay as they are.
    pub(super) fn overflowed(&self, weights: &Weights, totals: Totals) -> Weights {
        let chunks = self.members().iter().zip(weights.iter()).zip(totals);
        let next = chunks.map(|((&id, weights), total)| {
            let mut next = self.pool.take(Use::Weights, weights.dtype(), weights.len());
            chunk::overflowed(self.layout.tensor_of(id).role, weights, total, &mut next, &self.pool);
            Arc::new(next)
        });
        next.collect()
    }

    /// References of these versions (oldest first, the last is the one that is saved) and of the
    /// slots. Only between two updates.
    pub(super) fn cut(&self, weights: &[(Version, Weights)], applied: AppliedSteps) -> Cut {
        let slot_names = self.optimizers.slot_names();
        Cut::new(&self.layout, self.partition, weights, &self.slots(), slot_names, applied)
    }

    /// Returns a function that allocates the memory of one version and of the next slots, unless
    /// the partition `ended`.
    pub(super) fn reservation(&self, ended: CancellationToken) -> impl FnOnce() + Send + use<> {
        let chunk = |&id| {
            let (dtype, len) = (self.layout.tensor_of(id).dtype(), self.layout.chunk(id).len);
            (dtype, len, self.slot_names(id).len())
        };
        let (pool, chunks): (_, Vec<(DType, usize, usize)>) =
            (self.pool.clone(), self.members().iter().map(chunk).collect());
        move || {
            for (dtype, len, slots) in chunks {
                if ended.is_cancelled() {
                    return;
                }
                pool.reserve(Use::Weights, dtype, len);
                (0..slots).for_each(|_| pool.reserve(Use::Slot, dtype, len));
            }
        }
    }

    /// Buffers that were allocated because none was free.
    #[cfg(test)]
    pub(super) fn allocated(&self) -> usize {
        self.pool.allocated()
    }

    fn slots(&self) -> MutexGuard<'_, Vec<Slots>> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// How often the values of a partition are there at once.
#[derive(Clone, Copy, Debug)]
pub(super) struct Kept {
    /// Versions of the weights, and further ones that a checkpoint holds.
    pub(super) versions: usize,
    /// Copies of the slots: one, and one that a checkpoint holds.
    pub(super) slots: usize,
}

impl Kept {
    /// Returns element types, lengths and numbers of the buffers of a partition.
    fn buffers(self, layout: &Layout, partition: PartitionId, slots: usize) -> Vec<(DType, usize, usize)> {
        let of = |&id: &ChunkId| {
            let (tensor, len) = (layout.tensor_of(id), layout.chunk(id).len);
            let slots = if tensor.role == TensorRole::Parameter { slots } else { 0 };
            (tensor.dtype(), len, self.versions + self.slots * slots)
        };
        layout.members(partition).iter().map(of).collect()
    }
}

/// Returns the chunks of a partition that have norms.
fn parameters(layout: &Layout, partition: PartitionId) -> impl Iterator<Item = ChunkId> {
    let members = layout.members(partition).iter().copied();
    members.filter(|&id| layout.tensor_of(id).role == TensorRole::Parameter)
}

/// Returns where chunks of these sizes begin in a region of so many bytes, one after the other.
/// `None`: they find no room, or one of them is empty, which lies nowhere.
fn begins(sizes: impl Iterator<Item = usize>, bytes: usize) -> Option<Vec<usize>> {
    let mut end: usize = 0;
    let begin = |size: usize| {
        let begin = end.next_multiple_of(PART_ALIGNMENT);
        end = begin + size;
        (size > 0 && end <= bytes).then_some(begin)
    };
    sizes.map(begin).collect()
}

/// Shows whether anybody still holds a version.
#[derive(Debug)]
pub(super) struct Held(Weak<Buffer>);

impl Held {
    /// Watches a version. `None`: the partition has no chunks, so nothing can be held.
    pub(super) fn of(weights: &Weights) -> Option<Self> {
        weights.first().map(|first| Self(first.held_by_readers()))
    }

    /// Returns whether anybody holds it.
    pub(super) fn is_held(&self) -> bool {
        self.0.strong_count() > 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_lie_one_after_the_other_in_a_region_that_has_room() {
        let found = |sizes: &[usize], bytes| begins(sizes.iter().copied(), bytes);
        assert_eq!(found(&[260, 8, 256], 1024), Some(vec![0, 512, 768]));
        assert_eq!(found(&[260, 8], 520), Some(vec![0, 512]), "the last one ends with the region");
        assert_eq!(found(&[260, 8], 519), None);
        assert_eq!(found(&[260, 0, 8], 1024), None, "an empty chunk");
        assert_eq!(found(&[], 256), Some(vec![]));
    }
}
