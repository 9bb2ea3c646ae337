//! The whole way over a socket: push, pull, wait, health, reflection, shutdown.

use std::time::Duration;

use kernels::cpu::cast;
use net::channel::{Dialer, Purpose};
use proto::convert::{encode, pack, pack_as};
use proto::ids::{PartitionId, Step, Version};
use proto::parameters::{Outcome, Parameters, Pull, Push, Target, Want};
use proto::pb;
use proto::pb::push_request::Part;
use proto::placement::CHUNK_LEN;
use proto::status::Kind;
use proto::tensor::{Chunk, ChunkValues, TensorSpec, Values};
use proto::tree::Node;
use proto::wire::WireType;
use serde_json::json;
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;
use tonic_reflection::pb::v1::ServerReflectionRequest;
use tonic_reflection::pb::v1::server_reflection_client::ServerReflectionClient;
use tonic_reflection::pb::v1::server_reflection_request::MessageRequest;
use tonic_reflection::pb::v1::server_reflection_response::MessageResponse;
use tonic_reflection::pb::v1alpha;

use crate::harness::{Job, Shape, options, soon, until};
use crate::served::{Served, header};

const PARTITION: PartitionId = PartitionId(0);

/// 7 MiB in two partitions, one of them waiting for a wake-up on a pipelined version.
fn large() -> Job {
    large_in(WireType::F32)
}

fn large_in(wire: WireType) -> Job {
    Job::new(Shape {
        tensors: vec![
            TensorSpec::parameter("embedding", [4 * CHUNK_LEN + 3]),
            TensorSpec::state("mean", [300]),
            TensorSpec::counter("batches", []),
            TensorSpec::parameter("head", [2 * CHUNK_LEN, 1]),
        ],
        partitions: 2,
        records: 8,
        consistency: json!({ "mode": "pipelined" }),
        wire,
        ..Shape::default()
    })
}

#[tokio::test]
async fn what_travels_in_16_bits_is_half_of_the_bytes_and_has_the_bits_of_what_does_not_travel() {
    for wire in [WireType::Bf16, WireType::F16] {
        let job = large_in(wire);
        let served = Served::initialized(&job, options()).await;
        let reference = job.reference(Version(2));
        let metrics = served.ps.metrics();
        for partition in job.partitions() {
            let whole = job.layout.partition_bytes(partition) as u64;
            let narrow = job.layout.partition_bytes_in(partition, wire) as u64;
            assert!(narrow < whole * 6 / 10, "{narrow} of {whole}");
            // Some come over the connection, others from a worker of this process; leaves 0 and 1
            // meet on their way in.
            let pushes = [
                (0, Node::leaf(0), true),
                (0, Node::leaf(1), true),
                (0, Node::new(2, 4), false),
                (1, Node::new(2, 4), true),
                (1, Node::leaf(0), false),
                (1, Node::leaf(1), true),
            ];
            for (step, node, travels) in pushes {
                let (push, before) = (job.push(partition, Step(step), node), metrics.push_bytes.get());
                if travels {
                    served.client.push(push).await.unwrap();
                } else {
                    served.ps.push(push).await.unwrap();
                }
                assert_eq!(metrics.push_bytes.get() - before, if travels { narrow } else { whole });
            }
            let mut rounded = reference[2].clone();
            job.round(&mut rounded);
            assert!(rounded != reference[2], "rounding must show");
            let pull = job.pull(partition, Want::AtLeast(Version(2)));
            for (pull, expected, bytes) in
                [(pull, &reference[2], whole), (Pull { wire, ..pull }, &rounded, narrow)]
            {
                let before = metrics.pull_bytes.get();
                let mut pulled = served.client.pull(&job, pull).await.unwrap();
                for chunk in &mut pulled.chunks {
                    chunk.values = widened(chunk, pull.wire);
                }
                job.assert_pulled(partition, &pulled, expected);
                assert_eq!(metrics.pull_bytes.get() - before, bytes);
            }
        }
    }
}

