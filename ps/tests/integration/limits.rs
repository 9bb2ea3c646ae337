//! Everything has a limit, and the answer beyond it names the limit.

use std::time::Duration;

use bytes::Bytes;
use proto::ids::{ChunkId, JobId, PartitionId, Step, Version};
use proto::parameters::{Outcome, Parameters, Want};
use proto::pb;
use proto::pb::push_request::Part;
use proto::status::{Failure, Kind};
use proto::tensor::TensorSpec;
use proto::tree::Node;
use ps::Options;
use serde_json::json;
use tokio_stream::wrappers::ReceiverStream;

use crate::harness::{self, Job, Shape, opened, options, until};
use crate::served::Served;

const PARTITION: PartitionId = PartitionId(0);

#[tokio::test]
async fn pushes_beyond_the_bytes_in_flight_are_told_to_come_back() {
    let job = Job::new(Shape::default());
    let bytes = job.layout.partition_bytes(PARTITION) as u64;
    let limits = Options { push_bytes_max: 2 * bytes, partition_bytes_max: bytes, ..options() };
    let served = Served::initialized(&job, limits).await;
    // A push whose chunks do not come occupies its bytes.
    let push = job.push(PARTITION, Step(0), Node::leaf(0));
    let (one, two) = (served.begin(&push).await, served.begin(&push).await);
    let failure = served.client.push(push.clone()).await.unwrap_err();
    assert_eq!(failure.kind, Kind::Full);
    assert!(failure.is_retryable() && failure.message.contains("push_bytes_max"), "{failure}");

    // One ends with its chunks, the other is given up: both make room.
    assert_eq!(one.finish(&push).await.unwrap().outcome, Outcome::Merged);
    drop(two);
    until("all pushes have ended", || served.ps.metrics().push_bytes_in_flight.get() == 0).await;
    assert_eq!(served.client.push(push.clone()).await.unwrap().outcome, Outcome::Duplicate);
}

#[tokio::test]
async fn a_push_whose_chunks_do_not_come_is_ended() {
    let job = Job::new(Shape::default());
    let limits = Options { push_timeout: Duration::from_millis(20), ..options() };
    let served = Served::new(limits).await;
    served.ps.open(job.opening(PARTITION)).unwrap();
    // Not over the wire, where 20 ms may be too short for it.
    served.ps.push(job.push_initial(PARTITION)).await.unwrap();
    let push = job.push_step(PARTITION, Step(0));
    let (sender, receiver) = tokio::sync::mpsc::channel(9);
    sender
        .send(pb::PushRequest { part: Some(Part::Header((push.address, push.target).into())) })
        .await
        .unwrap();
    let failure =
        Failure::from(served.client.0.clone().push(ReceiverStream::new(receiver)).await.unwrap_err());
    assert_eq!(failure.kind, Kind::Unavailable);
    assert!(failure.message.contains("push_timeout"), "{failure}");
    assert_eq!(served.ps.metrics().push_bytes_in_flight.get(), 0);
    drop(sender);
}

#[tokio::test]
async fn a_push_whose_chunks_have_not_come_ends_with_its_job() {
    let job = Job::new(Shape::default());
    // Without a sibling, and with one, to which another thread adds what comes.
    for has_sibling in [false, true] {
        let served = Served::initialized(&job, options()).await;
        if has_sibling {
            served.client.push(job.push(PARTITION, Step(0), Node::leaf(1))).await.unwrap();
        }
        let push = job.push(PARTITION, Step(0), Node::leaf(0));
        let begun = served.begin(&push).await;
        served.ps.close(job.id);
        until("its room is free", || served.ps.metrics().push_bytes_in_flight.get() == 0).await;
        let failure = begun.finish(&push).await.unwrap_err();
        assert_eq!(failure.kind, Kind::NotFound, "{failure}");
    }
}

#[tokio::test]
async fn a_message_beyond_the_limit_is_refused() {
    let tensors = vec![TensorSpec::parameter("weight", [6 * proto::placement::CHUNK_LEN])];
    let job = Job::new(Shape { tensors, ..Shape::default() });
    let served = Served::initialized(&job, options()).await;
    let push = job.push_step(PARTITION, Step(0));
    // All chunks are right, and in one message.
    let chunks = push.chunks.iter().map(|chunk| pb::Chunk {
        id: chunk.id.get(),
        values: chunk.values.host().clone(),
        region: None,
    });
    let chunks = Part::Chunks(pb::Chunks { chunks: chunks.collect() });
    let header = Part::Header((push.address, push.target).into());
    let failure = served.client.push_parts(vec![header.clone(), chunks]).await.unwrap_err();
    assert_eq!(failure.kind, Kind::Malformed, "{failure}");
    assert!(failure.message.contains("too large"), "{failure}");
    // One chunk that is larger than any.
    let values = Bytes::from(vec![0; 3 << 20]);
    let large =
        Part::Chunks(pb::Chunks { chunks: vec![pb::Chunk { id: ChunkId(0).get(), values, region: None }] });
    let failure = served.client.push_parts(vec![header, large]).await.unwrap_err();
    assert!(failure.message.contains("has 3145728 bytes, the layout says 1048576"), "{failure}");
    assert_eq!(served.ps.metrics().push_bytes_in_flight.get(), 0);
    assert_eq!(served.client.push(push).await.unwrap().outcome, Outcome::Completed);
}

