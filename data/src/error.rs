//! Everything that stops the reading of data, and whether another attempt can help.

use std::path::{Path, PathBuf};

use proto::spec::DataSet;

/// Result of reading data.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What went wrong.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file cannot be read.
    #[error("{}: {source}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What the system says.
        source: std::io::Error,
    },
    /// A data file is not what its format says.
    #[error("{}: {reason}", path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// Where in it, expected against found, what to do.
        reason: String,
    },
    /// The job's description and its data do not go together.
    #[error(transparent)]
    Specification(proto::Error),
    /// A data set that the job does not have.
    #[error("data: the job has no {} data", if *.0 == DataSet::Train { "training" } else { "validation" })]
    NoSuchSet(DataSet),
    /// A file that the data set does not have.
    #[error("data files: the job has {files} such files, none has number {file}")]
    NoSuchFile {
        /// The file's number, from 0.
        file: usize,
        /// Files of the data set.
        files: usize,
    },
    /// A record beyond the end of its data set.
    #[error(
        "record {record}: the data set has {records}; its files have changed since the job began, restore them or submit the job anew"
    )]
    NoRecord {
        /// The record's number within its data set.
        record: u64,
        /// Records of the data set.
        records: u64,
    },
    /// This process's copy of the data is not the one that the job was indexed from.
    #[error("{}: {found} records here, {expected} where the job was indexed; give this worker the same files", path.display())]
    Records {
        /// The file.
        path: PathBuf,
        /// Records when it was indexed.
        expected: u64,
        /// Records here.
        found: u64,
    },
}

impl Error {
    /// Whether another attempt, here or elsewhere, can only fail the same way.
    pub const fn is_fatal(&self) -> bool {
        match self {
            Self::Malformed { .. } | Self::Specification(_) | Self::NoRecord { .. } => true,
            Self::File { .. } | Self::NoSuchSet(_) | Self::NoSuchFile { .. } | Self::Records { .. } => false,
        }
    }
}

/// The error of a file that is not what its format says.
pub(crate) fn malformed(path: &Path, reason: impl Into<String>) -> Error {
    Error::Malformed { path: path.to_owned(), reason: reason.into() }
}

/// As [`malformed`], for callers that return it at once.
pub(crate) fn wrong<T>(path: &Path, reason: impl Into<String>) -> Result<T> {
    Err(malformed(path, reason))
}
