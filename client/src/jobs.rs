//! The calls of a user to the `Jobs` service. Calls wait for a master that does not answer, and
//! only so long.

use std::error::Error as _;
use std::time::Duration;

use net::channel::{Dialer, MESSAGE_BYTES_MAX, Purpose};
use net::failover::Failover;
use proto::artifact;
use proto::pb;
use proto::pb::jobs_client::JobsClient;
use proto::pb::scripts_client::ScriptsClient;
use proto::retry::Retry;
use proto::script::BUNDLE;
use proto::status::{Failure, Kind};
use tokio::time::Instant;
use tonic::Status;

use crate::download::{Memory, download};
use crate::{Error, Follow, JobStatus, Logs, Notice, Notices, Result, ScriptSubmission, Submission, report};

/// Time between two notices that the master still does not answer.
const NOTICE_EVERY: Duration = Duration::from_secs(3);

/// A user's connection to a master. Cheap to clone.
///
/// `job` is always a job's number, its name with the number (`digits-7`), or its name alone, which
/// means its newest job.
#[derive(Clone, Debug)]
pub struct Client {
    jobs: JobsClient<Failover>,
    scripts: ScriptsClient<Failover>,
    url: String,
    patience: Duration,
    notices: Notices,
}

impl Client {
    /// Creates a client of the master at `url`, or of the leader of several masters whose URLs are
    /// separated by commas. Each call is tried for `patience`. Nothing is dialed yet.
    ///
    /// # Errors
    /// `url` is no URL.
    pub fn new(dialer: &Dialer, url: &str, patience: Duration) -> Result<Self> {
        let channel = Failover::new(dialer, url, Purpose::Control).map_err(Error::Url)?;
        let scripts = ScriptsClient::new(channel.clone()).max_decoding_message_size(MESSAGE_BYTES_MAX);
        let jobs = JobsClient::new(channel).max_decoding_message_size(MESSAGE_BYTES_MAX);
        Ok(Self { jobs, scripts, url: url.to_owned(), patience, notices: Notices::default() })
    }

    /// This client, with notices for a function of the caller.
    #[must_use]
    pub fn with_notices(self, notices: Notices) -> Self {
        Self { notices, ..self }
    }

    /// Returns the receiver of notices.
    pub const fn notices(&self) -> &Notices {
        &self.notices
    }

    /// Sends a job once: after a lost answer nobody knows whether the master has it, and a second
    /// copy would train twice. Waits for a master before that.
    ///
    /// # Errors
    /// [`Error::NoAnswer`], [`Error::Refused`], or [`Error::AnswerLost`].
    pub async fn submit(&self, submission: Submission) -> Result<pb::SubmitReply> {
        self.reach().await?;
        let mut jobs = self.jobs.clone();
        let answer = jobs.submit(futures::stream::iter(submission.into_messages())).await;
        answer.map(tonic::Response::into_inner).map_err(not_taken)
    }

    /// Sends a script once, like [`submit`](Self::submit). Agents of the cluster run it.
    ///
    /// # Errors
    /// Those of [`submit`](Self::submit).
    pub async fn submit_script(&self, submission: ScriptSubmission) -> Result<pb::SubmitReply> {
        use pb::artifact_part::Part;
        use pb::script_request::Part as Message;
        let ScriptSubmission { script, secrets, bundle } = submission;
        self.reach().await?;
        let message = |part| pb::ScriptRequest { part: Some(part) };
        let file = move |part| message(Message::Artifact(pb::ArtifactPart { part: Some(part) }));
        let header = file(Part::Header(artifact::describe(BUNDLE, &bundle.bytes)));
        let slices = artifact::slices(&bundle.bytes).map(move |slice| file(Part::Content(slice)));
        let secrets = (!secrets.is_empty()).then(|| message(Message::Secrets(pb::Secrets { secrets })));
        let messages = std::iter::once(message(Message::Script(script))).chain(secrets).chain([header]);
        let messages = messages.chain(slices).collect::<Vec<_>>();
        let answer = self.scripts.clone().submit(futures::stream::iter(messages)).await;
        answer.map(tonic::Response::into_inner).map_err(not_taken)
    }

    /// Returns the events of a job, from its first one to its end.
    pub fn follow(&self, job: &str) -> Follow {
        Follow::new(self.clone(), job)
    }

