//! Everything that can be wrong with a checkpoint or the store it lies on.

/// Result of reading or writing a checkpoint.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What is wrong.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// A URL that leads to no store.
    #[error("checkpoint store `{url}`: {reason}")]
    Url {
        /// As given.
        url: String,
        /// Why not.
        reason: String,
    },
    /// A place that no job of this master may name.
    #[error(
        "checkpoint store `{url}` is outside the places that this master allows: {allowed}; choose one below them, or have the \
         master started with one more --checkpoints PLACE"
    )]
    NotAllowed {
        /// As given.
        url: String,
        /// The allowed ones.
        allowed: String,
    },
    /// The store did not do as it was told. It may, when asked again.
    #[error("{what} `{file}`: {reason}")]
    Store {
        /// "read", "write".
        what: &'static str,
        /// Which file.
        file: String,
        /// What the store said.
        reason: String,
    },
    /// A file that is not there.
    #[error("`{file}` is missing; take an older checkpoint, or bring the file back")]
    Missing {
        /// Which.
        file: String,
    },
    /// Written by a later version of this program.
    #[error(
        "`{file}` has format {found}, this program knows formats up to {known}; read it with the version that wrote it"
    )]
    Future {
        /// Which.
        file: String,
        /// Its format.
        found: u64,
        /// The newest that is known here.
        known: u64,
    },
    /// A file that ends too early, or goes on too long.
    #[error(
        "`{file}` has {found_bytes} bytes, expected {expected_bytes}; it was not written to its end, take an older checkpoint"
    )]
    Truncated {
        /// Which.
        file: String,
        /// As the manifest or its header says.
        expected_bytes: u64,
        /// As it lies there.
        found_bytes: u64,
    },
    /// A file whose bytes are not those that were written.
    #[error("`{file}` is damaged: {what}; take an older checkpoint")]
    Damaged {
        /// Which.
        file: String,
        /// Where, expected against found.
        what: String,
    },
    /// A checkpoint of something else.
    #[error(
        "`{file}` is of another job: {what}: expected {expected}, found {found}; restore it into the job that wrote it"
    )]
    Differs {
        /// Which.
        file: String,
        /// What differs.
        what: &'static str,
        /// In the job that is to be restored.
        expected: String,
        /// In the checkpoint.
        found: String,
    },
    /// In arrival order, partitions that have applied different steps cannot be mixed.
    #[error(
        "`{file}`: its {saved} partitions have applied different steps, which cannot be spread over {wanted}; restore it with \
         fleet.ps = {saved}"
    )]
    LedgersDiffer {
        /// Which.
        file: String,
        /// Number of partitions of the checkpoint.
        saved: usize,
        /// Number of partitions to restore into.
        wanted: usize,
    },
}

impl Error {
    /// Whether trying again may help: the store failed, the checkpoint is not to blame.
    pub const fn is_retryable(&self) -> bool {
        matches!(self, Self::Store { .. })
    }
}
