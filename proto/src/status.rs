//! What a failure means to the other side: one table of kinds, their gRPC codes, and whether to try again.
//!
//! A [`Failure`] crosses the wire as a gRPC status whose metadata names the kind, so that a client never parses prose.

use std::error::Error as _;
use std::fmt;
use std::io;

use tonic::metadata::MetadataValue;
use tonic::{Code, Status};

/// Kinds of failure, as many as there are different reactions to them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// The request contradicts itself, the layout or the plan. A bug or another model: never try again.
    Malformed,
    /// No such job, partition or file here (any more).
    NotFound,
    /// The job is ending or has ended: nothing can be changed about it any more.
    Ended,
    /// The sender works in an older era, or a lease or incarnation that ended: it must ask the master anew.
    Fenced,
    /// The version is no longer kept: its steps are applied, the sender's work is a duplicate.
    Gone,
    /// The version does not exist yet: ask again.
    NotYet,
    /// A limit is reached: wait and try again.
    Full,
    /// Starting, draining or unreachable: wait and try again.
    Unavailable,
    /// A master that does not lead: ask the one that does.
    StandingBy,
    /// No token, or one that the other side does not know; or the two ends do not take each other's certificates.
    Unauthenticated,
    /// The token is for something else, or its bearer has all that it may have.
    Denied,
    /// The versions of the two programs do not fit.
    Incompatible,
    /// A bug on the other side.
    Internal,
}

/// The table: kind, its name on the wire, its gRPC code, whether to try again.
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

    /// The gRPC code it travels as.
    pub fn code(self) -> Code {
        self.row().2
    }

    /// Whether the same request may succeed later.
    pub fn is_retryable(self) -> bool {
        self.row().3
    }
}

/// A failed call: its kind for programs and a message for people.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct Failure {
    /// What to do about it.
    pub kind: Kind,
    /// What, where, expected against found.
    pub message: String,
}

impl Failure {
    /// A failure of `kind`.
    pub fn new(kind: Kind, message: impl fmt::Display) -> Self {
        Self { kind, message: message.to_string() }
    }

    /// Whether the same request may succeed later.
    pub fn is_retryable(&self) -> bool {
        self.kind.is_retryable()
    }
}

/// One end of a connection refuses the other's certificate: trying again does not help. Transports put it inside an [`io::Error`].
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct Refused(pub String);

/// The kind that a status of ours names; `None` for a status from elsewhere.
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
    /// A status without our metadata comes from the transport (or from something that is no Ebbflow): its code decides.
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
            // A broken connection surfaces as any of these; pushes and pulls are safe to repeat.
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

/// What one end of a connection has against the other's certificate, if that is why there is none.
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
    /// What fails our checks of outside input is malformed.
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
