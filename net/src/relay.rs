//! Calls of a script's process by way of its agent: users' code has no keys of the cluster.
//!
//! ```text
//!   process of a script              agent                                  master, ps
//!   Dialer::through(Line)
//!     new connection  ──URL, descriptor──►  Relay: may it reach this URL?
//!     call            ──over the descriptor──►  its own channel  ──token, script──►  Guard
//! ```
//!
//! The process inherits one end of a socket, a [`Line`]. For each connection it makes a pair of
//! sockets, and sends one of them with the URL that it means. The agent serves HTTP/2 there. It
//! passes on each call with its own certificate and token, and with the number of the script, which
//! a process cannot choose. Master and ps then let the call reach jobs of this script alone.
//!
//! **Always true:** nothing of what a process sends decides which keys are shown, to which URL
//! outside the cluster, or for which script.

mod forward;
#[cfg(target_os = "linux")]
mod line;
#[cfg(not(target_os = "linux"))]
#[path = "relay/nowhere.rs"]
mod line;

use std::io;
use std::os::fd::OwnedFd;

use proto::ids::JobId;
use tokio::task::JoinSet;

pub use self::line::Line;
use crate::channel::{Dialer, Purpose};

/// Most connections of one process at a time. A worker has one to the master and one to each ps.
const CONNECTIONS_MAX: usize = 2048;

/// The agent's end of a line to one process.
#[derive(Debug)]
pub struct Relay(line::End);

impl Relay {
    /// Creates a line: the agent's end, and the one that the process inherits.
    ///
    /// # Errors
    /// The process has no more descriptors, or this system has no such sockets.
    pub fn pair() -> io::Result<(Self, OwnedFd)> {
        let (end, inherited) = line::pair()?;
        Ok((Self(end), inherited))
    }

    /// Forwards calls of a process of `script`, until the process has closed its end. Dropping the
    /// future closes all connections.
    ///
    /// `purpose` says for what the process may connect to a URL; `None`: it may not, and the
    /// connection is closed.
    ///
    /// # Errors
    /// The socket fails.
    pub async fn run(
        self,
        dialer: &Dialer,
        script: JobId,
        purpose: impl AsyncFn(&str) -> Option<Purpose>,
    ) -> io::Result<()> {
        let mut connections = JoinSet::new();
        while let Some((url, stream)) = self.0.next().await? {
            while connections.try_join_next().is_some() {}
            if connections.len() >= CONNECTIONS_MAX {
                tracing::warn!(%script, "refused: more than {CONNECTIONS_MAX} connections of a process");
                continue;
            }
            let Some(purpose) = purpose(&url).await else { continue };
            match dialer.channel(&url, purpose) {
                Ok(channel) => {
                    connections.spawn(forward::serve(stream, channel, script));
                }
                Err(failure) => tracing::warn!(%script, reason = %failure, "a process cannot be connected"),
            }
        }
        Ok(())
    }
}
