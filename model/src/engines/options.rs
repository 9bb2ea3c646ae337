//! Options of builtin networks with the same meaning in every engine.

use proto::spec::Loss;
use serde::Deserialize;

use super::loss;
use crate::error::{Error, Result};
use crate::model::Context;

/// Most outputs and hidden values of a network. A larger number is a typing error, or a label that
/// is no class.
const WIDTH_MAX: usize = 1 << 20;

/// Engine for a network that both engines can compute.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Engine {
    /// The pure-Rust engine, which is in every build and gives the same bits in each.
    #[default]
    Pure,
    /// libtorch.
    Torch,
}

/// Function between two layers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Activation {
    /// `max(0, x)`.
    #[default]
    Relu,
    /// Hyperbolic tangent.
    Tanh,
}

/// `[model.options]` of `mlp`.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct Mlp {
    /// Widths of the hidden layers, first to last. Default: one of 128.
    pub(super) hidden: Vec<usize>,
    /// Number of outputs, for losses on classes. Default: the largest label in the data, plus 1.
    classes: Option<usize>,
    /// Number of outputs, for losses on values. Default: 1.
    outputs: Option<usize>,
    /// Function between the layers. Default: relu.
    pub(super) activation: Activation,
    /// Share of the hidden values that training drops, below 1; only with libtorch. Default: 0.
    pub(super) dropout: f32,
    /// Engine that computes the network. Default: pure.
    pub(super) engine: Engine,
}

impl Default for Mlp {
    fn default() -> Self {
        let (activation, engine) = (Activation::default(), Engine::default());
        Self { hidden: vec![128], classes: None, outputs: None, activation, dropout: 0.0, engine }
    }
}

impl Mlp {
    /// Reads and checks the options.
    ///
    /// # Errors
    /// Unknown or contradicting options; the error names them.
    pub(super) fn of(context: &Context) -> Result<Self> {
        let options: Self = context.options()?;
        for &width in &options.hidden {
            check_width(context, "hidden", width)?;
        }
        check_share(context, options.dropout)?;
        if options.dropout > 0.0 && options.engine == Engine::Pure {
            return Err(wrong(
                context,
                "the pure engine has no `dropout`; set engine = \"torch\"".to_owned(),
            ));
        }
        Ok(options)
    }

    /// Returns the number of values of one record's outputs.
    ///
    /// # Errors
    /// Those of [`outputs`].
    pub(super) fn outputs(&self, context: &Context) -> Result<usize> {
        outputs(context, self.classes, self.outputs)
    }
}

/// Returns the number of values of one record's outputs: that of an option, the number of classes
/// in the data, or 1.
///
/// # Errors
/// Both options are given, the data has no classes to count, or the number is out of range.
pub(super) fn outputs(context: &Context, classes: Option<usize>, outputs: Option<usize>) -> Result<usize> {
    let wants_classes = context.spec.model.loss.wants_classes();
    let (option, width) = match (classes, outputs, wants_classes) {
        (Some(_), Some(_), _) => {
            return Err(wrong(context, "give either `classes` or `outputs`, not both".to_owned()));
        }
        (Some(classes), None, _) => ("classes", classes),
        (None, Some(outputs), _) => ("outputs", outputs),
        (None, None, false) => ("outputs", 1),
        (None, None, true) => {
            let label_max = context.label_max.ok_or_else(|| {
                wrong(
                    context,
                    "`classes` is not given and the data has no class labels to count; set it".to_owned(),
                )
            })?;
            // A negative label is refused with its record's number when the record is read.
            ("classes", usize::try_from(label_max.max(0)).unwrap_or(usize::MAX).saturating_add(1))
        }
    };
    check_width(context, option, width)?;
    Ok(width)
}

/// Checks that the network's outputs are made for the job's loss.
///
/// # Errors
/// They are not.
pub(super) fn check_loss(context: &Context, fitting: &[Loss]) -> Result<()> {
    let model = &context.spec.model;
    if fitting.contains(&model.loss) {
        return Ok(());
    }
    let expected = match model.loss {
        Loss::CrossEntropy => "a logit for each class",
        Loss::Nll => "a log-probability for each class",
        Loss::Mse => "values",
        Loss::BceWithLogits => "logits of probabilities",
        Loss::Module => "a script that returns it",
    };
    let names: Vec<_> = fitting.iter().map(|&loss| loss::name(loss)).collect();
    let network = model.builtin.as_deref().unwrap_or_default();
    let found = format!("the outputs of `{network}`, which are for {}", names.join(" or "));
    Err(loss::mismatch(model.loss, expected, found))
}

/// Checks a share of values to drop.
///
/// # Errors
/// The share is 1 or more, or negative.
pub(super) fn check_share(context: &Context, dropout: f32) -> Result<()> {
    if (0.0..1.0).contains(&dropout) {
        return Ok(());
    }
    Err(wrong(context, format!("`dropout` = {dropout}: a share from 0 to below 1")))
}

fn check_width(context: &Context, option: &str, width: usize) -> Result<()> {
    if (1..=WIDTH_MAX).contains(&width) {
        return Ok(());
    }
    Err(wrong(
        context,
        format!("`{option}` = {width}: from 1 to {WIDTH_MAX}; set it, or mend the labels it comes from"),
    ))
}

fn wrong(context: &Context, reason: String) -> Error {
    Error::ModelOptions { model: context.spec.model.builtin.clone().unwrap_or_default(), reason }
}
