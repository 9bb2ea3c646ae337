//! Memory that other processes of this host read. It carries weights and gradients between two of
//! them without a socket.
//!
//! A process has one [`Memory`]: a file without a name, as large as the machine's memory and empty
//! at first. Pages exist only where a [`Region`] was taken. Another process of the same user that
//! is [attached](attach) has mapped the memory for reading. To send a region is to send its offset
//! and length. Calls decide who may write when: the memory has no flags and no locks (ADR 17).
//!
//! Always true here:
//!
//! - Only its owner writes to a memory: others get a descriptor without the right to write.
//! - A memory never shrinks, so reading it cannot fail, even after its owner's death. Pages given
//!   back read as zeros.
//! - The pages of a region are made when it is taken, on its owner's account. So reading a region
//!   takes no memory, and no limit of the reader's control group can end the reader.
//! - Reading outside of regions makes pages of zeros on the reader's account. It happens when the
//!   reader was stopped for so long that the owner gave it up, or when the owner names memory that
//!   it never took. Both are processes of one user, which trust each other (`docs/security.md`). A
//!   check for pages before each read would cost a lock of the whole memory, and the owner could
//!   remove them after it.
//! - A region belongs to one owner until it is dropped. An owner that told another process of a
//!   region keeps it until that process has said that it does not read any more, or is gone.
#![expect(unsafe_code, reason = "memory from the system is reached by addresses")]

pub mod attach;
mod ranges;
mod regions;
#[cfg(target_os = "linux")]
mod system;
#[cfg(not(target_os = "linux"))]
#[path = "memory/elsewhere.rs"]
mod system;

use std::fmt;
use std::fs::File;
use std::io;
use std::ops::{Deref, DerefMut, Range};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use proto::error::{Error, Result};
use proto::pb;
use proto::tensor::ExternalMemory;
use ranges::Ranges;
pub use regions::{Recycled, Regions};
use system::Mapping;

/// Smallest value in bytes that is sent as a region. Smaller values are sent as bytes, because a
/// region is whole pages.
pub const REGION_BYTES_MIN: usize = 4 << 10;

/// Memory of this process. Clones are the same memory.
#[derive(Clone)]
pub struct Memory(Arc<Owned>);

struct Owned {
    mapping: Mapping,
    /// Descriptor for other processes, which can only read with it.
    #[cfg_attr(not(target_os = "linux"), expect(dead_code, reason = "nobody to give it to"))]
    readable: File,
    ranges: Mutex<Ranges>,
}

impl Memory {
    /// Creates a memory as large as the memory of this machine. It has no pages until there are
    /// regions.
    ///
    /// # Errors
    /// The system has no such memory, or a limit forbids it.
    pub fn new() -> io::Result<Self> {
        Self::with_bytes(system::machine_bytes())
    }

    /// Creates a memory with room for regions of `bytes` in all.
    ///
    /// # Errors
    /// The system has no such memory, or a limit forbids it.
    pub fn with_bytes(bytes: usize) -> io::Result<Self> {
        let bytes = bytes.next_multiple_of(system::page_bytes());
        let (mapping, readable) = system::create(bytes)?;
        Ok(Self(Arc::new(Owned { mapping, readable, ranges: Mutex::new(Ranges::new(bytes)) })))
    }

    /// Takes a region of `bytes` zeros, on pages of its own. `None`: the memory has no room, or the
    /// machine has no memory; use other memory.
    ///
    /// # Panics
    /// If `bytes` is 0.
    pub fn take(&self, bytes: usize) -> Option<Region> {
        let range = self.0.ranges().take(bytes.next_multiple_of(system::page_bytes()))?;
        let region = Region { memory: self.0.clone(), range, bytes };
        self.0.mapping.populate(&region.range).ok().map(|()| region)
    }

    /// Returns where `values` lie in this memory, or `None` if they lie elsewhere.
    pub fn find(&self, values: &[u8]) -> Option<pb::Region> {
        let mapping = &self.0.mapping;
        let offset = values.as_ptr().addr().checked_sub(mapping.base().addr().get())?;
        let inside = offset + values.len() <= mapping.bytes() && !values.is_empty();
        inside.then_some(pb::Region { offset: offset as u64, bytes: values.len() as u64 })
    }
}

impl fmt::Debug for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Memory")
    }
}

