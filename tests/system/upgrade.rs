//! This program reads the files of the program before its first release: `tests/golden/upgrade`,
//! which the script there made.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::fs::{self, File};
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::Duration;

use crate::harness::machine::until;
use crate::harness::{self, Cluster, ebb, events, model, root, succeed, summary, text};

/// Deadline of every wait, far longer than needed.
const PATIENCE: Duration = Duration::from_secs(120);

fn golden() -> PathBuf {
    root().join("tests/golden/upgrade")
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap().map(Result::unwrap) {
        let target = to.join(entry.file_name());
        match entry.path().is_dir() {
            true => copy(&entry.path(), &target),
            false => drop(fs::copy(entry.path(), target).unwrap()),
        }
    }
}

/// A process that ends with its handle.
struct Started(Child);

impl Drop for Started {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_data_folder_of_an_older_program_is_taken_up() {
    let folder = tempfile::tempdir().unwrap();
    let data = folder.path().join("data");
    copy(&golden().join("jobs"), &data.join("jobs"));
    fs::copy(golden().join("starts"), data.join("starts")).unwrap();
    let mut journal = Vec::new();
    let packed = File::open(golden().join("journal.redb.gz")).unwrap();
    flate2::read::GzDecoder::new(packed).read_to_end(&mut journal).unwrap();
    fs::write(data.join("journal.redb"), journal).unwrap();

    let cluster = Cluster::with_data(&harness::ebb_path(), Some(&data), 2, 0, &[]);
    let status = |job: &str| -> serde_json::Value {
        serde_json::from_str(&succeed(["status", "--json", job, "--master", &cluster.url])).unwrap()
    };
    // The job that had ended is unchanged, with its events and its model.
    let first = status("first");
    assert_eq!((&first["status"], &first["steps_done"]), (&"succeeded".into(), &46.into()), "{first}");
    let told = succeed(["watch", "--json", "first", "--master", &cluster.url]);
    assert!(told.lines().last().unwrap().contains("succeeded"), "{told}");
    let out = folder.path().join("out");
    succeed(["fetch", "first", "--master", &cluster.url, "--out", out.to_str().unwrap()]);
    let sha256 = fs::read_to_string(golden().join("model.sha256")).unwrap();
    assert_eq!(summary(&out)["model_sha256"], sha256.trim());

    // The job that was being trained goes on. Its ps have lost their partitions, so it begins at
    // version 0.
    assert_eq!(status("second")["status"], "paused");
    succeed(["resume", "second", "--master", &cluster.url]);
    let data_root = root().join("examples/digits").display().to_string();
    let worker = ["worker", "--master", &cluster.url, "--device", "cpu", "--data-root", &data_root];
    let worker = ebb(worker).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let _worker = Started(worker);
    until("the job trains", PATIENCE, || status("second")["steps_done"].as_u64() > Some(10));
    succeed(["cancel", "second", "--force", "--master", &cluster.url]);
    until("the job ends", PATIENCE, || status("second")["status"] == "cancelled");
}

#[test]
fn checkpoints_of_an_older_program_are_read_and_end_with_its_bits() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoints = folder.path().join("checkpoints");
    copy(&golden().join("checkpoints"), &checkpoints);
    let said = succeed([Path::new("checkpoint"), Path::new("verify"), &checkpoints]);
    assert!(said.contains(": intact"), "{said}");
    let out = folder.path().join("out");
    let sets = ["name=\"kept\"", "epochs=40", "model.builtin=\"softmax\"", "model.options={}"];
    let place = format!("checkpoint.url={}", checkpoints.display());
    let mut run = ebb(["run", "--resume", "--workers", "1", "--ps", "3", "--out"]);
    run.arg(&out).arg(root().join("examples/digits/job.toml"));
    let sets = sets.into_iter().chain([place.as_str(), "checkpoint.every_steps=100", "fleet.ps=3"]);
    let output = run.args(sets.flat_map(|set| ["--set", set])).output().unwrap();
    let said = text(&output);
    assert!(output.status.success(), "{said}");
    assert!(events(&out, "train")[0]["step"].as_u64() >= Some(100), "it began anew:\n{said}");
    assert!(!model(&out).is_empty());
    let sha256 = fs::read_to_string(golden().join("kept.sha256")).unwrap();
    assert_eq!(summary(&out)["model_sha256"], sha256.trim());
}
