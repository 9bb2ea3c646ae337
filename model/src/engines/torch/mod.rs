//! libtorch behind [`Model`]: TorchScript modules, and Ebbflow's own networks written over tensors.
//!
//! [`model::TorchModel`] is common to both; [`script`] and [`builtin`] are the two kinds of
//! network. `shim.cpp` has functions that `tch` lacks. Results depend neither on libtorch's
//! generators nor on earlier computations.

mod beside;
mod builtin;
mod convnet;
mod layers;
mod loss;
mod mlp;
mod model;
mod network;
mod numerics;
mod on_device;
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

/// Builds `convnet`.
pub(super) fn convnet(context: &Context) -> Result<Box<dyn Model>> {
    network(context, convnet::build)
}

/// Builds `resnet18`.
pub(super) fn resnet18(context: &Context) -> Result<Box<dyn Model>> {
    network(context, resnet::build)
}

/// Builds the model of a job's TorchScript file.
pub(super) fn script(context: &Context) -> Result<Box<dyn Model>> {
    prepare(context)?;
    Ok(Box::new(TorchModel::new(ScriptNetwork::new(context)?, context)?))
}

/// Returns a job's TorchScript file with trained weights, and its constants.
pub(super) fn script_with_weights(
    file: &Path,
    tensors: &[TensorSpec],
    values: &[Values],
) -> Result<(Vec<u8>, Vec<Constant>)> {
    settings::start()?;
    script::with_weights(file, tensors, values)
}

/// Builds `mlp` with `engine = "torch"`.
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
