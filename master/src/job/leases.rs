//! What a job's workers are given and what they report. A report of a lease that has ended never
//! gets past the first check.

use std::collections::BTreeSet;
use std::time::Duration;

use proto::ids::{IncarnationId, LeaseId, Step};
use proto::pb;
use proto::pb::complete_request::Result as Report;
use proto::spec::DataSet;
use proto::status::{Failure, Kind};

use super::end::{Salvage, failed};
use super::partitions::Partitions;
use super::phase::{Begin, Beginning, Phase, Stage};
use super::training::Training;
use super::work::Work;
use super::{Effect, Job, Who, ended};
use crate::clock::Now;
use crate::dispatcher::{Dispatcher, TrainGrant};
use crate::lease::{Asker, Grant, LeaseIds};
use crate::progress::Hang;
use crate::tasks::TaskGrant;
use crate::why::Why;

impl Job {
    /// Leases work to a worker. The job remembers why it refused, for [`refusal`](Self::refusal).
    ///
    /// # Errors
    /// There is none that the worker may have now, and why.
    pub(crate) fn lease(&mut self, now: Now, ids: &mut LeaseIds, asker: Asker) -> Result<pb::Lease, Why> {
        let lease = self.next_lease(now, ids, asker);
        match &lease {
            Ok(_) => self.on_granted(asker.worker),
            Err(why) => drop(self.refusals.insert(asker.worker, why.clone())),
        }
        lease
    }

    fn next_lease(&mut self, now: Now, ids: &mut LeaseIds, asker: Asker) -> Result<pb::Lease, Why> {
        if let Some(why) = self.crew.refusal(asker.worker) {
            return Err(why);
        }
        if self.waits_for_class() {
            return Err(Why::NoClass);
        }
        if let Some(why) = self.rests() {
            // Work that came back and that other holders wait for is handed out all the same.
            // Without it they would hold their leases for as long as the job rests, and do nothing
            // for other jobs meanwhile.
            let waited_for = self.dispatcher().is_some_and(|books| books.is_waited_for());
            return if waited_for { self.next_run(now, ids, asker) } else { Err(why) };
        }
        // Measuring and exporting go before training: somebody waits for them.
        match self.queue.lease(now.since_start, ids, asker.worker) {
            Some(grant) => Ok(self.task_lease(now, &grant)),
            None => self.next_run(now, ids, asker),
        }
    }

    /// Returns the next microbatches to train.
    fn next_run(&mut self, now: Now, ids: &mut LeaseIds, asker: Asker) -> Result<pb::Lease, Why> {
        let training = match &mut self.phase {
            Phase::Indexing { .. } => return Err(Why::Indexing),
            Phase::Beginning(Beginning { stage: Begin::Initializing, .. }) => return Err(Why::Initializing),
            Phase::Beginning(_) => return Err(Why::Surveying),
            Phase::Training { training, .. } if !training.trains() => return Err(Why::AllHandedOut),
            Phase::Training { training, .. } => training,
            Phase::Ending(_) => return Err(Why::Ending),
        };
        training.hold_back();
        let grant = training.books.lease(now.since_start, ids, asker, self.crew.members())?;
        Ok(self.train_lease(now, &grant))
    }

    /// Returns a copy of a task whose holders hang, or of a straggler's lease, for a worker that
    /// finds nothing else in any job.
    ///
    /// # Errors
    /// There is none; the time from which on there may be one, if nothing else happens before.
    pub(crate) fn copy(
        &mut self,
        now: Now,
        ids: &mut LeaseIds,
        asker: Asker,
    ) -> Result<pb::Lease, Option<Duration>> {
        if !self.crew.contains(asker.worker) {
            return Err(None);
        }
        let lease = match self.queue.copy(now.since_start, ids, asker.worker) {
            Ok(grant) => self.task_lease(now, &grant),
            Err(later) => {
                let books = self.dispatcher().ok_or(later)?;
                let copy = books.copy(now.since_start, ids, asker);
                let grant = copy.map_err(|from| from.into_iter().chain(later).min())?;
                self.train_lease(now, &grant)
            }
        };
        self.on_granted(asker.worker);
        Ok(lease)
    }

    fn on_granted(&mut self, worker: IncarnationId) {
        self.numbers.workers_seen.insert(worker);
        self.refusals.remove(&worker);
    }

    /// Returns why a worker that holds no lease of this job has none: it takes no part, or else the
    /// reason of the last refusal. `None`: it has not asked.
    pub(crate) fn refusal(&self, worker: IncarnationId) -> Option<Why> {
        self.crew.refusal(worker).or_else(|| self.refusals.get(&worker).cloned())
    }

