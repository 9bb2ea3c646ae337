//! Steps that need norms over the whole model: each ps asks the others, and nobody can tell how
//! many there were.

use std::time::Duration;

use proptest::prelude::*;
use proto::ids::{Era, PartitionId, Step, Version};
use proto::loss_scale::LossScale;
use proto::parameters::{Pull, Want};
use proto::pb;
use proto::placement::CHUNK_LEN;
use proto::status::{Failure, Kind};
use proto::tensor::TensorSpec;
use proto::tree::Node;
use ps::Options;
use serde_json::{Value, json};

use crate::harness::{self, Job, Shape, covers, opened, options, soon, until};
use crate::served::Served;

/// Updates that measure: of the whole gradient, with and without being clipped, and of each tensor.
/// The last two have groups.
fn optimizers() -> [Value; 5] {
    let groups = json!([{ "tensors": ["b*"], "learning_rate": 0.03, "weight_decay": 0.2 }]);
    [
        json!({ "kind": "adam", "learning_rate": 0.01, "clip_norm": 0.5 }),
        json!({ "kind": "momentum", "learning_rate": 0.1, "clip_norm": 1e6 }),
        json!({ "kind": "lamb", "learning_rate": 0.01 }),
        json!({ "kind": "adamw", "learning_rate": 0.01, "clip_norm": 0.5, "groups": groups }),
        json!({ "kind": "lamb", "learning_rate": 0.01, "groups": groups }),
    ]
}

/// Several ps, one for each partition of a job.
struct Fleet {
    job: Job,
    ps: Vec<Served>,
}

impl Fleet {
    /// Starts a ps for each partition of a job. The partitions are not open yet.
    async fn new(shape: Shape, options: Options) -> Self {
        let mut job = Job::new(shape);
        let mut ps = Vec::new();
        for _ in job.partitions() {
            ps.push(Served::new(options.clone()).await);
        }
        job.homes = ps.iter().map(|ps| format!("http://{}", ps.address)).collect();
        Self { job, ps }
    }

    /// Starts a ps for each partition of a job and brings each partition to version 0.
    async fn initialized(shape: Shape, options: Options) -> Self {
        let fleet = Self::new(shape, options).await;
        for partition in fleet.job.partitions() {
            fleet.open(partition).await;
        }
        fleet
    }

    /// Opens a partition and brings it to version 0.
    async fn open(&self, partition: PartitionId) {
        let client = &self.ps[partition.index()].client;
        client.0.clone().open(self.job.open_request(partition)).await.expect("a valid request");
        client.push(self.job.push_initial(partition)).await.expect("version 0");
    }

    async fn push(&self, partition: PartitionId, step: Step, node: Node) -> Result<(), Failure> {
        self.ps[partition.index()].client.push(self.job.push(partition, step, node)).await.map(drop)
    }

    /// Brings the whole step to all partitions and checks the version that they make of it.
    async fn train(&self, step: Step, nodes: &[Node]) {
        for partition in self.job.partitions() {
            for &node in nodes {
                self.push(partition, step, node).await.expect("taken up");
            }
        }
        let version = Version(step.get() + 1);
        let reference = self.job.reference(version);
        for partition in self.job.partitions() {
            let pulled = self.pull(partition, version).await;
            self.job.assert_pulled(partition, &pulled, &reference[version.get() as usize]);
        }
    }

    /// Trains all steps. `nodes` are those of a step of 4 microbatches.
    async fn train_all(&self, nodes: &[Node]) {
        for step in (0..self.job.plan.steps()).map(Step) {
            match self.job.plan.of(step) {
                4 => self.train(step, nodes).await,
                of => self.train(step, &[Node::root(of)]).await,
            }
        }
    }

    async fn pull(&self, partition: PartitionId, version: Version) -> proto::parameters::Pulled {
        let wait = Duration::from_secs(30);
        let pull = Pull { wait, ..self.job.pull(partition, Want::Exact(version)) };
        soon(self.ps[partition.index()].client.pull(&self.job, pull)).await.expect("the version")
    }

    async fn squares(&self, partition: PartitionId, step: Step, wait_ms: u32) -> Result<Vec<f64>, Failure> {
        let (job, era) = (self.job.id.get(), self.job.era.get());
        let (partition_number, step) = (partition.get(), step.get());
        let request = pb::SquaresRequest { job, era, partition: partition_number, step, wait_ms };
        let reply = self.ps[partition.index()].client.0.clone().squares(request).await?;
        Ok(reply.into_inner().squares)
    }
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime")
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 12, ..ProptestConfig::default() })]

    #[test]
    fn norms_over_any_number_of_ps_are_those_of_the_whole_model(
        partitions in 1..5_u32, optimizer in 0..5_usize, delay in 0..3_u64, nodes in covers(4),
    ) {
        let mode = if delay == 0 { json!({ "mode": "sync" }) } else { json!({ "mode": "pipelined", "delay": delay }) };
        let optimizer = optimizers()[optimizer].clone();
        let shape = Shape { partitions, optimizer, consistency: mode, ..Shape::default() };
        runtime().block_on(async {
            let fleet = Fleet::initialized(shape, options()).await;
            fleet.train_all(&nodes).await;
        });
    }
}

