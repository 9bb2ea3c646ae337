//! Cost of full observability. `examples/mnist` runs with every span sent by OTLP and written to a
//! file, and all metrics sent and scraped, against the same job without any of it. Real processes
//! run on loopback. A round is four adjacent runs: without, with, with, without.
//!
//! The job is that of `examples/mnist`: a step of 128 records in 4 microbatches, two workers, two
//! ps. In a build without libtorch, the pure-Rust network `mlp` replaces its TorchScript module. A
//! step is then so short that the figure says more about spans than about users' jobs.
//!
//! Expected. A step whose microbatches come one by one has four leases: `task`, `lease`, `pull`,
//! `compute` and `push`, and two `apply`: 4 x 5 + 2 = 22 spans. It has fewer when a worker has the
//! weights or gets two microbatches at once. A span costs about 8 us of processor time: 4 to make
//! and write to the file, 3 to encode and send, 1 to receive. So a step costs 0.2 ms of two cores'
//! time, of 30 ms and more: 0.99.
//!
//! `cargo bench --bench overhead` takes 5 minutes. It needs MNIST, see `examples/mnist`.
#![expect(clippy::disallowed_methods, reason = "a bench measures real processes in real time")]

#[path = "../support/fleet.rs"]
#[allow(dead_code, reason = "each bench uses a part of it")]
mod fleet;
#[path = "../../tests/harness/mod.rs"]
mod harness;
#[path = "../../tests/harness/paced.rs"]
mod paced;
#[path = "../support/report.rs"]
mod report;
#[path = "../support/trace.rs"]
mod trace;

use std::fs;
use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Command, ExitCode};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use harness::collector::Collector;
use harness::{Cluster, Process, summary, text};
use report::{Figure, Target};

const PS: usize = 2;
const WORKERS: usize = 2;

/// Folder for the timeline of each process. `--trace` has no variable of the environment.
const TRACES: &str = "OVERHEAD_TRACES";

fn main() -> ExitCode {
    traced();
    fleet::main("overhead", |full| {
        let Some(data) = harness::mnist() else { return Vec::new() };
        let (rounds, records, epochs) = if full { (7, 8000, 6) } else { (1, 256, 1) };
        let (mut ratios, mut without, mut arrived, mut per_step) =
            (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        for _ in 0..rounds {
            // This order cancels a host that gets slower, or that slows the second run.
            let runs = [false, true, true, false].map(|observed| Run::of(&data, records, epochs, observed));
            let speed = |at: usize| runs[at].samples_per_second;
            ratios.push((speed(1) * speed(2) / speed(0) / speed(3)).sqrt());
            without.extend([speed(0), speed(3)]);
            for observed in &runs[1..3] {
                arrived.push(observed.computed as f64 / observed.microbatches);
                per_step.push(observed.spans as f64 / observed.steps);
            }
        }
        vec![
            Figure::new(
                "samples/s with all traces and numbers, of without",
                "ratio",
                ratios,
                0.99,
                Some(Target::AtLeast(0.98)),
            ),
            Figure::new("  samples/s without", "1/s", without, 0.0, None),
            Figure::new("  spans of microbatches that arrived, of all", "ratio", arrived, 1.0, None),
            Figure::new("  spans a step", "", per_step, 22.0, None),
        ]
    })
}

/// Starts a role that is to write its timeline: this program again, with one more flag.
fn traced() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let Some(folder) = std::env::var_os(TRACES).filter(|_| !args.iter().any(|arg| arg == "--trace")) else {
        return;
    };
    let file = Path::new(&folder).join(format!("{}.json", std::process::id()));
    let mut again = Command::new(std::env::current_exe().expect("this program"));
    let error = again.args(args).arg("--trace").arg(file).exec();
    panic!("this program does not start: {error}");
}

/// One job.
struct Run {
    samples_per_second: f64,
    microbatches: f64,
    steps: f64,
    /// Spans that arrived at the collector.
    spans: usize,
    /// Spans of computed microbatches.
    computed: usize,
}

