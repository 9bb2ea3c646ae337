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
mod sums;
mod tally;

pub use self::evaluation::{Evaluation, Merger};
pub use self::scores::{REPORT_SCORES_MAX, SCORES_MAX, ScoreCounts, Scores};
pub use self::sums::{SUMS_MAX, Sum, Sums, check as check_sums};
pub use self::tally::{CONFUSION_CLASSES_MAX, ClassCounts, Confusion, F1_CLASSES_MAX, Tallies, Tally};
pub use crate::metric::{Metric, TOP_MAX};
use crate::spec::Loss;

impl Metric {
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

#[cfg(test)]
mod tests;
