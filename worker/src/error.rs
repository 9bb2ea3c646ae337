//! Errors of a worker's task, and whether a retry may help.

use std::path::PathBuf;
use std::sync::Arc;

use model::fault::{Fault, fault};
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
    /// The device has too little free memory for this task. Another one, or a smaller task, may do.
    #[error(
        "{device} is out of memory: {reason}; lower batch.micro, let fewer processes use the device, or choose one with \
         more memory (fleet.device_memory)"
    )]
    OutOfMemory {
        /// Device with its memory.
        device: Arc<str>,
        /// What the engine says.
        reason: String,
    },
    /// This process cannot use its device any more.
    #[error("{device} is lost: {reason}; the worker leaves, start it again")]
    DeviceLost {
        /// Device with its memory.
        device: Arc<str>,
        /// What the engine says.
        reason: String,
        /// Whether the task may be the reason. Then its lease counts as an attempt, so that a job
        /// cannot end one worker after the other.
        by_task: bool,
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

    /// Returns this error of a task on `device`, or what it means for the device.
    pub(crate) fn on(self, device: &Arc<str>) -> Self {
        let Self::Model(model::Error::Engine { reason, .. }) = &self else { return self };
        let (device, reason) = (device.clone(), reason.clone());
        match fault(&reason) {
            None => self,
            Some(Fault::OutOfMemory) => Self::OutOfMemory { device, reason },
            Some(Fault::Lost) => Self::DeviceLost { device, reason, by_task: false },
            Some(Fault::Spoiled) => Self::DeviceLost { device, reason, by_task: true },
        }
    }

    /// Returns whether the worker ends because it cannot use its device any more.
    pub const fn is_device_lost(&self) -> bool {
        matches!(self, Self::DeviceLost { .. })
    }

    /// Returns whether a lease with this error is handed back: it would succeed elsewhere.
    pub(crate) const fn is_for_others(&self) -> bool {
        matches!(self, Self::DeviceLost { by_task: false, .. })
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
            Self::OutOfMemory { .. } | Self::DeviceLost { .. } => false,
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
    fn an_error_of_the_engine_says_what_it_means_for_the_device() {
        let device: Arc<str> = Arc::from("cuda:1 with 79.6 GiB");
        let of = |reason: &str| {
            let what = "gradients".to_owned();
            Error::from(model::Error::Engine { what, reason: reason.to_owned() }).on(&device)
        };
        let full = of("CUDA out of memory. Tried to allocate 2.00 GiB");
        let said = full.to_string();
        assert!(
            said.starts_with("cuda:1 with 79.6 GiB is out of memory: CUDA out of memory. Tried"),
            "{said}"
        );
        assert!(said.contains("2.00 GiB; lower batch.micro") && !full.is_fatal() && !full.is_device_lost());
        let lost = of("CUDA error: uncorrectable ECC error encountered");
        assert!(lost.is_device_lost() && lost.is_for_others() && !lost.is_fatal(), "{lost}");
        let spoiled = of("CUDA error: device-side assert triggered");
        assert!(spoiled.is_device_lost() && !spoiled.is_for_others() && !spoiled.is_fatal(), "{spoiled}");
        let other = of("shapes cannot be multiplied");
        assert_eq!(other.to_string(), "gradients: shapes cannot be multiplied");
    }

    #[test]
    fn what_other_workers_can_do_is_not_fatal() {
        let path = || PathBuf::from("x.npy");
        let missing = data::Error::File { path: path(), source: std::io::ErrorKind::NotFound.into() };
        let damaged = data::Error::Malformed { path: path(), reason: "cut off".to_owned() };
        assert!(!Error::from(missing).is_fatal() && Error::from(damaged).is_fatal());
        let reason = "no CUDA driver".to_owned();
        let no_gpu = model::Error::NoSuchDevice { device: "cuda:1".to_owned(), reason };
        let no_label = model::Error::Label { record: 7, label: 3, classes: 3 };
        assert!(!Error::from(no_gpu).is_fatal() && Error::from(no_label).is_fatal());
    }
}