impl Run {
    fn of(data: &Path, records: u64, epochs: u64, observed: bool) -> Self {
        let program = std::env::current_exe().expect("this program");
        let collector = observed.then(Collector::start);
        let traces = tempfile::tempdir().expect("a temporary folder");
        let folder = traces.path().display().to_string();
        let environment: Vec<(&str, &str)> = match &collector {
            None => Vec::new(),
            Some(collector) => vec![
                ("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url.as_str()),
                ("EBB_METRICS", "127.0.0.1:0"),
                (TRACES, folder.as_str()),
            ],
        };
        let mut cluster = Cluster::with_environment(&program, PS, 0, &environment);
        (0..WORKERS).for_each(|_| cluster.add_worker_with(&environment));
        let urls: Vec<String> = match observed {
            true => {
                let Cluster { master, ps, workers, .. } = &mut cluster;
                [master].into_iter().chain(ps).chain(workers).map(Process::metrics_url).collect()
            }
            false => Vec::new(),
        };
        let job = cluster.dir.path().join("job.toml");
        fs::write(&job, file(data, records, epochs)).expect("the job file");
        let (out, ended) = (cluster.dir.path().join("out"), AtomicBool::new(false));
        let output = std::thread::scope(|scope| {
            scope.spawn(|| {
                while !ended.load(Ordering::Relaxed) {
                    urls.iter().for_each(|url| scrape(url));
                    std::thread::park_timeout(Duration::from_secs(1));
                }
            });
            let output = cluster.submit(&job, &out, &[]);
            ended.store(true, Ordering::Relaxed);
            output
        });
        assert!(output.status.success(), "{}", text(&output));
        // Each process sends its remaining spans to the collector when it ends.
        for process in cluster.workers.iter_mut().chain(&mut cluster.ps).chain([&mut cluster.master]) {
            process.signal("TERM");
            process.child.wait().expect("a child");
        }
        if observed {
            assert_eq!(fs::read_dir(traces.path()).expect("a folder").count(), 1 + PS + WORKERS);
        }
        let spans = collector.map(|collector| collector.take()).unwrap_or_default();
        let summary = summary(&out);
        let number = |name: &str| summary[name].as_f64().expect("a number");
        Self {
            samples_per_second: number("samples_per_second"),
            microbatches: number("microbatches_applied"),
            steps: number("steps"),
            computed: spans.iter().filter(|span| span.name == "compute").count(),
            spans: spans.len(),
        }
    }
}

/// Scrapes metrics as Prometheus does.
fn scrape(url: &str) {
    let host = url.trim_start_matches("http://").trim_end_matches("/metrics");
    let asked = TcpStream::connect(host).and_then(|mut stream| {
        write!(stream, "GET /metrics HTTP/1.0\r\nHost: {host}\r\n\r\n")?;
        stream.read_to_end(&mut Vec::new())
    });
    asked.expect("a role shows its numbers");
}

/// Returns the job file of `examples/mnist`, without validation.
fn file(data: &Path, records: u64, epochs: u64) -> String {
    let script = harness::root().join("examples/mnist/model.pt");
    let model = match cfg!(feature = "torch") {
        true => format!("script = \"{}\"", script.display()),
        false => "builtin = \"mlp\"\noptions = { hidden = [128], engine = \"pure\" }".to_owned(),
    };
    format!(
        r#"
name = "overhead"
epochs = {epochs}
seed = 7
fleet = {{ ps = {PS}, workers = {{ min = {WORKERS} }} }}
[model]
{model}
[data]
format = "idx"
shape = [1, 28, 28]
normalize = {{ scale = 255, mean = 0.1307, std = 0.3081 }}
[data.train]
features = ["{}"]
labels = ["{}"]
records = [0, {records}]
[batch]
micro = 32
effective = 128
[optimizer]
kind = "adam"
learning_rate = 5e-3
schedule = {{ kind = "cosine", warmup_steps = 10 }}
"#,
        data.join("t10k-images-idx3-ubyte.gz").display(),
        data.join("t10k-labels-idx1-ubyte.gz").display(),
    )
}