/// Returns the values of a chunk that came in 16 bits, as f32.
fn widened(chunk: &Chunk, wire: WireType) -> ChunkValues {
    let wire = wire.of(chunk.role);
    if !wire.rounds() {
        return chunk.values.clone();
    }
    let mut values = vec![0.0f32; chunk.values.len() / 2];
    cast::decode(wire, chunk.values.host(), &mut values);
    Values::F32(values).into()
}

#[tokio::test]
async fn what_does_not_fit_the_type_of_exchange_is_refused_whole() {
    let job = Job::new(Shape { wire: WireType::Bf16, ..Shape::default() });
    let served = Served::initialized(&job, options()).await;
    let push = job.push(PARTITION, Step(0), Node::new(0, 2));
    let (node, initial) = (header(&push), job.push_initial(PARTITION));
    let whole = || pack(push.chunks.clone()).map(Part::Chunks);
    let edited = |edit: &dyn Fn(&mut pb::PushHeader)| {
        let Part::Header(mut header) = node.clone() else { unreachable!("made just now") };
        edit(&mut header);
        Part::Header(header)
    };
    let root = Node::root(4);
    let Target::Node { node: of_root, samples } = job.target(Step(0), root) else { unreachable!("a node") };
    let of_root = pb::Node { step: 0, begin: 0, end: 4, of: of_root.of, samples };
    for (first, message) in [
        (node.clone(), "`weight` has 60 bytes, the layout says 30 (15 values of 2 bytes)"),
        (
            edited(&|header| header.wire = 2),
            "PushHeader.wire: expected f32 or bf16 by the job's exchange.dtype, found f16",
        ),
        (
            edited(&|header| header.wire = 9),
            "PushHeader.wire: expected 0 (f32), 1 (bf16) or 2 (f16), found 9",
        ),
        (
            edited(&|header| header.target = Some(pb::push_header::Target::Node(of_root))),
            "expected its two halves",
        ),
        (header(&Push { wire: WireType::Bf16, ..initial }), "expected f32 for version 0"),
    ] {
        let parts = std::iter::once(first).chain(whole()).collect();
        let failure = served.client.push_parts(parts).await.unwrap_err();
        assert_eq!(failure.kind, Kind::Malformed, "{failure}");
        assert!(failure.message.contains(message), "{failure}");
    }
    let narrow =
        pack_as(push.chunks.clone(), |chunk| encode(cast::encode_chunk(push.wire, chunk))).map(Part::Chunks);
    let parts = std::iter::once(edited(&|header| header.wire = 0)).chain(narrow).collect();
    let failure = served.client.push_parts(parts).await.unwrap_err();
    assert!(
        failure.message.contains("`weight` has 30 bytes, the layout says 60 (15 values of 4 bytes)"),
        "{failure}"
    );
    let pull = Pull { wire: WireType::F16, ..job.pull(PARTITION, Want::Exact(Version(0))) };
    let failure = served.client.pull(&job, pull).await.unwrap_err();
    assert!(failure.message.contains("PullRequest.wire: expected f32 or bf16"), "{failure}");
    assert_eq!(served.ps.metrics().push_bytes_in_flight.get(), 0);
    assert_eq!(served.client.push(push).await.unwrap().outcome, Outcome::Merged, "nothing had changed");
}

