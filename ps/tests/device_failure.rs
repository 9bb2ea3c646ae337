//! A device that fails: the ps gives out nothing that was computed since, and ends with the reason.

use std::time::Duration;

use bytes::Bytes;
use net::channel::Dialer;
use proto::ids::{Era, JobId, PartitionId, Step, Version};
use proto::parameters::{Address, Parameters, Pull, Push, Target, Want};
use proto::spec::JobSpec;
use proto::tensor::{Chunk, TensorRole, TensorSpec};
use proto::tree::{Node, StepNode};
use proto::wire::WireType;
use ps::{Device, Opening, Options, Ps};
use store::Stores;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use self::fake::Driver;

#[allow(dead_code, unreachable_pub, reason = "shared with the tests of the kernels")]
#[path = "../../kernels/tests/cuda/fake.rs"]
mod fake;
#[allow(unreachable_pub, reason = "shared with the tests of the kernels")]
#[path = "../../kernels/tests/cuda/library.rs"]
mod library;
#[allow(dead_code, unreachable_pub, reason = "shared with the tests of the whole program")]
#[path = "../../tests/harness/skip.rs"]
mod skip;

/// The driver's error for an access to memory that is not there.
const ILLEGAL_ADDRESS: i32 = 700;
const ADDRESS: Address = Address { job: JobId(1), partition: PartitionId(0), era: Era(0) };
const LENGTH: usize = 1000;

const SPEC: &str = r#"{
    "name": "test", "epochs": 1, "model": { "builtin": "linear" },
    "data": { "format": "idx", "train": { "features": ["x"], "labels": ["y"] } },
    "batch": { "micro": 1, "effective": 4 },
    "optimizer": { "kind": "adam", "learning_rate": 0.01 }
}"#;

fn opening() -> Opening {
    let spec = JobSpec::from_json(SPEC).expect("a valid specification");
    Opening {
        address: ADDRESS,
        partitions: 1,
        tensors: vec![TensorSpec::parameter("weight", [LENGTH])],
        plan: spec.plan(400),
        spec,
        restore: None,
        homes: Vec::new(),
        placement: 0,
        script: None,
    }
}

fn push(target: Target) -> Push {
    let layout = proto::placement::Layout::new(opening().tensors, 1).expect("a model");
    let id = layout.members(PartitionId(0))[0];
    let values = Bytes::from(vec![0; 4 * LENGTH]);
    let chunks = vec![Chunk { id, role: TensorRole::Parameter, values: values.into() }];
    Push { address: ADDRESS, target, wire: WireType::F32, chunks }
}

const fn step(step: u64) -> Target {
    Target::Node { node: StepNode { step: Step(step), node: Node::root(4), of: 4 }, samples: 4 }
}

const fn pull(version: u64) -> Pull {
    let want = Want::Exact(Version(version));
    Pull { address: ADDRESS, want, wait: Duration::ZERO, wire: WireType::F32, on_device: false }
}

/// One test, because it breaks the driver of this process.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_ps_whose_device_fails_gives_out_nothing_more_and_ends_with_the_reason() {
    library::load_nvrtc();
    let driver = Driver::load();
    let device = match Device::cuda(0, None) {
        Ok(device) => device,
        Err(kernels::Error::NoCompiler) => {
            return skip::skipped(skip::Lacks::Package, "no NVRTC: no ps used a device");
        }
        Err(error) => panic!("{error}"),
    };
    // Nobody answers there.
    let master = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let url = |listener: &TcpListener| format!("http://{}", listener.local_addr().expect("an address"));
    let options = Options { master: url(&master), url: url(&listener), ..Options::default() };
    let ps = Ps::on(device, options, Stores::default(), None).expect("valid options");
    let stop = CancellationToken::new();
    let running =
        tokio::spawn(ps::run(ps.clone(), net::channel::accept(listener), Dialer::tcp(), stop.clone()));

    ps.open(opening()).expect("room");
    ps.push(push(Target::Initial)).await.expect("version 0");
    ps.push(push(step(0))).await.expect("a step");
    ps.pull(pull(1)).await.expect("version 1");
    driver.breaks(ILLEGAL_ADDRESS);
    // Whether it is acknowledged does not matter: the ps that comes next does not have it.
    let _ = ps.push(push(step(1))).await;
    for version in 0..=2 {
        assert!(ps.pull(pull(version)).await.is_err(), "version {version} of a device that failed");
    }
    ps.push(push(step(2))).await.expect_err("nothing is held");
    let ended = tokio::time::timeout(Duration::from_secs(120), running).await.expect("it ends");
    let error = ended.expect("no panic").expect_err("the device's failure").to_string();
    assert!(
        error.starts_with("the device of this ps failed, and its partitions are lost: CUDA device 0 "),
        "{error}"
    );
}
