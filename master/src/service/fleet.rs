//! The `Fleet` service: processes come and go, and ask for work.

use std::sync::{Arc, PoisonError};
use std::time::Duration;

use net::security::Caller;
use net::session::Shown;
use proto::convert::{artifact_name, required};
use proto::ids::{IncarnationId, JobId, LeaseId};
use proto::pb;
use proto::pb::complete_request::Result as Report;
use proto::pb::fleet_server::Fleet;
use proto::pb::upload_request::Part;
use proto::status::{Failure, Kind};
use tokio::sync::broadcast;
use tokio::sync::broadcast::error::RecvError;
use tokio::time::Instant;
use tonic::{Request, Response, Status, Streaming};

use super::{Answers, Messages, nothing};
use crate::artifacts::Folder;
use crate::books::{Answer, Books, Described, check_exported};
use crate::checkpoints;
use crate::ps_client;
use crate::shared::{Shared, leaving};

/// Longest wait of one request for work.
const WAIT_MAX: Duration = Duration::from_secs(60);

/// The service, on the books.
#[derive(Debug)]
pub(crate) struct FleetService {
    shared: Arc<Shared>,
}

/// The sender of a call, as far as the call proves it.
struct Sender {
    shown: Option<Shown>,
    caller: Caller,
}

impl Sender {
    fn of<T>(request: &Request<T>) -> Self {
        Self { shown: Shown::of(request.metadata().as_ref()), caller: Caller::of(request) }
    }

    /// Checks whether the call may speak for `incarnation`.
    ///
    /// # Errors
    /// It may not; see [`Books::check_sender`].
    fn speaks_for(&self, books: &Books, incarnation: u64) -> Result<(), Failure> {
        let checked = books.check_sender(self.shown, IncarnationId(incarnation));
        checked.inspect_err(|failure| {
            if failure.kind == Kind::Denied
                || self.shown.is_some_and(|shown| shown.incarnation.get() != incarnation)
            {
                self.caller.refuse("a call in the name of another process", &failure.message);
            }
        })
    }

    /// Checks whether the call is of a member at all.
    ///
    /// # Errors
    /// It is not.
    fn is_member(&self, books: &Books) -> Result<(), Failure> {
        self.speaks_for(books, self.shown.map_or(0, |shown| shown.incarnation.get()))
    }
}

impl FleetService {
    pub(crate) const fn new(shared: Arc<Shared>) -> Self {
        Self { shared }
    }
}

#[tonic::async_trait]
impl Fleet for FleetService {
    type HeartbeatStream = Answers<pb::HeartbeatReply>;
    type DownloadStream = Answers<pb::ArtifactPart>;

    async fn register(
        &self,
        request: Request<pb::RegisterRequest>,
    ) -> Result<Response<pb::RegisterReply>, Status> {
        let caller = Caller::of(&request);
        let request = request.into_inner();
        caller.may_join_as(request.role())?;
        caller.may_take_part(!request.program.is_empty())?;
        caller.may_name(Some(JobId(request.script)).filter(|script| *script != JobId(0)))?;
        Ok(Response::new(self.shared.act(|books, now| books.register(now, &request))?))
    }

    async fn heartbeat(
        &self,
        request: Request<Streaming<pb::HeartbeatRequest>>,
    ) -> Result<Response<Self::HeartbeatStream>, Status> {
        let sender = Sender::of(&request);
        let mut requests = Messages::of(request, self.shared.stream_silence);
        // Taken before the answer, so that the process is live by the time that it knows it is
        // connected.
        let first = requests.next().await?.ok_or_else(|| nothing("HeartbeatRequest"))?;
        let (stream, reply) = self.shared.act(|books, now| {
            sender.speaks_for(books, first.incarnation)?;
            books.stream_opened(now, &first)
        })?;
        let heartbeats = Heartbeats {
            incarnation: IncarnationId(first.incarnation),
            stream,
            requests: requests.into_stream(),
            recalls: self.shared.recalls.subscribe(),
            reply: Some(reply),
            shared: self.shared.clone(),
        };
        let replies = futures::stream::try_unfold(heartbeats, |mut heartbeats| async move {
            Ok(heartbeats.next().await?.map(|reply| (reply, heartbeats)))
        });
        Ok(Response::new(Box::pin(replies)))
    }

    async fn lease(&self, request: Request<pb::LeaseRequest>) -> Result<Response<pb::LeaseReply>, Status> {
        let sender = Sender::of(&request);
        self.wait_for_lease(&sender, request.into_inner()).await
    }

