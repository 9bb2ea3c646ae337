//! The door of a server over real sockets: it closes silent connections, and keeps those with
//! calls.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use net::channel::{Channel, Dialer, Purpose};
use net::security::door::{Door, Limits};
use net::security::{Keys, Options, TokenRole, tokens};
use proto::status::{Failure, Kind};
use tokio::io::AsyncReadExt as _;
use tokio::net::{TcpListener, TcpStream};
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_client::HealthClient;

/// Longest wait for an event that must happen.
const PATIENCE: Duration = Duration::from_secs(30);

/// A time limit that no test about numbers reaches.
const LONG: Duration = Duration::from_secs(600);

async fn serve(keys: Keys, limits: Limits) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (_, health) = tonic_health::server::health_reporter();
    let incoming = Door::new(keys, limits).open(listener, None);
    tokio::spawn(net::channel::server().add_service(health).serve_with_incoming(incoming));
    address
}

fn channel(address: SocketAddr, keys: Keys) -> Channel {
    Dialer::tcp().with(keys).channel(&format!("http://{address}"), Purpose::Control).unwrap()
}

async fn check(channel: &Channel) -> Result<(), Failure> {
    let answer = HealthClient::new(channel.clone()).check(HealthCheckRequest::default()).await;
    Ok(answer.map(drop)?)
}

/// Waits until the server has closed the connection.
async fn closed(mut stream: TcpStream) {
    let mut rest = Vec::new();
    // The bytes before the end, and the kind of end, do not matter.
    let _: Result<_, io::Error> =
        tokio::time::timeout(PATIENCE, stream.read_to_end(&mut rest)).await.expect("it is closed");
}

#[tokio::test]
async fn a_connection_without_a_call_is_closed_and_one_with_a_call_is_not() {
    let first_call = Duration::from_secs(3);
    let address = serve(Keys::default(), Limits { first_call, ..Limits::default() }).await;
    let good = channel(address, Keys::default());
    // On a busy machine the first call may come too late.
    while let Err(failure) = check(&good).await {
        assert!(failure.is_retryable(), "{failure}");
    }
    closed(TcpStream::connect(address).await.unwrap()).await;
    check(&good).await.unwrap();
}

#[tokio::test]
async fn too_many_without_a_call_close_the_oldest_of_them() {
    let limits = Limits { unproven_max: 2, first_call: LONG, handshake: LONG, ..Limits::default() };
    let address = serve(Keys::default(), limits).await;
    let good = channel(address, Keys::default());
    check(&good).await.unwrap();
    let mut silent = Vec::new();
    for _ in 0..5 {
        silent.push(TcpStream::connect(address).await.unwrap());
    }
    for oldest in silent.drain(..3) {
        closed(oldest).await;
    }
    check(&good).await.unwrap();
    check(&channel(address, Keys::default())).await.unwrap();
}

#[tokio::test]
async fn there_are_no_more_connections_than_the_limit_says() {
    let limits = Limits { connections_max: 1, first_call: LONG, ..Limits::default() };
    let address = serve(Keys::default(), limits).await;
    let good = channel(address, Keys::default());
    check(&good).await.unwrap();
    closed(TcpStream::connect(address).await.unwrap()).await;
    check(&good).await.unwrap();
    // The permit is given back with the connection.
    drop(good);
    let other = channel(address, Keys::default());
    while let Err(failure) = check(&other).await {
        assert!(failure.is_retryable(), "{failure}");
    }
}

#[tokio::test]
async fn a_token_that_is_not_in_the_list_opens_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let (list, token) = (dir.path().join("tokens.toml"), dir.path().join("token"));
    std::fs::write(&list, tokens::entry("anna", TokenRole::Read, "a-token-of-anna-s", None, None, false))
        .unwrap();
    let server = Keys::load(Options { tokens: Some(list), ..Options::default() }).unwrap();
    let address = serve(server, Limits::default()).await;
    let show = |text: &str| {
        std::fs::write(&token, text).unwrap();
        let keys = Keys::load(Options { token: Some(token.clone()), ..Options::default() }).unwrap();
        channel(address, keys)
    };
    check(&show("a-token-of-anna-s\n")).await.unwrap();
    let failure = check(&show("a-token-of-nobody-s")).await.unwrap_err();
    assert_eq!(failure.kind, Kind::Unauthenticated);
    // Every client may ask whether the server lives.
    check(&channel(address, Keys::default())).await.unwrap();
    let mut stranger = proto::pb::jobs_client::JobsClient::new(channel(address, Keys::default()));
    let failure = Failure::from(stranger.list(proto::pb::ListRequest::default()).await.unwrap_err());
    assert_eq!(failure.kind, Kind::Unauthenticated, "{failure}");
}
