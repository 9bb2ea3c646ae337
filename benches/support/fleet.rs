//! Shared code of benches with real processes: the bench as its own fleet, its job, and the time.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, SystemTime};

use crate::harness::{self, Cluster};
use crate::paced;
use crate::report::{self, Figure};
use crate::trace::Trace;

/// Allocator of `ebb`.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

pub(crate) const PER_STEP: u64 = 8;
const PER_EPOCH: u64 = 128;
const EPOCHS: u64 = 3000;
const SEED: u64 = 13;
const MICRO: u64 = 8;

/// Measures and reports. `full` is false where the bench only shows that it works.
pub(crate) fn main(name: &str, measure: impl FnOnce(bool) -> Vec<Figure>) -> ExitCode {
    // The program is `ebb` with one more network.
    let verbs = ["master", "ps", "worker"];
    if std::env::args().nth(1).is_some_and(|first| verbs.contains(&first.as_str())) {
        return ebbflow::main(paced::with_paced(ebbflow::model::Registry::default()));
    }
    let full = std::env::args().any(|arg| arg == "--bench");
    let figures = measure(full);
    report::print(&figures);
    if full {
        report::write(&figures, &harness::root().join(format!("target/bench/{name}.json")));
    }
    ExitCode::SUCCESS
}

/// A job with digits' MLP, whose microbatches take a fixed time.
pub(crate) struct Job {
    pub(crate) name: &'static str,
    pub(crate) compute_ms: u64,
    pub(crate) optimizer: &'static str,
    /// More lines of the job file. Paths start from its folder.
    pub(crate) more: &'static str,
}

impl Job {
    /// Starts two ps and some workers, and submits the job to them. Returns the cluster and the
    /// folder of the workers' traces.
    pub(crate) fn start(&self, workers: usize) -> (Cluster, PathBuf) {
        let program = std::env::current_exe().expect("this program");
        let cluster = Cluster::of(&program, 2, workers);
        let traces = cluster.dir.path().join("traces");
        fs::create_dir(&traces).expect("the traces' folder");
        let job = cluster.dir.path().join("job.toml");
        fs::write(&job, self.file(&traces)).expect("the job file");
        harness::succeed(["submit".as_ref(), "--master".as_ref(), cluster.url.as_ref(), job.as_os_str()]);
        (cluster, traces)
    }

    fn file(&self, traces: &Path) -> String {
        let data = harness::root().join("examples/digits");
        let Self { name, compute_ms, optimizer, more } = self;
        format!(
            r#"
name = "{name}"
epochs = {EPOCHS}
seed = {SEED}
fleet = {{ ps = 2 }}
{more}
[model]
builtin = "paced"
options = {{ of = "mlp", engine = "pure", hidden = [128], millis = {compute_ms}, trace = "{}" }}
[data]
format = "idx"
[data.train]
features = ["{}"]
labels = ["{}"]
records = [0, {}]
[batch]
micro = {MICRO}
effective = {}
[optimizer]
{optimizer}
"#,
            traces.display(),
            data.join("images.idx3.gz").display(),
            data.join("labels.idx1.gz").display(),
            MICRO * PER_EPOCH,
            MICRO * PER_STEP,
        )
    }
}

/// Reads what the workers of a [`Job`] have computed so far.
pub(crate) fn trace(folder: &Path) -> Trace {
    Trace::read(folder, SEED, EPOCHS * PER_EPOCH, PER_STEP)
}

/// Returns the time since 1970, as in the traces.
pub(crate) fn now() -> Duration {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).expect("a clock after 1970")
}
