//! A cluster in one thread: the real master, ps and worker code on a simulated network.

use std::collections::BTreeMap;
use std::io;
use std::net::{IpAddr, Ipv4Addr};
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures::Stream;
use object_store::memory::InMemory;
use proto::channel::{Accepted, Dialer};
use proto::checkpoint::store::Stores;
use proto::pb;
use proto::pb::jobs_client::JobsClient;
use proto::status::Failure;
use tokio_util::sync::CancellationToken;
use tonic::transport::Channel;
use turmoil::Sim;
use turmoil::net::{TcpListener, TcpStream};

use crate::plan::Plan;
use crate::{checks, model};

const PORT: u16 = 4700;

type Failed = Box<dyn std::error::Error>;

/// What the user saw.
#[derive(Clone, Debug, Default)]
pub(crate) struct Seen {
    pub(crate) events: Vec<pb::Event>,
    pub(crate) status: Option<pb::JobStatus>,
    /// `model.safetensors`.
    pub(crate) model: Vec<u8>,
}

/// The processes of a run.
pub(crate) struct Cluster {
    plan: Plan,
    folder: PathBuf,
    /// By host name: the master and the ps first.
    names: Vec<String>,
    /// Asks a worker to leave.
    shutdowns: Arc<Mutex<BTreeMap<String, CancellationToken>>>,
    /// What lies on the store of checkpoints; it outlives everything.
    pub(crate) store: Arc<InMemory>,
    pub(crate) master: Arc<Mutex<Option<master::Master>>>,
}

impl Cluster {
    /// Of a plan, with all files in `folder`.
    pub(crate) fn new(plan: &Plan, folder: PathBuf) -> Self {
        let mut names = vec!["master".to_owned()];
        names.extend((0..plan.ps + plan.spare_ps).map(|index| format!("ps-{index}")));
        names.extend((0..plan.workers).map(|index| format!("worker-{index}")));
        let (shutdowns, store, master) = (Arc::default(), Arc::default(), Arc::default());
        Self { plan: plan.clone(), folder, names, shutdowns, store, master }
    }

    /// Starts everything but the workers that join late; answers which those are.
    pub(crate) fn start(&self, sim: &mut Sim<'_>) -> Vec<String> {
        let options = master::Options {
            data_dir: self.folder.join("master"),
            death: Duration::from_secs(self.plan.death_secs),
            ps_grace: Duration::from_secs(self.plan.ps_grace_secs),
            ..master::Options::default()
        };
        let (rate, handle) = (self.plan.clock_rate, self.master.clone());
        // It outlives the master, like a disk.
        let journal = master::MemoryStore::default();
        let stores = Stores::only(self.store.clone());
        let on_disk = stores.clone();
        sim.host("master", move || {
            run_master(options.clone(), on_disk.clone(), rate, journal.clone(), handle.clone())
        });
        for name in self.names.iter().filter(|name| name.starts_with("ps-")) {
            let (host, stores) = (name.clone(), stores.clone());
            sim.host(name.as_str(), move || run_ps(host.clone(), stores.clone()));
        }
        let workers = self.names.iter().filter(|name| name.starts_with("worker-"));
        let (late, early): (Vec<_>, Vec<_>) =
            workers.rev().enumerate().partition(|(index, _)| (*index as u64) < self.plan.late);
        for (_, name) in early.iter().rev() {
            self.start_worker(sim, name);
        }
        late.into_iter().map(|(_, name)| name.clone()).collect()
    }

    /// A worker that was never there starts.
    pub(crate) fn start_worker(&self, sim: &mut Sim<'_>, name: &str) {
        let takes = if name == "worker-0" { self.plan.slow_compute_ms } else { self.plan.compute_ms };
        let options = worker::Options {
            name: name.to_owned(),
            scratch: self.folder.clone(),
            data_root: Some(self.folder.clone()),
            inline: Some(Duration::from_millis(takes)),
            ..worker::Options::default()
        };
        let shutdowns = self.shutdowns.clone();
        sim.host(name, move || run_worker(options.clone(), shutdowns.clone()));
        let slow = name.strip_prefix("worker-").and_then(|index| index.parse().ok());
        if slow.is_some_and(|index: u64| index < self.plan.slow_links) {
            for peer in self.peers(name).filter(|peer| *peer != "master") {
                sim.set_link_latency(name, peer, Duration::from_millis(10 * self.plan.latency_ms));
            }
        }
    }

    /// All processes but the user's and those of `without`.
    pub(crate) fn hosts(&self, without: &[String]) -> impl Iterator<Item = &str> {
        self.names.iter().filter(|name| !without.contains(name)).map(String::as_str)
    }

    /// Whom a process calls.
    pub(crate) fn peers(&self, host: &str) -> impl Iterator<Item = &str> {
        let count = match host {
            "master" => 0,
            _ if host.starts_with("ps-") => 1,
            _ => 1 + (self.plan.ps + self.plan.spare_ps) as usize,
        };
        self.names[..count].iter().map(String::as_str)
    }

    /// Asks a worker to finish what it does and to leave.
    pub(crate) fn drain(&self, worker: &str) {
        if let Some(shutdown) = self.shutdowns.lock().unwrap().get(worker) {
            shutdown.cancel();
        }
    }
}

/// Opens simulated connections.
fn dialer() -> Dialer {
    Dialer::new(|uri| async move { TcpStream::connect((uri.host().unwrap_or_default(), PORT)).await })
}

