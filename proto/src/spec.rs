//! The job's specification: what `JOB.toml` says, with defaults filled in and everything checked.
//!
//! It travels between processes as JSON of these same structures, so a job file, the wire and the code have one schema.
//! Unknown keys are errors that name the nearest known key; contradictions are reported all at once.

mod checkpoint;
mod file;
mod records;
mod validate;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};

pub use self::checkpoint::{CheckpointSpec, SCHEMES as CHECKPOINT_SCHEMES};
pub use self::file::parse;
pub use self::records::Records;
use crate::duration;
use crate::error::{Error, Result};
use crate::optimizer::OptimizerSpec;
use crate::plan::Plan;
use crate::wire::WireType;

/// A whole job.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, expecting = "the settings of a job")]
pub struct JobSpec {
    /// Name for people: 1 to 64 letters, digits, `-`, `_` or `.`.
    pub name: String,
    /// Passes over the training records.
    pub epochs: u64,
    /// Everything random derives from it: record order, initial weights, dropout. Default 0.
    #[serde(default)]
    pub seed: u64,
    /// What is trained.
    pub model: ModelSpec,
    /// What it is trained on.
    pub data: DataSpec,
    /// Records per gradient and per update.
    pub batch: BatchSpec,
    /// How gradients become updates.
    pub optimizer: OptimizerSpec,
    /// Which weights a step is computed from. Default: `sync`.
    #[serde(default)]
    pub consistency: ConsistencySpec,
    /// How many processes take part.
    #[serde(default)]
    pub fleet: FleetSpec,
    /// When the state is saved. Default: never.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub checkpoint: Option<CheckpointSpec>,
    /// Time-outs and how often to try.
    #[serde(default)]
    pub limits: LimitsSpec,
    /// How values are exchanged.
    #[serde(default, alias = "wire")]
    pub exchange: ExchangeSpec,
    /// Which workers may take part, as their arithmetic goes. Default: `one`.
    #[serde(default, skip_serializing_if = "NumericsSpec::is_default")]
    pub numerics: NumericsSpec,
}

/// Which workers may take part in a job whose updates are applied in canonical order, as their arithmetic goes. In the order of
/// arrival the bits are not promised, so workers of every class take part.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum NumericsSpec {
    /// Those of one numerics class: the trained bits do not depend on which of them computed what.
    #[default]
    One,
    /// Those of every class. Gives up the promise of equal bits.
    Any,
}

impl NumericsSpec {
    fn is_default(&self) -> bool {
        *self == Self::default()
    }
}

/// The network.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, expecting = "the settings of [model]")]
pub struct ModelSpec {
    /// TorchScript file (`torch.jit.script(..).save(..)`). Either this or `builtin`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub script: Option<String>,
    /// A network of Ebbflow's own (`linear`, `softmax`, `mlp`, `convnet`, `resnet18`) or of your program.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub builtin: Option<String>,
    /// Weights to begin with instead of those that the seed gives, where name, shape and type fit: a safetensors file, or a folder of
    /// checkpoints, of which the newest is taken.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub initial: Option<String>,
    /// Options of a builtin network, e.g. `hidden = [128]`; each network checks its own.
    #[serde(default, skip_serializing_if = "serde_json::Map::is_empty")]
    pub options: serde_json::Map<String, serde_json::Value>,
    /// What is minimised. Default: `cross_entropy`.
    #[serde(default)]
    pub loss: Loss,
    /// What an evaluation reports beside the loss. Default: nothing.
    #[serde(default)]
    pub metrics: Vec<Metric>,
}

/// What is minimised: the mean over the records of a microbatch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Loss {
    /// Softmax and negative log likelihood of the label's class; outputs are logits `[n, classes]`, labels classes.
    #[default]
    CrossEntropy,
    /// Negative log likelihood; outputs are log-probabilities `[n, classes]`, labels classes.
    Nll,
    /// Squared difference, mean over the outputs; labels have the outputs' shape.
    Mse,
    /// Sigmoid and binary cross-entropy, mean over the outputs; labels in `[0, 1]` with the outputs' shape.
    BceWithLogits,
    /// The script returns the loss itself: `forward(features, labels) -> (mean loss, outputs)`.
    Module,
}

impl Loss {
    /// Whether labels are class numbers (i64) rather than values (f32).
    pub const fn wants_classes(self) -> bool {
        matches!(self, Self::CrossEntropy | Self::Nll)
    }
}

/// What an evaluation reports beside the loss.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Metric {
    /// Share of records whose largest output is the label's class (for `bce_with_logits`: on the label's side of 0).
    Accuracy,
    /// Mean absolute difference between outputs and labels.
    Mae,
}

