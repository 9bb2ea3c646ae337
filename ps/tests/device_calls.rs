//! What an update and a pull ask of a device does not grow with the number of chunks: launches,
//! waits of the host, and allocations.
//!
//! The driver of `kernels/tests/cuda/driver.cpp` counts them.

use std::time::Duration;

use net::memory::{Memory, REGION_BYTES_MIN};
use proto::ids::{Era, JobId, PartitionId, Step, Version};
use proto::parameters::{Address, Outcome, Parameters, Pull, Push, Target, Want};
use proto::placement::Layout;
use proto::spec::JobSpec;
use proto::tensor::{Chunk, TensorSpec};
use proto::tree::{Node, StepNode};
use proto::wire::WireType;
use ps::{Device, Opening, Options, Ps};
use serde_json::json;
use store::Stores;

use self::fake::{Call, Driver};

#[allow(dead_code, unreachable_pub, reason = "shared with the tests of the kernels")]
#[path = "../../kernels/tests/cuda/fake.rs"]
mod fake;
#[allow(unreachable_pub, reason = "shared with the tests of the kernels")]
#[path = "../../kernels/tests/cuda/library.rs"]
mod library;
#[allow(dead_code, unreachable_pub, reason = "shared with the tests of the whole program")]
#[path = "../../tests/harness/skip.rs"]
mod skip;

const PARTITION: PartitionId = PartitionId(0);

/// Steps until every buffer has been used once, and the one that is counted.
const STEPS: u64 = 8;

/// Launches, waits and allocations.
type Calls = [i64; 3];

/// A job with a ps of its own. Each tensor is a chunk, and has another length.
struct Job {
    opening: Opening,
    ps: Ps,
}

/// One test, because the driver counts the calls of all threads.
#[tokio::test]
async fn an_update_and_a_pull_make_as_many_calls_for_many_chunks_as_for_one() {
    library::load_nvrtc();
    let driver = Driver::load();
    let device = match Device::cuda(0, None) {
        Ok(device) => device,
        Err(kernels::Error::NoCompiler) => {
            return skip::skipped(skip::Lacks::Package, "no NVRTC: no call was counted");
        }
        Err(error) => panic!("{error}"),
    };
    let group = json!([{ "tensors": ["w0"], "learning_rate": 0.1 }]);
    let optimizers = [
        (json!({ "kind": "adam", "learning_rate": 0.01, "groups": group }), [1, 2, 1]),
        (json!({ "kind": "momentum", "learning_rate": 0.01, "clip_norm": 0.5 }), [2, 4, 3]),
        (json!({ "kind": "lamb", "learning_rate": 0.01 }), [2, 4, 3]),
    ];
    for (optimizer, expected) in optimizers {
        for chunks in [1, 23] {
            let lengths: Vec<_> = (100..100 + chunks).collect();
            let job = Job::new(&device, &optimizer, &lengths, None);
            assert_eq!(job.update(driver).await, expected, "{optimizer}, {chunks} chunks");
            assert_eq!(job.pull(driver).await, [0, 1, 0], "a pull of {chunks} chunks");
        }
    }
    memory_in_which_workers_read_weights_is_locked_once(driver, &device).await;
}

/// The pages of each buffer are locked when it is made, and unlocked before its memory is given
/// back. A driver that locks none is no failure.
async fn memory_in_which_workers_read_weights_is_locked_once(driver: &Driver, device: &Device) {
    const OUT_OF_MEMORY: i32 = 2;
    let sgd = json!({ "kind": "sgd", "learning_rate": 0.01 });
    let large = REGION_BYTES_MIN / 4;
    for refused in [0, i64::MAX] {
        let memory = Memory::new().expect("memory for other processes");
        let job = Job::new(device, &sgd, &[large, large + 1, 3], Some(memory));
        driver.fail(c"cuMemHostRegister_v2", 0, refused, OUT_OF_MEMORY);
        job.update(driver).await;
        job.pull(driver).await;
        let counted = || [c"cuMemHostRegister_v2", c"cuMemHostUnregister"].map(|call| driver.calls(call));
        let [locked, unlocked] = counted();
        // Two large chunks of a version, of which few are held at once.
        assert!((2..=8).contains(&locked) && unlocked == 0, "{locked} locked, {unlocked} unlocked");
        drop(job);
        device.settle().expect("nothing failed");
        let expected = if refused == 0 { locked } else { 0 };
        assert_eq!(counted(), [locked, expected], "each is given back once");
    }
}

