//! The files of a script, from the user's folder into a bundle and from there into a private folder
//! of an agent. Only plain files travel.

use std::fs::{self, DirBuilder, OpenOptions};
use std::io::Write as _;
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use bytes::Bytes;
use ignore::WalkBuilder;
use proto::artifact::sha256_hex;
use proto::bundle::{self, File};
use proto::requirements::{self, Requirements};
use proto::script::BUNDLE_BYTES_MAX;

use crate::{Error, Result};

/// The files of a folder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bundle {
    /// The encoded files.
    pub bytes: Bytes,
    /// Path and size in bytes of each file, by path.
    pub files: Vec<(String, u64)>,
}

impl Bundle {
    /// Reads all plain files of `folder`, except those that a `.gitignore` names, `.git`,
    /// `__pycache__`, and files that usually have secrets: `.env`, `*.pem` and `*.key`.
    ///
    /// # Errors
    /// A file cannot be read, the folder has a link or a file that is none, the files together are
    /// too large, or `requirements.txt` has a line that agents refuse. The error names the file.
    pub fn pack(folder: &Path) -> Result<Self> {
        let wrong = |path: &Path, reason: String| Error::Bundle { path: path.to_owned(), reason };
        let unread = |path: &Path| {
            let path = path.to_owned();
            move |error: std::io::Error| Error::Bundle { path, reason: error.to_string() }
        };
        let root = fs::canonicalize(folder).map_err(unread(folder))?;
        // Hidden files travel too: packages and tools have their settings in them.
        let mut walk = WalkBuilder::new(&root);
        walk.hidden(false).require_git(false).git_global(false).ignore(false).follow_links(false);
        walk.filter_entry(|entry| entry.depth() == 0 || !is_left_out(&entry.file_name().to_string_lossy()));
        let (mut found, mut together) = (Vec::new(), 0);
        for entry in walk.build() {
            let entry = entry.map_err(|error| wrong(&root, error.to_string()))?;
            let (path, kind) = (entry.path(), entry.file_type());
            match kind {
                Some(kind) if kind.is_dir() => continue,
                Some(kind) if kind.is_file() => {}
                Some(kind) if kind.is_symlink() => {
                    let reason =
                        "is a link, and only plain files travel; name it in .gitignore or copy its file";
                    return Err(wrong(path, reason.to_owned()));
                }
                _ => return Err(wrong(path, "is no plain file; name it in .gitignore".to_owned())),
            }
            let below = path.strip_prefix(&root).ok().and_then(Path::to_str);
            let below = below.ok_or_else(|| wrong(path, "has a name that is no UTF-8".to_owned()))?;
            let about = fs::metadata(path).map_err(unread(path))?;
            together += about.len();
            if together > BUNDLE_BYTES_MAX {
                let reason = format!(
                    "with it the files are larger than the {BUNDLE_BYTES_MAX} bytes of a bundle; name data in .gitignore, \
                     and let the script read it from a place that all machines reach"
                );
                return Err(wrong(path, reason));
            }
            if found.len() == bundle::FILES_MAX {
                let reason = format!("is one more than the {} files of a bundle", bundle::FILES_MAX);
                return Err(wrong(path, reason));
            }
            let executable = about.permissions().mode() & 0o100 != 0;
            found.push((below.to_owned(), executable, fs::read(path).map_err(unread(path))?));
        }
        if let Some((path, _, content)) = found.iter().find(|(path, ..)| path == requirements::FILE) {
            let refused = |why| format!("{why}; a file that is not for the workers stays here by .gitignore");
            Requirements::parse(content).map_err(|why| wrong(&root.join(path), refused(why)))?;
        }
        let files = found.iter().map(|(path, executable, content)| {
            let executable = *executable;
            File { path, executable, content }
        });
        let bytes = bundle::encode(files.collect()).map_err(|reason| wrong(folder, reason))?.into();
        let mut files: Vec<_> =
            found.into_iter().map(|(path, _, content)| (path, content.len() as u64)).collect();
        files.sort_unstable();
        Ok(Self { bytes, files })
    }
}

/// Returns whether a file or folder of this name never travels.
fn is_left_out(name: &str) -> bool {
    let name = name.to_ascii_lowercase();
    let names = [".git", ".env", "__pycache__"];
    names.contains(&name.as_str()) || [".pem", ".key"].iter().any(|ending| name.ends_with(ending))
}

