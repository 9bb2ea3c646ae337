//! The bundle of a script: plain files in one sequence of bytes. It has no links, no owners and no
//! times, so that a reader need not refuse any.
//!
//! ```text
//!   "EBBNDL1\n" | count: u32 | count x [ length: u16 | path | mode: u8 | size: u64 ] | contents
//! ```
//!
//! Numbers are little-endian. The mode of an executable file is 1, that of others is 0. Paths are
//! in increasing order, each once, and contents follow in the order of the paths without gaps. So a
//! list of files has one encoding.

use std::collections::BTreeSet;

use crate::script::{BUNDLE_BYTES_MAX, path_refusal};

/// First bytes of a bundle.
const MAGIC: &[u8] = b"EBBNDL1\n";

/// Most files of a bundle.
pub const FILES_MAX: usize = 10_000;

/// A file of a bundle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct File<'a> {
    /// Path below the bundle's folder: plain parts with `/` between them.
    pub path: &'a str,
    /// Whether the file may be executed.
    pub executable: bool,
    /// Bytes of the file.
    pub content: &'a [u8],
}

/// Returns the bundle of these files, in any order.
///
/// # Errors
/// The files make no bundle: what is wrong, for people.
pub fn encode(mut files: Vec<File<'_>>) -> Result<Vec<u8>, String> {
    files.sort_by_key(|file| file.path);
    check(&files)?;
    let mut bytes = MAGIC.to_vec();
    bytes.extend((files.len() as u32).to_le_bytes());
    for File { path, executable, content } in &files {
        bytes.extend((path.len() as u16).to_le_bytes());
        bytes.extend(path.as_bytes());
        bytes.push(u8::from(*executable));
        bytes.extend((content.len() as u64).to_le_bytes());
    }
    files.iter().for_each(|file| bytes.extend(file.content));
    match bytes.len() as u64 {
        found if found > BUNDLE_BYTES_MAX => {
            Err(format!("{found} bytes, more than the {BUNDLE_BYTES_MAX} of a bundle"))
        }
        _ => Ok(bytes),
    }
}

/// Returns the files of a bundle, by path.
///
/// # Errors
/// The bytes are no bundle: what is wrong, for people.
pub fn decode(bytes: &[u8]) -> Result<Vec<File<'_>>, String> {
    if bytes.len() as u64 > BUNDLE_BYTES_MAX {
        return Err(format!("{} bytes, more than the {BUNDLE_BYTES_MAX} of a bundle", bytes.len()));
    }
    let mut rest = bytes;
    if take(&mut rest, MAGIC.len())? != MAGIC {
        return Err("it does not begin as a bundle".to_owned());
    }
    let count = u32::from_le_bytes(array(&mut rest)?) as usize;
    if count > FILES_MAX {
        return Err(format!("{count} files, more than {FILES_MAX}"));
    }
    let mut heads = Vec::new();
    for _ in 0..count {
        let length = u16::from_le_bytes(array(&mut rest)?);
        let path = std::str::from_utf8(take(&mut rest, length.into())?);
        let path = path.map_err(|_| "the path of a file is no UTF-8".to_owned())?;
        let executable = match array(&mut rest)? {
            [0] => false,
            [1] => true,
            [other] => return Err(format!("`{}` has the mode {other}", path.escape_debug())),
        };
        heads.push((path, executable, u64::from_le_bytes(array(&mut rest)?)));
    }
    let mut files = Vec::with_capacity(heads.len());
    for (path, executable, size) in heads {
        let size = usize::try_from(size).map_err(|_| "a file is too large".to_owned())?;
        files.push(File { path, executable, content: take(&mut rest, size)? });
    }
    if !rest.is_empty() {
        return Err(format!("{} bytes after its last file", rest.len()));
    }
    if !files.is_sorted_by(|one, next| one.path < next.path) {
        return Err("its files are not in order".to_owned());
    }
    check(&files)?;
    Ok(files)
}

/// Checks files in the order of their paths.
fn check(files: &[File<'_>]) -> Result<(), String> {
    if files.len() > FILES_MAX {
        return Err(format!("{} files, more than {FILES_MAX}", files.len()));
    }
    let paths: BTreeSet<_> = files.iter().map(|file| file.path).collect();
    if paths.len() < files.len() {
        return Err("it has a file twice".to_owned());
    }
    for path in &paths {
        if let Some(reason) = path_refusal(path) {
            return Err(format!("the path `{}` {reason}", path.escape_debug()));
        }
        let above = path.match_indices('/').map(|(at, _)| &path[..at]);
        if let Some(file) = above.into_iter().find(|above| paths.contains(above)) {
            return Err(format!("`{file}` is a file, and has files below it"));
        }
    }
    Ok(())
}

fn take<'a>(rest: &mut &'a [u8], count: usize) -> Result<&'a [u8], String> {
    let (taken, left) = rest.split_at_checked(count).ok_or("it ends too early")?;
    *rest = left;
    Ok(taken)
}

