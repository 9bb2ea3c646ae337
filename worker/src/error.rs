//! Everything that stops a worker's task, and whether another attempt can help.

use std::path::PathBuf;

use proto::ids::PartitionId;
use proto::status::Failure;

/// Result of a worker's work.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What went wrong.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A call to the master or a ps failed for good.
    #[error("{what}: {failure}")]
    Call {
        /// Which call, to whom.
        what: String,
        /// How it failed.
        failure: Failure,
    },
    /// A ps says that it does not hold a partition which it holds by the master's placement.
    #[error("{what}: {failure}")]
    NotHeld {
        /// Which call, to whom.
        what: String,
        /// Which partition.
        partition: PartitionId,
        /// What the ps says.
        failure: Failure,
    },
    /// A file cannot be read or written.
    #[error("{}: {source}", path.display())]
    File {
        /// Which.
        path: PathBuf,
        /// What the system says.
        source: std::io::Error,
    },
    /// A data file is not what its format says.
    #[error("{}: {reason}", path.display())]
    Data {
        /// Which.
        path: PathBuf,
        /// Where in it, expected against found, what to do.
        reason: String,
    },
    /// The job's description and its data do not go together.
    #[error(transparent)]
    Specification(proto::Error),
    /// A record beyond the end of its data set.
    #[error(
        "record {record}: the data set has {records}; its files have changed since the job began, restore them or submit the job anew"
    )]
    NoRecord {
        /// The record's number within its data set.
        record: u64,
        /// Records of the data set.
        records: u64,
    },
    /// This worker's copy of the data is not the one that the job was indexed from.
    #[error("{}: {found} records here, {expected} where the job was indexed; give this worker the same files", path.display())]
    Records {
        /// Which file.
        path: PathBuf,
        /// Records when it was indexed.
        expected: u64,
        /// Records here.
        found: u64,
    },
    /// A record's label does not fit the network's outputs.
    #[error(
        "record {record}: label {label} is outside 0..{classes}; the network has {classes} outputs, give it more or mend the labels"
    )]
    Label {
        /// The record within its data set.
        record: u64,
        /// Its label.
        label: i64,
        /// Outputs of the network.
        classes: usize,
    },
    /// Outputs and loss do not go together.
    #[error(
        "the loss `{loss}` needs {expected}, found {found}; choose another loss or network, or mend the labels"
    )]
    Loss {
        /// The job's loss.
        loss: String,
        /// Shape or type it needs.
        expected: String,
        /// What it was given.
        found: String,
    },
    /// The data's shape does not fit the network.
    #[error(
        "the network `{model}` needs records of shape {expected}, the data has {found:?}; set data.shape or choose another network"
    )]
    Shape {
        /// The network.
        model: String,
        /// What it takes.
        expected: String,
        /// What the data has.
        found: Vec<usize>,
    },
    /// A builtin network that nobody registered.
    #[error("model.builtin: no network `{name}`; known are {}", known.join(", "))]
    UnknownModel {
        /// The name.
        name: String,
        /// All names.
        known: Vec<String>,
    },
    /// A builtin network's options are wrong.
    #[error("model.options of `{model}`: {reason}")]
    ModelOptions {
        /// The network.
        model: String,
        /// What is wrong.
        reason: String,
    },
    /// A TorchScript file that is none, or does not do what the job needs.
    #[error("model script `{name}`: {reason}")]
    Script {
        /// Its artifact name.
        name: String,
        /// What is wrong and what to do.
        reason: String,
    },
    /// The compute engine failed.
    #[error("{what}: {reason}")]
    Engine {
        /// Doing what.
        what: String,
        /// What it says.
        reason: String,
    },
    /// The loss is not finite.
    #[error(
        "the loss of step {step} is {loss} (microbatch {microbatch}); lower the learning rate or look at the data"
    )]
    Diverged {
        /// The step.
        step: u64,
        /// The microbatch.
        microbatch: u64,
        /// NaN or infinity.
        loss: f32,
    },
    /// Options that contradict themselves: every violation.
    #[error("worker options: {}", .0.join("; "))]
    Options(Vec<String>),
    /// A device that no flag means.
    #[error("device `{0}`: expected cpu, cuda:N or auto")]
    UnknownDevice(String),
    /// A CUDA device that is not there.
    #[error(
        "device cuda:{index}: this process sees {found} CUDA devices; use --device cpu, or check the driver and `cargo xtask libtorch --cuda`"
    )]
    NoSuchDevice {
        /// The index asked for.
        index: usize,
        /// Devices there.
        found: usize,
    },
    /// This program was built without libtorch.
    #[error(
        "{0} needs libtorch, and this program was built with --no-default-features; build it with the `torch` feature"
    )]
    NoTorch(String),
}

impl Error {
    /// A task of ours that panicked.
    pub(crate) fn from_panic(what: &str, panic: &tokio::task::JoinError) -> Self {
        Self::Engine { what: what.to_owned(), reason: panic.to_string() }
    }

    /// Whether the other side no longer wants what this worker does: it slept, or the job was rewound or ended. A ps that does not hold
    /// what it should is another matter, see [`NotHeld`](Self::NotHeld).
    pub(crate) fn is_fenced(&self) -> bool {
        use proto::status::Kind;
        matches!(self, Self::Call { failure, .. } if matches!(failure.kind, Kind::Fenced | Kind::NotFound))
    }

    /// Whether the other side is fine but cannot do it yet.
    pub(crate) fn is_not_yet(&self) -> bool {
        matches!(self, Self::Call { failure, .. } if failure.kind == proto::status::Kind::NotYet)
    }

    /// Whether this worker could not reach a ps for all its attempts, or has no key for it: it cannot go on, others may.
    pub(crate) fn is_unreachable(&self) -> bool {
        use proto::status::Kind::{Denied, Full, Unauthenticated, Unavailable};
        matches!(self, Self::Call { failure, .. }
            if matches!(failure.kind, Unavailable | Full | Unauthenticated | Denied))
    }

    /// Whether another attempt, here or on another worker, can only fail the same way.
    pub fn is_fatal(&self) -> bool {
        match self {
            Self::Call { failure, .. } => matches!(failure.kind, proto::status::Kind::Malformed),
            Self::File { .. }
            | Self::NotHeld { .. }
            | Self::Records { .. }
            | Self::Engine { .. }
            | Self::NoSuchDevice { .. }
            | Self::NoTorch(_) => false,
            _ => true,
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
}
