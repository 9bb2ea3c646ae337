//! tonic in, tonic out: decodes and checks every message, calls [`Ps`], encodes the answer. Nothing
//! is decided here.

use std::convert::Infallible;
use std::future::Future;
use std::option;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, Request as HttpRequest, Response as HttpResponse};
use kernels::Squares;
use kernels::cpu::cast;
use net::bulk::{self, Incoming, PULL, PUSH, Until};
use net::channel::MESSAGE_BYTES_MAX;
use net::memory::Memory;
use net::security::Caller;
use net::timeline::Mark;
use proto::convert::{encode, pack_as, required, tensors, wire_type};
use proto::ids::{ChunkId, Era, JobId, PartitionId, Step, Version};
use proto::parameters::{Address, Pull, Pulled, Pushed};
use proto::pb;
use proto::pb::parameters_server::{ParametersServer, SERVICE_NAME};
use proto::pb::{pull_reply, push_request};
use proto::spec::JobSpec;
use proto::status::{Failure, Kind};
use proto::tensor::Chunk;
use proto::wire::WireType;
use tokio::sync::oneshot;
use tokio::task::AbortHandle;
use tokio_util::sync::CancellationToken;
use tonic::body::Body;
use tonic::codegen::Service as HttpService;
use tonic::server::NamedService;
use tonic::{Request, Response, Status, Streaming};

use crate::error::{Error, Result};
use crate::opening::{Applied, Opening};
use crate::partition::pull::Given;
use crate::partition::push::{Carrier, Header};
use crate::partitions::{MasterStart, Ps};

/// Regions in one message of an answer whose values lie in memory of the device.
const REGIONS_MAX: usize = 4096;

/// Clones are held for as long as this ps reads any of a sender's memory, except that its device
/// may still have to run what was queued.
type Held = Arc<Hold>;

/// Says at its end whether the device may still read the sender's memory.
struct Hold {
    /// `None` only while it is dropped.
    ended: Option<oneshot::Sender<bool>>,
    /// The device was told to read, and has not been waited for.
    on_device: AtomicBool,
}

impl Hold {
    fn new() -> (Held, oneshot::Receiver<bool>) {
        let (ended, released) = oneshot::channel();
        (Arc::new(Self { ended: Some(ended), on_device: AtomicBool::new(false) }), released)
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        let on_device = *self.on_device.get_mut();
        // Nobody waits any more when the call was given up.
        let _ = self.ended.take().map(|ended| ended.send(on_device));
    }
}

/// The gRPC side of a ps.
#[derive(Clone, Debug)]
pub(crate) struct Service {
    ps: Ps,
    /// Token that ends waiting pulls once it is cancelled.
    stopping: CancellationToken,
}

impl Service {
    pub(crate) const fn new(ps: Ps, stopping: CancellationToken) -> Self {
        Self { ps, stopping }
    }

