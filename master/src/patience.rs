//! How long a stream of files may take: a slow client must not hold a place for ever.
//!
//! A client must send something within the time of
//! [`stream_silence`](crate::Options::stream_silence). After [`START`] it must also have sent
//! [`BYTES_PER_SECOND`] on average: 16 GiB in three days are welcome, a byte a second is not.
//!
//! Pure: the time is an argument. `service` waits, and refuses the client.

use std::time::Duration;

use tokio::time::Instant;

/// Time that every stream has.
const START: Duration = Duration::from_secs(30);

/// Average rate that a stream must reach after [`START`].
const BYTES_PER_SECOND: u64 = 64 << 10;

/// The patience with one stream.
#[derive(Debug)]
pub(crate) struct Patience {
    /// Longest time between two messages.
    silence: Duration,
    begin: Instant,
    /// Bytes of all messages so far.
    bytes: u64,
}

impl Patience {
    /// Returns the patience with a stream that begins now.
    pub(crate) const fn new(now: Instant, silence: Duration) -> Self {
        Self { silence, begin: now, bytes: 0 }
    }

    /// Returns the latest time for the next message, seen from `now`.
    pub(crate) fn deadline(&self, now: Instant) -> Instant {
        (now + self.silence).min(self.begin + START + Duration::from_secs(self.bytes / BYTES_PER_SECOND))
    }

    /// Records that a message of so many bytes came.
    pub(crate) const fn on_message(&mut self, bytes: u64) {
        self.bytes += bytes;
    }

    /// Returns the refusal of a stream whose deadline has passed, for people.
    pub(crate) fn refusal(&self, now: Instant) -> String {
        let Self { silence, begin, bytes } = self;
        format!(
            "{bytes} bytes came in {:.0} s, and then too little for too long: a stream must send something every {silence:?} \
             and {} KiB a second on average",
            (now - *begin).as_secs_f32(),
            BYTES_PER_SECOND >> 10
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SILENCE: Duration = Duration::from_secs(15);

    #[test]
    fn a_stream_may_be_slow_but_not_for_ever() {
        let begin = Instant::now();
        let mut patience = Patience::new(begin, SILENCE);
        let wait = |patience: &Patience, secs| patience.deadline(begin + Duration::from_secs(secs)) - begin;
        // At first it is silence that ends it.
        assert_eq!(wait(&patience, 0), SILENCE);
        // Then what it brought so far.
        assert_eq!(wait(&patience, 25), START);
        patience.on_message(100 * BYTES_PER_SECOND);
        assert_eq!(wait(&patience, 25), Duration::from_secs(25) + SILENCE);
        assert_eq!(wait(&patience, 125), Duration::from_secs(130));
        patience.on_message(99 * BYTES_PER_SECOND / 100);
        assert_eq!(wait(&patience, 129), Duration::from_secs(130));
        let refusal = patience.refusal(begin + Duration::from_secs(130));
        assert!(refusal.starts_with("6618480 bytes came in 130 s"), "{refusal}");
    }
}
