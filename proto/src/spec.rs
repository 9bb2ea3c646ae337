//! The job's specification: the content of `JOB.toml`, with defaults filled in and everything
//! checked.
//!
//! It travels between processes as JSON of these same structures, so a job file, the wire and the
//! code have one schema. Unknown keys are errors that name the nearest known key. All
//! contradictions are reported at once.

mod autocast;
mod bad;
mod checkpoint;
pub mod data_url;
mod early_stopping;
mod evaluation;
mod file;
mod index_key;
pub mod mixup;
mod purpose;
mod records;
pub mod transform;
mod validate;
mod validation;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};

pub use self::autocast::Autocast;
pub use self::bad::{FillSpec, MAX_BAD, SKIPPED_MAX};
pub use self::checkpoint::{CheckpointSpec, SCHEMES as CHECKPOINT_SCHEMES};
pub use self::early_stopping::{Better, EarlyStoppingSpec};
pub use self::evaluation::{EvaluationSpec, WORST_MAX};
pub use self::file::{parse, parse_unchecked};
pub use self::mixup::MixupSpec;
pub use self::purpose::{PredictSpec, Purpose};
pub use self::records::Records;
pub use self::transform::Transform;
pub use self::validation::ValidationSet;
use crate::column::ElementType;
use crate::duration;
use crate::error::{Error, Result};
use crate::ids::Epoch;
use crate::metric::Metric;
use crate::optimizer::OptimizerSpec;
use crate::plan::{EpochOrder, Plan, RecordOrder, WindowOrder, Windows};
use crate::wire::WireType;

/// A whole job.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, expecting = "the settings of a job")]
pub struct JobSpec {
    /// Name for people: 1 to 64 letters, digits, `-`, `_` or `.`.
    pub name: String,
    /// Passes over the training records.
    pub epochs: u64,
    /// Seed of everything random: record order, initial weights, dropout. Default 0.
    #[serde(default)]
    pub seed: u64,
    /// Network, loss and metrics.
    pub model: ModelSpec,
    /// Training and validation data.
    pub data: DataSpec,
    /// Records of a gradient and of an update.
    pub batch: BatchSpec,
    /// Rule by which gradients become updates.
    pub optimizer: OptimizerSpec,
    /// Choice of the weights from which a step is computed. Default: `sync`.
    #[serde(default)]
    pub consistency: ConsistencySpec,
    /// Number of processes that take part.
    #[serde(default)]
    pub fleet: FleetSpec,
    /// Times and place of checkpoints. Default: no checkpoints.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub checkpoint: Option<CheckpointSpec>,
    /// Selection of the version that is exported, and the end of a training that gets no better.
    /// Default: the last version is exported.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub early_stopping: Option<EarlyStoppingSpec>,
    /// Times of evaluations, and what they list. Default: the end of each epoch.
    #[serde(default, skip_serializing_if = "EvaluationSpec::is_default")]
    pub evaluation: EvaluationSpec,
    /// Time-outs and limits of retries.
    #[serde(default)]
    pub limits: LimitsSpec,
    /// Exchange of values between workers and ps.
    #[serde(default, alias = "wire")]
    pub exchange: ExchangeSpec,
    /// Numerics classes of the workers that may take part. Default: `one`.
    #[serde(default, skip_serializing_if = "NumericsSpec::is_default")]
    pub numerics: NumericsSpec,
    /// Whether the job trains, or only evaluates or predicts. Default: `train`.
    #[serde(default, skip_serializing_if = "Purpose::is_default")]
    pub purpose: Purpose,
    /// Records to predict, and the place of the predictions. Only with `purpose = "predict"`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub predict: Option<PredictSpec>,
}

/// Numerics classes of the workers that may take part in a job with canonical order. Arrival order
/// does not promise equal bits, so workers of every class take part in it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum NumericsSpec {
    /// Workers of one numerics class: the trained bits do not depend on which worker computed what.
    #[default]
    One,
    /// Workers of every class, without the promise of equal bits.
    Any,
}

