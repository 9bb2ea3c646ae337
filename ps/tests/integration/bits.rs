//! The trained bits do not depend on partitions, chunks, threads, or the order and mixture in which
//! pushes come.

use proptest::prelude::*;
use proto::ids::{Step, Version};
use proto::parameters::{Outcome, Parameters, Want};
use proto::placement::CHUNK_LEN;
use proto::tensor::TensorSpec;
use proto::tree::Node;
use proto::wire::WireType;
use serde_json::json;

use crate::harness::{Job, Shape, covers, opened, options};

const DELAY: u64 = 2;

fn shapes() -> impl Strategy<Value = Shape> {
    let tensors = proptest::collection::vec((0..3u8, 1usize..40), 1..6).prop_map(|list| {
        let tensor = |(index, (role, len)): (usize, (u8, usize))| match role {
            0 => TensorSpec::parameter(format!("t{index}"), [len]),
            1 => TensorSpec::state(format!("t{index}"), [len]),
            _ => TensorSpec::counter(format!("t{index}"), []),
        };
        list.into_iter().enumerate().map(tensor).collect()
    });
    let kinds = prop_oneof![Just("sgd"), Just("momentum"), Just("adamw"), Just("adagrad")];
    let wires = prop_oneof![Just(WireType::F32), Just(WireType::Bf16), Just(WireType::F16)];
    (tensors, 1u32..4, 1u32..9, 2u64..40, kinds, wires).prop_map(
        |(tensors, partitions, microbatches_per_step, records, kind, wire)| Shape {
            tensors,
            partitions,
            microbatches_per_step,
            records,
            epochs: 2,
            consistency: json!({ "mode": "pipelined", "delay": DELAY }),
            optimizer: json!({ "kind": kind, "learning_rate": 0.05, "schedule": { "kind": "cosine" } }),
            evaluates: false,
            checkpoint: json!(null),
            wire,
            overflows: Vec::new(),
        },
    )
}

