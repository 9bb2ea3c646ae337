//! Scores of positive and negative labels, from which the area under the ROC curve is exact.
//!
//! A table has one row for each distinct score, in ascending order:
//!
//! ```text
//! score  positives  negatives
//!  -1.5          0          2
//!   0.5          1          1
//!   2.0          3          0
//! ```
//!
//! Tables merge like sorted lists. [`Scores`] holds several tables, each at least twice as long as
//! the next one. So each row is copied a few times only, however many data shards come.

use std::borrow::Cow;
use std::cmp::Ordering;

use crate::error::{Error, Result};

/// Most distinct scores of one evaluation. A table of so many takes about 100 MB.
pub const SCORES_MAX: usize = 1 << 22;

/// Most distinct scores in one worker's report of a data shard, so that it fits into a message.
pub const REPORT_SCORES_MAX: usize = 1 << 18;

/// Number of labels whose output is one score.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ScoreCounts {
    /// Output of the model. Never NaN, and never -0.
    pub score: f32,
    /// Number of positive labels.
    pub positives: u64,
    /// Number of negative labels.
    pub negatives: u64,
}

/// Numbers of positive and negative labels for each distinct score.
#[derive(Clone, Debug, Default)]
pub struct Scores {
    /// Tables in ascending order of the scores, each at least twice as long as the next one.
    tables: Vec<Vec<ScoreCounts>>,
}

impl Scores {
    /// Counts scores, each with whether its label is positive. `None`: a score is NaN.
    pub fn count(scores: impl IntoIterator<Item = (f32, bool)>) -> Option<Self> {
        let row = |(score, positive): (f32, bool)| ScoreCounts {
            // The sum is 0 for -0, which is the same score, and all other values stay.
            score: score + 0.0,
            positives: u64::from(positive),
            negatives: u64::from(!positive),
        };
        let mut rows: Vec<_> = scores.into_iter().map(row).collect();
        if rows.iter().any(|row| row.score.is_nan()) {
            return None;
        }
        rows.sort_unstable_by(|a, b| a.score.total_cmp(&b.score));
        rows.dedup_by(|row, kept| kept.absorb(row));
        Some(Self::of(rows))
    }

    /// Takes a table. `None`: its scores do not ascend, or one of them is NaN.
    pub fn from_table(mut table: Vec<ScoreCounts>) -> Option<Self> {
        table.iter_mut().for_each(|row| row.score += 0.0);
        let is_sorted = table.windows(2).all(|pair| pair[0].score < pair[1].score);
        let is_number = table.iter().all(|row| !row.score.is_nan());
        (is_sorted && is_number).then(|| Self::of(table))
    }

    fn of(table: Vec<ScoreCounts>) -> Self {
        Self { tables: Some(table).filter(|table| !table.is_empty()).into_iter().collect() }
    }

    /// Adds the counts of `other`.
    ///
    /// # Errors
    /// [`Error::TooManyScores`]: there are more than [`SCORES_MAX`] distinct scores. Some sets
    /// above the limit are noticed by [`finish`](Self::finish) only.
    pub fn merge(&mut self, other: Self) -> Result<()> {
        for mut table in other.tables {
            while let Some(last) = self.tables.pop_if(|last| last.len() < 2 * table.len()) {
                table = merged(&last, &table);
            }
            let distinct = table.len();
            self.tables.push(table);
            check(distinct)?;
        }
        Ok(())
    }

    /// Makes one table of all.
    ///
    /// # Errors
    /// [`Error::TooManyScores`]: there are more than [`SCORES_MAX`] distinct scores.
    pub fn finish(&mut self) -> Result<()> {
        let mut whole = self.tables.pop().unwrap_or_default();
        while let Some(longer) = self.tables.pop() {
            whole = merged(&longer, &whole);
        }
        *self = Self::of(whole);
        check(self.tables.first().map_or(0, Vec::len))
    }

    /// Returns the counts in ascending order of the scores.
    pub fn table(&self) -> Cow<'_, [ScoreCounts]> {
        match self.tables.as_slice() {
            [] => Cow::Borrowed(&[]),
            [table] => Cow::Borrowed(table),
            [first, rest @ ..] => {
                Cow::Owned(rest.iter().fold(first.clone(), |table, next| merged(&table, next)))
            }
        }
    }

    /// Returns the area under the ROC curve, which is the Mann-Whitney statistic U over the number
    /// of pairs. Pairs of equal scores count half. NaN without a positive and a negative label.
    ///
    /// The counting is in integers, so the only rounding is that of the division.
    pub fn auc(&self) -> f64 {
        let (mut positives, mut negatives, mut twice) = (0u128, 0u128, 0u128);
        for row in &*self.table() {
            let below = 2 * negatives + u128::from(row.negatives);
            twice = twice.saturating_add(u128::from(row.positives).saturating_mul(below));
            positives += u128::from(row.positives);
            negatives += u128::from(row.negatives);
        }
        let pairs = positives.saturating_mul(negatives);
        if pairs == 0 { f64::NAN } else { twice as f64 / (2.0 * pairs as f64) }
    }
}

impl PartialEq for Scores {
    fn eq(&self, other: &Self) -> bool {
        self.table() == other.table()
    }
}

impl ScoreCounts {
    /// Adds a row of the same score. Returns whether it was the same.
    fn absorb(&mut self, row: &Self) -> bool {
        let same = self.score == row.score;
        if same {
            self.positives = self.positives.saturating_add(row.positives);
            self.negatives = self.negatives.saturating_add(row.negatives);
        }
        same
    }
}

/// Merges two tables into one.
fn merged(a: &[ScoreCounts], b: &[ScoreCounts]) -> Vec<ScoreCounts> {
    let (mut a, mut b) = (a.iter().copied().peekable(), b.iter().copied().peekable());
    let mut table = Vec::with_capacity(a.len() + b.len());
    while let (Some(left), Some(right)) = (a.peek_mut(), b.peek()) {
        match left.score.total_cmp(&right.score) {
            Ordering::Less => table.extend(a.next()),
            Ordering::Greater => table.extend(b.next()),
            Ordering::Equal => {
                left.absorb(right);
                b.next();
            }
        }
    }
    table.extend(a);
    table.extend(b);
    table
}

fn check(found: usize) -> Result<()> {
    if found > SCORES_MAX { Err(Error::TooManyScores { max: SCORES_MAX }) } else { Ok(()) }
}
