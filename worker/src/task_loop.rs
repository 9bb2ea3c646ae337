//! The worker's day: lease -> records -> weights -> gradients -> push -> complete, and the next while this one is on its way.
//!
//! Three activities overlap. A *fetcher* always has one request for work at the master and prepares what it gets (the job's
//! data and model, records ahead of the computation). The *loop* computes, always the most urgent work it holds: measuring
//! and exporting first, then the lowest microbatch. *Finishers* wait for pushes to be acknowledged and report the lease.
//! Waiting for weights, or for room for gradients, gives way to more urgent work, so a lease that others wait for is never stuck behind one
//! that waits.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use net::channel::{Dialer, MESSAGE_BYTES_MAX, Purpose};
use net::failover::Failover;
use net::session::Session;
use proto::ids::{Era, IncarnationId, JobId, LeaseId, MicrobatchId, Version};
use proto::parameters::Target;
use proto::pb::complete_request::Result as Report;
use proto::pb::{self, Phase};
use proto::plan::Microbatch;
use proto::status::{Failure, Kind};
use proto::tensor::Values;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tonic_health::server::HealthReporter;
use tracing::{Instrument as _, Span};

use crate::config::Options;
use crate::data::Batch;
use crate::error::{Error, Result};
use crate::fetcher::Fetcher;
use crate::held::Held;
use crate::in_flight::InFlight;
use crate::job::{self, Job};
use crate::master_client::MasterClient;
use crate::metrics::Metrics;
use crate::model::Registry;
use crate::progress::Progress;
use crate::ps_client::Connector;
use crate::reporter::Reporter;
use crate::trainer::{self, Piece};
use crate::weights::Weights;
use crate::{engine, other_tasks};

/// Between two times that a lease says that it waits for room.
const SAID: Duration = Duration::from_secs(1);

/// What a lease waits for that has no room in memory, or whose push waits for its turn.
const OTHERS: &str = "send gradients: earlier ones are not taken yet";

/// What others see of a running worker.
#[derive(Clone, Debug)]
pub struct Watched {
    /// What it counts.
    pub metrics: Arc<Metrics>,
    /// Whether the master knows it.
    pub health: HealthReporter,
}

impl Default for Watched {
    fn default() -> Self {
        let (health, _) = tonic_health::server::health_reporter();
        Self { metrics: Arc::default(), health }
    }
}

/// Runs a worker until `shutdown`, then drains: finishes its microbatch, hands back the rest, leaves. Tells `watched`.
///
/// # Errors
/// Options or device that cannot be, a master that refuses this worker or stays unreachable for `master_timeout`, or a ps that
/// stays unreachable for the job's `pull_attempts_max` attempts.
pub async fn run(
    options: Options,
    master_url: &str,
    dialer: Dialer,
    connector: Connector,
    registry: Registry,
    watched: Watched,
    shutdown: CancellationToken,
) -> Result<()> {
    let Watched { metrics, health } = watched;
    options.validate().map_err(Error::Options)?;
    let device = options.device.resolve(engine::cuda_devices())?;
    // Some threads of the process may compute it for a while; nobody waits for this worker yet.
    let threads = options.threads;
    let numerics = match options.inline.as_ref().and_then(|inline| inline.numerics.clone()) {
        Some(numerics) => numerics,
        None => job::blocking(options.inline.as_ref(), move || engine::numerics(device, threads)).await?,
    };
    tracing::info!(%numerics, "numerics class");
    let unreachable = |failure| Error::Call { what: format!("master {master_url}"), failure };
    let masters = Failover::new(&dialer, master_url, Purpose::Control).map_err(unreachable)?;
    let register = pb::RegisterRequest {
        role: pb::ProcessRole::Worker.into(),
        name: options.name.clone(),
        program_version: proto::PROGRAM_VERSION.to_owned(),
        url: String::new(),
        threads: options.threads as u32,
        device: device.to_string(),
        numerics: Some(numerics.into()),
    };
    let (session, driver) = Session::start(masters, register);
    let seed = proto::random::key(0, &options.name, 0);
    let fleet = session.fleet().max_decoding_message_size(MESSAGE_BYTES_MAX);
    let master = MasterClient::new(fleet, master_url, seed);
    let held = Held::new(session.clone());
    let (arrivals_tx, arrivals) = mpsc::channel(16);
    let (granted_tx, granted) = mpsc::unbounded_channel();
    let fetcher = Fetcher::new(
        &options,
        device,
        connector.clone(),
        registry,
        master.clone(),
        session.clone(),
        held.clone(),
        granted,
        arrivals_tx,
    );
    let in_flight = InFlight::new(options.pushes_in_flight_max);
    let (ready, finishers) = (BTreeMap::new(), JoinSet::new());
    let work = TaskLoop {
        reporter: Reporter { master, held: held.clone(), granted: granted_tx },
        connector,
        held: held.clone(),
        arrivals,
        ready,
        cache: None,
        in_flight,
        finishers,
        metrics,
        broken: None,
    };

    let stop_fetching = shutdown.clone();
    let body = async {
        let fetching = async {
            tokio::select! {
                biased;
                () = fetcher.run() => {}
                () = stop_fetching.cancelled() => {}
            }
            std::future::pending::<()>().await;
        };
        let overdue = async {
            shutdown.cancelled().await;
            tokio::time::sleep(options.drain).await;
        };
        tokio::select! {
            biased;
            result = work.run(&shutdown, &session) => result,
            () = overdue => {
                tracing::warn!("not drained within {:?}; leaving, the rest of the leases expires", options.drain);
                Ok(())
            }
            () = fetching => unreachable!("never ends"),
            () = held.follow() => unreachable!("never ends"),
        }
    };
    tokio::select! {
        biased;
        failure = driver => Err(Error::Call { what: format!("register with master {master_url}"), failure }),
        error = master_lost(&session, master_url, options.master_timeout) => Err(error),
        never = net::health::follow(&health, &session) => match never {},
        result = body => result,
    }
}

