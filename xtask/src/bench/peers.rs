//! Other systems: their Python, installed for nobody else, and one process of theirs that measures when it is told to
//! (`benches/peers/common.py`).

use crate::{install::install, pip::Pip, workspace};
use anyhow::{Context, Result, ensure};
use serde_json::Value;
use std::{
    ffi::OsStr,
    fs::File,
    io::{BufRead as _, BufReader, Write as _},
    path::{Path, PathBuf},
    process::{Child, ChildStdout, Command, Stdio},
};

/// A Python that has what a peer needs.
pub(crate) struct Python {
    pub(crate) program: PathBuf,
}

impl Python {
    /// `EBB_PYTHON`, else one with the PyTorch that Ebbflow's libtorch is of. None, said aloud, where it cannot be had.
    pub(crate) fn torch() -> Result<Option<Self>> {
        match workspace::python_of_user() {
            Some(program) => Ok(Some(Self { program })),
            None => Self::with("torch", &["torch==2.11.0", "numpy==2.4.6", "safetensors==0.8.0"], "2.5 GB"),
        }
    }

    pub(super) fn tensorflow() -> Result<Option<Self>> {
        Self::with("tensorflow", &["tensorflow-cpu==2.21.0", "numpy==2.4.6"], "0.4 GB")
    }

    /// One with these packages, the first of which is imported as `module`; installed into a virtual environment in the cache.
    fn with(module: &str, packages: &[&str], size: &str) -> Result<Option<Self>> {
        // Another list is another folder.
        let dir = workspace::cache_dir()?.join(format!("peer-{}", packages.join("-").replace("==", "-")));
        let installed = install(&dir, |partial, lock| {
            eprintln!("{}: fetching {size} into `{}`", packages[0], dir.display());
            Pip::find(lock.try_clone()?)?.install_venv(packages, partial)?;
            let program = Self::of(partial).program;
            ensure!(imports(&program, module), "`{}` cannot import {module}", program.display());
            Ok(())
        });
        match installed {
            Ok(_) => Ok(Some(Self::of(&dir))),
            Err(error) => {
                eprintln!("\n== {module}: pip cannot install it here ({error:#})");
                eprintln!("   what needs it is SKIPPED");
                Ok(None)
            }
        }
    }

    fn of(environment: &Path) -> Self {
        Self { program: environment.join("bin/python") }
    }

    /// A script of `benches/peers/`, ready to run.
    pub(super) fn script(&self, name: &str) -> Command {
        let mut command = Command::new(&self.program);
        command.arg(workspace::root().join("benches/peers").join(name)).env("PYTHONDONTWRITEBYTECODE", "1");
        command
    }
}

fn imports(python: &Path, module: &str) -> bool {
    let mut command = Command::new(python);
    command.arg("-c").arg(format!("import {module}")).stdout(Stdio::null()).stderr(Stdio::null());
    command.status().is_ok_and(|status| status.success())
}

/// A peer that is up.
pub(super) struct Peer {
    child: Child,
    answers: BufReader<ChildStdout>,
    log: PathBuf,
}

impl Peer {
    /// What it says besides answers goes to the file `log`.
    pub(super) fn start<I: IntoIterator<Item = S>, S: AsRef<OsStr>>(
        python: &Python,
        script: &str,
        args: I,
        log: &Path,
    ) -> Result<Self> {
        let file = File::create(log).with_context(|| format!("create `{}`", log.display()))?;
        let mut command = python.script(script);
        command.args(args).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(file);
        let mut child = command.spawn().with_context(|| format!("start {command:?}"))?;
        let answers = BufReader::new(child.stdout.take().context("its output is piped")?);
        Ok(Self { child, answers, log: log.to_owned() })
    }

    /// One window: samples a second.
    pub(super) fn rate(&mut self) -> Result<f64> {
        let what = || format!("it says no rate; see `{}`", self.log.display());
        self.child.stdin.as_mut().context("its input is piped")?.write_all(b"\n").with_context(what)?;
        let mut line = String::new();
        self.answers.read_line(&mut line).with_context(what)?;
        let answer: Value = serde_json::from_str(&line).with_context(what)?;
        answer["samples_per_second"].as_f64().with_context(what)
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        // It ends, with its own children, when its input does.
        drop(self.child.stdin.take());
        let _ = self.child.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_peer_answers_each_time_it_is_asked_and_ends_with_its_input() {
        let python = Python { program: "python3".into() };
        let dir = tempfile::tempdir().unwrap();
        let script = dir.path().join("peer.py");
        let text = "import sys\nfor line in sys.stdin: print('{\"samples_per_second\": 2.5}', flush=True)\n";
        std::fs::write(&script, text).unwrap();
        let none: [&str; 0] = [];
        // An absolute path replaces the folder of the peers.
        let mut peer = Peer::start(&python, script.to_str().unwrap(), none, &dir.path().join("log")).unwrap();
        assert_eq!([peer.rate().unwrap(), peer.rate().unwrap()], [2.5, 2.5]);
    }

    #[test]
    fn a_peer_that_fails_names_its_log() {
        let python = Python { program: "false".into() };
        let dir = tempfile::tempdir().unwrap();
        let none: [&str; 0] = [];
        let mut peer = Peer::start(&python, "pair.py", none, &dir.path().join("log")).unwrap();
        let error = peer.rate().unwrap_err().to_string();
        assert!(error.contains("log`"), "{error}");
    }
}
