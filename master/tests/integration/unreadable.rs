//! A journal with what this program cannot read: it costs as little as possible, and nothing that a
//! ps holds.

use std::sync::Arc;

use master::{Batch, MemoryStore, Store};
use net::channel::Dialer;
use proto::pb;
use proto::pb::JobState;
use proto::pb::event::Kind as Event;
use proto::status::{Failure, Kind};
use store::Stores;

use crate::fake_ps::FakePs;
use crate::harness::{Cluster, Worker, job};

/// Changes the value of the first key that begins so.
async fn change(disk: &MemoryStore, prefix: &str, change: impl FnOnce(&[u8]) -> Vec<u8>) -> String {
    let all = disk.load().await.expect("memory");
    let (key, value) = all.into_iter().find(|(key, _)| key.starts_with(prefix)).expect("a key");
    disk.commit(&Batch::from([(key.clone(), Some(change(&value)))])).await.expect("memory");
    key
}

fn garbage(_: &[u8]) -> Vec<u8> {
    vec![0xff; 7]
}

/// Returns a specification of another version, as it may be.
fn another_version(bytes: &[u8]) -> Vec<u8> {
    let mut record = <pb::JobRecord as prost::Message>::decode(bytes).expect("a record");
    record.spec_json = record.spec_json.replacen('{', r#"{"invented_later": 1,"#, 1);
    prost::Message::encode_to_vec(&record)
}

#[tokio::test]
async fn a_job_that_cannot_be_read_is_shown_and_its_ps_keep_what_they_hold_until_a_user_gives_it_up() {
    for (spoil, name) in [(garbage as fn(&[u8]) -> Vec<u8>, "job-1"), (another_version, "digits-1")] {
        let disk = MemoryStore::default();
        let cluster = Cluster::mortal(Arc::new(disk.clone())).await;
        let ps = FakePs::start(&cluster.url, "ps-0").await;
        let mut worker = Worker::join(&cluster, "a").await;
        cluster.submit(&job(|_| ()), &[]).await.expect("a good job");
        worker.until_training().await;
        let stopped = Arc::new(MemoryStore::default());
        stopped
            .commit(
                &disk
                    .load()
                    .await
                    .expect("memory")
                    .into_iter()
                    .map(|(key, value)| (key, Some(value)))
                    .collect(),
            )
            .await
            .expect("memory");
        let key = change(&stopped, "job/", spoil).await;
        let cluster = cluster.kill(stopped.clone()).await;

        let mut worker = Worker::join(&cluster, "b").await;
        let reply = worker.beat(&[], false).await;
        assert_eq!((reply.jobs, reply.newest_job), (vec![1], 1), "a ps would close it");
        let status = cluster.status("1").await.expect("it is shown");
        assert_eq!((status.state(), status.name.as_str()), (JobState::Unreadable, name));
        for part in [key.as_str(), "ebb cancel --force 1", "the version of ebb that wrote it"] {
            assert!(status.reason.contains(part), "{part} is missing: {}", status.reason);
        }
        let listed = cluster.jobs().list(pb::ListRequest::default()).await.expect("a list").into_inner().jobs;
        assert_eq!(listed, std::slice::from_ref(&status));
        let mut jobs = cluster.jobs();
        let cancel = |force| pb::CancelRequest { job: "1".to_owned(), force };
        let refused = Failure::from(jobs.cancel(cancel(false)).await.unwrap_err());
        assert!(refused.kind == Kind::Internal && refused.message.contains(&status.reason), "{refused}");
        assert!(stopped.load().await.expect("memory").contains_key(&key), "it stays as it is");
        let next = cluster.submit(&job(|_| ()), &[]).await.expect("others go on");
        assert_eq!(next, "digits-2");

        let given_up = jobs.cancel(cancel(true)).await.expect("there is one").into_inner();
        assert_eq!(given_up.state(), JobState::Cancelled);
        let reply = worker.beat(&[], false).await;
        assert_eq!((reply.jobs, reply.newest_job), (vec![2], 2));
        let left = stopped.load().await.expect("memory");
        assert!(
            left.keys().all(|key| key.contains("/00000000000000000002") || key == "master"),
            "{:?}",
            left.keys()
        );
        drop(ps);
    }
}

#[tokio::test]
async fn an_event_that_cannot_be_read_is_a_warning_in_its_place() {
    let disk = Arc::new(MemoryStore::default());
    let cluster = Cluster::mortal(disk.clone()).await;
    let name = cluster.submit(&job(|_| ()), &[]).await.expect("a good job");
    let key = change(&disk, "event/", garbage).await;
    let cluster = cluster.kill(disk).await;
    let mut events = cluster.watch(&name, 0).await;
    let first = events.message().await.expect("events").expect("one");
    let Some(Event::Warning(warning)) = first.kind else { panic!("{first:?}") };
    assert!(first.sequence == 1 && warning.message.contains(&key), "{warning:?}");
}

#[tokio::test]
async fn a_master_that_cannot_read_which_one_it_is_says_what_to_do() {
    let folder = tempfile::tempdir().expect("a folder");
    let disk = Arc::new(MemoryStore::default());
    disk.commit(&Batch::from([("master".to_owned(), Some(vec![0xff; 7]))])).await.expect("memory");
    let options = master::Options { data_dir: folder.path().to_owned(), ..Default::default() };
    let clock = master::Clock::at_rate(1.0);
    let opened = master::Master::open_with(options, Stores::default(), Dialer::tcp(), disk, clock).await;
    let error = opened.expect_err("it is nobody").to_string();
    for part in ["the journal's `master`", "the version of ebb that wrote it", "a copy of the journal"] {
        assert!(error.contains(part), "{part} is missing: {error}");
    }
}
