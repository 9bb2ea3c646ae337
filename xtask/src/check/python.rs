//! The Python package: the wheel is built, and installed beside NumPy, PyTorch, TensorFlow and the
//! tools of the check. Style and types of the Python code are checked first. PyTorch and TensorFlow
//! are the copies that other tests and benches have. Each file of tests runs as a program of its
//! own, in which Keras is on PyTorch.
//!
//! Cargo builds the wheel's library for itself, because it links no libtorch. Its feature
//! `like-workspace` gives it the third-party crates that the programs without libtorch are built
//! of.

use super::programs::Program;
use crate::{
    install::run,
    needs,
    workspace::{requires_all, root, succeed, target_dir, without_package},
};
use anyhow::{Context, Result, bail, ensure};
use std::{
    fs, iter,
    path::{Path, PathBuf},
    process::Command,
};

/// Fetches the packages that [`build`] needs, unless they are there.
///
/// # Errors
/// They cannot be written.
pub(super) fn fetch() -> Result<()> {
    [&needs::PYTHON, &needs::TORCH, &needs::TENSORFLOW]
        .into_iter()
        .try_for_each(|need| need.interpreter().map(drop))
}

/// Checks and builds the Python package. Returns its test programs; none, said aloud, where tools
/// are missing.
///
/// # Errors
/// Something is wrong with it; or a tool is missing, and all are required.
pub(super) fn build() -> Result<Vec<Program>> {
    let interpreters =
        (needs::PYTHON.interpreter()?, needs::TORCH.interpreter()?, needs::TENSORFLOW.interpreter()?);
    let (Some(tools), Some(torch), Some(tensorflow)) = interpreters else {
        ensure!(
            !requires_all(),
            "PyTorch, TensorFlow, or the tools that check the Python package, cannot be had"
        );
        eprintln!("SKIPPED: the Python package");
        return Ok(Vec::new());
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
    let borrowed = [packages, self::packages(&torch)?, self::packages(&tensorflow)?];
    let python = environment(&tools, &borrowed, &wheel, &dir.join("environment"))?;
    programs(&python)
}

/// Returns one program for each file of tests but [`ON_TENSORFLOW`].
fn programs(python: &Path) -> Result<Vec<Program>> {
    let folder = root().join("python/tests");
    let files = fs::read_dir(&folder).with_context(|| format!("read `{}`", folder.display()))?;
    let name = |file: fs::DirEntry| file.file_name().into_string().ok();
    let mut names: Vec<String> = files.filter_map(Result::ok).filter_map(name).collect();
    names.retain(|name| name.starts_with("test_") && name.ends_with(".py") && name != ON_TENSORFLOW);
    names.sort();
    ensure!(!names.is_empty(), "no tests in `{}`", folder.display());
    let program = |name: String| Program {
        label: format!("python/{}", name.trim_end_matches(".py")),
        is_bench: false,
        path: python.to_owned(),
        folder: root().to_owned(),
        first: PYTEST.into_iter().map(Into::into).chain(iter::once(folder.join(&name).into())).collect(),
        tests: Vec::new(),
    };
    Ok(names.into_iter().map(program).collect())
}

/// Tests that need Keras on TensorFlow. `test_keras.py` runs them with others that do, because each
/// process that imports TensorFlow computes for ten seconds before it begins.
const ON_TENSORFLOW: &str = "test_elastic_keras.py";

/// Runs tests, and lists those that were skipped.
const PYTEST: [&str; 6] = ["-m", "pytest", "--quiet", "-rs", "-p", "no:cacheprovider"];

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
