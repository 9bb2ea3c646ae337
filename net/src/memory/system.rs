//! System calls of the memory: a file in memory, its mapping, and its descriptor for other
//! processes.

use std::fs::{File, OpenOptions};
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd as _, OwnedFd};
use std::ptr::NonNull;

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::{Advice, MapFlags, ProtFlags};

use crate::descriptors;

/// A mapping of a whole file in memory.
#[derive(Debug)]
pub(super) struct Mapping {
    base: NonNull<u8>,
    bytes: usize,
}

// SAFETY: an address range that nothing else in this process owns. The owner decides who may read
// or write which part.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    fn new(file: impl AsFd, bytes: usize, protection: ProtFlags) -> io::Result<Self> {
        let flags = MapFlags::SHARED | MapFlags::NORESERVE;
        // SAFETY: the system chooses an address range that is free in this process.
        let base = unsafe { rustix::mm::mmap(std::ptr::null_mut(), bytes, protection, flags, file, 0) }?;
        // Errors are ignored: a core dump without this memory is as good, and much smaller. SAFETY:
        // the range was mapped just now, and its content stays.
        let _ = unsafe { rustix::mm::madvise(base, bytes, Advice::LinuxDontDump) };
        Ok(Self { base: NonNull::new(base.cast()).ok_or(io::ErrorKind::OutOfMemory)?, bytes })
    }

    /// Returns the first address.
    pub(super) const fn base(&self) -> NonNull<u8> {
        self.base
    }

    /// Returns the length in bytes.
    pub(super) const fn bytes(&self) -> usize {
        self.bytes
    }

    /// Makes the system create the pages of `range`, which are whole pages. Without this call, a
    /// system without free memory would end the process at a write.
    pub(super) fn populate(&self, range: &Range<usize>) -> io::Result<()> {
        assert!(range.end <= self.bytes, "{range:?} is beyond {} bytes", self.bytes);
        // SAFETY: inside the mapping; the content stays.
        let populated = unsafe {
            rustix::mm::madvise(
                self.base.as_ptr().add(range.start).cast(),
                range.len(),
                Advice::LinuxPopulateWrite,
            )
        };
        Ok(populated?)
    }

    /// Gives the pages of `range`, which are whole pages, back to the system. From now on they read
    /// as zeros.
    pub(super) fn remove(&self, range: &Range<usize>) {
        assert!(range.end <= self.bytes, "{range:?} is beyond {} bytes", self.bytes);
        let begin = self.base.as_ptr().wrapping_add(range.start).cast();
        // Errors are ignored: the pages would be used again with their content. SAFETY: inside the
        // mapping; the caller has no reference into the range.
        let _ = unsafe { rustix::mm::madvise(begin, range.len(), Advice::LinuxRemove) };
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: mapped by `new`, and no reference into it outlives its owner.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.bytes) };
    }
}

/// Returns the size of a page in bytes.
pub(super) fn page_bytes() -> usize {
    rustix::param::page_size()
}

/// Returns the bytes of memory of this machine.
pub(super) fn machine_bytes() -> usize {
    let system = rustix::system::sysinfo();
    usize::try_from(system.totalram).unwrap_or(usize::MAX).saturating_mul(system.mem_unit as usize)
}

/// Returns 16 random bytes.
pub(super) fn random() -> io::Result<[u8; 16]> {
    let mut bytes = [0; 16];
    rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())?;
    Ok(bytes)
}

/// Creates a file in memory of fixed size. Returns its mapping for writing, and a descriptor with
/// which others can only read. The file has no pages yet.
pub(super) fn create(bytes: usize) -> io::Result<(Mapping, File)> {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Fsize).current;
    if limit.is_some_and(|limit| limit < bytes as u64) {
        // The system would end the process.
        return Err(io::Error::other("files may not be that large (ulimit -f)"));
    }
    let file = rustix::fs::memfd_create("ebbflow", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    rustix::fs::ftruncate(&file, bytes as u64)?;
    // With these seals a mapping stays readable as long as it lives, whatever its owner does.
    rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    let readable = OpenOptions::new().read(true).open(format!("/proc/self/fd/{}", file.as_raw_fd()))?;
    Ok((Mapping::new(&file, bytes, ProtFlags::READ | ProtFlags::WRITE)?, readable))
}

/// Maps a memory that another process created, for reading.
pub(super) fn open(file: OwnedFd) -> io::Result<Mapping> {
    let file = File::from(file);
    if !rustix::fs::fcntl_get_seals(&file)?.contains(SealFlags::SHRINK) {
        return Err(io::Error::other("a file that could shrink is no memory to read from"));
    }
    let bytes = usize::try_from(file.metadata()?.len()).map_err(io::Error::other)?;
    Mapping::new(&file, bytes, ProtFlags::READ)
}

/// Sends a descriptor over a Unix socket.
pub(super) fn send(socket: impl AsFd, file: impl AsFd) -> io::Result<()> {
    descriptors::send(socket, &[0], file)
}

/// Receives a descriptor over a Unix socket.
pub(super) fn receive(socket: impl AsFd) -> io::Result<OwnedFd> {
    let (_, file) = descriptors::receive(socket, &mut [0])?;
    file.ok_or_else(|| io::Error::other("a message without a descriptor"))
}