impl NumericsSpec {
    fn is_default(&self) -> bool {
        *self == Self::default()
    }
}

/// The network of a job, with its loss and metrics.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, expecting = "the settings of [model]")]
pub struct ModelSpec {
    /// TorchScript file (`torch.jit.script(..).save(..)`). Either this or `builtin`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub script: Option<String>,
    /// A network of Ebbflow's own (`linear`, `softmax`, `mlp`, `convnet`, `resnet18`) or of your
    /// program.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub builtin: Option<String>,
    /// Weights to begin with instead of those from the seed, where name, shape and type fit: a
    /// safetensors file, or a folder of checkpoints, whose newest is taken.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub initial: Option<String>,
    /// Options of a builtin network, e.g. `hidden = [128]`. Each network checks its own.
    #[serde(default, skip_serializing_if = "serde_json::Map::is_empty")]
    pub options: serde_json::Map<String, serde_json::Value>,
    /// Loss to minimise. Default: `cross_entropy`.
    #[serde(default)]
    pub loss: Loss,
    /// Class whose labels count neither in the loss nor in metrics. Default: -100, PyTorch's.
    #[serde(default = "ignored", skip_serializing_if = "is_ignored")]
    pub ignore_index: i64,
    /// Share of each label that `cross_entropy` spreads evenly over all classes, in [0, 1].
    /// Default: 0.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub label_smoothing: f64,
    /// Numbers that an evaluation reports beside the loss. Default: none.
    #[serde(default)]
    pub metrics: Vec<Metric>,
    /// 16-bit type in which libtorch computes matrix products and convolutions of forward, as
    /// PyTorch's autocast does. Faster on hardware with instructions for it, with other bits.
    /// Default: none, all in f32.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub autocast: Option<Autocast>,
    /// Whether NVIDIA GPUs may round the inputs of f32 matrix products and convolutions to TF32,
    /// which has 11 significant bits. Faster, with other bits. Default: false.
    #[serde(default, skip_serializing_if = "is_false")]
    pub tf32: bool,
}

/// Name in `model.builtin` of a model that a program drives with a loop of its own.
pub const PROGRAM: &str = "python";

/// Loss to minimise: the mean over the records of a microbatch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Loss {
    /// Softmax and negative log likelihood of the label's class. Outputs are logits `[n, classes]`,
    /// labels are classes, or probabilities where `data.mixup` mixes them. With labels `[n, ..]`,
    /// outputs are `[n, classes, ..]` as in PyTorch, or `[n, .., classes]`.
    #[default]
    CrossEntropy,
    /// Negative log likelihood. Outputs are log-probabilities `[n, classes]`, labels are classes.
    Nll,
    /// Squared difference, mean over the outputs. Labels have the outputs' shape.
    Mse,
    /// Sigmoid and binary cross-entropy, mean over the outputs. Labels are in `[0, 1]` and have the
    /// outputs' shape.
    BceWithLogits,
    /// Loss that the script itself returns: `forward(features, labels) -> (mean loss, outputs)`.
    /// In a job that a program drives, the loss of that program.
    Module,
}

impl Loss {
    /// Returns whether labels are class numbers (i64) rather than values (f32).
    pub const fn wants_classes(self) -> bool {
        matches!(self, Self::CrossEntropy | Self::Nll)
    }
}

