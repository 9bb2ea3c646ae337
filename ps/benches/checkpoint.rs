//! A checkpoint while training goes on: how long it takes against what the disk can do, and what the steps feel of it.
//!
//! The limits, for a partition of S bytes with Adam: the file has 3 S, so writing takes 3 S over the disk's bandwidth, which a plain
//! write and synchronisation of as many bytes measures in the same run. The step after a cut copies the slots, 2 S read (which the
//! update needs anyway) and 2 S written into memory that is new: its pages cost more than the copy. Other steps share two
//! things with the writer: memory bandwidth, and cores when there are few. Extra memory: the slots' copies, 2 S, and one version of
//! the weights, S.
//!
//! `EBB_BENCH_BYTES` sets S (256 MiB by default), `EBB_BENCH_DIR` the disk.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Duration;

use bytes::Bytes;
use proto::ids::{Era, JobId, PartitionId, Step, Version};
use proto::parameters::{Address, Parameters, Push, Target};
use proto::placement::Layout;
use proto::spec::JobSpec;
use proto::tensor::{Chunk, TensorSpec};
use proto::tree::{Node, StepNode};
use ps::checkpoint::Report;
use ps::{Opening, Options, Ps};
use tokio::time::Instant;

const SPEC: &str = r#"{
    "name": "bench", "epochs": 1, "model": { "builtin": "linear" },
    "data": { "format": "idx", "train": { "features": ["x"], "labels": ["y"] } },
    "batch": { "micro": 1 }, "optimizer": { "kind": "adam", "learning_rate": 0.01 },
    "checkpoint": { "url": "DIR", "every_seconds": 1 }
}"#;

const ADDRESS: Address = Address { job: JobId(1), partition: PartitionId(0), era: Era(0) };

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
    let steps = if full { 20 } else { 2 };
    let parent =
        setting("EBB_BENCH_DIR").map_or_else(|| PathBuf::from(env!("CARGO_TARGET_TMPDIR")), PathBuf::from);
    std::fs::create_dir_all(&parent).expect("a folder");
    let folder = tempfile::tempdir_in(parent).expect("a folder");
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    runtime.block_on(run(folder.path(), bytes, steps));
}

async fn run(folder: &Path, bytes: usize, steps: u64) {
    let plain = plain_write(&folder.join("plain"), 3 * bytes);
    let rate = |took: Duration| 3.0 * bytes as f64 / took.as_secs_f64() / (1 << 20) as f64;
    println!("partition {} MiB, file {} MiB", bytes >> 20, (3 * bytes) >> 20);
    println!("plain write + fsync       {:8.1} ms {:7.0} MiB/s", millis(plain), rate(plain));

    let mut training = Training::start(folder, bytes).await;
    training.steps(steps / 2).await;
    let without = training.steps(steps).await;
    println!("step                      {}", shown(&without));

    for round in ["first", "second"] {
        let before = memory();
        let mut peak = before;
        let next = training.next;
        assert!(training.ps.save(ADDRESS.job, Version(next + 1)).expect("open"), "to come");
        training.steps(1).await;
        let begin = Instant::now();
        let after_cut = training.steps(1).await;
        let mut while_written = Vec::new();
        let reports = training.ps.reports();
        let saved = |round: &str| {
            let reported = reports.borrow();
            let wanted = if round == "first" { 1 } else { 2 };
            reported
                .reports()
                .inspect(|report| assert!(matches!(report, Report::Saved(_)), "{report:?}"))
                .count()
                >= wanted
        };
        while !saved(round) {
            while_written.extend(training.steps(1).await);
            peak = peak.max(memory());
        }
        let took = begin.elapsed();
        println!("{round} checkpoint");
        println!("  written, within a step  {:8.1} ms {:7.0} MiB/s", millis(took), rate(took));
        println!("  step after the cut      {}", shown(&after_cut));
        println!("  steps while writing     {}", shown(&while_written));
        println!("  extra memory            {:8} MiB", peak.saturating_sub(before) >> 20);
        let after = training.steps(steps).await;
        println!("  steps after             {}", shown(&after));
    }
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

fn plain_write(path: &Path, bytes: usize) -> Duration {
    let piece = vec![7u8; 1 << 20];
    let begin = Instant::now();
    let mut file = File::create(path).expect("a file");
    for _ in 0..bytes >> 20 {
        file.write_all(&piece).expect("room on the disk");
    }
    file.sync_all().expect("a disk that writes");
    let took = begin.elapsed();
    std::fs::remove_file(path).expect("our own file");
    took
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
        let opening = Opening { address: ADDRESS, partitions: 1, tensors, plan, spec, restore: None };
        ps.open(opening).expect("a valid opening");
        let chunk = |&id| Chunk { id, values: Bytes::from(vec![0; layout.chunk_bytes(id)]) };
        let chunks: Vec<Chunk> = layout.members(ADDRESS.partition).iter().map(chunk).collect();
        let initial = Push { address: ADDRESS, target: Target::Initial, chunks: chunks.clone() };
        ps.push(initial).await.expect("version 0");
        Self { ps, chunks, next: 0 }
    }

    /// How long each of so many steps takes.
    async fn steps(&mut self, count: u64) -> Vec<Duration> {
        let mut times = Vec::new();
        for _ in 0..count {
            let node = StepNode { step: Step(self.next), node: Node::root(1), of: 1 };
            let target = Target::Node { node, samples: 1 };
            let push = Push { address: ADDRESS, target, chunks: self.chunks.clone() };
            let begin = Instant::now();
            self.ps.push(push).await.expect("the next step");
            times.push(begin.elapsed());
            self.next += 1;
        }
        times
    }
}
