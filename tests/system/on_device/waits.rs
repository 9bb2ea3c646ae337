//! What the devices of a process wait for: each has numbers of its own, and `ebb status` tells the
//! shares.

use std::process::Stdio;

use super::Driver;
use crate::harness::{Cluster, ebb, ebb_path, root, succeed, text};
use crate::observed::numbers;

#[test]
fn each_device_of_a_worker_process_tells_what_it_waits_for() {
    let Some(driver) = Driver::of_tests("no worker used a device") else { return };
    let job = root().join("examples/digits/job.toml");
    let path = driver.path();
    let environment =
        [("LD_LIBRARY_PATH", path.as_str()), ("EBB_TEST_DEVICES", "2"), ("EBB_METRICS", "127.0.0.1:0")];
    let mut cluster = Cluster::with_environment(&ebb_path(), 1, 0, &environment);
    cluster.add_worker_as(&["--device", "all"], &environment);
    let out = cluster.dir.path().join("out");
    // It trains until it is cancelled.
    let sets = ["--set", "epochs=100000", "--set", "fleet.ps=1", "--set", "fleet.workers.min=2"];
    let mut submission = cluster.submission(&job, &out, &sets);
    let mut child = submission.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let status = |more: &[&str]| {
        let output = ebb([&["status", "digits", "--master", &cluster.url], more].concat()).output().unwrap();
        text(&output)
    };
    // Shares are those of ten seconds.
    let told = loop {
        assert!(child.try_wait().unwrap().is_none(), "the job ended");
        let told = status(&[]);
        let lines = told.lines().filter(|line| line.contains("device") && line.contains("% weights"));
        if lines.count() == 2 {
            break told;
        }
        std::thread::park_timeout(std::time::Duration::from_millis(50));
    };
    for device in ["cuda:0", "cuda:1"] {
        assert!(told.contains(&format!("device     {device} with ")), "{told}");
    }
    let json: serde_json::Value = serde_json::from_str(status(&["--json"]).lines().next().unwrap()).unwrap();
    for device in json["devices"].as_array().unwrap() {
        for cause in ["data", "weights", "push"] {
            let share = device[format!("waits_{cause}_percent")].as_u64();
            assert!(share.is_some_and(|share| share <= 100), "{device}");
        }
    }
    let url = cluster.workers[0].metrics_url();
    let numbers = numbers(&url);
    for device in ["cuda:0", "cuda:1"] {
        let said = |name: &str| numbers[&format!("ebb_worker_{name}_total{{device=\"{device}\"}}")];
        assert!(said("microbatches") > 0.0 && said("pull_seconds") > 0.0 && said("load_seconds") > 0.0);
        assert!(said("room_seconds") >= 0.0);
    }
    assert!(!numbers.contains_key("ebb_worker_microbatches_total"), "of the process: they are sums");
    succeed(["cancel", "--force", "digits", "--master", &cluster.url]);
    child.wait().unwrap();
}
