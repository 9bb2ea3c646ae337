//! Losses with gradients. Outputs and labels are checked before libtorch sees them.

use data::Batch;
use proto::metrics::{Evaluation, Metric, Tallies};
use proto::spec::{Loss, ModelSpec};
use proto::tensor::Values;
use tch::{Kind, Reduction, Tensor};

use super::network::{Output, failed};
use crate::engines::loss::{Target, mismatch};
use crate::error::{Error, Result};
use crate::metrics::ClassMeter;

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
        Loss::CrossEntropy => {
            outputs.f_cross_entropy_loss(labels, none, Reduction::Mean, -100, spec.label_smoothing)
        }
        Loss::Nll => outputs.f_nll_loss(labels, none, Reduction::Mean, -100),
        Loss::Mse => like_outputs().and_then(|labels| outputs.f_mse_loss(&labels, Reduction::Mean)),
        Loss::BceWithLogits => like_outputs().and_then(|labels| {
            outputs.f_binary_cross_entropy_with_logits(&labels, none, none, Reduction::Mean)
        }),
        Loss::Module => return Err(mismatch(loss, "the script's own loss", "outputs only".to_owned())),
    };
    value.map_err(failed("loss"))
}

/// Sums losses over the records, and counts their metrics. `mean` is the mean loss.
pub(super) fn evaluate(spec: &ModelSpec, mean: f64, outputs: &Tensor, batch: &Batch) -> Result<Evaluation> {
    let metrics = &spec.metrics;
    let samples = batch.samples as u64;
    let evaluation = Evaluation { samples, loss_sum: mean * samples as f64, ..Evaluation::default() };
    if let Some(positions) = Positions::of(spec, batch) {
        if metrics.is_empty() {
            return Ok(evaluation);
        }
        let rows = positions.rows(outputs)?;
        let width = rows.size()[1] as usize;
        let tallies = with_rows(&rows, |rows| positions.count(metrics, rows, width))?;
        return Ok(Evaluation { tallies, ..evaluation });
    }
    let width = (outputs.numel() / batch.samples.max(1)).max(1);
    if spec.loss != Loss::Module {
        let target = Target::new(spec.loss, batch, width)?.smoothed(spec.label_smoothing);
        return with_rows(outputs, |rows| target.evaluate(spec.loss, metrics, rows, width));
    }
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
    let target = Target::new(like, &labelled, width)?;
    let counted = with_rows(outputs, |rows| target.evaluate(Loss::Module, metrics, rows, width))?;
    Ok(Evaluation { tallies: counted.tallies, ..evaluation })
}

/// Calls `of` with all outputs, row-major. Outputs in host memory are not copied.
fn with_rows<T>(outputs: &Tensor, of: impl FnOnce(&[f32]) -> Result<T>) -> Result<T> {
    let rows = outputs.f_to_kind(Kind::Float).and_then(|outputs| super::model::with_elements(&outputs, of));
    rows.map_err(failed("evaluation"))?
}

/// Several classes in each record, such as one for each token of a text.
struct Positions<'a> {
    loss: Loss,
    ignored: i64,
    smoothing: f64,
    batch: &'a Batch,
    classes: &'a [i64],
}

