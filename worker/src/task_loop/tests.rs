//! The loop beside a ps whose pulls take time, with computed steps that take time. Time is paused:
//! it moves on when nothing else can happen.

use std::collections::BTreeSet;
use std::sync::atomic::Ordering;
use std::sync::{Mutex, PoisonError};

use model::{Evaluation, Gradients, Model};
use net::channel::Dialer;
use proto::ids::{ChunkId, Era, JobId, Version};
use proto::parameters::{GivenValues, Outcome, Parameters, Pull, Push, Pushed, Take, Want};
use proto::tensor::{TensorSpec, Values};
use proto::wire::WireType;
use tokio::sync::watch;

use super::*;
use crate::config::Inline;
use crate::job::{Job, Read};
use crate::progress::Progress;

const URL: &str = "http://ps-0:1";

const INCARNATION: IncarnationId = IncarnationId(5);

/// Time of one microbatch, which is a whole step.
const COMPUTING: Duration = Duration::from_millis(100);

/// Records of the job, in steps of one record.
const RECORDS: u64 = 40;

const PULL_TIMEOUT: Duration = Duration::from_secs(10);

/// More than anything takes here that ends at all.
const LONG: Duration = Duration::from_secs(600);

/// What ps and model saw.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Event {
    /// A pull was called.
    Pull { job: JobId, era: Era, want: Want },
    /// A microbatch was computed from weights with this value.
    Computed { from: f32 },
    /// A node arrived.
    Push(Step),
}

#[derive(Clone)]
struct Log {
    began: Instant,
    events: Arc<Mutex<Vec<(Duration, Event)>>>,
}

impl Log {
    fn add(&self, event: Event) {
        let mut events = self.events.lock().unwrap_or_else(PoisonError::into_inner);
        events.push((self.began.elapsed(), event));
    }

    /// Returns the times of some events.
    fn times(&self, which: impl Fn(&Event) -> bool) -> Vec<Duration> {
        let events = self.events.lock().unwrap_or_else(PoisonError::into_inner);
        events.iter().filter(|(_, event)| which(event)).map(|(at, _)| *at).collect()
    }

    /// Returns the versions that were pulled, and whether a microbatch was being computed when the
    /// pull was called.
    fn pulls(&self) -> Vec<(u64, bool)> {
        let ends = self.times(|event| matches!(event, Event::Computed { .. }));
        let computes = |at: Duration| ends.iter().any(|&end| at < end && end <= at + COMPUTING);
        let events = self.events.lock().unwrap_or_else(PoisonError::into_inner);
        let pulled = events.iter().filter_map(|(at, event)| match event {
            Event::Pull { want: Want::Exact(version) | Want::AtLeast(version), .. } => {
                Some((version.get(), computes(*at)))
            }
            _ => None,
        });
        pulled.collect()
    }

    fn last_pulled(&self) -> Option<u64> {
        self.pulls().last().map(|(version, _)| *version)
    }

    /// Returns the values of the weights from which microbatches were computed.
    fn computed_from(&self) -> Vec<f32> {
        let events = self.events.lock().unwrap_or_else(PoisonError::into_inner);
        let from = events.iter().filter_map(|(_, event)| match event {
            Event::Computed { from } => Some(*from),
            _ => None,
        });
        from.collect()
    }
}

/// A ps of jobs with one tensor. A node is a whole step of the job that pushes.
struct Ps {
    log: Log,
    /// Time of a transfer.
    transfer: Duration,
    /// Time of a push.
    pushing: Duration,
    /// Number of applied steps.
    applied: watch::Sender<u64>,
    /// Version above which no one comes to be.
    last: u64,
    /// Versions whose next pull fails.
    fails: Mutex<BTreeSet<u64>>,
    /// Version from which on each pull fails.
    fails_from: u64,
    /// Calls of pulls that are open.
    open: Arc<watch::Sender<usize>>,
}

/// An open call.
struct Open(Arc<watch::Sender<usize>>);

