//! Workers whose arithmetic rounds in different ways: those of one numerics class compute, and the
//! others stand by with a visible reason.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]
#![cfg(all(feature = "torch", target_arch = "x86_64"))]

use std::path::Path;

use crate::harness::{Cluster, Process, digits, ebb, metric, model, root, succeed, summary, text};
use serde_json::Value;

/// A network on libtorch that every machine trains in a second.
const JOB: [&str; 4] =
    ["--set", "model.builtin=mlp", "--set", "model.options={ engine = \"torch\", hidden = [64] }"];

fn sets(more: &[&str]) -> Vec<String> {
    let more = more.iter().flat_map(|set| ["--set", *set]);
    JOB.into_iter().chain(more).map(str::to_owned).collect()
}

fn job() -> std::path::PathBuf {
    root().join("examples/digits/job.toml")
}

/// Returns the model of one worker in one process.
fn alone(dir: &Path, arguments: &[&str], more: &[&str]) -> Vec<u8> {
    let out = dir.join("alone");
    let output = ebb(["run", "--device", "cpu", "--out"])
        .arg(&out)
        .arg(job())
        .args(arguments)
        .args(sets(more))
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", text(&output));
    model(&out)
}

fn status(cluster: &Cluster) -> Value {
    let output = ebb(["status", "--json", "--master", &cluster.url, "digits"]).output().unwrap();
    assert!(output.status.success(), "{}", text(&output));
    serde_json::from_slice(&output.stdout).unwrap()
}

/// Asks until the status is as wanted. The job may be on its way to the master.
fn wait_for(cluster: &Cluster, is_such: impl Fn(&Value) -> bool) -> Value {
    loop {
        let output = ebb(["status", "--json", "--master", &cluster.url, "digits"]).output().unwrap();
        let status: Value = serde_json::from_slice(&output.stdout).unwrap_or_default();
        if is_such(&status) {
            return status;
        }
        assert!(status["status"] != "failed" && status["status"] != "succeeded", "it ended: {status:#}");
        std::thread::park_timeout(std::time::Duration::from_millis(20));
    }
}

/// Starts a worker and waits until it takes part.
fn join(cluster: &mut Cluster, arguments: &[&str], environment: &[(&str, &str)]) {
    cluster.add_worker_as(arguments, &[environment, &[("EBB_METRICS", "127.0.0.1:0")]].concat());
    cluster.wait_for_workers();
}

/// Returns whether a worker has computed gradients.
fn trained(worker: &mut Process) -> bool {
    metric(&worker.metrics_url(), "ebb_worker_microbatches_total") > 0.0
}

#[test]
fn workers_with_other_instructions_or_threads_stand_by_and_the_bits_are_right() {
    let mut cluster = Cluster::start(2, 0);
    let reference = alone(cluster.dir.path(), &[], &["epochs=2"]);
    join(&mut cluster, &[], &[]);
    join(&mut cluster, &[], &[]);
    // Settings that each of these libraries accepts everywhere and that are nowhere the default.
    join(&mut cluster, &[], &[("ATEN_CPU_CAPABILITY", "default")]);
    join(&mut cluster, &[], &[("ONEDNN_MAX_CPU_ISA", "SSE41")]);
    join(&mut cluster, &[], &[("MKL_CBWR", "COMPATIBLE")]);
    join(&mut cluster, &["--threads", "2"], &[]);

    let out = cluster.dir.path().join("out");
    let output = cluster.submission(&job(), &out, &[]).args(sets(&["epochs=2"])).output().unwrap();
    assert!(output.status.success(), "{}", text(&output));
    assert!(model(&out) == reference, "other bits");
    let events = text(&output);
    assert_eq!(events.matches("stand by, because their results may differ").count(), 4, "{events}");
    for (worker, process) in cluster.workers.iter_mut().enumerate().skip(2) {
        assert!(!trained(process), "worker {worker} computed gradients");
        // One of them may have counted the records, and one exported the model.
        assert!(process.log().matches("task reported").count() <= 2, "worker {worker} computed");
    }
    let numerics = &summary(&out)["numerics"];
    assert_eq!((numerics.as_array().unwrap().len(), numerics[0]["version"].as_u64()), (1, Some(0)));
    assert_eq!(numerics[0]["class"], status(&cluster)["numerics_class"]);
}

