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
    let spec = format!(
        r#"{{
            "name": "test", "epochs": 50, "model": {{ "builtin": "linear" }},
            "data": {{ "format": "idx", "train": {{ "features": ["x"], "labels": ["y"] }} }},
            "batch": {{ "micro": 1, "effective": 4 }}, "optimizer": {{ "kind": "adam", "learning_rate": 0.1 }},
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
    };
    Arc::new(Partition::new(opening, 0, &Options::default(), Surroundings::default()).unwrap())
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
    values().into_iter().for_each(|values| partition.arrive(&mut arrived, values));
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
