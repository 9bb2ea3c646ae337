//! The `Jobs` service: what users do.

use std::collections::VecDeque;
use std::sync::Arc;

use net::security::{Caller, TokenRole};
use proto::artifact::{INITIAL, SCRIPT};
use proto::convert::required;
use proto::ids::JobId;
use proto::pb;
use proto::pb::jobs_server::Jobs;
use proto::pb::submit_request::Part;
use proto::spec::JobSpec;
use proto::status::{Failure, Kind};
use tonic::{Request, Response, Status, Streaming};

use super::{Answers, Messages, nothing};
use crate::artifacts::Folder;
use crate::books::{Books, Changed};
use crate::clock::Now;
use crate::job::{Job, Resume};
use crate::membership::Membership;
use crate::owner::Owner;
use crate::scripts::ELECTION;
use crate::shared::{Shared, leaving};

/// Events that are copied under one lock.
const EVENTS_AT_ONCE: usize = 256;

/// The service, on the books.
#[derive(Debug)]
pub(crate) struct JobsService {
    shared: Arc<Shared>,
}

impl JobsService {
    pub(crate) const fn new(shared: Arc<Shared>) -> Self {
        Self { shared }
    }

    /// Changes a job as a user asks, and answers once the change would survive a restart.
    async fn change(
        &self,
        job: &str,
        changed: Changed,
        change: impl FnOnce(&mut Job, Now, &Membership) -> Result<(), Failure> + Send,
    ) -> Result<Response<pb::JobStatus>, Status> {
        let change =
            |books: &mut Books, now| books.change(now, job, changed, |job, fleet| change(job, now, fleet));
        let status = self.shared.act(change)?;
        self.shared.durable().await?;
        Ok(Response::new(status))
    }
}

#[tonic::async_trait]
impl Jobs for JobsService {
    type WatchStream = Answers<pb::Event>;
    type FetchStream = Answers<pb::ArtifactPart>;

    async fn submit(
        &self,
        request: Request<Streaming<pb::SubmitRequest>>,
    ) -> Result<Response<pb::SubmitReply>, Status> {
        let caller = Caller::of(&request);
        let mut requests = Messages::of(request, self.shared.stream_silence);
        let malformed = |message: &str| Status::from(Failure::new(Kind::Malformed, message));
        let first = requests.next().await?.ok_or_else(|| nothing("SubmitRequest"))?;
        let Some(Part::SpecJson(spec)) = first.part else {
            return Err(malformed("SubmitRequest.spec_json: expected in the first message, found none"));
        };
        let spec = JobSpec::from_json(&spec)?;
        let resume = Resume::of(first.resume, first.resume_anyway);
        let join = first.join;
        let script = Some(JobId(first.script)).filter(|script| *script != JobId(0));
        if script.is_some() && !join {
            return Err(malformed("SubmitRequest.script: expected with `join` alone"));
        }
        caller.may_name(script)?;
        let owner = match caller.script() {
            // The agent's token is not the owner's. The limits were those of the script.
            Some(script) => {
                let name =
                    self.shared.act(|books, _| books.script(script).map(|script| script.owner.clone()))?;
                Owner { name, ..Owner::default() }
            }
            None => Owner::of(&caller),
        };
        caller.may_take_part(spec.is_driven())?;
        // Else another user's loop could be told to read files with that user's rights.
        if spec.is_driven() && !join {
            return Err(malformed(
                "the job is driven by a loop of its own: start that program, whose `ebbflow.join` submits the job, \
                 or name another network as model.builtin",
            ));
        }
        match &spec.checkpoint {
            Some(checkpoint) => {
                let opened = self.shared.stores.open(&checkpoint.url);
                opened.map_err(|error| unusable(&caller, "checkpoint.url", &error))?;
            }
            None if resume.is_some() => {
                return Err(malformed("resume: the job has no [checkpoint] section; add one with its url"));
            }
            None => {}
        }
        if let Some(predict) = &spec.predict {
            let opened = self.shared.stores.open(&predict.place().0);
            opened.map_err(|error| unusable(&caller, "predict.url", &error))?;
        }
        // Refused before its files travel.
        self.shared.check_journal()?;
        // Limits are for new jobs.
        if join && let Some(reply) = self.shared.act(|books, _| books.join(&spec, script))? {
            return Ok(Response::new(reply));
        }
        self.shared.act(|books, _| {
            books.check_owner(&owner, 0)?;
            books.admit_for(script, &spec).map(drop)
        })?;
        let mut receiving = self.shared.artifacts.receive(&owner.name)?;
        while let Some(request) = requests.next().await? {
            match required("SubmitRequest", "part", request.part)? {
                Part::Artifact(part) => {
                    // As soon as a file is announced, so that nothing is written that has no place.
                    self.shared.act(|books, _| {
                        receiving.reserve(&part, |of_owner| books.check_owner(&owner, of_owner))
                    })?;
                    receiving.accept(part).inspect_err(|failure| {
                        caller.refuse("a file of a submission", &failure.message);
                    })?;
                }
                Part::SpecJson(_) => {
                    return Err(malformed("SubmitRequest.spec_json: expected once, found again"));
                }
            }
        }
        let mut received = receiving.finish()?;
        let files = [("script", &spec.model.script, SCRIPT), ("initial", &spec.model.initial, INITIAL)];
        for (key, given, file) in files {
            let came = received.artifacts.iter().any(|artifact| artifact.name == file);
            if let Some(given) = given.as_ref().filter(|_| !came) {
                return Err(malformed(&format!(
                    "model.{key} is `{given}`, and no file `{file}` came with the job"
                )));
            }
        }
        let reply = {
            // One after the other, so that the number is still the next one when the files lie
            // under it.
            let _next = self.shared.submitting.lock().await;
            if join && let Some(reply) = self.shared.act(|books, _| books.join(&spec, script))? {
                return Ok(Response::new(reply));
            }
            let check = |books: &Books, of_owner| books.check_owner(&owner, of_owner);
            let id = self.shared.act(|books, _| {
                check(books, received.of_owner())?;
                books.admit_for(script, &spec)
            })?;
            let input = self.shared.artifacts.adopt(&received, id, Folder::Input)?;
            self.shared.act(|books, now| {
                check(books, received.of_owner())?;
                let id = books.admit_for(script, &spec)?;
                let reply = match script {
                    Some(script) => {
                        books.script(script)?;
                        books.submit_of_script(now, id, spec.clone(), input, script)
                    }
                    None => books.submit(now, id, spec.clone(), input, resume, owner.name.clone()),
                };
                received.given();
                Ok::<_, Failure>(reply)
            })?
        };
        self.shared.durable().await?;
        tracing::info!(job = reply.job, "{} submitted", reply.name);
        Ok(Response::new(reply))
    }

