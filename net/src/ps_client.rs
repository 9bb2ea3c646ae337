//! The client of a ps: one connection, and calls over it.
//!
//! Worker, master and ps use it. What they say to a ps is theirs; how they reach it is here:
//!
//! - A [`PsClient`] connects when it is first used. It connects again when its connection was lost,
//!   at the next call; callers pause between attempts ([`Retry`](proto::retry::Retry)).
//! - [`PsClients`] gives out one client for each URL, so that calls to one ps share a connection.
//! - New connections and new calls use the keys of the [`Dialer`] as they are then.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use proto::pb::parameters_client::ParametersClient;
use proto::status::Failure;
use tokio::time::Instant;
use tonic::{Response, Status};

use crate::channel::{Channel, Dialer, MESSAGE_BYTES_MAX, Purpose};
use crate::retry;

/// A ps, over one connection. Clones share the connection; the last one closes it.
#[derive(Clone, Debug)]
pub struct PsClient {
    channel: Channel,
    /// Counts the clones.
    uses: Arc<()>,
}

impl PsClient {
    /// The ps at `url`; connects when it is first used.
    ///
    /// # Errors
    /// [`Dialer::channel`] refuses the URL.
    pub fn new(dialer: &Dialer, url: &str, purpose: Purpose) -> Result<Self, Failure> {
        Ok(Self { channel: dialer.channel(url, purpose)?, uses: Arc::default() })
    }

    /// The connection, for pushes and pulls ([`bulk`](crate::bulk)).
    pub const fn channel(&self) -> &Channel {
        &self.channel
    }

    /// Makes one small call, and waits at most `limit` for the reply. A caller may drop the future:
    /// the ps may or may not have heard the call.
    ///
    /// # Errors
    /// The failure of the call, or [`Kind::Unavailable`](proto::status::Kind::Unavailable) when the
    /// ps did not reply in time.
    pub async fn call<T, Fut>(
        &self,
        limit: Duration,
        call: impl FnOnce(ParametersClient<Channel>) -> Fut,
    ) -> Result<T, Failure>
    where
        Fut: Future<Output = Result<Response<T>, Status>>,
    {
        let client = ParametersClient::new(self.channel.clone());
        let reply = call(client.max_decoding_message_size(MESSAGE_BYTES_MAX));
        retry::within(limit, async { Ok(reply.await?.into_inner()) }).await
    }

    fn is_used(&self) -> bool {
        Arc::strong_count(&self.uses) > 1
    }
}

/// The clients of this process for its ps: one for each URL. Clones give out the same ones.
#[derive(Clone, Debug)]
pub struct PsClients(Arc<Shelf>);

#[derive(Debug)]
struct Shelf {
    dialer: Dialer,
    purpose: Purpose,
    /// How long a client is kept that nobody holds.
    idle: Duration,
    known: Mutex<HashMap<String, Known>>,
}

#[derive(Debug)]
struct Known {
    client: PsClient,
    /// When it was asked for last.
    asked: Instant,
}

impl PsClients {
    /// No clients yet. A client that nobody holds, and that nobody has asked for since `idle`, is
    /// forgotten at the next [`at`](Self::at).
    pub fn new(dialer: Dialer, purpose: Purpose, idle: Duration) -> Self {
        Self(Arc::new(Shelf { dialer, purpose, idle, known: Mutex::default() }))
    }

