//! A push that is wrong in any way is refused whole: the state is as it was, and the right push
//! still gives the right bits.

use bytes::Bytes;
use proptest::prelude::*;
use proto::ids::{ChunkId, Era, JobId, PartitionId, Step, Version};
use proto::parameters::{Outcome, Parameters, Push, Target, Want};
use proto::pb;
use proto::pb::push_request::Part;
use proto::status::{Failure, Kind};
use proto::tensor::{Chunk, TensorRole, TensorSpec};
use proto::tree::{Node, StepNode};
use ps::Ps;

use crate::harness::{Job, Shape, opened, options};
use crate::served::Served;

const PARTITION: PartitionId = PartitionId(0);

type Wrong = (&'static str, Kind, &'static str, fn(&mut Push));

/// What can be wrong: a name, how it is answered, a part of the message, the edit that makes it
/// wrong.
const WRONG: [Wrong; 16] = [
    ("another job", Kind::NotFound, "job 9 partition 0", |push| push.address.job = JobId(9)),
    ("another partition", Kind::NotFound, "partition 7", |push| push.address.partition = PartitionId(7)),
    ("a newer era", Kind::Unavailable, "era 1", |push| push.address.era = Era(1)),
    ("a missing chunk", Kind::Malformed, "chunk the end where chunk", |push| drop(push.chunks.pop())),
    ("the first chunk missing", Kind::Malformed, "where chunk 0 belongs", |push| drop(push.chunks.remove(0))),
    ("no chunk", Kind::Malformed, "chunk the end where chunk 0", |push| push.chunks.clear()),
    ("a foreign chunk", Kind::Malformed, "chunk 77 where chunk", |push| push.chunks[1].id = ChunkId(77)),
    ("the first chunk twice", Kind::Malformed, "chunk 0 where chunk 1 belongs", |push| {
        push.chunks[1] = push.chunks[0].clone();
    }),
    ("a chunk twice", Kind::Malformed, "where chunk the end belongs", |push| {
        let again: Chunk = push.chunks.last().expect("chunks").clone();
        push.chunks.push(again);
    }),
    ("a short chunk", Kind::Malformed, "has 4 bytes", |push| {
        push.chunks.last_mut().expect("chunks").values = vec![0; 4].into();
    }),
    ("other samples", Kind::Malformed, "Node.samples", |push| with_node(push, |_, samples| *samples += 1)),
    ("another M", Kind::Malformed, "Node.of", |push| with_node(push, |node, _| node.of = 9)),
    ("a step after the last", Kind::Malformed, "Node.step", |push| {
        with_node(push, |node, _| node.step = Step(99));
    }),
    ("no node of the tree", Kind::Malformed, "Node.range", |push| {
        with_node(push, |node, _| node.node = Node::new(1, 3));
    }),
    ("another step's M", Kind::Malformed, "Node.of", |push| with_node(push, |node, _| node.step = Step(1))),
    ("a step ahead", Kind::Malformed, "no worker can have computed it yet", |push| {
        with_node(push, |node, _| node.step = Step(2));
    }),
];

fn with_node(push: &mut Push, edit: impl FnOnce(&mut StepNode, &mut u64)) {
    let Target::Node { node, samples } = &mut push.target else { panic!("a node is pushed") };
    edit(node, samples);
}

/// Returns everything that can be seen of a partition.
async fn seen(ps: &Ps, job: &Job) -> (Vec<ps::Applied>, Vec<Bytes>, u64) {
    let pulled = ps.pull(job.pull(PARTITION, Want::AtLeast(Version(0)))).await.expect("version 0 is there");
    let weights = pulled.chunks.into_iter().map(|chunk| chunk.values.host().clone()).collect();
    (ps.ledger(job.id).expect("open"), weights, ps.metrics().push_bytes_in_flight.get())
}

#[tokio::test]
async fn a_wrong_push_is_refused_whole_in_the_process_and_on_the_wire() {
    let job = Job::new(Shape::default());
    let served = Served::initialized(&job, options()).await;
    let ps = &served.ps;
    // One half is here: the refused pushes must neither complete nor replace it.
    ps.push(job.push(PARTITION, Step(0), Node::new(0, 2))).await.unwrap();
    let before = seen(ps, &job).await;
    for (name, kind, message, edit) in WRONG {
        let mut push = job.push(PARTITION, Step(0), Node::new(2, 4));
        edit(&mut push);
        for failure in [ps.push(push.clone()).await.unwrap_err(), served.client.push(push).await.unwrap_err()]
        {
            assert_eq!(failure.kind, kind, "{name}: {failure}");
            assert!(failure.message.contains(message), "{name}: {failure}");
        }
        assert_eq!(seen(ps, &job).await, before, "{name}");
    }
    assert_eq!(ps.metrics().pushes_refused.get(), 2 * WRONG.len() as u64);
    let mut push = job.push(PARTITION, Step(0), Node::new(2, 4));
    // Chunks come in any order.
    push.chunks.reverse();
    let pushed = served.client.push(push).await.unwrap();
    assert_eq!((pushed.outcome, pushed.version), (Outcome::Completed, Version(1)));
    let pulled = ps.pull(job.pull(PARTITION, Want::Exact(Version(1)))).await.unwrap();
    job.assert_pulled(PARTITION, &pulled, &job.reference(Version(1))[1]);
}

