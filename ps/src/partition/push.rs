//! How pushes come in: checked before memory is reserved, added up as they come, each node taken up once.

use std::sync::{Arc, PoisonError};

use net::timeline::Mark;
use proto::ids::{Era, Version};
use proto::parameters::{Outcome, Pushed, Target};
use proto::spec::{Consistency, Order};
use proto::tensor::Chunk;
use proto::tree::{Node, StepNode};
use proto::wire::WireType;

use super::{BreaksByPanic, Partition, State, Sums, Weights};
use crate::aggregator::Offer;
use crate::checks;
use crate::chunk::{Merge, Slots, Sum, Total};
use crate::error::{Error, Result};
use crate::parallel;
use crate::pool::Use;

/// The chunks of a push that have come.
#[derive(Debug)]
pub(crate) struct Arrived {
    target: Target,
    /// As which values of parameters come.
    wire: WireType,
    /// What they are added to as they come, and the node that the sums belong to.
    pub(super) sibling: Option<(StepNode, Sums)>,
    sums: Sums,
    /// The push's span.
    mark: Option<Mark>,
}

impl Arrived {
    /// Whether its chunks are widened, or added to others, as they come.
    pub(crate) const fn is_worked_on(&self) -> bool {
        self.sibling.is_some() || self.wire.rounds()
    }

    /// All chunks of a push at once.
    pub(crate) fn at_once(target: Target, chunks: Vec<Chunk>) -> Self {
        let sums = chunks.into_iter().map(|chunk| Sum::Received(chunk.values)).collect();
        Self { target, wire: WireType::F32, sibling: None, sums, mark: Mark::current() }
    }
}

impl Partition {
    /// Checks everything about a push but its values. Nothing is changed.
    pub(crate) fn check(&self, era: Era, target: Target, wire: WireType) -> Result<()> {
        proto::convert::check_push_wire(target, wire, self.wire)?;
        if let Target::Node { node, samples } = target {
            proto::convert::check_node(&self.opening.plan, node, samples)?;
        }
        let state = self.state();
        self.check_era(&state, era)?;
        self.check_progress(&state, target)
    }

    /// Takes up a push whose header and chunks were checked.
    pub(crate) fn push(self: &Arc<Self>, era: Era, arrived: Arrived) -> Result<Pushed> {
        let _breaks = BreaksByPanic(self);
        match arrived.target {
            Target::Initial => self.push_initial(era, &arrived.sums),
            Target::Node { node, .. } => {
                let node = arrived.sibling.map_or(node, |(parent, _)| parent);
                self.push_node(era, node, arrived.sums, arrived.mark)
            }
        }
    }

    /// For the chunks of a push: they are added to the sibling's as they come, when it is here.
    pub(crate) fn arriving(&self, target: Target, wire: WireType) -> Arrived {
        let sibling = match target {
            Target::Initial => None,
            Target::Node { node, .. } => {
                let state = self.state();
                state.aggregator.sibling(node).map(|(parent, sums)| (parent, sums.clone()))
            }
        };
        Arrived { target, wire, sibling, sums: Vec::new(), mark: Mark::current() }
    }

    /// Takes the next chunk of a push, which was checked.
    pub(crate) fn arrive(&self, arrived: &mut Arrived, chunk: Chunk) {
        let index = arrived.sums.len();
        let wire = arrived.wire.of(chunk.role);
        let mut sum = match wire.rounds() {
            true => Sum::widened(&chunk.values, wire, &self.pool),
            false => Sum::Received(chunk.values),
        };
        if let Some((parent, sibling)) = &arrived.sibling {
            let merge = match parent.node == Node::root(parent.of) {
                true => Merge::root(chunk.role.dtype()),
                false => Merge::of(chunk.role, self.wire),
            };
            sum.merge(sibling[index].clone(), merge, &self.pool);
        }
        arrived.sums.push(sum);
    }

