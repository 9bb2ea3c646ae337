//! A ps on a CUDA device, as a process: the same bits as on the host, and what it says without a
//! device. The driver is the one of `kernels/tests/cuda/driver.cpp`; only the library path of these
//! processes leads to it.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use tempfile::TempDir;

use crate::harness::skip::{Lacks, skipped};
use crate::harness::{self, Cluster, events, model, root, summary, text};

#[allow(dead_code, unreachable_pub, reason = "shared with the tests of the kernels")]
#[path = "../../kernels/tests/cuda/library.rs"]
mod library;

/// Steps in the user's events before a ps is killed.
const BEFORE: usize = 60;

/// The folder of the driver.
struct Driver(TempDir);

impl Driver {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        library::build("driver.cpp", kernels::cuda::SOURCE, folder.path(), "libcuda.so");
        Self(folder)
    }

    /// Returns the library path that leads to the driver and to NVRTC.
    fn path(&self) -> String {
        format!("{}:{}", self.0.path().display(), nvrtc().unwrap_or_default())
    }
}

/// Returns the folder of NVRTC.
#[expect(clippy::disallowed_methods, reason = "the check says through the environment where NVRTC lies")]
fn nvrtc() -> Option<String> {
    std::env::var("EBB_NVRTC").ok().filter(|folder| !folder.is_empty())
}

/// Returns what a ps says that ends at once.
fn ends(device: &str, environment: &[(&str, &str)]) -> String {
    let mut command = harness::ebb(["ps", "--master", "127.0.0.1:9", "--device", device]);
    let output = command.envs(environment.iter().copied()).output().unwrap();
    let said = text(&output);
    assert!(!output.status.success() && !said.contains("panicked"), "{said}");
    said
}

#[test]
fn a_ps_without_a_device_says_what_is_missing_at_once() {
    let driver = Driver::new();
    let path = ("LD_LIBRARY_PATH", driver.0.path().to_str().unwrap());
    let said = ends("cuda:0", &[path, ("EBB_TEST_DEVICES", "0")]);
    assert!(
        said.contains("--device cuda:0") && said.contains("no CUDA device 0: the driver shows 0 devices"),
        "{said}"
    );
    let said = ends("cuda:3", &[path]);
    assert!(said.contains("no CUDA device 3: the driver shows 1 devices"), "{said}");
    let said = ends("cuda:0", &[path, ("EBB_TEST_DRIVER_VERSION", "11040")]);
    assert!(
        said.contains("the CUDA driver is too old: it supports CUDA 11.4, expected 12.0 or newer"),
        "{said}"
    );
    assert!(ends("gpu", &[]).contains("cuda:N"));
    if Path::new("/proc/driver/nvidia").exists() {
        return skipped(Lacks::Machine, "a CUDA driver is here: its absence was not tested");
    }
    let said = ends("cuda:0", &[]);
    assert!(said.contains("no CUDA driver: the loader found no `libcuda.so.1`"), "{said}");
}

#[test]
fn a_ps_with_device_auto_uses_the_host_without_a_device_and_says_so_once() {
    let driver = Driver::new();
    let environment = [("LD_LIBRARY_PATH", driver.0.path().to_str().unwrap()), ("EBB_TEST_DEVICES", "0")];
    let mut cluster = Cluster::with_environment(&harness::ebb_path(), 0, 1, &environment);
    cluster.add_ps_on("auto");
    let out = cluster.dir.path().join("out");
    let output = cluster.submit(
        &root().join("examples/digits/job.toml"),
        &out,
        &["--set", "epochs=1", "--set", "fleet.ps=1"],
    );
    assert!(output.status.success(), "{}", text(&output));
    let log = cluster.ps[0].log();
    assert_eq!(log.matches("partitions lie in memory of the host").count(), 1, "{log}");
}

#[test]
fn a_model_has_the_same_bits_with_ps_on_devices_on_the_host_and_mixed_also_when_one_dies() {
    if nvrtc().is_none() {
        return skipped(Lacks::Package, "no NVRTC: no ps used a device");
    }
    let driver = Driver::new();
    let path = driver.path();
    let environment = [("LD_LIBRARY_PATH", path.as_str())];
    let job = root().join("examples/digits/job.toml");
    for (mode, wire) in [("sync", "f32"), ("pipelined", "bf16")] {
        let sets =
            ["epochs=40".to_owned(), format!("consistency.mode={mode}"), format!("exchange.dtype={wire}")];
        let sets: Vec<&str> = sets.iter().flat_map(|set| ["--set", set]).collect();
        let calm = tempfile::tempdir().unwrap();
        let calm_out = calm.path().join("out");
        let output = harness::ebb(["run", "--workers", "1", "--ps", "1", "--out"])
            .arg(&calm_out)
            .arg(&job)
            .args(&sets)
            .output();
        let output = output.unwrap();
        assert!(output.status.success(), "{}", text(&output));
        let expected = summary(&calm_out)["model_sha256"].clone();
        assert!(expected.is_string(), "{expected}");

        // The second and the third time the ps with this number is killed.
        for (devices, killed) in
            [(["cuda:0", "cuda:0"], None), (["cuda:0", "cpu"], Some(0)), (["cpu", "cuda:0"], Some(0))]
        {
            let mut cluster = Cluster::with_environment(&harness::ebb_path(), 0, 2, &environment);
            devices.iter().for_each(|device| cluster.add_ps_on(device));
            for (ps, device) in cluster.ps.iter().zip(devices) {
                assert_eq!(ps.log().contains("partitions lie on a device"), device != "cpu");
            }
            let out = cluster.dir.path().join("out");
            let mut submission =
                cluster.submission(&job, &out, &[&sets[..], &["--set", "fleet.ps=2"]].concat());
            let mut child = submission.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
            if let Some(killed) = killed {
                while !out.join("metrics.jsonl").exists() || events(&out, "train").len() < BEFORE {
                    assert!(
                        child.try_wait().unwrap().is_none(),
                        "the job ended before it told {BEFORE} steps"
                    );
                    std::thread::park_timeout(Duration::from_millis(5));
                }
                cluster.restart_ps(killed);
            }
            let output = child.wait_with_output().unwrap();
            assert!(output.status.success(), "{}", text(&output));
            assert_eq!(summary(&out)["model_sha256"], expected, "{mode} {wire} {devices:?}");
            assert!(model(&out) == model(&calm_out), "{mode} {wire} {devices:?}");
        }
    }
}
