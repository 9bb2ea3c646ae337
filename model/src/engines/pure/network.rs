//! A stack of dense layers, which computes `linear`, `softmax` and `mlp`.
//!
//! Weights have the layout of `torch.nn.Linear` (`[outputs, inputs]`) and the names that
//! `torch.nn.Sequential` gives them, activations counted. So the exported file loads strictly into
//! the same network built in PyTorch. One thread computes. Random numbers are drawn for the initial
//! weights only.

use data::predictions::PREDICTION;
use data::{Batch, Column};
use proto::metrics::Metric;
use proto::random::Keyed;
use proto::spec::Loss;
use proto::tensor::{TensorSpec, Values};

use super::matrix;
use crate::engines::loss::Target;
use crate::engines::options::Activation;
use crate::error::{Error, Result};
use crate::model::{Context, Evaluation, Gradients, Model};

impl Activation {
    fn apply(self, values: &mut [f32]) {
        match self {
            // `max` would turn NaN into 0 and hide that the job diverged.
            Self::Relu => values.iter_mut().filter(|value| **value < 0.0).for_each(|value| *value = 0.0),
            Self::Tanh => values.iter_mut().for_each(|value| *value = libm::tanhf(*value)),
        }
    }

    /// Multiplies the gradient by the slope, which both activations compute from their answers.
    fn differentiate(self, gradient: &mut [f32], answers: &[f32]) {
        for (gradient, answer) in gradient.iter_mut().zip(answers) {
            match self {
                Self::Relu if *answer > 0.0 => {}
                Self::Relu => *gradient = 0.0,
                Self::Tanh => *gradient *= 1.0 - answer * answer,
            }
        }
    }
}

/// One dense layer: `y = x wᵗ + b`.
#[derive(Debug)]
struct Layer {
    /// Prefix of `weight` and `bias` in `state_dict`: empty, or `2.`.
    prefix: String,
    inputs: usize,
    outputs: usize,
    weight: Vec<f32>,
    bias: Vec<f32>,
}

/// The network, its loss and its metrics.
#[derive(Debug)]
pub(super) struct Network {
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
        Ok(Self::new(context, vec![Layer::new(String::new(), inputs, outputs)], Activation::default()))
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
        let layers = widths.map(|(at, width)| {
            let layer = Layer::new(format!("{}.", 2 * at), inputs, width);
            inputs = width;
            layer
        });
        let layers = layers.collect();
        Ok(Self::new(context, layers, activation))
    }

    fn new(context: &Context, layers: Vec<Layer>, activation: Activation) -> Self {
        let model = &context.spec.model;
        let (loss, label_smoothing) = (model.loss, model.label_smoothing);
        Self { layers, activation, loss, label_smoothing, metrics: model.metrics.clone() }
    }

    /// Returns the number of values of one record's outputs.
    fn outputs(&self) -> usize {
        self.layers.last().map_or(0, |layer| layer.outputs)
    }

    /// Computes the inputs of each layer, and the network's outputs.
    fn forward(&self, batch: &Batch) -> Result<(Vec<Vec<f32>>, Vec<f32>)> {
        let inputs = self.layers[0].inputs;
        let features = batch.features();
        if features.len() != batch.samples * inputs {
            let found: Vec<_> = batch.inputs.iter().map(|input| input.spec().to_string()).collect();
            return Err(Error::Engine {
                what: "forward".to_owned(),
                reason: format!(
                    "a record has {}, the network was built for {inputs} f32 values a record",
                    found.join(", ")
                ),
            });
        }
        let mut given = vec![features.to_vec()];
        for (at, layer) in self.layers.iter().enumerate() {
            if at > 0 {
                self.activation.apply(&mut given[at]);
            }
            given.push(matrix::forward(&given[at], &layer.weight, &layer.bias));
        }
        let outputs = given.pop().expect("a network has a layer");
        Ok((given, outputs))
    }
}

impl Layer {
    fn new(prefix: String, inputs: usize, outputs: usize) -> Self {
        Self { prefix, inputs, outputs, weight: vec![0.0; inputs * outputs], bias: vec![0.0; outputs] }
    }
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

    fn load(&mut self, weights: &[Values]) -> Result<()> {
        // The network has no integer tensors. An empty list has a length that no tensor has.
        let weights: Vec<&[f32]> = weights.iter().map(|values| values.as_f32().unwrap_or_default()).collect();
        let found: Vec<usize> = weights.iter().map(|values| values.len()).collect();
        let expected: Vec<usize> = self.tensors().iter().map(TensorSpec::len).collect();
        if found != expected {
            let reason = format!("tensors of {found:?} values, the network has {expected:?}");
            return Err(Error::Engine { what: "load".to_owned(), reason });
        }
        let own = self.layers.iter_mut().flat_map(|layer| [&mut layer.weight, &mut layer.bias]);
        own.zip(weights).for_each(|(own, values)| own.copy_from_slice(values));
        Ok(())
    }

    fn gradients(&mut self, batch: &Batch, _key: u64) -> Result<Gradients> {
        let (given, outputs) = self.forward(batch)?;
        let width = self.outputs();
        let target = Target::new(self.loss, batch, width)?.smoothed(self.label_smoothing);
        let (loss, mut slope) = target.gradient(&outputs, width);
        let mut values = Vec::new();
        for (at, layer) in self.layers.iter().enumerate().rev() {
            let (weight, bias) = matrix::weight_gradient(&slope, &given[at], layer.outputs, layer.inputs);
            // The order is from the last layer to the first, and is reversed below.
            values.extend([bias, weight].map(Values::F32));
            if at > 0 {
                slope = matrix::input_gradient(&slope, &layer.weight, layer.outputs, layer.inputs);
                self.activation.differentiate(&mut slope, &given[at]);
            }
        }
        values.reverse();
        Ok(Gradients { loss, values })
    }

    fn evaluate(&mut self, batch: &Batch) -> Result<Evaluation> {
        self.evaluate_and_predict(batch).map(|(evaluation, _)| evaluation)
    }

    fn predict(&mut self, batch: &Batch) -> Result<Column> {
        let (_, outputs) = self.forward(batch)?;
        Ok(Column::floats(PREDICTION, &[self.outputs()], batch.samples, &outputs))
    }

    fn evaluate_and_predict(&mut self, batch: &Batch) -> Result<(Evaluation, Column)> {
        let (_, outputs) = self.forward(batch)?;
        let width = self.outputs();
        let target = Target::new(self.loss, batch, width)?.smoothed(self.label_smoothing);
        let evaluation = target.evaluate(self.loss, &self.metrics, &outputs, width)?;
        Ok((evaluation, Column::floats(PREDICTION, &[width], batch.samples, &outputs)))
    }
}
