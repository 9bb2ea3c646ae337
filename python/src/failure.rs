//! Which exception of `ebbflow.errors` a failure becomes, and its text.

use client::Error;
use proto::status::{Failure, Kind};

/// Returns the name of the class in `ebbflow.errors`.
pub(crate) fn class(error: &Error) -> &'static str {
    match error {
        Error::NoAnswer { .. } => "UnreachableError",
        Error::AnswerLost(_) => "AnswerLostError",
        Error::Url(_)
        | Error::JobFile { .. }
        | Error::Invalid(_)
        | Error::Script { .. }
        | Error::NotTorchScript { .. }
        | Error::Initial { .. }
        | Error::UnknownNetwork { .. }
        | Error::NoDataFiles { .. }
        | Error::Data(_)
        | Error::CheckpointsInMemory
        | Error::PredictionsInMemory
        | Error::NothingToResume
        | Error::Exists { .. }
        | Error::Bundle { .. }
        | Error::NoSecret { .. }
        | Error::SecretNotText { .. }
        | Error::Path { .. } => "InvalidJobError",
        Error::Checkpoint(_)
        | Error::NoCheckpoints { .. }
        | Error::SeveralJobs { .. }
        | Error::NoneComplete { .. }
        | Error::NoneIntact { .. } => "CheckpointError",
        Error::NoFolder { .. }
        | Error::NotOurs { .. }
        | Error::Unwritable { .. }
        | Error::InUse { .. }
        | Error::HasResults { .. }
        | Error::NotCopied { .. }
        | Error::File { .. }
        | Error::SetAside { .. }
        | Error::EventsMissing { .. }
        | Error::Reserved { .. }
        | Error::NotSent { .. }
        | Error::Arrived { .. } => "OutputError",
        Error::Local { .. } | Error::Worker(_) | Error::Panicked(_) => "ClusterError",
        other => other.failure().map_or("Error", class_of_failure),
    }
}

fn class_of_failure(failure: &Failure) -> &'static str {
    match failure.kind {
        Kind::Malformed => "InvalidJobError",
        Kind::NotFound => "NotFoundError",
        Kind::Ended => "EndedError",
        Kind::Full => "LimitError",
        Kind::Unauthenticated | Kind::Denied => "AccessError",
        Kind::Unavailable | Kind::StandingBy | Kind::NotYet => "UnreachableError",
        Kind::Incompatible => "IncompatibleError",
        Kind::Fenced | Kind::Gone | Kind::Internal => "Error",
    }
}

/// Returns the message of an error and of its causes. A cause that the message repeats is left out.
pub(crate) fn message(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(found) = cause {
        let what = found.to_string();
        if !text.contains(&what) {
            text = format!("{text}: {what}");
        }
        cause = found.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use std::error::Error as _;
    use std::time::Duration;

    use super::*;

    #[test]
    fn failures_of_a_master_have_a_class_for_what_a_caller_does_next() {
        let failed = |kind| Error::Failed(Failure::new(kind, "it says why"));
        for (kind, name) in [
            (Kind::NotFound, "NotFoundError"),
            (Kind::Ended, "EndedError"),
            (Kind::Denied, "AccessError"),
            (Kind::Unauthenticated, "AccessError"),
            (Kind::Full, "LimitError"),
            (Kind::Incompatible, "IncompatibleError"),
            (Kind::Internal, "Error"),
        ] {
            assert_eq!(class(&failed(kind)), name);
        }
        assert_eq!(class(&Error::Refused(Failure::new(Kind::Full, "3 jobs"))), "LimitError");
        assert_eq!(class(&Error::AnswerLost(Failure::new(Kind::Full, "3 jobs"))), "AnswerLostError");
    }

    #[test]
    fn failures_of_this_side_have_a_class() {
        let url = "http://m".to_owned();
        let away = Error::NoAnswer { url, patience: Duration::ZERO, last: None };
        assert_eq!(class(&away), "UnreachableError");
        let source = std::io::Error::other("gone");
        assert_eq!(class(&Error::JobFile { path: "j.toml".into(), source }), "InvalidJobError");
        assert_eq!(class(&Error::NoSecret { name: "KEY".to_owned() }), "InvalidJobError");
        assert_eq!(class(&Error::SecretNotText { name: "KEY".to_owned() }), "InvalidJobError");
        assert_eq!(class(&Error::InUse { dir: "out".into() }), "OutputError");
        assert_eq!(class(&Error::HasResults { file: "s3://b/summary.json".to_owned() }), "OutputError");
        assert_eq!(class(&Error::Panicked("x".to_owned())), "ClusterError");
        assert_eq!(class(&Error::Io(std::io::Error::other("x"))), "Error");
    }

    #[test]
    fn a_message_has_each_cause_once() {
        let source = std::io::Error::other("no such file");
        let error = Error::JobFile { path: "j.toml".into(), source };
        assert_eq!(message(&error), "job file j.toml: no such file");
        let last = Some(Failure::new(Kind::Unavailable, "nobody listens"));
        let away = Error::NoAnswer { url: "http://m".to_owned(), patience: Duration::from_secs(1), last };
        assert_eq!(message(&away), "no answer from the master at http://m for 1s: nobody listens");
        assert!(away.source().is_some());
    }
}
