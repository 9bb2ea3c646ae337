//! The versions of a training that an evaluation measures.
//!
//! With 5 steps in an epoch, 2 epochs and an evaluation every 4 steps, these are the versions 4, 5,
//! 8 and 10. They are arithmetic on the plan, so the master and every ps know them without a
//! message.

use super::Plan;
use crate::ids::{Epoch, Version};

/// The versions of a training that are measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Occasions {
    plan: Plan,
    /// Distances in steps, counted from version 0; each at least 1.
    every: [u64; 2],
}

impl Occasions {
    /// Creates the occasions at the end of each epoch, and after each multiple of `every_steps`.
    /// `None` and 0: only at the ends of epochs.
    pub fn new(plan: Plan, every_steps: Option<u64>) -> Self {
        let epoch = plan.steps_per_epoch().max(1);
        let steps = every_steps.filter(|&steps| steps > 0).unwrap_or(epoch);
        Self { plan, every: [epoch, steps] }
    }

    /// Returns whether a version is measured.
    pub fn contains(&self, version: Version) -> bool {
        (1..=self.plan.steps()).contains(&version.0)
            && self.every.iter().any(|&every| version.0.is_multiple_of(every))
    }

    /// Returns the first measured version after this one. `None`: there is none.
    pub fn after(&self, version: Version) -> Option<Version> {
        let next = self.every.iter().map(|&every| (version.0 / every + 1).saturating_mul(every)).min();
        next.filter(|&next| next <= self.plan.steps()).map(Version)
    }

    /// Returns the last measured version before this one. `None`: there is none.
    pub fn before(&self, version: Version) -> Option<Version> {
        let below = version.0.min(self.plan.steps() + 1).saturating_sub(1);
        let last = self.every.iter().map(|&every| below - below % every).max();
        last.filter(|&last| last > 0).map(Version)
    }

    /// Returns the epoch of the last step below a version.
    pub const fn epoch_of(&self, version: Version) -> Epoch {
        self.plan.epochs_before(version)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Five steps in each epoch.
    const PLAN: Plan = Plan { records: 10, micro: 2, microbatches_per_step: 1, epochs: 2 };

    fn all(occasions: Occasions) -> Vec<u64> {
        let first = occasions.after(Version(0));
        std::iter::successors(first, |version| occasions.after(*version)).map(|version| version.0).collect()
    }

    #[test]
    fn epochs_are_measured_and_so_are_multiples_of_steps() {
        assert_eq!(all(Occasions::new(PLAN, None)), [5, 10]);
        assert_eq!(all(Occasions::new(PLAN, Some(4))), [4, 5, 8, 10]);
        assert_eq!(all(Occasions::new(PLAN, Some(100))), [5, 10]);
        assert_eq!(all(Occasions::new(PLAN, Some(u64::MAX))), [5, 10]);
        let occasions = Occasions::new(PLAN, Some(4));
        let epochs = [4, 5, 8, 10].map(|version| occasions.epoch_of(Version(version)));
        assert_eq!(epochs, [Epoch(0), Epoch(0), Epoch(1), Epoch(1)]);
    }

    proptest! {
        #[test]
        fn neighbours_are_the_nearest_measured_versions(
            steps in 1u64..9, epochs in 1u64..5, every in 0u64..12, version in 0u64..60,
        ) {
            let plan = Plan { records: steps, micro: 1, microbatches_per_step: 1, epochs };
            let occasions = Occasions::new(plan, Some(every));
            let due = |version: u64| {
                version > 0 && version <= steps * epochs
                    && (version.is_multiple_of(steps) || every > 0 && version.is_multiple_of(every))
            };
            prop_assert_eq!(occasions.contains(Version(version)), due(version));
            let after = (version + 1..=steps * epochs).find(|&next| due(next)).map(Version);
            prop_assert_eq!(occasions.after(Version(version)), after);
            let before = (1..version).rev().find(|&last| due(last)).map(Version);
            prop_assert_eq!(occasions.before(Version(version)), before);
        }
    }
}
