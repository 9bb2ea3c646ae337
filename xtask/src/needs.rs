//! What tests and benches start and no Rust toolchain brings: one list, and what fetches it.
//!
//! A program on the PATH wins. Else it comes into the cache beside libtorch and nowhere else, or,
//! with daemons and files all over the system, from Debian where that disturbs nobody. What cannot
//! be had is named; its tests are skipped and say so.

use crate::{
    install::{install, run, venv},
    workspace::{self, has_program},
};
use anyhow::{Context, Result, ensure};
use std::{
    ffi::OsString,
    fs,
    hash::{DefaultHasher, Hash as _, Hasher as _},
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    process::Command,
};

/// A program that tests start.
#[derive(Clone, Copy)]
pub(crate) struct Need {
    program: &'static str,
    from: Source,
    /// Tests that are skipped without it.
    tests: &'static str,
}

/// Where a program comes from.
#[derive(Clone, Copy)]
enum Source {
    /// A package of Debian, unpacked and not installed, and the folder of its programs.
    Unpacked(&'static str, &'static str),
    /// A package of Debian, installed.
    Installed(&'static str),
    /// A module of packages of PyPI. The variable by which users name their own program.
    Python(&'static Python, &'static str),
}

/// A Python with packages of PyPI, in a virtual environment of its own.
pub(crate) struct Python {
    /// Another list is another folder.
    packages: &'static [&'static str],
    /// Imported, or run as a program.
    module: &'static str,
    size: &'static str,
}

/// Programs of the tests without `deploy/`.
pub(crate) const TESTS: &[Need] = &[
    Need {
        program: "etcd",
        from: Source::Unpacked("etcd-server", "usr/bin"),
        tests: "tests of several masters",
    },
    Need {
        program: "moto_server",
        from: Source::Python(&MOTO, "EBB_MOTO"),
        tests: "tests of checkpoints on S3",
    },
];

/// Programs of the tests of `deploy/`.
pub(crate) const DEPLOY: &[Need] = &[
    Need {
        program: "kubernetes-validate",
        from: Source::Python(&VALIDATOR, "EBB_KUBERNETES_VALIDATE"),
        tests: "checks of manifests against the schemas of Kubernetes",
    },
    of_debian("shellcheck", "shellcheck"),
    of_debian("promtool", "prometheus"),
    of_debian("debootstrap", "debootstrap"),
    of_debian("slurmctld", "slurm-wlm"),
    of_debian("munged", "munge"),
    of_debian("sshd", "openssh-server"),
    of_debian("ssh", "openssh-client"),
    of_debian("docker-compose", "docker-compose"),
    of_debian("systemd-analyze", "systemd"),
];

const MOTO: Python = Python {
    packages: &["moto[s3]==5.2.1", "flask==3.1.3", "flask-cors==6.0.2"],
    module: "moto.server",
    size: "40 MB",
};
const VALIDATOR: Python =
    Python { packages: &["kubernetes-validate==1.30.0"], module: "kubernetes_validate", size: "5 MB" };
/// The PyTorch that Ebbflow's libtorch is of, and other packages that tests and examples import.
pub(crate) const TORCH: Python = Python {
    packages: &[
        "torch==2.11.0",
        "numpy==2.4.6",
        "safetensors==0.8.0",
        "pillow==13.0.0",
        "torchmetrics==1.9.0",
    ],
    module: "torch",
    size: "2.5 GB",
};
/// Compiles the kernels for CUDA devices, and needs none.
const NVRTC: Python =
    Python { packages: &["nvidia-cuda-nvrtc==13.0.88"], module: "nvidia.cu13", size: "90 MB" };
pub(crate) const TENSORFLOW: Python =
    Python { packages: &["tensorflow-cpu==2.21.0", "numpy==2.4.6"], module: "tensorflow", size: "0.4 GB" };
/// Draws the plots of benches.
pub(crate) const PLOTS: Python =
    Python { packages: &["matplotlib==3.11.2"], module: "matplotlib", size: "30 MB" };

