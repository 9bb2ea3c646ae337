//! Workers that live and make no progress: a file never answers, or a call of the model never
//! returns. Jobs end all the same, with the bits of a calm run, and users learn which worker hangs
//! in what.

use std::path::Path;
use std::sync::{Arc, Condvar, Mutex, PoisonError};

use data::Batch;
use model::{Evaluation, Gradients, Model};
use net::channel::Purpose;
use proto::pb::jobs_client::JobsClient;
use proto::pb::{self, JobState, Phase};
use proto::spec;

use super::*;

/// Far more time than anything here takes.
const PATIENCE: Duration = Duration::from_secs(120);

/// Time between two looks at a job.
const LOOK: Duration = Duration::from_millis(10);

/// A gate that calls of a model wait at, once it is armed.
#[derive(Clone, Default)]
struct Gate(Arc<(Mutex<State>, Condvar)>);

#[derive(Default)]
struct State {
    open: bool,
    /// Calls that came to the gate.
    came: u32,
}

impl Gate {
    fn pass(&self) {
        let (state, changed) = &*self.0;
        let mut state = state.lock().unwrap_or_else(PoisonError::into_inner);
        state.came += 1;
        changed.notify_all();
        drop(changed.wait_while(state, |state| !state.open).unwrap_or_else(PoisonError::into_inner));
    }

    fn open(&self) {
        self.0.0.lock().unwrap_or_else(PoisonError::into_inner).open = true;
        self.0.1.notify_all();
    }

    fn came(&self) -> u32 {
        self.0.0.lock().unwrap_or_else(PoisonError::into_inner).came
    }
}

/// Opens a gate in the end: a thread that waits there would outlive the test.
struct Opened(Gate);

impl Drop for Opened {
    fn drop(&mut self) {
        self.0.open();
    }
}

/// `softmax`, whose calls wait at a gate.
struct Gated {
    inner: Box<dyn Model>,
    training: Option<Gate>,
    measuring: Option<Gate>,
    /// Whether a gradient was computed that is no trial.
    trains: bool,
}

impl Model for Gated {
    fn tensors(&self) -> Vec<proto::tensor::TensorSpec> {
        self.inner.tensors()
    }

    fn initial(&mut self, seed: u64) -> model::Result<Vec<proto::tensor::Values>> {
        self.inner.initial(seed)
    }

    fn load(&mut self, weights: &[proto::tensor::Values]) -> model::Result<()> {
        self.inner.load(weights)
    }

    fn gradients(&mut self, batch: &Batch, key: u64) -> model::Result<Gradients> {
        // Key 0 is the trial of the worker that describes the model.
        self.trains |= key != 0;
        if let Some(gate) = self.training.as_ref().filter(|_| key != 0) {
            gate.pass();
        }
        self.inner.gradients(batch, key)
    }

    fn evaluate(&mut self, batch: &Batch) -> model::Result<Evaluation> {
        // An evaluation before training is such a trial.
        if let Some(gate) = self.measuring.as_ref().filter(|_| self.trains) {
            gate.pass();
        }
        self.inner.evaluate(batch)
    }
}

fn gated(training: Option<&Gate>, measuring: Option<&Gate>) -> Registry {
    let known = Registry::default();
    let (training, measuring) = (training.cloned(), measuring.cloned());
    Registry::default().with("gated", move |context| {
        let mut spec = (*context.spec).clone();
        spec.model.builtin = Some("softmax".to_owned());
        let inner = known.build(&model::Context { spec: Arc::new(spec), ..context.clone() })?;
        let (training, measuring) = (training.clone(), measuring.clone());
        Ok(Box::new(Gated { inner, training, measuring, trains: false }))
    })
}

/// Data folders: a good one, and one whose features are a pipe that nobody writes to.
struct Folders {
    dir: TempDir,
}

impl Folders {
    fn new() -> Self {
        let dir = tempfile::tempdir().expect("a temporary folder");
        let lines: String = (0..24u32).map(|i| format!("{},{},{}\n", i % 5, i % 7, i % 3)).collect();
        for folder in ["good", "dead"] {
            std::fs::create_dir(dir.path().join(folder)).expect("a folder");
        }
        std::fs::write(dir.path().join("good/x.csv"), lines).expect("a file");
        let pipe = dir.path().join("dead/x.csv");
        // A child process would keep open for a moment what other tests have just closed.
        let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
        rustix::fs::mkfifoat(rustix::fs::CWD, &pipe, mode).expect("a pipe");
        Self { dir }
    }

    fn of(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }
}

impl Drop for Folders {
    fn drop(&mut self) {
        // A reader that waits for the pipe goes on to its end, and nobody opens it any more.
        let path = self.of("dead/x.csv");
        let pipe = std::fs::File::options().read(true).write(true).open(&path);
        let _ = std::fs::remove_file(path);
        drop(pipe);
    }
}

/// A cluster with one job.
struct World {
    local: Local,
    jobs: JobsClient<net::channel::Channel>,
    job: String,
}

impl World {
    async fn start() -> Self {
        let options = options(None);
        let local =
            Local::start(Options { devices: Vec::new(), ..options }, Stores::default(), Registry::default());
        let local = local.await.expect("a master and a ps");
        let channel = local.dialer().channel(Local::MASTER_URL, Purpose::Control).expect("a URL");
        let mut jobs = JobsClient::new(channel);
        let text = r#"
name = "hangs"
epochs = 3
model = { builtin = "gated" }
data = { format = "csv", header = false, train = { features = ["x.csv"] }, shuffle = "records", validation_fraction = 0.25 }
batch = { micro = 1, effective = 4 }
optimizer = { kind = "sgd", learning_rate = 0.1 }
limits = { stall = "1s", lease = "60s" }
"#;
        let spec = spec::parse(text, Path::new("job.toml"), &[]).expect("a good job");
        let part = pb::submit_request::Part::SpecJson(spec.to_json());
        let submit = futures::stream::iter([pb::SubmitRequest { part: Some(part), ..Default::default() }]);
        let job = jobs.submit(submit).await.expect("a good job").into_inner().name;
        Self { local, jobs, job }
    }

