//! Everything that can be wrong with what one process says to another, or with a job file.

/// Result of a check in this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What is wrong with outside input.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A model without tensors.
    #[error("the model has no tensors; a model needs at least one parameter")]
    NoTensors,
    /// A placement without partitions.
    #[error("a job needs at least one partition; start a ps or set fleet.ps to 1 or more")]
    NoPartitions,
    /// A tensor that cannot be placed.
    #[error("tensor `{name}` (number {index}, shape {shape:?}): expected {expected}")]
    Tensor {
        /// Its name.
        name: String,
        /// Its place in the model's order.
        index: usize,
        /// Its shape.
        shape: Vec<usize>,
        /// What it should be.
        expected: &'static str,
    },
    /// A message lacks a field, or a field is out of its range.
    #[error("{message}.{field}: expected {expected}, found {found}")]
    Field {
        /// The protobuf message.
        message: &'static str,
        /// The field.
        field: &'static str,
        /// Its range.
        expected: String,
        /// What was sent.
        found: String,
    },
    /// A chunk that the partition does not have, or not in this place.
    #[error(
        "{what} partition {partition}: chunk {found} where chunk {expected} belongs; the sender has another model or \
         placement, restart it with this job's"
    )]
    WrongChunk {
        /// "push to" or "pull from".
        what: &'static str,
        /// The partition.
        partition: u32,
        /// What comes next in the layout: a chunk id or "the end".
        expected: String,
        /// What was sent: a chunk id or "the end".
        found: String,
    },
    /// A chunk of the wrong size.
    #[error(
        "{what} partition {partition}: chunk {chunk} of tensor `{tensor}` has {found_bytes} bytes, the layout says \
         {expected_bytes} ({len} values of {bytes_each} bytes); the sender has another model or type of exchange, restart it with this job's"
    )]
    ChunkBytes {
        /// "push to" or "pull from".
        what: &'static str,
        /// The partition.
        partition: u32,
        /// The chunk.
        chunk: u32,
        /// Its tensor.
        tensor: String,
        /// By the layout.
        expected_bytes: usize,
        /// Its values.
        len: usize,
        /// Each of them.
        bytes_each: usize,
        /// As sent.
        found_bytes: usize,
    },
    /// The job file cannot be read as TOML, has an unknown key or a wrong type.
    #[error("{0}")]
    JobFile(String),
    /// The job file is well-formed and contradicts itself: every violation, a line each.
    #[error("the job cannot run as it is described:\n{}", .0.iter().map(|line| format!("  - {line}")).collect::<Vec<_>>().join("\n"))]
    Invalid(Vec<String>),
}
