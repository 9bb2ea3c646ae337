//! Where this clone is, what the environment says, and how cargo is called. The only file here that
//! reads the environment.
#![expect(clippy::disallowed_methods, reason = "xtask's one reader of the environment")]

use anyhow::{Context, Result, ensure};
use std::{
    env,
    ffi::OsString,
    path::{Path, PathBuf},
    process::Command,
};

/// Returns the clone's root folder.
pub(crate) fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap_or(Path::new("."))
}

/// Returns the link that `.cargo/config.toml` names as `LIBTORCH`.
pub(crate) fn libtorch_link() -> PathBuf {
    root().join(".libtorch")
}

/// Returns the user's own `LIBTORCH`. Cargo sets the variable to [`libtorch_link`] for everything
/// it runs, xtask included, when the user has not set it; that value is not the user's.
pub(crate) fn libtorch_of_user() -> Option<PathBuf> {
    env::var_os("LIBTORCH").map(PathBuf::from).filter(|path| *path != libtorch_link())
}

/// Returns the folder that clones share: `$EBB_CACHE_DIR`, else `$XDG_CACHE_HOME/ebbflow`, else
/// `~/.cache/ebbflow`. Absolute.
pub(crate) fn cache_dir() -> Result<PathBuf> {
    let of_user = |name| env::var_os(name).filter(|path| !path.is_empty()).map(PathBuf::from);
    let caches = || of_user("XDG_CACHE_HOME").or_else(|| Some(env::home_dir()?.join(".cache")));
    let cache = of_user("EBB_CACHE_DIR")
        .or_else(|| Some(caches()?.join("ebbflow")))
        .context("no home folder to keep libtorch in; set EBB_CACHE_DIR to a folder")?;
    std::path::absolute(&cache).with_context(|| format!("resolve `{}`", cache.display()))
}

/// Returns the PATH with these folders too, searched last.
pub(crate) fn path_with(folders: &[PathBuf]) -> Result<OsString> {
    let path = env::var_os("PATH").unwrap_or_default();
    let all = env::split_paths(&path).chain(folders.iter().cloned());
    env::join_paths(all).with_context(|| format!("add {folders:?} to the PATH"))
}

/// Returns the folders of libraries that the user names, and this one before them.
pub(crate) fn library_path_with(folder: &Path) -> Result<OsString> {
    let path = env::var_os("LD_LIBRARY_PATH").filter(|path| !path.is_empty());
    let of_user = path.iter().flat_map(env::split_paths);
    let all = std::iter::once(folder.to_owned()).chain(of_user);
    env::join_paths(all).with_context(|| format!("add {} to LD_LIBRARY_PATH", folder.display()))
}

/// Returns whether the user has set a variable.
pub(crate) fn is_set(variable: &str) -> bool {
    env::var_os(variable).is_some()
}

/// Returns whether a program is on the PATH, or where those of an administrator lie.
pub(crate) fn has_program(program: &str) -> bool {
    let path = env::var_os("PATH").unwrap_or_default();
    let administrators = ["/usr/local/sbin", "/usr/sbin", "/sbin"].map(PathBuf::from);
    env::split_paths(&path).chain(administrators).any(|folder| folder.join(program).is_file())
}

/// Returns whether a test that lacks a package is to fail.
pub(crate) fn requires_all() -> bool {
    env::var_os("EBB_REQUIRE_ALL").is_some_and(|value| value == "1")
}

/// Returns the Python with PyTorch that the user names.
pub(crate) fn python_of_user() -> Option<PathBuf> {
    env::var_os("EBB_PYTHON").filter(|path| !path.is_empty()).map(PathBuf::from)
}

/// Returns where MNIST's test set lies: `EBB_MNIST_DIR`, the example's folder, or a data folder
/// beside the clone.
pub(crate) fn mnist() -> Option<PathBuf> {
    let given = env::var_os("EBB_MNIST_DIR").map(PathBuf::from);
    let places = [root().join("examples/mnist/data"), root().join("../shared/data/mnist10k")];
    given.into_iter().chain(places).find(|place| place.join("t10k-images-idx3-ubyte.gz").exists())
}

/// Returns where cargo builds.
pub(crate) fn target_dir() -> PathBuf {
    env::var_os("CARGO_TARGET_DIR").map_or_else(|| root().join("target"), |dir| root().join(dir))
}

/// Runs cargo with words in the clone's root.
///
/// # Errors
/// It fails; its reason is shown above.
pub(crate) fn run_cargo(words: &str) -> Result<()> {
    succeed(cargo().args(words.split_whitespace()))
}

/// Runs a command in the clone's root.
///
/// # Errors
/// It fails; its reason is shown above.
pub(crate) fn succeed(command: &mut Command) -> Result<()> {
    let status = command.current_dir(root()).status().with_context(|| format!("run {command:?}"))?;
    ensure!(status.success(), "{command:?}: {status}");
    Ok(())
}

/// Returns the cargo that runs this program, for a build as a user begins it.
pub(crate) fn cargo() -> Command {
    let mut command = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    without_package(&mut command);
    command
}

/// Takes the variables that describe this package from a command that builds. Build scripts of
/// dependencies look at them, and would run again after each build that a user began without xtask.
pub(crate) fn without_package(command: &mut Command) {
    for (name, _) in env::vars_os() {
        let text = name.to_string_lossy();
        if text.starts_with("CARGO_PKG_") || text.starts_with("CARGO_MANIFEST_") {
            command.env_remove(&name);
        }
    }
}
