//! A cluster in one thread: the real master, ps and worker code on a simulated network.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::io;
use std::net::{IpAddr, Ipv4Addr};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use ebbflow::random::Keyed;
use futures::Stream;
use net::channel::{Accepted, Channel, Dialer};
use proto::numerics::Numerics;
use proto::pb;
use proto::pb::jobs_client::JobsClient;
use proto::status::Failure;
use store::Stores;
use tokio_util::sync::CancellationToken;
use turmoil::Sim;
use turmoil::net::{TcpListener, TcpStream};

use crate::journal::Journal;
use crate::plan::{BESIDE, Dice, JOB, Plan, SLOW_LINK};
use crate::store::{Disk, Published};
use crate::{ambient, checks, liar, model};

const PORT: u16 = 4700;

type Failed = Box<dyn std::error::Error>;

/// Everything that the user saw.
#[derive(Clone, Debug, Default)]
pub(crate) struct Seen {
    /// Number of times that the job was submitted to go on from checkpoints.
    pub(crate) resumed: u64,
    /// Events since the last submission.
    pub(crate) events: Vec<pb::Event>,
    pub(crate) status: Option<pb::JobStatus>,
    /// Content of `model.safetensors`.
    pub(crate) model: Vec<u8>,
    /// Status, model and events of the job beside, unless it was cancelled.
    pub(crate) beside: Option<(pb::JobStatus, Vec<u8>, Vec<pb::Event>)>,
    /// Every checkpoint that was ever published.
    pub(crate) published: Vec<Published>,
}

/// Token of each worker and ps by host name, which tells it to leave.
type Shutdowns = Arc<Mutex<BTreeMap<String, CancellationToken>>>;

/// The ps by host name.
type PsByName = Arc<Mutex<BTreeMap<String, ps::Ps>>>;

/// The processes of a run.
pub(crate) struct Cluster {
    plan: Plan,
    folder: PathBuf,
    /// Host names: the master and the ps first.
    names: Vec<String>,
    /// Tokens that tell a worker or a ps to leave.
    shutdowns: Shutdowns,
    /// Switches by host name of workers that hang while theirs is set.
    hangs: BTreeMap<String, Arc<AtomicBool>>,
    /// The running ps, or their last ones, by host name.
    ps: PsByName,
    /// Store of the checkpoints. It outlives all processes.
    pub(crate) disk: Disk,
    /// Journal, which outlives the master like its disk.
    pub(crate) journal: Journal,
    /// Time for which the master's process is to stand still from now on.
    stop: Arc<Mutex<Duration>>,
    pub(crate) master: Arc<Mutex<Option<master::Master>>>,
}

impl Cluster {
    /// Creates the cluster of a plan, with all files in `folder`.
    pub(crate) fn new(seed: u64, plan: &Plan, folder: PathBuf) -> Self {
        let mut names = vec!["master".to_owned()];
        names.extend((0..plan.ps + plan.spare_ps).map(|index| format!("ps-{index}")));
        names.extend((0..plan.workers).map(|index| format!("worker-{index}")));
        let (shutdowns, stop, master, ps) = Default::default();
        let hangs = (0..plan.hanging).map(|worker| (format!("worker-{worker}"), Arc::default())).collect();
        let (disk, journal) = (Disk::new(seed, plan), Journal::new(seed, plan));
        Self { plan: plan.clone(), folder, names, shutdowns, hangs, ps, disk, journal, stop, master }
    }

