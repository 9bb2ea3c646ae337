//! All that a master knows: the fleet, the jobs, and who is given what. Pure; the edge holds it
//! under one short lock.
//!
//! A caller with an incarnation that is gone must register again, so an old process never touches
//! the leases of a new one.

mod scripts;

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use net::session::Shown;
use prost::Message as _;
use proto::convert::required;
use proto::ids::{Era, IncarnationId, JobId, LeaseId};
use proto::numerics::Numerics;
use proto::pb;
use proto::pb::complete_request::Result as Report;
use proto::pb::event::Kind as Event;
use proto::spec::JobSpec;
use proto::status::{Failure, Kind};
use tokio::sync::watch;

use crate::checkpoints::{Place, Probed};
use crate::clock::Now;
use crate::config::Options;
use crate::device::{self, WorkerDevice};
use crate::ended::{Archive, Ended};
use crate::events::{EventLog, Taken};
use crate::indexes::Indexes;
use crate::job::{Effect, Holder, Job, Resume, Settings, ended, unchangeable};
use crate::journal::{Batch, Unreadable, keys};
use crate::lease::LeaseIds;
use crate::membership::{Capacity, Change, MemberRole, Membership, Process};
use crate::metrics::Metrics;
use crate::owner::{Holding, Owner};
use crate::progress::{Hang, Lingering};
use crate::ps_address::PsAddress;
use crate::scheduler;
use crate::scripts::{Script, Scripts};
use crate::secrets::Key;
use crate::why::Why;

/// Ids that one start of a master may use; the next start begins after them, so that none is ever
/// used twice.
const IDS_PER_START: u64 = 1 << 40;

/// In fleets up to this size all who wait look again whenever somebody has completed a lease. In a
/// larger one they do when a step is done, when work comes back, and at each tick.
const ASKED_AGAIN_MAX: usize = 64;

/// Leases that have ended with which a worker may be busy; more are not listened to.
const LINGERING_MAX: usize = 16;

/// Leases of which one heartbeat may speak.
const LEASES_MAX: usize = 1024;

/// Jobs of one page of the list, at most.
const PAGE_JOBS: usize = 1000;

/// Bytes of the jobs of one page of the list; a page of a single job may be longer.
const PAGE_BYTES: usize = 1 << 20;

/// Shortest time between two events that tell a job of changes of the fleet.
const FLEET_TOLD: Duration = Duration::from_secs(1);

/// Shortest time between two such events for each live job, so that all jobs get a hundred a
/// second.
const FLEET_TOLD_EACH: Duration = Duration::from_millis(10);

/// Changes of the fleet that one event names; it counts the others.
const FLEET_REASONS: usize = 8;

/// Groups of idle workers in the status of a job; the largest ones are shown.
const IDLE_GROUPS: usize = 64;

/// Names of workers in a group of idle ones.
const IDLE_NAMED: usize = 8;

/// Jobs that an error lists at most.
const LISTED_MAX: usize = 20;

/// The books of a master.
#[derive(Debug)]
pub(crate) struct Books {
    options: Options,
    /// What the secrets of members are made of.
    key: Key,
    /// Unlike every other master; the same over all starts with one journal.
    master: u64,
    /// How often a master has started with this journal.
    starts: u64,
    fleet: Membership,
    /// Jobs whose end is not durable yet: few, and walked often.
    jobs: BTreeMap<JobId, Job>,
    /// The others.
    archive: Archive,
    /// Jobs of the journal that this program cannot read: for the ps they live.
    unreadable: BTreeMap<JobId, Unreadable>,
    newest_job: JobId,
    /// What workers found in files, of whatever job.
    indexes: Indexes,
    /// Scripts that are not over, and the agents that run them.
    scripts: Scripts,
    ids: LeaseIds,
    /// Leases that expired: those of forgotten jobs, the others are with their jobs.
    metrics: Metrics,
    /// Whether there may be work for every waiting worker.
    news: bool,
    /// Workers for which there may be work.
    news_for: Vec<IncarnationId>,
    /// Processes that came and went, for the log.
    changes: Vec<Change>,
    /// What workers are still busy with although the leases have ended.
    lingering: BTreeMap<IncarnationId, Vec<Lingering>>,
    /// Workers that hung when they asked for work last, and have said nothing else since.
    hung: BTreeSet<IncarnationId>,
    /// What the journal need not keep any more.
    forgotten: Batch,
    /// Changes of the fleet that jobs were not told of yet, and when they were told last.
    untold: Untold,
}

/// What follows from the description of a model.
#[derive(Debug)]
pub(crate) struct Described {
    pub(crate) job: JobId,
    /// What to open where.
    pub(crate) partitions: Vec<(PsAddress, pb::OpenRequest)>,
    /// The place of a job's checkpoints, and a name that no probe had before.
    pub(crate) probe: Option<(Place, String)>,
}

/// What a user does to a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Changed {
    /// It ends; one that has ended stays as it is.
    Cancelled,
    /// Something that one that has ended is not any more: `scaled`, `paused`, `resumed`.
    Else(&'static str),
}

/// Changes of the fleet that jobs are to be told of.
#[derive(Debug, Default)]
struct Untold {
    reasons: Vec<String>,
    /// Number of reasons that are only counted.
    more: u64,
    /// Time at which jobs were last told, since the start of the master.
    told: Option<Duration>,
}

impl Untold {
    fn add(&mut self, reason: &str) {
        match self.reasons.len() < FLEET_REASONS {
            true => self.reasons.push(reason.to_owned()),
            false => self.more += 1,
        }
    }

    /// Drops the changes so far, so that no job is told of them.
    fn forget(&mut self) {
        self.reasons.clear();
        self.more = 0;
    }

    /// Returns what to tell now, when there is anything and the last time is at least `pause` ago.
    fn take(&mut self, now: Duration, pause: Duration) -> Option<String> {
        if self.reasons.is_empty() || self.told.is_some_and(|told| now < told + pause) {
            return None;
        }
        self.told = Some(now);
        let reasons = std::mem::take(&mut self.reasons).join("; ");
        Some(match std::mem::take(&mut self.more) {
            0 => reasons,
            more => format!("{reasons}; and {more} more changes"),
        })
    }
}

/// What a worker that asks for work gets.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Answer {
    Lease(Box<pb::Lease>),
    /// There is none that it may have now. There may be one after this time, also if nothing
    /// happens.
    Wait(Option<Duration>),
}

