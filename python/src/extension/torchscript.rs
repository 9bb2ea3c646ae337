//! TorchScript modules that the PyTorch of this Python computes.
//!
//! This file checks and counts what the linked engine checks and counts, by the same code of the
//! crate `model`. `python/ebbflow/_torchscript.py` calls PyTorch.
//!
//! A model's thread holds the GIL while Python code runs and while it counts metrics. PyTorch gives
//! it up in forward and backward passes, so models of several workers compute beside each other.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use data::predictions::PREDICTION;
use data::{Batch, Column};
use ebbflow::model::engines::outputs::{self, Returned, Rows};
use ebbflow::model::engines::script::{self, Argument, Attribute, Held, Kept, Passing};
use ebbflow::model::export::Constant;
use ebbflow::model::{
    Allocator, Context, Device, Error, Evaluation, Gradients, Model, OwnMemory, Registry, Result,
    ScriptEngine, Weights,
};
use proto::artifact::SCRIPT;
use proto::column::ElementType;
use proto::loss_scale::LossScale;
use proto::numerics::Numerics;
use proto::spec::{Autocast, Loss, ModelSpec};
use proto::tensor::{DType, TensorRole, TensorSpec, Values};
use pyo3::exceptions::PyImportError;
use pyo3::prelude::*;
use pyo3::types::{PyByteArray, PyBytes};

use super::session::driven::saved_type;
use super::session::{Buffers, Region};

/// Module of the package that calls PyTorch.
const PYTHON: &str = "ebbflow._torchscript";

/// Returns the networks of the wheel, with the PyTorch of this Python for scripts.
pub(super) fn registry() -> Registry {
    Registry::default().with_scripts(Arc::new(PyTorch))
}

/// The PyTorch of this Python.
struct PyTorch;

impl ScriptEngine for PyTorch {
    fn build(&self, context: &Context) -> Result<Box<dyn Model>> {
        if context.device != Device::Cpu {
            let device = context.device.to_string();
            let reason =
                "the wheel computes TorchScript models on the CPU; use a worker that is linked to libtorch";
            return Err(Error::NoSuchDevice { device, reason: reason.to_owned() });
        }
        Python::attach(|py| Ok(Box::new(Scripted::new(py, context)?) as Box<dyn Model>))
    }