#[tokio::test]
async fn a_model_of_several_chunks_survives_the_round_trip_in_both_partitions() {
    let job = large();
    let served = Served::initialized(&job, options()).await;
    let reference = job.reference(Version(2));
    for partition in job.partitions() {
        let pulled = served.client.pull(&job, job.pull(partition, Want::Exact(Version(0)))).await.unwrap();
        job.assert_pulled(partition, &pulled, &reference[0]);
        for (step, node) in [(0, Node::new(0, 2)), (0, Node::leaf(2)), (1, Node::root(4)), (0, Node::leaf(3))]
        {
            served.client.push(job.push(partition, Step(step), node)).await.unwrap();
        }
        let pulled = served.client.pull(&job, job.pull(partition, Want::AtLeast(Version(1)))).await.unwrap();
        assert_eq!(pulled.version, Version(2));
        job.assert_pulled(partition, &pulled, &reference[2]);
        let repeat = served.client.push(job.push(partition, Step(0), Node::leaf(2))).await.unwrap();
        assert_eq!((repeat.outcome, repeat.version), (Outcome::Duplicate, Version(2)));
    }
    let request = pb::LedgerRequest { job: job.id.get() };
    let ledger = served.client.0.clone().ledger(request).await.unwrap().into_inner();
    let expected = |partition| pb::PartitionLedger {
        partition,
        version: Some(2),
        watermark: 2,
        microbatches_applied: 8,
        samples_applied: 16,
        duplicates_dropped: 1,
        ..Default::default()
    };
    assert_eq!(ledger.partitions, [expected(0), expected(1)]);
    let close = pb::CloseRequest { job: job.id.get(), ..Default::default() };
    served.client.0.clone().close(close).await.unwrap();
    served.client.0.clone().close(close).await.expect("unknown jobs are fine");
    assert_eq!(served.client.0.clone().ledger(request).await.unwrap_err().code(), tonic::Code::NotFound);
}

#[tokio::test]
async fn a_waiting_pull_wakes_when_its_version_appears() {
    let job = large();
    let served = Served::initialized(&job, options()).await;
    let pull = Pull { wait: Duration::from_secs(60), ..job.pull(PARTITION, Want::Exact(Version(1))) };
    let waiting: Vec<_> = (0..3)
        .map(|_| {
            let (client, job) = (served.client.clone(), job.clone());
            tokio::spawn(async move { client.pull(&job, pull).await })
        })
        .collect();
    until("three pulls wait", || served.ps.metrics().pulls_waiting.get() == 3).await;
    served.client.push(job.push_step(PARTITION, Step(0))).await.unwrap();
    let reference = job.reference(Version(1));
    for pull in waiting {
        let pulled = soon(pull).await.unwrap().unwrap();
        job.assert_pulled(PARTITION, &pulled, &reference[1]);
    }
}

#[tokio::test]
async fn a_pull_that_waits_in_vain_is_told_not_yet_and_one_too_late_gone() {
    let job = Job::new(Shape::default());
    let served = Served::initialized(&job, options()).await;
    let want = Want::Exact(Version(1));
    let pull = Pull { wait: Duration::from_millis(20), ..job.pull(PARTITION, want) };
    let failure = served.client.pull(&job, pull).await.unwrap_err();
    assert_eq!(failure.kind, Kind::NotYet);
    assert!(failure.message.contains("version 1 did not come within 20ms; it is at version 0"), "{failure}");
    for step in (0..3).map(Step) {
        served.client.push(job.push_step(PARTITION, step)).await.unwrap();
    }
    let failure = served.client.pull(&job, pull).await.unwrap_err();
    assert_eq!(failure.kind, Kind::Gone);
    assert_eq!(served.ps.metrics().pulls_refused.get(), 2);
}

#[tokio::test]
async fn pins_are_released_over_the_wire() {
    let job = Job::new(Shape { evaluates: true, ..Shape::default() });
    let served = Served::initialized(&job, options()).await;
    for step in (0..5).map(Step) {
        served.client.push(job.push_step(PARTITION, step)).await.unwrap();
    }
    let pull = job.pull(PARTITION, Want::Exact(Version(2)));
    let pulled = served.client.pull(&job, pull).await.unwrap();
    job.assert_pulled(PARTITION, &pulled, &job.reference(Version(2))[2]);
    let unpin = pb::UnpinRequest { job: job.id.get(), version: 2, era: 0, keep: 0 };
    served.client.0.clone().unpin(unpin).await.unwrap();
    assert_eq!(served.client.pull(&job, pull).await.unwrap_err().kind, Kind::Gone);
    let unknown = pb::UnpinRequest { job: 99, version: 2, era: 0, keep: 0 };
    assert_eq!(served.client.0.clone().unpin(unknown).await.unwrap_err().code(), tonic::Code::NotFound);
}

