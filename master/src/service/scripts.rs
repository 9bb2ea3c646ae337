//! The `Scripts` service: users send scripts, and agents run their processes.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use futures::StreamExt as _;
use net::security::{Caller, TokenRole};
use proto::convert::required;
use proto::ids::JobId;
use proto::pb;
use proto::pb::artifact_part::Part as File;
use proto::pb::bundle_reply::Part as Sent;
use proto::pb::script_request::Part;
use proto::pb::scripts_server::Scripts;
use proto::script::{BUNDLE, BUNDLE_BYTES_MAX, LINES_BYTES_MAX};
use proto::status::{Failure, Kind};
use tokio::sync::watch;
use tonic::{Request, Response, Status, Streaming};

use super::{Answers, Messages, nothing};
use crate::artifacts::Folder;
use crate::books::Books;
use crate::owner::Owner;
use crate::scripts::{AgentId, Log, Stage};
use crate::shared::{Shared, leaving};

/// The service, on the books.
#[derive(Debug)]
pub(crate) struct ScriptsService {
    shared: Arc<Shared>,
}

impl ScriptsService {
    pub(crate) const fn new(shared: Arc<Shared>) -> Self {
        Self { shared }
    }
}

#[tonic::async_trait]
impl Scripts for ScriptsService {
    type AttendStream = Answers<pb::AttendReply>;
    type BundleStream = Answers<pb::BundleReply>;
    type LogsStream = Answers<pb::LogsReply>;

    async fn submit(
        &self,
        request: Request<Streaming<pb::ScriptRequest>>,
    ) -> Result<Response<pb::SubmitReply>, Status> {
        let caller = Caller::of(&request);
        caller.may_send_scripts()?;
        let owner = Owner::of(&caller);
        let mut requests = Messages::of(request, self.shared.stream_silence);
        let malformed = |message: &str| Status::from(Failure::new(Kind::Malformed, message));
        let first = requests.next().await?.ok_or_else(|| nothing("ScriptRequest"))?;
        let Some(Part::Script(script)) = first.part else {
            return Err(malformed("ScriptRequest.script: expected in the first message, found none"));
        };
        proto::script::check(&script).map_err(Failure::from)?;
        // Refused before its files travel.
        self.shared.check_journal()?;
        let admit = |books: &mut Books, of_owner| {
            books.check_owner(&owner, of_owner)?;
            books.admit_script(&script)
        };
        self.shared.act(|books, _| admit(books, 0))?;
        let secrets = match script.secrets.is_empty() {
            true => Vec::new(),
            false => {
                let second = requests.next().await?.and_then(|second| second.part);
                let Some(Part::Secrets(pb::Secrets { secrets })) = second else {
                    return Err(malformed(
                        "ScriptRequest.secrets: expected in the second message, found none",
                    ));
                };
                proto::secret::check(&script.secrets, &secrets).map_err(Failure::from)?;
                secrets
            }
        };
        let mut receiving = self.shared.artifacts.receive(&owner.name)?;
        while let Some(request) = requests.next().await? {
            let Part::Artifact(part) = required("ScriptRequest", "part", request.part)? else {
                return Err(malformed(
                    "ScriptRequest.artifact: expected after the first messages, found another part",
                ));
            };
            if let Some(File::Header(file)) = &part.part
                && (file.name != BUNDLE || file.size > BUNDLE_BYTES_MAX)
            {
                let message = format!(
                    "ScriptRequest.artifact: expected one file `{BUNDLE}` of at most {BUNDLE_BYTES_MAX} bytes, found `{}` of {}",
                    file.name.escape_debug(),
                    file.size
                );
                return Err(malformed(&message));
            }
            let check = |books: &Books, of_owner| books.check_owner(&owner, of_owner);
            self.shared.act(|books, _| receiving.reserve(&part, |of_owner| check(books, of_owner)))?;
            receiving.accept(part).inspect_err(|failure| {
                caller.refuse("a file of a submission", &failure.message);
            })?;
        }
        let mut received = receiving.finish()?;
        let [bundle] = &received.artifacts[..] else {
            return Err(malformed("ScriptRequest.artifact: expected the bundle, found none"));
        };
        let bundle = bundle.clone();
        let reply = {
            // As for jobs: the number is still the next one when the file lies under it.
            let _next = self.shared.submitting.lock().await;
            let id = self.shared.act(|books, _| admit(books, received.of_owner()))?;
            self.shared.artifacts.adopt(&received, id, Folder::Input)?;
            self.shared.act(|books, now| {
                let id = admit(books, received.of_owner())?;
                let reply = books.submit_script(now, id, script.clone(), secrets, bundle, owner.name.clone());
                received.given();
                Ok::<_, Failure>(reply)
            })?
        };
        self.shared.durable().await?;
        tracing::info!(script = reply.job, "script {} submitted", reply.name);
        Ok(Response::new(reply))
    }