    fn numerics(&self, _: Device, threads: usize) -> Result<Numerics> {
        Python::attach(|py| {
            let found = engine(py)?.call_method1("numerics", (threads,));
            let found = found.and_then(|found| found.extract::<(String, Bound<'_, PyBytes>)>());
            let (facts, results) = found.map_err(failed(py, "the numerics class"))?;
            Ok(Numerics::computed(&facts, results.as_bytes()))
        })
    }
}

/// Returns the module of the package, ready to compute.
///
/// # Errors
/// This Python has no PyTorch, or it does not load.
fn engine(py: Python<'_>) -> Result<Bound<'_, PyModule>> {
    let engine = py.import(PYTHON).and_then(|engine| {
        engine.call_method0("start")?;
        Ok(engine)
    });
    engine.map_err(|error| match error.is_instance_of::<PyImportError>(py) {
        true => Error::NoPyTorch(said(py, &error)),
        false => failed(py, "PyTorch")(error),
    })
}

/// An attribute as Python describes it: name; type, shape and whether it requires a gradient;
/// whether it is a parameter, a buffer, written.
type Described = (String, Option<(String, Vec<usize>, bool)>, bool, bool, bool);

/// Type and shape of a tensor as Python describes it.
type Shaped = (String, Vec<usize>);

/// A script that PyTorch computes.
struct Scripted {
    module: Py<PyAny>,
    path: PathBuf,
    spec: ModelSpec,
    threads: usize,
    passing: Passing,
    /// Those of the script, and the loss scale if the job computes in f16.
    tensors: Vec<TensorSpec>,
    /// Elements of the loss scale, as they were loaded.
    scale: Option<Vec<i64>>,
    /// Name of each constant, and its index among the attributes.
    constants: Vec<(String, usize)>,
}

impl Scripted {
    fn new(py: Python<'_>, context: &Context) -> Result<Self> {
        let (path, threads) = (script::path(context)?.clone(), context.threads);
        let autocast = context.spec.model.autocast;
        let Read { module, mut tensors, constants } = read(py, &path, threads, autocast)?;
        if !tensors.iter().any(|tensor| tensor.role == TensorRole::Parameter) {
            return Err(script::nothing_to_train());
        }
        let scale = (autocast == Some(Autocast::F16)).then(|| LossScale::FIRST.elements().to_vec());
        tensors.extend(scale.is_some().then(LossScale::tensor));
        let arguments = module.call_method0("arguments").and_then(|found| found.extract());
        let arguments: Vec<(String, bool, bool)> = arguments.map_err(wrong(py))?;
        let argument = |(name, is_dictionary, is_optional)| Argument { name, is_dictionary, is_optional };
        let arguments: Vec<Argument> = arguments.into_iter().map(argument).collect();
        let passing = script::passing(&arguments, context)?;
        let (module, spec) = (module.unbind(), context.spec.model.clone());
        Ok(Self { module, path, spec, threads, passing, tensors, scale, constants })
    }

    /// Calls `forward`. Returns what the network returned: outputs, and the loss of its own.
    fn forward(
        &self,
        py: Python<'_>,
        batch: &Batch,
        key: Option<u64>,
    ) -> Result<(Returned, Option<Returned>)> {
        let column = |column: &Column| {
            let spec = column.spec();
            let shape: Vec<usize> = [batch.samples].iter().chain(&spec.shape).copied().collect();
            let values = PyByteArray::new(py, column.bytes());
            (spec.name.clone(), torch_type(spec.dtype), shape, values)
        };
        let inputs: Vec<_> = batch.inputs.iter().map(column).collect();
        let shown: Vec<_> = inputs
            .iter()
            .map(|(name, dtype, shape, _)| format!("{name} {dtype} of shape {shape:?}"))
            .collect();
        let own_loss = self.spec.loss == Loss::Module;
        let arguments = (inputs, column(&batch.labels), self.passing as u8, own_loss, key);
        let returned = self.module.bind(py).call_method1("forward", arguments);
        let returned = returned.and_then(|returned| returned.extract::<(Shaped, Option<Shaped>)>());
        let refused = |error: PyErr| script::forward_failed(said(py, &error), &shown.join(", "));
        let (outputs, loss) = returned.map_err(refused)?;
        Ok((self.returned(outputs), loss.map(|loss| self.returned(loss))))
    }

    fn returned(&self, (kind, shape): Shaped) -> Returned {
        let is_lower = self.spec.autocast.is_some_and(|autocast| autocast_type(autocast) == kind);
        Returned { is_float: kind == "float32" || is_lower, kind, shape }
    }

    /// Computes the mean loss of the last forward pass. Returns it, and whether it depends on the
    /// parameters.
    fn loss(
        &self,
        py: Python<'_>,
        (outputs, own): &(Returned, Option<Returned>),
        batch: &Batch,
    ) -> Result<(f64, bool)> {
        let rows = match own {
            Some(own) => {
                outputs::check_own_loss(own)?;
                Rows::Records
            }
            None => outputs::rows(&self.spec, outputs, batch)?,
        };
        let (is_second, counts) = match rows {
            Rows::Records => (None, true),
            Rows::Positions { is_second, counted } => (Some(is_second), counted > 0),
        };
        let (smoothing, ignored) = (self.spec.label_smoothing, self.spec.ignore_index);
        let arguments = (outputs::loss_name(self.spec.loss), smoothing, ignored, is_second, counts);
        let loss = self.module.bind(py).call_method1("loss", arguments);
        loss.and_then(|loss| loss.extract()).map_err(failed(py, "loss"))
    }

    /// Returns the outputs of the last forward pass, row-major.
    fn rows(&self, py: Python<'_>, is_second: bool) -> Result<Vec<f32>> {
        let rows = self.module.bind(py).call_method1("rows", (is_second,));
        let rows = rows.and_then(|rows| Ok(rows.cast_into::<PyBytes>()?));
        let rows = rows.map_err(failed(py, "outputs"))?;
        let float = |bytes: &[u8]| bytes.try_into().map_or(f32::NAN, f32::from_le_bytes);
        Ok(rows.as_bytes().chunks_exact(size_of::<f32>()).map(float).collect())
    }

    fn train(
        &self,
        py: Python<'_>,
        batch: &Batch,
        key: u64,
        weight: f32,
        memory: &dyn Allocator,
    ) -> Result<Gradients> {
        let returned = self.forward(py, batch, Some(key))?;
        let (loss, is_attached) = self.loss(py, &returned, batch)?;
        if !is_attached {
            return Err(outputs::detached(self.spec.loss));
        }
        let buffer = |tensor: &TensorSpec| match tensor.role {
            TensorRole::Parameter => memory.floats(tensor.len()).unwrap_or_else(|| tensor.zeros()),
            TensorRole::State | TensorRole::Counter | TensorRole::Register | TensorRole::LossScale => {
                tensor.zeros()
            }
        };
        let buffers = Buffers::new(self.tensors.iter().map(buffer).collect());
        let regions = buffers.regions(self.of_script());
        let scale = self.scale.as_deref().map(outputs::loss_scale).transpose()?;
        let filled = self.module.bind(py).call_method1("gradients", (weight, regions, scale));
        filled.map_err(failed(py, "gradients"))?;
        Ok(Gradients { loss: loss as f32, values: buffers.rest().map(|(_, values)| values).collect() })
    }

    /// Returns the number of the tensors that the script has.
    fn of_script(&self) -> usize {
        self.tensors.len() - usize::from(self.scale.is_some())
    }

    /// Runs and measures the model without training. Returns the outputs too.
    fn measured(&self, py: Python<'_>, batch: &Batch) -> Result<(Evaluation, Returned)> {
        let returned = self.forward(py, batch, None)?;
        let (mean, _) = self.loss(py, &returned, batch)?;
        let shape = &returned.0.shape;
        let elements = shape.iter().product::<usize>();
        let (is_second, width) = match outputs::has_positions(&self.spec, batch) {
            false => (false, (elements / batch.samples.max(1)).max(1)),
            true => match outputs::rows(&self.spec, &returned.0, batch)? {
                Rows::Positions { is_second: true, .. } => (true, shape[1]),
                _ => (false, shape[shape.len() - 1]),
            },
        };
        let rows = self.rows(py, is_second)?;
        Ok((outputs::evaluate(&self.spec, mean, &rows, width, batch)?, returned.0))
    }

    /// Returns the outputs of the last forward pass as a column.
    fn predictions(&self, py: Python<'_>, outputs: &Returned, batch: &Batch) -> Result<Column> {
        let shape = outputs.shape.split_first().filter(|(first, _)| **first == batch.samples);
        let Some((&samples, shape)) = shape else {
            return Err(Error::Engine {
                what: "predict".to_owned(),
                reason: format!(
                    "outputs of shape {:?} for {} records; the first dimension must count the records",
                    outputs.shape, batch.samples
                ),
            });
        };
        Ok(Column::floats(PREDICTION, shape, samples, &self.rows(py, false)?))
    }

    fn restore(&self, py: Python<'_>) -> Result<()> {
        self.module.bind(py).call_method0("restore").map(drop).map_err(failed(py, "restore state"))
    }
}

impl Model for Scripted {
    fn tensors(&self) -> Vec<TensorSpec> {
        self.tensors.clone()
    }

    /// Returns the values of the file, whatever was loaded since.
    fn initial(&mut self, _: u64) -> Result<Vec<Values>> {
        Python::attach(|py| {
            let Read { module, tensors, .. } = read(py, &self.path, self.threads, None)?;
            let values = module.call_method0("values").and_then(|values| values.extract());
            let values: Vec<Bound<'_, PyBytes>> = values.map_err(failed(py, "read initial values"))?;
            let read = |(tensor, bytes): (&TensorSpec, &Bound<'_, PyBytes>)| {
                Values::from_bytes(tensor.dtype(), bytes.as_bytes())
            };
            let scale = self.scale.as_ref().map(|_| Values::I64(LossScale::FIRST.elements().to_vec()));
            Ok(tensors.iter().zip(&values).map(read).chain(scale).collect())
        })
    }

    fn load(&mut self, weights: &[Values]) -> Result<()> {
        self.load_shared(&Weights::from(weights.to_vec()))
    }

    /// Copies the weights. PyTorch's own memory is aligned as in the linked engine.
    fn load_shared(&mut self, weights: &Weights) -> Result<()> {
        let fits = |(tensor, values): (&TensorSpec, &Values)| {
            (tensor.dtype(), tensor.len()) == (values.dtype(), values.len())
        };
        if self.tensors.len() != weights.len() || !self.tensors.iter().zip(weights.iter()).all(fits) {
            return Err(Error::Engine {
                what: "load weights".to_owned(),
                reason: "their number, types or lengths differ from the model's tensors".to_owned(),
            });
        }
        if let (Some(scale), Some(Values::I64(elements))) = (&mut self.scale, weights.last()) {
            scale.clone_from(elements);
        }
        Python::attach(|py| {
            let mut regions = Region::of_weights(weights);
            regions.truncate(self.of_script());
            let loaded = self.module.bind(py).call_method1("load", (regions,));
            loaded.map(drop).map_err(failed(py, "load weights"))
        })
    }

    fn gradients(&mut self, batch: &Batch, key: u64) -> Result<Gradients> {
        Python::attach(|py| {
            let gradients = self.train(py, batch, key, 1.0, &OwnMemory);
            self.restore(py)?;
            gradients
        })
    }

    fn weighted_gradients(&mut self, batch: &Batch, key: u64, memory: &dyn Allocator) -> Result<Gradients> {
        Python::attach(|py| {
            let gradients = self.train(py, batch, key, batch.samples as f32, memory);
            self.restore(py)?;
            gradients
        })
    }

    fn evaluate(&mut self, batch: &Batch) -> Result<Evaluation> {
        Python::attach(|py| {
            let measured = self.measured(py, batch).map(|(evaluation, _)| evaluation);
            self.restore(py)?;
            measured
        })
    }

    fn predict(&mut self, batch: &Batch) -> Result<Column> {
        Python::attach(|py| {
            let outputs = self.forward(py, batch, None);
            let predicted = outputs.and_then(|(outputs, _)| self.predictions(py, &outputs, batch));
            self.restore(py)?;
            predicted
        })
    }

    fn evaluate_and_predict(&mut self, batch: &Batch) -> Result<(Evaluation, Column)> {
        Python::attach(|py| {
            let both = self
                .measured(py, batch)
                .and_then(|(evaluation, outputs)| Ok((evaluation, self.predictions(py, &outputs, batch)?)));
            self.restore(py)?;
            both
        })
    }

    fn constants(&self) -> Result<Vec<Constant>> {
        Python::attach(|py| {
            let constant = |(name, index): &(String, usize)| {
                let found = self.module.bind(py).call_method1("constant", (*index,));
                let found =
                    found.and_then(|found| found.extract::<(String, Vec<usize>, Bound<'_, PyBytes>)>());
                let (dtype, shape, bytes) = found.map_err(failed(py, name))?;
                let dtype = saved_type(name, &dtype).map_err(|reason| script::wrong(&reason))?;
                Ok(Constant { name: name.clone(), shape, dtype, bytes: bytes.as_bytes().to_vec() })
            };
            self.constants.iter().map(constant).collect()
        })
    }

    fn export(&mut self) -> Result<BTreeMap<String, Vec<u8>>> {
        Python::attach(|py| {
            let saved = self.module.bind(py).call_method0("save");
            let saved = saved.and_then(|saved| Ok(saved.cast_into::<PyBytes>()?));
            let refused = |error| script::wrong(&format!("cannot be saved: {}", said(py, &error)));
            Ok([(SCRIPT.to_owned(), saved.map_err(refused)?.as_bytes().to_vec())].into())
        })
    }
}

/// A script and what becomes of its attributes.
struct Read<'py> {
    module: Bound<'py, PyAny>,
    tensors: Vec<TensorSpec>,
    constants: Vec<(String, usize)>,
}

/// Loads a script.
fn read<'py>(py: Python<'py>, path: &Path, threads: usize, autocast: Option<Autocast>) -> Result<Read<'py>> {
    let autocast = autocast.map(autocast_type);
    let module = engine(py)?.call_method1("Module", (path.display().to_string(), threads, autocast));
    let module = module.map_err(|error| script::not_loaded(path, &said(py, &error)))?;
    let attributes = module.call_method0("attributes").and_then(|found| found.extract());
    let attributes: Vec<Described> = attributes.map_err(wrong(py))?;
    let (mut tensors, mut constants, mut trained) = (Vec::new(), Vec::new(), Vec::new());
    for (index, (name, tensor, is_parameter, is_buffer, is_written)) in attributes.into_iter().enumerate() {
        let held = |(kind, shape, requires_grad): (String, Vec<usize>, bool)| {
            let dtype = match kind.as_str() {
                "float32" => Some(DType::F32),
                "int64" => Some(DType::I64),
                _ => None,
            };
            Held { kind, dtype, shape, requires_grad }
        };
        let tensor = tensor.map(held);
        let attribute = Attribute { name, tensor, is_parameter, is_buffer, is_written };
        match script::kept(&attribute)? {
            Kept::Trained(spec) => {
                trained.push((index, spec.role == TensorRole::Parameter));
                tensors.push(spec);
            }
            Kept::Constant => constants.push((attribute.name, index)),
            Kept::No => {}
        }
    }
    module.call_method1("train", (trained,)).map_err(failed(py, "copy state"))?;
    Ok(Read { module, tensors, constants })
}

/// Returns torch's name of a column's type.
const fn torch_type(dtype: ElementType) -> &'static str {
    match dtype {
        ElementType::U8 => "uint8",
        ElementType::I8 => "int8",
        ElementType::I16 => "int16",
        ElementType::I32 => "int32",
        ElementType::I64 => "int64",
        ElementType::F16 => "float16",
        ElementType::BF16 => "bfloat16",
        ElementType::F32 => "float32",
        ElementType::F64 => "float64",
        ElementType::Bool => "bool",
    }
}

/// Returns torch's name of a type of autocast.
const fn autocast_type(autocast: Autocast) -> &'static str {
    match autocast {
        Autocast::Bf16 => "bfloat16",
        Autocast::F16 => "float16",
    }
}

/// Returns the message of an exception.
fn said(py: Python<'_>, error: &PyErr) -> String {
    error.value(py).str().map_or_else(|_| error.to_string(), |text| text.to_string())
}

/// Returns a function that adds the failed operation to an exception.
fn failed<'a>(py: Python<'a>, what: &'a str) -> impl Fn(PyErr) -> Error + Copy + 'a {
    move |error| Error::Engine { what: what.to_owned(), reason: said(py, &error) }
}

/// Returns a function that makes an exception an error of the script.
fn wrong(py: Python<'_>) -> impl Fn(PyErr) -> Error + '_ {
    move |error| script::wrong(&said(py, &error))
}