    async fn job(&self, request: Request<pb::JobRequest>) -> Result<Response<pb::JobReply>, Status> {
        let sender = Sender::of(&request);
        let id = JobId(request.into_inner().job);
        let reply = self.shared.act(|books, _| {
            sender.is_member(books)?;
            books.check_script(sender.caller.script(), id)?;
            books.reply_for(id)
        })?;
        if !(reply.skipped_train.is_empty() && reply.skipped_validation.is_empty()) {
            // A worker leaves these records out, which a restart must not forget.
            self.shared.durable().await?;
        }
        Ok(Response::new(reply))
    }

    async fn describe(
        &self,
        request: Request<pb::DescribeRequest>,
    ) -> Result<Response<pb::DescribeReply>, Status> {
        let (sender, request) = (Sender::of(&request), request.into_inner());
        let (worker, lease) = (IncarnationId(request.incarnation), LeaseId(request.lease));
        let Described { job, partitions, probe } = self.shared.act(|books, _| {
            sender.speaks_for(books, request.incarnation)?;
            books.describe(&request)
        })?;
        for (partition, (ps, _)) in partitions.iter().enumerate() {
            tracing::info!(%job, partition, ps = ps.name, url = ps.url, "partition placed");
        }
        // What they are opened with is known after a restart: another beginning would be refused.
        // A master that no longer leads cannot write, and so opens nothing.
        self.shared.durable().await?;
        if let Some((place, name)) = probe {
            let Shared { stores, ps_clients, .. } = &*self.shared;
            let ps: Vec<_> = partitions.iter().map(|(ps, _)| ps.clone()).collect();
            let probed = checkpoints::probe(stores, ps_clients, &place, &ps, &name).await;
            self.shared.act(|books, now| books.probed(now, worker, lease, probed))?;
        }
        ps_client::open(&self.shared.ps_clients, partitions).await.map_err(|failure| match failure.kind {
            // The worker is fine, and so is its task: it waits for the ps.
            Kind::Unavailable => Failure::new(Kind::NotYet, failure.message),
            _ => failure,
        })?;
        Ok(Response::new(self.shared.act(|books, _| books.described(worker, lease))?))
    }

    async fn complete(
        &self,
        request: Request<pb::CompleteRequest>,
    ) -> Result<Response<pb::CompleteReply>, Status> {
        let (sender, request) = (Sender::of(&request), request.into_inner());
        let (incarnation, lease) = (request.incarnation, request.lease);
        let (accepted, next) = match request.result {
            Some(Report::Exported(_)) => (self.complete_export(&sender, request)?, None),
            _ => self.shared.act(|books, now| {
                sender.speaks_for(books, incarnation)?;
                books.complete_and_go_on(now, request)
            })?,
        };
        tracing::debug!(incarnation, lease, accepted, "task completed");
        if let Some(next) = &next {
            tell_granted(incarnation, next);
        }
        Ok(Response::new(pb::CompleteReply { accepted, next }))
    }

    async fn skip(&self, request: Request<pb::SkipRequest>) -> Result<Response<pb::SkipReply>, Status> {
        let (sender, request) = (Sender::of(&request), request.into_inner());
        let (incarnation, lease, records) = (request.incarnation, request.lease, request.records.len());
        self.shared.act(|books, now| {
            sender.speaks_for(books, incarnation)?;
            books.skip(now, request)
        })?;
        // The worker pushes without these records, and so does every other one after a restart.
        self.shared.durable().await?;
        tracing::debug!(incarnation, lease, records, "bad records skipped");
        Ok(Response::new(pb::SkipReply {}))
    }

    async fn fail(&self, request: Request<pb::FailRequest>) -> Result<Response<pb::FailReply>, Status> {
        let (sender, request) = (Sender::of(&request), request.into_inner());
        let pb::FailRequest { incarnation, lease, message, fatal, .. } = &request;
        self.shared.act(|books, now| {
            sender.speaks_for(books, *incarnation)?;
            books.fail(now, &request)
        })?;
        tracing::info!(incarnation, lease, fatal, reason = message, "task failed");
        Ok(Response::new(pb::FailReply {}))
    }

