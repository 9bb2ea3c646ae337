//! The line between a process of a script and its agent: the process has no keys, and reaches what
//! its agent lets it reach.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]
#![cfg(target_os = "linux")]

use std::convert::Infallible;
use std::future::{Ready, ready};
use std::os::fd::AsRawFd as _;
use std::task::{Context, Poll};

use http::header::AUTHORIZATION;
use http::{Request, Response};
use net::channel::{Channel, Dialer, Purpose};
use net::relay::{Line, Relay};
use net::security::door::{Door, Limits};
use net::security::{Caller, Keys, Options, TokenRole, tokens};
use proto::ids::JobId;
use proto::status::{Failure, Kind};
use tokio::net::TcpListener;
use tonic::Status;
use tonic::body::Body;
use tonic::server::NamedService;
use tower::{Service, ServiceExt as _};

const SCRIPT: JobId = JobId(7);

/// Answers every call of a master with the caller as it appears there.
#[derive(Clone)]
struct Echo;

impl NamedService for Echo {
    const NAME: &'static str = "ebbflow.v1.Fleet";
}

impl Service<Request<Body>> for Echo {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Ready<Result<Response<Body>, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let caller = Caller::of_http(&request).unwrap();
        let said = format!(
            "{:?} {:?} {:?}",
            caller.token().map(|token| &token.name),
            caller.role(),
            caller.script()
        );
        ready(Ok(Status::aborted(said).into_http()))
    }
}

/// Serves [`Echo`] to bearers of a worker's token. Returns its URL and the keys of a worker.
async fn serve(dir: &std::path::Path) -> (String, Keys) {
    let (list, token) = (dir.join("tokens.toml"), dir.join("token"));
    let text = "a-token-of-a-worker";
    std::fs::write(&list, tokens::entry("agents", TokenRole::Worker, text, None, None, false)).unwrap();
    std::fs::write(&token, text).unwrap();
    let server = Keys::load(Options { tokens: Some(list), ..Options::default() }).unwrap();
    let worker = Keys::load(Options { token: Some(token), ..Options::default() }).unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let incoming = Door::new(server, Limits::default()).open(listener, None);
    tokio::spawn(net::channel::server().add_service(Echo).serve_with_incoming(incoming));
    (url, worker)
}

/// Makes an empty call with these headers. Returns what follows.
async fn call(channel: &Channel, path: &str, headers: &[(&'static str, &'static str)]) -> Failure {
    let mut request = Request::post(format!("http://x{path}")).header("content-type", "application/grpc");
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    match channel.clone().oneshot(request.body(Body::empty()).unwrap()).await {
        Ok(answer) => Failure::from(Status::from_header_map(answer.headers()).unwrap()),
        Err(error) => Failure::from(Status::from_error(error.into())),
    }
}

#[tokio::test]
async fn a_process_acts_with_the_keys_of_its_agent_for_its_script_alone() {
    let dir = tempfile::tempdir().unwrap();
    let (url, keys) = serve(dir.path()).await;
    let (relay, inherited) = Relay::pair().unwrap();
    let line = Line::inherited(inherited.as_raw_fd()).unwrap();
    let process = async {
        let dialer = Dialer::through(line);
        let channel = dialer.channel(&url, Purpose::Control).unwrap();
        let said = call(&channel, "/ebbflow.v1.Fleet/Lease", &[]).await;
        assert_eq!(said.message, "Some(\"agents\") Some(Script) Some(JobId(7))");
        // What it says of itself counts for nothing.
        let forged = [("ebb-script", "8"), (AUTHORIZATION.as_str(), "Bearer a-token-of-nobody-here")];
        let said = call(&channel, "/ebbflow.v1.Fleet/Lease", &forged).await;
        assert_eq!(said.message, "Some(\"agents\") Some(Script) Some(JobId(7))");
        for path in ["/ebbflow.v1.Scripts/Attend", "/ebbflow.v1.Parameters/Attach", "/x", "/"] {
            let refused = call(&channel, path, &[]).await;
            assert_eq!(refused.kind, Kind::Denied, "{path}: {refused}");
        }
        // An agent that dials a URL of the process's choice would show its keys there.
        let elsewhere = dialer.channel("https://elsewhere:4700", Purpose::Bulk).unwrap();
        let refused = call(&elsewhere, "/ebbflow.v1.Fleet/Lease", &[]).await;
        assert_eq!(refused.kind, Kind::Unavailable, "{refused}");
        // Past its agent, it is a stranger.
        let direct = Dialer::tcp().channel(&url, Purpose::Control).unwrap();
        let refused = call(&direct, "/ebbflow.v1.Fleet/Lease", &[("ebb-script", "7")]).await;
        assert_eq!(refused.kind, Kind::Unauthenticated, "{refused}");
    };
    let dialer = Dialer::tcp().with(keys);
    let purpose = async |asked: &str| (asked == url).then_some(Purpose::Control);
    tokio::select! {
        ended = relay.run(&dialer, SCRIPT, purpose) => panic!("the line ended: {ended:?}"),
        () = process => {}
    }
    drop(inherited);
}

#[tokio::test]
async fn the_connections_of_a_process_end_with_its_agent() {
    let dir = tempfile::tempdir().unwrap();
    let (url, keys) = serve(dir.path()).await;
    let (relay, inherited) = Relay::pair().unwrap();
    let channel = Dialer::through(Line::inherited(inherited.as_raw_fd()).unwrap());
    let channel = channel.channel(&url, Purpose::Control).unwrap();
    let dialer = Dialer::tcp().with(keys);
    let purpose = async |_: &str| Some(Purpose::Control);
    tokio::select! {
        ended = relay.run(&dialer, SCRIPT, purpose) => panic!("the line ended: {ended:?}"),
        said = call(&channel, "/ebbflow.v1.Fleet/Lease", &[]) => assert!(said.message.contains("Script"), "{said}"),
    }
    let after = call(&channel, "/ebbflow.v1.Fleet/Lease", &[]).await;
    assert_eq!(after.kind, Kind::Unavailable, "{after}");
}