impl Metric {
    /// Its name in job files, events and summaries.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Accuracy => "accuracy",
            Self::Mae => "mae",
        }
    }
}

/// The data set.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, expecting = "the settings of [data]")]
pub struct DataSpec {
    /// How the files are written.
    pub format: Format,
    /// Training files.
    pub train: FilesSpec,
    /// Validation files. Either these or `validation_fraction`, or neither for no evaluation.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub validation: Option<FilesSpec>,
    /// Share of the training records, drawn by the seed, that validate instead; in (0, 1).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub validation_fraction: Option<f64>,
    /// Order of the records in an epoch. Default: `records`.
    #[serde(default)]
    pub shuffle: Shuffle,
    /// Shape that one record's features are given, e.g. `[1, 28, 28]`. Default: as in the file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shape: Option<Vec<usize>>,
    /// How features are scaled. Default: as in the file.
    #[serde(default)]
    pub normalize: Normalize,
    /// CSV: the column (its name in the header, or its number from 0) that holds the label. Default: the last.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub label: Option<String>,
    /// CSV: whether the first line names the columns. Default: true.
    #[serde(default = "yes")]
    pub header: bool,
    /// Folder that relative paths start from: the job file's. Set when the file is read, not by the user.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub base: Option<PathBuf>,
}

/// Files that belong together.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, expecting = "a table with `features` and `labels`")]
pub struct FilesSpec {
    /// Files of features, in order.
    pub features: Vec<String>,
    /// Files of labels, one for each of `features`. CSV: leave out, the label is a column.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub labels: Vec<String>,
    /// Only these records `[begin, end)`, counted over all files. Default: all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub records: Option<(u64, u64)>,
}

/// Data formats.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Format {
    /// MNIST's format, plain or `.gz`.
    Idx,
    /// Comma-separated text, plain or `.gz`.
    Csv,
    /// NumPy arrays, first dimension the records.
    Npy,
}

/// Order of the records in an epoch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Shuffle {
    /// A new permutation of all records each epoch.
    #[default]
    Records,
    /// The order of the files.
    None,
}

/// `feature = (raw / scale - mean) / std`, computed in f32 in this order.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default, expecting = "a table with `scale`, `mean` and `std`")]
pub struct Normalize {
    /// Divisor of the raw value, e.g. 255. Default 1.
    pub scale: f32,
    /// Subtracted then. Default 0.
    pub mean: f32,
    /// Divisor then. Default 1.
    pub std: f32,
}

impl Default for Normalize {
    fn default() -> Self {
        Self { scale: 1.0, mean: 0.0, std: 1.0 }
    }
}

/// Records per gradient and per update.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, expecting = "the settings of [batch]")]
pub struct BatchSpec {
    /// Records of one gradient: what must fit into a worker's memory.
    pub micro: u32,
    /// Records of one update, however many workers there are; rounded up to a multiple of `micro`. Default: `micro`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub effective: Option<u32>,
}

impl BatchSpec {
    /// M: microbatches of one step.
    pub fn microbatches_per_step(&self) -> u32 {
        self.effective.unwrap_or(self.micro).div_ceil(self.micro)
    }
}

/// Which weights a step is computed from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, expecting = "the settings of [consistency]")]
pub struct ConsistencySpec {
    /// One of the four presets. Default: `sync`.
    #[serde(default)]
    pub mode: Mode,
    /// Steps that computing may run ahead of applying (`pipelined` and `bounded`). Default 1 for them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub delay: Option<u32>,
}

/// The four usual presets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Mode {
    /// Step t from exactly version t. Bit-reproducible.
    #[default]
    Sync,
    /// Step t from exactly version t - delay. Bit-reproducible.
    Pipelined,
    /// Step t once all steps up to t - 1 - delay are applied (SSP).
    Bounded,
    /// From whatever is there.
    Async,
}

/// When updates are applied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// Step t only after t - 1.
    Canonical,
    /// As soon as a step's microbatches are in.
    Arrival,
}

/// The two settings that the presets stand for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Consistency {
    /// When updates are applied.
    pub order: Order,
    /// Steps that computing may run ahead of applying; `None`: no bound.
    pub delay: Option<u32>,
}

impl ConsistencySpec {
    /// What the preset means.
    pub fn resolve(&self) -> Consistency {
        let (order, delay) = match self.mode {
            Mode::Sync => (Order::Canonical, Some(0)),
            Mode::Pipelined => (Order::Canonical, Some(self.delay.unwrap_or(1))),
            Mode::Bounded => (Order::Arrival, Some(self.delay.unwrap_or(1))),
            Mode::Async => (Order::Arrival, None),
        };
        Consistency { order, delay }
    }
}

