//! Passes on the calls of one connection. Bodies go through as they come: nothing is decoded.

use std::convert::Infallible;

use http::header::AUTHORIZATION;
use http::{HeaderValue, Request, Response};
use hyper::body::Incoming;
use hyper::server::conn::http2;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use proto::ids::JobId;
use proto::status::{Failure, Kind};
use tokio::net::UnixStream;
use tonic::Status;
use tonic::body::Body;
use tower::ServiceExt as _;

use crate::channel::{CALLS_MAX, Channel, HEADER_BYTES_MAX, Purpose};
use crate::security::guard::SCRIPT;
use crate::security::table;

/// Serves a connection of a process of `script` until it ends.
pub(super) async fn serve(stream: UnixStream, channel: Channel, script: JobId) {
    let service = service_fn(move |request| pass_on(request, channel.clone(), script));
    let mut server = http2::Builder::new(TokioExecutor::new());
    // As of other servers: they are receive limits.
    server
        .timer(TokioTimer::new())
        .initial_stream_window_size(Purpose::Bulk.stream_window_bytes())
        .initial_connection_window_size(Purpose::Bulk.connection_window_bytes())
        .max_frame_size(Purpose::Bulk.frame_bytes())
        .max_concurrent_streams(CALLS_MAX)
        .max_header_list_size(HEADER_BYTES_MAX);
    if let Err(error) = server.serve_connection(TokioIo::new(stream), service).await {
        tracing::debug!(%script, %error, "a connection of a process ended");
    }
}

async fn pass_on(
    request: Request<Incoming>,
    channel: Channel,
    script: JobId,
) -> Result<Response<Body>, Infallible> {
    let (mut parts, body) = request.into_parts();
    let call = parts.uri.path();
    if !table::is_forwarded(call) {
        let verb = table::verb(call).escape_debug().to_string();
        let message = format!("an agent does not forward `{verb}` for processes of scripts");
        tracing::warn!(%script, call = verb, "refused: a call that no process of a script makes");
        return Ok(Status::from(Failure::new(Kind::Denied, message)).into_http());
    }
    // The channel shows the token of this process. Nothing that the process says takes its place.
    parts.headers.remove(AUTHORIZATION);
    parts.headers.insert(SCRIPT, HeaderValue::from(script.get()));
    parts.extensions.clear();
    let answer = channel.oneshot(Request::from_parts(parts, Body::new(body))).await;
    // Without a kind, as if the process had lost the connection itself: it asks another master.
    Ok(answer
        .unwrap_or_else(|error| Status::unavailable(format!("the agent: {}", causes(&error))).into_http()))
}

/// Returns an error with its causes.
fn causes(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(Some(error), |error| error.source());
    causes.map(ToString::to_string).collect::<Vec<_>>().join(": ")
}
