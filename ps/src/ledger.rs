//! Which steps are applied to a partition: the watermark and the set above it.
//!
//! Pure. Always true here:
//!
//! - All steps below the watermark are applied, the step at the watermark is not.
//! - A step is applied once. In canonical order it is the one at the watermark; in arrival order
//!   any that is not applied yet.
//! - The version is the number of applied steps: what the optimizer counts by, in both orders.
//!
//! With steps 0, 1 and 4 applied the watermark is 2, the set above it {4}, the version 3.

use std::collections::BTreeSet;

use proto::checkpoint::AppliedSteps;
use proto::ids::{Step, Version};
use proto::plan::Plan;
use proto::spec::Order;

/// The applied steps of one partition, and what was counted on the way.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ledger {
    plan: Plan,
    order: Order,
    watermark: Step,
    above: BTreeSet<Step>,
    microbatches_applied: u64,
    samples_applied: u64,
    /// Records of the applied steps that were left out, because they are bad.
    samples_skipped: u64,
    /// Applied steps that overflowed, so they changed no weight.
    overflows: u64,
    duplicates_dropped: u64,
}

impl Ledger {
    /// Creates a ledger without applied steps.
    pub const fn new(plan: Plan, order: Order) -> Self {
        Self {
            plan,
            order,
            watermark: Step(0),
            above: BTreeSet::new(),
            microbatches_applied: 0,
            samples_applied: 0,
            samples_skipped: 0,
            overflows: 0,
            duplicates_dropped: 0,
        }
    }

    /// Creates a ledger with the applied steps of a checkpoint, which the caller has checked
    /// against the plan.
    pub fn restored(plan: Plan, order: Order, applied: AppliedSteps) -> Self {
        let AppliedSteps { watermark, above, samples_skipped, overflows } = applied;
        let microbatches: u64 = above.iter().map(|&step| u64::from(plan.of(step))).sum();
        let samples: u64 = above.iter().map(|&step| plan.samples_of(step)).sum();
        Self {
            watermark,
            above,
            microbatches_applied: plan.first_of(watermark).get() + microbatches,
            samples_applied: (plan.samples_before(watermark) + samples).saturating_sub(samples_skipped),
            samples_skipped,
            overflows,
            ..Self::new(plan, order)
        }
    }

    /// Returns which steps are applied, as a checkpoint says it.
    pub fn applied_steps(&self) -> AppliedSteps {
        let Self { watermark, samples_skipped, overflows, .. } = *self;
        AppliedSteps { watermark, above: self.above.clone(), samples_skipped, overflows }
    }

    /// Returns whether a complete step may be applied now.
    pub fn may_apply(&self, step: Step) -> bool {
        match self.order {
            Order::Canonical => step == self.watermark,
            Order::Arrival => !self.is_applied(step),
        }
    }

    /// Writes down that a step of `samples` records is applied.
    ///
    /// # Panics
    /// If it may not be, or the plan has fewer records for it.
    pub fn apply(&mut self, step: Step, samples: u64) {
        assert!(self.may_apply(step), "step {step} applied at watermark {}", self.watermark);
        let planned = self.plan.samples_of(step);
        assert!(samples <= planned, "step {step} has {samples} records, its plan {planned}");
        self.microbatches_applied += u64::from(self.plan.of(step));
        self.samples_applied += samples;
        self.samples_skipped += planned - samples;
        self.above.insert(step);
        while self.above.remove(&self.watermark) {
            self.watermark = self.watermark.next();
        }
    }

    /// Writes down that the step that was applied last overflowed.
    pub const fn overflow(&mut self) {
        self.overflows += 1;
    }

    /// Writes down that a push brought nothing new.
    pub const fn drop_duplicate(&mut self) {
        self.duplicates_dropped += 1;
    }

    /// Returns whether a step is applied.
    pub fn is_applied(&self, step: Step) -> bool {
        step < self.watermark || self.above.contains(&step)
    }

    /// Returns the step below which all steps are applied.
    pub const fn watermark(&self) -> Step {
        self.watermark
    }

    /// Returns the applied steps above the watermark, increasing.
    pub fn applied_above(&self) -> impl Iterator<Item = Step> {
        self.above.iter().copied()
    }

    /// Returns the number of applied steps.
    pub fn version(&self) -> Version {
        Version(self.watermark.get() + self.above.len() as u64)
    }

    /// Microbatches of the applied steps.
    pub const fn microbatches_applied(&self) -> u64 {
        self.microbatches_applied
    }

