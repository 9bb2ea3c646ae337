//! Number of workers that one master can serve: a real master process, and simulated workers that
//! speak to it as real ones do and compute nothing.
//!
//! Each simulated worker has a TCP connection of its own, registers, keeps a heartbeat stream with
//! its leases, asks for a lease and reports it as done, which brings the next one. It pulls and
//! pushes nothing. The master cannot tell the difference, because weights never pass through it. A
//! real ps holds the model. A real worker begins the job (data, layout, version 0), then leaves.
//!
//! Expected, on two cores that the master shares with all its workers: an empty unary call costs
//! about 25 us of each side's processor (`cargo bench --bench data_plane` measures it), and a lease
//! is one call, the report of the last one. So
//!
//! | figure                      | limit           | because                                      |
//! | --------------------------- | --------------- | -------------------------------------------- |
//! | leases/s, as many as can be | 40,000          | 2 cores / (2 sides x 25 us), nothing decided |
//! | processor per lease         | 25 us           | one call                                     |
//! | lease latency with room     | below 1 ms      | one call; work is there                      |
//! | memory                      | 30 KiB a worker | buffers of HTTP/2, socket, two open calls    |
//!
//! *With room:* the job is `async`, so no worker waits for another, and each lease has two
//! microbatches. 2,000 workers whose leases take a second each ask for 2,000 leases per second. *As
//! many as can be:* 1,000 workers that ask again at once.
//!
//! `cargo bench --no-default-features --bench control_plane` takes a minute. Without `--bench` a
//! few workers show that it works.
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
mod simulated;
#[path = "../support/trace.rs"]
mod trace;

use std::fs;
use std::process::ExitCode;
use std::sync::atomic::Ordering;
use std::thread::sleep;
use std::time::{Duration, Instant};

use harness::Cluster;
use report::{Figure, Target};
use simulated::Workers;

/// Records of an epoch, each a microbatch.
const RECORDS: u64 = 1024;

/// Number of workers from which on they use most of the master's memory.
const MANY: usize = 1000;

/// Microbatches of a step. In `async` 64 steps may be computed at the same time, so there is always
/// work for 2,000 workers.
const PER_STEP: u64 = 128;

fn main() -> ExitCode {
    fleet::main("control_plane", |full| {
        let (many, eager, takes, stretch) = match full {
            true => (2000, 1000, Duration::from_secs(1), Duration::from_secs(15)),
            false => (20, 10, Duration::from_millis(10), Duration::from_millis(500)),
        };
        let room = Round::run(many, takes, stretch);
        let rush = Round::run(eager, Duration::ZERO, stretch);
        let mut figures = room.figures(["2,000 workers, a lease a second each", "with room"], 2000.0, None);
        let target = Some(Target::AtLeast(20_000.0));
        figures.extend(rush.figures(["1,000 workers, as fast as they can", "rush"], 40_000.0, target));
        figures
    })
}

/// Measurements of a master with some workers.
struct Round {
    workers: usize,
    joined_secs: f64,
    leases_per_second: Vec<f64>,
    p50_ms: Vec<f64>,
    p99_ms: Vec<f64>,
    /// Processor time of the master for each lease.
    processor_us: Vec<f64>,
    peak_mib: f64,
    before_mib: f64,
}

impl Round {
    /// Measures `workers` that hold each lease for `takes`.
    fn run(workers: usize, takes: Duration, stretch: Duration) -> Self {
        let (cluster, master) = start();
        let before_mib = peak_mib(master);
        let begin = Instant::now();
        let fleet = Workers::start(&cluster.url, workers, takes);
        fleet.wait_until_live();
        let joined_secs = begin.elapsed().as_secs_f64();
        sleep(stretch / 3);
        let mut round = Self {
            workers,
            joined_secs,
            leases_per_second: Vec::new(),
            p50_ms: Vec::new(),
            p99_ms: Vec::new(),
            processor_us: Vec::new(),
            peak_mib: 0.0,
            before_mib,
        };
        for _ in 0..3 {
            fleet.take_latencies();
            let (leases, processor, begin) =
                (fleet.leases.load(Ordering::Relaxed), processor_secs(master), Instant::now());
            sleep(stretch / 3);
            let done = (fleet.leases.load(Ordering::Relaxed) - leases) as f64;
            round.leases_per_second.push(done / begin.elapsed().as_secs_f64());
            round.processor_us.push((processor_secs(master) - processor) * 1e6 / done);
            let mut latencies = fleet.take_latencies();
            latencies.sort_unstable();
            let at = |percent: usize| {
                latencies
                    .get(latencies.len() * percent / 100)
                    .map_or(f64::NAN, |time| time.as_secs_f64() * 1e3)
            };
            round.p50_ms.push(at(50));
            round.p99_ms.push(at(99));
        }
        assert_eq!(fleet.lost.load(Ordering::Relaxed), 0, "workers were taken for dead");
        round.peak_mib = peak_mib(master);
        round
    }

