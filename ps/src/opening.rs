//! What a partition is opened with, what it has applied, and how it is named.

use std::fmt;
use std::ops::RangeInclusive;

use proto::ids::{Era, JobId, PartitionId, Version};
use proto::parameters::{Address, Restore};
use proto::plan::Plan;
use proto::spec::JobSpec;
use proto::tensor::{TensorRole, TensorSpec};

use crate::ledger::Ledger;

/// Which partition of which job.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Place {
    /// The job.
    pub job: JobId,
    /// The part of it.
    pub partition: PartitionId,
}

impl Place {
    /// Returns all partitions of a job.
    pub(crate) const fn all_of(job: JobId) -> RangeInclusive<Self> {
        RangeInclusive::new(
            Self { job, partition: PartitionId(0) },
            Self { job, partition: PartitionId(u32::MAX) },
        )
    }
}

impl From<Address> for Place {
    fn from(Address { job, partition, .. }: Address) -> Self {
        Self { job, partition }
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "job {} partition {}", self.job, self.partition)
    }
}

/// What a partition is opened with.
#[derive(Clone, Debug, PartialEq)]
pub struct Opening {
    /// Job, partition and era.
    pub address: Address,
    /// Number of partitions of the job.
    pub partitions: u32,
    /// All tensors of the model, in the model's order.
    pub tensors: Vec<TensorSpec>,
    /// The job's sequence of microbatches.
    pub plan: Plan,
    /// Optimizer, consistency and checkpoints are read from it.
    pub spec: JobSpec,
    /// The checkpoint to load; without one, version 0 is pushed.
    pub restore: Option<Restore>,
    /// URL of the ps of each partition, for steps that need norms over the whole model.
    pub homes: Vec<String>,
    /// Number of the placement that has these homes. Later placements have greater ones.
    pub placement: u64,
    /// The script whose processes train the job, if it is of one.
    pub script: Option<JobId>,
}

impl Opening {
    /// How [`difference`](Self::difference) calls the checkpoint that a partition is opened with.
    pub(crate) const CHECKPOINT: &'static str = "checkpoint";

    /// Returns whether a step needs to know what the other partitions of the job have measured.
    pub(crate) fn needs_others(&self) -> bool {
        self.partitions > 1 && (self.is_scaled() || self.spec.optimizer.needs_norms().is_some())
    }

    /// Returns whether the job has a loss scale.
    pub(crate) fn is_scaled(&self) -> bool {
        self.tensors.iter().any(|tensor| tensor.role == TensorRole::LossScale)
    }

    /// Names the first part of two openings that differs. The homes of the partitions may change.
    pub(crate) fn difference(&self, other: &Self) -> Option<&'static str> {
        let parts = [
            ("number of partitions", self.partitions == other.partitions),
            ("model", self.tensors == other.tensors),
            ("plan", self.plan == other.plan),
            ("specification", self.spec == other.spec),
            (Self::CHECKPOINT, self.restore == other.restore),
        ];
        parts.into_iter().find(|(_, same)| !same).map(|(what, _)| what)
    }
}

/// What a partition has applied.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Applied {
    /// Which partition.
    pub partition: PartitionId,
    /// Era it works in.
    pub era: Era,
    /// Steps applied; `None` until version 0 is there, or the checkpoint is loaded.
    pub version: Option<Version>,
    /// Which steps are applied, and what was counted on the way.
    pub ledger: Ledger,
    /// The reason for which the checkpoint cannot be loaded.
    pub restore_error: Option<String>,
}
