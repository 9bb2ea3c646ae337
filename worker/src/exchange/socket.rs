//! The socket carrier: gRPC over one connection, whose payloads are not copied ([`bulk`]).

use futures::{StreamExt as _, TryStreamExt as _, stream};
use kernels::cpu::cast;
use net::bulk::{self, PULL, PUSH};
use net::memory::attach::Attachment;
use net::ps_client::PsClient;
use proto::convert::{encode, pack_as, required};
use proto::ids::{ChunkId, Version};
use proto::parameters::{ComingChunks, GivenValues, Parameters, Pull, Push, Pushed, Take};
use proto::pb;
use proto::pb::pull_reply::Part as Reply;
use proto::pb::push_request::Part as Request;
use proto::status::Failure;
use proto::tensor::Chunk;
use proto::wire::WireType;
use tokio::sync::oneshot;
use tonic::Status;

use super::fetched;

/// A ps behind gRPC.
#[derive(Debug)]
pub(super) struct Socket {
    ps: PsClient,
}

impl Socket {
    pub(super) const fn new(ps: PsClient) -> Self {
        Self { ps }
    }

    pub(super) const fn ps(&self) -> &PsClient {
        &self.ps
    }
}

#[async_trait::async_trait]
impl Parameters for Socket {
    /// Sends the chunks from where they lie, encoded in the wire type.
    async fn push(&self, push: Push) -> Result<Pushed, Failure> {
        let header = header(&push);
        let messages = std::iter::once(header).chain(messages(push.chunks, push.wire).await?);
        pushed(bulk::call(self.ps.channel(), PUSH, messages).await?).await
    }

    /// Sends the chunks as they come. A failure resets the request.
    async fn push_coming(&self, push: Push, coming: ComingChunks) -> Result<Pushed, Failure> {
        let (header, wire) = (header(&push), push.wire);
        let rest = coming.and_then(move |chunks| messages(chunks, wire)).map_err(Status::from);
        let rest = rest.map_ok(|messages| stream::iter(messages.map(Ok::<_, Status>))).try_flatten();
        let all = stream::once(std::future::ready(Ok(header))).chain(rest);
        pushed(bulk::call_coming(self.ps.channel(), PUSH, all.boxed()).await?).await
    }

    /// Takes the chunks from the memory that the connection was read into.
    async fn pull_into(&self, pull: Pull, take: &mut Take<'_>) -> Result<Version, Failure> {
        let request = std::iter::once(pb::PullRequest::from(pull));
        let replies = bulk::call(self.ps.channel(), PULL, request).await?;
        take_all(replies, None, pull.wire, None, take).await
    }
}

/// Returns the first message of a push.
fn header(push: &Push) -> pb::PushRequest {
    let mut header = pb::PushHeader::from((push.address, push.target));
    header.wire = pb::WireType::from(push.wire).into();
    part(Request::Header(header))
}

/// Returns the messages of some chunks, which are encoded in the wire type as they are sent. Those
/// of a device are encoded there first.
async fn messages(
    chunks: Vec<Chunk>,
    wire: WireType,
) -> Result<impl Iterator<Item = pb::PushRequest> + Send + Unpin, Failure> {
    let encoded = fetched::encoded(&chunks, wire).await?;
    let is_encoded = encoded.is_some();
    let send = move |chunk| match is_encoded {
        true => encode(chunk),
        false => encode(cast::encode_chunk(wire, chunk)),
    };
    Ok(pack_as(encoded.unwrap_or(chunks), send).map(|chunks| part(Request::Chunks(chunks))))
}

/// Returns the answer to a push.
async fn pushed(mut replies: bulk::Replies) -> Result<Pushed, Failure> {
    let reply = required("Parameters.Push", "reply", replies.message::<pb::PushReply>().await?)?;
    // Its end says whether it is one.
    replies.message::<pb::PushReply>().await?;
    Ok(reply.try_into()?)
}

pub(super) fn part(part: Request) -> pb::PushRequest {
    pb::PushRequest { part: Some(part) }
}

/// The memory of a ps during one pull.
pub(super) struct Reading<'a> {
    pub(super) attachment: &'a Attachment,
    /// Dropped when all chunks were taken: the ps may write to that memory again.
    pub(super) until: oneshot::Sender<()>,
}

/// Hands the chunks of a pull to `take`: from the connection, or from the memory of the ps, where
/// the chunks name regions. The `header` may have been received already.
pub(super) async fn take_all(
    mut replies: bulk::Replies,
    header: Option<pb::PullHeader>,
    wire: WireType,
    reading: Option<Reading<'_>>,
    take: &mut Take<'_>,
) -> Result<Version, Failure> {
    let (attachment, mut until) = reading.map(|reading| (reading.attachment, reading.until)).unzip();
    let mut version = header.map(|header| Version(header.version));
    let mut left = header.map_or(0, |header| header.chunks);
    // The end of the stream says whether what was read is what it should be.
    while let Some(reply) = replies.message::<pb::PullReply>().await? {
        match required("PullReply", "part", reply.part)? {
            Reply::Header(header) => {
                version = Some(Version(header.version));
                left = header.chunks;
            }
            Reply::Chunks(message) => {
                for chunk in message.chunks {
                    let values = match (chunk.region, attachment) {
                        (Some(region), Some(attachment)) => attachment.read(region)?,
                        _ => &chunk.values,
                    };
                    take(ChunkId(chunk.id), wire, GivenValues::Host(values))?;
                    left = left.saturating_sub(1);
                }
            }
        }
        if left == 0 {
            // Ends the request: all has been read.
            until = None;
        }
    }
    drop(until);
    Ok(required("PullReply", "header", version)?)
}
