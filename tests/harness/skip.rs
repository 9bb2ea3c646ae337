//! What a test does when it cannot test: it says so, where `cargo xtask test` counts it. Every skip goes through here.

use std::io::Write as _;

/// What a skipped line begins with; `xtask/src/check/runner.rs` counts these.
const SKIPPED: &str = "SKIPPED: ";

/// Why something is not tested here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lacks {
    /// A program or package that can be installed. With `EBB_REQUIRE_ALL=1` this is a failure.
    Package,
    /// A device, data from outside the repository, or a privilege: nothing that a test run can install.
    Machine,
}

/// Says that a test does less than its name.
///
/// # Panics
/// With `EBB_REQUIRE_ALL=1`, when a package is missing.
#[expect(
    clippy::disallowed_methods,
    reason = "the check says through the environment that all must be tested"
)]
pub fn skipped(lacks: Lacks, what: &str) {
    // Past the test runner, which shows what a passing test prints to nobody.
    let _ = writeln!(std::io::stderr(), "{SKIPPED}{what}");
    let requires_all = std::env::var("EBB_REQUIRE_ALL").is_ok_and(|value| value == "1");
    assert!(!(requires_all && lacks == Lacks::Package), "EBB_REQUIRE_ALL=1 and {what}");
}
