//! Checkpoints that processes on a device write and processes on the host read, and the other way
//! round: a job that moves from fleet to fleet has the bits of one that stays on the host.

use super::{Driver, trained_alone};
use crate::crashes::saving;
use crate::harness::{Cluster, ebb_path, events, root, summary, text};

/// The devices of the ps of each fleet.
const FLEETS: [&[&str]; 4] = [&["cuda:0", "cpu"], &["cpu", "cuda:0", "cuda:0"], &["cuda:0"], &["cpu", "cpu"]];

/// Epochs that each fleet adds.
const EPOCHS: usize = 2;

/// Steps between two checkpoints. Each fleet trains 46 steps more than the one before, and writes
/// one checkpoint, within an epoch. So no checkpoint can be due while another one is written.
const EVERY: u64 = 40;

#[test]
fn checkpoints_go_from_any_number_of_ps_on_devices_and_the_host_to_any_other() {
    let Some(driver) = Driver::of_any("no process used a device") else { return };
    let job = root().join("examples/digits/job.toml");
    let path = driver.path();
    let environment = [("LD_LIBRARY_PATH", path.as_str())];
    for (mode, wire) in [("sync", "f32"), ("pipelined", "bf16")] {
        let folder = tempfile::tempdir().unwrap();
        let of_job = [
            // A rate that depends on the number of epochs would change with each fleet.
            "optimizer.schedule.kind=constant".to_owned(),
            format!("consistency.mode={mode}"),
            format!("exchange.dtype={wire}"),
        ];
        let of_job = [&of_job[..], &saving(folder.path(), EVERY)].concat();
        for (fleet, devices) in FLEETS.into_iter().enumerate() {
            let more = [format!("epochs={}", (fleet + 1) * EPOCHS), format!("fleet.ps={}", devices.len())];
            let sets = [&of_job[..], &more].concat();
            let mut sets: Vec<&str> = sets.iter().flat_map(|set| ["--set", set]).collect();
            let alone = folder.path().join(format!("alone-{fleet}"));
            let elsewhere = format!("checkpoint.url={}", alone.join("checkpoints").display());
            let expected = trained_alone(&job, &alone, &[&sets[..], &["--set", &elsewhere]].concat());

            let mut cluster = Cluster::with_environment(&ebb_path(), 0, 0, &environment);
            devices.iter().for_each(|device| cluster.add_ps_on(device));
            for device in ["cuda:0", "cpu"] {
                cluster.add_worker_as(&["--device", device], &environment);
            }
            if fleet > 0 {
                sets.push("--resume");
            }
            let out = cluster.dir.path().join("out");
            let output = cluster.submit(&job, &out, &sets);
            assert!(output.status.success(), "{mode} {devices:?}: {}", text(&output));
            assert_eq!(summary(&out)["model_sha256"], expected, "{mode} {devices:?}");
            for (ps, device) in cluster.ps.iter().zip(devices) {
                assert_eq!(ps.log().contains("partitions lie on a device"), *device != "cpu");
            }
            let first = events(&out, "train")[0]["step"].as_u64().unwrap();
            assert!(first >= fleet as u64 * EVERY, "{mode} {devices:?}: step {first} was trained again");
            let saved: Vec<_> =
                events(&out, "checkpoint").iter().map(|event| event["version"].clone()).collect();
            assert_eq!(saved, [(fleet as u64 + 1) * EVERY], "{mode} {devices:?}");
        }
    }
}
