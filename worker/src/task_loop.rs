//! The main loop of a worker: lease -> records -> weights -> gradients -> push -> complete, with
//! the next lease on its way.
//!
//! Three activities overlap:
//!
//! - A *fetcher* always has one request for work at the master and prepares the work that it gets:
//!   the job's data and model, and records ahead of the computation.
//! - The *loop* computes, always the most urgent work it holds: evaluation and export first, then
//!   the lowest microbatch.
//! - *Finishers* wait for pushes to be acknowledged and report the lease.
//!
//! Waiting for weights, or for room for gradients, gives way to more urgent work. So a lease that
//! others wait for is never stuck behind one that waits.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::ops::{ControlFlow, Range};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use data::Batch;
use kernels::telemetry::LatestReading;
use model::Registry;
use model::weights::Weights;
use net::channel::{Dialer, MESSAGE_BYTES_MAX, Purpose};
use net::failover::Failover;
use net::session::Session;
use proto::ids::{IncarnationId, LeaseId, MicrobatchId, Step};
use proto::parameters::Target;
use proto::pb::complete_request::Result as Report;
use proto::pb::{self, Phase};
use proto::plan::Microbatch;
use proto::status::{Failure, Kind};
use store::Stores;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tonic_health::server::HealthReporter;
use tracing::Instrument as _;

use crate::bad::Asker;
use crate::blocking::blocking;
use crate::config::Options;
use crate::device;
use crate::error::{Error, Result};
use crate::exchange::Connector;
use crate::fetcher::{Fetcher, Unable};
use crate::held::Held;
use crate::in_flight::InFlight;
use crate::master_client::MasterClient;
use crate::metrics::Metrics;
use crate::other_tasks;
use crate::predict;
use crate::reporter::Reporter;
use crate::trainer::{Piece, Sum};
use crate::training_weights::{self, Next, TrainingWeights, Wanted};
use crate::waits::Waits;
use crate::work::{Lease, OtherTask, Task, Train, Urgency, Work};

#[cfg(test)]
mod overlap_tests;
#[cfg(test)]
mod tests;

/// Time between two reports that a lease waits for room.
const SAID: Duration = Duration::from_secs(1);

/// Object of the phase of a lease that waits for room in memory, or whose push waits for its turn.
const OTHERS: &str = "send gradients: earlier ones are not taken yet";

/// Metrics and health of a running worker, for the outside.
#[derive(Clone, Debug)]
pub struct Watched {
    /// Metrics of the worker.
    pub metrics: Arc<Metrics>,
    /// Health of the worker: ready while the master knows it.
    pub health: HealthReporter,
    /// State of the worker's device, for the master. By default nothing is known of it.
    pub device: LatestReading,
}

impl Default for Watched {
    fn default() -> Self {
        let (health, _) = tonic_health::server::health_reporter();
        Self { metrics: Arc::default(), health, device: LatestReading::default() }
    }
}

