//! tonic in, tonic out: decodes and checks every message, calls [`Ps`], encodes the answer. Nothing is decided here.

use std::convert::Infallible;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use http::{Request as HttpRequest, Response as HttpResponse};
use proto::bulk::{self, Incoming, PULL, PUSH};
use proto::channel::MESSAGE_BYTES_MAX;
use proto::convert::{pack, required, tensors};
use proto::ids::{Era, JobId, PartitionId, Step, Version};
use proto::parameters::{Address, Parameters, Pull, Pulled, Pushed, Target, Want};
use proto::pb;
use proto::pb::parameters_server::{ParametersServer, SERVICE_NAME};
use proto::pb::{pull_reply, push_request};
use proto::spec::JobSpec;
use proto::timeline;
use tokio_util::sync::CancellationToken;
use tonic::body::Body;
use tonic::codegen::Service as HttpService;
use tonic::server::NamedService;
use tonic::{Request, Response, Status, Streaming};
use tracing::field::{Empty, debug};
use tracing::{Instrument as _, Span};

use crate::error::{Error, Result};
use crate::handle::Ps;
use crate::model::{Applied, Opening};
use crate::optim::norm::Squares;

/// The gRPC side of a ps.
#[derive(Clone, Debug)]
pub(crate) struct Service {
    ps: Ps,
    /// Once cancelled, pulls stop waiting.
    stopping: CancellationToken,
}

impl Service {
    pub(crate) const fn new(ps: Ps, stopping: CancellationToken) -> Self {
        Self { ps, stopping }
    }

    /// Receives a push: its header, which must be fine before memory is reserved, then its chunks.
    async fn receive(&self, mut stream: Incoming<Body>) -> Result<Pushed> {
        let first = stream.message::<pb::PushRequest>();
        let first = tokio::time::timeout(self.ps.options().push_timeout, first).await;
        let first = first.map_err(|_| misplaced("header"))??.and_then(|first| first.part);
        let Some(push_request::Part::Header(header)) = first else { return Err(misplaced("header")) };
        let (address, target) = header.try_into()?;
        record(address);
        if let Target::Node { node, .. } = target {
            Span::current().record("step", node.step.get());
        }
        let admission = self.ps.admit(address, target)?;
        let mut check = admission.check();
        let mut arriving = admission.arriving();
        let receiving = async {
            while let Some(message) = stream.message::<pb::PushRequest>().await? {
                let Some(push_request::Part::Chunks(message)) = message.part else {
                    return Err(misplaced("chunks"));
                };
                for chunk in message.chunks {
                    arriving.take(check.accept(chunk)?);
                }
            }
            check.finish()?;
            Ok(())
        };
        let waited = self.ps.options().push_timeout;
        let timed_out = |_| Error::PushTimedOut { place: admission.place(), waited };
        tokio::time::timeout(waited, receiving).await.map_err(timed_out)??;
        let pushed = admission.push(arriving.finish().await?).await?;
        Span::current().record("outcome", debug(pushed.outcome));
        Ok(pushed)
    }

    /// What a pull asks for, once it is there.
    async fn send(&self, mut request: Incoming<Body>) -> Result<Pulled, Status> {
        let request = request.message::<pb::PullRequest>().await?;
        let pull = Pull::try_from(required("Parameters.Pull", "request", request)?)?;
        record(pull.address);
        let (Want::Exact(version) | Want::AtLeast(version)) = pull.want;
        Span::current().record("version", version.get());
        tokio::select! {
            biased;
            pulled = self.ps.pull(pull) => Ok(pulled?),
            () = self.stopping.cancelled() => Err(Error::Stopping.into()),
        }
    }
}

/// Says in the span of a call where it goes.
fn record(address: Address) {
    let span = Span::current();
    span.record("job", address.job.get());
    span.record("partition", address.partition.get());
}

/// The span of a call, as the timeline shows it, below that of the caller.
macro_rules! served {
    ($name:literal, $number:ident, $request:expr) => {{
        let span = tracing::debug_span!(
            target: timeline::TARGET, parent: None, $name,
            otel.kind = "server", job = Empty, partition = Empty, $number = Empty, outcome = Empty
        );
        timeline::follow(&span, $request.headers());
        span
    }};
}

/// What a pull answers, one after the other.
fn replies(pulled: Pulled) -> impl Iterator<Item = pb::PullReply> + Send + Unpin + 'static {
    let part = |part| pb::PullReply { part: Some(part) };
    let header = pull_reply::Part::Header(pb::PullHeader { version: pulled.version.get() });
    let chunks = pack(pulled.chunks).map(move |chunks| part(pull_reply::Part::Chunks(chunks)));
    std::iter::once(part(header)).chain(chunks)
}

/// The service as the server sees it: pushes and pulls go past tonic's codec, which would copy what they carry.
#[derive(Clone, Debug)]
pub(crate) struct Bulk {
    service: Service,
    others: ParametersServer<Service>,
}

impl Bulk {
    pub(crate) fn new(service: Service) -> Self {
        let others = ParametersServer::new(service.clone())
            .max_decoding_message_size(MESSAGE_BYTES_MAX)
            .max_encoding_message_size(MESSAGE_BYTES_MAX);
        Self { service, others }
    }
}

