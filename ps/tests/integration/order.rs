//! Canonical and arrival order: what waits for what, and which version a pull gets.

use std::time::Duration;

use proto::ids::{Era, PartitionId, Step, Version};
use proto::parameters::{Outcome, Parameters, Pull, Want};
use proto::status::Kind;
use proto::tree::Node;
use serde_json::json;

use crate::harness::{Job, Shape, opened, options, soon, until};

const PARTITION: PartitionId = PartitionId(0);

fn job(consistency: serde_json::Value) -> Job {
    Job::new(Shape { consistency, ..Shape::default() })
}

#[tokio::test]
async fn in_canonical_order_a_complete_step_waits_for_the_one_before() {
    let job = job(json!({ "mode": "pipelined", "delay": 1 }));
    let ps = opened(&job, options());
    ps.push(job.push_initial(PARTITION)).await.unwrap();
    ps.push(job.push(PARTITION, Step(0), Node::new(0, 2))).await.unwrap();
    let early = ps.push(job.push_step(PARTITION, Step(1))).await.unwrap();
    assert_eq!((early.outcome, early.version), (Outcome::Completed, Version(0)));
    let repeat = ps.push(job.push_step(PARTITION, Step(1))).await.unwrap();
    assert_eq!((repeat.outcome, repeat.version), (Outcome::Duplicate, Version(0)));
    let last = ps.push(job.push(PARTITION, Step(0), Node::new(2, 4))).await.unwrap();
    assert_eq!((last.outcome, last.version), (Outcome::Completed, Version(2)));
    let reference = job.reference(Version(2));
    for version in [Version(1), Version(2)] {
        let pulled = ps.pull(job.pull(PARTITION, Want::Exact(version))).await.unwrap();
        job.assert_pulled(PARTITION, &pulled, &reference[version.index()]);
    }
}

#[tokio::test]
async fn in_arrival_order_a_complete_step_is_applied_at_once() {
    let job = job(json!({ "mode": "bounded", "delay": 3 }));
    let ps = opened(&job, options());
    ps.push(job.push_initial(PARTITION)).await.unwrap();
    let order = [2, 0, 3, 1].map(Step);
    let reference = job.reference_of(order.into_iter());
    let mut watermarks = Vec::new();
    for (count, step) in (1..).zip(order) {
        let pushed = ps.push(job.push_step(PARTITION, step)).await.unwrap();
        assert_eq!((pushed.outcome, pushed.version), (Outcome::Completed, Version(count)));
        let repeat = ps.push(job.push(PARTITION, step, Node::leaf(0))).await.unwrap();
        assert_eq!((repeat.outcome, repeat.version), (Outcome::Duplicate, Version(count)));
        let pulled = ps.pull(job.pull(PARTITION, Want::AtLeast(Version(0)))).await.unwrap();
        assert_eq!(pulled.version, Version(count));
        job.assert_pulled(PARTITION, &pulled, &reference[count as usize]);
        watermarks.push(ps.ledger(job.id).unwrap()[0].ledger.watermark());
    }
    assert_eq!(watermarks, [0, 1, 1, 4].map(Step));
    assert_eq!(ps.ledger(job.id).unwrap()[0].ledger.duplicates_dropped(), 4);
}

#[tokio::test(start_paused = true)]
async fn a_bounded_pull_waits_until_all_steps_below_are_applied() {
    let job = job(json!({ "mode": "bounded", "delay": 3 }));
    let ps = opened(&job, options());
    ps.push(job.push_initial(PARTITION)).await.unwrap();
    ps.push(job.push_step(PARTITION, Step(1))).await.unwrap();
    let wait = Duration::from_secs(30);
    let want = Want::AtLeast(Version(1));
    let failure = ps.pull(Pull { wait, ..job.pull(PARTITION, want) }).await.unwrap_err();
    assert_eq!(failure.kind, Kind::NotYet, "{failure}");
    assert!(failure.message.contains("all steps below 1 did not come within 30s"), "{failure}");
    let waiting = tokio::spawn({
        let (ps, pull) = (ps.clone(), Pull { wait, ..job.pull(PARTITION, want) });
        async move { ps.pull(pull).await }
    });
    until("a pull waits", || ps.metrics().pulls_waiting.get() > 0).await;
    ps.push(job.push_step(PARTITION, Step(0))).await.unwrap();
    assert_eq!(soon(waiting).await.unwrap().unwrap().version, Version(2));
    assert_eq!(ps.metrics().pulls_waiting.get(), 0);
}

#[tokio::test]
async fn as_many_versions_are_kept_as_a_partition_that_lags_behind_may_need() {
    let job = job(json!({ "mode": "pipelined", "delay": 1 }));
    let ps = opened(&job, options());
    ps.push(job.push_initial(PARTITION)).await.unwrap();
    for step in (0..6).map(Step) {
        ps.push(job.push_step(PARTITION, step)).await.unwrap();
    }
    let reference = job.reference(Version(6));
    for (version, weights) in (0..).map(Version).zip(&reference) {
        let pulled = ps.pull(job.pull(PARTITION, Want::Exact(version))).await;
        if version.get() < 3 {
            let failure = pulled.unwrap_err();
            assert_eq!(failure.kind, Kind::Gone);
            assert!(failure.message.contains(&format!("version {version} is kept no longer")), "{failure}");
        } else {
            job.assert_pulled(PARTITION, &pulled.unwrap(), weights);
        }
    }
}

#[tokio::test]
async fn ends_of_epochs_are_pinned_until_the_evaluation_is_done() {
    let job = Job::new(Shape { evaluates: true, ..Shape::default() });
    let ps = opened(&job, options());
    ps.push(job.push_initial(PARTITION)).await.unwrap();
    for step in (0..job.plan.steps()).map(Step) {
        ps.push(job.push_step(PARTITION, step)).await.unwrap();
    }
    let here = |version| {
        let pull = job.pull(PARTITION, Want::Exact(Version(version)));
        let ps = ps.clone();
        async move { ps.pull(pull).await.map_err(|failure| failure.kind).map(|pulled| pulled.version.get()) }
    };
    // Two steps an epoch, three epochs: 6 is the newest, 5 is kept for a rewind.
    let all = futures::future::join_all((0..=7).map(here)).await;
    let (gone, never) = (Err(Kind::Gone), Err(Kind::Malformed));
    assert_eq!(all, [gone, gone, Ok(2), gone, Ok(4), Ok(5), Ok(6), never]);
    ps.unpin(job.id, Era(0), Version(2), Version(0)).unwrap();
    assert_eq!((here(2).await, here(4).await), (gone, Ok(4)));
    ps.unpin(job.id, Era(0), Version(6), Version(0)).unwrap();
    assert_eq!((here(4).await, here(6).await), (gone, Ok(6)));
}

#[tokio::test]
async fn a_pull_shares_the_memory_of_the_weights() {
    let job = Job::new(Shape::default());
    let ps = opened(&job, options());
    ps.push(job.push_initial(PARTITION)).await.unwrap();
    let pull = || ps.pull(job.pull(PARTITION, Want::Exact(Version(0))));
    let (one, other) = (pull().await.unwrap(), pull().await.unwrap());
    for (one, other) in one.chunks.iter().zip(&other.chunks) {
        assert_eq!(one.values.host().as_ptr(), other.values.host().as_ptr());
    }
    let weights = job.initial();
    for step in (0..4).map(Step) {
        ps.push(job.push_step(PARTITION, step)).await.unwrap();
    }
    job.assert_pulled(PARTITION, &one, &weights);
}
