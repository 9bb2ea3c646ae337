//! Tuned tonic channels and servers: one place for frame sizes, windows and socket options, each
//! with its reason.
//!
//! The figures come from a prototype that streamed 64 MiB from one process's memory to another's
//! over loopback on two cores. They are relative to raw TCP with the same congestion control:
//! tonic's defaults reach 0.33, these settings 1.07. `docs/performance.md` has the figures of real
//! pulls and pushes.
//!
//! A [`Dialer`] opens sockets, and a stream of accepted connections feeds a server, so that tests
//! and simulations bring their own network. [`security`](crate::security) decides who may use them:
//! a dialer has the keys of its process, and every connection that a server accepts came through a
//! [`Door`].

use std::fmt;
use std::future::Future;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use futures::Stream;
use http::header::AUTHORIZATION;
use http::{Request, Response, Uri};
use hyper_util::rt::TokioIo;
use proto::status::{Failure, Kind};
use tokio::net::{TcpListener, TcpStream};
use tonic::body::Body;
use tonic::transport::channel::ResponseFuture;
use tonic::transport::{Endpoint, Server};
use tower::layer::util::{Identity, Stack};

use self::connection::tune;
use self::together::Together;
use crate::relay::Line;
use crate::security::door::Door;
use crate::security::{Guard, Keys};

pub(crate) mod connection;
pub(crate) mod nearby;
mod together;

pub use self::connection::{Accepted, Io};

/// Largest message that a process accepts, in bytes: one chunk of counters (2 MiB) and its headers,
/// with room.
pub const MESSAGE_BYTES_MAX: usize = 4 << 20;

/// Most concurrent calls of one connection. A worker has a few pushes and pulls in flight, a user's
/// command one call.
pub(crate) const CALLS_MAX: u32 = 256;

/// Most header bytes of one call.
pub(crate) const HEADER_BYTES_MAX: u32 = 16 << 10;

/// Longest TLS handshake over a Unix socket, before TCP is tried.
const NEARBY_HANDSHAKE: Duration = Duration::from_secs(2);

/// Purpose of a connection. Bulk transfers and small requests never share one: a small request
/// would wait behind megabytes of frames.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// Weights and gradients.
    Bulk,
    /// Small requests.
    Control,
}

impl Purpose {
    /// Returns the HTTP/2 frame size in bytes. In bulk, frames of 16 KiB (the default) reach 0.35
    /// of raw TCP, 64 KiB 0.6, 4 MiB 1.07. A frame has room for a whole chunk, so its payload is
    /// received in one piece and needs no copy ([`bulk`](crate::bulk)).
    pub(crate) const fn frame_bytes(self) -> u32 {
        match self {
            Self::Bulk => 4 << 20,
            Self::Control => 512 << 10,
        }
    }

    /// Returns the window of one stream in bytes. In bulk it holds at least four frames, otherwise
    /// the sender stalls for the round trip.
    pub(crate) const fn stream_window_bytes(self) -> u32 {
        match self {
            Self::Bulk => 16 << 20,
            Self::Control => 1 << 20,
        }
    }

    /// Returns the window of the whole connection in bytes.
    pub(crate) const fn connection_window_bytes(self) -> u32 {
        match self {
            Self::Bulk => 32 << 20,
            Self::Control => 4 << 20,
        }
    }
}

/// An opened connection.
struct Dialed {
    io: Box<dyn Io>,
    /// Whether the other end is a process of this host and this user, reached by a Unix socket. The
    /// kernel says so.
    within_host: bool,
}

type Dialing = Pin<Box<dyn Future<Output = io::Result<Dialed>> + Send>>;

/// Opens connections to URLs, over TCP or over the network of a test, with the keys of this
/// process.
#[derive(Clone)]
pub struct Dialer {
    dial: Arc<dyn Fn(Uri) -> Dialing + Send + Sync>,
    keys: Keys,
    /// An agent makes the connections, with its own keys.
    is_relayed: bool,
}

impl fmt::Debug for Dialer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Dialer").field("keys", &self.keys).finish_non_exhaustive()
    }
}

