//! Losses with gradients. Outputs and labels are checked before libtorch sees them.

use data::Batch;
use proto::spec::{Loss, Metric};
use proto::tensor::Values;
use tch::{Kind, Reduction, Tensor};

use super::network::{Output, failed};
use crate::engines::loss::{Target, mismatch};
use crate::error::Result;
use crate::model::Evaluation;

/// Computes the mean loss over the records, a scalar from which gradients flow. `labels` are the
/// batch's, on the device.
pub(super) fn mean(loss: Loss, output: &Output, labels: &Tensor, batch: &Batch) -> Result<Tensor> {
    if let Some(mean) = &output.loss {
        return own(mean);
    }
    let outputs = &output.outputs;
    Target::new(loss, batch, width(loss, outputs, batch)?)?;
    let none = None::<&Tensor>;
    let like_outputs = || labels.f_view_as(outputs);
    let value = match loss {
        // Labels are checked, so none is the class to ignore.
        Loss::CrossEntropy => outputs.f_cross_entropy_loss(labels, none, Reduction::Mean, -100, 0.0),
        Loss::Nll => outputs.f_nll_loss(labels, none, Reduction::Mean, -100),
        Loss::Mse => like_outputs().and_then(|labels| outputs.f_mse_loss(&labels, Reduction::Mean)),
        Loss::BceWithLogits => like_outputs().and_then(|labels| {
            outputs.f_binary_cross_entropy_with_logits(&labels, none, none, Reduction::Mean)
        }),
        Loss::Module => return Err(mismatch(loss, "the script's own loss", "outputs only".to_owned())),
    };
    value.map_err(failed("loss"))
}

/// Sums losses and metrics over the records. The losses are a script's own mean loss, or those of
/// `outputs` (row-major).
pub(super) fn evaluate(
    loss: Loss,
    mean: f64,
    metrics: &[Metric],
    outputs: &[f32],
    batch: &Batch,
) -> Result<Evaluation> {
    let width = (outputs.len() / batch.samples.max(1)).max(1);
    if loss != Loss::Module {
        return Target::new(loss, batch, width)?.evaluate(metrics, outputs, width);
    }
    let samples = batch.samples as u64;
    let mut evaluation = Evaluation { samples, loss_sum: mean * samples as f64, ..Evaluation::default() };
    if metrics.is_empty() {
        return Ok(evaluation);
    }
    // The script's labels are values. One value beside several outputs is a class.
    let classes = match &batch.labels {
        Values::F32(labels) if labels.len() == batch.samples && width > 1 => {
            Some(Values::I64(labels.iter().map(|&label| label as i64).collect()))
        }
        _ => None,
    };
    let like = if classes.is_some() { Loss::CrossEntropy } else { Loss::Mse };
    let labelled = Batch {
        samples: batch.samples,
        features: Vec::new(),
        shape: Vec::new(),
        labels: classes.unwrap_or_else(|| batch.labels.clone()),
        records: batch.records.clone(),
    };
    evaluation.metric_sums =
        Target::new(like, &labelled, width)?.evaluate(metrics, outputs, width)?.metric_sums;
    Ok(evaluation)
}

/// Returns the loss that a script computed.
fn own(mean: &Tensor) -> Result<Tensor> {
    let (size, kind) = (mean.size(), mean.f_kind().map_err(failed("loss"))?);
    if mean.numel() != 1 || kind != Kind::Float {
        return Err(mismatch(Loss::Module, "one mean loss, Float", format!("{kind:?} of shape {size:?}")));
    }
    mean.f_view([0i64; 0]).map_err(failed("loss"))
}

/// Returns the number of values of one record's outputs, if their shape fits the loss.
fn width(loss: Loss, outputs: &Tensor, batch: &Batch) -> Result<usize> {
    let (size, n) = (outputs.size(), batch.samples);
    let kind = outputs.f_kind().map_err(failed("outputs"))?;
    if kind != Kind::Float {
        return Err(mismatch(loss, "outputs of type Float", format!("{kind:?}")));
    }
    let is_row = if loss.wants_classes() { size.len() == 2 } else { !size.is_empty() };
    if !is_row || size[0] != n as i64 || outputs.numel() == 0 {
        let rest = if loss.wants_classes() { "classes" } else { ".." };
        return Err(mismatch(loss, &format!("outputs of shape [{n}, {rest}]"), format!("{size:?}")));
    }
    Ok(outputs.numel() / n)
}
