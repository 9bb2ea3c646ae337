//! Compute engines behind [`Model`](crate::model::Model): pure Rust always, libtorch with the `torch` feature.

mod loss;
mod options;
mod pure;
#[cfg(feature = "torch")]
mod torch;

use std::path::Path;

use proto::numerics::Numerics;
use proto::tensor::{TensorSpec, Values};

use self::options::{Engine, Mlp};
use crate::device::Device;
use crate::error::Result;
use crate::export::Constant;
use crate::model::{Context, Model, Registry};

/// Registers Ebbflow's own networks.
pub(crate) fn register(registry: &mut Registry) {
    let pure = registry.clone().with("linear", pure::linear).with("softmax", pure::softmax).with("mlp", mlp);
    *registry = pure;
    #[cfg(feature = "torch")]
    torch::register(registry);
}

/// Builds `mlp`, the network that every engine has.
fn mlp(context: &Context) -> Result<Box<dyn Model>> {
    let options = Mlp::of(context)?;
    match options.engine {
        Engine::Pure => pure::mlp(context, &options),
        #[cfg(feature = "torch")]
        Engine::Torch => torch::mlp(context, &options),
        #[cfg(not(feature = "torch"))]
        Engine::Torch => Err(crate::error::Error::NoTorch("model.options.engine = \"torch\"".to_owned())),
    }
}

/// Builds the model of a job that came with a TorchScript file.
#[cfg(feature = "torch")]
pub(crate) fn script(context: &Context) -> Result<Box<dyn Model>> {
    torch::script(context)
}

/// Builds the model of a job that came with a TorchScript file.
#[cfg(not(feature = "torch"))]
pub(crate) fn script(_context: &Context) -> Result<Box<dyn Model>> {
    Err(crate::error::Error::NoTorch("a TorchScript model".to_owned()))
}

/// See [`export::script`](crate::export::script).
#[cfg(feature = "torch")]
pub(crate) fn script_with_weights(
    file: &Path,
    tensors: &[TensorSpec],
    values: &[Values],
) -> Result<(Vec<u8>, Vec<Constant>)> {
    torch::script_with_weights(file, tensors, values)
}

/// See [`export::script`](crate::export::script).
#[cfg(not(feature = "torch"))]
pub(crate) fn script_with_weights(
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
