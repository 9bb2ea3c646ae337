//! TorchScript modules, as `torch.jit.script(model).save("model.pt")` writes them.
//!
//! The code of a script decides which of its tensors travel. It is read once, when the script is
//! loaded:
//!
//! | in the script | becomes |
//! | --- | --- |
//! | parameter (f32) | [`TensorRole::Parameter`] |
//! | f32 buffer that `forward` changes (running statistics) | [`TensorRole::State`] |
//! | i64 buffer that `forward` changes (`num_batches_tracked`) | [`TensorRole::Counter`] |
//! | buffer that `forward` never changes, frozen parameter | [`Constant`]: exported, never sent |
//! | anything else that `forward` changes | refused: no process would keep this state |
//!
//! A buffer is state if the code shows a way in which `forward` may change it. A parameter or
//! another attribute is refused only if `forward` certainly changes it. If the changing code always
//! runs, the script is refused when it is loaded, otherwise after the forward pass that changed the
//! attribute.
//!
//! A constant must not travel as state: the mean of M equal values need not be that value in f32.

use std::collections::BTreeMap;
use std::ffi::CString;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use proto::artifact::SCRIPT;
use proto::spec::{InputsSpec, Loss};
use proto::tensor::{TensorSpec, Values};
use tch::{Kind, Tensor};

use super::model::{fill, read};
use super::network::{Mode, Named, Network, Output, brief, device, failed};
use super::shim::{Argument, Entry, Passing, Script};
use crate::engines::loss;
use crate::error::{Error, Result};
use crate::export::{Constant, Dtype};
use crate::fault::fault;
use crate::model::Context;

/// A loaded module.
#[derive(Debug)]
pub(super) struct ScriptNetwork {
    script: Script,
    passing: Passing,
    path: PathBuf,
    tensors: Vec<Named>,
    constants: Vec<(String, Tensor)>,
    draws: bool,
}

impl ScriptNetwork {
    /// Loads the job's script onto its device.
    pub(super) fn new(context: &Context) -> Result<Self> {
        let path = context
            .artifacts
            .get(SCRIPT)
            .ok_or_else(|| wrong("the job came without this file; submit it again"))?;
        let script = load(path, device(context.device))?;
        let arguments = script.arguments().map_err(|error| wrong(&brief(&error)))?;
        let passing = passing(&arguments, context)?;
        let (mut tensors, mut constants) = (Vec::new(), Vec::new());
        for entry in script.entries().map_err(|error| wrong(&brief(&error)))? {
            match classify(entry)? {
                Kept::Trained(named) => tensors.push(named),
                Kept::Constant(name, tensor) => constants.push((name, tensor)),
                Kept::No => {}
            }
        }
        if !tensors.iter().any(|named| named.tensor.requires_grad()) {
            return Err(wrong("it has no parameters that require gradients, so there is nothing to train"));
        }
        Ok(Self { draws: script.draws(), script, passing, path: path.clone(), tensors, constants })
    }
}

impl Network for ScriptNetwork {
    fn tensors(&self) -> &[Named] {
        &self.tensors
    }

    /// Returns the values of the file, whatever was loaded since.
    fn initial(&self, _seed: u64) -> Result<Vec<Values>> {
        let script = load(&self.path, tch::Device::Cpu)?;
        let mut values = Vec::new();
        for entry in script.entries().map_err(|error| wrong(&brief(&error)))? {
            if let Kept::Trained(named) = classify(entry)? {
                values.push(read(&named.tensor).map_err(failed("read initial values"))?);
            }
        }
        Ok(values)
    }

    fn forward(
        &mut self,
        inputs: &[(CString, Tensor)],
        labels: Option<&Tensor>,
        mode: Mode,
    ) -> Result<Output> {
        let train = mode != Mode::Evaluate;
        // Some code draws in evaluation too, from a fixed key. The guard is held until the forward
        // pass is done; backward draws nothing.
        let key = if let Mode::Train { key } = mode { key } else { 0 };
        let _generators = self.draws.then(|| seed(key));
        let answer = self.script.forward(inputs, self.passing, labels, train);
        let (loss, outputs) = answer.map_err(|error| forward_failed(&error, inputs))?;
        Ok(Output { outputs, loss })
    }

    fn constants(&self) -> Result<Vec<Constant>> {
        self.constants.iter().map(|(name, tensor)| constant(name, tensor)).collect()
    }

    fn export(&mut self) -> Result<BTreeMap<String, Vec<u8>>> {
        Ok([(SCRIPT.to_owned(), saved(&mut self.script)?)].into())
    }
}

