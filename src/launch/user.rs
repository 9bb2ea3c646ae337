//! The user as whom processes of scripts run, if it is another one than that of this process.
#![expect(unsafe_code, reason = "the table of users has no safe interface")]

use std::ffi::{CStr, CString};
use std::fs;
use std::io;
use std::os::unix::fs::lchown;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};

/// Bytes for the entry of a user, at most. The system says if it needs more.
const ENTRY_BYTES: usize = 64 << 10;

/// A user of this machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct User {
    pub(crate) name: String,
    pub(crate) id: u32,
    pub(crate) group: u32,
    /// Home folder, which need not be there.
    pub(crate) home: PathBuf,
}

impl User {
    /// Finds the user `name`, as whom this process can start others.
    ///
    /// # Errors
    /// There is no such user, it is the one of this process or root, or this process may not start
    /// processes of others.
    pub(crate) fn separate(name: &str) -> Result<Self> {
        let own = rustix::process::geteuid();
        let user = Self::find(name).with_context(|| format!("--script-user {name}"))?;
        let user = user.with_context(|| {
            format!("--script-user {name}: this machine has no such user; make one with useradd")
        })?;
        if user.id == 0 || user.id == own.as_raw() {
            bail!(
                "--script-user {name}: it is root or the user of this worker, which separates nothing; name another one"
            );
        }
        if !own.is_root() {
            bail!(
                "--script-user {name}: only root starts processes of other users, and this worker runs as user {own}; start \
                 it as root, or without --script-user"
            );
        }
        Ok(user)
    }

    fn find(name: &str) -> io::Result<Option<Self>> {
        let name = CString::new(name)?;
        let mut bytes = vec![0; ENTRY_BYTES];
        // SAFETY: all zeros are a value of this structure of numbers and pointers.
        let mut entry: libc::passwd = unsafe { std::mem::zeroed() };
        let mut found = std::ptr::null_mut();
        // SAFETY: all pointers are of values that live during the call, and `bytes` has the length
        // that the call is told.
        let error = unsafe {
            libc::getpwnam_r(name.as_ptr(), &raw mut entry, bytes.as_mut_ptr(), bytes.len(), &raw mut found)
        };
        if error != 0 {
            return Err(io::Error::from_raw_os_error(error));
        }
        if found.is_null() {
            return Ok(None);
        }
        // SAFETY: the call has found an entry, whose texts end with a zero and lie in `bytes`.
        let home = unsafe { CStr::from_ptr(entry.pw_dir) };
        Ok(Some(Self {
            name: name.to_string_lossy().into_owned(),
            id: entry.pw_uid,
            group: entry.pw_gid,
            home: PathBuf::from(home.to_string_lossy().into_owned()),
        }))
    }

    /// Returns variables that name the user to programs.
    pub(crate) fn variables(&self) -> [(&'static str, String); 3] {
        let home = self.home.display().to_string();
        [("HOME", home), ("USER", self.name.clone()), ("LOGNAME", self.name.clone())]
    }

    /// Gives a folder and all below it to the user. Nobody else may write there meanwhile.
    ///
    /// # Errors
    /// The system refuses.
    pub(crate) fn give(&self, folder: &Path) -> io::Result<()> {
        for entry in fs::read_dir(folder)? {
            let entry = entry?;
            match entry.file_type()?.is_dir() {
                true => self.give(&entry.path())?,
                false => lchown(entry.path(), Some(self.id), Some(self.group))?,
            }
        }
        // Last, because from then on the user may change what is in it.
        lchown(folder, Some(self.id), Some(self.group))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_user_is_found_by_name() {
        let root = User::find("root").unwrap().unwrap();
        assert_eq!((root.id, root.group, root.name.as_str()), (0, 0, "root"));
        assert_eq!(User::find("no-such-user-here").unwrap(), None);
        User::find("a\0b").unwrap_err();
    }

    #[test]
    fn a_user_that_separates_nothing_is_refused_with_what_to_do() {
        let said = |name: &str| format!("{:#}", User::separate(name).unwrap_err());
        assert!(said("root").contains("separates nothing"), "{}", said("root"));
        assert!(said("no-such-user-here").contains("useradd"), "{}", said("no-such-user-here"));
        match (User::separate("nobody"), rustix::process::geteuid().is_root()) {
            (Ok(user), true) => assert_eq!(user.name, "nobody"),
            (Err(error), false) => assert!(error.to_string().contains("only root starts"), "{error}"),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_folder_is_given_with_all_that_is_in_it() {
        use std::os::unix::fs::MetadataExt as _;
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("a")).unwrap();
        fs::write(dir.path().join("a/b"), "").unwrap();
        // Only root can give files away; everybody can give them to themselves.
        let root = rustix::process::geteuid().is_root();
        let own = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
        let (id, group) = if root { (4242, 4243) } else { own };
        let user = User { name: "x".into(), id, group, home: "/".into() };
        user.give(dir.path()).unwrap();
        for path in ["", "a", "a/b"] {
            let found = fs::symlink_metadata(dir.path().join(path)).unwrap();
            assert_eq!((found.uid(), found.gid()), (id, group), "{path}");
        }
    }
}
