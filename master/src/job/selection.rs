//! The best version of a job that selects one, and its early end. The rule is
//! [`proto::selection`]; here the job follows it.
//!
//! ```text
//! measured v40 --> best stays v20 --> Unpin up to v40, but keep v20
//!                  |
//!                  v after `patience` of them
//!                  stopped: workers stop --> export v20
//! ```
//!
//! **Always true:** the best version is within reach. Every ps keeps it. After a loss, training
//! goes back to a checkpoint that is not newer, and comes to it again (ADR 31).

use proto::ids::Version;
use proto::pb;
use proto::pb::JobState;
use proto::selection::{Criterion, Selection};

use super::Job;
use super::end::{End, Salvage};
use super::evaluations::Measured;
use super::training::Training;
use crate::clock::Now;

impl Job {
    /// Returns the best version so far. `None`: the job selects none, or nothing is measured.
    pub(super) fn best(&self) -> Option<Version> {
        self.selection.as_ref().map(|selection| selection.best)
    }

    /// Returns whether training has stopped because nothing gets better.
    pub(super) fn is_stopped_early(&self) -> bool {
        self.selection.as_ref().is_some_and(|selection| selection.stops(self.spec.patience()))
    }

    /// Returns whether an evaluation is of a version after the one at which training stopped. It
    /// depends on the fleet how many of these there are, so nobody is told.
    pub(super) fn is_after_the_stop(&self, version: Version) -> bool {
        self.is_stopped_early() && self.selection.as_ref().is_some_and(|selection| version > selection.last)
    }

    /// Compares a measured version with the best one so far.
    pub(super) fn select(&mut self, measured: &Measured) {
        let Some(criterion) = self.spec.criterion() else { return };
        // A set of which every record is skipped has no metrics.
        let value = measured.value(&criterion.metric).unwrap_or(f64::NAN);
        match &mut self.selection {
            Some(selection) => selection.observe(measured.version, value),
            none => *none = Some(Selection::first(criterion, measured.version, value)),
        }
    }

    /// Ends the training when it is stopped early and the best version is there. Returns whether it
    /// is stopped.
    pub(super) fn maybe_stopped_early(&mut self, now: Now) -> bool {
        let Some(selection) = self.selection.as_ref().filter(|_| self.is_stopped_early()) else {
            return false;
        };
        let Selection { criterion: Criterion { metric, .. }, best, last, .. } = selection;
        let (metric, best, last) = (metric.clone(), *best, *last);
        // After a loss it may have to be trained again.
        let watermark = self.phase.trains().map(Training::watermark).unwrap_or_default();
        if watermark.get() >= best.get() {
            let reason = format!("stopped early at step {last}: {metric} is the best at step {best}");
            self.phase.decide(End { state: JobState::Succeeded, reason });
            self.stop_training(now, Salvage::Best(best));
        }
        true
    }

    /// Returns the best version for users, and for the journal.
    pub(super) fn selection_message(&self) -> Option<pb::Selection> {
        let selection = self.selection.as_ref()?;
        let Criterion { metric, larger, min_delta } = selection.criterion.clone();
        Some(pb::Selection {
            metric,
            larger,
            min_delta,
            best: selection.best.get(),
            value: selection.value(),
            last: selection.last.get(),
            waited: selection.waited,
            stopped: self.is_stopped_early(),
        })
    }
}

/// Returns the selection of a message that a master wrote.
pub(super) fn read(message: pb::Selection) -> Selection {
    let pb::Selection { metric, larger, min_delta, best, value, last, waited, .. } = message;
    Selection::of(Criterion { metric, larger, min_delta }, (Version(best), value), Version(last), waited)
}
