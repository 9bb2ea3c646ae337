//! Losses and metrics of one batch, for engines without automatic differentiation.
//!
//! Outputs are f32 `[n, k]` row-major. Every record is computed in f64 and rounded once, so that
//! large logits, many classes and long sums cost no accuracy. Losses are PyTorch's
//! (`torch.nn.functional`) with `reduction="mean"`.

use data::Batch;
use proto::column::ElementType;
use proto::metrics::{Evaluation, Metric};
use proto::spec::Loss;

use crate::error::{Error, Result};
use crate::metrics::{ClassMeter, ValueMeter, largest};

/// Labels for the outputs `[n, width]` of a batch, checked against loss and width.
#[derive(Clone, Copy, Debug)]
pub(super) enum Target<'a> {
    /// Classes `[n]` for logits.
    CrossEntropy(&'a [i64]),
    /// Classes `[n]` for logits, and the share of each that is spread evenly over all classes.
    Smoothed(&'a [i64], f64),
    /// Probabilities `[n, width]` for logits, and the share of each that is spread likewise.
    Soft(&'a [f32], f64),
    /// Classes `[n]` for log-probabilities.
    Nll(&'a [i64]),
    /// Values `[n, width]` for values.
    Mse(&'a [f32]),
    /// Probabilities `[n, width]` for logits.
    BceWithLogits(&'a [f32]),
}

impl<'a> Target<'a> {
    /// Checks the labels of a batch. Labels of `cross_entropy` may also be the probabilities that
    /// mixup makes.
    ///
    /// # Errors
    /// The labels have another type or width than the loss and the outputs need, or a label is out
    /// of range.
    pub(super) fn new(loss: Loss, batch: &'a Batch, width: usize) -> Result<Self> {
        match loss {
            Loss::CrossEntropy if mixed_classes(batch).is_some() => {
                soft(batch, width).map(|labels| Self::Soft(labels, 0.0))
            }
            Loss::CrossEntropy => classes(loss, batch, width).map(Self::CrossEntropy),
            Loss::Nll => classes(loss, batch, width).map(Self::Nll),
            Loss::Mse => values(loss, batch, width).map(Self::Mse),
            Loss::BceWithLogits => {
                let labels = values(loss, batch, width)?;
                match labels.iter().position(|label| !(0.0..=1.0).contains(label)) {
                    None => Ok(Self::BceWithLogits(labels)),
                    Some(at) => {
                        let (label, record) = (labels[at], batch.records[at / width]);
                        Err(mismatch(loss, "labels in [0, 1]", format!("label {label} of record {record}")))
                    }
                }
            }
            Loss::Module => {
                Err(mismatch(loss, "a script that returns its loss", "a builtin network".to_owned()))
            }
        }
    }

    /// Spreads a share of each label of `cross_entropy` evenly over all classes
    /// (`torch.nn.CrossEntropyLoss(label_smoothing=share)`). Other losses have none.
    pub(super) fn smoothed(self, share: f64) -> Self {
        match self {
            Self::CrossEntropy(classes) if share > 0.0 => Self::Smoothed(classes, share),
            Self::Soft(labels, _) => Self::Soft(labels, share),
            other => other,
        }
    }

    /// Returns the mean loss of the outputs `[n, width]`, and its gradient with respect to the
    /// outputs.
    pub(super) fn gradient(self, outputs: &[f32], width: usize) -> (f32, Vec<f32>) {
        let samples = (outputs.len() / width) as f64;
        let (mut sum, mut gradient) = (0.0, vec![0.0; outputs.len()]);
        let rows = outputs.chunks_exact(width).zip(gradient.chunks_exact_mut(width));
        for (record, (outputs, gradient)) in rows.enumerate() {
            sum += self.loss(record, outputs);
            self.differentiate(record, outputs, |output, slope| {
                gradient[output] = (slope / samples) as f32;
            });
        }
        ((sum / samples) as f32, gradient)
    }

    /// Sums the losses of the records, and counts their metrics. `loss` is the job's. Metrics know
    /// nothing of smoothed labels.
    ///
    /// # Errors
    /// A metric does not fit the labels, or so many classes.
    pub(super) fn evaluate(
        self,
        loss: Loss,
        metrics: &[Metric],
        outputs: &[f32],
        width: usize,
    ) -> Result<Evaluation> {
        let rows = outputs.chunks_exact(width).enumerate();
        let (samples, mut loss_sum) = ((outputs.len() / width) as u64, 0.0);
        let tallies = match self {
            Self::CrossEntropy(classes) | Self::Nll(classes) => {
                let mut meter = ClassMeter::new(metrics, width)?;
                for (record, outputs) in rows {
                    let loss = self.loss(record, outputs);
                    loss_sum += loss;
                    meter.add(outputs, classes[record] as usize, || loss);
                }
                meter.finish()
            }
            Self::Smoothed(classes, _) => {
                let mut meter = ClassMeter::new(metrics, width)?;
                for (record, outputs) in rows {
                    loss_sum += self.loss(record, outputs);
                    let plain = || Self::CrossEntropy(classes).loss(record, outputs);
                    meter.add(outputs, classes[record] as usize, plain);
                }
                meter.finish()
            }
            Self::Soft(labels, _) => {
                let mut meter = ClassMeter::new(metrics, width)?;
                for (record, outputs) in rows {
                    loss_sum += self.loss(record, outputs);
                    let plain = || Self::Soft(labels, 0.0).loss(record, outputs);
                    meter.add(outputs, largest(of_record(labels, record, outputs)), plain);
                }
                meter.finish()
            }
            Self::Mse(labels) | Self::BceWithLogits(labels) => {
                let mut meter = ValueMeter::new(metrics, loss)?;
                for (record, outputs) in rows {
                    let loss = self.loss(record, outputs);
                    loss_sum += loss;
                    meter.add(outputs, of_record(labels, record, outputs), || loss);
                }
                meter.finish()
            }
        };
        Ok(Evaluation { samples, loss_sum, tallies, ..Evaluation::default() })
    }

    /// Returns the loss of one record.
    pub(super) fn loss(self, record: usize, outputs: &[f32]) -> f64 {
        let pairs = |labels: &'a [f32]| pairs(labels, record, outputs);
        let mean = 1.0 / outputs.len() as f64;
        match self {
            Self::CrossEntropy(classes) => {
                log_sum_exp(outputs) - f64::from(outputs[classes[record] as usize])
            }
            // The probabilities p of a record sum up to 1, except for rounding. The loss is
            // -p log_softmax(outputs).
            Self::Smoothed(..) | Self::Soft(..) => {
                let total = log_sum_exp(outputs);
                let one = |(class, &output): (usize, &f32)| {
                    self.probability(record, class, outputs) * (total - f64::from(output))
                };
                outputs.iter().enumerate().map(one).sum::<f64>()
            }
            Self::Nll(classes) => -f64::from(outputs[classes[record] as usize]),
            Self::Mse(labels) => {
                mean * pairs(labels).map(|(output, label)| (output - label).powi(2)).sum::<f64>()
            }
            // The loss is -label ln(s) - (1 - label) ln(1 - s) with s = sigmoid(output), without
            // overflow for large outputs.
            Self::BceWithLogits(labels) => {
                let one = |(output, label): (f64, f64)| {
                    output.max(0.0) - output * label + libm::log1p(libm::exp(-output.abs()))
                };
                mean * pairs(labels).map(one).sum::<f64>()
            }
        }
    }

    /// Returns the probability of a class in the label of a record with these outputs.
    fn probability(self, record: usize, class: usize, outputs: &[f32]) -> f64 {
        let (label, share) = match self {
            Self::Smoothed(classes, share) => (f64::from(u8::from(class as i64 == classes[record])), share),
            Self::Soft(labels, share) => (f64::from(of_record(labels, record, outputs)[class]), share),
            Self::CrossEntropy(_) | Self::Nll(_) | Self::Mse(_) | Self::BceWithLogits(_) => return f64::NAN,
        };
        label * (1.0 - share) + share / outputs.len() as f64
    }

    /// Calls `put` with each output's index and the slope of one record's loss along it.
    fn differentiate(self, record: usize, outputs: &[f32], mut put: impl FnMut(usize, f64)) {
        let mean = 1.0 / outputs.len() as f64;
        match self {
            Self::CrossEntropy(classes) => {
                let total = log_sum_exp(outputs);
                for (class, &output) in outputs.iter().enumerate() {
                    let is_label = class as i64 == classes[record];
                    put(class, libm::exp(f64::from(output) - total) - f64::from(u8::from(is_label)));
                }
            }
            Self::Smoothed(..) | Self::Soft(..) => {
                let total = log_sum_exp(outputs);
                let probabilities = (0..outputs.len()).map(|class| self.probability(record, class, outputs));
                let sum = probabilities.sum::<f64>();
                for (class, &output) in outputs.iter().enumerate() {
                    let share = libm::exp(f64::from(output) - total);
                    put(class, sum * share - self.probability(record, class, outputs));
                }
            }
            Self::Nll(classes) => put(classes[record] as usize, -1.0),
            Self::Mse(labels) => {
                let slopes =
                    pairs(labels, record, outputs).map(|(output, label)| 2.0 * mean * (output - label));
                slopes.enumerate().for_each(|(at, slope)| put(at, slope));
            }
            Self::BceWithLogits(labels) => {
                let one = |(output, label): (f64, f64)| mean * (1.0 / (1.0 + libm::exp(-output)) - label);
                pairs(labels, record, outputs).map(one).enumerate().for_each(|(at, slope)| put(at, slope));
            }
        }
    }
}

/// Pairs a record's outputs with its labels.
fn pairs<'a>(labels: &'a [f32], record: usize, outputs: &'a [f32]) -> impl Iterator<Item = (f64, f64)> + 'a {
    outputs
        .iter()
        .zip(of_record(labels, record, outputs))
        .map(|(&output, &label)| (f64::from(output), f64::from(label)))
}

/// Returns the labels of a record, as many as it has outputs.
fn of_record<'a>(labels: &'a [f32], record: usize, outputs: &[f32]) -> &'a [f32] {
    &labels[record * outputs.len()..][..outputs.len()]
}

/// Computes `ln(sum(exp(outputs)))` without overflow.
fn log_sum_exp(outputs: &[f32]) -> f64 {
    let max = f64::from(outputs[largest(outputs)]);
    max + libm::log(outputs.iter().map(|&output| libm::exp(f64::from(output) - max)).sum::<f64>())
}

fn classes(loss: Loss, batch: &Batch, width: usize) -> Result<&[i64]> {
    let Some(labels) = batch.classes().filter(|labels| labels.len() == batch.samples) else {
        return Err(mismatch(loss, "one class a record", describe(batch)));
    };
    match labels.iter().position(|&label| !usize::try_from(label).is_ok_and(|label| label < width)) {
        None => Ok(labels),
        Some(at) => Err(Error::Label { record: batch.records[at], label: labels[at], classes: width }),
    }
}

/// Returns the number of classes of labels that mixup made: f32 `[n, classes]`.
fn mixed_classes(batch: &Batch) -> Option<usize> {
    let spec = batch.labels.spec();
    match *spec.shape {
        [classes] if classes > 1 && spec.dtype == ElementType::F32 => Some(classes),
        _ => None,
    }
}

/// Returns probabilities of all classes.
fn soft(batch: &Batch, width: usize) -> Result<&[f32]> {
    let classes = mixed_classes(batch).unwrap_or_default();
    batch.values().filter(|_| classes == width).ok_or_else(|| {
        let expected = format!("labels of {width} classes, as many as the network has outputs");
        mismatch(Loss::CrossEntropy, &expected, format!("{classes} (data.mixup.classes)"))
    })
}

fn values(loss: Loss, batch: &Batch, width: usize) -> Result<&[f32]> {
    batch.values().filter(|labels| labels.len() == batch.samples * width).ok_or_else(|| {
        mismatch(loss, &format!("{width} values a record, as the network has outputs"), describe(batch))
    })
}

fn describe(batch: &Batch) -> String {
    format!("labels {} for {} records", batch.labels.spec(), batch.samples)
}

/// Returns the error of labels or outputs that do not fit the loss.
pub(super) fn mismatch(loss: Loss, expected: &str, found: String) -> Error {
    Error::Loss { loss: name(loss), expected: expected.to_owned(), found }
}

/// Returns the name of a loss in job files.
pub(super) fn name(loss: Loss) -> String {
    serde_json::to_value(loss).ok().and_then(|name| name.as_str().map(str::to_owned)).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use proto::tensor::Values;

    use super::*;
    use crate::engines::golden;

    #[allow(clippy::needless_pass_by_value, reason = "each call makes its values")]
    fn batch(labels: Values, samples: usize) -> Batch {
        let records = (0..samples as u64).map(|record| 100 + record).collect();
        Batch { records, ..Batch::of(&[], &[0], &labels, samples) }
    }

    fn error(loss: Loss, labels: Values, width: usize) -> String {
        Target::new(loss, &batch(labels, 2), width).unwrap_err().to_string()
    }

    #[test]
    fn losses_and_metrics_of_two_records() {
        let outputs = [0.0, 0.0, 2.0, 0.0];
        let close =
            |found: f64, expected: f64| assert!((found - expected).abs() < 1e-12, "{found}, not {expected}");
        let classes = batch(Values::I64(vec![0, 1]), 2);
        let values = batch(Values::F32(vec![1.0, 0.0, 1.0, 0.0]), 2);
        let evaluate = |loss, metrics: &[Metric]| {
            let batch = if matches!(loss, Loss::CrossEntropy | Loss::Nll) { &classes } else { &values };
            Target::new(loss, batch, 2).unwrap().evaluate(loss, metrics, &outputs, 2).unwrap()
        };
        let found = evaluate(Loss::CrossEntropy, &[Metric::Accuracy]);
        close(found.loss_sum, 2f64.ln() + (2f64.exp() + 1.0).ln());
        assert_eq!((found.samples, found.values()["accuracy"]), (2, 0.5));
        close(evaluate(Loss::Nll, &[]).loss_sum, 0.0);
        let found = evaluate(Loss::Mse, &[Metric::Mae]);
        close(found.loss_sum, 1.0);
        close(found.values()["mae"], 0.5);
        let found = evaluate(Loss::BceWithLogits, &[Metric::Accuracy, Metric::Mae]);
        close(found.loss_sum, 1.5 * 2f64.ln() + 0.5 * (-2f64).exp().ln_1p());
        assert_eq!(found.values()["accuracy"], 0.75);
    }

    #[test]
    fn large_logits_neither_overflow_nor_vanish() {
        let classes = batch(Values::I64(vec![0, 0]), 2);
        let (loss, gradient) =
            Target::new(Loss::CrossEntropy, &classes, 2).unwrap().gradient(&[1e4, -1e4, -1e4, 1e4], 2);
        assert_eq!((loss, gradient), (1e4, vec![0.0, 0.0, -0.5, 0.5]));
        let values = batch(Values::F32(vec![1.0, 1.0]), 2);
        let (loss, gradient) =
            Target::new(Loss::BceWithLogits, &values, 1).unwrap().gradient(&[1e4, -1e4], 1);
        assert_eq!((loss, gradient), (5e3, vec![0.0, -0.5]));
    }

    #[test]
    fn outputs_that_are_not_finite_give_a_loss_that_is_not() {
        let classes = batch(Values::I64(vec![0]), 1);
        for outputs in [[f32::NAN, 0.0], [0.0, f32::NAN], [f32::INFINITY, 0.0], [f32::NEG_INFINITY; 2]] {
            let (loss, _) = Target::new(Loss::CrossEntropy, &classes, 2).unwrap().gradient(&outputs, 2);
            assert!(!loss.is_finite(), "{outputs:?} gave {loss}");
        }
    }

    #[test]
    fn labels_that_do_not_fit_are_named() {
        let message = error(Loss::CrossEntropy, Values::I64(vec![2, 3]), 3);
        assert!(message.contains("record 101: label 3 is outside 0..3"), "{message}");
        assert!(error(Loss::Nll, Values::I64(vec![-1, 0]), 3).contains("record 100: label -1"));
        let message = error(Loss::CrossEntropy, Values::F32(vec![0.0; 2]), 3);
        assert!(
            message.contains(
                "`cross_entropy` needs one class a record, found labels `labels` f32[1] for 2 records"
            ),
            "{message}"
        );
        assert!(error(Loss::Mse, Values::F32(vec![0.0; 2]), 3).contains("needs 3 values a record"));
        assert!(
            error(Loss::BceWithLogits, Values::F32(vec![0.0, 2.0]), 1)
                .contains("found label 2 of record 101")
        );
        assert!(error(Loss::BceWithLogits, Values::F32(vec![0.0, f32::NAN]), 1).contains("label NaN"));
        assert!(error(Loss::Module, Values::F32(vec![0.0; 2]), 1).contains("a script that returns its loss"));
        let message = error(Loss::CrossEntropy, Values::F32(vec![0.5; 4]), 3);
        let expected = "`cross_entropy` needs labels of 3 classes, as many as the network has outputs, found 2 \
                        (data.mixup.classes)";
        assert!(message.contains(expected), "{message}");
    }

    #[test]
    fn smoothed_and_mixed_labels_have_the_losses_of_pytorchs_definition() {
        for case in golden::soft() {
            if case.ignored.is_some() {
                continue;
            }
            let (samples, width) = (case.samples(), case.classes);
            let batch = case.batch();
            let target =
                Target::new(Loss::CrossEntropy, &batch, width).unwrap().smoothed(case.label_smoothing);
            let (loss, gradient) = target.gradient(&case.outputs, width);
            let close =
                |found: f64, expected: f64| (found - expected).abs() <= 1e-7 * expected.abs().max(1.0);
            assert!(close(f64::from(loss), case.loss), "{case:?}: {loss}");
            for (found, expected) in gradient.iter().zip(&case.gradient) {
                assert!(close(f64::from(*found), *expected), "{case:?}: {found}, expected {expected}");
            }
            let metrics = [Metric::Accuracy, Metric::LogLoss];
            let found = target.evaluate(Loss::CrossEntropy, &metrics, &case.outputs, width).unwrap();
            assert!((found.loss_sum / samples as f64 - case.loss).abs() < 1e-12, "{case:?}");
            assert!((found.values()["log_loss"] - case.plain_loss).abs() < 1e-12, "{case:?}: {found:?}");
        }
    }

    #[test]
    fn labels_that_are_not_smoothed_have_the_bits_of_before() {
        let classes = batch(Values::I64(vec![0, 2]), 2);
        let outputs = [0.3, -1.7, 2.5, 0.1, 0.2, 0.3];
        let target = Target::new(Loss::CrossEntropy, &classes, 3).unwrap();
        let plain = target.gradient(&outputs, 3);
        assert_eq!(target.smoothed(0.0).gradient(&outputs, 3), plain);
        let others = batch(Values::F32(vec![0.5; 6]), 2);
        let other = Target::new(Loss::Mse, &others, 3).unwrap();
        assert_eq!(other.smoothed(0.5).gradient(&outputs, 3), other.gradient(&outputs, 3));
    }

    #[test]
    fn a_metric_without_meaning_is_refused() {
        let classes = batch(Values::I64(vec![0]), 1);
        let target = Target::new(Loss::CrossEntropy, &classes, 2).unwrap();
        let refused = target.evaluate(Loss::CrossEntropy, &[Metric::Mae], &[0.0, 1.0], 2);
        assert!(refused.unwrap_err().to_string().contains("`mae`"));
    }

    proptest! {
        /// Compares with central differences. The loss is computed in f64, so only the step's own
        /// error is left.
        #[test]
        fn gradients_are_the_slopes_of_the_loss(
            outputs in proptest::collection::vec(-4f32..4.0, 6),
            labels in proptest::collection::vec(0i64..3, 2),
        ) {
            let classes = batch(Values::I64(labels.clone()), 2);
            let values = batch(Values::F32((0..6).map(|at| labels[at / 3] as f32 / 2.0 * (at % 2) as f32).collect()), 2);
            for loss in [Loss::CrossEntropy, Loss::Nll, Loss::Mse, Loss::BceWithLogits] {
                let target = Target::new(loss, if loss.wants_classes() { &classes } else { &values }, 3).unwrap();
                let (mean, gradient) = target.gradient(&outputs, 3);
                let at = |outputs: &[f32]| target.evaluate(loss, &[], outputs, 3).unwrap().loss_sum / 2.0;
                prop_assert!((f64::from(mean) - at(&outputs)).abs() < 1e-6);
                for (index, slope) in gradient.iter().enumerate() {
                    let (mut low, mut high) = (outputs.clone(), outputs.clone());
                    low[index] -= 1e-2;
                    high[index] += 1e-2;
                    let step = f64::from(high[index]) - f64::from(low[index]);
                    let expected = (at(&high) - at(&low)) / step;
                    prop_assert!((f64::from(*slope) - expected).abs() < 2e-5, "{loss:?}: {slope} against {expected}");
                }
            }
        }
    }
}
