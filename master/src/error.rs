//! Everything that stops a master. What stops only a request is a [`Failure`](proto::status::Failure).

use std::path::PathBuf;

/// Result of running a master.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What went wrong.
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
    /// The server stopped.
    #[error("serving: {0}")]
    Serve(#[from] tonic::transport::Error),
}
