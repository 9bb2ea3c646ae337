//! The end of a job under a master that is killed: an end that users saw stays, and nothing that
//! was delivered is trained again.

use std::collections::BTreeMap;
use std::sync::Arc;

use master::{Batch, MemoryStore, Store, StoreError};
use proto::pb;
use proto::pb::JobState;
use tokio::sync::watch;

use crate::fake_ps::FakePs;
use crate::harness::{Cluster, Worker, job, soon};

/// A journal that does not get the end of a job onto its disk.
#[derive(Clone, Debug)]
struct Stuck {
    disk: MemoryStore,
    /// Ends that it was asked to write.
    asked: watch::Sender<u32>,
}

#[async_trait::async_trait]
impl Store for Stuck {
    async fn load(&self) -> Result<BTreeMap<String, Vec<u8>>, StoreError> {
        self.disk.load().await
    }

    async fn commit(&self, batch: &Batch) -> Result<(), StoreError> {
        let ends = |(key, value): (&String, &Option<Vec<u8>>)| {
            let bytes = value.as_ref().filter(|_| key.starts_with("job/"));
            bytes.is_some_and(|bytes| {
                <pb::JobRecord as prost::Message>::decode(&bytes[..]).expect("a record").ended.is_some()
            })
        };
        if batch.keys.iter().any(ends) {
            self.asked.send_modify(|asked| *asked += 1);
            std::future::pending::<()>().await;
        }
        self.disk.commit(batch).await
    }
}

/// Returns a cluster whose job has delivered its model, and whose master cannot write down that it
/// has ended. The job was cancelled first, or trained to its end.
async fn stuck_at_its_end(cancelled: bool) -> (Cluster, FakePs, MemoryStore) {
    let disk = MemoryStore::default();
    let stuck = Stuck { disk: disk.clone(), asked: watch::Sender::new(0) };
    let cluster = Cluster::mortal(Arc::new(stuck.clone())).await;
    let ps = FakePs::start(&cluster.url, "ps-0").await;
    let mut worker = Worker::join(&cluster, "a").await;
    let spec = job(|spec| spec.epochs = if cancelled { 1000 } else { 2 });
    cluster.submit(&spec, &[]).await.expect("a good job");
    let lease = worker.until_training().await;
    ps.accounts.lock().expect("unpoisoned").version = 4;
    if cancelled {
        let request = pb::CancelRequest { job: "digits".to_owned(), force: false };
        cluster.jobs().cancel(request).await.expect("a job");
        // Twice without the lease: then the master knows that it hears.
        worker.beat(&[], false).await;
        worker.beat(&[], false).await;
    } else {
        worker.do_task(&lease).await;
    }
    worker.until_exported().await;
    let mut asked = stuck.asked.subscribe();
    soon("the end is to be written", asked.wait_for(|asked| *asked > 0)).await.expect("open");
    // What it says of its end it says to a worker and a ps alike.
    let reply = worker.beat(&[], false).await;
    assert_eq!(reply.jobs, [1], "a ps would close it, and the master may still forget that it ended");
    assert!(!ps.calls().contains(&"close job 1".to_owned()), "closed before its end is durable");
    (cluster, ps, disk)
}

#[tokio::test]
async fn a_job_that_delivered_its_model_is_not_trained_again_by_a_master_that_forgot_its_end() {
    let (cluster, ps, disk) = stuck_at_its_end(false).await;
    let cluster = cluster.kill(Arc::new(disk)).await;
    // No worker is there to train or to export it.
    assert_eq!(cluster.reach("digits", JobState::Succeeded).await, "trained 2 epochs");
    let status = cluster.status("digits").await.expect("a job");
    assert_eq!((status.steps_done, status.samples_applied), (4, 16));
    assert_eq!(cluster.fetch("digits").await.expect("files")["model.safetensors"], b"weights");
    ps.called("close job 1").await;
    let opened = ps.calls().into_iter().filter(|call| call.starts_with("open")).count();
    assert_eq!(opened, 1, "{:?}", ps.calls());
}

#[tokio::test]
async fn a_cancelled_job_keeps_its_model_when_master_and_ps_die_before_its_end_is_durable() {
    let (cluster, ps, disk) = stuck_at_its_end(true).await;
    drop(ps);
    let cluster = cluster.kill(Arc::new(disk)).await;
    // Started again under its name, without what it had.
    let _again = FakePs::start(&cluster.url, "ps-0").await;
    assert_eq!(cluster.reach("digits", JobState::Cancelled).await, "cancelled by a user");
    assert_eq!(cluster.fetch("digits").await.expect("files")["model.safetensors"], b"weights");
}

#[tokio::test]
async fn a_job_whose_master_dies_between_its_end_and_the_close_stays_ended() {
    let disk = Arc::new(MemoryStore::default());
    let cluster = Cluster::mortal(disk.clone()).await;
    let ps = FakePs::start(&cluster.url, "ps-0").await;
    let mut worker = Worker::join(&cluster, "a").await;
    cluster.submit(&job(|_| ()), &[]).await.expect("a good job");
    let lease = worker.until_training().await;
    {
        let mut accounts = ps.accounts.lock().expect("unpoisoned");
        (accounts.version, accounts.deaf_to_close) = (4, true);
    }
    worker.do_task(&lease).await;
    worker.until_exported().await;
    assert_eq!(cluster.reach("digits", JobState::Succeeded).await, "trained 2 epochs");
    let before = cluster.status("digits").await.expect("a job");
    ps.called("close job 1").await;
    let cluster = cluster.kill(disk).await;
    assert_eq!(cluster.status("digits").await.expect("a job"), before);
    let mut worker = Worker::join(&cluster, "b").await;
    let reply = worker.beat(&[], false).await;
    assert_eq!((reply.jobs, reply.newest_job), (vec![], 1), "its ps closes what is left");
}
