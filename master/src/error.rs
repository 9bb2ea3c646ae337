//! Everything that stops a master. A fault that stops only a request is a
//! [`Failure`](proto::status::Failure).

use std::path::PathBuf;

/// Result of running a master.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// The reason why a store of the journal could not do its work, for people.
pub type StoreError = Box<dyn std::error::Error + Send + Sync>;

/// A fault that stops a master.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Options that contradict themselves: every violation.
    #[error("master options: {}", .0.join("; "))]
    Options(Vec<String>),
    /// A file or folder of the data folder cannot be used.
    #[error("{}: {source}; data_dir must be a folder that this process may write", path.display())]
    File {
        /// Which.
        path: PathBuf,
        /// What the system says.
        source: std::io::Error,
    },
    /// Two masters must not share a data folder.
    #[error("{}: another master uses this folder; stop it or choose another data_dir", .0.display())]
    Busy(PathBuf),
    /// Several masters with one journal need one data folder.
    #[error(
        "{}: {found}, and the journal in etcd belongs to the data folder of master {expected:016x}; all masters of one --etcd-prefix \
         need the same folder, on a file system that they share", path.display()
    )]
    NotShared {
        /// The folder.
        path: PathBuf,
        /// What it is.
        found: String,
        /// Identity in the journal.
        expected: u64,
    },
    /// The journal cannot be opened or read.
    #[error("{}: {reason}; it must be the journal of this program, and no other process may have it open", path.display())]
    Journal {
        /// Which.
        path: PathBuf,
        /// What the store says.
        reason: StoreError,
    },
    /// The journal cannot be read.
    #[error("the journal cannot be read: {0}")]
    Store(StoreError),
    /// The journal has something that this program did not write.
    #[error(
        "the journal's `{key}` cannot be read: {reason}; it says which master this is, and without it the ps would drop every job. Start \
         the version of ebb that wrote it, or bring back a copy of the journal from before"
    )]
    Record {
        /// Key of the record.
        key: String,
        /// What is wrong with it.
        reason: prost::DecodeError,
    },
    /// The server stopped.
    #[error("serving: {0}")]
    Serve(#[from] tonic::transport::Error),
}
