//! A ps on a CUDA device, as a process: the same bits as on the host. And what a ps, a worker and
//! `ebb run` say without a device. The driver is the one of `kernels/tests/cuda/driver.cpp`; only
//! the library path of these processes leads to it.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod checkpoints;
mod crashes;
mod early;
mod same_bits;
mod uuids;
mod waits;

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

use crate::harness::skip::{Lacks, skipped};
use crate::harness::{self, Cluster, model, root, summary, text, told};
use crate::images;
use crate::observed::numbers;

#[allow(dead_code, unreachable_pub, reason = "shared with the tests of the kernels")]
#[path = "../../kernels/tests/cuda/library.rs"]
mod library;

/// Exit code of a ps whose device is lost.
const DEVICE_LOST: i32 = 3;

/// Steps in the user's events before a ps is killed.
const BEFORE: usize = 30;

/// The folder of the driver.
struct Driver(TempDir);

impl Driver {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        library::build("driver.cpp", kernels::cuda::SOURCE, folder.path(), "libcuda.so");
        Self(folder)
    }

    /// Returns a driver for processes that use a device. `None`: this machine has no NVRTC; what
    /// `nobody` says was not tested.
    fn of_any(nobody: &str) -> Option<Self> {
        if nvrtc().is_none() {
            skipped(Lacks::Package, &format!("no NVRTC: {nobody}"));
            return None;
        }
        Some(Self::new())
    }

    /// Returns a driver for what only the driver of the tests does. `None`: this machine has no
    /// NVRTC, or uses its own driver.
    fn of_tests(nobody: &str) -> Option<Self> {
        if is_real() {
            skipped_on_a_device();
            return None;
        }
        Self::of_any(nobody)
    }

    /// Builds NVML beside the driver.
    fn with_nvml(self) -> Self {
        library::build("nvml.cpp", "", self.0.path(), "libnvidia-ml.so.1");
        self
    }

    /// Returns the library path that leads to the driver and to NVRTC. The machine's own driver
    /// needs no path.
    fn path(&self) -> String {
        let driver = if is_real() { libraries() } else { self.0.path().display().to_string() };
        [driver, nvrtc().unwrap_or_default()].join(":")
    }
}

/// Returns whether processes use the machine's own driver: `cargo xtask gpu` says so. Then nothing
/// is tried that only the driver of the tests does.
#[expect(clippy::disallowed_methods, reason = "a person says through the environment which driver to use")]
fn is_real() -> bool {
    std::env::var("EBB_TEST_DRIVER").is_ok_and(|driver| driver == "real")
}

/// Returns the folders of libraries in the environment. In a container the driver may be there.
#[expect(clippy::disallowed_methods, reason = "the machine says through the environment where its driver is")]
fn libraries() -> String {
    std::env::var("LD_LIBRARY_PATH").unwrap_or_default()
}

/// Reports that a test needs the driver of the tests.
fn skipped_on_a_device() {
    skipped(Lacks::Machine, "EBB_TEST_DRIVER=real: what only the driver of the tests says was not tested");
}

/// Returns the folder of NVRTC.
#[expect(clippy::disallowed_methods, reason = "the check says through the environment where NVRTC lies")]
fn nvrtc() -> Option<String> {
    std::env::var("EBB_NVRTC").ok().filter(|folder| !folder.is_empty())
}

/// Returns what a ps says that ends at once.
fn ends(device: &str, environment: &[(&str, &str)]) -> String {
    refused(harness::ebb(["ps", "--master", "127.0.0.1:9", "--device", device]), environment)
}

/// Returns what a command says that ends at once.
fn refused(mut command: Command, environment: &[(&str, &str)]) -> String {
    let output = command.envs(environment.iter().copied()).output().unwrap();
    let said = text(&output);
    assert!(!output.status.success() && !said.contains("panicked"), "{said}");
    said
}

/// Returns whether a real driver is here, whose absence cannot be tested.
fn has_driver() -> bool {
    Path::new("/proc/driver/nvidia").exists()
}

/// Returns commands that compute on this device. Results go to `out`.
fn computing(device: &str, out: &Path) -> [Command; 2] {
    let mut run = harness::ebb(["run", "--device", device, "--out"]);
    run.arg(out).arg(root().join("examples/digits/job.toml"));
    [harness::ebb(["worker", "--master", "127.0.0.1:9", "--device", device]), run]
}

