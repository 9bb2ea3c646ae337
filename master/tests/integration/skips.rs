//! Bad records: a worker hears that one is skipped once no restart of the master can forget it.

use std::collections::BTreeMap;
use std::sync::Arc;

use master::{Batch, MemoryStore, Store, StoreError};
use proto::pb;
use proto::pb::JobState;
use proto::spec::{JobSpec, OnError};
use proto::status::{Failure, Kind};
use tokio::sync::watch;

use crate::fake_ps::FakePs;
use crate::harness::{Cluster, Worker, job, soon};

/// A journal that does not get skipped records onto its disk.
#[derive(Clone, Debug)]
struct Stuck {
    disk: MemoryStore,
    /// Number of times that it was asked to write some.
    asked: watch::Sender<u32>,
}

#[async_trait::async_trait]
impl Store for Stuck {
    async fn load(&self) -> Result<BTreeMap<String, Vec<u8>>, StoreError> {
        self.disk.load().await
    }

    async fn commit(&self, batch: &Batch) -> Result<(), StoreError> {
        let skips = |(key, value): (&String, &Option<Vec<u8>>)| {
            let bytes = value.as_ref().filter(|_| key.starts_with("job/"));
            bytes.is_some_and(|bytes| {
                let record = <pb::JobRecord as prost::Message>::decode(&bytes[..]).expect("a record");
                record.skipped_train.is_some()
            })
        };
        if batch.keys.iter().any(skips) {
            self.asked.send_modify(|asked| *asked += 1);
            std::future::pending::<()>().await;
        }
        self.disk.commit(batch).await
    }
}

/// Returns a job that may skip 4 of its 8 training records.
fn skipping() -> JobSpec {
    job(|spec| {
        spec.data.on_error = OnError::Skip;
        spec.data.max_bad = Some(0.5);
    })
}

fn request(worker: &Worker, lease: &pb::Lease, records: &[u64]) -> pb::SkipRequest {
    let bad = |&record: &u64| pb::BadRecord { record, reason: format!("column `x` of record {record}: bad") };
    pb::SkipRequest {
        incarnation: worker.incarnation,
        lease: lease.id,
        set: pb::DataSet::Train.into(),
        records: records.iter().map(bad).collect(),
    }
}

#[tokio::test]
async fn a_worker_hears_of_a_skipped_record_only_when_no_restart_forgets_it() {
    let disk = MemoryStore::default();
    let stuck = Stuck { disk: disk.clone(), asked: watch::Sender::new(0) };
    let cluster = Cluster::mortal(Arc::new(stuck.clone())).await;
    let _ps = FakePs::start(&cluster.url, "ps-0").await;
    let mut worker = Worker::join(&cluster, "a").await;
    cluster.submit(&skipping(), &[]).await.expect("a good job");
    let lease = worker.until_training().await;
    let (mut fleet, asks) = (worker.fleet.clone(), request(&worker, &lease, &[3]));
    let asking = tokio::spawn(async move { fleet.skip(asks).await });
    let mut asked = stuck.asked.subscribe();
    soon("it is to be written", asked.wait_for(|asked| *asked > 0)).await.expect("open");
    let cluster = cluster.kill(Arc::new(disk.clone())).await;
    let answer = soon("an answer", asking).await.expect("no panic");
    assert!(answer.is_err(), "the record is skipped, and the master has forgotten it");
    drop(worker);

    let mut worker = Worker::join(&cluster, "b").await;
    let lease = worker.until_training().await;
    assert_eq!(lease.skipped, 0);
    let asks = request(&worker, &lease, &[3]);
    for _ in 0..2 {
        worker.fleet.skip(asks.clone()).await.expect("not too many");
    }
    drop(worker);
    let cluster = cluster.kill(Arc::new(disk)).await;
    let mut worker = Worker::join(&cluster, "c").await;
    let lease = worker.until_training().await;
    assert_eq!(lease.skipped, 1);
    let job = worker.fleet.job(pb::JobRequest { job: lease.job }).await.expect("a job").into_inner();
    assert_eq!((job.skipped_train, job.skipped_validation), (vec![3], vec![]));
    let skipped = cluster.status("digits").await.expect("a job").skipped.expect("one record");
    let expected = pb::SkippedRecord {
        validation: false,
        file: "x.gz".to_owned(),
        record: 3,
        reason: "column `x` of record 3: bad".to_owned(),
    };
    assert_eq!(skipped, pb::Skipped { train: 1, records: vec![expected], ..Default::default() });
}

#[tokio::test]
async fn a_job_with_too_many_bad_records_fails_and_names_the_first_ones() {
    let cluster = Cluster::start().await;
    let _ps = FakePs::start(&cluster.url, "ps-0").await;
    let mut worker = Worker::join(&cluster, "a").await;
    cluster.submit(&skipping(), &[]).await.expect("a good job");
    let lease = worker.until_training().await;
    let few = request(&worker, &lease, &[8, 6, 4, 2]);
    worker.fleet.skip(few).await.expect("not too many");
    let many = request(&worker, &lease, &[5]);
    let refused = Failure::from(worker.fleet.skip(many).await.unwrap_err());
    assert_eq!(refused.kind, Kind::Fenced, "{refused}");
    // Twice without the lease: then the master knows that it hears.
    worker.beat(&[], false).await;
    worker.beat(&[], false).await;
    let reason = cluster.reach("digits", JobState::Failed).await;
    let expected = "5 of 8 training records are bad, at most 4 may be skipped (data.max_bad); `x.gz`, record 2: column `x` of \
                    record 2: bad; `x.gz`, record 4:";
    assert!(reason.starts_with(expected), "{reason}");
    assert!(reason.ends_with("clean the data, or raise data.max_bad"), "{reason}");
}
