//! Ebbflow's own networks: named tensors and a function over them.

use std::ffi::CString;
use std::fmt;

use proto::random::Keyed;
use proto::tensor::{TensorRole, TensorSpec, Values};
use tch::{Kind, Tensor};

use super::network::{Mode, Named, Network, Output, device, failed};
use crate::error::{Error, Result};
use crate::model::Context;

/// Initial values of a tensor. Our own generator draws them from (job seed, tensor name), so that
/// they depend on nothing else.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Init {
    /// Uniform in `[-bound, bound)`.
    Uniform(f32),
    /// Normal with mean 0 and this standard deviation.
    Normal(f32),
    /// Equal values.
    Constant(f32),
}

impl Init {
    /// Returns PyTorch's default for weights and biases of linear and convolution layers
    /// (`kaiming_uniform_(a=sqrt(5))`).
    pub(super) fn fan_in(inputs: usize) -> Self {
        Self::Uniform((1.0 / (inputs.max(1) as f64).sqrt()) as f32)
    }

    fn values(self, spec: &TensorSpec, seed: u64) -> Values {
        if spec.role == TensorRole::Counter {
            return spec.zeros();
        }
        let mut stream = Keyed::new(seed, &format!("init/{}", spec.name), 0);
        let draw = |_| match self {
            Self::Uniform(bound) => stream.uniform(-bound, bound),
            Self::Normal(deviation) => stream.normal() * deviation,
            Self::Constant(value) => value,
        };
        Values::F32((0..spec.len()).map(draw).collect())
    }
}

/// The tensors of a network under construction.
#[derive(Debug)]
pub(super) struct Weights {
    device: tch::Device,
    named: Vec<Named>,
    init: Vec<Init>,
}

impl Weights {
    /// Creates an empty list of tensors, which will be on the job's device.
    pub(super) fn new(context: &Context) -> Self {
        Self { device: device(context.device), named: Vec::new(), init: Vec::new() }
    }

    /// Adds a tensor that the optimizer trains.
    pub(super) fn parameter(&mut self, name: &str, shape: &[usize], init: Init) -> tch::Result<Tensor> {
        let tensor = self.add(TensorSpec::parameter(name, shape), init)?;
        tensor.f_set_requires_grad(true)
    }

    /// Adds a tensor that forward passes of training update in place.
    pub(super) fn state(&mut self, name: &str, shape: &[usize], init: Init) -> tch::Result<Tensor> {
        self.add(TensorSpec::state(name, shape), init)
    }

    /// Adds a number that counts up from 0.
    pub(super) fn counter(&mut self, name: &str) -> tch::Result<Tensor> {
        self.add(TensorSpec::counter(name, []), Init::Constant(0.0))
    }

    /// Adds a tensor. The returned handle shares its memory.
    fn add(&mut self, spec: TensorSpec, init: Init) -> tch::Result<Tensor> {
        let kind = if spec.role == TensorRole::Counter { Kind::Int64 } else { Kind::Float };
        let shape: Vec<i64> = spec.shape.iter().map(|&size| size as i64).collect();
        let tensor = Tensor::f_zeros(shape, (kind, self.device))?;
        let handle = tensor.shallow_clone();
        self.named.push(Named { spec, tensor });
        self.init.push(init);
        Ok(handle)
    }
}

type Forward = Box<dyn Fn(&Tensor, Mode) -> tch::Result<Tensor> + Send>;

/// A network: its tensors, and the function that holds handles to them.
pub(super) struct Builtin {
    name: String,
    weights: Weights,
    forward: Forward,
}

impl fmt::Debug for Builtin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Builtin").field("name", &self.name).finish_non_exhaustive()
    }
}

impl Builtin {
    /// Creates the network `name`.
    pub(super) fn new<F>(name: &str, weights: Weights, forward: F) -> Self
    where
        F: Fn(&Tensor, Mode) -> tch::Result<Tensor> + Send + 'static,
    {
        Self { name: name.to_owned(), weights, forward: Box::new(forward) }
    }
}

impl Network for Builtin {
    fn tensors(&self) -> &[Named] {
        &self.weights.named
    }

    fn initial(&self, seed: u64) -> Result<Vec<Values>> {
        let Weights { named, init, .. } = &self.weights;
        Ok(named.iter().zip(init).map(|(named, init)| init.values(&named.spec, seed)).collect())
    }

    fn forward(
        &mut self,
        inputs: &[(CString, Tensor)],
        _labels: Option<&Tensor>,
        mode: Mode,
    ) -> Result<Output> {
        let features = inputs.first().ok_or_else(|| Error::Engine {
            what: self.name.clone(),
            reason: "a batch without inputs".to_owned(),
        })?;
        let outputs = (self.forward)(&features.1, mode).map_err(failed(&self.name))?;
        Ok(Output { outputs, loss: None })
    }
}

/// Returns channels, height and width of the records.
///
/// # Errors
/// The records are no images of at least `min` x `min`.
pub(super) fn image(context: &Context, min: usize) -> Result<(usize, usize, usize)> {
    match *context.features()? {
        [channels, height, width] if height >= min && width >= min => Ok((channels, height, width)),
        _ => Err(Error::Shape {
            model: context.spec.model.builtin.clone().unwrap_or_default(),
            expected: format!("[channels, height, width], at least {min} x {min}"),
            found: context.features()?.to_vec(),
        }),
    }
}
