//! Everything that stops a model, and whether another attempt can help.

/// Result of building a model or computing with it.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What went wrong.
#[derive(Debug, thiserror::Error)]
pub enum Error {
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
    /// A file that is no TorchScript module, or does not do what the job needs.
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
    /// Whether another attempt, here or on another worker, can only fail the same way.
    pub const fn is_fatal(&self) -> bool {
        !matches!(self, Self::Engine { .. } | Self::NoSuchDevice { .. } | Self::NoTorch(_))
    }
}
