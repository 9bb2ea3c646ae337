//! The open files of the process, however many workers, jobs and data sets read them.
//!
//! Files that are open are open once. The references are weak, so that a file is closed when the
//! last job that reads it is gone. A file that was changed on disk is another file.
//!
//! This is process-wide state, but harmless: what it holds never changes.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use proto::spec::{DataSpec, FilesSpec, Format, TokensSpec};

use crate::error::{Error, Result};
use crate::index::KnownIndex;
use crate::object::Stamp;
use crate::packed::Access;
use crate::pass::Pass;
use crate::table::{Named, Table};

/// Opens file number `file` of each list of `files`, or finds it open. `pass` says what is learnt
/// of a file that is read to be opened. `known` counts if the files are as it says.
///
/// # Errors
/// A file is missing, malformed, or does not fit its partner.
pub(crate) fn open(
    spec: &DataSpec,
    files: &FilesSpec,
    file: usize,
    root: Option<&Path>,
    known: Option<&KnownIndex>,
    pass: Pass<'_>,
) -> Result<Arc<Table>> {
    if file >= files.len() {
        return Err(Error::NoSuchFile { file, files: files.len() });
    }
    let named = Named::all(spec, files, file, root, pass.observer)?;
    let key = Opened {
        format: spec.format,
        header: spec.header,
        lengths: spec.lengths.clone(),
        tokens: spec.tokens,
        first: (spec.format == Format::Images).then(|| spec.locate(spec.train.name(0), root)),
        files: named.iter().map(|file| (file.list.clone(), file.stamp.clone())).collect(),
        access: named.iter().any(|file| file.stamp.is_remote()).then_some(pass.access),
    };
    let holds = |known: &&KnownIndex| !known.stamp.is_empty() && known.stamp == Named::stamp(&named);
    let cuts = known.filter(holds).map(|known| &known.cuts);
    get(key, pass.access, || Table::of(spec, &named, root, Pass { cuts, ..pass }))
}

/// Identity of an open table: equal keys give equal tables.
#[derive(Clone, Debug, PartialEq)]
struct Opened {
    format: Format,
    /// Whether a CSV file has a header.
    header: bool,
    /// Lengths of ragged columns.
    lengths: BTreeMap<String, usize>,
    /// How records are cut from token files.
    tokens: Option<TokensSpec>,
    /// Folder that numbers the classes of folders of images.
    first: Option<PathBuf>,
    /// Files by the name of their list.
    files: Vec<(String, Stamp)>,
    /// Order in which files on another machine are read, because their blocks follow from it.
    access: Option<Access>,
}

/// Slot of one table. Its lock is held while the table is opened, so that a second reader waits
/// instead of opening it again.
type Slot = Arc<Mutex<Found>>;

/// The open tables of a slot.
#[derive(Default)]
struct Found {
    /// Table for any order of records.
    any: Weak<Table>,
    /// Table of compressed files that are read in sequence.
    packed: Weak<Table>,
}

impl Found {
    /// Returns a table that may be read like this.
    fn get(&self, access: Access) -> Option<Arc<Table>> {
        let packed = || self.packed.upgrade().filter(|_| access == Access::InSequence);
        self.any.upgrade().or_else(packed)
    }

    fn keep(&mut self, table: &Arc<Table>) {
        let place = if table.is_packed() { &mut self.packed } else { &mut self.any };
        *place = Arc::downgrade(table);
    }

    fn is_open(&self) -> bool {
        self.any.strong_count() + self.packed.strong_count() > 0
    }
}

static OPEN: Mutex<Vec<(Opened, Slot)>> = Mutex::new(Vec::new());

/// Returns the table of `key` from memory, or from `open`.
///
/// # Errors
/// `open` fails. The next caller tries again.
fn get(key: Opened, access: Access, open: impl FnOnce() -> Result<Table>) -> Result<Arc<Table>> {
    let slot = slot(key);
    let mut slot = lock(&slot);
    if let Some(table) = slot.get(access) {
        return Ok(table);
    }
    let table = Arc::new(open()?);
    slot.keep(&table);
    Ok(table)
}

fn slot(key: Opened) -> Slot {
    let mut open = lock(&OPEN);
    open.retain(|(_, slot)| Arc::strong_count(slot) > 1 || lock(slot).is_open());
    if let Some((_, slot)) = open.iter().find(|(other, _)| *other == key) {
        return slot.clone();
    }
    let slot = Slot::default();
    open.push((key, slot.clone()));
    slot
}

/// Locks a mutex, even after a panic: an opening that panicked leaves a valid empty slot.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
