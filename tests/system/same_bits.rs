//! The second promise without faults: the trained weights do not depend on how many processes
//! trained them.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::path::Path;

use crate::harness::{self, Cluster, Process, ebb, metric, model, root, summary, text};

const SHORT: [&str; 2] = ["--set", "epochs=2"];

fn run(workers: &str, ps: &str, more: &[&str]) -> (Vec<u8>, serde_json::Value) {
    let out = tempfile::tempdir().unwrap();
    let output = ebb(["run", "--workers", workers, "--ps", ps, "--out"])
        .arg(out.path())
        .arg(job())
        .args(SHORT)
        .args(more)
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", text(&output));
    (model(out.path()), summary(out.path()))
}

fn job() -> std::path::PathBuf {
    root().join("examples/digits/job.toml")
}

#[test]
fn workers_ps_and_processes_do_not_change_the_model() {
    let metrics = ["--set", "model.metrics=[\"accuracy\", \"top3\", \"f1\", \"confusion_matrix\"]"];
    let (reference, measured) = run("1", "1", &metrics);
    assert_eq!(measured["status"], "succeeded");
    let matrix: Vec<Vec<u64>> = serde_json::from_value(measured["confusion_matrix"].clone()).unwrap();
    let (all, right) =
        (matrix.iter().flatten().sum::<u64>(), (0..10).map(|class| matrix[class][class]).sum::<u64>());
    assert_eq!(measured["final"]["accuracy"], right as f64 / all as f64);
    for (workers, ps) in [("3", "1"), ("1", "3"), ("3", "2")] {
        assert!(run(workers, ps, &[]).0 == reference, "{workers} workers, {ps} ps: other bits");
    }
    let cluster = Cluster::start(3, 3);
    for ps in ["1", "3"] {
        let out = cluster.dir.path().join(format!("out-{ps}"));
        let ps_of_job = format!("fleet.ps={ps}");
        let sets = [&["--set", "epochs=2", "--set", &ps_of_job], &metrics[..]].concat();
        let output = cluster.submit(&job(), &out, &sets);
        assert!(output.status.success(), "{}", text(&output));
        assert!(model(&out) == reference, "3 worker processes, {ps} ps: other bits");
        for key in ["final", "confusion_matrix", "evaluations"] {
            assert_eq!(summary(&out)[key], measured[key], "3 worker processes, {ps} ps: other metrics");
        }
    }
}

#[test]
fn norms_over_the_whole_model_do_not_depend_on_how_many_ps_hold_it() {
    let clipped = ["--set", "optimizer.clip_norm=0.2"];
    let lamb = ["--set", "optimizer.kind=lamb", "--set", "optimizer.learning_rate=0.01"];
    let plain = run("1", "1", &[]).0;
    for more in [&clipped[..], &lamb[..]] {
        let reference = run("1", "1", more).0;
        assert!(reference != plain, "{more:?} must show in the weights");
        for (workers, ps) in [("2", "2"), ("1", "3")] {
            assert!(
                run(workers, ps, more).0 == reference,
                "{more:?}, {workers} workers, {ps} ps: other bits"
            );
        }
        let cluster = Cluster::start(3, 2);
        let out = cluster.dir.path().join("out");
        let sets = [&["--set", "epochs=2", "--set", "fleet.ps=3"], more].concat();
        let output = cluster.submit(&job(), &out, &sets);
        assert!(output.status.success(), "{}", text(&output));
        assert!(model(&out) == reference, "{more:?}, 2 worker and 3 ps processes: other bits");
    }
}

#[test]
fn embedded_tcp_unix_sockets_and_shared_memory_give_the_same_bits() {
    every_way(&[]);
}

#[test]
fn a_16_bit_exchange_has_its_own_bits_and_keeps_them() {
    let f32 = run("1", "1", &[]).0;
    let bf16 = every_way(&["--set", "exchange.dtype=bf16"]);
    let f16 = ["--set", "exchange.dtype=f16"];
    let (one, more) = (run("1", "1", &f16).0, run("3", "2", &f16).0);
    assert!(one == more, "f16, 3 workers, 2 ps: other bits");
    assert!(bf16 != f32 && one != f32 && one != bf16, "the type of the exchange must show in the weights");
    for (workers, ps) in [("1", "1"), ("3", "1"), ("1", "3")] {
        let found = run(workers, ps, &["--set", "exchange.dtype=bf16"]).0;
        assert!(found == bf16, "bf16, {workers} workers, {ps} ps: other bits");
    }
    // An exported model has the optimizer's weights, not the rounded ones of the exchange.
    let tensors = safetensors::SafeTensors::deserialize(&bf16).unwrap();
    let upper_half = |value: &[u8; 4]| value[0] == 0 && value[1] == 0;
    for (name, tensor) in tensors.tensors() {
        assert_eq!(tensor.dtype(), safetensors::Dtype::F32, "{name}");
        let values = tensor.data().as_chunks::<4>().0;
        assert!(values.iter().any(|value| !upper_half(value)), "`{name}` was rounded");
    }
}

