//! The model and its metrics do not depend on how many workers and ps train it, and on which of
//! them use a device.

use super::{Driver, trained_alone};
use crate::harness::{Cluster, ebb, ebb_path, model, root, summary, text};

#[test]
fn workers_ps_and_processes_on_devices_do_not_change_the_model() {
    let Some(driver) = Driver::of_any("no process used a device") else { return };
    let job = root().join("examples/digits/job.toml");
    let path = driver.path();
    let folder = tempfile::tempdir().unwrap();
    let out = |name: &str| folder.path().join(name);
    let metrics = "model.metrics=[\"accuracy\", \"top3\", \"f1\", \"confusion_matrix\"]";
    let sets = ["--set", "epochs=2", "--set", metrics];
    trained_alone(&job, &out("alone"), &sets);
    let has_the_bits_of_the_host = |name: &str| {
        assert!(model(&out(name)) == model(&out("alone")), "{name}: other bits");
        for key in ["model_sha256", "final", "confusion_matrix", "evaluations"] {
            assert_eq!(summary(&out(name))[key], summary(&out("alone"))[key], "{name}: another {key}");
        }
    };
    for (workers, ps) in [("1", "1"), ("3", "1"), ("1", "3"), ("3", "2")] {
        let name = format!("{workers} workers, {ps} ps");
        let mut run = ebb(["run", "--device", "cuda:0", "--ps-device", "cuda:0", "--workers", workers]);
        run.args(["--ps", ps, "--out"]).arg(out(&name)).arg(&job).args(sets);
        let output = run.env("LD_LIBRARY_PATH", &path).output().unwrap();
        assert!(output.status.success(), "{name}: {}", text(&output));
        has_the_bits_of_the_host(&name);
    }
    let environment = [("LD_LIBRARY_PATH", path.as_str())];
    let mut cluster = Cluster::with_environment(&ebb_path(), 0, 0, &environment);
    for (ps, worker) in [("cuda:0", "cuda:0"), ("cpu", "cuda:0"), ("cuda:0", "cpu")] {
        cluster.add_ps_on(ps);
        cluster.add_worker_as(&["--device", worker], &environment);
    }
    for ps in ["1", "2", "3"] {
        let name = format!("3 worker processes, {ps} ps");
        let of_job = format!("fleet.ps={ps}");
        let output = cluster.submit(&job, &out(&name), &[&sets[..], &["--set", &of_job]].concat());
        assert!(output.status.success(), "{name}: {}", text(&output));
        has_the_bits_of_the_host(&name);
    }
}