impl Drop for Open {
    fn drop(&mut self) {
        self.0.send_modify(|open| *open -= 1);
    }
}

/// Returns the value of the weights at a version.
fn value(job: JobId, era: Era, version: u64) -> f32 {
    (job.get() * 10_000 + era.get() * 1000 + version) as f32
}

#[async_trait::async_trait]
impl Parameters for Ps {
    async fn push(&self, push: Push) -> Result<Pushed, Failure> {
        let Target::Node { node, .. } = push.target else { panic!("a node") };
        self.log.add(Event::Push(node.step));
        tokio::time::sleep(self.pushing).await;
        self.applied.send_modify(|applied| *applied = self.last.min((node.step.get() + 1).max(*applied)));
        Ok(Pushed { outcome: Outcome::Completed, version: Version(*self.applied.borrow()) })
    }

    async fn pull_into(&self, pull: Pull, take: &mut Take<'_>) -> Result<Version, Failure> {
        let Pull { address, want, wait, .. } = pull;
        self.log.add(Event::Pull { job: address.job, era: address.era, want });
        self.open.send_modify(|open| *open += 1);
        let _open = Open(self.open.clone());
        let (Want::Exact(version) | Want::AtLeast(version)) = want;
        let failing = self.fails.lock().unwrap_or_else(PoisonError::into_inner).remove(&version.get());
        if failing || version.get() >= self.fails_from {
            return Err(Failure::new(Kind::Unavailable, "the ps is away"));
        }
        let mut applied = self.applied.subscribe();
        let comes = applied.wait_for(|applied| *applied >= version.get());
        if tokio::time::timeout(wait, comes).await.is_err() {
            return Err(Failure::new(Kind::NotYet, "not yet"));
        }
        tokio::time::sleep(self.transfer).await;
        let value = value(address.job, address.era, version.get()).to_le_bytes();
        take(ChunkId(0), WireType::F32, GivenValues::Host(&value))?;
        Ok(version)
    }
}

/// A model that says from which weights it computed.
struct Saying {
    log: Log,
    weights: f32,
    /// Addresses of the weights that were loaded.
    places: Arc<Mutex<BTreeSet<usize>>>,
}

impl Model for Saying {
    fn tensors(&self) -> Vec<TensorSpec> {
        vec![TensorSpec::parameter("w", [1])]
    }

    fn initial(&mut self, _: u64) -> model::Result<Vec<Values>> {
        Ok(vec![Values::F32(vec![0.0])])
    }

    fn load(&mut self, weights: &[Values]) -> model::Result<()> {
        let values = weights[0].as_f32().expect("floats");
        self.places.lock().unwrap_or_else(PoisonError::into_inner).insert(values.as_ptr().addr());
        self.weights = values[0];
        Ok(())
    }

    fn gradients(&mut self, _: &Batch, _: u64) -> model::Result<Gradients> {
        self.log.add(Event::Computed { from: self.weights });
        Ok(Gradients { loss: 0.0, values: vec![Values::F32(vec![1.0])] })
    }

    fn evaluate(&mut self, _: &Batch) -> model::Result<Evaluation> {
        Ok(Evaluation::default())
    }
}

/// How a cluster differs from others.
struct Setting {
    consistency: &'static str,
    transfer: Duration,
    pushing: Duration,
    last: u64,
    fails: Vec<u64>,
    fails_from: u64,
}

impl Default for Setting {
    fn default() -> Self {
        let transfer = Duration::from_millis(60);
        let consistency = "mode = 'pipelined'";
        let pushing = Duration::ZERO;
        Self { consistency, transfer, pushing, last: u64::MAX, fails: Vec::new(), fails_from: u64::MAX }
    }
}

/// A worker beside a ps, without a master.
struct Cluster {
    folder: tempfile::TempDir,
    consistency: &'static str,
    log: Log,
    ps: Arc<Ps>,
    connector: Connector,
    inline: Inline,
    held: Held,
    session: Session,
    metrics: Arc<Metrics>,
    arrivals: mpsc::Sender<Work>,
    places: Arc<Mutex<BTreeSet<usize>>>,
    shutdown: CancellationToken,
}