/// Trains over all kinds of connections between workers and ps. Returns the model, which is always
/// the same.
fn every_way(more: &[&str]) -> Vec<u8> {
    let (reference, _) = run("2", "2", more);
    let said = |cluster: &Cluster, worker: usize, what| cluster.workers[worker].log().contains(what);
    for sockets in [["tcp", "tcp"], ["unix", "unix"], ["nearest", "nearest"], ["nearest", "tcp"]] {
        let mut cluster = Cluster::start(2, 0);
        for sockets in sockets {
            let log = ("EBB_LOG", "info,worker=debug,net=debug");
            cluster.add_worker_with(&[("EBB_SOCKETS", sockets), log, ("EBB_METRICS", "127.0.0.1:0")]);
        }
        let urls: Vec<_> = cluster.workers.iter_mut().map(Process::metrics_url).collect();
        let sets = ["--set", "epochs=2", "--set", "fleet.ps=2", "--set", "fleet.workers.min=2"];
        let sets = [&sets, more].concat();
        // One worker may finish a job before the other one computes. Then the test submits another
        // job.
        for attempt in 0.. {
            let out = cluster.dir.path().join(format!("out-{attempt}"));
            let output = cluster.submit(&job(), &out, &sets);
            assert!(output.status.success(), "{}", text(&output));
            assert!(model(&out) == reference, "{sockets:?}, {more:?}: other bits");
            if urls.iter().all(|url| metric(url, "ebb_worker_microbatches_total") > 0.0) {
                break;
            }
        }
        for (worker, sockets) in sockets.iter().enumerate() {
            let said = ["Unix socket", "by shared memory"].map(|what| said(&cluster, worker, what));
            let expected =
                [*sockets != "tcp", *sockets == "nearest"].map(|way| way && cfg!(target_os = "linux"));
            assert_eq!(said, expected, "worker {worker} was told {sockets}");
        }
    }
    reference
}

#[test]
fn pipelined_has_its_own_bits_and_keeps_them() {
    let more = ["--set", "consistency.mode=pipelined", "--set", "consistency.delay=2"];
    let (reference, summary) = run("1", "1", &more);
    assert!(run("3", "2", &more).0 == reference, "3 workers, 2 ps: other bits");
    assert!(run("1", "1", &[]).0 != reference, "a delay of 2 steps must show in the weights");
    assert_eq!(summary["samples_applied"], 2 * 1438);
}

#[test]
fn another_seed_gives_another_model() {
    assert!(run("1", "1", &["--set", "seed=1"]).0 != run("1", "1", &["--set", "seed=2"]).0);
}

#[test]
fn arrival_modes_apply_every_record_once() {
    for mode in ["bounded", "async"] {
        let (_, summary) = run("3", "2", &["--set", &format!("consistency.mode={mode}")]);
        assert_eq!(summary["samples_applied"], 2 * 1438, "{mode}");
        assert_eq!(summary["status"], "succeeded", "{mode}");
    }
}

#[test]
fn the_size_of_a_microbatch_hardly_matters_on_the_pure_engine() {
    let loss = |micro: &str| {
        let out = tempfile::tempdir().unwrap();
        let sets = ["--set", "epochs=1", "--set", "batch.effective=128", "--set", micro];
        let output = ebb(["run", "--out"]).arg(out.path()).arg(job()).args(sets).output().unwrap();
        assert!(output.status.success(), "{}", text(&output));
        let evaluation = harness::events(Path::new(out.path()), "eval").pop().expect("one evaluation");
        evaluation["loss"].as_f64().unwrap()
    };
    let (small, large) = (loss("batch.micro=32"), loss("batch.micro=128"));
    assert!((small - large).abs() <= 1e-4, "micro 32: {small}, micro 128: {large}");
}