impl Books {
    /// Creates the books of a master without jobs. `key`: random, for this start alone; `identity`:
    /// of this master over all its starts; `starts`: number of its starts with this data folder;
    /// `newest_job`: the newest job that left files there.
    pub(crate) fn new(options: Options, key: Key, identity: u64, starts: u64, newest_job: JobId) -> Self {
        let first = (starts - 1) * IDS_PER_START + 1;
        Self {
            key,
            master: identity,
            starts,
            fleet: Membership::new(IncarnationId(first), options.death, options.members_max),
            jobs: BTreeMap::new(),
            archive: Archive::default(),
            unreadable: BTreeMap::new(),
            newest_job,
            indexes: Indexes::default(),
            scripts: Scripts::default(),
            ids: LeaseIds::starting_at(first),
            metrics: Metrics::default(),
            news: false,
            news_for: Vec::new(),
            changes: Vec::new(),
            lingering: BTreeMap::new(),
            hung: BTreeSet::new(),
            forgotten: Batch::default(),
            untold: Untold::default(),
            options,
        }
    }

    /// Returns whether there may be work for those who wait, since the last call.
    pub(crate) fn take_news(&mut self) -> bool {
        std::mem::take(&mut self.news)
    }

    /// Returns the workers for which there may be work, since the last call.
    pub(crate) fn take_news_for(&mut self) -> Vec<IncarnationId> {
        std::mem::take(&mut self.news_for)
    }

    /// Returns the processes that came and went since the last call.
    pub(crate) fn take_changes(&mut self) -> Vec<Change> {
        std::mem::take(&mut self.changes)
    }

    /// Returns what the edge must do since the last call. Crews follow the demands of their jobs
    /// from then on.
    pub(crate) fn take_effects(&mut self) -> Vec<(JobId, Effect)> {
        self.follow_demands();
        let of =
            |job: &mut Job| job.take_effects().into_iter().map(|effect| (job.id, effect)).collect::<Vec<_>>();
        self.jobs.values_mut().flat_map(of).collect()
    }

    /// Sets what workers found in files in earlier starts of the master.
    pub(crate) fn set_indexes(&mut self, indexes: Indexes) {
        self.indexes = indexes;
    }

    /// Takes up a job that an earlier start of the master wrote down.
    ///
    /// # Errors
    /// It does not fit together: what to [keep](Self::keep) instead.
    pub(crate) fn restore(
        &mut self,
        now: Now,
        record: pb::JobRecord,
        log: EventLog,
    ) -> Result<(), Unreadable> {
        let id = JobId(record.job);
        let name = record.spec_json.clone();
        let mut job = Job::restore(record, log, self.settings(), now).map_err(|reason| {
            let name = serde_json::from_str::<Named>(&name).map_or("job".to_owned(), |named| named.name);
            Unreadable::new(id, &name, reason)
        })?;
        job.know(&self.indexes);
        self.newest_job = self.newest_job.max(id);
        self.jobs.insert(id, job);
        self.schedule(now, Some(id));
        Ok(())
    }

    /// Takes up a job that had ended in an earlier start of the master.
    pub(crate) fn archive(&mut self, id: JobId, job: Ended) {
        self.newest_job = self.newest_job.max(id);
        self.archive.insert(id, job);
    }

    /// Keeps a job of the journal that cannot be read: users see it, and no ps drops it.
    pub(crate) fn keep(&mut self, job: Unreadable) {
        self.newest_job = self.newest_job.max(job.job);
        self.unreadable.insert(job.job, job);
    }

    /// Returns what is to be written down since the last call.
    pub(crate) fn take_batch(&mut self, now: Now) -> Batch {
        let mut batch = std::mem::take(&mut self.forgotten);
        for job in self.jobs.values_mut() {
            let (id, Taken { events, oldest }) = (job.id, job.log.take());
            if let Some(oldest) = oldest {
                batch.remove_range(keys::events_below(id, oldest));
            }
            for event in events {
                batch.set(keys::event(id, event.sequence), event.encode_to_vec());
            }
            for (key, found) in job.take_indexed() {
                self.indexes.keep(key, found, &mut batch);
            }
            if let Some(record) = job.take_record(now) {
                batch.set(keys::job(id), record.encode_to_vec());
            }
        }
        for (id, record) in self.scripts.take_records() {
            batch.set(keys::script(id), record.encode_to_vec());
        }
        batch
    }

    /// Removes a job and its events from the journal.
    fn forget(&mut self, id: JobId) {
        self.forgotten.remove_range(keys::events(id));
        self.forgotten.remove(keys::job(id));
    }

    pub(crate) fn metrics(&self) -> Metrics {
        let jobs_in = |state| self.live_jobs().filter(|job| job.state().0 == state).count() as u64;
        Metrics {
            jobs_live: self.live_jobs().count() as u64,
            jobs_pending: jobs_in(pb::JobState::Pending),
            jobs_running: jobs_in(pb::JobState::Running),
            workers_live: self.fleet.workers_live().into(),
            workers_cuda_live: self.fleet.workers_cuda_live(),
            workers_wanted: self.live_jobs().map(Job::workers_wanted).sum(),
            ps_live: self.fleet.ps_live().into(),
            leases_expired: self.metrics.leases_expired
                + self.jobs.values().map(Job::leases_taken_back).sum::<u64>(),
            ..self.metrics
        }
    }

    // The fleet.

    /// Records that time has passed.
    pub(crate) fn on_tick(&mut self, now: Now) {
        for change in self.fleet.expire(now.since_start) {
            self.on_change(now, change);
        }
        let held = self.live_jobs().flat_map(|job| job.hangs(now)).map(|hang| hang.worker);
        let left = self.lingering.iter();
        let left = left.filter(|(_, all)| all.iter().any(|lingering| self.still_hangs(now, lingering)));
        let hanging = held.chain(left.map(|(&worker, _)| worker)).chain(self.hung.iter().copied()).collect();
        self.fleet.set_hanging(hanging);
        for job in self.jobs.values_mut().filter(|job| !job.is_ended()) {
            job.on_tick(now, &self.fleet);
        }
        // Whether a slow worker may have work depends on the time.
        self.schedule(now, None);
        self.maybe_tell_fleet(now);
        self.scripts.expire(now.since_start, self.options.death);
        self.follow_scripts(now);
    }

    pub(crate) fn register(
        &mut self,
        now: Now,
        request: &pb::RegisterRequest,
    ) -> Result<pb::RegisterReply, Failure> {
        let process = process(request)?;
        let (incarnation, change) = self.fleet.register(now.since_start, process)?;
        if let Some(change) = change {
            self.on_change(now, change);
        }
        Ok(pb::RegisterReply {
            incarnation: incarnation.get(),
            heartbeat_ms: u32::try_from(self.options.heartbeat.as_millis()).unwrap_or(u32::MAX),
            master: self.master,
            starts: self.starts,
            secret: self.key.secret(incarnation).bytes().to_vec().into(),
        })
    }

    /// Checks whether a call that speaks for `incarnation` is of that member.
    ///
    /// # Errors
    /// The member is gone, or the call is of another process; then nothing may be done for it.
    pub(crate) fn check_sender(
        &self,
        shown: Option<Shown>,
        incarnation: IncarnationId,
    ) -> Result<(), Failure> {
        self.fleet.member(incarnation)?;
        self.key.check(shown, incarnation)
    }

