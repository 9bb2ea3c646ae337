//! How gradients come in: [`Partition::receive`] checks the header of a push and reserves memory
//! for its values, [`Arriving`] takes chunks up one after the other, and the sum of the whole node
//! is offered to the aggregator once.
//!
//! Always true here: everything about a push is checked before its first value counts, so a refused
//! push leaves all state as it was.

use std::sync::Arc;
use std::sync::mpsc;

use bytes::Bytes;
use kernels::Storage;
use net::timeline::Mark;
use proto::convert::ChunkCheck;
use proto::ids::{ChunkId, Era, Step, Version};
use proto::parameters::{Outcome, Pushed, Target};
use proto::spec::{Consistency, Order};
use proto::tensor;
use proto::tree::{Node, StepNode};
use proto::wire::WireType;
use tokio::task::JoinHandle;

use super::dense::{Summed, Sums};
use super::{BreaksByPanic, Partition, State};
use crate::admission::Reserved;
use crate::aggregator::Offer;
use crate::checks;
use crate::chunk::{Sum, Total};
use crate::device::Lent;
use crate::error::{Error, Result};
use crate::opening::Opening;

/// What the header of a push says.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Header {
    /// Era of the sender.
    pub(crate) era: Era,
    /// What the push brings.
    pub(crate) target: Target,
    /// The type in which the values of parameters come.
    pub(crate) wire: WireType,
    /// What brings them.
    pub(crate) carrier: Carrier,
    /// The sender's span.
    pub(crate) mark: Option<Mark>,
}

/// What brings the values of a push.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Carrier {
    /// A connection, one chunk after the other: each is worked on while the next is read.
    Socket,
    /// The memory of this process or of another one on this host, in f32: nothing has to be waited
    /// for. They are added up by all threads at once when all are here.
    Memory,
    /// Memory of the device of this ps that a worker has exported, in f32. Each chunk is read there
    /// as it comes, so that the worker gets its memory back before the push counts.
    Device,
}

/// The values of one chunk of a push.
#[derive(Debug)]
pub(crate) enum Payload {
    /// Values in memory of the host, as they were received.
    Host(Bytes),
    /// Values in memory that a worker has exported.
    Exported(Lent),
    /// Floats of a worker of this process in memory of a device.
    Device(Storage),
}

impl Payload {
    /// Returns the number of bytes.
    const fn len(&self) -> usize {
        match self {
            Self::Host(values) => values.len(),
            Self::Exported(lent) => lent.len(),
            Self::Device(values) => values.size(),
        }
    }
}

impl From<Bytes> for Payload {
    fn from(values: Bytes) -> Self {
        Self::Host(values)
    }
}

impl From<tensor::ChunkValues> for Payload {
    /// Takes values of a worker of this process. Those on a device stay there as long as these do.
    ///
    /// # Panics
    /// If they lie on a device that is not one of the kernels.
    fn from(values: tensor::ChunkValues) -> Self {
        match values {
            tensor::ChunkValues::Host(values) => Self::Host(values),
            tensor::ChunkValues::Device { memory, bytes } => {
                let storage = kernels::values::storage(memory.as_ref());
                let part = storage.and_then(|storage| storage.part_of(bytes, Arc::new(memory.clone())));
                Self::Device(part.expect("storage of a device"))
            }
        }
    }
}

impl From<Lent> for Payload {
    fn from(values: Lent) -> Self {
        Self::Exported(values)
    }
}

/// A push on its way in: its header was checked, and memory for its values is reserved. Dropping it
/// leaves all state as it was.
#[derive(Debug)]
pub(crate) struct Arriving<'a> {
    partition: &'a Arc<Partition>,
    header: Header,
    check: ChunkCheck<'a>,
    chunks: Chunks,
    reserved: Reserved,
}

/// Where the chunks of a push go as they come.
#[derive(Debug)]
enum Chunks {
    /// The chunks are kept as they are, or added up on the spot.
    Here(Arrived),
    /// Another thread widens and adds up the chunks, so that the socket is read meanwhile.
    Elsewhere {
        /// The channel to that thread.
        values: mpsc::Sender<(usize, Payload)>,
        /// Ends when there are no more.
        adding: JoinHandle<Arrived>,
    },
}

impl Chunks {
    /// Returns the chunks when they have been worked on.
    async fn all(self) -> Result<Arrived> {
        match self {
            Self::Here(arrived) => Ok(arrived),
            Self::Elsewhere { values, adding } => {
                drop(values);
                Ok(adding.await?)
            }
        }
    }
}

