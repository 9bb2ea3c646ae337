//! Requests on threads of their own, for threads that block until the answer. And retries.

use std::sync::LazyLock;
use std::sync::mpsc;
use std::time::Duration;

use proto::retry::{Pause, Retry};
use tokio::runtime::{Builder, Runtime};
use tokio::sync::Semaphore;
use tokio::time::Instant;

use super::{PATIENCE, patience};

/// Most requests of this process at a time.
const REQUESTS_MAX: usize = 16;

/// Lowest rate of an answer whose size is not that of a piece.
const BYTES_PER_SECOND_MIN: u64 = 64 << 10;

static REQUESTS: Semaphore = Semaphore::const_new(REQUESTS_MAX);

static RUNTIME: LazyLock<Runtime> = LazyLock::new(|| {
    let mut builder = Builder::new_multi_thread();
    let builder = builder.worker_threads(2).thread_name("data-remote").enable_all();
    builder.build().expect("the system has threads for requests")
});

/// Times of a request.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    /// Time to connect.
    pub(super) connect: Duration,
    /// Longest pause within an answer.
    pub(super) idle: Duration,
    /// Time of one attempt to fetch a piece.
    pub(super) attempt: Duration,
    /// Time of all attempts, after which no further one begins, but for the first few. A process
    /// may set it.
    pub(super) total: Duration,
    /// Attempts that are made in any case, so that a slow machine does not give up early.
    pub(super) attempts_min: u32,
    /// Wait before the second attempt. It doubles each time.
    pub(super) first_wait: Duration,
}

/// Limits of all files, unless the process sets others. A worker counts as hanging only after
/// minutes.
pub(super) const LIMITS: Limits = Limits {
    connect: Duration::from_secs(10),
    idle: Duration::from_secs(20),
    attempt: Duration::from_secs(120),
    total: PATIENCE,
    attempts_min: 4,
    first_wait: Duration::from_millis(200),
};

/// Why a request failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Failure {
    /// It may succeed later.
    Passing(String),
    /// There is no such file.
    Missing(String),
    /// The server wants other credentials.
    Denied(String),
    /// The file is another one now.
    Changed(String),
    /// Anything else that a repetition does not mend.
    Other(String),
}

impl Limits {
    /// Returns the limits of this process.
    pub(super) fn of_process() -> Self {
        Self { total: patience(), ..LIMITS }
    }

    /// Calls `attempt` until it succeeds, fails for good, or has failed often enough and the time
    /// for all attempts is over.
    /// Waits grow exponentially, with jitter.
    ///
    /// # Errors
    /// The last failure.
    pub(super) async fn patiently<T, Fut: Future<Output = Result<T, Failure>>>(
        &self,
        attempt: impl Fn() -> Fut,
    ) -> Result<T, Failure> {
        // Another seed in each process, so that workers do not knock in step.
        let seed = u64::from(std::process::id());
        let retry =
            Retry { first: self.first_wait, longest: Duration::from_secs(10), attempts_max: u32::MAX };
        let (begun, attempt) = (Instant::now(), &attempt);
        let judge = |failures: u32, failure: Failure| match failure {
            Failure::Passing(why) => {
                let attempts = failures + 1;
                if attempts < self.attempts_min || begun.elapsed() + retry.wait(failures, seed) < self.total {
                    return Ok(Pause::Growing);
                }
                let secs = begun.elapsed().as_secs();
                Err(Failure::Passing(format!("{why} (attempt {attempts}, after {secs} s)")))
            }
            failure => Err(failure),
        };
        let attempt = || async move {
            let _place = REQUESTS.acquire().await;
            attempt().await
        };
        retry.run(seed, tokio::time::sleep, judge, attempt).await
    }

    /// Returns limits for an attempt that fetches `bytes`, with more time for more bytes.
    pub(super) const fn for_bytes(self, bytes: u64) -> Self {
        let more = Duration::from_secs(bytes / BYTES_PER_SECOND_MIN);
        Self { attempt: self.attempt.saturating_add(more), ..self }
    }

    /// Ends an attempt that takes too long.
    ///
    /// # Errors
    /// Those of the attempt, or its time is over.
    pub(super) async fn in_time<T>(
        &self,
        attempt: impl Future<Output = Result<T, Failure>>,
    ) -> Result<T, Failure> {
        let over = || Failure::Passing(format!("no whole answer within {} s", self.attempt.as_secs()));
        tokio::time::timeout(self.attempt, attempt).await.unwrap_or_else(|_| Err(over()))
    }
}

/// The answer of a request that has begun.
#[derive(Debug)]
pub(super) struct Waiting<T>(mpsc::Receiver<T>);

impl<T> Waiting<T> {
    /// Waits for the answer. The call blocks its thread, whatever the thread belongs to.
    ///
    /// # Panics
    /// If the request panicked.
    pub(super) fn recv(self) -> T {
        self.0.recv().expect("a request ends with an answer")
    }
}

/// Begins a request.
pub(super) fn start<T: Send + 'static>(request: impl Future<Output = T> + Send + 'static) -> Waiting<T> {
    let (done, waiting) = mpsc::sync_channel(1);
    RUNTIME.spawn(async move {
        // The thread that asked may have met another failure and gone on.
        let _ = done.send(request.await);
    });
    Waiting(waiting)
}

/// Makes a request and waits for its answer. The call blocks.
///
/// # Panics
/// If the request panics.
pub(super) fn wait<T: Send + 'static>(request: impl Future<Output = T> + Send + 'static) -> T {
    start(request).recv()
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn what_may_pass_is_tried_until_the_time_is_over_and_all_else_once() {
        for (failure, attempts) in [
            (Failure::Missing("404".to_owned()), 1..=1),
            (Failure::Denied("403".to_owned()), 1..=1),
            (Failure::Changed("tag".to_owned()), 1..=1),
            // Waits of half to all of 0.2, 0.4, .., 10 s.
            (Failure::Passing("503".to_owned()), 9..=18),
        ] {
            let tried = AtomicU32::new(0);
            let begun = Instant::now();
            let result = LIMITS
                .patiently(|| async {
                    tried.fetch_add(1, Ordering::Relaxed);
                    Err::<(), _>(failure.clone())
                })
                .await;
            assert!(attempts.contains(&tried.load(Ordering::Relaxed)), "{failure:?}: {tried:?} attempts");
            assert!(begun.elapsed() <= LIMITS.total);
            let said = format!("{:?}", result.unwrap_err());
            assert!(!said.contains("503") || said.contains("attempt"), "{said}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn some_attempts_are_made_however_long_they_take() {
        let (tried, limits) = (AtomicU32::new(0), Limits { attempts_min: 3, ..LIMITS });
        let slow = || async {
            tried.fetch_add(1, Ordering::Relaxed);
            tokio::time::sleep(2 * limits.total).await;
            Err::<(), _>(Failure::Passing("503".to_owned()))
        };
        limits.patiently(slow).await.unwrap_err();
        assert_eq!(tried.load(Ordering::Relaxed), 3);
    }

    #[tokio::test(start_paused = true)]
    async fn an_attempt_without_an_end_is_one_that_failed() {
        let never = std::future::pending::<Result<(), Failure>>();
        let failure = LIMITS.in_time(never).await.unwrap_err();
        assert_eq!(failure, Failure::Passing("no whole answer within 120 s".to_owned()));
        let (limits, never) = (LIMITS.for_bytes(64 << 20), std::future::pending::<Result<(), Failure>>());
        let failure = limits.in_time(never).await.unwrap_err();
        assert_eq!(failure, Failure::Passing("no whole answer within 1144 s".to_owned()));
    }
}
