//! tonic in, tonic out: requests become actions on the books, failures become statuses. Nothing is decided here.

mod fleet;
mod jobs;

use std::pin::Pin;

use futures::Stream;
use proto::status::{Failure, Kind};
use tonic::Status;

pub(crate) use self::fleet::FleetService;
pub(crate) use self::jobs::JobsService;

/// A stream of answers.
type Answers<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

/// What long calls end with at a shutdown.
pub(crate) fn leaving() -> Status {
    Failure::new(Kind::Unavailable, "the master is shutting down").into()
}

/// A stream that ended where a first message belongs.
fn nothing(message: &str) -> Status {
    Failure::new(Kind::Malformed, format!("{message}: expected a first message, found the end of the stream"))
        .into()
}