    /// Returns whether a worker takes part in this job.
    pub(crate) fn has(&self, worker: IncarnationId) -> bool {
        self.crew.contains(worker)
    }

    /// Returns the workers that hold leases of this job.
    pub(crate) fn holders(&self) -> BTreeSet<IncarnationId> {
        let runs = self.phase.trains().into_iter().flat_map(|training| training.books.holders());
        self.queue.holders().chain(runs.map(|(worker, _)| worker)).collect()
    }

    /// Returns the number of training leases of this job that a worker holds.
    pub(crate) fn train_leases(&self, worker: IncarnationId) -> usize {
        self.phase.trains().map_or(0, |training| training.books.leases_of(worker))
    }

    /// Renews the leases of this job that a worker's heartbeat lists, and returns them.
    pub(crate) fn renew(&mut self, now: Now, worker: IncarnationId, listed: &[LeaseId]) -> Vec<LeaseId> {
        if let Some(Stage::Stopping { holders, leases, .. }) = self.phase.ends_mut()
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

    /// Records the progress of a worker with a lease of this job.
    pub(crate) fn progress(&mut self, now: Now, worker: IncarnationId, said: &pb::LeaseProgress) {
        let is_task = self.queue.progress(now.since_start, worker, said);
        if let Some(books) = self.dispatcher().filter(|_| !is_task) {
            books.progress(now.since_start, worker, said);
        }
    }

    /// Returns whether a worker hangs in something that it holds of this job.
    pub(crate) fn hangs_in(&self, now: Now, worker: IncarnationId) -> bool {
        let now = now.since_start;
        self.queue.hanging(now).any(|(_, grant, _)| grant.worker == worker)
            || self.phase.trains().is_some_and(|training| training.books.hangs(now, worker))
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
        let runs = self.phase.trains().into_iter().flat_map(move |training| training.books.hanging(now));
        tasks.chain(runs.map(move |(run, grant, taken_over)| {
            let (first, last) = (run.start.get(), run.end.get() - 1);
            hang(grant, format!("train microbatches {first} to {last}"), taken_over)
        }))
    }

    /// Records that a task is done, for all its holders.
    fn task_done(&mut self, worker: IncarnationId, lease: LeaseId) {
        let done = self.queue.complete(worker, lease).into_iter().flat_map(|done| done.beaten);
        self.effects.extend(done.map(|(worker, lease)| Effect::Recall(worker, lease)));
    }

    /// Returns what those who wait for work wait for, as far as a completed lease can change it:
    /// the phase, the first step that is not done, and whether other tasks wait.
    pub(crate) fn outlook(&self) -> impl PartialEq + use<> {
        let step = self.phase.training().map(Training::watermark);
        let unmeasured = self.phase.training().and_then(|training| training.evaluations.first_unmeasured());
        (
            self.phase.number(),
            step,
            unmeasured,
            self.queue.is_empty(),
            self.rests().is_some(),
            self.is_closing(),
        )
    }

    /// Returns whether a lease of this job is good.
    pub(crate) fn holds(&self, worker: IncarnationId, lease: LeaseId) -> bool {
        self.queue.work(worker, lease).is_some()
            || self.phase.trains().is_some_and(|training| training.books.run_of(worker, lease).is_some())
    }

    /// Returns whether a good lease is for the export of this job.
    pub(crate) fn exports(&self, worker: IncarnationId, lease: LeaseId) -> bool {
        matches!(self.queue.work(worker, lease), Some(Work::Export(_)))
    }

    /// Records that the task of a good lease is done.
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
            let Some(training) = self.phase.trains_mut() else { return Err(ended(lease)) };
            let Report::Trained(trained) = report else { return Err(other_report("trained")) };
            let beaten = training.complete(now.since_start, worker, lease, &trained)?;
            self.numbers.add_work(trained.load_us, trained.compute_us);
            self.effects.extend(beaten.into_iter().map(|(worker, lease)| Effect::Recall(worker, lease)));
            self.on_trained(now);
            return Ok(());
        };
        match (&work, report) {
            (Work::Index { validation, file, .. }, Report::Indexed(found)) => {
                if let Some(index) = self.phase.indexing() {
                    // Without a state of the file nobody can say whether it still holds.
                    let key = index.key(*validation, *file).filter(|_| !found.stamp.is_empty());
                    self.indexed.extend(key.map(|key| (key.to_owned(), found.clone())));
                    index.record(*validation, *file, found);
                }
                self.task_done(worker, lease);
                self.tell_indexed(now);
                self.on_indexed(now);
            }
            (Work::Init, Report::Initialized(pb::Initialized { note })) => {
                if !self.phase.partitions().is_some_and(|partitions| partitions.open) {
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
                let skipped = self.skipped_in(shard);
                let in_files: u64 = self.records_of(DataSet::Validation).iter().sum();
                let Some(training) = self.phase.trains_mut() else { return Err(ended(lease)) };
                let found = training
                    .evaluations
                    .check(shard, found, skipped)
                    .map_err(|message| Failure::new(Kind::Malformed, message))?;
                if let Some(record) = found.records().find(|record| *record >= in_files) {
                    let message =
                        format!("Evaluated.worst: expected records below {in_files}, found {record}");
                    return Err(Failure::new(Kind::Malformed, message));
                }
                let measured = training.evaluations.record(shard, found);
                self.task_done(worker, lease);
                match measured {
                    Ok(measured) => measured.into_iter().for_each(|measured| self.on_measured(now, measured)),
                    Err(reason) => {
                        self.stop(now, failed(reason), Salvage::Newest);
                        return Ok(());
                    }
                }
                self.maybe_trained_out(now);
            }
            (Work::Export(_), Report::Exported(exported)) => {
                self.output = exported.artifacts;
                self.task_done(worker, lease);
                self.save_last(now);
            }
            (&Work::Predict(part), Report::Predicted(found)) => {
                let training = self.phase.trains_mut();
                let Some(predictions) = training.and_then(|training| training.predictions.as_mut()) else {
                    return Err(ended(lease));
                };
                predictions.record(part, &found).map_err(|message| Failure::new(Kind::Malformed, message))?;
                self.task_done(worker, lease);
                self.maybe_trained_out(now);
            }
            (&Work::Join { keep, .. }, Report::Joined(_)) => {
                self.task_done(worker, lease);
                self.on_joined(now, keep);
            }
            (Work::Clear, Report::Cleared(pb::Cleared { note })) => {
                self.task_done(worker, lease);
                if !note.is_empty() {
                    self.warn(now, note);
                }
                self.finish(now);
            }
            (Work::Predict(_), _) => return Err(other_report("predicted")),
            (Work::Join { .. }, _) => return Err(other_report("joined")),
            (Work::Clear, _) => return Err(other_report("cleared")),
            (Work::Index { .. }, _) => return Err(other_report("indexed")),
            (Work::Init, _) => return Err(other_report("initialized")),
            (Work::Evaluate(_), _) => return Err(other_report("evaluated")),
            (Work::Export(_), _) => return Err(other_report("exported")),
        }
        Ok(())
    }

