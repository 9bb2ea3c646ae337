//! What a job's workers are given and what they report. A report of a lease that has ended never gets past the first check.

use std::time::Duration;

use proto::ids::{IncarnationId, LeaseId, Step};
use proto::pb;
use proto::pb::complete_request::Result as Report;
use proto::status::{Failure, Kind};

use super::ending::{Salvage, failed};
use super::partitions::Partitions;
use super::training::Training;
use super::work::Work;
use super::{Effect, Job, Phase, Who, ended};
use crate::clock::Now;
use crate::dispatcher::{Dispatcher, TrainGrant};
use crate::lease::{Grant, LeaseIds};
use crate::progress::Hang;
use crate::tasks::TaskGrant;

impl Job {
    /// Work for a worker, when there is some that it may have. `held_elsewhere`: its training leases of other jobs.
    pub(crate) fn lease(
        &mut self,
        now: Now,
        ids: &mut LeaseIds,
        worker: IncarnationId,
        held_elsewhere: usize,
    ) -> Option<pb::Lease> {
        if !self.crew.contains(worker) || self.waits_for_class() {
            return None;
        }
        if self.rests() {
            return self.lease_waited_for(now, ids, worker, held_elsewhere);
        }
        // Measuring and exporting go before training: somebody waits for them.
        let lease = match self.queue.lease(now.since_start, ids, worker) {
            Some(grant) => self.task_lease(now, &grant),
            None => return self.next_run(now, ids, worker, held_elsewhere),
        };
        self.numbers.workers_seen.insert(worker);
        Some(lease)
    }

    /// The next microbatches to train.
    fn next_run(
        &mut self,
        now: Now,
        ids: &mut LeaseIds,
        worker: IncarnationId,
        held_elsewhere: usize,
    ) -> Option<pb::Lease> {
        let trains = matches!(self.phase, Phase::Training);
        let books = &mut self.training.as_mut().filter(|_| trains)?.books;
        let grant = books.lease(now.since_start, ids, worker, self.crew.members(), held_elsewhere)?;
        self.numbers.workers_seen.insert(worker);
        Some(self.train_lease(now, &grant))
    }

    /// What a job that rests still hands out: work that came back and that other holders wait for. Without it they would hold
    /// their leases for as long as the job rests, and do nothing for other jobs meanwhile.
    fn lease_waited_for(
        &mut self,
        now: Now,
        ids: &mut LeaseIds,
        worker: IncarnationId,
        held_elsewhere: usize,
    ) -> Option<pb::Lease> {
        self.dispatcher()?.is_waited_for().then_some(())?;
        self.next_run(now, ids, worker, held_elsewhere)
    }

    /// A copy of a task whose holders hang, or of a straggler's lease, for a worker that finds nothing else in any job.
    ///
    /// # Errors
    /// There is none; the time from which on there may be one, if nothing else happens before.
    pub(crate) fn copy(
        &mut self,
        now: Now,
        ids: &mut LeaseIds,
        worker: IncarnationId,
        held_elsewhere: usize,
    ) -> Result<pb::Lease, Option<Duration>> {
        if !self.crew.contains(worker) {
            return Err(None);
        }
        let later = match self.queue.copy(now.since_start, ids, worker) {
            Ok(grant) => {
                self.numbers.workers_seen.insert(worker);
                return Ok(self.task_lease(now, &grant));
            }
            Err(later) => later,
        };
        let books = self.dispatcher().ok_or(later)?;
        let copy = books.copy(now.since_start, ids, worker, held_elsewhere);
        let grant = copy.map_err(|from| from.into_iter().chain(later).min())?;
        self.numbers.workers_seen.insert(worker);
        Ok(self.train_lease(now, &grant))
    }

    /// Training leases that a worker holds of this job.
    pub(crate) fn train_leases(&self, worker: IncarnationId) -> usize {
        let training = self.training.as_ref().filter(|_| matches!(self.phase, Phase::Training));
        training.map_or(0, |training| training.books.leases_of(worker))
    }

    /// A heartbeat of a worker: renews what it lists of this job and answers which those are.
    pub(crate) fn renew(&mut self, now: Now, worker: IncarnationId, listed: &[LeaseId]) -> Vec<LeaseId> {
        if let Phase::Stopping { holders, leases, .. } = &mut self.phase
            && let Some(quiet) = holders.get_mut(&worker)
        {
            *quiet = if listed.iter().any(|lease| leases.contains(lease)) { 0 } else { *quiet + 1 };
            // Twice: a lease may have been on its way to the worker when it sent the first.
            if *quiet >= 2 {
                holders.remove(&worker);
                self.maybe_stopped(now);
            }
        }
        let mut good = Vec::new();
        for &lease in listed {
            let since_start = now.since_start;
            if self.queue.renew(since_start, worker, lease)
                || self.dispatcher().is_some_and(|books| books.renew(since_start, worker, lease))
            {
                good.push(lease);
            }
        }
        good
    }