    /// Takes the first heartbeat of a stream. Returns the number of the stream, for
    /// [`stream_broken`](Self::stream_broken), and the answer.
    pub(crate) fn stream_opened(
        &mut self,
        now: Now,
        request: &pb::HeartbeatRequest,
    ) -> Result<(u64, pb::HeartbeatReply), Failure> {
        let stream = self.fleet.stream_opened(IncarnationId(request.incarnation))?;
        Ok((stream, self.heartbeat(now, request)?))
    }

    pub(crate) fn heartbeat(
        &mut self,
        now: Now,
        request: &pb::HeartbeatRequest,
    ) -> Result<pb::HeartbeatReply, Failure> {
        let incarnation = IncarnationId(request.incarnation);
        let member = self.fleet.member(incarnation)?;
        if request.leases.len() > LEASES_MAX {
            let found = request.leases.len();
            let message = format!(
                "HeartbeatRequest.leases: expected at most {LEASES_MAX}, found {found}; a worker holds a few leases at once"
            );
            return Err(Failure::new(Kind::Malformed, message));
        }
        if member.process.role != MemberRole::Ps
            && !(request.saved.is_empty() && request.save_failed.is_empty())
        {
            let message =
                "HeartbeatRequest.saved: a worker holds no partition, so it reports no checkpoint of one";
            return Err(Failure::new(Kind::Denied, message));
        }
        let drained_before = member.draining;
        if let Some(change) = self.fleet.beat(now.since_start, incarnation, request.draining)? {
            self.on_change(now, change);
        } else if request.draining && !drained_before {
            // It takes no more work, so the others share it from now on.
            self.on_fleet(now);
        }
        self.fleet.device_said(incarnation, request.device);
        let mut lost: Vec<_> = request.leases.iter().map(|progress| LeaseId(progress.lease)).collect();
        for job in self.jobs.values_mut().filter(|job| !job.is_ended()) {
            let good = job.renew(now, incarnation, &lost);
            let of_job = request.leases.iter().filter(|said| good.contains(&LeaseId(said.lease)));
            of_job.for_each(|said| job.progress(now, incarnation, said));
            lost.retain(|lease| !good.contains(lease));
        }
        // It has become free for work that goes before.
        if request.leases.iter().any(|said| said.phase() == pb::Phase::WaitingForRoom) {
            self.news_for.push(incarnation);
        }
        let lingering = request.lingering.iter().take(LINGERING_MAX);
        let lingering: Vec<_> =
            lingering.filter_map(|said| Lingering::heard(now.since_start, said)).collect();
        match lingering.is_empty() {
            true => drop(self.lingering.remove(&incarnation)),
            false => drop(self.lingering.insert(incarnation, lingering)),
        }
        // Until it has heard of a lease that has ended it says nothing of what is left of it.
        if lost.is_empty() && self.hung.contains(&incarnation) && !self.hangs(now, incarnation) {
            self.hung.remove(&incarnation);
        }
        let taken = self.take_reports(now, request);
        let may_leave = request.draining && self.live_jobs().all(|job| job.lets_go(incarnation));
        Ok(pb::HeartbeatReply { reports_taken: taken, may_leave, ..self.reply(lost) })
    }

    /// Takes a ps's reports of checkpoints. Returns those that it need not send again. Only
    /// the process that holds a partition says anything of it.
    fn take_reports(&mut self, now: Now, request: &pb::HeartbeatRequest) -> Vec<u64> {
        let ps = IncarnationId(request.incarnation);
        let name = self.fleet.member(ps).map(|member| member.process.name.clone()).unwrap_or_default();
        let mut taken = Vec::new();
        for saved in &request.saved {
            let job = self.jobs.get_mut(&JobId(saved.job)).filter(|job| !job.is_ended());
            let is_taken = |job: &mut Job| match job.holder(saved.partition, ps, &name) {
                Holder::Sender => job.on_saved(now, saved),
                Holder::SenderUnlessRestarted => false,
                Holder::Another => true,
            };
            if job.is_none_or(is_taken) {
                taken.push(saved.report);
            }
        }
        for failed in &request.save_failed {
            let job = self.jobs.get_mut(&JobId(failed.job)).filter(|job| !job.is_ended());
            let is_taken = |job: &mut Job| match job.holder(failed.partition, ps, &name) {
                Holder::Sender => {
                    job.on_save_failed(now, failed);
                    true
                }
                Holder::SenderUnlessRestarted => false,
                Holder::Another => true,
            };
            if job.is_none_or(is_taken) {
                taken.push(failed.report);
            }
        }
        taken
    }

    /// Returns the answer to a heartbeat, even to one that is only due. `lost`: leases of the
    /// sender that have ended.
    pub(crate) fn reply(&self, lost: Vec<LeaseId>) -> pb::HeartbeatReply {
        pb::HeartbeatReply {
            leases_lost: lost.into_iter().map(LeaseId::get).collect(),
            // A ps keeps what it has of a job until the end of the job is durable.
            // The number of a script is that of its first job, which may begin at any moment.
            jobs: self
                .unreadable
                .keys()
                .chain(self.jobs.keys())
                .copied()
                .chain(self.unjoined())
                .map(JobId::get)
                .collect(),
            newest_job: self.newest_job.get(),
            reports_taken: Vec::new(),
            may_leave: false,
        }
    }

    pub(crate) fn stream_broken(&mut self, now: Now, incarnation: IncarnationId, stream: u64) {
        if let Some(change) = self.fleet.stream_broken(incarnation, stream) {
            self.on_change(now, change);
        }
    }

    fn on_change(&mut self, now: Now, change: Change) {
        if change.gone && change.role == MemberRole::Worker {
            self.lingering.remove(&change.incarnation);
            self.hung.remove(&change.incarnation);
            for job in self.jobs.values_mut().filter(|job| !job.is_ended()) {
                job.worker_gone(now, change.incarnation);
            }
        }
        self.untold.add(&change.reason);
        self.maybe_tell_fleet(now);
        self.changes.push(change);
        self.on_fleet(now);
    }

    /// Tells jobs of changes of the fleet: of the first one at once, of those that follow closely
    /// together.
    fn maybe_tell_fleet(&mut self, now: Now) {
        let live = u32::try_from(self.live_jobs().count()).unwrap_or(u32::MAX);
        if live == 0 {
            // The next job begins with the fleet as it is then.
            self.untold.forget();
        }
        let pause = FLEET_TOLD.max(FLEET_TOLD_EACH * live);
        let Some(reason) = self.untold.take(now.since_start, pause) else { return };
        let event = pb::FleetEvent {
            generation: self.fleet.generation().get(),
            workers: self.fleet.workers_live(),
            ps: self.fleet.ps_live(),
            reason,
        };
        for job in self.jobs.values_mut().filter(|job| !job.is_ended()) {
            job.log.append(now.unix_ms, Event::Fleet(event.clone()));
        }
    }

