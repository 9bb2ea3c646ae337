//! tonic in, tonic out: decodes and checks every message, calls [`Ps`], encodes the answer. Nothing is decided here.

use std::pin::Pin;

use futures::Stream;
use proto::convert::{pack, required, tensors};
use proto::ids::{Era, JobId, PartitionId, Step, Version};
use proto::parameters::{Address, Parameters, Pull, Pushed};
use proto::pb;
use proto::pb::{pull_reply, push_request};
use proto::spec::JobSpec;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status, Streaming};

use crate::error::{Error, Result};
use crate::handle::Ps;
use crate::model::{Applied, Opening};

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
    async fn receive(&self, mut stream: Streaming<pb::PushRequest>) -> Result<Pushed> {
        let first = tokio::time::timeout(self.ps.options().push_timeout, stream.message()).await;
        let first = first.map_err(|_| misplaced("header"))??.and_then(|first| first.part);
        let Some(push_request::Part::Header(header)) = first else { return Err(misplaced("header")) };
        let (address, target) = header.try_into()?;
        let admission = self.ps.admit(address, target)?;
        let mut check = admission.check();
        let mut chunks = Vec::new();
        let arriving = async {
            while let Some(message) = stream.message().await? {
                let Some(push_request::Part::Chunks(message)) = message.part else {
                    return Err(misplaced("chunks"));
                };
                for chunk in message.chunks {
                    chunks.push(check.accept(chunk)?);
                }
            }
            Ok(())
        };
        let waited = self.ps.options().push_timeout;
        let timed_out = |_| Error::PushTimedOut { place: admission.place(), waited };
        tokio::time::timeout(waited, arriving).await.map_err(timed_out)??;
        admission.push(chunks).await
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
    type PullStream = Pin<Box<dyn Stream<Item = Result<pb::PullReply, Status>> + Send>>;

    async fn open(&self, request: Request<pb::OpenRequest>) -> Result<Response<pb::OpenReply>, Status> {
        let version = self.ps.open(opening(request.into_inner())?)?;
        Ok(Response::new(pb::OpenReply { version: version.map(Version::get) }))
    }

    async fn push(
        &self,
        request: Request<Streaming<pb::PushRequest>>,
    ) -> Result<Response<pb::PushReply>, Status> {
        let pushed = self.receive(request.into_inner()).await;
        Ok(Response::new(self.ps.counted(pushed)?.into()))
    }

    async fn pull(&self, request: Request<pb::PullRequest>) -> Result<Response<Self::PullStream>, Status> {
        let pull = Pull::try_from(request.into_inner())?;
        let pulled = tokio::select! {
            biased;
            pulled = self.ps.pull(pull) => pulled?,
            () = self.stopping.cancelled() => return Err(Error::Stopping.into()),
        };
        let part = |part| Ok(pb::PullReply { part: Some(part) });
        let header = pb::PullHeader { version: pulled.version.get() };
        let header = std::iter::once(part(pull_reply::Part::Header(header)));
        let chunks = pack(pulled.chunks).map(move |chunks| part(pull_reply::Part::Chunks(chunks)));
        Ok(Response::new(Box::pin(tokio_stream::iter(header.chain(chunks)))))
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
