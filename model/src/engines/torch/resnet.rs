//! `resnet18` (He et al. 2016) with the architecture, tensor names and initial distributions of
//! torchvision, which can load its `state_dict`.

use serde::Deserialize;
use tch::Tensor;

use super::builtin::{self, Builtin, Weights};
use super::layers::{BatchNorm, Conv, Linear, mean_of_channels};
use super::network::{Mode, failed};
use crate::engines::options::outputs;
use crate::error::Result;
use crate::model::Context;

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct Options {
    /// Number of outputs, for losses on classes. Default: the largest label in the data, plus 1.
    classes: Option<usize>,
    /// Number of outputs, for losses on values. Default: 1.
    outputs: Option<usize>,
    /// Whether images are about 32 x 32: a 3 x 3 first convolution keeps their size, and no pooling
    /// follows it.
    small_input: bool,
}

/// Builds the network, for images of any size.
pub(super) fn build(context: &Context) -> Result<Builtin> {
    let options: Options = context.options()?;
    let (channels, ..) = builtin::image(context, 1)?;
    let outputs = outputs(context, options.classes, options.outputs)?;
    layers(context, channels, outputs, options.small_input).map_err(failed("resnet18"))
}

fn layers(context: &Context, channels: usize, outputs: usize, small: bool) -> tch::Result<Builtin> {
    let mut weights = Weights::new(context);
    let (kernel, stride) = if small { (3, 1) } else { (7, 2) };
    let conv1 = Conv::without_bias(&mut weights, "conv1", (channels, 64), kernel, stride)?;
    let bn1 = BatchNorm::new(&mut weights, "bn1", 64)?;
    let (mut blocks, mut inputs) = (Vec::new(), 64);
    for (layer, outputs) in [64, 128, 256, 512].into_iter().enumerate() {
        let stride = if layer == 0 { 1 } else { 2 };
        for (block, stride) in [stride, 1].into_iter().enumerate() {
            let name = format!("layer{}.{block}", layer + 1);
            blocks.push(Block::new(&mut weights, &name, (inputs, outputs), stride)?);
            inputs = outputs;
        }
    }
    let fc = Linear::new(&mut weights, "fc", 512, outputs)?;
    Ok(Builtin::new("resnet18", weights, move |features, mode| {
        let mut x = bn1.forward(&conv1.forward(features)?, mode)?.f_relu()?;
        if !small {
            x = x.f_max_pool2d(3, 2, 1, 1, false)?;
        }
        let x = blocks.iter().try_fold(x, |x, block| block.forward(&x, mode))?;
        fc.forward(&mean_of_channels(&x)?)
    }))
}

/// Two 3 x 3 convolutions beside a shortcut.
struct Block {
    conv1: Conv,
    bn1: BatchNorm,
    conv2: Conv,
    bn2: BatchNorm,
    /// A 1 x 1 convolution on the shortcut, where the shape changes.
    downsample: Option<(Conv, BatchNorm)>,
}

impl Block {
    fn new(weights: &mut Weights, name: &str, channels: (usize, usize), stride: i64) -> tch::Result<Self> {
        let (inputs, outputs) = channels;
        let conv1 = Conv::without_bias(weights, &format!("{name}.conv1"), channels, 3, stride)?;
        let bn1 = BatchNorm::new(weights, &format!("{name}.bn1"), outputs)?;
        let conv2 = Conv::without_bias(weights, &format!("{name}.conv2"), (outputs, outputs), 3, 1)?;
        let bn2 = BatchNorm::new(weights, &format!("{name}.bn2"), outputs)?;
        let downsample = if stride == 1 && inputs == outputs {
            None
        } else {
            let conv = Conv::without_bias(weights, &format!("{name}.downsample.0"), channels, 1, stride)?;
            Some((conv, BatchNorm::new(weights, &format!("{name}.downsample.1"), outputs)?))
        };
        Ok(Self { conv1, bn1, conv2, bn2, downsample })
    }

    fn forward(&self, x: &Tensor, mode: Mode) -> tch::Result<Tensor> {
        let inner = self.bn1.forward(&self.conv1.forward(x)?, mode)?.f_relu()?;
        let inner = self.bn2.forward(&self.conv2.forward(&inner)?, mode)?;
        let shortcut = match &self.downsample {
            Some((conv, bn)) => bn.forward(&conv.forward(x)?, mode)?,
            None => x.shallow_clone(),
        };
        inner.f_add(&shortcut)?.f_relu()
    }
}