    async fn release(
        &self,
        request: Request<pb::ReleaseRequest>,
    ) -> Result<Response<pb::ReleaseReply>, Status> {
        let (sender, request) = (Sender::of(&request), request.into_inner());
        let (incarnation, lease) = (request.incarnation, request.lease);
        self.shared.act(|books, now| {
            sender.speaks_for(books, incarnation)?;
            books.release(now, request)
        })?;
        tracing::debug!(incarnation, lease, "lease released");
        Ok(Response::new(pb::ReleaseReply {}))
    }

    async fn download(
        &self,
        request: Request<pb::DownloadRequest>,
    ) -> Result<Response<Self::DownloadStream>, Status> {
        let sender = Sender::of(&request);
        let pb::DownloadRequest { job, name } = request.into_inner();
        let id = JobId(job);
        artifact_name(&name)?;
        let artifact = self.shared.act(|books, _| {
            sender.is_member(books)?;
            books.check_script(sender.caller.script(), id)?;
            let input = &books.job(id)?.input;
            let found = input.iter().find(|artifact| artifact.name == name).cloned();
            found.ok_or_else(|| {
                Failure::new(Kind::NotFound, format!("job {id} was submitted without a file `{name}`"))
            })
        })?;
        let parts = self.shared.artifacts.parts(id, Folder::Input, &artifact);
        Ok(Response::new(Box::pin(futures::stream::iter(parts.map(|part| part.map_err(Status::from))))))
    }

    async fn upload(
        &self,
        request: Request<Streaming<pb::UploadRequest>>,
    ) -> Result<Response<pb::UploadReply>, Status> {
        let sender = Sender::of(&request);
        let mut requests = Messages::of(request, self.shared.stream_silence);
        let first = requests.next().await?.ok_or_else(|| nothing("UploadRequest"))?;
        let Some(Part::Header(pb::UploadHeader { incarnation, lease })) = first.part else {
            let message = "UploadRequest.header: expected in the first message, found none";
            return Err(Failure::new(Kind::Malformed, message).into());
        };
        let (worker, lease) = (IncarnationId(incarnation), LeaseId(lease));
        let is_good = || {
            self.shared.act(|books, _| {
                sender.speaks_for(books, incarnation)?;
                books.exported_by(worker, lease).map(drop).ok_or_else(|| crate::job::ended(lease))
            })
        };
        is_good()?;
        let owner = sender.caller.token().map(|token| token.name.clone()).unwrap_or_default();
        let mut receiving = self.shared.artifacts.receive(&owner)?;
        while let Some(request) = requests.next().await? {
            match required("UploadRequest", "part", request.part)? {
                Part::Artifact(part) => {
                    receiving.reserve(&part, |_| Ok(()))?;
                    receiving.accept(part)?;
                }
                Part::Header(_) => {
                    let message = "UploadRequest.header: expected once, found again";
                    return Err(Failure::new(Kind::Malformed, message).into());
                }
            }
        }
        let received = receiving.finish()?;
        is_good()?;
        let earlier = {
            let mut uploads = self.shared.uploads.lock().unwrap_or_else(PoisonError::into_inner);
            uploads.insert((worker, lease), Arc::new(received))
        };
        // Its files are removed, which may wait for the disk: not under the lock.
        drop(earlier);
        Ok(Response::new(pb::UploadReply {}))
    }
}

impl FleetService {
    /// Answers with work as soon as there is some.
    async fn wait_for_lease(
        &self,
        sender: &Sender,
        request: pb::LeaseRequest,
    ) -> Result<Response<pb::LeaseReply>, Status> {
        let pb::LeaseRequest { incarnation, wait_ms } = request;
        let until = Instant::now() + Duration::from_millis(wait_ms.into()).min(WAIT_MAX);
        let asking = self.shared.work.ask(IncarnationId(incarnation));
        loop {
            // Before the books: at a shutdown the heartbeat of who asks may have ended already.
            if self.shared.stopping.is_cancelled() {
                return Err(leaving());
            }
            // Listening begins before looking, so that no news is missed between the two.
            let news = asking.news();
            tokio::pin!(news);
            news.as_mut().enable();
            let answer = self.shared.act(|books, now| {
                sender.speaks_for(books, incarnation)?;
                books.lease(now, IncarnationId(incarnation))
            })?;
            let again = match answer {
                Answer::Lease(lease) => {
                    tell_granted(incarnation, &lease);
                    return Ok(Response::new(pb::LeaseReply { lease: Some(*lease) }));
                }
                Answer::Wait(again) => Instant::now() + again.unwrap_or(WAIT_MAX),
            };
            tokio::select! {
                // In a fixed order, here and elsewhere, so that a simulation repeats itself.
                biased;
                () = self.shared.stopping.cancelled() => return Err(leaving()),
                () = news => {}
                () = tokio::time::sleep_until(again), if again < until => {}
                () = tokio::time::sleep_until(until) => {
                    return Ok(Response::new(pb::LeaseReply { lease: None }));
                }
            }
        }
    }

