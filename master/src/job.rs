//! A job's life, from its submission to its end. Pure: time, fleet and answers come in as arguments, effects go out as values.
//!
//! ```text
//!   Indexing -> Initializing -> Surveying -> Training -----------------------> Exporting -> Saving -> Finishing -> Ended
//!       |            |    ^         |           | |  stopped early: failed,        | ^                     ^
//!       |            |    |  a ps lost its part | v  diverged, cancelled           | |                     |
//!       |            |    +---------+-----------+---------------------------------+ |                     |
//!       |            |              |        Stopping -> Asking (how far?) ---------+                     |
//!       +------------+--------------+--- nothing is trained yet, or nothing can be saved -----------------+
//! ```
//!
//! Every recovery goes through the same door as the beginning: partitions are opened, version 0 or a checkpoint arrives, the ps are
//! asked what they have applied, and the books are made of that (`recovery`).
//!
//! While there are too few workers or ps the first four wait, which a user sees as `Pending`, and a user may hold them, which is
//! `Paused`: nothing new is handed out, what is held is finished (`control`). How the job ends is decided once,
//! when it is stopped or trained to its end; what goes wrong after that is added to the reason.

mod checkpoints;
mod closing;
mod control;
mod crew;
mod ending;
mod evaluations;
mod index;
mod leases;
mod losses;
mod numerics;
mod partitions;
mod record;
mod recovery;
mod status;
#[cfg(test)]
mod tests;
mod training;
mod work;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use proto::checkpoint::manifest::Manifest;
use proto::ids::{Epoch, Era, IncarnationId, JobId, LeaseId, Version};
use proto::numerics::Since;
use proto::pb;
use proto::pb::JobState;
use proto::pb::event::Kind as Event;
use proto::placement::Layout;
use proto::spec::JobSpec;
use proto::status::{Failure, Kind};
use proto::tensor::TensorSpec;

use self::checkpoints::Checkpoints;
pub(crate) use self::checkpoints::Resume;
pub(crate) use self::control::unchangeable;
use self::crew::Crew;
use self::ending::{End, Salvage, failed};
use self::index::{Facts, Index};
use self::partitions::Partitions;
pub(crate) use self::partitions::{Holder, PsAddress};
use self::training::Training;
use self::work::Work;
use crate::checkpoints::Place;
use crate::clock::Now;
use crate::events::EventLog;
use crate::lease::Limits;
use crate::membership::Membership;
use crate::progress::Hang;
use crate::tasks::TaskQueue;

/// One job.
#[derive(Debug)]
pub(crate) struct Job {
    pub(crate) id: JobId,
    pub(crate) spec: JobSpec,
    /// Name of the token that it was submitted with; empty without one.
    pub(crate) owner: String,
    /// Files it was submitted with.
    pub(crate) input: Vec<pb::Artifact>,
    /// Files it ended with.
    pub(crate) output: Vec<pb::Artifact>,
    pub(crate) log: EventLog,
    settings: Settings,
    phase: Phase,
    /// How it ends, once that is decided.
    end: Option<End>,
    /// What the fleet lacks for it, at the last look.
    waits: Option<String>,
    /// A user holds it.
    paused: bool,
    /// Everything but training.
    queue: TaskQueue<Work>,
    index: Index,
    facts: Option<Facts>,
    partitions: Option<Partitions>,
    /// How often all partitions were begun anew.
    era: Era,
    /// Of before the loss, while a lost ps is replaced.
    training: Option<Training>,
    /// Of a job that saves some.
    checkpoints: Option<Checkpoints>,
    crew: Crew,
    /// The numerics classes that computed what is trained.
    numerics: Vec<Since>,
    /// Classes of which users were told that they stand by.
    strangers_told: BTreeSet<String>,
    times: status::Times,
    numbers: status::Numbers,
    effects: Vec<Effect>,
    /// Epochs whose model was measured.
    epochs_measured: Epoch,
    /// Leases whose holders hang, as far as users were told; and when that was last looked at.
    hangs_told: BTreeSet<LeaseId>,
    hangs_told_at: Duration,
    /// Something changed that is to be written down.
    changed: bool,
}

/// How often it is looked who hangs, to tell users.
const HANGS_TOLD: Duration = Duration::from_secs(1);

/// What the master's options say about jobs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Settings {
    /// See [`Limits::claim`].
    pub(crate) claim: Duration,
    /// Longest wait for a ps to come back.
    pub(crate) ps_grace: Duration,
    /// Longest wait for workers to hear that a job stops.
    pub(crate) stop: Duration,
}