    async fn list(&self, request: Request<pb::ListRequest>) -> Result<Response<pb::ListReply>, Status> {
        let (script, request) = (Caller::of(&request).script(), request.into_inner());
        Ok(Response::new(self.shared.act(|books, now| books.list(now, request, script))))
    }

    async fn status(&self, request: Request<pb::StatusRequest>) -> Result<Response<pb::JobStatus>, Status> {
        let (script, name) = (Caller::of(&request).script(), request.into_inner().job);
        let status = self.shared.act(|books, now| books.status(now, &books.named(script, &name)?))?;
        Ok(Response::new(status))
    }

    async fn watch(&self, request: Request<pb::WatchRequest>) -> Result<Response<Self::WatchStream>, Status> {
        let script = Caller::of(&request).script();
        let pb::WatchRequest { job: name, after } = request.into_inner();
        let job = self.shared.act(|books, _| books.find(&books.named(script, &name)?))?;
        let watcher = Watcher { shared: self.shared.clone(), job, after, events: VecDeque::new() };
        let events = futures::stream::try_unfold(watcher, |mut watcher| async move {
            Ok(watcher.next().await?.map(|event| (event, watcher)))
        });
        Ok(Response::new(Box::pin(events)))
    }

    async fn cancel(&self, request: Request<pb::CancelRequest>) -> Result<Response<pb::JobStatus>, Status> {
        let caller = Caller::of(&request);
        let pb::CancelRequest { job, force } = request.into_inner();
        let job = may_cancel(&caller, &job, |script| self.shared.act(|books, _| books.named(script, &job)))?;
        if force && let Some(status) = self.shared.act(|books, _| books.give_up(&job)) {
            self.shared.durable().await?;
            return Ok(Response::new(status));
        }
        let cancel = |job: &mut Job, now, _: &Membership| {
            job.cancel(now, force);
            Ok(())
        };
        self.change(&job, Changed::Cancelled, cancel).await
    }

    async fn scale(&self, request: Request<pb::ScaleRequest>) -> Result<Response<pb::JobStatus>, Status> {
        let request = request.into_inner();
        let workers = proto::convert::workers(&request).map_err(Failure::from)?;
        let scale = |job: &mut Job, now, fleet: &Membership| job.scale(now, workers, fleet);
        self.change(&request.job, Changed::Else("scaled"), scale).await
    }

