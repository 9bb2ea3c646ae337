//! Tallies of the job's metrics, from the outputs of a network and their labels.
//!
//! Every engine counts with a *meter*, which takes one row of outputs at a time and keeps no copy
//! of it. A network of your own may count with a meter too:
//!
//! ```
//! use model::metrics::ClassMeter;
//! use proto::metrics::Metric;
//!
//! let mut meter = ClassMeter::new(&[Metric::Accuracy, Metric::TopK(2)], 3)?;
//! meter.add(&[0.1, 0.7, 0.2], 1, || 0.97);
//! meter.add(&[0.5, 0.2, 0.3], 2, || 1.14);
//! let tallies = meter.finish();
//! assert_eq!(Metric::Accuracy.value(&tallies[&Metric::Accuracy]), Some(0.5));
//! assert_eq!(Metric::TopK(2).value(&tallies[&Metric::TopK(2)]), Some(1.0));
//! # Ok::<(), model::Error>(())
//! ```
//!
//! **Always true:** an output that is NaN makes the metrics of its batch NaN. Sums get NaN, and
//! counts become undefined.

use proto::metrics::{ClassCounts, Confusion, Metric, Scores, Tallies, Tally};
use proto::spec::Loss;

use crate::error::{Error, Result};

/// Counts outputs of several classes, `[classes]` for each label.
#[derive(Debug)]
pub struct ClassMeter {
    tallies: Vec<(Metric, Tally)>,
    /// Whether a metric counts predictions of each class.
    predicts: bool,
    /// Whether a metric needs the place of the label's class.
    ranks: bool,
}

impl ClassMeter {
    /// Creates the meter of a network with this many classes.
    ///
    /// # Errors
    /// A metric does not fit classes, or so many of them.
    pub fn new(metrics: &[Metric], classes: usize) -> Result<Self> {
        let start = |&metric: &Metric| {
            fits(metric, Loss::CrossEntropy)?;
            let tally = match metric {
                Metric::F1 => Tally::of_classes(classes)?,
                Metric::ConfusionMatrix => Tally::Confusion(Confusion::new(classes)?),
                _ => MEAN,
            };
            Ok((metric, tally))
        };
        Ok(Self {
            tallies: metrics.iter().map(start).collect::<Result<_>>()?,
            predicts: metrics.iter().any(|metric| matches!(metric, Metric::F1 | Metric::ConfusionMatrix)),
            ranks: metrics.iter().any(|metric| matches!(metric, Metric::Accuracy | Metric::TopK(_))),
        })
    }

    /// Counts one label. `outputs` has as many elements as there are classes, and `class` is below
    /// their number. `loss` computes the negative log likelihood of the label.
    pub fn add(&mut self, outputs: &[f32], class: usize, loss: impl FnOnce() -> f64) {
        if self.tallies.is_empty() {
            return;
        }
        let is_nan = outputs.iter().any(|output| output.is_nan());
        let rank = if self.ranks { rank(outputs, class) } else { 0 };
        let predicted = if self.predicts { largest(outputs) } else { 0 };
        let mut loss = Some(loss);
        let mut computed = f64::NAN;
        for (metric, tally) in &mut self.tallies {
            if is_nan {
                spoil(tally);
                continue;
            }
            match (metric, tally) {
                (Metric::TopK(k), Tally::Mean { sum, count }) => {
                    *sum += f64::from(u8::from(rank < usize::from(*k)));
                    *count += 1;
                }
                (Metric::Accuracy, Tally::Mean { sum, count }) => {
                    *sum += f64::from(u8::from(rank == 0));
                    *count += 1;
                }
                (_, Tally::Mean { sum, count }) => {
                    computed = loss.take().map_or(computed, |loss| loss());
                    *sum += computed;
                    *count += 1;
                }
                (_, Tally::Classes(classes)) => {
                    classes[class].labelled += 1;
                    classes[predicted].predicted += 1;
                    classes[class].right += u64::from(class == predicted);
                }
                (_, Tally::Confusion(matrix)) => {
                    matrix.add(class, predicted, 1);
                }
                (_, Tally::Scores(_) | Tally::Undefined) => {}
            }
        }
    }

    /// Returns what was counted.
    pub fn finish(self) -> Tallies {
        self.tallies.into_iter().collect()
    }
}

/// Counts outputs that have a label of their own each, such as values or binary logits.
#[derive(Debug)]
pub struct ValueMeter {
    tallies: Vec<(Metric, Tally)>,
    /// Outputs for `auc`, each with whether its label is positive.
    scores: Vec<(f32, bool)>,
}

