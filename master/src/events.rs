//! A job's events: numbered from 1, kept for those who watch later, and announced to those who watch now.
//!
//! Numbers have no gaps for who keeps up. The log is bounded: beyond [`EVENTS_MAX`] the oldest are forgotten, never the newest.

use std::collections::VecDeque;

use proto::pb;
use proto::pb::event::Kind;
use tokio::sync::watch;

/// Events that one job keeps.
pub(crate) const EVENTS_MAX: usize = 16_384;

/// The log of one job.
#[derive(Debug)]
pub(crate) struct EventLog {
    events: VecDeque<pb::Event>,
    newest: u64,
    /// Newest that was taken to be written down.
    taken: u64,
    announce: watch::Sender<u64>,
}

impl Default for EventLog {
    fn default() -> Self {
        Self { events: VecDeque::new(), newest: 0, taken: 0, announce: watch::Sender::new(0) }
    }
}

impl EventLog {
    /// The log of an earlier start of the master, by number.
    pub(crate) fn restored(events: impl IntoIterator<Item = pb::Event>) -> Self {
        let events: VecDeque<_> = events.into_iter().collect();
        let newest = events.back().map_or(0, |event| event.sequence);
        Self { events, newest, taken: newest, announce: watch::Sender::new(newest) }
    }

    /// Appends an event and wakes who watches.
    pub(crate) fn append(&mut self, unix_ms: u64, kind: Kind) {
        self.newest += 1;
        self.events.push_back(pb::Event { sequence: self.newest, unix_ms, kind: Some(kind) });
        if self.events.len() > EVENTS_MAX {
            self.events.pop_front();
        }
        self.announce.send_replace(self.newest);
    }

    /// Up to `count` events with larger numbers than `after`, in order.
    pub(crate) fn after(&self, after: u64, count: usize) -> Vec<pb::Event> {
        let oldest = self.newest - self.events.len() as u64;
        let skip = after.saturating_sub(oldest).min(self.events.len() as u64) as usize;
        self.events.iter().skip(skip).take(count).cloned().collect()
    }

    /// What `of` makes of the newest event that it makes something of.
    pub(crate) fn newest<T>(&self, of: impl Fn(&Kind) -> Option<T>) -> Option<T> {
        self.events.iter().rev().find_map(|event| of(event.kind.as_ref()?))
    }

    /// Events that were appended since the last call, to write them down.
    pub(crate) fn take(&mut self) -> Vec<pb::Event> {
        let after = std::mem::replace(&mut self.taken, self.newest);
        if after == self.newest { Vec::new() } else { self.after(after, usize::MAX) }
    }

    /// Numbers of the events that it keeps.
    pub(crate) fn numbers(&self) -> std::ops::RangeInclusive<u64> {
        self.newest - self.events.len() as u64 + 1..=self.newest
    }

    /// Changes whenever an event is appended.
    pub(crate) fn watch(&self) -> watch::Receiver<u64> {
        self.announce.subscribe()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn warning(message: &str) -> Kind {
        Kind::Warning(pb::WarningEvent { message: message.to_owned() })
    }

    fn numbers(events: &[pb::Event]) -> Vec<u64> {
        events.iter().map(|event| event.sequence).collect()
    }

    #[test]
    fn events_are_numbered_from_one_and_read_from_anywhere() {
        let mut log = EventLog::default();
        assert!(log.after(0, 9).is_empty());
        for message in ["a", "b", "c"] {
            log.append(7, warning(message));
        }
        assert_eq!(numbers(&log.after(0, 9)), [1, 2, 3]);
        assert_eq!(numbers(&log.after(1, 1)), [2]);
        assert!(log.after(3, 9).is_empty() && log.after(99, 9).is_empty());
        assert_eq!((log.after(2, 1)[0].unix_ms, log.after(2, 1)[0].kind.clone()), (7, Some(warning("c"))));
    }

    #[test]
    fn a_watcher_hears_of_each_append() {
        let mut log = EventLog::default();
        let mut watcher = log.watch();
        assert!(!watcher.has_changed().expect("open"));
        log.append(0, warning("a"));
        assert!(watcher.has_changed().expect("open"));
        assert_eq!(*watcher.borrow_and_update(), 1);
    }

    #[test]
    fn an_event_is_taken_once_to_be_written_down_and_restored_with_its_number() {
        let mut log = EventLog::default();
        assert!(log.take().is_empty());
        (0..3).for_each(|_| log.append(7, warning("a")));
        let taken = log.take();
        assert_eq!((numbers(&taken), log.take().len(), log.numbers()), (vec![1, 2, 3], 0, 1..=3));
        let mut restored = EventLog::restored(taken);
        restored.append(8, warning("b"));
        assert_eq!((numbers(&restored.take()), restored.after(0, 9).len()), (vec![4], 4));
    }

    #[test]
    fn a_full_log_forgets_the_oldest() {
        let mut log = EventLog::default();
        (0..EVENTS_MAX + 5).for_each(|_| log.append(0, warning("a")));
        assert_eq!(log.after(0, 1)[0].sequence, 6);
        assert_eq!(
            numbers(&log.after(EVENTS_MAX as u64 + 3, 9)),
            [EVENTS_MAX as u64 + 4, EVENTS_MAX as u64 + 5]
        );
    }
}
