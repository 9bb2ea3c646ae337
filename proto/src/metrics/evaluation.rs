//! The measurements of records, from one batch up to a whole evaluation.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

use super::sums;
use super::{Confusion, Metric, Sums, Tallies, Tally};
use crate::error::{Error, Result};

/// Measurements of records.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Evaluation {
    /// Number of measured records.
    pub samples: u64,
    /// Sum of the records' losses.
    pub loss_sum: f64,
    /// Tallies of the job's metrics.
    pub tallies: Tallies,
    /// Sums of a program's own metrics.
    pub sums: Sums,
}

impl Evaluation {
    /// Adds the measurements of the records that come next.
    ///
    /// # Errors
    /// Tallies of a metric or sums do not belong together, or there are too many scores.
    pub fn merge(&mut self, next: Self) -> Result<()> {
        self.samples = self.samples.saturating_add(next.samples);
        self.loss_sum += next.loss_sum;
        sums::merge(&mut self.sums, next.sums)?;
        merge(&mut self.tallies, next.tallies)
    }

    /// Checks that there is a fitting tally for each of the job's metrics.
    ///
    /// # Errors
    /// [`Error::Tally`]: one is missing, or of another kind.
    pub fn check(&self, metrics: &[Metric]) -> Result<()> {
        for &metric in metrics {
            let tally = self.tallies.get(&metric);
            if !tally.is_some_and(|tally| metric.takes(tally)) {
                let found = tally.map_or_else(|| "none".to_owned(), Tally::describe);
                return Err(Error::Tally { metric, expected: "a tally of its kind".to_owned(), found });
            }
        }
        Ok(())
    }

    /// Returns the loss and the metrics that are numbers, by name.
    pub fn values(&self) -> BTreeMap<String, f64> {
        let value = |(metric, tally): (&Metric, &Tally)| Some((metric.name(), metric.value(tally)?));
        let mut values: BTreeMap<_, _> = self.tallies.iter().filter_map(value).collect();
        values.extend(self.sums.iter().filter_map(|(name, sum)| Some((name.clone(), sum.mean()?))));
        values.insert("loss".to_owned(), self.loss_sum / self.samples as f64);
        values
    }

    /// Returns the confusion matrix, if it is a metric of the job and no output was NaN.
    pub fn confusion(&self) -> Option<&Confusion> {
        match self.tallies.get(&Metric::ConfusionMatrix) {
            Some(Tally::Confusion(matrix)) => Some(matrix),
            _ => None,
        }
    }
}

fn merge(into: &mut Tallies, from: Tallies) -> Result<()> {
    for (metric, tally) in from {
        match into.entry(metric) {
            Entry::Vacant(place) => {
                place.insert(tally);
            }
            Entry::Occupied(mut place) => place.get_mut().merge(metric, tally)?,
        }
    }
    Ok(())
}

/// Merges the measurements of data shards that arrive in any order, with the same bits for every
/// order.
#[derive(Debug)]
pub struct Merger {
    /// What must be added in order of each data shard: samples, losses, means, and the sums of the
    /// shards from `added` on.
    shards: Vec<Option<Evaluation>>,
    /// Sums of the shards before `added`, which may be large.
    sums: Sums,
    added: usize,
    /// Sums of one shard, which show the names and sizes of all.
    shape: Sums,
    /// Number of shards without measurements.
    missing: usize,
    /// Tallies that merge exactly.
    exact: Tallies,
}

impl Merger {
    /// Creates the merger of this many data shards.
    pub fn new(shards: usize) -> Self {
        Self {
            shards: vec![None; shards],
            sums: Sums::new(),
            added: 0,
            shape: Sums::new(),
            missing: shards,
            exact: Tallies::new(),
        }
    }

    /// Returns whether all data shards are measured.
    pub const fn is_complete(&self) -> bool {
        self.missing == 0
    }

    /// Returns whether a data shard is not measured yet.
    pub fn lacks(&self, shard: usize) -> bool {
        self.shards.get(shard).is_some_and(Option::is_none)
    }

    /// Checks that the measurements of a data shard belong to those of the others.
    ///
    /// # Errors
    /// [`Error::Tally`]: the kinds of a metric's tallies, or their numbers of classes, differ.
    /// [`Error::Field`]: names or sizes of sums differ.
    pub fn check(&self, found: &Evaluation) -> Result<()> {
        sums::check_together(&self.shape, &found.sums)?;
        let both = found
            .tallies
            .iter()
            .filter_map(|(&metric, tally)| Some((metric, self.exact.get(&metric)?, tally)));
        both.into_iter().try_for_each(|(metric, merged, tally)| merged.check(metric, tally))
    }

    /// Takes the measurements of one data shard. The first ones count; a shard that does not exist
    /// has none.
    ///
    /// # Errors
    /// Those of [`check`](Self::check), and [`Error::TooManyScores`].
    pub fn add(&mut self, shard: usize, found: Evaluation) -> Result<()> {
        self.check(&found)?;
        let Some(place) = self.shards.get_mut(shard).filter(|place| place.is_none()) else { return Ok(()) };
        let (ordered, exact) = found.tallies.into_iter().partition(|(_, tally)| tally.is_ordered());
        if self.shape.is_empty() {
            self.shape = found.sums.clone();
        }
        *place = Some(Evaluation { tallies: ordered, ..found });
        self.missing -= 1;
        while let Some(Some(next)) = self.shards.get_mut(self.added) {
            sums::merge(&mut self.sums, std::mem::take(&mut next.sums))?;
            self.added += 1;
        }
        merge(&mut self.exact, exact)
    }

    /// Returns the measurements of all data shards.
    ///
    /// # Errors
    /// [`Error::TooManyScores`].
    pub fn finish(self) -> Result<Evaluation> {
        let mut whole = Evaluation::default();
        for shard in self.shards.into_iter().flatten() {
            whole.merge(shard)?;
        }
        whole.tallies.extend(self.exact);
        whole.sums = self.sums;
        for tally in whole.tallies.values_mut() {
            if let Tally::Scores(scores) = tally {
                scores.finish()?;
            }
        }
        Ok(whole)
    }
}