/// Returns a loop that calls ps by `connector`, without a master, and the senders of its channels.
pub(super) fn task_loop(connector: &Connector) -> (TaskLoop, Session, mpsc::Sender<Work>) {
    let masters = Failover::new(&Dialer::tcp(), "http://master:1", Purpose::Control).expect("a URL");
    let (session, _) = Session::start(masters, pb::RegisterRequest::default());
    let metrics = Arc::<Metrics>::default();
    let held = Held::new(session.clone(), LatestReading::default(), Waits::new(metrics.clone()));
    let (arrivals_tx, arrivals) = mpsc::channel(16);
    let reporter = Reporter {
        master: MasterClient::new(session.fleet(), "http://master:1", 0),
        held: held.clone(),
        granted: mpsc::unbounded_channel().0,
        device: Arc::from("cpu"),
    };
    let work = TaskLoop {
        reporter,
        device: Arc::from("cpu"),
        connector: connector.clone(),
        stores: Stores::default(),
        held,
        arrivals,
        unable: mpsc::unbounded_channel().1,
        ready: BTreeMap::new(),
        weights: TrainingWeights::default(),
        in_flight: InFlight::new(4),
        finishers: JoinSet::new(),
        metrics,
        broken: None,
    };
    (work, session, arrivals_tx)
}

/// Returns the work of a lease of these microbatches, which `held` has from now on.
pub(super) fn training(held: &Held, job: &Arc<Job>, era: u32, lease: u64, microbatches: Range<u64>) -> Work {
    let granted = pb::Lease { id: lease, job: job.id.get(), ..Default::default() };
    held.insert(INCARNATION, &granted);
    let id = LeaseId(lease);
    let (batches_tx, batches) = mpsc::channel(RECORDS as usize);
    for microbatch in microbatches.clone() {
        let Read { microbatch, batch, .. } = job.read(MicrobatchId(microbatch)).expect("records");
        batches_tx.try_send((Ok((microbatch, batch)), None)).expect("room");
    }
    let train = Train {
        job: job.clone(),
        era: Era(era.into()),
        next: MicrobatchId(microbatches.start),
        end: MicrobatchId(microbatches.end),
        batches,
        reports: Vec::new(),
        pushes: JoinSet::new(),
        piece: None,
        began: Instant::now(),
        loading: Duration::ZERO,
        computing: Duration::ZERO,
    };
    let lease =
        Lease { incarnation: INCARNATION, id, progress: held.progress_of(id), span: tracing::Span::none() };
    Work { lease, task: Task::Train(train) }
}

impl Cluster {
    fn new(setting: Setting) -> (Self, TaskLoop) {
        let log = Log { began: Instant::now(), events: Arc::default() };
        let Setting { consistency, transfer, pushing, last, fails, fails_from } = setting;
        let (applied, open) = (watch::Sender::new(0), Arc::new(watch::Sender::new(0)));
        let fails = Mutex::new(fails.into_iter().collect());
        let ps = Arc::new(Ps { log: log.clone(), transfer, pushing, applied, last, fails, fails_from, open });
        let carrier: Arc<dyn Parameters> = ps.clone();
        let connector = Connector::embedded(BTreeMap::from([(URL.to_owned(), carrier)]));
        let (work, session, arrivals) = task_loop(&connector);
        let folder = tempfile::tempdir().expect("a folder");
        std::fs::write(folder.path().join("data.csv"), "1,0\n".repeat(RECORDS as usize)).expect("a file");
        let cluster = Self {
            folder,
            consistency,
            log,
            ps,
            connector,
            inline: Inline { takes: COMPUTING, ..Inline::default() },
            held: work.held.clone(),
            session,
            metrics: work.metrics.clone(),
            arrivals,
            places: Arc::default(),
            shutdown: CancellationToken::new(),
        };
        (cluster, work)
    }

