//! Compute engines behind [`Model`](crate::model::Model): pure Rust always, libtorch with the `torch` feature.

use crate::error::{Error, Result};
use crate::model::{Context, Model, Registry};

/// Registers Ebbflow's own networks.
pub(crate) fn register(_registry: &mut Registry) {}

/// Builds the model of a job that came with a TorchScript file.
pub(crate) fn script(_context: &Context) -> Result<Box<dyn Model>> {
    Err(Error::NoTorch("a TorchScript model".to_owned()))
}
