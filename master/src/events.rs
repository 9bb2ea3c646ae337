//! A job's events: numbered from 1, kept for those who watch later, and announced to those who
//! watch now.
//!
//! Numbers have no gaps. The journal keeps the newest [`EVENTS_MAX`] events of a job, memory the
//! newest [`IN_MEMORY`]; older ones are forgotten, never newer ones. A reader of events that are no
//! longer in memory reads the journal.

use std::collections::VecDeque;

use proto::pb;
use proto::pb::event::Kind;
use tokio::sync::watch;

/// Events of one job that the journal keeps; it has up to [`REMOVED_AT_ONCE`] more.
pub(crate) const EVENTS_MAX: u64 = 16_384;

/// Events of one job that memory keeps.
pub(crate) const IN_MEMORY: usize = 1024;

/// Events that leave the journal together.
const REMOVED_AT_ONCE: u64 = 256;

/// The log of one job.
#[derive(Debug)]
pub(crate) struct EventLog {
    /// The newest ones, and all that were not yet taken to be written down.
    events: VecDeque<pb::Event>,
    newest: u64,
    /// Newest that was taken to be written down.
    taken: u64,
    /// The newest event that says how far training is known to users.
    progress: Option<Kind>,
    announce: watch::Sender<u64>,
}

/// What the journal is to do.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Taken {
    /// Events to write.
    pub(crate) events: Vec<pb::Event>,
    /// Events with smaller numbers are to be removed.
    pub(crate) oldest: Option<u64>,
}

impl Default for EventLog {
    fn default() -> Self {
        Self { events: VecDeque::new(), newest: 0, taken: 0, progress: None, announce: watch::Sender::new(0) }
    }
}

impl EventLog {
    /// Returns the log of an earlier start of the master, by number: all events, or the newest
    /// ones.
    pub(crate) fn restored(events: impl IntoIterator<Item = pb::Event>) -> Self {
        let mut log = Self::default();
        for event in events {
            log.push(event);
            log.taken = log.newest;
            log.shrink();
        }
        log
    }

    /// Appends an event and wakes who watches.
    pub(crate) fn append(&mut self, unix_ms: u64, kind: Kind) {
        self.push(pb::Event { sequence: self.newest + 1, unix_ms, kind: Some(kind) });
        self.shrink();
    }

    fn push(&mut self, event: pb::Event) {
        self.newest = event.sequence;
        let progress = event.kind.as_ref().filter(|kind| matches!(kind, Kind::Train(_) | Kind::Rewind(_)));
        self.progress = progress.cloned().or_else(|| self.progress.take());
        self.events.push_back(event);
        self.announce.send_replace(self.newest);
    }

    /// Forgets what is in the journal, beyond the newest ones.
    fn shrink(&mut self) {
        while self.events.len() > IN_MEMORY
            && self.events.front().is_some_and(|event| event.sequence <= self.taken)
        {
            self.events.pop_front();
        }
    }

    /// Returns up to `count` events with larger numbers than `after`, in order. `None`: the first
    /// of them is no longer in memory.
    pub(crate) fn after(&self, after: u64, count: usize) -> Option<Vec<pb::Event>> {
        let before = self.newest - self.events.len() as u64;
        let skip = usize::try_from(after.checked_sub(before)?).unwrap_or(usize::MAX);
        Some(self.events.iter().skip(skip).take(count).cloned().collect())
    }

    /// Returns the newest event of a step or of a rewind, since the journal began to forget any.
    pub(crate) const fn progress(&self) -> Option<&Kind> {
        self.progress.as_ref()
    }

    /// Events that were appended since the last call, to write them down, and what is to be removed
    /// in turn.
    pub(crate) fn take(&mut self) -> Taken {
        let before = std::mem::replace(&mut self.taken, self.newest);
        if before == self.newest {
            return Taken::default();
        }
        let events = self.after(before, usize::MAX).expect("they stay until they are taken");
        self.shrink();
        let is_due = before / REMOVED_AT_ONCE < self.newest / REMOVED_AT_ONCE;
        let oldest = (self.newest + 1).saturating_sub(EVENTS_MAX);
        Taken { events, oldest: Some(oldest).filter(|oldest| is_due && *oldest > 1) }
    }

    /// Changes whenever an event is appended.
    pub(crate) fn watch(&self) -> watch::Receiver<u64> {
        self.announce.subscribe()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

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
        assert!(log.after(0, 9).unwrap().is_empty());
        for message in ["a", "b", "c"] {
            log.append(7, warning(message));
        }
        assert_eq!(numbers(&log.after(0, 9).unwrap()), [1, 2, 3]);
        assert_eq!(numbers(&log.after(1, 1).unwrap()), [2]);
        assert!([3, 99].iter().all(|&after| log.after(after, 9).unwrap().is_empty()));
        let last = log.after(2, 1).unwrap().remove(0);
        assert_eq!((last.unix_ms, last.kind), (7, Some(warning("c"))));
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
        assert_eq!(log.take(), Taken::default());
        (0..3).for_each(|_| log.append(7, warning("a")));
        let taken = log.take().events;
        assert_eq!((numbers(&taken), log.take()), (vec![1, 2, 3], Taken::default()));
        let mut restored = EventLog::restored(taken);
        restored.append(8, warning("b"));
        assert_eq!((numbers(&restored.take().events), restored.after(0, 9).unwrap().len()), (vec![4], 4));
    }

    #[test]
    fn what_is_known_of_the_training_is_remembered_longer_than_the_event() {
        let rewind = Kind::Rewind(pb::RewindEvent { version: 7, era: 1 });
        let mut log = EventLog::default();
        log.append(0, rewind.clone());
        for _ in 0..2 * IN_MEMORY {
            log.append(0, warning("a"));
            log.take();
        }
        assert_eq!((log.after(0, 1), log.progress()), (None, Some(&rewind)));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]

        /// A journal that does as it is told, with restarts; how many events are appended before
        /// each look.
        #[test]
        fn memory_and_journal_are_bounded_and_lack_no_newer_event(
            appends in proptest::collection::vec((0u64..4000, any::<bool>()), 1..20),
            count in 1usize..600,
        ) {
            let (mut log, mut journal) = (EventLog::default(), BTreeMap::new());
            let mut newest = 0;
            for (appended, restart) in appends {
                newest += appended;
                (0..appended).for_each(|_| log.append(0, warning("a")));
                let taken = log.take();
                journal.extend(taken.events.into_iter().map(|event| (event.sequence, event)));
                if let Some(oldest) = taken.oldest {
                    journal = journal.split_off(&oldest);
                }
                prop_assert!(log.events.len() <= IN_MEMORY);
                prop_assert!(journal.len() as u64 <= EVENTS_MAX + REMOVED_AT_ONCE);
                prop_assert!(journal.len() as u64 >= newest.min(EVENTS_MAX));
                prop_assert!(journal.keys().copied().eq(newest + 1 - journal.len() as u64..=newest));
                if restart {
                    let known = journal.values().rev().take(IN_MEMORY).rev().cloned();
                    log = EventLog::restored(known);
                }
                // From wherever a reader begins: memory, or else the journal, has the next ones.
                for after in [0, newest / 2, newest.saturating_sub(IN_MEMORY as u64), newest] {
                    let read = log.after(after, count);
                    prop_assert_eq!(read.is_none(), after + (log.events.len() as u64) < newest);
                    let rest = (newest - after).min(count as u64);
                    prop_assert!(read.is_none_or(|read| numbers(&read).into_iter().eq(after + 1..=after + rest)));
                }
            }
        }
    }
}
