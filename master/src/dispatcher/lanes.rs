//! Which worker reads which lane: with the order `window`, a worker that goes on with the lanes it
//! had reads each of their files once.
//!
//! Microbatch i of an epoch comes from lane i mod L while all L lanes have microbatches. So the
//! same place in the next step is mostly the same lane, and what a worker is given of a step is
//! chosen by who had its first lane last:
//!
//! 1. the worker itself;
//! 2. nobody;
//! 3. another worker that cannot read all its own lanes before the others could; of several, the
//!    one with the most lanes left.
//!
//! A worker that finds only lanes which others keep waits. Who keeps lanes is decided anew at each
//! question, by the speeds of the workers: nobody keeps a lane by being silent or late. A worker is
//! never given another step for its lanes. So a preference changes which part of one step somebody
//! gets, and nothing else.
//!
//! A part is several microbatches in a row, and at most a fair number of lanes long. Otherwise a
//! step of many microbatches would have each worker read all lanes.
//!
//! The numbers of lanes are wrong after the end of the shortest lane. That costs reading, not
//! correctness.

use std::collections::BTreeMap;
use std::ops::Range;

use proto::ids::{IncarnationId, MicrobatchId};
use proto::plan::Plan;
use proto::tree;

/// The worker that had each lane last. Without lanes nobody prefers anything.
#[derive(Clone, Debug, Default)]
pub(super) struct Lanes {
    holders: Vec<Option<IncarnationId>>,
    /// How often a worker was given a lane that another one had last.
    moved: u64,
}

impl Lanes {
    /// Creates the books of so many lanes.
    pub(super) fn new(lanes: usize) -> Self {
        // With one lane there is nothing to choose.
        Self { holders: if lanes > 1 { vec![None; lanes] } else { Vec::new() }, moved: 0 }
    }

    /// Returns whether the order has lanes.
    pub(super) fn exist(&self) -> bool {
        !self.holders.is_empty()
    }

    /// Records that a worker is given these microbatches.
    pub(super) fn given(&mut self, plan: &Plan, worker: IncarnationId, run: &Range<u64>) {
        for microbatch in run.clone().take(self.holders.len()) {
            if let Some(lane) = self.lane(plan, microbatch) {
                let before = self.holders[lane].replace(worker);
                self.moved += u64::from(before.is_some_and(|before| before != worker));
            }
        }
    }

    /// Records that a worker is given a copy of these microbatches. Their lanes stay with whoever
    /// had them, and are read once more.
    pub(super) fn copied(&mut self, plan: &Plan, worker: IncarnationId, run: &Range<u64>) {
        let lanes = run.clone().take(self.holders.len()).filter_map(|microbatch| self.lane(plan, microbatch));
        self.moved += lanes.filter(|&lane| self.holders[lane] != Some(worker)).count() as u64;
    }

    /// Returns how often a worker was given a lane that another one had last, since the last call.
    pub(super) fn take_moved(&mut self) -> u64 {
        std::mem::take(&mut self.moved)
    }

    /// Returns how many microbatches a part may have if each of so many workers is to have as many
    /// lanes as any other.
    pub(super) fn fair(&self, workers: usize) -> u64 {
        (self.holders.len() / workers.max(1)).max(1) as u64
    }

    /// Returns where the part of one step begins that `worker` is given; `None`: others keep what
    /// is left. `free`: what is left of the step, ascending. `share`: most microbatches of a part.
    /// `crew`: the workers that share the step. `keeps`: whether a worker is to read all of so many
    /// microbatches.
    pub(super) fn choose(
        &self,
        plan: &Plan,
        free: &[Range<u64>],
        share: u64,
        worker: IncarnationId,
        crew: &[IncarnationId],
        keeps: impl Fn(IncarnationId, u64) -> bool,
    ) -> Option<u64> {
        let holder = |microbatch: u64| {
            let holder = self.holders[self.lane(plan, microbatch)?];
            holder.filter(|holder| crew.contains(holder))
        };
        let begins = || free.iter().flat_map(|range| begins(plan, range.clone(), share));
        let own = begins().find(|&first| holder(first) == Some(worker));
        if let Some(first) = own.or_else(|| begins().find(|&first| holder(first).is_none())) {
            return Some(first);
        }
        let mut left = BTreeMap::<IncarnationId, u64>::new();
        for holder in free.iter().flat_map(Clone::clone).filter_map(holder) {
            *left.entry(holder).or_default() += 1;
        }
        // The holder begins with its first part, so its last one is taken.
        let last = begins().filter_map(|first| Some((holder(first)?, first))).collect::<BTreeMap<_, _>>();
        let foreign = last.into_iter().filter(|(holder, _)| !keeps(*holder, left[holder]));
        foreign.max_by_key(|(holder, _)| left[holder]).map(|(_, first)| first)
    }

