//! Devices that are named by their UUIDs: which device that is, and what is said when it is none or
//! several. The driver of the tests gives device N the UUID that ends in N.

use std::fs;

use super::{Driver, computing, ends, is_real, nvrtc, refused, skipped_on_a_device, trained_alone};
use crate::harness::skip::{Lacks, skipped};
use crate::harness::{Cluster, ebb, ebb_path, metric, root, summary, text};
use crate::observed::numbers;

/// UUID of the first device, without its last letter.
const BEGINNING: &str = "00000000-0000-0000-0000-00000000000";

#[test]
fn a_ps_and_a_worker_are_on_the_devices_whose_uuids_were_named() {
    let Some(driver) = Driver::of_tests("no process used a device") else { return };
    let driver = driver.with_nvml();
    let job = root().join("examples/digits/job.toml");
    let path = driver.path();
    let environment =
        [("LD_LIBRARY_PATH", path.as_str()), ("EBB_TEST_DEVICES", "3"), ("EBB_METRICS", "127.0.0.1:0")];
    let mut cluster = Cluster::with_environment(&ebb_path(), 0, 0, &environment);
    cluster.add_ps_on(&format!("GPU-{BEGINNING}1"));
    cluster.add_worker_as(&["--device", &format!("MIG-{BEGINNING}2")], &environment);
    cluster.add_worker_as(&["--exchange-device", &format!("GPU-{BEGINNING}1")], &environment);
    let sets = ["--set", "epochs=2", "--set", "fleet.ps=1"];
    let expected = trained_alone(&job, &cluster.dir.path().join("alone"), &sets);
    cluster.wait_for_workers();
    let crossing = cluster.workers[1].metrics_url();
    // One worker may end a job before the other one computes. Then the test submits another job.
    let has_crossed = (0..10).any(|attempt| {
        let out = cluster.dir.path().join(format!("out-{attempt}"));
        let output = cluster.submit(&job, &out, &sets);
        assert!(output.status.success(), "{}", text(&output));
        assert_eq!(summary(&out)["model_sha256"], expected);
        metric(&crossing, "ebb_worker_push_device_bytes_total") > 0.0
    });
    assert!(has_crossed, "no gradients crossed on the device of the ps");
    let log = cluster.ps[0].log();
    assert!(log.contains("partitions lie on a device") && log.contains("cuda:1"), "{log}");
    let watched = numbers(&cluster.workers[0].metrics_url());
    let watched: Vec<_> = watched.keys().filter(|name| name.starts_with("ebb_device_lost")).collect();
    assert_eq!(watched, ["ebb_device_lost{device=\"cuda:2\"}"]);
}

#[test]
fn a_uuid_that_no_device_or_several_have_is_refused_with_what_to_write() {
    if is_real() {
        return skipped_on_a_device();
    }
    let (driver, out) = (Driver::new(), tempfile::tempdir().unwrap());
    let path = ("LD_LIBRARY_PATH", driver.0.path().to_str().unwrap());
    let two = [path, ("EBB_TEST_DEVICES", "2")];
    let hidden = format!("MIG-{BEGINNING}7");
    let works = format!("put CUDA_VISIBLE_DEVICES={hidden} before the command");
    let twice = format!("GPU-{BEGINNING}1,MIG-{BEGINNING}1");
    for (device, expected) in [
        ("GPU-0", format!("several devices begin so: cuda:0 is {BEGINNING}0, cuda:1 is {BEGINNING}1")),
        ("GPU-f", format!("this process sees others: cuda:0 is {BEGINNING}0, cuda:1 is {BEGINNING}1")),
        (hidden.as_str(), works),
        ("MIG-0", "nvidia-smi -L".to_owned()),
    ] {
        let of_ps = ends(device, &two);
        assert!(of_ps.contains(&expected) && of_ps.contains(device), "{of_ps}");
        if !cfg!(feature = "torch") && nvrtc().is_none() {
            skipped(Lacks::Package, "no NVRTC: no worker looked at devices");
            continue;
        }
        let path = driver.path();
        for command in computing(device, out.path()) {
            let said = refused(command, &[("LD_LIBRARY_PATH", path.as_str()), two[1]]);
            assert!(said.contains(&expected) && said.contains(device), "{said}");
        }
    }
    let said = ends(&twice, &two);
    assert!(said.contains("a ps has one device, found"), "{said}");
    let none = ends("GPU-0", &[path, ("EBB_TEST_DEVICES", "0")]);
    assert!(none.contains("device GPU-0: no CUDA device: the driver shows none"), "{none}");
}

#[test]
fn the_ps_of_a_run_are_on_the_device_whose_uuid_was_named() {
    let Some(driver) = Driver::of_tests("no ps used a device") else { return };
    let folder = tempfile::tempdir().unwrap();
    let (path, job) = (driver.path(), root().join("examples/digits/job.toml"));
    // A ps that may take too little names its device when it refuses.
    for (uuid, expected) in [("1", "cuda:1"), ("7", "--ps-device GPU-")] {
        let mut run = ebb(["run", "--device", "cpu", "--ps-device-bytes-max", "4KiB", "--ps-device"]);
        run.arg(format!("GPU-{BEGINNING}{uuid}")).arg("--out").arg(folder.path().join(uuid)).arg(&job);
        let output = run.env("LD_LIBRARY_PATH", &path).env("EBB_TEST_DEVICES", "2").output().unwrap();
        assert!(!output.status.success(), "{}", text(&output));
        assert!(text(&output).contains(expected), "{}", text(&output));
    }
}

#[test]
fn a_process_of_a_script_sees_the_device_whose_uuid_was_named() {
    if is_real() {
        return skipped_on_a_device();
    }
    let (driver, dir) = (Driver::new(), tempfile::tempdir().unwrap());
    let (script, out) = (dir.path().join("train.py"), dir.path().join("out"));
    fs::write(&script, "echo \"sees $CUDA_VISIBLE_DEVICES as $EBBFLOW_DEVICE\"").unwrap();
    let device = format!("GPU-{BEGINNING}1");
    let mut run = ebb(["run", "--python", "sh", "--device", &device, "--out"]);
    run.arg(&out).arg(&script).env_remove("CUDA_VISIBLE_DEVICES");
    run.env("LD_LIBRARY_PATH", driver.0.path()).env("EBB_TEST_DEVICES", "2");
    // The script never joins, so the run ends with an error.
    let said = text(&run.output().unwrap());
    let log = fs::read_to_string(out.join("logs/worker-0.log")).unwrap_or_default();
    assert_eq!(log, "sees 1 as cuda:1\n", "{said}");
}