    fn on_fleet(&mut self, now: Now) {
        self.schedule(now, None);
    }

    /// Chooses the crews anew, and lets jobs look at the fleet: `only` one of them, or all.
    fn schedule(&mut self, now: Now, only: Option<JobId>) {
        for id in self.choose_crews(|job| only.is_none_or(|only| only == job.id)) {
            if let Some(job) = self.jobs.get_mut(&id) {
                job.on_fleet(now, &self.fleet);
            }
        }
    }

    /// Chooses the crews of jobs whose demand changed since the last time.
    fn follow_demands(&mut self) {
        if self.live_jobs().any(Job::is_unscheduled) {
            self.choose_crews(Job::is_unscheduled);
        }
    }

    /// Chooses the crews of some live jobs anew; answers which jobs those are.
    fn choose_crews(&mut self, some: impl Fn(&Job) -> bool) -> Vec<JobId> {
        let jobs = self.live_jobs().filter(|job| some(job));
        let demands = jobs.map(|job| (job.id, job.demand(), job.crew()));
        let crews = scheduler::schedule(&scheduler::able(&self.fleet), demands);
        // There may be work for those that take part now.
        self.news |= !crews.is_empty();
        let chosen = crews.iter().map(|(id, _)| *id).collect();
        for (id, crew) in crews {
            if let Some(job) = self.jobs.get_mut(&id) {
                job.on_crew(crew);
            }
        }
        chosen
    }

    // Leases.

    /// Returns work for a worker, or the time of the next look if nothing happens before.
    pub(crate) fn lease(&mut self, now: Now, incarnation: IncarnationId) -> Result<Answer, Failure> {
        let member = self.fleet.member(incarnation)?;
        if member.process.role != MemberRole::Worker {
            return Err(Failure::new(
                Kind::Malformed,
                "LeaseRequest.incarnation: expected a worker, found a ps",
            ));
        }
        if !member.live || member.draining {
            return Ok(Answer::Wait(None));
        }
        // Who hangs would hang in more.
        if self.hangs(now, incarnation) {
            self.hung.insert(incarnation);
        }
        if self.hung.contains(&incarnation) {
            return Ok(Answer::Wait(None));
        }
        let held = self.live_jobs().map(|job| (job.id, job.train_leases(incarnation)));
        let turns = scheduler::turns(incarnation, held);
        let (ids, jobs) = (&mut self.ids, &mut self.jobs);
        let mut again: Option<Duration> = None;
        for (job, asker) in &turns {
            let Some(job) = jobs.get_mut(job) else { continue };
            match job.lease(now, ids, *asker) {
                Ok(lease) => {
                    self.metrics.leases_granted += 1;
                    self.metrics.lanes_moved += job.take_moved_lanes();
                    return Ok(Answer::Lease(Box::new(lease)));
                }
                Err(why) => again = again.into_iter().chain(why.again()).min(),
            }
        }
        for (job, asker) in &turns {
            let Some(job) = jobs.get_mut(job) else { continue };
            match job.copy(now, ids, *asker) {
                Ok(lease) => {
                    self.metrics.leases_granted += 1;
                    self.metrics.leases_copied += 1;
                    self.metrics.lanes_moved += job.take_moved_lanes();
                    return Ok(Answer::Lease(Box::new(lease)));
                }
                Err(from) => again = again.into_iter().chain(from).min(),
            }
        }
        Ok(Answer::Wait(again.map(|again| again.saturating_sub(now.since_start))))
    }

    /// Returns whether a worker hangs, in something that it holds or in what is left of a lease
    /// that has ended.
    fn hangs(&self, now: Now, worker: IncarnationId) -> bool {
        self.live_jobs().any(|job| job.hangs_in(now, worker))
            || self
                .lingering
                .get(&worker)
                .into_iter()
                .flatten()
                .any(|lingering| self.still_hangs(now, lingering))
    }

    /// Returns whether what is left of a lease hangs. A call of the model is given as long as any
    /// other place.
    fn still_hangs(&self, now: Now, lingering: &Lingering) -> bool {
        let live = self.jobs.get(&lingering.job).map(|job| job.spec.limits.stall);
        let stall = live.or_else(|| Some(self.archive.get(lingering.job)?.stall));
        stall.is_some_and(|stall| lingering.progress.hangs_from(None, stall) <= now.since_start)
    }

    /// Records that a task is done; false when its lease had ended, then nothing changed.
    pub(crate) fn complete(&mut self, now: Now, request: pb::CompleteRequest) -> Result<bool, Failure> {
        let (worker, lease) = (IncarnationId(request.incarnation), LeaseId(request.lease));
        let report = required("CompleteRequest", "result", request.result)?;
        let Some(job) = self.job_of(worker, lease)? else { return Ok(false) };
        let before = job.outlook();
        // Before the report, which may end the job: users read no further than the end.
        job.warn_of_records(now, &request.warning);
        job.complete(now, worker, lease, report)?;
        // A thousand who wait, asked again at every lease that somebody completes, would keep the
        // lock busy. A few may be.
        let matters = job.outlook() != before || self.fleet.len() <= ASKED_AGAIN_MAX;
        self.metrics.leases_completed += 1;
        self.follow_demands();
        match matters {
            true => self.news = true,
            false => self.news_for.push(worker),
        }
        Ok(true)
    }

    /// Completes a task, and answers the next work of a worker that wants more, when there is some
    /// at once.
    pub(crate) fn complete_and_go_on(
        &mut self,
        now: Now,
        request: pb::CompleteRequest,
    ) -> Result<(bool, Option<pb::Lease>), Failure> {
        let (worker, more) = (IncarnationId(request.incarnation), request.more);
        let accepted = self.complete(now, request)?;
        let next = match more.then(|| self.lease(now, worker)).transpose()? {
            Some(Answer::Lease(lease)) => Some(*lease),
            Some(Answer::Wait(_)) | None => None,
        };
        Ok((accepted, next))
    }

    pub(crate) fn fail(&mut self, now: Now, request: &pb::FailRequest) -> Result<(), Failure> {
        let (worker, lease) = (IncarnationId(request.incarnation), LeaseId(request.lease));
        let who = format!("worker `{}`", self.fleet.member(worker)?.process.name);
        if let Some(job) = self.job_of(worker, lease)? {
            job.fail(now, worker, &who, lease, request);
            self.metrics.leases_failed += 1;
            self.news = true;
        }
        Ok(())
    }

    /// Records that a worker found bad records that the job may skip.
    ///
    /// # Errors
    /// The lease has ended, the request makes no sense, or the job skips too many and fails.
    pub(crate) fn skip(&mut self, now: Now, request: pb::SkipRequest) -> Result<(), Failure> {
        let (worker, lease) = (IncarnationId(request.incarnation), LeaseId(request.lease));
        self.job_of(worker, lease)?.ok_or_else(|| ended(lease))?.skip(now, worker, lease, request)
    }

