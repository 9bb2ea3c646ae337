//! Fetches work ahead: always one request at the master, beside what comes with the answers to
//! reports, and everything a lease needs made ready before the loop sees it.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use futures::FutureExt as _;
use model::{Device, Registry};
use net::session::{Registered, Session};
use net::timeline::TARGET;
use proto::convert::required;
use proto::ids::{Era, IncarnationId, JobId, LeaseId, MicrobatchId};
use proto::pb::lease::Work as Wire;
use proto::pb::{self, Phase};
use proto::plan::Microbatch;
use proto::spec::DataSet;
use tokio::sync::{Semaphore, mpsc};
use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio_util::task::AbortOnDropHandle;
use tracing::field::Empty;
use tracing::{Instrument as _, Span};

use crate::ahead::Room;
use crate::bad::{Asker, Skipped};
use crate::blocking::blocking;
use crate::config::Options;
use crate::error::{Error, Result};
use crate::exchange::Connector;
use crate::held::Held;
use crate::job::{self, Job, Read};
use crate::master_client::MasterClient;
use crate::other_tasks::Index;
use crate::progress::Progress;
use crate::reporter::Granted;
use crate::tokenizers;
use crate::work::{Ahead, Lease, OtherTask, Task, Train, Work};

/// Wait before asking again after an answer that no retry mends (the session re-registers
/// meanwhile).
const PAUSE: Duration = Duration::from_millis(200);

/// A lease that cannot begin because the device is lost.
#[derive(Debug)]
pub(crate) struct Unable {
    pub(crate) incarnation: IncarnationId,
    pub(crate) lease: LeaseId,
    pub(crate) error: Error,
}

/// Turns leases into work.
pub(crate) struct Fetcher {
    options: Options,
    device: Device,
    /// Name of the device, for the timeline.
    device_name: Arc<str>,
    connector: Connector,
    registry: Registry,
    master: MasterClient,
    session: Session,
    held: Held,
    /// The device with its memory, for people.
    device_told: Arc<str>,
    /// Where leases go that find the device lost.
    unable: mpsc::UnboundedSender<Unable>,
    /// Leases that came with the answer to a report.
    granted: mpsc::UnboundedReceiver<Granted>,
    arrivals: mpsc::Sender<Work>,
    jobs: BTreeMap<JobId, Arc<Job>>,
    known_master: Option<u64>,
    /// Read records ahead; ends with this fetcher.
    readers: JoinSet<()>,
    /// One for each microbatch that may be read at a time.
    reading: Arc<Semaphore>,
    /// Memory for microbatches that wait for their computation.
    ahead: Room,
}