impl Default for Dialer {
    fn default() -> Self {
        Self::nearest()
    }
}

impl Dialer {
    /// Creates a dialer that opens connections with `dial`, without keys.
    pub fn new<F, Fut, T>(dial: F) -> Self
    where
        F: Fn(Uri) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = io::Result<T>> + Send + 'static,
        T: Io,
    {
        Self::with_dial(move |uri| {
            let dialing = dial(uri);
            Box::pin(async move { Ok(Dialed { io: Box::new(dialing.await?), within_host: false }) })
        })
    }

    fn with_dial(dial: impl Fn(Uri) -> Dialing + Send + Sync + 'static) -> Self {
        Self { dial: Arc::new(dial), keys: Keys::default(), is_relayed: false }
    }

    /// Creates a dialer for TCP with tuned sockets.
    pub fn tcp() -> Self {
        Self::new(|uri| async move { over_tcp(&addresses(&uri).await?).await })
    }

    /// Creates a dialer for Unix sockets to processes of this host that have one, and tuned TCP to
    /// all others.
    pub fn nearest() -> Self {
        Self::with_dial(|uri| {
            Box::pin(async move {
                let addresses = addresses(&uri).await?;
                #[cfg(target_os = "linux")]
                if let Some(stream) = addresses.iter().find_map(|address| nearby::connect(*address)) {
                    tracing::debug!(%uri, "a process of this host: over a Unix socket");
                    return Ok(Dialed { io: Box::new(stream), within_host: true });
                }
                Ok(Dialed { io: Box::new(over_tcp(&addresses).await?), within_host: false })
            })
        })
    }

    /// Creates a dialer of a script's process. Its agent makes all connections, with its own keys.
    pub fn through(line: Line) -> Self {
        let line = Arc::new(line);
        let dialer = Self::new(move |uri| {
            let line = line.clone();
            async move { line.dial(&uri).await }
        });
        Self { is_relayed: true, ..dialer }
    }

    /// Sets the keys of this process. They decide whether connections are encrypted and which token
    /// its calls show.
    pub fn with(self, keys: Keys) -> Self {
        Self { keys, ..self }
    }

    /// Returns a dialer without keys, for servers outside this cluster.
    pub fn without_keys(&self) -> Self {
        self.clone().with(Keys::default())
    }

    /// Returns the keys of this process.
    pub const fn keys(&self) -> &Keys {
        &self.keys
    }

    /// Returns a channel to `url`. It connects at its first use, and again whenever the connection
    /// is lost.
    ///
    /// # Errors
    /// `url` does not have the form `http://host:port`, or `https://host:port` for a process that
    /// encrypts.
    pub fn channel(&self, url: &str, purpose: Purpose) -> Result<Channel, Failure> {
        let uri = self.check(url)?;
        let (dial, keys, to) = (self.dial.clone(), self.keys.clone(), uri.clone());
        let near = Arc::new(AtomicBool::new(false));
        let now_near = near.clone();
        let connector = tower::service_fn(move |_: Uri| {
            let dialing = dial(to.clone());
            let (keys, to, near) = (keys.clone(), to.clone(), now_near.clone());
            async move {
                let dialed = dialing.await?;
                let (io, within_host) = secured(dialed, &keys, &to).await?;
                near.store(within_host, Ordering::Relaxed);
                io::Result::Ok(TokioIo::new(Together::new(io)))
            }
        });
        // tonic's own TLS reads certificates only once. So tonic gets none, and the scheme says
        // that the connection is plain.
        let plain = format!("http://{}", uri.authority().map_or("", |authority| authority.as_str()));
        let plain: Uri = plain.parse().map_err(|_| malformed(url, self.keys.scheme()))?;
        let inner = endpoint(plain, purpose).connect_with_connector_lazy(connector);
        Ok(Channel { inner, keys: self.keys.clone(), near })
    }