    pub(crate) fn release(&mut self, now: Now, request: pb::ReleaseRequest) -> Result<(), Failure> {
        let (worker, lease) = (IncarnationId(request.incarnation), LeaseId(request.lease));
        if let Some(job) = self.job_of(worker, lease)? {
            job.release(now, worker, lease, &request.trained.unwrap_or_default())?;
            request.not_held.into_iter().for_each(|partition| job.doubt(partition));
            self.metrics.leases_released += 1;
            self.news = true;
        }
        Ok(())
    }

    /// Returns the job that a good lease is of. A lease that has ended is counted and answered with
    /// `None`.
    fn job_of(&mut self, worker: IncarnationId, lease: LeaseId) -> Result<Option<&mut Job>, Failure> {
        self.fleet.member(worker)?;
        let job = self.jobs.values_mut().find(|job| !job.is_ended() && job.holds(worker, lease));
        self.metrics.reports_late += u64::from(job.is_none());
        Ok(job)
    }

    /// Returns the job that a good lease exports.
    pub(crate) fn exported_by(&self, worker: IncarnationId, lease: LeaseId) -> Option<JobId> {
        self.live_jobs().find(|job| job.exports(worker, lease)).map(|job| job.id)
    }

    // The model.

    pub(crate) fn describe(&mut self, request: &pb::DescribeRequest) -> Result<Described, Failure> {
        let (worker, lease) = (IncarnationId(request.incarnation), LeaseId(request.lease));
        let tensors = proto::convert::tensors(request.tensors.clone())?;
        let mut load = BTreeMap::new();
        for home in self.jobs.values().flat_map(Job::homes) {
            *load.entry(home).or_default() += 1;
        }
        let fleet = &self.fleet;
        fleet.member(worker)?;
        let job = self.jobs.values_mut().find(|job| !job.is_ended() && job.holds(worker, lease));
        let job = job.ok_or_else(|| ended(lease))?;
        let partitions = job.describe(worker, lease, tensors, fleet, &load)?;
        let probe = job.place().map(|place| (place, format!("{:016x}-{lease}", self.master)));
        Ok(Described { job: job.id, partitions, probe })
    }

    /// Records that it was looked whether the ps that are to hold the model see the same store as
    /// this master.
    ///
    /// # Errors
    /// They do not, so the job has failed; or the lease has ended meanwhile.
    pub(crate) fn probed(
        &mut self,
        now: Now,
        worker: IncarnationId,
        lease: LeaseId,
        probed: Probed,
    ) -> Result<(), Failure> {
        self.news = true;
        self.job_of(worker, lease)?.ok_or_else(|| ended(lease))?.on_probed(now, lease, probed)
    }

    pub(crate) fn described(
        &mut self,
        worker: IncarnationId,
        lease: LeaseId,
    ) -> Result<pb::DescribeReply, Failure> {
        self.job_of(worker, lease)?.ok_or_else(|| ended(lease))?.described(worker, lease)
    }

    // Jobs.

    /// Returns the number of a job that no script described.
    ///
    /// # Errors
    /// Those of [`admit_for`](Self::admit_for).
    #[cfg(test)]
    pub(crate) fn admit(&mut self, spec: &JobSpec) -> Result<JobId, Failure> {
        self.admit_for(None, spec)
    }

    /// Returns the number that a job gets if it is taken now. `script`: a process of this script
    /// describes the job. Forgets the oldest job that has ended when there are too many.
    ///
    /// # Errors
    /// The job cannot be taken, or too many jobs live.
    pub(crate) fn admit_for(&mut self, script: Option<JobId>, spec: &JobSpec) -> Result<JobId, Failure> {
        if spec.limits.lease < 2 * self.options.heartbeat {
            return Err(Failure::new(
                Kind::Malformed,
                format!(
                    "limits.lease = {:?} is below two heartbeats of this master ({:?} each), so leases would end while \
                     their holders live; set {:?} or more",
                    spec.limits.lease,
                    self.options.heartbeat,
                    2 * self.options.heartbeat
                ),
            ));
        }
        if let Some(other) = self.live_jobs().find(|job| job.saves_like(spec)) {
            return Err(Failure::new(
                Kind::Malformed,
                format!(
                    "{} saves its checkpoints at the same place under the same name; cancel it, or set another name or \
                     checkpoint.url",
                    other.name()
                ),
            ));
        }
        if let Some(other) = self.live_jobs().find(|job| job.predicts_like(spec)) {
            return Err(Failure::new(
                Kind::Malformed,
                format!(
                    "{} writes its predictions to the same file; cancel it, or choose another file",
                    other.name()
                ),
            ));
        }
        let next = self.newest_job.next();
        let id = script.map_or(next, |script| self.scripts.number(script, &spec.name, next));
        // A script counts as a job, so its first one has room.
        if id == next {
            self.make_room()?;
        }
        Ok(id)
    }

    /// Forgets jobs that have ended until there is room for one more.
    fn make_room(&mut self) -> Result<(), Failure> {
        while self.jobs.len() + self.unjoined().count() + self.archive.len() >= self.options.jobs_max {
            let oldest = self.archive.pop_oldest().ok_or_else(|| {
                let found = self.jobs.len() + self.unjoined().count();
                let message =
                    format!("{found} jobs have not ended, the most that this master takes (jobs_max)");
                Failure::new(Kind::Full, message)
            })?;
            self.forget(oldest);
        }
        Ok(())
    }

    /// Checks whether `owner` may submit one more job, with files of `bytes`.
    ///
    /// # Errors
    /// It has all that it may have.
    pub(crate) fn check_owner(&self, owner: &Owner, bytes: u64) -> Result<(), Failure> {
        let mut has = self.live_jobs().filter(|job| job.owner == owner.name).fold(
            Holding::default(),
            |Holding { jobs, artifact_bytes }, job| Holding {
                jobs: jobs + 1,
                artifact_bytes: artifact_bytes + job.input.iter().map(|file| file.size).sum::<u64>(),
            },
        );
        for (id, script) in self.scripts.iter().filter(|(_, script)| script.owner == owner.name) {
            has.jobs += u64::from(!self.jobs.contains_key(&id));
            has.artifact_bytes += script.bundle.size;
        }
        owner.check(has, bytes)
    }

    /// Takes the job that was just [admitted](Self::admit).
    pub(crate) fn submit(
        &mut self,
        now: Now,
        id: JobId,
        spec: JobSpec,
        input: Vec<pb::Artifact>,
        resume: Option<Resume>,
        owner: String,
    ) -> pb::SubmitReply {
        self.take_job(now, id, spec, input, resume, owner, None)
    }

