//! The journal as one redb file in the data folder: each commit is synced to the disk.
//!
//! redb refuses everything after the first error of the disk, until its file is opened again. So an
//! error closes the file, and the next attempt opens it: a disk that has room again needs no
//! restart.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use redb::{Database, DatabaseError, ReadableDatabase, ReadableTable, TableDefinition};

use super::{Batch, Count, Entry, Store};
use crate::error::{Error, Result, StoreError};

const TABLE: TableDefinition<'_, &str, &[u8]> = TableDefinition::new("journal");

/// Longest wait at a start for an earlier use of the file by this process to end.
const BUSY: Duration = Duration::from_secs(10);

/// Wait between two looks whether that use has ended.
const LOOK: Duration = Duration::from_millis(20);

/// Most memory that redb takes for pages of the file. Its default is 1 GiB, which a start would
/// fill, because it reads pages of each job. Afterwards the master seldom reads.
const CACHE_BYTES_MAX: usize = 64 << 20;

#[expect(
    clippy::disallowed_methods,
    reason = "at a start, before the master serves anybody; redb has no wait of its own"
)]
fn pause() {
    std::thread::sleep(LOOK);
}

/// A file of keys and values. One process at a time may have it open.
#[derive(Clone, Debug)]
pub struct FileStore {
    path: PathBuf,
    /// `None` after an error, until the next attempt.
    database: Arc<Mutex<Option<Arc<Database>>>>,
}

impl FileStore {
    /// Opens the file, or makes it. A file that was torn by a crash is repaired to its last commit.
    ///
    /// The caller holds the data folder's lock. So whoever still has the file open is a commit of
    /// an earlier master of this process that has not ended: it is waited for, up to 10 seconds.
    ///
    /// # Errors
    /// It cannot be read, or is no journal.
    pub fn open(path: &Path) -> Result<Self> {
        let unusable = |reason: redb::Error| Error::Journal { path: path.to_owned(), reason: reason.into() };
        let mut waited = Duration::ZERO;
        let database = loop {
            match builder().create(path) {
                Err(DatabaseError::DatabaseAlreadyOpen) if waited < BUSY => pause(),
                opened => break opened.map_err(|error| unusable(error.into()))?,
            }
            waited += LOOK;
        };
        let database = Arc::new(Mutex::new(Some(Arc::new(database))));
        Ok(Self { path: path.to_owned(), database })
    }

    /// Does something with the database, which is opened again where an error has closed it.
    fn with<T>(&self, action: impl FnOnce(&Database) -> Result<T, StoreError>) -> Result<T, StoreError> {
        let database = self.opened()?;
        action(&database).inspect_err(|_| {
            let mut slot = self.slot();
            if slot.as_ref().is_some_and(|open| Arc::ptr_eq(open, &database)) {
                *slot = None;
            }
        })
    }

    fn opened(&self) -> Result<Arc<Database>, StoreError> {
        let mut slot = self.slot();
        if let Some(database) = &*slot {
            return Ok(database.clone());
        }
        // Not `create`: a journal that has vanished is an error, and not an empty one.
        let database = Arc::new(builder().open(&self.path)?);
        *slot = Some(database.clone());
        Ok(database)
    }

    fn slot(&self) -> std::sync::MutexGuard<'_, Option<Arc<Database>>> {
        self.database.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn builder() -> redb::Builder {
    let mut builder = Database::builder();
    builder.set_cache_size(CACHE_BYTES_MAX);
    builder
}

fn read(database: &Database) -> Result<BTreeMap<String, Vec<u8>>, StoreError> {
    let transaction = database.begin_read()?;
    let table = match transaction.open_table(TABLE) {
        Ok(table) => table,
        Err(redb::TableError::TableDoesNotExist(_)) => return Ok(BTreeMap::new()),
        Err(error) => return Err(error.into()),
    };
    let mut all = BTreeMap::new();
    for entry in table.iter()? {
        let (key, value) = entry?;
        all.insert(key.value().to_owned(), value.value().to_owned());
    }
    Ok(all)
}

/// Returns up to `count` entries of a range, in its order, or those at its end.
fn read_some(database: &Database, range: &Range<String>, count: Count) -> Result<Vec<Entry>, StoreError> {
    let transaction = database.begin_read()?;
    let table = match transaction.open_table(TABLE) {
        Ok(table) => table,
        Err(redb::TableError::TableDoesNotExist(_)) => return Ok(Vec::new()),
        Err(error) => return Err(error.into()),
    };
    let mut entries = table.range(range.start.as_str()..range.end.as_str())?;
    let mut found = Vec::new();
    let (max, newest) = match count {
        Count::Oldest(max) => (max, false),
        Count::Newest(max) => (max, true),
    };
    while found.len() < max {
        let next = if newest { entries.next_back() } else { entries.next() };
        let Some(entry) = next else { break };
        let (key, value) = entry?;
        found.push((key.value().to_owned(), value.value().to_owned()));
    }
    if newest {
        found.reverse();
    }
    Ok(found)
}

fn write(database: &Database, batch: &Batch) -> Result<(), StoreError> {
    let transaction = database.begin_write()?;
    {
        let mut table = transaction.open_table(TABLE)?;
        for (begin, end) in &batch.ranges {
            table.retain_in(begin.as_str()..end.as_str(), |_, _| false)?;
        }
        for (key, value) in &batch.keys {
            match value {
                Some(value) => drop(table.insert(key.as_str(), value.as_slice())?),
                None => drop(table.remove(key.as_str())?),
            }
        }
    }
    Ok(transaction.commit()?)
}

#[async_trait::async_trait]
impl Store for FileStore {
    async fn load(&self) -> Result<BTreeMap<String, Vec<u8>>, StoreError> {
        self.with(read)
    }

