//! Which worker reads which lane: with the order `window`, a worker that goes on with the lanes it
//! had reads each of their files once.
//!
//! Microbatch i of an epoch comes from lane i mod L while all L lanes have microbatches. So the
//! same place in the next step is mostly the same lane, and what a worker is given of a step is
//! chosen by who had its first lane last: the worker itself, then nobody, then anybody. A worker
//! never waits for its lanes, and is never given another step for them. So a preference changes
//! which part of one step somebody gets, and nothing else.
//!
//! A part is several microbatches in a row. So with more microbatches in a step than lanes each
//! worker has all lanes, and there is nothing to prefer.
//!
//! The numbers of lanes are wrong after the end of the shortest lane. That costs reading, not
//! correctness.

use std::ops::Range;

use proto::ids::{IncarnationId, MicrobatchId};
use proto::plan::Plan;
use proto::tree;

/// The worker that had each lane last. Without lanes nobody prefers anything.
#[derive(Clone, Debug, Default)]
pub(super) struct Lanes {
    holders: Vec<Option<IncarnationId>>,
}

impl Lanes {
    /// Creates the books of so many lanes.
    pub(super) fn new(lanes: usize) -> Self {
        // With one lane there is nothing to choose.
        Self { holders: if lanes > 1 { vec![None; lanes] } else { Vec::new() } }
    }

    /// Returns whether the order has lanes.
    pub(super) fn exist(&self) -> bool {
        !self.holders.is_empty()
    }

    /// Records that a worker is given these microbatches.
    pub(super) fn given(&mut self, plan: &Plan, worker: IncarnationId, run: &Range<u64>) {
        for microbatch in run.clone().take(self.holders.len()) {
            if let Some(lane) = self.lane(plan, microbatch) {
                self.holders[lane] = Some(worker);
            }
        }
    }

    /// Returns where the part of one step begins that `worker` is given. `free`: what is left of
    /// the step, ascending; not empty. `share`: most microbatches of a part. `crew`: the workers
    /// that share the step.
    pub(super) fn choose(
        &self,
        plan: &Plan,
        free: &[Range<u64>],
        share: u64,
        worker: IncarnationId,
        crew: &[IncarnationId],
    ) -> u64 {
        let holder = |first: u64| {
            let holder = self.holders[self.lane(plan, first)?];
            holder.filter(|holder| crew.contains(holder))
        };
        let begins = || free.iter().flat_map(|range| begins(plan, range.clone(), share));
        let own = begins().find(|&first| holder(first) == Some(worker));
        let nobodys = || begins().find(|&first| holder(first).is_none());
        own.or_else(nobodys).unwrap_or(free[0].start)
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
    fn a_part_begins_with_an_own_lane_then_with_nobodys_then_anywhere() {
        let [one, two, gone] = [1, 2, 3].map(IncarnationId);
        let crew = [one, two];
        let mut lanes = Lanes::new(4);
        let step = vec![8..12, 12..16];
        assert_eq!(lanes.choose(&PLAN, &step, 2, one, &crew), 8, "the first part of nobody");
        lanes.given(&PLAN, two, &(0..2));
        assert_eq!(lanes.choose(&PLAN, &step, 2, one, &crew), 10, "the first lane that nobody had");
        lanes.given(&PLAN, one, &(2..4));
        assert_eq!(lanes.choose(&PLAN, &step, 2, two, &crew), 8);
        assert_eq!(lanes.choose(&PLAN, &step, 2, one, &crew), 10);
        assert_eq!(lanes.choose(&PLAN, &[8..9, 12..14], 2, one, &crew), 8, "only foreign lanes are left");
        lanes.given(&PLAN, gone, &(0..1));
        assert_eq!(lanes.choose(&PLAN, &step, 2, two, &crew), 8, "its holder takes no part any more");
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
