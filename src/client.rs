//! A user's side of the `Jobs` service: calls that wait visibly for a master that does not answer, and only so long.

use std::error::Error as _;
use std::time::Duration;

use anyhow::{Result, anyhow};
use net::channel::{Dialer, MESSAGE_BYTES_MAX, Purpose};
use net::failover::Failover;
use proto::pb;
use proto::pb::jobs_client::JobsClient;
use proto::retry::Retry;
use proto::status::Failure;
use tokio::time::Instant;
use tonic::Status;

use crate::terminal::screen::Screen;

/// How often a user hears that the master still does not answer.
const NOTICE_EVERY: Duration = Duration::from_secs(3);

/// The master as a user's command sees it; cheap to clone.
#[derive(Clone, Debug)]
pub(crate) struct Client {
    jobs: JobsClient<Failover>,
    url: String,
    patience: Duration,
    screen: Screen,
}

impl Client {
    /// For the master at `url` (or the one that leads of several, separated by commas), which is tried for `patience` in each call.
    ///
    /// # Errors
    /// Not a URL.
    pub(crate) fn new(dialer: &Dialer, url: &str, patience: Duration, screen: Screen) -> Result<Self> {
        let channel =
            Failover::new(dialer, url, Purpose::Control).map_err(|failure| anyhow!("--master: {failure}"))?;
        let jobs = JobsClient::new(channel).max_decoding_message_size(MESSAGE_BYTES_MAX);
        Ok(Self { jobs, url: url.to_owned(), patience, screen })
    }

    /// Where lines for the user go.
    pub(crate) const fn screen(&self) -> &Screen {
        &self.screen
    }

    /// One job.
    ///
    /// # Errors
    /// No such job, or no master.
    pub(crate) async fn status(&self, job: &str) -> Result<pb::JobStatus> {
        let request = pb::StatusRequest { job: job.to_owned() };
        self.call(async |mut jobs| Ok(jobs.status(request.clone()).await.map_err(failure)?.into_inner()))
            .await
    }

    /// All jobs, oldest first.
    ///
    /// # Errors
    /// No master.
    pub(crate) async fn list(&self) -> Result<Vec<pb::JobStatus>> {
        let mut all = Vec::new();
        let mut request = pb::ListRequest::default();
        loop {
            let page = self.page(request).await?;
            all.extend(page.jobs);
            request.after = match page.next {
                0 => return Ok(all),
                next => next,
            };
        }
    }

    /// Waits for a master.
    ///
    /// # Errors
    /// No master.
    pub(crate) async fn reach(&self) -> Result<()> {
        self.page(pb::ListRequest { after: 0, limit: 1 }).await.map(drop)
    }

    async fn page(&self, request: pb::ListRequest) -> Result<pb::ListReply> {
        self.call(async |mut jobs| Ok(jobs.list(request).await.map_err(failure)?.into_inner())).await
    }

    /// Stops a job.
    ///
    /// # Errors
    /// No such job, or no master.
    pub(crate) async fn cancel(&self, job: &str, force: bool) -> Result<pb::JobStatus> {
        let request = pb::CancelRequest { job: job.to_owned(), force };
        self.call(async |mut jobs| Ok(jobs.cancel(request.clone()).await.map_err(failure)?.into_inner()))
            .await
    }

    /// Sets how many workers take part in a job.
    ///
    /// # Errors
    /// No such job, one that is ending or has ended, or no master.
    pub(crate) async fn scale(&self, job: &str, workers: u32) -> Result<pb::JobStatus> {
        let request = pb::ScaleRequest { job: job.to_owned(), workers };
        self.call(async |mut jobs| Ok(jobs.scale(request.clone()).await.map_err(failure)?.into_inner())).await
    }

    /// Holds a job.
    ///
    /// # Errors
    /// No such job, one that is ending or has ended, or no master.
    pub(crate) async fn pause(&self, job: &str) -> Result<pb::JobStatus> {
        let request = pb::PauseRequest { job: job.to_owned() };
        self.call(async |mut jobs| Ok(jobs.pause(request.clone()).await.map_err(failure)?.into_inner())).await
    }

    /// Lets a paused job go on, or one that waits for workers of its numerics class in the class `numerics`.
    ///
    /// # Errors
    /// No such job, one that is ending or has ended, no worker of that class, or no master.
    pub(crate) async fn resume(&self, job: &str, numerics: Option<&str>) -> Result<pb::JobStatus> {
        let numerics = numerics.unwrap_or_default().to_owned();
        let request = pb::ResumeRequest { job: job.to_owned(), numerics };
        self.call(async |mut jobs| Ok(jobs.resume(request.clone()).await.map_err(failure)?.into_inner()))
            .await
    }

