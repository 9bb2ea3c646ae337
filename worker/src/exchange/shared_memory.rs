//! The shared-memory carrier: a push tells the ps where the gradients lie, and a pull is told where
//! the weights lie (ADR 17). For a ps on the device of this worker, both lie in memory of the
//! device (ADR 58).
//!
//! Calls still pass the socket, without the payloads. The socket also carries what does not lie in
//! such memory, and everything for a ps that is not of this host.

use std::sync::Arc;

use model::Allocator;
use net::bulk::{self, PUSH, Until};
use net::memory::{REGION_BYTES_MIN, Regions};
use net::ps_client::PsClient;
use proto::convert::{pack_as, required};
use proto::ids::Version;
use proto::parameters::{ComingChunks, Parameters, Pull, Push, Pushed, Take};
use proto::pb;
use proto::pb::push_request::Part as Request;
use proto::status::{Failure, Kind};
use proto::tensor::Values;
use proto::wire::WireType;
use tokio::sync::oneshot;
use tracing::Instrument as _;

use super::attached::{Attached, Attaching, Lent, Placed};
use super::exported::Exporter;
use super::fetched;
use super::placed::{Answer, ask, call_pull, read, read_there};
use super::socket::{Reading, Socket, part, take_all};
use crate::metrics::Metrics;

/// A ps that may be a process of this host.
pub(super) struct SharedMemory {
    socket: Socket,
    attaching: Arc<Attaching>,
}

impl SharedMemory {
    /// Copies what this worker sends into `regions`, unless it lies in their memory already, or
    /// into memory of a device for a ps on it.
    pub(super) fn new(
        ps: PsClient,
        regions: Regions,
        exporter: Option<Arc<Exporter>>,
        metrics: Arc<Metrics>,
    ) -> Self {
        Self { socket: Socket::new(ps), attaching: Arc::new(Attaching::new(regions, exporter, metrics)) }
    }

    async fn attached(&self) -> Option<Arc<Attached>> {
        self.attaching.attached(self.socket.ps()).await
    }

    /// Reads the chunks where they lie in the memory of the ps: f32.
    async fn read(&self, attached: &Attached, pull: Pull, take: &mut Take<'_>) -> Result<Version, Failure> {
        let (replies, until) = call_pull(self.socket.ps(), attached.attachment(), pull, None).await?;
        let reading = Reading { attachment: attached.attachment(), until };
        take_all(replies, None, WireType::F32, Some(reading), take).await
    }

    /// Offers room in memory of the device, and reads the chunks there, or where they lie in the
    /// memory of the ps.
    async fn read_placed(
        &self,
        attached: &Attached,
        room: Placed,
        pull: Pull,
        take: &mut Take<'_>,
    ) -> Result<Version, Failure> {
        // In a task of its own: when the caller gives up, the ps may still write.
        let asking = tokio::spawn(ask(self.socket.ps().clone(), room, pull).in_current_span());
        let asked = asking.await.map_err(|error| Failure::new(Kind::Internal, error))?;
        match asked? {
            Answer::Placed { version, chunks, placed } => {
                match pull.on_device {
                    true => read_there(placed, &chunks, take).await?,
                    false => read(placed, &chunks, take).await?,
                }
                Ok(version)
            }
            Answer::Elsewhere { header, replies, until } => {
                let reading = Reading { attachment: attached.attachment(), until };
                take_all(replies, Some(header), WireType::F32, Some(reading), take).await
            }
        }
    }
}

#[async_trait::async_trait]
impl Parameters for SharedMemory {
    /// Lends the chunks to the ps. It may read them after this has returned, until it has applied
    /// them or added them to others.
    async fn push(&self, push: Push) -> Result<Pushed, Failure> {
        if push.chunks.iter().any(|chunk| chunk.values.len() >= REGION_BYTES_MIN)
            && let Some(attached) = self.attached().await
        {
            let (ps, attaching) = (self.socket.ps().clone(), self.attaching.clone());
            // In a task of its own: when the caller gives up, the ps may still read.
            let (reply, replied) = oneshot::channel();
            if let Some(placed) = attaching.place(&attached, &ps, &push).await {
                tokio::spawn(push_placed(ps, attaching, placed, push, reply).in_current_span());
            } else if let Some(lent) = attaching.lend(&attached) {
                let push = fetched::whole(push).await?;
                tokio::spawn(push_lent(ps, attaching, lent, push, reply).in_current_span());
            } else {
                return self.socket.push(push).await;
            }
            let gone = |_| Failure::new(Kind::Internal, "a push ended without an answer");
            return replied.await.map_err(gone)?;
        }
        self.socket.push(push).await
    }

