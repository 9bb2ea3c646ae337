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

/// Returns the files of the example, cut to a range of records.
fn files(begin: u64, end: u64) -> String {
    format!(
        "{{ features = [\"images.idx3.gz\"], labels = [\"labels.idx1.gz\"], records = [{begin}, {end}] }}"
    )
}

/// Returns the data section of the example with other validation records.
fn data(validation: &str) -> String {
    format!(
        "data={{ format = \"idx\", train = {}, {validation}, normalize = {{ scale = 16, mean = 0.305, std = 0.376 }} }}",
        files(0, 1400)
    )
}

#[test]
fn each_validation_set_has_the_numbers_that_it_has_alone() {
    let dir = tempfile::tempdir().unwrap();
    let (dev, test) = (files(1400, 1600), files(1600, 1797));
    let several = data(&format!("validation = {dev}, validation_sets = {{ test = {test} }}"));
    let both = alone(dir.path(), &["epochs=2", &several]);
    let of_set = |out: &Path, set: &Value| -> Vec<Value> {
        let all = events(out, "eval");
        all.into_iter().filter(|event| event["set"] == *set).map(|event| event["accuracy"].clone()).collect()
    };
    let other = tempfile::tempdir().unwrap();
    let only = alone(other.path(), &["epochs=2", &data(&format!("validation = {test}"))]);
    assert_eq!(of_set(&both, &"test".into()), of_set(&only, &Value::Null));
    assert_eq!(of_set(&both, &Value::Null).len(), 2);
    let last = &summary(&both)["final"];
    assert_eq!(last["test/accuracy"], summary(&only)["final"]["accuracy"]);
    assert!(last["accuracy"].is_f64(), "{last}");
    assert!(harness::model(&both) == harness::model(&only), "what is measured changes no weights");

    let cluster = Cluster::start(2, 3);
    let (job, model) = (job().display().to_string(), both.display().to_string());
    let command = ["evaluate", &job, "--model", &model, "--master", &cluster.url, "--set", &several];
    let said = succeed(command);
    assert!(said.contains("397 of 397 records evaluated"), "{said}");
    assert!(said.contains("validation") && said.contains("test"), "{said}");
    let output = harness::ebb([&command[..], &["--json"]].concat()).output().unwrap();
    assert!(output.status.success(), "{}", text(&output));
    let together: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(&together["final"], last);
}
