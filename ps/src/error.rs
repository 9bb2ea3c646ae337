//! Everything that a ps refuses or that stops it, and what the other side should do about it.

use std::time::Duration;

use proto::ids::{Era, JobId, Step, Version};
use proto::parameters::Want;
use proto::status::{Failure, Kind};
use tonic::Status;

use crate::opening::Place;

/// Result of an operation of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What is wrong.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The options contradict themselves: every violation, a line each.
    #[error("the ps cannot run as it is configured:\n{}", .0.iter().map(|line| format!("  - {line}")).collect::<Vec<_>>().join("\n"))]
    Options(Vec<String>),
    /// A message fails the checks that both sides share.
    #[error(transparent)]
    Message(#[from] proto::Error),
    /// Nobody opened this here, or it was closed.
    #[error(
        "this ps does not hold {place}; the job has ended or lives elsewhere, ask the master for its placement"
    )]
    Unknown {
        /// The partition.
        place: Place,
    },
    /// Work on the partition has panicked, so what it has is not known any more. It is dropped.
    #[error(
        "this ps does not hold {place} any more: work on it panicked, which is a bug, and its log says where; the job goes on from its \
         last checkpoint"
    )]
    Broken {
        /// The partition.
        place: Place,
    },
    /// Nobody opened any part of the job here, or it was closed.
    #[error("this ps holds no partition of job {job}; it has ended or lives elsewhere")]
    UnknownJob {
        /// The job.
        job: JobId,
    },
    /// The sender missed a rewind.
    #[error(
        "{place}: sent in era {sender}, it is in era {here} here; the job was rewound, ask the master anew"
    )]
    Fenced {
        /// The partition.
        place: Place,
        /// Era of the request.
        sender: Era,
        /// Era of the partition.
        here: Era,
    },
    /// The sender's time as the master is over.
    #[error(
        "close job {job}: asked by start {sender} of the master, and start {here} is the master of this ps; nothing is closed"
    )]
    OldMaster {
        /// The job.
        job: JobId,
        /// Start of the sender.
        sender: u64,
        /// Start that this ps is registered with.
        here: u64,
    },
    /// The job is of another journal, in which it only has the same number.
    #[error(
        "close {place}: asked by master {sender:016x}, and master {here:016x} opened it; nothing is closed"
    )]
    OtherMaster {
        /// The partition.
        place: Place,
        /// Identity of the sender.
        sender: u64,
        /// Identity of the master that opened it.
        here: u64,
    },
    /// This ps has yet to hear of a rewind.
    #[error(
        "{place}: sent in era {sender}, it is still in era {here} here; wait until the master has opened the new one"
    )]
    EraAhead {
        /// The partition.
        place: Place,
        /// Era of the request.
        sender: Era,
        /// Era of the partition.
        here: Era,
    },
    /// The partition is open with another content.
    #[error("open {place}: it is open with another {what}; close the job before it is opened differently")]
    Differs {
        /// The partition.
        place: Place,
        /// The first part of the request that differs.
        what: &'static str,
    },
    /// The parts of an open request contradict each other.
    #[error("open {place}: {what}: expected {expected}, found {found}")]
    Contradiction {
        /// The partition.
        place: Place,
        /// Name of the number.
        what: &'static str,
        /// The value that the specification gives.
        expected: String,
        /// The value that was sent.
        found: String,
    },
    /// The partition is larger than this ps takes.
    #[error(
        "open {place}: {bytes} bytes of weights, this ps takes at most {bytes_max} (partition_bytes_max); \
         raise it or spread the model over more ps (fleet.ps)"
    )]
    PartitionTooLarge {
        /// The partition.
        place: Place,
        /// Size of its weights.
        bytes: u64,
        /// The limit.
        bytes_max: u64,
    },
    /// The device has too little memory left for the partition.
    #[error(
        "open {place}: versions, slots and a checkpoint of it need {bytes} bytes on {device}, which has {} left of {bytes_max} for \
         partitions; spread the model over more ps (fleet.ps), wait until another job ends, raise device_bytes_max, or \
         use a ps with --device cpu", bytes_max.saturating_sub(*taken)
    )]
    DeviceFull {
        /// The partition.
        place: Place,
        /// The device.
        device: String,
        /// Bytes that the partition needs there.
        bytes: u64,
        /// Bytes that others have taken.
        taken: u64,
        /// The limit.
        bytes_max: u64,
    },
    /// The device has less memory than it had when the ps started.
    #[error("open {place}: {error}")]
    DeviceShort {
        /// The partition.
        place: Place,
        /// What the device lacks.
        error: kernels::Error,
    },
    /// The device has too little memory for its limit.
    #[error(
        "device_bytes_max = {asked}: {device} has {free} of {total} bytes free, of which partitions may take {most}; lower it, \
         or let other processes on the device take less"
    )]
    DeviceMemory {
        /// The device.
        device: String,
        /// The limit.
        asked: u64,
        /// The largest limit.
        most: u64,
        /// Bytes that are free.
        free: u64,
        /// Bytes of the device.
        total: u64,
    },
    /// The device failed, so what it has is not known any more.
    #[error(
        "the device of this ps failed, and its partitions are lost: {0}; the job goes on from its last checkpoint"
    )]
    Device(#[from] kernels::Error),
    /// The other partitions cannot be reached.
    #[error("open: homes of partitions: {0}")]
    Home(Failure),
    /// No room for another job.
    #[error(
        "open job {job}: this ps has {jobs_max} jobs already (jobs_max); wait until one ends or raise the limit"
    )]
    JobsFull {
        /// The job.
        job: JobId,
        /// The limit.
        jobs_max: usize,
    },
    /// No room for another push right now.
    #[error(
        "push to {place}: {bytes} bytes on top of the {in_flight_bytes} being received or waiting for others exceed the limit of \
         {bytes_max} (push_bytes_max); send it again later"
    )]
    PushesFull {
        /// The partition.
        place: Place,
        /// Bytes of the push.
        bytes: u64,
        /// Bytes of others.
        in_flight_bytes: u64,
        /// The limit.
        bytes_max: u64,
    },
    /// Too many older versions are still being read.
    #[error(
        "pull from {place}: {versions} older versions are still being read, the most that this ps keeps for that \
         (pulled_versions_max); pull again later"
    )]
    PullsFull {
        /// The partition.
        place: Place,
        /// Number of versions.
        versions: usize,
    },
    /// Too many steps are incomplete.
    #[error(
        "push to {place}: step {step} would be one more than the {steps_max} steps that may be in progress \
         (steps_in_progress_max); send it again later"
    )]
    StepsFull {
        /// The partition.
        place: Place,
        /// The step.
        step: Step,
        /// The limit.
        steps_max: usize,
    },
    /// Gradients of weights that are not there yet.
    #[error(
        "push to {place}: step {step} while the weights are at version {version}; by the job's delay \
         no worker can have computed it yet, the sender has another job or placement"
    )]
    StepAhead {
        /// The partition.
        place: Place,
        /// The step.
        step: Step,
        /// Version of the partition.
        version: Version,
    },
    /// Gradients before version 0.
    #[error(
        "push to {place}: step {step} before version 0; send it again once the initial weights are there"
    )]
    NoWeights {
        /// The partition.
        place: Place,
        /// The step.
        step: Step,
    },
    /// The file that would show the master where this ps writes cannot be written.
    #[error("the place of the checkpoints: {failure}")]
    Probe {
        /// The failure of the store.
        failure: Failure,
    },
    /// A job that does not say where its checkpoints go.
    #[error("save {place}: its job has no checkpoints; give it a [checkpoint] section")]
    NoCheckpoints {
        /// The partition.
        place: Place,
    },
    /// A push that does not come to its end.
    #[error("push to {place}: its chunks did not arrive within {waited:?} (push_timeout); send it again")]
    PushTimedOut {
        /// The partition.
        place: Place,
        /// How long it took.
        waited: Duration,
    },
    /// A push tells of regions of a memory that is not known here: this ps started after they were
    /// attached, or the worker left.
    #[error("push to {place}: this ps does not read this worker's memory (any more); attach again")]
    NotAttached {
        /// The partition.
        place: Place,
    },
    /// An agent forwards a call of a process that belongs to another script.
    #[error("{place}: it is of no job of script {script}, whose processes take part in its jobs alone")]
    OfAnotherScript {
        /// The partition.
        place: Place,
        /// The script that the agent names.
        script: JobId,
    },
    /// The connection that brings a push broke, or a message of it is too large.
    #[error("receiving a push: {0}")]
    Stream(#[from] Box<Status>),
    /// A version that will never be.
    #[error("pull from {place}: {} will never be, the job ends with version {last}", wanted(*want))]
    BeyondPlan {
        /// The partition.
        place: Place,
        /// What was asked for.
        want: Want,
        /// The last version.
        last: Version,
    },
    /// A version that did not come in time.
    #[error(
        "pull from {place}: {} did not come within {waited:?}; it is at {}, ask again",
        wanted(*want), version.map_or_else(|| "no version yet".to_owned(), |version| format!("version {version}"))
    )]
    NotYet {
        /// The partition.
        place: Place,
        /// What was asked for.
        want: Want,
        /// How long the pull waited.
        waited: Duration,
        /// Version of the partition.
        version: Option<Version>,
    },
    /// A step whose sum was not complete in time.
    #[error("squares of step {step} of {place}: its sum was not complete within {waited:?}; ask again")]
    NotMeasured {
        /// The partition.
        place: Place,
        /// The step.
        step: Step,
        /// How long it was waited for.
        waited: Duration,
    },
    /// A step whose norms nobody can need any more.
    #[error(
        "squares of step {step} of {place}: kept no longer, as every partition has applied it; the sender has another era"
    )]
    NormsGone {
        /// The partition.
        place: Place,
        /// The step.
        step: Step,
    },
    /// A version that is kept no longer.
    #[error(
        "pull from {place}: version {version} is kept no longer, it is at version {newest}; the steps \
         of the older ones are applied, drop the work"
    )]
    Gone {
        /// The partition.
        place: Place,
        /// What was asked for.
        version: Version,
        /// What there is.
        newest: Version,
    },
    /// The ps is on its way out.
    #[error("this ps is shutting down; try again when it is back")]
    Stopping,
    /// The master wants no such ps.
    #[error("the master at {master} does not take this ps: {failure}")]
    Session {
        /// URL of the master.
        master: String,
        /// The reason of the master.
        failure: Failure,
    },
    /// The gRPC server cannot run.
    #[error("serving parameters: {0}")]
    Transport(#[from] tonic::transport::Error),
    /// A thread for connections cannot be started.
    #[error("starting a thread for connections: {0}")]
    Threads(#[from] std::io::Error),
    /// A thread for connections is gone.
    #[error("a thread for connections ended; this is a bug, the log of this ps has more")]
    ThreadEnded,
    /// The schema for reflection is broken.
    #[error("serving the schema: {0}")]
    Reflection(#[from] tonic_reflection::server::Error),
    /// The device of a worker of this process failed, with the gradients that it pushed.
    #[error("read the gradients of a push from the worker's device: {0}")]
    SenderDevice(String),
    /// A bug.
    #[error("taking up a push: {0}; this is a bug, the log of this ps has more")]
    Panicked(#[from] tokio::task::JoinError),
}

fn wanted(want: Want) -> String {
    match want {
        Want::Exact(version) => format!("version {version}"),
        Want::AtLeast(version) => format!("a version with all steps below {version}"),
    }
}

impl Error {
    /// Returns what the other side should do.
    pub fn kind(&self) -> Kind {
        match self {
            Self::Home(failure) | Self::Probe { failure } => failure.kind,
            Self::Stream(status) => Failure::from(Status::clone(status)).kind,
            Self::Message(_)
            | Self::Differs { .. }
            | Self::Contradiction { .. }
            | Self::PartitionTooLarge { .. }
            | Self::StepAhead { .. }
            | Self::NoCheckpoints { .. }
            | Self::BeyondPlan { .. } => Kind::Malformed,
            Self::Unknown { .. } | Self::UnknownJob { .. } | Self::Broken { .. } | Self::Device(_) => {
                Kind::NotFound
            }
            Self::DeviceFull { bytes, bytes_max, .. } if bytes > bytes_max => Kind::Malformed,
            Self::Fenced { .. } | Self::OldMaster { .. } | Self::OtherMaster { .. } => Kind::Fenced,
            Self::JobsFull { .. }
            | Self::DeviceFull { .. }
            | Self::DeviceShort { .. }
            | Self::PushesFull { .. }
            | Self::PullsFull { .. }
            | Self::StepsFull { .. } => Kind::Full,
            Self::EraAhead { .. }
            | Self::NoWeights { .. }
            | Self::PushTimedOut { .. }
            | Self::NotAttached { .. }
            | Self::SenderDevice(_)
            | Self::Stopping => Kind::Unavailable,
            Self::NotYet { .. } | Self::NotMeasured { .. } => Kind::NotYet,
            Self::OfAnotherScript { .. } => Kind::Denied,
            Self::Gone { .. } | Self::NormsGone { .. } => Kind::Gone,
            Self::Options(_)
            | Self::DeviceMemory { .. }
            | Self::Session { .. }
            | Self::Transport(_)
            | Self::Reflection(_)
            | Self::Threads(_)
            | Self::ThreadEnded
            | Self::Panicked(_) => Kind::Internal,
        }
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self::new(error.kind(), error)
    }
}

impl From<Status> for Error {
    fn from(status: Status) -> Self {
        Self::Stream(Box::new(status))
    }
}

impl From<Error> for Status {
    fn from(error: Error) -> Self {
        Failure::from(error).into()
    }
}

#[cfg(test)]
mod tests {
    use proto::ids::PartitionId;

    use super::*;

    #[test]
    fn messages_name_what_was_asked_and_what_there_is() {
        let place = Place { job: JobId(3), partition: PartitionId(1) };
        let error = Error::NotYet {
            place,
            want: Want::Exact(Version(7)),
            waited: Duration::from_secs(2),
            version: Some(Version(5)),
        };
        assert_eq!(
            error.to_string(),
            "pull from job 3 partition 1: version 7 did not come within 2s; it is at version 5, ask again"
        );
        assert!(Failure::from(error).is_retryable());
        let error = Error::StepAhead { place, step: Step(9), version: Version(4) };
        assert!(
            error
                .to_string()
                .starts_with("push to job 3 partition 1: step 9 while the weights are at version 4;")
        );
        assert_eq!(Failure::from(error).kind, Kind::Malformed);
    }
}
