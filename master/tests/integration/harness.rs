//! A master in its own folder, users and workers to speak to it.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use master::{Master, Options, Store};
use net::channel::{Channel, Dialer, Purpose, accept};
use net::security::door::Door;
use net::session::{Secret, Shown};
use proto::artifact::{describe, slices};
use proto::ids::IncarnationId;
use proto::pb;
use proto::pb::artifact_part::Part;
use proto::pb::complete_request::Result as Report;
use proto::pb::event::Kind as Event;
use proto::pb::fleet_client::FleetClient;
use proto::pb::jobs_client::JobsClient;
use proto::pb::lease::Work;
use proto::pb::{JobState, submit_request, upload_request};
use proto::spec::JobSpec;
use proto::status::Failure;
use store::Stores;
use tokio::net::TcpListener;
use tokio::runtime::Runtime;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::Streaming;
use tonic::service::Interceptor;
use tonic::service::interceptor::InterceptedService;

/// Far more than anything here takes, far less than a lease holds.
const PATIENCE: Duration = Duration::from_secs(120);

/// 10 records, of which 2 validate: 2 steps of 4 in each of 2 epochs.
const JOB: &str = r#"
name = "digits"
epochs = 2
model = { builtin = "softmax", metrics = ["accuracy"] }
data = { format = "idx", train = { features = ["x.gz"], labels = ["y.gz"] }, validation_fraction = 0.2 }
batch = { micro = 1, effective = 4 }
optimizer = { kind = "sgd", learning_rate = 0.5 }
limits = { attempts_max = 2, lease = "1h" }
"#;

/// Returns the job above, with more lines or other ones.
pub(crate) fn job(edit: impl FnOnce(&mut JobSpec)) -> JobSpec {
    let mut spec = proto::spec::parse(JOB, Path::new("job.toml"), &[]).expect("a good job");
    edit(&mut spec);
    spec
}

/// Fails the test when `future` takes too long.
pub(crate) async fn soon<T>(what: &str, future: impl Future<Output = T>) -> T {
    tokio::time::timeout(PATIENCE, future).await.unwrap_or_else(|_| panic!("{what}: not within {PATIENCE:?}"))
}

/// Returns options of a master with this data folder. A scripted worker sends no heartbeats of its
/// own, so a lease ends unless the worker uses it within `death`. This time and a heartbeat
/// therefore take longer than a loaded machine needs for that.
fn patient(data_dir: &Path) -> Options {
    Options {
        data_dir: data_dir.to_owned(),
        heartbeat: Duration::from_secs(600),
        death: Duration::from_secs(3600),
        ..Options::default()
    }
}

/// A running master.
pub(crate) struct Cluster {
    pub(crate) url: String,
    pub(crate) master: Master,
    pub(crate) shutdown: CancellationToken,
    pub(crate) served: JoinHandle<()>,
    /// The runtime of a master that can be killed.
    runtime: Option<Runtime>,
    folder: Option<tempfile::TempDir>,
}

impl Drop for Cluster {
    fn drop(&mut self) {
        self.served.abort();
        self.runtime.take().into_iter().for_each(Runtime::shutdown_background);
    }
}

impl Cluster {
    pub(crate) async fn start() -> Self {
        Self::with(|_| ()).await
    }

    pub(crate) async fn with(edit: impl FnOnce(&mut Options)) -> Self {
        Self::behind(Door::default(), edit).await
    }

