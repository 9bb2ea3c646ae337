//! Both promises with real processes when the master dies: it is killed while a job trains, and
//! started again with its folder.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::process::Stdio;
use std::time::Duration;

use crate::harness::slow_disk::SlowDisk;
use crate::harness::{Cluster, digits, ebb, events, model, root, succeed, summary, text, told};

/// Steps in the user's events before each kill of the master.
const BETWEEN: usize = 40;

#[test]
fn a_master_that_dies_rewinds_nothing_and_does_not_change_the_model() {
    let job = root().join("examples/digits/job.toml");
    for mode in ["consistency.mode=sync", "consistency.mode=pipelined"] {
        let calm = tempfile::tempdir().unwrap();
        let calm_out = calm.path().join("out");
        // Long enough for all that the test asks while the job trains.
        let sets = ["epochs=20", mode];
        let args = ["run", "--workers", "1", "--ps", "1", "--out"];
        let output =
            ebb(args).arg(&calm_out).args(["--set", sets[0], "--set", mode]).arg(&job).output().unwrap();
        assert!(output.status.success(), "{}", text(&output));

        let mut cluster = Cluster::of(&digits::program(), 2, 2);
        let out = cluster.dir.path().join("out");
        let mut submission = cluster.submission(&job, &out, &digits::arguments(&sets));
        let mut child = submission.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
        for kill in 1..=2 {
            while told(&out, "train") < kill * BETWEEN {
                assert!(child.try_wait().unwrap().is_none(), "{mode}: the job ended before kill {kill}");
                std::thread::park_timeout(Duration::from_millis(5));
            }
            cluster.restart_master();
        }
        let output = child.wait_with_output().unwrap();
        assert!(output.status.success(), "{}", text(&output));
        assert!(model(&out) == model(&calm_out), "{mode}: other bits than an undisturbed run");
        let steps: Vec<u64> =
            events(&out, "train").iter().map(|event| event["step"].as_u64().unwrap()).collect();
        assert!(steps.is_sorted_by(|one, next| one < next), "{mode}: steps were trained again: {steps:?}");
        assert_eq!(summary(&out)["samples_applied"], summary(&calm_out)["samples_applied"]);

        // A job that ended is still known after another restart.
        cluster.restart_master();
        let listed = succeed(["jobs", "--json", "--master", &cluster.url]);
        assert!(listed.contains(r#""status":"succeeded""#), "{listed}");
        let again = cluster.dir.path().join("again");
        succeed(["fetch", "1", "--master", &cluster.url, "--out", again.to_str().unwrap()]);
        assert!(model(&again) == model(&out));
    }
}

/// Longer than the silence after which a master takes a process for dead (`death`, 5 s).
const STOPPED: Duration = Duration::from_secs(8);

#[test]
fn a_master_that_stood_still_listens_before_it_declares_anybody_dead() {
    let mut cluster = Cluster::of(&digits::program(), 2, 2);
    let out = cluster.dir.path().join("out");
    let job = root().join("examples/digits/job.toml");
    let mut submission = cluster.submission(&job, &out, &digits::arguments(&["epochs=80"]));
    let mut child = submission.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let mut until = |what: &str, is_so: &mut dyn FnMut() -> bool| {
        while !is_so() {
            assert!(child.try_wait().unwrap().is_none(), "the job ended before {what}");
            std::thread::park_timeout(Duration::from_millis(5));
        }
    };
    until("it trains", &mut || told(&out, "train") >= BETWEEN);
    let before = told(&out, "train");
    cluster.master.signal("STOP");
    // A fixed wait, not one for a state: the master stands still this long.
    let (_sender, never) = std::sync::mpsc::channel::<()>();
    assert!(never.recv_timeout(STOPPED).is_err());
    cluster.master.signal("CONT");
    until("it goes on", &mut || told(&out, "train") >= before + 4 * BETWEEN);
    let status = succeed(["status", "1", "--json", "--master", &cluster.url]);
    succeed(["cancel", "1", "--force", "--master", &cluster.url]);
    let _ = child.wait();
    for lost in ["sent no heartbeat", "closed its heartbeat stream", "lease lost"] {
        assert!(!cluster.master.log().contains(lost), "{lost}:\n{}", cluster.master.log());
    }
    let status: serde_json::Value = serde_json::from_str(&status).unwrap();
    assert_eq!(status["leases_expired"], 0, "{status}");
    cluster.workers.clear();
}

#[test]
fn a_disk_that_does_not_answer_holds_up_nobody_but_who_waits_for_it() {
    let folder = tempfile::tempdir().unwrap();
    // Folders into which files are moved when a job is submitted, and when its model arrives.
    let Some(disk) = SlowDisk::new(folder.path(), &["input", "output"]) else { return };
    let program = &crate::harness::ebb_path();
    let cluster = Cluster::with_environment(program, 2, 1, &disk.environment());
    let out = cluster.dir.path().join("out");
    let mut submission = cluster.submission(&root().join("examples/digits/job.toml"), &out, &[]);
    let child = submission.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    for name in ["input", "output"] {
        disk.wait_for(name);
        // Answered while the folder does not exist yet. The call takes the lock that heartbeats
        // take.
        succeed(["jobs", "--master", &cluster.url]);
        disk.open(name);
    }
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{}", text(&output));
    let log = cluster.master.log();
    assert!(!log.contains("sent no heartbeat"), "{log}");
}