#[derive(Debug)]
enum Phase {
    Indexing,
    Initializing,
    /// The ps are asked what they have applied; not `asked` when that is to be done (again).
    Surveying {
        asked: bool,
    },
    Training,
    /// It ends early: its workers are told, so that the version to export stays within reach.
    Stopping {
        salvage: Salvage,
        /// Who held training leases, and the heartbeats without one since.
        holders: BTreeMap<IncarnationId, u32>,
        leases: BTreeSet<LeaseId>,
        until: Duration,
    },
    /// The ps are asked how far they are.
    Asking,
    Exporting,
    /// The last checkpoint is being written.
    Saving {
        until: Duration,
    },
    /// The ps are asked for their numbers.
    Finishing,
    Ended,
}

/// What the edge must do for a job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Effect {
    /// Ask each ps of the placement of this number what it holds and answer with [`Job::on_ledgers`].
    Ask(u64, Vec<PsAddress>),
    /// Ask a ps that came back what it holds and answer with [`Job::on_ps_answer`].
    Verify(PsAddress, IncarnationId),
    /// Tell each ps that the versions of this era up to this one need not be kept for measuring any more.
    Unpin(Vec<PsAddress>, Era, Version),
    /// Look which checkpoints there are and answer with [`Job::on_found`].
    Look(Place),
    /// Ask each ps to save a version and answer with [`Job::on_save_answered`].
    Save(Vec<PsAddress>, Version),
    /// Write a manifest, keep so many checkpoints, and answer with [`Job::on_published`].
    Publish(Place, Box<Manifest>, u32),
    /// Ask each ps for its ledger and answer with [`Job::on_finished`].
    Finish(Vec<PsAddress>),
    /// The job has ended in this era: once that is durable, [archive it](crate::books::Books::close), then let each ps drop what it has of it.
    Close(Vec<PsAddress>, Era),
    /// Tell a worker at once that this lease has ended, rather than with its next heartbeat.
    Recall(IncarnationId, LeaseId),
    /// Log that the state changed, and why.
    Tell(JobState, String),
    /// Log that a lease ended without its work being done.
    Lost(LeaseId),
}

/// Who speaks, for the reasons that users read.
pub(crate) type Who<'a> = &'a str;

impl Job {
    pub(crate) fn new(
        id: JobId,
        spec: JobSpec,
        input: Vec<pb::Artifact>,
        settings: Settings,
        now: Now,
        fleet: &Membership,
    ) -> Self {
        let limits = limits(&spec, settings);
        let mut queue = TaskQueue::new(limits);
        let index = Index::new(&spec);
        let crew = Crew::new(spec.fleet.workers, spec.needs_one_class());
        let checkpoints = spec.checkpoint.clone().map(|checkpoint| Checkpoints::new(checkpoint, &spec.name));
        index.work().into_iter().for_each(|work| queue.push(work));
        let mut job = Self {
            id,
            spec,
            owner: String::new(),
            input,
            output: Vec::new(),
            log: EventLog::default(),
            settings,
            phase: Phase::Indexing,
            end: None,
            waits: None,
            paused: false,
            queue,
            index,
            facts: None,
            partitions: None,
            era: Era(0),
            training: None,
            checkpoints,
            crew,
            numerics: Vec::new(),
            strangers_told: BTreeSet::new(),
            times: status::Times::submitted(now),
            numbers: status::Numbers::default(),
            effects: Vec::new(),
            epochs_measured: Epoch(0),
            hangs_told: BTreeSet::new(),
            hangs_told_at: Duration::ZERO,
            changed: true,
        };
        job.on_fleet(now, fleet);
        job
    }

    pub(crate) fn is_ended(&self) -> bool {
        matches!(self.phase, Phase::Ended)
    }

    /// Whether its model is delivered, so that nothing more is trained.
    const fn is_exported(&self) -> bool {
        !self.output.is_empty()
    }

    /// What is to be done since the last call.
    pub(crate) fn take_effects(&mut self) -> Vec<Effect> {
        std::mem::take(&mut self.effects)
    }

    // The fleet and the time.

    /// The fleet changed, or may have, or time has passed.
    pub(crate) fn on_fleet(&mut self, now: Now, fleet: &Membership) {
        self.crew.choose(fleet.workers(), |worker| fleet.hangs(worker), self.needs_fleet());
        self.maybe_decide_class();
        self.tell_strangers(now);
        self.watch_ps(now, fleet);
        self.maybe_hold(now, fleet);
        self.waits = self.lacks(fleet);
        self.tell_state(now);
    }

