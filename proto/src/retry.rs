//! How often and how soon a failed call is repeated: exponential back-off with jitter and an end.

use std::time::Duration;

use crate::random::Keyed;

/// How to repeat a call that may succeed later.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Retry {
    /// Wait before the second attempt; doubles each time.
    pub first: Duration,
    /// Longest wait between two attempts.
    pub longest: Duration,
    /// Attempts at most, the first included.
    pub attempts_max: u32,
}

impl Default for Retry {
    /// Ten attempts over about ten seconds.
    fn default() -> Self {
        Self { first: Duration::from_millis(50), longest: Duration::from_secs(2), attempts_max: 10 }
    }
}

impl Retry {
    /// For ever, for calls whose caller decides when to stop.
    pub fn unlimited() -> Self {
        Self { attempts_max: u32::MAX, ..Self::default() }
    }

    /// The wait before attempt `attempt` (the first is 0): uniform between half and all of the doubled wait, drawn
    /// from `seed`, so that a simulation repeats itself and a fleet does not knock in step.
    pub fn wait(&self, attempt: u32, seed: u64) -> Duration {
        let full = self.first.saturating_mul(1 << attempt.min(20)).min(self.longest);
        full.mul_f32(0.5 + 0.5 * Keyed::new(seed, "retry", u64::from(attempt)).next_f32())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_grow_and_stay_below_the_longest() {
        let retry = Retry::default();
        for attempt in 0..40 {
            let wait = retry.wait(attempt, 9);
            assert!(wait <= retry.longest && wait >= retry.first / 2, "{attempt}: {wait:?}");
        }
    }
}
