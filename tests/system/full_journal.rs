//! A journal that cannot be written, with real processes: the disk under the master's data folder
//! is full, or etcd's quota is used up. Training goes on, watchers of the master see the fault, and
//! the journal continues by itself once there is room.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::path::Path;
use std::process::{Child, Stdio};
use std::time::Duration;

use crate::harness::etcd::Etcd;
use crate::harness::machine::until;
use crate::harness::tmpfs::Tmpfs;
use crate::harness::{Cluster, digits, ebb, events, fail, metric, root, succeed, text, told};

/// Deadline of every wait, far longer than needed.
const PATIENCE: Duration = Duration::from_secs(120);

/// Setting for metrics at any free port of this machine.
const METRICS: (&str, &str) = ("EBB_METRICS", "127.0.0.1:0");

/// Settings of a job that outlasts the test: 12 minutes.
const SETS: [&str; 2] = ["epochs=400", "batch.micro=8"];

/// Returns the steps of the job that all ps have applied, as the master knows.
fn steps(url: &str) -> u64 {
    let status = succeed(["status", "--json", "1", "--master", url]);
    let status: serde_json::Value = serde_json::from_str(status.trim()).unwrap();
    status["steps_done"].as_u64().unwrap_or_else(|| panic!("no steps_done in {status}"))
}

fn is_ready(url: &str) -> bool {
    ebb(["health", url, "--ready", "--timeout", "60s"]).output().unwrap().status.success()
}

/// Submits a job, and returns the user's command that follows it.
fn submitted(cluster: &Cluster, out: &Path) -> Child {
    let mut submission =
        cluster.submission(&root().join("examples/digits/job.toml"), out, &digits::arguments(&SETS));
    let child = submission.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    until("the job trains", PATIENCE, || told(out, "train") > 20);
    child
}

/// Checks what must hold while the journal cannot be written. `keep` keeps it in this state.
fn goes_on_without_a_journal(cluster: &Cluster, metrics: &str, words: &str, keep: &mut dyn FnMut()) {
    until("the master says that its journal is overdue, because it cannot be written", PATIENCE, || {
        keep();
        metric(metrics, "ebb_master_journal_overdue_seconds") > 0.0
            && metric(metrics, "ebb_master_journal_failures_total") > 0.0
    });
    until("the master is not ready", PATIENCE, || {
        keep();
        !is_ready(&cluster.url)
    });
    succeed(["health", "--timeout", "60s", &cluster.url]);
    let before = steps(&cluster.url);
    until("it trains on", PATIENCE, || {
        keep();
        steps(&cluster.url) > before + 20
    });
    let job = root().join("examples/digits/job.toml");
    let refused =
        ebb(["submit", "--master", &cluster.url, "--set", "name=second"]).arg(job).output().unwrap();
    let refused = text(&refused);
    assert!(
        refused.contains("has not been able to write its journal") && refused.contains(words),
        "{refused}"
    );
    assert!(refused.contains("the master refused the job"), "{refused}");
}

/// Checks what must hold once there is room.
fn is_forgotten(cluster: &Cluster, metrics: &str, out: &Path) {
    until("the master is ready", PATIENCE, || is_ready(&cluster.url));
    // A slow disk may take some seconds for a write.
    until("its journal is not overdue", PATIENCE, || {
        metric(metrics, "ebb_master_journal_overdue_seconds") < 5.0
    });
    let before = told(out, "train");
    until("the user hears of more steps", PATIENCE, || told(out, "train") > before + 20);
}

/// Checks that the steps in the user's events are complete and in order, over all faults.
fn ended(cluster: &Cluster, mut child: Child, out: &Path) {
    succeed(["cancel", "1", "--force", "--master", &cluster.url]);
    let _ = child.wait();
    let told: Vec<_> = events(out, "train").iter().map(|event| event["step"].as_u64().unwrap()).collect();
    assert!(told.is_sorted_by(|one, next| one < next), "steps were told again: {told:?}");
    let missing = fail(["status", "2", "--master", &cluster.url]);
    assert!(missing.contains("no job `2`"), "{missing}");
}

#[test]
fn a_full_disk_under_the_journal_stops_no_training_and_is_forgotten_when_there_is_room() {
    let Some(mut disk) = Tmpfs::mount("8m") else { return };
    let (program, data) = (digits::program(), disk.path().join("data"));
    let mut cluster = Cluster::with_data(&program, Some(&data), 2, 1, &[METRICS]);
    let (metrics, out) = (cluster.master.metrics_url(), cluster.dir.path().join("out"));
    let child = submitted(&cluster, &out);
    // Repeated, because a failed write frees room for the next.
    goes_on_without_a_journal(&cluster, &metrics, "No space left on device", &mut || disk.fill());
    disk.free();
    is_forgotten(&cluster, &metrics, &out);
    // The next start has what was written after that.
    cluster.restart_master();
    let before = told(&out, "train");
    until("the next start goes on", PATIENCE, || told(&out, "train") > before + 20);
    ended(&cluster, child, &out);
}

#[test]
fn an_etcd_without_room_stops_no_training_and_is_forgotten_when_it_has_some() {
    let quota = 16 << 20;
    let Some(etcd) = Etcd::start_with(&["--quota-backend-bytes", &quota.to_string()]) else { return };
    let mut cluster = Cluster::elected(&digits::program(), &etcd, "30s", 2, 1, &[METRICS]);
    let metrics = cluster.master.metrics_url();
    cluster.url = cluster.url.split(',').next().unwrap().to_owned();
    let out = cluster.dir.path().join("out");
    let child = submitted(&cluster, &out);
    // base64 of 768 KiB under the key `x`. Each write takes as much again.
    let put = format!(r#"{{"key":"eA==","value":"{}"}}"#, "AAAA".repeat(256 << 10));
    while !etcd.call("/v3/kv/put", &put).contains("database space exceeded") {}
    goes_on_without_a_journal(&cluster, &metrics, "database space exceeded", &mut || ());
    let answer = etcd.call("/v3/kv/deleterange", r#"{"key":"eA=="}"#);
    let revision = answer.split(r#""revision":""#).nth(1).and_then(|rest| rest.split('"').next());
    let compaction = format!(r#"{{"revision":"{}","physical":true}}"#, revision.expect("a revision"));
    etcd.call("/v3/kv/compaction", &compaction);
    etcd.call("/v3/maintenance/defragment", "{}");
    // An alarm belongs to a member, and is disarmed by its id.
    let alarms = etcd.call("/v3/maintenance/alarm", r#"{"action":"GET"}"#);
    let member = alarms.split(r#""memberID":""#).nth(1).and_then(|rest| rest.split('"').next());
    let member = member.unwrap_or_else(|| panic!("no alarm in {alarms}"));
    let disarm = format!(r#"{{"action":"DEACTIVATE","memberID":"{member}","alarm":"NOSPACE"}}"#);
    etcd.call("/v3/maintenance/alarm", &disarm);
    is_forgotten(&cluster, &metrics, &out);
    ended(&cluster, child, &out);
}
