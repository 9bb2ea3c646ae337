//! The newest lines of each process of an agent, on their way to the master.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use proto::pb;
use proto::script::{LINES_BYTES_MAX, TAIL_BYTES_MAX};
use proto::tail::Tail;
use tokio::sync::watch;

use super::Key;

/// The newest lines of each process. Clones share them.
#[derive(Clone, Debug)]
pub(super) struct Tails {
    tails: Arc<Mutex<BTreeMap<Key, Tail>>>,
    news: watch::Sender<u64>,
}

impl Tails {
    /// Creates tails of no process.
    pub(super) fn new() -> Self {
        Self { tails: Arc::default(), news: watch::Sender::new(0) }
    }

    /// Appends a line of a process.
    pub(super) fn push(&self, key: Key, line: &str) {
        self.tails().entry(key).or_insert_with(|| Tail::new(TAIL_BYTES_MAX)).push(line.to_owned());
        self.news.send_modify(|count| *count += 1);
    }

    /// Changes when a process said something.
    pub(super) fn watch(&self) -> watch::Receiver<u64> {
        self.news.subscribe()
    }

    /// Returns lines that a stream has not brought, as many as one message may have. `sent` has the
    /// number of the newest line of each process that the stream brought, also of these ones.
    pub(super) fn unsent(&self, sent: &mut BTreeMap<Key, u64>) -> Vec<pb::ProcessLines> {
        let (mut room, mut found) = (LINES_BYTES_MAX, Vec::new());
        for (&(script, process), tail) in self.tails().iter() {
            let newest = sent.entry((script, process)).or_default();
            if room == 0 || *newest == tail.newest() {
                continue;
            }
            let (first, lines) = tail.after(*newest, room);
            room = room.saturating_sub(lines.iter().map(|line| line.len() + 1).sum());
            *newest = first + lines.len() as u64 - 1;
            found.push(pb::ProcessLines { script, process, first, lines });
        }
        found
    }

    /// Forgets the lines of processes that the agent has no longer, once a stream brought them.
    pub(super) fn keep(&self, held: &BTreeSet<Key>, sent: &mut BTreeMap<Key, u64>) {
        let mut tails = self.tails();
        tails
            .retain(|key, tail| held.contains(key) || sent.get(key).is_none_or(|sent| *sent < tail.newest()));
        sent.retain(|key, _| tails.contains_key(key));
    }

    fn tails(&self) -> MutexGuard<'_, BTreeMap<Key, Tail>> {
        self.tails.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_go_out_once_in_messages_of_bounded_size() {
        let (tails, mut sent) = (Tails::new(), BTreeMap::new());
        assert!(tails.unsent(&mut sent).is_empty());
        let line = "x".repeat(1 << 10);
        (0..200).for_each(|_| tails.push((7, 0), &line));
        tails.push((7, 1), "short");
        let (mut messages, mut lines) = (0, 0);
        loop {
            let found = tails.unsent(&mut sent);
            if found.is_empty() {
                break;
            }
            let bytes: usize = found.iter().flat_map(|of| &of.lines).map(|line| line.len() + 1).sum();
            assert!(bytes <= LINES_BYTES_MAX + line.len());
            (messages, lines) = (messages + 1, lines + found.iter().map(|of| of.lines.len()).sum::<usize>());
        }
        assert_eq!((messages, lines), (2, 201));
        // Another stream begins anew.
        assert_eq!(tails.unsent(&mut BTreeMap::new())[0].first, 1);
        tails.push((7, 1), "last");
        tails.keep(&BTreeSet::from([(7, 0)]), &mut sent);
        assert_eq!(tails.unsent(&mut sent)[0].lines, ["last"], "it was not sent yet");
        tails.keep(&BTreeSet::new(), &mut sent);
        assert!(sent.is_empty() && tails.tails().is_empty());
    }
}