/// The data set of a job.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, expecting = "the settings of [data]")]
pub struct DataSpec {
    /// Format of the files.
    pub format: Format,
    /// Training files.
    pub train: FilesSpec,
    /// Validation files. Either these or `validation_fraction`, or neither for no evaluation.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub validation: Option<FilesSpec>,
    /// Further validation files, by the name of their set. Each set is measured by itself.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub validation_sets: BTreeMap<String, FilesSpec>,
    /// Share of the training records, drawn by the seed, that validate instead; in (0, 1).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub validation_fraction: Option<f64>,
    /// Order of the records in an epoch. Default: `records`.
    #[serde(default)]
    pub shuffle: Shuffle,
    /// With `shuffle = "window"`: number of records that are permuted among each other. Default:
    /// 10,000.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub window: Option<u64>,
    /// With `shuffle = "window"`: number of files that are read side by side. Default: 16.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub interleave: Option<u32>,
    /// Shape of one record's features, e.g. `[1, 28, 28]`. Default: as in the file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shape: Option<Vec<usize>>,
    /// Scaling of the features. Default: none.
    #[serde(default)]
    pub normalize: Normalize,
    /// Columns that the model takes. Default: `tokens` of token files, otherwise one argument
    /// `features`, f32, with all columns but the label.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub inputs: Option<InputsSpec>,
    /// Types in which the model gets columns that `inputs` names. Default: f32 for f64, all others
    /// as in the files.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub dtypes: BTreeMap<String, ElementType>,
    /// Transforms of columns, in order, by the column's name. Default: none.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub transforms: BTreeMap<String, Vec<Transform>>,
    /// Transforms of columns of validation records. Default for each column: `transforms`, which
    /// must not be random then.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub validation_transforms: BTreeMap<String, Vec<Transform>>,
    /// Mixture of each training record with the one before it in its microbatch. Default: none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mixup: Option<MixupSpec>,
    /// Column that holds the label: its name, or its number from 0 in a format whose files have all
    /// columns. Default: `labels`, or the last column of a file whose columns have an order.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub label: Option<String>,
    /// CSV: whether the first line names the columns. Default: true.
    #[serde(default = "yes")]
    pub header: bool,
    /// Elements of each record of a ragged column, e.g. `{ x = 784, label = 1 }`. The column then
    /// has a fixed shape, without a dimension for the length 1. Default: no such columns.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub lengths: BTreeMap<String, usize>,
    /// Token files: type of the values, and how records are cut. Required for this format.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tokens: Option<TokensSpec>,
    /// What happens to a record without a value in a column, by the column's name. Default: `fail`.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub missing: BTreeMap<String, MissingSpec>,
    /// What happens to a record with a value that cannot be decoded. Default: `fail`.
    #[serde(default, skip_serializing_if = "OnError::is_default")]
    pub on_error: OnError,
    /// Largest share of the records of a set that may be skipped, in [0, 1]. Default: [`MAX_BAD`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_bad: Option<f64>,
    /// Folder from which relative paths start: the job file's. The reader of the file sets it, not
    /// the user.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub base: Option<PathBuf>,
}

/// What happens to a record without a value in a column.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged, expecting = "\"fail\", \"skip\", a number, true, false, or a table `{ value = \"text\" }`")]
pub enum MissingSpec {
    /// The job fails, or skips the record.
    Rule(MissingRule),
    /// This flag takes the place of the value.
    Flag(bool),
    /// This number takes the place of the value.
    Number(f64),
    /// This text, number or flag takes the place of the value.
    Table {
        /// Value for the record.
        value: FillSpec,
    },
}

/// What happens to a record whose missing value nothing replaces.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MissingRule {
    /// The job fails.
    Fail,
    /// The record is skipped, as long as no more than `max_bad` are.
    Skip,
}

/// What happens to a record with a value that cannot be decoded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OnError {
    /// The job fails, and names the record.
    #[default]
    Fail,
    /// The record is skipped, as long as no more than `max_bad` are.
    Skip,
}

/// Data files that belong together.
///
/// A format whose files have one array each (`idx`, `npy`) has one list of files for each column,
/// under the column's name: `{ features = ["x.npy"], labels = ["y.npy"] }`. All other formats have
/// one list: `{ files = ["a.csv", "b.csv"] }`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(expecting = "a table with `files`, or with `features` and `labels`")]
pub struct FilesSpec {
    /// Used records `[begin, end)`, counted over all files. Default: all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub records: Option<(u64, u64)>,
    /// Lists of files by their key, each in order. All lists have the same number of files.
    #[serde(flatten)]
    pub lists: BTreeMap<String, Vec<String>>,
}

impl FilesSpec {
    /// Returns the number of files in each list.
    pub fn len(&self) -> usize {
        self.lists.values().map(Vec::len).max().unwrap_or_default()
    }