    /// Creates a master that admits the callers of this door.
    pub(crate) async fn behind(door: Door, edit: impl FnOnce(&mut Options)) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let mut options = patient(folder.path());
        edit(&mut options);
        let master = Master::open(options, Stores::default(), Dialer::tcp()).await.expect("a good master");
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let url = format!("http://{}", listener.local_addr().expect("bound"));
        let shutdown = CancellationToken::new();
        let serving = {
            let (master, shutdown) = (master.clone(), shutdown.clone());
            let incoming = door.open(listener, None);
            async move { master.serve(incoming, shutdown).await.expect("serves until the shutdown") }
        };
        let (served, folder) = (tokio::spawn(serving), Some(folder));
        Self { url, master, shutdown, served, runtime: None, folder }
    }

    /// Returns the data folder.
    pub(crate) fn folder(&self) -> &Path {
        self.folder.as_ref().expect("it has one").path()
    }

    /// Waits for a state that nobody is told of.
    pub(crate) async fn until(&self, what: &str, state: impl Fn(&Self) -> bool) {
        let looking = async {
            while !state(self) {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        soon(what, looking).await;
    }

    /// Creates a master on a runtime of its own with a journal in `store`: it can be
    /// [killed](Self::kill).
    pub(crate) async fn mortal(store: Arc<dyn Store>) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        Self::start_mortal(store, folder, "127.0.0.1:0").await
    }

    /// Kills the master; whatever it was doing ends there. Then one starts at its address, with its
    /// folder.
    pub(crate) async fn kill(mut self, store: Arc<dyn Store>) -> Self {
        let folder = self.folder.take().expect("it has one");
        let address = self.url.trim_start_matches("http://").to_owned();
        self.runtime.take().expect("a runtime of its own").shutdown_background();
        drop(self);
        Self::start_mortal(store, folder, &address).await
    }

    async fn start_mortal(store: Arc<dyn Store>, folder: tempfile::TempDir, address: &str) -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
        let runtime = runtime.expect("a runtime");
        let options = patient(folder.path());
        // Until the threads of one that was killed have let go of the folder and the address.
        let opening = async {
            loop {
                let clock = master::Clock::at_rate(1.0);
                let (options, store, dialer) = (options.clone(), store.clone(), Dialer::tcp());
                match Master::open_with(options, Stores::default(), dialer, store, clock).await {
                    Ok(master) => break master,
                    Err(master::Error::Busy(_)) => tokio::time::sleep(Duration::from_millis(5)).await,
                    Err(error) => panic!("{error}"),
                }
            }
        };
        let master = soon("the folder", opening).await;
        let listener = {
            let address = address.to_owned();
            let binding = async move {
                loop {
                    match TcpListener::bind(&address).await {
                        Ok(listener) => break listener,
                        Err(_) => tokio::time::sleep(Duration::from_millis(5)).await,
                    }
                }
            };
            soon("the address", runtime.spawn(binding)).await.expect("no panic")
        };
        let url = format!("http://{}", listener.local_addr().expect("bound"));
        let shutdown = CancellationToken::new();
        let serving = {
            let (master, shutdown) = (master.clone(), shutdown.clone());
            async move { master.serve(accept(listener), shutdown).await.expect("serves until the shutdown") }
        };
        let served = runtime.spawn(serving);
        Self { url, master, shutdown, served, runtime: Some(runtime), folder: Some(folder) }
    }

    pub(crate) fn channel(&self) -> Channel {
        Dialer::tcp().channel(&self.url, Purpose::Control).expect("a URL")
    }

    pub(crate) fn jobs(&self) -> JobsClient<Channel> {
        JobsClient::new(self.channel())
    }

    /// Submits a job with files; answers its name.
    pub(crate) async fn submit(&self, spec: &JobSpec, files: &[(&str, &[u8])]) -> Result<String, Failure> {
        let mut parts = vec![submit_request::Part::SpecJson(spec.to_json())];
        parts.extend(
            artifact_parts(files)
                .into_iter()
                .map(|part| submit_request::Part::Artifact(pb::ArtifactPart { part: Some(part) })),
        );
        let requests =
            parts.into_iter().map(|part| pb::SubmitRequest { part: Some(part), ..Default::default() });
        let reply = self.jobs().submit(tokio_stream::iter(requests.collect::<Vec<_>>())).await?;
        Ok(reply.into_inner().name)
    }

    pub(crate) async fn status(&self, job: &str) -> Result<pb::JobStatus, Failure> {
        Ok(self.jobs().status(pb::StatusRequest { job: job.to_owned() }).await?.into_inner())
    }

    pub(crate) async fn watch(&self, job: &str, after: u64) -> Streaming<pb::Event> {
        let request = pb::WatchRequest { job: job.to_owned(), after };
        self.jobs().watch(request).await.expect("a job").into_inner()
    }

    /// Waits until the job is in this state; answers why.
    pub(crate) async fn reach(&self, job: &str, state: JobState) -> String {
        let mut events = self.watch(job, 0).await;
        let mut seen = Vec::new();
        let waiting = async {
            while let Some(event) = events.message().await.expect("events") {
                if let Some(Event::State(event)) = event.kind {
                    if event.state() == state {
                        return event.reason;
                    }
                    seen.push(event);
                }
            }
            panic!("{job} ended without {state:?}: {seen:?}")
        };
        soon(&format!("{job} in {state:?}"), waiting).await
    }

    /// Returns all events of a job that has ended.
    pub(crate) async fn events(&self, job: &str) -> Vec<pb::Event> {
        let mut stream = self.watch(job, 0).await;
        let mut events = Vec::new();
        while let Some(event) = soon("the end of the job", stream.message()).await.expect("events") {
            events.push(event);
        }
        events
    }

    /// Returns the files that a job ended with.
    pub(crate) async fn fetch(&self, job: &str) -> Result<BTreeMap<String, Vec<u8>>, Failure> {
        let request = pb::FetchRequest { job: job.to_owned() };
        read_artifacts(self.jobs().fetch(request).await?.into_inner()).await
    }
}

