//! A job's life, from its submission to its end. Pure: time, fleet and answers come in as
//! arguments, effects go out as values.
//!
//! ```text
//!              |<---- Beginning ---->|            |<--------- Ending --------------------->|
//! Indexing -> Initializing -> Surveying -> Training -----> Exporting -> Saving -> Finishing, Ended
//!    |            |   ^          |           |  |  stopped  | ^                  ^
//!    |            |   |  a ps lost its part  |  v  early    | |                  |
//!    |            |   +----------+-----------+--------------+ |                  |
//!    |            |              |     Stopping -> Asking ----+                  |
//!    +------------+--------------+--- nothing is trained, or nothing can be saved
//! ```
//!
//! A job that only evaluates or predicts goes the same way, with no microbatch to train. It ends
//! after its evaluation, or joins its predictions where others export (`predictions`).
//!
//! Each phase holds its data (`phase`). Checkpoints and a job that closes are parts with their own
//! state: they answer [`Outcome`]s, and the job takes them up.
//!
//! A recovery is another beginning: partitions are opened, version 0 or a checkpoint arrives, the
//! ps are asked what they have applied, and the dispatcher is made from their answers (`recovery`).
//!
//! With too few workers or ps, the phases up to training wait, and users see `Pending`. A user may
//! hold them, and users see `Paused`. Then the job hands out nothing new, and workers finish what
//! they hold (`control`). How the job ends is decided once, when it is stopped or trained to its
//! end. Later faults are added to the reason.

mod checkpoints;
mod closing;
mod control;
mod end;
mod ending;
mod evaluations;
mod index;
mod leases;
mod losses;
mod numerics;
mod partitions;
mod parts;
mod phase;
mod predictions;
mod record;
mod recovery;
mod selection;
mod skips;
mod status;
#[cfg(test)]
mod tests;
mod training;
mod wanted;
mod work;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use proto::checkpoint::manifest::Manifest;
use proto::ids::{Era, IncarnationId, JobId, LeaseId, Version};
use proto::numerics::Since;
use proto::pb;
use proto::pb::JobState;
use proto::pb::event::Kind as Event;
use proto::placement::Layout;
use proto::selection::Selection;
use proto::spec::JobSpec;
use proto::status::{Failure, Kind};
use proto::tensor::TensorSpec;

use self::checkpoints::Checkpoints;
pub(crate) use self::checkpoints::Resume;
use self::control::Control;
pub(crate) use self::control::unchangeable;
use self::end::{End, Salvage, failed};
use self::index::Index;
pub(crate) use self::partitions::Holder;
use self::partitions::Partitions;
use self::phase::{Model, Phase, Stage};
use self::predictions::Delivery;
use self::skips::Skips;
use self::training::Training;
use self::work::Work;
use crate::checkpoints::Place;
use crate::clock::Now;
use crate::device::{self, WantedDevice};
use crate::events::EventLog;
use crate::indexes::Indexes;
use crate::lease::Limits;
use crate::membership::Membership;
use crate::progress::Hang;
use crate::ps_address::PsAddress;
use crate::scheduler::{Crew, Demand};
use crate::tasks::TaskQueue;
use crate::why::Why;

/// One job.
#[derive(Debug)]
pub(crate) struct Job {
    pub(crate) id: JobId,
    pub(crate) spec: JobSpec,
    /// Name of the token that it was submitted with; empty without one.
    pub(crate) owner: String,
    /// Script whose process described it.
    pub(crate) script: Option<JobId>,
    /// Files it was submitted with.
    pub(crate) input: Vec<pb::Artifact>,
    /// Files it ended with.
    pub(crate) output: Vec<pb::Artifact>,
    /// What is done with its predictions, once they are complete.
    delivery: Option<Delivery>,
    pub(crate) log: EventLog,
    settings: Settings,
    phase: Phase,
    /// What users and the fleet let it do.
    control: Control,
    /// Everything but training.
    queue: TaskQueue<Work>,
    /// How often all partitions were begun anew.
    era: Era,
    /// The checkpoints; `None` for a job that saves none.
    checkpoints: Option<Checkpoints>,
    /// The workers that take part, as the scheduler chose them last.
    crew: Crew,
    /// The demand changed in a way that the crew must follow at once.
    unscheduled: bool,
    /// Bad records that are skipped.
    skips: Skips,
    /// The numerics classes that computed what is trained.
    numerics: Vec<Since>,
    /// Classes of which users were told that they stand by.
    strangers_told: BTreeSet<String>,
    times: status::Times,
    numbers: status::Numbers,
    effects: Vec<Effect>,
    /// Newest version that was measured, and all before it that are to be.
    measured: Option<Version>,
    /// Best version so far, of a job that selects one.
    selection: Option<Selection>,
    /// Why the last request of a worker was refused, of those that hold none of its leases.
    refusals: BTreeMap<IncarnationId, Why>,
    /// Leases whose holders hang, as far as users were told; and when that was last looked at.
    hangs_told: BTreeSet<LeaseId>,
    hangs_told_at: Duration,
    /// Users were told what a worker noticed in the records.
    records_told: bool,
    /// What workers found in its files, for later jobs.
    indexed: Vec<(String, pb::Indexed)>,
    /// Something changed that is to be written down.
    changed: bool,
}

