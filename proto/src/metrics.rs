//! Metrics of an evaluation: what they are called, what workers report, and what comes out.
//!
//! A worker counts its records in one [`Tally`] for each metric. Tallies merge, so any number of
//! workers may share an evaluation:
//!
//! ```text
//! accuracy: 2 of 3 in one data shard, 1 of 1 in the next one -> 3 of 4 -> 0.75
//! ```
//!
//! **Always true:** the value of a metric is computed once, from the merged tally, and does not
//! depend on who counted which records when. Counts and scores merge exactly in any order. Sums of
//! fractions do not, so the [`Merger`] adds them in the order of the data shards.
//!
//! Mergeable summaries are those of Agarwal et al., "Mergeable Summaries" (PODS 2012). They are
//! called metric states in TorchMetrics.

mod evaluation;
mod scores;
mod tally;

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

pub use self::evaluation::{Evaluation, Merger};
pub use self::scores::{REPORT_SCORES_MAX, SCORES_MAX, ScoreCounts, Scores};
pub use self::tally::{CONFUSION_CLASSES_MAX, ClassCounts, Confusion, F1_CLASSES_MAX, Tallies, Tally};
use crate::spec::Loss;

/// Largest k of a top-k accuracy.
pub const TOP_MAX: u16 = 1000;

/// Number that an evaluation reports beside the loss.
///
/// A job file names it by [`name`](Self::name), such as `"log_loss"` or `"top5"`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Metric {
    /// Share of labels whose class has the largest output, the first of equals. With
    /// `bce_with_logits`: share of outputs on the label's side of 0.
    Accuracy,
    /// Share of labels whose class is among the k largest outputs, lower classes first among
    /// equals. k is from 1 to [`TOP_MAX`].
    TopK(u16),
    /// Mean negative log likelihood of the labels.
    LogLoss,
    /// Exponential of the mean negative log likelihood.
    Perplexity,
    /// Mean absolute difference between outputs and labels.
    Mae,
    /// Mean squared difference between outputs and labels.
    Mse,
    /// Root of the mean squared difference.
    Rmse,
    /// Area under the ROC curve: the probability that a positive label has a larger output than a
    /// negative one. Equal outputs count half.
    Auc,
    /// Harmonic mean of precision and recall: of the positive label, or the mean over the classes.
    F1,
    /// Number of labels for each pair of class and predicted class.
    ConfusionMatrix,
}

impl Metric {
    /// All metrics, with one k for the top-k accuracies.
    pub const ALL: [Self; 10] = [
        Self::Accuracy,
        Self::TopK(5),
        Self::LogLoss,
        Self::Perplexity,
        Self::Mae,
        Self::Mse,
        Self::Rmse,
        Self::Auc,
        Self::F1,
        Self::ConfusionMatrix,
    ];

    /// Returns the metric's name in job files, events and summaries.
    ///
    /// ```
    /// use proto::metrics::Metric;
    /// assert_eq!(Metric::TopK(5).name(), "top5");
    /// assert_eq!("top5".parse(), Ok(Metric::TopK(5)));
    /// ```
    pub fn name(self) -> String {
        self.to_string()
    }