#[test]
fn a_worker_without_a_device_says_what_is_missing_at_once() {
    if is_real() {
        return skipped_on_a_device();
    }
    let (driver, out) = (Driver::new(), tempfile::tempdir().unwrap());
    let path = ("LD_LIBRARY_PATH", driver.0.path().to_str().unwrap());
    for (device, environment, expected) in [
        ("cuda:0", &[path, ("EBB_TEST_DEVICES", "0")][..], "no CUDA device: the driver shows none"),
        ("all", &[path, ("EBB_TEST_DEVICES", "0")][..], "no CUDA device: the driver shows none"),
        (
            "cuda:0",
            &[path, ("EBB_TEST_DRIVER_VERSION", "11040")][..],
            "the CUDA driver is too old: it supports CUDA 11.4, expected 12.0 or newer",
        ),
        ("cuda:0,0", &[][..], "names cuda:0 twice"),
        ("gpu", &[][..], "cuda:N"),
    ] {
        for command in computing(device, out.path()) {
            let said = refused(command, environment);
            assert!(said.contains(expected) && said.contains(device), "{said}");
        }
    }
    if has_driver() {
        return skipped(Lacks::Machine, "a CUDA driver is here: its absence was not tested");
    }
    for device in ["cuda:0", "all"] {
        for command in computing(device, out.path()) {
            let said = refused(command, &[]);
            assert!(
                said.contains(&format!(
                    "device {device}: no CUDA driver: the loader found no `libcuda.so.1`"
                )),
                "{said}"
            );
        }
    }
    if !cfg!(feature = "torch") && kernels::device::compiler().is_ok() {
        return skipped(Lacks::Machine, "the loader knows an NVRTC: its absence was not tested");
    }
    // Driver and device are there, but nothing that computes on them.
    let missing = if cfg!(feature = "torch") { "libtorch" } else { "no NVRTC: " };
    for command in computing("cuda:0", out.path()) {
        let said = refused(command, &[path]);
        assert!(said.contains("device cuda:0: ") && said.contains(missing), "{said}");
    }
}

#[test]
fn a_run_without_a_device_uses_the_cpu_and_says_so_once() {
    if is_real() {
        return skipped_on_a_device();
    }
    let driver = Driver::new();
    let out = tempfile::tempdir().unwrap();
    let mut run = harness::ebb(["run", "--set", "epochs=1", "--out"]);
    run.arg(out.path().join("out")).arg(root().join("examples/digits/job.toml"));
    run.env("LD_LIBRARY_PATH", driver.0.path()).env("EBB_TEST_DEVICES", "0");
    let output = run.output().unwrap();
    let said = text(&output);
    assert!(output.status.success(), "{said}");
    let expected = "computing on the CPU: no CUDA device: the driver shows none";
    assert_eq!(said.matches(expected).count(), 1, "{said}");
}

#[test]
#[cfg(not(feature = "torch"))]
fn a_run_whose_engine_is_not_made_for_devices_leaves_them_alone_and_says_so_once() {
    let Some(driver) = Driver::of_any("no engine could use a device") else { return };
    let out = tempfile::tempdir().unwrap();
    let run = |name: &str, arguments: &[&str]| {
        let mut run = harness::ebb(["run", "--set", "epochs=1", "--out"]);
        run.arg(out.path().join(name)).arg(root().join("examples/digits/job.toml")).args(arguments);
        let output = run.env("LD_LIBRARY_PATH", driver.path()).output().unwrap();
        let said = text(&output);
        assert!(output.status.success(), "{said}");
        said
    };
    let expected = "computing on the CPU: this program has no libtorch, and the kernels of its own engine";
    let said = run("auto", &[]);
    assert_eq!(said.matches(expected).count(), 1, "{said}");
    let said = run("named", &["--device", "cuda:0"]);
    assert!(!said.contains("computing on the CPU"), "{said}");
    let [auto, named] = ["auto", "named"].map(|name| summary(&out.path().join(name))["model_sha256"].clone());
    assert_eq!(auto, named);
}

#[test]
fn a_ps_refuses_several_devices() {
    for device in ["all", "cuda:0,1"] {
        let said = ends(device, &[]);
        assert!(said.contains(&format!("a ps has one device, found `{device}`")), "{said}");
    }
}

#[test]
fn a_ps_without_a_device_says_what_is_missing_at_once() {
    if is_real() {
        return skipped_on_a_device();
    }
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
    if has_driver() {
        return skipped(Lacks::Machine, "a CUDA driver is here: its absence was not tested");
    }
    let said = ends("cuda:0", &[]);
    assert!(said.contains("no CUDA driver: the loader found no `libcuda.so.1`"), "{said}");
}

