//! What a master must know after a restart, on stable storage: small, and written in the order in which it happened.
//!
//! The books append what changed, under their lock, and go on; one writer commits everything that was appended meanwhile in one
//! transaction. Who tells the outside world of a change waits until it is durable, so nobody ever saw what a restart forgets.
//! A store that fails is tried again for as long as it takes: training needs no journal, and goes on.
//!
//! Tasks and leases are not in it: after a restart the ps' ledgers say what is done.

mod file;
pub(crate) mod keys;
mod memory;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use prost::Message as _;
use proto::ids::JobId;
use proto::pb;
use proto::retry::Retry;
use tokio::sync::{Notify, watch};
use tokio::time::Instant;

use crate::error::{Error, Result};
use crate::events::EventLog;

pub use self::file::FileStore;
pub use self::memory::MemoryStore;

/// Keys with their new values; `None` removes one.
pub type Batch = BTreeMap<String, Option<Vec<u8>>>;

/// Why a store could not do it, for people.
pub type StoreError = Box<dyn std::error::Error + Send + Sync>;

/// Stable storage of keys and values.
#[async_trait::async_trait]
pub trait Store: std::fmt::Debug + Send + Sync {
    /// Everything that is there.
    async fn load(&self) -> Result<BTreeMap<String, Vec<u8>>, StoreError>;

    /// Writes all of `batch` or nothing; it is durable once this returns.
    async fn commit(&self, batch: &Batch) -> Result<(), StoreError>;
}

/// What an earlier start of a master wrote down.
#[derive(Debug, Default)]
pub(crate) struct Found {
    /// The master's own record; zeros before the first start.
    pub(crate) master: pb::MasterRecord,
    pub(crate) jobs: Vec<(pb::JobRecord, EventLog)>,
    /// Jobs whose record this program cannot read.
    pub(crate) unreadable: Vec<Unreadable>,
}

/// A job that this program cannot take up. It stays in the journal as it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Unreadable {
    pub(crate) job: JobId,
    /// `NAME-ID`, or as much of it as is known.
    pub(crate) name: String,
    /// Why, and what to do.
    pub(crate) reason: String,
    /// Everything that the journal has of it.
    pub(crate) keys: Vec<String>,
}

impl Unreadable {
    pub(crate) fn new(job: JobId, name: &str, keys: Vec<String>, reason: impl std::fmt::Display) -> Self {
        let key = keys::job(job);
        let reason = format!(
            "the journal's `{key}` cannot be read: {reason}; start the version of ebb that wrote it, or give the job up with \
             `ebb cancel --force {job}`; until then its ps keep what they hold of it"
        );
        Self { job, name: format!("{name}-{job}"), reason, keys }
    }
}

impl Found {
    /// What of a job cannot be read costs that job, and not the start: an event becomes a warning, a record an [`Unreadable`].
    ///
    /// # Errors
    /// The store cannot be read, or does not say which master this is.
    pub(crate) async fn load(store: &dyn Store) -> Result<Self> {
        let all = store.load().await.map_err(Error::Store)?;
        let mut found = Self::default();
        if let Some(bytes) = all.get(keys::MASTER) {
            found.master = master_record(bytes)?;
        }
        let under = |prefix: &str| {
            let prefix = prefix.to_owned();
            all.range(prefix.clone()..).take_while(move |(key, _)| key.starts_with(&prefix))
        };
        for (key, bytes) in under(keys::JOBS) {
            let Some(id) = keys::job_of(key) else {
                tracing::error!(key, "the journal has a key that is no job's; it stays there as it is");
                continue;
            };
            let events = || under(&keys::events(id));
            match pb::JobRecord::decode(&bytes[..]) {
                Ok(record) => {
                    found
                        .jobs
                        .push((record, EventLog::restored(events().map(|(key, bytes)| event(key, bytes)))));
                }
                Err(reason) => {
                    let keys = std::iter::once(key).chain(events().map(|(key, _)| key)).cloned().collect();
                    found.unreadable.push(Unreadable::new(id, "job", keys, reason));
                }
            }
        }
        Ok(found)
    }
}

