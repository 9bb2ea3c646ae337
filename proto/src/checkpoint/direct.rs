//! A large file on a local disk, past the page cache.
//!
//! The system's cache would take the bytes at memory speed on every core that it finds, from those who train, and write them later;
//! so they are gathered in blocks that the disk takes as they are, one being filled while others are written. A file system
//! that does not know this (some in memory, some in the network) is written to as usual.
//!
//! The file has a temporary name until it lies safe; one that was given up is removed with its folder.

use std::collections::VecDeque;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use tokio::task::JoinHandle;

/// Bytes of one write.
const BLOCK_BYTES: usize = 8 << 20;

/// Blocks that are being written at once: the disk has the next one when it is done with one.
const WRITING_MAX: usize = 2;

/// What offset, length and memory of a write must be multiples of, on every disk that we know of.
const ALIGNED: usize = 4096;

/// A file that is being written. Dropped before it is finished, nothing of it stays.
#[derive(Debug)]
pub(super) struct Direct {
    path: PathBuf,
    staged: Staged,
    file: Arc<File>,
    filling: Block,
    /// Where the block that is being filled begins.
    at: u64,
    writing: VecDeque<JoinHandle<io::Result<Block>>>,
    /// Written and ready to be filled.
    free: Vec<Block>,
}

/// Removes what it names when it is dropped.
#[derive(Debug)]
struct Staged(PathBuf);

impl Drop for Staged {
    fn drop(&mut self) {
        // After the rename it is not there any more; otherwise the reason for giving up is being reported.
        let _ = fs::remove_file(&self.0);
    }
}

impl Direct {
    /// Begins a file; folders that are missing are made.
    pub(super) fn create(path: PathBuf) -> io::Result<Self> {
        let (file, staged) = match stage(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                make_folders(parent(&path)?)?;
                stage(&path)?
            }
            staged => staged?,
        };
        let file = Arc::new(file);
        let (filling, writing, free) = (Block::new(), VecDeque::new(), Vec::new());
        Ok(Self { path, staged: Staged(staged), file, filling, at: 0, writing, free })
    }

    /// Appends; waits while [`WRITING_MAX`] blocks are being written.
    pub(super) async fn put(&mut self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            bytes = self.filling.fill(bytes);
            if self.filling.len == BLOCK_BYTES {
                while self.writing.len() >= WRITING_MAX {
                    self.written().await?;
                }
                let next = self.free.pop().unwrap_or_else(Block::new);
                let full = std::mem::replace(&mut self.filling, next);
                let (file, at) = (self.file.clone(), self.at);
                self.at += BLOCK_BYTES as u64;
                self.writing.push_back(tokio::task::spawn_blocking(move || {
                    file.write_all_at(full.bytes(BLOCK_BYTES), at)?;
                    Ok(full)
                }));
            }
        }
        Ok(())
    }

    /// Waits until the file is there, safe, under its name.
    pub(super) async fn finish(mut self) -> io::Result<()> {
        while !self.writing.is_empty() {
            self.written().await?;
        }
        let finishing = tokio::task::spawn_blocking(move || {
            let Self { path, staged, file, filling, at, .. } = self;
            if filling.len > 0 {
                file.write_all_at(filling.bytes(filling.len.next_multiple_of(ALIGNED)), at)?;
                // Writes are of whole sectors; what is too much goes again.
                file.set_len(at + filling.len as u64)?;
            }
            file.sync_all()?;
            fs::rename(&staged.0, &path)?;
            sync_folder(parent(&path)?)
        });
        finishing.await.map_err(io::Error::other)?
    }

    async fn written(&mut self) -> io::Result<()> {
        let Some(oldest) = self.writing.pop_front() else { return Ok(()) };
        let mut block = oldest.await.map_err(io::Error::other)??;
        block.len = 0;
        self.free.push(block);
        Ok(())
    }
}

/// Memory that a disk reads from itself.
#[derive(Debug)]
struct Block {
    memory: Vec<u8>,
    begin: usize,
    len: usize,
}

