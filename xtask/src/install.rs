//! How things come into the cache that clones share: whole folders, filled through pip or Debian's
//! packages.
//!
//! A folder is either complete or not there. It is filled under a temporary name beside its final
//! one and renamed at the end. The name has the id of this process, so an orphan of a killed
//! install never writes into a later one. A file lock makes clones take turns.

use anyhow::{Context, Result, bail, ensure};
use std::{
    ffi::OsStr,
    fs::{self, File, TryLockError},
    path::Path,
    process::{Command, Stdio},
};

/// Makes `dir` by `fill`, unless it is there already. `fill` gets the temporary folder.
///
/// # Errors
/// Those of `fill`, and of the file system; `dir` does not exist then.
pub(crate) fn install(dir: &Path, fill: impl FnOnce(&Path) -> Result<()>) -> Result<()> {
    let (parent, name) = dir.parent().zip(dir.file_name()).context("a folder of the cache has a name")?;
    fs::create_dir_all(parent).with_context(|| format!("create `{}`", parent.display()))?;
    let _lock = lock(parent)?;
    if dir.exists() {
        return Ok(());
    }
    let started = format!(".partial-{}-", name.display());
    // What others of this name began, and were killed. A folder that an orphan still fills is left
    // to the next install.
    for entry in fs::read_dir(parent)?.filter_map(Result::ok) {
        if entry.file_name().to_string_lossy().starts_with(&started) {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
    let partial = parent.join(started + &std::process::id().to_string());
    fs::create_dir(&partial).with_context(|| format!("create `{}`", partial.display()))?;
    let rename = |()| fs::rename(&partial, dir).with_context(|| format!("rename to `{}`", dir.display()));
    let result = fill(&partial).and_then(rename);
    if result.is_err() {
        // The first error is the one to report.
        let _ = fs::remove_dir_all(&partial);
    }
    result
}

fn lock(parent: &Path) -> Result<File> {
    let path = parent.join(".lock");
    let file = File::create(&path).with_context(|| format!("create `{}`", path.display()))?;
    if let Err(TryLockError::WouldBlock) = file.try_lock() {
        eprintln!("another process is installing into `{}`: waiting for it", parent.display());
    }
    file.lock().with_context(|| format!("lock `{}`", path.display()))?;
    Ok(file)
}

/// Makes a virtual environment in the empty folder `dir`, which may be moved, and installs packages
/// there with what they need.
///
/// # Errors
/// When Python or pip fails: no network, no such package.
pub(crate) fn venv(dir: &Path, packages: &[&str]) -> Result<()> {
    // Without a pip of its own, which some systems split off.
    run(Command::new("python3").args(["-m", "venv", "--without-pip"]).arg(dir))?;
    let mut asked = Command::new(dir.join("bin/python"));
    let asked = asked.args(["-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]).output()?;
    let target = String::from_utf8(asked.stdout)?;
    pip(dir, [&["install", "--quiet", "--no-warn-conflicts", "--target", target.trim()], packages].concat())
}

/// Runs pip, which knows the user's proxies, mirrors and certificates, to fill `dir`. What it says
/// goes to the user.
///
/// # Errors
/// There is no pip, or it fails.
pub(crate) fn pip<S: AsRef<OsStr>>(dir: &Path, args: impl IntoIterator<Item = S>) -> Result<()> {
    // /tmp may be small, or in memory.
    let temporary = dir.join("tmp");
    fs::create_dir(&temporary).with_context(|| format!("create `{}`", temporary.display()))?;
    let mut command = Command::new("python3");
    command.args(["-m", "pip", "--no-input", "--disable-pip-version-check", "--no-cache-dir"]).args(args);
    command.env("TMPDIR", &temporary).env("PIP_ROOT_USER_ACTION", "ignore").stdin(Stdio::null());
    let status = command.status();
    fs::remove_dir_all(&temporary)?;
    let status = status.context("start `python3`; install it: apt-get install python3 python3-pip")?;
    ensure!(
        status.success(),
        "{command:?}: {status}, its reason is above; without pip: apt-get install python3-pip; for a proxy or mirror see PIP_PROXY \
         and PIP_INDEX_URL"
    );
    Ok(())
}

/// Runs a command whose output is shown only when it fails.
///
/// # Errors
/// It does not start or fails; with the last thing that it said.
pub(crate) fn run(command: &mut Command) -> Result<()> {
    let output = command.stdin(Stdio::null()).output().with_context(|| format!("run {command:?}"))?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        bail!("{command:?}: {}", said.lines().last().unwrap_or("no reason given"));
    }
    Ok(())
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use std::{path::PathBuf, sync::Barrier};

    const FAKE_WHEEL: &str = "
import sys, zipfile, hashlib
with zipfile.ZipFile(sys.argv[1], 'w') as w:
    w.writestr('torch/lib/libtorch_cpu.so', 'cpu')
    w.writestr('torch/lib/libtorch_cuda.so', 'cuda')
    w.writestr('torch/nn/functional.py', 'import sys; print(sys.argv[1:])')
    w.writestr('fake-1.0.dist-info/METADATA', 'Metadata-Version: 2.1\\nName: fake\\nVersion: 1.0\\n')
    w.writestr('fake-1.0.dist-info/WHEEL', 'Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n')
    w.writestr('fake-1.0.dist-info/RECORD', '')
print(hashlib.sha256(open(sys.argv[1], 'rb').read()).hexdigest())
";

    /// Returns a wheel `fake` 1.0 in `dir`, its hash, and the argument with which pip finds it and
    /// nothing else.
    pub(crate) fn fake_wheel(dir: &Path) -> (PathBuf, String, String) {
        let wheel = dir.join("fake-1.0-py3-none-any.whl");
        let made = Command::new("python3").args(["-c", FAKE_WHEEL]).arg(&wheel).output().unwrap();
        let hash = String::from_utf8(made.stdout).unwrap().trim().to_owned();
        (wheel, hash, format!("--find-links={}", dir.display()))
    }

    fn names(dir: &Path) -> Vec<String> {
        let entries = fs::read_dir(dir).unwrap();
        let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        names.filter(|name| name != ".lock").collect()
    }

    #[test]
    fn a_folder_is_complete_or_not_there() {
        let cache = tempfile::tempdir().unwrap();
        let dir = cache.path().join("libtorch");
        let failed = install(&dir, |partial| {
            fs::write(partial.join("first"), "half")?;
            bail!("the network went away")
        });
        assert_eq!(failed.unwrap_err().to_string(), "the network went away");
        assert_eq!(names(cache.path()), [""; 0]);

        // As a process leaves it that was killed.
        fs::create_dir(cache.path().join(".partial-libtorch-1")).unwrap();
        install(&dir, |partial| Ok(fs::write(partial.join("first"), "whole")?)).unwrap();
        assert_eq!(names(cache.path()), ["libtorch"]);
        assert_eq!(fs::read_to_string(dir.join("first")).unwrap(), "whole");
    }

    #[test]
    fn two_clones_at_once_fill_the_folder_once() {
        let cache = tempfile::tempdir().unwrap();
        let (dir, start) = (cache.path().join("libtorch"), Barrier::new(2));
        let clone = || {
            start.wait();
            let mut fills = 0;
            install(&dir, |_| {
                fills += 1;
                Ok(())
            })
            .unwrap();
            fills
        };
        let fills: i32 =
            std::thread::scope(|scope| [scope.spawn(clone), scope.spawn(clone)].map(|t| t.join().unwrap()))
                .iter()
                .sum();
        assert_eq!(fills, 1);
    }

    #[test]
    fn a_virtual_environment_finds_its_packages_also_when_it_was_moved() {
        let dir = tempfile::tempdir().unwrap();
        let (_, _, index) = fake_wheel(dir.path());
        let (made, moved) = (dir.path().join("made"), dir.path().join("moved"));
        venv(&made, &["--no-index", &index, "fake==1.0"]).unwrap();
        fs::rename(&made, &moved).unwrap();
        run(Command::new(moved.join("bin/python")).args(["-c", "import torch.nn.functional"])).unwrap();
        assert!(venv(&dir.path().join("other"), &["--no-index", &index, "fake==2.0"]).is_err());
    }

    #[test]
    fn what_fails_says_which_command_and_why() {
        let error = run(Command::new("ls").arg("no-such-file")).unwrap_err().to_string();
        assert!(error.contains("ls") && error.contains("no-such-file"), "{error}");
    }
}
