//! Both promises with real processes when the master dies: it is killed while a job trains, and started again with its folder.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod harness;

use std::process::Stdio;
use std::time::Duration;

use harness::{Cluster, ebb, events, model, root, succeed, summary, text};

/// Steps that are told before each time the master is killed.
const BETWEEN: usize = 40;

#[test]
fn a_master_that_dies_rewinds_nothing_and_does_not_change_the_model() {
    let job = root().join("examples/digits/job.toml");
    for mode in ["consistency.mode=sync", "consistency.mode=pipelined"] {
        let calm = tempfile::tempdir().unwrap();
        let calm_out = calm.path().join("out");
        let sets = ["--set", "epochs=100", "--set", mode];
        let args = ["run", "--workers", "1", "--ps", "1", "--out"];
        let output = ebb(args).arg(&calm_out).args(sets).arg(&job).output().unwrap();
        assert!(output.status.success(), "{}", text(&output));

        let mut cluster = Cluster::start(2, 2);
        let out = cluster.dir.path().join("out");
        let mut submission = cluster.submission(&job, &out, &sets);
        let mut child = submission.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
        for kill in 1..=2 {
            while !out.join("metrics.jsonl").exists() || events(&out, "train").len() < kill * BETWEEN {
                assert!(child.try_wait().unwrap().is_none(), "{mode}: the job ended before kill {kill}");
                std::thread::park_timeout(Duration::from_millis(5));
            }
            cluster.restart_master();
        }
        let output = child.wait_with_output().unwrap();
        assert!(output.status.success(), "{}", text(&output));
        assert!(model(&out) == model(&calm_out), "{mode}: other bits than an undisturbed run");
        let told: Vec<u64> =
            events(&out, "train").iter().map(|event| event["step"].as_u64().unwrap()).collect();
        assert!(told.is_sorted_by(|one, next| one < next), "{mode}: steps were trained again: {told:?}");
        assert_eq!(summary(&out)["samples_applied"], summary(&calm_out)["samples_applied"]);

        // What ended is still there after another restart.
        cluster.restart_master();
        let listed = succeed(["jobs", "--json", "--master", &cluster.url]);
        assert!(listed.contains(r#""status":"succeeded""#), "{listed}");
        let again = cluster.dir.path().join("again");
        succeed(["fetch", "1", "--master", &cluster.url, "--out", again.to_str().unwrap()]);
        assert!(model(&again) == model(&out));
    }
}
