//! What is wrong with keys and where they lie.

use std::net::IpAddr;
use std::path::PathBuf;

/// What went wrong.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Options that contradict themselves: every violation.
    #[error("{}", .0.join("; "))]
    Options(Vec<String>),
    /// A server would be reached from other machines without both locks.
    #[error(
        "--listen {address} is reached from other machines, and this server lacks {missing}: make them with `ebb certs init` \
         and give --tls-ca, --tls-cert, --tls-key and --tokens (docs/security.md), listen on 127.0.0.1, or say --insecure in a \
         network where you trust everybody"
    )]
    Open {
        /// Where it would listen.
        address: IpAddr,
        /// What it lacks.
        missing: &'static str,
    },
    /// A process without certificates would show its health or its numbers to other machines.
    #[error(
        "{address} is reached from other machines, and this process has no certificates: give --tls-ca, --tls-cert and --tls-key \
         (docs/security.md), listen on 127.0.0.1, or say --insecure in a network where you trust everybody"
    )]
    Shown {
        /// Where it would listen.
        address: IpAddr,
    },
    /// A file cannot be read.
    #[error("{what} {}: {source}", path.display())]
    File {
        /// Which of the options.
        what: &'static str,
        /// Where.
        path: PathBuf,
        /// What the system says.
        source: std::io::Error,
    },
    /// A file is not what it should be.
    #[error("{what} {}: {reason}", path.display())]
    Content {
        /// Which of the options.
        what: &'static str,
        /// Where.
        path: PathBuf,
        /// Expected against found.
        reason: String,
    },
}
