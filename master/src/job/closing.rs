//! Checkpoints that no arithmetic names: after so many seconds, and of where a job stands when it
//! ends. Pure.
//!
//! A checkpoint is of one version that every partition comes to. While training goes on, a version
//! a little ahead is asked for. A job that a user ends is *closed*: what is handed out is finished,
//! nothing more is handed out, so that all partitions come to rest at the same version, in arrival
//! order with the same ledger too, and that version is saved. So is a job of which a ps wants to
//! leave: what it holds goes with it, and whatever comes next goes on from that version.

use std::time::Duration;

use proto::ids::{IncarnationId, Step, Version};
use proto::pb::JobState;
use proto::status::Failure;

use super::checkpoints::Checkpoints;
use super::end::{End, Salvage};
use super::phase::{Model, Phase, Stage};
use super::{Effect, Job, Outcome};
use crate::clock::Now;
use crate::dispatcher::Dispatcher;
use crate::membership::Membership;

/// Longest wait at the end of a job for its last checkpoint. A store that fails is reported after a
/// quarter of a minute; this is for one that never answers, and for large models on slow ones.
const LAST: Duration = Duration::from_secs(120);

/// Longest wait for the steps that are begun, when a job is to be saved where it stands.
const CLOSE: Duration = Duration::from_secs(30);

/// A job that is saved where it stands, and ends then, or goes on when a ps that leaves has come
/// back.
#[derive(Clone, Copy, Debug)]
pub(super) struct Closing {
    /// Whether the job ends.
    ends: bool,
    /// All steps that were begun are below it.
    version: Version,
    until: Duration,
    /// The ps will save it.
    saves: bool,
}

impl Checkpoints {
    /// Asks for a checkpoint when the last one is old enough. `frontier`: no step from there on was
    /// handed out.
    fn maybe_ask(&mut self, now: Duration, model: &Model, frontier: Step) -> Vec<Outcome> {
        let Some(every) = self.spec.every_seconds.map(Duration::from_secs) else { return Vec::new() };
        let due = *self.due.get_or_insert(now + every);
        if due > now || self.closing.is_some() {
            return Vec::new();
        }
        let ahead = frontier.get() + self.margin;
        let version = Version(ahead).min(model.facts.plan.final_version());
        self.due = Some(now + every);
        vec![save(model, version)]
    }

    /// Records that the ps have answered whether a version is still to come.
    fn on_save_answered(
        &mut self,
        now: Duration,
        version: Version,
        coming: Result<bool, Failure>,
    ) -> Vec<Outcome> {
        if let Some(closing) = self.closing.as_mut().filter(|closing| closing.version == version) {
            closing.saves = coming == Ok(true);
            let failure = coming.err();
            let warning =
                |failure| Outcome::warning(format!("no checkpoint of version {version}: {failure}"));
            return failure.map(warning).into_iter().collect();
        }
        match coming {
            Ok(true) => self.margin = (self.margin / 2).max(1),
            // It was too near; the next look asks for a later one.
            Ok(false) => (self.margin, self.due) = ((self.margin * 2).min(1 << 10), Some(now)),
            Err(_) => {}
        }
        Vec::new()
    }

    /// Closes a training that ends. `None`: there is nothing to save.
    fn close(&mut self, now: Duration, model: &Model, books: &mut Dispatcher) -> Option<Vec<Outcome>> {
        let until = now + CLOSE;
        if let Some(closing) = &mut self.closing {
            if closing.version == Version(0) {
                return None;
            }
            // A ps is leaving: it is being saved already.
            (closing.ends, closing.until) = (true, until);
            return Some(Vec::new());
        }
        let version = Version(books.close().get());
        if version == Version(0) {
            return None;
        }
        self.closing = Some(Closing { ends: true, version, until, saves: true });
        Some(vec![save(model, version)])
    }

    /// Closes a training that goes on after a ps has left.
    fn hold(&mut self, now: Duration, model: &Model, books: &mut Dispatcher) -> Vec<Outcome> {
        let version = Version(books.close().get());
        let saves = version > self.begun && !self.is_settled(version);
        self.closing = Some(Closing { ends: false, version, until: now + CLOSE, saves });
        if saves { vec![save(model, version)] } else { Vec::new() }
    }
}

/// Returns the request to every ps to save a version.
fn save(model: &Model, version: Version) -> Outcome {
    Outcome::Effect(Effect::Save(model.partitions.reachable(), version))
}

impl Job {
    /// Records that time has passed.
    pub(super) fn on_checkpoint_tick(&mut self, now: Now) {
        self.maybe_ask(now);
        self.maybe_closed(now);
        self.maybe_saved(now);
        if matches!(self.phase.ends(), Some(Stage::Saving { until }) if *until <= now.since_start) {
            self.warn(
                now,
                format!("the last checkpoint was not complete within {LAST:?}; the job ends without it"),
            );
            self.finish(now);
        }
    }

    /// Asks for a checkpoint when the last one is old enough.
    fn maybe_ask(&mut self, now: Now) {
        if self.rests().is_some() {
            return;
        }
        let Some(frontier) = self.phase.trains().map(|training| training.books.frontier()) else { return };
        let Some((checkpoints, seen)) = self.checkpoints_seen() else { return };
        let effects = checkpoints.maybe_ask(now.since_start, seen.model, frontier);
        self.take_up(now, effects);
    }