/// Most characters of what a worker noticed in the records.
const WARNING_CHARACTERS: usize = 500;

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

/// What the edge must do for a job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Effect {
    /// Ask each ps of the placement of this number what it holds and answer with
    /// [`Job::on_ledgers`].
    Ask(u64, Vec<PsAddress>),
    /// The partitions of the placement of this number have something to lose: once that is durable,
    /// answer with [`Job::train`].
    Train(u64),
    /// Ask a ps that came back what it holds and answer with [`Job::on_ps_answer`].
    Verify(PsAddress, IncarnationId),
    /// Tell each ps that the versions of this era up to this one need not be kept for measuring any
    /// more, except the best one.
    Unpin(Vec<PsAddress>, Era, Version, Option<Version>),
    /// Look which checkpoints there are and answer with [`Job::on_found`].
    Look(Place),
    /// Ask each ps to save a version and answer with [`Job::on_save_answered`].
    Save(Vec<PsAddress>, Version),
    /// The parts of the predictions are joined: once that is durable, answer with [`Job::clear`].
    Clear,
    /// Write a manifest, keep so many checkpoints, and answer with [`Job::on_published`].
    Publish(Place, Box<Manifest>, u32),
    /// Ask each ps for its ledger and answer with [`Job::on_finished`].
    Finish(Vec<PsAddress>),
    /// The job has ended in this era: once that is durable, [archive
    /// it](crate::books::Books::close), then let each ps drop what it has of it.
    Close(Vec<PsAddress>, Era),
    /// Tell a worker at once that this lease has ended, rather than with its next heartbeat.
    Recall(IncarnationId, LeaseId),
    /// Log that the state changed, and why.
    Tell(JobState, String),
    /// Log that a lease ended without its work being done.
    Lost(LeaseId),
}

/// What follows for a job from something that one of its parts was told.
#[derive(Debug)]
enum Outcome {
    /// The edge must do this.
    Effect(Effect),
    /// Users hear of this.
    Event(Event),
}

impl Outcome {
    /// Users are warned.
    const fn warning(message: String) -> Self {
        Self::Event(Event::Warning(pb::WarningEvent { message }))
    }
}

/// The name of a process, for the reasons that users read.
pub(crate) type Who<'a> = &'a str;

impl Job {
    pub(crate) fn new(
        id: JobId,
        spec: JobSpec,
        input: Vec<pb::Artifact>,
        settings: Settings,
        now: Now,
    ) -> Self {
        let limits = limits(&spec, settings);
        let mut queue = TaskQueue::new(limits);
        let index = Index::new(&spec);
        let demand = Demand::new(spec.fleet.workers, spec.needs_one_class()).of_program(&spec);
        let checkpoints = spec.checkpoint.clone().map(|checkpoint| Checkpoints::new(checkpoint, &spec.name));
        index.work().into_iter().for_each(|work| queue.push(work));
        Self {
            id,
            spec,
            owner: String::new(),
            script: None,
            input,
            output: Vec::new(),
            delivery: None,
            log: EventLog::default(),
            settings,
            phase: Phase::new(index),
            control: Control::new(demand),
            queue,
            era: Era(0),
            checkpoints,
            crew: Crew::default(),
            unscheduled: true,
            skips: Skips::default(),
            numerics: Vec::new(),
            strangers_told: BTreeSet::new(),
            times: status::Times::submitted(now),
            numbers: status::Numbers::default(),
            effects: Vec::new(),
            measured: None,
            selection: None,
            refusals: BTreeMap::new(),
            hangs_told: BTreeSet::new(),
            hangs_told_at: Duration::ZERO,
            records_told: false,
            indexed: Vec::new(),
            changed: true,
        }
    }