/// Writes the module in `file` with the `values` of `tensors`, as a file that `torch.jit.load`
/// reads. Also returns its constants.
pub(super) fn with_weights(
    file: &Path,
    tensors: &[TensorSpec],
    values: &[Values],
) -> Result<(Vec<u8>, Vec<Constant>)> {
    let mut script = load(file, tch::Device::Cpu)?;
    let mut constants = Vec::new();
    for entry in script.entries().map_err(|error| wrong(&brief(&error)))? {
        match classify(entry)? {
            Kept::Trained(Named { spec, tensor }) => {
                let trained = tensors.iter().zip(values).find(|(trained, _)| **trained == spec);
                let (_, values) = trained.ok_or_else(|| {
                    let (name, shape) = (&spec.name, &spec.shape);
                    wrong(&format!(
                        "it has `{name}` {shape:?}, which is not among what was trained; it is another job's"
                    ))
                })?;
                fill(&tensor, values).map_err(failed(&spec.name))?;
            }
            Kept::Constant(name, tensor) => constants.push(constant(&name, &tensor)?),
            Kept::No => {}
        }
    }
    Ok((saved(&mut script)?, constants))
}

fn saved(script: &mut Script) -> Result<Vec<u8>> {
    script.save().map_err(|error| wrong(&format!("cannot be saved: {}", brief(&error))))
}

enum Kept {
    Trained(Named),
    Constant(String, Tensor),
    No,
}

fn classify(entry: Entry) -> Result<Kept> {
    let Entry { name, tensor, is_parameter, is_buffer, is_written } = entry;
    let Some(tensor) = tensor else {
        return Err(wrong(&format!(
            "forward changes the attribute `{name}`, which is no tensor, so nobody would keep its value; \
             make it a buffer (register_buffer) or leave it unchanged"
        )));
    };
    let kind = tensor.f_kind().map_err(failed(&name))?;
    let shape: Vec<usize> = tensor.size().into_iter().map(|size| size as usize).collect();
    let trained = |spec| Ok(Kept::Trained(Named { spec, tensor: tensor.shallow_clone() }));
    match (is_parameter, is_buffer, is_written) {
        (true, _, true) => Err(wrong(&format!(
            "forward changes the parameter `{name}` itself; only the optimizer may (for max_norm and the like, \
             normalise a copy)"
        ))),
        (true, _, false) if tensor.requires_grad() && kind == Kind::Float => {
            trained(TensorSpec::parameter(name, shape))
        }
        (true, _, false) if tensor.requires_grad() => Err(wrong(&format!(
            "parameter `{name}` is {kind:?}; only 32-bit floats are trained: call model.float() before scripting it"
        ))),
        (false, true, true) if kind == Kind::Float => trained(TensorSpec::state(name, shape)),
        (false, true, true) if kind == Kind::Int64 => trained(TensorSpec::counter(name, shape)),
        (false, true, true) => Err(wrong(&format!(
            "forward changes the buffer `{name}`, which is {kind:?}; state is float32 (averaged over a step's \
             microbatches) or int64 (their maximum)"
        ))),
        (false, false, true) => Err(wrong(&format!(
            "forward changes the attribute `{name}`, which is no buffer, so nobody would keep its value; \
             use register_buffer"
        ))),
        (true, _, false) | (false, true, false) => Ok(Kept::Constant(name, tensor)),
        (false, false, false) => Ok(Kept::No),
    }
}

fn load(path: &Path, device: tch::Device) -> Result<Script> {
    Script::load(path, device).map_err(|error| {
        if !path.exists() {
            return wrong(&format!("{} is gone; submit the job again", path.display()));
        }
        wrong(&format!(
            "not a TorchScript file ({}); write it with torch.jit.script(model).save(\"{SCRIPT}\")",
            brief(&error).lines().next().unwrap_or_default()
        ))
    })
}