/// Builds and checks the Python package. `pyproject.toml` says what users need.
pub(crate) const PYTHON: Python = Python {
    packages: &[
        "maturin==1.16.0",
        "pytest==9.2.0",
        "numpy==2.4.6",
        "mypy==2.4.1",
        "ruff==0.17.6",
        "matplotlib==3.11.2",
        "jax==0.10.2",
        "optax==0.2.8",
        "keras==3.15.1",
        "onnx==1.23.2",
        "onnxruntime==1.32.0",
        "onnxscript==0.7.2",
        "transformers==5.24.0",
        "nbclient==0.11.0",
        "ipykernel==7.4.0",
        "ray==2.60.0",
        "tensorboard==2.21.0",
        "wandb==0.31.0",
        "mlflow-skinny==3.17.2",
        "sqlalchemy==2.1.9",
        "alembic==1.20.1",
    ],
    module: "maturin",
    size: "800 MB",
};

const fn of_debian(program: &'static str, package: &'static str) -> Need {
    Need { program, from: Source::Installed(package), tests: "tests of deploy/" }
}

/// Finds or fetches programs; answers the PATH with them.
///
/// # Errors
/// There is no place for a cache.
pub(crate) fn fetch(needs: &[Need]) -> Result<OsString> {
    let cache = workspace::cache_dir()?;
    let mut folders = Vec::new();
    let mut packages = Vec::new();
    for Need { program, from, tests } in needs {
        let found = match *from {
            Source::Installed(package) => {
                packages.extend((!has_program(program)).then_some(package));
                continue;
            }
            Source::Python(_, variable) if workspace::is_set(variable) => continue,
            _ if starts(Path::new(program)) => continue,
            Source::Unpacked(package, folder) => unpacked(&cache.join(program), package, folder, program),
            Source::Python(python, _) => python.program(program),
        };
        match found {
            Ok(folder) => folders.push(folder),
            Err(error) => {
                eprintln!("\n== {program}: not on the PATH, and not to be had ({error:#})");
                eprintln!("   {tests} are SKIPPED");
            }
        }
    }
    if !packages.is_empty() {
        install_packages(&packages);
    }
    workspace::path_with(&folders)
}

/// Returns whether a program can be started.
fn starts(program: &Path) -> bool {
    run(Command::new(program).arg("--help")).is_ok()
}

/// Returns a Python with PyTorch: EBB_PYTHON, else [`TORCH`]. `None`, said aloud, where it cannot
/// be had.
///
/// # Errors
/// There is no place for a cache.
pub(crate) fn torch() -> Result<Option<PathBuf>> {
    workspace::python_of_user().map_or_else(|| TORCH.interpreter(), |of_user| Ok(Some(of_user)))
}

/// Returns the folder with the library of [`NVRTC`]. `None`: EBB_NVRTC names one, or it cannot be
/// had, which is said aloud.
///
/// # Errors
/// There is no place for a cache, or the package has another form.
pub(crate) fn nvrtc() -> Result<Option<PathBuf>> {
    if workspace::is_set("EBB_NVRTC") {
        return Ok(None);
    }
    let Some(python) = NVRTC.interpreter()? else { return Ok(None) };
    let script = format!("import {0}; print({0}.__path__[0])", NVRTC.module);
    let asked = Command::new(&python).args(["-c", &script]).output().context("run Python")?;
    let folder = PathBuf::from(String::from_utf8(asked.stdout)?.trim()).join("lib");
    ensure!(folder.is_dir(), "{} has no folder `{}`", NVRTC.packages[0], folder.display());
    Ok(Some(folder))
}

impl Python {
    fn folder(&self) -> Result<PathBuf> {
        Ok(workspace::cache_dir()?.join(format!("peer-{}", self.name())))
    }

    /// Returns the list of packages as a part of the name of a file, which has 255 bytes at most.
    fn name(&self) -> String {
        let list = self.packages.join("-").replace("==", "-");
        if list.len() <= 200 {
            return list;
        }
        let mut hasher = DefaultHasher::new();
        list.hash(&mut hasher);
        format!("{}-and-others-{:016x}", self.packages[0].replace("==", "-"), hasher.finish())
    }

