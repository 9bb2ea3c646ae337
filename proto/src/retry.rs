//! The one place for backoff: exponential, with full jitter and an end.

use std::future::Future;
use std::time::Duration;

use crate::random::Keyed;
use crate::status::Failure;

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

    /// Calls `attempt` until it succeeds, fails for good, or the attempts are used up; then the last failure is returned.
    /// `on_retry` hears of each failure that is followed by another attempt, to make it visible.
    ///
    /// # Errors
    /// The last failure.
    pub async fn run<T, F, Fut>(
        &self,
        seed: u64,
        mut on_retry: impl FnMut(u32, &Failure),
        mut attempt: F,
    ) -> Result<T, Failure>
    where
        F: FnMut() -> Fut,
        Fut: Future<Output = Result<T, Failure>>,
    {
        let mut count = 0;
        loop {
            match attempt().await {
                Ok(value) => return Ok(value),
                Err(failure) if failure.is_retryable() && count + 1 < self.attempts_max => {
                    on_retry(count + 1, &failure);
                    tokio::time::sleep(self.wait(count, seed)).await;
                    count += 1;
                }
                Err(failure) => return Err(failure),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::status::Kind;

    fn fast() -> Retry {
        Retry { first: Duration::from_millis(1), longest: Duration::from_millis(2), attempts_max: 4 }
    }

    #[tokio::test(start_paused = true)]
    async fn a_failure_that_can_pass_is_retried_until_it_does() {
        let mut left = 3;
        let mut heard = 0;
        let result = fast()
            .run(
                1,
                |_, _| heard += 1,
                || {
                    left -= 1;
                    let answer = if left > 0 { Err(Failure::new(Kind::Unavailable, "down")) } else { Ok(7) };
                    async move { answer }
                },
            )
            .await;
        assert_eq!((result, heard), (Ok(7), 2));
    }

    #[tokio::test(start_paused = true)]
    async fn attempts_are_counted_and_the_last_failure_returned() {
        let mut calls = 0;
        let result: Result<(), _> = fast()
            .run(
                1,
                |_, _| (),
                || {
                    calls += 1;
                    async { Err(Failure::new(Kind::Unavailable, "down")) }
                },
            )
            .await;
        assert_eq!((result.unwrap_err().kind, calls), (Kind::Unavailable, 4));
    }

    #[tokio::test(start_paused = true)]
    async fn a_malformed_request_is_not_repeated() {
        let mut calls = 0;
        let result: Result<(), _> = fast()
            .run(
                1,
                |_, _| (),
                || {
                    calls += 1;
                    async { Err(Failure::new(Kind::Malformed, "bad")) }
                },
            )
            .await;
        assert_eq!((result.unwrap_err().kind, calls), (Kind::Malformed, 1));
    }

    #[test]
    fn waits_grow_and_stay_below_the_longest() {
        let retry = Retry::default();
        for attempt in 0..40 {
            let wait = retry.wait(attempt, 9);
            assert!(wait <= retry.longest && wait >= retry.first / 2, "{attempt}: {wait:?}");
        }
    }
}