/// Ends when the master has not known this worker for `patience`.
async fn master_lost(session: &Session, url: &str, patience: Duration) -> Error {
    let mut incarnations = session.incarnations();
    loop {
        let back = incarnations.wait_for(Option::is_some);
        if tokio::time::timeout(patience, back).await.is_err() {
            let message = format!("unreachable for {patience:?}; is it running, and is the URL right?");
            return Error::Call {
                what: format!("master {url}"),
                failure: Failure::new(Kind::Unavailable, message),
            };
        }
        if incarnations.wait_for(Option::is_none).await.is_err() {
            std::future::pending::<()>().await;
        }
    }
}

/// A part of what happens for a lease, as the timeline shows it: in this process, or in others that it calls.
macro_rules! part {
    ($name:literal, $lease:expr, $step:expr) => {
        part!($name, "internal", $lease, $step)
    };
    ($name:literal, calls, $lease:expr, $step:expr) => {
        part!($name, "client", $lease, $step)
    };
    ($name:literal, $kind:literal, $lease:expr, $step:expr) => {
        tracing::debug_span!(
            target: net::timeline::TARGET, parent: &$lease, $name, otel.kind = $kind, step = $step.get()
        )
    };
}

/// One lease with everything needed to work on it.
pub(crate) struct Work {
    pub(crate) incarnation: IncarnationId,
    pub(crate) lease: LeaseId,
    pub(crate) task: Task,
    /// Of the lease, for whoever works on it.
    pub(crate) progress: Progress,
    /// All that happens for this lease, from asking for it on.
    pub(crate) span: Span,
}

/// What the lease is for.
pub(crate) enum Task {
    Index(other_tasks::Index),
    Init(Arc<Job>, pb::InitTask),
    Evaluate(Arc<Job>, pb::EvaluateTask),
    Export(Arc<Job>, pb::ExportTask),
    Train(Train),
}

/// A run of microbatches, as far as it is not computed.
pub(crate) struct Train {
    pub(crate) job: Arc<Job>,
    pub(crate) era: Era,
    pub(crate) next: MicrobatchId,
    pub(crate) end: MicrobatchId,
    /// Records of `next` and the following, in order.
    pub(crate) batches: mpsc::Receiver<Result<(Microbatch, Batch)>>,
    pub(crate) reports: Vec<pb::MicrobatchReport>,
    pub(crate) pushes: JoinSet<Result<()>>,
    /// What gave way to more urgent work: it is of the step of `next`.
    pub(crate) piece: Option<Piece>,
    /// When this worker could begin: the job was open, and its first weights were there.
    pub(crate) began: Instant,
}

impl Work {
    /// Lower goes first.
    fn urgency(&self) -> (bool, u64, LeaseId) {
        match &self.task {
            Task::Train(train) => (true, train.next.get(), self.lease),
            _ => (false, 0, self.lease),
        }
    }
}

/// How a piece of training ended.
enum Ended {
    /// On to the next piece, or to the report.
    Done,
    /// Something more urgent arrived while waiting for weights, or for room for gradients.
    Yielded(Box<Work>),
    /// The worker is asked to leave.
    Draining,
}

