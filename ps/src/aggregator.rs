//! Which nodes of each step's reduction tree are here, and what a new one makes possible.
//!
//! Pure: it decides and moves values of any type `T`; the additions are done by the caller, outside
//! any lock. A merge therefore has a beginning ([`Offer::Merge`]) and an end
//! ([`Aggregator::merged`]), and other nodes may come in between.
//!
//! Always true here:
//!
//! - The nodes of a step are disjoint. Each either holds its values or is *busy*: somebody is
//!   adding them up.
//! - A node counts as covered from the moment it is offered, so a repeat is a duplicate even while
//!   its sum is being made.
//! - No two siblings both hold values: they would have become a merge. So a step holds about as
//!   many nodes as leases are outstanding, not as many as it has microbatches.
//! - A step completes once.
//!
//! An example with M = 4: offering 0 is held. Offering 1 gives the merge 0 + 1 -> [0, 2). Offering
//! [2, 4) meanwhile is held. When the merge is done, [0, 2) and [2, 4) give the merge that
//! completes the step.

use std::collections::BTreeMap;

use proto::ids::Step;
use proto::tree::{Node, StepNode};

/// The steps in progress: their nodes with values of type `T`.
#[derive(Debug)]
pub struct Aggregator<T> {
    /// Nodes by their first microbatch, and the values unless they are busy.
    steps: BTreeMap<Step, BTreeMap<u32, (Node, Option<T>)>>,
}

/// What to do with values that were offered, or that a merge has made.
#[derive(Debug, PartialEq, Eq)]
pub enum Offer<T> {
    /// Everything below the node was here already: drop them.
    Duplicate(T),
    /// A larger node came while they were being made: drop them.
    Superseded(T),
    /// The values are kept until the sibling comes.
    Held,
    /// Add `right` to `left`, then report the result with [`Aggregator::merged`] as the values of
    /// `parent`.
    Merge {
        /// The node that the sum belongs to.
        parent: StepNode,
        /// Values of its left half.
        left: T,
        /// Values of its right half.
        right: T,
    },
    /// The sum of the whole step. From now on everything of this step is a duplicate.
    Complete(T),
}

impl<T> Default for Aggregator<T> {
    fn default() -> Self {
        Self { steps: BTreeMap::new() }
    }
}

impl<T> Aggregator<T> {
    /// Takes up the values of a node.
    ///
    /// # Panics
    /// If there is no such node in the tree; the caller has checked it against the job's plan.
    pub fn offer(&mut self, at: StepNode, values: T) -> Offer<T> {
        assert!(at.node.is_in(at.of), "{} is no node of the tree over {}", at.node, at.of);
        let nodes = self.steps.entry(at.step).or_default();
        if covers(nodes, at.node) {
            return Offer::Duplicate(values);
        }
        // Nodes nest or are disjoint: whatever begins inside lies inside. The larger node brings
        // the same bits.
        nodes.retain(|_, (held, _)| !at.node.covers(*held));
        settle(nodes, at, values)
    }

    /// Returns what a node would be merged with if it came now: the values of its sibling, and the
    /// node that the sum belongs to. Whoever adds them up by himself offers the sum as values of
    /// that node, whatever came in between.
    pub fn sibling(&self, at: StepNode) -> Option<(StepNode, &T)> {
        let nodes = self.steps.get(&at.step)?;
        let (parent, sibling) = at.node.parent_and_sibling(at.of)?;
        let (held, values) = nodes.get(&sibling.begin)?;
        let values = values.as_ref().filter(|_| *held == sibling && !covers(nodes, at.node))?;
        Some((StepNode { node: parent, ..at }, values))
    }

    /// Takes up the sum that an [`Offer::Merge`] asked for.
    pub fn merged(&mut self, at: StepNode, values: T) -> Offer<T> {
        match self.steps.get_mut(&at.step) {
            Some(nodes) if nodes.get(&at.node.begin).is_some_and(|(busy, _)| *busy == at.node) => {
                settle(nodes, at, values)
            }
            _ => Offer::Superseded(values),
        }
    }

    /// Forgets a step: the ledger knows that it is applied, or nobody will complete it.
    pub fn forget(&mut self, step: Step) {
        self.steps.remove(&step);
    }

    /// Returns the number of steps with at least one node.
    pub fn steps(&self) -> usize {
        self.steps.len()
    }

    /// Returns whether a step has at least one node.
    pub fn has(&self, step: Step) -> bool {
        self.steps.contains_key(&step)
    }

    /// Returns how many nodes hold values, over all steps.
    pub fn values(&self) -> usize {
        let held =
            |nodes: &BTreeMap<u32, (Node, Option<T>)>| nodes.values().filter(|node| node.1.is_some()).count();
        self.steps.values().map(held).sum()
    }

    /// Returns the first microbatch of a step that is not here, counted from the left without a
    /// gap.
    pub fn first_missing(&self, step: Step) -> u32 {
        let nodes = self.steps.get(&step).into_iter().flat_map(BTreeMap::values);
        nodes.fold(0, |next, (node, _)| if node.begin == next { node.end } else { next })
    }

    /// Returns the nodes of a step that hold values, in order.
    pub fn held(&self, step: Step) -> impl Iterator<Item = Node> {
        let nodes = self.steps.get(&step).into_iter().flat_map(BTreeMap::values);
        nodes.filter(|(_, values)| values.is_some()).map(|(node, _)| *node)
    }
}

fn covers<T>(nodes: &BTreeMap<u32, (Node, Option<T>)>, node: Node) -> bool {
    nodes.range(..=node.begin).next_back().is_some_and(|(_, (held, _))| held.covers(node))
}

/// Takes the values of a node: they complete the step, merge with the sibling, or wait for it.
fn settle<T>(nodes: &mut BTreeMap<u32, (Node, Option<T>)>, at: StepNode, values: T) -> Offer<T> {
    let Some((parent, sibling)) = at.node.parent_and_sibling(at.of) else {
        nodes.insert(at.node.begin, (at.node, None));
        return Offer::Complete(values);
    };
    let waiting = nodes.get_mut(&sibling.begin).filter(|(held, _)| *held == sibling);
    let Some(others) = waiting.and_then(|(_, values)| values.take()) else {
        nodes.insert(at.node.begin, (at.node, Some(values)));
        return Offer::Held;
    };
    nodes.remove(&sibling.begin);
    nodes.remove(&at.node.begin);
    nodes.insert(parent.begin, (parent, None));
    let (left, right) = if at.node.begin < sibling.begin { (values, others) } else { (others, values) };
    Offer::Merge { parent: StepNode { node: parent, ..at }, left, right }
}

#[cfg(test)]
mod tests;