#[test]
fn a_ps_with_device_auto_uses_the_host_without_a_device_and_says_so_once() {
    if is_real() {
        return skipped_on_a_device();
    }
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
fn processes_of_a_script_take_turns_on_the_devices_and_see_theirs_alone() {
    if is_real() {
        return skipped_on_a_device();
    }
    let (driver, dir) = (Driver::new(), tempfile::tempdir().unwrap());
    let script = dir.path().join("train.py");
    fs::write(
        &script,
        "echo \"sees $CUDA_VISIBLE_DEVICES as $EBBFLOW_DEVICE\"; echo $CUBLAS_WORKSPACE_CONFIG >> $0.cublas",
    )
    .unwrap();
    // The script never joins, so each run ends with an error.
    let run = |more: &[&str], visible: Option<&str>| {
        let out = dir.path().join("out");
        let mut command = harness::ebb(["run", "--python", "sh", "--out"]);
        command.arg(&out).arg(&script).args(more).env_remove("CUDA_VISIBLE_DEVICES");
        command.env_remove("CUBLAS_WORKSPACE_CONFIG");
        command.env("LD_LIBRARY_PATH", driver.0.path()).env("EBB_TEST_DEVICES", "2");
        command.envs(visible.map(|visible| ("CUDA_VISIBLE_DEVICES", visible)));
        let said = text(&command.output().unwrap());
        let logs = (0..3).map(|worker| out.join(format!("logs/worker-{worker}.log")));
        let logs: String = logs.map(|log| fs::read_to_string(log).unwrap_or_default()).collect();
        let _ = fs::remove_dir_all(out);
        (said, logs)
    };
    let logs = run(&["--workers", "3", "--device", "all"], Some("3,5")).1;
    assert_eq!(logs, "sees 3 as cuda:0\nsees 5 as cuda:1\nsees 3 as cuda:0\n");
    assert_eq!(run(&["--device", "cuda:1"], None).1, "sees 1 as cuda:1\n");
    assert_eq!(run(&["--device", "cpu"], None).1, "sees -1 as \n");
    assert_eq!(run(&["--env", "CUDA_VISIBLE_DEVICES=7"], None).1, "sees 7 as \n", "the user's own choice");
    run(&["--env", "CUBLAS_WORKSPACE_CONFIG=:16:8"], None);
    let cublas = fs::read_to_string(dir.path().join("train.py.cublas")).unwrap();
    let expected = format!("{}:16:8\n", ":4096:8\n".repeat(6));
    assert_eq!(cublas, expected, "cuBLAS chooses no algorithm by free memory");
    let said = run(&["--device", "cuda:7"], None).0;
    assert!(said.contains("device cuda:7: this process sees 2 CUDA devices"), "{said}");
}

#[test]
fn an_agent_runs_a_process_on_each_device_and_a_process_keeps_its_device() {
    if is_real() {
        return skipped_on_a_device();
    }
    let (driver, dir) = (Driver::new(), tempfile::tempdir().unwrap());
    fs::create_dir(dir.path().join("code")).unwrap();
    let script = dir.path().join("code/train.py");
    let says = "echo $$ $CUDA_VISIBLE_DEVICES $EBBFLOW_DEVICE > $PLACE/new-$EBBFLOW_WORKER\n\
        mv $PLACE/new-$EBBFLOW_WORKER $PLACE/$EBBFLOW_WORKER\nexec sleep 600\n";
    fs::write(&script, says).unwrap();
    // The number of a process, and its device.
    let process = |name: &str, before: &str| loop {
        let said = fs::read_to_string(dir.path().join(name)).unwrap_or_default();
        match said.trim().split_once(' ') {
            Some((number, device)) if number != before => break (number.to_owned(), device.to_owned()),
            _ => std::thread::park_timeout(Duration::from_millis(5)),
        }
    };
    let mut cluster = Cluster::start(0, 0);
    let environment = [
        ("LD_LIBRARY_PATH", driver.0.path().to_str().unwrap()),
        ("EBB_TEST_DEVICES", "2"),
        ("CUDA_VISIBLE_DEVICES", "3,5"),
    ];
    cluster.add_worker_as(&["--scripts", "--python", "sh", "--device", "all"], &environment);
    let place = format!("PLACE={}", dir.path().display());
    let mut submit = harness::ebb(["submit", "--master", &cluster.url, "--workers", "3", "--env", &place]);
    let said = text(&submit.arg(&script).output().unwrap());
    assert!(said.contains("submitted train-1"), "{said}");
    let (first, device) = process("train-1-0", "");
    let mut devices = [device.clone(), process("train-1-1", "").1];
    devices.sort_unstable();
    assert_eq!(devices, ["3 cuda:0", "5 cuda:1"]);
    // The master may hear of them after this test.
    let status = || text(&harness::ebb(["status", "train", "--master", &cluster.url]).output().unwrap());
    while !status().contains("2 of 3 processes run") {
        std::thread::park_timeout(Duration::from_millis(5));
    }
    let number = Pid::from_raw(first.parse().unwrap()).unwrap();
    kill_process(number, Signal::KILL).unwrap();
    assert_eq!(process("train-1-0", &first).1, device);
    let log = cluster.workers[0].log();
    assert!(log.contains("2 at a time on cuda:0, cuda:1: "), "{log}");
    // No engine of this program computes there. Scripts bring their own.
    assert!(log.contains("--device all: computing on the CPU"), "{log}");
}

/// Lets NVML say these values from its next call on. No call finds a half of them.
fn says(file: &Path, values: &str) {
    let whole = file.with_extension("new");
    fs::write(&whole, values).unwrap();
    fs::rename(whole, file).unwrap();
}

#[test]
fn a_ps_shows_how_its_device_is_and_that_it_is_throttled_or_fails() {
    let Some(driver) = Driver::of_tests("no ps used a device") else { return };
    let driver = driver.with_nvml();
    let (path, values) = (driver.path(), driver.0.path().join("values"));
    let good = "busy 87\nmemory_total 100\nmemory_used 40\ntemperature 64\nthrottle 4\necc_uncorrected 0\n";
    says(&values, good);
    let environment = [
        ("LD_LIBRARY_PATH", path.as_str()),
        ("EBB_TEST_NVML", values.to_str().unwrap()),
        ("EBB_METRICS", "127.0.0.1:0"),
        ("EBB_LOG", "info,ebbflow=debug"),
    ];
    let mut cluster = Cluster::with_environment(&harness::ebb_path(), 0, 0, &environment);
    cluster.add_ps_on("cuda:0");
    cluster.add_ps_on("cpu");
    let urls = [0, 1].map(|ps| cluster.ps[ps].metrics_url());
    let said =
        |name: &str| numbers(&urls[0]).get(&format!("ebb_device_{name}{{device=\"cuda:0\"}}")).copied();
    let told =
        ["busy_ratio", "memory_used_bytes", "temperature_celsius", "throttled_by_power", "throttled_by_heat"];
    assert_eq!(told.map(said), [0.87, 40.0, 64.0, 1.0, 0.0].map(Some));
    assert_eq!((said("power_watts"), said("lost")), (None, Some(0.0)), "what it does not say is not shown");
    assert!(numbers(&urls[1]).keys().all(|name| !name.starts_with("ebb_device_")));

    for (values_now, name, expected) in [
        ("throttle 72\n", "throttled_by_heat", Some(1.0)),
        ("ecc_uncorrected 2\n", "ecc_uncorrected_total", Some(2.0)),
        ("lost 1\n", "lost", Some(1.0)),
    ] {
        says(&values, values_now);
        while said(name) != expected {
            std::thread::park_timeout(Duration::from_millis(10));
        }
    }
    assert!(!cluster.ps[0].log().contains("no telemetry"), "{}", cluster.ps[0].log());
}

#[test]
fn a_ps_shows_how_a_real_device_is() {
    if !is_real() {
        return skipped(Lacks::Machine, "no EBB_TEST_DRIVER=real: no real device was asked");
    }
    let path = Driver::new().path();
    let environment = [("LD_LIBRARY_PATH", path.as_str()), ("EBB_METRICS", "127.0.0.1:0")];
    let mut cluster = Cluster::with_environment(&harness::ebb_path(), 0, 0, &environment);
    cluster.add_ps_on("cuda:0");
    let url = cluster.ps[0].metrics_url();
    let said = |name: &str| numbers(&url).get(&format!("ebb_device_{name}{{device=\"cuda:0\"}}")).copied();
    let total = said("memory_total_bytes").unwrap_or_default();
    assert!(total > 1e9 && said("memory_used_bytes").is_some_and(|used| used > 0.0 && used <= total));
    assert!(said("temperature_celsius").is_none_or(|degrees| (1.0..150.0).contains(&degrees)));
    assert_eq!(said("lost"), Some(0.0));
}

#[test]
fn a_ps_without_nvml_says_so_once_and_goes_on() {
    let Some(driver) = Driver::of_tests("no ps used a device") else { return };
    if has_driver() {
        return skipped(Lacks::Machine, "a CUDA driver is here: the absence of NVML was not tested");
    }
    let path = driver.path();
    let environment = [
        ("LD_LIBRARY_PATH", path.as_str()),
        ("EBB_METRICS", "127.0.0.1:0"),
        ("EBB_LOG", "info,ebbflow=debug"),
    ];
    let mut cluster = Cluster::with_environment(&harness::ebb_path(), 0, 0, &environment);
    cluster.add_ps_on("cuda:0");
    let url = cluster.ps[0].metrics_url();
    assert!(numbers(&url).keys().all(|name| !name.starts_with("ebb_device_")));
    let log = cluster.ps[0].log();
    assert_eq!(log.matches("no telemetry of a device").count(), 1, "{log}");
    assert!(log.contains("no NVML: ") && !log.contains("panicked"), "{log}");
}

#[test]
fn a_model_has_the_same_bits_with_ps_on_devices_on_the_host_and_mixed_also_when_one_dies() {
    let Some(driver) = Driver::of_any("no ps used a device") else { return };
    let path = driver.path();
    let job = root().join("examples/digits/job.toml");
    for (mode, wire, seed) in [("sync", "f32", "1"), ("pipelined", "bf16", "2")] {
        // Streams of the driver run in other orders.
        let environment = [("LD_LIBRARY_PATH", path.as_str()), ("EBB_TEST_SEED", seed)];
        let sets =
            ["epochs=10".to_owned(), format!("consistency.mode={mode}"), format!("exchange.dtype={wire}")];
        let sets: Vec<&str> = sets.iter().flat_map(|set| ["--set", set]).collect();
        let calm = tempfile::tempdir().unwrap();
        let calm_out = calm.path().join("out");
        let expected = trained_alone(&job, &calm_out, &sets);

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
            let sets = [&sets[..], &["--set", "fleet.ps=2"]].concat();
            submit(&mut cluster, &job, &out, &sets, |cluster| {
                killed.into_iter().for_each(|killed| cluster.restart_ps(killed));
            });
            assert_eq!(summary(&out)["model_sha256"], expected, "{mode} {wire} {devices:?}");
            assert!(model(&out) == model(&calm_out), "{mode} {wire} {devices:?}");
        }
    }
}

