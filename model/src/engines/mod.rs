//! Compute engines behind [`Model`](crate::Model): pure Rust always, libtorch with the `torch` feature.

mod loss;
mod options;
mod pure;
mod registry;
#[cfg(feature = "torch")]
mod torch;

use std::path::Path;

use proto::numerics::Numerics;
use proto::tensor::{TensorSpec, Values};

pub use self::registry::Registry;
use crate::device::Device;
use crate::error::Result;
use crate::export::Constant;

/// The TorchScript module in `file` with `values` of the trained `tensors` in it, as `torch.jit.load` reads it; and the constants that it
/// has beside them. What a job exports itself at its end, here from values that were saved.
///
/// # Errors
/// No TorchScript module, or another job's.
#[cfg(feature = "torch")]
pub fn script_with_weights(
    file: &Path,
    tensors: &[TensorSpec],
    values: &[Values],
) -> Result<(Vec<u8>, Vec<Constant>)> {
    torch::script_with_weights(file, tensors, values)
}

/// A TorchScript module with trained weights in it: not without libtorch.
///
/// # Errors
/// Always [`Error::NoTorch`](crate::Error::NoTorch).
#[cfg(not(feature = "torch"))]
pub fn script_with_weights(
    _file: &Path,
    _tensors: &[TensorSpec],
    _values: &[Values],
) -> Result<(Vec<u8>, Vec<Constant>)> {
    Err(crate::error::Error::NoTorch("a TorchScript model".to_owned()))
}

/// CUDA devices that this process can compute on.
#[cfg(feature = "torch")]
pub fn cuda_devices() -> usize {
    torch::cuda_devices()
}

/// CUDA devices that this process can compute on: none without libtorch.
#[cfg(not(feature = "torch"))]
pub fn cuda_devices() -> usize {
    0
}

/// The numerics class of gradients computed on `device` with this number of threads. Computed once by a process, which takes about a
/// tenth of a second on a CPU.
///
/// # Errors
/// libtorch cannot compute there.
#[cfg(feature = "torch")]
pub fn numerics(device: Device, threads: usize) -> Result<Numerics> {
    torch::numerics(device, threads)
}

/// The numerics class of the pure-Rust engine: a constant, whatever it computes on.
///
/// Its only operations are `+ - * /`, square roots and conversions, which IEEE 754 rounds in one way, in an order that the source fixes
/// and the compiler keeps. Exponentials and the like are made of those too, in the crate `libm`: the C library's differ between its
/// versions, and between processors with and without fused multiplication.
///
/// # Errors
/// None; with libtorch there are some.
#[cfg(not(feature = "torch"))]
pub fn numerics(_device: Device, _threads: usize) -> Result<Numerics> {
    Ok(Numerics { class: "pure-1".to_owned(), facts: "pure Rust, IEEE 754 in a fixed order".to_owned() })
}
