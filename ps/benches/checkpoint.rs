//! A checkpoint while training goes on: how long it takes against what the disk can do, and what
//! the steps feel of it.
//!
//! The limits, for a partition of S bytes with Adam: the file has 3 S, so writing takes 3 S over
//! the disk's bandwidth, which `dd` with `oflag=direct` measures in the same run. The step after a
//! cut writes the slots, 2 S, into other memory: of the 7 S that an update reads and writes not a
//! byte more. All steps meanwhile share memory and cores with the writer, which reads each of the 3
//! S twice: for its checksum, 0.05 ms of a core for a MiB, and for the disk. Extra memory: what
//! follows the slots, 2 S, and one version of the weights, S; it is taken before the first
//! checkpoint and kept.
//!
//! Steps follow each other without a pause, as with workers that are infinitely fast: any of it is
//! seen. `EBB_BENCH_BYTES` sets S (256 MiB by default), `EBB_BENCH_DIR` the disk.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use proto::ids::{Era, JobId, PartitionId, Step, Version};
use proto::parameters::{Address, Parameters, Push, Target};
use proto::placement::Layout;
use proto::spec::JobSpec;
use proto::tensor::{Chunk, TensorRole, TensorSpec};
use proto::tree::{Node, StepNode};
use proto::wire::WireType;
use ps::checkpoint::Report;
use ps::{Opening, Options, Ps};
use report::{Figure, Target as Goal};
use tokio::time::Instant;

#[path = "../../benches/support/report.rs"]
mod report;

const SPEC: &str = r#"{
    "name": "bench", "epochs": 1, "model": { "builtin": "linear" },
    "data": { "format": "idx", "train": { "features": ["x"], "labels": ["y"] } },
    "batch": { "micro": 1 }, "optimizer": { "kind": "adam", "learning_rate": 0.01 },
    "checkpoint": { "url": "DIR", "every_seconds": 1 }
}"#;

const ADDRESS: Address = Address { job: JobId(1), partition: PartitionId(0), era: Era(0) };

/// The allocator of `ebb`.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Limit on the longest step during a checkpoint, relative to the longest step without one.
const GAP_MAX: f64 = 1.2;

/// Least bandwidth of a checkpoint, relative to the bandwidth of the disk.
const BANDWIDTH_MIN: f64 = 0.7;