    /// Returns whether there is no file.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the key and the name of file number `file` of each list.
    pub fn group(&self, file: usize) -> impl Iterator<Item = (&str, &str)> {
        self.lists.iter().filter_map(move |(key, files)| Some((key.as_str(), files.get(file)?.as_str())))
    }

    /// Returns the name that stands for file number `file` of all lists: that in `files`, in
    /// `features`, or in the first list.
    pub fn name(&self, file: usize) -> &str {
        let list = [FILES, FEATURES].into_iter().find_map(|key| self.lists.get(key));
        let list = list.or_else(|| self.lists.values().next());
        list.and_then(|files| files.get(file)).map_or("", String::as_str)
    }
}

/// Key of the list of files of a format whose files have all columns.
pub const FILES: &str = "files";

/// Name of the column of features, where a job names no inputs.
pub const FEATURES: &str = "features";

/// Name of the column of tokens in token files.
pub const TOKENS: &str = "tokens";

/// Name of the column of labels in token files, and in formats whose files have one array each.
pub const LABELS: &str = "labels";

/// Columns that a model takes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged, expecting = "a list of columns, or a table `{ argument = \"column\" }`")]
pub enum InputsSpec {
    /// Columns for the arguments of `forward`, by position.
    List(Vec<String>),
    /// Columns for the arguments of `forward`, by name.
    Named(BTreeMap<String, InputSpec>),
}

/// Columns of one argument.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged, expecting = "a column, or a list of columns")]
pub enum InputSpec {
    /// A column in its own type and shape.
    One(String),
    /// Columns of one number a record, as f32 `[n, columns]`.
    Several(Vec<String>),
}

impl InputsSpec {
    /// Returns the arguments, each with its columns.
    pub fn arguments(&self) -> Vec<(&str, InputSpec)> {
        match self {
            Self::List(columns) => {
                columns.iter().map(|column| (column.as_str(), InputSpec::One(column.clone()))).collect()
            }
            Self::Named(inputs) => {
                inputs.iter().map(|(name, input)| (name.as_str(), input.clone())).collect()
            }
        }
    }
}

impl InputSpec {
    /// Returns the names of the columns.
    pub fn columns(&self) -> &[String] {
        match self {
            Self::One(column) => std::slice::from_ref(column),
            Self::Several(columns) => columns,
        }
    }
}

/// Values of token files, and how records are cut from them.
///
/// Record r has the values `[r * stride, r * stride + block)` as `tokens`, and the values one place
/// further as `labels`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, expecting = "a table with `dtype`, `block` and `stride`")]
pub struct TokensSpec {
    /// Type of the values in the files.
    pub dtype: TokenType,
    /// Tokens of one record, 1 to [`BLOCK_MAX`].
    pub block: usize,
    /// Values from the begin of a record to the begin of the next one, 1 or more. Default: `block`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stride: Option<usize>,
}

/// Most tokens of one record.
pub const BLOCK_MAX: usize = 1 << 24;

impl TokensSpec {
    /// Returns the values from the begin of a record to the begin of the next one.
    pub fn stride(&self) -> usize {
        self.stride.unwrap_or(self.block)
    }
}

/// Type of the values in a token file, little-endian.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TokenType {
    /// Unsigned 16 bits. Columns have `i32`.
    U16,
    /// Unsigned 32 bits. Columns have `i64`.
    U32,
}

/// Data formats.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Format {
    /// MNIST's format, plain or `.gz`.
    Idx,
    /// Comma-separated text, plain or `.gz`.
    Csv,
    /// Tab-separated text, plain or `.gz`.
    Tsv,
    /// NumPy arrays whose first dimension is the records.
    Npy,
    /// Apache Parquet.
    Parquet,
    /// Apache Arrow IPC files and streams.
    Arrow,
    /// Values of one type without a header, cut into records by [`TokensSpec`].
    Tokens,
    /// Tensors whose first dimension is the records.
    Safetensors,
    /// Archives of NumPy arrays whose first dimension is the records.
    Npz,
    /// JSON Lines: one object a line.
    Jsonl,
    /// TensorFlow's records of `tf.train.Example`.
    Tfrecord,
    /// WebDataset: members `KEY.EXTENSION` of a tar archive.
    Tar,
    /// Folders of images, one subfolder for each class.
    Images,
    /// No files: a record is its number, and the model looks up the rest. A name in a list of files
    /// is a number of records ([`index_records`]).
    Index,
}

