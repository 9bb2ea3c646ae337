//! The connections of a server: a byte stream, where it came from, and its socket options.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tonic::transport::server::Connected;

use crate::security::Guest;

/// A byte stream between two processes.
pub trait Io: AsyncRead + AsyncWrite + Send + Unpin + 'static {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin + 'static> Io for T {}

/// Sets socket options. Errors are ignored: a socket without the options works, but slower.
pub(crate) fn tune(stream: &TcpStream) {
    // Without it a small frame waits for the acknowledgement of the previous one: 0.15 of raw TCP.
    let _ = stream.set_nodelay(true);
    // On loopback and datacentre links, the pacing of `bbr` costs 15 to 20 %.
    let _ = socket2::SockRef::from(stream).set_tcp_congestion(b"cubic");
}

/// An accepted connection of any kind, in the form that tonic's server needs.
#[derive(Debug)]
pub struct Accepted<T> {
    io: T,
    guest: Guest,
}

impl<T> Accepted<T> {
    /// Wraps a connection from inside this process, which needs no token: a pipe, or a simulated
    /// network.
    pub const fn trusted(io: T) -> Self {
        Self { io, guest: Guest::of_the_house() }
    }

    pub(crate) const fn at(io: T, guest: Guest) -> Self {
        Self { io, guest }
    }

    /// Returns the origin of the connection.
    pub const fn guest(&self) -> &Guest {
        &self.guest
    }
}

impl<T> Connected for Accepted<T> {
    type ConnectInfo = Guest;

    fn connect_info(&self) -> Guest {
        self.guest.clone()
    }
}

impl<T: AsyncRead + Unpin> AsyncRead for Accepted<T> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_read(cx, buf)
    }
}

impl<T: AsyncWrite + Unpin> AsyncWrite for Accepted<T> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.io).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(cx)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.io).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }
}