/// What becomes of a microbatch that is to be computed.
enum Turn {
    Now,
    /// Something else is more urgent.
    Later,
    /// Its lease is lost.
    Never,
    /// The worker is asked to leave.
    Draining,
}

struct TaskLoop {
    reporter: Reporter,
    connector: Connector,
    held: Held,
    arrivals: mpsc::Receiver<Work>,
    ready: BTreeMap<(bool, u64, LeaseId), Work>,
    /// The newest weights for training, with the job, its era and the wish they answer.
    cache: Option<(JobId, Era, Version, Weights)>,
    /// Bounds the gradients in memory.
    in_flight: InFlight,
    finishers: JoinSet<Result<()>>,
    metrics: Arc<Metrics>,
    /// Why this worker cannot go on.
    broken: Option<Error>,
}

impl TaskLoop {
    async fn run(mut self, shutdown: &CancellationToken, session: &Session) -> Result<()> {
        while !shutdown.is_cancelled() {
            while let Some(finished) = self.finishers.try_join_next() {
                self.note(finished);
            }
            if let Some(error) = self.broken.take() {
                return Err(error);
            }
            while let Ok(work) = self.arrivals.try_recv() {
                self.ready.insert(work.urgency(), work);
            }
            let Some((_, work)) = self.ready.pop_first() else {
                tokio::select! {
                    biased;
                    Some(work) = self.arrivals.recv() => drop(self.ready.insert(work.urgency(), work)),
                    Some(finished) = self.finishers.join_next() => self.note(finished),
                    () = shutdown.cancelled() => {}
                }
                continue;
            };
            if !self.held.has(work.lease) {
                tracing::debug!(lease = %work.lease, "lease ended meanwhile; dropping its work");
                continue;
            }
            self.step(work, shutdown).await;
        }
        session.report(|heartbeat| {
            heartbeat.draining = true;
            true
        });
        self.hand_back().await;
        Ok(())
    }

    /// Keeps the error of a finisher that ends this worker.
    fn note(&mut self, finished: std::result::Result<Result<()>, tokio::task::JoinError>) {
        if let Err(error) = finished.unwrap_or_else(|panic| Err(Error::from_panic("a finisher", &panic))) {
            self.broken = Some(error);
        }
    }

    /// Works on one lease for a while.
    async fn step(&mut self, work: Work, shutdown: &CancellationToken) {
        let (incarnation, lease) = (work.incarnation, work.lease);
        if let Task::Train(_) = work.task {
            match self.train(work, shutdown).await {
                Ok(Ended::Yielded(work)) => drop(self.ready.insert(work.urgency(), *work)),
                Ok(Ended::Done | Ended::Draining) => {}
                Err(error) => self.report(incarnation, lease, Err(error)).await,
            }
            return;
        }
        let (held, span) = (self.held.clone(), work.span.clone());
        let result = tokio::select! {
            biased;
            result = self.other(work).instrument(span) => result,
            () = held.lost(lease) => return,
            // What is still held is handed back.
            () = shutdown.cancelled() => return,
        };
        self.report(incarnation, lease, result).await;
    }

    async fn other(&self, work: Work) -> Result<Report> {
        let Work { incarnation, lease, progress, .. } = work;
        match work.task {
            Task::Train(_) => unreachable!("training goes piece by piece"),
            Task::Index(index) => index.run(progress).await,
            Task::Init(job, task) => {
                let master = &self.reporter.master;
                other_tasks::init(&job, &task, master, incarnation, lease, &self.connector, &progress).await
            }
            Task::Evaluate(job, task) => other_tasks::evaluate(&job, &task, &progress).await,
            Task::Export(job, task) => {
                other_tasks::export(&job, &task, &self.reporter.master, incarnation, lease, &progress).await
            }
        }
    }

    /// Tells the master how a lease ended. An error that means that *this worker* cannot go on is kept instead.
    async fn report(&mut self, incarnation: IncarnationId, lease: LeaseId, result: Result<Report>) {
        if let Err(error) = self.reporter.report(incarnation, lease, result).await {
            self.broken = Some(error);
        }
    }

