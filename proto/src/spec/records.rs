//! The records of each data set.
//!
//! Every process computes them from the specification and the files' record counts, so that
//! "validation record 17" is the same record everywhere. First, `records = [begin, end)` cuts the
//! files' records, counted over all files in order. Then `validation_fraction`, where given, draws
//! some of the training files' records for validation.

use std::ops::Range;

use super::{DataSet, DataSpec};
use crate::error::{Error, Result};
use crate::plan::RecordOrder;

/// The records of one data set, numbered from 0.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Records {
    /// Records cut from the files, in increasing order. Only one if there is an `order`.
    cuts: Vec<Range<u64>>,
    /// Ranks of this set within the cuts.
    ranks: Range<u64>,
    /// Order to which the ranks belong. `None`: the order of the files.
    order: Option<RecordOrder>,
}

impl Records {
    /// Returns the number of records.
    pub const fn len(&self) -> u64 {
        self.ranks.end - self.ranks.start
    }

    /// Returns false: [`DataSpec::records`] refuses empty sets.
    pub const fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the number of the set's record `index` over the records of all files, in order.
    ///
    /// # Panics
    /// If the set has no such record.
    pub fn in_files(&self, index: u64) -> u64 {
        assert!(index < self.len(), "record {index} of {}", self.len());
        let rank = self.ranks.start + index;
        let mut at = self.order.map_or(rank, |order| order.record(rank));
        for cut in &self.cuts {
            let length = cut.end - cut.start;
            if at < length {
                return cut.start + at;
            }
            at -= length;
        }
        unreachable!("record {index} of {} lies in no cut of {:?}", self.len(), self.cuts)
    }
}

impl DataSpec {
    /// Returns the data set whose files hold the records of `set`: itself, or the training set when
    /// a fraction of that validates.
    pub fn files_of(&self, set: DataSet) -> Option<DataSet> {
        match set {
            DataSet::Train => Some(DataSet::Train),
            DataSet::Validation if self.validation_fraction.is_some() => Some(DataSet::Train),
            DataSet::Validation => self.validates().then_some(DataSet::Validation),
        }
    }

    /// Returns the records of `set`, or `None` if the job has no such set. `in_files` are the
    /// numbers of records in each file of [`files_of`](Self::files_of), in order.
    ///
    /// `round(n * validation_fraction)` of n records validate, at least 1 and at most n - 1. They
    /// have the highest ranks in [`RecordOrder::split`].
    ///
    /// # Errors
    /// The files have no records, or fewer than `records = [begin, end)` or the fraction needs.
    pub fn records(&self, set: DataSet, in_files: &[u64], seed: u64) -> Result<Option<Records>> {
        let found = in_files.iter().fold(0u64, |sum, &records| sum.saturating_add(records));
        let cuts = match self.files_of(set) {
            None => return Ok(None),
            Some(DataSet::Train) => self.train.cut("data.train", found).map(|cut| vec![cut]),
            Some(DataSet::Validation) => self.validation_cuts(in_files),
        };
        let cuts = match cuts {
            Ok(cuts) => cuts,
            Err(message) => return wrong(message),
        };
        let all: u64 = cuts.iter().map(|cut| cut.end - cut.start).sum();
        let Some(fraction) = self.validation_fraction else {
            return Ok(Some(Records { cuts, ranks: 0..all, order: None }));
        };
        if all < 2 {
            return wrong(
                "data.validation_fraction: data.train has 1 record, which cannot both train and validate; add records"
                    .to_owned(),
            );
        }
        let validate = ((all as f64 * fraction).round() as u64).clamp(1, all - 1);
        let ranks = match set {
            DataSet::Train => 0..all - validate,
            DataSet::Validation => all - validate..all,
        };
        Ok(Some(Records { cuts, ranks, order: Some(RecordOrder::split(all, seed)) }))
    }
}

