//! What all engines of TorchScript modules share: which attributes travel, how `forward` takes its
//! inputs, and whose fault an error is. Nothing here calls libtorch.
//!
//! The code of a script decides which of its tensors travel. It is read once, when the script is
//! loaded:
//!
//! | in the script | becomes |
//! | --- | --- |
//! | parameter (f32) | [`TensorRole::Parameter`] |
//! | f32 buffer that `forward` changes (running statistics) | [`TensorRole::State`] |
//! | i64 buffer that `forward` changes (`num_batches_tracked`) | [`TensorRole::Counter`] |
//! | buffer that `forward` never changes, frozen parameter | a constant: exported, never sent |
//! | anything else that `forward` changes | refused: no process would keep this state |
//!
//! A buffer is state if the code shows a way in which `forward` may change it. A parameter or
//! another attribute is refused only if `forward` certainly changes it. If the changing code always
//! runs, the script is refused when it is loaded, otherwise after the forward pass that changed the
//! attribute.
//!
//! A constant must not travel as state: the mean of M equal values need not be that value in f32.
//!
//! [`TensorRole::Parameter`]: proto::tensor::TensorRole::Parameter
//! [`TensorRole::State`]: proto::tensor::TensorRole::State
//! [`TensorRole::Counter`]: proto::tensor::TensorRole::Counter

use std::path::{Path, PathBuf};

use proto::artifact::SCRIPT;
use proto::spec::{InputsSpec, Loss};
use proto::tensor::{DType, TensorSpec};

use super::loss;
use crate::error::{Error, Result};
use crate::fault::fault;
use crate::model::Context;

/// An attribute of a script that matters for training.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Attribute {
    /// Path from the module, as in `state_dict`.
    pub name: String,
    /// What it holds. `None`: no tensor.
    pub tensor: Option<Held>,
    /// Whether it is registered as a parameter.
    pub is_parameter: bool,
    /// Whether it is registered as a buffer.
    pub is_buffer: bool,
    /// Whether `forward` may change it.
    pub is_written: bool,
}

/// A tensor of a script.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Held {
    /// Its type, as the engine calls it.
    pub kind: String,
    /// Its type if it can travel.
    pub dtype: Option<DType>,
    /// Its shape.
    pub shape: Vec<usize>,
    /// Whether it requires a gradient.
    pub requires_grad: bool,
}

/// What becomes of an attribute.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Kept {
    /// It travels.
    Trained(TensorSpec),
    /// It is exported, and never sent.
    Constant,
    /// It stays in the script alone.
    No,
}

/// An argument of `forward`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Argument {
    /// Name of the argument.
    pub name: String,
    /// Whether it is a `Dict[str, Tensor]`.
    pub is_dictionary: bool,
    /// Whether it has a default.
    pub is_optional: bool,
}

/// How `forward` takes its inputs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Passing {
    /// One after the other, then the labels.
    ByPosition = 0,
    /// Inputs and `labels` by their names.
    ByName = 1,
    /// One dictionary, then the labels.
    Dictionary = 2,
}

/// Returns the script of a job.
///
/// # Errors
/// The job came without it.
pub fn path(context: &Context) -> Result<&PathBuf> {
    context.artifacts.get(SCRIPT).ok_or_else(|| wrong("the job came without this file; submit it again"))
}

/// Returns the error of a script that has nothing to train.
pub fn nothing_to_train() -> Error {
    wrong("it has no parameters that require gradients, so there is nothing to train")
}

/// Returns the error of a file that an engine cannot load. `said` is its message.
pub fn not_loaded(path: &Path, said: &str) -> Error {
    if !path.exists() {
        return wrong(&format!("{} is gone; submit the job again", path.display()));
    }
    wrong(&format!(
        "not a TorchScript file ({}); write it with torch.jit.script(model).save(\"{SCRIPT}\")",
        said.lines().next().unwrap_or_default()
    ))
}

/// Decides what becomes of an attribute.
///
/// # Errors
/// `forward` changes what nobody would keep, or a parameter has a type that is not trained.
pub fn kept(attribute: &Attribute) -> Result<Kept> {
    let Attribute { name, tensor, is_parameter, is_buffer, is_written } = attribute;
    let Some(Held { kind, dtype, shape, requires_grad }) = tensor else {
        return Err(wrong(&format!(
            "forward changes the attribute `{name}`, which is no tensor, so nobody would keep its value; \
             make it a buffer (register_buffer) or leave it unchanged"
        )));
    };
    match (*is_parameter, *is_buffer, *is_written) {
        (true, _, true) => Err(wrong(&format!(
            "forward changes the parameter `{name}` itself; only the optimizer may (for max_norm and the like, \
             normalise a copy)"
        ))),
        (true, _, false) if *requires_grad && *dtype == Some(DType::F32) => {
            Ok(Kept::Trained(TensorSpec::parameter(name, shape.clone())))
        }
        (true, _, false) if *requires_grad => Err(wrong(&format!(
            "parameter `{name}` is {kind}; only 32-bit floats are trained: call model.float() before scripting it"
        ))),
        (false, true, true) => match dtype {
            Some(DType::F32) => Ok(Kept::Trained(TensorSpec::state(name, shape.clone()))),
            Some(DType::I64) => Ok(Kept::Trained(TensorSpec::counter(name, shape.clone()))),
            None => Err(wrong(&format!(
                "forward changes the buffer `{name}`, which is {kind}; state is float32 (averaged over a step's \
                 microbatches) or int64 (their maximum)"
            ))),
        },
        (false, false, true) => Err(wrong(&format!(
            "forward changes the attribute `{name}`, which is no buffer, so nobody would keep its value; \
             use register_buffer"
        ))),
        (true, _, false) | (false, true, false) => Ok(Kept::Constant),
        (false, false, false) => Ok(Kept::No),
    }
}

/// Returns how `forward` takes the job's inputs.
///
/// # Errors
/// It does not take them.
pub fn passing(arguments: &[Argument], context: &Context) -> Result<Passing> {
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

/// Classifies the error of a forward pass on these inputs. An error of memory or device may not
/// occur elsewhere. Others are the fault of the script or the data.
pub fn forward_failed(error: String, inputs: &str) -> Error {
    let elsewhere = ["out of memory", "not enough memory", "t allocate memory", "CUDA error"];
    if fault(&error).is_some() || elsewhere.iter().any(|text| error.contains(text)) {
        return Error::Engine { what: format!("forward of {SCRIPT}"), reason: error };
    }
    if error.starts_with("forward changes ") {
        return wrong(&error);
    }
    // The interpreter prints its stack first and the cause last.
    let cause = error.lines().rfind(|line| !line.trim().is_empty()).unwrap_or_default();
    wrong(&format!("forward fails on {inputs}: {}", cause.trim()))
}

/// Returns an error of the script.
pub fn wrong(reason: &str) -> Error {
    Error::Script { name: SCRIPT.to_owned(), reason: reason.to_owned() }
}