/// Name of the only column of [`Format::Index`].
pub const RECORD: &str = "record";

/// Most records of one list entry of [`Format::Index`].
pub const INDEX_RECORDS_MAX: u64 = 1 << 32;

/// Returns the number of records that a name in a list of files of [`Format::Index`] stands for.
///
/// ```
/// use proto::spec::index_records;
/// assert_eq!(index_records("60000"), Some(60_000));
/// assert_eq!(index_records("0"), None);
/// assert_eq!(index_records("train.csv"), None);
/// ```
pub fn index_records(name: &str) -> Option<u64> {
    let is_plain = name.bytes().all(|digit| digit.is_ascii_digit()) && !name.starts_with('0');
    name.parse().ok().filter(|records| is_plain && (1..=INDEX_RECORDS_MAX).contains(records))
}

impl Format {
    /// Returns the format that a file's name stands for, such as `.parquet`, or `.csv.gz`.
    ///
    /// ```
    /// use proto::spec::Format;
    /// assert_eq!(Format::of_name("data/Train.CSV.gz"), Some(Format::Csv));
    /// assert_eq!(Format::of_name("train-images-idx3-ubyte.gz"), Some(Format::Idx));
    /// assert_eq!(Format::of_name("notes.txt"), None);
    /// ```
    pub fn of_name(name: &str) -> Option<Self> {
        let name = name.to_ascii_lowercase();
        let plain = [".gz", ".zst"].iter().find_map(|ending| name.strip_suffix(ending)).unwrap_or(&name);
        let (_, ending) = plain.rsplit_once('.').unwrap_or(("", plain));
        match ending {
            "csv" => Some(Self::Csv),
            "tsv" | "tab" => Some(Self::Tsv),
            "npy" => Some(Self::Npy),
            "npz" => Some(Self::Npz),
            "safetensors" => Some(Self::Safetensors),
            "parquet" => Some(Self::Parquet),
            "arrow" | "arrows" | "feather" => Some(Self::Arrow),
            "jsonl" | "ndjson" => Some(Self::Jsonl),
            "tfrecord" | "tfrecords" => Some(Self::Tfrecord),
            "tar" => Some(Self::Tar),
            _ if ending.starts_with("idx") || ending.ends_with("ubyte") => Some(Self::Idx),
            _ => None,
        }
    }

    /// Returns the format's name in job files.
    pub fn name(self) -> String {
        serde_json::to_value(self).ok().and_then(|name| name.as_str().map(str::to_owned)).unwrap_or_default()
    }

    /// Returns whether a file has one array, so that each column has files of its own.
    pub const fn has_one_column(self) -> bool {
        matches!(self, Self::Idx | Self::Npy)
    }

    /// Returns whether the order of columns in a file has a meaning, so that the last column may be
    /// the label. Columns without an order are sorted by name.
    pub const fn orders_columns(self) -> bool {
        matches!(self, Self::Csv | Self::Tsv | Self::Parquet | Self::Arrow | Self::Npz | Self::Index)
    }
}

/// Order of the records in an epoch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Shuffle {
    /// A new permutation of all records each epoch.
    #[default]
    Records,
    /// Files in sequence, some side by side, in a new order each epoch, and a new permutation
    /// within each window of records.
    Window,
    /// The order of the files.
    None,
}

/// Scaling of features: `feature = (raw / scale - mean) / std`, computed in f32 in this order.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default, expecting = "a table with `scale`, `mean` and `std`")]
pub struct Normalize {
    /// Divisor of the raw value, e.g. 255. Default 1.
    pub scale: f32,
    /// Subtrahend after the first division. Default 0.
    pub mean: f32,
    /// Divisor after the subtraction. Default 1.
    pub std: f32,
}