    /// Returns the weights of a job that ended: the bytes of `model.safetensors`, checked against
    /// their hash. `None` for a job that ended without a model.
    ///
    /// # Errors
    /// The master does not answer, or the file does not arrive whole.
    pub async fn weights(&self, status: &JobStatus) -> Result<Option<Vec<u8>>> {
        if report::model_sha256(status).is_none() {
            return Ok(None);
        }
        self.file(status, report::MODEL).await
    }

    /// Returns a file of a job that ended, checked against its hash. `None`: it has no such file.
    ///
    /// # Errors
    /// The master does not answer, or the file does not arrive whole.
    pub async fn file(&self, status: &JobStatus, name: &str) -> Result<Option<Vec<u8>>> {
        let wanted = |other: &str| other == name;
        let files = self.call(async |jobs| download(jobs, status, &Memory { wanted }).await).await??;
        Ok(files.into_iter().next().map(|(_, content)| content))
    }

    /// Returns the state of a job, with its counters and metrics.
    ///
    /// # Errors
    /// The job is not known, or the master does not answer.
    pub async fn status(&self, job: &str) -> Result<JobStatus> {
        let request = pb::StatusRequest { job: job.to_owned() };
        self.call(async |mut jobs| Ok(jobs.status(request.clone()).await.map_err(failure)?.into_inner()))
            .await
    }

    /// Returns all jobs of the master, the oldest first.
    ///
    /// # Errors
    /// The master does not answer.
    pub async fn list(&self) -> Result<Vec<JobStatus>> {
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

    /// Waits until a master answers.
    ///
    /// # Errors
    /// The master does not answer.
    pub async fn reach(&self) -> Result<()> {
        self.page(pb::ListRequest { after: 0, limit: 1 }).await.map(drop)
    }

    async fn page(&self, request: pb::ListRequest) -> Result<pb::ListReply> {
        self.call(async |mut jobs| Ok(jobs.list(request).await.map_err(failure)?.into_inner())).await
    }

    /// Stops a job. By `force` it ends at once, without an export of what is trained so far.
    ///
    /// # Errors
    /// The job is not known, or the master does not answer.
    pub async fn cancel(&self, job: &str, force: bool) -> Result<JobStatus> {
        let request = pb::CancelRequest { job: job.to_owned(), force };
        self.call(async |mut jobs| Ok(jobs.cancel(request.clone()).await.map_err(failure)?.into_inner()))
            .await
    }

    /// Sets how many workers take part in a job.
    ///
    /// # Errors
    /// The job is not known, is ending or has ended, or the master does not answer.
    pub async fn scale(&self, job: &str, workers: u32) -> Result<JobStatus> {
        let request = pb::ScaleRequest { job: job.to_owned(), workers };
        self.call(async |mut jobs| Ok(jobs.scale(request.clone()).await.map_err(failure)?.into_inner())).await
    }

    /// Holds a job: nothing new is handed out until [`resume`](Self::resume).
    ///
    /// # Errors
    /// The job is not known, is ending or has ended, or the master does not answer.
    pub async fn pause(&self, job: &str) -> Result<JobStatus> {
        let request = pb::PauseRequest { job: job.to_owned() };
        self.call(async |mut jobs| Ok(jobs.pause(request.clone()).await.map_err(failure)?.into_inner())).await
    }

    /// Lets a paused job go on. With `numerics`, lets a job that waits for workers of its numerics
    /// class go on in that class.
    ///
    /// # Errors
    /// The job is not known, is ending or has ended, no worker is of the class, or the master does
    /// not answer.
    pub async fn resume(&self, job: &str, numerics: Option<&str>) -> Result<JobStatus> {
        let numerics = numerics.unwrap_or_default().to_owned();
        let request = pb::ResumeRequest { job: job.to_owned(), numerics };
        self.call(async |mut jobs| Ok(jobs.resume(request.clone()).await.map_err(failure)?.into_inner()))
            .await
    }

    /// Returns what the processes of a submitted script said, oldest lines first. `process`: that
    /// of this number alone. With `follow` they go on until the script is over.
    ///
    /// # Errors
    /// The job is not known, is of no script, or the master does not answer.
    pub async fn logs(&self, job: &str, process: Option<u32>, follow: bool) -> Result<Logs> {
        let request = pb::LogsRequest { job: job.to_owned(), process, follow };
        let scripts = &self.scripts;
        let replies = self
            .call(async |_| Ok(scripts.clone().logs(request.clone()).await.map_err(failure)?.into_inner()))
            .await?;
        Ok(Logs::new(replies, process.is_none()))
    }

    /// Returns a stream of the job's events after number `after`.
    pub(crate) async fn watch(&self, job: &str, after: u64) -> Result<tonic::Streaming<pb::Event>> {
        let request = pb::WatchRequest { job: job.to_owned(), after };
        self.call(async |mut jobs| Ok(jobs.watch(request.clone()).await.map_err(failure)?.into_inner())).await
    }

    /// Repeats `attempt` while the master does not answer, for as long as the caller is patient.
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
                let (url, failure) = (self.url.clone(), failure.clone());
                let (waited, patience) = (now - begin, self.patience);
                self.notices.tell(&Notice::Waiting { url, failure, waited, patience });
                next_notice = now + NOTICE_EVERY;
            }
            last = Some(failure.clone());
        };
        let (retry, seed) = (Retry::unlimited(), u64::from(std::process::id()));
        let calls = net::retry::repeat(retry, seed, on_retry, || attempt(self.jobs.clone()));
        match tokio::time::timeout(self.patience, calls).await {
            Ok(answer) => answer.map_err(Error::Failed),
            Err(_) => Err(Error::NoAnswer { url: self.url.clone(), patience: self.patience, last }),
        }
    }
}