/// Every role, with a loss scale.
fn scaled() -> Vec<TensorSpec> {
    let mut tensors = Shape::default().tensors;
    tensors.extend([LossScale::tensor(), TensorSpec::register("loop", [5])]);
    tensors
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 12, ..ProptestConfig::default() })]

    /// Whichever partition has the infinite value, all leave their weights, and all know how often.
    #[test]
    fn a_step_that_overflows_changes_the_loss_scale_alone_in_all_partitions(
        partitions in 1..5_u32, optimizer in 0..6_usize, delay in 0..3_u64, nodes in covers(4),
        overflows in proptest::collection::btree_set(0..6_u64, 1..4),
    ) {
        let mode = if delay == 0 { json!({ "mode": "sync" }) } else { json!({ "mode": "pipelined", "delay": delay }) };
        // The last one needs no norms of its own.
        let unclipped = json!({ "kind": "adam", "learning_rate": 0.01 });
        let optimizer = optimizers().get(optimizer).cloned().unwrap_or(unclipped);
        let overflows: Vec<u64> = overflows.into_iter().collect();
        let shape = Shape {
            tensors: scaled(), partitions, optimizer, consistency: mode, overflows: overflows.clone(), ..Shape::default()
        };
        runtime().block_on(async {
            let fleet = Fleet::initialized(shape, options()).await;
            fleet.train_all(&nodes).await;
            for (ps, partition) in fleet.ps.iter().zip(fleet.job.partitions()) {
                let ledger = ps.ps.ledger(fleet.job.id).expect("a job");
                let applied = ledger.iter().find(|applied| applied.partition == partition).expect("open");
                assert_eq!(applied.ledger.overflows(), overflows.len() as u64);
                assert_eq!(ps.ps.metrics().overflows.get(), overflows.len() as u64);
            }
        });
    }
}

#[tokio::test]
async fn without_a_loss_scale_an_infinite_gradient_reaches_the_weights() {
    let fleet = Fleet::initialized(Shape { overflows: vec![0], ..clipped(1) }, options()).await;
    fleet.push(PartitionId(0), Step(0), Node::root(4)).await.expect("taken up");
    let pulled = fleet.pull(PartitionId(0), Version(1)).await;
    let floats =
        pulled.chunks.iter().flat_map(|chunk| chunk.values.host().chunks_exact(4).collect::<Vec<_>>());
    assert!(floats.into_iter().any(|raw| f32::from_le_bytes(raw.try_into().unwrap()).is_nan()));
}

#[tokio::test]
async fn norms_over_many_chunks_are_the_same_with_any_number_of_ps_and_threads() {
    for optimizer in optimizers() {
        for (partitions, threads) in [(1, 1), (1, 3), (2, 2), (3, 1)] {
            let shape = Shape {
                tensors: vec![
                    TensorSpec::parameter("embedding", [3 * CHUNK_LEN + 7]),
                    TensorSpec::parameter("bias", [11]),
                    TensorSpec::state("mean", [400]),
                    TensorSpec::counter("batches", []),
                ],
                partitions,
                records: 8,
                optimizer: optimizer.clone(),
                ..Shape::default()
            };
            let fleet = Fleet::initialized(shape, Options { threads, ..options() }).await;
            for step in [0, 1].map(Step) {
                fleet.train(step, &[Node::root(fleet.job.plan.of(step))]).await;
            }
        }
    }
}

fn clipped(partitions: u32) -> Shape {
    Shape { partitions, optimizer: optimizers()[0].clone(), ..Shape::default() }
}

#[tokio::test]
async fn a_step_waits_for_a_partition_that_lacks_it() {
    let fleet = Fleet::initialized(clipped(2), options()).await;
    let [here, there] = [0, 1].map(PartitionId);
    let (left, right) = Node::root(4).children().expect("M = 4");
    fleet.push(here, Step(0), Node::root(4)).await.unwrap();
    fleet.push(there, Step(0), left).await.unwrap();
    let early = fleet.squares(there, Step(0), 0).await.unwrap_err();
    assert_eq!(early.kind, Kind::NotYet, "{early}");
    let waits = fleet.ps[0].client.pull(&fleet.job, fleet.job.pull(here, Want::Exact(Version(1)))).await;
    assert_eq!(waits.unwrap_err().kind, Kind::NotYet);
    fleet.push(there, Step(0), right).await.unwrap();
    let reference = fleet.job.reference(Version(1));
    for partition in [here, there] {
        fleet.job.assert_pulled(partition, &fleet.pull(partition, Version(1)).await, &reference[1]);
    }
}

