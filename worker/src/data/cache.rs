//! One copy of a data file per process, however many workers and data sets of the process read it.
//!
//! `ebb run --workers 3` is one process with three workers that read the same files. The only process-wide state of this
//! crate, and harmless as such: what is shared never changes, a file that was changed on disk is another file, and the
//! references are weak, so that the memory is free when the last job that reads the file is gone.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::SystemTime;

use proto::spec::Format;

use super::table::Table;
use crate::error::{Error, Result};

/// What makes two reads the same.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Key {
    pub(super) format: Format,
    /// CSV: label column and whether there is a header.
    pub(super) columns: (Option<String>, bool),
    pub(super) files: Vec<Stamp>,
}

/// A file as it is now.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Stamp {
    path: PathBuf,
    bytes: u64,
    modified: Option<SystemTime>,
}

impl Stamp {
    /// Looks at a file.
    ///
    /// # Errors
    /// It is not there.
    pub(super) fn of(path: &Path) -> Result<Self> {
        let file = |source| Error::File { path: path.to_owned(), source };
        let metadata = path.metadata().map_err(file)?;
        let path = path.canonicalize().map_err(file)?;
        Ok(Self { path, bytes: metadata.len(), modified: metadata.modified().ok() })
    }
}

/// A place for one table. Its lock is held while the table is loaded: whoever wants it too waits instead of loading.
type Slot = Arc<Mutex<Weak<Table>>>;

static LOADED: Mutex<Vec<(Key, Slot)>> = Mutex::new(Vec::new());

/// The table of `key`: the one in memory, or else what `load` reads.
///
/// # Errors
/// Those of `load`; the next caller tries again.
pub(super) fn get(key: Key, load: impl FnOnce() -> Result<Table>) -> Result<Arc<Table>> {
    let slot = slot(key);
    let mut slot = lock(&slot);
    if let Some(table) = slot.upgrade() {
        return Ok(table);
    }
    let table = Arc::new(load()?);
    *slot = Arc::downgrade(&table);
    Ok(table)
}

fn slot(key: Key) -> Slot {
    let mut loaded = lock(&LOADED);
    loaded.retain(|(_, slot)| Arc::strong_count(slot) > 1 || lock(slot).strong_count() > 0);
    if let Some((_, slot)) = loaded.iter().find(|(other, _)| *other == key) {
        return slot.clone();
    }
    let slot = Slot::default();
    loaded.push((key, slot.clone()));
    slot
}

/// A load that panicked leaves an empty slot, which is a good one.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
