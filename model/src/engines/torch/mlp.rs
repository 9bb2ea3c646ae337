//! `mlp`: linear layers with an activation between them, for any feature shape.

use super::builtin::{Builtin, Weights};
use super::layers::{Linear, dropout};
use super::network::failed;
use crate::engines::options::{Activation, Mlp};
use crate::error::Result;
use crate::model::Context;

/// Builds the network. Its tensors have the names of PyTorch's `Sequential(Linear, ReLU, ..,
/// Linear)`: `0.weight`, `0.bias`, `2.weight`, .. With dropout they have those of
/// `Sequential(Linear, ReLU, Dropout, .., Linear)`: `0.`, `3.`, ..
pub(super) fn build(context: &Context, options: &Mlp) -> Result<Builtin> {
    let outputs = options.outputs(context)?;
    let mut weights = Weights::new(context);
    let modules = if options.dropout > 0.0 { 3 } else { 2 };
    let (mut layers, mut inputs) = (Vec::new(), context.features()?.iter().product());
    for width in options.hidden.iter().copied().chain([outputs]) {
        let name = (modules * layers.len()).to_string();
        layers.push(Linear::new(&mut weights, &name, inputs, width).map_err(failed("mlp"))?);
        inputs = width;
    }
    let (activation, share) = (options.activation, options.dropout);
    Ok(Builtin::new("mlp", weights, move |features, mode| {
        let mut x = features.f_flatten(1, -1)?;
        for (index, layer) in layers.iter().enumerate() {
            if index > 0 {
                x = match activation {
                    Activation::Relu => x.f_relu()?,
                    Activation::Tanh => x.f_tanh()?,
                };
                x = dropout(&x, share, &format!("dropout/{index}"), mode)?;
            }
            x = layer.forward(&x)?;
        }
        Ok(x)
    }))
}
