//! Data that is three times as large as a worker's memory: containers of 1 GiB without swap train
//! on 3 GiB of each format, from a disk and from S3.
//!
//! Records have 128 KiB: `u8 [128, 1024]`, and images of 362 x 362 grey pixels in PNG files. Each
//! run is one epoch of a small MLP. Workers run in Docker containers with `--memory 1g
//! --memory-swap 1g`, master and ps outside of them. In the runs with several workers one container
//! is killed in the middle and another one is added. The S3 server is moto, behind a proxy that
//! answers 503 and drops answers now and then.
//!
//! | figure | bound | because |
//! | --- | --- | --- |
//! | anonymous + shared memory of a worker | 0.8 GiB | the rest is for pages of files |
//! | bytes that the epoch reads, of the data set's bytes | 1.2 | each lane is read once |
//! | model | the same bits | whatever the fleet and the source |
//!
//! A lane that changes its worker costs one more window and one more block. The master counts such
//! lanes, and the bench subtracts their cost. Its first table has the bytes as they were read, and
//! the lanes. The index reads each file once before the epoch. A bench that misses a bound fails.
//!
//! `cargo bench --no-default-features --features cloud --bench large_data -- [RUN..]` needs Docker,
//! root, 10 GiB of disk below `target`, 12 GiB of memory for moto and an hour. Names of runs
//! choose some of them. Without `--bench` a few MiB are read by ordinary processes once.
#![expect(clippy::disallowed_methods, reason = "a bench measures real processes in real time")]

mod container;
mod files;
#[path = "../../tests/harness/mod.rs"]
mod harness;
#[path = "../support/report.rs"]
mod report;

use std::path::{Path, PathBuf};
use std::process::{Child, ExitCode};
use std::time::{Duration, Instant};

use container::{Memory, Worker};
use harness::s3::{Fault, Proxy, S3};
use harness::{Cluster, events, metric, summary, text};
use report::{Figure, Target};

/// Bytes of memory of a container.
const LIMIT: u64 = 1 << 30;

/// Anonymous and shared memory that a worker may use.
const BOUND: u64 = LIMIT / 5 * 4;

const MIB: f64 = (1 << 20) as f64;

/// Time between two looks at a job.
const LOOK: Duration = Duration::from_millis(20);

/// Time between two faults of S3, and of one of them.
const FAULTS: [Duration; 2] = [Duration::from_secs(3), Duration::from_millis(60)];

