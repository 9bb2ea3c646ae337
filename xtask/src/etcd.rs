//! The etcd server that the tests of several masters run: the one on the PATH, else Debian's, unpacked beside libtorch and not
//! installed. Without one those tests are skipped and say so.

use crate::{install, workspace};
use anyhow::{Context, Result, bail};
use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

/// The Debian package, and its program in there.
const PACKAGE: &str = "etcd-server";
const PROGRAM: &str = "usr/bin/etcd";

/// The folder to put on the PATH, where that is needed.
///
/// # Errors
/// There is no place for a cache.
pub(crate) fn ensure() -> Result<Option<PathBuf>> {
    if runs("etcd".as_ref(), "--version") {
        return Ok(None);
    }
    let dir = workspace::cache_dir()?.join("etcd");
    let result = install::install(&dir, |partial, _| unpack(partial));
    match result {
        Ok(_) => Ok(dir.join(PROGRAM).parent().map(Path::to_owned)),
        Err(error) => {
            eprintln!("\n== etcd: there is none, and no {PACKAGE} of Debian ({error:#})");
            eprintln!("   tests of several masters are SKIPPED; to run them put `etcd` on the PATH");
            Ok(None)
        }
    }
}

fn unpack(dir: &Path) -> Result<()> {
    // The lists of packages may be old, or missing as in a fresh container; only root can renew them.
    if apt(dir, &["download", PACKAGE]).is_err() {
        let _ = apt(dir, &["update"]);
        apt(dir, &["download", PACKAGE])?;
    }
    let files = fs::read_dir(dir).with_context(|| format!("read `{}`", dir.display()))?;
    let mut archives = files.filter_map(|file| Some(file.ok()?.path()));
    let archive = archives.find(|path| path.extension().is_some_and(|extension| extension == "deb"));
    let archive = archive.with_context(|| format!("apt-get downloaded no {PACKAGE}"))?;
    let mut command = Command::new("dpkg-deb");
    run(command.arg("-x").arg(&archive).arg(dir))?;
    fs::remove_file(&archive).with_context(|| format!("remove `{}`", archive.display()))?;
    match runs(&dir.join(PROGRAM), "--version") {
        true => Ok(()),
        false => bail!("{PACKAGE} has no {PROGRAM} that runs here"),
    }
}

fn apt(dir: &Path, args: &[&str]) -> Result<()> {
    run(Command::new("apt-get").arg("-q").args(args).current_dir(dir))
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

/// Whether a program can be started, by an argument with which it ends at once.
pub(crate) fn runs(program: &Path, arg: &str) -> bool {
    let mut command = Command::new(program);
    command.arg(arg).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    command.status().is_ok_and(|status| status.success())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_fails_says_which_command_and_why() {
        let error = run(Command::new("ls").arg("no-such-file")).unwrap_err().to_string();
        assert!(error.contains("ls") && error.contains("no-such-file"), "{error}");
        assert!(!runs("no-such-program".as_ref(), "--version"));
    }
}