    /// Takes back what is overdue.
    pub(crate) fn on_tick(&mut self, now: Now, fleet: &Membership) {
        let mut lost = self.queue.expire(now.since_start);
        lost.extend(self.dispatcher().map(|books| books.expire(now.since_start)).unwrap_or_default());
        self.numbers.taken_back += lost.len() as u64;
        self.on_lost(now, lost);
        if matches!(&self.phase, Phase::Stopping { until, .. } if *until <= now.since_start) {
            self.on_stopped(now);
        }
        self.on_checkpoint_tick(now);
        self.warn_of_hangs(now, fleet);
        self.on_fleet(now, fleet);
    }

    /// Tells users once of each lease whose holder hangs. Nobody needs to know sooner than a second later.
    fn warn_of_hangs(&mut self, now: Now, fleet: &Membership) {
        if now.since_start < self.hangs_told_at + HANGS_TOLD {
            return;
        }
        self.hangs_told_at = now.since_start;
        let hanging: Vec<_> = self.hangs(now).collect();
        self.hangs_told.retain(|told| hanging.iter().any(|hang| hang.lease == *told));
        for Hang { worker, lease, progress, work, .. } in hanging {
            if self.hangs_told.insert(lease) {
                let name = fleet
                    .member(worker)
                    .map_or_else(|_| worker.to_string(), |member| member.process.name.clone());
                let since = now.since_start.saturating_sub(progress.since).as_secs();
                let message = format!(
                    "worker `{name}` does not get on, for {since} s now: {progress}; it is to {work}, which another worker does when one \
                     is free (limits.stall)"
                );
                self.warn(now, message);
            }
        }
    }

    /// A worker is gone: what it held comes back.
    pub(crate) fn worker_gone(&mut self, now: Now, worker: IncarnationId) {
        let mut lost = self.queue.worker_gone(worker);
        lost.extend(self.dispatcher().map(|books| books.worker_gone(worker)).unwrap_or_default());
        self.numbers.taken_back += lost.len() as u64;
        self.on_lost(now, lost);
        if let Phase::Stopping { holders, .. } = &mut self.phase {
            holders.remove(&worker);
        }
        self.maybe_stopped(now);
    }

    /// Leases that were taken back by this start of the master, whatever for.
    pub(crate) const fn leases_taken_back(&self) -> u64 {
        self.numbers.taken_back
    }

    /// Why it cannot go on although its phase would.
    fn waits(&self) -> Option<&str> {
        self.waits.as_deref().filter(|_| self.needs_fleet())
    }

    /// Whether training is ahead or under way.
    const fn needs_fleet(&self) -> bool {
        let trains = matches!(
            self.phase,
            Phase::Indexing | Phase::Initializing | Phase::Surveying { .. } | Phase::Training
        );
        trains && !self.is_exported()
    }

    fn lacks(&self, fleet: &Membership) -> Option<String> {
        let before = !matches!(self.phase, Phase::Training);
        let lack = |what: &str, have: u32, want: u32| {
            (have < want).then(|| format!("{what} ({have} of {want} live)"))
        };
        let workers = lack("workers", self.crew.live(), self.crew.bounds().min);
        let workers = workers.map(|lack| format!("{lack}{}", self.lacks_of_class()));
        let ps = match &self.partitions {
            Some(partitions) => partitions.lack(fleet),
            None => lack("ps", fleet.ps().count() as u32, self.spec.fleet.ps),
        };
        let ps = ps.filter(|_| before);
        let lacks: Vec<_> = [ps, workers].into_iter().flatten().collect();
        (!lacks.is_empty()).then(|| format!("waits for {}", lacks.join(" and ")))
    }

    // The model.

    /// The worker that initializes the model has described it: which partitions to open where. Those that have something to lose are
    /// open.
    ///
    /// # Errors
    /// Not the holder of the `Init` lease, a model that cannot be placed, or too few ps at the moment.
    pub(crate) fn describe(
        &mut self,
        worker: IncarnationId,
        lease: LeaseId,
        tensors: Vec<TensorSpec>,
        fleet: &Membership,
        load: &BTreeMap<String, usize>,
    ) -> Result<Vec<(PsAddress, pb::OpenRequest)>, Failure> {
        let (Some(Work::Init), Some(facts)) = (self.queue.work(worker, lease), &self.facts) else {
            return Err(ended(lease));
        };
        let count = self.spec.fleet.ps;
        Layout::check(&tensors, count)?;
        let partitions = self.partitions.as_mut().ok_or_else(|| ended(lease))?;
        partitions.describe(tensors)?;
        partitions.place(fleet, load)?;
        self.changed = true;
        let spec_json = self.spec.to_json();
        let homes: Vec<_> = partitions.addresses().map(|ps| ps.url).collect();
        let place = self.checkpoints.as_ref().map(|checkpoints| &checkpoints.place);
        let open = |(partition, address, begin): (u32, PsAddress, Version)| {
            let place = place.filter(|_| begin > Version(0));
            let request = pb::OpenRequest {
                job: self.id.get(),
                era: self.era.get(),
                partition,
                partitions: count,
                tensors: partitions.tensors().iter().map(pb::TensorSpec::from).collect(),
                plan: Some(facts.plan.into()),
                spec_json: spec_json.clone(),
                restore: place.map(|place| pb::Restore { url: place.folder(begin), version: begin.get() }),
                homes: homes.clone(),
            };
            (address, request)
        };
        Ok(partitions.beginning().map(open).collect())
    }

