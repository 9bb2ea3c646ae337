//! The numbering of a job's work: the records of each microbatch, and the microbatches of each
//! step.
//!
//! A job is a numbered sequence of microbatches. Tasks, leases, the ledger, evaluation and recovery
//! are arithmetic on these numbers, and only this file computes them. Everything is a pure function
//! of (records, `micro`, M, epochs, seed) in O(1) memory: the record order is a keyed permutation
//! and is never stored.
//!
//! With 10 records, `micro` = 3 and M = 2, an epoch has 4 microbatches (3, 3, 3, 1 records) and 2
//! steps.

#[cfg(test)]
mod golden;
mod occasions;
mod windows;

use std::ops::Range;

use serde::{Deserialize, Serialize};

pub use self::occasions::Occasions;
pub use self::windows::{WindowOrder, Windows};
use crate::ids::{Epoch, MicrobatchId, Step, Version};
use crate::random;
use crate::tree::Node;

/// The shape of a job's sequence of microbatches.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Plan {
    /// Training records of one epoch; at least 1.
    pub records: u64,
    /// Records of one microbatch; at least 1. The last of an epoch may have fewer.
    pub micro: u32,
    /// M: microbatches of one step; at least 1. The last step of an epoch may have fewer.
    pub microbatches_per_step: u32,
    /// Passes over the data; at least 1.
    pub epochs: u64,
}

/// All numbers of one microbatch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Microbatch {
    /// Number of the microbatch over the whole job.
    pub id: MicrobatchId,
    /// Epoch of the microbatch.
    pub epoch: Epoch,
    /// Step of the microbatch.
    pub step: Step,
    /// Index among the microbatches of the step: a leaf of the reduction tree.
    pub index: u32,
    /// M of the step.
    pub of: u32,
    /// Positions `[begin, end)` in the record order of the epoch.
    pub positions: (u64, u64),
}

impl Microbatch {
    /// Returns the number of records.
    pub const fn samples(&self) -> u64 {
        self.positions.1 - self.positions.0
    }

    /// Returns the microbatch's leaf of the reduction tree.
    pub const fn leaf(&self) -> Node {
        Node::leaf(self.index)
    }
}

impl Plan {
    /// Returns the microbatches of one epoch.
    pub const fn microbatches_per_epoch(&self) -> u64 {
        self.records.div_ceil(self.micro as u64)
    }

    /// Returns the steps of one epoch.
    pub const fn steps_per_epoch(&self) -> u64 {
        self.microbatches_per_epoch().div_ceil(self.microbatches_per_step as u64)
    }

    /// Returns the number of steps of the whole job, which is also the final version.
    pub const fn steps(&self) -> u64 {
        self.steps_per_epoch() * self.epochs
    }

    /// Returns the microbatches of the whole job.
    pub const fn microbatches(&self) -> u64 {
        self.microbatches_per_epoch() * self.epochs
    }

    /// Returns the version of the weights after the last step.
    pub const fn final_version(&self) -> Version {
        Version(self.steps())
    }

    /// Returns the version at the end of an epoch, which its evaluation measures.
    pub const fn version_after(&self, epoch: Epoch) -> Version {
        Version((epoch.0 + 1) * self.steps_per_epoch())
    }

    /// Returns whether an epoch ends with this version.
    pub const fn ends_epoch(&self, version: Version) -> bool {
        version.0 > 0 && version.0.is_multiple_of(self.steps_per_epoch())
    }

    /// Returns how many epochs end with an older version than this one.
    pub const fn epochs_before(&self, version: Version) -> Epoch {
        Epoch(version.0.saturating_sub(1) / self.steps_per_epoch())
    }

    /// Returns the epoch that a step belongs to.
    pub const fn epoch_of(&self, step: Step) -> Epoch {
        Epoch(step.0 / self.steps_per_epoch())
    }

    /// Returns the M of a step: fewer in the last step of an epoch when M does not divide.
    pub const fn of(&self, step: Step) -> u32 {
        let before = (step.0 % self.steps_per_epoch()) * self.microbatches_per_step as u64;
        let left = self.microbatches_per_epoch() - before;
        if left < self.microbatches_per_step as u64 { left as u32 } else { self.microbatches_per_step }
    }

    /// Returns the first microbatch of a step. For the number of steps it returns the number of
    /// microbatches.
    pub const fn first_of(&self, step: Step) -> MicrobatchId {
        let epoch = self.epoch_of(step).0;
        let step_in_epoch = step.0 % self.steps_per_epoch();
        MicrobatchId(
            epoch * self.microbatches_per_epoch() + step_in_epoch * self.microbatches_per_step as u64,
        )
    }

    /// Returns the number of records of a step: the divisor of its update.
    pub fn samples_of(&self, step: Step) -> u64 {
        self.samples_below(step, Node::root(self.of(step)))
    }

