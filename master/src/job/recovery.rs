//! How a job begins to train, and begins again when a ps lost its part of the model: one mechanism
//! for both.
//!
//! ```text
//!   Initializing: the store is asked for the newest  ------>  Surveying: what  ---->  Training
//!     ^    checkpoint; an `Init` task opens the partitions,    has each ledger?        |
//!     |    which load it, or get version 0                        |                    |
//!     |                     an older one, or version 0 in the end |                    |
//!     +-- all leases end; partitions that were lost are fresh ----+--------------------+
//! ```
//!
//! In canonical order every partition is begun anew in a new era, because a step is computed from
//! one version of all of them. In arrival order only the lost one is, in the same era: the others
//! answer "duplicate" to what they have. Either way the books are what all ledgers have in common,
//! so there is nothing else to keep or to mend.

use proto::ids::{IncarnationId, Step, Version};
use proto::pb;
use proto::pb::event::Kind as Event;
use proto::spec::Order;
use proto::status::Failure;

use super::end::{End, Salvage, failed};
use super::partitions::{Back, Partitions};
use super::phase::{Begin, Beginning, Ending, Model, Phase, Stage};
use super::training::Training;
use super::work::Work;
use super::{Effect, Job, limits};
use crate::applied::Applied;
use crate::clock::Now;
use crate::membership::Membership;
use crate::ps_address::PsAddress;

impl Job {
    /// Looks after the ps that hold the model.
    pub(super) fn watch_ps(&mut self, now: Now, fleet: &Membership) {
        let over = self.phase.is_over();
        let Some(partitions) = self.phase.partitions_mut().filter(|_| !over) else { return };
        let watched = partitions.watch(now.since_start, fleet, self.settings.ps_grace);
        watched.warnings.into_iter().for_each(|message| self.warn(now, message));
        self.effects.extend(watched.ask.into_iter().map(|(ps, id)| Effect::Verify(ps, id)));
        if !watched.lost.is_empty() {
            self.on_ps_lost(now, &watched.lost);
        } else if watched.unsettled {
            self.initialize(now);
        }
        self.maybe_survey();
    }

    /// Records that a worker says that the ps of a partition does not hold it: the ps is asked at
    /// once.
    pub(crate) fn doubt(&mut self, partition: u32) {
        let over = self.phase.is_over();
        let partitions = self.phase.partitions_mut().filter(|_| !over);
        let asked = partitions.and_then(|partitions| partitions.doubt(partition));
        self.effects.extend(asked.map(|(ps, id)| Effect::Verify(ps, id)));
    }

    /// Records that a ps that came back, or that is doubted, has said what it holds.
    pub(crate) fn on_ps_answer(
        &mut self,
        now: Now,
        ps: &PsAddress,
        incarnation: IncarnationId,
        ledgers: Result<Vec<pb::PartitionLedger>, Failure>,
    ) {
        let watermark = self.phase.training().map(Training::watermark).unwrap_or_default();
        let Some(partitions) = self.phase.partitions_mut() else { return };
        match partitions.on_answer(ps, incarnation, ledgers, self.era, watermark) {
            Back::Late => {}
            Back::Whole => {
                self.changed = true;
                self.warn(now, format!("ps `{}` is back with its partitions", ps.name));
            }
            Back::Empty => self.on_ps_lost(now, std::slice::from_ref(&ps.name)),
        }
        self.tell_state(now);
    }

    /// Records that what these ps held is gone.
    fn on_ps_lost(&mut self, now: Now, lost: &[String]) {
        let names = lost.iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ");
        let ends_early = match self.phase.ends() {
            Some(Stage::Finishing | Stage::Ended) => return,
            // What was trained is exported already.
            Some(Stage::Saving { .. }) => return self.finish(now),
            _ if self.is_exported() => return self.end_without_ps(now),
            Some(Stage::Asking) => true,
            // A job that is stopped early comes to its best version again.
            Some(Stage::Stopping { .. } | Stage::Exporting) | None => self.ends_early(),
        };
        if ends_early {
            let reason = format!("ps {names} lost its part of the model, so nothing can be saved");
            return self.stop(now, failed(reason), Salvage::Nothing);
        }
        let canonical = self.spec.consistency.resolve().order == Order::Canonical;
        let why = format!("ps {names} lost its part of the model");
        if canonical {
            return self.begin_again(now, &why);
        }
        let Some(partitions) = self.phase.partitions_mut() else { return };
        partitions.lose(|ps| lost.iter().any(|name| name == ps));
        let again = match &self.checkpoints {
            Some(_) => "looking for the newest checkpoint",
            None => "no checkpoint, so that part is trained again from version 0",
        };
        self.warn(now, format!("{why}; {again}"));
        self.initialize_with(now, None);
    }

    /// Begins every partition of a job in canonical order anew, in the next era.
    pub(super) fn begin_again(&mut self, now: Now, why: &str) {
        let Some(partitions) = self.phase.partitions_mut() else { return };
        partitions.lose(|_| true);
        self.era = self.era.next();
        let again = match &mut self.checkpoints {
            Some(checkpoints) => {
                checkpoints.rewound();
                "looking for the newest checkpoint".to_owned()
            }
            None => {
                self.tell_rewind(now, Version(0));
                format!("no checkpoint, so training starts again from version 0 (era {})", self.era)
            }
        };
        self.warn(now, format!("{why}; {again}"));
        self.initialize_with(now, None);
    }

    /// Ends every lease and has a worker describe the model, so that empty partitions get a
    /// checkpoint or version 0.
    pub(super) fn initialize(&mut self, now: Now) {
        self.initialize_with(now, self.phase.end().cloned());
    }

