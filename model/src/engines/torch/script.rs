//! TorchScript modules, as `torch.jit.script(model).save("model.pt")` writes them.
//!
//! `engines/script.rs` says which of its tensors travel.

use std::collections::BTreeMap;
use std::ffi::CString;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use proto::artifact::SCRIPT;
use proto::tensor::{DType, TensorSpec, Values};
use tch::{Kind, Tensor};

use super::model::{fill, read};
use super::network::{Mode, Named, Network, Output, brief, device, failed};
use super::shim::{Entry, Script};
use crate::engines::script::{self, Attribute, Held, Passing, passing, wrong};
use crate::error::{Error, Result};
use crate::export::{Constant, Dtype};
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
        let path = script::path(context)?;
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
            return Err(script::nothing_to_train());
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
    let held = match &tensor {
        Some(tensor) => {
            let kind = tensor.f_kind().map_err(failed(&name))?;
            let dtype = match kind {
                Kind::Float => Some(DType::F32),
                Kind::Int64 => Some(DType::I64),
                _ => None,
            };
            let shape = tensor.size().into_iter().map(|size| size as usize).collect();
            Some(Held { kind: format!("{kind:?}"), dtype, shape, requires_grad: tensor.requires_grad() })
        }
        None => None,
    };
    let attribute = Attribute { name, tensor: held, is_parameter, is_buffer, is_written };
    Ok(match (script::kept(&attribute)?, tensor) {
        (script::Kept::Trained(spec), Some(tensor)) => Kept::Trained(Named { spec, tensor }),
        (script::Kept::Constant, Some(tensor)) => Kept::Constant(attribute.name, tensor),
        _ => Kept::No,
    })
}

fn load(path: &Path, device: tch::Device) -> Result<Script> {
    Script::load(path, device).map_err(|error| script::not_loaded(path, &brief(&error)))
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

fn forward_failed(error: &str, inputs: &[(CString, Tensor)]) -> Error {
    let input = |(name, tensor): &(CString, Tensor)| {
        format!("{} {:?} of shape {:?}", name.to_string_lossy(), tensor.kind(), tensor.size())
    };
    let inputs: Vec<_> = inputs.iter().map(input).collect();
    script::forward_failed(brief(error), &inputs.join(", "))
}