    /// Takes over what earlier tasks found in its files. Workers compare the files with it.
    pub(crate) fn know(&mut self, indexes: &Indexes) {
        if let Some(index) = self.phase.indexing() {
            index.know(indexes);
        }
    }

    /// Returns what workers found in its files since the last call, with the keys of the files.
    pub(crate) fn take_indexed(&mut self) -> Vec<(String, pb::Indexed)> {
        std::mem::take(&mut self.indexed)
    }

    /// Makes it a job of a script, whose processes alone are its workers.
    pub(crate) fn set_script(&mut self, script: JobId) {
        self.script = Some(script);
        self.control.demand.set_script(&self.spec.name, script);
        self.unscheduled = true;
    }

    pub(crate) fn is_ended(&self) -> bool {
        matches!(self.phase.ends(), Some(Stage::Ended))
    }

    /// Returns whether its result is delivered, so that nothing more is trained or predicted.
    const fn is_exported(&self) -> bool {
        !self.output.is_empty() || self.delivery.is_some()
    }

    /// Returns what is to be done since the last call.
    pub(crate) fn take_effects(&mut self) -> Vec<Effect> {
        std::mem::take(&mut self.effects)
    }

    // The fleet and the time.

    /// Returns what the job wants of the fleet now.
    pub(crate) fn demand(&self) -> Demand {
        self.control.demand.when(self.may_decide_class(), self.needs_fleet())
    }

    /// Returns for how many workers the job has work now. A paused one has none.
    pub(crate) fn workers_wanted(&self) -> u64 {
        if self.is_ended() || self.paused() || !self.needs_fleet() {
            return 0;
        }
        let bounds = self.control.demand.bounds();
        // Records that are only measured do not wait for each other.
        if !self.spec.purpose.trains() {
            return bounds.max.into();
        }
        let plan = self.phase.facts().map(|facts| &facts.plan);
        wanted::workers(bounds, plan, self.spec.consistency.resolve().delay)
    }

    /// Returns whether the scheduler must choose the crew anew before work is handed out.
    pub(crate) const fn is_unscheduled(&self) -> bool {
        self.unscheduled
    }

    /// Returns the workers that take part.
    pub(crate) const fn crew(&self) -> &Crew {
        &self.crew
    }

    /// Records that the scheduler has chosen who takes part, and maybe decided the numerics class.
    pub(crate) fn on_crew(&mut self, crew: Crew) {
        if let Some(class) = crew.class().filter(|_| self.control.demand.is_undecided()) {
            self.control.demand.set_class(class.clone());
            self.changed = true;
        }
        self.crew = crew;
        self.unscheduled = false;
    }

    /// Records that the fleet changed, or may have, or time has passed; the crew follows it
    /// already.
    pub(crate) fn on_fleet(&mut self, now: Now, fleet: &Membership) {
        self.tell_strangers(now);
        self.watch_ps(now, fleet);
        self.maybe_hold(now, fleet);
        self.control.on_look(self.lacks(fleet));
        self.tell_state(now);
    }

    /// Takes back what is overdue.
    pub(crate) fn on_tick(&mut self, now: Now, fleet: &Membership) {
        let mut lost = self.queue.expire(now.since_start);
        lost.extend(self.dispatcher().map(|books| books.expire(now.since_start)).unwrap_or_default());
        self.numbers.taken_back += lost.len() as u64;
        self.on_lost(now, lost);
        if matches!(self.phase.ends(), Some(Stage::Stopping { until, .. }) if *until <= now.since_start) {
            self.on_stopped(now);
        }
        self.on_checkpoint_tick(now);
        self.warn_of_hangs(now, fleet);
    }

    /// Tells users once of each lease whose holder hangs. Nobody needs to know sooner than a second
    /// later.
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

    /// Records that a worker is gone: what it held comes back.
    pub(crate) fn worker_gone(&mut self, now: Now, worker: IncarnationId) {
        self.refusals.remove(&worker);
        let mut lost = self.queue.worker_gone(worker);
        lost.extend(self.dispatcher().map(|books| books.worker_gone(worker)).unwrap_or_default());
        self.numbers.taken_back += lost.len() as u64;
        self.on_lost(now, lost);
        if let Some(Stage::Stopping { holders, .. }) = self.phase.ends_mut() {
            holders.remove(&worker);
        }
        self.maybe_stopped(now);
    }