#[tokio::test]
async fn health_and_reflection_answer() {
    let served = Served::new(options()).await;
    let url = format!("http://{}", served.address);
    let channel = Dialer::tcp().channel(&url, Purpose::Control).unwrap();
    let service = "ebbflow.v1.Parameters".to_owned();
    let reply = HealthClient::new(channel.clone()).check(HealthCheckRequest { service }).await.unwrap();
    assert_eq!(reply.into_inner().status(), ServingStatus::Serving);

    let list = MessageRequest::ListServices(String::new());
    let request = ServerReflectionRequest { host: String::new(), message_request: Some(list) };
    let mut reflection = ServerReflectionClient::new(channel.clone());
    let replies = reflection.server_reflection_info(tokio_stream::iter([request])).await.unwrap();
    let reply = replies.into_inner().message().await.unwrap().expect("an answer").message_response;
    let Some(MessageResponse::ListServicesResponse(list)) = reply else { panic!("{reply:?}") };
    let names: Vec<_> = list.service.into_iter().map(|service| service.name).collect();
    for name in ["ebbflow.v1.Parameters", "grpc.health.v1.Health"] {
        assert!(names.iter().any(|found| found == name), "{names:?}");
    }

    // As older clients ask.
    let list = v1alpha::server_reflection_request::MessageRequest::ListServices(String::new());
    let request = v1alpha::ServerReflectionRequest { host: String::new(), message_request: Some(list) };
    let mut reflection = v1alpha::server_reflection_client::ServerReflectionClient::new(channel);
    let replies = reflection.server_reflection_info(tokio_stream::iter([request])).await.unwrap();
    let reply = replies.into_inner().message().await.unwrap().expect("an answer").message_response;
    let Some(v1alpha::server_reflection_response::MessageResponse::ListServicesResponse(list)) = reply else {
        panic!("{reply:?}")
    };
    assert!(list.service.iter().any(|service| service.name == "ebbflow.v1.Parameters"), "{list:?}");
}

#[tokio::test]
async fn shutdown_answers_waiting_pulls_and_ends_the_server() {
    let job = Job::new(Shape::default());
    let mut served = Served::initialized(&job, options()).await;
    let pull = Pull { wait: Duration::from_secs(600), ..job.pull(PARTITION, Want::Exact(Version(1))) };
    let waiting = tokio::spawn({
        let (client, job) = (served.client.clone(), job.clone());
        async move { client.pull(&job, pull).await }
    });
    until("a pull waits", || served.ps.metrics().pulls_waiting.get() > 0).await;
    served.stop.cancel();
    let failure = soon(waiting).await.unwrap().unwrap_err();
    assert_eq!(failure.kind, Kind::Unavailable);
    assert!(failure.message.contains("shutting down"), "{failure}");
    soon(&mut served.task).await.unwrap().unwrap();
    let refused = served.client.push(job.push_step(PARTITION, Step(0))).await.unwrap_err();
    assert!(refused.is_retryable(), "{refused}");
}

#[tokio::test]
async fn a_push_under_way_at_the_shutdown_may_finish_and_a_stuck_one_does_not_hold_it_up() {
    let job = Job::new(Shape::default());
    let mut served = Served::initialized(&job, options()).await;
    let (push, other) =
        (job.push(PARTITION, Step(0), Node::leaf(0)), job.push(PARTITION, Step(0), Node::leaf(1)));
    let (one, stuck) = (served.begin(&push).await, served.begin(&other).await);
    served.stop.cancel();
    assert_eq!(one.finish(&push).await.unwrap().outcome, Outcome::Merged);
    soon(&mut served.task).await.unwrap().unwrap();
    drop(stuck);
}

#[tokio::test]
async fn a_large_push_that_is_refused_at_its_header_still_learns_why() {
    let job = large();
    let served = Served::new(options()).await;
    for _ in 0..20 {
        let failure = served.client.push(job.push_initial(PARTITION)).await.unwrap_err();
        assert_eq!(failure.kind, Kind::NotFound, "{failure}");
    }
    served.client.0.clone().open(job.open_request(PARTITION)).await.unwrap();
    let pushed = served.client.push(job.push_initial(PARTITION)).await.unwrap();
    assert_eq!(pushed.outcome, Outcome::Completed);
}