    fn check(&self, url: &str) -> Result<Uri, Failure> {
        let uri: Uri = url.parse().map_err(|_| malformed(url, self.keys.scheme()))?;
        let refuse = |message: String| Err(Failure::new(Kind::Malformed, message));
        if uri.host().is_none() {
            return Err(malformed(url, self.keys.scheme()));
        }
        match (uri.scheme_str(), self.keys.encrypts()) {
            (Some("http" | "https"), _) if self.is_relayed => {}
            (Some("https"), true) => {}
            (Some("https"), false) => {
                return refuse(format!(
                    "`{url}` needs certificates; give --tls-ca, --tls-cert and --tls-key"
                ));
            }
            (Some("http"), true) => {
                return refuse(format!(
                    "`{url}` would not be encrypted, and this process has certificates; say https://"
                ));
            }
            (Some("http"), false) => {
                let shows = self.keys.loaded().token.is_some() && !self.keys.is_insecure();
                if shows && !is_this_machine(host(&uri)) {
                    return refuse(format!(
                        "`{url}`: the token would travel to another machine for everybody to read; give --tls-ca, --tls-cert and \
                         --tls-key, or say --insecure in a network where you trust everybody"
                    ));
                }
            }
            _ => return Err(malformed(url, self.keys.scheme())),
        }
        Ok(uri)
    }
}

fn malformed(url: &str, scheme: &str) -> Failure {
    Failure::new(Kind::Malformed, format!("`{url}` is no URL; expected {scheme}://HOST:PORT"))
}

/// Returns the host of a URL, an IPv6 address without its brackets.
fn host(uri: &Uri) -> &str {
    uri.host().unwrap_or_default().trim_matches(['[', ']'])
}

fn is_this_machine(host: &str) -> bool {
    host == "localhost" || host.parse::<IpAddr>().is_ok_and(|address| address.to_canonical().is_loopback())
}

/// Makes a connection over which a token may be shown. With certificates the connection is
/// encrypted, and the other end has shown the server's certificate.
///
/// Any process of this user in this network namespace can take the name of a Unix socket. So with
/// certificates a process behind a Unix socket must show one too. If it does not, TCP is used.
async fn secured(dialed: Dialed, keys: &Keys, to: &Uri) -> io::Result<(Box<dyn Io>, bool)> {
    let Dialed { io, within_host } = dialed;
    if !within_host || !keys.encrypts() {
        return Ok((keys.secure(host(to), io).await?, within_host));
    }
    match tokio::time::timeout(NEARBY_HANDSHAKE, keys.secure(host(to), io)).await {
        Ok(Ok(io)) => return Ok((io, true)),
        Ok(Err(error)) => tracing::debug!(%to, %error, "no handshake over the Unix socket: over TCP"),
        Err(_) => tracing::debug!(%to, "no handshake over the Unix socket in time: over TCP"),
    }
    let stream = over_tcp(&addresses(to).await?).await?;
    Ok((keys.secure(host(to), Box::new(stream)).await?, false))
}

/// A channel to one URL. Each call shows the token of this process, if it has one. Clones share the
/// connection.
#[derive(Clone, Debug)]
pub struct Channel {
    inner: tonic::transport::Channel,
    keys: Keys,
    near: Arc<AtomicBool>,
}

impl Channel {
    /// Returns whether the newest connection is to a process of this host and this user. False
    /// without a connection.
    pub fn is_within_host(&self) -> bool {
        self.near.load(Ordering::Relaxed)
    }
}

impl tower::Service<Request<Body>> for Channel {
    type Response = Response<Body>;
    type Error = tonic::transport::Error;
    type Future = ResponseFuture;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, mut request: Request<Body>) -> Self::Future {
        if let Some(token) = &self.keys.loaded().token {
            request.headers_mut().insert(AUTHORIZATION, token.clone());
        }
        self.inner.call(request)
    }
}

