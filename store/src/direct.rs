//! Writes a large file to a local disk, past the page cache.
//!
//! The page cache would copy the bytes at memory speed on every free core, take those from
//! training, and write them later. Here the disk reads memory directly if it begins and ends at
//! aligned addresses. Other bytes are gathered in aligned blocks. A few large writes are in flight
//! while the next one is prepared. File systems without direct writes (some in memory, some in the
//! network) are written to as usual.
//!
//! The first bytes of the file are written last, and then it is renamed. Until it is durable it has
//! a temporary name. The removal of its folder removes a temporary file that a crash left.

use std::collections::VecDeque;
use std::fs::{self, File, OpenOptions};
use std::io::{self, IoSlice};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bytes::Bytes;
use tokio::task::JoinHandle;

use proto::checkpoint::ALIGNED;

/// Bytes of one write: enough to keep the disk busy while training threads use all cores.
const BLOCK_BYTES: usize = 8 << 20;

/// Most writes in flight: the disk has the next ones when it finishes one.
const WRITING_MAX: usize = 3;

/// A file that is being written. If it is dropped before it is finished, nothing of it stays.
#[derive(Debug)]
pub(crate) struct Direct {
    staged: Staged,
    file: Arc<File>,
    /// Bytes at the beginning of the file that are written last.
    head_bytes: usize,
    /// Aligned bytes for the next write, which the disk reads in place.
    lying: Vec<Bytes>,
    lying_bytes: usize,
    /// Gathered bytes for the next write. While there are some, all further bytes are gathered too.
    filling: Block,
    /// Offset of the next write.
    at: u64,
    /// Writes in flight. Each returns its block.
    writing: VecDeque<JoinHandle<io::Result<Option<Block>>>>,
    /// Written blocks that can be filled again.
    free: Vec<Block>,
}

/// Temporary file, which is removed when this value is dropped.
#[derive(Debug)]
struct Staged(PathBuf);

impl Drop for Staged {
    fn drop(&mut self) {
        // After the rename the name is free. Before it, another error is being reported.
        let _ = fs::remove_file(&self.0);
    }
}

impl Direct {
    /// Creates a file beside `path`, and missing folders.
    ///
    /// # Panics
    /// If `head_bytes` is no multiple of [`ALIGNED`].
    pub(crate) fn create(path: &Path, head_bytes: usize) -> io::Result<Self> {
        assert!(head_bytes.is_multiple_of(ALIGNED), "{head_bytes} bytes, expected a multiple of {ALIGNED}");
        let (file, staged) = match stage(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                make_folders(parent(path)?)?;
                stage(path)?
            }
            staged => staged?,
        };
        Ok(Self {
            staged: Staged(staged),
            file: Arc::new(file),
            head_bytes,
            lying: Vec::new(),
            lying_bytes: 0,
            filling: Block::default(),
            at: head_bytes as u64,
            writing: VecDeque::new(),
            free: Vec::new(),
        })
    }

    /// Appends bytes. Waits while too many writes are in flight.
    pub(crate) async fn put(&mut self, bytes: Bytes) -> io::Result<()> {
        let aligned = bytes.as_ptr().addr().is_multiple_of(ALIGNED) && bytes.len().is_multiple_of(ALIGNED);
        if aligned && self.filling.len == 0 {
            self.lying_bytes += bytes.len();
            self.lying.push(bytes);
            return if self.lying_bytes < BLOCK_BYTES { Ok(()) } else { self.write_lying().await };
        }
        self.write_lying().await?;
        let mut rest = &bytes[..];
        while !rest.is_empty() {
            rest = self.filling.fill(rest);
            if self.filling.len == BLOCK_BYTES {
                let full = std::mem::take(&mut self.filling);
                let write = |file: &File, at| {
                    file.write_all_at(full.bytes(BLOCK_BYTES), at)?;
                    Ok(Some(full))
                };
                self.write(BLOCK_BYTES, write).await?;
                self.filling = self.free.pop().unwrap_or_default();
            }
        }
        Ok(())
    }

    async fn write_lying(&mut self) -> io::Result<()> {
        let (lying, bytes) = (std::mem::take(&mut self.lying), std::mem::take(&mut self.lying_bytes));
        if bytes == 0 {
            return Ok(());
        }
        self.write(bytes, move |file, at| write_pieces(file, &lying, at).map(|()| None)).await
    }

    /// Writes in the background, once fewer than [`WRITING_MAX`] writes are in flight.
    async fn write(
        &mut self,
        bytes: usize,
        write: impl FnOnce(&File, u64) -> io::Result<Option<Block>> + Send + 'static,
    ) -> io::Result<()> {
        while self.writing.len() >= WRITING_MAX {
            self.written().await?;
        }
        let (file, at) = (self.file.clone(), self.at);
        self.at += bytes as u64;
        self.writing.push_back(tokio::task::spawn_blocking(move || write(&file, at)));
        Ok(())
    }

    /// Writes the beginning, and waits until the file is durable under its name.
    ///
    /// # Panics
    /// If the length of `head` is not `head_bytes`.
    pub(crate) async fn finish(mut self, name: &str, head: &[u8]) -> io::Result<()> {
        assert_eq!(head.len(), self.head_bytes, "the beginning has the room that was left for it");
        self.write_lying().await?;
        while !self.writing.is_empty() {
            self.written().await?;
        }
        let (name, mut first) = (name.to_owned(), Block::new(head.len()));
        first.fill(head);
        let finishing = tokio::task::spawn_blocking(move || {
            let Self { staged, file, filling, at, .. } = self;
            if filling.len > 0 {
                file.write_all_at(filling.bytes(filling.len.next_multiple_of(ALIGNED)), at)?;
                // Writes are of whole sectors. This cuts the excess.
                file.set_len(at + filling.len as u64)?;
            }
            file.write_all_at(first.bytes(first.len), 0)?;
            file.sync_all()?;
            fs::rename(&staged.0, staged.0.with_file_name(name))?;
            sync_folder(parent(&staged.0)?)
        });
        finishing.await.map_err(io::Error::other)?
    }

    /// Waits for the oldest write.
    async fn written(&mut self) -> io::Result<()> {
        let Some(oldest) = self.writing.pop_front() else { return Ok(()) };
        if let Some(mut block) = oldest.await.map_err(io::Error::other)?? {
            block.len = 0;
            self.free.push(block);
        }
        Ok(())
    }
}

