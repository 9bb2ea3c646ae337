//! What stands before the services: only a master that surely leads answers. It looks when a
//! request comes in, and again at each part of an answer that goes out, so that a process which was
//! stopped in between says nothing as a leader of the past. Health is for everybody: a master that
//! stands by is alive, and says itself that it is not ready.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use http::{Request, Response};
use http_body::{Frame, SizeHint};
use net::failover::standing_by;
use tokio::sync::watch;
use tokio::time::Instant;
use tonic::Status;
use tonic::body::Body;
use tower::{Layer, Service};

use crate::etcd::Leadership;

/// Where calls of the health protocol begin.
const HEALTH: &str = "/grpc.health.v1.Health/";

/// The callers that a master answers.
#[derive(Clone, Debug)]
pub(crate) enum Gate {
    /// All callers: there is one master.
    Open,
    /// Callers that come while this master leads.
    Leading(Arc<Leadership>),
    /// No caller: each is told the leader, if it is known.
    StandingBy(watch::Receiver<Option<String>>),
}

impl Gate {
    /// Returns why no call is answered now, or `None` if calls are.
    fn closed(&self) -> Option<Status> {
        match self {
            Self::Open => None,
            Self::Leading(leadership) if leadership.is_certain(Instant::now()) => None,
            Self::Leading(_) => Some(standing_by(None)),
            Self::StandingBy(leader) => Some(standing_by(leader.borrow().as_deref())),
        }
    }
}

impl<S> Layer<S> for Gate {
    type Service = Gated<S>;

    fn layer(&self, inner: S) -> Gated<S> {
        Gated { gate: self.clone(), inner }
    }
}

/// Services behind a gate.
#[derive(Clone, Debug)]
pub(crate) struct Gated<S> {
    gate: Gate,
    inner: S,
}

impl<S> Service<Request<Body>> for Gated<S>
where
    S: Service<Request<Body>, Response = Response<Body>>,
    S::Future: Send + 'static,
{
    type Response = Response<Body>;
    type Error = S::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Body>, S::Error>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        if request.uri().path().starts_with(HEALTH) {
            return Box::pin(self.inner.call(request));
        }
        if let Some(status) = self.gate.closed() {
            return Box::pin(async move { Ok(status.into_http()) });
        }
        let (gate, answer) = (self.gate.clone(), self.inner.call(request));
        if matches!(gate, Gate::Open) {
            return Box::pin(answer);
        }
        Box::pin(async move {
            let answer = answer.await?;
            Ok(match gate.closed() {
                Some(status) => status.into_http(),
                None => answer.map(|body| Body::new(GatedBody { gate, inner: body })),
            })
        })
    }
}

/// An answer that breaks off when the gate closes.
struct GatedBody {
    gate: Gate,
    inner: Body,
}

impl http_body::Body for GatedBody {
    type Data = bytes::Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Self::Data>, Status>>> {
        let frame = http_body::Body::poll_frame(Pin::new(&mut self.inner), cx);
        match self.gate.closed() {
            Some(status) if frame.is_ready() => Poll::Ready(Some(Err(status))),
            _ => frame,
        }
    }

    fn is_end_stream(&self) -> bool {
        http_body::Body::is_end_stream(&self.inner)
    }

    fn size_hint(&self) -> SizeHint {
        http_body::Body::size_hint(&self.inner)
    }
}

#[cfg(test)]
mod tests {
    use proto::status::{Failure, Kind};

    use super::*;

    #[tokio::test]
    async fn who_stands_by_asks_nothing_of_the_services_and_names_the_leader() {
        let (leader, known) = watch::channel(Some("http://b:1".to_owned()));
        let never =
            tower::service_fn(|_: Request<Body>| async { Err::<Response<Body>, _>("a service was asked") });
        let mut gated = Gate::StandingBy(known).layer(never);
        for expected in ["the leader is http://b:1", "there is no leader now"] {
            let answer = gated.call(Request::new(Body::empty())).await.expect("an answer");
            let failure = Failure::from(Status::from_header_map(answer.headers()).expect("a status"));
            assert_eq!(failure.kind, Kind::StandingBy);
            assert!(failure.message.contains(expected), "{failure}");
            leader.send_replace(None);
        }
        let health = Request::builder().uri("http://a:1/grpc.health.v1.Health/Check").body(Body::empty());
        assert_eq!(
            gated.call(health.expect("a request")).await.expect_err("its service"),
            "a service was asked"
        );
    }
}
