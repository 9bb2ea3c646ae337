//! The one place for retries: exponential back-off with jitter, and the loop around a call that may
//! succeed later.
//!
//! Time is an argument here: the caller of [`Retry::run`] says how to sleep, and judges each
//! failure.

use std::time::Duration;

use crate::random::Keyed;

/// Limits of the retries of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Retry {
    /// Wait before the second attempt. It doubles each time.
    pub first: Duration,
    /// Longest wait between two attempts.
    pub longest: Duration,
    /// Attempts at most, the first included; see [`is_last`](Retry::is_last).
    pub attempts_max: u32,
}

/// The wait between a failed attempt and the next one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pause {
    /// A wait that grows with each failure.
    Growing,
    /// No wait: the failure was an answer. Failures are counted from 0 again.
    None,
}

impl Default for Retry {
    /// Ten attempts over about ten seconds.
    fn default() -> Self {
        Self { first: Duration::from_millis(50), longest: Duration::from_secs(2), attempts_max: 10 }
    }
}

impl Retry {
    /// Returns a policy without a limit of attempts, for calls whose caller decides when to stop.
    pub fn unlimited() -> Self {
        Self { attempts_max: u32::MAX, ..Self::default() }
    }

    /// Whether the attempt after `failures` failures is the last one.
    pub const fn is_last(&self, failures: u32) -> bool {
        failures.saturating_add(1) >= self.attempts_max
    }

    /// The wait before attempt `attempt` (the first is 0): uniform between half and all of the
    /// doubled wait, drawn from `seed`, so that a simulation repeats itself and a fleet does not
    /// knock in step.
    pub fn wait(&self, attempt: u32, seed: u64) -> Duration {
        let full = self.first.saturating_mul(1 << attempt.min(20)).min(self.longest);
        full.mul_f32(0.5 + 0.5 * Keyed::new(seed, "retry", u64::from(attempt)).next_f32())
    }

    /// Calls `attempt` until it succeeds, or until `judge` ends the retries with an error.
    ///
    /// `judge` gets each failure and the number of failures before it. `seed` draws the waits, and
    /// `sleep` sleeps them. A caller may drop the future at any time: no attempt follows.
    ///
    /// # Errors
    /// The error of `judge`. For a `judge` that always goes on it is
    /// [`Infallible`](std::convert::Infallible).
    pub async fn run<T, E, Stop, Fut, Slept>(
        &self,
        seed: u64,
        sleep: impl Fn(Duration) -> Slept,
        mut judge: impl FnMut(u32, E) -> Result<Pause, Stop>,
        mut attempt: impl FnMut() -> Fut,
    ) -> Result<T, Stop>
    where
        Fut: Future<Output = Result<T, E>>,
        Slept: Future,
    {
        let mut failures = 0;
        loop {
            let failure = match attempt().await {
                Ok(value) => return Ok(value),
                Err(failure) => failure,
            };
            match judge(failures, failure)? {
                Pause::Growing => {
                    sleep(self.wait(failures, seed)).await;
                    failures = failures.saturating_add(1);
                }
                Pause::None => failures = 0,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::convert::Infallible;
    use std::future::ready;
    use std::pin::pin;
    use std::task::{Context, Poll, Waker};

    use super::*;

    /// The result of a future that never waits.
    fn now<T>(future: impl Future<Output = T>) -> T {
        match pin!(future).poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(value) => value,
            Poll::Pending => panic!("it waits"),
        }
    }

    #[test]
    fn waits_grow_and_stay_below_the_longest() {
        let retry = Retry::default();
        for attempt in 0..40 {
            let wait = retry.wait(attempt, 9);
            assert!(wait <= retry.longest && wait >= retry.first / 2, "{attempt}: {wait:?}");
        }
    }

    #[test]
    fn waits_grow_with_failures_and_begin_anew_after_an_answer() {
        let retry = Retry::unlimited();
        let slept = RefCell::new(Vec::new());
        let sleep = |wait| {
            slept.borrow_mut().push(wait);
            ready(())
        };
        let mut replies = [Err("down"), Err("down"), Err("wait"), Err("down"), Ok(7)].into_iter();
        let judge = |_, failure| match failure {
            "wait" => Ok::<_, Infallible>(Pause::None),
            _ => Ok(Pause::Growing),
        };
        let Ok(value) = now(retry.run(3, sleep, judge, || ready(replies.next().unwrap())));
        assert_eq!(value, 7);
        assert_eq!(*slept.borrow(), [0, 1, 0].map(|attempt| retry.wait(attempt, 3)));
    }

    #[test]
    fn the_judge_says_when_to_stop() {
        let retry = Retry { attempts_max: 3, ..Retry::default() };
        let mut attempts = 0;
        let judge = |failures, failure| match retry.is_last(failures) {
            true => Err(failure),
            false => Ok(Pause::Growing),
        };
        let attempt = || {
            attempts += 1;
            ready(Err::<(), _>("down"))
        };
        let result = now(retry.run(1, |_| ready(()), judge, attempt));
        assert_eq!((result, attempts), (Err("down"), 3));
    }
}