    /// Takes a job that a process of a script describes. The caller checked that the script lives.
    pub(crate) fn submit_of_script(
        &mut self,
        now: Now,
        id: JobId,
        spec: JobSpec,
        input: Vec<pb::Artifact>,
        script: JobId,
    ) -> pb::SubmitReply {
        let owner = self.scripts.get(script).map(|script| script.owner.clone()).unwrap_or_default();
        self.scripts.joined(script, &spec.name, id);
        self.take_job(now, id, spec, input, None, owner, Some(script))
    }

    #[expect(clippy::too_many_arguments, reason = "each is a fact of its own, and two callers have them")]
    fn take_job(
        &mut self,
        now: Now,
        id: JobId,
        spec: JobSpec,
        input: Vec<pb::Artifact>,
        resume: Option<Resume>,
        owner: String,
        script: Option<JobId>,
    ) -> pb::SubmitReply {
        let mut job = Job::new(id, spec, input, self.settings(), now);
        job.owner = owner;
        script.into_iter().for_each(|script| job.set_script(script));
        job.know(&self.indexes);
        if let Some(resume) = resume {
            job.resume_run(resume);
        }
        let reply = pb::SubmitReply { job: id.get(), name: job.name() };
        self.newest_job = self.newest_job.max(id);
        self.jobs.insert(id, job);
        self.metrics.jobs_submitted += 1;
        self.schedule(now, Some(id));
        reply
    }

    /// Returns the job in which a program with this specification takes part: the live one of its
    /// name, or with `rejoin` its newest one. A process of a script takes part in jobs of the
    /// script alone, also in one that has ended. `None`: there is none.
    ///
    /// # Errors
    /// No program drives such a job, the job has other settings, or the script is over.
    pub(crate) fn join(
        &self,
        spec: &JobSpec,
        script: Option<JobId>,
    ) -> Result<Option<pb::SubmitReply>, Failure> {
        if !spec.is_driven() {
            let message =
                "SubmitRequest.join: only a job that a program drives can be joined; submit this one";
            return Err(Failure::new(Kind::Malformed, message));
        }
        if let Some(id) = script {
            let script = self.scripts.get(id).ok_or_else(|| {
                let message = format!("script {id} is over, so its processes take part in nothing any more");
                Failure::new(Kind::Ended, message)
            })?;
            let archived = script.jobs.get(&spec.name).filter(|id| self.archive.get(**id).is_some());
            if let Some(&id) = archived {
                return Ok(Some(pb::SubmitReply { job: id.get(), name: self.name_of(id) }));
            }
        }
        let rejoin = self.options.rejoin || script.is_some();
        let of_script = |job: &&Job| job.script == script && job.spec.name == spec.name;
        let takes = |job: &&Job| of_script(job) && (rejoin || !job.is_ended());
        let Some(job) = self.jobs.values().rev().find(takes) else {
            // Settings of an archived job are not kept. They were compared while it lived.
            let ended = self.archive.newest_of(&spec.name).filter(|_| rejoin && script.is_none());
            return Ok(ended.map(|id| pb::SubmitReply { job: id.get(), name: self.name_of(id) }));
        };
        let differing = job.spec.differences(spec);
        if differing.is_empty() {
            return Ok(Some(pb::SubmitReply { job: job.id.get(), name: job.name() }));
        }
        let message = format!(
            "{} {}, and this process describes another job: {}; start it with the same script and data, or give \
             its job another name",
            job.name(),
            if job.is_ended() { "has ended" } else { "lives" },
            differing.join(", ")
        );
        Err(Failure::new(Kind::Malformed, message))
    }

    /// Returns the job that a user names: by its number, as `NAME-ID`, or by the name of its
    /// specification (the newest).
    pub(crate) fn find(&self, name: &str) -> Result<JobId, Failure> {
        if let Some(job) = self.find_unreadable(name) {
            return Err(Failure::new(Kind::Internal, format!("job {}: {}", job.name, job.reason)));
        }
        let by_number = name.parse().ok().map(JobId);
        let is_known = |id: &JobId| {
            self.jobs.contains_key(id) || self.archive.get(*id).is_some() || self.scripts.get(*id).is_some()
        };
        let by_number = by_number.filter(is_known);
        let script = |matches: &dyn Fn(JobId, &Script) -> bool| {
            self.scripts.iter().find(|(id, script)| matches(*id, script)).map(|(id, _)| id)
        };
        let live = |matches: &dyn Fn(&Job) -> bool| {
            self.jobs.values().rev().find(|job| matches(job)).map(|job| job.id)
        };
        let found = by_number
            .or_else(|| live(&|job| job.name() == name))
            .or_else(|| script(&|id, script| script.full_name(id) == name))
            .or_else(|| self.archive.called(name))
            .or_else(|| {
                let of_script = script(&|_, script| script.description.name == name);
                live(&|job| job.spec.name == name).max(of_script).max(self.archive.newest_of(name))
            });
        found.ok_or_else(|| {
            let ids = self.ids_after(JobId(0), |ids| ids.rev().take(LISTED_MAX + 1).collect());
            let names = ids.iter().rev().take(LISTED_MAX).map(|&id| self.name_of(id));
            let names = names.collect::<Vec<_>>().join(", ");
            let known = match ids.len() {
                0 => "this master has none".to_owned(),
                1..=LISTED_MAX => format!("there are {names}"),
                _ => format!("there are {names}, .."),
            };
            Failure::new(Kind::NotFound, format!("no job `{name}`; {known}"))
        })
    }

    /// `NAME-ID` of a job.
    fn name_of(&self, id: JobId) -> String {
        let live = self.jobs.get(&id).map(Job::name);
        let ended = || Some(self.archive.get(id)?.status().name);
        let script = || self.scripts.get(id).map(|script| script.full_name(id));
        live.or_else(ended).or_else(script).unwrap_or_default()
    }

    /// Returns numbers of readable jobs after `after`, in order. `some` selects them among the live
    /// and among the ended jobs.
    fn ids_after(
        &self,
        after: JobId,
        some: impl Fn(&mut dyn DoubleEndedIterator<Item = JobId>) -> Vec<JobId>,
    ) -> Vec<JobId> {
        let mut live = self.jobs.range(after.next()..).map(|(&id, _)| id);
        let mut ids = some(&mut live);
        ids.extend(some(&mut self.archive.after(after)));
        ids.extend(some(&mut self.unjoined().filter(|id| *id > after).collect::<Vec<_>>().into_iter()));
        ids.sort_unstable();
        ids
    }

    /// Returns the unreadable job that a user names.
    fn find_unreadable(&self, name: &str) -> Option<&Unreadable> {
        let by_number = name.parse().ok().and_then(|id| self.unreadable.get(&JobId(id)));
        by_number.or_else(|| self.unreadable.values().find(|job| job.name == name))
    }

