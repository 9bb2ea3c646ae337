//! Checkpoints that no arithmetic names: after so many seconds, and of where a job stands when it ends. Pure.
//!
//! A checkpoint is of one version that every partition comes to. While training goes on, a version a little ahead is asked for. A
//! job that a user ends is *closed*: what is handed out is finished, nothing more is handed out, so that all partitions come to rest
//! at the same version, in arrival order with the same ledger too, and that version is saved. So is a job of which a ps wants to
//! leave: what it holds goes with it, and whatever comes next goes on from that version.

use std::time::Duration;

use proto::ids::{IncarnationId, Version};
use proto::pb::JobState;
use proto::status::Failure;

use super::ending::{End, Salvage};
use super::partitions::Partitions;
use super::{Effect, Job, Phase};
use crate::clock::Now;
use crate::membership::Membership;

/// Longest wait at the end of a job for its last checkpoint. A store that fails is reported after a quarter of a minute; this is for
/// one that never answers, and for large models on slow ones.
const LAST: Duration = Duration::from_secs(120);

/// Longest wait for the steps that are begun, when a job is to be saved where it stands.
const CLOSE: Duration = Duration::from_secs(30);

/// A job that is saved where it stands, and ends then, or goes on when a ps that leaves has come back.
#[derive(Clone, Copy, Debug)]
pub(super) struct Closing {
    /// It ends.
    ends: bool,
    /// All steps that were begun are below it.
    version: Version,
    until: Duration,
    /// The ps will save it.
    saves: bool,
}

impl Job {
    /// Time has passed.
    pub(super) fn on_checkpoint_tick(&mut self, now: Now) {
        self.maybe_ask(now);
        self.maybe_closed(now);
        self.maybe_saved(now);
        if let Phase::Saving { until } = self.phase
            && until <= now.since_start
        {
            self.warn(
                now,
                format!("the last checkpoint was not complete within {LAST:?}; the job ends without it"),
            );
            self.finish(now);
        }
    }

    /// Asks for a checkpoint when the last one is old enough.
    fn maybe_ask(&mut self, now: Now) {
        let trains = matches!(self.phase, Phase::Training) && !self.rests();
        let (Some(checkpoints), Some(training), Some(facts)) =
            (&mut self.checkpoints, self.training.as_ref().filter(|_| trains), &self.facts)
        else {
            return;
        };
        let Some(every) = checkpoints.spec.every_seconds.map(Duration::from_secs) else { return };
        let due = *checkpoints.due.get_or_insert(now.since_start + every);
        if due > now.since_start || checkpoints.closing.is_some() {
            return;
        }
        let ahead = training.books.frontier().get() + checkpoints.margin;
        let version = Version(ahead).min(facts.plan.final_version());
        checkpoints.due = Some(now.since_start + every);
        let ps = self.partitions.as_ref().map(Partitions::reachable).unwrap_or_default();
        self.effects.push(Effect::Save(ps, version));
    }

    /// The ps have answered whether a version is still to come.
    pub(crate) fn on_save_answered(&mut self, now: Now, version: Version, coming: Result<bool, Failure>) {
        let Some(checkpoints) = &mut self.checkpoints else { return };
        if let Some(closing) = checkpoints.closing.as_mut().filter(|closing| closing.version == version) {
            closing.saves = coming == Ok(true);
            if let Err(failure) = coming {
                self.warn(now, format!("no checkpoint of version {version}: {failure}"));
            }
            return self.maybe_saved(now);
        }
        checkpoints.margin = match coming {
            Ok(true) => (checkpoints.margin / 2).max(1),
            // It was too near; the next look asks for a later one.
            Ok(false) => (checkpoints.margin * 2).min(1 << 10),
            Err(_) => return,
        };
        if coming == Ok(false) {
            checkpoints.due = Some(now.since_start);
        }
    }

