//! Compiled kernels in a folder, so that a process starts without the compiler's seconds.
//!
//! Always true here:
//!
//! - The name of an entry is a hash of source, options and compute capability, with the version of
//!   the compiler behind it. Another version of Ebbflow never finds it, and another compiler only
//!   when it is asked for any.
//! - An entry was loaded by a driver before it was written.
//! - An entry begins with a hash of the rest. What is damaged counts as missing.
//! - Only the folder's owner can write there. A folder in which others can is not used, because the
//!   device would run what they wrote.

use std::fs::{self, DirBuilder};
use std::io::{self, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::Path;

use sha2::{Digest as _, Sha256};

/// What compilers make of one source. Each compiler has an entry of its own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Key(String);

/// The version of a compiler: its major and its minor number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Version(pub(crate) i32, pub(crate) i32);

impl Key {
    /// Returns the key of a source with options.
    pub(crate) fn of(source: &str, options: &[String]) -> Self {
        let mut hash = Sha256::new();
        for part in options.iter().map(String::as_str).chain([source]) {
            // With lengths, so that parts do not run into each other.
            hash.update((part.len() as u64).to_le_bytes());
            hash.update(part);
        }
        Self(hex(&hash.finalize()))
    }

    /// Returns the name of the entry of a compiler.
    fn entry(&self, Version(major, minor): Version) -> String {
        format!("{}-{major}.{minor}.ptx", self.0)
    }

    /// Returns the compiler whose entry has this name. `None`: it is no entry of this key.
    fn version(&self, entry: &str) -> Option<Version> {
        let version = entry.strip_prefix(&self.0)?.strip_prefix('-')?.strip_suffix(".ptx")?;
        let (major, minor) = version.split_once('.')?;
        Some(Version(major.parse().ok()?, minor.parse().ok()?))
    }
}

/// Returns the entries of all compilers that are neither missing nor damaged, the newest first.
pub(crate) fn read_all(folder: &Path, key: &Key) -> Vec<String> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut versions: Vec<_> = entries.filter_map(|entry| key.version(entry.file_name().to_str()?)).collect();
    versions.sort_unstable();
    versions.into_iter().rev().filter_map(|version| read(folder, key, version)).collect()
}

/// Returns the entry of a compiler. `None`: there is none, it is damaged, or others can write to
/// the folder.
pub(crate) fn read(folder: &Path, key: &Key, version: Version) -> Option<String> {
    if !is_private(folder).ok()? {
        return None;
    }
    let entry = fs::read_to_string(folder.join(key.entry(version))).ok()?;
    let (hash, ptx) = entry.split_once('\n')?;
    (hash == hex(&Sha256::digest(ptx))).then(|| ptx.to_owned())
}

/// Writes an entry as a whole, in a folder that is made if it is missing.
///
/// # Errors
/// Those of the file system, and others can write to the folder.
pub(crate) fn write(folder: &Path, key: &Key, version: Version, ptx: &str) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
    if !is_private(folder)? {
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, "others can write to this folder"));
    }
    // A name of this process. What it left there before is written over.
    let entry = key.entry(version);
    let partial = folder.join(format!(".{}-{entry}", std::process::id()));
    let _ = fs::remove_file(&partial);
    let mut file = fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(&partial)?;
    let written =
        writeln!(file, "{}", hex(&Sha256::digest(ptx))).and_then(|()| file.write_all(ptx.as_bytes()));
    let written = written.and_then(|()| fs::rename(&partial, folder.join(entry)));
    if written.is_err() {
        // The first error is the one to report.
        let _ = fs::remove_file(&partial);
    }
    written
}

/// Returns whether the folder is this user's own, and nobody else can write to it.
fn is_private(folder: &Path) -> io::Result<bool> {
    let (folder, process) = (fs::metadata(folder)?, fs::metadata("/proc/self")?);
    Ok(folder.is_dir() && folder.uid() == process.uid() && folder.mode() & 0o022 == 0)
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    const NEW: Version = Version(13, 0);

    fn key(option: &str) -> Key {
        Key::of("source", &[option.to_owned(), "--ftz=false".to_owned()])
    }

    #[test]
    fn an_entry_is_found_by_source_options_and_compiler_alone() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path().join("kernels");
        assert_eq!(read(&folder, &key("a"), NEW), None, "no folder");
        write(&folder, &key("a"), NEW, "text\nof a kernel\n").unwrap();
        assert_eq!(read(&folder, &key("a"), NEW).as_deref(), Some("text\nof a kernel\n"));
        assert_eq!(read(&folder, &key("b"), NEW), None);
        assert_eq!(read(&folder, &key("a"), Version(13, 1)), None);
        assert_ne!(Key::of("ab", &["c".to_owned()]), Key::of("b", &["ca".to_owned()]));
        assert_eq!(fs::metadata(&folder).unwrap().permissions().mode() & 0o777, 0o700);
        assert_eq!(fs::read_dir(&folder).unwrap().count(), 1, "nothing partial is left");
    }

    #[test]
    fn entries_of_any_compiler_are_found_the_newest_first() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(read_all(&folder.path().join("kernels"), &key("a")), Vec::<String>::new(), "no folder");
        for version in [Version(9, 2), Version(13, 0), Version(12, 10), Version(12, 9)] {
            write(folder.path(), &key("a"), version, &format!("{version:?}")).unwrap();
        }
        write(folder.path(), &key("b"), Version(14, 0), "of another key").unwrap();
        fs::write(folder.path().join(key("a").entry(Version(12, 9))), "damaged").unwrap();
        fs::write(folder.path().join(format!("{}-x.y.ptx", key("a").0)), "of no compiler").unwrap();
        assert_eq!(
            read_all(folder.path(), &key("a")),
            ["Version(13, 0)", "Version(12, 10)", "Version(9, 2)"]
        );
    }

    #[test]
    fn a_damaged_entry_counts_as_missing_and_is_written_over() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(key("a").entry(NEW));
        write(folder.path(), &key("a"), NEW, "a kernel").unwrap();
        let good = fs::read(&path).unwrap();
        for at in 0..good.len() {
            let mut bad = good.clone();
            bad[at] ^= 0x80;
            fs::write(&path, bad).unwrap();
            assert_eq!(read(folder.path(), &key("a"), NEW), None, "byte {at}");
            fs::write(&path, &good[..at]).unwrap();
            assert_eq!(read(folder.path(), &key("a"), NEW), None, "{at} bytes");
        }
        write(folder.path(), &key("a"), NEW, "a kernel").unwrap();
        assert_eq!(read(folder.path(), &key("a"), NEW).as_deref(), Some("a kernel"));
    }

    #[test]
    fn a_folder_that_others_can_write_to_is_not_used() {
        let folder = tempfile::tempdir().unwrap();
        write(folder.path(), &key("a"), NEW, "a kernel").unwrap();
        fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o777)).unwrap();
        assert_eq!(read(folder.path(), &key("a"), NEW), None);
        assert_eq!(read_all(folder.path(), &key("a")), Vec::<String>::new());
        let refused = write(folder.path(), &key("b"), NEW, "a kernel").unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::PermissionDenied);
    }
}