#[test]
fn a_ps_whose_device_is_lost_says_so_and_ends_with_its_own_code_and_the_job_goes_on() {
    let Some(driver) = Driver::of_tests("no ps used a device") else { return };
    let path = driver.path();
    let job = root().join("examples/digits/job.toml");
    let sets = ["--set", "epochs=5", "--set", "fleet.ps=1"];
    let calm = tempfile::tempdir().unwrap();
    let calm_out = calm.path().join("out");
    let expected = trained_alone(&job, &calm_out, &sets);
    // An access to memory that is not there, in the middle of the job.
    let environment = [("LD_LIBRARY_PATH", path.as_str()), ("EBB_TEST_FAIL", "cuLaunchKernel:30:700")];
    let mut cluster = Cluster::with_environment(&harness::ebb_path(), 0, 1, &environment);
    cluster.add_ps_on("cuda:0");
    let out = cluster.dir.path().join("out");
    let mut submission = cluster.submission(&job, &out, &sets);
    let child = submission.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let (ended, log) = cluster.start_again(0, "EBB_TEST_FAIL");
    assert_eq!(ended.code(), Some(DEVICE_LOST), "{log}");
    // Which operation hears of it first depends on what the ps does then.
    let said = "error: the device of this ps failed, and its partitions are lost: CUDA device 0 could not";
    let is_named = log.contains(said) && log.contains("CUDA_ERROR_ILLEGAL_ADDRESS");
    assert!(is_named && !log.contains("panicked"), "{log}");
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{}", text(&output));
    assert_eq!(summary(&out)["model_sha256"], expected);
    assert!(model(&out) == model(&calm_out));
}

