//! What the process keeps of data files in memory, however many workers, jobs and data sets read
//! them: decoded blocks, and pieces of files on other machines and of compressed files.
//!
//! They stay up to a bound (`room.rs`). Then those go that were not used for longest. A block
//! serves many batches in sequence and then none for an epoch, so a policy that keeps what was used
//! often would drop the block at hand. A block that lies in a mapped file takes no memory and is
//! not kept here.
//!
//! This is process-wide state, but harmless: what it holds never changes.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};

use lru::LruCache;
use once_cell::sync::OnceCell;

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
    /// Bytes of a file on another machine, or of a compressed one.
    Piece(bytes::Bytes),
}

/// Place of what the cache holds.
#[derive(Clone, PartialEq, Eq, Hash)]
enum Place {
    Block(Key),
    /// Number of the file in this process, and of the piece in the file.
    Piece(u64, u64),
}

impl Kept {
    fn bytes(&self) -> u64 {
        match self {
            Self::Block(block) => block.iter().map(|column| column.owned_bytes() as u64).sum(),
            Self::Piece(piece) => piece.len() as u64,
        }
    }
}

/// What lies at a place. Whoever comes while it is read waits for it.
type Cell = Arc<OnceCell<Kept>>;

/// What is kept, the last used first.
struct Shelf {
    /// With the bytes of each, which are 0 while it is read.
    cells: LruCache<Place, (Cell, u64)>,
    /// Bytes of all together.
    bytes: u64,
    bytes_max: u64,
}

impl Shelf {
    /// Counts what was read at a place, and makes room for it.
    fn keep(&mut self, place: Place, cell: Cell) {
        let bytes = cell.get().map_or(0, Kept::bytes);
        self.bytes += bytes;
        if let Some((_, (_, before))) = self.cells.push(place, (cell, bytes)) {
            self.bytes -= before;
        }
        self.shrink();
    }

    fn shrink(&mut self) {
        while self.bytes > self.bytes_max
            && let Some((_, (_, bytes))) = self.cells.pop_lru()
        {
            self.bytes -= bytes;
        }
    }

    fn forget(&mut self, place: &Place) {
        if let Some((_, bytes)) = self.cells.pop(place) {
            self.bytes -= bytes;
        }
    }

    fn forget_all(&mut self, is_gone: impl Fn(&Place) -> bool) {
        let gone: Vec<Place> =
            self.cells.iter().filter(|(place, _)| is_gone(place)).map(|(place, _)| place.clone()).collect();
        gone.iter().for_each(|place| self.forget(place));
    }
}

static SHELF: LazyLock<Mutex<Shelf>> = LazyLock::new(|| {
    Mutex::new(Shelf { cells: LruCache::unbounded(), bytes: 0, bytes_max: default_memory() })
});

fn shelf() -> MutexGuard<'static, Shelf> {
    SHELF.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns what lies at a place, or what `read` makes. Others that want it wait for that.
///
/// # Errors
/// `read` fails. The next reader tries again.
fn get(place: Place, read: impl FnOnce() -> Result<Kept>) -> Result<Kept> {
    let cell = shelf().cells.get_or_insert(place.clone(), Default::default).0.clone();
    let mut is_new = false;
    let kept = cell.get_or_try_init(|| {
        is_new = true;
        read()
    });
    match &kept {
        // A block in a mapped file.
        Ok(kept) if kept.bytes() == 0 => shelf().forget(&place),
        Ok(_) if is_new => shelf().keep(place, cell.clone()),
        Ok(_) => {}
        Err(_) => shelf().forget(&place),
    }
    kept.cloned()
}

/// Sets the most bytes of blocks and pieces. What is too much is forgotten.
pub(crate) fn resize(bytes: u64) {
    let mut shelf = shelf();
    shelf.bytes_max = bytes;
    shelf.shrink();
}

/// Returns a decoded block from memory, or from `read`. Other readers of the same block wait.
///
/// # Errors
/// `read` fails. The next reader tries again.
pub(crate) fn block(key: &Key, read: impl FnOnce() -> Result<Vec<Column>>) -> Result<Blocks> {
    match get(Place::Block(key.clone()), || read().map(|block| Kept::Block(Arc::new(block))))? {
        Kept::Block(block) => Ok(block),
        Kept::Piece(_) => unreachable!("a block lies at {key:?}"),
    }
}

/// Forgets the blocks of a table.
pub(crate) fn forget(table: u64) {
    shelf().forget_all(|place| matches!(place, Place::Block(key) if key.table == table));
}

/// Number of the next file of this process whose pieces may lie here.
static NEXT_FILE: AtomicU64 = AtomicU64::new(0);

