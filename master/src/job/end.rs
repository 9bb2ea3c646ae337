//! The end of a job: its state, its reason, and what is saved before.

use proto::ids::Version;
use proto::pb::JobState;

/// How a job ends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct End {
    pub(super) state: JobState,
    pub(super) reason: String,
}

/// What of a job that ends early is worth keeping.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Salvage {
    Nothing,
    /// This version is known to be good.
    Version(Version),
    /// This version is the best one, in every order of updates.
    Best(Version),
    /// Whatever all its partitions have.
    Newest,
}

pub(super) const fn failed(reason: String) -> End {
    End { state: JobState::Failed, reason }
}