#[test]
fn a_job_whose_class_is_gone_waits_and_goes_on_in_another_when_a_user_says_so() {
    let mut cluster = Cluster::of(&digits::program(), 2, 0);
    join(&mut cluster, &[], &[]);
    join(&mut cluster, &[], &[("MKL_CBWR", "COMPATIBLE")]);
    let (out, checkpoints) = (cluster.dir.path().join("out"), cluster.dir.path().join("ck"));
    let place = format!("checkpoint.url={}", checkpoints.display());
    let pace = r#"model.options={ of = "mlp", millis = 10, engine = "torch", hidden = [64] }"#;
    let settings = sets(&["epochs=15", &place, "checkpoint.every_steps=20", "model.builtin=paced", pace]);
    let mut following = cluster.submission(&job(), &out, &[]).args(settings).spawn().unwrap();
    let running = wait_for(&cluster, |status| status["checkpoint"].as_u64() >= Some(20));
    assert_eq!((&running["workers"], &running["workers_standby"]), (&1.into(), &1.into()));
    let idle = running["idle"].as_array().unwrap();
    let stranger = idle.iter().find(|idle| idle["why"] == "other_class").unwrap();
    assert_eq!(stranger["count"], 1);
    let other = stranger["numerics_class"].as_str().unwrap().to_owned();

    cluster.workers[0].signal("KILL");
    let waiting = wait_for(&cluster, |status| status["status"] == "pending");
    let reason = waiting["reason"].as_str().unwrap();
    assert!(reason.contains("workers (0 of 1 live) of numerics class"), "{reason}");
    assert!(reason.contains("ebb resume digits-1 --numerics CLASS"), "{reason}");
    let shown = succeed(["status", "--master", &cluster.url, "digits"]);
    assert!(shown.contains(": standing by, of another numerics class: "), "{shown}");

    succeed(["resume", "--master", &cluster.url, "--numerics", &other, "digits"]);
    assert!(following.wait().unwrap().success());
    let summary = summary(&out);
    let numerics = summary["numerics"].as_array().unwrap();
    assert_eq!(numerics.len(), 2, "{summary:#}");
    assert_eq!(numerics[1]["class"], other.as_str());
    assert_eq!(numerics[1]["version"].as_u64().unwrap() % 20, 0, "from a checkpoint on");
}

#[test]
fn portable_workers_are_of_one_class_with_whoever_is_held_to_the_same_instructions() {
    let mut cluster = Cluster::start(2, 0);
    let reference = alone(cluster.dir.path(), &["--numerics", "portable"], &["epochs=2"]);
    join(&mut cluster, &["--numerics", "portable"], &[]);
    let held = [("ATEN_CPU_CAPABILITY", "avx2"), ("ONEDNN_MAX_CPU_ISA", "AVX2"), ("MKL_CBWR", "AVX2")];
    join(&mut cluster, &[], &held);
    let mut out = cluster.dir.path().join("out");
    // One worker may finish a job before the other has begun. Then the test submits another job.
    for attempt in 0.. {
        out = cluster.dir.path().join(format!("out-{attempt}"));
        let settings = sets(&["epochs=2", "fleet.workers.min=2"]);
        let output = cluster.submission(&job(), &out, &[]).args(settings).output().unwrap();
        assert!(output.status.success(), "{}", text(&output));
        assert!(model(&out) == reference, "other bits");
        if cluster.workers.iter_mut().all(trained) {
            break;
        }
    }
    let facts = summary(&out)["numerics"][0]["facts"].as_str().unwrap().to_owned();
    for part in ["ATen AVX2", "oneDNN at most AVX2", "MKL AVX2"] {
        assert!(facts.contains(part), "{part} missing in {facts}");
    }
}

#[test]
fn any_class_takes_part_when_the_job_gives_up_its_bits() {
    let mut cluster = Cluster::start(2, 0);
    join(&mut cluster, &[], &[]);
    join(&mut cluster, &["--threads", "2"], &[]);
    let out = cluster.dir.path().join("out");
    let settings = sets(&["epochs=2", "fleet.workers.min=2", "numerics=any"]);
    let output = cluster.submission(&job(), &out, &[]).args(settings).output().unwrap();
    assert!(output.status.success(), "{}", text(&output));
    assert_eq!(summary(&out)["numerics"].as_array().unwrap().len(), 0);
}