/// An event, from its bytes; what cannot be read is told in its place, so that numbers have no gaps.
fn event(key: &str, bytes: &[u8]) -> pb::Event {
    pb::Event::decode(bytes).unwrap_or_else(|reason| {
        tracing::error!(key, %reason, "an event of the journal cannot be read; a warning stands in its place");
        let message = format!("the journal's `{key}` cannot be read: {reason}; what happened here is not known");
        let kind = pb::event::Kind::Warning(pb::WarningEvent { message });
        pb::Event { sequence: keys::event_of(key).unwrap_or(0), unix_ms: 0, kind: Some(kind) }
    })
}

/// The master's own record, from its bytes.
pub(crate) fn master_record(bytes: &[u8]) -> Result<pb::MasterRecord> {
    let wrong = |reason| Error::Record { key: keys::MASTER.to_owned(), reason };
    pb::MasterRecord::decode(bytes).map_err(wrong)
}

/// What makes the next start the same master, and one more.
pub(crate) fn keep_identity(identity: u64, starts: u64) -> Batch {
    let record = pb::MasterRecord { identity, starts };
    Batch::from([(keys::MASTER.to_owned(), Some(record.encode_to_vec()))])
}

/// A moment in the journal: everything appended before it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Mark(u64);

/// The journal of one master.
#[derive(Debug)]
pub(crate) struct Journal {
    store: Arc<dyn Store>,
    pending: Mutex<Pending>,
    appended: Notify,
    durable: watch::Sender<Mark>,
    failures: AtomicU64,
}

#[derive(Debug, Default)]
struct Pending {
    /// Appended since the last write began.
    batch: Batch,
    /// Being written; stays until it is durable, so a write that is given up half-way loses nothing.
    writing: Batch,
    newest: Mark,
    /// When the write under way began.
    since: Option<Instant>,
    /// Why its last attempt failed.
    reason: Option<String>,
}

/// A write that takes longer than a store needs, or that fails.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Overdue {
    /// Since it began.
    pub(crate) waited: Duration,
    /// What the store says; `None` while it says nothing.
    pub(crate) reason: Option<String>,
}

impl Journal {
    pub(crate) fn new(store: Arc<dyn Store>) -> Self {
        let durable = watch::Sender::new(Mark::default());
        let (appended, failures) = (Notify::new(), AtomicU64::new(0));
        Self { store, pending: Mutex::default(), appended, durable, failures }
    }

    /// Takes changes; they are written in the order of the calls.
    pub(crate) fn append(&self, batch: Batch) -> Mark {
        let mut pending = self.pending();
        if !batch.is_empty() {
            pending.batch.extend(batch);
            pending.newest.0 += 1;
            self.appended.notify_one();
        }
        pending.newest
    }

    /// Everything that was appended so far.
    pub(crate) fn newest(&self) -> Mark {
        self.pending().newest
    }

    /// Waits until everything before `mark` is on stable storage.
    pub(crate) async fn durable(&self, mark: Mark) {
        // The sender lives in `self`, so waiting cannot fail.
        let _ = self.durable.subscribe().wait_for(|durable| *durable >= mark).await;
    }

    /// Writes what is appended. Runs until dropped; nothing is lost between two writes.
    pub(crate) async fn write(&self) {
        loop {
            self.appended.notified().await;
            self.flush().await;
        }
    }

    /// Writes what is appended so far.
    pub(crate) async fn flush(&self) {
        let (batch, mark) = {
            let mut pending = self.pending();
            let Pending { batch, writing, newest, since, .. } = &mut *pending;
            writing.append(batch);
            since.get_or_insert_with(Instant::now);
            (writing.clone(), *newest)
        };
        let mut attempt = 0;
        while let Err(reason) = self.store.commit(&batch).await {
            if attempt == 0 {
                tracing::error!(
                    %reason,
                    "the journal cannot be written; training goes on, new jobs and news wait until it can"
                );
            }
            self.failures.fetch_add(1, Ordering::Relaxed);
            self.pending().reason = Some(reason.to_string());
            tokio::time::sleep(RETRY.wait(attempt, 0)).await;
            attempt += 1;
        }
        if attempt > 0 {
            tracing::info!(attempts = attempt + 1, "the journal is written again");
        }
        let mut pending = self.pending();
        (pending.since, pending.reason) = (None, None);
        pending.writing.clear();
        drop(pending);
        self.durable.send_replace(mark);
    }

