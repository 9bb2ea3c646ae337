//! Errors of messages between processes, and of job files.

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
    /// A stream of chunks has a chunk that does not come next in the partition's layout.
    #[error(
        "{what} partition {partition}: chunk {found} where chunk {expected} belongs; the sender has another model or \
         placement, restart it with this job's"
    )]
    WrongChunk {
        /// "push to" or "pull from".
        what: &'static str,
        /// Partition of the stream.
        partition: u32,
        /// Next chunk of the layout: a chunk id or "the end".
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
    /// The job file cannot be read as TOML, has an unknown key or a wrong type.
    #[error("{0}")]
    JobFile(String),
    /// The job file is well-formed and contradicts itself. The text has a line for each violation.
    #[error("the job cannot run as it is described:\n{}", .0.iter().map(|line| format!("  - {line}")).collect::<Vec<_>>().join("\n"))]
    Invalid(Vec<String>),
}