    /// Gives up an unreadable job that a user names: the journal forgets it, and its ps drop it.
    /// `None` when there is none.
    pub(crate) fn give_up(&mut self, name: &str) -> Option<pb::JobStatus> {
        let id = self.find_unreadable(name)?.job;
        let job = self.unreadable.remove(&id)?;
        self.forget(id);
        let reason = "given up by a user; this program could not read it".to_owned();
        Some(pb::JobStatus { state: pb::JobState::Cancelled.into(), reason, ..unreadable_status(&job) })
    }

    /// Returns everything that a user may ask of the job that it names.
    ///
    /// # Errors
    /// There is none.
    pub(crate) fn status(&self, now: Now, name: &str) -> Result<pb::JobStatus, Failure> {
        match self.find_unreadable(name) {
            Some(job) => Ok(unreadable_status(job)),
            None => self.find(name).map(|id| self.status_of(now, id)),
        }
    }

    /// Returns the events of a job with larger numbers than `after`, up to `count` of those in
    /// memory, and whether it has ended. `None` instead of events: the first of them is in the
    /// journal alone.
    ///
    /// # Errors
    /// The job has been forgotten.
    pub(crate) fn events(
        &self,
        id: JobId,
        after: u64,
        count: usize,
    ) -> Result<(Option<Vec<pb::Event>>, bool), Failure> {
        match self.archive.get(id) {
            Some(_) => Ok((None, true)),
            None if self.unjoined().any(|script| script == id) => Ok((Some(Vec::new()), false)),
            None => self.job(id).map(|job| (job.log.after(after, count), job.is_ended())),
        }
    }

    /// Returns what changes when there are new events of a job. A job that has ended brings none.
    pub(crate) fn watch(&self, id: JobId) -> watch::Receiver<u64> {
        let live = self.jobs.get(&id).map(|job| job.log.watch());
        live.or_else(|| self.scripts.watch(id)).unwrap_or_else(|| watch::channel(0).1)
    }

    /// Returns a job by its number whose end is not durable yet.
    pub(crate) fn job(&self, id: JobId) -> Result<&Job, Failure> {
        let gone = || Failure::new(Kind::NotFound, format!("no job {id} (any more)"));
        self.jobs.get(&id).ok_or_else(gone)
    }

    /// Returns what a worker needs to take part in a job.
    pub(crate) fn reply_for(&self, id: JobId) -> Result<pb::JobReply, Failure> {
        self.job(id).map(|job| job.reply(&self.indexes))
    }

    /// Returns a job by its number, to bring it an answer. It may have been forgotten meanwhile.
    pub(crate) fn job_mut(&mut self, id: JobId) -> Option<&mut Job> {
        self.news = true;
        self.jobs.get_mut(&id)
    }

    /// Records that the end of a job is durable: from now on the ps may drop it, and it is
    /// archived. Answers what to tell those that hold it.
    pub(crate) fn close(&mut self, now: Now, id: JobId, era: Era) -> pb::CloseRequest {
        if let Some(job) = self.jobs.remove(&id) {
            let stall = job.spec.limits.stall;
            self.archive.insert(id, Ended::new(&job.status(now), stall));
            self.metrics.leases_expired += job.leases_taken_back();
        }
        pb::CloseRequest { job: id.get(), era: era.get(), master: self.master, starts: self.starts }
    }

    /// Changes the job that a user names; answers how it is then. One that has ended is not
    /// `changed` any more.
    pub(crate) fn change(
        &mut self,
        now: Now,
        name: &str,
        changed: Changed,
        change: impl FnOnce(&mut Job, &Membership) -> Result<(), Failure>,
    ) -> Result<pb::JobStatus, Failure> {
        let id = self.find(name)?;
        if changed == Changed::Cancelled && self.scripts.get(id).is_some() {
            self.scripts.cancel(id);
            self.follow_scripts(now);
        }
        match (self.jobs.get_mut(&id), changed) {
            (Some(job), _) => {
                change(job, &self.fleet)?;
                self.schedule(now, Some(id));
                self.news = true;
            }
            (None, Changed::Cancelled) => {}
            (None, Changed::Else(changed))
                if self.scripts.get(id).is_some() && self.archive.get(id).is_none() =>
            {
                let name = self.name_of(id);
                let message =
                    format!("{name} cannot be {changed} yet: none of its processes has joined a job");
                return Err(Failure::new(Kind::Ended, message));
            }
            (None, Changed::Else(changed)) => {
                let status = self.status_of(now, id);
                return Err(unchangeable(&status.name, changed, status.state(), &status.reason));
            }
        }
        Ok(self.status_of(now, id))
    }

    /// Returns a page of the list of all jobs, oldest first: up to `limit` with larger numbers than
    /// `after`. A process of `script` sees the jobs of this script alone.
    pub(crate) fn list(&self, now: Now, request: pb::ListRequest, script: Option<JobId>) -> pb::ListReply {
        let limit = match request.limit as usize {
            0 => PAGE_JOBS,
            limit => limit.min(PAGE_JOBS),
        };
        let after = JobId(request.after);
        let mut ids = self.ids_after(after, |ids| ids.take(limit + 1).collect());
        ids.extend(self.unreadable.range(after.next()..).map(|(id, _)| id).take(limit + 1));
        ids.sort_unstable();
        if let Some(script) = script {
            ids = self.jobs_of(script, after);
        }
        let (mut jobs, mut bytes) = (Vec::new(), 0);
        for &id in ids.iter().take(limit) {
            let unreadable = self.unreadable.get(&id).map(unreadable_status);
            let mut status = unreadable.unwrap_or_else(|| self.listed(now, id));
            status.confusion = None;
            status.confusions.clear();
            status.worst.clear();
            if let Some(skipped) = &mut status.skipped {
                skipped.records.clear();
                skipped.further.clear();
            }
            let length = status.encoded_len();
            // Its place in the list: a tag, and its length.
            bytes += 1 + prost::length_delimiter_len(length) + length;
            if bytes > PAGE_BYTES && !jobs.is_empty() {
                break;
            }
            jobs.push(status);
        }
        let last = jobs.last().map_or(0, |status| status.job);
        let next = if jobs.len() < ids.len() { last } else { 0 };
        pb::ListReply { jobs, next }
    }

    /// Returns everything that the master says of one job.
    fn status_of(&self, now: Now, id: JobId) -> pb::JobStatus {
        let live = self.jobs.get(&id).filter(|job| !job.is_ended());
        let idle = live.map(|job| self.idle(now, job)).unwrap_or_default();
        let devices = live.map(|job| self.devices(job)).unwrap_or_default();
        pb::JobStatus { idle, devices, ..self.listed(now, id) }
    }

    /// Returns the live workers that take part in a job, grouped by their devices.
    fn devices(&self, job: &Job) -> Vec<pb::WorkersOnDevice> {
        let members = self.fleet.live_workers().filter(|(worker, _)| job.has(*worker));
        device::groups(members.map(|(_, member)| (&member.process, member.reading)))
    }