    /// Starts all processes but the workers that join late. Returns the names of those.
    pub(crate) fn start(&self, sim: &mut Sim<'_>) -> Vec<String> {
        let options = master::Options {
            data_dir: self.folder.join("master"),
            death: Duration::from_secs(self.plan.death_secs),
            ps_grace: Duration::from_secs(self.plan.ps_grace_secs),
            ..master::Options::default()
        };
        let (rate, handle, journal) = (self.plan.clock_rate, self.master.clone(), self.journal.clone());
        let stop = self.stop.clone();
        let stores = Stores::only(Arc::new(self.disk.clone()));
        let on_disk = stores.clone();
        sim.host("master", move || {
            run_master(options.clone(), on_disk.clone(), rate, journal.clone(), handle.clone(), stop.clone())
        });
        for name in self.names.iter().filter(|name| name.starts_with("ps-")) {
            let own = || Stores::only(Arc::new(Disk::new(0, &self.plan)));
            let stores = if self.plan.apart { own() } else { stores.clone() };
            let options = self.ps_options(name);
            let (shutdowns, all) = (self.shutdowns.clone(), self.ps.clone());
            sim.host(name.as_str(), move || {
                run_ps(options.clone(), stores.clone(), shutdowns.clone(), all.clone())
            });
        }
        let workers = self.names.iter().filter(|name| name.starts_with("worker-"));
        let (late, early): (Vec<_>, Vec<_>) =
            workers.rev().enumerate().partition(|(index, _)| (*index as u64) < self.plan.late);
        for (_, name) in early.iter().rev() {
            self.start_worker(sim, name);
        }
        late.into_iter().map(|(_, name)| name.clone()).collect()
    }

    /// Starts a new worker.
    pub(crate) fn start_worker(&self, sim: &mut Sim<'_>, name: &str) {
        let number = name.strip_prefix("worker-").and_then(|number| number.parse().ok()).unwrap_or(0);
        let takes = if number == 0 { self.plan.slow_compute_ms } else { self.plan.compute_ms };
        let class = self.plan.class_of(number);
        let inline = worker::config::Inline {
            takes: Duration::from_millis(takes),
            gradient_takes: Duration::from_millis(self.plan.gradient_ms),
            numerics: Some(Numerics { class: class.to_owned(), facts: "simulated".to_owned() }),
            hangs: self.hangs.get(name).cloned().unwrap_or_default(),
        };
        let options = worker::Options {
            name: name.to_owned(),
            scratch: self.folder.clone(),
            data_root: Some(self.folder.clone()),
            inline: Some(inline),
            ..worker::Options::default()
        };
        let shutdowns = self.shutdowns.clone();
        sim.host(name, move || run_worker(options.clone(), class, shutdowns.clone()));
        if number < self.plan.slow_links {
            for peer in self.peers(name).filter(|peer| *peer != "master") {
                sim.set_link_latency(name, peer, Duration::from_millis(SLOW_LINK * self.plan.latency_ms));
            }
        }
    }

    /// Returns all hosts but the user's and those of `without`.
    pub(crate) fn hosts(&self, without: &[String]) -> impl Iterator<Item = &str> {
        self.names.iter().filter(|name| !without.contains(name)).map(String::as_str)
    }

    /// Returns the hosts that a process calls.
    pub(crate) fn peers(&self, host: &str) -> impl Iterator<Item = &str> {
        let count = match host {
            "master" => 0,
            // Ps ask each other when a job needs norms. Each pair comes once: links are the same
            // from both ends.
            _ if host.starts_with("ps-") => self.names.iter().position(|name| name == host).unwrap_or(1),
            _ => 1 + (self.plan.ps + self.plan.spare_ps) as usize,
        };
        self.names[..count].iter().map(String::as_str)
    }

    /// Tells a worker or a ps to drain: it finishes or saves what it holds, and leaves.
    pub(crate) fn drain(&self, host: &str) {
        if let Some(shutdown) = self.shutdowns.lock().unwrap().get(host) {
            shutdown.cancel();
        }
    }

