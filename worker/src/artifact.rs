//! A file of a job on a worker. It has no name, so that nobody can replace it.
//!
//! It lies in the scratch folder, which other users may share, as an open file that was never
//! linked there (`O_TMPFILE`, mode 0600). Where the file system lacks such files, its name is
//! removed at once. The system frees the file when the process ends in any way. Its hash is
//! computed from the bytes as they are written, and readers use the same open file.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd as _;
use std::path::{Path, PathBuf};

use sha2::{Digest as _, Sha256};
use tokio::io::AsyncWriteExt as _;

/// A complete file.
#[derive(Debug)]
pub(crate) struct Artifact {
    file: File,
}

impl Artifact {
    /// Returns a path to the file, valid as long as this value lives.
    pub(crate) fn path(&self) -> PathBuf {
        let folder = if cfg!(target_os = "linux") { "/proc/self/fd" } else { "/dev/fd" };
        Path::new(folder).join(self.file.as_raw_fd().to_string())
    }
}

/// A file that is being written.
pub(crate) struct Writing {
    file: tokio::fs::File,
    hash: Sha256,
}

impl Writing {
    /// Creates a file in the file system of `folder`.
    ///
    /// # Errors
    /// The folder cannot be written.
    pub(crate) fn begin(folder: &Path) -> io::Result<Self> {
        let file = tempfile::tempfile_in(folder)?;
        Ok(Self { file: tokio::fs::File::from_std(file), hash: Sha256::new() })
    }

    /// Adds bytes.
    ///
    /// # Errors
    /// The disk is full, or broken.
    pub(crate) async fn put(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.hash.update(bytes);
        self.file.write_all(bytes).await
    }

    /// Ends the file. Returns it with the SHA-256 of its bytes, in lower-case hex.
    ///
    /// # Errors
    /// The disk is full, or broken.
    pub(crate) async fn finish(mut self) -> io::Result<(Artifact, String)> {
        self.file.flush().await?;
        let file = self.file.into_std().await;
        Ok((Artifact { file }, proto::artifact::hex(&self.hash.finalize())))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_file_has_no_name_and_is_read_as_it_was_written() {
        let folder = tempfile::tempdir().unwrap();
        let mut writing = Writing::begin(folder.path()).unwrap();
        writing.put(b"wei").await.unwrap();
        writing.put(b"ghts").await.unwrap();
        let (artifact, hash) = writing.finish().await.unwrap();
        assert_eq!(hash, proto::artifact::sha256_hex(b"weights"));
        let names: Vec<_> = std::fs::read_dir(folder.path()).unwrap().collect();
        assert!(names.is_empty(), "{names:?}");
        // Each reader begins at the beginning, however far the others are.
        for _ in 0..2 {
            assert_eq!(std::fs::read(artifact.path()).unwrap(), b"weights");
        }
        let path = artifact.path();
        drop(artifact);
        // Another test may have opened a file under the same number.
        let left = std::fs::read(path).ok();
        assert_ne!(left.as_deref(), Some(&b"weights"[..]), "it is gone with its holder");
    }

    #[test]
    fn a_folder_that_is_not_there_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        assert!(Writing::begin(&folder.path().join("none")).is_err());
    }
}
