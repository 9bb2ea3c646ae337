//! Gradients reach a ps while their microbatch is still computed: the loop beside a server that it
//! calls over a socket, with a model that goes on only when the server has what was made before.

use std::iter::Once;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc as threads;
use std::task::{Context, Poll};

use futures::FutureExt as _;
use futures::future::BoxFuture;
use model::{Allocator, Evaluation, Gradients, Model, TakeGradient, Upcoming};
use net::bulk::{self, Incoming, PULL, PUSH};
use net::channel::Listener;
use proto::ids::{JobId, Version};
use proto::parameters::{Outcome, Pushed};
use proto::pb::parameters_server::SERVICE_NAME;
use proto::pb::{pull_reply, push_request};
use proto::tensor::{TensorSpec, Values};
use tokio::sync::mpsc::UnboundedReceiver;
use tonic::Status;
use tonic::body::Body;
use tonic::codegen::Service;
use tonic::codegen::http::{Request, Response};
use tonic::server::NamedService;

use super::tests::{task_loop, training};
use super::*;
use crate::job::Job;
use crate::progress::Progress;

/// More than anything takes here that ends at all.
const LONG: Duration = Duration::from_secs(300);

/// What the server received of pushes.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Received {
    /// A chunk, with its value.
    Chunk(u32, f32),
    /// A push that counts: the request ended after all chunks.
    Whole,
    /// A push that does not count.
    Broken,
}

/// A ps of two tensors `[1]`. It reads requests as a ps does.
#[derive(Clone)]
struct Server {
    received: mpsc::UnboundedSender<Received>,
    /// Hears of each chunk.
    chunks: threads::Sender<u32>,
}

impl Server {
    async fn push(self, mut stream: Incoming<Body>) -> Response<Body> {
        let say = |received| self.received.send(received).expect("the test listens");
        let refuse = |status| {
            say(Received::Broken);
            bulk::respond::<Once<pb::PushReply>>(Err(status))
        };
        let mut chunks = 0;
        loop {
            let part = match stream.message::<pb::PushRequest>().await {
                Ok(Some(message)) => message.part,
                Ok(None) if chunks == 2 => break,
                Ok(None) => return refuse(Status::invalid_argument("chunks are missing")),
                Err(status) => return refuse(status),
            };
            let Some(push_request::Part::Chunks(message)) = part else { continue };
            for chunk in message.chunks {
                chunks += 1;
                let value = f32::from_le_bytes(*chunk.values.first_chunk().expect("a value"));
                say(Received::Chunk(chunk.id, value));
                // The model may have failed.
                let _ = self.chunks.send(chunk.id);
            }
        }
        say(Received::Whole);
        let pushed = Pushed { outcome: Outcome::Completed, version: Version(1) };
        bulk::respond(Ok(std::iter::once(pb::PushReply::from(pushed))))
    }

    fn pull() -> Response<Body> {
        let chunk = |id| pb::Chunk { id, values: 0.0f32.to_le_bytes().to_vec().into(), region: None };
        let header = pb::PullHeader { version: 0, chunks: 2, on_device: false };
        let chunks = pb::Chunks { chunks: vec![chunk(0), chunk(1)] };
        let parts = [pull_reply::Part::Header(header), pull_reply::Part::Chunks(chunks)];
        bulk::respond(Ok(parts.map(|part| pb::PullReply { part: Some(part) }).into_iter()))
    }
}

impl NamedService for Server {
    const NAME: &'static str = SERVICE_NAME;
}

impl Service<Request<Body>> for Server {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<'static, std::result::Result<Response<Body>, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<std::result::Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        match request.uri().path() {
            PUSH => Box::pin(self.clone().push(Incoming::request(request.into_body())).map(Ok)),
            path => {
                assert_eq!(path, PULL, "no other call");
                Box::pin(std::future::ready(Ok(Self::pull())))
            }
        }
    }
}

/// How a microbatch ends whose gradients are pushed as they are made. In each case but the first
/// its push must not count.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Ends {
    Well,
    /// With an error, before the last gradient is made.
    Failing,
    /// With a loss that is not finite, after the last gradient was made.
    Diverging,
    /// With a panic, before the last gradient is made.
    Panicking,
}

/// A model of two layers. The second microbatch of a step goes on from its last layer to the first
/// only when the server has the gradient of the last.
struct Halting {
    index: u32,
    /// Hears of each chunk that the server has.
    chunks: threads::Receiver<u32>,
    /// How the next microbatches end, one after the other. The others end well.
    ends: Arc<(Vec<Ends>, AtomicUsize)>,
}

impl Model for Halting {
    fn tensors(&self) -> Vec<TensorSpec> {
        ["first", "last"].map(|name| TensorSpec::parameter(name, [1])).into()
    }

    fn initial(&mut self, _: u64) -> model::Result<Vec<Values>> {
        Ok(vec![Values::F32(vec![0.0]); 2])
    }

    fn load(&mut self, _: &[Values]) -> model::Result<()> {
        Ok(())
    }

    fn announce(&mut self, upcoming: Upcoming<'_>) {
        if let Upcoming::Gradients(microbatch) = upcoming {
            self.index = microbatch.index;
        }
    }

    fn gradients(&mut self, _: &Batch, _: u64) -> model::Result<Gradients> {
        unreachable!("they are taken as they are made")
    }

