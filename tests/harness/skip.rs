//! Reports of tests that cannot test: they say so, and `cargo xtask test` counts them. Every skip
//! goes through here.

use std::io::Write as _;

/// Beginning of a line about a skip. `xtask/src/check/runner.rs` counts these lines.
const SKIPPED: &str = "SKIPPED: ";

/// Reason of a skip.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lacks {
    /// A program or package that can be installed. With `EBB_REQUIRE_ALL=1` its absence is a
    /// failure.
    Package,
    /// A device, data from outside the repository, or a privilege. A test run cannot install these.
    Machine,
}

/// Reports that a test does less than its name says.
///
/// # Panics
/// With `EBB_REQUIRE_ALL=1`, when a package is missing.
#[expect(
    clippy::disallowed_methods,
    reason = "the check says through the environment that all must be tested"
)]
pub fn skipped(lacks: Lacks, what: &str) {
    // Written past the test runner, which hides the output of a passing test.
    let _ = writeln!(std::io::stderr(), "{SKIPPED}{what}");
    let requires_all = std::env::var("EBB_REQUIRE_ALL").is_ok_and(|value| value == "1");
    assert!(!(requires_all && lacks == Lacks::Package), "EBB_REQUIRE_ALL=1 and {what}");
}
