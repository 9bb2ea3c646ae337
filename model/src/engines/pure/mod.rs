//! The pure-Rust engine: small networks of dense layers, in every build of the program and with the
//! same bits in each, on the host and on a CUDA device.

mod network;
#[cfg(test)]
mod tests;

use proto::spec::Loss;
use serde::Deserialize;

use self::network::Network;
use super::options::{self, Mlp};
use crate::device::Device;
use crate::error::{Error, Result};
use crate::model::{Context, Model};

/// Opens the device of the context, for kernels.
///
/// # Errors
/// The device cannot be used. A program with libtorch computes on it all the same; without kernels,
/// networks of this engine are computed on the host there, which gives the same bits.
fn opened(context: &Context) -> Result<kernels::Device> {
    use kernels::Error as Kernels;
    let Device::Cuda(ordinal) = context.device else { return Ok(kernels::Device::default()) };
    match context.devices.cuda(ordinal) {
        Err(Kernels::NotBuilt | Kernels::NoCompiler) if cfg!(feature = "torch") => {
            Ok(kernels::Device::default())
        }
        opened => opened.map_err(|error| Error::NoSuchDevice {
            device: context.device.to_string(),
            reason: error.to_string(),
        }),
    }
}

/// Builds `linear`: each output is a weighted sum of the features.
pub(super) fn linear(context: &Context) -> Result<Box<dyn Model>> {
    #[derive(Default, Deserialize)]
    #[serde(deny_unknown_fields, default)]
    struct Linear {
        /// Number of outputs of one record. Default 1.
        outputs: Option<usize>,
    }
    check_settings(context)?;
    options::check_loss(context, &[Loss::Mse, Loss::BceWithLogits])?;
    let Linear { outputs } = context.options()?;
    Ok(Box::new(Network::single(context, options::outputs(context, None, outputs)?)?))
}

/// Builds `softmax`: multinomial logistic regression.
pub(super) fn softmax(context: &Context) -> Result<Box<dyn Model>> {
    #[derive(Default, Deserialize)]
    #[serde(deny_unknown_fields, default)]
    struct Softmax {
        /// Number of classes. Default: the largest label in the data, plus 1.
        classes: Option<usize>,
    }
    check_settings(context)?;
    options::check_loss(context, &[Loss::CrossEntropy])?;
    let Softmax { classes } = context.options()?;
    Ok(Box::new(Network::single(context, options::outputs(context, classes, None)?)?))
}

/// Builds `mlp`: dense layers with an activation between them.
pub(super) fn mlp(context: &Context, mlp: &Mlp) -> Result<Box<dyn Model>> {
    check_settings(context)?;
    options::check_loss(context, &[Loss::CrossEntropy, Loss::Mse, Loss::BceWithLogits])?;
    let outputs = mlp.outputs(context)?;
    Ok(Box::new(Network::sequential(context, &mlp.hidden, outputs, mlp.activation)?))
}

/// Checks that the job asks for f32, in which this engine computes.
///
/// # Errors
/// The job sets `autocast` or `tf32`.
fn check_settings(context: &Context) -> Result<()> {
    let model = &context.spec.model;
    let set = [("autocast", model.autocast.is_some()), ("tf32", model.tf32)];
    let Some((setting, _)) = set.into_iter().find(|(_, is_set)| *is_set) else { return Ok(()) };
    let network = model.builtin.as_deref().unwrap_or_default();
    let reason = format!(
        "the pure engine computes `{network}` in f32; remove it, or choose a network of libtorch: a script, convnet, \
         resnet18, or mlp with engine = \"torch\""
    );
    Err(Error::Setting { setting, reason })
}