    /// The client of the ps at `url`.
    ///
    /// # Errors
    /// [`Dialer::channel`] refuses the URL.
    pub fn at(&self, url: &str) -> Result<PsClient, Failure> {
        let Shelf { dialer, purpose, idle, known } = &*self.0;
        let now = Instant::now();
        let mut known = known.lock().unwrap_or_else(PoisonError::into_inner);
        known.retain(|of, known| of == url || known.client.is_used() || now - known.asked < *idle);
        if let Some(known) = known.get_mut(url) {
            known.asked = now;
            return Ok(known.client.clone());
        }
        let client = PsClient::new(dialer, url, *purpose)?;
        known.insert(url.to_owned(), Known { client: client.clone(), asked: now });
        Ok(client)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::OnceLock;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use http::Uri;
    use proto::pb;
    use proto::status::Kind;
    use tokio::net::{TcpListener, TcpStream};
    use tokio::task::JoinHandle;
    use tokio_util::sync::CancellationToken;

    use super::*;
    use crate::channel;

    const LIMIT: Duration = Duration::from_secs(600);

    /// A server that knows no call of a ps, at a URL.
    struct Server {
        url: String,
        stop: CancellationToken,
        serving: JoinHandle<()>,
    }

    async fn serve() -> Server {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let (_, service) = tonic_health::server::health_reporter();
        let serving = channel::server().add_service(service);
        let stop = CancellationToken::new();
        let stopped = stop.clone().cancelled_owned();
        let serving = serving.serve_with_incoming_shutdown(channel::accept(listener), stopped);
        Server { url, stop, serving: tokio::spawn(async move { serving.await.unwrap() }) }
    }

    /// A dialer that counts its connections.
    fn counting() -> (Dialer, Arc<AtomicUsize>) {
        counting_to(Arc::default())
    }

    /// A dialer that counts its connections, and makes them to `moved` once that has a URL.
    fn counting_to(moved: Arc<OnceLock<Uri>>) -> (Dialer, Arc<AtomicUsize>) {
        let dialed = Arc::new(AtomicUsize::new(0));
        let counter = dialed.clone();
        let dialer = Dialer::new(move |uri| {
            counter.fetch_add(1, Ordering::Relaxed);
            let uri = moved.get().cloned().unwrap_or(uri);
            async move { TcpStream::connect(uri.authority().unwrap().as_str()).await }
        });
        (dialer, dialed)
    }

    /// Whether the server replied.
    async fn replies(client: &PsClient) -> bool {
        let request = pb::UnpinRequest::default();
        let called = client.call(LIMIT, |mut client| async move { client.unpin(request).await }).await;
        called.unwrap_err().kind != Kind::Unavailable
    }

    #[tokio::test]
    async fn calls_to_one_ps_share_a_connection() {
        let (server, (dialer, dialed)) = (serve().await, counting());
        let clients = PsClients::new(dialer, Purpose::Control, Duration::from_secs(600));
        for _ in 0..20 {
            assert!(replies(&clients.at(&server.url).unwrap()).await);
        }
        assert_eq!(dialed.load(Ordering::Relaxed), 1);
        assert!(clients.at("no url").is_err());
    }

    #[tokio::test(start_paused = true)]
    async fn an_idle_client_is_forgotten() {
        let idle = Duration::from_secs(60);
        let clients = PsClients::new(Dialer::tcp(), Purpose::Control, idle);
        let [one, other] = ["http://127.0.0.1:1", "http://127.0.0.1:2"];
        let before = Arc::downgrade(&clients.at(one).unwrap().uses);
        tokio::time::advance(idle / 2).await;
        clients.at(other).unwrap();
        assert!(before.strong_count() > 0, "not idle for long enough");
        tokio::time::advance(idle / 2).await;
        clients.at(other).unwrap();
        assert_eq!(before.strong_count(), 0);
    }

    #[tokio::test]
    async fn a_client_is_kept_while_somebody_has_it() {
        let (server, (dialer, dialed)) = (serve().await, counting());
        let clients = PsClients::new(dialer, Purpose::Control, Duration::ZERO);
        let used = clients.at(&server.url).unwrap();
        assert!(replies(&used).await);
        clients.at("http://127.0.0.1:1").unwrap();
        assert!(replies(&clients.at(&server.url).unwrap()).await);
        assert_eq!(dialed.load(Ordering::Relaxed), 1);
        drop(used);
        clients.at("http://127.0.0.1:1").unwrap();
        assert!(replies(&clients.at(&server.url).unwrap()).await);
        assert_eq!(dialed.load(Ordering::Relaxed), 2);
    }

    #[tokio::test]
    async fn a_lost_connection_is_made_again() {
        let (server, again, moved) = (serve().await, serve().await, Arc::new(OnceLock::new()));
        let (dialer, dialed) = counting_to(moved.clone());
        let client = PsClient::new(&dialer, &server.url, Purpose::Control).unwrap();
        assert!(replies(&client).await);
        moved.set(again.url.parse().unwrap()).unwrap();
        server.stop.cancel();
        server.serving.await.unwrap();
        while !replies(&client).await || dialed.load(Ordering::Relaxed) == 1 {
            tokio::task::yield_now().await;
        }
    }

    #[tokio::test]
    async fn a_ps_that_does_not_reply_in_time_is_unavailable() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let client = PsClient::new(&Dialer::tcp(), &url, Purpose::Control).unwrap();
        let limit = Duration::from_millis(20);
        let request = pb::UnpinRequest::default();
        let called = client.call(limit, |mut client| async move { client.unpin(request).await }).await;
        let failure = called.unwrap_err();
        assert_eq!((failure.kind, &*failure.message), (Kind::Unavailable, "no answer within 20ms"));
    }
}