    /// Receives a push: its header, which must be fine before memory is reserved, then its chunks.
    /// An agent that forwards it names `script`.
    /// The last clone of `held` is dropped when nothing of the sender's memory is read any more.
    /// If the chunks lie in memory of the device, `read` is told when they are read. The push
    /// counts only when the sender has seen that, because memory of a device may go with its
    /// process.
    async fn receive(
        &self,
        mut stream: Incoming<Body>,
        script: Option<JobId>,
        held: Held,
        mark: Option<Mark>,
        read: oneshot::Sender<()>,
    ) -> Result<Pushed> {
        let first = stream.message::<pb::PushRequest>();
        let first = tokio::time::timeout(self.ps.options().push_timeout, first).await;
        let first = first.map_err(|_| misplaced("header"))??.and_then(|first| first.part);
        let Some(push_request::Part::Header(mut header)) = first else { return Err(misplaced("header")) };
        let name = std::mem::take(&mut header.attachment);
        let (wire, on_device) = (wire_type("PushHeader", header.wire)?, header.on_device);
        let (address, target) = header.try_into()?;
        let attachment = self.ps.attachments().get(&name);
        let carrier = match attachment {
            Some(_) if on_device => Carrier::Device,
            Some(_) => Carrier::Memory,
            None => Carrier::Socket,
        };
        let partition = self.ps.find(address)?;
        partition.check_script(script)?;
        let place = partition.place();
        let mut arriving = partition.receive(Header { era: address.era, target, wire, carrier, mark })?;
        if attachment.is_none() && (on_device || !name.is_empty()) {
            return Err(Error::NotAttached { place });
        }
        if wire.rounds() && !name.is_empty() {
            let expected = "f32 with an attachment".to_owned();
            let (message, field, found) = ("PushHeader", "wire", wire.to_string());
            return Err(Error::Message(proto::Error::Field { message, field, expected, found }));
        }
        let receiving = async {
            while let Some(message) = stream.message::<pb::PushRequest>().await? {
                let Some(push_request::Part::Chunks(message)) = message.part else {
                    return Err(misplaced("chunks"));
                };
                for chunk in message.chunks {
                    let id = ChunkId(chunk.id);
                    let Some(region) = chunk.region else {
                        arriving.take(id, chunk.values)?;
                        continue;
                    };
                    let attachment = attachment.as_ref().ok_or(Error::NotAttached { place })?;
                    if on_device {
                        let lent = attachment.region(region, held.clone())?;
                        held.on_device.store(true, Ordering::Relaxed);
                        arriving.take(id, lent.ok_or(Error::NotAttached { place })?)?;
                        self.ps.metrics().push_bytes_device.add(region.bytes);
                    } else {
                        arriving.take(id, attachment.share(region, held.clone())?)?;
                        self.ps.metrics().push_bytes_shared.add(region.bytes);
                    }
                }
                if on_device && arriving.is_whole() {
                    break;
                }
            }
            if !on_device {
                return Ok(arriving);
            }
            let arriving = arriving.read().await?;
            held.on_device.store(false, Ordering::Relaxed);
            // Without a receiver the call is given up, and this is not polled any more.
            let _ = read.send(());
            match stream.message::<pb::PushRequest>().await? {
                None => Ok(arriving),
                Some(_) => Err(misplaced("end")),
            }
        };
        let waited = self.ps.options().push_timeout;
        let timed_out = |_| Error::PushTimedOut { place, waited };
        let receiving = tokio::time::timeout(waited, receiving);
        let arriving = tokio::select! {
            biased;
            received = receiving => received.map_err(timed_out)??,
            // The rest may come as late as a backward pass ends. Room and memory are needed before.
            error = partition.refusal(address.era) => return Err(error),
        };
        arriving.finish().await
    }

    /// Returns the answer to a push, and its end. The call ends when this ps no longer reads the
    /// sender's memory. If this ps stops before, the call ends without a reply.
    fn acknowledge(
        &self,
        pushed: Result<Pushed>,
        released: oneshot::Receiver<bool>,
    ) -> (option::IntoIter<pb::PushReply>, Until) {
        let (reply, result) = match pushed {
            Ok(pushed) => (Some(pb::PushReply::from(pushed)), Ok(())),
            Err(error) => (None, Err(Status::from(error))),
        };
        let (stopping, device) = (self.stopping.clone(), self.ps.device().clone());
        let released = async move {
            if !released.await.unwrap_or(false) {
                return true;
            }
            // A device that failed may have read nothing, so nothing is said of the memory.
            tokio::task::spawn_blocking(move || device.settle().is_ok()).await.unwrap_or(false)
        };
        let until = async move {
            tokio::select! {
                biased;
                released = released => released.then(|| bulk::trailers(result.as_ref().copied())),
                () = stopping.cancelled() => None,
            }
        };
        (reply.into_iter(), Box::pin(until))
    }