    /// One piece: the microbatches of the lease that belong to one step.
    async fn train(&mut self, mut work: Work, shutdown: &CancellationToken) -> Result<Ended> {
        let Task::Train(train) = &work.task else { unreachable!("called with training work only") };
        let (job, metrics) = (train.job.clone(), self.metrics.clone());
        let (step, indices) = job.plan.by_step(train.next..train.end).swap_remove(0);
        let want = trainer::want(job.consistency, step);
        let weights = match self.cached(&job, train.era, want) {
            Some(weights) => Some(weights),
            None => {
                work.progress.enter(Phase::Pulling, format!("the weights of step {step}"));
                let client = job.placed()?.ps.at(train.era).saying(&work.progress);
                let _timer = metrics.pull_nanos.time();
                let pull = client.pull_rounded(want).instrument(part!("pull", calls, work.span, step));
                tokio::pin!(pull);
                loop {
                    tokio::select! {
                        biased;
                        () = shutdown.cancelled() => {
                            work.progress.queue();
                            self.ready.insert(work.urgency(), work);
                            return Ok(Ended::Draining);
                        }
                        Some(arrived) = self.arrivals.recv() => {
                            let more_urgent = arrived.urgency() < work.urgency();
                            self.ready.insert(arrived.urgency(), arrived);
                            if more_urgent {
                                work.progress.queue();
                                return Ok(Ended::Yielded(Box::new(work)));
                            }
                        }
                        () = self.held.lost(work.lease) => return Ok(Ended::Done),
                        Some(finished) = self.finishers.join_next() => {
                            self.note(finished);
                            if self.broken.is_some() {
                                return Ok(Ended::Yielded(Box::new(work)));
                            }
                        }
                        pulled = &mut pull => {
                            metrics.pulls.add(1);
                            break pulled?;
                        }
                    }
                }
            }
        };
        let Task::Train(train) = &mut work.task else { unreachable!("called with training work only") };
        if job.first_weights() {
            train.began = Instant::now();
        }
        let Some(weights) = weights else {
            // The version is gone, so the step is applied: somebody else was faster.
            train.piece = None;
            for _ in indices.clone() {
                train.batches.recv().await;
                train.reports.push(pb::MicrobatchReport::default());
            }
            train.next = MicrobatchId(train.next.get() + u64::from(indices.end - indices.start));
            if train.next == train.end {
                work.progress.computed();
            }
            self.advance(work);
            return Ok(Ended::Done);
        };
        if let proto::parameters::Want::Exact(version) = want {
            self.cache = Some((job.id, train.era, version, weights.clone()));
        }
        let mut piece = match train.piece.take() {
            Some(piece) => piece,
            None => Piece::new(&job, step, indices.clone())?,
        };
        for _ in indices {
            if !self.held.has(work.lease) {
                return Ok(Ended::Done);
            }
            match self.turn(&job, train.next, work.lease, &work.progress, shutdown).await {
                Turn::Now => {}
                Turn::Later => {
                    train.piece = Some(piece);
                    return Ok(Ended::Yielded(Box::new(work)));
                }
                Turn::Never => return Ok(Ended::Done),
                Turn::Draining => {
                    self.send(&job, piece.take(true), train, &work.progress, &work.span)?;
                    break;
                }
            }
            let loading = metrics.load_nanos.time();
            work.progress.enter(Phase::Reading, format!("microbatch {}", train.next));
            let load = train.batches.recv().instrument(part!("load", work.span, step));
            let (microbatch, batch) = match load.await {
                Some(read) => read?,
                // The reader was stopped with everything else.
                None if shutdown.is_cancelled() => break,
                None => {
                    return Err(Error::Engine {
                        what: "reading".to_owned(),
                        reason: "the reader ended early".to_owned(),
                    });
                }
            };
            drop(loading);
            let compute = part!("compute", work.span, step);
            work.progress.enter(Phase::Computing, format!("microbatch {}", microbatch.id));
            let (computing, began) = (metrics.compute_nanos.time(), Instant::now());
            let adding = piece.add(&job, &weights, microbatch, batch, &work.progress).instrument(compute);
            let (added, report) = adding.await?;
            self.held.computed(job.id, began.elapsed());
            drop(computing);
            metrics.microbatches.add(1);
            metrics.samples.add(report.samples);
            piece = added;
            train.reports.push(report);
            train.next = train.next.next();
            if train.next == train.end {
                work.progress.computed();
            }
            let leaving = shutdown.is_cancelled();
            self.send(&job, piece.take(leaving), train, &work.progress, &work.span)?;
            self.held.progress(work.lease, train.reports.len() as u64);
            if leaving {
                break;
            }
        }
        self.advance(work);
        Ok(Ended::Done)
    }

    fn cached(&self, job: &Job, era: Era, want: proto::parameters::Want) -> Option<Weights> {
        match (&self.cache, want) {
            (Some((id, of, version, weights)), proto::parameters::Want::Exact(wanted))
                if (*id, *of, *version) == (job.id, era, wanted) =>
            {
                Some(weights.clone())
            }
            _ => None,
        }
    }