/// Trains in one process on the host. Returns the digest of the model.
fn trained_alone(job: &Path, out: &Path, sets: &[&str]) -> serde_json::Value {
    let mut run = harness::ebb(["run", "--workers", "1", "--ps", "1", "--device", "cpu", "--out"]);
    let output = run.arg(out).arg(job).args(sets).output().unwrap();
    assert!(output.status.success(), "{}", text(&output));
    let digest = summary(out)["model_sha256"].clone();
    assert!(digest.is_string(), "{digest}");
    digest
}

/// Submits a job and waits for its end. In the middle, when the user has heard of some steps,
/// `disturb` is called.
fn submit(cluster: &mut Cluster, job: &Path, out: &Path, sets: &[&str], disturb: impl FnOnce(&mut Cluster)) {
    let mut submission = cluster.submission(job, out, sets);
    let mut child = submission.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    loop {
        let has_ended = child.try_wait().unwrap().is_some();
        if told(out, "train") >= BEFORE {
            break;
        }
        assert!(!has_ended, "the job ended before it told {BEFORE} steps");
        std::thread::park_timeout(Duration::from_millis(5));
    }
    disturb(cluster);
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{}", text(&output));
}

/// Two devices with access to each other's memory.
const PEERS: &[(&str, &str)] = &[("EBB_TEST_DEVICES", "2"), ("EBB_TEST_PEERS", "1")];

/// Memory in which gradients and weights travel between processes, and what is in the way.
#[derive(Clone, Copy, Debug)]
struct Way<'a> {
    /// The device of the ps.
    ps: &'a str,
    of_ps: &'a [(&'a str, &'a str)],
    /// The device that workers compute on.
    computes: &'a str,
    /// The device whose memory workers export.
    worker: &'a str,
    of_worker: &'a [(&'a str, &'a str)],
    /// What each worker says once. `None`: nothing is refused.
    refused: Option<&'a str>,
}

impl<'a> Way<'a> {
    const fn new(ps: &'a str, worker: &'a str) -> Self {
        Self { ps, of_ps: &[], computes: "cpu", worker, of_worker: &[], refused: None }
    }

    /// Returns the same way with workers that compute on a device, where their gradients stay and
    /// their weights go.
    const fn computing_on(self, computes: &'a str) -> Self {
        Self { computes, ..self }
    }

