//! Cache of data files: one copy per process, however many workers and data sets of the process
//! read it.
//!
//! `ebb run --workers 3` is one process with three workers that read the same files. The cache is
//! process-wide state, but harmless: shared tables never change, a file that was changed on disk is
//! another file, and the references are weak, so that the memory is free when the last job that
//! reads the file is gone.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::SystemTime;

use proto::spec::{DataSpec, FilesSpec, Format};

use crate::error::{Error, Result};
use crate::observer::Observer;
use crate::table::Table;

/// Reads file (pair) number `file` of `files`, or finds it in memory.
///
/// # Errors
/// A file is missing, malformed, or does not fit its partner.
pub(crate) fn open(
    spec: &DataSpec,
    files: &FilesSpec,
    file: usize,
    root: Option<&Path>,
    observer: &dyn Observer,
) -> Result<Arc<Table>> {
    let locate = |list: &[String]| list.get(file).map(|name| spec.locate(name, root));
    let Some(features) = locate(&files.features) else {
        return Err(Error::NoSuchFile { file, files: files.features.len() });
    };
    let labels = locate(&files.labels);
    // Called here because another worker of this process may be reading the file already.
    observer.open(&features);
    let stamps = [Some(&features), labels.as_ref()].into_iter().flatten().map(|path| Stamp::of(path));
    let key = Key {
        format: spec.format,
        columns: (spec.label.clone(), spec.header),
        files: stamps.collect::<Result<_>>()?,
    };
    get(key, || Table::load(spec, features, labels, observer))
}

/// Identity of a read: equal keys give equal tables.
#[derive(Clone, Debug, PartialEq)]
struct Key {
    format: Format,
    /// Label column of a CSV file, and whether it has a header.
    columns: (Option<String>, bool),
    files: Vec<Stamp>,
}

/// State of a file at one moment.
#[derive(Clone, Debug, PartialEq)]
struct Stamp {
    path: PathBuf,
    bytes: u64,
    modified: Option<SystemTime>,
}

impl Stamp {
    /// Looks at a file.
    ///
    /// # Errors
    /// The file is missing.
    fn of(path: &Path) -> Result<Self> {
        let file = |source| Error::File { path: path.to_owned(), source };
        let metadata = path.metadata().map_err(file)?;
        let path = path.canonicalize().map_err(file)?;
        Ok(Self { path, bytes: metadata.len(), modified: metadata.modified().ok() })
    }
}

/// Slot of one table. Its lock is held while the table is loaded, so that a second reader waits
/// instead of loading.
type Slot = Arc<Mutex<Weak<Table>>>;

static LOADED: Mutex<Vec<(Key, Slot)>> = Mutex::new(Vec::new());

/// Returns the table of `key` from memory, or from `load`.
///
/// # Errors
/// `load` fails. The next caller tries again.
fn get(key: Key, load: impl FnOnce() -> Result<Table>) -> Result<Arc<Table>> {
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

/// Locks a mutex, even after a panic: a load that panicked leaves a valid empty slot.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
