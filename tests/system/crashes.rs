//! Both promises with checkpoints and real processes: a ps, the master, both, or everything is
//! killed at random moments.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::Duration;

use crate::harness::oracle::Oracle;
use crate::harness::{self, Cluster, digits, ebb, events, model, program, root, summary, text, told};
use ebbflow::random::Keyed;

/// Fewest training events between two crashes. Some more are drawn.
const BETWEEN: usize = 30;

/// Processes that are killed, and started again without their memory.
#[derive(Clone, Copy, Debug)]
pub(super) enum Crash {
    Ps,
    Master,
    Both,
    Everything,
}

/// A job that is disturbed.
pub(super) struct Disturbed {
    cluster: Cluster,
    out: PathBuf,
    child: Child,
    dice: Keyed,
    told: usize,
}

impl Disturbed {
    pub(super) fn start(cluster: Cluster, job: &Path, sets: &[String], seed: u64) -> Self {
        let out = cluster.dir.path().join("out");
        let sets: Vec<&str> = sets.iter().flat_map(|set| ["--set", set]).collect();
        let mut submission = cluster.submission(job, &out, &sets);
        let child = submission.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
        Self { cluster, out, child, dice: Keyed::new(seed, "crashes", 0), told: 0 }
    }

    /// Crashes again and again. Returns whether the job still trained at each crash: on a slow disk
    /// it may have no new checkpoint before it ends.
    pub(super) fn all(&mut self, crashes: &[Crash]) -> bool {
        crashes.iter().all(|&crash| {
            let trains = self.wait();
            if trains {
                self.crash(crash);
            }
            trains
        })
    }

    /// Waits for a new checkpoint, and for some steps after it. Returns whether they came before
    /// the end of the job.
    fn wait(&mut self) -> bool {
        let more = BETWEEN + (self.dice.next_u64() % 40) as usize;
        let saved = told(&self.out, "checkpoint");
        let ready = |out: &Path, steps| told(out, "checkpoint") > saved && told(out, "train") >= steps;
        while !ready(&self.out, self.told + more) {
            if let Some(status) = self.child.try_wait().unwrap() {
                let mut said = String::new();
                let stdout = self.child.stdout.as_mut().unwrap();
                std::io::Read::read_to_string(stdout, &mut said).unwrap();
                assert!(status.success(), "{said}");
                return false;
            }
            std::thread::park_timeout(Duration::from_millis(5));
        }
        self.told = told(&self.out, "train");
        // The crash may hit any part of a step or a write. The wait is so short that the job cannot
        // end.
        std::thread::park_timeout(Duration::from_millis(self.dice.next_u64() % 30));
        true
    }

    fn crash(&mut self, crash: Crash) {
        let ps = self.dice.next_u64() as usize % self.cluster.ps.len();
        match crash {
            Crash::Ps => self.cluster.restart_ps(ps),
            Crash::Master => self.cluster.restart_master(),
            Crash::Both => {
                self.cluster.master.signal("KILL");
                self.cluster.restart_ps(ps);
                self.cluster.restart_master();
            }
            Crash::Everything => self.cluster.restart_everything(),
        }
    }

    /// Waits until the job has succeeded. Returns its cluster and folder.
    pub(super) fn end(mut self) -> (Cluster, PathBuf) {
        let status = self.child.wait().unwrap();
        let mut said = String::new();
        std::io::Read::read_to_string(self.child.stdout.as_mut().unwrap(), &mut said).unwrap();
        assert!(status.success(), "{said}");
        println!("{}", summary(&self.out));
        (self.cluster, self.out)
    }
}

/// Returns the settings of a job that saves every `steps`.
pub(super) fn saving(folder: &Path, steps: u64) -> Vec<String> {
    let url = folder.join("checkpoints").display().to_string();
    vec![format!("checkpoint.url={url}"), format!("checkpoint.every_steps={steps}")]
}

/// Runs the job without faults on one worker and one ps.
fn calm(job: &Path, sets: &[String]) -> (Vec<u8>, serde_json::Value) {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("out");
    let sets = sets.iter().flat_map(|set| ["--set", set]);
    let output =
        ebb(["run", "--workers", "1", "--ps", "1", "--out"]).arg(&out).args(sets).arg(job).output().unwrap();
    assert!(output.status.success(), "{}", text(&output));
    (model(&out), summary(&out))
}

#[test]
fn whatever_crashes_the_model_is_the_same() {
    let job = root().join("examples/digits/job.toml");
    let crashes = [Crash::Ps, Crash::Everything, Crash::Master, Crash::Both, Crash::Ps, Crash::Everything];
    let mut left = vec![("pipelined", 2, 24), ("sync", 1, 24)];
    while let Some((mode, seed, count)) = left.pop() {
        let sets = vec![format!("epochs={count}"), format!("consistency.mode={mode}")];
        let (bits, undisturbed) = calm(&job, &sets);
        let cluster = Cluster::of(&digits::program(), 2, 2);
        let paced = digits::PACED.map(str::to_owned).to_vec();
        let sets = [sets, saving(cluster.dir.path(), 10), paced].concat();
        let mut disturbed = Disturbed::start(cluster, &job, &sets, seed);
        if !disturbed.all(&crashes) {
            left.push((mode, seed, 2 * count));
            continue;
        }
        let (_cluster, out) = disturbed.end();
        assert!(model(&out) == bits, "{mode}: other bits than an undisturbed run");
        assert_eq!(summary(&out)["samples_applied"], undisturbed["samples_applied"]);
        let told: Vec<_> = events(&out, "train").iter().map(|event| event["step"].clone()).collect();
        assert_eq!(
            told.iter().filter(|step| **step == told[0]).count(),
            1,
            "{mode}: it began again from version 0"
        );
        let epochs = |out: &Path| {
            let epoch = |event: &serde_json::Value| event["epoch"].as_u64().unwrap();
            events(out, "eval").iter().map(epoch).collect::<std::collections::BTreeSet<_>>().len()
        };
        assert_eq!(epochs(&out), count, "{mode}: an epoch was not measured");
    }
}

