//! The edge where time comes in: everything below is told what time it is.
//!
//! Deadlines are in time that the master was *awake*. A master that was stopped, swapped out or
//! suspended has heard nobody meanwhile, and what was said to it waits in its sockets: its clock
//! stands still for as long, so that it listens before it declares anybody dead.
//!
//! ```text
//!   real time     0.0  0.1  0.2  stopped for 60 s  60.2  60.3
//!   since_start   0.0  0.1  0.2                     0.7   0.8
//! ```

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

/// A moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Now {
    /// Time awake since the master started: what deadlines are made of. Never steps back.
    pub(crate) since_start: Duration,
    /// Wall clock, in milliseconds since 1970: what people read. May step back; nothing is decided
    /// by it.
    pub(crate) unix_ms: u64,
}

/// Longest time between two looks at the clock that counts as awake. The master looks every 0.1 s,
/// and at each call.
const LATE_MAX: Duration = Duration::from_millis(500);

/// Tells the time.
#[doc(hidden)]
#[derive(Debug)]
pub struct Clock {
    start: Instant,
    rate: f64,
    awake: Mutex<Awake>,
}

/// Time awake. Pure.
#[derive(Clone, Copy, Debug, Default)]
struct Awake {
    /// Time at the last look.
    seen: Duration,
    /// How much of it the master was not awake.
    lost: Duration,
}

impl Awake {
    /// Looks at the clock, `elapsed` after the start.
    fn look(&mut self, elapsed: Duration) -> Duration {
        let since = elapsed.saturating_sub(self.seen);
        self.seen = self.seen.max(elapsed);
        self.lost += since.saturating_sub(LATE_MAX);
        self.seen - self.lost
    }
}

impl Clock {
    pub(crate) fn start() -> Self {
        Self::at_rate(1.0)
    }

    /// Creates a clock that runs this much faster than everybody else's: for simulations.
    pub fn at_rate(rate: f64) -> Self {
        Self { start: Instant::now(), rate, awake: Mutex::default() }
    }

    pub(crate) fn now(&self) -> Now {
        let elapsed = self.start.elapsed().mul_f64(self.rate);
        let since_start = self.awake.lock().unwrap_or_else(PoisonError::into_inner).look(elapsed);
        Now { since_start, unix_ms: unix_ms() }
    }
}

/// Returns the wall clock.
#[expect(clippy::disallowed_methods, reason = "events carry the time for people; nothing is decided by it")]
fn unix_ms() -> u64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    since.map_or(0, |since| since.as_millis() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_clock_stands_still_while_the_master_does() {
        let ms = Duration::from_millis;
        let mut awake = Awake::default();
        let told: Vec<_> =
            [0, 100, 200, 60_200, 60_300, 60_250, 60_700, 120_000].map(|at| awake.look(ms(at))).into();
        assert_eq!(told, [0, 100, 200, 700, 800, 800, 1200, 1700].map(ms));
    }
}
