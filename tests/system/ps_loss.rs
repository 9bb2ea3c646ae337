//! Both promises with real processes when a ps dies: it is killed while a job trains, and a ps with
//! its name starts without its data.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::Duration;

use crate::harness::oracle::Oracle;
use crate::harness::{self, Cluster, digits, events, model, root, summary, text, told};

/// Steps in the user's events before the ps is killed.
const BEFORE: usize = 60;

/// Runs a job. Once it trains, ps 1 is killed and started again at another port. Returns the job's
/// folder.
fn run_with_a_loss(cluster: &mut Cluster, job: &Path, more: &[&str]) -> PathBuf {
    let out = cluster.dir.path().join("out");
    let mut submission = cluster.submission(job, &out, more);
    let child = submission.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    let child = wait_for_steps(child, &out);
    cluster.restart_ps(1);
    let output = child.wait_with_output().unwrap();
    println!("{}", summary(&out));
    assert!(output.status.success(), "{}", text(&output));
    out
}

fn wait_for_steps(mut child: Child, out: &Path) -> Child {
    while told(out, "train") < BEFORE {
        assert!(child.try_wait().unwrap().is_none(), "the job ended before it told {BEFORE} steps");
        std::thread::park_timeout(Duration::from_millis(5));
    }
    child
}

#[test]
fn a_ps_that_dies_does_not_change_the_model() {
    let job = root().join("examples/digits/job.toml");
    for mode in ["consistency.mode=sync", "consistency.mode=pipelined"] {
        let sets = ["epochs=15", "fleet.ps=2", mode];
        let calm = tempfile::tempdir().unwrap();
        let calm_out = calm.path().join("out");
        let args = ["run", "--workers", "1", "--ps", "1", "--set", sets[0], "--set", mode, "--out"];
        let output = harness::ebb(args).arg(&calm_out).arg(&job).output().unwrap();
        assert!(output.status.success(), "{}", text(&output));
        let mut cluster = Cluster::of(&digits::program(), 2, 2);
        let out = run_with_a_loss(&mut cluster, &job, &digits::arguments(&sets));
        assert!(model(&out) == model(&calm_out), "{mode}: other bits than an undisturbed run");
        let told: Vec<_> = events(&out, "train").iter().map(|event| event["step"].clone()).collect();
        let begun = told.iter().filter(|step| **step == told[0]).count();
        assert_eq!(begun, 2, "{mode}: it did not start again");
        assert_eq!(summary(&out)["samples_applied"], summary(&calm_out)["samples_applied"]);
    }
}

#[test]
fn a_ps_that_dies_costs_no_record_and_doubles_none() {
    let program = harness::example("oracle");
    // 5 s at its pace, so that it still trains when the ps is killed.
    let oracle = Oracle::new(8, Some(10));
    for mode in ["bounded", "async"] {
        let mut cluster = Cluster::of(&program, 3, 2);
        let mode_set = format!("consistency.mode={mode}");
        let sets = ["--set", "fleet.ps=3", "--set", &mode_set];
        let out = run_with_a_loss(&mut cluster, &oracle.job(), &sets);
        oracle.check(&out, mode);
        let dropped = summary(&out)["duplicates_dropped"].as_u64();
        assert!(dropped > Some(0), "{mode}: the others had it already");
    }
}