#[test]
fn whatever_crashes_every_record_counts_once_an_epoch() {
    let mut left = vec![("async", 4, 16), ("bounded", 3, 16)];
    while let Some((mode, seed, count)) = left.pop() {
        let oracle = Oracle::new(count, Some(10));
        let cluster = Cluster::of(&harness::example("oracle"), 3, 2);
        let more = vec![format!("consistency.mode={mode}"), "fleet.ps=3".to_owned()];
        let sets = [saving(cluster.dir.path(), 15), more].concat();
        let mut disturbed = Disturbed::start(cluster, &oracle.job(), &sets, seed);
        if !disturbed.all(&[Crash::Ps, Crash::Both, Crash::Everything, Crash::Ps]) {
            left.push((mode, seed, 2 * count));
            continue;
        }
        let (_cluster, out) = disturbed.end();
        oracle.check(&out, mode);
    }
}

/// Interrupts a run, and resumes it with other numbers of ps. Returns whether it still trained when
/// it was interrupted.
fn interrupted(epochs: u32) -> bool {
    let job = root().join("examples/digits/job.toml");
    let sets = vec![format!("epochs={epochs}"), "consistency.mode=pipelined".to_owned()];
    let (bits, undisturbed) = calm(&job, &sets);
    let folder = tempfile::tempdir().unwrap();
    let sets = [sets, saving(folder.path(), 50)].concat();
    let sets: Vec<&str> = sets.iter().map(String::as_str).collect();
    let run = |out: &Path, more: &[&str]| {
        let mut command = program(&digits::program(), ["run", "--workers", "2", "--out"]);
        command.arg(out).args(digits::arguments(&sets)).args(more).arg(&job);
        command
    };
    let refused = |mut command: std::process::Command| {
        let output = command.output().unwrap();
        assert!(!output.status.success(), "expected an error, got:\n{}", text(&output));
        text(&output)
    };
    let nothing = refused(run(&folder.path().join("nothing"), &["--resume"]));
    assert!(nothing.contains("nothing to resume from"), "{nothing}");

    let out = folder.path().join("out");
    let mut interrupted = run(&out, &["--ps", "3"]);
    let mut child = interrupted.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    while told(&out, "train") < 130 {
        if let Some(status) = child.try_wait().unwrap() {
            assert!(status.success(), "{status} before it was interrupted");
            return false;
        }
        std::thread::park_timeout(Duration::from_millis(5));
    }
    let pid = child.id().to_string();
    assert!(std::process::Command::new("kill").args(["-INT", &pid]).status().unwrap().success());
    let output = child.wait_with_output().unwrap();
    let stopped = summary(&out);
    if stopped["status"] == "succeeded" {
        return false;
    }
    assert_eq!(stopped["status"], "cancelled", "{}", text(&output));
    let last = events(&out, "checkpoint").last().unwrap()["version"].as_u64().unwrap();
    assert_eq!(stopped["steps"].as_u64(), Some(last), "it was saved where it stopped: {stopped}");

    let again = refused(run(&folder.path().join("again"), &[]));
    assert!(again.contains("go on from them with --resume"), "{again}");

    let saved = folder.path().join("checkpoints");
    for ps in ["1", "2", "5"] {
        // Each run resumes from the same checkpoint, not from that of the run before.
        let kept = folder.path().join("kept");
        if ps == "1" {
            copy(&saved, &kept);
        } else {
            std::fs::remove_dir_all(&saved).unwrap();
            copy(&kept, &saved);
        }
        let out = folder.path().join(format!("out-{ps}"));
        let output = run(&out, &["--resume", "--ps", ps]).output().unwrap();
        assert!(output.status.success(), "{}", text(&output));
        assert!(model(&out) == bits, "{ps} ps: other bits than an undisturbed run");
        let first = events(&out, "train")[0]["step"].as_u64().unwrap();
        assert!(first >= last, "{ps} ps: step {first} was trained again, {last} were saved");
        assert_eq!(summary(&out)["samples_applied"], undisturbed["samples_applied"]);
    }
    true
}

#[test]
fn an_interrupted_run_resumes_with_any_number_of_ps_and_the_same_bits() {
    assert!([10, 20, 40, 80].into_iter().any(interrupted), "it always ended before");
}

fn copy(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap().map(Result::unwrap) {
        let to = to.join(entry.file_name());
        if entry.path().is_dir() {
            copy(&entry.path(), &to);
        } else {
            std::fs::copy(entry.path(), to).unwrap();
        }
    }
}
