//! The harness itself: a test that hangs ends by itself, with the logs of its processes.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]
#![expect(
    clippy::disallowed_methods,
    reason = "this program starts itself, and says so through the environment"
)]

use std::process::Command;
use std::time::Duration;

use crate::harness::machine::until;
use crate::harness::{Cluster, text};

/// Far more than any machine needs to end a killed process.
const LONG: Duration = Duration::from_secs(120);

/// Name of the test that hangs, as the test runner writes it.
const HANGING: &str = "watched::a_cluster_is_waited_for_in_vain";

/// Environment variable that makes [`a_cluster_is_waited_for_in_vain`] hang.
const HANG: &str = "EBB_TEST_HANG";

#[test]
fn a_cluster_is_waited_for_in_vain() {
    if std::env::var_os(HANG).is_some() {
        let _cluster = Cluster::start(1, 0);
        loop {
            std::thread::park();
        }
    }
}

#[test]
fn a_test_that_hangs_ends_itself_and_shows_the_logs_of_its_processes() {
    let mut hanging = Command::new(std::env::current_exe().unwrap());
    hanging.args(["--exact", HANGING]).env(HANG, "1").env("EBB_TEST_LIMIT", "10");
    let output = hanging.output().unwrap();
    let said = text(&output);
    assert_eq!(output.status.code(), Some(101), "{said}");
    for part in [&format!("HANGS: `{HANGING}`"), "master.log", "--- child "] {
        assert!(said.contains(part), "`{part}` missing in:\n{said}");
    }
    // No child is left behind. A killed child may need a moment on a busy machine.
    let children = said.lines().filter_map(|line| line.strip_prefix("--- child ")?.split(':').next());
    for child in children {
        let is_gone = || {
            let status = std::fs::read_to_string(format!("/proc/{child}/status")).unwrap_or_default();
            status.is_empty() || status.contains("(zombie)")
        };
        until(&format!("{child} is gone"), LONG, is_gone);
    }
}
