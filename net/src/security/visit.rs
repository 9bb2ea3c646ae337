//! A connection as the door and the check of every call know it.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};

use super::Keys;
use super::refusals::{Peer, Refusals};

/// One connection that came through a door.
pub(super) struct Visit {
    keys: Keys,
    refusals: Arc<Refusals>,
    peer: Peer,
    proven: AtomicBool,
    /// Cancelled when the connection is to be closed, to make room.
    closed: CancellationToken,
}

impl fmt::Debug for Visit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Visit")
            .field("peer", &self.peer)
            .field("proven", &self.proven)
            .finish_non_exhaustive()
    }
}

impl Visit {
    /// Creates a connection from `peer` that is not proven. `keys` and `refusals` are the door's.
    pub(super) fn new(keys: Keys, refusals: Arc<Refusals>, peer: Peer) -> Self {
        Self { keys, refusals, peer, proven: AtomicBool::new(false), closed: CancellationToken::new() }
    }

    pub(super) const fn keys(&self) -> &Keys {
        &self.keys
    }

    pub(super) const fn peer(&self) -> Peer {
        self.peer
    }

    /// Marks the connection as proven, because a call was accepted.
    pub(super) fn prove(&self) {
        self.proven.store(true, Ordering::Relaxed);
    }

    pub(super) fn is_proven(&self) -> bool {
        self.proven.load(Ordering::Relaxed)
    }

    /// Lets the door close the connection, to make room.
    pub(super) fn close(&self) {
        self.closed.cancel();
    }

    /// Returns when the connection is to be closed.
    pub(super) fn closed(&self) -> WaitForCancellationFutureOwned {
        self.closed.clone().cancelled_owned()
    }

    /// Logs a refusal; see [`Refusals::tell`].
    pub(super) fn refuse(&self, why: &'static str, about: &str, details: &str) {
        self.refusals.tell(why, Some(self.peer), about, details);
    }
}

/// Origin of a connection.
#[derive(Clone, Debug)]
pub struct Guest(Option<Arc<Visit>>);

impl Guest {
    /// Returns the origin of connections from inside this process.
    pub(crate) const fn of_the_house() -> Self {
        Self(None)
    }

    /// Returns the connection, if it came through a door.
    pub(super) fn visit(&self) -> Option<&Visit> {
        self.0.as_deref()
    }

    pub(super) const fn at(visit: Arc<Visit>) -> Self {
        Self(Some(visit))
    }

    /// Marks the connection as proven. A server without tokens calls it after a valid request.
    pub fn prove(&self) {
        if let Some(visit) = &self.0 {
            visit.prove();
        }
    }
}