#[tokio::test]
async fn a_push_before_version_0_is_told_to_come_back() {
    let job = Job::new(Shape::default());
    let ps = opened(&job, options());
    let failure = ps.push(job.push_step(PARTITION, Step(0))).await.unwrap_err();
    assert_eq!(failure.kind, Kind::Unavailable, "{failure}");
    let mut short = job.push_initial(PARTITION);
    short.chunks.pop();
    assert_eq!(ps.push(short).await.unwrap_err().kind, Kind::Malformed);
    let failure = ps.pull(job.pull(PARTITION, Want::Exact(Version(0)))).await.unwrap_err();
    assert_eq!(failure.kind, Kind::NotYet);
    assert!(failure.message.contains("no version yet"), "{failure}");
}

#[tokio::test]
async fn a_stream_that_is_no_push_is_refused() {
    let job = Job::new(Shape::default());
    let served = Served::initialized(&job, options()).await;
    let push = job.push_step(PARTITION, Step(0));
    let header = || Part::Header((push.address, push.target).into());
    let chunks = || proto::convert::pack(push.chunks.clone()).map(Part::Chunks);
    let streams = [
        ("nothing", vec![]),
        ("no header", chunks().collect()),
        ("two headers", vec![header(), header()]),
        ("a header at the end", std::iter::once(header()).chain(chunks()).chain([header()]).collect()),
        ("no target", vec![Part::Header(pb::PushHeader { job: 1, ..Default::default() })]),
    ];
    for (name, parts) in streams {
        let failure = served.client.push_parts(parts).await.unwrap_err();
        assert_eq!(failure.kind, Kind::Malformed, "{name}: {failure}");
    }
    assert_eq!(served.ps.metrics().push_bytes_in_flight.get(), 0);
    assert_eq!(served.client.push(push.clone()).await.unwrap().outcome, Outcome::Completed);
}

#[tokio::test]
async fn an_open_request_that_contradicts_itself_is_refused() {
    let job = Job::new(Shape::default());
    let served = Served::new(options()).await;
    let refuse = async |edit: &dyn Fn(&mut pb::OpenRequest)| {
        let mut request = job.open_request(PARTITION);
        edit(&mut request);
        let failure = Failure::from(served.client.0.clone().open(request).await.unwrap_err());
        assert_eq!(failure.kind, Kind::Malformed, "{failure}");
        failure.message
    };
    assert!(refuse(&|request| request.plan = None).await.contains("OpenRequest.plan"));
    assert!(refuse(&|request| request.plan.as_mut().unwrap().records = 0).await.contains("Plan.records"));
    assert!(refuse(&|request| request.plan.as_mut().unwrap().epochs = 99).await.contains("epochs: 99"));
    assert!(refuse(&|request| request.partitions = u32::MAX).await.contains("expected 1, found 4294967295"));
    assert!(refuse(&|request| request.partition = 1).await.contains("expected a number below 1, found 1"));
    assert!(refuse(&|request| request.tensors.clear()).await.contains("no tensors"));
    assert!(refuse(&|request| request.tensors[0].name = "bias".to_owned()).await.contains("`bias`"));
    assert!(refuse(&|request| request.spec_json = "{}".to_owned()).await.contains("job specification"));
    let huge = refuse(&|request| request.tensors[0].shape = vec![1 << 40, 1 << 40]).await;
    assert!(huge.contains("partition_bytes_max"), "{huge}");
    assert_eq!(served.ps.metrics().partitions.get(), 0);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn chunks_of_any_ids_and_sizes_never_change_the_state_unless_they_are_right(
        chunks in proptest::collection::vec((0u32..5, 0usize..8), 0..5),
    ) {
        let tensors = vec![TensorSpec::parameter("a", [2]), TensorSpec::counter("b", []), TensorSpec::state("c", [1])];
        let job = Job::new(Shape { tensors, ..Shape::default() });
        let right = chunks == [(0, 2), (1, 2), (2, 1)];
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        runtime.block_on(async {
            let ps = opened(&job, options());
            ps.push(job.push_initial(PARTITION)).await.unwrap();
            let before = seen(&ps, &job).await;
            let chunk = |&(id, words): &(u32, usize)| {
                let role = [TensorRole::Parameter, TensorRole::Counter, TensorRole::State].get(id as usize).copied();
                let values = vec![0; words * 4].into();
                Chunk { id: ChunkId(id), role: role.unwrap_or(TensorRole::Parameter), values }
            };
            let push = Push { chunks: chunks.iter().map(chunk).collect(), ..job.push_step(PARTITION, Step(0)) };
            assert_eq!(ps.push(push).await.is_ok(), right);
            assert_eq!(seen(&ps, &job).await == before, !right);
        });
    }
}
