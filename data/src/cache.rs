//! What the process keeps of data files, however many workers, jobs and data sets read them.
//!
//! - **Tables.** Files that are open are open once. The references are weak, so that a file is
//!   closed when the last job that reads it is gone. A file that was changed on disk is another
//!   file.
//! - **Blocks.** Decoded blocks stay in memory up to a bound. Then those that were not used lately
//!   go. A block that lies in a mapped file takes no memory and is not kept here.
//!
//! Both are process-wide state, but harmless: what they hold never changes.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError, Weak};

use proto::spec::{DataSpec, FilesSpec, Format, TokensSpec};
use quick_cache::sync::Cache;
use quick_cache::{OptionsBuilder, Weighter};

use crate::column::Column;
use crate::error::{Error, Result};
use crate::object::Stamp;
use crate::observer::Observer;
use crate::table::Table;

/// Columns of a block.
pub(crate) type Blocks = Arc<Vec<Column>>;

/// Place of a decoded block.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Key {
    /// Number of the table in this process.
    pub(crate) table: u64,
    pub(crate) part: usize,
    pub(crate) block: usize,
    /// Decoded columns.
    pub(crate) columns: Arc<[usize]>,
}

/// Returns a quarter of the memory that this process may use, in bytes: of the machine's, or of the
/// limit of its control group.
pub fn default_memory() -> u64 {
    let info = rustix::system::sysinfo();
    let machine = info.totalram as u64 * u64::from(info.mem_unit);
    let limit = std::fs::read_to_string("/sys/fs/cgroup/memory.max").ok();
    let limit = limit.and_then(|text| text.trim().parse().ok()).unwrap_or(u64::MAX);
    machine.min(limit) / 4
}

#[derive(Clone)]
struct Bytes;

impl Weighter<Key, Blocks> for Bytes {
    fn weight(&self, _: &Key, block: &Blocks) -> u64 {
        bytes(block)
    }
}

fn bytes(block: &Blocks) -> u64 {
    block.iter().map(|column| column.owned_bytes() as u64).sum()
}

static BLOCKS: LazyLock<Cache<Key, Blocks, Bytes>> = LazyLock::new(|| {
    let mut options = OptionsBuilder::new();
    let options = options.shards(1).estimated_items_capacity(1024).weight_capacity(default_memory());
    let options = options.build().expect("all options are given");
    Cache::with_options(options, Bytes, Default::default(), Default::default())
});

/// Bounds the memory of decoded blocks in this process. Without a call it is [`default_memory`].
/// Blocks in use are not counted.
pub fn limit_memory(bytes: u64) {
    BLOCKS.set_capacity(bytes);
}

/// Returns a decoded block from memory, or from `read`. Other readers of the same block wait.
///
/// # Errors
/// `read` fails. The next reader tries again.
pub(crate) fn block(key: &Key, read: impl FnOnce() -> Result<Vec<Column>>) -> Result<Blocks> {
    let block = BLOCKS.get_or_insert_with(key, || read().map(Arc::new))?;
    if bytes(&block) == 0 {
        BLOCKS.remove(key);
    }
    Ok(block)
}

/// Forgets the blocks of a table.
pub(crate) fn forget(table: u64) {
    BLOCKS.retain(|key, _| key.table != table);
}

/// Opens file number `file` of each list of `files`, or finds it open.
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
    if file >= files.len() {
        return Err(Error::NoSuchFile { file, files: files.len() });
    }
    let paths = files.group(file).map(|(key, name)| (key.to_owned(), spec.locate(name, root)));
    let stamps = paths.map(|(key, path)| {
        // Called here because another worker of this process may be reading the file already.
        observer.open(&path);
        Ok((key, Stamp::of(&path)?))
    });
    let key = Opened {
        format: spec.format,
        header: spec.header,
        lengths: spec.lengths.clone(),
        tokens: spec.tokens,
        first: (spec.format == Format::Images).then(|| spec.locate(spec.train.name(0), root)),
        files: stamps.collect::<Result<_>>()?,
    };
    get(key, || Table::open(spec, files, file, root, observer))
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
}

/// Slot of one table. Its lock is held while the table is opened, so that a second reader waits
/// instead of opening it again.
type Slot = Arc<Mutex<Weak<Table>>>;

static OPEN: Mutex<Vec<(Opened, Slot)>> = Mutex::new(Vec::new());

/// Returns the table of `key` from memory, or from `open`.
///
/// # Errors
/// `open` fails. The next caller tries again.
fn get(key: Opened, open: impl FnOnce() -> Result<Table>) -> Result<Arc<Table>> {
    let slot = slot(key);
    let mut slot = lock(&slot);
    if let Some(table) = slot.upgrade() {
        return Ok(table);
    }
    let table = Arc::new(open()?);
    *slot = Arc::downgrade(&table);
    Ok(table)
}

fn slot(key: Opened) -> Slot {
    let mut open = lock(&OPEN);
    open.retain(|(_, slot)| Arc::strong_count(slot) > 1 || lock(slot).strong_count() > 0);
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