    /// How a worker gets on with a lease of this job.
    pub(crate) fn progress(&mut self, now: Now, worker: IncarnationId, said: &pb::LeaseProgress) {
        let is_task = self.queue.progress(now.since_start, worker, said);
        if let Some(books) = self.dispatcher().filter(|_| !is_task) {
            books.progress(now.since_start, worker, said);
        }
    }

    /// Whether a worker hangs in something that it holds of this job.
    pub(crate) fn hangs_in(&self, now: Now, worker: IncarnationId) -> bool {
        let now = now.since_start;
        self.queue.hanging(now).any(|(_, grant, _)| grant.worker == worker)
            || self.trains().is_some_and(|training| training.books.hangs(now, worker))
    }

    /// Workers that hang, and in what of this job.
    pub(crate) fn hangs(&self, now: Now) -> impl Iterator<Item = Hang> {
        let now = now.since_start;
        let hang = |grant: &Grant, work: String, taken_over| Hang {
            worker: grant.worker,
            lease: grant.lease,
            progress: grant.progress.clone(),
            work,
            taken_over,
        };
        let tasks = self.queue.hanging(now);
        let tasks = tasks.map(move |(work, grant, taken_over)| hang(grant, work.title(), taken_over));
        let runs = self.trains().into_iter().flat_map(move |training| training.books.hanging(now));
        tasks.chain(runs.map(move |(run, grant, taken_over)| {
            let (first, last) = (run.start.get(), run.end.get() - 1);
            hang(grant, format!("train microbatches {first} to {last}"), taken_over)
        }))
    }

    /// While it trains.
    fn trains(&self) -> Option<&Training> {
        self.training.as_ref().filter(|_| matches!(self.phase, Phase::Training))
    }

    /// A task is done, for all its holders.
    fn task_done(&mut self, worker: IncarnationId, lease: LeaseId) {
        let done = self.queue.complete(worker, lease).into_iter().flat_map(|done| done.beaten);
        self.effects.extend(done.map(|(worker, lease)| Effect::Recall(worker, lease)));
    }

    /// What those who wait for work wait for, as far as a completed lease can change it: the phase, the first step that is not done, and
    /// whether other tasks wait.
    pub(crate) fn outlook(&self) -> impl PartialEq + use<> {
        let step = self.training.as_ref().map(Training::watermark);
        (std::mem::discriminant(&self.phase), step, self.queue.is_empty(), self.rests(), self.is_closing())
    }

    /// Whether a lease of this job is good.
    pub(crate) fn holds(&self, worker: IncarnationId, lease: LeaseId) -> bool {
        let training = self.training.as_ref().filter(|_| matches!(self.phase, Phase::Training));
        self.queue.work(worker, lease).is_some()
            || training.is_some_and(|training| training.books.run_of(worker, lease).is_some())
    }

    /// Whether a good lease is for the export of this job.
    pub(crate) fn exports(&self, worker: IncarnationId, lease: LeaseId) -> bool {
        matches!(self.queue.work(worker, lease), Some(Work::Export(_)))
    }

