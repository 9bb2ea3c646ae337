//! The versions of a training that an evaluation measures.
//!
//! With 5 steps in an epoch, 2 epochs and an evaluation every 4 steps, these are the versions 4, 5,
//! 8 and 10. The last version is always measured. The versions are arithmetic on the plan, so the
//! master and every ps know them without a message.

use super::Plan;
use crate::ids::{Epoch, Version};

/// The versions of a training that are measured: the last one, and multiples of two distances.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Occasions {
    plan: Plan,
    /// Distances in steps, counted from version 0; each at least 1.
    every: [u64; 2],
}

impl Occasions {
    /// Creates the occasions at the end of every epoch, or of each multiple of `every_epochs` and
    /// of the last one. 0 counts as `None`.
    pub fn new(plan: Plan, every_epochs: Option<u64>) -> Self {
        let epoch = plan.steps_per_epoch().max(1);
        let every = epoch.saturating_mul(every_epochs.unwrap_or(1).max(1));
        Self { plan, every: [every, every] }
    }

    /// Adds each multiple of a number of steps. `None` and 0 add nothing.
    #[must_use]
    pub fn and_every_steps(mut self, steps: Option<u64>) -> Self {
        self.every[1] = steps.filter(|&steps| steps > 0).unwrap_or(self.every[0]);
        self
    }

    /// Returns whether a version is measured.
    pub fn contains(&self, version: Version) -> bool {
        let last = self.plan.steps();
        version.0 == last
            || (1..last).contains(&version.0)
                && self.every.iter().any(|&every| version.0.is_multiple_of(every))
    }

    /// Returns the first measured version after this one. `None`: there is none.
    pub fn after(&self, version: Version) -> Option<Version> {
        let last = self.plan.steps();
        let multiples = self.every.iter().map(|&every| (version.0 / every + 1).saturating_mul(every));
        let next = multiples.min().map_or(last, |next| next.min(last));
        Some(Version(next)).filter(|_| version.0 < last)
    }

    /// Returns the last measured version before this one. `None`: there is none.
    pub fn before(&self, version: Version) -> Option<Version> {
        let last = self.plan.steps();
        if version.0 > last {
            return Some(Version(last));
        }
        let below = version.0.saturating_sub(1);
        let before = self.every.iter().map(|&every| below - below % every).max();
        before.filter(|&before| before > 0).map(Version)
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
        let steps = |every| Occasions::new(PLAN, None).and_every_steps(every);
        assert_eq!(all(steps(None)), [5, 10]);
        assert_eq!(all(steps(Some(4))), [4, 5, 8, 10]);
        assert_eq!(all(steps(Some(100))), [5, 10]);
        assert_eq!(all(steps(Some(u64::MAX))), [5, 10]);
        let occasions = steps(Some(4));
        let epochs = [4, 5, 8, 10].map(|version| occasions.epoch_of(Version(version)));
        assert_eq!(epochs, [Epoch(0), Epoch(0), Epoch(1), Epoch(1)]);
    }

    #[test]
    fn ends_of_epochs_can_be_left_out_except_the_last() {
        let plan = Plan { epochs: 5, ..PLAN };
        let epochs = |every| Occasions::new(plan, every);
        assert_eq!(all(epochs(None)), [5, 10, 15, 20, 25]);
        assert_eq!(all(epochs(Some(2))), [10, 20, 25]);
        assert_eq!(all(epochs(Some(u64::MAX))), [25]);
        assert_eq!(all(epochs(Some(2)).and_every_steps(Some(8))), [8, 10, 16, 20, 24, 25]);
    }

    proptest! {
        #[test]
        fn neighbours_are_the_nearest_measured_versions(
            steps in 1u64..9, epochs in 1u64..5, every_epochs in 0u64..4, every in 0u64..12, version in 0u64..60,
        ) {
            let plan = Plan { records: steps, micro: 1, microbatches_per_step: 1, epochs };
            let occasions = Occasions::new(plan, Some(every_epochs)).and_every_steps(Some(every));
            let last = steps * epochs;
            let due = |version: u64| {
                version > 0 && version <= last
                    && (version == last || version.is_multiple_of(steps * every_epochs.max(1))
                        || every > 0 && version.is_multiple_of(every))
            };
            prop_assert_eq!(occasions.contains(Version(version)), due(version));
            let after = (version + 1..=last).find(|&next| due(next)).map(Version);
            prop_assert_eq!(occasions.after(Version(version)), after);
            let before = (1..version).rev().find(|&last| due(last)).map(Version);
            prop_assert_eq!(occasions.before(Version(version)), before);
        }
    }
}
