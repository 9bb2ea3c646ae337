//! The memory for data of this process, under one limit: files that are held whole, and the blocks
//! and pieces of the cache.
//!
//! ```text
//! | held files | blocks and pieces | free |
//! 0            held                          limit
//! ```
//!
//! A file that is held, such as an unpacked one, stays until it is closed. The cache can forget. So
//! files come first, and the cache has what they leave. A file that does not fit is refused: the
//! files before it stay open for as long as their jobs run, so waiting for them could take forever.
//!
//! A compressed file that is read in sequence need not be held. It is held only while all held
//! files together have half of the room at most, so that the cache keeps the other half.

use std::path::Path;
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};

use crate::cache;
use crate::column::FileBytes;
use crate::error::{Error, Result as DataResult, wrong};

/// The holders of memory, and how many bytes each has. Pure.
#[derive(Debug)]
struct Accounts {
    limit: u64,
    /// Most bytes of the cache, whatever files leave.
    cache_max: u64,
    /// Bytes of held files.
    held: u64,
}

/// Refusal of bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Full {
    limit: u64,
    /// Bytes of held files.
    held: u64,
}

impl Accounts {
    /// Takes bytes for a file, if all files then have at most `most`.
    ///
    /// # Errors
    /// They would have more. Nothing is taken then.
    fn hold(&mut self, bytes: u64, most: u64) -> Result<(), Full> {
        self.check(bytes, most)?;
        self.held += bytes;
        Ok(())
    }

    /// Checks that `bytes` and those of all files are at most `most` together.
    ///
    /// # Errors
    /// They are more.
    fn check(&self, bytes: u64, most: u64) -> Result<(), Full> {
        let fits = self.held.checked_add(bytes).is_some_and(|sum| sum <= most);
        fits.then_some(()).ok_or(Full { limit: self.limit, held: self.held })
    }

    /// Gives bytes of a file back.
    const fn release(&mut self, bytes: u64) {
        self.held = self.held.saturating_sub(bytes);
    }

    /// Returns the most bytes of the cache.
    const fn cache(&self) -> u64 {
        let left = self.limit.saturating_sub(self.held);
        if left < self.cache_max { left } else { self.cache_max }
    }
}

static ROOM: LazyLock<Mutex<Accounts>> =
    LazyLock::new(|| Mutex::new(Accounts { limit: cache::default_memory(), cache_max: u64::MAX, held: 0 }));

fn room() -> MutexGuard<'static, Accounts> {
    ROOM.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Bounds the memory for data of this process: decoded blocks, parts of files on other machines,
/// and files that must be in memory as a whole, together. Without a call it is
/// [`default_memory`](crate::default_memory). Blocks in use are not counted, nor files that are
/// mapped.
pub fn limit_memory(bytes: u64) {
    let mut room = room();
    room.limit = bytes.max(1);
    cache::resize(room.cache());
}

/// Bounds the memory of decoded blocks and of parts of files alone, within the limit of all data.
pub fn limit_blocks(bytes: u64) {
    let mut room = room();
    room.cache_max = bytes;
    cache::resize(room.cache());
}

/// Returns the limit, which is also that of one file or one record that must be in memory as a
/// whole.
pub(crate) fn bytes_max() -> u64 {
    room().limit
}

/// Returns the most bytes of the cache at this moment.
pub(crate) fn cache_bytes() -> u64 {
    room().cache()
}

/// Checks that files leave the cache room for what has to be there at the same time.
///
/// # Errors
/// They do not.
pub(crate) fn check_cache(bytes: u64) -> Result<(), Full> {
    let room = room();
    room.check(bytes, room.limit)
}

/// Refuses a part of a file that has to be read at once and does not fit into the room.
///
/// # Errors
/// It does not fit.
pub(crate) fn check_part(path: &Path, bytes: u64) -> DataResult<()> {
    let bytes_max = bytes_max();
    if bytes <= bytes_max {
        return Ok(());
    }
    wrong(
        path,
        format!(
            "a part of {bytes} bytes has to be read at once, more than the {bytes_max} of data_memory; raise it, or \
             write the file in smaller parts"
        ),
    )
}

/// Bytes that a file has of the room. They are free again when this is dropped.
#[derive(Debug, Default)]
pub(crate) struct Held(u64);