    /// Pushes nodes of a lease's job, each when it is its turn.
    fn send(
        &self,
        job: &Job,
        nodes: Vec<(Target, Vec<Values>)>,
        train: &mut Train,
        progress: &Progress,
        lease: &Span,
    ) -> Result<()> {
        for (target, values) in nodes {
            let Target::Node { node, .. } = target else { unreachable!("a piece has nodes only") };
            let first = MicrobatchId(job.plan.first_of(node.step).get() + u64::from(node.node.begin));
            let client = job.placed()?.ps.at(train.era).saying(progress);
            let (metrics, lease, progress) = (self.metrics.clone(), lease.clone(), progress.clone());
            let pushing = self.in_flight.begin(job.id, first);
            train.pushes.spawn(async move {
                while tokio::time::timeout(SAID, pushing.turn()).await.is_err() {
                    progress.refused(OTHERS);
                }
                let _timer = metrics.push_nanos.time();
                let push = client.push(target, values).instrument(part!("push", calls, lease, node.step));
                let pushed = push.await.map(drop);
                drop(pushing);
                metrics.pushes.add(u64::from(pushed.is_ok()));
                pushed
            });
        }
        Ok(())
    }

    /// Waits until memory has room for the gradient of `next`, and nothing else is more urgent meanwhile.
    async fn turn(
        &mut self,
        job: &Job,
        next: MicrobatchId,
        lease: LeaseId,
        progress: &Progress,
        shutdown: &CancellationToken,
    ) -> Turn {
        loop {
            let pushed = self.in_flight.changed();
            if self.in_flight.has_room(job.id, next) {
                return Turn::Now;
            }
            progress.enter(Phase::WaitingForRoom, OTHERS);
            // Pushes of a lost lease may wait for a ps that never comes back, and hold what this one needs.
            let held = self.held.clone();
            let changed = held.changed();
            self.ready.retain(|_, work| held.has(work.lease));
            if !held.has(lease) {
                return Turn::Never;
            }
            while let Ok(work) = self.arrivals.try_recv() {
                self.ready.insert(work.urgency(), work);
            }
            let most_urgent = self.ready.first_key_value().map(|(urgency, _)| *urgency);
            if most_urgent.is_some_and(|urgency| urgency < (true, next.get(), lease)) {
                return Turn::Later;
            }
            tokio::select! {
                biased;
                () = shutdown.cancelled() => return Turn::Draining,
                Some(arrived) = self.arrivals.recv() => drop(self.ready.insert(arrived.urgency(), arrived)),
                () = changed => {}
                () = pushed => {}
                () = tokio::time::sleep(SAID) => {}
            }
        }
    }

    /// Puts unfinished training back; reports finished training once its pushes are acknowledged.
    fn advance(&mut self, work: Work) {
        match work.task {
            Task::Train(train) if train.next == train.end => {
                self.metrics.leases.add(1);
                let finishing =
                    self.reporter.clone().finish(work.incarnation, work.lease, train, work.progress);
                self.finishers.spawn(finishing.instrument(work.span));
            }
            _ => {
                work.progress.queue();
                self.ready.insert(work.urgency(), work);
            }
        }
    }

    /// Drain: what is computed is pushed and reported, the rest is given back. A failure on the way costs no more than the
    /// lease that it met, which then expires.
    async fn hand_back(mut self) {
        while let Some(finished) = self.finishers.join_next().await {
            self.note(finished);
        }
        for work in std::mem::take(&mut self.ready).into_values() {
            let mut done = Vec::new();
            if let Task::Train(mut train) = work.task {
                // What gave way may have more than was pushed.
                let mut acknowledged = train.piece.is_none();
                while let Some(pushed) = train.pushes.join_next().await {
                    acknowledged &= matches!(pushed, Ok(Ok(())));
                }
                if acknowledged {
                    done = train.reports;
                }
            }
            self.release(work.incarnation, work.lease, done).await;
        }
        // Leases that were still being prepared.
        for (incarnation, lease) in self.held.all() {
            self.release(incarnation, lease, Vec::new()).await;
        }
    }

    async fn release(&self, incarnation: IncarnationId, lease: LeaseId, done: Vec<pb::MicrobatchReport>) {
        if let Err(error) = self.reporter.master.release(incarnation, lease, done).await {
            tracing::warn!(%lease, reason = %error, "the master did not take this lease back; it expires");
        }
        self.held.remove(lease);
    }
}