    /// Opens a job.
    async fn job(&self, id: u64) -> Arc<Job> {
        let consistency = self.consistency;
        let job = format!(
            "name = 'job'\nepochs = 1\n[model]\nbuiltin = 'saying'\nloss = 'mse'\n\
             [data]\nformat = 'csv'\nheader = false\ntrain = {{ features = ['data.csv'] }}\n\
             [batch]\nmicro = 1\neffective = 1\n[optimizer]\nkind = 'sgd'\nlearning_rate = 0.1\n\
             [consistency]\n{consistency}\n[limits]\npull_timeout = '10s'\npull_attempts_max = 3\n"
        );
        let spec = proto::spec::parse(&job, &self.folder.path().join("job.toml"), &[]).expect("a job");
        let (log, places) = (self.log.clone(), self.places.clone());
        let registry = Registry::default().with("saying", move |_| {
            Ok(Box::new(Saying { log: log.clone(), weights: f32::NAN, places: places.clone() }))
        });
        let options = Options { inline: Some(self.inline.clone()), ..Options::default() };
        let reply = pb::JobReply { spec_json: spec.to_json(), ..Default::default() };
        let master = MasterClient::new(self.session.fleet(), "http://master:1", 0);
        let device = model::Device::Cpu;
        let (connector, progress) = (&self.connector, Progress::default());
        let job =
            Job::open(JobId(id), &reply, &options, device, &registry, &master, connector, &progress).await;
        let job = job.expect("a job");
        let partition = pb::PartitionAddress { ps: "ps-0".to_owned(), url: URL.to_owned() };
        let tensors = vec![pb::TensorSpec::from(&TensorSpec::parameter("w", [1]))];
        let placement = pb::Placement { tensors, partitions: vec![partition], number: 1 };
        job.place(placement, &self.connector).expect("a placement");
        Arc::new(job)
    }

    /// Returns the work of a lease of these steps, which the worker holds from now on.
    fn work(&self, job: &Arc<Job>, era: u32, lease: u64, steps: Range<u64>) -> Work {
        training(&self.held, job, era, lease, steps)
    }

    async fn send(&self, work: Work) {
        assert!(self.arrivals.send(work).await.is_ok(), "the loop lives");
    }

    async fn applied(&self, steps: u64) {
        let mut applied = self.ps.applied.subscribe();
        let waiting = applied.wait_for(|applied| *applied >= steps);
        tokio::time::timeout(LONG, waiting).await.expect("in time").expect("the ps lives");
    }

    /// Waits until so many calls of pulls are open.
    async fn open(&self, calls: usize) {
        let mut open = self.ps.open.subscribe();
        let waiting = open.wait_for(|open| *open == calls);
        tokio::time::timeout(LONG, waiting).await.expect("in time").expect("the ps lives");
    }

    fn idle(&self, lease: u64) -> (Phase, Duration) {
        let mut said = pb::LeaseProgress::default();
        self.held.progress_of(LeaseId(lease)).say(&mut said);
        (said.phase(), Duration::from_millis(said.idle_ms))
    }

    /// Runs the loop while `script` runs.
    async fn run<T>(&self, work: TaskLoop, script: impl Future<Output = T>) -> T {
        tokio::select! {
            biased;
            done = script => done,
            ended = work.run(&self.shutdown, &self.session) => panic!("the loop ended: {ended:?}"),
        }
    }

    /// Trains steps as one lease.
    async fn train(setting: Setting, steps: u64) -> Self {
        let (cluster, work) = Self::new(setting);
        let job = cluster.job(1).await;
        let script = async {
            cluster.send(cluster.work(&job, 0, 1, 0..steps)).await;
            cluster.applied(steps).await;
        };
        cluster.run(work, script).await;
        cluster
    }
}

fn millis(times: &[Duration]) -> Vec<u128> {
    times.windows(2).map(|pair| (pair[1] - pair[0]).as_millis()).collect()
}