    /// Records that the ps have answered whether a version is still to come.
    pub(crate) fn on_save_answered(&mut self, now: Now, version: Version, coming: Result<bool, Failure>) {
        let Some(checkpoints) = &mut self.checkpoints else { return };
        let effects = checkpoints.on_save_answered(now.since_start, version, coming);
        self.take_up(now, effects);
        self.maybe_saved(now);
    }

    /// Ends the job with a checkpoint of where it stands: what is begun is finished, and nothing
    /// more is begun. False when it has no checkpoints, or nothing to save.
    pub(super) fn close(&mut self, now: Now, end: &End) -> bool {
        let (Some(checkpoints), Phase::Training { model, training, .. }) =
            (&mut self.checkpoints, &mut self.phase)
        else {
            return false;
        };
        if checkpoints.closing.is_some_and(|closing| closing.ends) {
            return true;
        }
        let Some(effects) = checkpoints.close(now.since_start, model, &mut training.books) else {
            return false;
        };
        self.take_up(now, effects);
        self.phase.decide(end.clone());
        self.tell_state(now);
        self.maybe_closed(now);
        true
    }

    /// Saves the job where it stands when a ps with a part of its model wants to leave. It goes on
    /// when that part is somewhere again.
    pub(super) fn maybe_hold(&mut self, now: Now, fleet: &Membership) {
        let (Some(checkpoints), Phase::Training { model, training, .. }) =
            (&mut self.checkpoints, &mut self.phase)
        else {
            return;
        };
        if checkpoints.closing.is_some() || !model.partitions.is_left(fleet) {
            return;
        }
        let effects = checkpoints.hold(now.since_start, model, &mut training.books);
        self.take_up(now, effects);
        self.tell_state(now);
    }

    /// Returns whether a ps that wants to leave may do so: it has nothing of this job, or what it
    /// has is saved as far as it can be.
    pub(crate) fn lets_go(&self, ps: IncarnationId) -> bool {
        let needed = self.phase.partitions().is_some_and(|partitions| partitions.need(ps));
        let Some(checkpoints) = self.checkpoints.as_ref().filter(|_| needed && !self.is_ended()) else {
            return true;
        };
        let Some(closing) = checkpoints.closing.filter(|_| self.phase.trains().is_some()) else {
            // It will train soon, or ends; the ps does not wait for ever.
            return false;
        };
        !closing.ends
            && checkpoints.writing.is_none()
            && (!closing.saves || checkpoints.is_settled(closing.version))
    }

    /// Records that what was lost is begun anew, so nothing is held any more.
    pub(super) fn let_go(&mut self) {
        if let Some(checkpoints) = &mut self.checkpoints {
            checkpoints.closing.take_if(|closing| !closing.ends);
        }
    }

    /// Returns whether nothing more is begun, because it ends with a checkpoint.
    pub(super) fn is_closing(&self) -> bool {
        self.checkpoints.as_ref().is_some_and(|checkpoints| checkpoints.closing.is_some())
    }

    /// Records that the steps that were begun are finished and their epochs measured, or it took
    /// too long.
    pub(super) fn maybe_closed(&mut self, now: Now) {
        let closing = self.checkpoints.as_ref().and_then(|checkpoints| checkpoints.closing);
        let (Some(Closing { ends: true, version, until, .. }), Some(training)) =
            (closing, self.phase.trains())
        else {
            return;
        };
        let trained = training.watermark().get() >= version.get();
        if (trained && self.is_measured_before(version)) || until <= now.since_start {
            self.stop_training(now, Salvage::Newest);
        }
    }

    // The end.

    /// Ends the job, once its last checkpoint is complete.
    pub(super) fn save_last(&mut self, now: Now) {
        if !self.is_saving() {
            return self.finish(now);
        }
        self.phase.set_end(Stage::Saving { until: now.since_start + LAST });
        self.tell_state(now);
    }

    pub(super) fn maybe_saved(&mut self, now: Now) {
        if matches!(self.phase.ends(), Some(Stage::Saving { .. })) && !self.is_saving() {
            self.finish(now);
        }
    }

    /// Returns whether a checkpoint is still to come, although nothing is trained any more.
    fn is_saving(&self) -> bool {
        let (Some(checkpoints), Some(training), Some(Model { facts, partitions, .. })) =
            (&self.checkpoints, self.phase.training(), self.phase.model())
        else {
            return false;
        };
        if self.phase.end().is_some_and(|end| end.state == JobState::Failed) {
            return false;
        }
        let here = partitions.are_all_here();
        let trained = Version(training.watermark().get());
        let asked = checkpoints.closing.filter(|closing| closing.saves && closing.version <= trained);
        let last = checkpoints
            .spec
            .newest(&facts.plan, trained)
            .max(asked.map_or(Version(0), |asked| asked.version));
        let comes = here && self.is_measured_before(last);
        checkpoints.writing.is_some() || (comes && last > checkpoints.begun && !checkpoints.is_settled(last))
    }
}