    /// The write under way, when there is one.
    pub(crate) fn overdue(&self) -> Option<Overdue> {
        let pending = self.pending();
        let reason = pending.reason.clone();
        pending.since.map(|since| Overdue { waited: since.elapsed(), reason })
    }

    /// Attempts to write that failed.
    pub(crate) fn failures(&self) -> u64 {
        self.failures.load(Ordering::Relaxed)
    }

    fn pending(&self) -> MutexGuard<'_, Pending> {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Between two attempts to write.
const RETRY: Retry =
    Retry { first: Duration::from_millis(100), longest: Duration::from_secs(5), attempts_max: u32::MAX };

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;

    /// Fails a number of times, counts its commits.
    #[derive(Debug, Default)]
    struct Flaky {
        inner: MemoryStore,
        failures: AtomicU32,
        commits: AtomicU32,
    }

    #[async_trait::async_trait]
    impl Store for Flaky {
        async fn load(&self) -> Result<BTreeMap<String, Vec<u8>>, StoreError> {
            self.inner.load().await
        }

        async fn commit(&self, batch: &Batch) -> Result<(), StoreError> {
            self.commits.fetch_add(1, Ordering::Relaxed);
            if self.failures.load(Ordering::Relaxed) > 0 {
                self.failures.fetch_sub(1, Ordering::Relaxed);
                return Err("no space left".into());
            }
            self.inner.commit(batch).await
        }
    }

    fn set(key: &str, value: &str) -> Batch {
        Batch::from([(key.to_owned(), Some(value.as_bytes().to_vec()))])
    }

    async fn writing<T>(journal: &Journal, wait: impl Future<Output = T>) -> T {
        tokio::select! {
            biased;
            () = journal.write() => unreachable!("writes for ever"),
            done = wait => done,
        }
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_appended_meanwhile_is_written_at_once_and_in_order() {
        let store = Arc::new(Flaky::default());
        let journal = Journal::new(store.clone());
        journal.append(set("a", "1"));
        journal.append(set("a", "2"));
        let mark = journal.append(set("b", "3"));
        writing(&journal, journal.durable(mark)).await;
        let found = store.load().await.expect("memory");
        assert_eq!(found, BTreeMap::from([("a".into(), b"2".to_vec()), ("b".into(), b"3".to_vec())]));
        assert_eq!(store.commits.load(Ordering::Relaxed), 1);
        let removed = journal.append(Batch::from([("a".to_owned(), None)]));
        writing(&journal, journal.durable(removed)).await;
        assert_eq!(store.load().await.expect("memory").len(), 1);
    }

    #[tokio::test(start_paused = true)]
    async fn nothing_is_durable_before_the_store_took_it_and_failures_are_tried_again() {
        let store = Arc::new(Flaky { failures: AtomicU32::new(3), ..Flaky::default() });
        let journal = Journal::new(store.clone());
        let mark = journal.append(set("a", "1"));
        let early = tokio::time::timeout(Duration::from_millis(50), journal.durable(mark));
        assert!(writing(&journal, early).await.is_err(), "durable before it was written");
        let overdue = journal.overdue().expect("it is not written");
        assert_eq!(overdue.reason.as_deref(), Some("no space left"));
        assert!(overdue.waited >= Duration::from_millis(50) && journal.failures() > 0);
        assert_eq!(store.load().await.expect("memory").len(), 0);
        // That write was given up in mid-retry; what it had taken is still there.
        journal.append(set("b", "2"));
        writing(&journal, journal.durable(mark)).await;
        assert_eq!(store.load().await.expect("memory").len(), 2);
        assert_eq!(journal.overdue(), None);
    }

    #[tokio::test]
    async fn nothing_appended_is_durable_at_once() {
        let journal = Journal::new(Arc::new(MemoryStore::default()));
        let mark = journal.append(Batch::new());
        journal.durable(mark).await;
    }
}