    /// Returns the options of a ps, with the limits of its memory.
    fn ps_options(&self, name: &str) -> ps::Options {
        let usual = ps::Options::default();
        let (mut partition_bytes_max, mut push_bytes_max) = (usual.partition_bytes_max, usual.push_bytes_max);
        if self.plan.push_room > 0 {
            partition_bytes_max = self.plan.model_bytes();
            push_bytes_max = self.plan.push_room * partition_bytes_max;
        }
        ps::Options {
            name: name.to_owned(),
            url: format!("http://{name}:{PORT}"),
            master: format!("http://master:{PORT}"),
            threads: 1,
            inline_bytes_max: usize::MAX,
            partition_bytes_max,
            push_bytes_max,
            ..usual
        }
    }

    /// Checks that no ps has more in memory than it may. `over`: all jobs have ended, so it has
    /// nothing.
    pub(crate) fn check_memory(&self, over: bool) {
        for (name, ps) in &*self.ps.lock().unwrap() {
            let (metrics, most) = (ps.metrics(), ps.options().push_bytes_max);
            let (coming, held) = (metrics.push_bytes_in_flight.get(), metrics.push_bytes_held.get());
            assert!(coming <= most, "{name} takes in {coming} bytes of at most {most}");
            let held_max = most + self.plan.first_bytes();
            assert!(held <= held_max, "{name} holds {held} bytes of sums, and may hold {held_max}");
            let left = (coming, held, metrics.pulls_waiting.get(), metrics.partitions.get());
            assert!(!over || left == (0, 0, 0, 0), "all jobs have ended, and {name} still has {left:?}");
        }
    }

    /// Makes a worker hang: it sends heartbeats from now on, and makes no progress.
    pub(crate) fn hang(&self, worker: &str) {
        if let Some(hangs) = self.hangs.get(worker)
            && !hangs.swap(true, Ordering::Relaxed)
        {
            checks::count("workers that hang");
        }
    }

    /// Returns the workers that may hang.
    pub(crate) fn may_hang(&self) -> impl Iterator<Item = &str> {
        self.hangs.keys().map(String::as_str)
    }

    /// Stops the master's process for a time, as after a SIGSTOP. Messages to it wait, and its
    /// clocks go on.
    pub(crate) fn stop_master(&self, time: Duration) {
        *self.stop.lock().unwrap() = time;
    }

    /// Removes the data folder and the journal of a master that does not run.
    pub(crate) fn lose_master(&self) {
        count_leases(&self.master);
        self.journal.lose();
        let data = self.folder.join("master");
        // The folder may be lost again before the master is started.
        if data.exists() {
            std::fs::remove_dir_all(data).unwrap();
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
        let accepted = listener.accept().await.map(|(stream, _)| Accepted::trusted(stream));
        Some((accepted, listener))
    }))
}

/// Takes a master that ended, if there is one, and adds its counts.
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
    journal: Journal,
    handle: Arc<Mutex<Option<master::Master>>>,
    stop: Arc<Mutex<Duration>>,
) -> Result<(), Failed> {
    // The master that crashed held the folder.
    count_leases(&handle);
    let (journal, clock) = (Arc::new(journal), master::Clock::at_rate(rate));
    let master = master::Master::open_with(options, stores, dialer(), journal, clock).await?;
    *handle.lock().unwrap() = Some(master.clone());
    tokio::select! {
        biased;
        () = stand_still(&stop) => unreachable!("looks for ever"),
        served = master.serve(accept().await?, CancellationToken::new()) => Ok(served?),
    }
}

/// Stops the process of this task when it is told to: moves its clocks on, and nothing else happens
/// meanwhile.
async fn stand_still(stop: &Mutex<Duration>) {
    // An order for an earlier process is not for this one.
    *stop.lock().unwrap() = Duration::ZERO;
    loop {
        tokio::time::sleep(Duration::from_millis(20)).await;
        let time = std::mem::take(&mut *stop.lock().unwrap());
        if !time.is_zero() {
            tokio::time::advance(time).await;
        }
    }
}

