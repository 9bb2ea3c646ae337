//! What a master must know after a restart, on stable storage: small, and written in the order in
//! which it happened.
//!
//! The books append what changed, under their lock, and go on; one writer commits everything that
//! was appended meanwhile in one transaction. Who tells the outside world of a change waits until
//! it is durable, so nobody ever saw what a restart forgets. A store that fails is tried again for
//! as long as it takes: training needs no journal, and goes on.
//!
//! Tasks and leases are not in it: after a restart the ps' ledgers say what is done.

mod batch;
mod file;
pub(crate) mod keys;
mod memory;

use std::collections::{BTreeMap, BTreeSet};
use std::convert::Infallible;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use prost::Message as _;
use proto::ids::JobId;
use proto::pb;
use proto::retry::{Pause, Retry};
use proto::spec::LimitsSpec;
use tokio::sync::{Notify, watch};
use tokio::time::Instant;

use crate::ended::Ended;
use crate::error::{Error, Result, StoreError};
use crate::events::{self, EVENTS_MAX, EventLog};
use crate::indexes::Indexes;

pub use self::batch::Batch;
#[cfg(test)]
pub(crate) use self::batch::any;
pub use self::file::FileStore;
pub use self::memory::MemoryStore;

/// Records of jobs that are read at once.
const RECORDS_AT_ONCE: usize = 1024;

/// Events that are read at once.
const EVENTS_AT_ONCE: usize = 16_384;

/// A key with its value.
pub type Entry = (String, Vec<u8>);

/// Which entries of a range are read, at most.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Count {
    /// At most this many entries, from the smallest key on.
    Oldest(usize),
    /// At most this many entries, those with the largest keys.
    Newest(usize),
}

/// Stable storage of keys and values.
#[async_trait::async_trait]
pub trait Store: std::fmt::Debug + Send + Sync {
    /// Returns everything that is there.
    async fn load(&self) -> Result<BTreeMap<String, Vec<u8>>, StoreError>;

    /// Entries of a range of keys, by key.
    async fn read(&self, range: &Range<String>, count: Count) -> Result<Vec<Entry>, StoreError> {
        let all = self.load().await?;
        let inside: Vec<_> = all.into_iter().filter(|(key, _)| range.contains(key)).collect();
        Ok(match count {
            Count::Oldest(max) => inside.into_iter().take(max).collect(),
            Count::Newest(max) => {
                let skip = inside.len().saturating_sub(max);
                inside.into_iter().skip(skip).collect()
            }
        })
    }

    /// Writes all of `batch` or nothing; it is durable once this returns.
    async fn commit(&self, batch: &Batch) -> Result<(), StoreError>;
}

/// What an earlier start of a master wrote down.
#[derive(Debug, Default)]
pub(crate) struct Found {
    /// The master's own record; zeros before the first start.
    pub(crate) master: pb::MasterRecord,
    /// Jobs that have not ended, with their newest events.
    pub(crate) jobs: Vec<(pb::JobRecord, EventLog)>,
    /// Jobs that have ended. Their events stay in the journal.
    pub(crate) ended: Vec<(JobId, Ended)>,
    /// Jobs whose record this program cannot read.
    pub(crate) unreadable: Vec<Unreadable>,
    /// What workers found in files.
    pub(crate) indexes: Indexes,
    /// Scripts that are not over.
    pub(crate) scripts: Vec<pb::ScriptRecord>,
    /// What the journal need not keep: an earlier version of this program left it behind.
    pub(crate) left_over: Batch,
}

/// A job that this program cannot take up. It stays in the journal as it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Unreadable {
    pub(crate) job: JobId,
    /// `NAME-ID`, or as much of it as is known.
    pub(crate) name: String,
    /// The reason, and what to do.
    pub(crate) reason: String,
}

impl Unreadable {
    pub(crate) fn new(job: JobId, name: &str, reason: impl std::fmt::Display) -> Self {
        let key = keys::job(job);
        let reason = format!(
            "the journal's `{key}` cannot be read: {reason}; start the version of ebb that wrote it, or give the job up with \
             `ebb cancel --force {job}`; until then its ps keep what they hold of it"
        );
        Self { job, name: format!("{name}-{job}"), reason }
    }
}