    /// Leases that were taken back by this start of the master, whatever for.
    pub(crate) const fn leases_taken_back(&self) -> u64 {
        self.numbers.taken_back
    }

    /// Returns why it cannot go on although its phase would.
    fn waits(&self) -> Option<&str> {
        self.control.waits().filter(|_| self.needs_fleet())
    }

    /// Returns whether training is ahead or under way.
    const fn needs_fleet(&self) -> bool {
        !matches!(self.phase, Phase::Ending(_)) && !self.is_exported()
    }

    fn lacks(&self, fleet: &Membership) -> Option<String> {
        let before = self.phase.trains().is_none();
        let lack = |what: &str, have: u32, want: u32| {
            (have < want).then(|| format!("{what} ({have} of {want} live)"))
        };
        let workers = lack("workers", self.crew.live(), self.control.demand.bounds().min);
        let workers =
            workers.map(|lack| format!("{lack}{}{}", self.lacks_of_device(), self.lacks_of_class()));
        let ps = match self.phase.partitions() {
            Some(partitions) => partitions.lack(fleet),
            None => lack("ps", fleet.ps().count() as u32, self.spec.fleet.ps),
        };
        let ps = ps.filter(|_| before);
        let lacks: Vec<_> = [ps, workers].into_iter().flatten().collect();
        (!lacks.is_empty()).then(|| format!("waits for {}", lacks.join(" and ")))
    }

    /// Returns what a job that lacks workers says of their devices. Empty if it takes any.
    fn lacks_of_device(&self) -> String {
        let wanted = self.control.demand.device();
        if wanted == WantedDevice::default() {
            return String::new();
        }
        match device::counted(self.crew.other_devices()).as_str() {
            "" => format!(" {wanted}"),
            others => format!(" {wanted}; standing by are {others}"),
        }
    }

    // The model.