    fn lane(&self, plan: &Plan, microbatch: u64) -> Option<usize> {
        let in_epoch = microbatch % plan.microbatches_per_epoch();
        in_epoch.checked_rem(self.holders.len() as u64).map(|lane| lane as usize)
    }
}

/// Returns where parts of a range of one step begin, if each has at most `share` microbatches.
fn begins(plan: &Plan, range: Range<u64>, share: u64) -> impl Iterator<Item = u64> {
    let first = plan.microbatch(MicrobatchId(range.start));
    let (base, of) = (range.start - u64::from(first.index), first.of);
    let end = (range.end - base).min(of.into()) as u32;
    let mut at = first.index;
    std::iter::from_fn(move || {
        let begin = (at < end).then_some(at)?;
        at = tree::largest_from(at, end, of, share.min(of.into()) as u32).end;
        Some(base + u64::from(begin))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLAN: Plan = Plan { records: 64, micro: 1, microbatches_per_step: 8, epochs: 2 };

    #[test]
    fn a_part_begins_with_an_own_lane_then_with_nobodys_then_with_one_that_is_not_kept() {
        let [one, two, gone] = [1, 2, 3].map(IncarnationId);
        let mut lanes = Lanes::new(4);
        let choose = |lanes: &Lanes, free: &[Range<u64>], worker, keeps: bool| {
            lanes.choose(&PLAN, free, 2, worker, &[one, two], |_, _| keeps)
        };
        let step = [8..12, 12..16];
        assert_eq!(choose(&lanes, &step, one, true), Some(8), "the first part of nobody");
        lanes.given(&PLAN, two, &(0..2));
        assert_eq!(choose(&lanes, &step, one, true), Some(10), "the first lane that nobody had");
        lanes.given(&PLAN, one, &(2..4));
        assert_eq!(choose(&lanes, &step, two, true), Some(8));
        assert_eq!(choose(&lanes, &step, one, true), Some(10));
        let foreign = [8..9, 12..14];
        assert_eq!(choose(&lanes, &foreign, one, true), None, "the other one goes on with its lanes");
        assert_eq!(choose(&lanes, &foreign, one, false), Some(12), "its last part");
        lanes.given(&PLAN, gone, &(0..1));
        assert_eq!(choose(&lanes, &step, two, true), Some(8), "its holder takes no part any more");
    }

    #[test]
    fn whoever_has_most_left_loses_a_part_and_is_asked_for_all_that_it_has_left() {
        let [one, two, three] = [1, 2, 3].map(IncarnationId);
        let mut lanes = Lanes::new(8);
        lanes.given(&PLAN, two, &(0..2));
        lanes.given(&PLAN, three, &(2..6));
        let choose = |free: &[Range<u64>], kept: &[(IncarnationId, u64)]| {
            let keeps = |worker, left| kept.contains(&(worker, left));
            lanes.choose(&PLAN, free, 2, one, &[one, two, three], keeps)
        };
        let free = [8..12, 12..14];
        assert_eq!(choose(&free, &[]), Some(12));
        assert_eq!(choose(&free, &[(three, 4)]), Some(8));
        assert_eq!(choose(&free, &[(two, 2), (three, 4)]), None);
        assert_eq!(choose(&free, &[(two, 1), (three, 3)]), Some(12), "all that is left counts");
    }

    #[test]
    fn a_lane_moves_when_another_worker_is_given_it_or_a_copy_of_it() {
        let [one, two] = [1, 2].map(IncarnationId);
        let mut lanes = Lanes::new(4);
        lanes.given(&PLAN, one, &(0..4));
        lanes.given(&PLAN, one, &(8..10));
        lanes.copied(&PLAN, one, &(8..10));
        assert_eq!(lanes.take_moved(), 0, "it had them");
        lanes.copied(&PLAN, two, &(10..12));
        lanes.given(&PLAN, one, &(10..12));
        assert_eq!((lanes.take_moved(), lanes.take_moved()), (2, 0), "a copy takes no lane away");
        lanes.given(&PLAN, two, &(8..16));
        assert_eq!(lanes.take_moved(), 4, "each lane once, however often the part has it");
        assert_eq!([1, 2, 3, 5].map(|workers| lanes.fair(workers)), [4, 2, 1, 1]);
    }

    #[test]
    fn parts_are_nodes_and_a_new_epoch_begins_with_the_first_lane() {
        let starts = |range, share| begins(&PLAN, range, share).collect::<Vec<_>>();
        assert_eq!(starts(9..16, 2), [9, 10, 12, 14]);
        assert_eq!(starts(8..16, 3), [8, 10, 12, 14]);
        assert_eq!(starts(8..16, 100), [8]);
        assert_eq!(starts(13..15, 4), [13, 14]);
        let lanes = Lanes::new(5);
        assert_eq!((lanes.lane(&PLAN, 63), lanes.lane(&PLAN, 64)), (Some(3), Some(0)));
        assert_eq!((Lanes::new(1).exist(), Lanes::default().lane(&PLAN, 3)), (false, None));
    }
}
