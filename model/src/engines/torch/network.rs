//! The interface of scripts and of Ebbflow's own networks, and the conversion of libtorch's
//! messages.

use std::collections::BTreeMap;
use std::ffi::CString;

use proto::tensor::{TensorSpec, Values};
use tch::{TchError, Tensor};

use crate::device::Device;
use crate::error::{Error, Result};
use crate::export::Constant;

/// A tensor of a network with its name.
#[derive(Debug)]
pub(super) struct Named {
    pub(super) spec: TensorSpec,
    /// Tensor of the network itself. Parameters are leaves that require gradients.
    pub(super) tensor: Tensor,
}

/// Kind of a forward pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mode {
    /// Training: every random number comes from `key`, and running statistics are updated.
    Train { key: u64 },
    /// Evaluation: nothing is random and nothing changes.
    Evaluate,
}

/// Result of a forward pass.
#[derive(Debug)]
pub(super) struct Output {
    /// Outputs `[n, ..]`.
    pub(super) outputs: Tensor,
    /// Mean loss, if the network computes it itself.
    pub(super) loss: Option<Tensor>,
}

/// A network: a script, or one of Ebbflow's own.
pub(super) trait Network: Send {
    /// Returns the tensors that a step changes, in the model's order.
    fn tensors(&self) -> &[Named];

    /// Returns the values of version 0.
    fn initial(&self, seed: u64) -> Result<Vec<Values>>;

    /// Computes the outputs for the inputs `[n, shape..]`, each with the name of its argument.
    /// `labels` are given if the network computes its own loss.
    fn forward(
        &mut self,
        inputs: &[(CString, Tensor)],
        labels: Option<&Tensor>,
        mode: Mode,
    ) -> Result<Output>;

    /// Returns the constants; see [`Model::constants`](crate::Model::constants).
    fn constants(&self) -> Result<Vec<Constant>> {
        Ok(Vec::new())
    }

    /// Returns further files; see [`Model::export`](crate::Model::export).
    fn export(&mut self) -> Result<BTreeMap<String, Vec<u8>>> {
        Ok(BTreeMap::new())
    }
}

/// Returns libtorch's name of a device.
pub(super) const fn device(device: Device) -> tch::Device {
    match device {
        Device::Cpu => tch::Device::Cpu,
        Device::Cuda(index) => tch::Device::Cuda(index),
    }
}

/// Returns a function that adds the failed operation to libtorch's errors.
pub(super) fn failed(what: &str) -> impl Fn(TchError) -> Error + Copy {
    move |error| Error::Engine { what: what.to_owned(), reason: brief(&error.to_string()) }
}

/// Returns libtorch's message without its C++ stack.
pub(super) fn brief(message: &str) -> String {
    let message = message.strip_prefix("Internal torch error: ").unwrap_or(message);
    message.split("\nException raised from").next().unwrap_or(message).trim().to_owned()
}