    async fn read(&self, range: &Range<String>, count: Count) -> Result<Vec<Entry>, StoreError> {
        let (store, range) = (self.clone(), range.clone());
        tokio::task::spawn_blocking(move || store.with(|database| read_some(database, &range, count))).await?
    }

    async fn commit(&self, batch: &Batch) -> Result<(), StoreError> {
        let (store, batch) = (self.clone(), batch.clone());
        tokio::task::spawn_blocking(move || store.with(|database| write(database, &batch))).await?
    }
}

#[cfg(test)]
mod tests {
    use super::super::batch::any::batch;
    use super::*;

    #[tokio::test]
    async fn what_was_committed_is_there_after_it_was_opened_again() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("journal.redb");
        let store = FileStore::open(&path).expect("made");
        assert!(store.load().await.expect("empty").is_empty());
        let batch = Batch::from([("a".to_owned(), Some(vec![1])), ("b".to_owned(), Some(vec![2]))]);
        store.commit(&batch).await.expect("written");
        store.commit(&Batch::from([("a".to_owned(), None)])).await.expect("written");
        drop(store);
        let found = FileStore::open(&path).expect("there").load().await.expect("readable");
        assert_eq!(found, BTreeMap::from([("b".to_owned(), vec![2])]));
    }

    proptest::proptest! {
        #![proptest_config(proptest::prelude::ProptestConfig::with_cases(16))]

        #[test]
        fn a_file_has_what_the_batches_leave_and_reads_ranges_of_it(
            batches in proptest::collection::vec(batch(proptest::prelude::Just(vec![1])), 0..5),
            (one, other) in ("[aej]", "[bfk]"),
            count in 0usize..9,
        ) {
            let folder = tempfile::tempdir().expect("a folder");
            let store = FileStore::open(&folder.path().join("journal.redb")).expect("made");
            let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
            let mut expected = BTreeMap::new();
            for batch in batches {
                runtime.block_on(store.commit(&batch)).expect("written");
                batch.apply(&mut expected);
            }
            proptest::prop_assert_eq!(&runtime.block_on(store.load()).expect("readable"), &expected);
            let range = one.clone().min(other.clone())..one.max(other);
            let all: Vec<_> = expected.into_iter().filter(|(key, _)| range.contains(key)).collect();
            let read = |count| runtime.block_on(store.read(&range, count)).expect("readable");
            let many = count.min(all.len());
            proptest::prop_assert_eq!(&read(Count::Oldest(count)), &all[..many]);
            proptest::prop_assert_eq!(&read(Count::Newest(count)), &all[all.len() - many..]);
        }
    }

    #[test]
    fn a_file_that_is_no_journal_is_refused_by_name() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("journal.redb");
        std::fs::write(&path, b"weights, not a journal").expect("written");
        let error = FileStore::open(&path).expect_err("no journal").to_string();
        assert!(error.contains("journal.redb"), "{error}");
    }

    #[tokio::test]
    async fn a_file_that_an_ending_commit_still_has_open_is_waited_for() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("journal.redb");
        let first = Database::create(&path).expect("made");
        let opening = std::thread::spawn({
            let path = path.clone();
            move || FileStore::open(&path).map(drop)
        });
        // Long enough that the other one finds it open, whenever it looks first.
        std::thread::park_timeout(Duration::from_millis(200));
        drop(first);
        opening.join().expect("no panic").expect("opened once the first one is closed");
    }

    /// A small file system in memory, mounted by root; unmounted with its handle.
    struct Disk(tempfile::TempDir);

    impl Disk {
        fn mount() -> Option<Self> {
            let folder = tempfile::tempdir().expect("a folder");
            let mut mount = std::process::Command::new("mount");
            mount.args(["-t", "tmpfs", "-o", "size=4m", "tmpfs"]).arg(folder.path());
            if mount.output().is_ok_and(|output| output.status.success()) {
                return Some(Self(folder));
            }
            use std::io::Write as _;
            let said =
                "SKIPPED: mounting a tmpfs needs root; a journal on a disk that is really full was not tried";
            let _ = writeln!(std::io::stderr(), "{said}");
            None
        }
    }

    impl Drop for Disk {
        fn drop(&mut self) {
            let _ = std::process::Command::new("umount").arg("-l").arg(self.0.path()).status();
        }
    }

    #[tokio::test]
    async fn a_disk_that_was_full_takes_commits_again_when_there_is_room() {
        let Some(disk) = Disk::mount() else { return };
        let store = FileStore::open(&disk.0.path().join("journal.redb")).expect("made");
        let batch = |number: u32| Batch::from([(format!("{number:05}"), Some(vec![7; 10_000]))]);
        let mut taken = 0;
        let full = loop {
            match store.commit(&batch(taken)).await {
                Ok(()) => taken += 1,
                Err(error) => break error.to_string(),
            }
        };
        assert!(full.contains("No space left"), "{full}");
        // Still full, however often it is tried, and what is there can be read.
        let again = store.commit(&batch(taken)).await.expect_err("still full").to_string();
        assert!(again.contains("No space left"), "{again}");
        assert_eq!(store.load().await.expect("readable").len(), taken as usize);
        let larger =
            std::process::Command::new("mount").args(["-o", "remount,size=16m"]).arg(disk.0.path()).status();
        assert!(larger.expect("mount runs").success());
        store.commit(&batch(taken)).await.expect("there is room");
        assert_eq!(store.load().await.expect("readable").len(), taken as usize + 1);
    }
}
