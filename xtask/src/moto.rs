//! The S3 server that the tests of checkpoints in object stores run: `EBB_MOTO`, the one on the PATH, else moto, installed with pip
//! beside libtorch and nowhere else. Without one those tests are skipped and say so.

use crate::{etcd::runs, install::install, pip::Pip, workspace};
use anyhow::{Context, Result, ensure};
use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
};

/// Another version is installed beside it.
const VERSION: &str = "5.2.1";

const PACKAGES: [&str; 3] = ["moto[s3]==5.2.1", "flask==3.1.3", "flask-cors==6.0.2"];

/// In the folder that is installed.
const PROGRAM: &str = "moto_server";

/// Finds its packages beside itself: what pip itself would write there names the folder in which it was installed.
const SCRIPT: &str = r#"#!/bin/sh
PYTHONPATH="$(dirname "$0")/packages" exec python3 -m moto.server "$@"
"#;

/// The folder to put on the PATH, where that is needed.
///
/// # Errors
/// There is no place for a cache.
pub(crate) fn ensure() -> Result<Option<PathBuf>> {
    if workspace::has_moto() || runs(PROGRAM.as_ref(), "--help") {
        return Ok(None);
    }
    let dir = workspace::cache_dir()?.join(format!("moto-{VERSION}"));
    let installed = install(&dir, |partial, lock| {
        eprintln!("moto {VERSION}: fetching 40 MB into `{}`", dir.display());
        Pip::find(lock.try_clone()?)?.install(&PACKAGES, &partial.join("packages"))?;
        let program = partial.join(PROGRAM);
        write_script(&program).with_context(|| format!("write `{}`", program.display()))?;
        ensure!(runs(&program, "--help"), "`{}` does not run here", program.display());
        Ok(())
    });
    match installed {
        Ok(_) => Ok(Some(dir)),
        Err(error) => {
            eprintln!("\n== moto: there is none, and pip cannot install it ({error:#})");
            eprintln!(
                "   tests over S3 are SKIPPED; to run them put `moto_server` on the PATH or set EBB_MOTO"
            );
            Ok(None)
        }
    }
}

fn write_script(program: &Path) -> std::io::Result<()> {
    fs::write(program, SCRIPT)?;
    fs::set_permissions(program, fs::Permissions::from_mode(0o755))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    #[test]
    fn the_script_finds_its_packages_wherever_it_lies() {
        let dir = tempfile::tempdir().unwrap();
        let package = dir.path().join("packages/moto");
        fs::create_dir_all(&package).unwrap();
        fs::write(package.join("__init__.py"), "").unwrap();
        fs::write(package.join("server.py"), "import sys; print('ours', sys.argv[1:])").unwrap();
        write_script(&dir.path().join(PROGRAM)).unwrap();
        let moved = dir.path().join("with a space");
        fs::create_dir(&moved).unwrap();
        for name in ["packages", PROGRAM] {
            fs::rename(dir.path().join(name), moved.join(name)).unwrap();
        }
        let output = Command::new(moved.join(PROGRAM)).args(["-p", "0"]).output().unwrap();
        assert_eq!(String::from_utf8_lossy(&output.stdout).trim(), "ours ['-p', '0']", "{output:?}");
    }
}
