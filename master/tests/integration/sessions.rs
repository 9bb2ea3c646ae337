//! Members speak for themselves: what a process says in the name of another is refused, and changes
//! nothing.

use proto::pb;
use proto::pb::fleet_client::FleetClient;
use proto::pb::upload_request::Part;
use proto::status::{Failure, Kind};

use crate::fake_ps::FakePs;
use crate::harness::{Cluster, Worker, job, trained};
use crate::stores::{file, place, report, saving};

/// How a client is refused that speaks for the worker with this lease.
macro_rules! refusals {
    ($fleet:expr, $incarnation:expr, $lease:expr) => {{
        let (fleet, incarnation, lease) = (&mut $fleet, $incarnation, $lease);
        let kind = |call: &str, status: Option<tonic::Status>| {
            Failure::from(status.unwrap_or_else(|| panic!("{call} is taken"))).kind
        };
        let beat = pb::HeartbeatRequest { incarnation, draining: true, ..Default::default() };
        let result = Some(trained(0, 16));
        let complete = pb::CompleteRequest { incarnation, lease, result, more: true, ..Default::default() };
        let message = "forged".to_owned();
        let fail = pb::FailRequest { incarnation, lease, message, fatal: true, diverged_at: None };
        let trained = Some(pb::Trained::default());
        let release = pb::ReleaseRequest { incarnation, lease, trained, not_held: None };
        let describe = pb::DescribeRequest { incarnation, lease, tensors: Vec::new() };
        let header = Part::Header(pb::UploadHeader { incarnation, lease });
        let upload = tokio_stream::iter([pb::UploadRequest { part: Some(header) }]);
        let wait = pb::LeaseRequest { incarnation, wait_ms: 1 };
        [
            kind("heartbeat", fleet.heartbeat(tokio_stream::iter([beat])).await.err()),
            kind("complete", fleet.complete(complete).await.err()),
            kind("fail", fleet.fail(fail).await.err()),
            kind("release", fleet.release(release).await.err()),
            kind("describe", fleet.describe(describe).await.err()),
            kind("upload", fleet.upload(upload).await.err()),
            kind("lease", fleet.lease(wait).await.err()),
        ]
    }};
}

#[tokio::test]
async fn a_call_in_the_name_of_another_process_is_refused_and_changes_nothing() {
    let cluster = Cluster::start().await;
    let _ps = FakePs::start(&cluster.url, "ps-0").await;
    let mut a = Worker::join(&cluster, "a").await;
    cluster.submit(&job(|_| ()), &[]).await.expect("a good job");
    let lease = a.until_training().await;
    let mut b = Worker::join(&cluster, "b").await;
    assert_eq!(refusals!(b.fleet, a.incarnation, lease.id), [Kind::Fenced; 7], "another member");
    let mut nobody = FleetClient::new(cluster.channel());
    assert_eq!(refusals!(nobody, a.incarnation, lease.id), [Kind::Denied; 7], "without a secret");
    let job = pb::JobRequest { job: 1 };
    assert!(nobody.job(job).await.is_err() && b.fleet.job(job).await.is_ok());
    let download = pb::DownloadRequest { job: 1, name: "model.pt".to_owned() };
    assert_ne!(nobody.download(download).await.unwrap_err().code(), tonic::Code::NotFound);
    assert_eq!(a.beat(&[&lease], false).await.leases_lost, [0; 0]);
    a.do_task(&lease).await;
    a.until_exported().await;
    let status = cluster.status("digits").await.expect("a job");
    assert_eq!((status.leases_expired, status.workers_seen), (0, 1));
}

#[tokio::test]
async fn a_worker_reports_no_checkpoint() {
    let folder = tempfile::tempdir().expect("a folder");
    let cluster = Cluster::start().await;
    let _ps = FakePs::start(&cluster.url, "ps-0").await;
    let mut worker = Worker::join(&cluster, "a").await;
    cluster.submit(&saving(folder.path()), &[]).await.expect("a good job");
    worker.until_training().await;
    let incarnation = worker.incarnation;
    let forged = pb::HeartbeatRequest { incarnation, saved: vec![file(1).1], ..Default::default() };
    let refused = worker.beat_with(forged).await.expect_err("refused");
    assert!(
        refused.kind == Kind::Denied && refused.message.contains("a worker holds no partition"),
        "{refused}"
    );
    assert_eq!(cluster.status("digits").await.expect("a job").checkpoint, None);
}

#[tokio::test]
async fn only_the_ps_that_holds_a_partition_reports_its_checkpoints() {
    let folder = tempfile::tempdir().expect("a folder");
    let cluster = Cluster::start().await;
    let ps = FakePs::start(&cluster.url, "ps-0").await;
    let mut worker = Worker::join(&cluster, "a").await;
    cluster.submit(&saving(folder.path()), &[]).await.expect("a good job");
    worker.until_training().await;
    let other = FakePs::start(&cluster.url, "ps-1").await;
    let (bytes, saved) = file(1);
    std::fs::create_dir_all(place(folder.path(), 1)).expect("a folder");
    std::fs::write(place(folder.path(), 1).join("partition-0"), bytes).expect("written");
    for (ps, checkpoint) in [(&other, None), (&ps, Some(1))] {
        report(ps, saved.clone()).await;
        assert_eq!(cluster.status("digits").await.expect("a job").checkpoint, checkpoint);
    }
}
