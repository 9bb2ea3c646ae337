//! `ebb run SCRIPT.py` with real processes: what becomes of scripts that never join, and how
//! processes end. The interpreter is `sh`, so these tests need no Python. `python/tests` has
//! scripts that train.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

use crate::harness::{ebb, text};

/// A script, and the folder of its results.
struct Place {
    dir: TempDir,
}

impl Place {
    fn new(script: &str) -> Self {
        let dir = TempDir::new().unwrap();
        fs::write(dir.path().join("train.py"), script).unwrap();
        Self { dir }
    }

    fn out(&self) -> PathBuf {
        self.dir.path().join("out")
    }

    fn log(&self, worker: u32) -> String {
        fs::read_to_string(self.out().join(format!("logs/worker-{worker}.log"))).unwrap()
    }

    /// Returns the run of the script, with more arguments.
    fn run(&self, more: &[&str]) -> Command {
        let mut command = ebb(["run", "--python", "sh", "--out"]);
        command.arg(self.out()).arg(self.dir.path().join("train.py")).args(more);
        command
    }
}

/// Returns the text after the prefix `worker-0 | ` in the first line that has it.
fn first_words(run: &mut Child) -> String {
    let lines = BufReader::new(run.stderr.as_mut().unwrap()).lines().map_while(Result::ok);
    let mut words = lines.filter_map(|line| Some(line.strip_prefix("worker-0 | ")?.to_owned()));
    words.next().expect("the script says something")
}

/// Returns whether a process runs. One that has ended and that nobody has waited for does not.
fn runs(process: &str) -> bool {
    let stat = fs::read_to_string(format!("/proc/{process}/stat"));
    stat.is_ok_and(|stat| stat.rsplit(") ").next().is_some_and(|state| !state.starts_with('Z')))
}

#[test]
fn a_script_that_never_joins_fails_with_what_it_said() {
    let place = Place::new(
        "echo \"$EBBFLOW_WORKER got $1 $2 and $GIVEN of $EBBFLOW_WORKERS\"; echo [$EBB_TLS_CA] >&2",
    );
    let more = ["--workers", "2", "--env", "GIVEN=this", "--", "--lr", "0.1"];
    let output = place.run(&more).env("EBB_TLS_CA", "no-such-file").output().unwrap();
    let said = text(&output);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("worker-0 | worker-0 got --lr 0.1 and this of 2"), "{said}");
    assert!(said.contains("no process has joined a job of this run by ebbflow.join"), "{said}");
    assert!(said.contains("train.py: worker-") && said.contains("ended with exit code 0"), "{said}");
    assert!(said.contains("said last:\n"), "{said}");
    for worker in 0..2 {
        let log = place.log(worker);
        assert!(log.contains(&format!("worker-{worker} got")) && log.contains("[]"), "{log}");
    }
}

#[test]
fn a_script_that_fails_before_it_joins_ends_the_run_at_once() {
    let place = Place::new(
        "case $EBBFLOW_WORKER in worker-1) echo wrong; exit 7;; *) while :; do sleep 600 & wait; done;; esac",
    );
    let output = place.run(&["--workers", "3"]).output().unwrap();
    let said = text(&output);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("worker-1 ended with exit code 7") && said.contains("    wrong"), "{said}");
    assert!(!said.contains("started again"), "{said}");
}

#[test]
fn signals_end_the_processes_too() {
    let place = Place::new("trap 'echo asked; exit 0' TERM; echo begun; while :; do sleep 600 & wait; done");
    for (signal, code) in [(Signal::INT, 130), (Signal::TERM, 143)] {
        let mut run = place.run(&[]).stderr(Stdio::piped()).spawn().unwrap();
        assert_eq!(first_words(&mut run), "begun");
        kill_process(Pid::from_child(&run), signal).unwrap();
        assert_eq!(run.wait().unwrap().code(), Some(code));
        assert_eq!(place.log(0), "begun\nasked\n");
    }
}

#[test]
fn processes_and_what_they_started_do_not_outlive_a_run_that_is_killed() {
    let place = Place::new(
        "trap '' TERM HUP INT; sleep 600 & child=$!; setsid sleep 600 & session=$!\n\
        (setsid sleep 600 & echo $! > $PLACE/daemon) ; echo $$ $child $session $(cat $PLACE/daemon)\n\
        while :; do sleep 600; done",
    );
    let variable = format!("PLACE={}", place.dir.path().display());
    let mut run = place.run(&["--env", &variable]).stderr(Stdio::piped()).spawn().unwrap();
    let words = first_words(&mut run);
    let processes: Vec<_> = words.split(' ').collect();
    assert!(processes.len() == 4 && processes.iter().all(|process| runs(process)), "{words}");
    run.kill().unwrap();
    run.wait().unwrap();
    for process in processes {
        while runs(process) {
            std::thread::park_timeout(Duration::from_millis(5));
        }
    }
}

#[test]
fn what_cannot_be_kept_is_refused_by_name() {
    let place = Place::new("");
    let refused = |more: &[&str]| {
        let output = place.run(more).output().unwrap();
        assert!(!output.status.success());
        text(&output)
    };
    assert!(refused(&["--set", "epochs=1"]).contains("error: --set: not for a Python script"));
    assert!(refused(&["--env", "LD_PRELOAD=x"]).contains("LD_PRELOAD cannot be set for a script"));
    let mut other = ebb(["run", "--python", "no-such-python", "--out"]);
    let script = place.dir.path().join("train.py");
    let said = text(&other.arg(place.out()).arg(script).output().unwrap());
    assert!(said.contains("cannot start `no-such-python`") && said.contains("because: "), "{said}");
    let job = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/digits/job.toml");
    let said = text(&ebb(["run"]).arg(job).args(["--env", "A=1"]).output().unwrap());
    assert!(said.contains("--env: only for a Python script"), "{said}");
}