impl ValueMeter {
    /// Creates the meter of a network with this loss, which has no classes.
    ///
    /// # Errors
    /// A metric does not fit the loss.
    pub fn new(metrics: &[Metric], loss: Loss) -> Result<Self> {
        let start = |&metric: &Metric| {
            fits(metric, loss)?;
            let tally = match metric {
                Metric::F1 => Tally::Classes(vec![ClassCounts::default()]),
                Metric::Auc => Tally::Scores(Scores::default()),
                Metric::TopK(_) | Metric::Perplexity | Metric::ConfusionMatrix => {
                    return Err(needs_classes(metric, "each output has a label of its own"));
                }
                Metric::LogLoss if loss == Loss::Module => {
                    return Err(needs_classes(metric, "the script's labels are values"));
                }
                _ => MEAN,
            };
            Ok((metric, tally))
        };
        Ok(Self { tallies: metrics.iter().map(start).collect::<Result<_>>()?, scores: Vec::new() })
    }

    /// Counts one record, with as many labels as outputs. A label above 0.5 is positive, and an
    /// output above 0 predicts a positive label. `loss` computes the mean negative log likelihood
    /// of the labels.
    pub fn add(&mut self, outputs: &[f32], labels: &[f32], loss: impl Fn() -> f64) {
        let pairs = || outputs.iter().zip(labels);
        let mean = 1.0 / outputs.len() as f64;
        let is_nan = outputs.iter().any(|output| output.is_nan());
        let difference = |(output, label): (&f32, &f32)| f64::from(*output) - f64::from(*label);
        for (metric, tally) in &mut self.tallies {
            if is_nan {
                spoil(tally);
                continue;
            }
            match (metric, tally) {
                (Metric::Accuracy, Tally::Mean { sum, count }) => {
                    let right = pairs().filter(|(output, label)| (**output > 0.0) == is_positive(**label));
                    *sum += right.count() as f64;
                    *count += outputs.len() as u64;
                }
                (metric, Tally::Mean { sum, count }) => {
                    *sum += match metric {
                        Metric::Mae => mean * pairs().map(|pair| difference(pair).abs()).sum::<f64>(),
                        Metric::LogLoss => loss(),
                        _ => mean * pairs().map(|pair| difference(pair).powi(2)).sum::<f64>(),
                    };
                    *count += 1;
                }
                (_, Tally::Classes(positive)) => {
                    for (&output, &label) in pairs() {
                        let (predicted, labelled) = (output > 0.0, is_positive(label));
                        positive[0].predicted += u64::from(predicted);
                        positive[0].labelled += u64::from(labelled);
                        positive[0].right += u64::from(predicted && labelled);
                    }
                }
                (_, Tally::Scores(_)) => {
                    self.scores.extend(pairs().map(|(&output, &label)| (output, is_positive(label))));
                }
                (_, Tally::Confusion(_) | Tally::Undefined) => {}
            }
        }
    }

    /// Returns what was counted.
    pub fn finish(self) -> Tallies {
        let mut tallies: Tallies = self.tallies.into_iter().collect();
        if let Some(tally @ Tally::Scores(_)) = tallies.get_mut(&Metric::Auc) {
            *tally = Scores::count(self.scores).map_or(Tally::Undefined, Tally::Scores);
        }
        tallies
    }
}

/// The mean of nothing.
const MEAN: Tally = Tally::Mean { sum: 0.0, count: 0 };

fn is_positive(label: f32) -> bool {
    label > 0.5
}

/// Records that an output was NaN.
fn spoil(tally: &mut Tally) {
    match tally {
        Tally::Mean { sum, count } => {
            *sum = f64::NAN;
            *count += 1;
        }
        _ => *tally = Tally::Undefined,
    }
}

/// Returns the number of classes before `class` when they are sorted by output, the largest first
/// and equals by number.
fn rank(outputs: &[f32], class: usize) -> usize {
    let output = outputs[class];
    let (before, after) = outputs.split_at(class);
    before.iter().filter(|other| **other >= output).count()
        + after.iter().filter(|other| **other > output).count()
}

/// Returns the index of the largest output, the first of equals.
pub(crate) fn largest(outputs: &[f32]) -> usize {
    (1..outputs.len()).fold(0, |best, at| if outputs[at] > outputs[best] { at } else { best })
}

