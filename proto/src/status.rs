//! Meaning of a failure to the other side: one table of kinds, their gRPC codes, and whether a
//! retry may help.
//!
//! A [`Failure`] crosses the wire as a gRPC status whose metadata names the kind, so that a client
//! never parses prose.

use std::error::Error as _;
use std::fmt;
use std::io;

use tonic::metadata::MetadataValue;
use tonic::{Code, Status};

/// Kinds of failure, one for each reaction of the caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// The request contradicts itself, the layout or the plan: the sender has a bug or another
    /// model. Retries do not help.
    Malformed,
    /// The job, partition or file is not here, or no longer.
    NotFound,
    /// The job is ending or has ended, so it can no longer be changed.
    Ended,
    /// The sender has an older era, or a lease or incarnation that ended. It must ask the master
    /// again.
    Fenced,
    /// The version is no longer kept. Its steps are applied, so the sender's work is a duplicate.
    Gone,
    /// The version does not exist yet. The caller retries.
    NotYet,
    /// A limit is reached. The caller waits and retries.
    Full,
    /// The process starts, drains or is unreachable. The caller waits and retries.
    Unavailable,
    /// The master does not lead. The caller asks the leader.
    StandingBy,
    /// The call has no token or an unknown one, or one end does not accept the other's certificate.
    Unauthenticated,
    /// The token does not allow the call, or its bearer has reached a limit.
    Denied,
    /// The versions of the two programs do not fit.
    Incompatible,
    /// The other side has a bug.
    Internal,
}

/// Table of the kinds: kind, name on the wire, gRPC code, whether a retry may help.
const TABLE: [(Kind, &str, Code, bool); 13] = [
    (Kind::Malformed, "malformed", Code::InvalidArgument, false),
    (Kind::NotFound, "not-found", Code::NotFound, false),
    (Kind::Ended, "ended", Code::FailedPrecondition, false),
    (Kind::Fenced, "fenced", Code::FailedPrecondition, false),
    (Kind::Gone, "gone", Code::OutOfRange, false),
    (Kind::NotYet, "not-yet", Code::Unavailable, true),
    (Kind::Full, "full", Code::ResourceExhausted, true),
    (Kind::Unavailable, "unavailable", Code::Unavailable, true),
    (Kind::StandingBy, "standing-by", Code::Unavailable, true),
    (Kind::Unauthenticated, "unauthenticated", Code::Unauthenticated, false),
    (Kind::Denied, "denied", Code::PermissionDenied, false),
    (Kind::Incompatible, "incompatible", Code::FailedPrecondition, false),
    (Kind::Internal, "internal", Code::Internal, false),
];

const KIND_KEY: &str = "ebb-kind";

impl Kind {
    fn row(self) -> &'static (Self, &'static str, Code, bool) {
        TABLE.iter().find(|row| row.0 == self).expect("every kind is in the table")
    }

    /// Returns the gRPC code of the kind.
    pub fn code(self) -> Code {
        self.row().2
    }

    /// Returns whether the same request may succeed later.
    pub fn is_retryable(self) -> bool {
        self.row().3
    }
}

/// A failed call: its kind for programs and a message for people.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct Failure {
    /// Kind of the failure, which decides the caller's reaction.
    pub kind: Kind,
    /// Message for people: what, where, expected against found.
    pub message: String,
}

impl Failure {
    /// Returns a failure of `kind`.
    pub fn new(kind: Kind, message: impl fmt::Display) -> Self {
        Self { kind, message: message.to_string() }
    }

    /// Returns whether the same request may succeed later.
    pub fn is_retryable(&self) -> bool {
        self.kind.is_retryable()
    }
}

/// One end of a connection refuses the other's certificate. Retries do not help. Transports put
/// this error inside an [`io::Error`].
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct Refused(pub String);

/// Returns the kind that an Ebbflow status names, or `None` for any other status.
pub fn kind_named(status: &Status) -> Option<Kind> {
    let name = status.metadata().get(KIND_KEY)?.to_str().ok()?;
    TABLE.iter().find(|row| row.1 == name).map(|row| row.0)
}

impl From<Failure> for Status {
    fn from(failure: Failure) -> Self {
        let mut status = Self::new(failure.kind.code(), failure.message);
        status.metadata_mut().insert(KIND_KEY, MetadataValue::from_static(failure.kind.row().1));
        status
    }
}

impl From<Status> for Failure {
    /// Converts a status. One without Ebbflow's metadata comes from the transport or from a foreign
    /// server: its code decides the kind.
    fn from(status: Status) -> Self {
        if let Some(refused) = refused(&status) {
            return Self::new(Kind::Unauthenticated, refused);
        }
        let kind = kind_named(&status).unwrap_or_else(|| match status.code() {
            Code::InvalidArgument | Code::OutOfRange => Kind::Malformed,
            Code::NotFound => Kind::NotFound,
            Code::Unimplemented => Kind::Incompatible,
            Code::ResourceExhausted => Kind::Full,
            Code::Unauthenticated => Kind::Unauthenticated,
            Code::PermissionDenied => Kind::Denied,
            // A broken connection shows as any of these. Pushes and pulls are safe to repeat.
            Code::Unavailable | Code::Cancelled | Code::DeadlineExceeded | Code::Unknown | Code::Internal => {
                Kind::Unavailable
            }
            _ => Kind::Internal,
        });
        let message = match status.message() {
            "" => format!("{:?}", status.code()),
            message => message.to_owned(),
        };
        Self { kind, message }
    }
}

/// Returns the refusal of a certificate, if that caused the status.
fn refused(status: &Status) -> Option<&Refused> {
    let mut cause = status.source();
    while let Some(error) = cause {
        let inside = error.downcast_ref::<io::Error>().and_then(io::Error::get_ref);
        if let Some(refused) = inside.and_then(|inside| inside.downcast_ref()) {
            return Some(refused);
        }
        cause = error.source();
    }
    None
}

impl From<crate::Error> for Failure {
    /// Converts an error of outside input, which is always malformed.
    fn from(error: crate::Error) -> Self {
        Self::new(Kind::Malformed, error)
    }
}

impl From<crate::Error> for Status {
    fn from(error: crate::Error) -> Self {
        Failure::from(error).into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_survives_the_wire() {
        for (kind, ..) in TABLE {
            let failure = Failure::new(kind, format!("about {kind:?}"));
            assert_eq!(Failure::from(Status::from(failure.clone())), failure);
        }
    }

    #[test]
    fn a_broken_transport_is_worth_a_retry() {
        assert!(Failure::from(Status::unavailable("connection refused")).is_retryable());
        assert!(!Failure::from(Status::invalid_argument("no")).is_retryable());
    }
}