impl Default for Normalize {
    fn default() -> Self {
        Self { scale: 1.0, mean: 0.0, std: 1.0 }
    }
}

/// Records of a gradient and of an update.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, expecting = "the settings of [batch]")]
pub struct BatchSpec {
    /// Records of one gradient, which must fit into a worker's memory.
    pub micro: u32,
    /// Records of one update, however many workers there are; rounded up to a multiple of `micro`.
    /// Default: `micro`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub effective: Option<u32>,
}

impl BatchSpec {
    /// Returns M, the microbatches of one step.
    pub fn microbatches_per_step(&self) -> u32 {
        self.effective.unwrap_or(self.micro).div_ceil(self.micro)
    }
}

/// Choice of the weights from which a step is computed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, expecting = "the settings of [consistency]")]
pub struct ConsistencySpec {
    /// One of the four presets. Default: `sync`.
    #[serde(default)]
    pub mode: Mode,
    /// Steps that computing may run ahead of applying (`pipelined` and `bounded`). Default 1 for
    /// them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub delay: Option<u32>,
}

/// The four usual presets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Mode {
    /// Step t is computed from exactly version t. Bit-reproducible.
    #[default]
    Sync,
    /// Step t is computed from exactly version t - delay. Bit-reproducible.
    Pipelined,
    /// Step t is computed once all steps up to t - 1 - delay are applied (SSP).
    Bounded,
    /// Step t is computed from the newest weights, whatever their version.
    Async,
}

/// Order in which updates are applied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// Step t is applied only after step t - 1.
    Canonical,
    /// A step is applied as soon as all its microbatches have arrived.
    Arrival,
}

/// The two settings that the presets stand for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Consistency {
    /// Order in which updates are applied.
    pub order: Order,
    /// Steps that computing may run ahead of applying. `None`: no bound.
    pub delay: Option<u32>,
}

impl ConsistencySpec {
    /// Returns the settings of the preset.
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

/// Processes that take part.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default, expecting = "the settings of [fleet]")]
pub struct FleetSpec {
    /// Bounds of the number of workers. Default 1 to 64.
    pub workers: WorkersSpec,
    /// Number of partitions, each on a ps of its own. The job waits until there are so many ps.
    /// Default 1.
    pub ps: u32,
    /// Kind of the device on which workers compute. The job waits for such workers. Default: any.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub device: Option<DeviceKind>,
    /// Least memory of the CUDA device of a worker, in bytes. A worker that does not know its
    /// memory takes no part. Default: any.
    #[serde(with = "crate::size", skip_serializing_if = "Option::is_none")]
    pub device_memory: Option<u64>,
}

impl Default for FleetSpec {
    fn default() -> Self {
        Self { workers: WorkersSpec::default(), ps: 1, device: None, device_memory: None }
    }
}

/// Kind of the device on which a worker computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DeviceKind {
    /// The processor of the host.
    Cpu,
    /// A CUDA device.
    Cuda,
}

impl fmt::Display for DeviceKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Cpu => "cpu",
            Self::Cuda => "cuda",
        })
    }
}

/// Most workers that may take part in one job: as many as a step may have microbatches.
pub const WORKERS_MAX: u32 = 65_536;

/// Bounds of the number of workers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default, expecting = "a table with `min` and `max`")]
pub struct WorkersSpec {
    /// Fewest workers: with fewer the job waits. Default 1.
    pub min: u32,
    /// Most workers: further ones stand by. Default 64.
    pub max: u32,
}

impl Default for WorkersSpec {
    fn default() -> Self {
        Self { min: 1, max: 64 }
    }
}

