//! The networks that a job can name, and the engine that builds each.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use super::options::{Engine, Mlp};
use super::pure;
#[cfg(feature = "torch")]
use super::torch;
use crate::error::{Error, Result};
use crate::model::{Context, Model};

type Build = Arc<dyn Fn(&Context) -> Result<Box<dyn Model>> + Send + Sync>;

/// The networks that `model.builtin` can name: Ebbflow's, and those of a user's program.
#[derive(Clone)]
pub struct Registry {
    builders: BTreeMap<String, Build>,
}

impl fmt::Debug for Registry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Registry").field(&self.names()).finish()
    }
}

impl Default for Registry {
    /// Returns a registry of Ebbflow's own networks.
    fn default() -> Self {
        let registry = Self { builders: BTreeMap::new() };
        let registry = registry.with("linear", pure::linear).with("softmax", pure::softmax).with("mlp", mlp);
        #[cfg(feature = "torch")]
        let registry = registry.with("convnet", torch::convnet).with("resnet18", torch::resnet18);
        registry
    }
}

impl Registry {
    /// Adds (or replaces) the network `name`.
    #[must_use]
    pub fn with<F>(mut self, name: &str, build: F) -> Self
    where
        F: Fn(&Context) -> Result<Box<dyn Model>> + Send + Sync + 'static,
    {
        self.builders.insert(name.to_owned(), Arc::new(build));
        self
    }

    /// Returns the known names, in order.
    pub fn names(&self) -> Vec<&str> {
        self.builders.keys().map(String::as_str).collect()
    }

    /// Builds the job's model: its script, or the network that `model.builtin` names.
    ///
    /// # Errors
    /// The network is unknown, or its options, the data's shape or the script do not fit.
    pub fn build(&self, context: &Context) -> Result<Box<dyn Model>> {
        let Some(name) = &context.spec.model.builtin else { return script(context) };
        let build = self.builders.get(name).ok_or_else(|| Error::UnknownModel {
            name: name.clone(),
            known: self.names().into_iter().map(str::to_owned).collect(),
        })?;
        build(context)
    }
}

/// Builds `mlp`, which every engine has.
fn mlp(context: &Context) -> Result<Box<dyn Model>> {
    let options = Mlp::of(context)?;
    match options.engine {
        Engine::Pure => pure::mlp(context, &options),
        #[cfg(feature = "torch")]
        Engine::Torch => torch::mlp(context, &options),
        #[cfg(not(feature = "torch"))]
        Engine::Torch => Err(Error::NoTorch("model.options.engine = \"torch\"".to_owned())),
    }
}

/// Builds the model of a job with a TorchScript file.
#[cfg(feature = "torch")]
fn script(context: &Context) -> Result<Box<dyn Model>> {
    torch::script(context)
}

/// Fails: a TorchScript file needs libtorch.
#[cfg(not(feature = "torch"))]
fn script(_context: &Context) -> Result<Box<dyn Model>> {
    Err(Error::NoTorch("a TorchScript model".to_owned()))
}
