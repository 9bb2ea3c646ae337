//! Predicting in parts that any workers take. Pure.
//!
//! ```text
//!   parts, any worker, any order  -->  Join, one worker  -->  Clear, when the journal has the join
//! ```
//!
//! Each part is a file whose name and bytes depend on its records alone. So whatever is done twice
//! leaves the same files, and nothing of the parts is written down. Parts are removed only after
//! the journal says that they are joined: from then on nobody predicts or joins them again.

use proto::pb;
use proto::spec::{DataSet, JobSpec, PredictSpec, Purpose};
use store::location::Location;

use super::end::{End, Salvage};
use super::phase::{Phase, Stage};
use super::work::Work;
use super::{Effect, Job};
use crate::clock::Now;

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

    #[test]
    fn predictions_are_in_their_file_or_parts_beside_it() {
        let spec = PredictSpec::new(DataSet::Validation, "/out/p.npy".to_owned());
        assert_eq!(Delivery::Joined.place(&spec), "/out/p.npy");
        assert_eq!(Delivery::Kept.place(&spec), "/out/p.npy.parts/manifest.json");
    }
}