    /// Records that the worker that initializes the model has described it: which partitions to
    /// open where. Partitions that have something to lose are open already.
    ///
    /// # Errors
    /// Not the holder of the `Init` lease, a model that cannot be placed, groups of the optimizer
    /// that do not fit it, or too few ps at the moment.
    pub(crate) fn describe(
        &mut self,
        worker: IncarnationId,
        lease: LeaseId,
        tensors: Vec<TensorSpec>,
        fleet: &Membership,
        load: &BTreeMap<String, usize>,
    ) -> Result<Vec<(PsAddress, pb::OpenRequest)>, Failure> {
        let (Some(Work::Init), Some(Model { facts, partitions, .. })) =
            (self.queue.work(worker, lease), self.phase.model_mut())
        else {
            return Err(ended(lease));
        };
        let count = self.spec.fleet.ps;
        Layout::check(&tensors, count)?;
        let groups = self.spec.optimizer.groups_of(&tensors);
        groups.map_err(|invalid| proto::Error::Invalid(invalid.violations))?;
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
                placement: partitions.number(),
                script: self.script.map_or(0, JobId::get),
            };
            (address, request)
        };
        Ok(partitions.beginning().map(open).collect())
    }

    /// Records that the partitions are open: where they are, for the worker.
    ///
    /// # Errors
    /// The lease has ended meanwhile.
    pub(crate) fn described(
        &mut self,
        worker: IncarnationId,
        lease: LeaseId,
    ) -> Result<pb::DescribeReply, Failure> {
        let init = matches!(self.queue.work(worker, lease), Some(Work::Init));
        let partitions = self.phase.partitions_mut().filter(|_| init).ok_or_else(|| ended(lease))?;
        partitions.open = true;
        self.changed = true;
        let restoring = partitions.beginning().all(|(.., begin)| begin > Version(0));
        Ok(pb::DescribeReply { placement: Some(partitions.placement()), restoring })
    }

    /// Returns the ps of its partitions that are not missing.
    fn reachable(&self) -> Vec<PsAddress> {
        self.phase.partitions().map(Partitions::reachable).unwrap_or_default()
    }

    /// Returns the ps of its partitions, to balance others against.
    pub(crate) fn homes(&self) -> impl Iterator<Item = String> {
        let live = self.phase.partitions().filter(|_| !self.is_ended());
        live.into_iter().flat_map(|partitions| partitions.addresses().map(|address| address.name))
    }

    /// Returns the URLs of the ps of its partitions, unless it has ended.
    pub(crate) fn ps_urls(&self) -> impl Iterator<Item = String> {
        let live = self.phase.partitions().filter(|_| !self.is_ended());
        live.into_iter().flat_map(|partitions| partitions.addresses().map(|address| address.url))
    }

    // From phase to phase.

    fn on_indexed(&mut self, now: Now) {
        let Some(index) = self.phase.index().filter(|_| self.queue.is_empty()) else { return };
        match index.facts(&self.spec) {
            Ok(facts) => {
                self.phase.on_indexed(facts, Partitions::new(Vec::new(), self.spec.fleet.ps));
                self.initialize(now);
            }
            Err(reason) => self.stop(now, failed(reason), Salvage::Nothing),
        }
        self.tell_state(now);
    }

    /// Records that some microbatches are done.
    fn on_trained(&mut self, now: Now) {
        let Some(training) = self.phase.trains_mut() else { return };
        let (events, measuring) = training.advance(self.times.training(now), &self.crew);
        measuring.into_iter().for_each(|work| self.queue.push(work));
        events.into_iter().for_each(|event| self.log.append(now.unix_ms, Event::Train(event)));
        self.maybe_trained_out(now);
        self.maybe_closed(now);
    }

    fn on_measured(&mut self, now: Now, measured: evaluations::Measured) {
        if self.is_after_the_stop(measured.version) {
            return;
        }
        self.select(&measured);
        let evaluations::Measured { epoch, version, sets } = measured;
        // The last metrics are those of the model that is exported.
        if self.best().is_none_or(|best| best == version) {
            self.numbers.take_measured(&sets);
            self.numbers.worst = sets.iter().flat_map(|set| self.worst_of(set)).collect();
        }
        self.measured = Some(version);
        self.changed = true;
        let ends = |facts: &index::Facts| facts.plan.ends_epoch(version);
        let within_epoch = self.spec.purpose.trains() && !self.phase.facts().is_some_and(ends);
        for evaluations::MeasuredSet { name: set, metrics, samples, sums, .. } in sets {
            let (epoch, step) = (epoch.get(), version.get());
            let sums = proto::convert::metric_sums(sums);
            let event = pb::EvaluationEvent { epoch, step, metrics, samples, within_epoch, set, sums };
            self.log.append(now.unix_ms, Event::Evaluation(event));
        }
        self.effects.push(Effect::Unpin(self.reachable(), self.era, version, self.best()));
        self.maybe_publish(now);
    }

    /// Exports the model once everything is trained and measured. A job that a user holds does not
    /// export: the export would be handed out.
    fn maybe_trained_out(&mut self, now: Now) {
        if self.phase.trains().is_none() || self.paused() || self.maybe_stopped_early(now) {
            return;
        }
        if !self.phase.trains().is_some_and(Training::is_done) {
            return;
        }
        if !self.spec.purpose.trains() {
            return self.maybe_measured_out(now);
        }
        let final_version = self.phase.facts().map(|facts| facts.plan.final_version());
        let epochs = self.spec.epochs;
        let trained = format!("trained {epochs} epochs");
        match self.best() {
            None => {
                self.phase.decide(End { state: JobState::Succeeded, reason: trained });
                self.export(now, final_version);
            }
            Some(best) => {
                let reason = format!("{trained}; the model is that of step {best}, the best one");
                self.phase.decide(End { state: JobState::Succeeded, reason });
                self.export_exactly(now, Some(best));
            }
        }
    }

    /// Takes up what follows from one of its parts.
    fn take_up(&mut self, now: Now, outcomes: Vec<Outcome>) {
        for outcome in outcomes {
            match outcome {
                Outcome::Effect(effect) => self.effects.push(effect),
                Outcome::Event(event) => self.log.append(now.unix_ms, event),
            }
        }
    }

    /// Tells users what a worker noticed in the records, unless they know of something already.
    /// Nothing is noticed in most jobs: `message` is empty.
    pub(crate) fn warn_of_records(&mut self, now: Now, message: &str) {
        if !message.is_empty() && !std::mem::replace(&mut self.records_told, true) {
            self.warn(now, message.chars().take(WARNING_CHARACTERS).collect());
        }
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
