//! Errors of messages between processes, and of job files.

use crate::metric::Metric;

/// Result of a check in this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Error in outside input.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A model has no tensors.
    #[error("the model has no tensors; a model needs at least one parameter")]
    NoTensors,
    /// A placement has no partitions.
    #[error("a job needs at least one partition; start a ps or set fleet.ps to 1 or more")]
    NoPartitions,
    /// A tensor cannot be placed.
    #[error("tensor `{name}` (number {index}, shape {shape:?}): expected {expected}")]
    Tensor {
        /// Name of the tensor.
        name: String,
        /// Index of the tensor in the model's order.
        index: usize,
        /// Shape of the tensor.
        shape: Vec<usize>,
        /// Required property.
        expected: &'static str,
    },
    /// A message lacks a field, or a field is out of its range.
    #[error("{message}.{field}: expected {expected}, found {found}")]
    Field {
        /// Name of the protobuf message.
        message: &'static str,
        /// Name of the field.
        field: &'static str,
        /// Range of the field.
        expected: String,
        /// Value that was sent.
        found: String,
    },
    /// A stream of chunks has a chunk of another partition, has one twice, or lacks one.
    #[error(
        "{what} partition {partition}: chunk {found} where chunk {expected} belongs; the sender has another model or \
         placement, restart it with this job's"
    )]
    WrongChunk {
        /// "push to" or "pull from".
        what: &'static str,
        /// Partition of the stream.
        partition: u32,
        /// First chunk of the layout that has not come: a chunk id or "the end".
        expected: String,
        /// Chunk that was sent: a chunk id or "the end".
        found: String,
    },
    /// A chunk has the wrong size.
    #[error(
        "{what} partition {partition}: chunk {chunk} of tensor `{tensor}` has {found_bytes} bytes, the layout says \
         {expected_bytes} ({len} values of {bytes_each} bytes); the sender has another model or type of exchange, restart it with this job's"
    )]
    ChunkBytes {
        /// "push to" or "pull from".
        what: &'static str,
        /// Partition of the stream.
        partition: u32,
        /// Chunk with the wrong size.
        chunk: u32,
        /// Tensor of the chunk.
        tensor: String,
        /// Size according to the layout.
        expected_bytes: usize,
        /// Number of values in the chunk.
        len: usize,
        /// Bytes of one value.
        bytes_each: usize,
        /// Size that was sent.
        found_bytes: usize,
    },
    /// What a worker counted for a metric is missing, or does not belong to what others counted.
    #[error(
        "metric `{metric}`: expected {expected}, found {found}; the worker has another model, restart it with this job's"
    )]
    Tally {
        /// Metric of the job.
        metric: Metric,
        /// Kind of what other workers counted.
        expected: String,
        /// Kind of what this worker counted.
        found: String,
    },
    /// The outputs of an evaluation have too many distinct values.
    #[error(
        "metric `auc`: more than {max} distinct outputs; use fewer validation records, for example by data.validation.records, \
         or remove \"auc\" from model.metrics"
    )]
    TooManyScores {
        /// Largest number of distinct outputs.
        max: usize,
    },
    /// The outputs of one data shard have too many distinct values for a message.
    #[error(
        "metric `auc`: {found} distinct outputs in one part of an evaluation, expected at most {max}; use a network with fewer \
         outputs, or remove \"auc\" from model.metrics"
    )]
    ReportScores {
        /// Number of distinct outputs.
        found: usize,
        /// Largest number of distinct outputs.
        max: usize,
    },
    /// A network has too many classes for a metric.
    #[error(
        "metric `{metric}`: the network has {classes} classes, expected at most {max}; remove \"{metric}\" from model.metrics"
    )]
    TooManyClasses {
        /// Metric of the job.
        metric: Metric,
        /// Number of classes of the network.
        classes: usize,
        /// Largest number of classes.
        max: usize,
    },
    /// The job file cannot be read as TOML, has an unknown key or a wrong type.
    #[error("{0}")]
    JobFile(String),
    /// The job file is well-formed and contradicts itself. The text has a line for each violation.
    #[error("the job cannot run as it is described:\n{}", .0.iter().map(|line| format!("  - {line}")).collect::<Vec<_>>().join("\n"))]
    Invalid(Vec<String>),
}
