//! Errors of a model, and whether a retry may help.

use proto::metrics::Metric;
use proto::spec::DeviceKind;

/// Result of building a model or computing with it.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Error of building a model or computing with it.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A record's label does not fit the network's outputs.
    #[error(
        "record {record}: label {label} is outside 0..{classes}; the network has {classes} outputs, give it more or mend the labels"
    )]
    Label {
        /// Number of the record within its data set.
        record: u64,
        /// Label of the record.
        label: i64,
        /// Number of outputs of the network.
        classes: usize,
    },
    /// Outputs and loss do not fit each other.
    #[error(
        "the loss `{loss}` needs {expected}, found {found}; choose another loss or network, or mend the labels"
    )]
    Loss {
        /// Loss of the job.
        loss: String,
        /// Shape or type that the loss needs.
        expected: String,
        /// Shape or type that was found.
        found: String,
    },
    /// The data's shape does not fit the network.
    #[error(
        "the network `{model}` needs records of shape {expected}, the data has {found:?}; set data.shape or choose another network"
    )]
    Shape {
        /// Name of the network.
        model: String,
        /// Shape that the network accepts.
        expected: String,
        /// Shape of the data.
        found: Vec<usize>,
    },
    /// The job's inputs do not fit the network.
    #[error(
        "the network `{model}` takes {expected}, the job gives {found}; change data.inputs or choose another network"
    )]
    Inputs {
        /// Name of the network.
        model: String,
        /// Inputs that the network takes.
        expected: String,
        /// Inputs of the job.
        found: String,
    },
    /// No builtin network has this name.
    #[error("model.builtin: no network `{name}`; known are {}", known.join(", "))]
    UnknownModel {
        /// Unknown name.
        name: String,
        /// All known names.
        known: Vec<String>,
    },
    /// The options of a builtin network are wrong.
    #[error("model.options of `{model}`: {reason}")]
    ModelOptions {
        /// Name of the network.
        model: String,
        /// Reason why they are wrong.
        reason: String,
    },
    /// The engine cannot compute as the job says.
    #[error("model.{setting}: {reason}")]
    Setting {
        /// Setting of the job's model.
        setting: &'static str,
        /// Reason why the engine cannot, and what to do.
        reason: String,
    },
    /// The file is no TorchScript module, or the module does not do what the job needs.
    #[error("model script `{name}`: {reason}")]
    Script {
        /// Artifact name of the file.
        name: String,
        /// Defect, and what to do.
        reason: String,
    },
    /// A metric does not fit the labels or the network.
    #[error("metric `{metric}`: {reason}")]
    Metric {
        /// Metric of the job.
        metric: Metric,
        /// Reason why it does not fit, and what to do.
        reason: String,
    },
    /// A network has too many classes for a metric.
    #[error(transparent)]
    Classes(#[from] proto::Error),
    /// A device refused or failed.
    #[error(transparent)]
    Device(#[from] kernels::Error),
    /// The compute engine failed.
    #[error("{what}: {reason}")]
    Engine {
        /// Operation that failed.
        what: String,
        /// Message of the engine.
        reason: String,
    },
    /// The text names no device.
    #[error(
        "device `{0}`: expected cpu, cuda:N, several such as cuda:0,2, GPU-UUID or MIG-UUID as `nvidia-smi -L` spells \
         them, all, or auto"
    )]
    UnknownDevice(String),
    /// The text names several devices, or none in particular.
    #[error("device `{0}`: expected one device, cpu, cuda:N, GPU-UUID or MIG-UUID")]
    NotOneDevice(String),
    /// The text names a device twice.
    #[error(
        "device `{text}` names {device} twice; name it once; `ebb run --workers` puts several workers on it"
    )]
    RepeatedDevice {
        /// Repeated device.
        device: String,
        /// Whole text.
        text: String,
    },
    /// The CUDA device cannot be used.
    #[error("device {device}: {reason}")]
    NoSuchDevice {
        /// Device that was asked for, or `all`.
        device: String,
        /// What is missing, and what to do.
        reason: String,
    },
    /// The job takes workers on other devices.
    #[error(
        "device {chosen}: the job has fleet.device = \"{wanted}\"; change one of them, or leave out --device"
    )]
    OtherDevice {
        /// Devices that the user chose.
        chosen: String,
        /// Kind of device that the job wants.
        wanted: DeviceKind,
    },
    /// The CUDA half of libtorch is not there, or does not load.
    #[error("no CUDA in libtorch: {0}; get it with `cargo xtask libtorch --cuda`, or compute on the CPU")]
    NoTorchCuda(String),
    /// The kernels of the pure engine do not run on a CUDA device.
    #[error(transparent)]
    NoKernels(kernels::Error),
    /// The program that drives the model failed at it. A retry, here or elsewhere, may help.
    #[error("{what}: {reason}")]
    Driver {
        /// Operation that failed.
        what: String,
        /// Message of the program, with its traceback.
        reason: String,
    },
    /// The program that drives the model has left the job. Others can compute this.
    #[error("{0}: the training loop ended before it answered")]
    Left(String),
    /// This program was built without libtorch.
    #[error(
        "{0} needs libtorch, and this program was built with --no-default-features; build it with the `torch` feature"
    )]
    NoTorch(String),
    /// The program brings an engine for scripts, and this worker was not told to use it.
    #[error("a TorchScript model: this worker takes none; start it with `ebb worker --torchscript`")]
    ScriptsLeftOut,
    /// The Python process has no PyTorch.
    #[error("a TorchScript model needs PyTorch here: {0}; pip install torch==2.11.0")]
    NoPyTorch(String),
}

impl Error {
    /// Returns whether every retry, here or on another worker, fails the same way.
    pub const fn is_fatal(&self) -> bool {
        let no_engine = matches!(
            self,
            Self::NoSuchDevice { .. }
                | Self::NoTorch(_)
                | Self::NoTorchCuda(_)
                | Self::NoKernels(_)
                | Self::ScriptsLeftOut
                | Self::NoPyTorch(_)
        );
        let elsewhere = matches!(self, Self::Engine { .. } | Self::Driver { .. } | Self::Left(_));
        !(no_engine || elsewhere)
    }
}
