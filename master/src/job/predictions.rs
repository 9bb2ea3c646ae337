//! Predicting in parts that any workers take. Pure.
//!
//! ```text
//!   parts, any worker, any order  -->  Join, one worker  -->  Clear, when the journal has the join
//! ```
//!
//! Each part is a file whose name and bytes depend on its records alone. So whatever is done twice
//! leaves the same files, and nothing of the parts is written down. Parts are removed only after
//! the journal says that they are joined: from then on nobody predicts or joins them again.

use std::collections::BTreeSet;

use proto::pb;
use proto::predictions::{part_records, parts};
use proto::spec::{DataSet, JobSpec, PredictSpec, Purpose};
use store::location::Location;

use super::ending::{End, Salvage};
use super::phase::{Phase, Stage};
use super::work::{Part, Work};
use super::{Effect, Job};
use crate::clock::Now;

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
    fn join(&self, spec: &PredictSpec) -> Work {
        Work::Join { records: self.records, keep: self.bytes > spec.join_bytes_max }
    }
}

/// What is done with the parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Delivery {
    /// They are joined into one file and can be removed.
    Joined,
    /// They stay, and their manifest is written.
    Kept,
}

impl Delivery {
    /// Returns what a journal has. `None`: nothing is done.
    pub(super) const fn of(recorded: pb::Delivery) -> Option<Self> {
        match recorded {
            pb::Delivery::Open => None,
            pb::Delivery::Joined => Some(Self::Joined),
            pb::Delivery::Kept => Some(Self::Kept),
        }
    }

    /// Returns the form in which a journal has it.
    pub(super) fn recorded(delivery: Option<Self>) -> pb::Delivery {
        match delivery {
            None => pb::Delivery::Open,
            Some(Self::Joined) => pb::Delivery::Joined,
            Some(Self::Kept) => pb::Delivery::Kept,
        }
    }

    /// Returns where the predictions are.
    pub(super) fn place(self, spec: &PredictSpec) -> String {
        match self {
            Self::Joined => spec.url.clone(),
            Self::Kept => {
                let folder = spec.place().0;
                let (folder, parts) = (folder.trim_end_matches('/'), spec.parts_folder());
                format!("{folder}/{parts}/{}", proto::predictions::MANIFEST)
            }
        }
    }
}

/// Returns whether a job predicts.
pub(super) fn predicts(spec: &JobSpec) -> Option<&PredictSpec> {
    spec.predict.as_ref().filter(|_| spec.purpose == Purpose::Predict)
}

impl Job {
    /// Returns whether a job would write its predictions to the file of this one.
    pub(crate) fn predicts_like(&self, other: &JobSpec) -> bool {
        let place = |spec: &JobSpec| Location::of(&predicts(spec)?.url).ok();
        place(&self.spec).is_some_and(|ours| place(other) == Some(ours))
    }

    /// Hands out the join of all parts, which are written.
    pub(super) fn join(&mut self, now: Now) {
        let predictions = self.phase.training().and_then(|training| training.predictions.as_ref());
        let (Some(spec), Some(predictions)) = (predicts(&self.spec), predictions) else { return };
        let (work, records) = (predictions.join(spec), predictions.records_done());
        self.phase
            .decide(End { state: pb::JobState::Succeeded, reason: format!("predicted {records} records") });
        self.queue.push(work);
        self.phase.set_end(Stage::Exporting);
        self.tell_state(now);
    }

    /// Records that the parts are joined, or have their manifest. What follows waits until that is
    /// written down.
    pub(super) fn on_joined(&mut self, now: Now, keep: bool) {
        self.delivery = Some(if keep { Delivery::Kept } else { Delivery::Joined });
        self.changed = true;
        self.effects.push(Effect::Clear);
        self.tell_state(now);
    }

    /// Records that the journal knows what is done with the parts: those that are joined are
    /// removed.
    pub(crate) fn clear(&mut self, now: Now) {
        if matches!(self.phase.ends(), Some(Stage::Exporting)) {
            self.conclude(now);
        }
    }

    /// Ends a job whose result is delivered.
    pub(super) fn conclude(&mut self, now: Now) {
        match self.delivery {
            Some(Delivery::Joined) if self.queue.is_empty() => {
                self.queue.push(Work::Clear);
                self.phase.set_end(Stage::Exporting);
                self.tell_state(now);
            }
            Some(Delivery::Joined) => {}
            Some(Delivery::Kept) => self.finish(now),
            None => self.save_last(now),
        }
    }

    /// Ends a job that does not train once all its records are done.
    pub(super) fn maybe_measured_out(&mut self, now: Now) {
        if !matches!(self.phase, Phase::Training { .. }) {
            return;
        }
        if predicts(&self.spec).is_some() {
            return self.join(now);
        }
        let records = self.phase.facts().map_or(0, |facts| facts.measured(&self.spec));
        let records = records.saturating_sub(self.skips.records(DataSet::Validation).len() as u64);
        let reason = format!("evaluated {records} records");
        self.stop(now, End { state: pb::JobState::Succeeded, reason }, Salvage::Nothing);
    }

    /// Ends a job whose result is delivered, when a ps is lost or the rest cannot be done. Parts
    /// that are joined may stay.
    pub(super) fn end_without_ps(&mut self, now: Now) {
        if self.delivery == Some(Delivery::Joined)
            && let Some(predict) = predicts(&self.spec)
        {
            let folder = predict.parts_folder();
            self.warn(now, format!("the predictions are whole; remove `{folder}` beside them by hand"));
        }
        self.finish(now);
    }
}

#[cfg(test)]
mod tests {
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
        assert_eq!(Delivery::Joined.place(&spec), "/out/p.npy");
        assert_eq!(Delivery::Kept.place(&spec), "/out/p.npy.parts/manifest.json");
    }
}