#[tokio::test]
async fn a_job_too_many_and_a_partition_too_large_are_refused() {
    let job = Job::new(Shape { partitions: 2, ..Shape::default() });
    let bytes = job.layout.partition_bytes(PARTITION) as u64;
    let ps = opened(&job, Options { jobs_max: 1, ..options() });
    let other = Job { id: JobId(2), ..job.clone() };
    let failure = Failure::from(ps.open(other.opening(PARTITION)).unwrap_err());
    assert_eq!(failure.kind, Kind::Full);
    assert!(failure.message.contains("jobs_max"), "{failure}");
    ps.close(job.id);
    assert_eq!(ps.open(other.opening(PARTITION)).unwrap(), None);

    let small = harness::ps(Options { partition_bytes_max: bytes - 1, ..options() }).unwrap();
    let failure = Failure::from(small.open(job.opening(PARTITION)).unwrap_err());
    assert_eq!(failure.kind, Kind::Malformed);
    assert!(failure.message.contains(&format!("{bytes} bytes of weights")), "{failure}");
}

#[tokio::test]
async fn steps_in_progress_are_bounded_in_arrival_order() {
    let job = Job::new(Shape { consistency: json!({ "mode": "async" }), ..Shape::default() });
    let ps = opened(&job, Options { steps_in_progress_max: 2, ..options() });
    ps.push(job.push_initial(PARTITION)).await.unwrap();
    for step in [2, 4].map(Step) {
        ps.push(job.push(PARTITION, step, Node::leaf(0))).await.unwrap();
    }
    let failure = ps.push(job.push_step(PARTITION, Step(0))).await.unwrap_err();
    assert_eq!(failure.kind, Kind::Full);
    assert!(failure.message.contains("steps_in_progress_max"), "{failure}");
    for leaf in 1..4 {
        ps.push(job.push(PARTITION, Step(2), Node::leaf(leaf))).await.unwrap();
    }
    ps.push(job.push_step(PARTITION, Step(0))).await.unwrap();
    ps.push(job.push(PARTITION, Step(1), Node::leaf(0))).await.unwrap();
    // A late copy of an applied step is a duplicate, not one step more.
    assert_eq!(ps.push(job.push_step(PARTITION, Step(2))).await.unwrap().outcome, Outcome::Duplicate);
}

#[tokio::test]
async fn sums_that_wait_count_and_what_the_oldest_step_lacks_first_is_taken() {
    let job = Job::new(Shape::default());
    let bytes = job.layout.partition_bytes(PARTITION) as u64;
    let ps = opened(&job, Options { push_bytes_max: 2 * bytes, partition_bytes_max: bytes, ..options() });
    ps.push(job.push_initial(PARTITION)).await.unwrap();
    for leaf in [1, 3] {
        ps.push(job.push(PARTITION, Step(0), Node::leaf(leaf))).await.unwrap();
    }
    assert_eq!(ps.metrics().push_bytes_held.get(), 2 * bytes);
    let failure = ps.push(job.push(PARTITION, Step(0), Node::leaf(2))).await.unwrap_err();
    assert!(failure.kind == Kind::Full && failure.message.contains("waiting for others"), "{failure}");
    // From the left the step comes to its end all the same.
    for leaf in [0, 2] {
        ps.push(job.push(PARTITION, Step(0), Node::leaf(leaf))).await.unwrap();
    }
    assert_eq!((ps.metrics().push_bytes_held.get(), ps.metrics().updates.get()), (0, 1));
    ps.push(job.push(PARTITION, Step(1), Node::leaf(1))).await.unwrap();
    assert_eq!(ps.metrics().push_bytes_held.get(), bytes);
    ps.close(job.id);
    assert_eq!(ps.metrics().push_bytes_held.get(), 0);
}

#[tokio::test]
async fn what_is_applied_already_is_taken_also_when_there_is_no_room() {
    let job = Job::new(Shape::default());
    let bytes = job.layout.partition_bytes(PARTITION) as u64;
    let ps = opened(&job, Options { push_bytes_max: bytes, partition_bytes_max: bytes, ..options() });
    ps.push(job.push_initial(PARTITION)).await.unwrap();
    let leaves = || (0..4).map(|leaf| job.push(PARTITION, Step(0), Node::leaf(leaf)));
    for push in leaves() {
        ps.push(push).await.unwrap();
    }
    ps.push(job.push(PARTITION, Step(1), Node::leaf(1))).await.unwrap();
    assert_eq!(ps.metrics().push_bytes_held.get(), bytes);
    // The holder of a copy repeats what is applied before it comes to what is lacking.
    for push in leaves() {
        assert_eq!(ps.push(push).await.unwrap().outcome, Outcome::Duplicate);
    }
    assert_eq!(ps.metrics().push_bytes_held.get(), bytes);
}

#[tokio::test]
async fn versions_that_are_read_for_long_are_bounded() {
    let job = Job::new(Shape::default());
    let ps = opened(&job, Options { pulled_versions_max: 1, ..options() });
    ps.push(job.push_initial(PARTITION)).await.unwrap();
    let pull = |version| ps.pull(job.pull(PARTITION, Want::Exact(Version(version))));
    let slow = pull(0).await.unwrap();
    for step in 0..3 {
        ps.push(job.push_step(PARTITION, Step(step))).await.unwrap();
    }
    let failure = pull(3).await.unwrap_err();
    assert!(failure.kind == Kind::Full && failure.message.contains("pulled_versions_max"), "{failure}");
    drop(slow);
    assert_eq!(pull(3).await.unwrap().version, Version(3));
}