impl Fetcher {
    #[allow(
        clippy::too_many_arguments,
        reason = "called once; a structure of the same fields would say it twice"
    )]
    pub(crate) fn new(
        options: &Options,
        device: Device,
        device_name: Arc<str>,
        connector: Connector,
        registry: Registry,
        master: MasterClient,
        session: Session,
        held: Held,
        device_told: Arc<str>,
        granted: mpsc::UnboundedReceiver<Granted>,
        arrivals: mpsc::Sender<Work>,
        unable: mpsc::UnboundedSender<Unable>,
    ) -> Self {
        let (jobs, known_master, readers) = (BTreeMap::new(), None, JoinSet::new());
        let reading = Arc::new(Semaphore::new(options.data_threads));
        let ahead = Room::new(options.data_memory / 2);
        let options = options.clone();
        Self {
            options,
            device,
            device_name,
            connector,
            registry,
            master,
            session,
            held,
            device_told,
            unable,
            granted,
            arrivals,
            jobs,
            known_master,
            readers,
            reading,
            ahead,
        }
    }

    /// Runs until dropped.
    pub(crate) async fn run(mut self) {
        let mut replies = self.session.replies();
        loop {
            let Registered { incarnation, master, .. } = self.session.registered().await;
            if self.known_master.replace(master) != Some(master) {
                // Another master numbers its jobs anew.
                self.jobs.clear();
            }
            let task = task_span(&self.device_name);
            let mut asking = self.ask(incarnation, &task);
            let lease = loop {
                tokio::select! {
                    biased;
                    lease = &mut asking => break lease.unwrap_or_else(|panic| {
                        Err(Error::from_panic("asking for a lease", &panic))
                    }),
                    Ok(()) = replies.changed() => {
                        let reply = replies.borrow_and_update().clone();
                        self.on_reply(&reply);
                    }
                    Some(Granted { incarnation, lease, after }) = self.granted.recv() => {
                        let task = task_span(&self.device_name);
                        task.record("after", after.get());
                        self.on_lease(incarnation, lease, task).await;
                    }
                }
            };
            while self.readers.try_join_next().is_some() {}
            match lease {
                Ok(None) => {}
                Ok(Some(lease)) => self.on_lease(incarnation, lease, task).await,
                Err(error) => {
                    tracing::debug!(reason = %error, "no lease");
                    tokio::time::sleep(PAUSE).await;
                }
            }
        }
    }

    /// Asks the master for work in a task of its own. The answer counts as held when it arrives, so
    /// heartbeats name the lease even while the fetcher is still busy with another one.
    fn ask(&self, incarnation: IncarnationId, task: &Span) -> AbortOnDropHandle<Result<Option<pb::Lease>>> {
        let asking = tracing::debug_span!(target: TARGET, parent: task, "lease", otel.kind = "client");
        let (master, held) = (self.master.clone(), self.held.clone());
        let answer = async move {
            let lease = master.lease(incarnation).await?;
            if let Some(lease) = &lease {
                held.insert(incarnation, lease);
            }
            Ok(lease)
        };
        AbortOnDropHandle::new(tokio::spawn(answer.instrument(asking)))
    }

    fn on_reply(&mut self, reply: &pb::HeartbeatReply) {
        // A job above the newest that the master knew when it answered may have begun since.
        let lives = |id: JobId| id.get() > reply.newest_job || reply.jobs.contains(&id.get());
        self.jobs.retain(|&id, _| lives(id));
        self.held.retain_jobs(lives);
    }

    /// Prepares a lease that this worker holds. A lease that was lost since its answer came is left
    /// alone.
    async fn on_lease(&mut self, incarnation: IncarnationId, lease: pb::Lease, span: Span) {
        let id = LeaseId(lease.id);
        if !self.held.has(id) {
            return;
        }
        span.record("job", lease.job).record("lease", lease.id);
        let progress = self.held.progress_of(id);
        progress.enter(Phase::Opening, format!("job {}", lease.job));
        let asker = Asker { master: self.master.clone(), incarnation, lease: id };
        match self.prepare(lease, asker, &progress).await {
            Ok(task) => {
                progress.queue();
                let lease = Lease { incarnation, id, progress, span };
                drop(self.arrivals.send(Work { lease, task }).await);
            }
            Err(error) => match error.on(&self.device_told) {
                error if error.is_device_lost() => {
                    // The receiver is gone only when the worker leaves, which hands back all.
                    let _ = self.unable.send(Unable { incarnation, lease: id, error });
                }
                error => {
                    self.held.remove(id);
                    tracing::warn!(lease = %id, reason = %error, "cannot begin this task");
                    if let Err(error) = self.master.fail(incarnation, id, &error).await {
                        tracing::debug!(reason = %error, "the master did not take the failure");
                    }
                }
            },
        }
    }

    async fn prepare(&mut self, lease: pb::Lease, asker: Asker, progress: &Progress) -> Result<Task> {
        let wrong = |error: proto::Error| Error::Call { what: "lease".to_owned(), failure: error.into() };
        let id = JobId(lease.job);
        let needs = Needs { placement: Some(lease.placement), skipped: lease.skipped };
        match required("Lease", "work", lease.work).map_err(wrong)? {
            Wire::Index(task) => {
                let reply = self.master.job(id).await?;
                let spec = job::specification(&reply)?;
                let (options, master) = (&self.options, &self.master);
                let tokenizers = tokenizers::load(id, &spec, &reply, options, master, progress).await?;
                Ok(Task::Other(OtherTask::Index(Box::new(Index::new(spec, &task, options, tokenizers)?))))
            }
            Wire::Init(task) => {
                let job = self.open(id, Needs { placement: None, ..needs }, progress).await?;
                Ok(Task::Other(OtherTask::Init(job, task)))
            }
            Wire::Evaluate(task) => {
                let job = self.open(id, needs, progress).await?;
                Ok(Task::Other(OtherTask::Evaluate(job, task)))
            }
            Wire::Export(task) => {
                let job = self.open(id, needs, progress).await?;
                Ok(Task::Other(OtherTask::Export(job, task)))
            }
            Wire::Predict(task) => {
                let job = self.open(id, needs, progress).await?;
                Ok(Task::Other(OtherTask::Predict(job, task)))
            }
            Wire::Join(task) => {
                let job = self.open(id, needs, progress).await?;
                Ok(Task::Other(OtherTask::Join(job, task)))
            }
            Wire::Clear(pb::ClearTask {}) => {
                let job = self.open(id, needs, progress).await?;
                Ok(Task::Other(OtherTask::Clear(job)))
            }
            Wire::Train(task) => {
                let job = self.open(id, needs, progress).await?;
                Ok(Task::Train(self.train(job, &task, asker)?))
            }
        }
    }

    fn train(&mut self, job: Arc<Job>, task: &pb::TrainTask, asker: Asker) -> Result<Train> {
        let (next, end) = (MicrobatchId(task.first), MicrobatchId(task.first + u64::from(task.count)));
        if task.count == 0 || end.get() > job.plan.microbatches() {
            return Err(Error::Task {
                what: format!("lease of microbatches {next}..{end}"),
                reason: format!(
                    "this worker counts {} in the job; its data differs",
                    job.plan.microbatches()
                ),
            });
        }
        let batches = self.read_ahead(job.clone(), next..end, asker);
        let (era, reports, pushes, began) = (Era(task.era), Vec::new(), JoinSet::new(), Instant::now());
        Ok(Train {
            job,
            era,
            next,
            end,
            batches,
            reports,
            pushes,
            piece: None,
            began,
            loading: Duration::ZERO,
            computing: Duration::ZERO,
        })
    }

    /// Reads microbatches on other threads, a few ahead of the computation. `asker` asks about bad
    /// records.
    fn read_ahead(&mut self, job: Arc<Job>, run: Range<MicrobatchId>, asker: Asker) -> mpsc::Receiver<Ahead> {
        let (batches_tx, batches) = mpsc::channel(self.options.prefetch);
        let mut ids = run.start.get()..run.end.get();
        let read_ahead = self.options.read_ahead.clone();
        let tell = move |read: &Result<(Microbatch, data::Batch)>| {
            if let (Some(read_ahead), Ok((microbatch, batch))) = (&read_ahead, read) {
                read_ahead.tell(microbatch, batch);
            }
        };
        if let Some(inline) = self.options.inline.clone() {
            self.readers.spawn(async move {
                for id in ids {
                    inline.hang().await;
                    let read = good(job.read(MicrobatchId(id)), &asker).await;
                    tell(&read);
                    if batches_tx.send((read, None)).await.is_err() {
                        return;
                    }
                }
            });
        } else {
            let (reading, readers) = (self.reading.clone(), self.options.data_threads);
            let places = self.ahead.places(job.train.record_bytes() * u64::from(job.plan.micro));
            self.readers.spawn(async move {
                let mut begun = VecDeque::new();
                loop {
                    while begun.len() < readers && !ids.is_empty() {
                        // What was read must not wait for room for the next one.
                        let place = match begun.is_empty() {
                            true => Some(places.take().await),
                            false => places.take().now_or_never(),
                        };
                        // A number is taken once there is a place for its microbatch.
                        let Some(place) = place else { break };
                        let Some(id) = ids.next() else { break };
                        let read = read(job.clone(), MicrobatchId(id), reading.clone(), asker.clone());
                        begun.push_back((AbortOnDropHandle::new(tokio::spawn(read)), place));
                    }
                    let Some((first, place)) = begun.pop_front() else { return };
                    let read = first
                        .await
                        .unwrap_or_else(|panic| Err(Error::from_panic("a reading thread", &panic)));
                    tell(&read);
                    // An error here means that the lease is over.
                    if batches_tx.send((read, Some(place))).await.is_err() {
                        return;
                    }
                }
            });
        }
        batches
    }

    /// The job, opened once, which knows what a lease needs.
    async fn open(&mut self, id: JobId, needs: Needs, progress: &Progress) -> Result<Arc<Job>> {
        let known = self.jobs.get(&id).filter(|job| !job.compute.is_dead()).cloned();
        if let Some(job) = known.as_ref().filter(|job| needs.are_met(job)) {
            return Ok(job.clone());
        }
        let reply = self.master.job(id).await?;
        let job = match known {
            Some(job) => job,
            None => {
                let (options, registry, connector) = (&self.options, &self.registry, &self.connector);
                let (device, master) = (self.device, &self.master);
                let open = Job::open(id, &reply, options, device, registry, master, connector, progress);
                let job = Arc::new(open.await?);
                self.jobs.insert(id, job.clone());
                job
            }
        };
        job.skip(Skipped::of(&reply));
        if let Some(placement) = reply.placement {
            job.place(placement, &self.connector)?;
        }
        Ok(job)
    }
}