    /// Ends the job with a checkpoint of where it stands: what is begun is finished, and nothing more is begun. False when it
    /// has no checkpoints, or nothing to save.
    pub(super) fn close(&mut self, now: Now, end: &End) -> bool {
        let trains = matches!(self.phase, Phase::Training);
        let (Some(checkpoints), Some(training)) =
            (&mut self.checkpoints, self.training.as_mut().filter(|_| trains))
        else {
            return false;
        };
        let until = now.since_start + CLOSE;
        match &mut checkpoints.closing {
            Some(closing) if closing.ends => return true,
            // A ps is leaving: it is being saved already.
            Some(closing) if closing.version > Version(0) => (closing.ends, closing.until) = (true, until),
            Some(_) => return false,
            None => {
                let version = Version(training.books.close().get());
                if version == Version(0) {
                    return false;
                }
                checkpoints.closing = Some(Closing { ends: true, version, until, saves: true });
                let ps = self.partitions.as_ref().map(Partitions::reachable).unwrap_or_default();
                self.effects.push(Effect::Save(ps, version));
            }
        }
        self.end = Some(end.clone());
        self.tell_state(now);
        self.maybe_closed(now);
        true
    }

    /// Saves the job where it stands when a ps with a part of its model wants to leave. It goes on when that part is somewhere again.
    pub(super) fn maybe_hold(&mut self, now: Now, fleet: &Membership) {
        let left = self.partitions.as_ref().is_some_and(|partitions| partitions.is_left(fleet));
        let trains = matches!(self.phase, Phase::Training);
        let (Some(checkpoints), Some(training)) =
            (&mut self.checkpoints, self.training.as_mut().filter(|_| trains && left))
        else {
            return;
        };
        if checkpoints.closing.is_some() {
            return;
        }
        let version = Version(training.books.close().get());
        let saves = version > checkpoints.begun && !checkpoints.is_settled(version);
        let until = now.since_start + CLOSE;
        checkpoints.closing = Some(Closing { ends: false, version, until, saves });
        if saves {
            let ps = self.partitions.as_ref().map(Partitions::reachable).unwrap_or_default();
            self.effects.push(Effect::Save(ps, version));
        }
        self.tell_state(now);
    }

    /// Whether a ps that wants to leave may do so: it has nothing of this job, or what it has is saved as far as it can be.
    pub(crate) fn lets_go(&self, ps: IncarnationId) -> bool {
        let needed = self.partitions.as_ref().is_some_and(|partitions| partitions.need(ps));
        let Some(checkpoints) = self.checkpoints.as_ref().filter(|_| needed && !self.is_ended()) else {
            return true;
        };
        let Some(closing) = checkpoints.closing.filter(|_| matches!(self.phase, Phase::Training)) else {
            // It will train soon, or ends; the ps does not wait for ever.
            return false;
        };
        !closing.ends
            && checkpoints.writing.is_none()
            && (!closing.saves || checkpoints.is_settled(closing.version))
    }

    /// What was lost is begun anew, so nothing is held any more.
    pub(super) fn let_go(&mut self) {
        if let Some(checkpoints) = &mut self.checkpoints {
            checkpoints.closing.take_if(|closing| !closing.ends);
        }
    }

    /// Whether nothing more is begun, because it ends with a checkpoint.
    pub(super) fn is_closing(&self) -> bool {
        self.checkpoints.as_ref().is_some_and(|checkpoints| checkpoints.closing.is_some())
    }

    /// The steps that were begun are finished and their epochs measured, or it took too long.
    pub(super) fn maybe_closed(&mut self, now: Now) {
        let closing = self.checkpoints.as_ref().and_then(|checkpoints| checkpoints.closing);
        let (Some(Closing { ends: true, version, until, .. }), Phase::Training) = (closing, &self.phase)
        else {
            return;
        };
        let trained =
            self.training.as_ref().is_some_and(|training| training.watermark().get() >= version.get());
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
        self.phase = Phase::Saving { until: now.since_start + LAST };
        self.tell_state(now);
    }

    pub(super) fn maybe_saved(&mut self, now: Now) {
        if matches!(self.phase, Phase::Saving { .. }) && !self.is_saving() {
            self.finish(now);
        }
    }

    /// Whether a checkpoint is still to come, although nothing is trained any more.
    fn is_saving(&self) -> bool {
        let (Some(checkpoints), Some(training), Some(facts)) =
            (&self.checkpoints, &self.training, &self.facts)
        else {
            return false;
        };
        if self.end.as_ref().is_some_and(|end| end.state == JobState::Failed) {
            return false;
        }
        let here = self.partitions.as_ref().is_some_and(Partitions::are_all_here);
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