impl Block {
    fn new() -> Self {
        let memory = vec![0; BLOCK_BYTES + ALIGNED];
        let begin = memory.as_ptr().align_offset(ALIGNED);
        Self { memory, begin, len: 0 }
    }

    /// Takes what there is room for; answers the rest.
    fn fill<'a>(&mut self, bytes: &'a [u8]) -> &'a [u8] {
        let (fits, rest) = bytes.split_at(bytes.len().min(BLOCK_BYTES - self.len));
        let from = self.begin + self.len;
        self.memory[from..from + fits.len()].copy_from_slice(fits);
        self.len += fits.len();
        rest
    }

    fn bytes(&self, len: usize) -> &[u8] {
        &self.memory[self.begin..self.begin + len]
    }
}

/// A new file beside `path`. Several processes may be writing the same one: a ps that was given up, and who took its place.
fn stage(path: &Path) -> io::Result<(File, PathBuf)> {
    for number in 1.. {
        let mut staged = path.as_os_str().to_owned();
        staged.push(format!(".{number}.partial"));
        let staged = PathBuf::from(staged);
        match open(&staged) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            opened => return opened.map(|file| (file, staged)),
        }
    }
    unreachable!("some number is free")
}

#[cfg(target_os = "linux")]
fn open(path: &Path) -> io::Result<File> {
    use std::os::unix::fs::OpenOptionsExt as _;

    let mut options = OpenOptions::new();
    options.write(true).create_new(true);
    match options.clone().custom_flags(libc::O_DIRECT).open(path) {
        // The file was made before the flag was refused.
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
            let _ = fs::remove_file(path);
            options.open(path)
        }
        opened => opened,
    }
}

#[cfg(not(target_os = "linux"))]
fn open(path: &Path) -> io::Result<File> {
    OpenOptions::new().write(true).create_new(true).open(path)
}

fn parent(path: &Path) -> io::Result<&Path> {
    path.parent().ok_or_else(|| io::Error::other("the file has no folder"))
}

/// Makes a folder and those above it, so that they survive a loss of power.
fn make_folders(folder: &Path) -> io::Result<()> {
    let missing: Vec<_> = folder.ancestors().take_while(|folder| !folder.exists()).collect();
    fs::create_dir_all(folder)?;
    missing.into_iter().filter_map(Path::parent).try_for_each(sync_folder)
}

fn sync_folder(folder: &Path) -> io::Result<()> {
    File::open(folder)?.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(folder: &Path) -> Vec<String> {
        let names =
            fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
        names.collect()
    }

    fn content(bytes: usize) -> Vec<u8> {
        (0..bytes).map(|at| (at * 7 + at / 251) as u8).collect()
    }

    #[tokio::test]
    async fn files_of_every_length_are_there_when_they_are_finished_and_not_before() {
        let folder = tempfile::tempdir().unwrap();
        for bytes in [0, 1, ALIGNED, ALIGNED + 1, BLOCK_BYTES, 3 * BLOCK_BYTES + 5] {
            let (below, content) = (folder.path().join(format!("a/b/{bytes}")), content(bytes));
            let mut file = Direct::create(below.join("x")).unwrap();
            for piece in content.chunks(1_000_003) {
                file.put(piece).await.unwrap();
            }
            assert_eq!(names(&below), ["x.1.partial"]);
            file.finish().await.unwrap();
            assert_eq!(names(&below), ["x"]);
            assert!(fs::read(below.join("x")).unwrap() == content, "{bytes} bytes");
        }
    }

    #[tokio::test]
    async fn two_that_write_the_same_file_do_not_meet_and_what_is_given_up_is_gone() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x");
        let (mut one, mut other) =
            (Direct::create(path.clone()).unwrap(), Direct::create(path.clone()).unwrap());
        one.put(b"the same").await.unwrap();
        other.put(b"the ").await.unwrap();
        one.finish().await.unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"the same");
        drop(other);
        assert_eq!(names(folder.path()), ["x"]);
    }
}
