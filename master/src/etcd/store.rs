//! The journal in etcd. What fits into one transaction is one; a larger batch is staged first:
//!
//! ```text
//!   staged/00000000 ..   its operations, one a key
//!   staged/ready         all are there: the batch counts as written, and any leader finishes it
//! ```
//!
//! Then its transactions are done one after the other, which may be repeated, and what was staged
//! is removed. A leader that finds a batch which is ready does that first, so nobody ever reads
//! half of one. Every transaction is fenced by the lead.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use prost::Message as _;
use tokio::sync::Mutex;

use super::client::{Client, end_of};
use super::election::{LEADER, Leadership};
use super::pb::RequestOp;
use super::pieces;
use crate::error::StoreError;
use crate::journal::{Batch, Count, Entry, Store};

const JOURNAL: &str = "journal/";
const STAGED: &str = "staged/";
const READY: &str = "ready";

/// The journal, for as long as one master leads.
#[derive(Debug)]
pub(crate) struct EtcdStore {
    client: Client,
    leadership: Arc<Leadership>,
    /// A staged batch may be there that is not done. Held while one is written.
    unfinished: Mutex<bool>,
}

impl EtcdStore {
    pub(crate) fn new(client: Client, leadership: Arc<Leadership>) -> Self {
        Self { client, leadership, unfinished: Mutex::new(true) }
    }

    /// Returns what is at `key`, for those who do not lead: it may change at any moment.
    pub(crate) async fn peek(client: &Client, key: &str) -> Result<Option<Vec<u8>>, StoreError> {
        let found = client.list(&format!("{JOURNAL}{key}")).await?;
        // Found under what was asked for, the key itself has no name left.
        let whole = found.into_iter().filter(|(name, _)| name.is_empty() || name.starts_with('\0'));
        let whole = whole.map(|(name, value)| (format!("{key}{name}"), value)).collect();
        Ok(pieces::join(&whole)?.remove(key))
    }

    async fn write(&self, operations: Vec<RequestOp>) -> Result<(), StoreError> {
        let made = self.leadership.made();
        let reply = self.client.transaction(LEADER, made, operations).await?;
        if reply.succeeded {
            return Ok(());
        }
        self.leadership.lose("etcd refused a write: another master leads");
        Err(format!("this master no longer leads (since revision {made}): its write was refused").into())
    }

    /// Does what is staged, when there may be anything.
    async fn finish_first(&self, unfinished: &mut bool) -> Result<(), StoreError> {
        if *unfinished {
            self.finish().await?;
            *unfinished = false;
        }
        Ok(())
    }

    /// Does what an earlier write, perhaps of an earlier leader, had staged.
    async fn finish(&self) -> Result<(), StoreError> {
        let staged = self.client.list(STAGED).await?;
        if staged.is_empty() {
            return Ok(());
        }
        if staged.contains_key(READY) {
            let operations = staged.iter().filter(|(key, _)| *key != READY);
            let operations =
                operations.map(|(_, bytes)| RequestOp::decode(&bytes[..])).collect::<Result<Vec<_>, _>>()?;
            self.write_all(pieces::transactions(operations)).await?;
        }
        self.clear().await
    }

    async fn stage(&self, transactions: &[Vec<RequestOp>]) -> Result<(), StoreError> {
        let key = |name: &str| self.client.key(&format!("{STAGED}{name}")).into_bytes();
        let operations = transactions.iter().flatten().enumerate();
        let staged = operations
            .map(|(index, operation)| pieces::put(key(&format!("{index:08}")), operation.encode_to_vec()));
        self.write_all(pieces::transactions(staged.collect())).await?;
        self.write(vec![pieces::put(key(READY), Vec::new())]).await
    }

    async fn clear(&self) -> Result<(), StoreError> {
        let staged = self.client.key(STAGED);
        self.write(vec![pieces::delete(staged.clone().into_bytes(), end_of(&staged))]).await
    }

    async fn write_all(&self, transactions: Vec<Vec<RequestOp>>) -> Result<(), StoreError> {
        for transaction in transactions {
            self.write(transaction).await?;
        }
        Ok(())
    }
}

#[async_trait::async_trait]
impl Store for EtcdStore {
    async fn load(&self) -> Result<BTreeMap<String, Vec<u8>>, StoreError> {
        self.finish_first(&mut *self.unfinished.lock().await).await?;
        Ok(pieces::join(&self.client.list(JOURNAL).await?)?)
    }

