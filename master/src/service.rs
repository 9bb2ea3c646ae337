//! tonic in, tonic out: requests become actions on the books, failures become statuses. Nothing is
//! decided here.

mod fleet;
mod jobs;
mod scripts;

use std::pin::Pin;
use std::time::Duration;

use futures::Stream;
use net::security::Caller;
use proto::status::{Failure, Kind};
use tokio::time::Instant;
use tonic::{Request, Status, Streaming};

use crate::patience::Patience;

pub(crate) use self::fleet::FleetService;
pub(crate) use self::jobs::JobsService;
pub(crate) use self::scripts::ScriptsService;

/// A stream of replies.
type Answers<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

/// The messages of a client that sends a stream, within the limits of [`Patience`].
struct Messages<T> {
    stream: Streaming<T>,
    caller: Caller,
    patience: Patience,
}

impl<T: prost::Message> Messages<T> {
    /// Returns the messages of a request. `silence`: the longest time between two of them.
    fn of(request: Request<Streaming<T>>, silence: Duration) -> Self {
        let caller = Caller::of(&request);
        Self { caller, stream: request.into_inner(), patience: Patience::new(Instant::now(), silence) }
    }

    /// Returns the next message; `None` at the end of the stream.
    ///
    /// # Errors
    /// The stream broke, or it is too slow.
    async fn next(&mut self) -> Result<Option<T>, Status> {
        let deadline = self.patience.deadline(Instant::now());
        let Ok(message) = tokio::time::timeout_at(deadline, self.stream.message()).await else {
            let message = self.patience.refusal(Instant::now());
            self.caller.refuse("a stream that is too slow", &message);
            // As for a broken connection: a worker that stood still may try again.
            return Err(Failure::new(Kind::Unavailable, message).into());
        };
        let message = message?;
        self.patience.on_message(message.as_ref().map_or(0, |message| message.encoded_len() as u64));
        Ok(message)
    }

    /// Returns the rest of the stream, without limits.
    fn into_stream(self) -> Streaming<T> {
        self.stream
    }
}

/// Returns the status of a stream that ended where a first message belongs.
fn nothing(message: &str) -> Status {
    Failure::new(Kind::Malformed, format!("{message}: expected a first message, found the end of the stream"))
        .into()
}
