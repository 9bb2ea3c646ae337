//! SIGTERM with real processes: a ps that is told to leave, and a run in one process, first save
//! the state of their jobs.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::path::Path;
use std::process::{Child, Stdio};
use std::time::Duration;

use crate::harness::{Cluster, ebb, events, model, root, summary, text};

/// Steps in the user's events before a process is told to leave.
const BEFORE: usize = 60;

/// Returns the settings of a job whose steps never trigger a checkpoint, so that each one was saved
/// on request.
fn sets(folder: &Path, mode: &str) -> Vec<String> {
    let url = format!("checkpoint.url={}", folder.join("checkpoints").display());
    let sets = ["epochs=60".to_owned(), mode.to_owned(), url, "checkpoint.every_steps=1000000".to_owned()];
    sets.into_iter().flat_map(|set| ["--set".to_owned(), set]).collect()
}

fn undisturbed(mode: &str) -> Vec<u8> {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("out");
    let mut command = ebb(["run", "--workers", "1", "--ps", "1", "--out"]);
    command
        .arg(&out)
        .args(["--set", "epochs=60", "--set", mode])
        .arg(root().join("examples/digits/job.toml"));
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", text(&output));
    model(&out)
}

/// Waits until the events have more steps than before.
fn train(child: &mut Child, out: &Path) {
    let told = || if out.join("metrics.jsonl").exists() { events(out, "train").len() } else { 0 };
    let before = told();
    while told() < before + BEFORE {
        assert!(child.try_wait().unwrap().is_none(), "it ended before it told {BEFORE} steps more");
        std::thread::park_timeout(Duration::from_millis(5));
    }
}

#[track_caller]
fn assert_no_step_twice(out: &Path) {
    let steps: Vec<_> = events(out, "train").iter().map(|event| event["step"].as_u64().unwrap()).collect();
    assert!(steps.is_sorted_by(|one, next| one < next), "a step was trained again: {steps:?}");
}

#[test]
fn a_ps_that_is_told_to_leave_saves_its_jobs_first_and_nothing_is_trained_again() {
    let job = root().join("examples/digits/job.toml");
    for mode in ["consistency.mode=sync", "consistency.mode=pipelined", "consistency.mode=async"] {
        let mut cluster = Cluster::start(2, 2);
        let out = cluster.dir.path().join("out");
        let sets = sets(cluster.dir.path(), mode);
        let sets: Vec<&str> = sets.iter().map(String::as_str).collect();
        let mut submission = cluster.submission(&job, &out, &sets);
        let mut child = submission.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        for leaving in [1, 0] {
            train(&mut child, &out);
            cluster.replace_ps(leaving);
        }
        let output = child.wait_with_output().unwrap();
        let said = text(&output);
        assert!(output.status.success(), "{said}");
        let saved: Vec<_> = events(&out, "checkpoint").iter().map(|event| event["version"].clone()).collect();
        assert!(saved.len() >= 2, "{mode}: {said}");
        for version in &saved[..2] {
            assert!(
                said.contains(&format!("from the checkpoint of version {version}")),
                "{mode}: {version}\n{said}"
            );
        }
        assert_no_step_twice(&out);
        if mode != "consistency.mode=async" {
            assert!(model(&out) == undisturbed(mode), "{mode}: other bits than an undisturbed run");
        }
    }
}

#[test]
fn a_ps_without_anything_to_save_leaves_at_once() {
    let mut cluster = Cluster::start(1, 0);
    cluster.replace_ps(0);
}

#[test]
fn a_run_that_is_told_to_leave_saves_where_it_stands_and_resumes_from_there() {
    let (job, mode) = (root().join("examples/digits/job.toml"), "consistency.mode=sync");
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("out");
    let run = |more: &[&str]| {
        let mut command = ebb(["run", "--workers", "2", "--ps", "2", "--out"]);
        command.arg(&out).args(sets(folder.path(), mode)).args(more).arg(&job);
        command
    };
    let mut child = run(&[]).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    train(&mut child, &out);
    let killed =
        std::process::Command::new("kill").args(["-TERM", &child.id().to_string()]).status().unwrap();
    assert!(killed.success());
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(143), "{}", text(&output));
    let saved = events(&out, "checkpoint").last().map(|event| event["version"].as_u64().unwrap());
    assert_eq!(saved, summary(&out)["steps"].as_u64(), "it was saved where it stopped");

    let output = run(&["--resume"]).output().unwrap();
    assert!(output.status.success(), "{}", text(&output));
    let gone_on = format!("training goes on from the checkpoint of version {}", saved.unwrap());
    assert!(text(&output).contains(&gone_on), "{}", text(&output));
    assert_no_step_twice(&out);
    assert!(model(&out) == undisturbed(mode), "other bits than an undisturbed run");
}
