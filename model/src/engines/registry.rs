//! The networks that a job can name, the engine that builds each, and how this engine rounds.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use proto::numerics::Numerics;
use proto::spec::JobSpec;

use super::options::{Engine, Mlp};
use super::pure;
#[cfg(feature = "torch")]
use super::torch;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::model::{Context, Model};

/// An engine of TorchScript modules that the surrounding program brings, such as the PyTorch of a
/// Python process.
pub trait ScriptEngine: Send + Sync {
    /// Builds the model of a job with a script.
    ///
    /// # Errors
    /// The engine is not there, or the script does not fit.
    fn build(&self, context: &Context) -> Result<Box<dyn Model>>;

    /// Returns the numerics class of gradients computed on `device` with `threads` threads.
    ///
    /// # Errors
    /// The engine is not there, or cannot compute on the device.
    fn numerics(&self, device: Device, threads: usize) -> Result<Numerics>;
}

type Build = Arc<dyn Fn(&Context) -> Result<Box<dyn Model>> + Send + Sync>;

/// The networks that `model.builtin` can name: Ebbflow's, and those of a user's program.
#[derive(Clone)]
pub struct Registry {
    builders: BTreeMap<String, Build>,
    /// Engine of TorchScript modules. `None`: libtorch, if this program is linked to it.
    scripts: Option<Arc<dyn ScriptEngine>>,
}

impl fmt::Debug for Registry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Registry").field(&self.names()).finish()
    }
}

impl Default for Registry {
    /// Returns a registry of Ebbflow's own networks.
    fn default() -> Self {
        let registry = Self { builders: BTreeMap::new(), scripts: None };
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

    /// Builds the models of jobs with a TorchScript file by `engine`.
    #[must_use]
    pub fn with_scripts(mut self, engine: Arc<dyn ScriptEngine>) -> Self {
        self.scripts = Some(engine);
        self
    }

    /// Returns the registry for processes that compute this job alone. Without a script they load
    /// no engine for one, and have the numerics class of the others.
    #[must_use]
    pub fn for_job(mut self, spec: &JobSpec) -> Self {
        self.scripts = self.scripts.filter(|_| spec.model.script.is_some());
        self
    }

    /// Returns the registry for processes that compute any job. An engine that the program brings
    /// is left out: it rounds like no other, and the class of a process holds for all its jobs.
    #[must_use]
    pub fn for_any_job(mut self) -> Self {
        self.scripts = self.scripts.map(|_| Arc::new(LeftOut) as Arc<dyn ScriptEngine>);
        self
    }

    /// Returns the registry for processes that compute any job, scripts too. All their jobs have
    /// the numerics class of the engine for scripts.
    ///
    /// # Errors
    /// This program has no such engine.
    pub fn for_any_job_and_scripts(self) -> Result<Self> {
        match self.scripts.is_some() || cfg!(feature = "torch") {
            true => Ok(self),
            false => Err(Error::NoTorch("a worker of TorchScript models".to_owned())),
        }
    }

    /// Returns the numerics class of gradients computed on `device` with `threads` threads.
    ///
    /// # Errors
    /// An engine cannot compute on the device, or is not there.
    pub fn numerics(&self, device: Device, threads: usize) -> Result<Numerics> {
        match &self.scripts {
            Some(engine) => engine.numerics(device, threads),
            None => super::numerics(device, threads),
        }
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
        let Some(name) = &context.spec.model.builtin else {
            return match &self.scripts {
                Some(engine) => engine.build(context),
                None => script(context),
            };
        };
        let build = self.builders.get(name).ok_or_else(|| Error::UnknownModel {
            name: name.clone(),
            known: self.names().into_iter().map(str::to_owned).collect(),
        })?;
        build(context)
    }
}

/// Takes the place of an engine that the program brings, in a process that does not use it.
struct LeftOut;

impl ScriptEngine for LeftOut {
    fn build(&self, context: &Context) -> Result<Box<dyn Model>> {
        match script(context) {
            Err(Error::NoTorch(_)) => Err(Error::ScriptsLeftOut),
            built => built,
        }
    }

    fn numerics(&self, device: Device, threads: usize) -> Result<Numerics> {
        super::numerics(device, threads)
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

#[cfg(test)]
mod tests {
    use super::*;

    /// An engine that is not there.
    struct Missing;

    impl ScriptEngine for Missing {
        fn build(&self, _: &Context) -> Result<Box<dyn Model>> {
            Err(Error::NoPyTorch("no module".to_owned()))
        }

        fn numerics(&self, _: Device, _: usize) -> Result<Numerics> {
            Err(Error::NoPyTorch("no module".to_owned()))
        }
    }

    fn job(model: &str) -> JobSpec {
        let text = format!(
            "name = \"x\"\nepochs = 1\nbatch = {{ micro = 1 }}\nmodel = {{ {model} }}\n\
             optimizer = {{ kind = \"sgd\", learning_rate = 1 }}\n\
             data = {{ format = \"csv\", train = {{ files = [\"x\"] }} }}\n"
        );
        proto::spec::parse(&text, std::path::Path::new("x.toml"), &[]).unwrap()
    }

    #[test]
    fn only_processes_that_take_scripts_ask_the_engine_that_the_program_brings() {
        let registry = Registry::default().with_scripts(Arc::new(Missing));
        let asks = |registry: Registry| {
            let numerics = registry.numerics(Device::Cpu, 1);
            matches!(numerics, Err(Error::NoPyTorch(_)))
        };
        assert!(asks(registry.clone().for_job(&job("script = \"x.pt\""))));
        assert!(!asks(registry.clone().for_job(&job("builtin = \"softmax\""))));
        assert!(asks(registry.clone().for_any_job_and_scripts().unwrap()));
        assert!(!asks(registry.for_any_job()));
    }

    #[test]
    fn a_process_that_cannot_compute_scripts_says_why() {
        let context = Context {
            spec: Arc::new(job("script = \"x.pt\"")),
            inputs: Vec::new(),
            label_max: None,
            artifacts: BTreeMap::new(),
            device: Device::Cpu,
            devices: Default::default(),
            threads: 1,
        };
        let registry = Registry::default().with_scripts(Arc::new(Missing)).for_any_job();
        let error = registry.build(&context).err().expect("no script is built");
        assert!(!Error::ScriptsLeftOut.is_fatal(), "another worker may take it");
        let is_linked = cfg!(feature = "torch");
        assert_eq!(matches!(error, Error::ScriptsLeftOut), !is_linked, "{error}");
        assert_eq!(Registry::default().for_any_job_and_scripts().is_ok(), is_linked);
    }
}