#[tokio::test]
async fn a_partition_that_comes_later_is_asked_until_it_is_there() {
    let fleet = Fleet::new(clipped(2), options()).await;
    let [here, there] = [0, 1].map(PartitionId);
    fleet.open(here).await;
    fleet.push(here, Step(0), Node::root(4)).await.unwrap();
    fleet.open(there).await;
    fleet.push(there, Step(0), Node::root(4)).await.unwrap();
    let reference = fleet.job.reference(Version(1));
    for partition in [here, there] {
        fleet.job.assert_pulled(partition, &fleet.pull(partition, Version(1)).await, &reference[1]);
    }
}

#[tokio::test]
async fn others_are_asked_where_the_newest_placement_has_them_however_late_an_open_arrives() {
    let Fleet { mut job, ps } = Fleet::new(clipped(2), options()).await;
    let [here, there] = [0, 1].map(PartitionId);
    let (spare, second) = (Served::new(options()).await, job.homes[1].clone());
    job.homes[1] = format!("http://{}", spare.address);
    let first = job.open_request(here);
    (job.homes[1], job.placement) = (second, 1);
    let fleet = Fleet { job, ps };
    let open = async |request: &pb::OpenRequest| {
        fleet.ps[0].client.0.clone().open(request.clone()).await.expect("a valid request");
    };
    // What the first placement opens there is never filled.
    spare.client.0.clone().open(pb::OpenRequest { partition: 1, ..first.clone() }).await.unwrap();
    open(&first).await;
    fleet.open(here).await;
    fleet.open(there).await;
    open(&first).await;
    fleet.train(Step(0), &[Node::root(4)]).await;
}

#[tokio::test]
async fn squares_are_kept_for_the_last_two_steps_and_answered_again_with_the_same_bits() {
    let fleet = Fleet::initialized(clipped(2), options()).await;
    let mut told = Vec::new();
    for step in [0, 1, 2].map(Step) {
        fleet.train(step, &[Node::root(fleet.job.plan.of(step))]).await;
        told.push(fleet.squares(PartitionId(1), step, 0).await.expect("just applied"));
    }
    assert_eq!(fleet.squares(PartitionId(1), Step(1), 0).await.as_ref(), Ok(&told[1]));
    assert_eq!(fleet.squares(PartitionId(1), Step(0), 0).await.unwrap_err().kind, Kind::Gone);
}

#[tokio::test]
async fn an_update_that_waits_for_others_ends_with_the_era() {
    let mut fleet = Fleet::initialized(clipped(2), options()).await;
    let [here, there] = [0, 1].map(PartitionId);
    fleet.push(here, Step(0), Node::root(4)).await.unwrap();
    let asked = fleet.squares(here, Step(0), 1000).await.expect("measured");
    fleet.job.era = Era(1);
    for partition in [here, there] {
        fleet.open(partition).await;
    }
    let metrics = fleet.ps[0].ps.metrics();
    assert_eq!(metrics.updates.get(), 0, "nobody updates what was rewound");
    fleet.train(Step(0), &[Node::root(4)]).await;
    assert_eq!(fleet.squares(here, Step(0), 0).await, Ok(asked), "the same bits in the next era");
    until("one update each", || metrics.updates.get() == 1).await;
}

#[test]
fn a_job_of_several_ps_is_not_opened_without_their_addresses() {
    let job = Job::new(clipped(2));
    let ps = harness::ps(options()).expect("valid options");
    let refused = ps.open(job.opening(PartitionId(0))).unwrap_err().to_string();
    assert!(refused.contains("homes of partitions: expected 2, found 0"), "{refused}");
    opened(&Job::new(clipped(1)), options());
    opened(&Job::new(Shape { partitions: 2, ..Shape::default() }), options());
}

#[test]
fn norms_over_several_ps_in_arrival_order_are_refused_with_the_setting_and_what_to_do() {
    for (setting, optimizer) in [("kind = \"lamb\"", &optimizers()[2]), ("clip_norm", &optimizers()[0])] {
        for mode in ["bounded", "async"] {
            let consistency = json!({ "mode": mode });
            let one = Job::new(Shape { optimizer: optimizer.clone(), consistency, ..Shape::default() });
            let mut spec = one.spec;
            spec.fleet.ps = 2;
            let refused = spec.validate().expect_err("two partitions").to_string();
            assert!(refused.contains(setting) && refused.contains("set fleet.ps to 1"), "{refused}");
        }
    }
}
