//! The back-up of docs/operating.md: a master's folder is copied while a job trains, and put back
//! after everything was lost. The job goes on from a checkpoint that the copy does not know, and
//! ends with the bits of an undisturbed run.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use crate::harness::machine::until;
use crate::harness::{Cluster, digits, model, root, succeed};

/// Deadline of every wait, far longer than needed.
const PATIENCE: Duration = Duration::from_secs(200);

fn copy(from: &Path, to: &Path) {
    assert!(Command::new("cp").arg("-a").args([from, to]).status().unwrap().success());
}

fn steps_done(url: &str) -> u64 {
    let status = succeed(["status", "digits", "--json", "--master", url]);
    let status: serde_json::Value = serde_json::from_str(status.lines().next().unwrap()).unwrap();
    // The job has 920 steps, and the test ends long before the last.
    assert!(!["succeeded", "failed", "cancelled"].map(Into::into).contains(&status["status"]), "{status}");
    status["steps_done"].as_u64().unwrap()
}

#[test]
fn a_fleet_that_starts_anew_with_an_older_journal_ends_with_the_same_bits() {
    let mut cluster = Cluster::of(&digits::program(), 2, 2);
    let at = |cluster: &Cluster, name: &str| cluster.dir.path().join(name);
    let job = root().join("examples/digits/job.toml").display().to_string();
    let settings = ["epochs=40", "consistency.mode=pipelined"];
    let calm = at(&cluster, "calm").display().to_string();
    let run = ["run", "--workers", "1", "--ps", "1", "--device", "cpu", "--out", &calm, &job];
    succeed([&run[..], &["--set", settings[0], "--set", settings[1]]].concat());

    let url = cluster.url.clone();
    let saves = format!("checkpoint.url=file://{}", at(&cluster, "checkpoints").display());
    let saves = ["--set", &saves, "--set", "checkpoint.every_steps=50"];
    succeed([&["submit", "--master", &url, &job][..], &digits::arguments(&settings), &saves].concat());
    until("a checkpoint is there", PATIENCE, || steps_done(&url) > 150);
    // A copy of one moment, as a snapshot of the file system would be.
    cluster.master.signal("STOP");
    copy(&at(&cluster, "data"), &at(&cluster, "copy"));
    cluster.master.signal("CONT");
    // The restart begins an era. The copy knows neither that era nor the checkpoints that follow.
    cluster.restart_ps(0);
    let copied = steps_done(&url);
    until("training after the loss", PATIENCE, || steps_done(&url) > copied + 200);

    cluster.restart_everything_after(|dir| {
        std::fs::remove_dir_all(dir.join("data")).unwrap();
        copy(&dir.join("copy"), &dir.join("data"));
    });
    succeed(["watch", "digits", "--master", &url]);
    let out = at(&cluster, "out");
    succeed(["fetch", "digits", "--master", &url, "--out", out.to_str().unwrap()]);
    assert!(model(&out) == model(calm.as_ref()), "other bits than an undisturbed run");
}
