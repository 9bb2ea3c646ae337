//! Log of refusals. Repeats of one refusal are logged once a minute at most.

use std::collections::HashMap;
use std::fmt;
use std::net::IpAddr;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

/// Time after which an equal refusal is logged again, with the number of repeats.
const AGAIN: Duration = Duration::from_secs(60);

/// Most refusals that are remembered. A client with more addresses may fill the log with one line
/// for each.
const REMEMBERED_MAX: usize = 1024;

/// Origin of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Peer {
    Address(IpAddr),
    UnixSocket,
}

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Address(address) => address.fmt(f),
            Self::UnixSocket => f.write_str("unix-socket"),
        }
    }
}

/// Key of equal refusals: a short fixed reason, the origin, and a subject. There are few subjects,
/// and a stranger cannot choose one.
type Key = (&'static str, Option<Peer>, String);

/// Refusals that were logged.
#[derive(Debug, Default)]
pub(super) struct Refusals(Mutex<HashMap<Key, Told>>);

#[derive(Clone, Copy, Debug)]
struct Told {
    at: Instant,
    /// Number of repeats since then.
    more: u64,
}

impl Refusals {
    /// Logs a refusal, unless an equal one was logged a moment ago. `details` are logged, but do
    /// not distinguish refusals.
    pub(super) fn tell(&self, why: &'static str, peer: Option<Peer>, about: &str, details: &str) {
        let more = self.count(Instant::now(), (why, peer, about.to_owned()));
        let peer = peer.map(tracing::field::display);
        match more {
            None => {}
            Some(0) => tracing::warn!(peer, about, details, "refused: {why}"),
            Some(more) => tracing::warn!(peer, about, details, more, "refused: {why}"),
        }
    }

    /// Returns how many equal refusals were not logged since the last time, or `None` if this one
    /// is not logged either. `now` decides.
    fn count(&self, now: Instant, key: Key) -> Option<u64> {
        let mut told = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(told) = told.get_mut(&key) {
            if now.duration_since(told.at) < AGAIN {
                told.more += 1;
                return None;
            }
            let more = told.more;
            *told = Told { at: now, more: 0 };
            return Some(more);
        }
        if told.len() >= REMEMBERED_MAX {
            told.retain(|_, told| now.duration_since(told.at) < AGAIN);
        }
        if told.len() >= REMEMBERED_MAX {
            told.clear();
        }
        told.insert(key, Told { at: now, more: 0 });
        Some(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn the_same_refusal_is_logged_once_and_counted() {
        let refusals = Refusals::default();
        let now = Instant::now();
        let peer = Some(Peer::Address("10.0.0.1".parse().unwrap()));
        let count = |now, why, peer, about: &str| refusals.count(now, (why, peer, about.to_owned()));
        assert_eq!(count(now, "no token", peer, ""), Some(0));
        for _ in 0..3 {
            assert_eq!(count(now, "no token", peer, ""), None);
        }
        assert_eq!(count(now, "wrong role", peer, ""), Some(0));
        assert_eq!(count(now, "wrong role", peer, "anna"), Some(0));
        assert_eq!(count(now, "no token", None, ""), Some(0));
        assert_eq!(count(now + AGAIN, "no token", peer, ""), Some(3));
        assert_eq!(count(now + AGAIN, "no token", peer, ""), None);
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_remembered_has_an_end() {
        let refusals = Refusals::default();
        let now = Instant::now();
        for number in 0..5000u32 {
            let peer = Some(Peer::Address(number.to_be_bytes().into()));
            assert_eq!(refusals.count(now, ("no token", peer, String::new())), Some(0));
        }
        assert!(refusals.0.lock().unwrap().len() <= REMEMBERED_MAX);
    }
}
