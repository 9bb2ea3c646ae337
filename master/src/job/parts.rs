//! The parts of a job that predicts: which are written. Pure.

use std::collections::BTreeSet;

use proto::pb;
use proto::predictions::{part_records, parts};
use proto::spec::PredictSpec;

use super::work::{Part, Work};

/// The parts of a job that predicts.
#[derive(Debug)]
pub(super) struct Predictions {
    records: u64,
    /// Parts were handed to the queue.
    begun: bool,
    /// First records of the parts that are written.
    written: BTreeSet<u64>,
    records_done: u64,
    bytes: u64,
}

impl Predictions {
    /// Creates the predictions of so many records, at least 1.
    pub(super) const fn new(records: u64) -> Self {
        Self { records, begun: false, written: BTreeSet::new(), records_done: 0, bytes: 0 }
    }

    /// Returns the parts to predict, once.
    pub(super) fn begin(&mut self) -> Vec<Part> {
        if std::mem::replace(&mut self.begun, true) {
            return Vec::new();
        }
        parts(self.records).map(|range| Part { begin: range.start, end: range.end }).collect()
    }

    /// Takes a worker's answer.
    ///
    /// # Errors
    /// It is not about this part.
    pub(super) fn record(&mut self, part: Part, found: &pb::Predicted) -> Result<(), String> {
        let records = part.end - part.begin;
        if found.samples != records {
            return Err(format!("Predicted.samples: expected {records}, found {}", found.samples));
        }
        if self.written.insert(part.begin) {
            self.records_done += records;
            self.bytes = self.bytes.saturating_add(found.bytes);
        }
        Ok(())
    }

    /// Returns whether all parts are written.
    pub(super) fn are_done(&self) -> bool {
        self.written.len() as u64 == self.records.div_ceil(part_records(self.records))
    }

    /// Returns the number of records in the parts that are written.
    pub(super) const fn records_done(&self) -> u64 {
        self.records_done
    }

    /// Returns the work that follows all parts: they are joined, unless they are larger together
    /// than the job's limit.
    pub(super) fn join(&self, spec: &PredictSpec) -> Work {
        Work::Join { records: self.records, keep: self.bytes > spec.join_bytes_max }
    }
}

#[cfg(test)]
mod tests {
    use proto::spec::DataSet;

    use super::*;

    fn predicted(part: Part, bytes: u64) -> pb::Predicted {
        pb::Predicted { samples: part.end - part.begin, bytes }
    }

    #[test]
    fn every_record_is_in_one_part_and_the_last_answer_completes_them() {
        let mut predictions = Predictions::new(600);
        let parts = predictions.begin();
        let ranges: Vec<_> = parts.iter().map(|part| (part.begin, part.end)).collect();
        assert_eq!(ranges, [(0, 256), (256, 512), (512, 600)]);
        assert!(predictions.begin().is_empty(), "they are handed out once");
        for part in [parts[2], parts[0], parts[2]] {
            predictions.record(part, &predicted(part, 10)).unwrap();
            assert!(!predictions.are_done());
        }
        assert_eq!(predictions.records_done(), 344);
        predictions.record(parts[1], &predicted(parts[1], 10)).unwrap();
        assert!(predictions.are_done());
    }

    #[test]
    fn an_answer_about_other_records_is_refused() {
        let mut predictions = Predictions::new(10);
        let part = predictions.begin()[0];
        let refused = predictions.record(part, &pb::Predicted { samples: 9, bytes: 1 }).unwrap_err();
        assert!(refused.contains("expected 10, found 9"), "{refused}");
        assert!(!predictions.are_done());
    }

    #[test]
    fn parts_beyond_the_limit_stay() {
        let mut spec = PredictSpec::new(DataSet::Validation, "/out/p.npy".to_owned());
        spec.join_bytes_max = 20;
        let mut predictions = Predictions::new(512);
        for part in predictions.begin() {
            predictions.record(part, &predicted(part, 10)).unwrap();
        }
        assert_eq!(predictions.join(&spec), Work::Join { records: 512, keep: false });
        spec.join_bytes_max = 19;
        assert_eq!(predictions.join(&spec), Work::Join { records: 512, keep: true });
    }
}
