//! What only the inside of a partition shows.

use bytes::Bytes;
use proto::ids::{JobId, PartitionId};
use proto::parameters::{Outcome, Target};
use proto::spec::JobSpec;
use proto::tensor::TensorSpec;
use proto::tree::{Node, StepNode};

use super::push::{Arrived, Carrier};
use super::*;

fn partition(consistency: &str) -> Arc<Partition> {
    partition_of(consistency, r#"{ "kind": "adam", "learning_rate": 0.1 }"#, "fail")
}

fn partition_of(consistency: &str, optimizer: &str, on_error: &str) -> Arc<Partition> {
    let spec = format!(
        r#"{{
            "name": "test", "epochs": 50, "model": {{ "builtin": "linear" }},
            "data": {{
                "format": "idx", "train": {{ "features": ["x"], "labels": ["y"] }}, "on_error": "{on_error}"
            }},
            "batch": {{ "micro": 1, "effective": 4 }}, "optimizer": {optimizer},
            "consistency": {consistency}
        }}"#
    );
    let spec = JobSpec::from_json(&spec).unwrap();
    let address = Address { job: JobId(1), partition: PartitionId(0), era: Era(0) };
    let tensors = vec![TensorSpec::parameter("weight", [100]), TensorSpec::counter("count", [])];
    let opening = Opening {
        address,
        partitions: 1,
        tensors,
        plan: spec.plan(4),
        spec,
        restore: None,
        homes: vec![],
        placement: 0,
        script: None,
    };
    Arc::new(Partition::new(opening, 0, &Options::default(), Surroundings::default(), None).unwrap())
}

/// Values of the chunks that begin one byte off alignment, as from the wire.
fn values() -> [Bytes; 2] {
    [100 * 4, 8].map(|len| Bytes::from(vec![0; len + 1]).slice(1..))
}

/// Hands in a push as shared memory does: all chunks are present before the first is processed.
fn arrived(partition: &Partition, target: Target) -> Arrived {
    arrived_by(Carrier::Memory, partition, target)
}

/// Hands in a push as a socket does, one chunk after the other.
fn arrived_one_by_one(partition: &Partition, target: Target) -> Arrived {
    arrived_by(Carrier::Socket, partition, target)
}

fn arrived_by(carrier: Carrier, partition: &Partition, target: Target) -> Arrived {
    let mut arrived = partition.arriving(target, WireType::F32, carrier);
    // The last one comes first.
    for (place, values) in values().into_iter().enumerate().rev() {
        partition.arrive(&mut arrived, place, values.into());
    }
    arrived
}

fn node(step: u64, begin: u32, end: u32) -> Target {
    let node = StepNode { step: Step(step), node: Node::new(begin, end), of: 4 };
    Target::Node { node, samples: u64::from(end - begin) }
}

fn push(partition: &Arc<Partition>, step: u64, begin: u32, end: u32) -> Outcome {
    let target = node(step, begin, end);
    partition.check(Era(0), target, WireType::F32).unwrap();
    partition.push(Era(0), arrived_one_by_one(partition, target)).unwrap().outcome
}

/// Pushes a node that has `samples` records, the gradient `sum`, and the counter `count`.
fn push_bad(partition: &Arc<Partition>, step: u64, (begin, end): (u32, u32), samples: u64, sum: f32) {
    let Target::Node { node, .. } = node(step, begin, end) else { panic!("a node") };
    let target = Target::Node { node, samples };
    partition.check(Era(0), target, WireType::F32).unwrap();
    let mut arrived = partition.arriving(target, WireType::F32, Carrier::Socket);
    let gradient = sum.to_le_bytes().repeat(100);
    partition.arrive(&mut arrived, 1, Bytes::copy_from_slice(&5i64.to_le_bytes()).into());
    partition.arrive(&mut arrived, 0, Bytes::from(gradient).into());
    partition.push(Era(0), arrived).unwrap();
}

/// Returns the newest version, its first weight, and its counter.
fn newest(partition: &Partition) -> (Version, f32, i64) {
    let state = partition.state();
    let (version, weights) = state.versions.newest().unwrap();
    let [weight, counter] = [&weights[0], &weights[1]].map(|buffer| buffer.bytes().into_owned());
    let weight = f32::from_le_bytes(*weight.first_chunk().unwrap());
    (version, weight, i64::from_le_bytes(*counter.first_chunk().unwrap()))
}

