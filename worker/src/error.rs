//! Errors of a worker's task, and whether a retry may help.

use std::path::PathBuf;

use proto::ids::PartitionId;
use proto::status::Failure;

/// Result of a worker's work.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Error of a worker.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A call to the master or a ps failed for good.
    #[error("{what}: {failure}")]
    Call {
        /// Call and its receiver.
        what: String,
        /// Failure of the call.
        failure: Failure,
    },
    /// A ps does not hold a partition that the master's placement gives to it.
    #[error("{what}: {failure}")]
    NotHeld {
        /// Call and its receiver.
        what: String,
        /// Partition that is not held.
        partition: PartitionId,
        /// Failure that the ps returned.
        failure: Failure,
    },
    /// A file cannot be read or written.
    #[error("{}: {source}", path.display())]
    File {
        /// Path of the file or folder.
        path: PathBuf,
        /// Error of the system.
        source: std::io::Error,
    },
    /// Data cannot be read.
    #[error(transparent)]
    Data(#[from] data::Error),
    /// A model cannot be built, or does not compute.
    #[error(transparent)]
    Model(#[from] model::Error),
    /// What was counted of an evaluation cannot be reported.
    #[error(transparent)]
    Evaluation(#[from] proto::Error),
    /// The place of the predictions cannot be opened, read or written.
    #[error(transparent)]
    Store(#[from] proto::checkpoint::Error),
    /// This worker could not do a task. A retry may help.
    #[error("{what}: {reason}")]
    Task {
        /// Operation that failed.
        what: String,
        /// Reason of the failure.
        reason: String,
    },
    /// No worker can do a task of this job.
    #[error("{what}: {reason}")]
    Impossible {
        /// Operation that failed.
        what: String,
        /// Reason of the failure, and what to do.
        reason: String,
    },
    /// The loss is not finite.
    #[error(
        "the loss of step {step} is {loss} (microbatch {microbatch}); {}",
        warning.as_deref().unwrap_or("lower the learning rate or look at the data")
    )]
    Diverged {
        /// Step of the microbatch.
        step: u64,
        /// Microbatch with the loss.
        microbatch: u64,
        /// Loss: NaN or infinity.
        loss: f32,
        /// What this worker noticed in the job's records.
        warning: Option<String>,
    },
    /// The options contradict themselves. The list has every violation.
    #[error("worker options: {}", .0.join("; "))]
    Options(Vec<String>),
}

impl Error {
    /// Returns the error of an asynchronous task of this worker that panicked.
    pub(crate) fn from_panic(what: &str, panic: &tokio::task::JoinError) -> Self {
        Self::Task { what: what.to_owned(), reason: panic.to_string() }
    }

    /// Returns whether the other side no longer wants this worker's result, because the worker
    /// slept, or the job was rewound or ended. A ps that does not hold its partition is another
    /// error, see [`NotHeld`](Self::NotHeld).
    pub(crate) fn is_fenced(&self) -> bool {
        use proto::status::Kind;
        matches!(self, Self::Call { failure, .. } if matches!(failure.kind, Kind::Fenced | Kind::NotFound))
    }

    /// Returns whether the other side is fine but cannot do it yet, or this side will not do it.
    pub(crate) fn is_not_yet(&self) -> bool {
        matches!(self, Self::Model(model::Error::Left(_)))
            || matches!(self, Self::Call { failure, .. } if failure.kind == proto::status::Kind::NotYet)
    }

    /// Returns whether this worker could not reach a ps for all its attempts, or has no key for it.
    /// The worker cannot go on, but others may.
    pub(crate) fn is_unreachable(&self) -> bool {
        use proto::status::Kind::{Denied, Full, Unauthenticated, Unavailable};
        matches!(self, Self::Call { failure, .. }
            if matches!(failure.kind, Unavailable | Full | Unauthenticated | Denied))
    }

    /// Returns whether every retry, here or on another worker, fails the same way.
    pub fn is_fatal(&self) -> bool {
        match self {
            Self::Call { failure, .. } => matches!(failure.kind, proto::status::Kind::Malformed),
            Self::Data(error) => error.is_fatal(),
            Self::Model(error) => error.is_fatal(),
            Self::Store(error) => {
                use proto::checkpoint::Error::{NotAllowed, Url};
                matches!(error, Url { .. } | NotAllowed { .. })
            }
            Self::File { .. } | Self::NotHeld { .. } | Self::Task { .. } => false,
            Self::Impossible { .. } | Self::Diverged { .. } | Self::Evaluation(_) | Self::Options(_) => true,
        }
    }
}

#[cfg(test)]
mod tests {
    use proto::status::Kind;

    use super::*;

    #[test]
    fn a_partition_that_is_not_there_is_neither_fatal_nor_forgotten() {
        let (what, failure) = ("pull from partition 0".to_owned(), Failure::new(Kind::NotFound, "not here"));
        let of_the_master = Error::Call { what: what.clone(), failure: failure.clone() };
        assert!(of_the_master.is_fenced(), "the job is gone");
        let of_a_ps = Error::NotHeld { what, partition: PartitionId(0), failure };
        assert!(!of_a_ps.is_fenced() && !of_a_ps.is_fatal() && !of_a_ps.is_unreachable());
    }

    #[test]
    fn a_loss_that_is_not_finite_comes_with_what_was_noticed_in_the_records() {
        let diverged = |warning: Option<&str>| {
            let warning = warning.map(str::to_owned);
            Error::Diverged { step: 3, microbatch: 7, loss: f32::NAN, warning }.to_string()
        };
        assert_eq!(
            diverged(None),
            "the loss of step 3 is NaN (microbatch 7); lower the learning rate or look at the data"
        );
        assert_eq!(
            diverged(Some("1 value is NaN")),
            "the loss of step 3 is NaN (microbatch 7); 1 value is NaN"
        );
    }

    #[test]
    fn what_other_workers_can_do_is_not_fatal() {
        let path = || PathBuf::from("x.npy");
        let missing = data::Error::File { path: path(), source: std::io::ErrorKind::NotFound.into() };
        let damaged = data::Error::Malformed { path: path(), reason: "cut off".to_owned() };
        assert!(!Error::from(missing).is_fatal() && Error::from(damaged).is_fatal());
        let no_gpu = model::Error::NoSuchDevice { index: 1, found: 1 };
        let no_label = model::Error::Label { record: 7, label: 3, classes: 3 };
        assert!(!Error::from(no_gpu).is_fatal() && Error::from(no_label).is_fatal());
    }
}