    fn add_worker(&mut self, index: u32, data: PathBuf, registry: Registry) {
        self.local.start_worker(index, Device::Cpu, &options(Some(data)), registry);
    }

    async fn until(&mut self, what: &str, is_so: impl Fn(&pb::JobStatus) -> bool) -> pb::JobStatus {
        let looking = async {
            loop {
                let status = self.jobs.status(pb::StatusRequest { job: self.job.clone() }).await;
                let status = status.expect("an answer").into_inner();
                if is_so(&status) {
                    return status;
                }
                assert!(!status.state().is_end(), "ended before {what}: {status:?}");
                tokio::time::sleep(LOOK).await;
            }
        };
        tokio::time::timeout(PATIENCE, looking).await.unwrap_or_else(|_| panic!("not in time: {what}"))
    }

    /// Waits for the end of the job. Returns the SHA-256 of its model.
    async fn model(mut self) -> String {
        let status = self.until("its end", |status| status.state().is_end()).await;
        assert_eq!(status.state(), JobState::Succeeded, "{}", status.reason);
        self.local.stop().await;
        let model = status.artifacts.iter().find(|file| file.name == crate::report::MODEL);
        model.expect("a model").sha256.clone()
    }
}

fn options(data_root: Option<PathBuf>) -> Options {
    Options { data_root, ..Options::default() }
}

fn names(status: &pb::JobStatus, worker: &str, phase: Phase) -> bool {
    status.hangs.iter().any(|hang| hang.worker == worker && hang.phase() == phase)
}

/// Returns the hash of the model that one undisturbed worker trains.
async fn calm(folders: &Folders) -> String {
    let mut world = World::start().await;
    world.add_worker(0, folders.of("good"), gated(None, None));
    world.model().await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_file_that_never_answers_while_records_are_counted_is_read_by_another_worker() {
    let folders = Folders::new();
    let mut world = World::start().await;
    world.add_worker(0, folders.of("dead"), gated(None, None));
    // On a busy machine the worker may lose its first lease. Then it holds another one.
    let holds = |hang: &pb::Hang| {
        hang.worker == "worker-0"
            && hang.phase() == Phase::Reading
            && hang.what.ends_with("dead/x.csv")
            && hang.work.contains("count the records")
            && !hang.taken_over
            && hang.idle_ms >= 1000
    };
    let status = world.until("the only worker hangs", |status| status.hangs.iter().any(holds)).await;
    assert_eq!(status.state(), JobState::Indexing, "nothing is ended for it");
    world.add_worker(1, folders.of("good"), gated(None, None));
    assert_eq!(world.model().await, calm(&folders).await);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_file_that_never_answers_while_a_job_trains_holds_up_nobody() {
    let (folders, gate) = (Folders::new(), Gate::default());
    let _opened = Opened(gate.clone());
    let mut world = World::start().await;
    world.add_worker(0, folders.of("good"), gated(Some(&gate), None));
    world.until("it trains", |_| gate.came() > 0).await;
    world.add_worker(1, folders.of("dead"), gated(None, None));
    world.until("the other one hangs", |status| names(status, "worker-1", Phase::Reading)).await;
    gate.open();
    assert_eq!(world.model().await, calm(&folders).await);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_model_that_never_returns_for_one_worker_holds_up_nobody() {
    let (folders, stuck) = (Folders::new(), Gate::default());
    let _opened = Opened(stuck.clone());
    let mut world = World::start().await;
    world.add_worker(0, folders.of("good"), gated(Some(&stuck), None));
    let hangs = |status: &pb::JobStatus| stuck.came() == 1 && names(status, "worker-0", Phase::Computing);
    world.until("the only worker hangs", hangs).await;
    world.add_worker(1, folders.of("good"), gated(None, None));
    let status = world.until("the end", |status| status.state() == JobState::Succeeded).await;
    assert_eq!(stuck.came(), 1, "who hangs is given no more");
    let found = status.artifacts.iter().find(|file| file.name == crate::report::MODEL);
    assert_eq!(found.expect("a model").sha256, calm(&folders).await);
    world.local.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn two_workers_that_hang_in_the_same_work_leave_it_to_a_third() {
    let (folders, stuck) = (Folders::new(), Gate::default());
    let _opened = Opened(stuck.clone());
    let mut world = World::start().await;
    for worker in 0..2 {
        world.add_worker(worker, folders.of("good"), gated(Some(&stuck), None));
        let (name, came) = (format!("worker-{worker}"), worker + 1);
        let hangs = |status: &pb::JobStatus| stuck.came() == came && names(status, &name, Phase::Computing);
        world.until("it hangs", hangs).await;
    }
    world.add_worker(2, folders.of("good"), gated(None, None));
    assert_eq!(world.model().await, calm(&folders).await);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_measurement_that_never_ends_is_taken_by_another_worker() {
    let (folders, stuck) = (Folders::new(), Gate::default());
    let _opened = Opened(stuck.clone());
    let mut world = World::start().await;
    // It trains alone, so the first measurement is its own.
    world.add_worker(0, folders.of("good"), gated(None, Some(&stuck)));
    world
        .until("it hangs", |status| {
            status.hangs.iter().any(|hang| hang.what.starts_with("validation records"))
        })
        .await;
    world.add_worker(1, folders.of("good"), gated(None, None));
    assert_eq!(world.model().await, calm(&folders).await);
}