    /// Waits for what a pull asks for, and returns the response that brings it. An agent that
    /// forwards it names `script`.
    async fn send(
        &self,
        mut stream: Incoming<Body>,
        script: Option<JobId>,
    ) -> Result<HttpResponse<Body>, Status> {
        let request = stream.message::<pb::PullRequest>().await?;
        let mut request = required("Parameters.Pull", "request", request)?;
        let (name, part) = (std::mem::take(&mut request.attachment), request.part.take());
        let pull = Pull::try_from(request)?;
        self.ps.find(pull.address)?.check_script(script)?;
        let attachment = part.and_then(|part| Some((self.ps.attachments().get(&name)?, part)));
        // Dropped when nothing is written to the part any more.
        let (writes, written) = oneshot::channel::<()>();
        let lent = attachment.map(|(attachment, part)| attachment.region(part, writes)).transpose();
        let giving = async {
            match lent.map_err(Error::from)?.flatten() {
                Some(lent) => self.ps.pull_to(pull, lent).await,
                None => self.ps.pull(pull).await.map(Given::Here),
            }
        };
        let given = tokio::select! {
            biased;
            given = giving => given?,
            () = self.stopping.cancelled() => {
                // The answer says that the part is the worker's again.
                let _ = written.await;
                return Err(Error::Stopping.into());
            }
        };
        let pulled = match given {
            Given::Here(pulled) => pulled,
            Given::OnDevice { version, chunks } => {
                let bytes = chunks.iter().filter_map(|chunk| chunk.region).map(|region| region.bytes);
                self.ps.metrics().pull_bytes_device.add(bytes.sum());
                let until = self.hold(stream, Vec::new());
                return Ok(bulk::respond_until(on_device(version, &chunks), Box::pin(until)));
            }
        };
        match self.ps.memory().filter(|_| self.ps.attachments().get(&name).is_some()) {
            Some(memory) => {
                let until = self.hold(stream, pulled.chunks.clone());
                Ok(bulk::respond_until(replies(pulled, self.tell(memory, pull.wire)), Box::pin(until)))
            }
            None => {
                let waited = self.ps.options().push_timeout;
                let replies = Timed::new(
                    replies(pulled, move |chunk| encode(cast::encode_chunk(pull.wire, chunk))),
                    waited,
                );
                let until = replies.ended(waited);
                Ok(bulk::respond_until(replies, Box::pin(until)))
            }
        }
    }

    /// Returns how a chunk is sent to a worker that reads this ps's memory: by telling where it
    /// lies.
    fn tell(&self, memory: &Memory, wire: WireType) -> impl FnMut(Chunk) -> pb::Chunk + Send + 'static {
        let (ps, memory) = (self.ps.clone(), memory.clone());
        move |chunk| match memory.find(chunk.values.host()) {
            Some(region) => {
                ps.metrics().pull_bytes_shared.add(region.bytes);
                pb::Chunk { id: chunk.id.get(), values: Bytes::new(), region: Some(region) }
            }
            None => encode(cast::encode_chunk(wire, chunk)),
        }
    }

    /// Keeps `chunks` as they are until the worker has read them, which the end of its request
    /// says. It may take as long as a push.
    fn hold(
        &self,
        mut stream: Incoming<Body>,
        chunks: Vec<Chunk>,
    ) -> impl Future<Output = Option<HeaderMap>> + use<> {
        let waited = self.ps.options().push_timeout;
        async move {
            let ended = tokio::time::timeout(waited, stream.message::<pb::PullRequest>()).await;
            let late = |_| {
                let message = format!("the weights were not read within {waited:?}; pull them again");
                Err(Status::from(Failure::new(Kind::Unavailable, message)))
            };
            let ended = ended.unwrap_or_else(late).map(drop);
            // What was read until now is what it was.
            drop(chunks);
            Some(bulk::trailers(ended.as_ref().copied()))
        }
    }
}

/// What a pull answers, for as long as a worker may take to read it. Then it is let go, whether the
/// worker reads or not: one that never does keeps no version.
struct Timed<I> {
    /// `None` once the time is over.
    replies: Arc<Mutex<Option<I>>>,
    over: AbortHandle,
}

