//! The Python package: the wheel is built, installed beside NumPy, PyTorch and the tools of the
//! check, and tested with real processes. Style and types of the Python code are checked first.
//! PyTorch is the copy that other tests have.
//!
//! Cargo builds the wheel's library for itself, because it links no libtorch. Its feature
//! `like-workspace` gives it the third-party crates that the programs without libtorch are built
//! of.

use crate::{
    install::run,
    needs,
    workspace::{requires_all, root, succeed, target_dir, without_package},
};
use anyhow::{Context, Result, bail, ensure};
use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

/// Checks the Python package, or says that it cannot.
///
/// # Errors
/// Something is wrong with it; or a tool is missing, and all are required.
pub(super) fn check() -> Result<()> {
    let (Some(tools), Some(torch)) = (needs::PYTHON.interpreter()?, needs::TORCH.interpreter()?) else {
        ensure!(!requires_all(), "PyTorch, or the tools that check the Python package, cannot be had");
        eprintln!("SKIPPED: the Python package");
        return Ok(());
    };
    let packages = packages(&tools)?;
    for words in ["ruff check .", "ruff format --check .", "mypy"] {
        succeed(Command::new(&tools).arg("-m").args(words.split_whitespace()))?;
    }
    let dir = target_dir().join("check/python");
    if dir.exists() {
        fs::remove_dir_all(&dir).with_context(|| format!("remove `{}`", dir.display()))?;
    }
    let wheel = wheel(&packages.join("bin/maturin"), &tools, &dir.join("wheel"))?;
    let borrowed = [packages, self::packages(&torch)?];
    let python = environment(&tools, &borrowed, &wheel, &dir.join("environment"))?;
    succeed(Command::new(&python).args(["-m", "pytest", "--quiet", "-p", "no:cacheprovider"]))
}

/// Returns the folder of an interpreter's packages.
fn packages(python: &Path) -> Result<PathBuf> {
    let ask = ["-c", "import sysconfig; print(sysconfig.get_path('purelib'))"];
    let asked = Command::new(python).args(ask).output().context("run Python")?;
    Ok(PathBuf::from(String::from_utf8(asked.stdout)?.trim()))
}

/// Builds the wheel, unoptimised, in the folder where cargo builds the rest.
fn wheel(maturin: &Path, python: &Path, out: &Path) -> Result<PathBuf> {
    let mut build = Command::new(maturin);
    without_package(&mut build);
    build
        .args(["build", "--quiet", "--locked", "--features", "extension,like-workspace", "--interpreter"])
        .arg(python)
        .arg("--out")
        .arg(out);
    succeed(build.env("CARGO_TARGET_DIR", target_dir()))?;
    let mut files = fs::read_dir(out).context("the folder of the wheel")?.filter_map(Result::ok);
    match (files.next(), files.next()) {
        (Some(wheel), None) => Ok(wheel.path()),
        _ => bail!("expected one wheel in `{}`", out.display()),
    }
}

/// Makes a virtual environment with the wheel. It finds the packages in the folders `borrowed` too.
/// Returns its interpreter.
fn environment(tools: &Path, borrowed: &[PathBuf], wheel: &Path, dir: &Path) -> Result<PathBuf> {
    run(Command::new(tools).args(["-m", "venv", "--without-pip"]).arg(dir))?;
    let python = dir.join("bin/python");
    // Named after nothing that a package has.
    let link = packages(&python)?.join("borrowed-by-the-check.pth");
    let folders: String = borrowed.iter().map(|folder| format!("{}\n", folder.display())).collect();
    fs::write(&link, folders).with_context(|| format!("write `{}`", link.display()))?;
    let mut pip = Command::new("python3");
    pip.args(["-m", "pip", "--disable-pip-version-check", "--python"]).arg(&python);
    run(pip.args(["install", "--quiet", "--no-deps", "--no-index"]).arg(wheel).current_dir(root()))?;
    Ok(python)
}