    /// Starts a ps and two workers of the pure engine.
    fn cluster(self, path: &str) -> Cluster {
        let common = [("LD_LIBRARY_PATH", path), ("EBB_METRICS", "127.0.0.1:0")];
        let environment = |more: &[(&'a str, &'a str)]| [&common[..], more].concat();
        let mut cluster = Cluster::with_environment(&harness::ebb_path(), 0, 0, &environment(self.of_ps));
        cluster.add_ps_on(self.ps);
        for _ in 0..2 {
            let devices = ["--device", self.computes, "--exchange-device", self.worker];
            cluster.add_worker_as(&devices, &environment(self.of_worker));
        }
        cluster
    }
}

/// Returns the bytes of gradients that the ps has read in memory of the device and in memory of the
/// host, and those that the workers have told it to.
fn carried(cluster: &mut Cluster) -> [[f64; 2]; 2] {
    let ways = ["device", "shared"];
    let read = |url: &str, role: &str| {
        ways.map(|way| harness::metric(url, &format!("ebb_{role}_push_{way}_bytes_total")))
    };
    let ps = read(&cluster.ps[0].metrics_url(), "ps");
    let mut workers = [0.0; 2];
    for worker in &mut cluster.workers {
        let bytes = read(&worker.metrics_url(), "worker");
        workers.iter_mut().zip(bytes).for_each(|(sum, bytes)| *sum += bytes);
    }
    [ps, workers]
}

/// Returns the bytes of weights that the ps has copied into memory of the device, and those that
/// the workers have read there.
fn pulled_on_device(cluster: &mut Cluster) -> [f64; 2] {
    let read = |url: &str, role: &str| harness::metric(url, &format!("ebb_{role}_pull_device_bytes_total"));
    let ps = read(&cluster.ps[0].metrics_url(), "ps");
    let workers = cluster.workers.iter_mut().map(|worker| read(&worker.metrics_url(), "worker"));
    [ps, workers.sum()]
}