impl Held {
    /// Takes bytes for a file.
    ///
    /// # Errors
    /// Other files have them.
    pub(crate) fn of(bytes: u64) -> Result<Self, Full> {
        let mut held = Self::default();
        held.grow(bytes)?;
        Ok(held)
    }

    /// Takes more bytes.
    ///
    /// # Errors
    /// Other files have them. Nothing has changed then.
    pub(crate) fn grow(&mut self, bytes: u64) -> Result<(), Full> {
        self.take(bytes, |limit| limit)
    }

    /// Takes more bytes for a file that need not be held.
    ///
    /// # Errors
    /// All files would have more than half of the room. Nothing has changed then.
    pub(crate) fn grow_in_share(&mut self, bytes: u64) -> Result<(), Full> {
        self.take(bytes, |limit| limit / 2)
    }

    fn take(&mut self, bytes: u64, most: impl Fn(u64) -> u64) -> Result<(), Full> {
        let mut room = room();
        let most = most(room.limit);
        room.hold(bytes, most)?;
        self.0 += bytes;
        cache::resize(room.cache());
        Ok(())
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        if self.0 > 0 {
            let mut room = room();
            room.release(self.0);
            cache::resize(room.cache());
        }
    }
}

impl Full {
    /// Returns the error of a file, of which `what` does not fit.
    pub(crate) fn at(self, path: &Path, what: impl Into<String>) -> Error {
        Error::Full { path: path.to_owned(), what: what.into(), held: self.held, limit: self.limit }
    }
}

/// Bytes of a file in memory, with their place in the room.
#[derive(Debug)]
pub(crate) struct Whole<B> {
    bytes: B,
    _held: Held,
}

impl<B> Whole<B> {
    pub(crate) const fn new(bytes: B, held: Held) -> Self {
        Self { bytes, _held: held }
    }
}

impl<B: FileBytes> FileBytes for Whole<B> {
    fn bytes(&self) -> &[u8] {
        self.bytes.bytes()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[derive(Clone, Copy, Debug)]
    enum Deed {
        Hold(u64),
        /// Holds a file if all files then have half of the room at most.
        HoldInShare(u64),
        /// Closes the file of this number among those that are open.
        Close(usize),
        Limit(u64),
        LimitCache(u64),
    }

    fn deed() -> impl Strategy<Value = Deed> {
        prop_oneof![
            4 => (0u64..60).prop_map(Deed::Hold),
            3 => (0u64..40).prop_map(Deed::HoldInShare),
            3 => any::<usize>().prop_map(Deed::Close),
            1 => (1u64..150).prop_map(Deed::Limit),
            1 => (0u64..150).prop_map(Deed::LimitCache),
            1 => Just(Deed::Hold(u64::MAX)),
        ]
    }

    proptest! {
        #[test]
        fn files_and_cache_never_have_more_than_the_limit_together(
            deeds in proptest::collection::vec(deed(), 0..60)
        ) {
            let mut room = Accounts { limit: 100, cache_max: u64::MAX, held: 0 };
            let mut files: Vec<u64> = Vec::new();
            for deed in deeds {
                let all: u64 = files.iter().sum();
                match deed {
                    Deed::Hold(bytes) | Deed::HoldInShare(bytes) => {
                        let is_share = matches!(deed, Deed::HoldInShare(_));
                        let most = if is_share { room.limit / 2 } else { room.limit };
                        match room.hold(bytes, most) {
                            Ok(()) => {
                                prop_assert!(all + bytes <= most);
                                files.push(bytes);
                            }
                            Err(full) => {
                                prop_assert_eq!(full, Full { limit: room.limit, held: all });
                                prop_assert!(all.checked_add(bytes).is_none_or(|sum| sum > most));
                            }
                        }
                    }
                    Deed::Close(_) if files.is_empty() => {}
                    Deed::Close(at) => {
                        let bytes = files.swap_remove(at % files.len());
                        room.release(bytes);
                    }
                    Deed::Limit(limit) => room.limit = limit,
                    Deed::LimitCache(bytes) => room.cache_max = bytes,
                }
                let all: u64 = files.iter().sum();
                prop_assert_eq!(room.held, all);
                prop_assert!(room.cache() <= room.cache_max);
                // A lower limit closes no file. Then the cache has nothing.
                prop_assert!(all + room.cache() <= room.limit.max(all));
                prop_assert!(room.cache() == room.cache_max || all + room.cache() == room.limit.max(all));
            }
        }
    }
}
