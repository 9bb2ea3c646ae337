//! Errors of a checkpoint or of the store on which it lies.

/// Result of reading or writing a checkpoint.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Error of a checkpoint or its store.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// The URL leads to no store.
    #[error("checkpoint store `{url}`: {reason}")]
    Url {
        /// URL as the user gave it.
        url: String,
        /// Reason why the URL leads to no store.
        reason: String,
    },
    /// The master does not allow jobs to use this place.
    #[error(
        "checkpoint store `{url}` is outside the places that this master allows: {allowed}; choose one below them, or have the \
         master started with one more --checkpoints PLACE"
    )]
    NotAllowed {
        /// URL as the user gave it.
        url: String,
        /// Allowed places.
        allowed: String,
    },
    /// The store failed. A retry may help.
    #[error("{what} `{file}`: {reason}")]
    Store {
        /// Failed operation: "read" or "write".
        what: &'static str,
        /// File of the operation.
        file: String,
        /// Answer of the store.
        reason: String,
    },
    /// A file of the checkpoint is missing.
    #[error("`{file}` is missing; take an older checkpoint, or bring the file back")]
    Missing {
        /// Missing file.
        file: String,
    },
    /// A later version of this program wrote the file.
    #[error(
        "`{file}` has format {found}, this program knows formats up to {known}; read it with the version that wrote it"
    )]
    Future {
        /// File with the unknown format.
        file: String,
        /// Format of the file.
        found: u64,
        /// Newest format that this program knows.
        known: u64,
    },
    /// The file is shorter or longer than expected.
    #[error(
        "`{file}` has {found_bytes} bytes, expected {expected_bytes}; it was not written to its end, take an older checkpoint"
    )]
    Truncated {
        /// File with the wrong size.
        file: String,
        /// Size according to the manifest or the file's header.
        expected_bytes: u64,
        /// Size on the store.
        found_bytes: u64,
    },
    /// The file's bytes differ from those that were written.
    #[error("`{file}` is damaged: {what}; take an older checkpoint")]
    Damaged {
        /// Damaged file.
        file: String,
        /// Place of the damage, with expected against found.
        what: String,
    },
    /// The checkpoint does not fit the job.
    #[error(
        "`{file}` is of another job: {what}: expected {expected}, found {found}; restore it into the job that wrote it"
    )]
    Differs {
        /// File of the checkpoint.
        file: String,
        /// Property that differs.
        what: &'static str,
        /// Value in the job to be restored.
        expected: String,
        /// Value in the checkpoint.
        found: String,
    },
    /// Partitions with different applied steps (arrival order) cannot be restored into another
    /// number of partitions.
    #[error(
        "`{file}`: its {saved} partitions have applied different steps, which cannot be spread over {wanted}; restore it with \
         fleet.ps = {saved}"
    )]
    LedgersDiffer {
        /// Manifest of the checkpoint.
        file: String,
        /// Partitions of the checkpoint.
        saved: usize,
        /// Partitions to restore into.
        wanted: usize,
    },
}

impl Error {
    /// Returns whether a retry may help: the store failed, not the checkpoint.
    pub const fn is_retryable(&self) -> bool {
        matches!(self, Self::Store { .. })
    }
}
