//! Several masters, with a real etcd and real processes: the leader is killed, or stands still,
//! while a job trains.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]
#![expect(clippy::disallowed_methods, reason = "how long a takeover took is printed for people")]

use std::path::Path;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use crate::harness::etcd::Etcd;
use crate::harness::{
    Cluster, LEADS, STANDS_BY, candidate, digits, ebb, ebb_path, events, fail, model, root, succeed, summary,
    text, told,
};
use net::channel::{Dialer, Purpose};
use proto::pb;
use proto::status::{Failure, Kind};

/// Steps in the user's events before and after each fault.
const BETWEEN: usize = 40;

/// Twice the default, so that a busy machine renews it in time.
const TTL: &str = "10s";

fn wait_for_steps(child: &mut Child, out: &Path, count: usize) {
    while told(out, "train") < count {
        assert!(child.try_wait().unwrap().is_none(), "the job ended before it told {count} steps");
        std::thread::park_timeout(Duration::from_millis(5));
    }
}

/// Trains `job` without faults, and again with `disturb`, which gets the cluster, the user's
/// command and its folder. Compares the two.
fn same_as_calm(etcd: &Etcd, mode: &str, disturb: impl FnOnce(&mut Cluster, &mut Child, &Path)) -> Cluster {
    let job = root().join("examples/digits/job.toml");
    let calm = tempfile::tempdir().unwrap();
    let calm_out = calm.path().join("out");
    // Long enough for all that a test asks while the job trains.
    let sets = ["epochs=20", mode];
    let args = ["run", "--workers", "1", "--ps", "1", "--out"];
    let output = ebb(args).arg(&calm_out).args(["--set", sets[0], "--set", mode]).arg(&job).output().unwrap();
    assert!(output.status.success(), "{}", text(&output));

    let mut cluster = Cluster::elected(&digits::program(), etcd, TTL, 2, 2, &[]);
    let out = cluster.dir.path().join("out");
    let mut submission = cluster.submission(&job, &out, &digits::arguments(&sets));
    let mut child = submission.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    wait_for_steps(&mut child, &out, BETWEEN);
    disturb(&mut cluster, &mut child, &out);
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{}", text(&output));
    assert!(model(&out) == model(&calm_out), "{mode}: other bits than an undisturbed run");
    let steps: Vec<u64> = events(&out, "train").iter().map(|event| event["step"].as_u64().unwrap()).collect();
    assert!(steps.is_sorted_by(|one, next| one < next), "{mode}: steps were trained again: {steps:?}");
    assert_eq!(summary(&out)["samples_applied"], summary(&calm_out)["samples_applied"]);
    assert_eq!(summary(&out)["model_sha256"], summary(&calm_out)["model_sha256"]);
    cluster
}

#[test]
fn a_standby_takes_over_from_a_leader_that_dies_and_does_not_change_the_model() {
    for mode in ["consistency.mode=sync", "consistency.mode=pipelined"] {
        let Some(etcd) = Etcd::start() else { return };
        let cluster = same_as_calm(&etcd, mode, |cluster, child, out| {
            let killed = Instant::now();
            cluster.master.signal("KILL");
            let standby = cluster.standby.as_mut().unwrap();
            standby.wait_for(LEADS);
            let elected = killed.elapsed();
            wait_for_steps(child, out, told(out, "train") + BETWEEN);
            println!(
                "{mode}: a standby led {elected:?} after the leader died, with a TTL of {TTL}; {BETWEEN} steps were \
                      told {:?} after it",
                killed.elapsed()
            );
        });
        // The third leader has the input files of the first leader and the results of the second.
        let mut third = candidate(&ebb_path(), cluster.dir.path(), "third.log", &etcd, TTL);
        let url = third.url();
        third.wait_for(STANDS_BY);
        cluster.standby.as_ref().unwrap().signal("TERM");
        third.wait_for(LEADS);
        let listed = succeed(["jobs", "--json", "--master", &url]);
        assert!(listed.contains(r#""status":"succeeded""#), "{listed}");
        let again = cluster.dir.path().join("again");
        succeed(["fetch", "digits", "--master", &url, "--out", again.to_str().unwrap()]);
        assert!(model(&again) == model(&cluster.dir.path().join("out")));
    }
}

/// Asks the master at `url` for its jobs.
fn ask(url: &str) -> Result<(), Failure> {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    runtime.block_on(async {
        let channel = Dialer::tcp().channel(url, Purpose::Control)?;
        let mut jobs = pb::jobs_client::JobsClient::new(channel);
        jobs.list(pb::ListRequest::default()).await.map(drop).map_err(Failure::from)
    })
}

#[test]
fn a_leader_that_stood_still_for_too_long_neither_answers_nor_writes() {
    let Some(etcd) = Etcd::start() else { return };
    same_as_calm(&etcd, "consistency.mode=sync", |cluster, child, out| {
        let urls: Vec<String> = cluster.url.split(',').map(str::to_owned).collect();
        assert_eq!(ask(&urls[0]), Ok(()));
        let refused = ask(&urls[1]).unwrap_err();
        assert!(refused.kind == Kind::StandingBy && refused.message.contains(&urls[0]), "{refused}");
        // A supervisor that restarts dead processes leaves a standby alone. A load balancer sends
        // work to the leader.
        succeed(["health", "--timeout", "60s", "--ready", &urls[0]]);
        succeed(["health", "--timeout", "60s", &urls[1]]);
        assert!(fail(["health", "--timeout", "60s", "--ready", &urls[1]]).contains("not ready"));

        cluster.master.signal("STOP");
        let standby = cluster.standby.as_mut().unwrap();
        standby.wait_for(LEADS);
        assert_eq!(ask(&urls[1]), Ok(()));
        succeed(["health", "--timeout", "60s", "--ready", &urls[1]]);
        wait_for_steps(child, out, told(out, "train") + BETWEEN);
        cluster.master.signal("CONT");
        // From the first moment on, even before the master notices.
        loop {
            let failure = ask(&urls[0]).expect_err("a leader of the past answered");
            if failure.kind == Kind::StandingBy && failure.message.contains(&urls[1]) {
                break;
            }
        }
        cluster.master.wait_for("this master no longer leads");
        assert!(cluster.standby.as_mut().unwrap().child.try_wait().unwrap().is_none());
        assert_eq!(ask(&urls[1]), Ok(()), "the new leader was disturbed");
        // It is a standby like any other.
        cluster.master.wait_for(STANDS_BY);
    });
}

#[test]
fn a_master_with_another_data_folder_is_refused() {
    let Some(etcd) = Etcd::start() else { return };
    let cluster = Cluster::elected(&ebb_path(), &etcd, TTL, 0, 0, &[]);
    let elsewhere = cluster.dir.path().join("elsewhere").display().to_string();
    let args = ["master", "--listen", "127.0.0.1:0", "--data-dir", &elsewhere, "--etcd", &etcd.url];
    let said = fail(args);
    assert!(said.contains("elsewhere") && said.contains("--etcd-prefix"), "{said}");
}
