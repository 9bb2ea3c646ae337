//! A ps behind gRPC, as it comes: over its connection, or by memory that both read when it is a process of this host.

use std::sync::Arc;

use kernels::cpu::cast;
use net::bulk::{self, PULL, PUSH, Until};
use net::channel::Channel;
use net::memory::REGION_BYTES_MIN;
use proto::convert::{encode, pack_as, required};
use proto::ids::{ChunkId, Version};
use proto::parameters::{Parameters, Pull, Push, Pushed, Take};
use proto::pb;
use proto::pb::pull_reply::Part as Reply;
use proto::pb::push_request::Part as Request;
use proto::status::{Failure, Kind};
use proto::wire::WireType;
use tokio::sync::oneshot;
use tracing::Instrument as _;

use crate::near::{Attached, Lent, Near};

/// A ps behind gRPC.
pub(crate) struct GrpcPs {
    channel: Channel,
    /// Of a worker with memory of its own.
    near: Option<Arc<Near>>,
}

impl GrpcPs {
    pub(crate) fn new(channel: Channel, near: Option<Near>) -> Self {
        Self { channel, near: near.map(Arc::new) }
    }

    async fn attached(&self) -> Option<(&Arc<Near>, Arc<Attached>)> {
        let near = self.near.as_ref()?;
        Some((near, near.attached(&self.channel).await?))
    }
}

#[async_trait::async_trait]
impl Parameters for GrpcPs {
    async fn push(&self, push: Push) -> Result<Pushed, Failure> {
        if push.chunks.iter().any(|chunk| chunk.values.len() >= REGION_BYTES_MIN)
            && let Some((near, attached)) = self.attached().await
            && let Some(lent) = near.lend(&attached)
        {
            let (reply, replied) = oneshot::channel();
            // In a task of its own: when the caller gives up, the ps may still read.
            let pushing = push_near(self.channel.clone(), near.clone(), lent, push, reply);
            tokio::spawn(pushing.in_current_span());
            let gone = |_| Failure::new(Kind::Internal, "a push ended without an answer");
            return replied.await.map_err(gone)?;
        }
        let wire = push.wire;
        let mut header = pb::PushHeader::from((push.address, push.target));
        header.wire = pb::WireType::from(wire).into();
        let header = part(Request::Header(header));
        let chunks = pack_as(push.chunks, move |chunk| encode(cast::encode_chunk(wire, chunk)))
            .map(|chunks| part(Request::Chunks(chunks)));
        let mut replies = bulk::call(&self.channel, PUSH, std::iter::once(header).chain(chunks)).await?;
        let reply = required("Parameters.Push", "reply", replies.message::<pb::PushReply>().await?)?;
        // Its end says whether it is one.
        replies.message::<pb::PushReply>().await?;
        Ok(reply.try_into()?)
    }

    async fn pull_into(&self, pull: Pull, take: &mut Take<'_>) -> Result<Version, Failure> {
        let attached = self.attached().await;
        let pulled = pull_by(&self.channel, attached.as_ref().map(|(_, attached)| &**attached), pull, take);
        let pulled = pulled.await;
        if let (Err(failure), Some(near)) = (&pulled, &self.near)
            && failure.kind == Kind::Unavailable
        {
            near.forget().await;
        }
        pulled
    }
}

fn part(part: Request) -> pb::PushRequest {
    pb::PushRequest { part: Some(part) }
}

/// A push by memory, where values stay f32: answers the caller, then waits until the ps does not read it any more.
async fn push_near(
    channel: Channel,
    near: Arc<Near>,
    lent: Arc<Lent>,
    push: Push,
    reply: oneshot::Sender<Result<Pushed, Failure>>,
) {
    let mut header = pb::PushHeader::from((push.address, push.target));
    header.attachment = lent.attachment().name().clone();
    let lending = lent.clone();
    let chunks = pack_as(push.chunks, move |chunk| lending.lend(chunk));
    let messages = std::iter::once(Request::Header(header)).chain(chunks.map(Request::Chunks)).map(part);
    let pushed = match bulk::call_until(&channel, PUSH, messages, None).await {
        Err(status) => Err(status.into()),
        Ok(mut replies) => {
            let pushed = async {
                let pushed = replies.message::<pb::PushReply>().await?;
                Ok(required("Parameters.Push", "reply", pushed)?.try_into()?)
            };
            let pushed: Result<Pushed, Failure> = pushed.await;
            let failed = pushed.as_ref().err().cloned();
            // Nobody waits for the answer any more when this cannot be told.
            let _ = reply.send(pushed);
            let ended = replies.message::<pb::PushReply>().await;
            if replies.is_answered() {
                lent.answered();
            }
            if failed.is_some_and(|failure| failure.kind == Kind::Unavailable) || ended.is_err() {
                near.forget().await;
            }
            return;
        }
    };
    let _ = reply.send(pushed);
    near.forget().await;
}

/// A pull whose chunks are taken from the connection, or, where they are told of, from the memory of the ps.
async fn pull_by(
    channel: &Channel,
    attached: Option<&Attached>,
    pull: Pull,
    take: &mut Take<'_>,
) -> Result<Version, Failure> {
    // Memory is read where it lies: f32.
    let wire = if attached.is_some() { WireType::F32 } else { pull.wire };
    let mut request = pb::PullRequest::from(Pull { wire, ..pull });
    let (mut reading, read) = (None, attached.map(|_| oneshot::channel::<()>()));
    let until = read.map(|(sender, read)| {
        reading = Some(sender);
        Box::pin(async move {
            let _ = read.await;
            None
        }) as Until
    });
    if let Some(attached) = attached {
        request.attachment = attached.attachment().name().clone();
    }
    let mut replies = bulk::call_until(channel, PULL, std::iter::once(request), until).await?;
    let (mut version, mut left) = (None, 0);
    // The end of the stream says whether what was read is what it should be.
    while let Some(reply) = replies.message::<pb::PullReply>().await? {
        match required("PullReply", "part", reply.part)? {
            Reply::Header(header) => {
                version = Some(Version(header.version));
                left = header.chunks;
            }
            Reply::Chunks(message) => {
                for chunk in message.chunks {
                    let values = match (chunk.region, attached) {
                        (Some(region), Some(attached)) => attached.attachment().read(region)?,
                        _ => &chunk.values,
                    };
                    take(ChunkId(chunk.id), wire, values)?;
                    left = left.saturating_sub(1);
                }
            }
        }
        if left == 0 {
            // Ends the request: all has been read.
            reading = None;
        }
    }
    drop(reading);
    Ok(required("PullReply", "header", version)?)
}