impl Owned {
    fn ranges(&self) -> MutexGuard<'_, Ranges> {
        self.ranges.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A part of a [`Memory`]. When it is dropped, its pages go back to the system.
pub struct Region {
    memory: Arc<Owned>,
    /// Byte range in whole pages.
    range: Range<usize>,
    bytes: usize,
}

impl Deref for Region {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: inside the mapping, initialized by the system, and this process reaches it only
        // through this value.
        unsafe {
            let begin = self.memory.mapping.base().as_ptr().add(self.range.start);
            std::slice::from_raw_parts(begin, self.bytes)
        }
    }
}

impl DerefMut for Region {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as for reading. Other processes cannot write to it, and calls ensure that they do
        // not read meanwhile.
        unsafe {
            let begin = self.memory.mapping.base().as_ptr().add(self.range.start);
            std::slice::from_raw_parts_mut(begin, self.bytes)
        }
    }
}

impl ExternalMemory for Region {
    fn bytes(&self) -> &[u8] {
        self
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        self
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        self.memory.mapping.remove(&self.range);
        self.memory.ranges().give(self.range.clone());
    }
}

impl fmt::Debug for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Region({} bytes)", self.bytes)
    }
}

/// Another process's memory, mapped for reading.
#[derive(Debug)]
struct Theirs(Mapping);

impl Theirs {
    /// Returns the bytes of a region.
    ///
    /// # Errors
    /// The region is not inside the memory.
    fn bytes(&self, region: pb::Region) -> Result<&[u8]> {
        let pb::Region { offset, bytes } = region;
        if bytes == 0 || offset.checked_add(bytes).is_none_or(|end| end > self.0.bytes() as u64) {
            let expected = format!("bytes of a memory of {}", self.0.bytes());
            let found = format!("{bytes} from {offset} on");
            return Err(Error::Field { message: "Chunk", field: "region", expected, found });
        }
        // SAFETY: inside the mapping, which lives as long as `self` and cannot shrink. The owner
        // keeps the content until this process has said that it does not read any more. A reader
        // that was stopped for so long that the owner gave it up may see other bytes: it copies
        // them, and discards the copy because its call fails.
        Ok(unsafe {
            let begin = self.0.base().as_ptr().add(offset as usize);
            std::slice::from_raw_parts(begin, bytes as usize)
        })
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn a_region_lies_where_it_is_found_and_comes_back_empty() {
        let memory = Memory::with_bytes(1 << 20).unwrap();
        let mut one = memory.take(10_000).unwrap();
        let two = memory.take(5).unwrap();
        one.fill(7);
        assert_eq!(memory.find(&one).unwrap().bytes, 10_000);
        assert_eq!(memory.find(&one[100..300]).unwrap().offset, memory.find(&one).unwrap().offset + 100);
        assert_eq!(memory.find(&[1, 2, 3]), None);
        assert!(two.iter().all(|&byte| byte == 0));
        drop((one, two));
        assert!(memory.take(1 << 20).unwrap().iter().all(|&byte| byte == 0));
    }

    #[test]
    fn the_pages_of_a_region_are_made_before_it_is_read_and_reading_it_makes_none() {
        use std::os::unix::fs::MetadataExt as _;

        let memory = Memory::with_bytes(1 << 20).unwrap();
        let made = || memory.0.readable.metadata().unwrap().blocks() * 512;
        assert_eq!(made(), 0);
        let region = memory.take(100_000).unwrap();
        let of_region = made();
        assert!(of_region >= 100_000, "{of_region} bytes of pages");
        let theirs = Theirs(system::open(memory.0.readable.try_clone().unwrap().into()).unwrap());
        let read = |at| theirs.bytes(at).unwrap().iter().all(|&byte| byte == 0);
        let at = memory.find(&region).unwrap();
        assert!(read(at));
        assert_eq!(made(), of_region);
        drop(region);
        assert_eq!(made(), 0, "given back");
        assert!(read(at));
    }

    #[test]
    fn a_full_memory_has_no_room_and_no_harm_is_done() {
        let memory = Memory::with_bytes(1 << 16).unwrap();
        let all = memory.take(1 << 16).unwrap();
        assert!(memory.take(1).is_none());
        drop(all);
        assert!(memory.take(1).is_some());
    }
}
