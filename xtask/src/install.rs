//! Folders that are either complete or not there. A folder is filled under a temporary name beside its final one and
//! renamed at the end, so whatever interrupts the filling (Ctrl-C, SIGKILL, a full disk), nobody ever finds half of it.
//!
//! A file lock makes clones that share the place take turns. It is given to child processes too: the kernel drops it
//! when the last of them is gone, so an orphan of a killed install is waited for and never writes into a later one.

use anyhow::{Context, Result};
use std::{
    ffi::OsStr,
    fs::{self, File, TryLockError},
    path::{Path, PathBuf},
};

/// Makes `dir` by `fill`, unless it is there already; returns whether it had to.
///
/// `fill` gets the temporary folder, and the lock for the processes it starts.
///
/// # Errors
/// Those of `fill`, and of the file system; `dir` does not exist then.
pub(crate) fn install(dir: &Path, fill: impl FnOnce(&Path, &File) -> Result<()>) -> Result<bool> {
    let parent = dir.parent().with_context(|| format!("`{}` has no parent folder", dir.display()))?;
    fs::create_dir_all(parent).with_context(|| format!("create `{}`", parent.display()))?;
    let lock = lock(parent)?;
    if dir.exists() {
        return Ok(false);
    }
    let partial = partial(dir);
    if partial.exists() {
        fs::remove_dir_all(&partial).with_context(|| format!("remove `{}`", partial.display()))?;
    }
    fs::create_dir(&partial).with_context(|| format!("create `{}`", partial.display()))?;
    let result = fill(&partial, &lock)
        .and_then(|()| fs::rename(&partial, dir).with_context(|| format!("rename to `{}`", dir.display())));
    if result.is_err() {
        // The first error is the one to report; what stays here is removed by the next install.
        let _ = fs::remove_dir_all(&partial);
    }
    result.map(|()| true)
}

fn partial(dir: &Path) -> PathBuf {
    let mut name = OsStr::new(".partial-").to_owned();
    name.push(dir.file_name().unwrap_or_default());
    dir.with_file_name(name)
}

fn lock(parent: &Path) -> Result<File> {
    let path = parent.join(".lock");
    let context = || format!("lock `{}`", path.display());
    let file = File::create(&path).with_context(context)?;
    match file.try_lock() {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => {
            eprintln!("another process is installing into `{}`: waiting for it", parent.display());
            file.lock().with_context(context)?;
        }
        Err(TryLockError::Error(error)) => return Err(error).with_context(context),
    }
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::bail;
    use std::{
        process::{Command, Stdio},
        sync::{
            Barrier,
            atomic::{AtomicUsize, Ordering},
        },
    };

    fn names(dir: &Path) -> Vec<String> {
        let entries =
            fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let mut names: Vec<_> = entries.filter(|name| name != ".lock").collect();
        names.sort();
        names
    }

    #[test]
    fn failed_filling_leaves_nothing_and_the_next_one_completes() {
        let cache = tempfile::tempdir().unwrap();
        let dir = cache.path().join("libtorch");
        let error = install(&dir, |partial, _| {
            fs::write(partial.join("first"), "half")?;
            bail!("the network went away")
        });
        assert_eq!(error.unwrap_err().to_string(), "the network went away");
        assert_eq!(names(cache.path()), Vec::<String>::new());

        assert!(install(&dir, |partial, _| Ok(fs::write(partial.join("first"), "whole")?)).unwrap());
        assert_eq!(fs::read_to_string(dir.join("first")).unwrap(), "whole");
        assert_eq!(names(cache.path()), ["libtorch"]);
    }

    #[test]
    fn leftovers_of_a_killed_process_are_removed_and_never_taken_for_an_install() {
        let cache = tempfile::tempdir().unwrap();
        let dir = cache.path().join("libtorch");
        fs::create_dir(partial(&dir)).unwrap();
        fs::write(partial(&dir).join("first"), "half").unwrap();

        assert!(install(&dir, |_, _| Ok(())).unwrap());
        assert_eq!(names(cache.path()), ["libtorch"]);
        assert_eq!(names(&dir), Vec::<String>::new());
    }

    #[test]
    fn child_that_outlives_its_install_keeps_the_lock() {
        let cache = tempfile::tempdir().unwrap();
        let mut child = None;
        let failed = install(&cache.path().join("libtorch"), |_, lock| {
            // `cat` ends when its standard input, our pipe, is closed; it holds the lock as its standard error.
            let command = &mut Command::new("cat");
            child = Some(command.stdin(Stdio::piped()).stderr(lock.try_clone()?).spawn()?);
            bail!("killed")
        });
        assert!(failed.is_err());
        let lock = File::open(cache.path().join(".lock")).unwrap();
        assert!(matches!(lock.try_lock(), Err(TryLockError::WouldBlock)));

        let mut child = child.unwrap();
        drop(child.stdin.take());
        child.wait().unwrap();
        lock.try_lock().unwrap();
    }

    #[test]
    fn two_clones_at_once_fill_the_folder_once() {
        let cache = tempfile::tempdir().unwrap();
        let dir = cache.path().join("libtorch");
        let (start, fills) = (Barrier::new(2), AtomicUsize::new(0));
        let clone = || {
            start.wait();
            install(&dir, |_, _| {
                fills.fetch_add(1, Ordering::Relaxed);
                assert!(!dir.exists());
                Ok(())
            })
            .unwrap()
        };
        let filled =
            std::thread::scope(|scope| [scope.spawn(clone), scope.spawn(clone)].map(|t| t.join().unwrap()));
        assert!(filled[0] != filled[1], "exactly one of them filled it");
        assert_eq!(fills.into_inner(), 1);
    }
}
