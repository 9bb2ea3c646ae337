//! Against a real etcd: who is elected, and that only the leader writes.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use proto::channel::Dialer;
use tokio::sync::watch;
use tokio::time::Instant;

use super::{Client, Election, EtcdStore, Leadership};
use crate::journal::{Batch, Store as _};

#[expect(unreachable_pub, reason = "shared with the tests of the whole program")]
#[path = "../../../tests/harness/etcd.rs"]
pub(super) mod server;

use server::Etcd;

const TTL: Duration = Duration::from_secs(4);

/// Far more than anything here takes.
const PATIENCE: Duration = Duration::from_secs(60);

pub(super) fn client(etcd: &Etcd) -> Client {
    Client::new(&Dialer::tcp(), &etcd.url, "test/", Duration::from_secs(1)).expect("a URL")
}

fn election(etcd: &Etcd, url: &str) -> Election {
    Election::new(client(etcd), url.to_owned(), TTL)
}

pub(super) async fn elected(etcd: &Etcd, url: &str) -> Arc<Leadership> {
    let (leader, _) = watch::channel(None);
    let election = election(etcd, url);
    let campaign = tokio::time::timeout(PATIENCE, election.campaign(&leader));
    Arc::new(campaign.await.expect("elected"))
}

/// A master that stands by, and whom it knows as the leader.
fn standby(etcd: &Etcd, url: &str) -> (tokio::task::JoinHandle<Leadership>, watch::Receiver<Option<String>>) {
    let election = election(etcd, url);
    let (leader_tx, leader) = watch::channel(None);
    (tokio::spawn(async move { election.campaign(&leader_tx).await }), leader)
}

fn set(key: &str, value: Vec<u8>) -> Batch {
    Batch::from([(key.to_owned(), Some(value))])
}

/// More than fits into one transaction, by number and by size.
pub(super) fn large() -> Batch {
    let small = (0..300u32).map(|index| (format!("event/{index:03}"), Some(index.to_le_bytes().to_vec())));
    small.chain([("job/1".to_owned(), Some(vec![7; 3 << 20]))]).collect()
}

pub(super) fn values(batch: Batch) -> BTreeMap<String, Vec<u8>> {
    batch.into_iter().filter_map(|(key, value)| Some((key, value?))).collect()
}

#[tokio::test]
async fn what_was_committed_is_loaded_whatever_its_size() {
    let Some(etcd) = Etcd::start() else { return };
    let leadership = elected(&etcd, "http://a:1").await;
    let store = EtcdStore::new(client(&etcd), leadership.clone());
    assert!(store.load().await.expect("empty").is_empty());
    store.commit(&large()).await.expect("written");
    assert!(store.load().await.expect("readable") == values(large()));
    let peeked = EtcdStore::peek(&client(&etcd), "job/1").await.expect("readable");
    assert!(peeked == Some(vec![7; 3 << 20]));
    assert_eq!(EtcdStore::peek(&client(&etcd), "job").await.expect("readable"), None);
    let removal: Batch = large().into_keys().map(|key| (key, None)).collect();
    store.commit(&removal).await.expect("removed");
    assert!(store.load().await.expect("empty").is_empty());
    assert!(client(&etcd).list("").await.expect("readable").into_keys().eq(["leader".to_owned()]));
}

#[tokio::test]
async fn a_master_that_lost_the_lead_cannot_write() {
    let Some(etcd) = Etcd::start() else { return };
    let first = elected(&etcd, "http://a:1").await;
    let of_first = EtcdStore::new(client(&etcd), first.clone());
    of_first.load().await.expect("empty");
    of_first.commit(&set("job/1", vec![1])).await.expect("written");
    // Nobody renews its lease; it believes what it believes.
    let second = elected(&etcd, "http://b:1").await;
    assert!(!first.is_certain(Instant::now()), "it was certain while another was elected");
    let of_second = EtcdStore::new(client(&etcd), second.clone());
    assert_eq!(of_second.load().await.expect("readable"), values(set("job/1", vec![1])));
    for batch in [set("job/1", vec![2]), large()] {
        let refused = of_first.commit(&batch).await.unwrap_err().to_string();
        assert!(refused.contains("no longer leads"), "{refused}");
        assert!(first.lost().is_cancelled());
    }
    assert_eq!(of_second.load().await.expect("readable"), values(set("job/1", vec![1])));
    of_second.commit(&set("job/1", vec![3])).await.expect("it leads");
    // Giving back a lead that is lost takes nothing from the one who has it.
    first.resign().await;
    of_second.commit(&set("job/1", vec![4])).await.expect("it leads");
}

#[tokio::test]
async fn a_leader_that_renews_stays_and_one_that_resigns_is_replaced_at_once() {
    let Some(etcd) = Etcd::start() else { return };
    let first = elected(&etcd, "http://a:1").await;
    let (campaign, mut known) = standby(&etcd, "http://b:1");
    known.wait_for(|leader| leader.as_deref() == Some("http://a:1")).await.expect("it campaigns");
    let kept = tokio::time::timeout(2 * TTL, first.keep()).await;
    assert!(kept.is_err() && first.is_certain(Instant::now()) && !campaign.is_finished());
    let resigned = Instant::now();
    first.resign().await;
    let second = tokio::time::timeout(PATIENCE, campaign).await.expect("elected").expect("no panic");
    // By the watch: without it the standby looks again after the TTL.
    assert!(resigned.elapsed() < TTL, "{:?}", resigned.elapsed());
    assert!(second.is_certain(Instant::now()) && !first.is_certain(Instant::now()));
}

#[tokio::test]
async fn a_leader_that_etcd_does_not_answer_steps_down_before_its_lease_ends() {
    let Some(etcd) = Etcd::start() else { return };
    let asked = Instant::now();
    let leadership = elected(&etcd, "http://a:1").await;
    etcd.signal("STOP");
    tokio::time::timeout(PATIENCE, leadership.keep()).await.expect("it steps down");
    // Not renewed even once, its lease would have ended `TTL` after it was asked for.
    assert!(leadership.lost().is_cancelled() && asked.elapsed() < TTL, "{:?}", asked.elapsed());
    etcd.signal("CONT");
}
