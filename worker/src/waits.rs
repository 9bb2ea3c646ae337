//! What a worker's computation waits for, as shares of its time.
//!
//! The metrics of the worker count the times. A wait counts when it ends.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

use crate::metrics::Metrics;

/// Least time over which shares are taken.
const WINDOW: Duration = Duration::from_secs(10);

/// Shares of time in percent, 0 to 100.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Shares {
    /// Share of waits for records.
    pub(crate) data: u32,
    /// Share of waits for weights.
    pub(crate) weights: u32,
    /// Share of waits for pushes, which need memory.
    pub(crate) push: u32,
}

/// The waits of a worker's computation. Clones are of the same worker.
#[derive(Clone, Debug)]
pub(crate) struct Waits {
    metrics: Arc<Metrics>,
    window: Arc<Mutex<Window>>,
}

impl Waits {
    pub(crate) fn new(metrics: Arc<Metrics>) -> Self {
        let window = Window { began: Instant::now(), nanos: nanos(&metrics), shares: None };
        Self { metrics, window: Arc::new(Mutex::new(window)) }
    }

    /// Returns the shares in the newest window that has ended. `None`: none has ended yet.
    pub(crate) fn shares(&self) -> Option<Shares> {
        let mut window = self.window.lock().unwrap_or_else(PoisonError::into_inner);
        window.at(Instant::now(), nanos(&self.metrics))
    }
}

/// Returns the nanoseconds of waits so far, by cause.
fn nanos(metrics: &Metrics) -> [u64; 3] {
    [&metrics.load_nanos, &metrics.pull_nanos, &metrics.room_nanos].map(net::metrics::Metric::get)
}

/// A time from `began` on, over which shares are taken.
#[derive(Debug)]
struct Window {
    began: Instant,
    /// Waits before the window.
    nanos: [u64; 3],
    /// Shares in the window before this one.
    shares: Option<Shares>,
}

impl Window {
    /// Begins another window if this one is long enough. Returns the newest shares.
    fn at(&mut self, now: Instant, nanos: [u64; 3]) -> Option<Shares> {
        let took = now.duration_since(self.began);
        if took >= WINDOW {
            let share = |cause: usize| {
                let waited = u128::from(nanos[cause].saturating_sub(self.nanos[cause]));
                // A wait may have begun before the window.
                (waited * 100 / took.as_nanos()).min(100) as u32
            };
            let shares = Some(Shares { data: share(0), weights: share(1), push: share(2) });
            *self = Self { began: now, nanos, shares };
        }
        self.shares
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn shares_are_those_of_the_newest_window() {
        let metrics = Arc::<Metrics>::default();
        metrics.load_nanos.add_time(Duration::from_secs(7));
        let waits = Waits::new(metrics.clone());
        metrics.load_nanos.add_time(Duration::from_secs(3));
        metrics.pull_nanos.add_time(Duration::from_secs(1));
        tokio::time::advance(WINDOW - Duration::from_millis(1)).await;
        assert_eq!(waits.shares(), None, "too early");
        tokio::time::advance(Duration::from_millis(1)).await;
        let first = Some(Shares { data: 30, weights: 10, push: 0 });
        assert_eq!(waits.shares(), first);

        // A wait that began before the window.
        metrics.room_nanos.add_time(2 * WINDOW);
        tokio::time::advance(WINDOW / 2).await;
        assert_eq!(waits.clone().shares(), first, "the window has not ended");
        tokio::time::advance(WINDOW).await;
        assert_eq!(waits.shares(), Some(Shares { data: 0, weights: 0, push: 100 }));
    }
}