/// Trains in each of these ways. Gradients and weights take the way that is not refused, and the
/// bits are those of one process.
fn every_way_gives_the_same_bits(driver: &Driver, ways: &[Way<'_>], sets: &[&str]) {
    let (path, job) = (driver.path(), root().join("examples/digits/job.toml"));
    let calm = tempfile::tempdir().unwrap();
    let calm_out = calm.path().join("out");
    let expected = trained_alone(&job, &calm_out, sets);
    for way in ways {
        let mut cluster = way.cluster(&path);
        let out = cluster.dir.path().join("out");
        let output = cluster.submit(&job, &out, sets);
        assert!(output.status.success(), "{way:?}: {}", text(&output));
        assert_eq!(summary(&out)["model_sha256"], expected, "{way:?}");
        assert!(model(&out) == model(&calm_out), "{way:?}");
        let pulled = pulled_on_device(&mut cluster);
        assert_eq!(pulled[0] > 0.0, pulled[1] > 0.0, "{way:?}: copied and read {pulled:?}");
        let [ps, workers] = carried(&mut cluster);
        assert!(ps[0] + ps[1] > 0.0, "{way:?}: {ps:?}");
        let is_used = |bytes: [f64; 2]| bytes.map(|bytes| bytes > 0.0);
        assert_eq!(is_used(ps), is_used(workers), "{way:?}: read {ps:?}, told {workers:?}");
        if is_real() {
            // A driver may refuse, which is said below.
            let logs: String = cluster.workers.iter().map(harness::Process::log).collect();
            eprintln!("{way:?}: on the device and on the host {ps:?}, weights {pulled:?}\n{logs}");
            continue;
        }
        let on_device = way.ps != "cpu" && way.worker != "cpu" && way.refused.is_none();
        assert_eq!([ps[0], pulled[0]].map(|bytes| bytes > 0.0), [on_device; 2], "{way:?}: {ps:?} {pulled:?}");
        let said = "gradients and weights go to and from a ps of this host through memory of the host";
        let logs = cluster.workers.iter().map(harness::Process::log);
        let told: Vec<_> = logs.filter(|log| log.contains(said)).collect();
        assert_eq!(!told.is_empty(), way.refused.is_some(), "{way:?}: {told:?}");
        for log in told {
            let reason = way.refused.unwrap_or_default();
            assert!(log.matches(said).count() == 1 && log.contains(reason), "{way:?}: {log}");
        }
    }
}

#[test]
fn a_model_has_the_same_bits_when_values_cross_on_the_device_and_when_something_refuses() {
    let Some(driver) = Driver::of_any("no ps used a device") else { return };
    let both = Way::new("cuda:0", "cuda:0");
    let small = ["--set", "epochs=5", "--set", "fleet.ps=1"];
    let ways = [both, Way::new("cuda:0", "cpu"), Way::new("cpu", "cuda:0")];
    every_way_gives_the_same_bits(&driver, &ways, &small);
    // A tensor of two chunks, and a partition that threads of its own work on.
    let large = ["--set", "epochs=1", "--set", "fleet.ps=1", "--set", "model.options.hidden=[4608]"];
    every_way_gives_the_same_bits(&driver, &[both], &large);
    if is_real() {
        return skipped_on_a_device();
    }
    let fails = &[("EBB_TEST_IPC", "801")];
    let ways = [
        Way { of_worker: fails, refused: Some("could not export memory"), ..both },
        Way { of_ps: fails, refused: Some("could not open memory of another process"), ..both },
        Way {
            worker: "cuda:1",
            of_worker: &[("EBB_TEST_DEVICES", "2")],
            refused: Some("the ps is on another CUDA device than cuda:1 and has no access to its memory"),
            ..both
        },
        // The worker does not see the device of the ps. So the ps says that it has no access.
        Way {
            ps: "cuda:1",
            of_ps: &[("EBB_TEST_DEVICES", "2")],
            refused: Some("which has no access to it: "),
            ..both
        },
        Way { worker: "cuda:1", of_ps: PEERS, of_worker: PEERS, ..both },
        Way { worker: "cuda:1", computes: "cuda:1", of_ps: PEERS, of_worker: PEERS, ..both },
        Way {
            of_worker: &[("EBB_TEST_DEVICE_BYTES", "1048576")],
            refused: Some("has no 2097152 bytes left"),
            ..both
        },
        Way {
            of_ps: &[("EBB_PS_DEVICE_BYTES_MAX", "1MiB")],
            refused: Some("2097152 bytes find no room on cuda:0"),
            ..both
        },
    ];
    every_way_gives_the_same_bits(&driver, &ways, &small);
}

#[test]
fn a_model_that_computes_on_a_device_has_the_bits_of_the_host_wherever_its_values_go() {
    let Some(driver) = Driver::of_any("no worker used a device") else { return };
    let there = Way::new("cuda:0", "cuda:0").computing_on("cuda:0");
    let ways = [
        there,
        Way::new("cuda:0", "cpu").computing_on("cuda:0"),
        Way::new("cpu", "cpu").computing_on("cuda:0"),
    ];
    for wire in ["f32", "bf16"] {
        let dtype = format!("exchange.dtype={wire}");
        let small = ["--set", "epochs=5", "--set", "fleet.ps=1", "--set", &dtype];
        every_way_gives_the_same_bits(&driver, &ways, &small);
    }
    let large = ["--set", "epochs=1", "--set", "fleet.ps=1", "--set", "model.options.hidden=[4608]"];
    every_way_gives_the_same_bits(&driver, &[there], &large);
}

#[test]
fn workers_on_a_device_and_on_the_host_train_one_model_together() {
    let Some(driver) = Driver::of_any("no worker used a device") else { return };
    let path = driver.path();
    let job = root().join("examples/digits/job.toml");
    let sets = ["--set", "epochs=20", "--set", "fleet.ps=1", "--set", "consistency.mode=pipelined"];
    let calm = tempfile::tempdir().unwrap();
    let expected = trained_alone(&job, &calm.path().join("out"), &sets);
    let environment = [("LD_LIBRARY_PATH", path.as_str())];
    let mut cluster = Cluster::with_environment(&harness::ebb_path(), 0, 0, &environment);
    cluster.add_ps_on("cpu");
    for device in ["cpu", "cuda:0"] {
        cluster.add_worker_as(&["--device", device], &environment);
    }
    cluster.wait_for_workers();
    // One worker may end a job before the other one asks for work. Then the test submits another
    // job.
    let both_take_part = (0..10).any(|attempt| {
        let out = cluster.dir.path().join(format!("out-{attempt}"));
        submit(&mut cluster, &job, &out, &sets, |_| {});
        assert_eq!(summary(&out)["model_sha256"], expected);
        summary(&out)["workers_seen"] == 2
    });
    assert!(both_take_part, "they are of one numerics class");
}

#[test]
fn images_that_cross_to_a_device_as_bytes_train_the_model_of_the_host() {
    let Some(driver) = Driver::of_any("no worker used a device") else { return };
    let folder = tempfile::tempdir().unwrap();
    let (job, out) = (images::write(folder.path()), |name: &str| folder.path().join(name));
    let expected = trained_alone(&job, &out("alone"), &[]);
    for seed in ["1", "2"] {
        let mut run = harness::ebb(["run", "--workers", "2", "--ps", "1", "--device", "cuda:0", "--out"]);
        run.arg(out(seed)).arg(&job).env("LD_LIBRARY_PATH", driver.path()).env("EBB_TEST_SEED", seed);
        let output = run.output().unwrap();
        assert!(output.status.success(), "{}", text(&output));
        assert_eq!(summary(&out(seed))["model_sha256"], expected, "seed {seed}");
        assert!(model(&out(seed)) == model(&out("alone")), "seed {seed}");
    }
}

#[test]
fn the_ps_of_a_run_keep_the_model_on_a_device_beside_workers_there_and_on_the_host() {
    let Some(driver) = Driver::of_any("no ps used a device") else { return };
    let path = driver.path();
    let job = root().join("examples/digits/job.toml");
    let folder = tempfile::tempdir().unwrap();
    let out = |name: &str| folder.path().join(name);
    let run = |name: &str, arguments: &[&str]| {
        let mut command = harness::ebb(["run", "--workers", "2", "--ps", "2", "--out"]);
        command.arg(out(name)).arg(&job).args(["--set", "epochs=5"]).args(arguments);
        command.env("LD_LIBRARY_PATH", &path).output().unwrap()
    };
    let expected = trained_alone(&job, &out("alone"), &["--set", "epochs=5"]);
    for (device, of_ps) in [("cpu", "cuda:0"), ("cuda:0", "cpu"), ("cuda:0", "cuda:0")] {
        let name = format!("{device} {of_ps}").replace(':', "");
        let output = run(&name, &["--device", device, "--ps-device", of_ps]);
        assert!(output.status.success(), "{}", text(&output));
        assert_eq!(summary(&out(&name))["model_sha256"], expected, "--device {device} --ps-device {of_ps}");
    }
    if is_real() {
        return skipped_on_a_device();
    }
    let output = run("full", &["--device", "cpu", "--ps-device", "cuda:0", "--ps-device-bytes-max", "4KiB"]);
    assert!(!output.status.success());
    let said = text(&output);
    assert!(said.contains("cuda:0") && said.contains("4096") && !said.contains("panicked"), "{said}");
    let output = run("none", &["--device", "cpu", "--ps-device", "cuda:7"]);
    assert!(!output.status.success());
    let said = text(&output);
    assert!(said.contains("--ps-device cuda:7") && !said.contains("panicked"), "{said}");
    let output = run("two", &["--ps-device", "cuda:0,1"]);
    assert!(!output.status.success() && text(&output).contains("expected one device"), "{}", text(&output));
}

#[test]
fn a_worker_or_a_ps_that_dies_while_values_cross_on_the_device_changes_no_bit() {
    let Some(driver) = Driver::of_any("no ps used a device") else { return };
    for (mode, wire, computes) in
        [("sync", "f32", "cpu"), ("pipelined", "bf16", "cpu"), ("pipelined", "f32", "cuda:0")]
    {
        let kill_a_worker = |cluster: &mut Cluster| drop(cluster.workers.remove(0));
        let kill_the_ps = |cluster: &mut Cluster| cluster.restart_ps(0);
        for (what, disturb) in [
            ("worker", &kill_a_worker as &dyn Fn(&mut Cluster)),
            ("ps", &kill_the_ps as &dyn Fn(&mut Cluster)),
        ] {
            let dies =
                |epochs: u32| dies_while_values_cross((mode, wire, computes), &driver, epochs, disturb);
            // A short job may end before the process dies.
            let has_crossed = [20, 40, 80, 160].into_iter().any(dies);
            assert!(has_crossed, "{mode} {wire}: nothing crossed on the device after the {what} died");
        }
    }
}

/// Disturbs a job whose values cross on the device, and checks its bits. Returns whether values
/// crossed there afterwards, too.
fn dies_while_values_cross(
    (mode, wire, computes): (&str, &str, &str),
    driver: &Driver,
    epochs: u32,
    disturb: &dyn Fn(&mut Cluster),
) -> bool {
    let job = root().join("examples/digits/job.toml");
    let sets =
        [format!("consistency.mode={mode}"), format!("exchange.dtype={wire}"), format!("epochs={epochs}")];
    let sets: Vec<&str> = sets.iter().flat_map(|set| ["--set", set]).collect();
    let sets = [&sets[..], &["--set", "fleet.ps=1"]].concat();
    let calm = tempfile::tempdir().unwrap();
    let calm_out = calm.path().join("out");
    let expected = trained_alone(&job, &calm_out, &sets);
    let mut cluster = Way::new("cuda:0", "cuda:0").computing_on(computes).cluster(&driver.path());
    let out = cluster.dir.path().join("out");
    submit(&mut cluster, &job, &out, &sets, |cluster| {
        let before = [carried(cluster)[0][0], pulled_on_device(cluster)[0]];
        let has_crossed = before.iter().all(|bytes| *bytes > 0.0);
        assert!(is_real() || has_crossed, "{mode} {wire}: {before:?} have crossed on the device");
        disturb(cluster);
    });
    assert_eq!(summary(&out)["model_sha256"], expected, "{mode} {wire}");
    assert!(model(&out) == model(&calm_out), "{mode} {wire}");
    let after = [carried(&mut cluster)[0][0], pulled_on_device(&mut cluster)[0]];
    is_real() || after.iter().all(|bytes| *bytes > 0.0)
}
