//! Repeats calls that may succeed later.

use std::future::Future;

use proto::retry::Retry;
use proto::status::Failure;

/// Calls `attempt` until it succeeds, fails for good, or the attempts are used up; then the last failure is returned.
/// `on_retry` hears of each failure that is followed by another attempt, to make it visible.
///
/// # Errors
/// The last failure.
pub async fn repeat<T, F, Fut>(
    retry: Retry,
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
            Err(failure) if failure.is_retryable() && count + 1 < retry.attempts_max => {
                on_retry(count + 1, &failure);
                tokio::time::sleep(retry.wait(count, seed)).await;
                count += 1;
            }
            Err(failure) => return Err(failure),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use proto::status::Kind;

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