    async fn read(&self, range: &Range<String>, count: Count) -> Result<Vec<Entry>, StoreError> {
        self.finish_first(&mut *self.unfinished.lock().await).await?;
        let whole = |name: &str| self.client.key(&format!("{JOURNAL}{name}")).into_bytes();
        let (begin, end) = (whole(&range.start), whole(&range.end));
        let max = match count {
            Count::Oldest(max) => max,
            Count::Newest(_) => usize::MAX,
        };
        let heads =
            |found: &BTreeMap<String, Vec<u8>>| found.keys().filter(|key| pieces::is_head(key)).count();
        let mut found = self.client.read(JOURNAL, begin, end, |found| heads(found) > max).await?;
        // The last one may lack pieces.
        let beyond = found.keys().filter(|key| pieces::is_head(key)).nth(max).cloned();
        beyond.into_iter().for_each(|beyond| drop(found.split_off(&beyond)));
        let mut values: Vec<_> = pieces::join(&found)?.into_iter().collect();
        if let Count::Newest(max) = count {
            values.drain(..values.len().saturating_sub(max));
        }
        Ok(values)
    }

    async fn commit(&self, batch: &Batch) -> Result<(), StoreError> {
        let mut unfinished = self.unfinished.lock().await;
        // Before anything newer: what is staged would overwrite it.
        self.finish_first(&mut unfinished).await?;
        let operations = pieces::operations(&self.client.key(JOURNAL), batch);
        let mut transactions = pieces::transactions(operations);
        if transactions.len() <= 1 {
            return match transactions.pop() {
                Some(transaction) => self.write(transaction).await,
                None => Ok(()),
            };
        }
        *unfinished = true;
        self.stage(&transactions).await?;
        self.write_all(transactions).await?;
        self.clear().await?;
        *unfinished = false;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{client, elected, large, server, values};
    use super::*;

    #[tokio::test]
    async fn a_batch_that_was_ready_is_finished_by_the_next_leader_and_another_is_dropped() {
        let Some(etcd) = server::Etcd::start() else { return };
        let first = elected(&etcd, "http://a:1").await;
        let store = EtcdStore::new(client(&etcd), first.clone());
        store.load().await.expect("empty");
        let transactions = |batch: &Batch| {
            let operations = pieces::operations(&client(&etcd).key(JOURNAL), batch);
            pieces::transactions(operations)
        };
        // The leader dies after the first of its transactions.
        let large_ones = transactions(&large());
        store.stage(&large_ones).await.expect("staged");
        store.write(large_ones[0].clone()).await.expect("written");
        first.resign().await;

        let second = elected(&etcd, "http://b:1").await;
        let store = EtcdStore::new(client(&etcd), second.clone());
        assert!(store.load().await.expect("readable") == values(large()));
        assert!(client(&etcd).list(STAGED).await.expect("readable").is_empty());
        // This one dies before all is staged.
        let removal: Batch = large().keys.into_keys().map(|key| (key, None)).collect();
        store.stage(&transactions(&removal)).await.expect("staged");
        let ready = client(&etcd).key(&format!("{STAGED}{READY}"));
        store.write(vec![pieces::delete(ready.clone().into_bytes(), end_of(&ready))]).await.expect("written");
        second.resign().await;

        let third = elected(&etcd, "http://c:1").await;
        let store = EtcdStore::new(client(&etcd), third);
        assert!(store.load().await.expect("readable") == values(large()));
    }

    #[tokio::test]
    async fn what_is_staged_is_written_before_anything_newer() {
        let Some(etcd) = server::Etcd::start() else { return };
        let store = EtcdStore::new(client(&etcd), elected(&etcd, "http://a:1").await);
        let operations = pieces::operations(&client(&etcd).key(JOURNAL), &large());
        store.stage(&pieces::transactions(operations)).await.expect("staged");
        let newer = Batch::from([("job/1".to_owned(), Some(vec![1])), ("event/000".to_owned(), None)]);
        store.commit(&newer).await.expect("written");
        let mut expected = values(large());
        expected.insert("job/1".to_owned(), vec![1]);
        expected.remove("event/000");
        assert!(store.load().await.expect("readable") == expected);
    }

    #[tokio::test]
    async fn ranges_are_read_in_part_and_removed_whole() {
        let Some(etcd) = server::Etcd::start() else { return };
        let store = EtcdStore::new(client(&etcd), elected(&etcd, "http://a:1").await);
        store.commit(&large()).await.expect("written");
        let all: Vec<_> = values(large()).into_iter().collect();
        let everything = "a".to_owned().."z".to_owned();
        for count in [0, 1, 299, 300, 301, 999] {
            let many = all.len().min(count);
            let oldest = store.read(&everything, Count::Oldest(count)).await.expect("readable");
            assert!(oldest == all[..many], "{count}");
            let newest = store.read(&everything, Count::Newest(count)).await.expect("readable");
            assert!(newest == all[all.len() - many..], "{count}");
        }
        let mut removal = Batch::default();
        removal.remove_range("event/".to_owned().."event/299".to_owned());
        removal.remove("job/1".to_owned());
        removal.set("event/007".to_owned(), vec![7]);
        store.commit(&removal).await.expect("written");
        assert!(
            store
                .load()
                .await
                .expect("readable")
                .into_keys()
                .eq(["event/007", "event/299"].map(str::to_owned))
        );
    }
}
