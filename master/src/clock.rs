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
#[doc(hidden)]
#[derive(Debug)]
pub struct Clock {
    start: Instant,
    rate: f64,
}

impl Clock {
    pub(crate) fn start() -> Self {
        Self::at_rate(1.0)
    }

    /// A clock that runs this much faster than everybody else's: for simulations.
    pub fn at_rate(rate: f64) -> Self {
        Self { start: Instant::now(), rate }
    }

    pub(crate) fn now(&self) -> Now {
        Now { since_start: self.start.elapsed().mul_f64(self.rate), unix_ms: unix_ms() }
    }
}

/// The wall clock.
#[expect(clippy::disallowed_methods, reason = "events carry the time for people; nothing is decided by it")]
fn unix_ms() -> u64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    since.map_or(0, |since| since.as_millis() as u64)
}
