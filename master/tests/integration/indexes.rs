//! What workers found in files, after a restart of the master and in a second job.

use std::sync::Arc;
use std::time::Duration;

use master::{MemoryStore, Store};
use proto::pb;
use proto::pb::complete_request::Result as Report;
use proto::pb::lease::Work;
use proto::spec::JobSpec;

use crate::fake_ps::FakePs;
use crate::harness::{Cluster, Worker, job};

/// Returns a job with two training files.
fn two_files() -> JobSpec {
    job(|spec| {
        let lists = [("features", ["x.gz", "v.gz"]), ("labels", ["y.gz", "w.gz"])];
        spec.data.train.lists =
            lists.map(|(key, files)| (key.to_owned(), files.map(str::to_owned).to_vec())).into();
    })
}

/// Returns an index of a file in this state.
fn found(stamp: &str) -> pb::Indexed {
    pb::Indexed {
        records: 10,
        shape: vec![2],
        label_min: Some(0),
        label_max: Some(9),
        crc32c: Some(7),
        bytes: 80,
        stamp: stamp.to_owned(),
        ..Default::default()
    }
}

/// Returns the file of a task, and what it says is known.
fn asked(lease: &pb::Lease) -> (u32, Option<pb::Indexed>) {
    match &lease.work {
        Some(Work::Index(task)) => (task.file, task.known.clone()),
        other => panic!("expected a file to index, found {other:?}"),
    }
}

#[tokio::test]
async fn a_restarted_master_and_a_second_job_know_what_was_found_in_files_before() {
    let disk: Arc<dyn Store> = Arc::new(MemoryStore::default());
    let cluster = Cluster::mortal(disk.clone()).await;
    let _ps = FakePs::start(&cluster.url, "ps-0").await;
    let mut worker = Worker::join(&cluster, "a").await;
    cluster.submit(&two_files(), &[]).await.expect("a good job");
    let lease = worker.lease().await;
    assert_eq!(asked(&lease), (0, None));
    assert!(worker.complete(&lease, Report::Indexed(found("80@1.5"))).await.expect("a good report"));
    // The answer to a submission comes when everything before is durable.
    let other = JobSpec { name: "other".to_owned(), ..two_files() };
    cluster.submit(&other, &[]).await.expect("a good job");

    let cluster = cluster.kill(disk).await;
    let mut worker = Worker::join(&cluster, "a").await;
    let mut tasks = Vec::new();
    while tasks.len() < 4 {
        let lease = worker.lease().await;
        if !matches!(lease.work, Some(Work::Index(_))) {
            // A model to initialize, once all files are indexed.
            continue;
        }
        let (file, known) = asked(&lease);
        tasks.push((lease.job, file, known.clone()));
        // Its second file cannot be told from another one.
        let answer = known.unwrap_or_else(|| found(""));
        assert!(worker.complete(&lease, Report::Indexed(answer)).await.expect("a good report"));
    }
    tasks.sort_by_key(|(job, file, _)| (*job, *file));
    let known = || Some(found("80@1.5"));
    assert_eq!(tasks, [(1, 0, known()), (1, 1, None), (2, 0, known()), (2, 1, None)]);

    let third = JobSpec { name: "third".to_owned(), epochs: 9, ..two_files() };
    cluster.submit(&third, &[]).await.expect("a good job");
    let lease = loop {
        let lease = worker.maybe_lease(Duration::from_secs(60)).await.expect("work");
        if lease.job == 3 {
            break lease;
        }
    };
    assert_eq!(asked(&lease), (0, known()));
}