impl<I: Send + 'static> Timed<I> {
    fn new(replies: I, waited: Duration) -> Self {
        let replies = Arc::new(Mutex::new(Some(replies)));
        let kept = replies.clone();
        let letting_go = async move {
            tokio::time::sleep(waited).await;
            drop(lock(&kept).take());
        };
        Self { replies, over: tokio::spawn(letting_go).abort_handle() }
    }

    /// Returns how the call ends, once it has answered what it can.
    fn ended(&self, waited: Duration) -> impl Future<Output = Option<HeaderMap>> + use<I> {
        let replies = self.replies.clone();
        async move {
            let ended = match *lock(&replies) {
                Some(_) => Ok(()),
                None => {
                    let message = format!("the weights were not read within {waited:?}; pull them again");
                    Err(Status::from(Failure::new(Kind::Unavailable, message)))
                }
            };
            Some(bulk::trailers(ended.as_ref().copied()))
        }
    }
}

impl<I: Iterator> Iterator for Timed<I> {
    type Item = I::Item;

    fn next(&mut self) -> Option<I::Item> {
        lock(&self.replies).as_mut()?.next()
    }
}

impl<I> Drop for Timed<I> {
    fn drop(&mut self) {
        self.over.abort();
    }
}

fn lock<I>(replies: &Mutex<Option<I>>) -> MutexGuard<'_, Option<I>> {
    replies.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns what a pull answers, one after the other.
fn replies(
    pulled: Pulled,
    send: impl FnMut(Chunk) -> pb::Chunk + Send + Unpin + 'static,
) -> impl Iterator<Item = pb::PullReply> + Send + Unpin + 'static {
    let part = |part| pb::PullReply { part: Some(part) };
    let (version, chunks) = (pulled.version.get(), pulled.chunks.len() as u64);
    let header = pull_reply::Part::Header(pb::PullHeader { version, chunks, on_device: false });
    let chunks = pack_as(pulled.chunks, send).map(move |chunks| part(pull_reply::Part::Chunks(chunks)));
    std::iter::once(part(header)).chain(chunks)
}

/// Returns what a pull answers whose chunks lie in memory of the device.
fn on_device(version: Version, chunks: &[pb::Chunk]) -> impl Iterator<Item = pb::PullReply> + use<> {
    let header = pb::PullHeader { version: version.get(), chunks: chunks.len() as u64, on_device: true };
    let message = |chunks: &[pb::Chunk]| pull_reply::Part::Chunks(pb::Chunks { chunks: chunks.to_vec() });
    let messages: Vec<_> = chunks.chunks(REGIONS_MAX).map(message).collect();
    let parts = std::iter::once(pull_reply::Part::Header(header)).chain(messages);
    parts.map(|part| pb::PullReply { part: Some(part) })
}

/// The service as the server sees it: pushes and pulls go past tonic's codec, which would copy what
/// they carry.
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
        let script = Caller::of_http(&request).and_then(Caller::script);
        match request.uri().path() {
            PUSH => {
                let pushing = async move {
                    let (held, released) = Hold::new();
                    let (read, was_read) = oneshot::channel();
                    let mark = Mark::of(request.headers());
                    let stream = Incoming::request(request.into_body());
                    let receiver = service.clone();
                    let mut receiving = Box::pin(async move {
                        let pushed = receiver.receive(stream, script, held, mark, read).await;
                        receiver.ps.counted(pushed)
                    });
                    let pushed = tokio::select! {
                        biased;
                        pushed = &mut receiving => Some(pushed),
                        Ok(()) = was_read => None,
                    };
                    Ok(match pushed {
                        Some(pushed) => {
                            let (reply, until) = service.acknowledge(pushed, released);
                            bulk::respond_until(reply, until)
                        }
                        None => bulk::respond_later(async move {
                            let pushed = receiving.await;
                            service.acknowledge(pushed, released)
                        }),
                    })
                };
                Box::pin(pushing)
            }
            PULL => {
                let pulling = async move {
                    let sent = service.send(Incoming::request(request.into_body()), script).await;
                    Ok(sent.unwrap_or_else(Status::into_http))
                };
                Box::pin(pulling)
            }
            _ => self.others.call(request),
        }
    }
}