/// Runs a worker until `shutdown`, then drains: finishes its microbatch, hands back the rest,
/// leaves. Predictions go to `stores`, metrics and health to `watched`.
///
/// # Errors
/// Invalid options or device, a master that refuses this worker or stays unreachable for
/// `master_timeout`, or a ps that stays unreachable for the job's `pull_attempts_max` attempts.
#[allow(clippy::too_many_arguments, reason = "each is a thing of its own that the process has")]
pub async fn run(
    options: Options,
    master_url: &str,
    dialer: Dialer,
    connector: Connector,
    registry: Registry,
    stores: Stores,
    watched: Watched,
    shutdown: CancellationToken,
) -> Result<()> {
    let Watched { metrics, health, device: latest } = watched;
    options.validate().map_err(Error::Options)?;
    data::limit_memory(options.data_memory);
    data::allow_urls(&options.data_urls).map_err(Error::Options)?;
    data::be_patient_for(options.data_patience);
    let device = options.device;
    let (device_name, device_memory_bytes) = match &options.program_device {
        Some(of) => (Arc::<str>::from(&*of.name), of.memory_bytes),
        None => (device.to_string().into(), device::check(device)?),
    };
    let told = device::told(&device_name, device_memory_bytes);
    // Some threads of the process may compute it for a while. Nothing waits for this worker yet.
    let threads = options.threads;
    let simulated = options.inline.as_ref().and_then(|inline| inline.numerics.clone());
    let numerics = match simulated.or_else(|| options.numerics.clone()) {
        Some(numerics) => numerics,
        None => {
            let registry = registry.clone();
            let computing = blocking(options.inline.as_ref(), move || registry.numerics(device, threads));
            computing.await.map_err(|error| error.on(&told))?
        }
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
        device: device_name.to_string(),
        numerics: Some(numerics.into()),
        program: options.program.clone(),
        device_memory_bytes,
        script: options.script,
    };
    let (session, driver) = Session::start(masters, register);
    let seed = proto::random::key(0, &options.name, 0);
    let fleet = session.fleet().max_decoding_message_size(MESSAGE_BYTES_MAX);
    let master = MasterClient::new(fleet, master_url, seed);
    let held = Held::new(session.clone(), latest, Waits::new(metrics.clone()));
    let (arrivals_tx, arrivals) = mpsc::channel(16);
    let (granted_tx, granted) = mpsc::unbounded_channel();
    let (unable_tx, unable) = mpsc::unbounded_channel();
    let fetcher = Fetcher::new(
        &options,
        device,
        device_name.clone(),
        connector.clone(),
        registry,
        master.clone(),
        session.clone(),
        held.clone(),
        told.clone(),
        granted,
        arrivals_tx,
        unable_tx,
    );
    let in_flight = InFlight::new(options.pushes_in_flight_max);
    let (ready, finishers) = (BTreeMap::new(), JoinSet::new());
    let work = TaskLoop {
        reporter: Reporter { master, held: held.clone(), granted: granted_tx, device: told },
        device: device_name,
        connector,
        stores,
        held: held.clone(),
        arrivals,
        unable,
        ready,
        weights: TrainingWeights::default(),
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
            std::future::pending::<Infallible>().await
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
            never = fetching => match never {},
            never = held.follow() => match never {},
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

/// A part of what happens for a lease, as the timeline shows it: `client` for a call, `internal`
/// for what this process computes.
macro_rules! part {
    ($name:literal, $kind:literal, $lease:expr, $step:expr, $device:expr $(, $field:ident)*) => {
        tracing::debug_span!(
            target: net::timeline::TARGET, parent: &$lease, $name, otel.kind = $kind, step = $step.get(),
            device = &*$device $(, $field)*
        )
    };
}

/// State of a lease after work on one of its pieces.
enum Ended {
    /// The piece is done. The next one or the report follows.
    Advanced,
    /// The lease waits again, because something more urgent arrived or the worker is asked to
    /// leave.
    Yielded,
    /// This worker does not hold the lease any more.
    Lost,
}

/// Decision about a microbatch that is to be computed.
enum Turn {
    Now,
    /// More urgent work comes first.
    Later,
    /// The lease is lost.
    Never,
    /// The worker is asked to leave.
    Draining,
}

struct TaskLoop {
    reporter: Reporter,
    /// Name of the device.
    device: Arc<str>,
    connector: Connector,
    /// Where predictions go.
    stores: Stores,
    held: Held,
    arrivals: mpsc::Receiver<Work>,
    /// Leases that found the device lost.
    unable: mpsc::UnboundedReceiver<Unable>,
    ready: BTreeMap<Urgency, Work>,
    weights: TrainingWeights,
    /// Pushes in flight, which bound the gradients in memory.
    in_flight: InFlight,
    finishers: JoinSet<Result<()>>,
    metrics: Arc<Metrics>,
    /// Error because of which this worker cannot go on.
    broken: Option<Error>,
}

impl TaskLoop {
    async fn run(mut self, shutdown: &CancellationToken, session: &Session) -> Result<()> {
        while !shutdown.is_cancelled() {
            while let Some(finished) = self.finishers.try_join_next() {
                self.note(finished);
            }
            while let Ok(unable) = self.unable.try_recv() {
                self.on_unable(unable).await;
            }
            if let Some(error) = self.broken.take() {
                if error.is_device_lost() {
                    self.leave(session).await;
                }
                return Err(error);
            }
            while let Ok(work) = self.arrivals.try_recv() {
                self.queue(work);
            }
            let Some((_, work)) = self.ready.pop_first() else {
                tokio::select! {
                    biased;
                    Some(work) = self.arrivals.recv() => self.queue(work),
                    Some(unable) = self.unable.recv() => self.on_unable(unable).await,
                    Some(finished) = self.finishers.join_next() => self.note(finished),
                    () = shutdown.cancelled() => {}
                }
                continue;
            };
            if !self.held.has(work.lease.id) {
                tracing::debug!(lease = %work.lease.id, "lease ended meanwhile; dropping its work");
                continue;
            }
            self.step(work, shutdown).await;
        }
        self.leave(session).await;
        Ok(())
    }

    /// Tells the master that this worker leaves, and hands back what it holds.
    async fn leave(self, session: &Session) {
        session.report(|heartbeat| {
            heartbeat.draining = true;
            true
        });
        self.hand_back().await;
    }

    /// Reports a lease that found the device lost.
    async fn on_unable(&mut self, Unable { incarnation, lease, error }: Unable) {
        self.report(incarnation, lease, Err(error), None).await;
    }

    /// Keeps the error of a finisher that ends this worker.
    fn note(&mut self, finished: std::result::Result<Result<()>, tokio::task::JoinError>) {
        if let Err(error) = finished.unwrap_or_else(|panic| Err(Error::from_panic("a finisher", &panic))) {
            self.broken = Some(error);
        }
    }

    /// Queues work until it is the most urgent.
    fn queue(&mut self, work: Work) {
        self.ready.insert(work.urgency(), work);
    }

    /// Works on one lease for a while.
    async fn step(&mut self, Work { lease, task }: Work, shutdown: &CancellationToken) {
        let (incarnation, id) = (lease.incarnation, lease.id);
        let mut job = None;
        let result = match task {
            Task::Train(train) => match self.train(lease, train, shutdown).await {
                Ok(()) => return,
                Err(error) => Err(error),
            },
            Task::Other(task) => {
                job = task.job().cloned();
                let (held, span) = (self.held.clone(), lease.span.clone());
                tokio::select! {
                    biased;
                    result = self.other(lease, task).instrument(span) => result,
                    () = held.lost(id) => return,
                    // Leases that are still held are handed back.
                    () = shutdown.cancelled() => return,
                }
            }
        };
        self.report(incarnation, id, result, job.and_then(|job| job.warning())).await;
    }

    async fn other(&self, lease: Lease, task: OtherTask) -> Result<Report> {
        let Lease { incarnation, id, progress, .. } = lease;
        let master = &self.reporter.master;
        match task {
            OtherTask::Index(index) => index.run(progress).await,
            OtherTask::Init(job, task) => {
                other_tasks::init(&job, &task, master, incarnation, id, &self.connector, &progress).await
            }
            OtherTask::Evaluate(job, task) => {
                let asker = Asker { master: master.clone(), incarnation, lease: id };
                other_tasks::evaluate(&job, &task, &asker, &progress).await
            }
            OtherTask::Export(job, task) => {
                other_tasks::export(&job, &task, master, incarnation, id, &progress).await
            }
            OtherTask::Predict(job, task) => predict::predict(&job, &task, &self.stores, &progress).await,
            OtherTask::Join(job, task) => predict::join(&job, &task, &self.stores, &progress).await,
            OtherTask::Clear(job) => predict::clear(&job, &self.stores, &progress).await,
        }
    }

    /// Reports to the master how a lease ended. Keeps an error that means that this worker cannot
    /// go on.
    async fn report(
        &mut self,
        incarnation: IncarnationId,
        lease: LeaseId,
        result: Result<Report>,
        warning: Option<String>,
    ) {
        if let Err(error) = self.reporter.report(incarnation, lease, result, warning).await {
            self.broken = Some(error);
        }
    }

    /// Trains one piece: the microbatches of the lease that belong to one step.
    async fn train(&mut self, lease: Lease, mut train: Train, shutdown: &CancellationToken) -> Result<()> {
        let (step, indices) = train.job.plan.by_step(train.next..train.end).swap_remove(0);
        let ended = match self.weights(&lease, &train, step, shutdown).await? {
            ControlFlow::Break(ended) => ended,
            ControlFlow::Continue(weights) => {
                if train.job.first_weights() {
                    train.began = Instant::now();
                }
                match weights {
                    Some(weights) => {
                        self.compute(&lease, &mut train, (step, indices), &weights, shutdown).await?
                    }
                    // The version is gone, so the step is applied: another worker was faster.
                    None => {
                        train.skip(indices).await;
                        if train.is_computed() {
                            lease.progress.computed();
                        }
                        Ended::Advanced
                    }
                }
            }
        };
        match ended {
            Ended::Advanced => self.advance(lease, train),
            Ended::Yielded => self.queue(Work { lease, task: Task::Train(train) }),
            Ended::Lost => {}
        }
        Ok(())
    }

    /// Waits for the weights of a step, unless more urgent work arrives meanwhile. `None`: the
    /// version is gone.
    async fn weights(
        &mut self,
        lease: &Lease,
        train: &Train,
        step: Step,
        shutdown: &CancellationToken,
    ) -> Result<ControlFlow<Ended, Option<Weights>>> {
        let (job, metrics, device) = (&train.job, self.metrics.clone(), self.device.clone());
        let wanted = Wanted::of(job, train.era, step);
        if let Some(weights) = self.weights.current(wanted) {
            return Ok(ControlFlow::Continue(Some(weights)));
        }
        lease.progress.enter(Phase::Pulling, format!("the weights of step {step}"));
        let client = job.placed()?.ps.at(train.era).saying(&lease.progress).counting(metrics.clone());
        let _timer = metrics.pull_nanos.time();
        let ahead = self.weights.take_ahead(wanted);
        let pull = async {
            if let Some(ahead) = ahead
                && let Some(pulled) = ahead.pulled().await
            {
                return Ok(pulled);
            }
            let pull = client.pull_rounded(wanted.want());
            pull.instrument(part!("pull", "client", lease.span, step, device)).await
        };
        tokio::pin!(pull);
        let pulled = loop {
            tokio::select! {
                biased;
                () = shutdown.cancelled() => {
                    lease.progress.queue();
                    return Ok(ControlFlow::Break(Ended::Yielded));
                }
                Some(arrived) = self.arrivals.recv() => {
                    let more_urgent = arrived.urgency() < train.urgency(lease.id);
                    self.queue(arrived);
                    if more_urgent {
                        lease.progress.queue();
                        return Ok(ControlFlow::Break(Ended::Yielded));
                    }
                }
                () = self.held.lost(lease.id) => return Ok(ControlFlow::Break(Ended::Lost)),
                Some(finished) = self.finishers.join_next() => {
                    self.note(finished);
                    if self.broken.is_some() {
                        return Ok(ControlFlow::Break(Ended::Yielded));
                    }
                }
                pulled = &mut pull => {
                    metrics.pulls.add(1);
                    break pulled?;
                }
            }
        };
        if let Some(weights) = &pulled {
            self.weights.keep(wanted, weights);
        }
        Ok(ControlFlow::Continue(pulled))
    }

    /// Begins to pull the weights of the next piece while `step` is computed, if they may exist by
    /// then.
    fn pull_ahead(&mut self, lease: &Lease, train: &Train, step: Step, shutdown: &CancellationToken) {
        if self.weights.pulls_ahead(&self.held) {
            return;
        }
        let ready = self.ready.values().filter(|work| self.held.has(work.lease.id));
        let Some(next) = training_weights::next((lease, train), step, ready) else { return };
        // The piece itself says what is wrong.
        let Ok(placed) = train.job.placed() else { return };
        let Next { lease, step, wanted } = next;
        let (id, waited, ahead) = (lease.id, Arc::<AtomicBool>::default(), true);
        tracing::debug!(lease = %id, %step, "pulling weights ahead");
        let progress = lease.progress.beside(waited.clone());
        let client = placed.ps.at(train.era).once().saying(&progress).counting(self.metrics.clone());
        let (held, shutdown) = (self.held.clone(), shutdown.clone());
        let pull = async move {
            tokio::select! {
                biased;
                () = held.lost(id) => None,
                () = shutdown.cancelled() => None,
                pulled = client.pull_rounded(wanted.want()) => {
                    let failed = |reason: &Error| tracing::debug!(%reason, "a pull ahead failed");
                    pulled.inspect_err(failed).ok()
                }
            }
        };
        let pull = pull.instrument(part!("pull", "client", lease.span, step, self.device, ahead));
        self.weights.pull_ahead(wanted, id, waited, pull);
    }

    /// Computes the microbatches `indices` of a step, and pushes each of their sums that cannot
    /// grow any more.
    async fn compute(
        &mut self,
        lease: &Lease,
        train: &mut Train,
        (step, indices): (Step, Range<u32>),
        weights: &Weights,
        shutdown: &CancellationToken,
    ) -> Result<Ended> {
        let mut piece = match train.piece.take() {
            Some(piece) => piece,
            None => Piece::new(&train.job, step, indices.clone())?,
        };
        for _ in indices {
            if !self.held.has(lease.id) {
                return Ok(Ended::Lost);
            }
            match self.turn(lease, train, shutdown).await {
                Turn::Now => {}
                Turn::Later => {
                    train.piece = Some(piece);
                    return Ok(Ended::Yielded);
                }
                Turn::Never => return Ok(Ended::Lost),
                Turn::Draining => break,
            }
            self.pull_ahead(lease, train, step, shutdown);
            let waiting = Instant::now();
            let Some((microbatch, batch)) = self.load(lease, train, shutdown).await? else { break };
            let loading = waiting.elapsed();
            train.loading += loading;
            let load_us = loading.as_micros() as u64;
            lease.progress.enter(Phase::Computing, format!("microbatch {}", microbatch.id));
            let (metrics, began) = (self.metrics.clone(), Instant::now());
            let computing = metrics.compute_nanos.time();
            let (maker, mut sum) = piece.begin(microbatch.leaf(), batch.samples as u64).unzip();
            let job = train.job.clone();
            let adding = piece.add(&job, weights, microbatch, batch, &lease.progress, maker);
            let adding =
                adding.instrument(part!("compute", "internal", lease.span, step, self.device, load_us));
            let (added, report) = self.beside(lease, train, step, shutdown, &mut sum, adding).await??;
            let computing_took = began.elapsed();
            train.computing += computing_took;
            if report.samples > 0 {
                self.held.computed(train.job.id, computing_took);
            }
            drop(computing);
            self.metrics.microbatches.add(1);
            self.metrics.samples.add(report.samples);
            piece = added;
            train.reports.push(report);
            train.next = train.next.next();
            if train.is_computed() {
                lease.progress.computed();
            }
            self.push(lease, train, sum)?;
            self.held.progress(lease.id, train.reports.len() as u64);
            if shutdown.is_cancelled() {
                break;
            }
        }
        // A worker that leaves in mid-piece reports what it has computed as done. So it pushes all
        // of it.
        self.push(lease, train, piece.take())?;
        Ok(Ended::Advanced)
    }

    /// Waits until a microbatch of `step` is computed. What arrives meanwhile may be the next
    /// piece. The push of a `sum` that it completes begins with the first gradient.
    async fn beside<T>(
        &mut self,
        lease: &Lease,
        train: &mut Train,
        step: Step,
        shutdown: &CancellationToken,
        sum: &mut Option<Sum>,
        computing: impl Future<Output = T>,
    ) -> Result<T> {
        tokio::pin!(computing);
        loop {
            let begun = async {
                match &*sum {
                    Some(sum) => sum.values.begun().await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                biased;
                computed = &mut computing => return Ok(computed),
                Some(arrived) = self.arrivals.recv() => {
                    self.queue(arrived);
                    self.pull_ahead(lease, train, step, shutdown);
                }
                () = begun => self.push(lease, train, sum.take())?,
            }
        }
    }

    /// Waits for the records of the next microbatch. `None`: the reader was stopped because the
    /// worker leaves.
    async fn load(
        &self,
        lease: &Lease,
        train: &mut Train,
        shutdown: &CancellationToken,
    ) -> Result<Option<(Microbatch, Batch)>> {
        let _timer = self.metrics.load_nanos.time();
        lease.progress.enter(Phase::Reading, format!("microbatch {}", train.next));
        match train.batches.recv().await {
            Some((read, _)) => read.map(Some),
            None if shutdown.is_cancelled() => Ok(None),
            None => {
                Err(Error::Task { what: "reading".to_owned(), reason: "the reader ended early".to_owned() })
            }
        }
    }

    /// Pushes sums of a lease, each in its turn.
    fn push(&self, lease: &Lease, train: &mut Train, sums: impl IntoIterator<Item = Sum>) -> Result<()> {
        let Train { job, era, pushes, .. } = train;
        for Sum { node, samples, values } in sums {
            let first = MicrobatchId(job.plan.first_of(node.step).get() + u64::from(node.node.begin));
            let (metrics, device) = (self.metrics.clone(), self.device.clone());
            let (span, progress) = (lease.span.clone(), lease.progress.clone());
            let client = job.placed()?.ps.at(*era).saying(&progress).counting(metrics.clone());
            let pushing = self.in_flight.begin(job.id, first);
            pushes.spawn(async move {
                while tokio::time::timeout(SAID, pushing.turn()).await.is_err() {
                    progress.refused(OTHERS);
                }
                let _timer = metrics.push_nanos.time();
                let push = client.push_coming(Target::Node { node, samples }, &values);
                let pushed =
                    push.instrument(part!("push", "client", span, node.step, device)).await.map(drop);
                drop((values, pushing));
                metrics.pushes.add(u64::from(pushed.is_ok()));
                pushed
            });
        }
        Ok(())
    }

    /// Waits until memory has room for the next gradient of a lease, unless more urgent work
    /// arrives meanwhile.
    async fn turn(&mut self, lease: &Lease, train: &Train, shutdown: &CancellationToken) -> Turn {
        let (metrics, mut waiting) = (self.metrics.clone(), None);
        loop {
            let pushed = self.in_flight.changed();
            if self.in_flight.has_room(train.job.id, train.next) {
                return Turn::Now;
            }
            waiting.get_or_insert_with(|| metrics.room_nanos.time());
            lease.progress.enter(Phase::WaitingForRoom, OTHERS);
            // Pushes of a lost lease may wait for a ps that never comes back, and hold the room
            // that this lease needs.
            let held = self.held.clone();
            let changed = held.changed();
            self.ready.retain(|_, work| held.has(work.lease.id));
            if !held.has(lease.id) {
                return Turn::Never;
            }
            while let Ok(work) = self.arrivals.try_recv() {
                self.queue(work);
            }
            let most_urgent = self.ready.first_key_value().map(|(urgency, _)| *urgency);
            if most_urgent.is_some_and(|urgency| urgency < train.urgency(lease.id)) {
                return Turn::Later;
            }
            tokio::select! {
                biased;
                () = shutdown.cancelled() => return Turn::Draining,
                Some(arrived) = self.arrivals.recv() => self.queue(arrived),
                () = changed => {}
                () = pushed => {}
                () = tokio::time::sleep(SAID) => {}
            }
        }
    }

    /// Queues unfinished training again. Reports finished training once its pushes are
    /// acknowledged.
    fn advance(&mut self, lease: Lease, train: Train) {
        if train.is_computed() {
            self.metrics.leases.add(1);
            let span = lease.span.clone();
            self.finishers.spawn(self.reporter.clone().finish(lease, train).instrument(span));
        } else {
            lease.progress.queue();
            self.queue(Work { lease, task: Task::Train(train) });
        }
    }

    /// Drains: reports computed work once it is pushed, and gives back the rest. A failure affects
    /// only its own lease, which then expires.
    async fn hand_back(mut self) {
        while let Some(finished) = self.finishers.join_next().await {
            self.note(finished);
        }
        for Work { lease, task } in std::mem::take(&mut self.ready).into_values() {
            let mut done = Vec::new();
            if let Task::Train(mut train) = task {
                // A piece that gave way may have computed more than was pushed.
                let mut acknowledged = train.piece.is_none();
                while let Some(pushed) = train.pushes.join_next().await {
                    acknowledged &= matches!(pushed, Ok(Ok(())));
                }
                if acknowledged {
                    done = train.reports;
                }
            }
            self.release(lease.incarnation, lease.id, done).await;
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