/// Returns the error of a submission that has no good answer.
fn not_taken(status: Status) -> Error {
    let failure = failure(status);
    // A limit is an answer: the master has not taken the job.
    let lost = failure.is_retryable() && failure.kind != Kind::Full;
    if lost { Error::AnswerLost(failure) } else { Error::Refused(failure) }
}

/// Returns the failure in a status, with what the transport knows below its own "transport error".
pub fn failure(status: Status) -> Failure {
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
    use crate::fake::{Fake, client};
    use crate::pipe::Network;

    const SHORT: Duration = Duration::from_secs(10);

    #[tokio::test(start_paused = true)]
    async fn a_master_that_is_away_is_named_after_visible_retries() {
        let (client, told) = client(&Network::new(), SHORT);
        let Err(Error::NoAnswer { url, patience, last }) = client.list().await else { panic!("an answer") };
        assert_eq!((url.as_str(), patience), ("http://127.0.0.1:4700", SHORT));
        assert!(last.unwrap().message.contains("nobody listens"));
        let told = told.lines();
        assert!((3..=4).contains(&told.len()), "{} notices in 10 s: {told:?}", told.len());
        assert!(told[1].contains(" of 10 s)") && !told[1].contains("(0 of"), "{told:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_master_that_comes_late_is_waited_for() {
        let network = Network::new();
        let (client, told) = client(&network, Duration::from_secs(30));
        let start = async {
            tokio::time::sleep(Duration::from_secs(5)).await;
            Fake::new().serve(&network);
        };
        let (jobs, ()) = tokio::join!(client.list(), start);
        assert_eq!(jobs.unwrap()[0].name, "line-3");
        assert!(told.lines()[0].contains("waiting for the master"), "{:?}", told.lines());
    }

    #[tokio::test]
    async fn an_unknown_job_is_an_error_at_once() {
        let (client, told) = Fake::new().client();
        let error = client.status("square").await.unwrap_err();
        assert!(error.to_string().contains("no job `square`"), "{error}");
        assert_eq!(error.failure().unwrap().kind, Kind::NotFound);
        assert!(told.lines().is_empty());
    }

    #[tokio::test]
    async fn weights_are_the_bytes_of_the_model() {
        let fake = Fake::new();
        let client = fake.client().0;
        let status = client.status("line").await.unwrap();
        assert_eq!(client.weights(&status).await.unwrap().as_deref(), Some(&b"weights"[..]));

        fake.script().files[0].1 = bytes::Bytes::from_static(b"weight");
        let error = client.weights(&status).await.unwrap_err();
        assert!(matches!(error, Error::Arrived { size: 6, .. }), "{error}");
        let none = JobStatus { artifacts: Vec::new(), ..status };
        fake.script().status = none.clone();
        assert_eq!(client.weights(&none).await.unwrap(), None);
    }

    #[test]
    fn a_url_that_is_none_is_refused() {
        let error = Client::new(&Dialer::tcp(), "ftp://m", Duration::ZERO).unwrap_err();
        assert!(matches!(error, Error::Url(_)), "{error}");
    }
}
