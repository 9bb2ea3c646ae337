//! Value of a second worker at the beginning of a job: a network of 24 million parameters, `sync`,
//! two microbatches in each step.
//!
//! Opening such a job takes long: the module is built, and 97 MB of weights are pulled into memory
//! that was never touched. Workers that were slow at that must not be taken for slow workers. A
//! microbatch takes 200 ms; the rest after its computation is slept away
//! (`tests/harness/paced.rs`).
//!
//! Each rate is counted for some seconds, beginning 1 s after all workers have begun to compute.
//! Expected, with c = 200 ms and no other costs: one worker has a rate of 1 / c microbatches, two
//! have 2 / c, so the ratio is 2. The exchange of 97 MB with the ps in each step, and the wait at
//! its end, reduce the ratio.
//!
//! `cargo bench --no-default-features --bench cold_start` takes 5 to 7 minutes.
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
use std::path::Path;
use std::process::ExitCode;
use std::thread::sleep;
use std::time::{Duration, SystemTime};

use harness::{Cluster, Process};
use report::{Figure, Target};
use trace::Trace;

/// Allocator of `ebb`.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

const COMPUTE_MS: u64 = 200;
const PER_STEP: u64 = 2;
const MICRO: u64 = 2;
const SEED: u64 = 13;
const EPOCHS: u64 = 1000;
const PER_EPOCH: u64 = 128;

/// Wait after all workers have begun to compute.
const SETTLES: Duration = Duration::from_secs(1);
/// Time for which the second worker is stopped while it opens the job.
const STOPPED: Duration = Duration::from_secs(4);
/// Time between two looks at the workers' traces.
const LOOK: Duration = Duration::from_millis(5);

fn main() -> ExitCode {
    let verbs = ["master", "ps", "worker"];
    if std::env::args().nth(1).is_some_and(|first| verbs.contains(&first.as_str())) {
        return ebbflow::main(paced::with_paced(ebbflow::model::Registry::default()));
    }
    let full = std::env::args().any(|arg| arg == "--bench");
    let (rounds, window) = if full { (10, 6) } else { (1, 2) };
    let window = Duration::from_secs(window);
    let (mut one, mut both, mut stopped) = (Vec::new(), Vec::new(), Vec::new());
    for round in 1..=rounds {
        let rates = [rate(1, None, window), rate(2, None, window), rate(2, Some(STOPPED), window)];
        eprintln!(
            "round {round} of {rounds}: {rates:.2?} microbatches/s by one, by two, and by two of which one was stopped"
        );
        one.push(rates[0]);
        both.push(rates[1] / rates[0]);
        stopped.push(rates[2] / rates[0]);
    }
    let limit = 1e3 / COMPUTE_MS as f64;
    let least = |ratios: &[f64]| ratios.iter().copied().fold(f64::INFINITY, f64::min);
    let (least_both, least_stopped) = (least(&both), least(&stopped));
    let target = Some(Target::AtLeast(1.6));
    let figures = [
        Figure::new("one worker, microbatches/s", "1/s", one, limit, None),
        Figure::new("two workers, of one", "ratio", both, 2.0, target),
        Figure::new("  the least of all rounds", "ratio", vec![least_both], 2.0, target),
        Figure::new("one of them stopped while it opened the job", "ratio", stopped, 2.0, target),
        Figure::new("  the least of all rounds", "ratio", vec![least_stopped], 2.0, target),
    ];
    report::print(&figures);
    if full {
        report::write(&figures, &harness::root().join("target/bench/cold_start.json"));
    }
    ExitCode::SUCCESS
}

/// Returns the microbatches per second of a new fleet with a new job. The last worker is stopped
/// for a while when it begins to open the job.
fn rate(workers: usize, stopped: Option<Duration>, window: Duration) -> f64 {
    let program = std::env::current_exe().expect("this program");
    let cluster = Cluster::of(&program, 1, workers);
    let traces = cluster.dir.path().join("traces");
    fs::create_dir(&traces).expect("the traces' folder");
    let job = cluster.dir.path().join("job.toml");
    fs::write(&job, job_file(workers, &traces)).expect("the job file");
    harness::succeed(["submit".as_ref(), "--master".as_ref(), cluster.url.as_ref(), job.as_os_str()]);
    if let Some((stopped, last)) = stopped.zip(cluster.workers.last()) {
        // The trace exists as soon as the network is being built.
        wait_until(|| traces.join(last.child.id().to_string()).exists());
        last.signal("STOP");
        sleep(stopped);
        last.signal("CONT");
    }
    let begun = |worker: &Process| trace(&traces).first_of(worker.child.id()).map(|first| first.begin);
    wait_until(|| traces.exists() && cluster.workers.iter().all(|worker| begun(worker).is_some()));
    let begun = cluster.workers.iter().filter_map(begun).max().expect("all have begun");
    let from = begun + SETTLES;
    wait_until(|| now() >= from + window);
    let progress = trace(&traces).progress(&(from..from + window));
    progress as f64 / window.as_secs_f64()
}

fn trace(folder: &Path) -> Trace {
    Trace::read(folder, SEED, EPOCHS * PER_EPOCH, PER_STEP)
}

fn wait_until(is_so: impl Fn() -> bool) {
    while !is_so() {
        sleep(LOOK);
    }
}

/// Returns the time since 1970, as in the traces.
fn now() -> Duration {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).expect("a clock after 1970")
}

fn job_file(workers: usize, traces: &Path) -> String {
    let data = harness::root().join("examples/digits");
    format!(
        r#"
name = "cold_start"
epochs = {EPOCHS}
seed = {SEED}
fleet = {{ workers = {{ min = {workers} }} }}
[model]
builtin = "paced"
options = {{ of = "mlp", engine = "pure", hidden = [4850, 4850], millis = {COMPUTE_MS}, trace = "{}" }}
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
kind = "sgd"
learning_rate = 0.01
"#,
        traces.display(),
        data.join("images.idx3.gz").display(),
        data.join("labels.idx1.gz").display(),
        MICRO * PER_EPOCH,
        MICRO * PER_STEP,
    )
}