impl Found {
    /// Reads the records of all jobs, and the newest events of those that have not ended.
    ///
    /// What of a job cannot be read costs that job, and not the start: an event becomes a warning,
    /// a record an [`Unreadable`].
    ///
    /// # Errors
    /// The store cannot be read, or does not say which master this is.
    pub(crate) async fn load(store: &dyn Store) -> Result<Self> {
        let mut found = Self::default();
        let master = format!("{}\0", keys::MASTER);
        for (_, bytes) in read(store, keys::MASTER.to_owned()..master, Count::Oldest(1)).await? {
            found.master = master_record(&bytes)?;
        }
        let mut range = keys::jobs();
        loop {
            let page = read(store, range.clone(), Count::Oldest(RECORDS_AT_ONCE)).await?;
            let Some((last, _)) = page.last() else { break };
            range.start = format!("{last}\0");
            for (key, bytes) in page {
                found.take(store, &key, &bytes).await?;
            }
        }
        found.take_indexes(store).await?;
        found.take_scripts(store).await?;
        if !found.master.swept {
            found.sweep(store).await?;
        }
        Ok(found)
    }

    /// Reads what workers found in files. An entry that cannot be read is dropped: its file is read
    /// again.
    async fn take_indexes(&mut self, store: &dyn Store) -> Result<()> {
        let mut range = keys::indexes();
        loop {
            let page = read(store, range.clone(), Count::Oldest(RECORDS_AT_ONCE)).await?;
            let Some((last, _)) = page.last() else { return Ok(()) };
            range.start = format!("{last}\0");
            for (key, bytes) in page {
                match (keys::index_of(&key), pb::IndexRecord::decode(&*bytes)) {
                    (Some(file), Ok(record)) => self.indexes.restore(file.to_owned(), record),
                    (_, Err(reason)) => {
                        tracing::warn!(key, %reason, "the index of a file cannot be read; the file will be");
                        self.left_over.remove(key.clone());
                    }
                    (None, Ok(_)) => {}
                }
            }
        }
    }

    /// Reads the scripts. One that cannot be read stays in the journal as it is.
    async fn take_scripts(&mut self, store: &dyn Store) -> Result<()> {
        // There are few, as all of them live.
        for (key, bytes) in read(store, keys::scripts(), Count::Oldest(usize::MAX)).await? {
            match pb::ScriptRecord::decode(&*bytes) {
                Ok(record) => self.scripts.push(record),
                Err(reason) => tracing::error!(key, %reason, "a script cannot be read; it stays as it is"),
            }
        }
        Ok(())
    }

    async fn take(&mut self, store: &dyn Store, key: &str, bytes: &[u8]) -> Result<()> {
        let Some(id) = keys::job_of(key) else {
            tracing::error!(key, "the journal has a key that is no job's; it stays there as it is");
            return Ok(());
        };
        match pb::JobRecord::decode(bytes) {
            Ok(pb::JobRecord { ended: Some(status), .. }) => {
                self.ended.push((id, Ended::new(&status, LimitsSpec::default().stall)));
            }
            Ok(record) => self.jobs.push((record, newest_events(store, id).await?)),
            Err(reason) => self.unreadable.push(Unreadable::new(id, "job", reason)),
        }
        Ok(())
    }

    /// Looks for what versions before this one left behind: events of forgotten jobs, and events
    /// beyond the limit.
    async fn sweep(&mut self, store: &dyn Store) -> Result<()> {
        let jobs = self.jobs.iter().map(|(record, _)| JobId(record.job));
        let others = self.ended.iter().map(|(id, _)| *id).chain(self.unreadable.iter().map(|job| job.job));
        let known: BTreeSet<_> = jobs.chain(others).collect();
        let mut newest = BTreeMap::new();
        let mut range = keys::all_events();
        loop {
            let page = read(store, range.clone(), Count::Oldest(EVENTS_AT_ONCE)).await?;
            let Some((last, _)) = page.last() else { break };
            range.start = format!("{last}\0");
            for (key, _) in page {
                newest.extend(keys::job_of_event(&key).zip(keys::event_of(&key)));
            }
        }
        for (id, newest) in newest {
            match known.contains(&id) {
                false => self.left_over.remove_range(keys::events(id)),
                true if newest > EVENTS_MAX => {
                    self.left_over.remove_range(keys::events_below(id, newest - EVENTS_MAX + 1));
                }
                true => {}
            }
        }
        Ok(())
    }
}

