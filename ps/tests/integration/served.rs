//! A ps on a socket, and the wire as a worker uses it.

use std::net::SocketAddr;

use kernels::cpu::cast;
use net::channel::{Channel, Dialer, MESSAGE_BYTES_MAX, Purpose};
use proto::convert::{ChunkCheck, encode, pack_as};
use proto::ids::Version;
use proto::parameters::{Pull, Pulled, Push, Pushed};
use proto::pb;
use proto::pb::parameters_client::ParametersClient;
use proto::pb::push_request::Part;
use proto::status::Failure;
use ps::{Options, Ps};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;

use crate::harness::{self, Job, until};

/// A ps on a socket of this machine; it ends with the value.
#[derive(Debug)]
pub(crate) struct Served {
    pub(crate) ps: Ps,
    pub(crate) client: Client,
    pub(crate) address: SocketAddr,
    pub(crate) stop: CancellationToken,
    pub(crate) task: tokio::task::JoinHandle<ps::Result<()>>,
}

impl Drop for Served {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Served {
    pub(crate) async fn new(options: Options) -> Self {
        let ps = harness::ps(options).expect("valid options");
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let address = listener.local_addr().expect("an address");
        let stop = CancellationToken::new();
        let serving = ps::server::serve(ps.clone(), net::channel::accept(listener), stop.clone());
        let task = tokio::spawn(serving);
        Self { ps, client: Client::new(address), address, stop, task }
    }

    /// Starts a ps with all partitions of a job open and version 0 pushed.
    pub(crate) async fn initialized(job: &Job, options: Options) -> Self {
        let mut served = Self::new(options).await;
        for partition in job.partitions() {
            served.client.0.open(job.open_request(partition)).await.expect("a valid request");
            served.client.push(job.push_initial(partition)).await.expect("version 0");
        }
        served
    }
}

impl Served {
    /// Sends the header of a push and waits until the ps has reserved memory for its chunks.
    pub(crate) async fn begin(&self, push: &Push) -> Begun {
        let in_flight = || self.ps.metrics().push_bytes_in_flight.get();
        let before = in_flight();
        let (sender, receiver) = mpsc::channel(9);
        let header = header(push);
        sender.send(pb::PushRequest { part: Some(header) }).await.expect("room for it");
        let mut client = self.client.0.clone();
        let call = tokio::spawn(async move { client.push(ReceiverStream::new(receiver)).await });
        until("memory is reserved", || in_flight() > before).await;
        Begun { sender, call: AbortOnDropHandle::new(call) }
    }
}

/// A push whose chunks have yet to come; dropped, it is given up.
#[derive(Debug)]
pub(crate) struct Begun {
    sender: mpsc::Sender<pb::PushRequest>,
    call: AbortOnDropHandle<Result<tonic::Response<pb::PushReply>, tonic::Status>>,
}

impl Begun {
    /// Sends the chunks.
    pub(crate) async fn finish(self, push: &Push) -> Result<Pushed, Failure> {
        for chunks in pack_as(push.chunks.clone(), |chunk| encode(cast::encode_chunk(push.wire, chunk))) {
            // When the ps has ended the call, its answer says why.
            let _ = self.sender.send(pb::PushRequest { part: Some(Part::Chunks(chunks)) }).await;
        }
        drop(self.sender);
        Ok(self.call.await.expect("no panic")?.into_inner().try_into()?)
    }
}

/// Returns what a push begins with.
pub(crate) fn header(push: &Push) -> Part {
    let wire = pb::WireType::from(push.wire).into();
    Part::Header(pb::PushHeader { wire, ..(push.address, push.target).into() })
}

/// The wire as a worker uses it.
#[derive(Clone, Debug)]
pub(crate) struct Client(pub(crate) ParametersClient<Channel>);

impl Client {
    pub(crate) fn new(address: SocketAddr) -> Self {
        let channel = Dialer::tcp().channel(&format!("http://{address}"), Purpose::Bulk).expect("a URL");
        Self(ParametersClient::new(channel).max_decoding_message_size(MESSAGE_BYTES_MAX))
    }

    pub(crate) async fn push(&self, push: Push) -> Result<Pushed, Failure> {
        let header = header(&push);
        let chunks =
            pack_as(push.chunks, |chunk| encode(cast::encode_chunk(push.wire, chunk))).map(Part::Chunks);
        self.push_parts(std::iter::once(header).chain(chunks).collect()).await
    }

    pub(crate) async fn push_parts(&self, parts: Vec<Part>) -> Result<Pushed, Failure> {
        let messages = parts.into_iter().map(|part| pb::PushRequest { part: Some(part) });
        let reply = self.0.clone().push(tokio_stream::iter(messages.collect::<Vec<_>>())).await?;
        Ok(reply.into_inner().try_into()?)
    }

    pub(crate) async fn pull(&self, job: &Job, pull: Pull) -> Result<Pulled, Failure> {
        let mut stream = self.0.clone().pull(pb::PullRequest::from(pull)).await?.into_inner();
        let mut check = ChunkCheck::new("pull from", &job.layout, pull.address.partition);
        let (mut version, mut chunks) = (None, Vec::new());
        while let Some(reply) = stream.message().await? {
            match reply.part.expect("a part") {
                pb::pull_reply::Part::Header(header) => version = Some(Version(header.version)),
                pb::pull_reply::Part::Chunks(message) => {
                    for chunk in message.chunks {
                        chunks.push(check.accept(chunk, pull.wire)?);
                    }
                }
            }
        }
        check.finish()?;
        Ok(Pulled { version: version.expect("a header"), chunks })
    }
}
