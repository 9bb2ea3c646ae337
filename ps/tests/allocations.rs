//! After its first steps a ps allocates no buffer: counted at the allocator of the whole process,
//! with all that a step does.
#![expect(unsafe_code, reason = "an allocator that counts")]

use std::alloc::{GlobalAlloc, Layout as Block, System};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use bytes::Bytes;
use proto::ids::{Era, JobId, PartitionId, Step, Version};
use proto::parameters::{Address, Outcome, Parameters, Pull, Push, Target, Want};
use proto::placement::Layout;
use proto::spec::JobSpec;
use proto::tensor::{Chunk, TensorRole, TensorSpec};
use proto::tree::{Node, StepNode};
use proto::wire::WireType;
use ps::{Opening, Options, Ps};

/// Smaller ones are no buffers of a chunk, which has 256 KiB here.
const BUFFER_BYTES_MIN: usize = 16 << 10;

static BUFFERS: AtomicUsize = AtomicUsize::new(0);

struct Counting;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn count(bytes: usize) {
    BUFFERS.fetch_add(usize::from(bytes >= BUFFER_BYTES_MIN), Ordering::Relaxed);
}

// SAFETY: all is left to the system's.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, block: Block) -> *mut u8 {
        count(block.size());
        // SAFETY: the caller's promise.
        unsafe { System.alloc(block) }
    }

    unsafe fn alloc_zeroed(&self, block: Block) -> *mut u8 {
        count(block.size());
        // SAFETY: the caller's promise.
        unsafe { System.alloc_zeroed(block) }
    }

    unsafe fn realloc(&self, memory: *mut u8, block: Block, bytes: usize) -> *mut u8 {
        count(bytes);
        // SAFETY: the caller's promise.
        unsafe { System.realloc(memory, block, bytes) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, block: Block) {
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(memory, block) }
    }
}

const MICROBATCHES: u32 = 4;
const JOB: JobId = JobId(1);
const PARTITION: Address = Address { job: JOB, partition: PartitionId(0), era: Era(0) };

#[test]
fn a_step_allocates_no_buffer_once_the_first_are_done() {
    let spec = r#"{
        "name": "test", "epochs": 50, "model": { "builtin": "linear" },
        "data": { "format": "idx", "train": { "features": ["x"], "labels": ["y"] } },
        "batch": { "micro": 1, "effective": 4 }, "optimizer": { "kind": "adam", "learning_rate": 0.1 }
    }"#;
    let spec = JobSpec::from_json(spec).unwrap();
    let tensors = ["one", "two", "three"].map(|name| TensorSpec::parameter(name, [64 << 10]));
    let layout = Layout::new(tensors.to_vec(), 1).unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let _entered = runtime.enter();
    let ps = Ps::new(Options::default()).unwrap();
    let plan = spec.plan(u64::from(MICROBATCHES));
    let (tensors, homes) = (tensors.to_vec(), Vec::new());
    let opening = Opening {
        address: PARTITION,
        partitions: 1,
        tensors,
        plan,
        spec,
        restore: None,
        homes,
        placement: 0,
        script: None,
    };
    ps.open(opening).unwrap();

    let members = layout.members(PARTITION.partition);
    let values = members.iter().map(|&id| (id, Bytes::from(vec![0; 4 * layout.chunk(id).len])));
    let chunks: Vec<_> =
        values.map(|(id, values)| Chunk { id, role: TensorRole::Parameter, values: values.into() }).collect();
    let push = |target| {
        let push = Push { address: PARTITION, target, wire: WireType::F32, chunks: chunks.clone() };
        runtime.block_on(ps.push(push)).unwrap()
    };
    push(Target::Initial);
    let mut counts = Vec::new();
    for step in 0..40 {
        let before = BUFFERS.load(Ordering::Relaxed);
        let outcomes = [0, 2, 1, 3].map(|index| {
            let node = StepNode { step: Step(step), node: Node::leaf(index), of: MICROBATCHES };
            push(Target::Node { node, samples: 1 }).outcome
        });
        assert_eq!(outcomes[3], Outcome::Completed);
        let want = Want::Exact(Version(step + 1));
        let pulled = runtime
            .block_on(ps.pull(Pull {
                address: PARTITION,
                want,
                wait: Duration::ZERO,
                wire: WireType::F32,
                on_device: false,
            }))
            .unwrap();
        assert_eq!(pulled.chunks.len(), chunks.len());
        counts.push(BUFFERS.load(Ordering::Relaxed) - before);
    }
    assert!(counts[0] > 0, "nothing was counted: {counts:?}");
    assert!(counts[8..].iter().all(|&count| count == 0), "buffers allocated in each step: {counts:?}");
}
