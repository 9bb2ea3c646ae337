//! A network inside one process: host names lead to in-memory pipes instead of sockets.
//!
//! `ebb run` and tests connect master, ps and workers with it, so that they need no ports and leave
//! none behind. Everything above the byte stream (tonic, HTTP/2, our own checks) is the same as
//! over TCP. A name nobody listens on refuses the connection, and a pipe breaks when either end is
//! dropped, as a socket would.

use std::collections::HashMap;
use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};

use futures::Stream;
use net::channel::{Accepted, Dialer};
use tokio::io::DuplexStream;
use tokio::sync::mpsc;

/// Bytes that a pipe holds before its writer waits: several small messages. Weights and gradients
/// never come this way.
const PIPE_BYTES: usize = 256 << 10;

/// Connections that wait to be accepted before the next dial waits.
const BACKLOG: usize = 64;

/// The host names of one in-memory network. Clones are the same network.
#[derive(Clone, Debug, Default)]
pub struct Network {
    hosts: Arc<Mutex<HashMap<String, mpsc::Sender<DuplexStream>>>>,
}

impl Network {
    /// Creates a network without hosts.
    pub fn new() -> Self {
        Self::default()
    }

    /// Takes connections to `http://NAME` from now on, until the result is dropped.
    ///
    /// # Errors
    /// [`io::ErrorKind::AddrInUse`] while another listener has the name.
    pub fn listen(&self, name: &str) -> io::Result<Incoming> {
        let (sender, receiver) = mpsc::channel(BACKLOG);
        let mut hosts = self.hosts.lock().unwrap_or_else(PoisonError::into_inner);
        if hosts.get(name).is_some_and(|host| !host.is_closed()) {
            return Err(io::Error::new(
                io::ErrorKind::AddrInUse,
                format!("`{name}` has a listener already; choose another name"),
            ));
        }
        hosts.insert(name.to_owned(), sender);
        Ok(Incoming(receiver))
    }

    /// Returns a dialer in this network, by the host of the URL. The port means nothing.
    pub fn dialer(&self) -> Dialer {
        let network = self.clone();
        Dialer::new(move |uri| {
            let network = network.clone();
            async move { network.dial(uri.host().unwrap_or_default()).await }
        })
    }

    async fn dial(&self, name: &str) -> io::Result<DuplexStream> {
        let host = self.hosts.lock().unwrap_or_else(PoisonError::into_inner).get(name).cloned();
        let refused =
            || io::Error::new(io::ErrorKind::ConnectionRefused, format!("nobody listens on `{name}`"));
        let (ours, theirs) = tokio::io::duplex(PIPE_BYTES);
        host.ok_or_else(refused)?.send(theirs).await.map_err(|_| refused())?;
        Ok(ours)
    }
}

/// The connections to one name, for a server.
#[derive(Debug)]
pub struct Incoming(mpsc::Receiver<DuplexStream>);

impl Stream for Incoming {
    type Item = io::Result<Accepted<DuplexStream>>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.0.poll_recv(cx).map(|pipe| pipe.map(|pipe| Ok(Accepted::trusted(pipe))))
    }
}

#[cfg(test)]
mod tests {
    use net::channel::Purpose;
    use tonic_health::pb::HealthCheckRequest;
    use tonic_health::pb::health_client::HealthClient;

    use super::*;

    async fn check(network: &Network, url: &str) -> Result<(), tonic::Status> {
        let channel = network.dialer().channel(url, Purpose::Control).expect("a URL");
        HealthClient::new(channel).check(HealthCheckRequest::default()).await.map(drop)
    }

    fn serve(network: &Network, name: &str) -> tokio::task::JoinHandle<()> {
        let incoming = network.listen(name).expect("a free name");
        tokio::spawn(async move {
            let (_reporter, health) = tonic_health::server::health_reporter();
            let served = net::channel::server().add_service(health).serve_with_incoming(incoming);
            served.await.expect("serves until it is aborted");
        })
    }

    #[tokio::test]
    async fn a_grpc_service_is_reached_by_its_name() {
        let network = Network::new();
        let server = serve(&network, "master");
        check(&network, "http://master").await.expect("the health service answers");
        let elsewhere = check(&network, "http://ps-0").await.expect_err("nobody listens there");
        assert_eq!(elsewhere.code(), tonic::Code::Unavailable);
        server.abort();
    }

    #[tokio::test]
    async fn a_name_is_taken_until_its_listener_is_dropped() {
        let network = Network::new();
        let incoming = network.listen("ps-0").expect("a free name");
        assert_eq!(network.listen("ps-0").expect_err("taken").kind(), io::ErrorKind::AddrInUse);
        drop(incoming);
        let server = serve(&network, "ps-0");
        check(&network, "http://ps-0").await.expect("the new listener answers");
        server.abort();
    }
}
