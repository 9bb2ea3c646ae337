//! What only the inside of a partition shows.

use bytes::Bytes;
use proto::ids::JobId;
use proto::parameters::{Outcome, Target};
use proto::tree::StepNode;

use super::*;

fn model(consistency: &str) -> Arc<Partition> {
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
    let opening =
        Opening { address, partitions: 1, tensors, plan: spec.plan(4), spec, restore: None, homes: vec![] };
    Arc::new(Partition::new(opening, 0, &Options::default(), Surroundings::default()).unwrap())
}

/// Values that begin one byte off alignment, as from the wire.
fn chunks() -> Vec<Chunk> {
    let values = [100 * 4, 8].map(|len| Bytes::from(vec![0; len + 1]).slice(1..));
    let roles = [Role::Parameter, Role::Counter];
    let chunk = |(id, (role, values))| Chunk { id: ChunkId(id), role, values };
    (0..).zip(roles.into_iter().zip(values)).map(chunk).collect()
}

fn arrived(target: Target) -> Arrived {
    Arrived::at_once(target, chunks())
}

/// As from the wire, one chunk after the other.
fn arrived_one_by_one(model: &Partition, target: Target) -> Arrived {
    let mut arrived = model.arriving(target, WireType::F32);
    chunks().into_iter().for_each(|chunk| model.arrive(&mut arrived, chunk));
    arrived
}

fn node(step: u64, begin: u32, end: u32) -> Target {
    let node = StepNode { step: Step(step), node: proto::tree::Node::new(begin, end), of: 4 };
    Target::Node { node, samples: u64::from(end - begin) }
}

fn push(model: &Arc<Partition>, step: u64, begin: u32, end: u32) -> Outcome {
    let target = node(step, begin, end);
    model.check(Era(0), target, WireType::F32).unwrap();
    model.push(Era(0), arrived_one_by_one(model, target)).unwrap().outcome
}

#[test]
fn after_the_first_steps_no_buffer_is_allocated() {
    let model = model(r#"{ "mode": "pipelined", "delay": 2 }"#);
    model.push(Era(0), arrived(Target::Initial)).unwrap();
    let step = |step| [(0, 1), (2, 3), (1, 2), (3, 4)].map(|(begin, end)| push(&model, step, begin, end));
    let mut allocated = 0;
    for number in 0..40 {
        assert_eq!(step(number)[3], Outcome::Completed);
        if number == 8 {
            allocated = model.pool.allocated();
        }
    }
    assert_eq!(model.pool.allocated(), allocated);
}

#[test]
fn a_push_that_was_on_its_way_at_a_rewind_changes_nothing() {
    let model = model(r#"{ "mode": "sync" }"#);
    model.push(Era(0), arrived(Target::Initial)).unwrap();
    push(&model, 0, 0, 2);
    let target = node(0, 2, 4);
    // Its header is fine, then the partition of the next era takes the place, then its values are there.
    model.check(Era(0), target, WireType::F32).unwrap();
    model.end(Life::Rewound(Era(1)));
    for target in [target, Target::Initial] {
        let refused = model.push(Era(0), arrived(target)).unwrap_err();
        assert!(matches!(refused, Error::Fenced { sender: Era(0), here: Era(1), .. }), "{refused}");
    }
    assert_eq!(model.applied().version, Some(Version(0)));
}

#[test]
fn nothing_is_left_of_an_applied_step() {
    let model = model(r#"{ "mode": "async" }"#);
    model.push(Era(0), arrived(Target::Initial)).unwrap();
    push(&model, 7, 0, 1);
    push(&model, 3, 0, 2);
    push(&model, 3, 2, 4);
    let state = model.state();
    assert_eq!((state.aggregator.steps(), state.ready.len(), state.updating), (1, 0, false));
    assert_eq!(state.versions.newest().map(|(version, _)| version), Some(Version(1)));
}

#[test]
fn what_is_added_up_as_it_comes_counts_once_whatever_came_in_between() {
    let model = model(r#"{ "mode": "sync" }"#);
    model.push(Era(0), arrived(Target::Initial)).unwrap();
    push(&model, 0, 0, 1);
    // Two copies of the same node on their way at once; both are added to the one that is here.
    let (one, other) = (arrived_one_by_one(&model, node(0, 1, 2)), arrived_one_by_one(&model, node(0, 1, 2)));
    assert!(one.sibling.is_some() && other.sibling.is_some());
    assert_eq!(model.push(Era(0), one).unwrap().outcome, Outcome::Merged);
    assert_eq!(model.push(Era(0), other).unwrap().outcome, Outcome::Duplicate);
    // One whose sibling was replaced by a larger node, with the whole step, before it had come.
    push(&model, 0, 2, 3);
    let late = arrived_one_by_one(&model, node(0, 3, 4));
    assert_eq!(push(&model, 0, 0, 4), Outcome::Completed);
    assert_eq!(model.push(Era(0), late).unwrap().outcome, Outcome::Duplicate);
    assert_eq!(model.applied().ledger.microbatches_applied(), 4);
}
