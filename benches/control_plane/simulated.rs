//! Workers that speak as real ones do and compute nothing.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use net::channel::{Channel, Dialer, Purpose};
use net::session::{Secret, Shown};
use proto::ids::IncarnationId;
use proto::pb;
use proto::pb::complete_request::Result as Report;
use proto::pb::fleet_client::FleetClient;
use proto::pb::lease::Work;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::service::Interceptor;
use tonic::service::interceptor::InterceptedService;

/// Longest wait of one request for work, as in a real worker.
const LEASE_WAIT_MS: u32 = 20_000;

/// Most registrations at once: a real fleet does not start within a millisecond.
const JOINING_MAX: usize = 64;

/// Simulated workers. They end with their handle.
pub(crate) struct Workers {
    count: usize,
    shared: Arc<Shared>,
    _runtime: tokio::runtime::Runtime,
}

impl std::ops::Deref for Workers {
    type Target = Shared;

    fn deref(&self) -> &Shared {
        &self.shared
    }
}

/// Counters of all workers.
#[derive(Debug)]
pub(crate) struct Shared {
    live: AtomicUsize,
    /// Leases that were granted and reported as done.
    pub(crate) leases: AtomicU64,
    /// Workers that the master no longer knew.
    pub(crate) lost: AtomicU64,
    latencies: Mutex<Vec<Duration>>,
    joining: tokio::sync::Semaphore,
}

impl Workers {
    /// Starts workers that hold each lease for `takes`.
    pub(crate) fn start(url: &str, count: usize, takes: Duration) -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().expect("a runtime");
        let shared = Arc::new(Shared {
            live: AtomicUsize::new(0),
            leases: AtomicU64::new(0),
            lost: AtomicU64::new(0),
            latencies: Mutex::default(),
            joining: tokio::sync::Semaphore::new(JOINING_MAX),
        });
        for index in 0..count {
            let (url, shared) = (url.to_owned(), shared.clone());
            // The workers' phases differ, so that they do not ask at the same moment of each
            // second.
            let phase = takes * index as u32 / count as u32;
            runtime.spawn(async move {
                let ended = worker(&url, index, takes, phase, &shared).await;
                shared.lost.fetch_add(1, Ordering::Relaxed);
                eprintln!("simulated worker {index}: {ended}");
            });
        }
        Self { count, shared, _runtime: runtime }
    }

    pub(crate) fn wait_until_live(&self) {
        while self.live.load(Ordering::Relaxed) < self.count && self.lost.load(Ordering::Relaxed) == 0 {
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Shared {
    /// Takes the durations of the requests for work since the last call.
    pub(crate) fn take_latencies(&self) -> Vec<Duration> {
        std::mem::take(&mut *self.latencies.lock().expect("nobody panics"))
    }
}

/// Runs one worker, and returns why it ended.
async fn worker(url: &str, index: usize, takes: Duration, phase: Duration, shared: &Shared) -> String {
    match live(url, index, takes, phase, shared).await {
        Ok(never) => match never {},
        Err(status) => status.to_string(),
    }
}

async fn live(
    url: &str,
    index: usize,
    takes: Duration,
    phase: Duration,
    shared: &Shared,
) -> Result<std::convert::Infallible, tonic::Status> {
    let joining = shared.joining.acquire().await.expect("never closed");
    // A connection of its own, to the master's TCP socket.
    let channel = Dialer::tcp().channel(url, Purpose::Control).map_err(tonic::Status::from)?;
    let mut fleet = FleetClient::new(channel.clone());
    let register = pb::RegisterRequest {
        role: pb::ProcessRole::Worker.into(),
        name: format!("simulated-{index}"),
        program_version: env!("CARGO_PKG_VERSION").to_owned(),
        url: String::new(),
        threads: 1,
        device: "cpu".to_owned(),
        numerics: None,
        program: String::new(),
        device_memory_bytes: 0,
        script: 0,
    };
    let reply = fleet.register(register).await?.into_inner();
    let pb::RegisterReply { incarnation, heartbeat_ms, secret, .. } = reply;
    let secret = Secret::from_bytes(&secret).expect("16 bytes");
    let shown = Shown { incarnation: IncarnationId(incarnation), secret };
    let mut fleet = FleetClient::with_interceptor(channel, Shows(shown));
    let held = AtomicU64::new(0);
    let beat = || pb::HeartbeatRequest {
        incarnation,
        leases: match held.load(Ordering::Relaxed) {
            0 => Vec::new(),
            lease => vec![pb::LeaseProgress { lease, ..Default::default() }],
        },
        ..Default::default()
    };
    let (beats, requests) = mpsc::channel(4);
    let _ = beats.try_send(beat());
    let mut answers = fleet.heartbeat(ReceiverStream::new(requests)).await?.into_inner();
    answers.message().await?;
    shared.live.fetch_add(1, Ordering::Relaxed);
    drop(joining);
    let beating = async {
        let mut ticks = tokio::time::interval(Duration::from_millis(heartbeat_ms.into()));
        loop {
            tokio::select! {
                answer = answers.message() => drop(answer?),
                _ = ticks.tick() => drop(beats.try_send(beat())),
            }
        }
    };
    let working = async {
        tokio::time::sleep(phase).await;
        let mut lease = None;
        loop {
            let (mut asked, mut fleet) = (Instant::now(), fleet.clone());
            let next = match lease.take() {
                Some(lease) => work(&mut fleet, incarnation, lease, takes, &held, &mut asked, shared).await?,
                None => None,
            };
            lease = match next {
                Some(next) => Some(next),
                None => {
                    let request = pb::LeaseRequest { incarnation, wait_ms: LEASE_WAIT_MS };
                    fleet.lease(request).await?.into_inner().lease
                }
            };
            if lease.is_some() {
                shared.latencies.lock().expect("nobody panics").push(asked.elapsed());
            }
        }
    };
    tokio::select! {
        ended = beating => ended,
        ended = working => ended,
    }
}

/// Shows a session with each call.
#[derive(Clone, Copy)]
struct Shows(Shown);

impl Interceptor for Shows {
    fn call(&mut self, mut request: tonic::Request<()>) -> Result<tonic::Request<()>, tonic::Status> {
        self.0.show(request.metadata_mut().as_mut());
        Ok(request)
    }
}

/// Works on one lease until the answer to its report, which may bring the next. `asked` becomes the
/// time of the report.
async fn work(
    fleet: &mut FleetClient<InterceptedService<Channel, Shows>>,
    incarnation: u64,
    lease: pb::Lease,
    takes: Duration,
    held: &AtomicU64,
    asked: &mut Instant,
    shared: &Shared,
) -> Result<Option<pb::Lease>, tonic::Status> {
    let Some(Work::Train(train)) = lease.work else {
        return Err(tonic::Status::internal("a lease that is not for training"));
    };
    held.store(lease.id, Ordering::Relaxed);
    if !takes.is_zero() {
        tokio::time::sleep(takes).await;
    }
    let report = pb::MicrobatchReport { loss_sum: 0.5, samples: 1, skipped: 0 };
    let trained = pb::Trained { microbatches: vec![report; train.count as usize], ..pb::Trained::default() };
    let result = Some(Report::Trained(trained));
    let request =
        pb::CompleteRequest { incarnation, lease: lease.id, result, more: true, ..Default::default() };
    *asked = Instant::now();
    let next = fleet.complete(request).await?.into_inner().next;
    held.store(0, Ordering::Relaxed);
    shared.leases.fetch_add(1, Ordering::Relaxed);
    Ok(next)
}
