//! Wheels through pip, which knows the user's proxies, mirrors and certificates. Versions and SHA-256 hashes are pinned
//! in requirement files; pip refuses what differs. pip's own output (sizes, progress, refusals) goes to the user.

use anyhow::{Context, Result, anyhow, bail, ensure};
use std::{
    fs::{self, File},
    path::{Path, PathBuf},
    process::Command,
};

const UNPACK: &str = include_str!("unpack.py");

/// The wheels' own tags. All are named because pip widens none of them: a wheel may say `manylinux_2_17` or
/// `manylinux2014` for the same thing.
const PLATFORMS: [&str; 7] = [
    "manylinux_2_28",
    "manylinux_2_27",
    "manylinux_2_25",
    "manylinux_2_24",
    "manylinux_2_18",
    "manylinux_2_17",
    "manylinux2014",
];

/// A Python 3 with pip.
#[derive(Debug)]
pub(crate) struct Pip {
    python: &'static str,
    /// Held by every process started here, as its standard input, which none of them reads.
    lock: File,
    /// Added to every `pip download`.
    options: Vec<String>,
}

impl Pip {
    /// The `python3` on the path. What it starts also holds `lock`.
    ///
    /// # Errors
    /// When Python or its pip is missing; says which package brings it.
    pub(crate) fn find(lock: File) -> Result<Self> {
        let python = "python3";
        let output = Command::new(python).args(["-m", "pip", "--version"]).output().map_err(|error| {
            anyhow!(
                "`{python}` does not start ({error}), but libtorch comes as a Python wheel; \
                 install it: apt-get install python3 python3-pip"
            )
        })?;
        ensure!(
            output.status.success(),
            "`{python} -m pip` does not work ({}); install it: apt-get install python3-pip",
            String::from_utf8_lossy(&output.stderr).trim()
        );
        Ok(Self { python, lock, options: Vec::new() })
    }

    /// Downloads what the requirement file text `requirements` pins into the empty folder `dir`; returns the wheels.
    ///
    /// # Errors
    /// When pip fails: no network, no such wheel, another hash.
    pub(crate) fn download(&self, requirements: &str, dir: &Path) -> Result<Vec<PathBuf>> {
        let (list, wheels, temporary) = (dir.join("requirements.txt"), dir.join("wheels"), dir.join("tmp"));
        fs::write(&list, requirements).with_context(|| format!("write `{}`", list.display()))?;
        fs::create_dir(&temporary).with_context(|| format!("create `{}`", temporary.display()))?;
        let mut command = Command::new(self.python);
        command
            .args([
                "-m",
                "pip",
                "download",
                "--no-input",
                "--disable-pip-version-check",
                "--no-cache-dir",
                "--no-deps",
            ])
            // Any Python 3 may fetch the pinned wheel.
            .args([
                "--only-binary=:all:",
                "--implementation=cp",
                "--python-version=3.11",
                "--abi=cp311",
                "--abi=none",
            ])
            .args(PLATFORMS.map(|platform| format!("--platform={platform}_{}", std::env::consts::ARCH)))
            .args(&self.options)
            .arg("--require-hashes")
            .arg("--requirement")
            .arg(&list)
            .arg("--dest")
            .arg(&wheels)
            .stdin(self.lock.try_clone()?)
            // /tmp may be small, or in memory.
            .env("TMPDIR", &temporary);
        let status = command.status().with_context(|| format!("run `{}`", self.python))?;
        ensure!(
            status.success(),
            "pip did not fetch the wheels ({status}), its reason is above; for a proxy or mirror see PIP_PROXY and \
             PIP_INDEX_URL; without network, unpack libtorch yourself and set LIBTORCH to its folder"
        );
        fs::remove_dir_all(&temporary)?;
        let entries = fs::read_dir(&wheels).with_context(|| format!("list `{}`", wheels.display()))?;
        entries.map(|entry| Ok(entry?.path())).collect()
    }

    /// Installs `packages` with what they need into the new folder `dir`, for this Python and for nobody else.
    ///
    /// # Errors
    /// When pip fails: no network, no such package.
    pub(crate) fn install(&self, packages: &[&str], dir: &Path) -> Result<()> {
        let mut command = Command::new(self.python);
        command
            .args([
                "-m",
                "pip",
                "install",
                "--no-input",
                "--disable-pip-version-check",
                "--no-cache-dir",
                "--quiet",
            ])
            .args(&self.options)
            .arg("--target")
            .arg(dir)
            .args(packages)
            .stdin(self.lock.try_clone()?)
            // It warns of what does not concern a folder of ours.
            .env("PIP_ROOT_USER_ACTION", "ignore");
        let status = command.status().with_context(|| format!("run `{}`", self.python))?;
        ensure!(
            status.success(),
            "pip did not install {} ({status}), its reason is above; for a proxy or mirror see PIP_PROXY and PIP_INDEX_URL",
            packages.join(" ")
        );
        Ok(())
    }

    /// Makes a virtual environment in the empty folder `dir`, which may be moved, and installs `packages` with what they need there.
    ///
    /// # Errors
    /// As [`Pip::install`].
    pub(crate) fn install_venv(&self, packages: &[&str], dir: &Path) -> Result<()> {
        let mut venv = Command::new(self.python);
        // Without a pip of its own, which some systems split off.
        venv.args(["-m", "venv", "--without-pip"]).arg(dir).stdin(self.lock.try_clone()?);
        let status = venv.status().with_context(|| format!("run `{}`", self.python))?;
        ensure!(status.success(), "no virtual environment in `{}` ({status})", dir.display());
        let mut command = Command::new(self.python);
        command
            .args(["-m", "pip", "--python"])
            .arg(dir.join("bin/python"))
            .args(["install", "--no-input", "--disable-pip-version-check", "--no-cache-dir"])
            .args(&self.options)
            .args(packages)
            .stdin(self.lock.try_clone()?);
        let status = command.status().with_context(|| format!("run `{}`", self.python))?;
        ensure!(
            status.success(),
            "pip did not install {} ({status}), its reason is above",
            packages.join(" ")
        );
        Ok(())
    }