    fn gradients_as_made(
        &mut self,
        _: &Batch,
        _: u64,
        _: &dyn Allocator,
        take: &mut TakeGradient<'_>,
    ) -> model::Result<f32> {
        let gradient = |value: f32| Values::F32(vec![value + self.index as f32]);
        take(1, gradient(10.0));
        let mut ends = Ends::Well;
        if self.index == 1 {
            // Chunks of the pushes before are not meant.
            while self.chunks.recv().expect("the server lives") != 1 {}
            let (all, next) = &*self.ends;
            ends = all.get(next.fetch_add(1, Ordering::Relaxed)).copied().unwrap_or(Ends::Well);
        }
        assert_ne!(ends, Ends::Panicking, "on purpose");
        if ends == Ends::Failing {
            return Err(model::Error::Engine { what: "layer".to_owned(), reason: "on purpose".to_owned() });
        }
        take(0, gradient(20.0));
        Ok(if ends == Ends::Diverging { f32::NAN } else { 0.5 })
    }

    fn evaluate(&mut self, _: &Batch) -> model::Result<Evaluation> {
        Ok(Evaluation::default())
    }
}

/// The loop, a job of steps of two microbatches, and what the server receives.
struct Rig {
    work: TaskLoop,
    job: Arc<Job>,
    received: UnboundedReceiver<Received>,
    shutdown: CancellationToken,
}

impl Rig {
    async fn new(ends: &[Ends]) -> Self {
        let (received_tx, received) = mpsc::unbounded_channel();
        let (chunks_tx, chunks) = threads::channel();
        let tcp = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let listener = Listener::beside(tcp).expect("a listener");
        let url = format!("http://{}", listener.address().expect("an address"));
        let server = Server { received: received_tx, chunks: chunks_tx };
        let server = net::channel::server().add_service(server);
        tokio::spawn(server.serve_with_incoming(listener.accept().expect("connections")));
        let connector = Connector::socket(Dialer::tcp());
        let (work, session, _) = task_loop(&connector);
        let folder = tempfile::tempdir().expect("a folder");
        std::fs::write(folder.path().join("data.csv"), "1,0\n".repeat(8)).expect("a file");
        let toml = "name = 'job'\nepochs = 1\n[model]\nbuiltin = 'halting'\nloss = 'mse'\n\
             [data]\nformat = 'csv'\nheader = false\ntrain = { features = ['data.csv'] }\n\
             [batch]\nmicro = 1\neffective = 2\n[optimizer]\nkind = 'sgd'\nlearning_rate = 0.1\n";
        let spec = proto::spec::parse(toml, &folder.path().join("job.toml"), &[]).expect("a job");
        let (chunks, ends) =
            (Arc::new(Mutex::new(Some(chunks))), Arc::new((ends.to_vec(), AtomicUsize::new(0))));
        let registry = Registry::default().with("halting", move |_| {
            let chunks = chunks.lock().expect("nobody panicked").take().expect("one model");
            Ok(Box::new(Halting { index: 0, chunks, ends: ends.clone() }))
        });
        let reply = pb::JobReply { spec_json: spec.to_json(), ..Default::default() };
        let master = MasterClient::new(session.fleet(), "http://master:1", 0);
        let (options, progress) = (Options::default(), Progress::default());
        let device = model::Device::Cpu;
        let job =
            Job::open(JobId(1), &reply, &options, device, &registry, &master, &connector, &progress).await;
        let job = Arc::new(job.expect("a job"));
        let partition = pb::PartitionAddress { ps: "ps-0".to_owned(), url };
        let tensors = ["first", "last"].map(|name| (&TensorSpec::parameter(name, [1])).into());
        let placement = pb::Placement { tensors: tensors.into(), partitions: vec![partition], number: 1 };
        job.place(placement, &connector).expect("a placement");
        Self { work, job, received, shutdown: CancellationToken::new() }
    }

    /// Trains the first step as one lease.
    async fn train(&mut self, lease: u64) -> Result<()> {
        let Work { lease, task } = training(&self.work.held, &self.job, 0, lease, 0..2);
        let Task::Train(train) = task else { panic!("training") };
        let training = self.work.train(lease, train, &self.shutdown);
        tokio::time::timeout(LONG, training).await.expect("the computation goes on")
    }

    /// Returns what the server receives until a request ends.
    async fn receive(&mut self) -> Vec<Received> {
        let mut all = Vec::new();
        while !all.last().is_some_and(|last| matches!(last, Received::Whole | Received::Broken)) {
            let next = tokio::time::timeout(LONG, self.received.recv());
            all.push(next.await.expect("in time").expect("the server lives"));
        }
        all
    }
}

// Without the overlap this waits forever: the model goes on when the server has the first chunk.
#[tokio::test]
async fn a_ps_has_the_gradient_of_the_last_layer_while_the_first_is_still_computed() {
    let mut rig = Rig::new(&[]).await;
    rig.train(1).await.expect("it trains");
    // The sums of both microbatches.
    assert_eq!(rig.receive().await, [Received::Chunk(1, 21.0), Received::Chunk(0, 41.0), Received::Whole]);
}

#[tokio::test]
async fn a_microbatch_that_fails_breaks_its_push_off_and_the_repeat_brings_all() {
    let first = Received::Chunk(1, 21.0);
    for (ends, sent) in [
        (Ends::Failing, vec![first, Received::Broken]),
        (Ends::Diverging, vec![first, Received::Broken]),
        (Ends::Panicking, vec![first, Received::Broken]),
    ] {
        let mut rig = Rig::new(&[ends]).await;
        let error = rig.train(1).await.expect_err("the microbatch fails");
        assert_eq!(rig.receive().await, sent, "{ends:?}: {error}");
        if ends == Ends::Panicking {
            // The model is built again by another lease.
            continue;
        }
        rig.train(2).await.expect("it trains");
        let whole = [first, Received::Chunk(0, 41.0), Received::Whole];
        assert_eq!(rig.receive().await, whole, "{ends:?}");
        assert!(rig.received.try_recv().is_err(), "nothing else came");
    }
}
