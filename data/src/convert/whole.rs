//! Files that are either whole or not there: they are written under a temporary name, forced to the
//! disk, and then renamed.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use crate::error::{Error, Result};

/// Ending of a temporary name.
pub(super) const PARTIAL: &str = ".partial";

/// A file on its way. A file that is dropped before [`keep`] leaves no trace.
#[derive(Debug)]
pub(super) struct Whole {
    file: BufWriter<File>,
    path: PathBuf,
    temporary: Temporary,
}

/// Removes the file that it names when it is dropped.
#[derive(Debug)]
struct Temporary(PathBuf);

impl Drop for Temporary {
    fn drop(&mut self) {
        // After a rename the file is gone. Otherwise the caller has the reason for giving up.
        let _ = std::fs::remove_file(&self.0);
    }
}

impl Whole {
    /// Begins a file that will be `folder/name`.
    ///
    /// # Errors
    /// The file cannot be created.
    pub(super) fn create(folder: &Path, name: &str) -> Result<Self> {
        let temporary = folder.join(format!(".{name}{PARTIAL}"));
        let file = File::create(&temporary).map_err(failed(&temporary))?;
        let temporary = Temporary(temporary);
        Ok(Self { file: BufWriter::with_capacity(1 << 18, file), path: folder.join(name), temporary })
    }

    /// Returns the path that the file will have.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Appends to the file.
    ///
    /// # Errors
    /// The file cannot be written.
    pub(super) fn append(&mut self, bytes: &[u8]) -> Result<()> {
        self.file.write_all(bytes).map_err(failed(&self.path))
    }

    /// Writes to a place of a file to which nothing is appended.
    ///
    /// # Errors
    /// The file cannot be written.
    pub(super) fn write_at(&self, bytes: &[u8], offset: u64) -> Result<()> {
        self.file.get_ref().write_all_at(bytes, offset).map_err(failed(&self.path))
    }
}

impl Write for Whole {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.file.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

/// Gives files their names, and returns their bytes. Files of these names are replaced. After a
/// crash in the middle, the first files of the list may be there without the others.
///
/// # Errors
/// A file or its folder cannot be written.
pub(super) fn keep(files: Vec<Whole>) -> Result<u64> {
    let (mut bytes, mut ready) = (0, Vec::with_capacity(files.len()));
    for Whole { file, path, temporary } in files {
        let file = file.into_inner().map_err(|error| failed(&path)(error.into_error()))?;
        file.sync_all().map_err(failed(&path))?;
        bytes += file.metadata().map_err(failed(&path))?.len();
        ready.push((path, temporary));
    }
    for (path, temporary) in ready {
        std::fs::rename(&temporary.0, &path).map_err(failed(&path))?;
        // The name is durable when its folder is.
        let folder = path.parent().unwrap_or(Path::new("."));
        File::open(folder).and_then(|folder| folder.sync_all()).map_err(failed(folder))?;
    }
    Ok(bytes)
}

/// Returns the error of a file.
pub(super) fn failed(path: &Path) -> impl FnOnce(io::Error) -> Error + use<> {
    let path = path.to_owned();
    move |source| Error::File { path, source }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(folder: &Path) -> Vec<String> {
        let names = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name());
        names.map(|name| name.into_string().unwrap()).collect()
    }

    #[test]
    fn an_unfinished_file_leaves_the_old_one_and_no_trace() {
        let folder = tempfile::tempdir().unwrap();
        let write = |content: &[u8]| {
            let mut file = Whole::create(folder.path(), "part").unwrap();
            file.append(content).unwrap();
            file
        };
        assert_eq!(keep(vec![write(b"old")]).unwrap(), 3);
        let file = write(b"half");
        assert_eq!(names(folder.path()).len(), 2);
        drop(file);
        assert_eq!(names(folder.path()), ["part"]);
        assert_eq!(std::fs::read(folder.path().join("part")).unwrap(), b"old");
        keep(vec![write(b"new")]).unwrap();
        assert_eq!(std::fs::read(folder.path().join("part")).unwrap(), b"new");
        assert_eq!(names(folder.path()), ["part"]);
    }

    #[test]
    fn a_full_disk_is_an_error_that_names_the_file() {
        let folder = tempfile::tempdir().unwrap();
        let mut file = Whole::create(folder.path(), "part").unwrap();
        // The kernel's always-full device stands for the disk.
        file.file = BufWriter::new(File::options().write(true).open("/dev/full").unwrap());
        file.append(b"values").unwrap();
        let error = keep(vec![file]).unwrap_err();
        let Error::File { path, source } = &error else { panic!("{error}") };
        assert!(path.ends_with("part"), "{error}");
        assert_eq!(source.kind(), io::ErrorKind::StorageFull);
        assert!(names(folder.path()).is_empty());
    }
}
