//! The failures between a user's program and a job.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use proto::status::Failure;

/// A failure, with advice on what to do about it.
///
/// [`std::error::Error::source`] leads to the cause. No message repeats the message of its cause.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A URL that leads to no master.
    #[error("{0}")]
    Url(Failure),
    /// The master's answer is a failure.
    #[error(transparent)]
    Failed(Failure),
    /// The master did not answer in time.
    #[error("no answer from the master at {url} for {patience:?}")]
    NoAnswer {
        /// The master's URLs.
        url: String,
        /// Time that it was tried for.
        patience: Duration,
        /// The newest failed attempt, if one ended at all.
        #[source]
        last: Option<Failure>,
    },
    /// The master has not taken the job.
    #[error("the master refused the job")]
    Refused(#[source] Failure),
    /// The master may have taken the job, and may not.
    #[error("the job was sent and the answer was lost; look with `ebb jobs` before sending it again")]
    AnswerLost(#[source] Failure),
    /// The stream of a job's events ended for good.
    #[error("watching {job}")]
    Watch {
        /// The job's name.
        job: String,
        /// The cause.
        source: Failure,
    },

    /// Files of a folder cannot travel with a script.
    #[error("{}: {reason}", path.display())]
    Bundle {
        /// The file, or the folder.
        path: PathBuf,
        /// The reason, and what to do.
        reason: String,
    },
    /// A secret of a script has no value.
    #[error("secret {name}: the environment has no such variable; set it before submitting")]
    NoSecret {
        /// The variable.
        name: String,
    },
    /// A secret of a script is no text.
    #[error(
        "secret {name}: the value of the variable is no UTF-8, and secrets travel as text; encode it, for example as \
         Base64, and decode it in the script"
    )]
    SecretNotText {
        /// The variable.
        name: String,
    },
    /// A bundle is damaged, or somebody made it by hand.
    #[error("the bundle of the script is refused: {0}")]
    BadBundle(String),

    /// A job file cannot be read.
    #[error("job file {}", path.display())]
    JobFile {
        /// The path.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// A job file, or a message of the master, is wrong.
    #[error(transparent)]
    Invalid(#[from] proto::Error),
    /// A model's file cannot be read.
    #[error("model.script: {}", path.display())]
    Script {
        /// The path.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// A model's file is something else, such as a `state_dict`.
    #[error(
        "model.script: {} is no TorchScript file; write it with `torch.jit.script(model).save(\"{name}\")`",
        path.display()
    )]
    NotTorchScript {
        /// The path.
        path: PathBuf,
        /// A good name for it.
        name: &'static str,
    },
    /// The file of a tokenizer cannot be read.
    #[error("the tokenizer of a transform `tokenize`: {}", path.display())]
    Tokenizer {
        /// The path.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The file of a tokenizer is something else.
    #[error("the tokenizer of a transform `tokenize`: {}: {reason}", path.display())]
    NotTokenizer {
        /// The path.
        path: PathBuf,
        /// What is wrong, and what to do.
        reason: String,
    },
    /// The weights to begin with cannot be read.
    #[error("model.initial: {initial}")]
    Initial {
        /// The value in the job file.
        initial: String,
        /// The cause.
        source: Box<Error>,
    },

    /// A network that this process does not have.
    #[error("model.builtin: no network `{name}`; known are {}", known.join(", "))]
    UnknownNetwork {
        /// The name in the job file.
        name: String,
        /// The networks that the process has.
        known: Vec<String>,
    },
    /// Data files that this process cannot read.
    #[error(
        "{} of {files} data files cannot be read; mend [data] in the job file, or say with --data-root where its paths start:{}",
        missing.len(),
        missing.iter().map(|(path, why)| format!("\n  - {}: {why}", path.display())).collect::<String>()
    )]
    NoDataFiles {
        /// The files that cannot be read, with the reasons.
        missing: Vec<(PathBuf, String)>,
        /// Number of data files.
        files: usize,
    },
    /// A data file, or a folder of data files, cannot be read.
    #[error(transparent)]
    Data(#[from] data::Error),
    /// A job at a master that would keep its checkpoints in the memory of one process.
    #[error(
        "checkpoint.url: memory:// is the memory of one process, for `ebb run`; set a path or URL that master and ps reach"
    )]
    CheckpointsInMemory,
    /// Predictions that nobody could read.
    #[error(
        "predictions: memory:// is the memory of one process, and nothing could read them afterwards; set a path or another URL"
    )]
    PredictionsInMemory,
    /// A job without checkpoints that is to go on from one.
    #[error("resume: the job file has no [checkpoint] section that says where its checkpoints are")]
    NothingToResume,

    /// A file of predictions that exists before its job.
    #[error("{file} exists; choose another file for the predictions, or remove it first")]
    Exists {
        /// The file.
        file: String,
    },

    /// A store of checkpoints fails, or a checkpoint is damaged.
    #[error(transparent)]
    Checkpoint(#[from] proto::checkpoint::Error),
    /// A path that the system cannot make absolute.
    #[error("path `{path}`")]
    Path {
        /// The path.
        path: String,
        /// The cause.
        source: io::Error,
    },
    /// A folder in which no job has checkpoints.
    #[error(
        "{url} has no checkpoints: expected folders such as v0000001200 in it, or one folder down, found none; name what the \
         job file has as checkpoint.url, or the job by --job"
    )]
    NoCheckpoints {
        /// The URL as given.
        url: String,
    },
    /// A folder in which several jobs have checkpoints.
    #[error("{url} has checkpoints of {}; name one: {first}", jobs.join(", "))]
    SeveralJobs {
        /// The URL as given.
        url: String,
        /// The folders of the jobs.
        jobs: Vec<String>,
        /// The URL of the first.
        first: String,
    },
    /// A folder that has only unfinished checkpoints.
    #[error(
        "{folder} has no checkpoints yet, only what was begun: none of its {begun} folder{} is complete (has a manifest.json); \
         let the job go on until one is, or name another folder",
        if *begun == 1 { "" } else { "s" }
    )]
    NoneComplete {
        /// The folder.
        folder: String,
        /// Number of unfinished checkpoints.
        begun: usize,
    },
    /// A folder that has only damaged checkpoints.
    #[error(
        "{folder} has no intact checkpoint; `ebb checkpoint verify {folder}` says what is wrong with each"
    )]
    NoneIntact {
        /// The folder.
        folder: String,
    },
    /// Weights that cannot be written in the format.
    #[error(transparent)]
    Model(#[from] model::Error),

    /// A folder for results that is a file.
    #[error("{}: is a file; choose a folder", dir.display())]
    NoFolder {
        /// The folder.
        dir: PathBuf,
    },
    /// A folder for results that has a model which no job has written there.
    #[error(
        "{}: has a {model} that is no result of an earlier run (there is no {evidence}); move it away or choose another folder",
        dir.display()
    )]
    NotOurs {
        /// The folder.
        dir: PathBuf,
        /// The model's file name.
        model: &'static str,
        /// The files of which a result has at least one.
        evidence: String,
    },
    /// A folder for results that cannot be written.
    #[error("{}: cannot write there; choose another folder", dir.display())]
    Unwritable {
        /// The folder.
        dir: PathBuf,
        /// The cause.
        source: Box<Error>,
    },
    /// A place for a copy of the results that has results.
    #[error("{file} exists, and results there are never replaced; choose another URL, or remove them first")]
    HasResults {
        /// The file.
        file: String,
    },
    /// Results that are complete in their folder, and not at the URL of their copy.
    #[error("the results in {} are complete, and their copy at {url} is not", dir.display())]
    NotCopied {
        /// The folder of results.
        dir: PathBuf,
        /// The URL.
        url: String,
        /// The cause.
        source: Box<Error>,
    },
    /// A folder for results that another process writes.
    #[error("{}: another process writes its results there; choose another folder", dir.display())]
    InUse {
        /// The folder.
        dir: PathBuf,
    },
    /// A file of the results cannot be made, written, read or replaced.
    #[error("cannot {action} {}", path.display())]
    File {
        /// `create`, `write`, `read`, or `replace`.
        action: &'static str,
        /// The path.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// An earlier model cannot be renamed.
    #[error("cannot set {} aside", path.display())]
    SetAside {
        /// The path.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The events of a job could not be written, after its model was.
    #[error(
        "{}",
        match files.is_empty() {
            true => format!("the events are missing in {}", dir.display()),
            false => format!("{} is complete, only the events are missing", files.join(" and ")),
        }
    )]
    EventsMissing {
        /// The folder of results.
        dir: PathBuf,
        /// Files that are there whole.
        files: Vec<String>,
        /// The cause.
        source: Box<Error>,
    },
    /// A file of a job has a name that its results need.
    #[error("{name}: the model exports a file of this name, which belongs to the results")]
    Reserved {
        /// The name.
        name: String,
    },
    /// The master did not send a file that the job has.
    #[error("{name}: the master did not send it; fetch again")]
    NotSent {
        /// The file.
        name: String,
    },
    /// A file of a job arrived with other bytes than it has.
    #[error(
        "{name}: arrived with {size} bytes and SHA-256 {sha256}, expected {} bytes and {}; fetch again",
        expected.size,
        expected.sha256
    )]
    Arrived {
        /// The file.
        name: String,
        /// Bytes that arrived.
        size: u64,
        /// Their hash.
        sha256: String,
        /// Size and hash that the master had announced.
        expected: Box<proto::pb::Artifact>,
    },

    /// A part of a cluster in this process cannot start, or failed.
    #[error("{what}")]
    Local {
        /// The part.
        what: String,
        /// The cause.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// A worker of this process failed.
    #[error(transparent)]
    Worker(#[from] worker::Error),
    /// A thread of this process panicked.
    #[error("a role of this process panicked: {0}")]
    Panicked(String),
    /// The system refuses.
    #[error(transparent)]
    Io(#[from] io::Error),
}

impl Error {
    /// Returns the failed call below this error, if there is one: its kind says what a gateway
    /// answers.
    pub const fn failure(&self) -> Option<&Failure> {
        match self {
            Self::Url(failure) | Self::Failed(failure) | Self::Refused(failure) => Some(failure),
            Self::AnswerLost(failure) | Self::Watch { source: failure, .. } => Some(failure),
            Self::NoAnswer { last, .. } => last.as_ref(),
            _ => None,
        }
    }

    /// Returns whether a worker of this process cannot use its device any more.
    pub const fn is_device_lost(&self) -> bool {
        matches!(self, Self::Worker(error) if error.is_device_lost())
    }
}

/// The result of the calls of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;
