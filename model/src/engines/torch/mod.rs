//! libtorch behind [`Model`]: TorchScript modules, and networks of ours written over tensors.
//!
//! [`model::TorchModel`] does what all of them share; [`script`] and [`builtin`] are the two kinds of network. `shim.cpp`
//! reaches what `tch` does not. Nothing here depends on libtorch's generators or on what was computed before.

mod builtin;
mod convnet;
mod layers;
mod loss;
mod mlp;
mod model;
mod network;
mod numerics;
mod resnet;
mod script;
mod settings;
mod shim;

use std::path::Path;

use proto::spec::Loss;
use proto::tensor::{TensorSpec, Values};

use self::builtin::Builtin;
use self::model::TorchModel;
pub(super) use self::numerics::numerics;
use self::script::ScriptNetwork;
pub(super) use self::settings::cuda_devices;
use crate::engines::options::{Mlp, check_loss};
use crate::error::Result;
use crate::export::Constant;
use crate::model::{Context, Model};

/// Builds `convnet`: two kinds of layers for images, see its file.
pub(super) fn convnet(context: &Context) -> Result<Box<dyn Model>> {
    network(context, convnet::build)
}

/// Builds `resnet18`.
pub(super) fn resnet18(context: &Context) -> Result<Box<dyn Model>> {
    network(context, resnet::build)
}

/// A job's TorchScript file.
pub(super) fn script(context: &Context) -> Result<Box<dyn Model>> {
    prepare(context)?;
    Ok(Box::new(TorchModel::new(ScriptNetwork::new(context)?, context)?))
}

/// A job's TorchScript file with trained weights in it, and its constants.
pub(super) fn script_with_weights(
    file: &Path,
    tensors: &[TensorSpec],
    values: &[Values],
) -> Result<(Vec<u8>, Vec<Constant>)> {
    settings::start()?;
    script::with_weights(file, tensors, values)
}

/// `mlp` with `engine = "torch"`.
pub(super) fn mlp(context: &Context, options: &Mlp) -> Result<Box<dyn Model>> {
    network(context, |context| mlp::build(context, options))
}

fn network(context: &Context, build: impl Fn(&Context) -> Result<Builtin>) -> Result<Box<dyn Model>> {
    check_loss(context, &[Loss::CrossEntropy, Loss::Mse, Loss::BceWithLogits])?;
    prepare(context)?;
    Ok(Box::new(TorchModel::new(build(context)?, context)?))
}

fn prepare(context: &Context) -> Result<()> {
    settings::start()?;
    settings::enter(context.threads)
}
