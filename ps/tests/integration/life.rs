//! Open, close, rewind.

use std::time::Duration;

use proto::ids::{Era, JobId, PartitionId, Step, Version};
use proto::parameters::{Outcome, Parameters, Pull, Want};
use proto::status::{Failure, Kind};

use ps::MasterStart;

use crate::harness::{self, Job, Shape, opened, options, soon, until};

const PARTITION: PartitionId = PartitionId(0);

#[tokio::test]
async fn opening_again_changes_nothing_and_answers_the_version() {
    let job = Job::new(Shape::default());
    let ps = opened(&job, options());
    assert_eq!(ps.open(job.opening(PARTITION)).unwrap(), None);
    ps.push(job.push_initial(PARTITION)).await.unwrap();
    assert_eq!(ps.open(job.opening(PARTITION)).unwrap(), Some(Version(0)));
    ps.push(job.push_step(PARTITION, Step(0))).await.unwrap();
    assert_eq!(ps.open(job.opening(PARTITION)).unwrap(), Some(Version(1)));
    let repeat = ps.push(job.push_initial(PARTITION)).await.unwrap();
    assert_eq!((repeat.outcome, repeat.version), (Outcome::Duplicate, Version(1)));
}

#[tokio::test]
async fn opening_differently_is_refused_and_changes_nothing() {
    let job = Job::new(Shape::default());
    let ps = opened(&job, options());
    ps.push(job.push_initial(PARTITION)).await.unwrap();
    let others = [
        ("model", Shape { tensors: Shape::default().tensors[..2].to_vec(), ..Shape::default() }),
        ("plan", Shape { records: 12, ..Shape::default() }),
        ("specification", Shape { evaluates: true, ..Shape::default() }),
        ("number of partitions", Shape { partitions: 2, ..Shape::default() }),
    ];
    for (what, shape) in others {
        let failure = Failure::from(ps.open(Job::new(shape).opening(PARTITION)).unwrap_err());
        assert_eq!(failure.kind, Kind::Malformed);
        assert!(failure.message.contains(&format!("open with another {what};")), "{failure}");
    }
    let pulled = ps.pull(job.pull(PARTITION, Want::Exact(Version(0)))).await.unwrap();
    job.assert_pulled(PARTITION, &pulled, &job.initial());
}

#[tokio::test]
async fn a_closed_job_is_forgotten_and_its_waiting_pulls_learn_it() {
    let job = Job::new(Shape { partitions: 2, ..Shape::default() });
    let other = Job { id: JobId(2), ..job.clone() };
    let ps = opened(&job, options());
    assert_eq!(ps.open(other.opening(PARTITION)).unwrap(), None);
    let waiting = tokio::spawn({
        let pull = Pull { wait: Duration::from_secs(600), ..job.pull(PARTITION, Want::Exact(Version(0))) };
        let ps = ps.clone();
        async move { ps.pull(pull).await }
    });
    until("a pull waits", || ps.metrics().pulls_waiting.get() > 0).await;
    assert_eq!(ps.metrics().partitions.get(), 3);
    ps.close(job.id);
    assert_eq!(soon(waiting).await.unwrap().unwrap_err().kind, Kind::NotFound);
    assert_eq!(ps.push(job.push_initial(PARTITION)).await.unwrap_err().kind, Kind::NotFound);
    assert_eq!(Failure::from(ps.ledger(job.id).unwrap_err()).kind, Kind::NotFound);
    assert_eq!(ps.ledger(other.id).unwrap().len(), 1);
    assert_eq!(ps.metrics().partitions.get(), 1);
    ps.close(job.id);
    assert_eq!(ps.open(job.opening(PARTITION)).unwrap(), None, "a closed job may begin anew");
}