/// The chunks of a push that have come.
#[derive(Debug)]
pub(super) struct Arrived {
    target: Target,
    /// The type in which values of parameters come.
    wire: WireType,
    /// What they are added to as they come, and the node that the sums belong to.
    pub(super) sibling: Option<(StepNode, Sums)>,
    /// The chunks in the order in which they came, each with its place in the partition.
    sums: Vec<(usize, Sum)>,
    /// Records of the node, and of the sibling if there is one.
    samples: u64,
    /// The sender's span.
    mark: Option<Mark>,
}

impl Arrived {
    /// Returns whether its chunks are widened, or added to others, as they come.
    const fn is_worked_on(&self) -> bool {
        self.sibling.is_some() || self.wire.rounds()
    }

    /// Returns the sums in the order of the partition, once all of them have come.
    fn in_order(mut sums: Vec<(usize, Sum)>) -> Sums {
        // Most pushes come in order, which costs one pass.
        sums.sort_by_key(|(place, _)| *place);
        sums.into_iter().map(|(_, sum)| sum).collect()
    }
}

impl Partition {
    /// Begins a push: checks its header and reserves memory for its values. Returns at once. The
    /// push counts from [`Arriving::finish`] on.
    ///
    /// # Panics
    /// Outside a runtime, when the values are to be worked on by another thread.
    ///
    /// # Errors
    /// Whatever is wrong with the header, or no memory for the values now. Nothing has changed
    /// then.
    pub(crate) fn receive(self: &Arc<Self>, header: Header) -> Result<Arriving<'_>> {
        let Header { era, target, wire, carrier, mark } = header;
        self.check(era, target, wire)?;
        let reserved = self.admission.reserve(self.place, self.bytes(), || self.is_needed_first(target))?;
        let mut arrived = Arrived { mark, ..self.arriving(target, wire, carrier) };
        let chunks = if (arrived.is_worked_on() || self.dense.is_on_device()) && !self.is_inline() {
            let (partition, (values, received)) = (self.clone(), mpsc::channel());
            let adding = tokio::task::spawn_blocking(move || {
                received
                    .into_iter()
                    .for_each(|(place, values)| partition.arrive(&mut arrived, place, values));
                arrived
            });
            Chunks::Elsewhere { values, adding }
        } else {
            Chunks::Here(arrived)
        };
        Ok(Arriving { partition: self, header, check: self.dense.check_push(), chunks, reserved })
    }

    /// Checks everything about a push but its values. Nothing is changed.
    pub(super) fn check(&self, era: Era, target: Target, wire: WireType) -> Result<()> {
        proto::convert::check_push_wire(target, wire, self.wire())?;
        if let Target::Node { node, samples } = target {
            let Opening { plan, spec, .. } = &self.opening;
            proto::convert::check_node(plan, node, samples, spec.data.may_skip())?;
        }
        let state = self.state();
        self.check_era(&state, era)?;
        self.check_progress(&state, target)
    }

    /// Checks whether a step may be worked on now: the bound of the steps in progress.
    fn check_progress(&self, state: &State, target: Target) -> Result<()> {
        let Target::Node { node: StepNode { step, .. }, .. } = target else { return Ok(()) };
        let (place, steps_max) = (self.place, self.steps_in_progress_max);
        let Some(version) = state.version() else { return Err(Error::NoWeights { place, step }) };
        match self.consistency {
            // It was computed from version step - delay or a later one, which the sender pulled
            // here.
            Consistency { order: Order::Canonical, delay } => {
                let ahead = step.get() > version.get() + u64::from(delay.unwrap_or(0));
                if ahead { Err(Error::StepAhead { place, step, version }) } else { Ok(()) }
            }
            Consistency { order: Order::Arrival, .. } => {
                let room = state.aggregator.steps() < steps_max
                    || state.aggregator.has(step)
                    || state.ledger.is_applied(step);
                if room { Ok(()) } else { Err(Error::StepsFull { place, step, steps_max }) }
            }
        }
    }

    /// Returns whether a push brings what its oldest step lacks first: it is taken also when there
    /// is much that waits, which ends that way. So is what is here already, which leaves nothing in
    /// memory and lets its sender go on to what is lacking.
    fn is_needed_first(&self, target: Target) -> bool {
        let Target::Node { node, .. } = target else { return true };
        let state = self.state();
        let oldest = state.ledger.watermark();
        node.step < oldest
            || (node.step == oldest && node.node.begin <= state.aggregator.first_missing(oldest))
    }

    /// Creates the receiver of a push's chunks. Each chunk from a socket or a device is added to
    /// the sibling's on arrival, if the sibling is here.
    pub(super) fn arriving(&self, target: Target, wire: WireType, carrier: Carrier) -> Arrived {
        let (sibling, samples) = match (target, carrier) {
            (Target::Initial, _) => (None, 0),
            (Target::Node { samples, .. }, Carrier::Memory) => (None, samples),
            (Target::Node { node, samples }, Carrier::Socket | Carrier::Device) => {
                let state = self.state();
                match state.aggregator.sibling(node) {
                    Some((parent, sibling)) => {
                        (Some((parent, sibling.sums.clone())), samples + sibling.samples)
                    }
                    None => (None, samples),
                }
            }
        };
        let sums = Vec::with_capacity(self.dense.members().len());
        Arrived { target, wire, sibling, sums, samples, mark: None }
    }

    /// Takes the values of the chunk at a place of the partition, which were checked.
    pub(super) fn arrive(&self, arrived: &mut Arrived, place: usize, values: Payload) {
        let sum = self.dense.arrived(place, values, arrived.wire, arrived.sibling.as_ref());
        arrived.sums.push((place, sum));
    }

    /// Takes up a push whose header and chunks were checked.
    pub(super) fn push(self: &Arc<Self>, era: Era, arrived: Arrived) -> Result<Pushed> {
        let _breaks = BreaksByPanic(self);
        let sums = Arrived::in_order(arrived.sums);
        match arrived.target {
            Target::Initial => self.push_initial(era, &sums),
            Target::Node { node, .. } => {
                let node = arrived.sibling.map_or(node, |(parent, _)| parent);
                let summed = Summed { samples: arrived.samples, sums };
                self.push_node(era, node, summed, arrived.mark)
            }
        }
    }

    fn push_initial(&self, era: Era, values: &[Sum]) -> Result<Pushed> {
        if let Some(repeated) = self.initial_repeated(era, &mut self.state())? {
            return Ok(repeated);
        }
        let (weights, slots) = self.dense.initial(values);
        self.settle()?;
        let mut state = self.state();
        // Another one may have been faster. It brought the same values.
        if let Some(repeated) = self.initial_repeated(era, &mut state)? {
            return Ok(repeated);
        }
        self.dense.replace_slots(slots);
        drop(state.versions.insert(Version(0), weights));
        drop(state);
        self.changed.notify_waiters();
        Ok(Pushed { outcome: Outcome::Completed, version: Version(0) })
    }

    fn initial_repeated(&self, era: Era, state: &mut State) -> Result<Option<Pushed>> {
        self.check_era(state, era)?;
        // A partition that loads a checkpoint gets its weights from there, and has no use for
        // version 0.
        let restored = self.opening.restore.as_ref().map(|restore| restore.version);
        let Some(version) = state.version().or(restored) else { return Ok(None) };
        state.ledger.drop_duplicate();
        Ok(Some(Pushed { outcome: Outcome::Duplicate, version }))
    }

    fn push_node(
        self: &Arc<Self>,
        era: Era,
        node: StepNode,
        summed: Summed,
        mark: Option<Mark>,
    ) -> Result<Pushed> {
        let offer = self.offer(era, node, summed, mark)?;
        let outcome = self.climb(era, node.step, offer)?;
        let mut state = self.state();
        self.count_held(&mut state);
        Ok(Pushed { outcome, version: state.ledger.version() })
    }

    /// Offers a node to the aggregator, which says what it makes possible.
    fn offer(&self, era: Era, node: StepNode, summed: Summed, mark: Option<Mark>) -> Result<Offer<Summed>> {
        let mut state = self.state();
        self.check_era(&state, era)?;
        checks::taken_up(self.opening.address, era, node.step, &state.ledger, self.consistency.delay);
        if state.ledger.is_applied(node.step) {
            return Ok(Offer::Duplicate(summed));
        }
        let offer = state.aggregator.offer(node, summed);
        if let (Some(mark), false) = (mark, matches!(offer, Offer::Duplicate(_))) {
            state.marks.entry(node.step).or_default().push(mark);
        }
        Ok(offer)
    }

    /// Climbs the tree of a step from an offer, for as long as the node's sibling is here: each
    /// merge is an offer again.
    fn climb(self: &Arc<Self>, era: Era, step: Step, offer: Offer<Summed>) -> Result<Outcome> {
        match offer {
            Offer::Duplicate(_) => {
                self.state().ledger.drop_duplicate();
                Ok(Outcome::Duplicate)
            }
            Offer::Held | Offer::Superseded(_) => Ok(Outcome::Merged),
            Offer::Merge { parent, left, right } if parent.node == Node::root(parent.of) => {
                self.complete_from_halves(era, parent, left, right)
            }
            Offer::Merge { parent, left, right } => {
                let offer = self.merge(era, parent, left, right)?;
                self.climb(era, step, offer)
            }
            Offer::Complete(Summed { samples, sums }) => {
                self.complete(step, samples, sums.into_iter().map(Total::Sum).collect());
                Ok(Outcome::Completed)
            }
        }
    }

    /// Adds two siblings up, and offers the sum as their parent.
    fn merge(&self, era: Era, parent: StepNode, left: Summed, right: Summed) -> Result<Offer<Summed>> {
        let samples = left.samples + right.samples;
        let sums = self.dense.merge(left.sums, right.sums);
        let mut state = self.state();
        self.check_era(&state, era)?;
        Ok(state.aggregator.merged(parent, Summed { samples, sums }))
    }

    /// Completes the step of `root` from the two halves of its tree, which are not added up here:
    /// the update does that in its own pass.
    fn complete_from_halves(
        self: &Arc<Self>,
        era: Era,
        root: StepNode,
        left: Summed,
        right: Summed,
    ) -> Result<Outcome> {
        let samples = left.samples + right.samples;
        let mut state = self.state();
        self.check_era(&state, era)?;
        let whole = state.aggregator.merged(root, Summed { samples, sums: Sums::new() });
        drop(state);
        if !matches!(whole, Offer::Complete(_)) {
            return Ok(Outcome::Merged);
        }
        let halves = left.sums.into_iter().zip(right.sums);
        let halves = halves.map(|(left, right)| Total::Halves(left, right));
        self.complete(root.step, samples, halves.collect());
        Ok(Outcome::Completed)
    }
}