    /// Returns why the metric does not fit a loss, and the metric to use instead. `None`: it fits,
    /// or only the labels of a script's own loss can say.
    pub const fn misfit(self, loss: Loss) -> Option<(&'static str, Self)> {
        const CLASSES: &str = "needs classes; this loss compares values";
        const VALUES: &str = "compares values; this loss has class labels";
        match (loss, self) {
            (Loss::Module, _)
            | (
                Loss::CrossEntropy | Loss::Nll,
                Self::Accuracy
                | Self::TopK(_)
                | Self::LogLoss
                | Self::Perplexity
                | Self::F1
                | Self::ConfusionMatrix,
            )
            | (Loss::Mse, Self::Mae | Self::Mse | Self::Rmse)
            | (Loss::BceWithLogits, Self::Accuracy | Self::LogLoss | Self::Mae | Self::Auc | Self::F1) => {
                None
            }
            (Loss::CrossEntropy | Loss::Nll, Self::Mae) => Some((VALUES, Self::Accuracy)),
            (Loss::CrossEntropy | Loss::Nll, Self::Mse | Self::Rmse) => Some((VALUES, Self::LogLoss)),
            (Loss::CrossEntropy | Loss::Nll, Self::Auc) => {
                Some(("needs binary labels; this loss has class labels", Self::F1))
            }
            (Loss::Mse, Self::LogLoss | Self::Perplexity) => {
                Some(("needs probabilities; this loss compares values", Self::Mse))
            }
            (Loss::Mse, Self::Auc) => Some(("needs binary labels; this loss compares values", Self::Mae)),
            (Loss::Mse, _) => Some((CLASSES, Self::Mae)),
            (Loss::BceWithLogits, Self::Mse | Self::Rmse) => {
                Some(("compares values; the outputs for this loss are logits", Self::LogLoss))
            }
            (Loss::BceWithLogits, Self::TopK(_)) => {
                Some(("needs classes; this loss has binary labels", Self::Accuracy))
            }
            (Loss::BceWithLogits, Self::Perplexity) => {
                Some(("needs classes; this loss has binary labels", Self::LogLoss))
            }
            (Loss::BceWithLogits, Self::ConfusionMatrix) => {
                Some(("needs classes; this loss has binary labels", Self::F1))
            }
        }
    }

    /// Returns the value of a merged tally. `None`: the value is no number, but a matrix.
    ///
    /// NaN stands for a value that does not exist: an output was NaN, no label counted, or `auc`
    /// saw only positive or only negative labels.
    pub fn value(self, tally: &Tally) -> Option<f64> {
        let value = match (self, tally) {
            (Self::ConfusionMatrix, _) => return None,
            (Self::Perplexity, tally) => libm::exp(tally.mean()),
            (Self::Rmse, tally) => tally.mean().sqrt(),
            (_, Tally::Classes(classes)) => tally::f1(classes),
            (_, Tally::Scores(scores)) => scores.auc(),
            (_, tally) => tally.mean(),
        };
        Some(value)
    }

    /// Returns whether tallies of this metric are of this kind.
    pub const fn takes(self, tally: &Tally) -> bool {
        match self {
            Self::F1 => matches!(tally, Tally::Classes(_) | Tally::Undefined),
            Self::ConfusionMatrix => matches!(tally, Tally::Confusion(_) | Tally::Undefined),
            Self::Auc => matches!(tally, Tally::Scores(_) | Tally::Undefined),
            _ => matches!(tally, Tally::Mean { .. }),
        }
    }
}

impl fmt::Display for Metric {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Accuracy => "accuracy",
            Self::TopK(k) => return write!(f, "top{k}"),
            Self::LogLoss => "log_loss",
            Self::Perplexity => "perplexity",
            Self::Mae => "mae",
            Self::Mse => "mse",
            Self::Rmse => "rmse",
            Self::Auc => "auc",
            Self::F1 => "f1",
            Self::ConfusionMatrix => "confusion_matrix",
        })
    }
}

impl From<Metric> for String {
    fn from(metric: Metric) -> Self {
        metric.to_string()
    }
}

impl FromStr for Metric {
    type Err = String;

    /// Reads a name. The message of an unknown name is worded like serde's, to which a hint is
    /// added.
    fn from_str(name: &str) -> Result<Self, String> {
        if let Some(metric) = Self::ALL.into_iter().find(|metric| metric.name() == name) {
            return Ok(metric);
        }
        if let Some(k) = name.strip_prefix("top") {
            let is_plain = !k.starts_with('0') && k.bytes().all(|digit| digit.is_ascii_digit());
            return match k.parse() {
                Ok(k @ 1..=TOP_MAX) if is_plain => Ok(Self::TopK(k)),
                _ => Err(format!(
                    "metric `{name}`: expected `top` and a number from 1 to {TOP_MAX}, such as `top5`"
                )),
            };
        }
        let known: Vec<_> = Self::ALL.iter().map(|metric| format!("`{metric}`")).collect();
        Err(format!("unknown variant `{name}`, expected one of {}", known.join(", ")))
    }
}

impl TryFrom<String> for Metric {
    type Error = String;

    fn try_from(name: String) -> Result<Self, String> {
        name.parse()
    }
}

#[cfg(test)]
mod tests;
