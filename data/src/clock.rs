//! The time, for measurements of the input pipeline.

use std::time::Instant;

/// Returns the time of a measurement's begin or end.
#[expect(clippy::disallowed_methods, reason = "a measurement for people; nothing is decided by it")]
pub(crate) fn now() -> Instant {
    Instant::now()
}