    async fn pause(&self, request: Request<pb::PauseRequest>) -> Result<Response<pb::JobStatus>, Status> {
        let pause = |job: &mut Job, now, _: &Membership| job.pause(now);
        self.change(&request.into_inner().job, Changed::Else("paused"), pause).await
    }

    async fn resume(&self, request: Request<pb::ResumeRequest>) -> Result<Response<pb::JobStatus>, Status> {
        let pb::ResumeRequest { job, numerics } = request.into_inner();
        let resume = |job: &mut Job, now, fleet: &Membership| job.resume(now, &numerics, fleet);
        self.change(&job, Changed::Else("resumed"), resume).await
    }

    async fn fetch(&self, request: Request<pb::FetchRequest>) -> Result<Response<Self::FetchStream>, Status> {
        let (script, name) = (Caller::of(&request).script(), request.into_inner().job);
        let status = self.shared.act(|books, now| books.status(now, &books.named(script, &name)?))?;
        if status.artifacts.is_empty() {
            let state = status.state().name();
            let message = format!("job {} has no files; it is {state}: {}", status.name, status.reason);
            return Err(Failure::new(Kind::NotFound, message).into());
        }
        let shared = self.shared.clone();
        let files = status
            .artifacts
            .into_iter()
            .flat_map(move |artifact| shared.artifacts.parts(JobId(status.job), Folder::Output, &artifact));
        Ok(Response::new(Box::pin(futures::stream::iter(files.map(|part| part.map_err(Status::from))))))
    }
}

/// Returns the job that a caller may cancel. A program ends the election of its script alone, by
/// its name there, which `named` finds.
///
/// # Errors
/// The caller may not cancel it, or it is not known.
fn may_cancel(
    caller: &Caller,
    job: &str,
    named: impl FnOnce(Option<JobId>) -> Result<String, Failure>,
) -> Result<String, Failure> {
    let is_program = caller.role() == Some(TokenRole::Script) || caller.script().is_some();
    if is_program && (caller.script().is_none() || !job.ends_with(ELECTION)) {
        let message = format!(
            "a program may not cancel `{}`; that takes a token of the role operate",
            job.escape_debug()
        );
        caller.refuse("a program that cancels a job", &message);
        return Err(Failure::new(Kind::Denied, message));
    }
    named(caller.script())
}

/// Returns the failure for a folder, by its key in the job file, that jobs of this master cannot
/// use.
fn unusable(caller: &Caller, key: &str, error: &proto::checkpoint::Error) -> Status {
    let message = format!("{key}: {error}");
    match error {
        proto::checkpoint::Error::NotAllowed { .. } => {
            caller.refuse("a place that jobs may not write to", &message);
            Failure::new(Kind::Denied, message).into()
        }
        _ => Failure::new(Kind::Malformed, message).into(),
    }
}

/// Reads a job's events, first those that are there, then each as it comes.
struct Watcher {
    shared: Arc<Shared>,
    job: JobId,
    after: u64,
    /// Read and not yet sent.
    events: VecDeque<pb::Event>,
}

impl Watcher {
    /// Returns the next event; `None` after the last one of a job that has ended.
    async fn next(&mut self) -> Result<Option<pb::Event>, Status> {
        loop {
            if let Some(event) = self.events.pop_front() {
                self.after = event.sequence;
                return Ok(Some(event));
            }
            let (after, id) = (self.after, self.job);
            // A script gets a job while it is watched, so each look says again what to wait for.
            let (recent, ended, mut news) = self.shared.act(|books, _| {
                let (recent, ended) = books.events(id, after, EVENTS_AT_ONCE)?;
                Ok::<_, Failure>((recent, ended, books.watch(id)))
            })?;
            // Nobody sees what a restart may forget.
            self.shared.durable().await?;
            let events = match recent {
                Some(events) => events,
                None => {
                    let read = self.shared.journal.events(id, after, EVENTS_AT_ONCE).await;
                    let unreadable = |reason| {
                        let message =
                            format!("the events of job {id} cannot be read from the journal: {reason}");
                        Failure::new(Kind::Unavailable, message)
                    };
                    read.map_err(unreadable)?
                }
            };
            if events.is_empty() && ended {
                return Ok(None);
            }
            self.events.extend(events);
            if self.events.is_empty() {
                tokio::select! {
                    biased;
                    () = self.shared.stopping.cancelled() => return Err(leaving()),
                    // An error means that the job has ended or was forgotten, which the next look
                    // tells.
                    _ = news.changed() => {}
                }
            }
        }
    }
}