impl Arriving<'_> {
    /// Checks a chunk of the push and takes its values, which are not copied: the partition holds
    /// them until the step is applied or they are added to others. Chunks come in any order.
    /// Returns at once; another thread may still be working on them.
    ///
    /// # Errors
    /// The chunk does not belong here, came before, or has the wrong size. The push cannot go on
    /// then.
    pub(crate) fn take(&mut self, id: ChunkId, values: impl Into<Payload>) -> Result<()> {
        let values = values.into();
        let place = self.check.check(id, self.header.wire, values.len())?;
        match &mut self.chunks {
            Chunks::Here(arrived) => self.partition.arrive(arrived, place, values),
            // A thread that is gone has panicked, which is told in the end.
            Chunks::Elsewhere { values: to, .. } => drop(to.send((place, values))),
        }
        Ok(())
    }

    /// Returns whether all chunks of the push have been taken.
    pub(crate) fn is_whole(&self) -> bool {
        self.check.is_whole()
    }

    /// Waits until the device has read all values that were taken. Nothing reads the worker's
    /// memory any more then.
    ///
    /// # Errors
    /// Work on the values panicked, or the device failed.
    pub(crate) async fn read(self) -> Result<Self> {
        let Self { partition, header, check, chunks, reserved } = self;
        let arrived = chunks.all().await?;
        let settling = partition.clone();
        if partition.is_inline() {
            settling.settle()?;
        } else {
            tokio::task::spawn_blocking(move || settling.settle()).await??;
        }
        Ok(Self { partition, header, check, chunks: Chunks::Here(arrived), reserved })
    }

    /// Takes up the push once all its chunks have come. Returns when its node is merged or, if it
    /// completes a step that is the next to be applied, when the new version is there (for a step
    /// that needs norms of other partitions: before it is there). A caller may drop the future: the
    /// push then either counts whole or not at all, and may be sent again.
    ///
    /// # Errors
    /// Chunks are missing, the partition was closed or rewound meanwhile, or work on it panicked.
    #[tracing::instrument(
        level = "debug", name = "push", skip_all, fields(place = %self.partition.place, target = ?self.header.target)
    )]
    pub(crate) async fn finish(self) -> Result<Pushed> {
        let Self { partition, header: Header { era, wire, .. }, check, chunks, reserved } = self;
        check.finish()?;
        let arrived = chunks.all().await?;
        let (partition, inline) = (partition.clone(), partition.is_inline());
        let take_up = move || {
            let pushed = partition.push(era, arrived);
            partition.metrics.push_bytes.add(partition.bytes_in(wire) as u64);
            drop(reserved);
            pushed
        };
        if inline { take_up() } else { tokio::task::spawn_blocking(take_up).await? }
    }
}