    /// Returns the number of records of all earlier steps.
    pub fn samples_before(&self, step: Step) -> u64 {
        let per_step = u64::from(self.microbatches_per_step) * u64::from(self.micro);
        let in_epoch = step.0 % self.steps_per_epoch() * per_step;
        self.epoch_of(step).0 * self.records + in_epoch
    }

    /// Returns the number of records below a node of a step's tree.
    ///
    /// # Panics
    /// If the node reaches past the step's microbatches.
    pub fn samples_below(&self, step: Step, node: Node) -> u64 {
        let first = self.first_of(step).0;
        let begin = self.microbatch(MicrobatchId(first + u64::from(node.begin))).positions.0;
        let end = self.microbatch(MicrobatchId(first + u64::from(node.end) - 1)).positions.1;
        end - begin
    }

    /// Returns all numbers of a microbatch.
    ///
    /// # Panics
    /// If the job has no such microbatch.
    pub fn microbatch(&self, id: MicrobatchId) -> Microbatch {
        assert!(id.0 < self.microbatches(), "microbatch {id} of {}", self.microbatches());
        let per_epoch = self.microbatches_per_epoch();
        let (epoch, in_epoch) = (id.0 / per_epoch, id.0 % per_epoch);
        let per_step = u64::from(self.microbatches_per_step);
        let step = Step(epoch * self.steps_per_epoch() + in_epoch / per_step);
        let begin = in_epoch * u64::from(self.micro);
        Microbatch {
            id,
            epoch: Epoch(epoch),
            step,
            index: (in_epoch % per_step) as u32,
            of: self.of(step),
            positions: (begin, self.records.min(begin + u64::from(self.micro))),
        }
    }

    /// Cuts a run of microbatches into one piece for each step: `(step, indices within the step)`.
    pub fn by_step(&self, run: Range<MicrobatchId>) -> Vec<(Step, Range<u32>)> {
        let mut pieces = Vec::new();
        let mut at = run.start.0;
        while at < run.end.0 {
            let first = self.microbatch(MicrobatchId(at));
            let left_in_step = u64::from(first.of - first.index);
            let count = left_in_step.min(run.end.0 - at);
            pieces.push((first.step, first.index..first.index + count as u32));
            at += count;
        }
        pieces
    }
}

/// Order of the records in an epoch, of any kind.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EpochOrder {
    /// A permutation of all records, or the order of the files.
    Records(RecordOrder),
    /// Files in sequence, shuffled within windows.
    Windows(WindowOrder),
}

impl EpochOrder {
    /// Returns the records at these positions of this order.
    ///
    /// # Panics
    /// If a position is not below the number of records.
    pub fn records(&self, positions: Range<u64>) -> Vec<u64> {
        match self {
            Self::Records(order) => order.permutation.apply_all(positions),
            Self::Windows(order) => order.records(positions),
        }
    }
}

/// Order of the records in an epoch without windows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecordOrder {
    permutation: Permutation,
}

impl RecordOrder {
    /// Returns the order of `records` training records in `epoch`. Without `shuffle` it is the
    /// order of the files.
    pub fn new(records: u64, seed: u64, epoch: Epoch, shuffle: bool) -> Self {
        let key = shuffle.then(|| random::key(seed, "order", epoch.0));
        Self { permutation: Permutation { len: records, key } }
    }

    /// Returns the order that splits a data set into training and validation records: the rank of a
    /// record decides.
    pub fn split(records: u64, seed: u64) -> Self {
        Self { permutation: Permutation { len: records, key: Some(random::key(seed, "split", 0)) } }
    }

    /// Returns the record at a position of this order, in O(1).
    ///
    /// # Panics
    /// If the position is not below the number of records.
    pub fn record(&self, position: u64) -> u64 {
        self.permutation.apply(position)
    }
}

/// A keyed bijection on `0..len`: a Feistel network on the next even power of two, repeated until
/// the result is inside (cycle walking; Black and Rogaway 2002). Fewer than 4 repetitions are
/// expected. Small domains need the twelve rounds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Permutation {
    len: u64,
    /// Key of the bijection. `None`: the identity.
    key: Option<u64>,
}

/// Rounds of the Feistel network.
const ROUNDS: usize = 12;

/// Values that go through the network side by side, because each of its steps waits for the one
/// before.
const SIDE_BY_SIDE: usize = 8;

impl Permutation {
    fn apply(&self, position: u64) -> u64 {
        self.apply_all(position..position + 1)[0]
    }