async fn run_ps(
    options: ps::Options,
    stores: Stores,
    shutdowns: Shutdowns,
    all: PsByName,
) -> Result<(), Failed> {
    let (shutdown, name) = (CancellationToken::new(), options.name.clone());
    shutdowns.lock().unwrap().insert(name.clone(), shutdown.clone());
    let ps = ps::Ps::with_stores(options, stores)?;
    // The ps that crashed is dropped by now.
    all.lock().unwrap().insert(name, ps.clone());
    Ok(ps::run(ps, accept().await?, dialer(), shutdown).await?)
}

async fn run_worker(
    options: worker::Options,
    class: &'static str,
    shutdowns: Shutdowns,
) -> Result<(), Failed> {
    let shutdown = CancellationToken::new();
    // The process that hung has ended.
    options.inline.iter().for_each(|inline| inline.hangs.store(false, Ordering::Relaxed));
    shutdowns.lock().unwrap().insert(options.name.clone(), shutdown.clone());
    let connector = worker::Connector::socket(dialer());
    let master = format!("http://master:{PORT}");
    if let Err(error) = worker::run(
        options,
        &master,
        dialer(),
        connector,
        model::registry(class),
        Stores::default(),
        worker::Watched::default(),
        shutdown,
    )
    .await
    {
        // The worker could not reach another process for as long as it may try. A supervisor would
        // start it again.
        tracing::debug!(%error, "worker gave up");
        checks::count("workers gave up");
    }
    Ok(())
}