/// A client that shows a session with each call.
pub(crate) type Member = FleetClient<InterceptedService<Channel, Shows>>;

/// Shows a session.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shows(Shown);

impl Interceptor for Shows {
    fn call(&mut self, mut request: tonic::Request<()>) -> Result<tonic::Request<()>, tonic::Status> {
        self.0.show(request.metadata_mut().as_mut());
        Ok(request)
    }
}

/// Calls the master as a member with this secret.
pub(crate) fn member(cluster: &Cluster, incarnation: u64, secret: &[u8]) -> Member {
    let incarnation = IncarnationId(incarnation);
    let shown = Shown { incarnation, secret: Secret::from_bytes(secret).expect("16 bytes") };
    FleetClient::with_interceptor(cluster.channel(), Shows(shown))
}

/// Puts files together again.
pub(crate) async fn read_artifacts(
    mut stream: Streaming<pb::ArtifactPart>,
) -> Result<BTreeMap<String, Vec<u8>>, Failure> {
    let (mut files, mut name) = (BTreeMap::<String, Vec<u8>>::new(), String::new());
    while let Some(part) = stream.message().await? {
        match part.part.expect("a part") {
            Part::Header(artifact) => {
                name = artifact.name;
                files.insert(name.clone(), Vec::new());
            }
            Part::Content(content) => files.get_mut(&name).expect("a header first").extend(content),
        }
    }
    Ok(files)
}

fn artifact_parts(files: &[(&str, &[u8])]) -> Vec<Part> {
    let of = |(name, content): &(&str, &[u8])| {
        let header = Part::Header(describe(name, content));
        std::iter::once(header)
            .chain(slices(&Bytes::copy_from_slice(content)).map(Part::Content))
            .collect::<Vec<_>>()
    };
    files.iter().flat_map(of).collect()
}

/// A worker that does what the test says. Dropped, it is dead: its connection closes.
pub(crate) struct Worker {
    pub(crate) incarnation: u64,
    /// Calls the master as this worker.
    pub(crate) fleet: Member,
    beats: mpsc::Sender<pb::HeartbeatRequest>,
    replies: Streaming<pb::HeartbeatReply>,
}

impl Worker {
    pub(crate) async fn join(cluster: &Cluster, name: &str) -> Self {
        Self::join_on(cluster, name, "cpu", 0).await
    }

