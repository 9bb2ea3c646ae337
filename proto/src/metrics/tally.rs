//! What is counted for one metric, and how two counts become one.

use std::collections::BTreeMap;

use super::{Metric, Scores};
use crate::error::{Error, Result};

/// Most classes of `f1`, so that a report fits into a message.
pub const F1_CLASSES_MAX: usize = 1 << 18;

/// Most classes of `confusion_matrix`, so that the matrix fits into a job's status.
pub const CONFUSION_CLASSES_MAX: usize = 256;

/// Tallies of an evaluation by metric.
pub type Tallies = BTreeMap<Metric, Tally>;

/// What a worker counted for one metric.
#[derive(Clone, Debug, PartialEq)]
pub enum Tally {
    /// Sum over labels or records, and their number. A sum of whole numbers below 2^53 is exact.
    Mean {
        /// Sum of what is averaged. NaN if an output was.
        sum: f64,
        /// Number of terms.
        count: u64,
    },
    /// Counts of each class, or of the positive label alone.
    Classes(Vec<ClassCounts>),
    /// Counts of each pair of classes.
    Confusion(Confusion),
    /// Counts of each score.
    Scores(Scores),
    /// Nothing: an output was NaN, so counts have no meaning.
    Undefined,
}

/// Numbers of labels and predictions of one class.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ClassCounts {
    /// Number of labels of this class whose prediction is right.
    pub right: u64,
    /// Number of predictions of this class.
    pub predicted: u64,
    /// Number of labels of this class.
    pub labelled: u64,
}

/// Number of labels for each pair of class and predicted class.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Confusion {
    classes: usize,
    /// Counts `[class, predicted class]`, row-major.
    counts: Vec<u64>,
}

impl Confusion {
    /// Creates a matrix of zeros.
    ///
    /// # Errors
    /// [`Error::TooManyClasses`]: more than [`CONFUSION_CLASSES_MAX`].
    pub fn new(classes: usize) -> Result<Self> {
        check_classes(Metric::ConfusionMatrix, classes, CONFUSION_CLASSES_MAX)?;
        Ok(Self { classes, counts: vec![0; classes * classes] })
    }

    /// Returns the number of classes.
    pub const fn classes(&self) -> usize {
        self.classes
    }

    /// Adds `labels` labels of `class` that were predicted as `predicted`. Returns whether both
    /// classes exist.
    pub fn add(&mut self, class: usize, predicted: usize, labels: u64) -> bool {
        let exist = class < self.classes && predicted < self.classes;
        if exist {
            let count = &mut self.counts[class * self.classes + predicted];
            *count = count.saturating_add(labels);
        }
        exist
    }

    /// Returns the rows, one for each class of labels. Element j counts predictions of class j.
    pub fn rows(&self) -> impl ExactSizeIterator<Item = &[u64]> {
        self.counts.chunks_exact(self.classes.max(1))
    }

    /// Returns all pairs that occur: class, predicted class, number of labels.
    pub fn cells(&self) -> impl Iterator<Item = (usize, usize, u64)> {
        let cells = self.counts.iter().enumerate().filter(|(_, labels)| **labels > 0);
        cells.map(move |(at, &labels)| (at / self.classes, at % self.classes, labels))
    }
}

impl Tally {
    /// Creates the counts of classes for `f1`, all 0.
    ///
    /// # Errors
    /// [`Error::TooManyClasses`]: more than [`F1_CLASSES_MAX`].
    pub fn of_classes(classes: usize) -> Result<Self> {
        check_classes(Metric::F1, classes, F1_CLASSES_MAX)?;
        Ok(Self::Classes(vec![ClassCounts::default(); classes]))
    }

    /// Returns whether the result of merging depends on the order, because it rounds.
    pub const fn is_ordered(&self) -> bool {
        matches!(self, Self::Mean { .. })
    }

    /// Returns the mean; NaN if nothing counted.
    pub fn mean(&self) -> f64 {
        match *self {
            Self::Mean { sum, count } => sum / count as f64,
            _ => f64::NAN,
        }
    }

    /// Checks that the tallies of `metric` of two workers belong together.
    ///
    /// # Errors
    /// [`Error::Tally`]: their kinds or numbers of classes differ.
    pub fn check(&self, metric: Metric, other: &Self) -> Result<()> {
        let fits = match (self, other) {
            (Self::Classes(one), Self::Classes(other)) => one.len() == other.len(),
            (Self::Confusion(one), Self::Confusion(other)) => one.classes == other.classes,
            (one, other) => metric.takes(one) && metric.takes(other),
        };
        if fits {
            return Ok(());
        }
        Err(Error::Tally { metric, expected: self.describe(), found: other.describe() })
    }

    /// Adds what another tally of `metric` counted. Nothing can be added to undefined counts.
    ///
    /// # Errors
    /// Those of [`check`](Self::check), and [`Error::TooManyScores`].
    pub fn merge(&mut self, metric: Metric, other: Self) -> Result<()> {
        self.check(metric, &other)?;
        match (&mut *self, other) {
            (Self::Mean { sum, count }, Self::Mean { sum: next, count: terms }) => {
                *sum += next;
                *count = count.saturating_add(terms);
            }
            (Self::Classes(classes), Self::Classes(others)) => {
                classes.iter_mut().zip(&others).for_each(|(counts, other)| counts.add(other));
            }
            (Self::Confusion(matrix), Self::Confusion(other)) => {
                let pairs = matrix.counts.iter_mut().zip(&other.counts);
                pairs.for_each(|(count, other)| *count = count.saturating_add(*other));
            }
            (Self::Scores(scores), Self::Scores(others)) => scores.merge(others)?,
            _ => *self = Self::Undefined,
        }
        Ok(())
    }

    /// Returns the kind and the number of classes, for errors.
    pub(crate) fn describe(&self) -> String {
        match self {
            Self::Mean { .. } => "a mean".to_owned(),
            Self::Classes(classes) => format!("counts of {} classes", classes.len()),
            Self::Confusion(matrix) => format!("a matrix of {} classes", matrix.classes),
            Self::Scores(_) => "scores".to_owned(),
            Self::Undefined => "undefined counts".to_owned(),
        }
    }
}

impl ClassCounts {
    fn add(&mut self, other: &Self) {
        self.right = self.right.saturating_add(other.right);
        self.predicted = self.predicted.saturating_add(other.predicted);
        self.labelled = self.labelled.saturating_add(other.labelled);
    }

    /// Returns the harmonic mean of precision and recall. `None`: the class occurs neither among
    /// the labels nor among the predictions.
    fn f1(&self) -> Option<f64> {
        let both = self.predicted.saturating_add(self.labelled);
        (both > 0).then(|| 2.0 * self.right as f64 / both as f64)
    }
}

/// Returns the mean F1 over the classes that occur. One class alone is the positive label, and has
/// 0 if it does not occur, as in scikit-learn. NaN if none of several classes occurs.
pub(super) fn f1(classes: &[ClassCounts]) -> f64 {
    if let [positive] = classes {
        return positive.f1().unwrap_or(0.0);
    }
    let of_each = || classes.iter().filter_map(ClassCounts::f1);
    of_each().sum::<f64>() / of_each().count() as f64
}

/// Checks the number of classes of a metric.
pub(super) fn check_classes(metric: Metric, classes: usize, max: usize) -> Result<()> {
    if classes > max { Err(Error::TooManyClasses { metric, classes, max }) } else { Ok(()) }
}