    /// Publishes what was uploaded and completes the lease: both or neither, so the job never ends
    /// without its files. What is published for a lease that ended meanwhile belongs to nothing.
    fn complete_export(&self, sender: &Sender, request: pb::CompleteRequest) -> Result<bool, Failure> {
        let (worker, lease) = (IncarnationId(request.incarnation), LeaseId(request.lease));
        let uploads = || self.shared.uploads.lock().unwrap_or_else(PoisonError::into_inner);
        let exported = self.shared.act(|books, _| {
            sender.speaks_for(books, request.incarnation)?;
            let Some(job) = books.exported_by(worker, lease) else { return Ok(None) };
            let uploaded = uploads().get(&(worker, lease)).cloned();
            let artifacts =
                uploaded.as_ref().map(|uploaded| uploaded.artifacts.as_slice()).unwrap_or_default();
            check_exported(request.result.as_ref(), artifacts)?;
            Ok::<_, Failure>(uploaded.map(|uploaded| (job, uploaded)))
        })?;
        if let Some((job, uploaded)) = &exported {
            self.shared.artifacts.adopt(uploaded, *job, Folder::Output)?;
        }
        let completed = self.shared.act(|books, now| books.complete(now, request));
        let completed_upload = uploads().remove(&(worker, lease));
        drop((exported, completed_upload));
        completed
    }
}

fn tell_granted(incarnation: u64, lease: &pb::Lease) {
    let &pb::Lease { id, job, task, attempt, placement, ref work, .. } = lease;
    let (microbatches, era) = match work {
        Some(pb::lease::Work::Train(train)) => (train.count, train.era),
        _ => (0, 0),
    };
    tracing::debug!(
        incarnation,
        lease = id,
        job,
        task,
        attempt,
        microbatches,
        era,
        placement,
        "lease granted"
    );
}

/// One heartbeat stream. Its end, however it comes, is the end of the process for the fleet.
struct Heartbeats {
    incarnation: IncarnationId,
    stream: u64,
    requests: Streaming<pb::HeartbeatRequest>,
    /// Leases that ended, of all workers.
    recalls: broadcast::Receiver<(IncarnationId, LeaseId)>,
    /// The answer to the first one.
    reply: Option<pb::HeartbeatReply>,
    shared: Arc<Shared>,
}

impl Heartbeats {
    async fn next(&mut self) -> Result<Option<pb::HeartbeatReply>, Status> {
        if let Some(reply) = self.reply.take() {
            return Ok(Some(reply));
        }
        let request = tokio::select! {
            biased;
            () = self.shared.stopping.cancelled() => return Err(leaving()),
            request = self.requests.message() => request?,
            lease = recalled(self.incarnation, &mut self.recalls) => {
                tracing::debug!(incarnation = %self.incarnation, %lease, "lease recalled");
                return Ok(Some(self.shared.act(|books, _| books.reply(vec![lease]))));
            }
        };
        let Some(request) = request else { return Ok(None) };
        if request.incarnation != self.incarnation.get() {
            let (expected, found) = (self.incarnation, request.incarnation);
            let message =
                format!("HeartbeatRequest.incarnation: expected {expected} as before, found {found}");
            return Err(Failure::new(Kind::Malformed, message).into());
        }
        Ok(Some(self.shared.act(|books, now| books.heartbeat(now, &request))?))
    }
}

/// Returns the next lease of this worker to be recalled. One that is missed here is told with the
/// next heartbeat.
async fn recalled(
    worker: IncarnationId,
    recalls: &mut broadcast::Receiver<(IncarnationId, LeaseId)>,
) -> LeaseId {
    loop {
        match recalls.recv().await {
            Ok((holder, lease)) if holder == worker => return lease,
            Ok(_) | Err(RecvError::Lagged(_)) => {}
            Err(RecvError::Closed) => std::future::pending().await,
        }
    }
}

impl Drop for Heartbeats {
    fn drop(&mut self) {
        // At a shutdown it is the master that leaves.
        if !self.shared.stopping.is_cancelled() {
            self.shared.act(|books, now| books.stream_broken(now, self.incarnation, self.stream));
        }
    }
}