    /// Returns the images of a range of positions.
    fn apply_all(&self, positions: Range<u64>) -> Vec<u64> {
        assert!(positions.end <= self.len, "position {} of {}", positions.end.saturating_sub(1), self.len);
        let mut values: Vec<u64> = positions.collect();
        let Some(key) = self.key.filter(|_| !values.is_empty()) else { return values };
        let half_bits = (64 - (self.len - 1).leading_zeros()).div_ceil(2).max(1);
        let mask = (1u64 << half_bits) - 1;
        let keys: [u64; ROUNDS] = std::array::from_fn(|round| random::mix(key ^ round as u64));
        let mut outside: Vec<usize> = (0..values.len()).collect();
        while !outside.is_empty() {
            for some in outside.chunks(SIDE_BY_SIDE) {
                let (mut left, mut right) = ([0; SIDE_BY_SIDE], [0; SIDE_BY_SIDE]);
                for (lane, &at) in some.iter().enumerate() {
                    (left[lane], right[lane]) = (values[at] >> half_bits, values[at] & mask);
                }
                for key in keys {
                    for (left, right) in left.iter_mut().zip(&mut right) {
                        let f = random::mix(*right ^ key) & mask;
                        (*left, *right) = (*right, *left ^ f);
                    }
                }
                for (lane, &at) in some.iter().enumerate() {
                    values[at] = (left[lane] << half_bits) | right[lane];
                }
            }
            outside.retain(|&at| values[at] >= self.len);
        }
        values
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn plans() -> impl Strategy<Value = Plan> {
        (1u64..400, 1u32..40, 1u32..20, 1u64..4).prop_map(
            |(records, micro, microbatches_per_step, epochs)| Plan {
                records,
                micro,
                microbatches_per_step,
                epochs,
            },
        )
    }

    #[test]
    fn the_example_of_the_file_header_holds() {
        let plan = Plan { records: 10, micro: 3, microbatches_per_step: 2, epochs: 2 };
        let samples: Vec<u64> = (0..4).map(|id| plan.microbatch(MicrobatchId(id)).samples()).collect();
        assert_eq!(samples, [3, 3, 3, 1]);
        assert_eq!((plan.steps_per_epoch(), plan.steps(), plan.microbatches()), (2, 4, 8));
        assert_eq!(plan.version_after(Epoch(0)), Version(2));
    }

    proptest! {
        #[test]
        fn every_epoch_visits_every_record_once(plan in plans(), seed in any::<u64>()) {
            let mut seen = vec![0u64; plan.records as usize];
            for id in 0..plan.microbatches() {
                let microbatch = plan.microbatch(MicrobatchId(id));
                let order = RecordOrder::new(plan.records, seed, microbatch.epoch, true);
                for position in microbatch.positions.0..microbatch.positions.1 {
                    seen[order.record(position) as usize] += 1;
                }
            }
            prop_assert!(seen.iter().all(|&count| count == plan.epochs));
        }

        #[test]
        fn steps_number_their_microbatches_in_sequence(plan in plans()) {
            let (mut next, mut before) = (0, 0);
            for step in (0..plan.steps()).map(Step) {
                prop_assert_eq!(plan.first_of(step), MicrobatchId(next));
                prop_assert_eq!(plan.samples_before(step), before);
                let mut samples = 0;
                for index in 0..plan.of(step) {
                    let microbatch = plan.microbatch(MicrobatchId(next));
                    prop_assert_eq!((microbatch.step, microbatch.index, microbatch.of), (step, index, plan.of(step)));
                    prop_assert_eq!(microbatch.epoch, plan.epoch_of(step));
                    samples += microbatch.samples();
                    next += 1;
                }
                prop_assert_eq!(plan.samples_of(step), samples);
                before += samples;
            }
            prop_assert_eq!(next, plan.microbatches());
            let end = Step(plan.steps());
            prop_assert_eq!((plan.first_of(end), plan.samples_before(end)), (MicrobatchId(next), before));
            prop_assert!(plan.ends_epoch(plan.final_version()));
        }

        #[test]
        fn by_step_keeps_every_microbatch(plan in plans(), a in any::<u64>(), b in any::<u64>()) {
            let (a, b) = (a % (plan.microbatches() + 1), b % (plan.microbatches() + 1));
            let run = MicrobatchId(a.min(b))..MicrobatchId(a.max(b));
            let mut at = run.start.0;
            for (step, indices) in plan.by_step(run.clone()) {
                prop_assert_eq!(plan.first_of(step).0 + u64::from(indices.start), at);
                prop_assert!(indices.end <= plan.of(step));
                at += u64::from(indices.end - indices.start);
            }
            prop_assert_eq!(at, run.end.0);
        }

        #[test]
        fn orders_differ_between_epochs_and_seeds(seed in any::<u64>()) {
            let list = |seed, epoch| {
                let order = RecordOrder::new(200, seed, Epoch(epoch), true);
                (0..200).map(|position| order.record(position)).collect::<Vec<_>>()
            };
            prop_assert_ne!(list(seed, 0), list(seed, 1));
            prop_assert_ne!(list(seed, 0), list(seed.wrapping_add(1), 0));
        }
    }

    #[test]
    fn unshuffled_order_is_the_order_of_the_files() {
        let order = RecordOrder::new(5, 9, Epoch(3), false);
        assert_eq!((0..5).map(|position| order.record(position)).collect::<Vec<_>>(), [0, 1, 2, 3, 4]);
    }
}
