//! How long a stream of files may take: a client that sends a byte now and then must not hold a place for ever.
//!
//! It has to say something within the time that [`stream_silence`](crate::Options::stream_silence) says, and after [`START`] to have brought [`BYTES_PER_SECOND`] on average: 16 GiB in
//! three days are still welcome, a byte a second is not. Pure: the time is an argument.

use std::time::Duration;

use net::security::Caller;
use proto::status::{Failure, Kind};
use tokio::time::Instant;
use tonic::{Status, Streaming};

/// Time that every stream has.
const START: Duration = Duration::from_secs(30);

/// What it must bring from then on, on average.
const BYTES_PER_SECOND: u64 = 64 << 10;

/// The patience with one stream.
#[derive(Debug)]
pub(crate) struct Patience {
    caller: Caller,
    /// Longest time between two messages.
    silence: Duration,
    begin: Instant,
    bytes: u64,
}

impl Patience {
    /// It begins now.
    pub(crate) fn with(caller: Caller, silence: Duration) -> Self {
        Self { caller, silence, begin: Instant::now(), bytes: 0 }
    }

    /// Until when the next message may take.
    fn deadline(&self, now: Instant) -> Instant {
        (now + self.silence).min(self.begin + START + Duration::from_secs(self.bytes / BYTES_PER_SECOND))
    }

    /// The next message of the stream.
    ///
    /// # Errors
    /// What the stream says; or it took too long.
    pub(crate) async fn next<T: prost::Message>(
        &mut self,
        stream: &mut Streaming<T>,
    ) -> Result<Option<T>, Status> {
        let deadline = self.deadline(Instant::now());
        let Ok(message) = tokio::time::timeout_at(deadline, stream.message()).await else {
            let (bytes, time, silence) = (self.bytes, self.begin.elapsed(), self.silence);
            let message = format!(
                "{bytes} bytes came in {:.0} s, and then too little for too long: a stream must send something every {silence:?} \
                 and {} KiB a second on average",
                time.as_secs_f32(),
                BYTES_PER_SECOND >> 10
            );
            self.caller.refuse("a stream that is too slow", &message);
            // Like a connection that broke: a worker that stood still may try again.
            return Err(Failure::new(Kind::Unavailable, message).into());
        };
        let message = message?;
        self.bytes += message.as_ref().map_or(0, |message| message.encoded_len() as u64);
        Ok(message)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SILENCE: Duration = Duration::from_secs(15);

    #[tokio::test(start_paused = true)]
    async fn a_stream_may_be_slow_but_not_for_ever() {
        let mut patience = Patience::with(Caller::of(&tonic::Request::new(())), SILENCE);
        let wait = |patience: &Patience, secs| {
            patience.deadline(patience.begin + Duration::from_secs(secs)) - patience.begin
        };
        // At first it is silence that ends it.
        assert_eq!(wait(&patience, 0), SILENCE);
        // Then what it brought so far.
        assert_eq!(wait(&patience, 25), START);
        patience.bytes = 100 * BYTES_PER_SECOND;
        assert_eq!(wait(&patience, 25), Duration::from_secs(25) + SILENCE);
        assert_eq!(wait(&patience, 125), Duration::from_secs(130));
        patience.bytes += 99 * BYTES_PER_SECOND / 100;
        assert_eq!(wait(&patience, 129), Duration::from_secs(130));
    }
}