impl Job {
    fn new(
        device: &Device,
        optimizer: &serde_json::Value,
        lengths: &[usize],
        memory: Option<Memory>,
    ) -> Self {
        let spec = json!({
            "name": "test", "epochs": 1, "model": { "builtin": "linear" },
            "data": { "format": "idx", "train": { "features": ["x"], "labels": ["y"] } },
            "batch": { "micro": 1, "effective": 2 },
            "optimizer": optimizer,
        });
        let spec = JobSpec::from_json(&spec.to_string()).expect("a valid specification");
        let tensors = lengths.iter().enumerate();
        let tensors = tensors.map(|(number, length)| TensorSpec::parameter(format!("w{number}"), [*length]));
        let opening = Opening {
            address: Address { job: JobId(1), partition: PARTITION, era: Era(0) },
            partitions: 1,
            tensors: tensors.collect(),
            plan: spec.plan(2 * STEPS),
            spec,
            restore: None,
            homes: Vec::new(),
            placement: 0,
            script: None,
        };
        let ps =
            Ps::on(device.clone(), Options::default(), Stores::default(), memory).expect("valid options");
        ps.open(opening.clone()).expect("room");
        Self { opening, ps }
    }

    /// Trains, and returns the calls of the last step's update: those of the push that makes it,
    /// less those of the push before it, which brings as many values.
    async fn update(&self, driver: &Driver) -> Calls {
        assert_eq!(self.push(driver, Target::Initial).await.0, Outcome::Completed);
        let mut last = Calls::default();
        for step in 0..STEPS {
            let leaf = |leaf| StepNode { step: Step(step), node: Node::leaf(leaf), of: 2 };
            let [first, second] = [0, 1].map(|number| Target::Node { node: leaf(number), samples: 1 });
            let (held, before) = self.push(driver, first).await;
            let (completed, with_update) = self.push(driver, second).await;
            assert_eq!((held, completed), (Outcome::Merged, Outcome::Completed), "step {step}");
            last = [0, 1, 2].map(|kind| with_update[kind] - before[kind]);
            if step + 1 < STEPS {
                self.pull_version(step + 1).await;
            }
        }
        last
    }

    /// Pulls the last version, and returns the calls.
    async fn pull(&self, driver: &Driver) -> Calls {
        driver.count();
        self.pull_version(STEPS).await;
        calls(driver)
    }

    async fn push(&self, driver: &Driver, target: Target) -> (Outcome, Calls) {
        let layout = Layout::new(self.opening.tensors.clone(), 1).expect("a model");
        let chunk = |id| {
            let (role, len) = (layout.tensor_of(id).role, layout.chunk(id).len);
            Chunk { id, role, values: vec![0; 4 * len].into() }
        };
        let chunks = layout.members(PARTITION).iter().copied().map(chunk).collect();
        let push = Push { address: self.opening.address, target, wire: WireType::F32, chunks };
        driver.count();
        let outcome = self.ps.push(push).await.expect("a push").outcome;
        (outcome, calls(driver))
    }

    async fn pull_version(&self, version: u64) {
        let (address, want) = (self.opening.address, Want::Exact(Version(version)));
        let pull = Pull { address, want, wait: Duration::ZERO, wire: WireType::F32, on_device: false };
        self.ps.pull(pull).await.expect("a version");
    }
}

fn calls(driver: &Driver) -> Calls {
    [Call::Launch, Call::Wait, Call::Allocation].map(|call| driver.called(call))
}
