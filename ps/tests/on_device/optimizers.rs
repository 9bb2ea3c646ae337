//! Every optimizer makes the bits of the serial reference, which is computed on the host.

use proto::ids::{PartitionId, Step, Version};
use proto::optimizer::OptimizerKind;
use proto::parameters::{Outcome, Parameters, Want};
use proto::placement::CHUNK_LEN;
use proto::tensor::TensorSpec;
use proto::tree::Node;
use proto::wire::WireType;
use serde_json::json;

use crate::harness::{Job, Shape, opened, options};

const PARTITION: PartitionId = PartitionId(0);

/// Two chunks of one tensor, the last of them shorter, and every role.
fn tensors() -> Vec<TensorSpec> {
    vec![
        TensorSpec::parameter("weight", [CHUNK_LEN + 33]),
        TensorSpec::state("mean", [7]),
        TensorSpec::counter("batches", []),
        TensorSpec::parameter("bias", [1]),
    ]
}

#[tokio::test]
async fn every_optimizer_makes_the_bits_of_the_host_from_every_wire_type() {
    for kind in OptimizerKind::ALL {
        for wire in [WireType::F32, WireType::Bf16, WireType::F16] {
            let groups = json!([{ "tensors": ["bias"], "learning_rate": 0.1 }]);
            let optimizer = json!({ "kind": kind, "learning_rate": 0.03, "groups": groups });
            let shape =
                Shape { tensors: tensors(), records: 16, epochs: 1, optimizer, wire, ..Shape::default() };
            let job = Job::new(shape);
            let ps = opened(&job, options());
            ps.push(job.push_initial(PARTITION)).await.expect("version 0");
            let steps = job.plan.steps();
            for step in (0..steps).map(Step) {
                // In an order in which some meet their sibling and others wait.
                for leaf in [3, 0, 1, 2] {
                    ps.push(job.push(PARTITION, step, Node::leaf(leaf))).await.expect("a leaf");
                }
                let again = ps.push(job.push(PARTITION, step, Node::leaf(1))).await.expect("a repeat");
                assert_eq!(again.outcome, Outcome::Duplicate);
            }
            let reference = job.reference(Version(steps));
            let pulled = ps.pull(job.pull(PARTITION, Want::Exact(Version(steps)))).await.expect("a version");
            job.assert_pulled(PARTITION, &pulled, &reference[steps as usize]);
        }
    }
}

#[tokio::test]
async fn a_pulled_version_stays_as_it_is_while_training_goes_on() {
    let job = Job::new(Shape { tensors: tensors(), records: 80, epochs: 1, ..Shape::default() });
    let ps = opened(&job, options());
    ps.push(job.push_initial(PARTITION)).await.expect("version 0");
    let steps = job.plan.steps();
    let reference = job.reference(Version(steps));
    let mut held = Vec::new();
    for step in (0..steps).map(Step) {
        let pulls = [(); 2].map(|()| ps.pull(job.pull(PARTITION, Want::Exact(Version(step.get())))));
        let [one, other] = pulls.map(|pull| pull);
        let (one, other) = tokio::join!(one, other);
        let (one, other) = (one.expect("a version"), other.expect("a version"));
        let address = |pulled: &proto::parameters::Pulled| pulled.chunks[0].values.host().as_ptr();
        assert_eq!(address(&one), address(&other), "both read one copy");
        held.push(one);
        ps.push(job.push_step(PARTITION, step)).await.expect("a step");
    }
    for pulled in &held {
        job.assert_pulled(PARTITION, pulled, &reference[pulled.version.get() as usize]);
    }
}
