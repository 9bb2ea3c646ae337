//! Users scale, pause and resume a job that goes on; who may, when, and what workers see of it.

use std::time::Duration;

use proto::pb;
use proto::pb::JobState;
use proto::pb::lease::Work;
use proto::spec::Mode;
use proto::status::{Failure, Kind};

use crate::fake_ps::FakePs;
use crate::harness::{Cluster, Worker, job, microbatches, soon};

const MOMENT: Duration = Duration::from_millis(50);

impl Cluster {
    async fn scale(&self, job: &str, workers: u32) -> Result<pb::JobStatus, Failure> {
        let request = pb::ScaleRequest { job: job.to_owned(), workers };
        Ok(self.jobs().scale(request).await?.into_inner())
    }

    async fn pause(&self, job: &str) -> Result<pb::JobStatus, Failure> {
        Ok(self.jobs().pause(pb::PauseRequest { job: job.to_owned() }).await?.into_inner())
    }

    async fn resume(&self, job: &str) -> Result<pb::JobStatus, Failure> {
        Ok(self
            .jobs()
            .resume(pb::ResumeRequest { job: job.to_owned(), ..Default::default() })
            .await?
            .into_inner())
    }
}

#[tokio::test]
async fn who_stands_by_gets_the_work_of_the_dead_while_it_asks() {
    let cluster = Cluster::start().await;
    let _ps = FakePs::start(&cluster.url, "ps-0").await;
    let (mut a, mut b) = (Worker::join(&cluster, "a").await, Worker::join(&cluster, "b").await);
    let name = cluster.submit(&job(|spec| spec.fleet.workers.max = 1), &[]).await.expect("a good job");
    let held = a.until_training().await;
    let status = cluster.status(&name).await.expect("a job");
    assert_eq!((status.workers, status.workers_standby), (1, 1));
    assert_eq!((status.workers_min, status.workers_max), (1, 1));
    assert_eq!(b.maybe_lease(MOMENT).await, None);
    let asking = tokio::spawn(async move { (b.lease().await, b) });
    drop(a);
    let (again, mut b) = soon("the lease of the dead", asking).await.expect("no panic");
    assert_eq!((microbatches(&again), again.attempt), (microbatches(&held), 2));
    b.do_task(&again).await;
    b.until_exported().await;
    cluster.reach(&name, JobState::Succeeded).await;
}

#[tokio::test]
async fn a_worker_that_waits_is_woken_by_scaling_up_and_by_resuming() {
    let cluster = Cluster::start().await;
    let _ps = FakePs::start(&cluster.url, "ps-0").await;
    let (mut a, mut b) = (Worker::join(&cluster, "a").await, Worker::join(&cluster, "b").await);
    // In arrival order nobody waits for another's step, so there is work for both at any time.
    let long = job(|spec| {
        (spec.epochs, spec.fleet.workers.max, spec.consistency.mode) = (200, 1, Mode::Async);
    });
    let name = cluster.submit(&long, &[]).await.expect("a good job");
    let held = a.until_training().await;
    assert_eq!(b.maybe_lease(MOMENT).await, None);
    let asking = tokio::spawn(async move { (b.lease().await, b) });
    for _ in 0..2 {
        let status = cluster.scale(&name, 2).await.expect("it goes on");
        assert_eq!((status.workers, status.workers_standby, status.workers_max), (2, 0, 2));
    }
    let (other, mut b) = soon("work for both", asking).await.expect("no panic");
    for _ in 0..2 {
        assert_eq!(cluster.pause(&name).await.expect("it goes on").state(), JobState::Paused);
    }
    a.do_task(&held).await;
    b.do_task(&other).await;
    assert_eq!((a.maybe_lease(MOMENT).await, b.maybe_lease(MOMENT).await), (None, None));
    let asking = tokio::spawn(async move { a.lease().await });
    for _ in 0..2 {
        assert_eq!(cluster.resume(&name).await.expect("it goes on").state(), JobState::Running);
    }
    soon("work again", asking).await.expect("no panic");
}

#[tokio::test]
async fn a_paused_job_leaves_its_workers_to_others_and_can_be_cancelled() {
    let cluster = Cluster::start().await;
    let _ps = FakePs::start(&cluster.url, "ps-0").await;
    let mut a = Worker::join(&cluster, "a").await;
    let first = cluster.submit(&job(|_| ()), &[]).await.expect("a good job");
    assert_eq!(cluster.pause(&first).await.expect("it goes on").state(), JobState::Paused);
    let second = cluster.submit(&job(|_| ()), &[]).await.expect("a good job");
    a.until_exported().await;
    cluster.reach(&second, JobState::Succeeded).await;
    let request = pb::CancelRequest { job: first.clone(), force: false };
    cluster.jobs().cancel(request).await.expect("a job");
    cluster.reach(&first, JobState::Cancelled).await;
}

#[tokio::test]
async fn what_cannot_be_changed_is_refused_with_a_reason() {
    let cluster = Cluster::start().await;
    let name = cluster.submit(&job(|_| ()), &[]).await.expect("a good job");
    for workers in [0, 65_537] {
        let failure = cluster.scale(&name, workers).await.unwrap_err();
        assert!(failure.kind == Kind::Malformed && failure.message.contains("1 to 65536"), "{failure}");
    }
    let before = cluster.status(&name).await.expect("a job");
    assert_eq!((before.workers_min, before.workers_max), (1, 64));
    for failure in [cluster.scale("x", 1).await, cluster.pause("x").await, cluster.resume("x").await] {
        assert_eq!(failure.unwrap_err().kind, Kind::NotFound);
    }
    cluster.jobs().cancel(pb::CancelRequest { job: name.clone(), force: true }).await.expect("a job");
    for failure in [cluster.scale("1", 1).await, cluster.pause("1").await, cluster.resume("1").await] {
        let failure = failure.unwrap_err();
        assert!(failure.kind == Kind::Ended && failure.message.contains("it is cancelled"), "{failure}");
    }
}

#[tokio::test]
async fn a_job_that_waits_for_workers_takes_what_is_held_and_goes_on_with_enough() {
    let cluster = Cluster::start().await;
    let _ps = FakePs::start(&cluster.url, "ps-0").await;
    let (mut a, b) = (Worker::join(&cluster, "a").await, Worker::join(&cluster, "b").await);
    let spec = job(|spec| (spec.epochs, spec.fleet.workers.min) = (20, 2));
    let name = cluster.submit(&spec, &[]).await.expect("a good job");
    let held = a.until_training().await;
    drop(b);
    let waits = async {
        while cluster.status(&name).await.expect("a job").state() != JobState::Pending {
            tokio::task::yield_now().await;
        }
    };
    soon("too few workers", waits).await;
    let status = cluster.status(&name).await.expect("a job");
    assert_eq!((status.reason.as_str(), status.workers), ("waits for workers (1 of 2 live)", 1));
    a.do_task(&held).await;
    assert_eq!(cluster.status(&name).await.expect("a job").samples_applied, u64::from(microbatches(&held).1));
    assert_eq!(a.maybe_lease(MOMENT).await, None);
    cluster.scale(&name, 1).await.expect("it goes on");
    assert!(matches!(a.lease().await.work, Some(Work::Train(_))), "one is enough now");
}