    /// Records of the applied steps, without those that were left out.
    pub const fn samples_applied(&self) -> u64 {
        self.samples_applied
    }

    /// Applied steps that overflowed.
    pub const fn overflows(&self) -> u64 {
        self.overflows
    }

    /// Pushes that brought nothing new.
    pub const fn duplicates_dropped(&self) -> u64 {
        self.duplicates_dropped
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn plan(steps: u64) -> Plan {
        // The last microbatch has one record less.
        Plan { records: steps * 6 - 1, micro: 3, microbatches_per_step: 2, epochs: 1 }
    }

    #[test]
    fn the_example_of_the_file_header_holds() {
        let mut ledger = Ledger::new(plan(9), Order::Arrival);
        [4, 0, 1].into_iter().for_each(|step| ledger.apply(Step(step), 5));
        assert_eq!((ledger.watermark(), ledger.version()), (Step(2), Version(3)));
        assert_eq!(ledger.applied_above().collect::<Vec<_>>(), [Step(4)]);
    }

    #[test]
    fn in_canonical_order_a_step_waits_for_the_one_before() {
        let mut ledger = Ledger::new(plan(3), Order::Canonical);
        assert!(!ledger.may_apply(Step(1)));
        ledger.apply(Step(0), 6);
        assert!(ledger.may_apply(Step(1)) && !ledger.may_apply(Step(0)));
    }

    #[test]
    #[should_panic(expected = "step 1 applied at watermark 2")]
    fn applying_a_step_twice_is_a_broken_invariant() {
        let mut ledger = Ledger::new(plan(3), Order::Arrival);
        [0, 1, 1].into_iter().for_each(|step| ledger.apply(Step(step), 5));
    }

    #[test]
    fn skipped_records_are_counted_also_after_a_checkpoint() {
        let mut ledger = Ledger::new(plan(3), Order::Canonical);
        [6, 0].into_iter().enumerate().for_each(|(step, samples)| ledger.apply(Step(step as u64), samples));
        assert_eq!(ledger.samples_applied(), 6);
        let mut restored = Ledger::restored(plan(3), Order::Canonical, ledger.applied_steps());
        assert_eq!(restored, ledger);
        restored.apply(Step(2), 3);
        assert_eq!((restored.samples_applied(), restored.applied_steps().samples_skipped), (9, 8));
    }

    #[test]
    #[should_panic(expected = "step 0 has 7 records, its plan 6")]
    fn a_step_with_more_records_than_planned_is_a_broken_invariant() {
        Ledger::new(plan(3), Order::Canonical).apply(Step(0), 7);
    }

    proptest! {
        #[test]
        fn any_order_of_arrival_ends_with_the_same_ledger(
            order in (1u64..60).prop_flat_map(|steps| Just((0..steps).collect::<Vec<_>>()).prop_shuffle()),
        ) {
            let plan = plan(order.len() as u64);
            let mut ledger = Ledger::new(plan, Order::Arrival);
            let mut applied = BTreeSet::new();
            for &step in &order {
                prop_assert!(ledger.may_apply(Step(step)));
                ledger.apply(Step(step), plan.samples_of(Step(step)));
                applied.insert(step);
                let lowest_missing = (0..).find(|step| !applied.contains(step)).unwrap();
                prop_assert_eq!(ledger.watermark(), Step(lowest_missing));
                prop_assert_eq!(ledger.version(), Version(applied.len() as u64));
                let restored = Ledger::restored(plan, Order::Arrival, ledger.applied_steps());
                prop_assert_eq!(&restored, &ledger);
                for step in 0..plan.steps() {
                    prop_assert_eq!(ledger.is_applied(Step(step)), applied.contains(&step));
                    prop_assert_eq!(ledger.may_apply(Step(step)), !applied.contains(&step));
                }
            }
            prop_assert_eq!(ledger.applied_above().count(), 0);
            prop_assert_eq!(ledger.samples_applied(), plan.records);
            prop_assert_eq!(ledger.microbatches_applied(), plan.microbatches());
            // The canonical order is one of them.
            let mut canonical = Ledger::new(plan, Order::Canonical);
            (0..plan.steps()).for_each(|step| canonical.apply(Step(step), plan.samples_of(Step(step))));
            prop_assert_eq!(canonical.samples_applied(), ledger.samples_applied());
            prop_assert_eq!(canonical.version(), ledger.version());
        }
    }
}