/// One way to read a data set.
struct Run {
    name: &'static str,
    kind: files::Kind,
    order: &'static str,
    /// Names of its rows: memory, bytes of the index and of the epoch, models with other bits.
    rows: [&'static str; 4],
}

const RUNS: [Run; 5] = [
    Run {
        name: "parquet-window",
        kind: files::Kind::Parquet,
        order: "window",
        rows: [
            "parquet-window: memory of a worker",
            "parquet-window: bytes read by the index",
            "parquet-window: bytes read by the epoch",
            "parquet-window: models with other bits",
        ],
    },
    Run {
        name: "tar-window",
        kind: files::Kind::Tar,
        order: "window",
        rows: [
            "tar-window: memory of a worker",
            "tar-window: bytes read by the index",
            "tar-window: bytes read by the epoch",
            "tar-window: models with other bits",
        ],
    },
    Run {
        name: "npy-window",
        kind: files::Kind::Npy,
        order: "window",
        rows: [
            "npy-window: memory of a worker",
            "npy-window: bytes read by the index",
            "npy-window: bytes read by the epoch",
            "npy-window: models with other bits",
        ],
    },
    Run {
        name: "npy-records",
        kind: files::Kind::Npy,
        order: "records",
        rows: [
            "npy-records: memory of a worker",
            "npy-records: bytes read by the index",
            "npy-records: bytes read by the epoch",
            "npy-records: models with other bits",
        ],
    },
    Run {
        name: "images-records",
        kind: files::Kind::Images,
        order: "records",
        rows: [
            "images-records: memory of a worker",
            "images-records: bytes read by the index",
            "images-records: bytes read by the epoch",
            "images-records: models with other bits",
        ],
    },
];

/// Fleet and source of a training.
#[derive(Clone, Copy)]
struct Fleet {
    workers: usize,
    on_s3: bool,
}

const FLEETS: [Fleet; 6] = [
    Fleet { workers: 1, on_s3: false },
    Fleet { workers: 2, on_s3: false },
    Fleet { workers: 5, on_s3: false },
    Fleet { workers: 1, on_s3: true },
    Fleet { workers: 2, on_s3: true },
    Fleet { workers: 5, on_s3: true },
];

/// Result of a training.
struct Trained {
    sha256: String,
    seconds: f64,
    /// Most anonymous and shared memory of one container.
    memory: Memory,
    /// Bytes that all workers read together, for the index and in the epoch.
    read: Option<[u64; 2]>,
    /// Lanes that changed their worker.
    lanes: u64,
    killed: usize,
}

fn main() -> ExitCode {
    let full = std::env::args().any(|arg| arg == "--bench");
    let chosen: Vec<String> = std::env::args().skip(1).filter(|arg| !arg.starts_with("--")).collect();
    let folder = harness::root().join("target/bench/large_data");
    let bytes = if full { 3 << 30 } else { 6 << 20 };
    let server = if full { S3::start() } else { None };
    assert!(!full || server.is_some(), "the S3 server of the tests is needed: `moto_server` on the PATH");
    let mut figures = Vec::new();
    println!(
        "run             workers source  seconds  anon+shm MiB  index/data  epoch/data  lanes moved  killed  model"
    );
    for run in RUNS.iter().filter(|run| chosen.is_empty() || chosen.iter().any(|name| name == run.name)) {
        let data = files::write(&folder.join(bytes.to_string()), run.kind, bytes);
        let fleets = FLEETS.iter().filter(|fleet| !fleet.on_s3 || server.is_some());
        let trained: Vec<_> = fleets
            .map(|&fleet| {
                let proxy = server.as_ref().filter(|_| fleet.on_s3).map(|server| {
                    files::upload(server, &data);
                    Proxy::start(server)
                });
                let trained = train(run, &data, fleet, proxy.as_ref(), full);
                show(run, fleet, &trained, data.bytes);
                trained
            })
            .collect();
        figures.extend(run.figures(&trained, &data));
        if let Some(server) = &server {
            files::remove(server, &data);
        }
    }
    report::print(&figures);
    if full {
        report::write(&figures, &harness::root().join("target/bench/large_data.json"));
    }
    let is_met = figures.iter().all(Figure::is_met);
    if is_met { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

impl Run {
    /// Returns the rows of this run's trainings, the first one with one worker.
    fn figures(&self, trained: &[Trained], data: &files::Data) -> Vec<Figure> {
        let [memory, index_row, epoch_row, bits] = self.rows;
        let memories = trained.iter().map(|trained| trained.memory.most as f64 / MIB);
        let bound = BOUND as f64 / MIB;
        let memory = Figure::most(memory, "MiB", memories.collect(), bound, Some(Target::Below(bound)));
        let others = trained.iter().filter(|other| other.sha256 != trained[0].sha256).count();
        let bits = Figure::new(bits, "models", vec![others as f64], 0.0, Some(Target::Below(1.0)));
        let is_window = self.order == "window";
        let read = |trained: &Trained, at: usize| Some(trained.read?[at] as f64 / data.bytes as f64);
        let index = trained.iter().filter_map(|trained| read(trained, 0));
        let index = Figure::most(index_row, "of data", index.collect(), 1.0, None);
        let epoch = trained.iter().filter_map(|trained| {
            let again = if is_window { trained.lanes * data.lane() } else { 0 };
            Some(read(trained, 1)? - again as f64 / data.bytes as f64)
        });
        // The order `records` reads as the system's pages fall.
        let bound = is_window.then_some(Target::Below(1.2));
        let epoch = Figure::most(epoch_row, "of data", epoch.collect(), 1.0, bound);
        vec![memory, index, epoch, bits]
    }
}

/// Prints a line.
fn show(run: &Run, fleet: Fleet, trained: &Trained, bytes: u64) {
    let part = |at: usize| match trained.read {
        Some(read) => format!("{:.3}", read[at] as f64 / bytes as f64),
        None => "-".to_owned(),
    };
    println!(
        "{:15} {:7} {:6} {:8.1} {:13.0} {:>11} {:>11} {:12} {:7}  {}",
        run.name,
        fleet.workers,
        if fleet.on_s3 { "S3" } else { "disk" },
        trained.seconds,
        trained.memory.most as f64 / MIB,
        part(0),
        part(1),
        trained.lanes,
        trained.killed,
        &trained.sha256[..16],
    );
}

/// Trains one epoch with a fleet.
fn train(run: &Run, data: &files::Data, fleet: Fleet, source: Option<&Proxy>, full: bool) -> Trained {
    let mut cluster =
        Cluster::with_environment(&harness::ebb_path(), 2, 0, &[("EBB_METRICS", "127.0.0.1:0")]);
    let folder = cluster.dir.path().to_owned();
    let (job, out) = (folder.join("job.toml"), folder.join("out"));
    std::fs::write(&job, files::job(data, run.order, source.is_some())).expect("the job file");
    let endpoint = source.map(|proxy| format!("http://{}", proxy.address)).unwrap_or_default();
    let environment = match source {
        Some(_) => s3_environment(&endpoint),
        None => Vec::new(),
    };
    if full && source.is_none() {
        // Otherwise pages that the last run left in the memory of the host would not be read.
        drop_pages();
    }
    let before = source.map_or(0, Proxy::forwarded);
    let read = |containers: &[Worker]| match source {
        Some(proxy) => proxy.forwarded() - before,
        None => containers.iter().filter_map(Worker::read).sum(),
    };
    let mut of_index = None;
    let mut containers: Vec<Worker> = Vec::new();
    let add = |cluster: &mut Cluster, containers: &mut Vec<Worker>| {
        if full {
            containers.push(Worker::start(&cluster.url, data.folder(), LIMIT, &environment));
        } else {
            cluster.add_worker_with(&environment);
        }
    };
    (0..fleet.workers).for_each(|_| add(&mut cluster, &mut containers));
    let begin = Instant::now();
    let mut submission = cluster.submission(&job, &out, &[]);
    submission.envs(environment.iter().copied()).stdout(std::process::Stdio::piped());
    let mut submission = submission.stderr(std::process::Stdio::piped()).spawn().expect("ebb starts");
    let (mut killed, mut next) = (0, Instant::now() + FAULTS[0]);
    while submission.try_wait().expect("a child").is_none() {
        // The pause sets how often memory is looked at. It waits for no state.
        std::thread::park_timeout(LOOK);
        containers.iter_mut().for_each(Worker::look);
        if of_index.is_none() && is_running(&cluster.url) {
            of_index = Some(read(&containers));
        }
        if full && fleet.workers > 1 && killed == 0 && steps(&out) > data.steps() / 3 {
            containers[0].kill();
            add(&mut cluster, &mut containers);
            killed += 1;
        }
        if let Some(proxy) = source
            && next <= Instant::now()
        {
            next = Instant::now() + FAULTS[0];
            proxy.set(if killed % 2 == 0 { Fault::Busy } else { Fault::Drops });
            std::thread::park_timeout(FAULTS[1]);
            proxy.set(Fault::Nothing);
        }
    }
    let seconds = begin.elapsed().as_secs_f64();
    ended(submission, &cluster, &containers);
    assert!(!full || of_index.is_some(), "nobody saw the job run");
    let lanes = metric(&cluster.master.metrics_url(), "ebb_master_lanes_moved_total") as u64;
    let summary = summary(&out);
    assert_eq!(summary["samples_applied"], data.records, "{summary}");
    let all = read(&containers);
    let read = of_index.map(|index| [index, all - index]).filter(|_| full);
    let memory = containers.iter().map(Worker::memory).max().unwrap_or_default();
    let sha256 = summary["model_sha256"].as_str().expect("a model").to_owned();
    Trained { sha256, seconds, memory, read, lanes, killed }
}

/// Checks how a job ended.
fn ended(submission: Child, cluster: &Cluster, containers: &[Worker]) {
    let output = submission.wait_with_output().expect("a child");
    let logs = || containers.iter().map(Worker::log).collect::<Vec<_>>().join("\n");
    assert!(output.status.success(), "{}\n{}\n{}", text(&output), cluster.master.log(), logs());
}

/// Returns whether the cluster's job has counted the records of its files, and trains.
fn is_running(master: &str) -> bool {
    let output = harness::ebb(["status", "--json", "1", "--master", master]).output().expect("ebb starts");
    // There may be no job yet.
    let status = serde_json::from_slice::<serde_json::Value>(&output.stdout).unwrap_or_default();
    status["status"] == "running"
}

/// Returns how many steps a job has applied.
fn steps(out: &Path) -> u64 {
    if !out.join("metrics.jsonl").exists() {
        return 0;
    }
    events(out, "train").iter().filter_map(|event| event["step"].as_u64()).max().unwrap_or(0)
}

fn s3_environment(endpoint: &str) -> Vec<(&str, &str)> {
    vec![
        ("AWS_ENDPOINT", endpoint),
        ("AWS_ALLOW_HTTP", "true"),
        ("AWS_REGION", "us-east-1"),
        ("AWS_ACCESS_KEY_ID", "test"),
        ("AWS_SECRET_ACCESS_KEY", "test"),
        ("EBB_DATA_URLS", "s3://bucket"),
    ]
}

/// Tells the system to forget the pages of files.
fn drop_pages() {
    let status = std::process::Command::new("sync").status();
    assert!(status.is_ok_and(|status| status.success()), "sync runs");
    std::fs::write(PathBuf::from("/proc/sys/vm/drop_caches"), "1").expect("this bench runs as root");
}
