//! Evaluations during training with real processes: equal numbers for any fleet, also when a ps is
//! lost and the job goes back.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use serde_json::Value;

use crate::harness::{self, Cluster, events, root, succeed, summary, text};

/// Steps in an epoch of the example.
const EPOCH: u64 = 23;

fn job() -> PathBuf {
    root().join("examples/digits/job.toml")
}

/// Trains in one process with one worker. Returns the folder of the results.
fn alone(dir: &Path, sets: &[&str]) -> PathBuf {
    let out = dir.join("alone");
    let (job, path) = (job().display().to_string(), out.display().to_string());
    let sets: Vec<&str> = sets.iter().flat_map(|set| ["--set", set]).collect();
    succeed([&["run", &job, "--workers", "1", "--ps", "1", "--out", &path][..], &sets].concat());
    out
}

/// Trains on a cluster, of which ps 1 is killed and started again once `before` evaluations are
/// reported. Returns the folder of the results.
fn with_a_loss(cluster: &mut Cluster, sets: &[&str], before: usize) -> PathBuf {
    let out = cluster.dir.path().join("together");
    let sets: Vec<&str> = sets.iter().flat_map(|set| ["--set", set]).collect();
    let mut submission = cluster.submission(&job(), &out, &sets);
    let mut child = submission.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    while !out.join("metrics.jsonl").exists() || events(&out, "eval").len() < before {
        assert!(child.try_wait().unwrap().is_none(), "the job ended before it told {before} evaluations");
        std::thread::park_timeout(Duration::from_millis(5));
    }
    cluster.restart_ps(1);
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{}", text(&output));
    assert!(!events(&out, "rewind").is_empty(), "nothing was lost");
    out
}

fn steps(out: &Path) -> Vec<u64> {
    let summary = summary(out);
    let evaluations = summary["evaluations"].as_array().unwrap();
    evaluations.iter().map(|evaluation| evaluation["step"].as_u64().unwrap()).collect()
}

#[test]
fn evaluations_within_epochs_have_the_same_numbers_for_any_fleet_and_after_a_loss() {
    let dir = tempfile::tempdir().unwrap();
    let sets = ["epochs=60", "evaluation.every_steps=10"];
    let calm = alone(dir.path(), &sets);
    let due = |step: &u64| step.is_multiple_of(10) || step.is_multiple_of(EPOCH);
    assert_eq!(steps(&calm), (1..=60 * EPOCH).filter(due).collect::<Vec<_>>());
    let mut cluster = Cluster::start(2, 3);
    let out = with_a_loss(&mut cluster, &[&sets[..], &["fleet.ps=2"]].concat(), 6);
    let evaluations = |out: &Path| -> Value { summary(out)["evaluations"].clone() };
    assert!(evaluations(&out) == evaluations(&calm), "other numbers than an undisturbed run");
    assert!(harness::model(&out) == harness::model(&calm), "other bits than an undisturbed run");
}