/// Most pieces of one vectored write on Linux (`IOV_MAX`).
#[cfg(target_os = "linux")]
const PIECES_MAX: usize = 1024;

/// Writes pieces of memory as one.
#[cfg(target_os = "linux")]
fn write_pieces(file: &File, pieces: &[Bytes], mut at: u64) -> io::Result<()> {
    let mut slices: Vec<_> = pieces.iter().map(|piece| IoSlice::new(piece)).collect();
    let mut rest = &mut slices[..];
    while !rest.is_empty() {
        let pieces = &rest[..rest.len().min(PIECES_MAX)];
        let written = rustix::io::retry_on_intr(|| rustix::io::pwritev(file, pieces, at))?;
        if written == 0 {
            return Err(io::ErrorKind::WriteZero.into());
        }
        at += written as u64;
        IoSlice::advance_slices(&mut rest, written);
    }
    Ok(())
}

#[cfg(not(target_os = "linux"))]
fn write_pieces(file: &File, pieces: &[Bytes], mut at: u64) -> io::Result<()> {
    for piece in pieces {
        file.write_all_at(piece, at)?;
        at += piece.len() as u64;
    }
    Ok(())
}

/// Aligned memory for direct writes. It is allocated at the first use.
#[derive(Debug, Default)]
struct Block {
    memory: Vec<u8>,
    begin: usize,
    len: usize,
}

impl Block {
    fn new(room: usize) -> Self {
        let memory = vec![0; room + ALIGNED];
        let begin = memory.as_ptr().align_offset(ALIGNED);
        Self { memory, begin, len: 0 }
    }

    /// Copies as many bytes as fit, and returns the rest.
    fn fill<'a>(&mut self, bytes: &'a [u8]) -> &'a [u8] {
        if self.memory.is_empty() {
            *self = Self::new(BLOCK_BYTES);
        }
        let (fits, rest) = bytes.split_at(bytes.len().min(self.memory.len() - ALIGNED - self.len));
        let from = self.begin + self.len;
        self.memory[from..from + fits.len()].copy_from_slice(fits);
        self.len += fits.len();
        rest
    }

    fn bytes(&self, len: usize) -> &[u8] {
        &self.memory[self.begin..self.begin + len]
    }
}

/// Creates a new file beside `path`. Several processes may write the same file: a ps that was given
/// up, and its replacement.
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
        // The file was created before the flag was refused.
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

/// Creates a folder and those above it, so that they survive a power loss.
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

    /// Returns a copy of `content` that begins `shift` bytes after an aligned address.
    fn lying(content: &[u8], shift: usize) -> Bytes {
        let mut memory = vec![0; content.len() + 2 * ALIGNED];
        let begin = memory.as_ptr().align_offset(ALIGNED) + shift;
        memory[begin..begin + content.len()].copy_from_slice(content);
        Bytes::from(memory).slice(begin..begin + content.len())
    }

    #[tokio::test]
    async fn files_of_every_length_are_there_when_they_are_finished_and_not_before() {
        let folder = tempfile::tempdir().unwrap();
        for bytes in [0, 1, ALIGNED, ALIGNED + 1, BLOCK_BYTES, 3 * BLOCK_BYTES + 5] {
            // Pieces that are gathered, and pieces that are written in place until one is not
            // aligned.
            for (piece_bytes, shift, head_bytes) in [(1_000_003, 7, 0), (1 << 20, 0, 2 * ALIGNED)] {
                let (below, content) = (folder.path().join(format!("a/{bytes}/{shift}")), content(bytes));
                let head = vec![0xee; head_bytes];
                let mut file = Direct::create(&below.join("x"), head_bytes).unwrap();
                for piece in content.chunks(piece_bytes) {
                    file.put(lying(piece, shift)).await.unwrap();
                }
                assert_eq!(names(&below), ["x.1.partial"]);
                file.finish("y", &head).await.unwrap();
                assert_eq!(names(&below), ["y"]);
                assert!(fs::read(below.join("y")).unwrap() == [head, content].concat(), "{bytes} bytes");
            }
        }
    }

    #[tokio::test]
    async fn two_that_write_the_same_file_do_not_meet_and_what_is_given_up_is_gone() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x");
        let (mut one, mut other) = (Direct::create(&path, 0).unwrap(), Direct::create(&path, 0).unwrap());
        one.put(Bytes::from_static(b"the same")).await.unwrap();
        other.put(Bytes::from_static(b"the ")).await.unwrap();
        one.finish("x", &[]).await.unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"the same");
        drop(other);
        assert_eq!(names(folder.path()), ["x"]);
    }
}
