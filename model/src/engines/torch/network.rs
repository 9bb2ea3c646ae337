//! What a script and a network of ours have in common, and how what libtorch says is read.

use std::collections::BTreeMap;

use proto::tensor::{TensorSpec, Values};
use tch::{TchError, Tensor};

use crate::device::Device;
use crate::error::{Error, Result};
use crate::export::Constant;

/// A tensor of a network under its name.
#[derive(Debug)]
pub(super) struct Named {
    pub(super) spec: TensorSpec,
    /// The network's own tensor; parameters are leaves that require gradients.
    pub(super) tensor: Tensor,
}

/// Whether a forward pass learns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mode {
    /// Every random number comes from `key`; running statistics are updated.
    Train { key: u64 },
    /// Nothing is random and nothing changes.
    Evaluate,
}

/// What a forward pass gives.
#[derive(Debug)]
pub(super) struct Output {
    /// `[n, ..]`.
    pub(super) outputs: Tensor,
    /// The mean loss, when the network computes it itself.
    pub(super) loss: Option<Tensor>,
}

/// What differs between a script and a network of ours.
pub(super) trait Network: Send {
    /// What a step changes, in the model's order.
    fn tensors(&self) -> &[Named];

    /// Values of version 0.
    fn initial(&self, seed: u64) -> Result<Vec<Values>>;

    /// Outputs for features `[n, shape..]`; `labels` are given when the loss is the network's own.
    fn forward(&mut self, features: &Tensor, labels: Option<&Tensor>, mode: Mode) -> Result<Output>;

    /// See [`Model::constants`](crate::Model::constants).
    fn constants(&self) -> Result<Vec<Constant>> {
        Ok(Vec::new())
    }

    /// See [`Model::export`](crate::Model::export).
    fn export(&mut self) -> Result<BTreeMap<String, Vec<u8>>> {
        Ok(BTreeMap::new())
    }
}

/// libtorch's name of a device.
pub(super) const fn device(device: Device) -> tch::Device {
    match device {
        Device::Cpu => tch::Device::Cpu,
        Device::Cuda(index) => tch::Device::Cuda(index),
    }
}

/// Names what libtorch failed at.
pub(super) fn failed(what: &str) -> impl Fn(TchError) -> Error + Copy {
    move |error| Error::Engine { what: what.to_owned(), reason: brief(&error.to_string()) }
}

/// libtorch's message without its C++ stack.
pub(super) fn brief(message: &str) -> String {
    let message = message.strip_prefix("Internal torch error: ").unwrap_or(message);
    message.split("\nException raised from").next().unwrap_or(message).trim().to_owned()
}