    async fn attend(
        &self,
        request: Request<Streaming<pb::AttendRequest>>,
    ) -> Result<Response<Self::AttendStream>, Status> {
        let mut requests = Messages::of(request, self.shared.stream_silence);
        let first = requests.next().await?.ok_or_else(|| nothing("AttendRequest"))?;
        let ((agent, stream), orders) = self.shared.act(|books, now| {
            let orders = books.watch_orders();
            Ok::<_, Failure>((books.attend(now, &first)?, orders))
        })?;
        tracing::info!("agent `{}` takes scripts, {} processes", first.name, first.processes);
        let attending = Attending {
            agent,
            stream,
            name: first.name,
            requests: requests.into_stream(),
            orders,
            is_first: true,
            shared: self.shared.clone(),
        };
        let replies = futures::stream::try_unfold(attending, |mut attending| async move {
            Ok(attending.next().await?.map(|reply| (reply, attending)))
        });
        Ok(Response::new(Box::pin(replies)))
    }

    async fn bundle(
        &self,
        request: Request<pb::BundleRequest>,
    ) -> Result<Response<Self::BundleStream>, Status> {
        let id = JobId(request.into_inner().script);
        let (description, owner, secrets, bundle) = self.shared.act(|books, _| {
            let script = books.script(id)?;
            let secrets = script.secrets(id)?.to_vec();
            let (description, owner) = (script.description.clone(), script.owner.clone());
            Ok::<_, Failure>((description, owner, secrets, script.bundle.clone()))
        })?;
        let secrets = (!secrets.is_empty()).then_some(Sent::Secrets(pb::Secrets { secrets }));
        let described = pb::BundleReply { part: Some(Sent::Script(description)), owner };
        let secrets = secrets.map(|part| pb::BundleReply { part: Some(part), ..Default::default() });
        let first = [Some(Ok(described)), secrets.map(Ok)];
        let parts = self.shared.artifacts.parts(id, Folder::Input, &bundle);
        let sent = |part| pb::BundleReply { part: Some(Sent::Artifact(part)), ..Default::default() };
        let parts = parts.map(move |part| part.map(sent).map_err(Status::from));
        let all = futures::stream::iter(first.into_iter().flatten().chain(parts));
        Ok(Response::new(all.boxed()))
    }

    async fn logs(&self, request: Request<pb::LogsRequest>) -> Result<Response<Self::LogsStream>, Status> {
        let caller = Caller::of(&request);
        let pb::LogsRequest { job, process, follow } = request.into_inner();
        let script = self.shared.act(|books, _| {
            let (script, log) = books.log(&job)?;
            may_read(&caller, log)?;
            Ok::<_, Failure>(script)
        })?;
        let (shared, seen) = (self.shared.clone(), BTreeMap::new());
        let reader = Reader { shared, script, process, follow, seen, read: VecDeque::new() };
        let replies = futures::stream::try_unfold(reader, |mut reader| async move {
            Ok(reader.next().await?.map(|reply| (reply, reader)))
        });
        Ok(Response::new(Box::pin(replies)))
    }

