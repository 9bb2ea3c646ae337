//! Against a real etcd: who is elected, and that only the leader writes.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use net::channel::Dialer;
use tokio::sync::watch;
use tokio::time::Instant;

use super::{Client, Election, EtcdStore, Leadership};
use crate::journal::{Batch, Store as _};

#[expect(unreachable_pub, reason = "shared with the tests of the whole program")]
#[path = "../../../tests/harness/etcd.rs"]
pub(crate) mod server;

#[allow(dead_code, unreachable_pub, reason = "shared with the tests of the whole program")]
#[path = "../../../tests/harness/skip.rs"]
mod skip;

use server::Etcd;
use skip::{Lacks, skipped};

/// Lifetime of leases that are renewed, or whose end a test awaits.
const TTL: Duration = Duration::from_secs(8);

/// Patience of a client: far more than any test here takes.
const PATIENCE: Duration = Duration::from_secs(120);

/// Lifetime of leases that do not expire while a test runs.
const LONG: Duration = Duration::from_secs(600);

pub(crate) fn client(etcd: &Etcd) -> Client {
    Client::new(&Dialer::tcp(), &etcd.url, "test/", PATIENCE).expect("a URL")
}

fn election(etcd: &Etcd, url: &str, ttl: Duration) -> Election {
    Election::new(client(etcd), url.to_owned(), ttl)
}

/// Returns a leader whose lease lasts until it is ended.
pub(crate) async fn elected(etcd: &Etcd, url: &str) -> Arc<Leadership> {
    elected_for(LONG, etcd, url).await
}

async fn elected_for(ttl: Duration, etcd: &Etcd, url: &str) -> Arc<Leadership> {
    let (leader, _) = watch::channel(None);
    let election = election(etcd, url, ttl);
    let campaign = tokio::time::timeout(PATIENCE, election.campaign(&leader));
    Arc::new(campaign.await.expect("elected"))
}

/// Returns a master that stands by, and whom it knows as the leader. It looks again by itself after
/// a long time only.
fn standby(etcd: &Etcd, url: &str) -> (tokio::task::JoinHandle<Leadership>, watch::Receiver<Option<String>>) {
    let election = election(etcd, url, LONG);
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
    batch.keys.into_iter().filter_map(|(key, value)| Some((key, value?))).collect()
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
    let removal: Batch = large().keys.into_keys().map(|key| (key, None)).collect();
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
    // It believes what it believes.
    first.expire().await;
    let second = elected(&etcd, "http://b:1").await;
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
async fn a_leader_whose_lease_nobody_renews_is_not_certain_when_another_is_elected() {
    let Some(etcd) = Etcd::start() else { return };
    let first = elected_for(TTL, &etcd, "http://a:1").await;
    let _second = elected(&etcd, "http://b:1").await;
    assert!(!first.is_certain(Instant::now()), "it was certain while another was elected");
}

#[tokio::test]
async fn a_leader_that_renews_stays_and_one_that_resigns_is_replaced_at_once() {
    let Some(etcd) = Etcd::start() else { return };
    // A leader renews its lease long before the end. So a slow machine loses no lead.
    let ttl = 3 * TTL;
    let first = elected_for(ttl, &etcd, "http://a:1").await;
    let granted = first.until();
    let (campaign, mut known) = standby(&etcd, "http://b:1");
    known.wait_for(|leader| leader.as_deref() == Some("http://a:1")).await.expect("it campaigns");
    // Until it is certain of longer than the lease that it was given.
    let outlives = async {
        while first.until() < granted + TTL {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::select! {
        () = first.keep() => panic!("it lost the lead"),
        () = outlives => {}
    }
    assert!(first.is_certain(Instant::now()) && !campaign.is_finished());
    first.resign().await;
    // By the watch, as the standby looks again by itself much later.
    assert!(LONG > 2 * PATIENCE);
    let second = tokio::time::timeout(PATIENCE, campaign).await.expect("elected").expect("no panic");
    assert!(second.is_certain(Instant::now()) && !first.is_certain(Instant::now()));
}

#[tokio::test]
async fn a_leader_that_etcd_does_not_answer_steps_down_before_its_lease_ends() {
    let Some(etcd) = Etcd::start() else { return };
    let leadership = elected_for(TTL, &etcd, "http://a:1").await;
    let elected = Instant::now();
    etcd.signal("STOP");
    let until = leadership.until();
    tokio::time::timeout(PATIENCE, leadership.keep()).await.expect("it steps down");
    assert!(leadership.lost().is_cancelled());
    // Its lease was granted before it was elected, and ends no sooner than a quarter after what it
    // counted on.
    assert!(leadership.until() == until && until <= elected + TTL - TTL / 4);
    etcd.signal("CONT");
}