#[test]
fn a_step_is_divided_by_the_records_of_its_nodes_and_without_any_changes_nothing() {
    let momentum = r#"{ "kind": "momentum", "momentum": 0.5, "learning_rate": 1.0 }"#;
    let partition = partition_of(r#"{ "mode": "sync" }"#, momentum, "skip");
    partition.push(Era(0), arrived(&partition, Target::Initial)).unwrap();
    push_bad(&partition, 0, (0, 1), 1, 6.0);
    push_bad(&partition, 0, (1, 2), 0, 0.0);
    push_bad(&partition, 0, (2, 4), 1, 2.0);
    assert_eq!(newest(&partition), (Version(1), -4.0, 5), "8 of 2 records, and not of 4");
    push_bad(&partition, 1, (2, 4), 0, 0.0);
    push_bad(&partition, 1, (0, 2), 0, 0.0);
    assert_eq!(newest(&partition), (Version(2), -4.0, 5), "a step without records has no momentum");
    push_bad(&partition, 2, (0, 4), 4, 0.0);
    assert_eq!(newest(&partition), (Version(3), -6.0, 5));
    let ledger = partition.applied().ledger;
    assert_eq!((ledger.samples_applied(), ledger.applied_steps().samples_skipped), (6, 6));
    assert_eq!((ledger.watermark(), ledger.microbatches_applied()), (Step(3), 12));
}

#[test]
fn only_a_job_that_skips_records_may_push_fewer_than_planned() {
    for (on_error, is_taken) in [("fail", false), ("skip", true)] {
        let adam = r#"{ "kind": "adam", "learning_rate": 0.1 }"#;
        let partition = partition_of(r#"{ "mode": "sync" }"#, adam, on_error);
        partition.push(Era(0), arrived(&partition, Target::Initial)).unwrap();
        let Target::Node { node, .. } = node(0, 0, 2) else { panic!("a node") };
        let checked = partition.check(Era(0), Target::Node { node, samples: 1 }, WireType::F32);
        assert_eq!(checked.is_ok(), is_taken, "{checked:?}");
        assert!(partition.check(Era(0), Target::Node { node, samples: 3 }, WireType::F32).is_err());
    }
}

#[test]
fn after_the_first_steps_no_buffer_is_allocated() {
    let partition = partition(r#"{ "mode": "pipelined", "delay": 2 }"#);
    partition.push(Era(0), arrived(&partition, Target::Initial)).unwrap();
    let step = |step| [(0, 1), (2, 3), (1, 2), (3, 4)].map(|(begin, end)| push(&partition, step, begin, end));
    let mut allocated = 0;
    for number in 0..40 {
        assert_eq!(step(number)[3], Outcome::Completed);
        if number == 8 {
            allocated = partition.dense.allocated();
        }
    }
    assert_eq!(partition.dense.allocated(), allocated);
}

#[test]
fn a_push_that_was_on_its_way_at_a_rewind_changes_nothing() {
    let partition = partition(r#"{ "mode": "sync" }"#);
    partition.push(Era(0), arrived(&partition, Target::Initial)).unwrap();
    push(&partition, 0, 0, 2);
    let target = node(0, 2, 4);
    // Its header is fine, then the partition of the next era takes the place, then its values are
    // there.
    partition.check(Era(0), target, WireType::F32).unwrap();
    partition.end(Life::Rewound(Era(1)));
    for target in [target, Target::Initial] {
        let refused = partition.push(Era(0), arrived(&partition, target)).unwrap_err();
        assert!(matches!(refused, Error::Fenced { sender: Era(0), here: Era(1), .. }), "{refused}");
    }
    assert_eq!(partition.applied().version, Some(Version(0)));
}

#[test]
fn nothing_is_left_of_an_applied_step() {
    let partition = partition(r#"{ "mode": "async" }"#);
    partition.push(Era(0), arrived(&partition, Target::Initial)).unwrap();
    push(&partition, 7, 0, 1);
    push(&partition, 3, 0, 2);
    push(&partition, 3, 2, 4);
    let state = partition.state();
    assert_eq!((state.aggregator.steps(), state.ready.len(), state.updating), (1, 0, false));
    assert_eq!(state.versions.newest().map(|(version, _)| version), Some(Version(1)));
}

#[test]
fn what_is_added_up_as_it_comes_counts_once_whatever_came_in_between() {
    let partition = partition(r#"{ "mode": "sync" }"#);
    partition.push(Era(0), arrived(&partition, Target::Initial)).unwrap();
    push(&partition, 0, 0, 1);
    // Two copies of the same node on their way at once; both are added to the one that is here.
    let (one, other) =
        (arrived_one_by_one(&partition, node(0, 1, 2)), arrived_one_by_one(&partition, node(0, 1, 2)));
    assert!(one.sibling.is_some() && other.sibling.is_some());
    assert_eq!(partition.push(Era(0), one).unwrap().outcome, Outcome::Merged);
    assert_eq!(partition.push(Era(0), other).unwrap().outcome, Outcome::Duplicate);
    // One whose sibling was replaced by a larger node, with the whole step, before it had come.
    push(&partition, 0, 2, 3);
    let late = arrived_one_by_one(&partition, node(0, 3, 4));
    assert_eq!(push(&partition, 0, 0, 4), Outcome::Completed);
    assert_eq!(partition.push(Era(0), late).unwrap().outcome, Outcome::Duplicate);
    assert_eq!(partition.applied().ledger.microbatches_applied(), 4);
}