fn array<const N: usize>(rest: &mut &[u8]) -> Result<[u8; N], String> {
    take(rest, N).map(|bytes| bytes.try_into().expect("as many bytes"))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn file<'a>(path: &'a str, content: &'a [u8]) -> File<'a> {
        File { path, executable: false, content }
    }

    /// Returns bytes like those of [`encode`], without its checks.
    fn raw(files: &[(&[u8], u8, u64)], contents: &[u8]) -> Vec<u8> {
        let mut bytes = [MAGIC, &(files.len() as u32).to_le_bytes()].concat();
        for (path, mode, size) in files {
            let length = (path.len() as u16).to_le_bytes();
            bytes.extend([&length[..], path, &[*mode], &size.to_le_bytes()].concat());
        }
        [&bytes, contents].concat()
    }

    #[test]
    fn files_come_back_in_the_order_of_their_paths() {
        let run = File { executable: true, ..file("bin/run", b"#!") };
        let bytes = encode(vec![file("train.py", b"import torch"), run, file("bin.txt", b"")]).unwrap();
        let paths: Vec<_> = decode(&bytes).unwrap().iter().map(|file| file.path).collect();
        assert_eq!(paths, ["bin.txt", "bin/run", "train.py"]);
        assert!(decode(&bytes).unwrap()[1].executable);
        assert_eq!(decode(&encode(Vec::new()).unwrap()).unwrap(), []);
    }

    #[test]
    fn a_hostile_bundle_is_refused_with_the_reason() {
        let one = |path: &[u8]| raw(&[(path, 0, 1)], b"x");
        decode(&one(b"good")).unwrap();
        for (bytes, reason) in [
            (one(b"../../etc/passwd"), "has a part `.` or `..`"),
            (one(b"a/../../b"), "has a part `.` or `..`"),
            (one(b"/etc/passwd"), "is absolute"),
            (one(b"a\\b"), "backslash"),
            (one(b"a\0b"), "control character"),
            (one(b""), "is empty"),
            (one(b"\xff"), "no UTF-8"),
            (raw(&[(b"a", 7, 0)], b""), "has the mode 7"),
            (raw(&[(b"a", 0, 2)], b"x"), "ends too early"),
            (raw(&[(b"a", 0, u64::MAX)], b"x"), "ends too early"),
            (raw(&[(b"a", 0, u64::MAX), (b"b", 0, u64::MAX)], b"x"), "ends too early"),
            (raw(&[(b"a", 0, 1)], b"xy"), "1 bytes after"),
            (raw(&[(b"b", 0, 0), (b"a", 0, 0)], b""), "not in order"),
            (raw(&[(b"a", 0, 0), (b"a", 0, 0)], b""), "not in order"),
            (raw(&[(b"a", 0, 0), (b"a/b", 0, 0)], b""), "`a` is a file"),
            (raw(&[(b"a", 0, 0), (b"a-b", 0, 0), (b"a/b/c", 0, 0)], b""), "`a` is a file"),
            ([MAGIC, &u32::MAX.to_le_bytes()].concat(), "4294967295 files"),
            (b"PK\x03\x04 a zip".to_vec(), "does not begin as a bundle"),
            (Vec::new(), "ends too early"),
        ] {
            let said = decode(&bytes).unwrap_err();
            assert!(said.contains(reason), "{reason} in {said}");
        }
    }

    #[test]
    fn what_would_be_refused_is_not_written() {
        let twice = encode(vec![file("a", b""), file("a", b"")]).unwrap_err();
        assert_eq!(twice, "it has a file twice");
        assert!(encode(vec![file("../a", b"")]).unwrap_err().contains("`../a` has a part"));
        let names: Vec<_> = (0..=FILES_MAX).map(|index| index.to_string()).collect();
        let many = names.iter().map(|name| file(name, b"")).collect();
        assert!(encode(many).unwrap_err().contains("10001 files"));
    }

    proptest! {
        #[test]
        fn what_is_decoded_is_encoded_to_the_same_bytes(
            files in proptest::collection::btree_map(
                "[ab]{1,2}(/[ab.]{1,3}){0,2}",
                (any::<bool>(), proptest::collection::vec(any::<u8>(), 0..9)),
                0..8,
            )
        ) {
            let files: Vec<_> = files.iter().map(|(path, (executable, content))| {
                File { path, executable: *executable, content }
            }).collect();
            if let Ok(bytes) = encode(files.clone()) {
                let found = decode(&bytes).unwrap();
                prop_assert_eq!(&found, &files);
                prop_assert_eq!(encode(found).unwrap(), bytes);
            }
        }

        #[test]
        fn damaged_bytes_are_refused_or_are_another_good_bundle(at in 0usize..80, byte in any::<u8>(), cut in 0usize..80) {
            let mut bytes = encode(vec![file("a/b", b"12345"), file("c", b"67"), file("d.py", b"")]).unwrap();
            let length = bytes.len();
            bytes[at % length] = byte;
            for bytes in [&bytes[..], &bytes[..cut.min(length)]] {
                if let Ok(files) = decode(bytes) {
                    prop_assert_eq!(encode(files).unwrap(), bytes);
                }
            }
        }
    }
}