fn endpoint(uri: Uri, purpose: Purpose) -> Endpoint {
    Endpoint::from(uri)
        .connect_timeout(Duration::from_secs(5))
        .initial_stream_window_size(purpose.stream_window_bytes())
        .initial_connection_window_size(purpose.connection_window_bytes())
        .max_frame_size(purpose.frame_bytes())
        // Notices a peer that vanished without closing (power, network) while a call waits.
        .http2_keep_alive_interval(Duration::from_secs(10))
        .keep_alive_timeout(Duration::from_secs(10))
        .keep_alive_while_idle(true)
}

/// Returns a server with the bulk settings. They are receive limits, so they suit small requests
/// too. [`Guard`] checks the callers.
pub fn server() -> Server<Stack<Guard, Identity>> {
    Server::builder()
        .initial_stream_window_size(Purpose::Bulk.stream_window_bytes())
        .initial_connection_window_size(Purpose::Bulk.connection_window_bytes())
        .max_frame_size(Purpose::Bulk.frame_bytes())
        .max_concurrent_streams(CALLS_MAX)
        .http2_max_header_list_size(HEADER_BYTES_MAX)
        .http2_keepalive_interval(Some(Duration::from_secs(10)))
        .http2_keepalive_timeout(Some(Duration::from_secs(10)))
        .layer(Guard)
}

async fn over_tcp(addresses: &[SocketAddr]) -> io::Result<TcpStream> {
    let stream = TcpStream::connect(addresses).await?;
    tune(&stream);
    Ok(stream)
}

async fn addresses(uri: &Uri) -> io::Result<Vec<SocketAddr>> {
    Ok(tokio::net::lookup_host((host(uri), uri.port_u16().unwrap_or(80))).await?.collect())
}

/// Accepts a listening socket's connections from every client, tuned.
pub fn accept(listener: TcpListener) -> impl Stream<Item = io::Result<Accepted<Box<dyn Io>>>> + Send {
    Door::default().open(listener, None)
}

/// A listening TCP socket, the Unix socket beside it for processes of this host, and the door for
/// both. Clones share sockets and door: each connection goes to one of the clones that accept.
#[derive(Debug)]
pub struct Listener {
    tcp: std::net::TcpListener,
    unix: Option<std::os::unix::net::UnixListener>,
    door: Door,
}

impl Listener {
    /// Listens on a Unix socket beside `tcp`, where that is possible.
    ///
    /// # Errors
    /// `tcp` does not listen.
    pub fn beside(tcp: TcpListener) -> io::Result<Self> {
        let listener = Self::tcp(tcp)?;
        #[cfg(target_os = "linux")]
        let listener = Self { unix: nearby::listen(listener.tcp.local_addr()?), ..listener };
        Ok(listener)
    }

    /// Listens on TCP alone.
    ///
    /// # Errors
    /// The system does not release the socket from the runtime.
    pub fn tcp(tcp: TcpListener) -> io::Result<Self> {
        Ok(Self { tcp: tcp.into_std()?, unix: None, door: Door::default() })
    }

    /// Sets the door. Without a door every client is accepted.
    pub fn behind(self, door: Door) -> Self {
        Self { door, ..self }
    }

    /// Returns the TCP address.
    ///
    /// # Errors
    /// The system does not give the address.
    pub fn address(&self) -> io::Result<SocketAddr> {
        self.tcp.local_addr()
    }

    /// Clones the listener, with the same sockets and the same door.
    ///
    /// # Errors
    /// The process has no more file descriptors.
    pub fn try_clone(&self) -> io::Result<Self> {
        Ok(Self {
            tcp: self.tcp.try_clone()?,
            unix: self.unix.as_ref().map(std::os::unix::net::UnixListener::try_clone).transpose()?,
            door: self.door.clone(),
        })
    }

    /// Accepts connections that pass the door, tuned, in the runtime of the caller.
    ///
    /// # Errors
    /// The runtime cannot watch the sockets.
    pub fn accept(self) -> io::Result<impl Stream<Item = io::Result<Accepted<Box<dyn Io>>>> + Send> {
        let tcp = TcpListener::from_std(self.tcp)?;
        let unix = self.unix.map(tokio::net::UnixListener::from_std).transpose()?;
        Ok(self.door.open(tcp, unix))
    }
}