impl<'a> Positions<'a> {
    /// Returns the positions of a batch. `None`: its records have one label, or values.
    fn of(spec: &ModelSpec, batch: &'a Batch) -> Option<Self> {
        let classes = batch.classes().filter(|_| spec.loss.wants_classes())?;
        let several = !batch.labels.spec().shape.is_empty();
        let (ignored, smoothing) = (spec.ignore_index, spec.label_smoothing);
        several.then_some(Self { loss: spec.loss, ignored, smoothing, batch, classes })
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
                _ => rows.f_cross_entropy_loss(&labels, none, Reduction::Mean, self.ignored, self.smoothing),
            }
        };
        mean().map_err(failed("loss"))
    }

    /// Counts the metrics of the positions that count, from all outputs `[positions, width]`.
    fn count(&self, metrics: &[Metric], rows: &[f32], width: usize) -> Result<Tallies> {
        let mut meter = ClassMeter::new(metrics, width)?;
        let target = match self.loss {
            Loss::Nll => Target::Nll(self.classes),
            _ => Target::CrossEntropy(self.classes),
        };
        for (at, outputs) in rows.chunks_exact(width).enumerate() {
            let class = self.classes[at];
            if class != self.ignored {
                meter.add(outputs, class as usize, || target.loss(at, outputs));
            }
        }
        Ok(meter.finish())
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engines::golden;

    fn spec(loss: Loss, ignore_index: i64, metrics: Vec<Metric>) -> ModelSpec {
        let text = "name = \"x\"\nepochs = 1\nbatch = { micro = 1 }\noptimizer = { kind = \"sgd\", learning_rate = 1 }\n\
             model = { script = \"x.pt\" }\ndata = { format = \"csv\", train = { files = [\"x\"] } }\n";
        let job = proto::spec::parse(text, std::path::Path::new("x.toml"), &[]).unwrap();
        ModelSpec { loss, ignore_index, metrics, ..job.model }
    }

    fn tensor(shape: &[usize], values: &[f32]) -> Tensor {
        let shape: Vec<_> = shape.iter().map(|&size| size as i64).collect();
        Tensor::from_slice(values).view(shape.as_slice())
    }

    #[test]
    fn the_metrics_are_those_of_scikit_learn() {
        for case in golden::cases() {
            let spec = spec(case.loss, case.ignored.unwrap_or(-100), case.metrics());
            let (batch, outputs) = case.part(0, case.shape[0]);
            let outputs = tensor(&case.shape, outputs);
            case.check(&evaluate(&spec, 0.5, &outputs, &batch).unwrap());
            if case.shape.len() == 3 {
                let first = outputs.movedim_int(-1, 1);
                case.check(&evaluate(&spec, 0.5, &first, &batch).unwrap());
            }
        }
    }

    #[test]
    fn smoothed_and_mixed_labels_have_the_losses_of_pytorchs_definition() {
        for case in golden::soft() {
            let (batch, width) = (case.batch(), case.classes);
            let mut spec = spec(Loss::CrossEntropy, case.ignored.unwrap_or(-100), vec![Metric::LogLoss]);
            spec.label_smoothing = case.label_smoothing;
            let mut shape = vec![batch.samples];
            shape.extend(case.ignored.map(|_| case.samples()));
            shape.push(width);
            let outputs = tensor(&shape, &case.outputs).set_requires_grad(true);
            let labels = match (batch.classes(), batch.values()) {
                (Some(classes), _) => Tensor::from_slice(classes).view_as(&outputs.select(-1, 0)),
                (None, values) => Tensor::from_slice(values.unwrap()).view_as(&outputs),
            };
            let output = Output { outputs: outputs.shallow_clone(), loss: None };
            let loss = mean(&spec, &output, &labels, &batch).unwrap();
            let close =
                |found: f64, expected: f64| (found - expected).abs() <= 1e-6 * expected.abs().max(1.0);
            assert!(close(loss.double_value(&[]), case.loss), "{case:?}: {loss:?}");
            loss.backward();
            let gradient: Vec<f32> = Vec::try_from(outputs.grad().view(-1)).unwrap();
            for (found, expected) in gradient.iter().zip(&case.gradient) {
                assert!(close(f64::from(*found), *expected), "{case:?}: {found}, expected {expected}");
            }
            let found = evaluate(&spec, loss.double_value(&[]), &outputs.detach(), &batch).unwrap();
            assert!(close(found.loss_sum / batch.samples as f64, case.loss), "{case:?}: {found:?}");
            assert!(close(found.values()["log_loss"], case.plain_loss), "{case:?}: {found:?}");
        }
    }

    #[test]
    fn outputs_of_a_scripts_own_loss_have_metrics_by_their_labels() {
        for case in golden::cases().into_iter().filter(|case| case.ignored.is_none()) {
            let (batch, outputs) = case.part(0, case.shape[0]);
            let outputs = tensor(&case.shape, outputs);
            // Outputs of classes count as logits, and logits of values as values.
            let is_loss = |metric: &Metric| matches!(metric, Metric::LogLoss | Metric::Perplexity);
            let metrics = case.metrics().into_iter().filter(|metric| !is_loss(metric)).collect::<Vec<_>>();
            let found = evaluate(&spec(Loss::Module, -100, metrics), 0.5, &outputs, &batch).unwrap();
            assert_eq!(found.loss_sum, 0.5 * batch.samples as f64);
            let mut case = case;
            case.values.retain(|metric, _| found.tallies.contains_key(&metric.parse().unwrap()));
            case.check(&found);
        }
    }

    #[test]
    fn outputs_that_are_nan_have_metrics_that_are() {
        for mut case in golden::cases() {
            *case.outputs.last_mut().unwrap() = f32::NAN;
            let spec = spec(case.loss, case.ignored.unwrap_or(-100), case.metrics());
            let (batch, outputs) = case.part(0, case.shape[0]);
            let found = evaluate(&spec, f64::NAN, &tensor(&case.shape, outputs), &batch).unwrap();
            for (name, value) in found.values().iter().filter(|(name, _)| *name != "loss") {
                assert!(value.is_nan(), "{}: {name} is {value}", case.name);
            }
            assert!(found.confusion().is_none());
        }
    }

    #[test]
    fn a_position_that_does_not_count_may_have_any_outputs() {
        let mut case = golden::cases().into_iter().find(|case| case.ignored.is_some()).unwrap();
        case.outputs[0] = f32::NAN;
        let spec = spec(case.loss, -100, case.metrics());
        let (batch, outputs) = case.part(0, case.shape[0]);
        assert_eq!(batch.classes().unwrap()[0], -100);
        case.check(&evaluate(&spec, 0.5, &tensor(&case.shape, outputs), &batch).unwrap());
    }
}
