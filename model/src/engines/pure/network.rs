//! A stack of dense layers, which computes `linear`, `softmax` and `mlp`.
//!
//! Weights have the layout of `torch.nn.Linear` (`[outputs, inputs]`) and the names that
//! `torch.nn.Sequential` gives them, activations counted. So the exported file loads strictly into
//! the same network built in PyTorch. One thread computes. Random numbers are drawn for the initial
//! weights only.
//!
//! Weights lie on the device of the worker, and products are computed there, with the bits of the
//! host (ADR 61). The loss is computed on the host: it is small, and its exponentials are functions
//! of the host. So is tanh.

use std::borrow::Cow;

use data::predictions::PREDICTION;
use data::{Batch, Column};
use kernels::dense::{self, Input};
use kernels::{Device, Operand, Storage};
use proto::metrics::Metric;
use proto::random::Keyed;
use proto::spec::Loss;
use proto::tensor::{DType, TensorSpec, Values};

use super::opened;
use crate::engines::loss::Target;
use crate::engines::options::Activation;
use crate::error::{Error, Result};
use crate::fault;
use crate::model::{Allocator, Context, Evaluation, Gradients, Model, TakeGradient, weigh};

impl Activation {
    /// Computes the answers in place.
    ///
    /// # Errors
    /// The device failed.
    fn apply(self, values: &mut Storage) -> Result<()> {
        match self {
            Self::Relu => values.relu(),
            Self::Tanh => {
                let tanh = |values: &mut [f32]| {
                    values.iter_mut().for_each(|value| *value = libm::tanhf(*value));
                };
                values.change(tanh).map_err(|error| failed(TANH, &error))?;
            }
        }
        Ok(())
    }

    /// Multiplies the gradient by the slope, which both activations compute from their answers.
    fn differentiate(self, gradient: &mut Storage, answers: &Storage) {
        match self {
            Self::Relu => gradient.relu_slope(answers),
            Self::Tanh => gradient.tanh_slope(answers),
        }
    }
}

/// What an error says that was computed.
const FORWARD: &str = "forward";
const TANH: &str = "tanh";

/// Returns the error of an operation that the device refused. It goes on.
fn refused(what: &str, error: &kernels::Error) -> Error {
    let said = error.to_string();
    let reason = match error {
        // The advice is for a ps. A worker has its own.
        kernels::Error::OutOfMemory { .. } => said.split(';').next().unwrap_or_default().to_owned(),
        _ => said,
    };
    Error::Engine { what: what.to_owned(), reason }
}

/// Returns the error of a device that has failed, and says so from now on.
fn failed(what: &str, error: &kernels::Error) -> Error {
    Error::Engine { what: what.to_owned(), reason: fault::of_failed(error) }
}

/// One dense layer: `y = x wᵗ + b`.
#[derive(Debug)]
struct Layer {
    /// Prefix of `weight` and `bias` in `state_dict`: empty, or `2.`.
    prefix: String,
    inputs: usize,
    outputs: usize,
    weight: Storage,
    bias: Storage,
}

/// What a network computed for some records.
struct Pass<'a> {
    features: Input<'a>,
    /// Answers of all layers but the last, after the activation.
    hidden: Vec<Storage>,
    outputs: Storage,
}

/// The network, its loss and its metrics.
#[derive(Debug)]
pub(super) struct Network {
    device: Device,
    layers: Vec<Layer>,
    activation: Activation,
    loss: Loss,
    label_smoothing: f64,
    metrics: Vec<Metric>,
}

impl Network {
    /// Creates a network of one layer, named like a lone `torch.nn.Linear`.
    pub(super) fn single(context: &Context, outputs: usize) -> Result<Self> {
        let inputs = context.features()?.iter().product();
        Self::new(context, [(String::new(), inputs, outputs)], Activation::default())
    }

    /// Creates layers named as in `torch.nn.Sequential(Linear, activation, Linear, ..)`: `0.`,
    /// `2.`, ..
    pub(super) fn sequential(
        context: &Context,
        hidden: &[usize],
        outputs: usize,
        activation: Activation,
    ) -> Result<Self> {
        let mut inputs = context.features()?.iter().product();
        let widths = hidden.iter().copied().chain([outputs]).enumerate();
        let layers =
            widths.map(|(at, width)| (format!("{}.", 2 * at), std::mem::replace(&mut inputs, width), width));
        Self::new(context, layers, activation)
    }

