//! The events of a job, in the order in which the master noted them.

use proto::pb;
use proto::pb::event::Kind;

/// One thing that happened to a job.
#[derive(Clone, Debug, PartialEq)]
pub struct Event {
    /// Counts the events of the job from 1.
    pub sequence: u64,
    /// Milliseconds since 1970 on the master's clock.
    pub unix_ms: u64,
    /// The kind of event, with its facts.
    pub kind: Kind,
}

impl Event {
    /// Returns the event of a message; `None` for a kind that only newer programs know.
    pub(crate) fn of(message: pb::Event) -> Option<Self> {
        let pb::Event { sequence, unix_ms, kind } = message;
        Some(Self { sequence, unix_ms, kind: kind? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kind_that_is_not_known_is_no_event() {
        assert_eq!(Event::of(pb::Event { sequence: 3, unix_ms: 7, kind: None }), None);
        let kind = Kind::Rewind(pb::RewindEvent { version: 4, era: 1 });
        let event = Event::of(pb::Event { sequence: 3, unix_ms: 7, kind: Some(kind.clone()) });
        assert_eq!(event, Some(Event { sequence: 3, unix_ms: 7, kind }));
    }
}
