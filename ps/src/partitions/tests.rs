//! What becomes of a partition on which work panics.

use std::panic::AssertUnwindSafe;

use bytes::Bytes;
use futures::FutureExt as _;
use proto::ids::PartitionId;
use proto::parameters::{Target, Want};
use proto::spec::JobSpec;
use proto::tensor::{Chunk, TensorRole, TensorSpec};
use proto::tree::{Node, StepNode};

use super::*;

fn address(era: u64) -> Address {
    Address { job: JobId(1), partition: PartitionId(0), era: Era(era) }
}

fn opening(era: u64) -> Opening {
    let spec = r#"{
        "name": "test", "epochs": 5, "model": { "builtin": "linear" },
        "data": { "format": "idx", "train": { "features": ["x"], "labels": ["y"] } },
        "batch": { "micro": 1, "effective": 2 }, "optimizer": { "kind": "adam", "learning_rate": 0.1 },
        "fleet": { "ps": 1 }
    }"#;
    let spec = JobSpec::from_json(spec).expect("a good job");
    let tensors = vec![TensorSpec::parameter("weight", [3])];
    let plan = spec.plan(2);
    Opening {
        address: address(era),
        partitions: 1,
        tensors,
        plan,
        spec,
        restore: None,
        homes: vec![],
        placement: 0,
        script: None,
    }
}

fn push(era: u64, target: Target) -> Push {
    let values = Bytes::from(vec![0; 3 * 4]);
    let chunks =
        vec![Chunk { id: proto::ids::ChunkId(0), role: TensorRole::Parameter, values: values.into() }];
    Push { address: address(era), target, wire: WireType::F32, chunks }
}

fn node(begin: u32) -> Target {
    let node = StepNode { step: Step(0), node: Node::new(begin, begin + 1), of: 2 };
    Target::Node { node, samples: 1 }
}

#[tokio::test]
async fn a_partition_whose_update_panics_is_held_no_more_and_can_be_opened_again() {
    let ps = Ps::new(Options::default()).expect("good options");
    ps.open(opening(0)).expect("a good opening");
    ps.push(push(0, Target::Initial)).await.expect("version 0");
    let pull = |era| Pull {
        address: address(era),
        want: Want::Exact(Version(1)),
        wait: Duration::from_secs(60),
        wire: WireType::F32,
        on_device: false,
    };
    let waiting = {
        let ps = ps.clone();
        tokio::spawn(async move { ps.pull(pull(0)).await })
    };
    while ps.metrics().pulls_waiting.get() == 0 {
        tokio::task::yield_now().await;
    }
    ps.find(address(0)).expect("open").spoil();
    ps.push(push(0, node(0))).await.expect("half a step");
    let panicked = AssertUnwindSafe(ps.push(push(0, node(1)))).catch_unwind().await;
    assert!(panicked.is_err(), "the update needs what was lost");

    // A worker that is told so tells the master, which asks for the ledger, and begins the
    // partition anew.
    let told = waiting.await.expect("no panic").expect_err("the version never comes");
    assert!(told.kind == Kind::NotFound && told.message.contains("panicked"), "{told}");
    let again = ps.push(push(0, node(1))).await.expect_err("it is not held");
    assert!(again.kind == Kind::NotFound && again.message.contains("panicked"), "{again}");
    assert!(matches!(ps.ledger(JobId(1)), Err(Error::UnknownJob { .. })));
    assert_eq!(ps.jobs().len(), 1, "until the master ends the job");
    for era in [0, 1] {
        assert_eq!(ps.open(opening(era)).expect("anew"), None);
        ps.push(push(era, Target::Initial)).await.expect("version 0");
        ps.push(push(era, node(0))).await.expect("half a step");
        ps.push(push(era, node(1))).await.expect("a step");
        assert_eq!(ps.pull(pull(era)).await.expect("it is there").version, Version(1));
    }
}
