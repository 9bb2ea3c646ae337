//! How a job ends: by its last step, by what went wrong, or by a user; and what is saved before.

use proto::ids::{Step, Version};
use proto::pb;
use proto::pb::JobState;
use proto::spec::Order;
use proto::status::Failure;

use super::end::{End, Salvage, failed};
use super::phase::{Ending, Phase, Stage};
use super::work::Work;
use super::{Effect, Job};
use crate::clock::Now;
use crate::lease::Lost;

impl Job {
    /// Leases ended without their work being done; once too often is the end.
    pub(super) fn on_lost(&mut self, now: Now, lost: Vec<Lost>) {
        self.numbers.leases_expired += lost.len() as u64;
        self.effects.extend(lost.iter().map(|lost| Effect::Lost(lost.lease)));
        if let Some(reason) = lost.into_iter().find_map(|lost| lost.exhausted) {
            self.stop(now, failed(reason), Salvage::Newest);
        }
    }

    /// Records that a user asks for the end.
    pub(crate) fn cancel(&mut self, now: Now, force: bool) {
        let end = End { state: JobState::Cancelled, reason: "cancelled by a user".to_owned() };
        match self.phase {
            _ if self.phase.is_over() => {}
            _ if force => {
                self.phase.decide(end);
                self.finish(now);
            }
            Phase::Ending(_) => {}
            // A restart of the master came between the export and the end.
            _ if self.is_exported() => {}
            _ => {
                if !self.close(now, &end) {
                    self.stop(now, end, Salvage::Newest);
                }
            }
        }
    }

    /// Fails the job, because nobody is left that trains it or exports what is trained.
    pub(crate) fn abandon(&mut self, now: Now, reason: String) {
        self.stop(now, failed(reason), Salvage::Nothing);
    }

    /// Ends the job early. Once its end is decided, this only adds to the reason. A job whose
    /// predictions are delivered has succeeded, whatever happens then.
    pub(super) fn stop(&mut self, now: Now, end: End, salvage: Salvage) {
        if matches!(self.phase.ends(), Some(Stage::Finishing | Stage::Ended | Stage::Saving { .. })) {
            return;
        }
        if self.delivery.is_some() {
            self.warn(now, end.reason);
            return self.end_without_ps(now);
        }
        match &mut self.phase {
            Phase::Indexing { .. } | Phase::Beginning(_) => self.phase.decide(end),
            Phase::Training { .. } => {
                self.phase.decide(end);
                if salvage != Salvage::Nothing {
                    self.stop_training(now, salvage);
                    return;
                }
            }
            Phase::Ending(Ending { end: decided, .. }) => match decided.state {
                JobState::Succeeded => *decided = end,
                _ => decided.reason = format!("{}; {}", decided.reason, end.reason),
            },
        }
        self.finish(now);
    }

    pub(super) fn stop_training(&mut self, now: Now, salvage: Salvage) {
        let held = self.phase.training().into_iter().flat_map(|training| training.books.holders());
        let (holders, leases) = held.map(|(worker, lease)| ((worker, 0), lease)).unzip();
        let until = now.since_start + self.settings.stop;
        self.queue.clear();
        self.phase.set_end(Stage::Stopping { salvage, holders, leases, until });
        self.tell_state(now);
        self.maybe_stopped(now);
    }

    pub(super) fn maybe_stopped(&mut self, now: Now) {
        if matches!(self.phase.ends(), Some(Stage::Stopping { holders, .. }) if holders.is_empty()) {
            self.on_stopped(now);
        }
    }

    /// Records that nobody trains any more.
    pub(super) fn on_stopped(&mut self, now: Now) {
        let Some(Stage::Stopping { salvage, .. }) = self.phase.ends() else { return };
        match *salvage {
            Salvage::Nothing => self.finish(now),
            Salvage::Version(version) => self.export(now, Some(version)),
            Salvage::Best(version) => self.export_exactly(now, Some(version)),
            Salvage::Newest => {
                self.phase.set_end(Stage::Asking);
                self.ask();
            }
        }
    }

    /// Records that the ps have said how far they are: which version all of them have.
    pub(super) fn on_asked(&mut self, now: Now, ledgers: Result<Vec<pb::PartitionLedger>, Failure>) {
        let Some(partitions) = self.phase.partitions() else { return self.finish(now) };
        let complete = |ledgers: &Vec<_>| {
            partitions
                .check_all(ledgers, None, self.era)
                .map_err(|partition| format!("partition {partition} is not there"))
        };
        match ledgers.map_err(|failure| failure.message).and_then(|found| complete(&found).map(|()| found)) {
            Err(reason) => {
                let reason = format!("what was trained could not be exported: {reason}");
                self.stop(now, failed(reason), Salvage::Nothing);
            }
            Ok(ledgers) => match ledgers.iter().map(|ledger| ledger.version.unwrap_or(0)).min() {
                None | Some(0) => self.finish(now),
                Some(version) => self.export(now, Some(Version(version))),
            },
        }
    }

    /// Hands out the export of `version`. In arrival order it exports the newest version of each
    /// partition, as these may differ.
    pub(super) fn export(&mut self, now: Now, version: Option<Version>) {
        let canonical = self.spec.consistency.resolve().order == Order::Canonical;
        self.export_exactly(now, version.filter(|_| canonical));
    }

    /// Hands out the export of `version`, which every partition keeps; `None`: the newest.
    pub(super) fn export_exactly(&mut self, now: Now, version: Option<Version>) {
        self.queue.push(Work::Export(version));
        self.phase.set_end(Stage::Exporting);
        self.tell_state(now);
    }

    /// Returns the last version whose loss was finite when the loss of `step` is not: the one
    /// before that which the step was computed from. In arrival order nobody knows which weights it
    /// was computed from.
    pub(super) fn last_good(&self, step: Step) -> Salvage {
        let consistency = self.spec.consistency.resolve();
        if self.phase.facts().is_none_or(|facts| step.get() >= facts.plan.steps()) {
            return Salvage::Nothing;
        }
        let Some(delay) = consistency.delay.filter(|_| consistency.order == Order::Canonical) else {
            return Salvage::Nothing;
        };
        match step.get().saturating_sub(delay.into()).saturating_sub(1) {
            0 => Salvage::Nothing,
            version => Salvage::Version(Version(version)),
        }
    }

    /// Records that nothing more is to be had from the workers: the ps tell their numbers.
    pub(super) fn finish(&mut self, now: Now) {
        self.queue.clear();
        self.phase.set_end(Stage::Finishing);
        match self.phase.partitions().filter(|partitions| partitions.number() > 0) {
            Some(partitions) => self.effects.push(Effect::Finish(partitions.reachable())),
            None => self.on_finished(now, Ok(Vec::new())),
        }
        self.tell_state(now);
    }

    /// Records that the ps have told their numbers. They hold the job until its end is durable:
    /// whatever happens before, it can be ended again.
    pub(crate) fn on_finished(&mut self, now: Now, ledgers: Result<Vec<pb::PartitionLedger>, Failure>) {
        if !matches!(self.phase.ends(), Some(Stage::Finishing)) {
            return;
        }
        match ledgers {
            Ok(ledgers) => self.numbers.take_ledgers(&ledgers),
            Err(failure) => self.warn(now, format!("the ps' own counts are missing: {failure}")),
        }
        self.phase.set_end(Stage::Ended);
        self.effects.push(Effect::Close(self.reachable(), self.era));
        self.tell_state(now);
    }
}