    /// The job's events after number `after`.
    ///
    /// # Errors
    /// No such job, or no master.
    pub(crate) async fn watch(&self, job: &str, after: u64) -> Result<tonic::Streaming<pb::Event>> {
        let request = pb::WatchRequest { job: job.to_owned(), after };
        self.call(async |mut jobs| Ok(jobs.watch(request.clone()).await.map_err(failure)?.into_inner())).await
    }

    /// Repeats `attempt` while the master does not answer, for as long as the user is patient.
    ///
    /// # Errors
    /// What the master says, or that it does not answer.
    pub(crate) async fn call<T>(
        &self,
        attempt: impl AsyncFn(JobsClient<Failover>) -> Result<T, Failure>,
    ) -> Result<T> {
        let begin = Instant::now();
        let mut next_notice = begin;
        let mut last = None;
        let on_retry = |_, failure: &Failure| {
            let now = Instant::now();
            if now >= next_notice {
                let (waited, patience) = ((now - begin).as_secs(), self.patience.as_secs_f32().ceil());
                let text =
                    format!("waiting for the master at {}: {failure} ({waited} of {patience} s)", self.url);
                self.screen.line(&text);
                next_notice = now + NOTICE_EVERY;
            }
            last = Some(failure.clone());
        };
        let (retry, seed) = (Retry::unlimited(), u64::from(std::process::id()));
        let calls = net::retry::repeat(retry, seed, on_retry, || attempt(self.jobs.clone()));
        match tokio::time::timeout(self.patience, calls).await {
            Ok(answer) => answer.map_err(anyhow::Error::new),
            Err(_) => Err(self.no_answer(last)),
        }
    }

    /// One call that must not be repeated, because it is not known whether it was heard.
    pub(crate) const fn jobs(&self) -> &JobsClient<Failover> {
        &self.jobs
    }

    fn no_answer(&self, last: Option<Failure>) -> anyhow::Error {
        let what = format!(
            "no answer from the master at {} for {:?}; start it with `ebb master`, or say where it is with --master or \
             EBB_MASTER",
            self.url, self.patience
        );
        match last {
            Some(failure) => anyhow::Error::new(failure).context(what),
            None => anyhow!(what),
        }
    }
}

/// The failure in a status, with what the transport knows below its own "transport error".
pub(crate) fn failure(status: Status) -> Failure {
    let mut deepest = None;
    let mut source = status.source();
    while let Some(error) = source {
        deepest = Some(error.to_string());
        source = error.source();
    }
    let mut failure = Failure::from(status);
    if let Some(reason) = deepest
        && !failure.message.contains(&reason)
    {
        failure.message = reason;
    }
    failure
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake::{Fake, app, reach};
    use crate::pipe::Network;

    #[tokio::test(start_paused = true)]
    async fn a_master_that_is_away_is_named_after_visible_retries() {
        let app = app(&Network::new());
        let client = app.client(&reach(Duration::from_secs(10))).unwrap();
        let error = format!("{:#}", client.list().await.unwrap_err());
        for part in ["http://127.0.0.1:4700", "10s", "ebb master", "nobody listens"] {
            assert!(error.contains(part), "{part} missing in {error}");
        }
        let notices = app.said().lines().count();
        assert!((3..=4).contains(&notices), "{notices} notices in 10 s:\n{}", app.said());
    }

    #[tokio::test(start_paused = true)]
    async fn a_master_that_comes_late_is_waited_for() {
        let network = Network::new();
        let app = app(&network);
        let client = app.client(&reach(Duration::from_secs(30))).unwrap();
        let start = async {
            tokio::time::sleep(Duration::from_secs(5)).await;
            let incoming = network.listen("127.0.0.1").unwrap();
            let service = pb::jobs_server::JobsServer::new(Fake::new());
            tokio::spawn(net::channel::server().add_service(service).serve_with_incoming(incoming));
        };
        let (jobs, ()) = tokio::join!(client.list(), start);
        assert_eq!(jobs.unwrap()[0].name, "line-3");
        assert!(app.said().contains("waiting for the master"), "{}", app.said());
    }

    #[tokio::test]
    async fn an_unknown_job_is_an_error_at_once() {
        let app = Fake::new().app();
        let client = app.client(&reach(Duration::from_secs(30))).unwrap();
        let error = client.status("square").await.unwrap_err().to_string();
        assert!(error.contains("no job `square`"), "{error}");
        assert_eq!(app.said(), "");
    }

    #[test]
    fn a_url_that_is_none_is_refused() {
        let error = Client::new(&Dialer::tcp(), "ftp://m", Duration::ZERO, Screen::default()).unwrap_err();
        assert!(error.to_string().contains("--master"), "{error}");
    }
}