    fn figures(self, [first, short]: [&'static str; 2], limit: f64, target: Option<Target>) -> Vec<Figure> {
        let rush = short == "rush";
        let name = |room: &'static str, eager: &'static str| if rush { eager } else { room };
        let worker_kib = (self.peak_mib - self.before_mib) * 1024.0 / self.workers as f64;
        let mut figures = vec![
            Figure::new(first, "1/s", self.leases_per_second, limit, target),
            Figure::new(
                name("  lease latency, p50", "  rush: lease latency, p50"),
                "ms",
                self.p50_ms,
                1.0,
                None,
            ),
            Figure::new(
                name("  lease latency, p99", "  rush: lease latency, p99"),
                "ms",
                self.p99_ms,
                1.0,
                None,
            ),
            Figure::new(
                name("  processor of the master per lease", "  rush: processor of the master per lease"),
                "us",
                self.processor_us,
                25.0,
                None,
            ),
            Figure::new(
                name("  until all are live", "  rush: until all are live"),
                "s",
                vec![self.joined_secs],
                0.0,
                None,
            ),
            Figure::new(
                name("  peak memory of the master (VmHWM)", "  rush: peak memory of the master (VmHWM)"),
                "MiB",
                vec![self.peak_mib],
                0.0,
                None,
            ),
        ];
        // The job and its journal take some MiB meanwhile, which would be most of the memory of a
        // few workers.
        if self.workers >= MANY {
            let name = name("  of it a worker", "  rush: of it a worker");
            figures.push(Figure::new(name, "KiB", vec![worker_kib], 30.0, None));
        }
        figures
    }
}

/// Starts a master and a ps with a job whose training has begun, and no worker. Returns the cluster
/// and the master's process id.
fn start() -> (Cluster, u32) {
    let program = std::env::current_exe().expect("this program");
    let mut cluster = Cluster::of(&program, 1, 1);
    let data = harness::root().join("examples/digits");
    let file = format!(
        r#"
name = "control"
epochs = 10000000
fleet = {{ ps = 1, workers = {{ min = 1, max = 65536 }} }}
consistency = {{ mode = "async" }}
[model]
builtin = "softmax"
[data]
format = "idx"
[data.train]
features = ["{}"]
labels = ["{}"]
records = [0, {RECORDS}]
[batch]
micro = 1
effective = {PER_STEP}
[optimizer]
kind = "sgd"
learning_rate = 0.01
"#,
        data.join("images.idx3.gz").display(),
        data.join("labels.idx1.gz").display(),
    );
    let job = cluster.dir.path().join("job.toml");
    fs::write(&job, file).expect("the job file");
    harness::succeed(["submit".as_ref(), "--master".as_ref(), cluster.url.as_ref(), job.as_os_str()]);
    // The real worker counts the records, makes version 0, trains a little and leaves.
    loop {
        let status = harness::succeed(["status", "control", "--master", &cluster.url]);
        assert!(!status.contains("failed"), "{status}");
        if status.contains("running") {
            break;
        }
        sleep(Duration::from_millis(20));
    }
    cluster.workers[0].signal("TERM");
    cluster.workers[0].child.wait().expect("the worker ends");
    let master = cluster.master.child.id();
    (cluster, master)
}

/// Returns the processor time that a process has used.
fn processor_secs(process: u32) -> f64 {
    let stat = fs::read_to_string(format!("/proc/{process}/stat")).expect("the master lives");
    let fields: Vec<_> = stat[stat.rfind(')').expect("a name") + 2..].split(' ').collect();
    // In ticks of a hundredth of a second, user and system, after pid, name and state.
    let ticks = |index: usize| fields[index].parse::<f64>().expect("a number");
    (ticks(11) + ticks(12)) / 100.0
}

fn peak_mib(process: u32) -> f64 {
    let status = fs::read_to_string(format!("/proc/{process}/status")).expect("the master lives");
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).expect("its peak");
    line.split_whitespace().next().and_then(|kib| kib.parse::<f64>().ok()).expect("a number") / 1024.0
}