    /// Initializes the model, and lets the job end like this afterwards.
    fn initialize_with(&mut self, now: Now, end: Option<End>) {
        let training = self.phase.trains().into_iter().flat_map(|training| training.books.holders());
        let ended: Vec<_> = self.queue.leases().chain(training.map(|(_, lease)| lease)).collect();
        self.numbers.leases_expired += ended.len() as u64;
        self.numbers.taken_back += ended.len() as u64;
        self.effects.extend(ended.into_iter().map(Effect::Lost));
        self.queue.clear();
        self.let_go();
        self.phase.begin(end);
        if self.decide_beginning() {
            self.queue.push(Work::Init);
            self.unscheduled = true;
        }
        self.tell_state(now);
    }

    /// Records that every partition has a version.
    pub(super) fn on_initialized(&mut self, now: Now) {
        self.phase.set_begin(Begin::Surveying { asked: false });
        self.maybe_survey();
        self.tell_state(now);
    }

    fn maybe_survey(&mut self) {
        let here = self.phase.partitions().is_some_and(Partitions::are_all_here);
        if here && self.phase.begins() == Some(Begin::Surveying { asked: false }) {
            self.phase.set_begin(Begin::Surveying { asked: true });
            self.ask();
        }
    }

    /// Lets the ps say what they have applied.
    pub(super) fn ask(&mut self) {
        let asked = self.phase.partitions().map(|partitions| (partitions.number(), partitions.reachable()));
        let (placement, ps) = asked.unwrap_or_default();
        self.effects.push(Effect::Ask(placement, ps));
    }

    /// Takes the ledgers that the ps reported. `placement`: its number at the time of the question.
    pub(crate) fn on_ledgers(
        &mut self,
        now: Now,
        placement: u64,
        ledgers: Result<Vec<pb::PartitionLedger>, Failure>,
    ) {
        let here = self.placement() == placement;
        match &self.phase {
            Phase::Ending(Ending { stage: Stage::Asking, .. }) => self.on_asked(now, ledgers),
            Phase::Beginning(Beginning { stage: Begin::Surveying { asked: true }, .. }) if here => {
                self.on_surveyed(now, ledgers);
            }
            _ => {}
        }
    }

    fn on_surveyed(&mut self, now: Now, ledgers: Result<Vec<pb::PartitionLedger>, Failure>) {
        let Some(partitions) = self.phase.partitions() else { return };
        let failed =
            ledgers.as_ref().map(|ledgers| partitions.not_restored(ledgers, self.era)).unwrap_or_default();
        if !failed.is_empty() {
            return self.on_restore_failed(now, failed);
        }
        let whole = |ledgers: &Vec<_>| partitions.check_all(ledgers, None, self.era).is_ok();
        let Some(ledgers) = ledgers.ok().filter(whole) else {
            // Asked again with the next look at the fleet, which also tells whether one of them is
            // gone.
            self.phase.set_begin(Begin::Surveying { asked: false });
            return;
        };
        let begun = partitions.begun();
        self.phase.partitions_mut().into_iter().for_each(Partitions::keep);
        self.changed = true;
        if self.ends_early() && !self.is_exported() {
            // It was being stopped when the master was started again.
            self.phase.set_end(Stage::Asking);
            return self.on_asked(now, Ok(ledgers));
        }
        let applied = Applied::on_all(&ledgers);
        let limits = limits(&self.spec, self.settings);
        let resumed = self.checkpoints.as_ref().is_some_and(|checkpoints| checkpoints.resume.is_some());
        self.on_begun(begun);
        let (measured, trained) = (self.measured, self.times.training(now));
        let told = self.told();
        let Phase::Beginning(Beginning { model: Model { facts, .. }, before, .. }) = &mut self.phase else {
            return;
        };
        let before = before.take();
        let mut training = Training::new(&self.spec, facts, limits, trained, &applied, before, measured);
        if self.spec.data.may_skip() {
            // The ledgers leave out what was skipped.
            let samples = ledgers.iter().map(|ledger| ledger.samples_applied).min();
            training.samples_done = training.samples_done.min(samples.unwrap_or(u64::MAX));
        }
        training.losses.skip_to(told);
        training.evaluations.skip_to(begun.unwrap_or_default());
        if resumed {
            self.numbers.samples_before = training.samples_done;
        }
        self.note_class(Version(training.watermark().get()));
        self.phase.prepare(training);
        match begun {
            Some(_) => self.effects.push(Effect::Train(self.placement())),
            // The journal knew before that there was something to lose.
            None => self.train(now, self.placement()),
        }
    }

    /// Begins the training that is ready. `placement`: its number when it became ready.
    pub(crate) fn train(&mut self, now: Now, placement: u64) {
        if self.phase.begins() != Some(Begin::Ready) || self.placement() != placement {
            return;
        }
        self.phase.train();
        if self.is_exported() {
            return self.conclude(now);
        }
        self.tell_state(now);
        self.on_trained(now);
    }

    /// Logs that training in canonical order goes back to this version, so its steps are told
    /// again.
    pub(super) fn tell_rewind(&mut self, now: Now, version: Version) {
        let event = pb::RewindEvent { version: version.get(), era: self.era.get() };
        self.log.append(now.unix_ms, Event::Rewind(event));
    }

    /// Users know the loss of all steps below this one, also from an earlier start of the master.
    /// The ps may have applied fewer: the gradients of a step are reported when all of them are
    /// there, and applied a moment later.
    fn told(&self) -> Step {
        match self.log.progress() {
            Some(Event::Train(event)) => Step(event.step).next(),
            Some(Event::Rewind(event)) => Step(event.version),
            _ => Step::default(),
        }
    }
}