impl NamedService for Bulk {
    const NAME: &'static str = SERVICE_NAME;
}

impl HttpService<HttpRequest<Body>> for Bulk {
    type Response = HttpResponse<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: HttpRequest<Body>) -> Self::Future {
        let service = self.service.clone();
        match request.uri().path() {
            PUSH => {
                let span = served!("push", step, request);
                let pushing = async move {
                    let pushed = service.receive(Incoming::request(request.into_body())).await;
                    let reply =
                        service.ps.counted(pushed).map(|pushed| std::iter::once(pb::PushReply::from(pushed)));
                    Ok(bulk::respond(reply.map_err(Status::from)))
                };
                Box::pin(pushing.instrument(span))
            }
            PULL => {
                let span = served!("pull", version, request);
                let pulling = async move {
                    let pulled = service.send(Incoming::request(request.into_body())).await;
                    Ok(bulk::respond(pulled.map(replies)))
                };
                Box::pin(pulling.instrument(span))
            }
            _ => self.others.call(request),
        }
    }
}

/// A stream of a push that is not one header and then chunks.
fn misplaced(expected: &str) -> Error {
    let (message, field) = ("PushRequest", "part");
    let found = format!("something else or nothing where the {expected} belong");
    Error::Message(proto::Error::Field { message, field, expected: expected.to_owned(), found })
}

#[tonic::async_trait]
impl pb::parameters_server::Parameters for Service {
    type PullStream = tokio_stream::Empty<Result<pb::PullReply, Status>>;

    async fn open(&self, request: Request<pb::OpenRequest>) -> Result<Response<pb::OpenReply>, Status> {
        let version = self.ps.open(opening(request.into_inner())?)?;
        Ok(Response::new(pb::OpenReply { version: version.map(Version::get) }))
    }

    async fn push(&self, _: Request<Streaming<pb::PushRequest>>) -> Result<Response<pb::PushReply>, Status> {
        Err(Status::internal("a push goes past tonic's codec"))
    }

    async fn pull(&self, _: Request<pb::PullRequest>) -> Result<Response<Self::PullStream>, Status> {
        Err(Status::internal("a pull goes past tonic's codec"))
    }

    async fn squares(
        &self,
        request: Request<pb::SquaresRequest>,
    ) -> Result<Response<pb::SquaresReply>, Status> {
        let pb::SquaresRequest { job, era, partition, step, wait_ms } = request.into_inner();
        let address = Address { job: JobId(job), partition: PartitionId(partition), era: Era(era) };
        let wait = Duration::from_millis(wait_ms.into());
        let measured = tokio::select! {
            biased;
            measured = self.ps.squares(address, Step(step), wait) => measured?,
            () = self.stopping.cancelled() => return Err(Error::Stopping.into()),
        };
        let squares = measured.iter().flat_map(|Squares(squares)| *squares).collect();
        Ok(Response::new(pb::SquaresReply { squares }))
    }

    async fn ledger(&self, request: Request<pb::LedgerRequest>) -> Result<Response<pb::LedgerReply>, Status> {
        let applied = self.ps.ledger(JobId(request.into_inner().job))?;
        let partitions = applied.into_iter().map(partition_ledger).collect();
        Ok(Response::new(pb::LedgerReply { partitions }))
    }

    async fn save(&self, request: Request<pb::SaveRequest>) -> Result<Response<pb::SaveReply>, Status> {
        let pb::SaveRequest { job, version } = request.into_inner();
        let coming = self.ps.save(JobId(job), Version(version))?;
        Ok(Response::new(pb::SaveReply { coming }))
    }

    async fn unpin(&self, request: Request<pb::UnpinRequest>) -> Result<Response<pb::UnpinReply>, Status> {
        let pb::UnpinRequest { job, era, version } = request.into_inner();
        self.ps.unpin(JobId(job), Era(era), Version(version))?;
        Ok(Response::new(pb::UnpinReply {}))
    }

    async fn close(&self, request: Request<pb::CloseRequest>) -> Result<Response<pb::CloseReply>, Status> {
        self.ps.close(JobId(request.into_inner().job));
        Ok(Response::new(pb::CloseReply {}))
    }
}

fn opening(request: pb::OpenRequest) -> Result<Opening> {
    let plan = required("OpenRequest", "plan", request.plan)?;
    Ok(Opening {
        address: Address {
            job: JobId(request.job),
            partition: PartitionId(request.partition),
            era: Era(request.era),
        },
        partitions: request.partitions,
        tensors: tensors(request.tensors)?,
        plan: plan.try_into()?,
        spec: JobSpec::from_json(&request.spec_json)?,
        restore: request.restore.map(TryInto::try_into).transpose()?,
        homes: request.homes,
    })
}

fn partition_ledger(applied: Applied) -> pb::PartitionLedger {
    let Applied { partition, era, version, ledger, restore_error } = applied;
    pb::PartitionLedger {
        partition: partition.get(),
        era: era.get(),
        version: version.map(Version::get),
        watermark: ledger.watermark().get(),
        applied_above: ledger.applied_above().map(Step::get).collect(),
        microbatches_applied: ledger.microbatches_applied(),
        samples_applied: ledger.samples_applied(),
        duplicates_dropped: ledger.duplicates_dropped(),
        restore_error: restore_error.unwrap_or_default(),
    }
}