impl Records {
    /// Returns how many of these records lie in each file, in order. A set that a fraction was
    /// drawn from counts as one file, because its records lie anywhere.
    pub fn shards(&self, in_files: &[u64]) -> Vec<u64> {
        if self.order.is_some() {
            return vec![self.len()];
        }
        let mut begin = 0u64;
        let inside = in_files.iter().map(|&records| {
            let file = begin..begin.saturating_add(records);
            begin = file.end;
            let inside = |cut: &Range<u64>| file.end.min(cut.end).saturating_sub(file.start.max(cut.start));
            self.cuts.iter().map(inside).sum::<u64>()
        });
        inside.collect()
    }
}

fn wrong(message: String) -> Result<Option<Records>> {
    Err(Error::Invalid(vec![message]))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    fn spec(extra: &str) -> DataSpec {
        let train = r#"format = "csv"
            train = { features = ["a.csv", "b.csv"], records = [2, 12] }
        "#;
        toml::from_str(&format!("{train}{extra}")).unwrap()
    }

    fn all(records: &Records) -> Vec<u64> {
        (0..records.len()).map(|index| records.in_files(index)).collect()
    }

    #[test]
    fn a_range_cuts_the_records_of_all_files() {
        let records = spec("").records(DataSet::Train, &[5, 9], 3).unwrap().unwrap();
        assert_eq!(all(&records), (2..12).collect::<Vec<_>>());
        assert_eq!(spec("").records(DataSet::Validation, &[5, 9], 3).unwrap(), None);
    }

    #[test]
    fn a_range_takes_a_part_of_each_file() {
        let records = spec("").records(DataSet::Train, &[5, 0, 9], 3).unwrap().unwrap();
        assert_eq!(records.shards(&[5, 0, 9]), [3, 0, 7]);
        assert_eq!(records.shards(&[5, 0, 9]).iter().sum::<u64>(), records.len());
        let mut fraction = spec("validation_fraction = 0.5");
        fraction.train.records = None;
        let records = fraction.records(DataSet::Train, &[5, 9], 3).unwrap().unwrap();
        assert_eq!(records.shards(&[5, 9]), [7]);
    }

    #[test]
    fn own_validation_files_are_used_whole() {
        let spec = spec(r#"validation = { features = ["c.csv"] }"#);
        assert_eq!(spec.files_of(DataSet::Validation), Some(DataSet::Validation));
        let records = spec.records(DataSet::Validation, &[4], 3).unwrap().unwrap();
        assert_eq!(all(&records), [0, 1, 2, 3]);
    }

    #[test]
    fn a_set_that_cannot_be_filled_is_refused_with_its_counts() {
        let message = spec("").records(DataSet::Train, &[5, 6], 0).unwrap_err().to_string();
        assert!(message.contains("data.train.records = [2, 12]: the files have 11 records"), "{message}");
        let spec: DataSpec = toml::from_str(
            r#"train = { features = ["a"] }
            format = "csv"
            validation_fraction = 0.5"#,
        )
        .unwrap();
        for (records, expected) in [(0, "no records"), (1, "has 1 record")] {
            let message = spec.records(DataSet::Validation, &[records], 0).unwrap_err().to_string();
            assert!(message.contains(expected), "{message}");
        }
    }

    proptest! {
        #[test]
        fn a_fraction_parts_the_cut_in_two(n in 2u64..500, fraction in 0.001f64..0.999, seed in any::<u64>()) {
            let mut spec = spec("");
            spec.validation_fraction = Some(fraction);
            spec.train.records = Some((7, 7 + n));
            let train = spec.records(DataSet::Train, &[n, 7], seed).unwrap().unwrap();
            let validation = spec.records(DataSet::Validation, &[n, 7], seed).unwrap().unwrap();
            let expected = ((n as f64 * fraction).round() as u64).clamp(1, n - 1);
            prop_assert_eq!((train.len(), validation.len()), (n - expected, expected));
            let union: BTreeSet<u64> = all(&train).into_iter().chain(all(&validation)).collect();
            prop_assert_eq!(union, (7..7 + n).collect::<BTreeSet<_>>());
        }
    }
}