    /// Unpacks the members of `wheel` that match `patterns` (`*` also matches `/`; a leading `!` takes members out)
    /// into `dir`; returns how many.
    ///
    /// # Errors
    /// When the wheel is damaged, or the disk full.
    pub(crate) fn unpack(&self, wheel: &Path, dir: &Path, patterns: &[&str]) -> Result<usize> {
        let output = Command::new(self.python)
            .args(["-c", UNPACK])
            .args([wheel, dir])
            .args(patterns)
            .stdin(self.lock.try_clone()?)
            .output()
            .with_context(|| format!("run `{}`", self.python))?;
        if !output.status.success() {
            bail!("unpack `{}`: {}", wheel.display(), String::from_utf8_lossy(&output.stderr).trim());
        }
        let members = String::from_utf8_lossy(&output.stdout);
        members
            .trim()
            .parse()
            .with_context(|| format!("unpack `{}`: no count in `{members}`", wheel.display()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FAKE_WHEEL: &str = "
import sys, zipfile, hashlib
with zipfile.ZipFile(sys.argv[1], 'w') as w:
    w.writestr('torch/lib/libtorch_cpu.so', 'cpu')
    w.writestr('torch/lib/libtorch_cuda.so', 'cuda')
    w.writestr('torch/nn/functional.py', 'pass')
    w.writestr('fake-1.0.dist-info/METADATA', 'Metadata-Version: 2.1\\nName: fake\\nVersion: 1.0\\n')
    w.writestr('fake-1.0.dist-info/WHEEL', 'Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n')
    w.writestr('fake-1.0.dist-info/RECORD', '')
print(hashlib.sha256(open(sys.argv[1], 'rb').read()).hexdigest())
";

    /// A pip that finds one wheel, `fake` 1.0, in a folder and looks nowhere else; with the wheel's hash.
    fn pip_with_fake_wheel(dir: &Path) -> (Pip, String) {
        let wheel = dir.join("fake-1.0-py3-none-any.whl");
        let output = Command::new("python3").args(["-c", FAKE_WHEEL]).arg(wheel).output().unwrap();
        let options =
            vec!["--no-index".to_owned(), format!("--find-links={}", dir.display()), "--quiet".to_owned()];
        let pip = Pip { options, ..Pip::find(tempfile::tempfile().unwrap()).unwrap() };
        (pip, String::from_utf8(output.stdout).unwrap().trim().to_owned())
    }

    #[test]
    fn pinned_wheel_is_fetched_and_its_wanted_members_unpacked() {
        let (index, dir) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let (pip, hash) = pip_with_fake_wheel(index.path());
        let wheels = pip.download(&format!("fake==1.0 --hash=sha256:{hash}"), dir.path()).unwrap();
        assert_eq!(wheels.len(), 1);

        let kept = pip.unpack(&wheels[0], dir.path(), &["torch/lib/*", "!*cuda*"]).unwrap();
        assert_eq!(kept, 1);
        assert_eq!(fs::read_to_string(dir.path().join("torch/lib/libtorch_cpu.so")).unwrap(), "cpu");
        assert!(!dir.path().join("torch/lib/libtorch_cuda.so").exists());
        assert!(!dir.path().join("torch/nn").exists());
    }

    #[test]
    fn package_is_installed_into_a_folder_of_its_own() {
        let (index, dir) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let (pip, _) = pip_with_fake_wheel(index.path());
        let target = dir.path().join("packages");
        pip.install(&["fake==1.0"], &target).unwrap();
        assert!(target.join("torch/nn/functional.py").exists());
        let error = pip.install(&["fake==2.0"], &target).unwrap_err().to_string();
        assert!(error.starts_with("pip did not install fake==2.0"), "{error}");
    }

    #[test]
    fn a_virtual_environment_finds_its_packages_also_when_it_was_moved() {
        let (index, dir) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let (pip, _) = pip_with_fake_wheel(index.path());
        let (made, moved) = (dir.path().join("made"), dir.path().join("moved"));
        pip.install_venv(&["fake==1.0"], &made).unwrap();
        fs::rename(&made, &moved).unwrap();
        let mut python = Command::new(moved.join("bin/python"));
        assert!(python.args(["-c", "import torch.nn.functional"]).status().unwrap().success());
    }

    #[test]
    fn wheel_with_another_hash_is_refused() {
        let (index, dir) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let (pip, _) = pip_with_fake_wheel(index.path());
        let other = "0".repeat(64);
        let error = pip.download(&format!("fake==1.0 --hash=sha256:{other}"), dir.path()).unwrap_err();
        assert!(error.to_string().starts_with("pip did not fetch the wheels"), "{error}");
    }

    #[test]
    fn truncated_wheel_is_an_error_that_names_it() {
        let (index, dir) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let (pip, _) = pip_with_fake_wheel(index.path());
        let wheel = index.path().join("fake-1.0-py3-none-any.whl");
        let bytes = fs::read(&wheel).unwrap();
        fs::write(&wheel, &bytes[..bytes.len() / 2]).unwrap();
        let error = pip.unpack(&wheel, dir.path(), &["*"]).unwrap_err().to_string();
        assert!(error.contains("fake-1.0-py3-none-any.whl"), "{error}");
    }
}
