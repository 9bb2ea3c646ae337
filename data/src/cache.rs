//! What the process keeps of data files, however many workers, jobs and data sets read them.
//!
//! - **Tables.** Files that are open are open once. The references are weak, so that a file is
//!   closed when the last job that reads it is gone. A file that was changed on disk is another
//!   file.
//! - **Blocks and pieces.** Decoded blocks, and pieces of files on other machines, stay in memory
//!   up to a bound. Then those that were not used lately go. A block that lies in a mapped file
//!   takes no memory and is not kept here.
//!
//! Both are process-wide state, but harmless: what they hold never changes.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
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

/// What the cache holds.
#[derive(Clone)]
enum Kept {
    Block(Blocks),
    /// Bytes of a file on another machine.
    #[cfg_attr(not(feature = "cloud"), allow(dead_code, reason = "all files are local"))]
    Piece(bytes::Bytes),
}

/// Place of what the cache holds.
#[derive(Clone, PartialEq, Eq, Hash)]
enum Place {
    Block(Key),
    /// Number of the file in this process, and of the piece in the file.
    #[cfg_attr(not(feature = "cloud"), allow(dead_code, reason = "all files are local"))]
    Piece(u64, u64),
}

#[derive(Clone)]
struct Weights;

impl Weighter<Place, Kept> for Weights {
    fn weight(&self, _: &Place, kept: &Kept) -> u64 {
        match kept {
            Kept::Block(block) => bytes(block),
            Kept::Piece(piece) => piece.len() as u64,
        }
    }
}

fn bytes(block: &Blocks) -> u64 {
    block.iter().map(|column| column.owned_bytes() as u64).sum()
}

static KEPT: LazyLock<Cache<Place, Kept, Weights>> = LazyLock::new(|| {
    let mut options = OptionsBuilder::new();
    let options = options.shards(1).estimated_items_capacity(1024).weight_capacity(default_memory());
    let options = options.build().expect("all options are given");
    Cache::with_options(options, Weights, Default::default(), Default::default())
});

/// Bound of the memory in bytes, if somebody has set it. 0: nobody has.
static LIMIT: AtomicU64 = AtomicU64::new(0);

/// Bounds the memory of decoded blocks in this process, and the size of a file that must be in
/// memory as a whole. Without a call it is [`default_memory`]. Blocks in use are not counted.
pub fn limit_memory(bytes: u64) {
    LIMIT.store(bytes.max(1), Ordering::Relaxed);
    KEPT.set_capacity(bytes);
}

/// Bounds the memory of decoded blocks in this process alone.
pub fn limit_blocks(bytes: u64) {
    KEPT.set_capacity(bytes);
}

/// Returns the most bytes of a file that must be in memory as a whole, such as a compressed one.
pub(crate) fn whole_bytes_max() -> u64 {
    match LIMIT.load(Ordering::Relaxed) {
        0 => default_memory(),
        bytes => bytes,
    }
}

/// Returns a decoded block from memory, or from `read`. Other readers of the same block wait.
///
/// # Errors
/// `read` fails. The next reader tries again.
pub(crate) fn block(key: &Key, read: impl FnOnce() -> Result<Vec<Column>>) -> Result<Blocks> {
    let place = Place::Block(key.clone());
    let kept = KEPT.get_or_insert_with(&place, || read().map(|block| Kept::Block(Arc::new(block))))?;
    let Kept::Block(block) = kept else { unreachable!("a block lies at {key:?}") };
    if bytes(&block) == 0 {
        KEPT.remove(&place);
    }
    Ok(block)
}

/// Forgets the blocks of a table.
pub(crate) fn forget(table: u64) {
    KEPT.retain(|place, _| !matches!(place, Place::Block(key) if key.table == table));
}

/// Returns a piece of a file from memory, or from `fetch`. Other readers of the same piece wait.
///
/// # Errors
/// `fetch` fails. The next reader tries again.
#[cfg(feature = "cloud")]
pub(crate) fn piece(
    file: u64,
    number: u64,
    fetch: impl FnOnce() -> Result<bytes::Bytes>,
) -> Result<bytes::Bytes> {
    match KEPT.get_or_insert_with(&Place::Piece(file, number), || fetch().map(Kept::Piece))? {
        Kept::Piece(piece) => Ok(piece),
        Kept::Block(_) => unreachable!("a piece lies at {file}, {number}"),
    }
}

/// Returns a piece of a file if it is in memory.
#[cfg(feature = "cloud")]
pub(crate) fn known_piece(file: u64, number: u64) -> Option<bytes::Bytes> {
    match KEPT.get(&Place::Piece(file, number))? {
        Kept::Piece(piece) => Some(piece),
        Kept::Block(_) => None,
    }
}

/// Keeps a piece of a file.
#[cfg(feature = "cloud")]
pub(crate) fn keep_piece(file: u64, number: u64, piece: bytes::Bytes) {
    KEPT.insert(Place::Piece(file, number), Kept::Piece(piece));
}

/// Forgets the pieces of a file.
#[cfg(feature = "cloud")]
pub(crate) fn forget_pieces(file: u64) {
    KEPT.retain(|place, _| !matches!(place, Place::Piece(of, _) if *of == file));
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