/// Returns how `forward` takes the job's inputs.
///
/// # Errors
/// It does not take them.
fn passing(arguments: &[Argument], context: &Context) -> Result<Passing> {
    let loss = context.spec.model.loss;
    let labels = usize::from(loss == Loss::Module);
    let inputs: Vec<&str> = context.inputs.iter().map(|input| input.name.as_str()).collect();
    if let Some(InputsSpec::Named(_)) = context.spec.data.inputs {
        let (first, others) = (arguments.first(), arguments.get(1..).unwrap_or_default());
        let free = others.iter().filter(|argument| !argument.is_optional).count();
        if first.is_some_and(|first| first.is_dictionary) && free <= labels && labels <= others.len() {
            return Ok(Passing::Dictionary);
        }
        let given: Vec<&str> = inputs.into_iter().chain((labels > 0).then_some("labels")).collect();
        let unknown = given.iter().find(|name| !arguments.iter().any(|argument| argument.name == **name));
        let missing = arguments
            .iter()
            .find(|argument| !argument.is_optional && !given.contains(&argument.name.as_str()));
        let names: Vec<_> = arguments.iter().map(|argument| argument.name.as_str()).collect();
        let wrong = |what: String| {
            wrong(&format!(
                "{what}; forward takes {}, the job gives {}: change forward, or data.inputs",
                names.join(", "),
                given.join(", ")
            ))
        };
        return match (unknown, missing) {
            (Some(name), _) => Err(wrong(format!("forward has no argument `{name}`"))),
            (None, Some(argument)) => Err(wrong(format!("forward needs the argument `{}`", argument.name))),
            (None, None) => Ok(Passing::ByName),
        };
    }
    let given = inputs.len() + labels;
    let (min, max) = (arguments.iter().filter(|argument| !argument.is_optional).count(), arguments.len());
    if !(min..=max).contains(&given) {
        let call = inputs.into_iter().chain((labels > 0).then_some("labels")).collect::<Vec<_>>().join(", ");
        let loss = loss::name(loss);
        return Err(wrong(&format!(
            "forward takes {min} to {max} arguments, and the loss `{loss}` calls forward({call}); change forward, data.inputs, \
             or model.loss (\"module\": forward(features, labels) returns the mean loss and the outputs)"
        )));
    }
    // Columns in another order than arguments of the same names would train nonsense.
    let swapped = inputs.iter().enumerate().find(|&(at, name)| {
        arguments.iter().position(|argument| argument.name == **name).is_some_and(|other| other != at)
    });
    match swapped {
        Some((at, name)) if context.spec.data.named_inputs().is_some() => Err(wrong(&format!(
            "data.inputs gives `{name}` as argument {at}, and forward has an argument of this name in another place; \
             name the arguments: inputs = {{ {name} = \"{name}\", .. }}"
        ))),
        _ => Ok(Passing::ByPosition),
    }
}

/// Seeds libtorch's generators. They belong to the process, so a model on another thread must wait
/// until this one has finished drawing.
fn seed(key: u64) -> MutexGuard<'static, ()> {
    static GENERATORS: Mutex<()> = Mutex::new(());
    let guard = GENERATORS.lock().unwrap_or_else(PoisonError::into_inner);
    tch::manual_seed(key.cast_signed());
    guard
}

fn constant(name: &str, tensor: &Tensor) -> Result<Constant> {
    let kind = tensor.f_kind().map_err(failed(name))?;
    let dtype = match kind {
        Kind::Uint8 => Dtype::U8,
        Kind::Int8 => Dtype::I8,
        Kind::Int16 => Dtype::I16,
        Kind::Int => Dtype::I32,
        Kind::Int64 => Dtype::I64,
        Kind::Half => Dtype::F16,
        Kind::BFloat16 => Dtype::BF16,
        Kind::Float => Dtype::F32,
        Kind::Double => Dtype::F64,
        Kind::Bool => Dtype::BOOL,
        _ => {
            return Err(wrong(&format!(
                "buffer `{name}` is {kind:?}, which model.safetensors has no type for"
            )));
        }
    };
    let mut bytes = vec![0; tensor.numel() * kind.elt_size_in_bytes()];
    tensor.f_copy_data_u8(&mut bytes, tensor.numel()).map_err(failed(name))?;
    let shape = tensor.size().into_iter().map(|size| size as usize).collect();
    Ok(Constant { name: name.to_owned(), shape, dtype, bytes })
}

/// Classifies the error of a forward pass. An error of memory or device may not occur elsewhere.
/// Others are the fault of the script or the data.
fn forward_failed(error: &str, inputs: &[(CString, Tensor)]) -> Error {
    let error = brief(error);
    let elsewhere = ["out of memory", "not enough memory", "t allocate memory", "CUDA error"];
    if fault(&error).is_some() || elsewhere.iter().any(|text| error.contains(text)) {
        return Error::Engine { what: format!("forward of {SCRIPT}"), reason: error };
    }
    if error.starts_with("forward changes ") {
        return wrong(&error);
    }
    // The interpreter prints its stack first and the cause last.
    let cause = error.lines().rfind(|line| !line.trim().is_empty()).unwrap_or_default();
    let input = |(name, tensor): &(CString, Tensor)| {
        format!("{} {:?} of shape {:?}", name.to_string_lossy(), tensor.kind(), tensor.size())
    };
    let inputs: Vec<_> = inputs.iter().map(input).collect();
    wrong(&format!("forward fails on {}: {}", inputs.join(", "), cause.trim()))
}

fn wrong(reason: &str) -> Error {
    Error::Script { name: SCRIPT.to_owned(), reason: reason.to_owned() }
}
