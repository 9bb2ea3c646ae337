//! `convnet`: a small network for small images, after LeNet-5 (LeCun et al. 1998).
//!
//! Each entry of `channels` is a 3 x 3 convolution, a ReLU and a halving. Dropout and two linear
//! layers follow.

use serde::Deserialize;

use super::builtin::{self, Builtin, Weights};
use super::layers::{Conv, Linear, dropout, halve};
use super::network::failed;
use crate::engines::options::{check_share, outputs};
use crate::error::{Error, Result};
use crate::model::Context;

#[derive(Deserialize)]
#[serde(deny_unknown_fields, default)]
struct Options {
    /// Channels of each convolution.
    channels: Vec<usize>,
    /// Width of the linear layer before the last.
    hidden: usize,
    /// Number of outputs, for losses on classes. Default: the largest label in the data, plus 1.
    classes: Option<usize>,
    /// Number of outputs, for losses on values. Default: 1.
    outputs: Option<usize>,
    /// Share of the values before each linear layer that is dropped in training.
    dropout: f32,
}

impl Default for Options {
    fn default() -> Self {
        Self { channels: vec![16, 32], hidden: 128, classes: None, outputs: None, dropout: 0.0 }
    }
}

/// Builds the network with the tensors `conv1`, `conv2`, ..., `fc1`, `fc2`, each with `.weight` and
/// `.bias`.
pub(super) fn build(context: &Context) -> Result<Builtin> {
    let options: Options = context.options()?;
    let depth = options.channels.len();
    if !(1..=8).contains(&depth) || options.channels.contains(&0) || options.hidden == 0 {
        return Err(Error::ModelOptions {
            model: "convnet".to_owned(),
            reason: format!(
                "channels = {:?}, hidden = {}: 1 to 8 convolutions, and widths of at least 1",
                options.channels, options.hidden
            ),
        });
    }
    let (channels, height, width) = builtin::image(context, 1 << depth)?;
    check_share(context, options.dropout)?;
    let outputs = outputs(context, options.classes, options.outputs)?;
    let pixels = (height >> depth) * (width >> depth);
    layers(context, &options, channels, pixels, outputs).map_err(failed("convnet"))
}

fn layers(
    context: &Context,
    options: &Options,
    channels: usize,
    pixels: usize,
    outputs: usize,
) -> tch::Result<Builtin> {
    let (mut weights, share) = (Weights::new(context), options.dropout);
    let (mut convs, mut inputs) = (Vec::new(), channels);
    for (index, &outputs) in options.channels.iter().enumerate() {
        convs.push(Conv::new(&mut weights, &format!("conv{}", index + 1), (inputs, outputs), 3, 1)?);
        inputs = outputs;
    }
    let fc1 = Linear::new(&mut weights, "fc1", inputs * pixels, options.hidden)?;
    let fc2 = Linear::new(&mut weights, "fc2", options.hidden, outputs)?;
    Ok(Builtin::new("convnet", weights, move |features, mode| {
        let image =
            convs.iter().try_fold(features.shallow_clone(), |x, conv| halve(&conv.forward(&x)?.f_relu()?))?;
        let x = dropout(&image.f_flatten(1, -1)?, share, "dropout/1", mode)?;
        let x = dropout(&fc1.forward(&x)?.f_relu()?, share, "dropout/2", mode)?;
        fc2.forward(&x)
    }))
}