/// Returns the number of a file whose pieces may lie here.
pub(crate) fn next_file() -> u64 {
    NEXT_FILE.fetch_add(1, Ordering::Relaxed)
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
    match get(Place::Piece(file, number), || fetch().map(Kept::Piece))? {
        Kept::Piece(piece) => Ok(piece),
        Kept::Block(_) => unreachable!("a piece lies at {file}, {number}"),
    }
}

/// Returns a piece of a file if it is in memory.
pub(crate) fn known_piece(file: u64, number: u64) -> Option<bytes::Bytes> {
    match shelf().cells.get(&Place::Piece(file, number))?.0.get()? {
        Kept::Piece(piece) => Some(piece.clone()),
        Kept::Block(_) => None,
    }
}

/// Keeps a piece of a file.
pub(crate) fn keep_piece(file: u64, number: u64, piece: bytes::Bytes) {
    shelf().keep(Place::Piece(file, number), Arc::new(OnceCell::with_value(Kept::Piece(piece))));
}

/// Forgets the pieces of a file.
pub(crate) fn forget_pieces(file: u64) {
    shelf().forget_all(|place| matches!(place, Place::Piece(of, _) if *of == file));
}

#[cfg(test)]
mod tests {
    use proto::column::{ColumnSpec, ElementType};

    use super::*;
    use crate::column::{ALIGNMENT, Memory};
    use crate::error::Error;

    /// A column takes whole lines of memory.
    const LINE: u64 = ALIGNMENT as u64;

    /// Returns a column of so many lines of memory.
    fn cell(lines: usize) -> Cell {
        let bytes = lines * ALIGNMENT;
        let mut column = Column::with_capacity(ColumnSpec::fixed("x", ElementType::U8, [bytes]), 1);
        column.push(&vec![1; bytes]);
        Arc::new(OnceCell::with_value(Kept::Block(Arc::new(vec![column]))))
    }

    fn place(block: usize) -> Place {
        Place::Block(Key { table: u64::MAX, part: 0, block, columns: [0].into() })
    }

    fn shelf_of(lines: u64) -> Shelf {
        Shelf { cells: LruCache::unbounded(), bytes: 0, bytes_max: lines * LINE }
    }

    #[test]
    fn what_was_not_used_for_longest_goes_first() {
        let mut shelf = shelf_of(30);
        (0..3).for_each(|block| shelf.keep(place(block), cell(10)));
        // The block at hand stays, however often the others were used before.
        shelf.cells.get(&place(0));
        shelf.keep(place(3), cell(10));
        let held: Vec<bool> = (0..4).map(|block| shelf.cells.contains(&place(block))).collect();
        assert_eq!((held, shelf.bytes), (vec![true, false, true, true], 30 * LINE));
        shelf.keep(place(4), cell(31));
        assert_eq!((shelf.cells.len(), shelf.bytes), (0, 0), "larger than all room");
    }

    #[test]
    fn bytes_are_counted_once_and_given_back() {
        let mut shelf = shelf_of(100);
        shelf.keep(place(0), cell(10));
        shelf.keep(place(0), cell(20));
        shelf.keep(place(1), cell(5));
        assert_eq!(shelf.bytes, 25 * LINE);
        shelf.forget(&place(1));
        shelf.forget(&place(1));
        assert_eq!(shelf.bytes, 20 * LINE);
        shelf.forget_all(|of| *of == place(0));
        assert_eq!((shelf.bytes, shelf.cells.len()), (0, 0));
    }

    #[test]
    fn a_block_is_read_once_and_again_after_an_error() {
        let key = |block| Key { table: u64::MAX - 1, part: 0, block, columns: [0].into() };
        let failed = block(&key(0), || Err(Error::NoRecord { record: 1, records: 1 }));
        assert!(failed.is_err());
        let column = || Column::floats("x", &[2], 1, &[1.0, 2.0]);
        let first = block(&key(0), || Ok(vec![column()])).unwrap();
        let again = block(&key(0), || panic!("it is in memory")).unwrap();
        assert!(Arc::ptr_eq(&first, &again));
        // A block in a mapped file is not kept.
        let bytes: Arc<Vec<u8>> = Arc::new(vec![0; 4]);
        let spec = ColumnSpec::fixed("x", ElementType::U8, [4]);
        let mapped = || Column::fixed(spec.clone(), 1, Memory::File { bytes: bytes.clone(), range: 0..4 });
        block(&key(1), || Ok(vec![mapped()])).unwrap();
        assert!(!shelf().cells.contains(&Place::Block(key(1))));
        forget(u64::MAX - 1);
        assert!(!shelf().cells.contains(&Place::Block(key(0))));
    }
}
