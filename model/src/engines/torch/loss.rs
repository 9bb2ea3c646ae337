//! Losses with gradients. Outputs and labels are checked before libtorch sees them.

use data::Batch;
use proto::spec::{Loss, Metric, ModelSpec};
use proto::tensor::Values;
use tch::{Kind, Reduction, Tensor};

use super::network::{Output, failed};
use crate::engines::loss::{Target, mismatch};
use crate::error::{Error, Result};
use crate::model::Evaluation;

/// Computes the mean loss over the records, a scalar from which gradients flow. `labels` are the
/// batch's, on the device.
pub(super) fn mean(spec: &ModelSpec, output: &Output, labels: &Tensor, batch: &Batch) -> Result<Tensor> {
    if let Some(mean) = &output.loss {
        return own(mean);
    }
    let outputs = &output.outputs;
    if let Some(positions) = Positions::of(spec, batch) {
        return positions.mean(outputs, labels);
    }
    let loss = spec.loss;
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

/// Sums losses and metrics over the records. `mean` is the mean loss.
pub(super) fn evaluate(spec: &ModelSpec, mean: f64, outputs: &Tensor, batch: &Batch) -> Result<Evaluation> {
    let metrics = &spec.metrics;
    if let Some(positions) = Positions::of(spec, batch) {
        return positions.evaluate(mean, outputs, metrics);
    }
    let rows = read_rows(outputs)?;
    let width = (rows.len() / batch.samples.max(1)).max(1);
    if spec.loss != Loss::Module {
        return Target::new(spec.loss, batch, width)?.evaluate(metrics, &rows, width);
    }
    let samples = batch.samples as u64;
    let mut evaluation = Evaluation { samples, loss_sum: mean * samples as f64, ..Evaluation::default() };
    if metrics.is_empty() {
        return Ok(evaluation);
    }
    // The script's labels are values. One value beside several outputs is a class.
    let labels = match (batch.values(), batch.classes()) {
        (Some(labels), _) if labels.len() == batch.samples && width > 1 => {
            Values::I64(labels.iter().map(|&label| label as i64).collect())
        }
        (Some(labels), _) => Values::F32(labels.to_vec()),
        (None, Some(classes)) => Values::I64(classes.to_vec()),
        (None, None) => {
            let found = batch.labels.spec().to_string();
            return Err(mismatch(Loss::Module, "labels of f32 or i64 for its metrics", found));
        }
    };
    let like = if labels.as_f32().is_none() { Loss::CrossEntropy } else { Loss::Mse };
    let labelled = Batch { records: batch.records.clone(), ..Batch::of(&[], &[0], &labels, batch.samples) };
    evaluation.metric_sums =
        Target::new(like, &labelled, width)?.evaluate(metrics, &rows, width)?.metric_sums;
    Ok(evaluation)
}

/// Returns all outputs, row-major.
fn read_rows(outputs: &Tensor) -> Result<Vec<f32>> {
    let rows = outputs.f_to_kind(Kind::Float).and_then(|outputs| super::model::read_f32(&outputs));
    rows.map_err(failed("evaluation"))
}

/// Several classes in each record, such as one for each token of a text.
struct Positions<'a> {
    loss: Loss,
    ignored: i64,
    batch: &'a Batch,
    classes: &'a [i64],
}

impl<'a> Positions<'a> {
    /// Returns the positions of a batch. `None`: its records have one label, or values.
    fn of(spec: &ModelSpec, batch: &'a Batch) -> Option<Self> {
        let classes = batch.classes().filter(|_| spec.loss.wants_classes())?;
        let several = !batch.labels.spec().shape.is_empty();
        several.then_some(Self { loss: spec.loss, ignored: spec.ignore_index, batch, classes })
    }

    /// Returns the outputs as `[positions, classes]`.
    fn rows(&self, outputs: &Tensor) -> Result<Tensor> {
        let (size, n) = (outputs.size(), self.batch.samples as i64);
        let of_one: Vec<i64> = self.batch.labels.spec().shape.iter().map(|&size| size as i64).collect();
        let rank = of_one.len() + 2;
        let first = size.len() == rank && size[0] == n && size[2..] == of_one;
        let last = size.len() == rank && size[0] == n && size[1..rank - 1] == of_one;
        let kind = outputs.f_kind().map_err(failed("outputs"))?;
        if kind != Kind::Float || first == last {
            let expected = if first && last {
                format!(
                    "outputs of which it is clear where the classes are, and both [{n}, classes, {of_one:?}] and \
                     [{n}, {of_one:?}, classes] fit (loss = \"module\" with a loss of the script's own can say it)"
                )
            } else {
                format!("Float outputs of shape [{n}, classes, {of_one:?}] or [{n}, {of_one:?}, classes]")
            };
            return Err(mismatch(self.loss, &expected, format!("{kind:?} of shape {size:?}")));
        }
        let rows = || {
            let outputs = if first { outputs.f_movedim_int(1, -1)? } else { outputs.shallow_clone() };
            let classes = outputs.size()[rank - 1];
            outputs.f_contiguous()?.f_view([-1, classes])
        };
        let rows = rows().map_err(failed("outputs"))?;
        let width = rows.size()[1];
        let wrong =
            self.classes.iter().position(|&class| class != self.ignored && !(0..width).contains(&class));
        match wrong {
            None => Ok(rows),
            Some(at) => {
                let record = self.batch.records[at / (self.classes.len() / self.batch.samples)];
                Err(Error::Label { record, label: self.classes[at], classes: width as usize })
            }
        }
    }

    fn counted(&self) -> usize {
        self.classes.iter().filter(|&&class| class != self.ignored).count()
    }

    /// Returns the mean loss over the positions that count, 0 if none does.
    fn mean(&self, outputs: &Tensor, labels: &Tensor) -> Result<Tensor> {
        let rows = self.rows(outputs)?;
        let none = None::<&Tensor>;
        let mean = || {
            if self.counted() == 0 {
                return rows.f_sum(Kind::Float)?.f_mul_scalar(0.0);
            }
            let labels = labels.f_view([-1])?;
            match self.loss {
                Loss::Nll => rows.f_nll_loss(&labels, none, Reduction::Mean, self.ignored),
                _ => rows.f_cross_entropy_loss(&labels, none, Reduction::Mean, self.ignored, 0.0),
            }
        };
        mean().map_err(failed("loss"))
    }

    /// Sums the mean loss and the mean metrics of the positions that count over the records.
    fn evaluate(&self, mean: f64, outputs: &Tensor, metrics: &[Metric]) -> Result<Evaluation> {
        let (samples, counted) = (self.batch.samples as u64, self.counted());
        let mut evaluation = Evaluation { samples, loss_sum: mean * samples as f64, ..Evaluation::default() };
        let rows = self.rows(outputs)?;
        let width = rows.size()[1] as usize;
        let rows = read_rows(&rows)?;
        let keep = || self.classes.iter().enumerate().filter(|(_, class)| **class != self.ignored);
        let classes = Values::I64(keep().map(|(_, &class)| class).collect());
        let kept: Vec<f32> =
            keep().flat_map(|(at, _)| &rows[at * width..(at + 1) * width]).copied().collect();
        let of_positions = Batch::of(&[], &[0], &classes, counted);
        let sums = Target::new(self.loss, &of_positions, width)?.evaluate(metrics, &kept, width)?.metric_sums;
        let scale = samples as f64 / counted.max(1) as f64;
        evaluation.metric_sums = sums.into_iter().map(|(name, sum)| (name, sum * scale)).collect();
        Ok(evaluation)
    }
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
