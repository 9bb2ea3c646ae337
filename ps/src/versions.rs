//! Which versions of the weights are kept: the newest few, and those that an evaluation has not
//! measured yet.
//!
//! Pure; the weights are any type `T`. Always true here: the newest version is kept, so is every
//! one that is pinned, and at most `newest` versions are neither older than the newest nor pinned.

use std::collections::BTreeMap;

use proto::ids::Version;
use proto::plan::Occasions;

/// The kept versions of one partition.
#[derive(Debug)]
pub(crate) struct Versions<T> {
    kept: BTreeMap<Version, T>,
    /// How many of the newest are kept, at least 1.
    newest: usize,
    /// Versions to pin, if the job evaluates.
    evaluated: Option<Occasions>,
    /// Versions up to this one are not pinned any more, except `best`.
    unpinned: Version,
    /// Best version so far, or version 0 if there is none. It is pinned.
    best: Version,
}

/// What there is of a version.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Kept<T> {
    /// The version.
    Here(T),
    /// The version is gone: its steps are applied.
    Gone,
    /// The version does not exist yet.
    NotYet,
}

impl<T: Clone> Versions<T> {
    /// Creates a store without versions. It keeps the `newest` newest versions, and every version
    /// that `evaluated` contains until it is unpinned.
    pub(crate) const fn new(newest: usize, evaluated: Option<Occasions>) -> Self {
        Self { kept: BTreeMap::new(), newest, evaluated, unpinned: Version(0), best: Version(0) }
    }

    /// Adds the next version; returns what is let go, to be dropped outside the caller's lock.
    ///
    /// # Panics
    /// If it is not newer than the newest.
    #[must_use = "to be dropped outside the lock"]
    pub(crate) fn insert(&mut self, version: Version, weights: T) -> Vec<T> {
        assert!(self.newest().is_none_or(|(newest, _)| newest < version), "version {version} is not newer");
        self.kept.insert(version, weights);
        self.prune()
    }

    /// Versions up to `version` need not be kept for evaluation any more, except `best`; returns
    /// what is let go. A call with an older version than before changes nothing.
    #[must_use = "to be dropped outside the lock"]
    pub(crate) fn unpin(&mut self, version: Version, best: Version) -> Vec<T> {
        if version >= self.unpinned {
            (self.unpinned, self.best) = (version, best);
        }
        self.prune()
    }

    /// Returns the versions that are kept for evaluation alone, once
    /// [`make_room`](Self::make_room) was called.
    pub(crate) fn pinned(&self) -> Vec<(Version, T)> {
        let newest = self.newest.saturating_sub(1).max(1);
        let pinned = self.kept.iter().rev().skip(newest);
        pinned.map(|(version, weights)| (*version, weights.clone())).collect()
    }

    /// Puts equal weights in the place of a version, if it is kept; returns what is let go.
    #[must_use = "to be dropped outside the lock"]
    pub(crate) fn replace(&mut self, version: Version, weights: T) -> Option<T> {
        let kept = self.kept.get_mut(&version)?;
        Some(std::mem::replace(kept, weights))
    }

    /// Lets go of all versions.
    #[must_use = "to be dropped outside the lock"]
    pub(crate) fn clear(&mut self) -> Vec<T> {
        std::mem::take(&mut self.kept).into_values().collect()
    }

    /// Looks a version up.
    pub(crate) fn get(&self, version: Version) -> Kept<T> {
        match (self.kept.get(&version), self.newest()) {
            (Some(weights), _) => Kept::Here(weights.clone()),
            (None, Some((newest, _))) if version < newest => Kept::Gone,
            _ => Kept::NotYet,
        }
    }

    /// Returns the newest version and its weights.
    pub(crate) fn newest(&self) -> Option<(Version, &T)> {
        self.kept.last_key_value().map(|(version, weights)| (*version, weights))
    }

    /// Returns how many are kept.
    pub(crate) fn len(&self) -> usize {
        self.kept.len()
    }

    /// Lets go of what need not be kept once the next version is being made: whoever has the step's
    /// gradients has what they were computed from. Returns what is let go.
    #[must_use = "to be dropped outside the lock"]
    pub(crate) fn make_room(&mut self) -> Vec<T> {
        self.keep(self.newest.saturating_sub(1).max(1))
    }

    fn prune(&mut self) -> Vec<T> {
        self.keep(self.newest)
    }

    fn keep(&mut self, newest: usize) -> Vec<T> {
        let oldest_of_newest = self.kept.keys().rev().nth(newest - 1).copied().unwrap_or_default();
        let (evaluated, unpinned, best) = (self.evaluated, self.unpinned, self.best);
        let pinned = |version: Version| {
            version > Version(0) && version == best
                || version > unpinned && evaluated.is_some_and(|occasions| occasions.contains(version))
        };
        let gone = self.kept.extract_if(..oldest_of_newest, |version, _| !pinned(*version));
        gone.map(|(_, weights)| weights).collect()
    }
}