    /// Joins as a worker on a device with so much memory.
    pub(crate) async fn join_on(
        cluster: &Cluster,
        name: &str,
        device: &str,
        device_memory_bytes: u64,
    ) -> Self {
        let mut fleet = FleetClient::new(cluster.channel());
        let register = pb::RegisterRequest {
            role: pb::ProcessRole::Worker.into(),
            name: name.to_owned(),
            program_version: proto::PROGRAM_VERSION.to_owned(),
            threads: 1,
            device: device.to_owned(),
            device_memory_bytes,
            ..Default::default()
        };
        let pb::RegisterReply { incarnation, secret, .. } =
            fleet.register(register).await.expect("a place").into_inner();
        let mut fleet = member(cluster, incarnation, &secret);
        let (beats, receiver) = mpsc::channel(4);
        let first = pb::HeartbeatRequest { incarnation, ..Default::default() };
        beats.send(first).await.expect("open");
        let stream = fleet.heartbeat(ReceiverStream::new(receiver)).await.expect("known");
        let mut worker = Self { incarnation, fleet, beats, replies: stream.into_inner() };
        worker.reply().await;
        worker
    }

    /// Returns the next answer, asked for or not.
    pub(crate) async fn reply(&mut self) -> pb::HeartbeatReply {
        soon("an answer to a heartbeat", self.replies.message()).await.expect("open").expect("an answer")
    }

    /// Sends one heartbeat and returns the answer.
    pub(crate) async fn beat(&mut self, leases: &[&pb::Lease], draining: bool) -> pb::HeartbeatReply {
        let progress = |lease: &&pb::Lease| pb::LeaseProgress { lease: lease.id, ..Default::default() };
        let leases = leases.iter().map(progress).collect();
        let incarnation = self.incarnation;
        let beat = pb::HeartbeatRequest { incarnation, leases, draining, ..Default::default() };
        self.beats.send(beat).await.expect("open");
        self.reply().await
    }

    /// Sends this heartbeat and returns the answer.
    pub(crate) async fn beat_with(
        &mut self,
        beat: pb::HeartbeatRequest,
    ) -> Result<pb::HeartbeatReply, Failure> {
        self.beats.send(beat).await.expect("open");
        let reply = soon("an answer to a heartbeat", self.replies.message()).await;
        Ok(reply?.expect("an answer"))
    }

    /// Work, if there is some within `wait`.
    pub(crate) async fn maybe_lease(&mut self, wait: Duration) -> Option<pb::Lease> {
        let request = pb::LeaseRequest { incarnation: self.incarnation, wait_ms: wait.as_millis() as u32 };
        self.fleet.lease(request).await.expect("known").into_inner().lease
    }

    /// Work, which must come.
    pub(crate) async fn lease(&mut self) -> pb::Lease {
        self.maybe_lease(PATIENCE).await.expect("work")
    }

    pub(crate) async fn complete(&mut self, lease: &pb::Lease, report: Report) -> Result<bool, Failure> {
        Ok(self.report(lease, report, false).await?.accepted)
    }

    /// Reports a task, and takes `more` work with the answer.
    pub(crate) async fn report(
        &mut self,
        lease: &pb::Lease,
        report: Report,
        more: bool,
    ) -> Result<pb::CompleteReply, Failure> {
        let (incarnation, lease) = (self.incarnation, lease.id);
        let request =
            pb::CompleteRequest { incarnation, lease, result: Some(report), more, ..Default::default() };
        Ok(self.fleet.complete(request).await?.into_inner())
    }

    pub(crate) async fn fail(
        &mut self,
        lease: &pb::Lease,
        message: &str,
        fatal: bool,
        diverged_at: Option<u64>,
    ) {
        let request = pb::FailRequest {
            incarnation: self.incarnation,
            lease: lease.id,
            message: message.to_owned(),
            fatal,
            diverged_at,
        };
        self.fleet.fail(request).await.expect("known");
    }

    pub(crate) async fn upload(&mut self, lease: &pb::Lease, files: &[(&str, &[u8])]) -> Result<(), Failure> {
        let header = pb::UploadHeader { incarnation: self.incarnation, lease: lease.id };
        let mut parts = vec![upload_request::Part::Header(header)];
        parts.extend(
            artifact_parts(files)
                .into_iter()
                .map(|part| upload_request::Part::Artifact(pb::ArtifactPart { part: Some(part) })),
        );
        let requests: Vec<_> = parts.into_iter().map(|part| pb::UploadRequest { part: Some(part) }).collect();
        self.fleet.upload(tokio_stream::iter(requests)).await?;
        Ok(())
    }