/// How many processes take part.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default, expecting = "the settings of [fleet]")]
pub struct FleetSpec {
    /// Workers. Default 1 to 64.
    pub workers: WorkersSpec,
    /// Partitions of the model, each on a ps of its own; the job waits until so many are there. Default 1.
    pub ps: u32,
}

impl Default for FleetSpec {
    fn default() -> Self {
        Self { workers: WorkersSpec::default(), ps: 1 }
    }
}

/// Workers that may take part in one job: as many as a step may have microbatches.
pub const WORKERS_MAX: u32 = 65_536;

/// Bounds of the number of workers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default, expecting = "a table with `min` and `max`")]
pub struct WorkersSpec {
    /// Below this many the job waits. Default 1.
    pub min: u32,
    /// Workers above this many stand by. Default 64.
    pub max: u32,
}

impl Default for WorkersSpec {
    fn default() -> Self {
        Self { min: 1, max: 64 }
    }
}

/// Time-outs and how often to try.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default, expecting = "the settings of [limits]")]
pub struct LimitsSpec {
    /// How long a lease holds without a heartbeat of its holder. Default 30 s.
    #[serde(with = "duration")]
    pub lease: Duration,
    /// How long a worker may stay in one place of its work, such as reading a file, without getting on: then it hangs, and its work is
    /// copied. Raise it where files or models take long to open. Default 5 min.
    #[serde(with = "duration")]
    pub stall: Duration,
    /// Reported failures of one task before the job fails. Default 3.
    pub attempts_max: u32,
    /// Deaths of processes holding one task before the job fails. Default 10.
    pub deaths_max: u32,
    /// How long a ps holds a pull of weights that are not there yet. One push or pull may take twice as long in all. Default 30 s.
    #[serde(with = "duration")]
    pub pull_timeout: Duration,
    /// A worker ends when one ps fails its calls for so many `pull_timeout`s. Default 5.
    pub pull_attempts_max: u32,
}

impl Default for LimitsSpec {
    fn default() -> Self {
        Self {
            lease: Duration::from_secs(30),
            stall: Duration::from_secs(300),
            attempts_max: 3,
            deaths_max: 10,
            pull_timeout: Duration::from_secs(30),
            pull_attempts_max: 5,
        }
    }
}

/// How values are exchanged between workers and ps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default, expecting = "the settings of [exchange]")]
pub struct ExchangeSpec {
    /// Type that gradients, and weights for training, are rounded to: half of the bytes for other bits. Default: f32, not rounded.
    #[serde(alias = "value")]
    pub dtype: WireType,
}

impl JobSpec {
    /// Whether its workers must be of one numerics class.
    pub fn needs_one_class(&self) -> bool {
        self.numerics == NumericsSpec::One && self.consistency.resolve().order == Order::Canonical
    }

    /// Reads the wire form and checks it.
    ///
    /// # Errors
    /// Not such JSON, or [`Error::Invalid`] with every violation.
    pub fn from_json(json: &str) -> Result<Self> {
        if json.trim_start().starts_with('[') {
            return Err(Error::JobFile(
                "job specification: expected the settings of a job, as a table with their names, found a list".to_owned(),
            ));
        }
        let spec: Self = serde_json::from_str(json).map_err(|error| file::in_json(&error))?;
        spec.validate()?;
        Ok(spec)
    }

    /// The wire form.
    pub fn to_json(&self) -> String {
        serde_json::to_string(self).expect("a specification has no keys that JSON lacks")
    }

    /// The numbering of this job's work over `records` training records.
    pub fn plan(&self, records: u64) -> Plan {
        Plan {
            records,
            micro: self.batch.micro,
            microbatches_per_step: self.batch.microbatches_per_step(),
            epochs: self.epochs,
        }
    }
}

impl DataSpec {
    /// The files of a data set, when it has files of its own.
    pub fn files(&self, set: DataSet) -> Option<&FilesSpec> {
        match set {
            DataSet::Train => Some(&self.train),
            DataSet::Validation => self.validation.as_ref(),
        }
    }

    /// Where a data file lies: below `root` when the worker has one, otherwise below the job file's folder.
    pub fn locate(&self, file: &str, root: Option<&Path>) -> PathBuf {
        let path = Path::new(file);
        match (root, &self.base) {
            (Some(root), _) => root.join(path.strip_prefix("/").unwrap_or(path)),
            (None, Some(base)) => base.join(path),
            (None, None) => path.to_owned(),
        }
    }
}

/// Which records of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DataSet {
    /// The training records.
    Train,
    /// The validation records.
    Validation,
}

/// Sums of metrics by name; a mean once divided by the samples.
pub type Metrics = BTreeMap<String, f64>;

const fn yes() -> bool {
    true
}