    /// The partitions are open: where they are, for the worker.
    ///
    /// # Errors
    /// The lease has ended meanwhile.
    pub(crate) fn described(
        &mut self,
        worker: IncarnationId,
        lease: LeaseId,
    ) -> Result<pb::DescribeReply, Failure> {
        let init = matches!(self.queue.work(worker, lease), Some(Work::Init));
        let partitions = self.partitions.as_mut().filter(|_| init).ok_or_else(|| ended(lease))?;
        partitions.open = true;
        self.changed = true;
        let restoring = partitions.beginning().all(|(.., begin)| begin > Version(0));
        Ok(pb::DescribeReply { placement: Some(partitions.placement()), restoring })
    }

    /// The ps of its partitions, to balance others against.
    pub(crate) fn homes(&self) -> impl Iterator<Item = String> {
        let live = self.partitions.as_ref().filter(|_| !self.is_ended());
        live.into_iter().flat_map(|partitions| partitions.addresses().map(|address| address.name))
    }

    // From phase to phase.

    fn on_indexed(&mut self, now: Now) {
        if !self.queue.is_empty() {
            return;
        }
        match self.index.facts(&self.spec) {
            Ok(facts) => {
                self.facts = Some(facts);
                self.initialize(now);
            }
            Err(reason) => self.stop(now, failed(reason), Salvage::Nothing),
        }
        self.tell_state(now);
    }

    /// Some microbatches are done.
    fn on_trained(&mut self, now: Now) {
        let Some(training) = &mut self.training else { return };
        let (events, shards) = training.advance(self.times.training(now), &self.crew);
        shards.into_iter().for_each(|shard| self.queue.push(Work::Evaluate(shard)));
        events.into_iter().for_each(|event| self.log.append(now.unix_ms, Event::Train(event)));
        self.maybe_trained_out(now);
        self.maybe_closed(now);
    }

    fn on_measured(&mut self, now: Now, measured: evaluations::Measured) {
        let evaluations::Measured { epoch, version, metrics, samples } = measured;
        self.numbers.final_metrics.clone_from(&metrics);
        self.epochs_measured = epoch.next();
        self.changed = true;
        let event = pb::EvaluationEvent { epoch: epoch.get(), step: version.get(), metrics, samples };
        self.log.append(now.unix_ms, Event::Evaluation(event));
        let ps = self.partitions.as_ref().map(Partitions::reachable).unwrap_or_default();
        self.effects.push(Effect::Unpin(ps, self.era, version));
        self.maybe_publish(now);
    }

    /// Exports, once everything is trained and measured. Not while a user holds the job: the export would be handed out.
    fn maybe_trained_out(&mut self, now: Now) {
        let done = self.training.as_ref().is_some_and(Training::is_done);
        if !done || !matches!(self.phase, Phase::Training) || self.paused() {
            return;
        }
        let final_version = self.facts.as_ref().map(|facts| facts.plan.final_version());
        let epochs = self.spec.epochs;
        self.end = Some(End { state: JobState::Succeeded, reason: format!("trained {epochs} epochs") });
        self.export(now, final_version);
    }

    fn warn(&mut self, now: Now, message: String) {
        self.log.append(now.unix_ms, Event::Warning(pb::WarningEvent { message }));
    }
}

fn limits(spec: &JobSpec, settings: Settings) -> Limits {
    let limits = spec.limits;
    Limits {
        lease: limits.lease,
        claim: settings.claim,
        attempts_max: limits.attempts_max,
        deaths_max: limits.deaths_max,
        stall: limits.stall,
    }
}

pub(crate) fn ended(lease: LeaseId) -> Failure {
    Failure::new(Kind::Fenced, format!("lease {lease} has ended; somebody else does its work"))
}
