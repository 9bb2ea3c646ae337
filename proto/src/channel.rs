//! Tuned tonic channels and servers: one place for frame sizes, windows and socket options, each with its reason.
//!
//! The figures come from streaming 64 MiB from one process's memory to another's over loopback on two cores, relative to
//! raw TCP with the same congestion control, in a prototype: tonic as it comes 0.33, with these settings 1.07. What a real pull and
//! push reach is in `docs/performance.md`. Sockets themselves come from a [`Dialer`] and a stream of accepted connections, so
//! that tests and simulations bring their own network.

use std::fmt;
use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use futures::{Stream, StreamExt as _};
use http::Uri;
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tonic::transport::server::Connected;
use tonic::transport::{Channel, Endpoint, Server};

use crate::status::{Failure, Kind};

mod nearby;

/// Largest message that anybody accepts: one chunk of counters (2 MiB) and its headers, with room.
pub const MESSAGE_BYTES_MAX: usize = 4 << 20;

/// Payload bytes that one streamed message gathers: fewer waste headers and wake-ups, more defeat streaming.
pub const PAYLOAD_BYTES: usize = 1 << 20;

/// What a connection is for. Bulk transfers and small requests never share one: a small request would wait behind
/// megabytes of frames.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// Weights and gradients.
    Bulk,
    /// Small requests.
    Control,
}

impl Purpose {
    /// HTTP/2 frame size. Bulk: 16 KiB frames (the default) reach 0.35 of raw TCP, 64 KiB 0.6, 4 MiB 1.07. And a frame takes a whole
    /// chunk, so that its payload is received in one piece and needs no copy ([`bulk`](crate::bulk)).
    const fn frame_bytes(self) -> u32 {
        match self {
            Self::Bulk => 4 << 20,
            Self::Control => 512 << 10,
        }
    }

    /// Window of one stream: at least four frames in bulk, or the sender stalls for the round trip.
    const fn stream_window_bytes(self) -> u32 {
        match self {
            Self::Bulk => 16 << 20,
            Self::Control => 1 << 20,
        }
    }

    /// Window of the whole connection.
    const fn connection_window_bytes(self) -> u32 {
        match self {
            Self::Bulk => 32 << 20,
            Self::Control => 4 << 20,
        }
    }
}

/// A byte stream between two processes.
pub trait Io: AsyncRead + AsyncWrite + Send + Unpin + 'static {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin + 'static> Io for T {}

type Dialing = Pin<Box<dyn Future<Output = io::Result<Box<dyn Io>>> + Send>>;

/// Opens connections to URLs: TCP, or whatever network a test brings.
#[derive(Clone)]
pub struct Dialer(Arc<dyn Fn(Uri) -> Dialing + Send + Sync>);

impl fmt::Debug for Dialer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Dialer")
    }
}

impl Default for Dialer {
    fn default() -> Self {
        Self::nearest()
    }
}

impl Dialer {
    /// A dialer that opens connections with `dial`.
    pub fn new<F, Fut, T>(dial: F) -> Self
    where
        F: Fn(Uri) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = io::Result<T>> + Send + 'static,
        T: Io,
    {
        Self(Arc::new(move |uri| {
            let dialing = dial(uri);
            Box::pin(async move { Ok(Box::new(dialing.await?) as Box<dyn Io>) })
        }))
    }

    /// TCP with tuned sockets.
    pub fn tcp() -> Self {
        Self::new(|uri| async move {
            let stream = TcpStream::connect(&*addresses(&uri).await?).await?;
            tune(&stream);
            Ok(stream)
        })
    }

    /// Unix sockets to processes of this host that have one, tuned TCP to all others.
    pub fn nearest() -> Self {
        Self::new(|uri| async move {
            let addresses = addresses(&uri).await?;
            #[cfg(target_os = "linux")]
            if let Some(stream) = addresses.iter().find_map(|address| nearby::connect(*address)) {
                tracing::debug!(%uri, "a process of this host: over a Unix socket");
                return Ok(Box::new(stream) as Box<dyn Io>);
            }
            let stream = TcpStream::connect(&*addresses).await?;
            tune(&stream);
            Ok(Box::new(stream))
        })
    }

