//! The edge where time comes in: everything below is told what time it is.

use std::time::Duration;

use tokio::time::Instant;

/// A moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Now {
    /// Since the master started: what deadlines are made of. Never steps back.
    pub(crate) since_start: Duration,
    /// Wall clock, in milliseconds since 1970: what people read. May step back; nothing is decided by it.
    pub(crate) unix_ms: u64,
}

/// Tells the time.
#[derive(Debug)]
pub(crate) struct Clock {
    start: Instant,
}

impl Clock {
    pub(crate) fn start() -> Self {
        Self { start: Instant::now() }
    }

    pub(crate) fn now(&self) -> Now {
        Now { since_start: self.start.elapsed(), unix_ms: unix_ms() }
    }
}

/// The wall clock.
#[expect(clippy::disallowed_methods, reason = "events carry the time for people; nothing is decided by it")]
fn unix_ms() -> u64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    since.map_or(0, |since| since.as_millis() as u64)
}