/// Returns a job and the nodes that are pushed of each of its steps.
fn jobs() -> impl Strategy<Value = (Job, Vec<Vec<Node>>)> {
    shapes().prop_map(Job::new).prop_flat_map(|job| {
        let wire = job.spec.exchange.dtype;
        // With 16 bits the sum of a whole step is left to the ps.
        let pushable = move |node: Node, of| match node.children() {
            Some((left, right)) if !wire.worker_sums(node, of) => vec![left, right],
            _ => vec![node],
        };
        let of = (0..job.plan.steps()).map(|step| job.plan.of(Step(step)));
        let nodes = |of| {
            covers(of).prop_map(move |nodes| nodes.into_iter().flat_map(|node| pushable(node, of)).collect())
        };
        let nodes: Vec<_> = of.map(nodes).collect();
        (Just(job), nodes)
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn any_order_and_mixture_of_pushes_trains_the_bits_of_the_serial_reference(
        (job, nodes) in jobs(),
        seed in any::<u64>(),
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        let ps = opened(&job, options());
        let steps = job.plan.steps();
        let reference = job.reference(Version(steps));
        let mut random = proto::random::Keyed::new(seed, "order", 0);
        for partition in job.partitions() {
            runtime.block_on(ps.push(job.push_initial(partition))).unwrap();
            let mut waiting: Vec<(Step, Node)> = nodes
                .iter()
                .enumerate()
                .flat_map(|(step, nodes)| nodes.iter().map(move |&node| (Step(step as u64), node)))
                .collect();
            let mut version = 0;
            let mut completed = 0;
            while !waiting.is_empty() {
                // Whatever a worker can have computed by now: up to DELAY steps ahead.
                let window = waiting.iter().take_while(|(step, _)| step.get() <= version + DELAY).count();
                let (step, node) = waiting.remove((random.next_f32() * window as f32) as usize % window);
                let pushed = runtime.block_on(ps.push(job.push(partition, step, node))).unwrap();
                completed += u64::from(pushed.outcome == Outcome::Completed);
                version = pushed.version.get();
                let pulled = runtime.block_on(ps.pull(job.pull(partition, Want::AtLeast(pushed.version)))).unwrap();
                prop_assert_eq!(pulled.version, pushed.version);
                job.assert_pulled(partition, &pulled, &reference[version as usize]);
            }
            prop_assert_eq!((version, completed), (steps, steps));
        }
        for applied in ps.ledger(job.id).unwrap() {
            prop_assert_eq!(applied.ledger.samples_applied(), job.plan.records * job.plan.epochs);
            prop_assert_eq!(applied.ledger.microbatches_applied(), job.plan.microbatches());
        }
    }
}

/// Returns a model of 3.1 MiB: several chunks, sums and updates on threads of their own.
fn large(partitions: u32) -> Job {
    Job::new(Shape {
        tensors: vec![
            TensorSpec::parameter("embedding", [3 * CHUNK_LEN + 7]),
            TensorSpec::parameter("bias", [11]),
            TensorSpec::state("mean", [5]),
            TensorSpec::counter("batches", []),
        ],
        partitions,
        records: 8,
        ..Shape::default()
    })
}

#[tokio::test]
async fn a_model_of_many_chunks_trains_the_same_on_any_number_of_partitions_and_threads() {
    let reference = large(1).reference(Version(2));
    for (partitions, threads) in [(1, 1), (1, 4), (2, 2), (3, 1)] {
        let job = large(partitions);
        let ps = opened(&job, ps::Options { threads, ..options() });
        for partition in job.partitions() {
            ps.push(job.push_initial(partition)).await.unwrap();
            for step in [0, 1].map(Step) {
                for index in [2, 0, 3, 1] {
                    ps.push(job.push(partition, step, Node::leaf(index))).await.unwrap();
                }
            }
            let pulled = ps.pull(job.pull(partition, Want::Exact(Version(2)))).await.unwrap();
            job.assert_pulled(partition, &pulled, &reference[2]);
        }
    }
}

#[tokio::test]
async fn tensors_with_settings_of_their_own_train_the_same_on_any_number_of_partitions() {
    let table = json!({ "kind": "table", "table": [[0, 1.0], [1, 0.25]] });
    let groups = json!([
        { "tensors": ["bias"], "weight_decay": 0.0, "betas": [0.5, 0.9], "eps": 1e-3 },
        { "tensors": ["embed*"], "learning_rate": 0.3, "schedule": table },
    ]);
    let optimizer = |groups| json!({ "kind": "adamw", "learning_rate": 0.05, "groups": groups });
    let grouped = |partitions| {
        let tensors = vec![
            TensorSpec::parameter("embedding", [2 * CHUNK_LEN + 7]),
            TensorSpec::parameter("weight", [33]),
            TensorSpec::state("mean", [5]),
            TensorSpec::parameter("bias", [11]),
        ];
        let optimizer = optimizer(groups.clone());
        Job::new(Shape { tensors, partitions, records: 8, optimizer, ..Shape::default() })
    };
    let reference = grouped(1).reference(Version(2));
    // Each tensor ends where a job ends that has the settings of its group for all tensors.
    for (tensor, group) in [(0, Some(1)), (1, None), (3, Some(0))] {
        let mut alone = grouped(1);
        let optimizer = &mut alone.spec.optimizer;
        *optimizer = optimizer.grouped().swap_remove(group.map_or(0, |group: usize| group + 1));
        assert_eq!(alone.reference(Version(2))[2][tensor], reference[2][tensor], "tensor {tensor}");
    }
    for (partitions, threads) in [(1, 2), (3, 1)] {
        let job = grouped(partitions);
        let ps = opened(&job, ps::Options { threads, ..options() });
        for partition in job.partitions() {
            ps.push(job.push_initial(partition)).await.unwrap();
            for step in [0, 1].map(Step) {
                ps.push(job.push_step(partition, step)).await.unwrap();
            }
            let pulled = ps.pull(job.pull(partition, Want::Exact(Version(2)))).await.unwrap();
            job.assert_pulled(partition, &pulled, &reference[2]);
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn workers_that_push_everything_twice_at_the_same_time_apply_it_once() {
    let job = large(1);
    let partition = job.partitions().next().unwrap();
    let ps = opened(&job, options());
    let steps = 3;
    let reference = job.reference(Version(steps));
    let initial = (0..3).map(|_| ps.push(job.push_initial(partition)));
    let initial = futures::future::join_all(initial).await;
    assert_eq!(
        initial.iter().filter(|pushed| pushed.as_ref().unwrap().outcome == Outcome::Completed).count(),
        1
    );
    for step in (0..steps).map(Step) {
        let nodes = [(0, 1), (2, 4), (1, 2), (2, 3), (0, 4), (3, 4), (0, 2), (1, 2)];
        let pushes = nodes.into_iter().cycle().take(16).map(|(begin, end)| {
            let (ps, push) = (ps.clone(), job.push(partition, step, Node::new(begin, end)));
            tokio::spawn(async move { ps.push(push).await.unwrap().outcome })
        });
        let outcomes = futures::future::join_all(pushes.collect::<Vec<_>>()).await;
        let count = |wanted| outcomes.iter().filter(|outcome| *outcome.as_ref().unwrap() == wanted).count();
        assert_eq!(count(Outcome::Completed), 1);
        assert!(count(Outcome::Duplicate) >= 8, "the second half brings nothing new");
        let pulled = ps.pull(job.pull(partition, Want::Exact(step.produces()))).await.unwrap();
        job.assert_pulled(partition, &pulled, &reference[step.produces().index()]);
    }
    let ledger = ps.ledger(job.id).unwrap().remove(0).ledger;
    assert_eq!(ledger.samples_applied(), steps * 8);
    assert_eq!(ps.metrics().push_bytes_in_flight.get(), 0);
}
