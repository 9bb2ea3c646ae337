//! The log of one process of a script: a file, and the one before it.

use std::fs::{self, File};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

/// Size in bytes at which a log begins anew. With the file before it a process has at most twice as
/// much on the disk.
pub(crate) const BYTES_MAX: u64 = 64 << 20;

/// A log that begins anew when it is full. The full file stays as `NAME.1` until the next one is.
#[derive(Debug)]
pub(crate) struct Log {
    path: PathBuf,
    file: File,
    bytes: u64,
    bytes_max: u64,
}

impl Log {
    /// Creates an empty log. Files of an earlier run are removed.
    ///
    /// # Errors
    /// The file cannot be written.
    pub(crate) fn create(path: &Path, bytes_max: u64) -> io::Result<Self> {
        match fs::remove_file(before(path)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        Ok(Self { path: path.to_owned(), file: File::create(path)?, bytes: 0, bytes_max })
    }

    /// Writes a line.
    ///
    /// # Errors
    /// The file cannot be written, for example on a full disk.
    pub(crate) fn line(&mut self, text: &str) -> io::Result<()> {
        let bytes = text.len() as u64 + 1;
        if self.bytes > 0 && self.bytes + bytes > self.bytes_max {
            fs::rename(&self.path, before(&self.path))?;
            self.file = File::create(&self.path)?;
            self.bytes = 0;
        }
        self.bytes += bytes;
        self.file.write_all(format!("{text}\n").as_bytes())
    }
}

/// Returns the path of the file before this one.
fn before(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".1");
    name.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_log_begins_anew_and_the_last_lines_are_there() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("worker-0.log");
        let read = |path: &Path| fs::read_to_string(path).unwrap();
        let mut log = Log::create(&path, 12).unwrap();
        for line in ["one", "two", "three", "four"] {
            log.line(line).unwrap();
        }
        assert_eq!((read(&before(&path)), read(&path)), ("one\ntwo\n".into(), "three\nfour\n".into()));
        log.line("longer than the whole log").unwrap();
        log.line("after").unwrap();
        assert_eq!(read(&path), "after\n");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 2);
        drop(Log::create(&path, 12).unwrap());
        assert_eq!(read(&path), "");
        assert!(!before(&path).exists(), "a log of an earlier run");
    }

    #[test]
    fn a_log_that_cannot_be_written_says_so() {
        let dir = tempfile::tempdir().unwrap();
        Log::create(&dir.path().join("no/worker-0.log"), 10).unwrap_err();
    }
}