/// What a worker must know of a job before it begins a lease.
#[derive(Clone, Copy, Debug)]
struct Needs {
    /// Lowest number of the placement. `None`: there need not be one.
    placement: Option<u64>,
    /// Number of skipped records.
    skipped: u64,
}

impl Needs {
    fn are_met(self, job: &Job) -> bool {
        self.placement.is_none_or(|number| job.is_placed(number)) && job.skipped().count() >= self.skipped
    }
}

/// Reads a microbatch on a thread that may block, in its turn. Bad records are left out.
async fn read(
    job: Arc<Job>,
    id: MicrobatchId,
    turn: Arc<Semaphore>,
    asker: Asker,
) -> Result<(Microbatch, data::Batch)> {
    let turn = turn.acquire_owned().await;
    let read = blocking(None, move || job.read(id)).await;
    // Others may read while the master answers.
    drop(turn);
    good(read, &asker).await
}

/// Returns the good records of a microbatch, once the master knows of the others.
async fn good(read: Result<Read>, asker: &Asker) -> Result<(Microbatch, data::Batch)> {
    let Read { microbatch, batch, bad } = read?;
    asker.skip(DataSet::Train, &bad).await?;
    Ok((microbatch, batch))
}

/// What the timeline shows of a lease, from asking for it on.
fn task_span(device: &str) -> Span {
    tracing::debug_span!(
        target: TARGET, parent: None, "task", job = Empty, lease = Empty, after = Empty, device = device
    )
}

#[cfg(test)]
mod tests;