    /// Its interpreter. `None`, said aloud, where it cannot be had.
    ///
    /// # Errors
    /// There is no place for a cache.
    pub(crate) fn interpreter(&self) -> Result<Option<PathBuf>> {
        let (dir, import) = (self.folder()?, format!("import {}", self.module));
        let check = |dir: &Path| run(Command::new(dir.join("bin/python")).args(["-c", &import]));
        match self.install(&dir, check) {
            Ok(()) => Ok(Some(dir.join("bin/python"))),
            Err(error) => {
                eprintln!("\n== {}: pip cannot install it here ({error:#})", self.module);
                eprintln!("   what needs it is SKIPPED");
                Ok(None)
            }
        }
    }

    /// Returns the folder of the program `name`, which runs the module wherever the folder lies.
    fn program(&self, name: &str) -> Result<PathBuf> {
        let dir = self.folder()?;
        self.install(&dir, |dir| {
            let program = dir.join(name);
            let python = r#""$(dirname "$0")/bin/python""#;
            fs::write(&program, format!("#!/bin/sh\nexec {python} -m {} \"$@\"\n", self.module))?;
            fs::set_permissions(&program, fs::Permissions::from_mode(0o755))?;
            ensure!(starts(&program), "`{}` does not start here", program.display());
            Ok(())
        })?;
        Ok(dir)
    }

    fn install(&self, dir: &Path, finish: impl FnOnce(&Path) -> Result<()>) -> Result<()> {
        install(dir, |partial| {
            eprintln!("{}: fetching {} into `{}`", self.packages[0], self.size, dir.display());
            venv(partial, self.packages)?;
            finish(partial)
        })
    }
}

/// Unpacks a package of Debian into `dir`; answers the folder of its programs, of which `program`
/// is one.
fn unpacked(dir: &Path, package: &str, folder: &str, program: &str) -> Result<PathBuf> {
    install(dir, |partial| {
        with_fresh_lists(|| {
            run(Command::new("apt-get").args(["-q", "download", package]).current_dir(partial))
        })?;
        let mut files = fs::read_dir(partial)?.filter_map(|file| Some(file.ok()?.path()));
        let archive = files.find(|file| file.extension().is_some_and(|extension| extension == "deb"));
        let archive = archive.with_context(|| format!("apt-get downloaded no {package}"))?;
        run(Command::new("dpkg-deb").arg("-x").arg(&archive).arg(partial))?;
        fs::remove_file(&archive)?;
        ensure!(
            starts(&partial.join(folder).join(program)),
            "the {program} of {package} does not start here"
        );
        Ok(())
    })?;
    Ok(dir.join(folder))
}

/// Installs packages of Debian only as root where no init runs that would start their daemons, as
/// in a container or on a machine of a CI.
fn install_packages(packages: &[&str]) {
    let list = packages.join(" ");
    let is_root = Command::new("id").arg("-u").output().is_ok_and(|id| id.stdout.trim_ascii() == b"0");
    if !is_root || Path::new("/run/systemd/system").exists() || !has_program("apt-get") {
        eprintln!("\n== tests of deploy/ that need {list} are SKIPPED");
        eprintln!("   to run them: apt-get install --no-install-recommends {list}");
        return;
    }
    eprintln!("\n== installing {list}");
    let options = ["--quiet", "--yes", "--no-install-recommends", "--option", "DPkg::Lock::Timeout=300"];
    let install = || {
        let mut command = Command::new("apt-get");
        command.args(options).arg("install").args(packages).env("DEBIAN_FRONTEND", "noninteractive");
        run(&mut command)
    };
    if let Err(error) = with_fresh_lists(install) {
        eprintln!("   that failed ({error:#}); tests of deploy/ that need them are SKIPPED");
    }
}

/// Tries again with new lists of packages: they may be old, or missing as in a fresh container.
/// Only root can renew them.
fn with_fresh_lists(action: impl Fn() -> Result<()>) -> Result<()> {
    action().or_else(|_| {
        let _ = run(Command::new("apt-get").args(["-q", "update"]));
        action()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folders_have_names_that_fit_and_tell_lists_apart() {
        let name = |packages| Python { packages, module: "a", size: "1 MB" }.name();
        assert_eq!(name(&["a==1", "b[c]==2"]), "a-1-b[c]-2");
        let long = [&["a==1"; 60][..], &["b==2"]].concat().leak();
        let other = [&["a==1"; 60][..], &["b==3"]].concat().leak();
        assert!(name(long).starts_with("a-1-and-others-") && name(long).len() < 60);
        assert_ne!(name(long), name(other));
    }
}
