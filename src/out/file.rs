//! Files that are either whole or not there: written under a temporary name, forced to the disk, then renamed.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};

/// A file on its way; dropped before [`keep`](Self::keep), nothing of it stays.
#[derive(Debug)]
pub(crate) struct Whole {
    file: File,
    path: PathBuf,
    temporary: Temporary,
}

/// Removes what it names when it is dropped.
#[derive(Debug)]
struct Temporary(PathBuf);

impl Drop for Temporary {
    fn drop(&mut self) {
        // After a rename it is not there any more; otherwise the reason for giving up is already being reported.
        let _ = std::fs::remove_file(&self.0);
    }
}

impl Whole {
    /// Starts a file that will be `dir/name`.
    pub(crate) fn create(dir: &Path, name: &str) -> Result<Self> {
        let path = dir.join(name);
        let temporary = dir.join(format!(".{name}.partial"));
        let file =
            File::create(&temporary).with_context(|| format!("cannot create {}", temporary.display()))?;
        Ok(Self { file, path, temporary: Temporary(temporary) })
    }

    /// Appends to it.
    pub(crate) fn write(&mut self, content: &[u8]) -> Result<()> {
        self.file.write_all(content).with_context(|| cannot_write(&self.path))
    }

    /// Gives it its name, over a file that has it.
    pub(crate) fn keep(self) -> Result<()> {
        let Self { file, path, temporary } = self;
        file.sync_all().with_context(|| cannot_write(&path))?;
        std::fs::rename(&temporary.0, &path).with_context(|| cannot_write(&path))
    }
}

/// Writes a small file whole.
pub(crate) fn write(dir: &Path, name: &str, content: &[u8]) -> Result<()> {
    let mut file = Whole::create(dir, name)?;
    file.write(content)?;
    file.keep()
}

/// What to say when a file cannot be written; the system's reason (a full disk) follows.
pub(crate) fn cannot_write(path: &Path) -> String {
    format!("cannot write {}", path.display())
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
        let error = format!("{:#}", full.write(b"weights").unwrap_err());
        assert!(error.contains("model") && error.contains("No space left"), "{error}");
    }
}