    async fn stage(&self, request: Request<pb::StageRequest>) -> Result<Response<pb::StageReply>, Status> {
        let id = JobId(request.into_inner().script);
        let (stage, ps) = self.shared.act(|books, _| (books.stage(id), books.ps_of(id)));
        let stage = match stage {
            Stage::Unjoined => pb::ScriptStage::Unjoined,
            Stage::Training => pb::ScriptStage::Training,
            Stage::Ended => pb::ScriptStage::Ended,
        };
        Ok(Response::new(pb::StageReply { stage: stage.into(), ps }))
    }
}

/// Checks that a caller may read what the processes of a script say.
///
/// # Errors
/// The caller is neither the owner of the script nor an operator.
fn may_read(caller: &Caller, log: &Log) -> Result<(), Failure> {
    match caller.token() {
        Some(token) if token.role != TokenRole::Operate && token.name != log.owner => {
            let message = format!(
                "{} is not a script of `{}`; its owner and operators may read its logs",
                log.name, token.name
            );
            caller.refuse("logs of somebody else", &message);
            Err(Failure::new(Kind::Denied, message))
        }
        _ => Ok(()),
    }
}

/// Reads the logs of a script, first the lines that are there, then each as it comes.
struct Reader {
    shared: Arc<Shared>,
    script: JobId,
    /// The only process; `None`: all of them.
    process: Option<u32>,
    follow: bool,
    /// Number of the newest line of each process that was read.
    seen: BTreeMap<u32, u64>,
    /// Read and not yet sent.
    read: VecDeque<pb::LogsReply>,
}

impl Reader {
    /// Returns the next lines; `None` after the last ones.
    async fn next(&mut self) -> Result<Option<pb::LogsReply>, Status> {
        loop {
            if let Some(reply) = self.read.pop_front() {
                return Ok(Some(reply));
            }
            let found = self.shared.act(|books, _| {
                let log = books.log_of(self.script)?;
                let read = log.read(self.process, &self.seen, LINES_BYTES_MAX);
                Some((log.name.clone(), read, log.is_over, log.watch()))
            });
            let Some((name, read, is_over, mut news)) = found else { return Ok(None) };
            for (process, first, lines) in read {
                let seen = self.seen.entry(process).or_default();
                let missed = first - *seen - 1;
                *seen = first + lines.len() as u64 - 1;
                self.read.push_back(pb::LogsReply { worker: format!("{name}-{process}"), missed, lines });
            }
            if !self.read.is_empty() {
                continue;
            }
            if is_over || !self.follow {
                return Ok(None);
            }
            tokio::select! {
                biased;
                () = self.shared.stopping.cancelled() => return Err(leaving()),
                _ = news.changed() => {}
            }
        }
    }
}

/// One stream of an agent. Its end, however it comes, is the end of the agent.
struct Attending {
    agent: AgentId,
    stream: u64,
    name: String,
    requests: Streaming<pb::AttendRequest>,
    /// Agents are to run other processes.
    orders: watch::Receiver<u64>,
    /// Nothing was answered yet.
    is_first: bool,
    shared: Arc<Shared>,
}

impl Attending {
    async fn next(&mut self) -> Result<Option<pb::AttendReply>, Status> {
        if !std::mem::take(&mut self.is_first) {
            tokio::select! {
                biased;
                () = self.shared.stopping.cancelled() => return Err(leaving()),
                request = self.requests.message() => {
                    let Some(request) = request? else { return Ok(None) };
                    self.shared.act(|books, now| books.heard(now, self.agent, self.stream, &request))?;
                }
                _ = self.orders.changed() => {}
            }
        }
        let reply = self.shared.act(|books, _| books.orders(self.agent));
        // An agent forgets a process that it need not run any more, so nobody forgets its end.
        self.shared.durable().await?;
        Ok(Some(reply))
    }
}

impl Drop for Attending {
    fn drop(&mut self) {
        // At a shutdown it is the master that leaves.
        if !self.shared.stopping.is_cancelled() {
            tracing::info!("agent `{}` is gone", self.name);
            self.shared.act(|books, now| books.agent_gone(now, self.agent, self.stream));
        }
    }
}