    /// Does a task as a real worker would, as far as the master can see.
    pub(crate) async fn do_task(&mut self, lease: &pb::Lease) {
        let report = self.work(lease).await;
        assert!(self.complete(lease, report).await.expect("a good report"), "{lease:?}");
    }

    /// Does a task as a real worker would, and returns the report without sending it.
    pub(crate) async fn work(&mut self, lease: &pb::Lease) -> Report {
        match lease.work.as_ref().expect("work") {
            Work::Index(_) => {
                let found = pb::Indexed {
                    records: 10,
                    shape: vec![2],
                    label_min: Some(0),
                    label_max: Some(9),
                    crc32c: Some(7),
                    bytes: 80,
                    ..Default::default()
                };
                Report::Indexed(found)
            }
            Work::Init(_) => {
                let tensor = proto::tensor::TensorSpec::parameter("w", [3]);
                let request = pb::DescribeRequest {
                    incarnation: self.incarnation,
                    lease: lease.id,
                    tensors: vec![(&tensor).into()],
                };
                let reply = self.fleet.describe(request).await.expect("a placement").into_inner();
                assert_eq!(reply.placement.expect("a placement").tensors.len(), 1);
                Report::Initialized(pb::Initialized::default())
            }
            Work::Train(task) => trained(task.first, task.count),
            Work::Evaluate(task) => Report::Evaluated(pb::Evaluated {
                loss_sum: 3.0,
                samples: task.end - task.begin,
                metric_sums: BTreeMap::from([("accuracy".to_owned(), 1.0)]),
                ..pb::Evaluated::default()
            }),
            Work::Predict(task) => {
                Report::Predicted(pb::Predicted { samples: task.end - task.begin, bytes: 1 })
            }
            Work::Join(_) => Report::Joined(pb::Joined { bytes: 1 }),
            Work::Clear(_) => Report::Cleared(pb::Cleared::default()),
            Work::Export(_) => {
                let files: [(&str, &[u8]); 1] = [("model.safetensors", b"weights")];
                self.upload(lease, &files).await.expect("a good upload");
                Report::Exported(pb::Exported { artifacts: vec![describe(files[0].0, files[0].1)] })
            }
        }
    }

    /// Hands training back of which the first `done` microbatches are finished. Nobody learns from
    /// this how fast the worker is.
    pub(crate) async fn hand_back(&mut self, lease: &pb::Lease, done: u32) {
        let Report::Trained(done) = trained(microbatches(lease).0, done) else { unreachable!() };
        let (incarnation, lease) = (self.incarnation, lease.id);
        let request = pb::ReleaseRequest { incarnation, lease, trained: Some(done), not_held: None };
        self.fleet.release(request).await.expect("known");
    }

    /// Does everything until there is work of training, which is answered.
    pub(crate) async fn until_training(&mut self) -> pb::Lease {
        loop {
            let lease = self.lease().await;
            if matches!(lease.work, Some(Work::Train(_))) {
                return lease;
            }
            self.do_task(&lease).await;
        }
    }

    /// Does everything until the job is exported.
    pub(crate) async fn until_exported(&mut self) {
        loop {
            let lease = self.lease().await;
            self.do_task(&lease).await;
            if matches!(lease.work, Some(Work::Export(_))) {
                return;
            }
        }
    }
}

/// Returns a report of consecutive microbatches, each with its number as loss. By the worker's own
/// clock they took so little that a stop of this process makes no worker slow.
pub(crate) fn trained(first: u64, count: u32) -> Report {
    let loss = |id: u64| pb::MicrobatchReport { loss_sum: id as f64, samples: 1, skipped: 0 };
    Report::Trained(pb::Trained {
        microbatches: (first..first + u64::from(count)).map(loss).collect(),
        took_us: 10_000 * u64::from(count),
        ..pb::Trained::default()
    })
}

/// Returns the microbatches of a training lease: the first and how many.
pub(crate) fn microbatches(lease: &pb::Lease) -> (u64, u32) {
    match lease.work.as_ref() {
        Some(Work::Train(task)) => (task.first, task.count),
        other => panic!("expected training, found {other:?}"),
    }
}