    /// A channel to `url` that connects when it is first used and again whenever the connection is lost.
    ///
    /// # Errors
    /// Not a URL of the form `http://host:port`.
    pub fn channel(&self, url: &str, purpose: Purpose) -> Result<Channel, Failure> {
        let wrong = || Failure::new(Kind::Malformed, format!("`{url}` is no URL; expected http://HOST:PORT"));
        let uri: Uri = url.parse().map_err(|_| wrong())?;
        if uri.scheme_str() != Some("http") || uri.host().is_none() {
            return Err(wrong());
        }
        let dial = self.0.clone();
        let connector = tower::service_fn(move |uri: Uri| {
            let dialing = dial(uri);
            async move { dialing.await.map(TokioIo::new) }
        });
        Ok(endpoint(uri, purpose).connect_with_connector_lazy(connector))
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

/// A server with the bulk settings: they are receive limits, so they suit small requests too.
pub fn server() -> Server {
    Server::builder()
        .initial_stream_window_size(Purpose::Bulk.stream_window_bytes())
        .initial_connection_window_size(Purpose::Bulk.connection_window_bytes())
        .max_frame_size(Purpose::Bulk.frame_bytes())
        .http2_keepalive_interval(Some(Duration::from_secs(10)))
        .http2_keepalive_timeout(Some(Duration::from_secs(10)))
}

/// Socket options, best effort: a socket without them works, slower.
fn tune(stream: &TcpStream) {
    // Without it a small frame waits for the acknowledgement of the previous one: 0.15 of raw TCP.
    let _ = stream.set_nodelay(true);
    // On loopback and datacentre links `bbr` paces at a cost of 15 to 20 %.
    let _ = socket2::SockRef::from(stream).set_tcp_congestion(b"cubic");
}

async fn addresses(uri: &Uri) -> io::Result<Vec<SocketAddr>> {
    let host = uri.host().unwrap_or_default().trim_matches(['[', ']']);
    Ok(tokio::net::lookup_host((host, uri.port_u16().unwrap_or(80))).await?.collect())
}

/// A listening socket's connections, tuned.
pub fn accept(listener: TcpListener) -> impl Stream<Item = io::Result<Accepted<TcpStream>>> + Send {
    futures::stream::unfold(listener, |listener| async move {
        let accepted = listener.accept().await.map(|(stream, _)| {
            tune(&stream);
            Accepted(stream)
        });
        Some((accepted, listener))
    })
}

/// A listening TCP socket, and the Unix socket beside it for processes of this host.
#[derive(Debug)]
pub struct Listener {
    tcp: std::net::TcpListener,
    #[cfg(target_os = "linux")]
    unix: Option<std::os::unix::net::UnixListener>,
}

impl Listener {
    /// Puts a Unix socket beside `tcp`, where it can.
    ///
    /// # Errors
    /// `tcp` does not listen.
    pub fn beside(tcp: TcpListener) -> io::Result<Self> {
        let tcp = tcp.into_std()?;
        #[cfg(target_os = "linux")]
        let unix = nearby::listen(tcp.local_addr()?);
        Ok(Self {
            tcp,
            #[cfg(target_os = "linux")]
            unix,
        })
    }

    /// Its TCP address.
    ///
    /// # Errors
    /// The system does not say.
    pub fn address(&self) -> io::Result<SocketAddr> {
        self.tcp.local_addr()
    }

    /// The same sockets once more: each connection goes to one of those that accept.
    ///
    /// # Errors
    /// The process has no more file descriptors.
    pub fn try_clone(&self) -> io::Result<Self> {
        Ok(Self {
            tcp: self.tcp.try_clone()?,
            #[cfg(target_os = "linux")]
            unix: self.unix.as_ref().map(std::os::unix::net::UnixListener::try_clone).transpose()?,
        })
    }

    /// Its connections, tuned, for the runtime in which it is called.
    ///
    /// # Errors
    /// The runtime cannot watch the sockets.
    pub fn accept(self) -> io::Result<impl Stream<Item = io::Result<Accepted<Box<dyn Io>>>> + Send> {
        let tcp = accept(TcpListener::from_std(self.tcp)?);
        let tcp =
            tcp.map(|accepted| accepted.map(|Accepted(stream)| Accepted(Box::new(stream) as Box<dyn Io>)));
        #[cfg(target_os = "linux")]
        let tcp = {
            let unix = self.unix.map(tokio::net::UnixListener::from_std).transpose()?;
            let unix = futures::stream::unfold(unix, |unix| async move {
                let (stream, _) = match unix.as_ref()?.accept().await {
                    Ok(accepted) => accepted,
                    Err(error) => return Some((Err(error), unix)),
                };
                Some((Ok(Accepted(Box::new(stream) as Box<dyn Io>)), unix))
            });
            futures::stream::select(tcp.boxed(), unix.boxed())
        };
        Ok(tcp)
    }
}

/// An accepted connection of any kind, as tonic's server wants it.
#[derive(Debug)]
pub struct Accepted<T>(pub T);

impl<T> Connected for Accepted<T> {
    type ConnectInfo = ();

    fn connect_info(&self) {}
}

impl<T: AsyncRead + Unpin> AsyncRead for Accepted<T> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_read(cx, buf)
    }
}

impl<T: AsyncWrite + Unpin> AsyncWrite for Accepted<T> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.0).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_shutdown(cx)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.0).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.0.is_write_vectored()
    }
}