    /// Returns what a list says of a job: all but idle workers and devices, for which every worker
    /// is looked at.
    fn listed(&self, now: Now, id: JobId) -> pb::JobStatus {
        let job = self.jobs.get(&id);
        let millis = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
        let hangs = self.hangs_in(now, id).map(|hang| pb::Hang {
            worker: self.name(hang.worker),
            phase: hang.progress.phase.into(),
            what: hang.progress.what,
            idle_ms: millis(now.since_start.saturating_sub(hang.progress.since)),
            work: hang.work,
            taken_over: hang.taken_over,
        });
        let status = job.map(|job| job.status(now)).or_else(|| self.archive.get(id).map(Ended::status));
        let status = status.or_else(|| self.scripts.status(id));
        pb::JobStatus { hangs: hangs.collect(), ..status.unwrap_or_default() }
    }

    /// Returns the workers that hang in leases of a job, also in those that have ended.
    fn hangs_in(&self, now: Now, id: JobId) -> impl Iterator<Item = Hang> {
        let live = self.jobs.get(&id).filter(|job| !job.is_ended());
        let held = live.into_iter().flat_map(move |job| job.hangs(now));
        let lingering = self.lingering.iter().flat_map(move |(&worker, all)| {
            let of_job = all.iter().filter(move |one| one.job == id && self.still_hangs(now, one));
            of_job.map(move |Lingering { lease, progress, .. }| Hang {
                worker,
                lease: *lease,
                progress: progress.clone(),
                work: String::new(),
                taken_over: true,
            })
        });
        held.chain(lingering)
    }

    /// Returns the live workers without a lease of a job, and why. Workers that hang in this job
    /// are not among them.
    fn idle(&self, now: Now, job: &Job) -> Vec<pb::Idle> {
        let hanging: BTreeSet<_> = self.hangs_in(now, job.id).map(|hang| hang.worker).collect();
        let holders = job.holders();
        let at_work = self.at_work(job);
        let mut groups: BTreeMap<(i32, String), pb::Idle> = BTreeMap::new();
        for (worker, member) in self.fleet.live_workers() {
            if holders.contains(&worker) || hanging.contains(&worker) {
                continue;
            }
            let why = match at_work.get(&worker) {
                _ if member.draining => Why::Drains,
                _ if self.hung.contains(&worker) || self.fleet.hangs(worker) => Why::Hangs,
                Some(other) if job.has(worker) => Why::WorksFor(other.name()),
                _ => job.refusal(worker).unwrap_or(Why::NotAsked),
            };
            let idle = why.idle(now.since_start);
            let group = groups.entry((idle.why, idle.reason.clone())).or_insert(idle);
            group.count += 1;
            if group.workers.len() < IDLE_NAMED {
                group.workers.push(member.process.name.clone());
            }
        }
        let mut groups: Vec<_> = groups.into_values().collect();
        groups.sort_by_key(|idle| Reverse(idle.count));
        groups.truncate(IDLE_GROUPS);
        groups
    }

    /// Returns the workers that hold leases of other jobs than this one, each with the oldest of
    /// these jobs.
    fn at_work(&self, job: &Job) -> BTreeMap<IncarnationId, &Job> {
        let mut at_work = BTreeMap::new();
        for other in self.live_jobs().filter(|other| other.id != job.id) {
            for worker in other.holders() {
                at_work.entry(worker).or_insert(other);
            }
        }
        at_work
    }

    /// Returns the name of a registered process, else its incarnation.
    fn name(&self, incarnation: IncarnationId) -> String {
        let member = self.fleet.member(incarnation);
        member.map_or_else(|_| incarnation.to_string(), |member| member.process.name.clone())
    }

    fn settings(&self) -> Settings {
        let Options { ps_grace, death, .. } = self.options;
        Settings { claim: self.options.claim(), ps_grace, stop: 2 * death }
    }

    fn live_jobs(&self) -> impl Iterator<Item = &Job> {
        self.jobs.values().filter(|job| !job.is_ended())
    }
}

/// The part of a specification that most versions can read.
#[derive(serde::Deserialize)]
struct Named {
    name: String,
}

fn unreadable_status(job: &Unreadable) -> pb::JobStatus {
    pb::JobStatus {
        job: job.job.get(),
        name: job.name.clone(),
        state: pb::JobState::Unreadable.into(),
        reason: job.reason.clone(),
        ..Default::default()
    }
}

/// Checks whether an `Exported` report names exactly what was uploaded.
pub(crate) fn check_exported(report: Option<&Report>, uploaded: &[pb::Artifact]) -> Result<(), Failure> {
    match report {
        Some(Report::Exported(exported)) if exported.artifacts == uploaded && !uploaded.is_empty() => Ok(()),
        _ => Err(Failure::new(
            Kind::Malformed,
            format!(
                "Exported.artifacts: expected the {} files of the upload; call Upload first",
                uploaded.len()
            ),
        )),
    }
}

fn process(request: &pb::RegisterRequest) -> Result<Process, Failure> {
    let malformed = |message: String| Err(Failure::new(Kind::Malformed, message));
    let pb::RegisterRequest { name, url, program_version, threads, device, numerics, program, .. } = request;
    if !proto::compatible(program_version) {
        return Err(Failure::new(
            Kind::Incompatible,
            format!(
                "`{name}` is version {program_version}, this master is {}; install one version (equal in its first two \
                 numbers) everywhere and start again",
                proto::PROGRAM_VERSION
            ),
        ));
    }
    let role = match request.role() {
        pb::ProcessRole::Worker => MemberRole::Worker,
        pb::ProcessRole::Ps => MemberRole::Ps,
        pb::ProcessRole::Unspecified => {
            return malformed(format!("RegisterRequest.role: expected worker or ps, found {}", request.role));
        }
    };
    if !(1..=128).contains(&name.len()) || name.chars().any(char::is_control) {
        return malformed(format!(
            "RegisterRequest.name: expected 1 to 128 bytes without control characters, found `{}`",
            name.escape_debug()
        ));
    }
    if role == MemberRole::Ps && !url.starts_with("http://") && !url.starts_with("https://") {
        return malformed(format!(
            "RegisterRequest.url: expected http://HOST:PORT or https://HOST:PORT, found `{}`",
            url.escape_debug()
        ));
    }
    if role == MemberRole::Ps {
        return Ok(Process::new(role, name, url));
    }
    let numerics = numerics.clone().map_or_else(|| Ok(Numerics::unknown()), Numerics::try_from)?;
    let device = WorkerDevice::told(device, request.device_memory_bytes)?;
    let capacity = match device.is_cuda() {
        true => Capacity { cuda: 1, threads: 0 },
        false => Capacity { cuda: 0, threads: (*threads).into() },
    };
    let program = scheduler::program(program, JobId(request.script));
    Ok(Process { numerics: Arc::new(numerics), capacity, device, program, ..Process::new(role, name, "") })
}
