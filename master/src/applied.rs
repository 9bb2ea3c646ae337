//! Which steps are done: those that *every* partition has applied. The books after any recovery are
//! computed from it.
//!
//! With ledgers { below 2, and 4, 5 } and { below 5, and 6 } the steps 0, 1 and 4 are done:
//! watermark 2, above it {4}.

use std::collections::BTreeSet;
use std::ops::Range;

use proto::ids::Step;
use proto::pb;

/// The steps that all partitions have applied.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Applied {
    /// All steps below it; it itself is not.
    watermark: Step,
    /// Others above it.
    above: BTreeSet<Step>,
}

impl Applied {
    /// Returns what the ledgers of all partitions have in common; nothing without ledgers.
    pub(crate) fn on_all(ledgers: &[pb::PartitionLedger]) -> Self {
        let Some(lowest) = ledgers.iter().min_by_key(|ledger| ledger.watermark) else {
            return Self::default();
        };
        // A common step at or past the lowest watermark stands in that ledger one by one.
        let common = |step: &u64| ledgers.iter().all(|ledger| has(ledger, *step));
        let above = lowest.applied_above.iter().copied().filter(common).map(Step).collect();
        Self { watermark: Step(lowest.watermark), above }
    }

    /// Returns the step below which all steps are done.
    pub(crate) const fn watermark(&self) -> Step {
        self.watermark
    }

    /// Returns the done steps above the watermark, increasing.
    pub(crate) fn above(&self) -> impl Iterator<Item = Step> {
        self.above.iter().copied()
    }

    /// Runs of steps that are not done, from the watermark to the last that is.
    pub(crate) fn gaps(&self) -> Vec<Range<Step>> {
        let mut gaps = Vec::new();
        let mut at = self.watermark;
        for &step in &self.above {
            if at < step {
                gaps.push(at..step);
            }
            at = step.next();
        }
        gaps
    }

    /// Returns the step after the last step that is done.
    pub(crate) fn end(&self) -> Step {
        self.above.last().map_or(self.watermark, |last| last.next())
    }
}

fn has(ledger: &pb::PartitionLedger, step: u64) -> bool {
    step < ledger.watermark || ledger.applied_above.contains(&step)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Returns a ledger as a ps would write it.
    fn ledger(steps: &BTreeSet<u64>) -> pb::PartitionLedger {
        let watermark = (0..).find(|step| !steps.contains(step)).expect("finite");
        let applied_above = steps.range(watermark..).copied().collect();
        pb::PartitionLedger { watermark, applied_above, ..Default::default() }
    }

    #[test]
    fn the_example_of_the_file_header_holds() {
        let ledgers = [ledger(&[0, 1, 4, 5].into()), ledger(&[0, 1, 2, 3, 4, 6].into())];
        let applied = Applied::on_all(&ledgers);
        assert_eq!((applied.watermark(), applied.above().collect::<Vec<_>>()), (Step(2), vec![Step(4)]));
        assert_eq!((applied.gaps(), applied.end()), (vec![Step(2)..Step(4)], Step(5)));
        assert_eq!(Applied::on_all(&[]), Applied::default());
    }

    proptest! {
        #[test]
        fn a_step_is_done_when_every_partition_has_it(
            partitions in proptest::collection::vec(proptest::collection::btree_set(0u64..12, 0..12), 1..5),
        ) {
            let ledgers: Vec<_> = partitions.iter().map(ledger).collect();
            let applied = Applied::on_all(&ledgers);
            let gaps = applied.gaps();
            for step in 0..13 {
                let done = partitions.iter().all(|steps| steps.contains(&step));
                let (watermark, step) = (applied.watermark(), Step(step));
                prop_assert_eq!(step < watermark || applied.above.contains(&step), done, "{}", step);
                let in_gap = gaps.iter().any(|gap| gap.contains(&step));
                prop_assert_eq!(in_gap, !done && step < applied.end());
                prop_assert!(step != watermark || !done);
            }
        }
    }
}
