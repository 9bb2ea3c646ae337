//! What the process keeps of data files in memory, however many workers, jobs and data sets read
//! them: decoded blocks, and pieces of files on other machines.
//!
//! They stay up to a bound (`room.rs`). Then those that were not used lately go. A block that lies
//! in a mapped file takes no memory and is not kept here.
//!
//! This is process-wide state, but harmless: what it holds never changes.

use std::sync::{Arc, LazyLock};

use quick_cache::sync::Cache;
use quick_cache::{OptionsBuilder, Weighter};

use crate::column::Column;
use crate::error::Result;
use crate::memory::memory_limit;

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

/// Returns a quarter of the memory that this process may use, in bytes.
pub fn default_memory() -> u64 {
    memory_limit() / 4
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

/// Sets the most bytes of blocks and pieces. What is too much is forgotten.
pub(crate) fn resize(bytes: u64) {
    KEPT.set_capacity(bytes);
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
