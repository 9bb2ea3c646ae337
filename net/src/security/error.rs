//! Errors of keys and their files.

use std::net::IpAddr;
use std::path::PathBuf;

/// Error of keys, their files or their use.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The options contradict themselves. The list has every violation.
    #[error("{}", .0.join("; "))]
    Options(Vec<String>),
    /// A server would be reached from other machines without certificates or tokens.
    #[error(
        "--listen {address} is reached from other machines, and this server lacks {missing}: make them with `ebb certs init` \
         and give --tls-ca, --tls-cert, --tls-key and --tokens (docs/security.md), listen on 127.0.0.1, or say --insecure in a \
         network where you trust everybody"
    )]
    Open {
        /// Address on which it would listen.
        address: IpAddr,
        /// Missing keys.
        missing: &'static str,
    },
    /// A process without certificates would show its health or its metrics to other machines.
    #[error(
        "{address} is reached from other machines, and this process has no certificates: give --tls-ca, --tls-cert and --tls-key \
         (docs/security.md), listen on 127.0.0.1, or say --insecure in a network where you trust everybody"
    )]
    Shown {
        /// Address on which it would listen.
        address: IpAddr,
    },
    /// A file cannot be read.
    #[error("{what} {}: {source}", path.display())]
    File {
        /// Option that names the file.
        what: &'static str,
        /// Path of the file.
        path: PathBuf,
        /// Error of the system.
        source: std::io::Error,
    },
    /// A given token is no token.
    #[error("token: {reason}")]
    Token {
        /// Expected against found, without the token.
        reason: String,
    },
    /// A file has the wrong content.
    #[error("{what} {}: {reason}", path.display())]
    Content {
        /// Option that names the file.
        what: &'static str,
        /// Path of the file.
        path: PathBuf,
        /// Expected against found.
        reason: String,
    },
}
