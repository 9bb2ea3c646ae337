//! Files that are either whole or not there: they are written under a temporary name, forced to the
//! disk, and then renamed.

use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use crate::{Error, Result};

/// A file on its way. A file that is dropped before [`keep`](Self::keep) leaves no trace.
#[derive(Debug)]
pub(crate) struct Whole {
    file: File,
    path: PathBuf,
    temporary: Temporary,
}

/// Removes the file that it names when it is dropped.
#[derive(Debug)]
struct Temporary(PathBuf);

impl Drop for Temporary {
    fn drop(&mut self) {
        // After a rename the file is gone; otherwise the caller already has the reason for giving
        // up.
        let _ = std::fs::remove_file(&self.0);
    }
}

impl Whole {
    /// Begins a file that will be `dir/name`.
    pub(crate) fn create(dir: &Path, name: &str) -> Result<Self> {
        let path = dir.join(name);
        let temporary = dir.join(format!(".{name}.partial"));
        let file = File::create(&temporary).map_err(file_error("create", &temporary))?;
        Ok(Self { file, path, temporary: Temporary(temporary) })
    }

    /// Appends to the file.
    pub(crate) fn write(&mut self, content: &[u8]) -> Result<()> {
        self.file.write_all(content).map_err(file_error("write", &self.path))
    }

    /// Gives the file its name. Replaces a file that has this name.
    pub(crate) fn keep(self) -> Result<()> {
        let Self { file, path, temporary } = self;
        file.sync_all().map_err(file_error("write", &path))?;
        std::fs::rename(&temporary.0, &path).map_err(file_error("write", &path))
    }
}

/// Writes the file `dir/name` so that it is whole or, after a failure, as it was.
///
/// # Errors
/// The file cannot be written.
pub fn write(dir: &Path, name: &str, content: &[u8]) -> Result<()> {
    let mut file = Whole::create(dir, name)?;
    file.write(content)?;
    file.keep()
}

/// Returns the error of a file. The system's reason, such as a full disk, is its source.
pub(crate) fn file_error(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Error + use<> {
    let path = path.to_owned();
    move |source| Error::File { action, path, source }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(dir: &Path) -> Vec<String> {
        let names = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name());
        names.map(|name| name.into_string().unwrap()).collect()
    }

    #[test]
    fn an_unfinished_file_leaves_the_old_one_and_no_trace() {
        let dir = tempfile::tempdir().unwrap();
        write(dir.path(), "model", b"old").unwrap();
        let mut file = Whole::create(dir.path(), "model").unwrap();
        file.write(b"half of the ne").unwrap();
        assert_eq!(names(dir.path()).len(), 2);
        drop(file);
        assert_eq!(names(dir.path()), ["model"]);
        assert_eq!(std::fs::read(dir.path().join("model")).unwrap(), b"old");

        write(dir.path(), "model", b"new").unwrap();
        assert_eq!(names(dir.path()), ["model"]);
        assert_eq!(std::fs::read(dir.path().join("model")).unwrap(), b"new");
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn a_full_disk_is_an_error_that_names_the_file() {
        let dir = tempfile::tempdir().unwrap();
        let mut full = Whole::create(dir.path(), "model").unwrap();
        // The kernel's always-full device stands for the disk.
        full.file = File::options().write(true).open("/dev/full").unwrap();
        let error = full.write(b"weights").unwrap_err();
        let Error::File { action: "write", path, source } = &error else { panic!("{error}") };
        assert!(path.ends_with("model"), "{error}");
        assert_eq!(source.kind(), io::ErrorKind::StorageFull);
    }
}