#[tokio::test]
async fn a_close_of_an_earlier_era_master_or_start_is_refused_and_drops_nothing() {
    let job = Job { era: Era(2), ..Job::new(Shape::default()) };
    let ps = harness::ps(options()).unwrap();
    let sender = |master, starts| MasterStart { master, starts };
    ps.registered_with(sender(70, 3));
    ps.open(job.opening(PARTITION)).unwrap();
    for (era, sender, words) in [
        (1, sender(70, 3), "sent in era 1, it is in era 2"),
        (2, sender(70, 2), "start 2 of the master, and start 3 is the master"),
        (2, sender(69, 9), "master 0000000000000046 opened it"),
    ] {
        let failure = Failure::from(ps.close_ended(job.id, Era(era), sender).unwrap_err());
        assert!(failure.kind == Kind::Fenced && failure.message.contains(words), "{failure}");
        assert_eq!(ps.ledger(job.id).unwrap().len(), 1);
    }
    // The next leader has not registered this ps yet.
    ps.close_ended(job.id, Era(2), sender(70, 4)).unwrap();
    assert!(ps.ledger(job.id).is_err());
    ps.close_ended(job.id, Era(2), sender(70, 4)).expect("a repeat");
}

#[tokio::test]
async fn a_newer_era_begins_anew_and_fences_the_older() {
    let old = Job::new(Shape::default());
    let new = Job { era: Era(1), ..old.clone() };
    let ps = opened(&old, options());
    ps.push(old.push_initial(PARTITION)).await.unwrap();
    ps.push(old.push_step(PARTITION, Step(0))).await.unwrap();
    let early = ps.pull(new.pull(PARTITION, Want::Exact(Version(0)))).await.unwrap_err();
    assert!(early.is_retryable() && early.message.contains("still in era 0"), "{early}");
    let waiting = tokio::spawn({
        let pull = Pull { wait: Duration::from_secs(600), ..old.pull(PARTITION, Want::Exact(Version(2))) };
        let ps = ps.clone();
        async move { ps.pull(pull).await }
    });
    until("a pull waits", || ps.metrics().pulls_waiting.get() > 0).await;

    assert_eq!(ps.open(new.opening(PARTITION)).unwrap(), None);
    assert_eq!(soon(waiting).await.unwrap().unwrap_err().kind, Kind::Fenced);
    assert_eq!(ps.push(old.push_step(PARTITION, Step(1))).await.unwrap_err().kind, Kind::Fenced);
    assert_eq!(ps.pull(old.pull(PARTITION, Want::Exact(Version(1)))).await.unwrap_err().kind, Kind::Fenced);
    assert_eq!(Failure::from(ps.open(old.opening(PARTITION)).unwrap_err()).kind, Kind::Fenced);
    ps.push(new.push_initial(PARTITION)).await.unwrap();
    assert_eq!(ps.push(old.push_initial(PARTITION)).await.unwrap_err().kind, Kind::Fenced);
    let pulled = ps.pull(new.pull(PARTITION, Want::Exact(Version(0)))).await.unwrap();
    new.assert_pulled(PARTITION, &pulled, &new.initial());
    let applied = &ps.ledger(new.id).unwrap()[0];
    assert_eq!(
        (applied.era, applied.version, applied.ledger.watermark()),
        (Era(1), Some(Version(0)), Step(0))
    );
}

#[tokio::test]
async fn what_was_measured_before_a_rewind_is_kept_for_measuring_again() {
    let old = Job::new(Shape { evaluates: true, ..Shape::default() });
    let new = Job { era: Era(1), ..old.clone() };
    let ps = opened(&old, options());
    ps.open(new.opening(PARTITION)).unwrap();
    ps.push(new.push_initial(PARTITION)).await.unwrap();
    let last = new.plan.version_after(proto::ids::Epoch(0));
    // Late, from before the rewind.
    ps.unpin(old.id, Era(0), last, Version(0)).unwrap();
    for step in 0..last.get() + 4 {
        ps.push(new.push_step(PARTITION, Step(step))).await.unwrap();
    }
    ps.pull(new.pull(PARTITION, Want::Exact(last))).await.unwrap();
    ps.unpin(new.id, Era(1), last, Version(0)).unwrap();
    assert_eq!(ps.pull(new.pull(PARTITION, Want::Exact(last))).await.unwrap_err().kind, Kind::Gone);
}