    /// The task of a good lease is done.
    ///
    /// # Errors
    /// The report is not what the task asks for; nothing changed.
    pub(crate) fn complete(
        &mut self,
        now: Now,
        worker: IncarnationId,
        lease: LeaseId,
        report: Report,
    ) -> Result<(), Failure> {
        let Some(work) = self.queue.work(worker, lease).cloned() else {
            let Some(training) = self.training.as_mut().filter(|_| matches!(self.phase, Phase::Training))
            else {
                return Err(ended(lease));
            };
            let Report::Trained(trained) = report else { return Err(other_report("trained")) };
            let beaten = training.complete(now.since_start, worker, lease, &trained)?;
            self.effects.extend(beaten.into_iter().map(|(worker, lease)| Effect::Recall(worker, lease)));
            self.on_trained(now);
            return Ok(());
        };
        match (&work, report) {
            (Work::Index { validation, file, .. }, Report::Indexed(found)) => {
                self.index.record(*validation, *file, found);
                self.task_done(worker, lease);
                self.on_indexed(now);
            }
            (Work::Init, Report::Initialized(pb::Initialized { note })) => {
                if !self.partitions.as_ref().is_some_and(|partitions| partitions.open) {
                    let message =
                        "CompleteRequest.initialized: the model was not described; call Describe first";
                    return Err(Failure::new(Kind::Malformed, message));
                }
                self.task_done(worker, lease);
                if !note.is_empty() {
                    self.warn(now, note);
                }
                self.on_initialized(now);
            }
            (Work::Evaluate(shard), Report::Evaluated(found)) => {
                let Some(training) = &mut self.training else { return Err(ended(lease)) };
                let measured = training
                    .evaluations
                    .check(shard, &found)
                    .map(|()| training.evaluations.record(shard, found))
                    .map_err(|message| Failure::new(Kind::Malformed, message))?;
                self.task_done(worker, lease);
                measured.into_iter().for_each(|measured| self.on_measured(now, measured));
                self.maybe_trained_out(now);
            }
            (Work::Export(_), Report::Exported(exported)) => {
                self.output = exported.artifacts;
                self.task_done(worker, lease);
                self.save_last(now);
            }
            (Work::Index { .. }, _) => return Err(other_report("indexed")),
            (Work::Init, _) => return Err(other_report("initialized")),
            (Work::Evaluate(_), _) => return Err(other_report("evaluated")),
            (Work::Export(_), _) => return Err(other_report("exported")),
        }
        Ok(())
    }

    /// The holder of a lease could not do its task; false when the lease had ended.
    pub(crate) fn fail(
        &mut self,
        now: Now,
        worker: IncarnationId,
        who: Who<'_>,
        lease: LeaseId,
        failure: &pb::FailRequest,
    ) -> bool {
        if !self.holds(worker, lease) {
            return false;
        }
        let message = format!("{who}: {}", failure.message);
        if failure.fatal || failure.diverged_at.is_some() {
            self.numbers.leases_expired += 1;
            let salvage = failure.diverged_at.map_or(Salvage::Newest, |step| self.last_good(Step(step)));
            self.stop(now, failed(message), salvage);
            return true;
        }
        let lost = match self.queue.fail(worker, lease, &message) {
            Some(lost) => Some(lost),
            None => self.dispatcher().and_then(|books| books.fail(worker, lease, &message)),
        };
        self.warn(now, message);
        self.on_lost(now, lost.into_iter().collect());
        true
    }

    /// The holder of a lease hands it back with what is finished; false when the lease had ended.
    ///
    /// # Errors
    /// The report is not about this lease; nothing changed.
    pub(crate) fn release(
        &mut self,
        now: Now,
        worker: IncarnationId,
        lease: LeaseId,
        trained: &pb::Trained,
    ) -> Result<bool, Failure> {
        if self.queue.release(worker, lease) {
            return Ok(true);
        }
        if !self.holds(worker, lease) {
            return Ok(false);
        }
        if let Some(training) = &mut self.training {
            training.release(now.since_start, worker, lease, trained)?;
            self.on_trained(now);
        }
        Ok(true)
    }

    pub(super) fn dispatcher(&mut self) -> Option<&mut Dispatcher> {
        let trains = matches!(self.phase, Phase::Training);
        self.training.as_mut().filter(|_| trains).map(|training| &mut training.books)
    }

    // Grants as they travel.

    fn task_lease(&self, now: Now, grant: &TaskGrant<Work>) -> pb::Lease {
        pb::Lease {
            id: grant.lease.get(),
            job: self.id.get(),
            task: grant.task.get(),
            attempt: grant.attempt,
            expires_ms: millis(grant.deadline.saturating_sub(now.since_start)),
            work: Some(grant.work.wire(self.era)),
            placement: self.placement(),
        }
    }

    fn train_lease(&self, now: Now, grant: &TrainGrant) -> pb::Lease {
        let (first, end) = (grant.run.start.get(), grant.run.end.get());
        let task = pb::TrainTask { first, count: (end - first) as u32, era: self.era.get() };
        pb::Lease {
            id: grant.lease.get(),
            job: self.id.get(),
            task: first,
            attempt: grant.attempt,
            expires_ms: millis(grant.deadline.saturating_sub(now.since_start)),
            work: Some(pb::lease::Work::Train(task)),
            placement: self.placement(),
        }
    }

    fn placement(&self) -> u64 {
        self.partitions.as_ref().map_or(0, Partitions::number)
    }
}

fn millis(duration: Duration) -> u32 {
    u32::try_from(duration.as_millis()).unwrap_or(u32::MAX)
}

fn other_report(expected: &str) -> Failure {
    Failure::new(Kind::Malformed, format!("CompleteRequest.result: expected `{expected}`, found another"))
}
