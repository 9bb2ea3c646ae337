//! One step of one partition, from the first push to the answer of the last: sums along the tree,
//! then the update.
//!
//! The bound is memory. With S the size of the partition, momentum, and M = 4 leaves that come from
//! the wire (unaligned):
//!
//! | what                                          | moves |
//! | --------------------------------------------- | ----- |
//! | 0 + 1 and 2 + 3: copy one, add the other      | 10 S  |
//! | their sum                                     | 3 S   |
//! | update: weights, sum, velocity in and out     | 5 S   |
//!
//! so 18 S; and 8 S when one worker brings the whole step as one node (5 S for the update, 3 S for
//! copying what is not aligned, 5 S in all when it is). A pull moves nothing: it shares the
//! buffers.
//!
//! Expected with memcpy at 31 GiB/s a core out of the caches and 90 within (2 cores of an AMD EPYC,
//! see `optimizers.rs`), and measured there:
//!
//! | partition | leaves = 4         | leaves = 1         | pull   |
//! | --------- | ------------------ | ------------------ | ------ |
//! | 64 KiB    | 12 us, 13 us       | 5 us, 6 us         | 0.3 us |
//! | 1 MiB     | 0.20 ms, 0.18 ms   | 0.09 ms, 0.09 ms   | 0.3 us |
//! | 32 MiB    | 9 ms, 11 ms        | 4 ms, 5.4 ms       | 1.7 us |
//!
//! So a step costs what its memory traffic costs; locks, decisions and the thread that may block
//! are in the noise.

use std::hint::black_box;
use std::time::Duration;

use bytes::Bytes;
use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use proto::ids::{Era, JobId, PartitionId, Step, Version};
use proto::parameters::{Address, Parameters, Pull, Push, Target, Want};
use proto::placement::Layout;
use proto::spec::JobSpec;
use proto::tensor::{Chunk, TensorRole, TensorSpec};
use proto::tree::{Node, StepNode};
use proto::wire::WireType;
use ps::{Opening, Options, Ps};
use tokio::runtime::Runtime;

const SIZES: [(&str, usize); 3] = [("64KiB", 64 << 10), ("1MiB", 1 << 20), ("32MiB", 32 << 20)];

const SPEC: &str = r#"{
    "name": "bench", "epochs": 1, "model": { "builtin": "linear" },
    "data": { "format": "idx", "train": { "features": ["x"], "labels": ["y"] } },
    "batch": { "micro": 1, "effective": 4 },
    "optimizer": { "kind": "momentum", "learning_rate": 0.01 }
}"#;

const ADDRESS: Address = Address { job: JobId(1), partition: PartitionId(0), era: Era(0) };

/// Returns a ps with one partition at version 0, and a push's chunks that begin one byte off
/// alignment.
fn partition(runtime: &Runtime, bytes: usize) -> (Ps, Vec<Chunk>) {
    let tensors = vec![TensorSpec::parameter("weight", [bytes / 4])];
    let layout = Layout::new(tensors.clone(), 1).expect("a valid model");
    let spec = JobSpec::from_json(SPEC).expect("a valid specification");
    let ps = Ps::new(Options::default()).expect("valid options");
    ps.open(Opening {
        address: ADDRESS,
        partitions: 1,
        tensors,
        plan: spec.plan(1 << 40),
        spec,
        restore: None,
        homes: Vec::new(),
        placement: 0,
        script: None,
    })
    .expect("a valid opening");
    let chunk = |&id| {
        let values = Bytes::from(vec![0; layout.chunk_bytes(id) + 1]).slice(1..);
        Chunk { id, role: TensorRole::Parameter, values: values.into() }
    };
    let chunks: Vec<Chunk> = layout.members(ADDRESS.partition).iter().map(chunk).collect();
    let initial =
        Push { address: ADDRESS, target: Target::Initial, wire: WireType::F32, chunks: chunks.clone() };
    runtime.block_on(ps.push(initial)).expect("version 0");
    (ps, chunks)
}

fn step(criterion: &mut Criterion) {
    let runtime = Runtime::new().expect("a runtime");
    let leaves: Vec<Node> = (0..4).map(Node::leaf).collect();
    for (name, nodes) in [("step/leaves=4", leaves), ("step/leaves=1", vec![Node::root(4)])] {
        let mut group = criterion.benchmark_group(name);
        for (size, bytes) in SIZES {
            let (ps, chunks) = partition(&runtime, bytes);
            let mut steps = (0..).map(Step);
            group.throughput(Throughput::Bytes(bytes as u64));
            group.bench_function(BenchmarkId::from_parameter(format!("partition={size}")), |bencher| {
                bencher.iter(|| {
                    let step = steps.next().expect("endless");
                    for &node in &nodes {
                        let target = Target::Node {
                            node: StepNode { step, node, of: 4 },
                            samples: u64::from(node.len()),
                        };
                        let push =
                            Push { address: ADDRESS, target, wire: WireType::F32, chunks: chunks.clone() };
                        black_box(runtime.block_on(ps.push(push)).expect("the next step"));
                    }
                });
            });
        }
        group.finish();
    }
}

fn pull(criterion: &mut Criterion) {
    let runtime = Runtime::new().expect("a runtime");
    let mut group = criterion.benchmark_group("pull");
    for (size, bytes) in SIZES {
        let (ps, _) = partition(&runtime, bytes);
        let pull = Pull {
            address: ADDRESS,
            want: Want::Exact(Version(0)),
            wait: Duration::ZERO,
            wire: WireType::F32,
            on_device: false,
        };
        group.bench_function(BenchmarkId::from_parameter(format!("partition={size}")), |bencher| {
            bencher.iter(|| black_box(runtime.block_on(ps.pull(pull)).expect("version 0")));
        });
    }
    group.finish();
}

criterion_group!(benches, step, pull);
criterion_main!(benches);
