//! Repeats calls that may succeed later, by the clock of this runtime.

use std::future::Future;
use std::time::Duration;

use proto::retry::{Pause, Retry};
use proto::status::{Failure, Kind};

/// Calls `attempt` until it succeeds, fails for good, or the attempts are used up; then the last
/// failure is returned. `on_retry` hears of each failure that another attempt follows.
///
/// # Errors
/// The last failure.
pub async fn repeat<T, F, Fut>(
    retry: Retry,
    seed: u64,
    mut on_retry: impl FnMut(u32, &Failure),
    attempt: F,
) -> Result<T, Failure>
where
    F: FnMut() -> Fut,
    Fut: Future<Output = Result<T, Failure>>,
{
    let judge = |failures, failure: Failure| {
        if !failure.is_retryable() || retry.is_last(failures) {
            return Err(failure);
        }
        on_retry(failures + 1, &failure);
        Ok(Pause::Growing)
    };
    retry.run(seed, tokio::time::sleep, judge, attempt).await
}

/// The result of `call`, or [`Kind::Unavailable`] once it has taken longer than `limit`. The call
/// is dropped then.
///
/// # Errors
/// The failure of the call, or that it took too long.
pub async fn within<T>(
    limit: Duration,
    call: impl Future<Output = Result<T, Failure>>,
) -> Result<T, Failure> {
    let late = |_| Err(Failure::new(Kind::Unavailable, format!("no answer within {limit:?}")));
    tokio::time::timeout(limit, call).await.unwrap_or_else(late)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fast() -> Retry {
        Retry { first: Duration::from_millis(1), longest: Duration::from_millis(2), attempts_max: 4 }
    }

    #[tokio::test(start_paused = true)]
    async fn a_failure_that_can_pass_is_retried_until_it_does() {
        let mut left = 3;
        let mut heard = 0;
        let result = repeat(
            fast(),
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
        let result: Result<(), _> = repeat(
            fast(),
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
        let result: Result<(), _> = repeat(
            fast(),
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
}