/// Writes the files of a script's bundle into a new folder below `parent`, which only this user can
/// read. Its name is the number of the script and the SHA-256 of the bundle. A script may change
/// its files, and another script of the same files must not see that. A folder of that name is
/// replaced.
///
/// # Errors
/// The bytes are not those of the hash, are no bundle, or cannot be written. Nothing is left then
/// under the folder's name.
pub fn unpack(bytes: &[u8], sha256: &str, script: u64, parent: &Path) -> Result<PathBuf> {
    let found = sha256_hex(bytes);
    if found != sha256 {
        return Err(Error::BadBundle(format!("its sha256 is {found}, expected {sha256}")));
    }
    // All of it is checked before the first file is written.
    let files = bundle::decode(bytes).map_err(Error::BadBundle)?;
    let folder = parent.join(format!("{script}-{found}"));
    let begun = parent.join(format!("{script}-{found}.begun"));
    for old in [&folder, &begun] {
        match fs::remove_dir_all(old) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error.into()),
            _ => {}
        }
    }
    let private = |path: &Path| DirBuilder::new().recursive(true).mode(0o700).create(path);
    private(&begun)?;
    for File { path, executable, content } in files {
        let path = begun.join(path);
        path.parent().map_or(Ok(()), private)?;
        let mode = if executable { 0o700 } else { 0o600 };
        OpenOptions::new().write(true).create_new(true).mode(mode).open(&path)?.write_all(content)?;
    }
    fs::rename(&begun, &folder)?;
    Ok(folder)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    fn folder(files: &[(&str, &str)]) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        for (path, content) in files {
            let path = dir.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, content).unwrap();
        }
        dir
    }

    fn names(bundle: &Bundle) -> Vec<&str> {
        bundle.files.iter().map(|(path, _)| path.as_str()).collect()
    }

    #[test]
    fn secrets_and_ignored_files_stay_at_home() {
        let dir = folder(&[
            ("train.py", "print()"),
            ("src/net.py", ""),
            (".settings/a", ""),
            (".gitignore", "data/\n*.bin\n!keep.bin\n"),
            ("src/.gitignore", "local.py\n"),
            ("src/local.py", ""),
            ("data/large", ""),
            ("x.bin", ""),
            ("keep.bin", ""),
            (".git/config", "url = https://user:password@host"),
            (".env", "PASSWORD=1"),
            ("deploy/.ENV", "PASSWORD=1"),
            ("deploy/server.key", ""),
            ("deploy/ca.PEM", ""),
            ("__pycache__/train.pyc", ""),
        ]);
        let bundle = Bundle::pack(dir.path()).unwrap();
        assert_eq!(
            names(&bundle),
            [".gitignore", ".settings/a", "keep.bin", "src/.gitignore", "src/net.py", "train.py"]
        );
        assert!(bundle.files.contains(&("train.py".to_owned(), 7)));
        assert_eq!(Bundle::pack(dir.path()).unwrap(), bundle, "the same files make the same bytes");
    }

    #[test]
    fn links_and_what_is_no_file_are_named() {
        let dir = folder(&[("train.py", "")]);
        let link = dir.path().join("passwords");
        for target in ["/etc/passwd", "train.py", "no such file", "/"] {
            symlink(target, &link).unwrap();
            let error = Bundle::pack(dir.path()).unwrap_err().to_string();
            assert!(error.contains("passwords: is a link"), "{error}");
            fs::remove_file(&link).unwrap();
        }
        let _socket = std::os::unix::net::UnixListener::bind(&link).unwrap();
        let error = Bundle::pack(dir.path()).unwrap_err().to_string();
        assert!(error.contains("passwords: is no plain file"), "{error}");
        assert!(Bundle::pack(&dir.path().join("no")).unwrap_err().to_string().contains("no: "));
    }

    #[test]
    fn a_folder_that_is_too_large_is_refused_before_it_is_read() {
        let dir = folder(&[("train.py", "")]);
        let large = fs::File::create(dir.path().join("weights.bin")).unwrap();
        large.set_len(BUNDLE_BYTES_MAX + 1).unwrap();
        let error = Bundle::pack(dir.path()).unwrap_err().to_string();
        assert!(error.contains("weights.bin: with it") && error.contains(".gitignore"), "{error}");
    }

    #[test]
    fn requirements_that_agents_refuse_do_not_travel() {
        let dir = folder(&[
            ("train.py", ""),
            ("requirements.txt", "numpy\n--pre\n"),
            ("a/requirements.txt", "-e ."),
        ]);
        let error = Bundle::pack(dir.path()).unwrap_err().to_string();
        assert!(
            error.contains("requirements.txt: line 2: `--pre`") && error.contains(".gitignore"),
            "{error}"
        );
        fs::write(dir.path().join("requirements.txt"), "numpy\n").unwrap();
        Bundle::pack(dir.path()).unwrap();
        fs::write(dir.path().join("requirements.txt"), "--pre\n").unwrap();
        fs::write(dir.path().join(".gitignore"), "/requirements.txt\n").unwrap();
        assert_eq!(
            names(&Bundle::pack(dir.path()).unwrap()),
            [".gitignore", "a/requirements.txt", "train.py"]
        );
    }

    #[test]
    fn a_bundle_is_unpacked_whole_into_a_private_folder() {
        let dir = folder(&[("train.py", "print()"), ("bin/run", "#!")]);
        fs::set_permissions(dir.path().join("bin/run"), fs::Permissions::from_mode(0o755)).unwrap();
        let Bundle { bytes, .. } = Bundle::pack(dir.path()).unwrap();
        let (hash, parent) = (sha256_hex(&bytes), tempfile::tempdir().unwrap());
        fs::create_dir(parent.path().join(format!("7-{hash}.begun"))).unwrap();
        let unpacked = unpack(&bytes, &hash, 7, parent.path()).unwrap();
        assert_eq!(unpacked, parent.path().join(format!("7-{hash}")));
        let mode = |path: &str| fs::metadata(unpacked.join(path)).unwrap().permissions().mode() & 0o777;
        assert_eq!((mode(""), mode("bin"), mode("bin/run"), mode("train.py")), (0o700, 0o700, 0o700, 0o600));
        assert_eq!(fs::read(unpacked.join("train.py")).unwrap(), b"print()");
        assert_eq!(fs::read_dir(parent.path()).unwrap().count(), 1);
    }

    #[test]
    fn scripts_of_equal_files_have_folders_of_their_own_and_no_folder_is_taken_as_it_is() {
        let Bundle { bytes, .. } = Bundle::pack(folder(&[("train.py", "print()")]).path()).unwrap();
        let (hash, parent) = (sha256_hex(&bytes), tempfile::tempdir().unwrap());
        let [one, other] = [7, 8].map(|script| unpack(&bytes, &hash, script, parent.path()).unwrap());
        assert_ne!(one, other);
        fs::write(one.join("train.py"), "changed").unwrap();
        fs::write(one.join("added"), "").unwrap();
        assert_eq!(fs::read(other.join("train.py")).unwrap(), b"print()");
        // As after an agent that could not remove it.
        assert_eq!(unpack(&bytes, &hash, 7, parent.path()).unwrap(), one);
        assert_eq!(fs::read(one.join("train.py")).unwrap(), b"print()");
        assert!(!one.join("added").exists());
    }

    #[test]
    fn a_bundle_of_another_hash_or_with_bad_paths_leaves_nothing() {
        let parent = tempfile::tempdir().unwrap();
        let good = bundle::encode(vec![File { path: "ab", executable: false, content: b"x" }]).unwrap();
        let refused =
            |bytes: &[u8], hash: &str| unpack(bytes, hash, 7, parent.path()).unwrap_err().to_string();
        assert!(refused(&good, &sha256_hex(b"")).contains("its sha256 is"));
        let at = good.windows(2).position(|two| two == b"ab").unwrap();
        for path in [b"..", b"/x", b"a/", b"\0x"] {
            let mut bytes = good.clone();
            bytes[at..at + 2].copy_from_slice(path);
            let said = refused(&bytes, &sha256_hex(&bytes));
            assert!(said.contains("refused") && said.contains("the path"), "{said}");
        }
        assert_eq!(fs::read_dir(parent.path()).unwrap().count(), 0);
    }
}
