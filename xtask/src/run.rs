//! A first training run in one command: libtorch, the release build, the job.

use crate::{libtorch, workspace::cargo};
use anyhow::{Context, Result};
use std::{ffi::OsString, os::unix::process::CommandExt, path::PathBuf};

/// Build `ebb` (release) and run a job in one process: `ebb run JOB.toml [ARGS]...`.
///
/// Fetches libtorch first if this clone has none (see `cargo xtask libtorch --help`). The exit code
/// is the job's.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Job file, for example examples/digits/job.toml
    job: PathBuf,
    /// Passed on to `ebb run`, see `ebb run --help`
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    args: Vec<OsString>,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    libtorch::ensure_installed()?;
    // Cargo replaces itself by the program, and so do we: exit code, Ctrl-C and SIGTERM are the
    // job's own.
    let error = cargo()
        .args(["run", "--release", "--package", "ebbflow", "--bin", "ebb", "--", "run"])
        .arg(&args.job)
        .args(&args.args)
        .exec();
    Err(error).context("run cargo")
}