/// Time-outs and limits of retries.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default, expecting = "the settings of [limits]")]
pub struct LimitsSpec {
    /// Time for which a lease holds without a heartbeat of its holder. Default 30 s.
    #[serde(with = "duration")]
    pub lease: Duration,
    /// Time after which a worker without progress hangs and its work is copied. Raise it where
    /// files or models take long to open. Default 5 min.
    #[serde(with = "duration")]
    pub stall: Duration,
    /// Reported failures of one task before the job fails. Default 3.
    pub attempts_max: u32,
    /// Deaths of processes holding one task before the job fails. Default 10.
    pub deaths_max: u32,
    /// Time for which a ps holds a pull of weights that do not exist yet. One push or pull may take
    /// twice as long in all. Default 30 s.
    #[serde(with = "duration")]
    pub pull_timeout: Duration,
    /// Number of `pull_timeout`s for which one ps may fail a worker's calls before the worker ends.
    /// Default 5.
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

/// Exchange of values between workers and ps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default, expecting = "the settings of [exchange]")]
pub struct ExchangeSpec {
    /// Type to which gradients, and weights for training, are rounded. 16 bits halve the bytes and
    /// change the bits. Default: f32, not rounded.
    #[serde(alias = "value")]
    pub dtype: WireType,
}

impl JobSpec {
    /// Returns whether the job's workers must be of one numerics class.
    pub fn needs_one_class(&self) -> bool {
        self.numerics == NumericsSpec::One && self.consistency.resolve().order == Order::Canonical
    }

    /// Returns whether a program drives the job's model with a loop of its own, which measures the
    /// model between two epochs and may name metrics of its own choice. Then no worker tries the
    /// model before it trains, and an epoch begins only when the one before it is measured.
    pub fn is_driven(&self) -> bool {
        self.data.format == Format::Index || self.model.builtin.as_deref() == Some(PROGRAM)
    }

    /// Reads and checks the wire form.
    ///
    /// # Errors
    /// [`Error::JobFile`] for other JSON, or [`Error::Invalid`] with every violation.
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

    /// Lets relative paths of the data start from `folder`. The job notes the folder only if one of
    /// its data files has such a path, so that processes in several folders describe one job.
    pub fn settle_data(&mut self, folder: &Path) {
        self.data.every_transform().for_each(|transform| transform.settle(folder));
        let of_validation = self.data.validation_files().map(|(_, files)| files);
        let files = std::iter::once(&self.data.train).chain(of_validation);
        let is_relative = |name: &String| {
            let path = data_url::local(name);
            path.is_some_and(|path| Path::new(&*path).is_relative())
        };
        let starts_here = files.flat_map(|files| files.lists.values().flatten()).any(is_relative);
        if starts_here && self.data.format != Format::Index {
            self.data.base = Some(folder.to_owned());
        }
    }

    /// Returns the settings that differ from those of `other`, as `data.train: 5, not 6`.
    pub fn differences(&self, other: &Self) -> Vec<String> {
        let json = |spec: &Self| serde_json::to_value(spec).unwrap_or_default();
        let mut found = Vec::new();
        differ("", &json(self), &json(other), &mut found);
        found
    }

    /// Returns the wire form.
    pub fn to_json(&self) -> String {
        serde_json::to_string(self).expect("a specification has no keys that JSON lacks")
    }

    /// Returns the order of the training records in an epoch. `shards` are the numbers of used
    /// records in each file ([`DataSpec::shards`]).
    pub fn order(&self, shards: &[u64], epoch: Epoch) -> EpochOrder {
        let shuffle = self.data.shuffle;
        if let (Shuffle::Window, Some((window, interleave))) = (shuffle, self.data.windows()) {
            let settings = Windows { micro: self.batch.micro, window, interleave };
            return EpochOrder::Windows(WindowOrder::new(shards, settings, self.seed, epoch));
        }
        let records = shards.iter().sum();
        EpochOrder::Records(RecordOrder::new(records, self.seed, epoch, shuffle == Shuffle::Records))
    }

    /// Returns the plan of this job over `records` training records.
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
    /// Returns the section with these training files, and with defaults for all else.
    pub fn of(format: Format, train: FilesSpec) -> Self {
        Self {
            format,
            train,
            validation: None,
            validation_sets: BTreeMap::new(),
            validation_fraction: None,
            shuffle: Shuffle::default(),
            window: None,
            interleave: None,
            shape: None,
            normalize: Normalize::default(),
            inputs: None,
            dtypes: BTreeMap::new(),
            transforms: BTreeMap::new(),
            validation_transforms: BTreeMap::new(),
            mixup: None,
            label: None,
            header: true,
            lengths: BTreeMap::new(),
            tokens: None,
            missing: BTreeMap::new(),
            on_error: OnError::default(),
            max_bad: None,
            base: None,
        }
    }