    /// Creates layers from their prefixes, inputs and outputs, on the device of the context.
    fn new(
        context: &Context,
        layers: impl IntoIterator<Item = (String, usize, usize)>,
        activation: Activation,
    ) -> Result<Self> {
        let device = opened(context)?;
        let layers = layers.into_iter().map(|(prefix, inputs, outputs)| {
            let zeros = |len| device.zeros(DType::F32, len).map_err(|error| refused("build", &error));
            Ok(Layer { prefix, inputs, outputs, weight: zeros(inputs * outputs)?, bias: zeros(outputs)? })
        });
        let layers = layers.collect::<Result<_>>()?;
        let model = &context.spec.model;
        let (loss, label_smoothing) = (model.loss, model.label_smoothing);
        Ok(Self { device, layers, activation, loss, label_smoothing, metrics: model.metrics.clone() })
    }

    /// Returns the number of values of one record's outputs.
    fn outputs(&self) -> usize {
        self.layers.last().map_or(0, |layer| layer.outputs)
    }

    /// Computes the answers of each layer.
    fn forward<'a>(&self, batch: &'a Batch) -> Result<Pass<'a>> {
        let inputs = self.layers[0].inputs;
        let expected = batch.samples * inputs;
        let copy = batch.placed.get(0).and_then(|copy| kernels::values::storage(copy.as_ref()));
        // A copy of another length belongs to other records.
        let copy = copy.filter(|copy| copy.len() == expected && !self.device.is_host());
        let features = batch.features();
        if copy.is_none() && features.len() != expected {
            let found: Vec<_> = batch.inputs.iter().map(|input| input.spec().to_string()).collect();
            return Err(Error::Engine {
                what: FORWARD.to_owned(),
                reason: format!(
                    "a record has {}, the network was built for {inputs} f32 values a record",
                    found.join(", ")
                ),
            });
        }
        let refused = |error: kernels::Error| refused(FORWARD, &error);
        let features = match copy {
            Some(copy) => Input::There(copy),
            None => Input::on(&self.device, features).map_err(refused)?,
        };
        let [first, others @ ..] = self.layers.as_slice() else { unreachable!("a network has a layer") };
        let mut outputs = dense::forward(features.operand(), &first.weight, &first.bias).map_err(refused)?;
        let mut hidden = Vec::new();
        for layer in others {
            self.activation.apply(&mut outputs)?;
            let next =
                dense::forward(Operand::Stored(&outputs), &layer.weight, &layer.bias).map_err(refused)?;
            hidden.push(std::mem::replace(&mut outputs, next));
        }
        Ok(Pass { features, hidden, outputs })
    }

    /// Computes loss and gradients, which `take` gets from the last tensor to the first. Those of a
    /// device may still be under way.
    fn backward(&self, batch: &Batch, take: &mut TakeGradient<'_>) -> Result<f32> {
        const WHAT: &str = "gradients";
        let refused = |error: kernels::Error| refused(WHAT, &error);
        let Pass { features, hidden, outputs } = self.forward(batch)?;
        let width = self.outputs();
        let target = Target::new(self.loss, batch, width)?.smoothed(self.label_smoothing);
        let (loss, slope) = target.gradient(&read(WHAT, &outputs)?, width);
        let mut slope = self.device.upload(slope).map_err(refused)?;
        for (at, layer) in self.layers.iter().enumerate().rev() {
            let before = at.checked_sub(1).map(|before| &hidden[before]);
            let given = before.map_or_else(|| features.operand(), Operand::Stored);
            let gradients = dense::weight_gradient(&slope, given, layer.outputs, layer.inputs);
            let [weight, bias] = gradients.map_err(refused)?;
            take(2 * at + 1, bias.into());
            take(2 * at, weight.into());
            if let Some(answers) = before {
                let gradient = dense::input_gradient(&slope, &layer.weight, layer.outputs, layer.inputs);
                slope = gradient.map_err(refused)?;
                self.activation.differentiate(&mut slope, answers);
            }
        }
        Ok(loss)
    }

    /// Computes loss and metrics.
    fn measured(&self, batch: &Batch, outputs: &[f32]) -> Result<Evaluation> {
        let width = self.outputs();
        let target = Target::new(self.loss, batch, width)?.smoothed(self.label_smoothing);
        target.evaluate(self.loss, &self.metrics, outputs, width)
    }

    /// Waits for the device. If it has failed, this is the error, whatever was computed.
    fn settled<T>(&self, what: &str, result: Result<T>) -> Result<T> {
        self.device.settle().map_err(|error| failed(what, &error))?;
        result
    }

    /// Computes the outputs, on the host.
    fn outputs_of<T>(&self, batch: &Batch, take: impl FnOnce(&[f32]) -> Result<T>) -> Result<T> {
        let taken = self.forward(batch).and_then(|pass| take(&read(FORWARD, &pass.outputs)?));
        self.settled(FORWARD, taken)
    }
}