fn fits(metric: Metric, loss: Loss) -> Result<()> {
    let Some((reason, better)) = metric.misfit(loss) else { return Ok(()) };
    let reason = format!("{reason}; remove it from model.metrics, or use \"{better}\" instead");
    Err(Error::Metric { metric, reason })
}

fn needs_classes(metric: Metric, found: &str) -> Error {
    let reason = format!("needs classes, and {found}; remove it from model.metrics");
    Error::Metric { metric, reason }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_and_predictions_prefer_the_first_of_equals() {
        let outputs = [1.0, 3.0, 3.0, 2.0];
        assert_eq!(largest(&outputs), 1);
        assert_eq!([0, 1, 2, 3].map(|class| rank(&outputs, class)), [3, 0, 1, 2]);
        for class in 0..4 {
            assert_eq!(rank(&outputs, class) == 0, largest(&outputs) == class);
        }
    }

    #[test]
    fn the_loss_is_computed_once_for_all_metrics_that_need_it() {
        let mut meter = ClassMeter::new(&[Metric::Perplexity, Metric::LogLoss, Metric::Accuracy], 2).unwrap();
        let mut calls = 0;
        meter.add(&[0.0, 1.0], 1, || {
            calls += 1;
            0.25
        });
        assert_eq!(calls, 1);
        let tallies = meter.finish();
        for metric in [Metric::Perplexity, Metric::LogLoss] {
            assert_eq!(tallies[&metric], Tally::Mean { sum: 0.25, count: 1 });
        }
    }

    #[test]
    fn every_metric_is_nan_once_an_output_is() {
        let classes = [
            Metric::Accuracy,
            Metric::TopK(2),
            Metric::LogLoss,
            Metric::Perplexity,
            Metric::F1,
            Metric::ConfusionMatrix,
        ];
        let mut meter = ClassMeter::new(&classes, 2).unwrap();
        for outputs in [[0.0, 1.0], [f32::NAN, 0.0], [1.0, 0.0]] {
            meter.add(&outputs, 1, || 0.5);
        }
        let binary = [Metric::Accuracy, Metric::LogLoss, Metric::Mae, Metric::Auc, Metric::F1];
        let mut binary = ValueMeter::new(&binary, Loss::BceWithLogits).unwrap();
        let mut values = ValueMeter::new(&[Metric::Mse, Metric::Rmse], Loss::Mse).unwrap();
        for outputs in [[0.0, 1.0], [f32::NAN, 0.0], [1.0, 0.0]] {
            binary.add(&outputs, &[0.0, 1.0], || 0.5);
            values.add(&outputs, &[0.0, 1.0], || 0.5);
        }
        let found: Vec<_> =
            [meter.finish(), binary.finish(), values.finish()].into_iter().flatten().collect();
        assert_eq!(found.len(), 13);
        for (metric, tally) in found {
            assert!(metric.takes(&tally), "{metric}: {tally:?}");
            assert!(metric.value(&tally).is_none_or(f64::is_nan), "{metric}: {tally:?}");
        }
    }

    #[test]
    fn infinite_outputs_have_their_place() {
        let mut meter = ValueMeter::new(&[Metric::Auc, Metric::Accuracy], Loss::BceWithLogits).unwrap();
        meter.add(&[f32::INFINITY, f32::NEG_INFINITY, 0.0], &[1.0, 0.0, 0.0], || 0.0);
        let tallies = meter.finish();
        assert_eq!(Metric::Auc.value(&tallies[&Metric::Auc]), Some(1.0));
        assert_eq!(Metric::Accuracy.value(&tallies[&Metric::Accuracy]), Some(1.0));
    }

    #[test]
    fn metrics_without_meaning_are_refused_with_a_better_one() {
        let said = |made: Result<ClassMeter>| made.unwrap_err().to_string();
        let message = said(ClassMeter::new(&[Metric::Mae], 2));
        assert!(message.contains("`mae`") && message.contains("use \"accuracy\""), "{message}");
        assert!(said(ClassMeter::new(&[Metric::ConfusionMatrix], 1000)).contains("at most 256"));
        let said = |metric, loss| ValueMeter::new(&[metric], loss).unwrap_err().to_string();
        assert!(said(Metric::Accuracy, Loss::Mse).contains("use \"mae\""));
        for metric in [Metric::TopK(5), Metric::Perplexity, Metric::ConfusionMatrix, Metric::LogLoss] {
            assert!(said(metric, Loss::Module).contains("needs classes"), "{metric}");
        }
    }
}