/// Submits the job, follows it to its end, and fetches its model. It submits the job again when the
/// master no longer knows it, or when it cannot begin because of the content of the store.
pub(crate) async fn run_user(
    plan: Plan,
    spec: String,
    disk: Disk,
    seen: Arc<Mutex<Seen>>,
) -> Result<(), Failed> {
    let channel = dialer().channel(&format!("http://master:{PORT}"), net::channel::Purpose::Control)?;
    let jobs = JobsClient::new(channel);
    let (mut resume, mut before) = (false, RefCell::default());
    loop {
        let job = insist(async || submit(jobs.clone(), &spec, JOB, resume, &before).await).await?;
        match follow(&jobs, &job, &seen).await {
            Ok((status, model)) => match again(&status) {
                None => {
                    checks::ended(status.job);
                    {
                        let mut seen = seen.lock().unwrap();
                        (seen.status, seen.model) = (Some(status.clone()), model.clone());
                    }
                    return if plan.lingers { linger(&plan, &jobs, status, model).await } else { Ok(()) };
                }
                Some(Again::AsBefore) => {}
                Some(Again::Resume) => resume = true,
                Some(Again::Cleared) => {
                    disk.clear();
                    resume = false;
                }
            },
            Err(lost) if lost.code() == tonic::Code::NotFound => {
                checks::count("jobs submitted again to a master that knows none");
                (resume, before) = (true, RefCell::default());
                seen.lock().unwrap().begin_again(resume);
                continue;
            }
            Err(status) => return Err(status.into()),
        }
        checks::count("jobs submitted again that could not begin");
        before = job.into();
        seen.lock().unwrap().begin_again(resume);
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
}

/// Waits until all processes have heard of the job's end, including a master that is started again.
/// The end must stay as it was.
async fn linger(
    plan: &Plan,
    jobs: &JobsClient<Channel>,
    ended: pb::JobStatus,
    model: Vec<u8>,
) -> Result<(), Failed> {
    let job = ended.name.clone();
    let same = async || {
        let now = insist(async || fetch(jobs.clone(), &job).await).await?;
        // A worker may hang in its former work long after.
        let hangs = ended.hangs.clone();
        assert_eq!(pb::JobStatus { hangs, ..now.0 }, ended, "a job that had ended changed");
        assert!(now.1 == model, "the model of a job that had ended changed");
        Ok::<_, tonic::Status>(())
    };
    checks::restart_master();
    tokio::time::sleep(Duration::from_secs(1)).await;
    same().await?;
    let healed = Duration::from_millis(plan.until_ms) + HEARD_OF;
    tokio::time::sleep(healed.saturating_sub(ambient::elapsed())).await;
    Ok(same().await?)
}

/// Time after the last fault until all processes have heard of what happened in between.
const HEARD_OF: Duration = Duration::from_secs(60);

/// Runs a member of the fleet that lies.
pub(crate) async fn run_liar(seed: u64, plan: Plan) -> Result<(), Failed> {
    let channel = dialer().channel(&format!("http://master:{PORT}"), net::channel::Purpose::Control)?;
    liar::run(seed, plan, channel).await;
    Ok(())
}

/// Pauses, scales and continues jobs. Submits one beside the first, which it may cancel, and
/// otherwise fetches its model. In the end every job continues.
pub(crate) async fn run_other_user(
    seed: u64,
    plan: Plan,
    beside: Option<String>,
    seen: Arc<Mutex<Seen>>,
) -> Result<(), Failed> {
    let channel = dialer().channel(&format!("http://master:{PORT}"), net::channel::Purpose::Control)?;
    let mut jobs = JobsClient::new(channel);
    let mut dice = Dice(Keyed::new(seed, "other user", 0));
    let mut submitted = None;
    let cancels = dice.happens(plan.cancel);
    while ambient::elapsed() < Duration::from_millis(plan.until_ms) && (plan.meddles || beside.is_some()) {
        tokio::time::sleep(Duration::from_millis(dice.range(50, 2000))).await;
        if let (Some(spec), None) = (&beside, &submitted) {
            let submit = async || submit(jobs.clone(), spec, BESIDE, false, &RefCell::default()).await;
            submitted = Some(insist(submit).await?);
        }
        if plan.meddles {
            // An unreachable master is not waited for, and a job that has ended is not changed.
            let _ = meddle(&mut jobs, &mut dice, plan.workers).await;
        }
    }
    let listed =
        insist(async || Ok(jobs.clone().list(pb::ListRequest::default()).await?.into_inner().jobs)).await?;
    for job in listed.into_iter().map(|job| job.name).filter(|_| plan.meddles) {
        let workers = plan.workers as u32;
        let go_on =
            async || jobs.clone().resume(pb::ResumeRequest { job: job.clone(), ..Default::default() }).await;
        let scale = async || jobs.clone().scale(pb::ScaleRequest { job: job.clone(), workers }).await;
        // The job may have ended.
        let _ = (insist(go_on).await, insist(scale).await);
    }
    let Some(job) = submitted else { return Ok(()) };
    end_beside(&jobs, &job, cancels.then(|| dice.one_in(2)), &seen).await?;
    if plan.lingers {
        tokio::time::sleep(HEARD_OF).await;
    }
    Ok(())
}

/// Cancels the job beside the first, by force or not, or follows it to its end.
async fn end_beside(
    jobs: &JobsClient<Channel>,
    job: &str,
    cancel: Option<bool>,
    seen: &Mutex<Seen>,
) -> Result<(), Failed> {
    if let Some(force) = cancel {
        let job = job.to_owned();
        let cancel = async || jobs.clone().cancel(pb::CancelRequest { job: job.clone(), force }).await;
        // The job may have ended, or be gone with the master's disk.
        let _ = insist(cancel).await;
        return Ok(());
    }
    let other = Mutex::new(Seen::default());
    match follow(jobs, job, &other).await {
        Ok((status, model)) => {
            checks::ended(status.job);
            let events = std::mem::take(&mut other.lock().unwrap().events);
            seen.lock().unwrap().beside = Some((status, model, events));
            Ok(())
        }
        Err(lost) if lost.code() == tonic::Code::NotFound => Ok(()),
        Err(status) => Err(status.into()),
    }
}

/// Pauses, scales or continues some job.
async fn meddle(jobs: &mut JobsClient<Channel>, dice: &mut Dice, workers: u64) -> Result<(), tonic::Status> {
    let listed = jobs.list(pb::ListRequest::default()).await?.into_inner().jobs;
    if listed.is_empty() {
        return Ok(());
    }
    let job = listed[dice.range(0, listed.len() as u64 - 1) as usize].name.clone();
    match dice.range(0, 3) {
        0 => drop(jobs.pause(pb::PauseRequest { job }).await?),
        1 => drop(jobs.scale(pb::ScaleRequest { job, workers: dice.range(1, workers) as u32 }).await?),
        _ => drop(jobs.resume(pb::ResumeRequest { job, ..Default::default() }).await?),
    }
    checks::count("what a user did to jobs");
    Ok(())
}

impl Seen {
    fn begin_again(&mut self, resume: bool) {
        self.events.clear();
        self.resumed += u64::from(resume);
    }
}

/// Way in which a user submits a job again that could not begin.
enum Again {
    AsBefore,
    /// Resume from the checkpoints.
    Resume,
    /// Remove all checkpoints, because none can be read.
    Cleared,
}

/// Returns how a user submits a job again that has ended, or `None` if not at all.
fn again(status: &pb::JobStatus) -> Option<Again> {
    let failed = status.state() == pb::JobState::Failed;
    match &status.reason {
        _ if !failed => None,
        reason if reason.contains("go on from them with --resume") => Some(Again::Resume),
        reason if reason.contains("nothing to resume from") => Some(Again::Cleared),
        reason if reason.contains("can be restored") => Some(Again::Cleared),
        reason if reason.contains("the store is away") => Some(Again::AsBefore),
        _ => None,
    }
}

async fn follow(
    jobs: &JobsClient<Channel>,
    job: &str,
    seen: &Mutex<Seen>,
) -> Result<(pb::JobStatus, Vec<u8>), tonic::Status> {
    insist(async || watch(jobs.clone(), job, seen).await).await?;
    insist(async || fetch(jobs.clone(), job).await).await
}

/// Retries while the master is unreachable.
async fn insist<T>(attempt: impl AsyncFn() -> Result<T, tonic::Status>) -> Result<T, tonic::Status> {
    loop {
        match attempt().await {
            Err(status) if Failure::from(status.clone()).is_retryable() => {
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
            result => return result,
        }
    }
}

/// Submits the job, unless a master that died before its answer has accepted it: then there is a
/// job after the one `before`. A master that lost its data does not know `before`, and may give its
/// name to the next job. So `before` becomes empty then.
async fn submit(
    mut jobs: JobsClient<Channel>,
    spec: &str,
    name: &str,
    resume: bool,
    before: &RefCell<String>,
) -> Result<String, tonic::Status> {
    let listed = jobs.list(pb::ListRequest::default()).await?.into_inner().jobs;
    if listed.iter().all(|job| job.name != *before.borrow()) {
        before.take();
    }
    let ours = |job: &pb::JobStatus| job.name.starts_with(name);
    if let Some(job) = listed.into_iter().rfind(ours)
        && job.name != *before.borrow()
    {
        return Ok(job.name);
    }
    let part = pb::submit_request::Part::SpecJson(spec.to_owned());
    let submit = tokio_stream::iter([pb::SubmitRequest { part: Some(part), resume, ..Default::default() }]);
    Ok(jobs.submit(submit).await?.into_inner().name)
}

/// Follows the job to its end, from the last event that was seen.
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
    if status.state() != pb::JobState::Succeeded {
        return Ok((status, Vec::new()));
    }
    let mut files = jobs.fetch(pb::FetchRequest { job: job.to_owned() }).await?.into_inner();
    let mut model = Vec::new();
    while let Some(part) = files.message().await? {
        if let Some(pb::artifact_part::Part::Content(content)) = part.part {
            model.extend_from_slice(&content);
        }
    }
    Ok((status, model))
}
