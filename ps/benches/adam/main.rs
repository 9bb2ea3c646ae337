//! A step of Adam on 64 million parameters, through the ps, beside the memory's own speed and
//! PyTorch's fused Adam.
//!
//! A step reads weights, gradient and two slots, and writes the slots and the next weights: 28
//! bytes for each parameter, 1.75 GiB, all of it out of the caches. *The same traffic* is a kernel
//! that reads and writes exactly this, in chunks of the same size, past the caches where the ps
//! does so, and only adds: what the memory can do with so many streams. *PyTorch* is
//! `torch.optim.Adam(fused=True)` on one tensor (`benches/peers/adam_fused.py`), in a process that
//! is asked in turn; `EBB_PYTHON` names a Python that has it, without one its rows are missing.
//! *Ours* is a push of the whole step to an embedded ps until it is acknowledged: offered, applied,
//! and the next version there.
//!
//! Expected: what is not memory is a mutex for each chunk and a few allocations a step, far below 1
//! %; division and square root hide behind the memory with 8 lanes or more. So 1 of the same
//! traffic, and 1 of PyTorch, which has the same bound.
//!
//! Each round takes every figure once, so that ratios are of neighbours in time. Without `--bench`
//! it is one round, small.
#![expect(clippy::disallowed_methods, reason = "a bench measures real time")]

use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use proto::ids::{Era, JobId, PartitionId, Step};
use proto::parameters::{Address, Parameters, Push, Target};
use proto::placement::Layout;
use proto::spec::JobSpec;
use proto::tensor::{Chunk, TensorRole, TensorSpec};
use proto::tree::{Node, StepNode};
use proto::wire::WireType;
use ps::{Opening, Options, Ps};
use report::{Figure, Target as Goal, median};
use tokio::runtime::Runtime;

#[path = "../../../benches/support/fused.rs"]
mod fused;
#[path = "../../../benches/support/report.rs"]
mod report;
mod traffic;

use fused::Peer;
use traffic::Traffic;

/// The allocator of `ebb`.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

const SPEC: &str = r#"{
    "name": "bench", "epochs": 1, "model": { "builtin": "linear" },
    "data": { "format": "idx", "train": { "features": ["x"], "labels": ["y"] } },
    "batch": { "micro": 1 }, "optimizer": { "kind": "adam", "learning_rate": 0.001 }
}"#;

const ADDRESS: Address = Address { job: JobId(1), partition: PartitionId(0), era: Era(0) };

const THREADS: [usize; 2] = [1, 2];

/// Steps whose median is one sample.
const STEPS: usize = 3;

fn main() {
    let full = std::env::args().any(|arg| arg == "--bench");
    let (parameters, rounds) = if full { (64 << 20, 15) } else { (4 << 20, 1) };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let mut ours = THREADS.map(|threads| Training::start(&runtime, parameters, threads));
    let mut traffic = Traffic::new(parameters);
    let mut peer = Peer::start(parameters, "cpu");
    let mut figures = Vec::new();
    let mut rows: [Rows; THREADS.len()] = Default::default();
    // The first round warms up.
    for round in 0..=rounds {
        for ((training, rows), threads) in ours.iter_mut().zip(&mut rows).zip(THREADS) {
            let bound = seconds(|| traffic.pass(threads));
            let step = seconds(|| training.step(&runtime));
            let fused = peer.as_mut().map(|peer| median(&peer.steps(threads)));
            if round > 0 {
                rows.bound.push(bound);
                rows.step.push(step);
                rows.fused.extend(fused);
            }
        }
    }
    for (rows, names) in rows.iter().zip(&NAMES) {
        figures.extend(rows.figures(names));
    }
    report::print(&figures);
}

/// Returns the median of a few.
fn seconds(mut work: impl FnMut()) -> f64 {
    let mut taken = [0.0; STEPS];
    for took in &mut taken {
        let begin = Instant::now();
        work();
        *took = begin.elapsed().as_secs_f64();
    }
    median(&taken)
}

/// Seconds, of each round.
#[derive(Default)]
struct Rows {
    bound: Vec<f64>,
    step: Vec<f64>,
    fused: Vec<f64>,
}

/// What the figures of one number of threads are called.
struct Names {
    step: &'static str,
    of_bound: &'static str,
    of_fused: &'static str,
}

const NAMES: [Names; THREADS.len()] = [
    Names {
        step: "Adam, 1 thread: a step",
        of_bound: "Adam, 1 thread: of the same traffic",
        of_fused: "Adam, 1 thread: of PyTorch fused",
    },
    Names {
        step: "Adam, 2 threads: a step",
        of_bound: "Adam, 2 threads: of the same traffic",
        of_fused: "Adam, 2 threads: of PyTorch fused",
    },
];

impl Rows {
    fn figures(&self, names: &Names) -> Vec<Figure> {
        let of = |peer: &[f64]| peer.iter().zip(&self.step).map(|(peer, step)| peer / step).collect();
        let millis = self.step.iter().map(|seconds| seconds * 1e3).collect();
        let mut figures = vec![
            Figure::new(names.step, "ms", millis, median(&self.bound) * 1e3, None),
            Figure::new(names.of_bound, "ratio", of(&self.bound), 1.0, Some(Goal::AtLeast(0.97))),
        ];
        if !self.fused.is_empty() {
            let goal = Some(Goal::AtLeast(1.0));
            figures.push(Figure::new(names.of_fused, "ratio", of(&self.fused), 1.0, goal));
        }
        figures
    }
}

/// One partition that takes steps.
struct Training {
    ps: Ps,
    chunks: Vec<Chunk>,
    next: u64,
}

impl Training {
    fn start(runtime: &Runtime, parameters: usize, threads: usize) -> Self {
        let tensors = vec![TensorSpec::parameter("weight", [parameters])];
        let layout = Layout::new(tensors.clone(), 1).expect("a valid model");
        let spec = JobSpec::from_json(SPEC).expect("a valid specification");
        let ps = Ps::new(Options { threads, ..Options::default() }).expect("valid options");
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
        let chunk = |&id| {
            let len = layout.chunk_bytes(id) / 4;
            let values: Vec<u8> =
                (0..len).flat_map(|index| ((index % 1000) as f32 * 1e-3 - 0.5).to_le_bytes()).collect();
            Chunk { id, role: TensorRole::Parameter, values: values.into() }
        };
        let chunks: Vec<Chunk> = layout.members(ADDRESS.partition).iter().map(chunk).collect();
        let initial =
            Push { address: ADDRESS, target: Target::Initial, wire: WireType::F32, chunks: chunks.clone() };
        runtime.block_on(ps.push(initial)).expect("version 0");
        Self { ps, chunks, next: 0 }
    }

    fn step(&mut self, runtime: &Runtime) {
        let node = StepNode { step: Step(self.next), node: Node::root(1), of: 1 };
        let target = Target::Node { node, samples: 1 };
        let push = Push { address: ADDRESS, target, wire: WireType::F32, chunks: self.chunks.clone() };
        runtime.block_on(self.ps.push(push)).expect("the next step");
        self.next += 1;
    }
}

/// Returns the next of a queue that threads share.
fn take<I: Iterator>(queue: &Mutex<I>) -> Option<I::Item> {
    queue.lock().unwrap_or_else(PoisonError::into_inner).next()
}
