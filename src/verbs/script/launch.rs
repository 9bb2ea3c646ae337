//! `ebb run SCRIPT.py --on PLATFORM`: this process becomes the launcher, which is a part of the
//! Python package.

use std::ffi::OsString;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, bail};
use model::device::Choice;

use crate::app::App;
use crate::args::{self, Platform};
use crate::verbs::run::RESULTS;

/// Module of the Python package that launches.
const MODULE: &str = "ebbflow.launchers";

/// Replaces this process by the launcher. It returns errors only.
///
/// # Errors
/// An argument does not fit, there is no such interpreter, or its Python lacks the package.
pub(super) fn become_launcher(args: &args::Run, on: Platform, app: &App) -> Result<bool> {
    refuse(args, on)?;
    let python = app.environment.python(args.script.python.as_deref());
    check(&python)?;
    let mut command = Command::new(&python);
    command.args(["-m", MODULE]).args(arguments(args, on));
    let error = command.exec();
    Err(error).with_context(|| format!("{} cannot be started", python.display()))
}

/// Refuses what the platform cannot do.
fn refuse(args: &args::Run, on: Platform) -> Result<()> {
    if args.compute.device != Choice::Auto {
        bail!("--device: not with --on; pass --gpu for processes with a GPU each");
    }
    if !args.launch.mounts.is_empty() && on != Platform::Compose {
        bail!("--mount: only with --on compose");
    }
    if args.launch.gpu && on == Platform::Compose {
        bail!("--gpu: not with --on compose; use this host without --on");
    }
    match (on, args.launch.image.is_some()) {
        (Platform::Kubernetes | Platform::Compose, false) => {
            bail!(
                "--image: missing; --on {} needs an image with Python, ebbflow and what the script imports",
                on.name()
            )
        }
        (Platform::Kubernetes | Platform::Compose, true) | (_, false) => Ok(()),
        (_, true) => bail!("--image: only with --on kubernetes or compose"),
    }
}

/// Checks that this Python has the launcher.
fn check(python: &Path) -> Result<()> {
    let import = format!("import {MODULE}");
    let asked = Command::new(python).args(["-c", &import]).stdin(Stdio::null()).output();
    let asked = asked.with_context(|| format!("the interpreter {} cannot be started", python.display()))?;
    if asked.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&asked.stderr);
    let why = said.trim().lines().last().unwrap_or("it said nothing").to_owned();
    bail!(
        "--on: {} lacks the Python package ebbflow ({why}); install it there, or name another interpreter with --python",
        python.display()
    )
}

/// Returns the arguments of the launcher.
fn arguments(args: &args::Run, on: Platform) -> Vec<OsString> {
    let args::Launch { cpus, gpu, image, mounts, .. } = &args.launch;
    let script = args.job.file_stem().unwrap_or(args.job.as_os_str());
    let out = args.out.clone().unwrap_or_else(|| Path::new(RESULTS).join(script));
    let number = |given: Option<u32>| given.unwrap_or(1).to_string().into();
    let mut all: Vec<OsString> = vec!["--on".into(), on.name().into(), "--out".into(), out.into()];
    all.extend(["--workers".into(), number(args.workers), "--ps".into(), number(args.ps)]);
    all.extend(["--cpus".into(), number(*cpus)]);
    let python = args.script.python.clone().map(PathBuf::into_os_string);
    for (flag, value) in [("--python", python), ("--image", image.clone().map(Into::into))] {
        all.extend(value.into_iter().flat_map(|value| [flag.into(), value]));
    }
    all.extend(mounts.iter().flat_map(|mount| ["--mount".into(), mount.clone()]));
    for (flag, is_given) in [("--gpu", *gpu), ("--json", args.json)] {
        all.extend(is_given.then(|| flag.into()));
    }
    for (name, value) in &args.script.variables {
        all.extend(["--env".into(), format!("{name}={value}").into()]);
    }
    all.extend(["--".into(), args.job.clone().into()]);
    all.extend(args.script.arguments.iter().cloned());
    all
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;
    use crate::args::{Cli, Command as Verb};

    fn args(line: &str) -> args::Run {
        let line = ["ebb", "run"].into_iter().chain(line.split_whitespace());
        match Cli::try_parse_from(line).unwrap().command {
            Verb::Run(run) => run,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn the_launcher_gets_every_argument() {
        let run = args("a/train.py --on slurm");
        let plain = "--on slurm --out out/train --workers 1 --ps 1 --cpus 1 -- a/train.py";
        assert_eq!(
            arguments(&run, Platform::Slurm),
            plain.split(' ').map(OsString::from).collect::<Vec<_>>()
        );
        let run = args(
            "t.py --on kubernetes --workers 4 --ps 2 --out o --python p --cpus 3 --gpu --image i --env A=b=c --json -- --on x",
        );
        let whole = "--on kubernetes --out o --workers 4 --ps 2 --cpus 3 --python p --image i --gpu --json --env A=b=c -- \
                     t.py --on x";
        let whole: Vec<_> = whole.split_whitespace().map(OsString::from).collect();
        assert_eq!(arguments(&run, Platform::Kubernetes), whole);
        let run = args("t.py --on compose --image i --mount /a --mount /b:ro");
        let mounts =
            "--on compose --out out/t --workers 1 --ps 1 --cpus 1 --image i --mount /a --mount /b:ro -- t.py";
        let mounts: Vec<_> = mounts.split(' ').map(OsString::from).collect();
        assert_eq!(arguments(&run, Platform::Compose), mounts);
    }

    #[test]
    fn what_a_platform_cannot_do_is_refused_by_name() {
        for (line, name) in [
            ("t.py --on ray --device cuda:0", "--device"),
            ("t.py --on ray --image i", "--image: only"),
            ("t.py --on kubernetes", "--image: missing"),
            ("t.py --on compose", "--image: missing"),
            ("t.py --on compose --image i --gpu", "--gpu: not"),
            ("t.py --on slurm --mount /a", "--mount: only"),
        ] {
            let run = args(line);
            let said = refuse(&run, run.launch.on.unwrap()).unwrap_err().to_string();
            assert!(said.starts_with(name), "{said}");
        }
        for line in [
            "t.py --gpu",
            "t.py --cpus 2",
            "t.py --image i",
            "t.py --mount /a",
            "t.py --on pbs",
            "t.py --on ray --cpus 0",
        ] {
            assert!(
                Cli::try_parse_from(["ebb", "run"].into_iter().chain(line.split(' '))).is_err(),
                "{line}"
            );
        }
    }

    #[test]
    fn a_python_without_the_package_is_named() {
        let said = format!("{:#}", check(Path::new("/bin/false")).unwrap_err());
        assert!(said.contains("/bin/false lacks the Python package ebbflow (it said nothing)"), "{said}");
        let said = format!("{:#}", check(Path::new("/no/python")).unwrap_err());
        assert!(said.contains("/no/python cannot be started"), "{said}");
        check(Path::new("/bin/true")).unwrap();
    }
}