    /// Returns the records of a window and the number of lanes, if the order has windows.
    pub fn windows(&self) -> Option<(u64, u32)> {
        let settings = || (self.window.unwrap_or(10_000), self.interleave.unwrap_or(16));
        (self.shuffle == Shuffle::Window).then(settings)
    }

    /// Returns the columns that the model takes. `None`: one argument `features` in f32. A model of
    /// token files takes the column `tokens`, and one of record numbers takes those, unless the job
    /// says otherwise.
    pub fn named_inputs(&self) -> Option<InputsSpec> {
        let only = |column: &str| Some(InputsSpec::List(vec![column.to_owned()]));
        let own = || match self.format {
            Format::Tokens => only(TOKENS),
            Format::Index => only(RECORD),
            _ => None,
        };
        self.inputs.clone().or_else(own)
    }

    /// Returns the transforms of a column in a data set.
    pub fn transforms_of(&self, set: DataSet, column: &str) -> &[Transform] {
        let own = self.validation_transforms.get(column).filter(|_| set == DataSet::Validation);
        own.or_else(|| self.transforms.get(column)).map_or(&[], Vec::as_slice)
    }

    /// Returns the transforms of all columns in all data sets.
    pub fn every_transform(&mut self) -> impl Iterator<Item = &mut Transform> {
        self.transforms.values_mut().chain(self.validation_transforms.values_mut()).flatten()
    }

    /// Returns the SHA-256 of each tokenizer that came with the job, in hex and without repetition.
    pub fn tokenizers(&self) -> BTreeSet<&str> {
        let all = self.transforms.values().chain(self.validation_transforms.values()).flatten();
        all.filter_map(|transform| match transform {
            Transform::Tokenize { sha256, .. } => sha256.as_deref(),
            _ => None,
        })
        .collect()
    }

    /// Returns where a data file lies: below `root` if the worker has one, otherwise below the job
    /// file's folder. A URL of another machine stays as it is.
    pub fn locate(&self, file: &str, root: Option<&Path>) -> PathBuf {
        let Some(path) = data_url::local(file) else { return PathBuf::from(file) };
        let path = Path::new(&*path);
        match (root, &self.base) {
            (Some(root), _) => root.join(path.strip_prefix("/").unwrap_or(path)),
            (None, Some(base)) => base.join(path),
            (None, None) => path.to_owned(),
        }
    }
}

/// Data set of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DataSet {
    /// The training records.
    Train,
    /// The validation records.
    Validation,
}

/// Appends the settings that differ below `key`.
fn differ(key: &str, one: &serde_json::Value, other: &serde_json::Value, found: &mut Vec<String>) {
    use serde_json::Value;
    if let (Value::Object(one), Value::Object(other)) = (one, other) {
        let absent = Value::Null;
        let keys: std::collections::BTreeSet<_> = one.keys().chain(other.keys()).collect();
        for name in keys {
            let key = if key.is_empty() { name.clone() } else { format!("{key}.{name}") };
            let [one, other] = [one, other].map(|section| section.get(name).unwrap_or(&absent));
            differ(&key, one, other, found);
        }
    } else if one != other {
        let shown = |value: &Value| match value {
            Value::Null => "absent".to_owned(),
            value => value.to_string().chars().take(80).collect(),
        };
        found.push(format!("{key}: {}, not {}", shown(one), shown(other)));
    }
}

const fn yes() -> bool {
    true
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
const fn is_zero(value: &f64) -> bool {
    *value == 0.0
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
const fn is_false(value: &bool) -> bool {
    !*value
}

const fn ignored() -> i64 {
    -100
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
const fn is_ignored(class: &i64) -> bool {
    *class == ignored()
}