    /// Sends what comes through the socket to a ps that is not of this host. For the others all of
    /// it is waited for: no values travel then, only their places.
    async fn push_coming(&self, push: Push, coming: ComingChunks) -> Result<Pushed, Failure> {
        if self.attached().await.is_none() {
            return self.socket.push_coming(push, coming).await;
        }
        self.push(push.with(coming).await?).await
    }

    /// Takes the chunks from the memory of the ps. What was taken counts only when this succeeds.
    async fn pull_into(&self, pull: Pull, take: &mut Take<'_>) -> Result<Version, Failure> {
        let pulled = match self.attached().await {
            Some(attached) => match attached.room() {
                Some(room) => self.read_placed(&attached, room, pull, take).await,
                None => self.read(&attached, pull, take).await,
            },
            None => self.socket.pull_into(pull, take).await,
        };
        if pulled.as_ref().is_err_and(|failure| failure.kind == Kind::Unavailable) {
            self.attaching.forget().await;
        }
        pulled
    }
}

/// A push by memory, where values stay f32: answers the caller, then waits until the ps does not
/// read the memory any more.
async fn push_lent(
    ps: PsClient,
    attaching: Arc<Attaching>,
    lent: Arc<Lent>,
    push: Push,
    reply: oneshot::Sender<Result<Pushed, Failure>>,
) {
    let mut header = pb::PushHeader::from((push.address, push.target));
    header.attachment = lent.attachment().name().clone();
    let lending = lent.clone();
    let chunks = pack_as(push.chunks, move |chunk| lending.lend(chunk));
    let messages = std::iter::once(Request::Header(header)).chain(chunks.map(Request::Chunks)).map(part);
    let mut replies = match bulk::call_until(ps.channel(), PUSH, messages, None).await {
        Ok(replies) => replies,
        Err(status) => {
            let _ = reply.send(Err(status.into()));
            return attaching.forget().await;
        }
    };
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
        attaching.forget().await;
    }
}

/// A push by memory of the device, where values stay f32. The ps reads it before its response
/// begins. Then the request ends, which tells the ps that this worker lived while it read, and the
/// push counts.
async fn push_placed(
    ps: PsClient,
    attaching: Arc<Attaching>,
    mut placed: Placed,
    push: Push,
    reply: oneshot::Sender<Result<Pushed, Failure>>,
) {
    let mut header = pb::PushHeader::from((push.address, push.target));
    header.attachment = placed.attachment().name().clone();
    header.on_device = true;
    let chunks = pack_as(push.chunks, placed.lend());
    let messages = std::iter::once(Request::Header(header)).chain(chunks.map(Request::Chunks)).map(part);
    let (lives, lived) = oneshot::channel::<()>();
    let until = Box::pin(async move {
        // A task that is dropped has not seen the response, and the request does not end.
        if lived.await.is_err() {
            std::future::pending::<()>().await;
        }
        None
    }) as Until;
    let mut replies = match bulk::call_until(ps.channel(), PUSH, messages, Some(until)).await {
        Ok(replies) => replies,
        Err(status) => {
            let _ = reply.send(Err(status.into()));
            return attaching.forget().await;
        }
    };
    // When the ps is gone, the call ends by itself.
    let _ = lives.send(());
    let pushed = replies.message::<pb::PushReply>().await;
    if replies.is_answered() || matches!(pushed, Ok(Some(_))) {
        placed.answered();
    }
    // Before the caller makes the next push, which may need the memory.
    drop(placed);
    let read = |reply: Option<pb::PushReply>| -> Result<Pushed, Failure> {
        Ok(required("Parameters.Push", "reply", reply)?.try_into()?)
    };
    let pushed = pushed.map_err(Failure::from).and_then(read);
    let failed = pushed.as_ref().err().cloned();
    // Nobody waits for the answer any more when this cannot be told.
    let _ = reply.send(pushed);
    let ended = replies.message::<pb::PushReply>().await;
    if failed.is_some_and(|failure| failure.kind == Kind::Unavailable) || ended.is_err() {
        attaching.forget().await;
    }
}

/// Shared memory as a model sees it.
pub(super) struct GradientMemory(pub(super) Regions);

impl Allocator for GradientMemory {
    fn floats(&self, len: usize) -> Option<Values> {
        self.0.floats(len)
    }
}
