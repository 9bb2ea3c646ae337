//! Small requests: a call with some bytes and an answer with some, on a worker's connection for
//! small requests.

use std::convert::Infallible;
use std::future::Future;
use std::pin::Pin;
use std::process::ExitCode;
use std::task::{Context, Poll};
use std::time::Instant;

use bytes::Bytes;
use net::bulk::{self, Incoming};
use net::channel::{Channel, Dialer, Listener, Purpose};
use proto::pb;
use tonic::Status;
use tonic::body::Body;
use tonic::codegen::Service;
use tonic::codegen::http;
use tonic::server::NamedService;

/// Bytes that a request for rows of a table sends and gets.
pub(crate) const UP: usize = 8 << 10;
pub(crate) const DOWN: usize = 256 << 10;

const ASK: &str = "/bench.Requests/Ask";

/// Runs the child process that answers requests.
pub(crate) fn serve() -> ExitCode {
    let serving = async {
        let listener = Listener::beside(tokio::net::TcpListener::bind("127.0.0.1:0").await?)?;
        println!("{}", listener.address()?);
        let answers = Answers(Bytes::from(vec![6; DOWN]));
        net::channel::server().add_service(answers).serve_with_incoming(listener.accept()?).await?;
        Ok::<_, Box<dyn std::error::Error>>(())
    };
    crate::runtime().block_on(serving).expect("requests are served");
    ExitCode::SUCCESS
}

/// Answers an empty request with nothing, and any other one with these bytes.
#[derive(Clone)]
struct Answers(Bytes);

impl NamedService for Answers {
    const NAME: &'static str = "bench.Requests";
}

impl Service<http::Request<Body>> for Answers {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let bytes = self.0.clone();
        Box::pin(async move {
            let asked = Incoming::request(request.into_body()).message::<pb::Chunk>().await;
            let answer = |asked: Option<pb::Chunk>| {
                let empty = asked.is_none_or(|asked| asked.values.is_empty());
                std::iter::once(pb::Chunk {
                    id: 0,
                    values: if empty { Bytes::new() } else { bytes },
                    region: None,
                })
            };
            Ok(bulk::respond(asked.map(answer)))
        })
    }
}

/// The bench's end.
#[derive(Clone)]
pub(crate) struct Requests {
    channel: Channel,
    request: Bytes,
}

impl Requests {
    pub(crate) fn new(dialer: &Dialer, address: &str, request_bytes: usize) -> Self {
        let channel = dialer.channel(&format!("http://{address}"), Purpose::Control).expect("a URL");
        Self { channel, request: Bytes::from(vec![7; request_bytes]) }
    }

    async fn ask(&self) -> Result<usize, Status> {
        let request = pb::Chunk { id: 0, values: self.request.clone(), region: None };
        let mut replies = bulk::call(&self.channel, ASK, std::iter::once(request)).await?;
        let reply = replies.message::<pb::Chunk>().await?.unwrap_or_default();
        replies.message::<pb::Chunk>().await?;
        Ok(reply.values.len())
    }

    /// Returns the seconds of each of `count` requests, one after the other.
    pub(crate) async fn each(&self, count: usize) -> Vec<f64> {
        let mut seconds = Vec::with_capacity(count);
        for _ in 0..count {
            let begin = Instant::now();
            self.ask().await.expect("an answer");
            seconds.push(begin.elapsed().as_secs_f64());
        }
        seconds
    }

    /// Returns the seconds per request for `count` requests, `at_once` of them in flight.
    pub(crate) async fn together(&self, count: usize, at_once: usize) -> f64 {
        let begin = Instant::now();
        futures::future::join_all((0..at_once).map(|_| self.each(count / at_once))).await;
        begin.elapsed().as_secs_f64() / count as f64
    }
}
