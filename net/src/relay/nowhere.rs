//! Stands for the socket between a process and its agent on systems without such sockets.

use std::io;
use std::os::fd::{OwnedFd, RawFd};

use http::Uri;
use tokio::net::UnixStream;

/// The end of a process of a script. There is none on this system.
#[derive(Debug)]
pub struct Line(std::convert::Infallible);

impl Line {
    /// Fails on this system.
    ///
    /// # Errors
    /// This system has no such sockets.
    pub fn inherited(_: RawFd) -> io::Result<Self> {
        Err(io::ErrorKind::Unsupported.into())
    }

    pub(crate) async fn dial(&self, _: &Uri) -> io::Result<UnixStream> {
        match self.0 {}
    }
}

/// The agent's end. There is none on this system.
#[derive(Debug)]
pub(super) struct End(std::convert::Infallible);

pub(super) fn pair() -> io::Result<(End, OwnedFd)> {
    Err(io::ErrorKind::Unsupported.into())
}

impl End {
    pub(super) async fn next(&self) -> io::Result<Option<(String, UnixStream)>> {
        match self.0 {}
    }
}
