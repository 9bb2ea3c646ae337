//! A worker whose device is lost or full, as a process. The engine of these workers fails with the
//! texts of CUDA; the network is `paced` of `tests/harness/paced.rs`.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::process::Stdio;

use crate::harness::oracle::Oracle;
use crate::harness::{self, Cluster, text};

/// Exit code of a worker whose device is lost.
const DEVICE_LOST: i32 = 3;

#[test]
fn a_worker_whose_device_is_lost_says_so_and_leaves_and_another_one_goes_on() {
    let oracle = Oracle::new(2, Some(1));
    for (fault, is_attempt) in [
        ("CUDA error: uncorrectable ECC error encountered", false),
        ("CUDA error: device-side assert triggered", true),
    ] {
        let mut cluster = Cluster::of(&harness::example("oracle"), 1, 0);
        cluster.add_worker_with(&[("PACED_FAULT", fault)]);
        let out = cluster.dir.path().join("out");
        // A second failed attempt would end the job.
        let sets = ["--set", "limits.attempts_max=2", "--set", "fleet.ps=1"];
        let mut submission = cluster.submission(&oracle.job(), &out, &sets);
        let child = submission.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let left = cluster.workers[0].child.wait().unwrap();
        let log = cluster.workers[0].log();
        assert_eq!(left.code(), Some(DEVICE_LOST), "{log}");
        assert!(log.contains(&format!("error: cpu is lost: {fault}")) && !log.contains("panicked"), "{log}");
        cluster.add_worker();
        let output = child.wait_with_output().unwrap();
        let said = text(&output);
        assert!(output.status.success(), "{said}");
        assert_eq!(said.contains(fault), is_attempt, "only a failed attempt is news for the user: {said}");
        oracle.check(&out, fault);
    }
}

#[test]
fn a_full_device_fails_the_microbatch_with_figures_and_advice_and_the_worker_goes_on() {
    let oracle = Oracle::new(2, Some(1));
    let mut cluster = Cluster::of(&harness::example("oracle"), 1, 0);
    let fault = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.15 GiB";
    cluster.add_worker_with(&[("PACED_FAULT", fault)]);
    let out = cluster.dir.path().join("out");
    let output = cluster.submit(&oracle.job(), &out, &["--set", "fleet.ps=1"]);
    let said = text(&output);
    assert!(!output.status.success(), "{said}");
    assert!(said.contains(&format!("cpu is out of memory: {fault}; lower batch.micro")), "{said}");
    let worker = &mut cluster.workers[0];
    assert!(worker.child.try_wait().unwrap().is_none(), "{}", worker.log());
}