/// Returns values in memory of the host.
fn read<'a>(what: &str, values: &'a Storage) -> Result<Cow<'a, [f32]>> {
    values.read().map_err(|error| failed(what, &error))
}

impl Model for Network {
    fn tensors(&self) -> Vec<TensorSpec> {
        let specs = |layer: &Layer| {
            let name = |part| format!("{}{part}", layer.prefix);
            [
                TensorSpec::parameter(name("weight"), [layer.outputs, layer.inputs]),
                TensorSpec::parameter(name("bias"), [layer.outputs]),
            ]
        };
        self.layers.iter().flat_map(specs).collect()
    }

    /// Draws from the distribution of `torch.nn.Linear`: weights and biases are uniform within `1 /
    /// sqrt(inputs)` of 0.
    fn initial(&mut self, seed: u64) -> Result<Vec<Values>> {
        let inputs = self.layers.iter().flat_map(|layer| [layer.inputs; 2]);
        let draw = |(tensor, inputs): (&TensorSpec, usize)| {
            let bound = (1.0 / (inputs as f64).sqrt()) as f32;
            let mut keyed = Keyed::new(seed, &format!("init/{}", tensor.name), 0);
            Values::F32((0..tensor.len()).map(|_| keyed.uniform(-bound, bound)).collect())
        };
        Ok(self.tensors().iter().zip(inputs).map(draw).collect())
    }

    fn device(&self) -> Device {
        self.device.clone()
    }

    fn load(&mut self, weights: &[Values]) -> Result<()> {
        // The network has no integer tensors. An empty list has a length that no tensor has.
        let floats = |values: &Values| if values.dtype() == DType::F32 { values.len() } else { 0 };
        let found: Vec<usize> = weights.iter().map(floats).collect();
        let expected: Vec<usize> = self.tensors().iter().map(TensorSpec::len).collect();
        if found != expected {
            let reason = format!("tensors of {found:?} values, the network has {expected:?}");
            return Err(Error::Engine { what: "load".to_owned(), reason });
        }
        let own = self.layers.iter_mut().flat_map(|layer| [&mut layer.weight, &mut layer.bias]);
        for (own, values) in own.zip(weights) {
            match kernels::values::on_device(values) {
                None => own.place(0, values.bytes()),
                Some(from) if own.is_on_host() => {
                    own.receive(from).map_err(|error| failed("load", &error))?;
                }
                Some(from) => own.place_part(0, from, 0..from.size()),
            }
        }
        Ok(())
    }

    fn gradients(&mut self, batch: &Batch, _key: u64) -> Result<Gradients> {
        let mut values = Vec::new();
        let loss = self.backward(batch, &mut |_, gradient| values.push(gradient));
        let loss = self.settled("gradients", loss)?;
        values.reverse();
        Ok(Gradients { loss, values })
    }

    /// Hands over the gradients of the last layer first.
    fn gradients_as_made(
        &mut self,
        batch: &Batch,
        _key: u64,
        memory: &dyn Allocator,
        take: &mut TakeGradient<'_>,
    ) -> Result<f32> {
        let loss = self.backward(batch, &mut |tensor, mut values| {
            weigh(&mut values, batch.samples as f32, memory);
            take(tensor, values);
        });
        self.settled("gradients", loss)
    }

    fn evaluate(&mut self, batch: &Batch) -> Result<Evaluation> {
        self.outputs_of(batch, |outputs| self.measured(batch, outputs))
    }

    fn predict(&mut self, batch: &Batch) -> Result<Column> {
        let width = self.outputs();
        self.outputs_of(batch, |outputs| Ok(Column::floats(PREDICTION, &[width], batch.samples, outputs)))
    }

    fn evaluate_and_predict(&mut self, batch: &Batch) -> Result<(Evaluation, Column)> {
        let width = self.outputs();
        self.outputs_of(batch, |outputs| {
            let evaluation = self.measured(batch, outputs)?;
            Ok((evaluation, Column::floats(PREDICTION, &[width], batch.samples, outputs)))
        })
    }
}
