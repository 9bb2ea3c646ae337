//! The memory of a device: what a partition is promised, and what is refused.

use kernels::Device;
use proto::ids::{Era, JobId, PartitionId, Step, Version};
use proto::parameters::{Parameters, Want};
use proto::placement::CHUNK_LEN;
use proto::status::{Failure, Kind};
use proto::tensor::TensorSpec;
use proto::tree::Node;
use ps::{Options, Ps};
use serde_json::json;
use store::Stores;

use crate::harness::{Job, Shape, options};

const PARTITION: PartitionId = PartitionId(0);
const MIB: u64 = 1 << 20;

/// Returns a job with a model of `mib` MiB and Adam, which has two slots.
fn job(id: u64, mib: usize) -> Job {
    let shape = Shape {
        tensors: vec![TensorSpec::parameter("weight", [mib * CHUNK_LEN])],
        microbatches_per_step: 8,
        records: 48,
        epochs: 1,
        ..Shape::default()
    };
    Job { id: JobId(id), ..Job::new(shape) }
}

/// Returns a ps on the device whose partitions may take so many MiB.
fn ps_with(device: Device, mib: u64) -> Ps {
    let options = Options { device_bytes_max: Some(mib * MIB), ..options() };
    Ps::on(device, options, Stores::default(), None).expect("valid options")
}

/// Trains all steps from single leaves, and compares each version.
async fn train(ps: &Ps, job: &Job) {
    ps.push(job.push_initial(PARTITION)).await.expect("version 0");
    let steps = job.plan.steps();
    let reference = job.reference(Version(steps));
    for step in (0..steps).map(Step) {
        // Every second one at first: no sum can be made, and all wait.
        for leaf in [0, 2, 4, 6, 1, 3, 5, 7] {
            ps.push(job.push(PARTITION, step, Node::leaf(leaf))).await.expect("a leaf");
        }
        let pulled = ps.pull(job.pull(PARTITION, Want::Exact(step.produces()))).await.expect("a version");
        job.assert_pulled(PARTITION, &pulled, &reference[step.produces().get() as usize]);
    }
}

#[tokio::test]
async fn a_partition_that_does_not_fit_is_refused_with_the_figures_until_another_one_ends() {
    let Some(device) = crate::cuda() else { return };
    // Two versions and two slots: 8 MiB of a model of 2 MiB.
    let ps = ps_with(device, 12);
    let (first, second, large) = (job(1, 2), job(2, 2), job(3, 4));
    assert_eq!(ps.open(first.opening(PARTITION)).expect("room"), None);
    let refused = Failure::from(ps.open(second.opening(PARTITION)).expect_err("no room"));
    assert_eq!(refused.kind, Kind::Full, "it is worth asking again");
    let expected = format!(
        "need {} bytes on cuda:0 (a host that plays a device), which has {} left of {}",
        8 * MIB,
        4 * MIB,
        12 * MIB
    );
    assert!(refused.message.contains(&expected), "{refused}");
    assert!(refused.message.contains("fleet.ps") && refused.message.contains("--device cpu"), "{refused}");
    let never = Failure::from(ps.open(large.opening(PARTITION)).expect_err("no device"));
    assert_eq!(never.kind, Kind::Malformed, "it will never fit");

    train(&ps, &first).await;
    ps.close(first.id);
    assert_eq!(ps.open(second.opening(PARTITION)).expect("room again"), None);
    train(&ps, &second).await;
}

#[tokio::test]
async fn sums_that_find_no_room_on_the_device_lie_on_the_host_and_have_the_same_bits() {
    let Some(device) = crate::cuda() else { return };
    // Room for nothing but versions and slots, then for one sum, then for all.
    for mib in [8, 10, 64] {
        let ps = ps_with(device.clone(), mib);
        let job = job(1, 2);
        ps.open(job.opening(PARTITION)).expect("room");
        train(&ps, &job).await;
    }
}

#[tokio::test]
async fn a_partition_of_a_new_era_takes_over_the_memory_of_the_one_before() {
    let Some(device) = crate::cuda() else { return };
    let ps = ps_with(device, 8);
    for era in 0..3 {
        let job = Job { era: Era(era), ..job(1, 2) };
        assert_eq!(ps.open(job.opening(PARTITION)).expect("room"), None);
        train(&ps, &job).await;
    }
}

#[tokio::test]
async fn a_limit_beyond_what_is_free_is_refused() {
    let Some(device) = crate::cuda() else { return };
    let options = Options { device_bytes_max: Some(1 << 40), ..options() };
    let refused =
        Ps::on(device, options, Stores::default(), None).expect_err("no device has that").to_string();
    assert!(refused.starts_with("device_bytes_max = 1099511627776: cuda:0 "), "{refused}");
}

#[tokio::test]
async fn versions_that_wait_for_their_evaluation_do_not_fill_the_device() {
    let Some(device) = crate::cuda() else { return };
    // Three versions and two slots.
    let ps = ps_with(device, 10);
    let shape = Shape {
        tensors: vec![TensorSpec::parameter("weight", [2 * CHUNK_LEN])],
        microbatches_per_step: 1,
        records: 4,
        epochs: 8,
        optimizer: json!({ "kind": "adam", "learning_rate": 0.01 }),
        evaluates: true,
        ..Shape::default()
    };
    let job = Job::new(shape);
    ps.open(job.opening(PARTITION)).expect("room");
    ps.push(job.push_initial(PARTITION)).await.expect("version 0");
    let steps = job.plan.steps();
    let reference = job.reference(Version(steps));
    for step in (0..steps).map(Step) {
        ps.push(job.push_step(PARTITION, step)).await.expect("a step");
    }
    for version in (1..=steps).filter(|&version| job.plan.ends_epoch(Version(version))) {
        let pulled = ps.pull(job.pull(PARTITION, Want::Exact(Version(version)))).await.expect("a version");
        job.assert_pulled(PARTITION, &pulled, &reference[version as usize]);
    }
}