#[tokio::test(start_paused = true)]
async fn a_step_costs_the_longer_one_of_its_computation_and_the_pull_of_the_next() {
    for (transfer, step) in [(0, 100), (60, 100), (99, 100), (150, 150)] {
        let transfer = Duration::from_millis(transfer);
        let cluster = Cluster::train(Setting { transfer, ..Setting::default() }, 12).await;
        let ends = cluster.log.times(|event| matches!(event, Event::Computed { .. }));
        // The first steps read version 0.
        assert_eq!(millis(&ends[2..]), [step; 9], "{transfer:?}");
        let versions: Vec<_> =
            (0..12u64).map(|step| value(JobId(1), Era(0), step.saturating_sub(1))).collect();
        assert_eq!(cluster.log.computed_from(), versions);
    }
}

#[tokio::test(start_paused = true)]
async fn the_time_of_a_worker_is_that_of_its_computation_and_of_what_it_waits_for() {
    for (pushing, waits) in [(0, false), (1000, true)] {
        let pushing = Duration::from_millis(pushing);
        let setting = Setting { consistency: "mode = 'async'", pushing, ..Setting::default() };
        let cluster = Cluster::train(setting, 12).await;
        let Metrics { load_nanos, pull_nanos, room_nanos, compute_nanos, .. } = &*cluster.metrics;
        let times = [load_nanos, pull_nanos, room_nanos, compute_nanos];
        let [load, pull, room, compute] = times.map(|time| Duration::from_nanos(time.get()));
        let ends = cluster.log.times(|event| matches!(event, Event::Computed { .. }));
        let (all, known) = (*ends.last().expect("12 steps"), load + pull + room + compute);
        assert!(all.abs_diff(known) < COMPUTING / 2, "{load:?} {pull:?} {room:?} {compute:?} of {all:?}");
        assert_eq!(room > Duration::ZERO, waits, "{room:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn pulls_run_ahead_where_the_version_may_exist_before_the_step_is_complete() {
    let versions = |consistency, delay: u64, ahead| {
        let pulled = (0..9).map(move |step: u64| (step.saturating_sub(delay), ahead && step > delay));
        let mut pulled: Vec<_> = pulled.collect();
        if ahead {
            pulled.dedup_by_key(|(version, _)| *version);
        }
        (consistency, pulled)
    };
    let all = [
        versions("mode = 'sync'", 0, false),
        versions("mode = 'pipelined'", 1, true),
        versions("mode = 'pipelined'\ndelay = 3", 3, true),
        versions("mode = 'bounded'\ndelay = 2", 2, false),
        versions("mode = 'async'", 9, false),
    ];
    for (consistency, expected) in all {
        let cluster = Cluster::train(Setting { consistency, ..Setting::default() }, 9).await;
        assert_eq!(cluster.log.pulls(), expected, "{consistency}");
    }
}

#[tokio::test(start_paused = true)]
async fn sync_never_pulls_ahead() {
    let (cluster, work) = Cluster::new(Setting { consistency: "mode = 'sync'", ..Setting::default() });
    let job = cluster.job(1).await;
    let script = async {
        cluster.ps.applied.send_replace(3);
        cluster.send(cluster.work(&job, 0, 1, 3..5)).await;
        // The weights have come, and step 3 is computed.
        tokio::time::sleep(cluster.ps.transfer + COMPUTING / 2).await;
        // A late copy of an earlier step, whose version may exist.
        cluster.send(cluster.work(&job, 0, 2, 2..3)).await;
        cluster.applied(5).await;
        assert_eq!(cluster.log.pulls(), [(3, false), (2, false), (4, false)]);
    };
    cluster.run(work, script).await;
}

#[tokio::test(start_paused = true)]
async fn the_next_lease_is_pulled_for_when_it_comes_while_the_one_before_is_computed() {
    let (cluster, work) = Cluster::new(Setting::default());
    let job = cluster.job(1).await;
    let script = async {
        cluster.send(cluster.work(&job, 0, 1, 0..3)).await;
        cluster.applied(2).await;
        // The last step of the lease is being computed: its weights have come ahead.
        tokio::time::sleep(COMPUTING / 2).await;
        let before = cluster.log.pulls().len();
        cluster.send(cluster.work(&job, 0, 2, 3..4)).await;
        cluster.applied(4).await;
        assert_eq!(cluster.log.pulls()[before..], [(2, true)]);
    };
    cluster.run(work, script).await;
}

#[tokio::test(start_paused = true)]
async fn a_pull_ahead_that_fails_is_made_again_when_its_step_begins() {
    let cluster = Cluster::train(Setting { fails: vec![3], ..Setting::default() }, 6).await;
    assert_eq!(cluster.log.pulls(), [(0, false), (1, true), (2, true), (3, true), (3, false), (4, true)]);
    assert_eq!((cluster.metrics.pull_failures.get(), cluster.metrics.pulls.get()), (1, 5));
}

#[tokio::test(start_paused = true)]
async fn a_ps_that_stays_away_ends_the_worker_no_later_than_without_pulls_ahead() {
    let (cluster, work) = Cluster::new(Setting { fails_from: 3, ..Setting::default() });
    let job = cluster.job(1).await;
    cluster.send(cluster.work(&job, 0, 1, 0..6)).await;
    let error = work.run(&cluster.shutdown, &cluster.session).await.unwrap_err();
    assert!(error.is_unreachable() && error.to_string().contains("pull from partition 0"), "{error}");
    let fails = cluster.log.times(|event| matches!(event, Event::Pull { want: Want::Exact(Version(3)), .. }));
    let ordinary = cluster.log.began.elapsed() - fails[1];
    assert!(ordinary < 4 * PULL_TIMEOUT && fails[1] - fails[0] <= COMPUTING, "{ordinary:?}");
}

#[tokio::test(start_paused = true)]
async fn a_pull_ahead_ends_with_its_lease() {
    // Version 2 never comes.
    let (cluster, work) = Cluster::new(Setting { last: 1, ..Setting::default() });
    let job = cluster.job(1).await;
    let script = async {
        cluster.send(cluster.work(&job, 0, 1, 0..3)).await;
        cluster.send(cluster.work(&job, 0, 2, 3..5)).await;
        cluster.applied(1).await;
        // Step 1 is computed, then step 2, and meanwhile the pull for step 3 waits.
        tokio::time::sleep(COMPUTING * 3 / 2).await;
        assert_eq!((cluster.log.last_pulled(), *cluster.ps.open.borrow()), (Some(2), 1));
        let before = Instant::now();
        cluster.held.remove(LeaseId(2));
        cluster.open(0).await;
        // Another lease comes instead.
        cluster.send(cluster.work(&job, 0, 3, 3..4)).await;
        cluster.open(1).await;
        assert_eq!(before.elapsed(), Duration::ZERO);
        let pushed = || cluster.log.times(|event| *event == Event::Push(Step(2))).len();
        assert_eq!(pushed(), 0);
        tokio::time::sleep(COMPUTING).await;
        assert_eq!(pushed(), 1, "the other lease goes on");
    };
    cluster.run(work, script).await;
}

#[tokio::test(start_paused = true)]
async fn a_pull_ahead_ends_when_the_worker_is_asked_to_leave() {
    let (cluster, work) = Cluster::new(Setting { last: 1, ..Setting::default() });
    let job = cluster.job(1).await;
    let script = async {
        cluster.send(cluster.work(&job, 0, 1, 0..5)).await;
        cluster.applied(1).await;
        tokio::time::sleep(COMPUTING * 3 / 2).await;
        assert_eq!(*cluster.ps.open.borrow(), 1);
        let before = Instant::now();
        cluster.shutdown.cancel();
        cluster.open(0).await;
        assert_eq!(before.elapsed(), Duration::ZERO);
    };
    cluster.run(work, script).await;
}

#[tokio::test(start_paused = true)]
async fn weights_of_another_era_or_job_are_never_taken_from_a_pull_ahead() {
    for (other_job, era) in [(false, 1), (true, 0)] {
        let (cluster, work) = Cluster::new(Setting { last: 2, ..Setting::default() });
        let job = cluster.job(1).await;
        let other = if other_job { cluster.job(2).await } else { job.clone() };
        let script = async {
            // The lease stays, as if its loss were not known yet. It is less urgent than the other.
            cluster.send(cluster.work(&job, 0, 1, 1..9)).await;
            cluster.applied(2).await;
            // Step 2 is computed. The pull for step 3 has version 2.
            tokio::time::sleep(COMPUTING * 9 / 10).await;
            assert_eq!(cluster.log.last_pulled(), Some(2));
            cluster.send(cluster.work(&other, era, 2, 2..3)).await;
            // Step 2 ends, the other weights are pulled, and the other step is computed.
            tokio::time::sleep(COMPUTING * 3).await;
            let from = value(other.id, Era(era.into()), 1);
            assert_eq!(cluster.log.computed_from().last(), Some(&from));
            let pulled = |job: JobId, era: u64, version: u64| {
                let pull = Event::Pull { job, era: Era(era), want: Want::Exact(Version(version)) };
                cluster.log.times(|event| *event == pull).len()
            };
            // The pull ahead was for something else, and is made again.
            assert_eq!(pulled(JobId(1), 0, 2), 2);
            assert_eq!((pulled(other.id, era.into(), 1), pulled(other.id, era.into(), 2)), (1, 0));
        };
        cluster.run(work, script).await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_pull_ahead_does_not_hide_a_computation_that_hangs() {
    let (cluster, work) = Cluster::new(Setting { last: 1, ..Setting::default() });
    let job = cluster.job(1).await;
    let script = async {
        cluster.send(cluster.work(&job, 0, 1, 0..9)).await;
        cluster.applied(1).await;
        tokio::time::sleep(COMPUTING * 3 / 2).await;
        cluster.inline.hangs.store(true, Ordering::Relaxed);
        cluster.send(cluster.work(&job, 0, 2, 9..12)).await;
        tokio::time::sleep(PULL_TIMEOUT * 5).await;
        // The pull ahead was answered "not yet" and repeated all the time.
        let second = |event: &Event| matches!(event, Event::Pull { want: Want::Exact(Version(2)), .. });
        assert_eq!(cluster.log.times(second).len(), 6);
        for (lease, phase) in [(1, Phase::Computing), (2, Phase::Queued)] {
            let (now, idle) = cluster.idle(lease);
            assert!(now == phase && idle >= PULL_TIMEOUT * 4, "lease {lease}: {now:?}, {idle:?}");
        }
    };
    cluster.run(work, script).await;
}

#[tokio::test(start_paused = true)]
async fn a_lease_that_waits_for_a_pull_ahead_does_not_count_as_hung() {
    let (cluster, work) = Cluster::new(Setting { last: 1, ..Setting::default() });
    let job = cluster.job(1).await;
    let script = async {
        cluster.send(cluster.work(&job, 0, 1, 0..9)).await;
        cluster.applied(1).await;
        tokio::time::sleep(PULL_TIMEOUT * 11 / 2).await;
        let (phase, idle) = cluster.idle(1);
        assert!(phase == Phase::Pulling && idle <= PULL_TIMEOUT, "{phase:?}, {idle:?}");
        let calls =
            cluster.log.times(|event| matches!(event, Event::Pull { want: Want::Exact(Version(2)), .. }));
        assert!(calls.iter().all(|at| calls.len() == 6 && *at >= calls[0]), "{calls:?}");
        assert_eq!(*cluster.ps.open.borrow(), 1, "one call waits");
    };
    cluster.run(work, script).await;
}

#[tokio::test(start_paused = true)]
async fn pulls_ahead_take_memory_for_one_more_set_of_weights() {
    let cluster = Cluster::train(Setting::default(), RECORDS).await;
    let places = cluster.places.lock().unwrap_or_else(PoisonError::into_inner).len();
    assert!((2..=3).contains(&places), "{places} sets of weights");
}