    /// Whether a step may be worked on now: the bound of the steps in progress.
    fn check_progress(&self, state: &State, target: Target) -> Result<()> {
        let Target::Node { node: StepNode { step, .. }, .. } = target else { return Ok(()) };
        let (place, steps_max) = (self.place, self.steps_in_progress_max);
        let Some(version) = state.version() else { return Err(Error::NoWeights { place, step }) };
        match self.consistency {
            // It was computed from version step - delay or a later one, which the sender pulled here.
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

    fn push_initial(&self, era: Era, values: &[Sum]) -> Result<Pushed> {
        if let Some(repeated) = self.initial_repeated(era, &mut self.state())? {
            return Ok(repeated);
        }
        let members = || self.layout.members(self.opening.address.partition).iter();
        let weights: Weights = members()
            .zip(values)
            .map(|(&id, values)| {
                let (dtype, len) = (self.layout.tensor_of(id).dtype(), self.layout.chunk(id).len);
                let mut buffer = self.pool.take(Use::Weights, dtype, len);
                buffer.bytes_mut().copy_from_slice(values.bytes());
                Arc::new(buffer)
            })
            .collect();
        let slots = members()
            .map(|&id| {
                let (role, len) = (self.layout.tensor_of(id).role, self.layout.chunk(id).len);
                Slots::new(role, len, &self.optimizer, &self.pool)
            })
            .collect();
        let mut state = self.state();
        // Another one may have been faster. It brought the same values.
        if let Some(repeated) = self.initial_repeated(era, &mut state)? {
            return Ok(repeated);
        }
        *self.slots.lock().unwrap_or_else(PoisonError::into_inner) = slots;
        drop(state.versions.insert(Version(0), weights));
        drop(state);
        self.changed.notify_waiters();
        Ok(Pushed { outcome: Outcome::Completed, version: Version(0) })
    }

    fn initial_repeated(&self, era: Era, state: &mut State) -> Result<Option<Pushed>> {
        self.check_era(state, era)?;
        // A partition that loads a checkpoint gets its weights from there, and has no use for version 0.
        let restored = self.opening.restore.as_ref().map(|restore| restore.version);
        let Some(version) = state.version().or(restored) else { return Ok(None) };
        state.ledger.drop_duplicate();
        Ok(Some(Pushed { outcome: Outcome::Duplicate, version }))
    }

    fn push_node(
        self: &Arc<Self>,
        era: Era,
        node: StepNode,
        sums: Sums,
        mark: Option<Mark>,
    ) -> Result<Pushed> {
        let mut offer = {
            let mut state = self.state();
            self.check_era(&state, era)?;
            let delay = self.consistency.delay;
            checks::taken_up(self.opening.address, era, node.step, &state.ledger, delay);
            if state.ledger.is_applied(node.step) {
                Offer::Duplicate(sums)
            } else {
                let offer = state.aggregator.offer(node, sums);
                if let (Some(mark), false) = (mark, matches!(offer, Offer::Duplicate(_))) {
                    state.marks.entry(node.step).or_default().push(mark);
                }
                offer
            }
        };
        let outcome = loop {
            match offer {
                Offer::Duplicate(_) => {
                    self.state().ledger.drop_duplicate();
                    break Outcome::Duplicate;
                }
                Offer::Held | Offer::Superseded(_) => break Outcome::Merged,
                // The update adds them up, so nobody does before.
                Offer::Merge { parent, left, right } if parent.node == Node::new(0, parent.of) => {
                    let mut state = self.state();
                    self.check_era(&state, era)?;
                    let whole = state.aggregator.merged(parent, Sums::new());
                    drop(state);
                    if !matches!(whole, Offer::Complete(_)) {
                        break Outcome::Merged;
                    }
                    let halves = left.into_iter().zip(right).map(|(left, right)| Total::Halves(left, right));
                    self.complete(node.step, halves.collect());
                    break Outcome::Completed;
                }
                Offer::Merge { parent, left, right } => {
                    let sums = self.merge(left, right);
                    let mut state = self.state();
                    self.check_era(&state, era)?;
                    offer = state.aggregator.merged(parent, sums);
                }
                Offer::Complete(sums) => {
                    self.complete(node.step, sums.into_iter().map(Total::Sum).collect());
                    break Outcome::Completed;
                }
            }
        };
        let mut state = self.state();
        self.count_held(&mut state);
        Ok(Pushed { outcome, version: state.ledger.version() })
    }

    fn merge(&self, mut left: Sums, right: Sums) -> Sums {
        let members = self.layout.members(self.opening.address.partition).iter();
        let chunks = members.zip(left.iter_mut().zip(right));
        parallel::for_each(self.threads, chunks, |(&id, (left, right))| {
            left.merge(right, Merge::of(self.layout.tensor_of(id).role, self.wire), &self.pool);
        });
        left
    }
}