    /// Records that the holder of a lease could not do its task; false when the lease had ended.
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

    /// Records that the holder of a lease hands it back with what is finished; false when the lease
    /// had ended.
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
        if let Some(training) = self.phase.trains_mut() {
            training.release(now.since_start, worker, lease, trained)?;
            self.on_trained(now);
        }
        Ok(true)
    }

    pub(super) fn dispatcher(&mut self) -> Option<&mut Dispatcher> {
        self.phase.trains_mut().map(|training| &mut training.books)
    }

    /// Returns how many lanes changed their worker since the last call.
    pub(crate) fn take_moved_lanes(&mut self) -> u64 {
        self.dispatcher().map_or(0, Dispatcher::take_moved_lanes)
    }

    // Grants as they travel.

    fn task_lease(&self, now: Now, grant: &TaskGrant<Work>) -> pb::Lease {
        let mut work = grant.work.wire(self.era);
        if let (Work::Index { validation, file, .. }, pb::lease::Work::Index(task)) = (&grant.work, &mut work)
        {
            task.known = self.phase.index().and_then(|index| index.known(*validation, *file)).cloned();
        }
        pb::Lease {
            id: grant.lease.get(),
            job: self.id.get(),
            task: grant.task.get(),
            attempt: grant.attempt,
            expires_ms: millis(grant.deadline.saturating_sub(now.since_start)),
            work: Some(work),
            placement: self.placement(),
            skipped: self.skips.count(),
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
            skipped: self.skips.count(),
        }
    }

    /// Returns the number of the placement; 0 before the first.
    pub(super) fn placement(&self) -> u64 {
        self.phase.partitions().map_or(0, Partitions::number)
    }
}

fn millis(duration: Duration) -> u32 {
    u32::try_from(duration.as_millis()).unwrap_or(u32::MAX)
}

fn other_report(expected: &str) -> Failure {
    Failure::new(Kind::Malformed, format!("CompleteRequest.result: expected `{expected}`, found another"))
}
