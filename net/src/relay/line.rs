//! The socket between a process and its agent: each message is a URL and the descriptor of a
//! connection.
#![expect(unsafe_code, reason = "a descriptor that a process inherits is a bare number")]

use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd, RawFd};

use http::Uri;
use rustix::net::sockopt::socket_type;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use tokio::io::unix::AsyncFd;
use tokio::net::UnixStream;

use crate::descriptors::{receive, send};

/// Longest URL in bytes.
const URL_BYTES_MAX: usize = 512;

/// Size of a connection's send buffers in bytes, as of other Unix sockets of a host.
const BUFFER_BYTES: usize = 4 << 20;

/// The end of a process of a script.
#[derive(Debug)]
pub struct Line(OwnedFd);

impl Line {
    /// Takes the socket that this process has inherited under `number`. The number stays in use, so
    /// that a process may do so several times.
    ///
    /// # Errors
    /// It is no such socket, for example in a child that has inherited the environment alone.
    pub fn inherited(number: RawFd) -> io::Result<Self> {
        if number < 0 {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        // SAFETY: the number is borrowed for the clone alone. The system refuses one that is not
        // open.
        let socket = unsafe { BorrowedFd::borrow_raw(number) }.try_clone_to_owned()?;
        match socket_type(&socket)? {
            SocketType::SEQPACKET => Ok(Self(socket)),
            _ => Err(io::Error::other("the descriptor is not the socket of an agent")),
        }
    }

    /// Asks the agent for a connection to `uri`.
    pub(crate) async fn dial(&self, uri: &Uri) -> io::Result<UnixStream> {
        let (own, theirs) = std::os::unix::net::UnixStream::pair()?;
        for socket in [&own, &theirs] {
            socket.set_nonblocking(true)?;
            // Errors are ignored: a smaller buffer works, but slower.
            let _ = socket2::SockRef::from(socket).set_send_buffer_size(BUFFER_BYTES);
        }
        let authority = uri.authority().map_or("", |authority| authority.as_str());
        let url = format!("{}://{authority}", uri.scheme_str().unwrap_or("http"));
        if url.len() > URL_BYTES_MAX {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        // A clone, because several runtimes of a process may wait for the socket.
        let socket = watched(self.0.try_clone()?)?;
        socket
            .async_io(tokio::io::Interest::WRITABLE, |socket| send(socket, url.as_bytes(), theirs.as_fd()))
            .await?;
        UnixStream::from_std(own)
    }
}

/// The agent's end.
#[derive(Debug)]
pub(super) struct End(AsyncFd<OwnedFd>);

pub(super) fn pair() -> io::Result<(End, OwnedFd)> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let (own, theirs) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
    Ok((End(watched(own)?), theirs))
}

impl End {
    /// Returns the next URL and the connection for it. `None`: the process has closed its end.
    /// Messages that are no such are left out.
    pub(super) async fn next(&self) -> io::Result<Option<(String, UnixStream)>> {
        loop {
            let mut bytes = [0; URL_BYTES_MAX];
            let received =
                self.0.async_io(tokio::io::Interest::READABLE, |socket| receive(socket, &mut bytes)).await;
            let (count, file) = match received {
                Ok(received) => received,
                Err(error) if error.kind() == io::ErrorKind::ConnectionReset => return Ok(None),
                Err(error) => return Err(error),
            };
            if count == 0 && file.is_none() {
                return Ok(None);
            }
            let url = std::str::from_utf8(&bytes[..count]).ok();
            if let Some((url, stream)) = url.zip(file.and_then(|file| stream(file).ok())) {
                return Ok(Some((url.to_owned(), stream)));
            }
        }
    }
}

/// Lets the runtime of the caller watch a socket.
fn watched(socket: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: an `OwnedFd` keeps one descriptor open until it is dropped, which is after the
    // runtime has forgotten it.
    unsafe { AsyncFd::register(socket) }.map_err(io::Error::from)
}

/// Returns a descriptor as a connection. The process may have sent anything.
fn stream(file: OwnedFd) -> io::Result<UnixStream> {
    if socket_type(&file)? != SocketType::STREAM {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let stream = std::os::unix::net::UnixStream::from(file);
    stream.set_nonblocking(true)?;
    UnixStream::from_std(stream)
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd as _;

    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    use super::*;

    #[tokio::test]
    async fn a_connection_is_made_of_a_url_and_a_descriptor() {
        let (end, inherited) = pair().unwrap();
        let line = Line::inherited(inherited.as_raw_fd()).unwrap();
        drop(inherited);
        let uri: Uri = "https://ps-7:4701/ignored".parse().unwrap();
        let (dialed, taken) = tokio::join!(line.dial(&uri), end.next());
        let (mut own, (url, mut theirs)) = (dialed.unwrap(), taken.unwrap().unwrap());
        assert_eq!(url, "https://ps-7:4701");
        own.write_all(b"hello").await.unwrap();
        drop(own);
        let mut text = String::new();
        theirs.read_to_string(&mut text).await.unwrap();
        assert_eq!(text, "hello");
        drop(line);
        assert!(end.next().await.unwrap().is_none(), "the process is gone");
    }

    #[tokio::test]
    async fn messages_that_are_no_connection_are_left_out() {
        let (end, inherited) = pair().unwrap();
        let file = tempfile::tempfile().unwrap();
        send(&inherited, b"http://a:1", &file).unwrap();
        rustix::net::send(&inherited, b"no descriptor", rustix::net::SendFlags::empty()).unwrap();
        let (_own, theirs) = std::os::unix::net::UnixStream::pair().unwrap();
        send(&inherited, b"\xff", &theirs).unwrap();
        send(&inherited, b"http://a:2", &theirs).unwrap();
        assert_eq!(end.next().await.unwrap().unwrap().0, "http://a:2");
    }

    #[test]
    fn another_descriptor_is_no_line() {
        let file = tempfile::tempfile().unwrap();
        let (socket, _other) = std::os::unix::net::UnixStream::pair().unwrap();
        for number in [-1, 1 << 20, file.as_raw_fd(), socket.as_raw_fd()] {
            Line::inherited(number).unwrap_err();
        }
    }
}