async fn accept() -> io::Result<impl Stream<Item = io::Result<Accepted<TcpStream>>> + Send> {
    let listener = TcpListener::bind((IpAddr::from(Ipv4Addr::UNSPECIFIED), PORT)).await?;
    Ok(futures::stream::unfold(listener, |listener| async move {
        let accepted = listener.accept().await.map(|(stream, _)| Accepted(stream));
        Some((accepted, listener))
    }))
}

/// The end of a master, if there is one: what it counted.
pub(crate) fn count_leases(master: &Mutex<Option<master::Master>>) {
    if let Some(metrics) = master.lock().unwrap().take().map(|master| master.metrics()) {
        checks::add("leases granted", metrics.leases_granted);
        checks::add("leases copied", metrics.leases_copied);
    }
}

async fn run_master(
    options: master::Options,
    stores: Stores,
    rate: f64,
    journal: master::MemoryStore,
    handle: Arc<Mutex<Option<master::Master>>>,
) -> Result<(), Failed> {
    // The one that crashed held the folder.
    count_leases(&handle);
    let (journal, clock) = (Arc::new(journal), master::Clock::at_rate(rate));
    let master = master::Master::open_with(options, stores, dialer(), journal, clock).await?;
    *handle.lock().unwrap() = Some(master.clone());
    Ok(master.serve(accept().await?, CancellationToken::new()).await?)
}

async fn run_ps(name: String, stores: Stores) -> Result<(), Failed> {
    let url = format!("http://{name}:{PORT}");
    let options = ps::Options {
        name,
        url,
        master: format!("http://master:{PORT}"),
        threads: 1,
        ..ps::Options::default()
    };
    Ok(ps::run(ps::Ps::with_stores(options, stores)?, accept().await?, dialer(), CancellationToken::new())
        .await?)
}

async fn run_worker(
    options: worker::Options,
    shutdowns: Arc<Mutex<BTreeMap<String, CancellationToken>>>,
) -> Result<(), Failed> {
    let shutdown = CancellationToken::new();
    shutdowns.lock().unwrap().insert(options.name.clone(), shutdown.clone());
    let connector = worker::Connector::grpc(dialer());
    let master = format!("http://master:{PORT}");
    if let Err(error) = worker::run(options, &master, dialer(), connector, model::registry(), shutdown).await
    {
        // It could not reach somebody for as long as it was told to try. Whoever looks after it starts it again.
        tracing::debug!(%error, "worker gave up");
        checks::count("workers gave up");
    }
    Ok(())
}

/// Submits the job, follows it to its end, and fetches its model.
pub(crate) async fn run_user(spec: String, seen: Arc<Mutex<Seen>>) -> Result<(), Failed> {
    let channel = dialer().channel(&format!("http://master:{PORT}"), proto::channel::Purpose::Control)?;
    let jobs = JobsClient::new(channel);
    let job = insist(async || submit(jobs.clone(), &spec).await).await?;
    insist(async || watch(jobs.clone(), &job, &seen).await).await?;
    let (status, model) = insist(async || fetch(jobs.clone(), &job).await).await?;
    let mut seen = seen.lock().unwrap();
    (seen.status, seen.model) = (Some(status), model);
    Ok(())
}

/// Tries again while the master is away.
async fn insist<T>(attempt: impl AsyncFn() -> Result<T, tonic::Status>) -> Result<T, Failed> {
    loop {
        match attempt().await {
            Err(status) if Failure::from(status.clone()).is_retryable() => {
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
            result => return Ok(result?),
        }
    }
}

/// Submits the job, unless a master that died before it could answer has taken it.
async fn submit(mut jobs: JobsClient<Channel>, spec: &str) -> Result<String, tonic::Status> {
    if let Some(job) = jobs.list(pb::ListRequest {}).await?.into_inner().jobs.pop() {
        return Ok(job.name);
    }
    let part = pb::submit_request::Part::SpecJson(spec.to_owned());
    let submit = tokio_stream::iter([pb::SubmitRequest { part: Some(part), resume: false }]);
    Ok(jobs.submit(submit).await?.into_inner().name)
}

/// Follows the job to its end, from what was seen on.
async fn watch(mut jobs: JobsClient<Channel>, job: &str, seen: &Mutex<Seen>) -> Result<(), tonic::Status> {
    let after = seen.lock().unwrap().events.last().map_or(0, |event| event.sequence);
    let mut events = jobs.watch(pb::WatchRequest { job: job.to_owned(), after }).await?.into_inner();
    while let Some(event) = events.message().await? {
        let events = &mut seen.lock().unwrap().events;
        let before = events.last().map_or(0, |event: &pb::Event| event.sequence);
        assert_eq!(event.sequence, before + 1, "events have no gaps, also after a restart of the master");
        events.push(event);
    }
    Ok(())
}

async fn fetch(mut jobs: JobsClient<Channel>, job: &str) -> Result<(pb::JobStatus, Vec<u8>), tonic::Status> {
    let status = jobs.status(pb::StatusRequest { job: job.to_owned() }).await?.into_inner();
    let mut files = jobs.fetch(pb::FetchRequest { job: job.to_owned() }).await?.into_inner();
    let mut model = Vec::new();
    while let Some(part) = files.message().await? {
        if let Some(pb::artifact_part::Part::Content(content)) = part.part {
            model.extend_from_slice(&content);
        }
    }
    Ok((status, model))
}
