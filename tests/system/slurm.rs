//! A job on a real Slurm of one node, which `deploy/slurm/one-node.sh` starts. Tasks of the worker
//! array are cancelled and requeued while it trains, and it ends with the bits and the accuracy of
//! an undisturbed run.
//!
//! The test needs root, and Debian's slurm-wlm and python3. It reports a skip without them.
#![cfg(not(feature = "torch"))]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::fs;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use crate::harness::machine::{Reserved, has, is_root, until};
use crate::harness::{Lacks, digits, ebb, model, root, skipped, summary, text, told};

const PATIENCE: Duration = Duration::from_secs(300);

/// Settings of a job.
const SETTINGS: [&str; 4] = ["--set", "epochs=30", "--set", "consistency.mode=pipelined"];

/// Pace of the job: 80 ms for each microbatch. Four workers need a minute for it. Slurm cancels two
/// tasks in much less.
const PACE: [&str; 4] =
    ["--set", "model.builtin=paced", "--set", r#"model.options={ of = "mlp", millis = 80, hidden = [128] }"#];

/// A Slurm in a folder. It ends with its handle.
struct Slurm {
    dir: PathBuf,
    /// Address of the master, whose job binds all addresses.
    address: Reserved,
}

impl Slurm {
    /// Starts Slurm. It reports a skip and returns `None` where that is impossible.
    fn start(dir: &Path) -> Option<Self> {
        let tools = ["munged", "slurmctld", "slurmd", "sbatch", "python3"];
        if !has(&tools, "slurm-wlm munge python3", "nothing of deploy/slurm is tried") {
            return None;
        }
        if !is_root() {
            skipped(Lacks::Machine, "slurmd needs root; nothing of deploy/slurm is tried");
            return None;
        }
        let slurm = Self { dir: dir.to_owned(), address: Reserved::at(Ipv4Addr::UNSPECIFIED.into()) };
        let output =
            Command::new(root().join("deploy/slurm/one-node.sh")).arg("up").arg(dir).output().unwrap();
        assert!(output.status.success(), "{}", text(&output));
        Some(slurm)
    }

    /// Runs one of Slurm's commands, expects success, and returns its output.
    fn run(&self, program: &str, args: &[&str]) -> String {
        let output = Command::new(program)
            .args(args)
            .current_dir(&self.dir)
            .env("SLURM_CONF", self.dir.join("slurm.conf"))
            .env("EBB", digits::program())
            .env("EBB_DIR", self.dir.join("shared"))
            .env("EBB_DATA", root().join("examples/digits"))
            .env("EBB_PORT", self.address.address.rsplit(':').next().unwrap())
            .output()
            .unwrap();
        assert!(output.status.success(), "{program} {args:?}: {}", text(&output));
        String::from_utf8_lossy(&output.stdout).trim().to_owned()
    }

    fn submit(&self, script: &str, more: &[&str]) -> String {
        let script = root().join("deploy/slurm").join(script).display().to_string();
        self.run("sbatch", &[&["--parsable"], more, &[script.as_str()]].concat())
    }

    /// Returns the logs of the tasks with this name.
    fn logs(&self, name: &str) -> String {
        let mut logs = String::new();
        for entry in fs::read_dir(&self.dir).unwrap() {
            let path = entry.unwrap().path();
            if path.file_name().unwrap().to_string_lossy().starts_with(name) {
                logs += &fs::read_to_string(path).unwrap();
            }
        }
        logs
    }
}

impl Drop for Slurm {
    fn drop(&mut self) {
        if std::thread::panicking() {
            for name in ["ebb-", "slurmctld.log", "slurmd."] {
                eprintln!("--- {name}\n{}", self.logs(name));
            }
        }
        let _ = Command::new("scancel")
            .args(["--user", "root"])
            .env("SLURM_CONF", self.dir.join("slurm.conf"))
            .status();
        let _ = Command::new(root().join("deploy/slurm/one-node.sh")).arg("down").arg(&self.dir).status();
    }
}

#[test]
fn an_array_whose_tasks_are_cancelled_and_requeued_trains_digits_to_its_number() {
    let folder = tempfile::tempdir().unwrap();
    let Some(slurm) = Slurm::start(&folder.path().join("slurm")) else { return };
    let job = root().join("examples/digits/job.toml");
    let (calm, out) = (folder.path().join("calm"), folder.path().join("out"));
    let mut run = ebb(["run", "--workers", "1", "--ps", "1", "--device", "cpu", "--out"]);
    let run = run.arg(&calm).args(SETTINGS).arg(&job).output().unwrap();
    assert!(run.status.success(), "{}", text(&run));

    let control = slurm.submit("control.sbatch", &[]);
    let workers = slurm.submit("worker.sbatch", &[]);
    let url = slurm.dir.join("shared/master.url");
    until("the master's URL", PATIENCE, || url.exists());
    let url = fs::read_to_string(url).unwrap().trim().to_owned();
    let mut submission = ebb(["submit", "--master", &url, "--follow", "--out"]);
    let mut submission = submission
        .arg(&out)
        .arg(&job)
        .args(SETTINGS)
        .args(PACE)
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let steps = || told(&out, "train");
    until("training", PATIENCE, || steps() > 0);

    slurm.run("scontrol", &["requeue", &format!("{workers}_0")]);
    slurm.run("scancel", &[&format!("{workers}_1")]);
    let before = steps();
    until("training without two", PATIENCE, || steps() > before);
    assert!(submission.try_wait().unwrap().is_none(), "the job ended before its workers were disturbed");
    let back = slurm.submit("worker.sbatch", &["--array=1"]);

    let output = submission.wait_with_output().unwrap();
    assert!(output.status.success(), "{}", text(&output));
    assert!(model(&out) == model(&calm), "other bits than an undisturbed run");
    let accuracy = summary(&out)["final"]["accuracy"].as_f64().unwrap_or_default();
    assert!(accuracy >= 0.975, "{}", summary(&out));
    // The requeued task comes back by itself, under the name of its second start.
    until("the requeued task", PATIENCE, || {
        slurm.logs("ebb-worker").contains("worker worker-0-1 of the master")
    });

    // Down: all processes leave by themselves, and none has to be killed.
    slurm.run("scancel", &[&workers, &back, &control]);
    until("an empty queue", PATIENCE, || slurm.run("squeue", &["--noheader"]).is_empty());
}
