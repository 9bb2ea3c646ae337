//! The folder of a conversion, on a disk or in an object store: what may be in it before, and the
//! names of its files.

use std::fmt;
use std::path::{Path, PathBuf};

use super::sink::PART;
use super::whole::{PARTIAL, failed};
use crate::error::{Result, wrong};

/// Name of the file that describes the shards. It is written last, so that a folder with it is
/// complete.
pub(super) const SECTION: &str = "data.toml";

/// A folder of an object store for the shards of a conversion. Its calls block.
pub trait ShardStore: fmt::Debug + Send + Sync {
    /// Returns the names of the files and folders that are directly in it.
    ///
    /// # Errors
    /// The folder cannot be listed.
    fn names(&self) -> Result<Vec<String>>;

    /// Removes a file.
    ///
    /// # Errors
    /// The file cannot be removed.
    fn remove(&self, name: &str) -> Result<()>;

    /// Copies a file of the disk to the folder. There it is whole, or it does not exist.
    ///
    /// # Errors
    /// The file cannot be read or written.
    fn write(&self, name: &str, file: &Path) -> Result<()>;

    /// Returns the URL of a file of this name.
    fn url(&self, name: &str) -> String;

    /// Returns whether a file, a path or a URL, lies in the folder, however it is spelled.
    fn holds(&self, file: &str) -> bool;
}

/// Makes the folder of a conversion, without the files of an earlier one. `sources` are the files
/// that are converted.
///
/// # Errors
/// The folder cannot be written, has files and may not be overwritten, has files that no conversion
/// wrote, or has sources.
pub(super) fn prepare(folder: &Path, overwrite: bool, sources: &[PathBuf]) -> Result<()> {
    std::fs::create_dir_all(folder).map_err(failed(folder))?;
    let (mut own, mut others) = (Vec::new(), Vec::new());
    for entry in folder.read_dir().map_err(failed(folder))? {
        let entry = entry.map_err(failed(folder))?;
        let is_file = entry.file_type().map_err(failed(folder))?.is_file();
        let name = entry.file_name().to_string_lossy().into_owned();
        if is_file && is_own(&name) { own.push(name) } else { others.push(name) }
    }
    let place = folder.canonicalize().map_err(failed(folder))?;
    let inside = |source: &&PathBuf| source.canonicalize().is_ok_and(|source| source.starts_with(&place));
    check(folder, &own, &others, overwrite, sources.iter().find(inside))?;
    in_order(own).iter().try_for_each(|name| {
        let path = folder.join(name);
        std::fs::remove_file(&path).map_err(failed(&path))
    })
}

/// Prepares a folder of an object store like [`prepare`].
///
/// # Errors
/// Those of [`prepare`].
pub(super) fn prepare_store(store: &dyn ShardStore, overwrite: bool, sources: &[PathBuf]) -> Result<()> {
    let (own, others): (Vec<_>, Vec<_>) = store.names()?.into_iter().partition(|name| is_own(name));
    let folder = store.url("");
    let inside = |source: &&PathBuf| source.to_str().is_some_and(|source| store.holds(source));
    check(Path::new(&folder), &own, &others, overwrite, sources.iter().find(inside))?;
    in_order(own).iter().try_for_each(|name| store.remove(name))
}

/// Checks what is in a folder: files of a conversion, others, and a source.
///
/// # Errors
/// Something is there that has to stay.
fn check(
    folder: &Path,
    own: &[String],
    others: &[String],
    overwrite: bool,
    source: Option<&PathBuf>,
) -> Result<()> {
    if let Some(other) = others.iter().min() {
        return wrong(
            folder,
            format!("`{other}` is there, which no conversion wrote; choose an empty folder, or a new one"),
        );
    }
    if !own.is_empty() && !overwrite {
        return wrong(
            folder,
            format!(
                "{} files of an earlier conversion are there; choose another folder, or replace them with --overwrite",
                own.len()
            ),
        );
    }
    match source {
        Some(source) => wrong(
            folder,
            format!("the source {} is in it, and would be replaced; choose another folder", source.display()),
        ),
        None => Ok(()),
    }
}

/// Returns files in the order in which they are removed: the description first, because without it
/// nobody takes what is left for a whole conversion.
fn in_order(mut own: Vec<String>) -> Vec<String> {
    own.sort_by_key(|name| name != SECTION);
    own
}

/// Returns whether a URL has the name of a file as it is, whatever encodes and decodes it.
pub(super) fn is_plain(name: &str) -> bool {
    name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte))
}

/// Returns whether a conversion writes files of this name.
fn is_own(name: &str) -> bool {
    let whole = name.strip_prefix('.').and_then(|name| name.strip_suffix(PARTIAL)).unwrap_or(name);
    let number = whole.strip_prefix(PART).and_then(|rest| rest.split_once('.'));
    whole == SECTION
        || number
            .is_some_and(|(number, _)| number.len() >= 5 && number.bytes().all(|byte| byte.is_ascii_digit()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(folder: &Path, overwrite: bool, sources: &[PathBuf]) -> String {
        prepare(folder, overwrite, sources).unwrap_err().to_string()
    }

    #[test]
    fn only_files_of_a_conversion_are_replaced_and_only_on_demand() {
        let parent = tempfile::tempdir().unwrap();
        let folder = parent.path().join("a/out");
        prepare(&folder, false, &[]).unwrap();
        for name in ["part-00000.parquet", "part-00001.x.y.npy", ".part-00002.tar.partial", SECTION] {
            std::fs::write(folder.join(name), "old").unwrap();
        }
        assert!(error(&folder, false, &[]).contains("a/out: 4 files of an earlier conversion are there"));
        let sources = [parent.path().join("elsewhere"), folder.join("part-00000.parquet")];
        assert!(
            error(&folder, true, &sources).contains("part-00000.parquet is in it, and would be replaced")
        );
        std::fs::write(folder.join("part-1.txt"), "the user's").unwrap();
        assert!(error(&folder, true, &[]).contains("`part-1.txt` is there, which no conversion wrote"));
        std::fs::remove_file(folder.join("part-1.txt")).unwrap();
        prepare(&folder, true, &[]).unwrap();
        assert_eq!(folder.read_dir().unwrap().count(), 0);
        std::fs::create_dir(folder.join("part-00000.x")).unwrap();
        assert!(error(&folder, true, &[]).contains("`part-00000.x` is there"));
    }

    #[test]
    fn a_folder_that_cannot_be_made_is_named() {
        let parent = tempfile::tempdir().unwrap();
        std::fs::write(parent.path().join("file"), "").unwrap();
        assert!(error(&parent.path().join("file"), true, &[]).contains("/file: "));
    }
}