#[expect(clippy::disallowed_methods, reason = "a bench is told its size by the environment")]
fn setting(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

fn main() {
    // As criterion does: without `--bench` everything runs once, small.
    let full = std::env::args().any(|argument| argument == "--bench");
    let bytes =
        setting("EBB_BENCH_BYTES").map_or(256 << 20, |bytes| bytes.parse().expect("a number of bytes"));
    let bytes: usize = if full { bytes } else { 1 << 20 };
    let (rounds, steps) = if full { (5, 20) } else { (1, 2) };
    let parent =
        setting("EBB_BENCH_DIR").map_or_else(|| PathBuf::from(env!("CARGO_TARGET_TMPDIR")), PathBuf::from);
    std::fs::create_dir_all(&parent).expect("a folder");
    let folder = tempfile::tempdir_in(parent).expect("a folder");
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    runtime.block_on(run(folder.path(), bytes, rounds, steps));
}

async fn run(folder: &Path, bytes: usize, rounds: usize, steps: u64) {
    println!("partition {} MiB, file {} MiB", bytes >> 20, (3 * bytes) >> 20);
    let mut training = Training::start(folder, bytes).await;
    training.settle(steps / 2).await;
    let (mut gaps, mut bandwidths, mut extra) = (Vec::new(), Vec::new(), Vec::new());
    for round in 1..=rounds {
        let disk = direct_write(&folder.join("plain"), 3 * bytes);
        let calm = training.steps(steps).await;
        let before = memory();
        let Checkpoint { took, times, peak } = training.checkpoint(round).await;
        let rate = |took: Duration| 3.0 * bytes as f64 / took.as_secs_f64() / f64::from(1 << 20);
        println!("checkpoint {round}");
        println!("  dd oflag=direct         {:8.1} ms {:7.0} MiB/s", millis(disk), rate(disk));
        println!("  written, within a step  {:8.1} ms {:7.0} MiB/s", millis(took), rate(took));
        println!("  steps before            {}", shown(&calm));
        println!("  step after the cut      {:8.1} ms", millis(times[0]));
        println!("  steps while writing     {}", shown(&times[1..]));
        let longest = |times: &[Duration]| times.iter().max().copied().unwrap_or_default().as_secs_f64();
        gaps.push(longest(&times) / longest(&calm));
        bandwidths.push(disk.as_secs_f64() / took.as_secs_f64());
        extra.push((peak.saturating_sub(before) >> 20) as f64);
    }
    report::print(&[
        Figure::new(
            "longest step with a checkpoint, of that without",
            "ratio",
            gaps,
            1.0,
            Some(Goal::Below(GAP_MAX)),
        ),
        Figure::new(
            "bandwidth, of dd oflag=direct",
            "ratio",
            bandwidths,
            1.0,
            Some(Goal::AtLeast(BANDWIDTH_MIN)),
        ),
        Figure::new("extra memory beyond what is reserved", "MiB", extra, 0.0, None),
    ]);
}

fn millis(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

fn shown(times: &[Duration]) -> String {
    let mut times = times.to_vec();
    times.sort();
    let Some((&last, &middle)) = times.last().zip(times.get(times.len() / 2)) else {
        return "    none".to_owned();
    };
    format!("{:8.1} ms median, {:.1} ms longest of {}", millis(middle), millis(last), times.len())
}

/// Resident bytes of this process; 0 where the system does not say.
fn memory() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    line.and_then(|line| line.trim().trim_end_matches(" kB").parse::<usize>().ok()).unwrap_or(0) << 10
}

/// What the disk can do past the page cache.
fn direct_write(path: &Path, bytes: usize) -> Duration {
    let mut dd = Command::new("dd");
    dd.args(["if=/dev/zero", "bs=8M", "oflag=direct", "conv=fsync", "status=none"]);
    dd.arg(format!("count={bytes}B")).arg(format!("of={}", path.display()));
    let begin = Instant::now();
    let status = dd.status().expect("dd starts");
    let took = begin.elapsed();
    assert!(status.success(), "dd: {status}");
    std::fs::remove_file(path).expect("our own file");
    took
}

/// One checkpoint, seen by the steps that go on.
struct Checkpoint {
    took: Duration,
    /// Times of the steps from the cut until the checkpoint was complete.
    times: Vec<Duration>,
    /// Largest number of resident bytes.
    peak: usize,
}

/// One partition that takes steps.
struct Training {
    ps: Ps,
    chunks: Vec<Chunk>,
    next: u64,
}

impl Training {
    async fn start(folder: &Path, bytes: usize) -> Self {
        let tensors = vec![TensorSpec::parameter("weight", [bytes / 4])];
        let layout = Layout::new(tensors.clone(), 1).expect("a valid model");
        let spec = JobSpec::from_json(&SPEC.replace("DIR", folder.to_str().expect("UTF-8")));
        let spec = spec.expect("a valid specification");
        let ps = Ps::new(Options::default()).expect("valid options");
        let plan = spec.plan(1 << 40);
        let opening = Opening {
            address: ADDRESS,
            partitions: 1,
            tensors,
            plan,
            spec,
            restore: None,
            homes: Vec::new(),
            placement: 0,
            script: None,
        };
        ps.open(opening).expect("a valid opening");
        let chunk =
            |&id| Chunk { id, role: TensorRole::Parameter, values: vec![0; layout.chunk_bytes(id)].into() };
        let chunks: Vec<Chunk> = layout.members(ADDRESS.partition).iter().map(chunk).collect();
        let initial =
            Push { address: ADDRESS, target: Target::Initial, wire: WireType::F32, chunks: chunks.clone() };
        ps.push(initial).await.expect("version 0");
        Self { ps, chunks, next: 0 }
    }

    /// Returns how long each of so many steps takes.
    async fn steps(&mut self, count: u64) -> Vec<Duration> {
        let mut times = Vec::new();
        for _ in 0..count {
            let node = StepNode { step: Step(self.next), node: Node::root(1), of: 1 };
            let target = Target::Node { node, samples: 1 };
            let push = Push { address: ADDRESS, target, wire: WireType::F32, chunks: self.chunks.clone() };
            let begin = Instant::now();
            self.ps.push(push).await.expect("the next step");
            times.push(begin.elapsed());
            self.next += 1;
        }
        times
    }

    /// Takes steps until the memory of the first checkpoint is there, which comes in the
    /// background: a machine may need seconds for its pages.
    async fn settle(&mut self, steps: u64) {
        let mut before = 0;
        loop {
            self.steps(steps).await;
            let now = memory();
            if now < before + (1 << 20) {
                return;
            }
            before = now;
        }
    }

    /// Saves the next version but one, as checkpoint number `round`.
    async fn checkpoint(&mut self, round: usize) -> Checkpoint {
        assert!(self.ps.save(ADDRESS.job, Version(self.next + 1)).expect("open"), "to come");
        self.steps(1).await;
        let (begin, mut times, mut peak) = (Instant::now(), Vec::new(), 0);
        let reports = self.ps.reports();
        let saved = || {
            let reported = reports.borrow();
            let saved = |report: &Report| assert!(matches!(report, Report::Saved(_)), "{report:?}");
            reported.reports().inspect(|report| saved(report)).count() >= round
        };
        while times.is_empty() || !saved() {
            times.extend(self.steps(1).await);
            peak = peak.max(memory());
        }
        Checkpoint { took: begin.elapsed(), times, peak }
    }
}
