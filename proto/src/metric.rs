//! The metrics of an evaluation, and their names.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

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
