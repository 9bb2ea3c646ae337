//! SIGTERM with real processes: a ps that is told to leave, and a run in one process, first save
//! the state of their jobs.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::path::Path;
use std::process::{Child, Stdio};
use std::time::Duration;

use crate::harness::{Cluster, digits, ebb, events, model, program, root, summary, text, told};

/// Steps in the user's events before a process is told to leave.
const BEFORE: usize = 60;

/// Epochs of a job. Where the job ends before its processes leave, the next number is tried.
const EPOCHS: [u32; 4] = [15, 30, 60, 120];

/// Returns the settings of a job whose steps never trigger a checkpoint, so that each one was saved
/// on request.
fn sets(folder: &Path, mode: &str, epochs: u32) -> Vec<String> {
    let url = format!("checkpoint.url={}", folder.join("checkpoints").display());
    let sets =
        [format!("epochs={epochs}"), mode.to_owned(), url, "checkpoint.every_steps=1000000".to_owned()];
    sets.into_iter()
        .chain(digits::PACED.map(str::to_owned))
        .flat_map(|set| ["--set".to_owned(), set])
        .collect()
}

fn undisturbed(mode: &str, epochs: u32) -> Vec<u8> {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("out");
    let mut command = ebb(["run", "--workers", "1", "--ps", "1", "--out"]);
    command
        .arg(&out)
        .args(["--set", &format!("epochs={epochs}"), "--set", mode])
        .arg(root().join("examples/digits/job.toml"));
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", text(&output));
    model(&out)
}

/// Waits until the events have more steps than before. Returns whether they came before the end of
/// the job.
fn train(child: &mut Child, out: &Path) -> bool {
    let steps = || told(out, "train");
    let before = steps();
    while steps() < before + BEFORE {
        if let Some(status) = child.try_wait().unwrap() {
            assert!(status.success(), "{status} before it told {BEFORE} steps more");
            return false;
        }
        std::thread::park_timeout(Duration::from_millis(5));
    }
    true
}

#[track_caller]
fn assert_no_step_twice(out: &Path) {
    let steps: Vec<_> = events(out, "train").iter().map(|event| event["step"].as_u64().unwrap()).collect();
    assert!(steps.is_sorted_by(|one, next| one < next), "a step was trained again: {steps:?}");
}

/// Runs a job whose two ps leave one after the other. Returns whether it still trained when they
/// left.
fn two_ps_leave(mode: &str, epochs: u32) -> bool {
    let mut cluster = Cluster::of(&digits::program(), 2, 2);
    let out = cluster.dir.path().join("out");
    let sets = sets(cluster.dir.path(), mode, epochs);
    let sets: Vec<&str> = sets.iter().map(String::as_str).collect();
    let mut submission = cluster.submission(&root().join("examples/digits/job.toml"), &out, &sets);
    let mut child = submission.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    for leaving in [1, 0] {
        if !train(&mut child, &out) {
            return false;
        }
        cluster.replace_ps(leaving);
    }
    let output = child.wait_with_output().unwrap();
    let said = text(&output);
    assert!(output.status.success(), "{said}");
    let saved: Vec<_> = events(&out, "checkpoint").iter().map(|event| event["version"].clone()).collect();
    // Nothing goes on from a version that ends the job.
    if saved.len() < 2 || saved[..2].contains(&summary(&out)["steps"]) {
        eprintln!("{mode}: {} checkpoints in {epochs} epochs:\n{said}", saved.len());
        return false;
    }
    for version in &saved[..2] {
        assert!(
            said.contains(&format!("from the checkpoint of version {version}")),
            "{mode}: {version}\n{said}"
        );
    }
    assert_no_step_twice(&out);
    if mode != "consistency.mode=async" {
        assert!(model(&out) == undisturbed(mode, epochs), "{mode}: other bits than an undisturbed run");
    }
    true
}

#[test]
fn a_ps_that_is_told_to_leave_saves_its_jobs_first_and_nothing_is_trained_again() {
    for mode in ["consistency.mode=sync", "consistency.mode=pipelined", "consistency.mode=async"] {
        assert!(
            EPOCHS.into_iter().any(|epochs| two_ps_leave(mode, epochs)),
            "{mode}: it always ended before"
        );
    }
}

#[test]
fn a_ps_without_anything_to_save_leaves_at_once() {
    let mut cluster = Cluster::start(1, 0);
    cluster.replace_ps(0);
}

/// Tells a run to leave, and resumes it. Returns whether it still trained when it was told.
fn a_run_leaves(epochs: u32) -> bool {
    let (job, mode) = (root().join("examples/digits/job.toml"), "consistency.mode=sync");
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("out");
    let run = |more: &[&str]| {
        let mut command = program(&digits::program(), ["run", "--workers", "2", "--ps", "2", "--out"]);
        command.arg(&out).args(sets(folder.path(), mode, epochs)).args(more).arg(&job);
        command
    };
    let mut child = run(&[]).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    if !train(&mut child, &out) {
        return false;
    }
    let killed =
        std::process::Command::new("kill").args(["-TERM", &child.id().to_string()]).status().unwrap();
    assert!(killed.success());
    let output = child.wait_with_output().unwrap();
    if output.status.success() && summary(&out)["status"] == "succeeded" {
        return false;
    }
    assert_eq!(output.status.code(), Some(143), "{}", text(&output));
    let saved = events(&out, "checkpoint").last().map(|event| event["version"].as_u64().unwrap());
    assert_eq!(saved, summary(&out)["steps"].as_u64(), "it was saved where it stopped");

    let output = run(&["--resume"]).output().unwrap();
    assert!(output.status.success(), "{}", text(&output));
    let gone_on = format!("training goes on from the checkpoint of version {}", saved.unwrap());
    assert!(text(&output).contains(&gone_on), "{}", text(&output));
    assert_no_step_twice(&out);
    assert!(model(&out) == undisturbed(mode, epochs), "other bits than an undisturbed run");
    true
}

#[test]
fn a_run_that_is_told_to_leave_saves_where_it_stands_and_resumes_from_there() {
    assert!(EPOCHS.into_iter().any(a_run_leaves), "it always ended before");
}
