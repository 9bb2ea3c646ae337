//! Everything crashes and starts again while some ps and workers use a device: the model has the
//! bits of an undisturbed run on the host.

use super::{Driver, trained_alone};
use crate::crashes::{Crash, Disturbed, saving};
use crate::harness::{Cluster, ebb_path, events, root, summary};
use crate::observed::numbers;

#[test]
fn whatever_crashes_a_model_on_devices_and_on_the_host_has_the_bits_of_the_host() {
    let Some(driver) = Driver::of_any("no process used a device") else { return };
    let driver = driver.with_nvml();
    let job = root().join("examples/digits/job.toml");
    let path = driver.path();
    let crashes = [Crash::Everything, Crash::Ps, Crash::Both, Crash::Everything];
    let mut left = vec![("pipelined", "bf16", 5, 20), ("sync", "f32", 6, 20)];
    while let Some((mode, wire, seed, count)) = left.pop() {
        let sets = [
            format!("epochs={count}"),
            format!("consistency.mode={mode}"),
            format!("exchange.dtype={wire}"),
            "fleet.ps=2".to_owned(),
        ];
        let calm = tempfile::tempdir().unwrap();
        let calm_sets: Vec<&str> = sets.iter().flat_map(|set| ["--set", set]).collect();
        let expected = trained_alone(&job, &calm.path().join("out"), &calm_sets);

        // Streams of the driver run in other orders.
        let order = seed.to_string();
        let environment =
            [("LD_LIBRARY_PATH", path.as_str()), ("EBB_TEST_SEED", &order), ("EBB_METRICS", "127.0.0.1:0")];
        let mut cluster = Cluster::with_environment(&ebb_path(), 0, 0, &environment);
        for device in ["cuda:0", "cpu"] {
            cluster.add_ps_on(device);
            cluster.add_worker_as(&["--device", device], &environment);
        }
        let sets = [&sets[..], &saving(cluster.dir.path(), 10)].concat();
        let mut disturbed = Disturbed::start(cluster, &job, &sets, seed);
        if !disturbed.all(&crashes) {
            left.push((mode, wire, seed, 2 * count));
            continue;
        }
        let (mut cluster, out) = disturbed.end();
        assert_eq!(summary(&out)["model_sha256"], expected, "{mode} {wire}");
        let first = &events(&out, "train")[0]["step"];
        let starts = events(&out, "train").iter().filter(|event| event["step"] == *first).count();
        assert_eq!(starts, 1, "{mode}: it began again from version 0");
        // The processes that ended the job are on the devices that the first ones had.
        let ps = [0, 1].map(|ps| cluster.ps[ps].log().contains("partitions lie on a device"));
        let mut watches = |worker: usize| {
            let numbers = numbers(&cluster.workers[worker].metrics_url());
            numbers.contains_key("ebb_device_lost{device=\"cuda:0\"}")
        };
        assert_eq!([ps, [watches(0), watches(1)]], [[true, false]; 2]);
    }
}
