//! Compute engines behind [`Model`](crate::Model): pure Rust always, libtorch with the `torch`
//! feature.

#[cfg(test)]
mod golden;
mod loss;
mod options;
pub mod outputs;
pub mod per_record;
mod pure;
mod registry;
pub mod script;
#[cfg(feature = "torch")]
mod torch;

use std::path::Path;

use proto::numerics::Numerics;
use proto::tensor::{TensorSpec, Values};

pub use self::registry::{Registry, ScriptEngine};
use crate::device::Device;
#[cfg(not(feature = "torch"))]
use crate::error::Error;
use crate::error::Result;
use crate::export::Constant;

/// Writes the TorchScript module in `file` with `values` of the trained `tensors`, as
/// `torch.jit.load` reads it. Also returns the module's constants. A job exports such a file at its
/// end; this function makes it from saved values.
///
/// # Errors
/// The file is no TorchScript module, or belongs to another job.
#[cfg(feature = "torch")]
pub fn script_with_weights(
    file: &Path,
    tensors: &[TensorSpec],
    values: &[Values],
) -> Result<(Vec<u8>, Vec<Constant>)> {
    torch::script_with_weights(file, tensors, values)
}

/// Fails: TorchScript modules need libtorch.
///
/// # Errors
/// Always [`Error::NoTorch`](crate::Error::NoTorch).
#[cfg(not(feature = "torch"))]
pub fn script_with_weights(
    _file: &Path,
    _tensors: &[TensorSpec],
    _values: &[Values],
) -> Result<(Vec<u8>, Vec<Constant>)> {
    Err(Error::NoTorch("a TorchScript model".to_owned()))
}

/// Returns the number of CUDA devices on which libtorch computes.
///
/// # Errors
/// libtorch does not start, or its CUDA half is not there or does not load.
#[cfg(feature = "torch")]
pub fn cuda_devices() -> Result<usize> {
    torch::cuda_devices()
}

/// Returns the number of CUDA devices on which the pure engine computes: those of the driver. None
/// is opened for that.
///
/// # Errors
/// There is no driver, it is too old, or there is no NVRTC, which compiles the kernels.
#[cfg(not(feature = "torch"))]
pub fn cuda_devices() -> Result<usize> {
    let listed = kernels::device::listed().map_err(Error::NoKernels)?;
    kernels::device::compiler().map_err(Error::NoKernels)?;
    Ok(listed.len())
}

/// Whether this program's engine is made to be fast on CUDA devices, so that it uses them where a
/// user names none. The kernels of the pure engine are made for equal bits.
pub const IS_FAST_ON_CUDA: bool = cfg!(feature = "torch");

/// Returns the numerics class of gradients computed on `device` with `threads` threads. A process
/// computes it once, which takes about a tenth of a second on a CPU.
///
/// # Errors
/// libtorch cannot compute on the device.
#[cfg(feature = "torch")]
pub fn numerics(device: Device, threads: usize) -> Result<Numerics> {
    torch::numerics(device, threads)
}

/// Returns the numerics class of the pure-Rust engine, a constant.
///
/// Its only operations are `+ - * /`, square roots and conversions, which IEEE 754 rounds in one
/// way. The source fixes their order, and the compiler keeps it. The crate `libm` makes
/// exponentials and the like from them. Those of the C library differ between its versions, and
/// between processors with and without fused multiplication.
///
/// It is one class for all devices: on a CUDA device the same operations run in the same order, and
/// the functions of the host stay on the host.
///
/// # Errors
/// None, but libtorch's engine has some.
#[cfg(not(feature = "torch"))]
pub fn numerics(_device: Device, _threads: usize) -> Result<Numerics> {
    Ok(Numerics { class: "pure-1".to_owned(), facts: "pure Rust, IEEE 754 in a fixed order".to_owned() })
}
