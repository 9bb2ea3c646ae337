//! Errors of reading data, and whether a retry may help.

use std::path::{Path, PathBuf};

use proto::spec::DataSet;

/// Result of reading data.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Error of reading data.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file cannot be read.
    #[error("{}: {source}", path.display())]
    File {
        /// Path of the file.
        path: PathBuf,
        /// Error of the system.
        source: std::io::Error,
    },
    /// A file on another machine cannot be read.
    #[error("{url}: {reason}")]
    Remote {
        /// URL of the file.
        url: String,
        /// Cause, and what to check.
        reason: String,
    },
    /// A data file is malformed.
    #[error("{}: {reason}", path.display())]
    Malformed {
        /// Path of the file.
        path: PathBuf,
        /// Place in the file, expected against found, what to do.
        reason: String,
    },
    /// A file must be in memory as a whole, and other files have the memory for data.
    #[error(
        "{}: {what}, and other open files of this worker have {held} of the {limit} bytes for data (data_memory); \
         raise it, give the job a worker of its own, or unpack the files", path.display()
    )]
    Full {
        /// Path of the file.
        path: PathBuf,
        /// Part of the file for which there is no memory.
        what: String,
        /// Bytes that other files, and the parts of this one before, have.
        held: u64,
        /// Bytes for data of this process.
        limit: u64,
    },
    /// The job's specification does not fit its data.
    #[error(transparent)]
    Specification(proto::Error),
    /// The job does not have this data set.
    #[error("data: the job has no {} data", if *.0 == DataSet::Train { "training" } else { "validation" })]
    NoSuchSet(DataSet),
    /// The data set does not have this file.
    #[error("data files: the job has {files} such files, none has number {file}")]
    NoSuchFile {
        /// Number of the file, from 0.
        file: usize,
        /// Files of the data set.
        files: usize,
    },
    /// The record is beyond the end of its data set.
    #[error(
        "record {record}: the data set has {records}; its files have changed since the job began, restore them or submit the job anew"
    )]
    NoRecord {
        /// Number of the record within its data set.
        record: u64,
        /// Records of the data set.
        records: u64,
    },
    /// This process's copy of the data differs from the one that the job was indexed from.
    #[error(
        "{}: {} records and {} bytes here, {} records and {} bytes where the job was indexed; give this worker the same files",
        path.display(), found.0, found.1, expected.0, expected.1
    )]
    Changed {
        /// Path of the file.
        path: PathBuf,
        /// Records and bytes when it was indexed.
        expected: (u64, u64),
        /// Records and bytes here.
        found: (u64, u64),
    },
    /// Records cannot be mixed.
    #[error("data.mixup: {0}")]
    Mixup(String),
    /// Outputs of a model make no file of predictions, or parts of predictions make no whole file.
    #[error("predictions: {0}")]
    Predictions(String),
}

impl Error {
    /// Returns whether every retry, here or elsewhere, fails the same way.
    pub const fn is_fatal(&self) -> bool {
        match self {
            Self::Malformed { .. }
            | Self::Specification(_)
            | Self::NoRecord { .. }
            | Self::Mixup(_)
            | Self::Predictions(_) => true,
            // The other files may be closed by then, or another worker may have the memory.
            Self::Full { .. } => false,
            Self::File { .. } | Self::Remote { .. } | Self::NoSuchSet(_) => false,
            Self::NoSuchFile { .. } | Self::Changed { .. } => false,
        }
    }
}

/// Why a part of a file makes no column.
#[derive(Debug)]
pub(crate) enum Flaw {
    /// The part is malformed for this reason.
    Malformed(String),
    /// The part cannot be read.
    Unread(Error),
}

impl Flaw {
    /// Returns the error. `named` names the part in a reason.
    pub(crate) fn at(self, path: &Path, named: impl FnOnce(String) -> String) -> Error {
        match self {
            Self::Malformed(reason) => malformed(path, named(reason)),
            Self::Unread(error) => error,
        }
    }
}

impl From<String> for Flaw {
    fn from(reason: String) -> Self {
        Self::Malformed(reason)
    }
}

impl From<Error> for Flaw {
    fn from(error: Error) -> Self {
        Self::Unread(error)
    }
}

/// Returns the error of a malformed file.
pub(crate) fn malformed(path: &Path, reason: impl Into<String>) -> Error {
    Error::Malformed { path: path.to_owned(), reason: reason.into() }
}

/// Returns the error of a malformed file as a result.
pub(crate) fn wrong<T>(path: &Path, reason: impl Into<String>) -> Result<T> {
    Err(malformed(path, reason))
}
