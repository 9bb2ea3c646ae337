//! How long a job stands still when a ps or the master dies: real processes on loopback, SIGKILL, started again at once.
//!
//! Four workers train digits' MLP in `sync` with 8 microbatches of 5 ms a step (`tests/harness/paced.rs`), on two ps, with a checkpoint
//! every 100 steps. *Killed to first new step*: from the signal to the end of the longest time without an applied step after it,
//! seen in the workers' traces.
//!
//! Expected, with c = 5 ms, M = 8, W = 4 (a step takes 10 ms) and a process that starts in 30 ms:
//!
//! | figure | limit | because |
//! | --- | --- | --- |
//! | ps killed to first new step | 60 ms | process start, registering, opening and reading 100 KB twice, one step |
//! | steps lost with a ps | 50 | half a checkpoint's distance: in canonical order all partitions go back to it |
//! | master killed to first new step | 40 ms | process start; workers hold leases for one more step; nothing is rewound |
//!
//! Workers and ps try again with a growing wait (`proto/src/retry.rs`), which adds up to one such wait.
//! `cargo bench --no-default-features --bench recovery` takes 2 minutes; without `--bench` one round of each runs.
#![expect(clippy::disallowed_methods, reason = "a bench measures real processes in real time")]

#[path = "../../tests/harness/mod.rs"]
mod harness;
#[path = "../../tests/harness/paced.rs"]
mod paced;
#[path = "../support/report.rs"]
mod report;
#[path = "../support/trace.rs"]
mod trace;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::thread::sleep;
use std::time::{Duration, SystemTime};

use harness::Cluster;
use report::{Figure, Target};
use trace::Trace;

/// As `ebb` has it.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

const COMPUTE_MS: u64 = 5;
const PER_STEP: u64 = 8;
const PER_EPOCH: u64 = 128;
const EPOCHS: u64 = 3000;
const SEED: u64 = 13;
/// Between two kills; rounds differ by a tenth of it, so that they meet other places between two checkpoints.
const APART: Duration = Duration::from_millis(2500);

fn main() -> ExitCode {
    // The bench is its own fleet: `ebb` with one more network.
    let verbs = ["master", "ps", "worker"];
    if std::env::args().nth(1).is_some_and(|first| verbs.contains(&first.as_str())) {
        return ebbflow::main(paced::with_paced(ebbflow::model::Registry::default()));
    }
    let full = std::env::args().any(|arg| arg == "--bench");
    let rounds = if full { 20 } else { 1 };
    let ps = Killed::many(rounds, |cluster, round| cluster.restart_ps(round as usize % 2));
    let master = Killed::many(rounds, |cluster, _| cluster.restart_master());
    let figures = [
        ps.figure("ps killed to first new step", 60.0),
        Figure::new("  steps lost", "", ps.lost, 50.0, None),
        master.figure("master killed to first new step", 40.0),
        Figure::new("  steps lost", "", master.lost, 0.0, Some(Target::Below(1.0))),
    ];
    report::print(&figures);
    if full {
        report::write(&figures, &harness::root().join("target/bench/recovery.json"));
    }
    ExitCode::SUCCESS
}

/// What each round of one kind of kill cost.
struct Killed {
    pauses_ms: Vec<f64>,
    lost: Vec<f64>,
}

impl Killed {
    /// Trains a job and kills something `rounds` times.
    fn many(rounds: u32, kill: impl Fn(&mut Cluster, u32)) -> Self {
        let program = std::env::current_exe().expect("this program");
        let mut cluster = Cluster::of(&program, 2, 4);
        let traces = cluster.dir.path().join("traces");
        fs::create_dir(&traces).expect("the traces' folder");
        let job = cluster.dir.path().join("job.toml");
        fs::write(&job, job_file(&traces, &cluster.dir.path().join("checkpoints"))).expect("the job file");
        harness::succeed(["submit".as_ref(), "--master".as_ref(), cluster.url.as_ref(), job.as_os_str()]);
        let mut killed = Vec::new();
        for round in 0..rounds {
            sleep(APART + APART / 10 * (round % 10));
            killed.push(now());
            kill(&mut cluster, round);
        }
        sleep(APART);
        let trace = Trace::read(&traces, SEED, EPOCHS * PER_EPOCH, PER_STEP);
        let (pauses_ms, lost) = killed
            .iter()
            .map(|&at| {
                let (end, lost) = trace.standstill(&(at..at + APART));
                ((end - at).as_secs_f64() * 1e3, lost as f64)
            })
            .unzip();
        Self { pauses_ms, lost }
    }

    fn figure(&self, name: &'static str, limit_ms: f64) -> Figure {
        Figure::new(name, "ms", self.pauses_ms.clone(), limit_ms, None)
    }
}

fn job_file(traces: &Path, checkpoints: &Path) -> String {
    let data = harness::root().join("examples/digits");
    let file = |name: &str| -> PathBuf { data.join(name) };
    let micro = 8;
    format!(
        r#"
name = "recovery"
epochs = {EPOCHS}
seed = {SEED}
fleet = {{ ps = 2 }}
checkpoint = {{ url = "{}", every_steps = 100 }}
[model]
builtin = "paced"
options = {{ of = "mlp", engine = "pure", hidden = [128], millis = {COMPUTE_MS}, trace = "{}" }}
[data]
format = "idx"
[data.train]
features = ["{}"]
labels = ["{}"]
records = [0, {}]
[batch]
micro = {micro}
effective = {}
[optimizer]
kind = "adam"
learning_rate = 0.001
"#,
        checkpoints.display(),
        traces.display(),
        file("images.idx3.gz").display(),
        file("labels.idx1.gz").display(),
        micro * PER_EPOCH,
        micro * PER_STEP,
    )
}

fn now() -> Duration {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).expect("a clock after 1970")
}
