//! Programs that the tests of `deploy/` run and that no Rust toolchain brings: packages of Debian, and a validator of PyPI.
//!
//! Debian's are installed only where that disturbs nobody: by root, where no init runs that would start their daemons, as in a container or
//! on a machine of a CI. Elsewhere they are named. The validator lies beside libtorch. Whatever is missing in the end, the
//! tests that need it are skipped and say so.

use crate::{
    etcd::{run, runs},
    install::install,
    pip::Pip,
    workspace,
};
use anyhow::{Context, Result, ensure};
use std::{
    fs::{self, File},
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    process::Command,
};

/// A program, and the package that has it.
const PACKAGES: [(&str, &str); 9] = [
    ("shellcheck", "shellcheck"),
    ("promtool", "prometheus"),
    ("debootstrap", "debootstrap"),
    ("slurmctld", "slurm-wlm"),
    ("munged", "munge"),
    ("sshd", "openssh-server"),
    ("ssh", "openssh-client"),
    ("docker-compose", "docker-compose"),
    ("systemd-analyze", "systemd"),
];

/// The schemas of Kubernetes, for `tests/system/deploy.rs`.
const VALIDATOR: &str = "kubernetes-validate";
const VALIDATOR_VERSION: &str = "1.30.0";

/// Finds its packages beside itself, wherever it lies.
const SCRIPT: &str = r#"#!/bin/sh
PYTHONPATH="$(dirname "$0")/packages" exec python3 -m kubernetes_validate "$@"
"#;

/// Installs what is missing and may be installed. The folder to put on the PATH, where one is needed.
///
/// # Errors
/// There is no place for a cache.
pub(crate) fn ensure() -> Result<Option<PathBuf>> {
    debian();
    if runs(VALIDATOR.as_ref(), "--version") {
        return Ok(None);
    }
    let dir = workspace::cache_dir()?.join(format!("{VALIDATOR}-{VALIDATOR_VERSION}"));
    match install(&dir, validator) {
        Ok(_) => Ok(Some(dir)),
        Err(error) => {
            eprintln!("\n== {VALIDATOR}: there is none, and pip brings none ({error:#})");
            eprintln!("   manifests are NOT checked against the schemas of Kubernetes");
            Ok(None)
        }
    }
}

fn debian() {
    let missing: Vec<_> =
        PACKAGES.into_iter().filter(|(program, _)| !workspace::has_program(program)).collect();
    if missing.is_empty() {
        return;
    }
    let packages: Vec<_> = missing.iter().map(|(_, package)| *package).collect();
    let list = packages.join(" ");
    if !is_root() || Path::new("/run/systemd/system").exists() || !workspace::has_program("apt-get") {
        eprintln!("\n== packages: tests of deploy/ that need {list} are SKIPPED");
        eprintln!("   to run them: apt-get install --no-install-recommends {list}");
        return;
    }
    eprintln!("\n== packages: installing {list}");
    // The lists of packages may be old, or missing as in a fresh container.
    let installed = apt(&["install"], &packages).or_else(|_| {
        let _ = apt(&["update"], &[]);
        apt(&["install"], &packages)
    });
    if let Err(error) = installed {
        eprintln!("   that failed ({error:#}); tests of deploy/ that need them are SKIPPED");
    }
}

fn apt(verb: &[&str], packages: &[&str]) -> Result<()> {
    let mut command = Command::new("apt-get");
    command.args(["--quiet", "--yes", "--no-install-recommends", "--option", "DPkg::Lock::Timeout=300"]);
    run(command.args(verb).args(packages).env("DEBIAN_FRONTEND", "noninteractive"))
}

/// A folder with the validator's program and its packages beside it.
fn validator(dir: &Path, lock: &File) -> Result<()> {
    let wanted = format!("{VALIDATOR}=={VALIDATOR_VERSION}");
    Pip::find(lock.try_clone()?)?.install(&[&wanted], &dir.join("packages"))?;
    let program = dir.join(VALIDATOR);
    fs::write(&program, SCRIPT).with_context(|| format!("write `{}`", program.display()))?;
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755))?;
    ensure!(runs(&program, "--version"), "`{}` does not run here", program.display());
    Ok(())
}

fn is_root() -> bool {
    Command::new("id").arg("-u").output().is_ok_and(|output| output.stdout.trim_ascii() == b"0")
}