async fn read(store: &dyn Store, range: Range<String>, count: Count) -> Result<Vec<Entry>> {
    store.read(&range, count).await.map_err(Error::Store)
}

/// Returns the newest events of a job; all of them, if these do not say what is trained.
async fn newest_events(store: &dyn Store, id: JobId) -> Result<EventLog> {
    for count in [events::IN_MEMORY, usize::MAX] {
        let newest = read(store, keys::events(id), Count::Newest(count)).await?;
        let all = newest.len() < count;
        let log = EventLog::restored(newest.iter().map(|(key, bytes)| event(key, bytes)));
        if all || log.progress().is_some() {
            return Ok(log);
        }
    }
    unreachable!("nobody has as many events")
}

/// Returns an event, from its bytes; what cannot be read is told in its place, so that numbers have
/// no gaps.
fn event(key: &str, bytes: &[u8]) -> pb::Event {
    pb::Event::decode(bytes).unwrap_or_else(|reason| {
        tracing::error!(key, %reason, "an event of the journal cannot be read; a warning stands in its place");
        let message = format!("the journal's `{key}` cannot be read: {reason}; what happened here is not known");
        let kind = pb::event::Kind::Warning(pb::WarningEvent { message });
        pb::Event { sequence: keys::event_of(key).unwrap_or(0), unix_ms: 0, kind: Some(kind) }
    })
}

/// Returns the master's own record, from its bytes.
pub(crate) fn master_record(bytes: &[u8]) -> Result<pb::MasterRecord> {
    let wrong = |reason| Error::Record { key: keys::MASTER.to_owned(), reason };
    pb::MasterRecord::decode(bytes).map_err(wrong)
}

/// Returns what makes the next start the same master, and one more.
pub(crate) fn keep_identity(identity: u64, starts: u64) -> Batch {
    let record = pb::MasterRecord { identity, starts, swept: true };
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
    /// Being written; stays until it is durable, so a write that is given up half-way loses
    /// nothing.
    writing: Batch,
    newest: Mark,
    /// Time at which the write under way began.
    since: Option<Instant>,
    /// Reason for which its last attempt failed.
    reason: Option<String>,
}

/// A write that takes longer than a store needs, or that fails.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Overdue {
    /// Time since the write began.
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
            pending.batch.append(batch);
            pending.newest.0 += 1;
            self.appended.notify_one();
        }
        pending.newest
    }

    /// Returns up to `count` events of a job with larger numbers than `after`, of those that are
    /// durable.
    ///
    /// # Errors
    /// The store cannot be read.
    pub(crate) async fn events(
        &self,
        id: JobId,
        after: u64,
        count: usize,
    ) -> Result<Vec<pb::Event>, StoreError> {
        let found = self.store.read(&keys::events_after(id, after), Count::Oldest(count)).await?;
        Ok(found.iter().map(|(key, bytes)| event(key, bytes)).collect())
    }

    /// Returns everything that was appended so far.
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
            writing.append(std::mem::take(batch));
            since.get_or_insert_with(Instant::now);
            (writing.clone(), *newest)
        };
        let mut attempts: u32 = 1;
        let judge = |failures, reason: StoreError| {
            if failures == 0 {
                tracing::error!(
                    %reason,
                    "the journal cannot be written; training goes on, new jobs and news wait until it can"
                );
            }
            attempts += 1;
            self.failures.fetch_add(1, Ordering::Relaxed);
            self.pending().reason = Some(reason.to_string());
            Ok::<_, Infallible>(Pause::Growing)
        };
        let Ok(()) = RETRY.run(0, tokio::time::sleep, judge, || self.store.commit(&batch)).await;
        if attempts > 1 {
            tracing::info!(attempts, "the journal is written again");
        }
        let mut pending = self.pending();
        (pending.since, pending.reason) = (None, None);
        pending.writing = Batch::default();
        drop(pending);
        self.durable.send_replace(mark);
    }

    /// Returns the write under way, when there is one.
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
        let mark = journal.append(Batch::default());
        journal.durable(mark).await;
    }
}