/// Returns the error of a push whose stream is not one header and then chunks.
fn misplaced(expected: &str) -> Error {
    let (message, field) = ("PushRequest", "part");
    let found = format!("something else or nothing where the {expected} belong");
    Error::Message(proto::Error::Field { message, field, expected: expected.to_owned(), found })
}

#[tonic::async_trait]
impl pb::parameters_server::Parameters for Service {
    type PullStream = tokio_stream::Empty<Result<pb::PullReply, Status>>;

    async fn probe(&self, request: Request<pb::ProbeRequest>) -> Result<Response<pb::ProbeReply>, Status> {
        let pb::ProbeRequest { url, job, file } = request.into_inner();
        self.ps.probe(&url, &job, &file).await?;
        Ok(Response::new(pb::ProbeReply {}))
    }

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

    async fn attach(&self, request: Request<pb::AttachRequest>) -> Result<Response<pb::AttachReply>, Status> {
        let pb::AttachRequest { name, device_memory } = request.into_inner();
        let device = self.ps.device().device().uuid().map_or_else(Bytes::new, |uuid| uuid.to_vec().into());
        if !device_memory.is_empty() {
            let opened = self.ps.attachments().open(&name, device_memory, self.ps.device()).await;
            let refused = opened.err().unwrap_or_default();
            return Ok(Response::new(pb::AttachReply { attached: refused.is_empty(), device, refused }));
        }
        let attached = match self.ps.memory() {
            Some(memory) => self.ps.attachments().take_up(name, memory).await,
            None => Err(std::io::ErrorKind::Unsupported.into()),
        };
        let attached =
            attached.inspect_err(|error| tracing::debug!(%error, "a worker's memory stays unread")).is_ok();
        Ok(Response::new(pb::AttachReply { attached, device, refused: String::new() }))
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
        let pb::UnpinRequest { job, era, version, keep } = request.into_inner();
        self.ps.unpin(JobId(job), Era(era), Version(version), Version(keep))?;
        Ok(Response::new(pb::UnpinReply {}))
    }

    async fn close(&self, request: Request<pb::CloseRequest>) -> Result<Response<pb::CloseReply>, Status> {
        let pb::CloseRequest { job, era, master, starts } = request.into_inner();
        self.ps.close_ended(JobId(job), Era(era), MasterStart { master, starts })?;
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
        placement: request.placement,
        script: Some(JobId(request.script)).filter(|script| *script != JobId(0)),
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
        overflows: ledger.overflows(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_reader_that_never_reads_keeps_nothing() {
        let waited = Duration::from_secs(60);
        let weights = Arc::new(());
        let mut replies = Timed::new(vec![weights.clone(); 3].into_iter(), waited);
        assert!(replies.next().is_some());
        tokio::time::sleep(waited - Duration::from_secs(1)).await;
        assert!(replies.next().is_some() && Arc::strong_count(&weights) > 1);
        tokio::time::sleep(Duration::from_secs(2)).await;
        assert_eq!(Arc::strong_count(&weights), 1, "the version is let go");
        assert!(replies.next().is_none());
        let trailers = replies.ended(waited).await.expect("an end");
        let failure = Failure::from(Status::from_header_map(&trailers).expect("a status"));
        assert!(failure.kind == Kind::Unavailable && failure.message.contains("within 60s"), "{failure}");
        let read = Timed::new(std::iter::empty::<()>(), waited).ended(waited).await.expect("an end");
        assert_eq!(Status::from_header_map(&read).map(|status| status.code()), Some(tonic::Code::Ok));
    }
}