#[cfg(test)]
mod tests {
    use proto::plan::Plan;

    use super::*;

    /// Three steps an epoch.
    const PLAN: Plan = Plan { records: 6, micro: 2, microbatches_per_step: 1, epochs: 4 };

    const NONE: Version = Version(0);

    fn epochs() -> Occasions {
        Occasions::new(PLAN, None)
    }

    fn kept(versions: &Versions<u64>) -> Vec<u64> {
        versions.kept.keys().map(|version| version.get()).collect()
    }

    fn filled(newest: usize, evaluated: Option<Occasions>, to: u64) -> Versions<u64> {
        let mut versions = Versions::new(newest, evaluated);
        for version in 0..=to {
            drop(versions.insert(Version(version), version));
        }
        versions
    }

    #[test]
    fn only_the_newest_are_kept_without_evaluation() {
        let versions = filled(2, None, 7);
        assert_eq!(kept(&versions), [6, 7]);
        assert_eq!(versions.get(Version(6)), Kept::Here(6));
        assert_eq!(versions.get(Version(5)), Kept::Gone);
        assert_eq!(versions.get(Version(8)), Kept::NotYet);
        assert_eq!(Versions::<u64>::new(2, None).get(Version(0)), Kept::NotYet);
    }

    #[test]
    fn room_for_the_next_version_is_that_of_the_oldest() {
        let mut versions = filled(2, Some(epochs()), 4);
        assert_eq!(kept(&versions), [3, 4]);
        assert_eq!(versions.make_room(), [0; 0], "the end of an epoch is not measured yet");
        let mut versions = filled(4, None, 7);
        assert_eq!(versions.make_room(), [4]);
        assert_eq!(kept(&versions), [5, 6, 7]);
        assert_eq!(versions.make_room(), [0; 0]);
        let mut versions = filled(1, None, 7);
        assert_eq!(versions.make_room(), [0; 0], "the next one is made from the newest");
    }

    #[test]
    fn ends_of_epochs_stay_until_they_are_unpinned() {
        let mut versions = filled(2, Some(epochs()), 10);
        assert_eq!(kept(&versions), [3, 6, 9, 10]);
        assert_eq!(versions.unpin(Version(6), NONE), [3, 6]);
        assert_eq!(kept(&versions), [9, 10]);
        assert_eq!(versions.unpin(Version(9), NONE), [0; 0], "still among the newest");
        assert_eq!(versions.insert(Version(11), 11), [9]);
    }

    #[test]
    fn versions_between_epochs_stay_if_they_are_measured() {
        let versions = filled(1, Some(Occasions::new(PLAN, None).and_every_steps(Some(4))), 10);
        assert_eq!(kept(&versions), [3, 4, 6, 8, 9, 10]);
    }

    #[test]
    fn the_best_version_stays_until_it_is_beaten() {
        let mut versions = filled(1, Some(epochs()), 10);
        assert_eq!(versions.unpin(Version(6), Version(3)), [6]);
        assert_eq!(kept(&versions), [3, 9, 10]);
        assert_eq!(versions.unpin(Version(3), NONE), [0; 0], "a late message of before");
        assert_eq!(versions.unpin(Version(9), Version(9)), [3]);
        assert_eq!(versions.unpin(Version(12), Version(9)), [0; 0]);
        assert_eq!(versions.insert(Version(11), 11), [10]);
        assert_eq!(kept(&versions), [9, 11]);
    }

    #[test]
    fn versions_that_only_an_evaluation_needs_may_be_replaced() {
        let mut versions = filled(2, Some(epochs()), 8);
        assert_eq!(versions.make_room(), [7]);
        assert_eq!(versions.pinned(), [(Version(6), 6), (Version(3), 3)]);
        assert_eq!(versions.replace(Version(3), 33), Some(3));
        assert_eq!(versions.replace(Version(4), 44), None, "it is not kept");
        assert_eq!(versions.get(Version(3)), Kept::Here(33));
        assert_eq!((versions.clear(), versions.len()), (vec![33, 6, 8], 0));
    }

    #[test]
    fn what_is_unpinned_before_it_exists_is_not_pinned() {
        let mut versions = filled(1, Some(epochs()), 1);
        assert_eq!(versions.unpin(Version(3), NONE), [0; 0]);
        (2..5).for_each(|version| drop(versions.insert(Version(version), version)));
        assert_eq!(kept(&versions), [4]);
    }
}
