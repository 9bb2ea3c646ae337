//! Work that is not training, as the master thinks of it and as it travels.

use std::fmt;

use proto::ids::{Epoch, Version};
use proto::pb;
use proto::pb::lease::Work as Wire;

/// Era of every job: this version never rewinds one.
pub(super) const ERA: u64 = 0;

/// A task that is not training.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Work {
    /// Count the records of one file (pair).
    Index {
        /// Of the validation files; otherwise of the training files.
        validation: bool,
        /// Its place among them.
        file: usize,
        /// Its path, for people.
        path: String,
    },
    /// Describe the model and push version 0.
    Init,
    /// Measure a data shard of the validation records.
    Evaluate(Shard),
    /// Upload the model at a version; `None`: the newest.
    Export(Option<Version>),
}

/// A data shard of the validation records at the end of an epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Shard {
    pub(crate) epoch: Epoch,
    pub(crate) version: Version,
    /// Its place among the shards of the epoch.
    pub(crate) index: usize,
    /// Validation records `[begin, end)`.
    pub(crate) begin: u64,
    pub(crate) end: u64,
}

impl From<&Work> for Wire {
    fn from(work: &Work) -> Self {
        match *work {
            Work::Index { validation, file, .. } => {
                let set = if validation { pb::DataSet::Validation } else { pb::DataSet::Train };
                Self::Index(pb::IndexTask { set: set.into(), file: file as u32 })
            }
            Work::Init => Self::Init(pb::InitTask {}),
            Work::Evaluate(Shard { epoch, version, begin, end, .. }) => Self::Evaluate(pb::EvaluateTask {
                epoch: epoch.get(),
                version: version.get(),
                era: ERA,
                begin,
                end,
            }),
            Work::Export(version) => {
                Self::Export(pb::ExportTask { version: version.map(Version::get), era: ERA })
            }
        }
    }
}

impl fmt::Display for Work {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Index { path, .. } => write!(f, "`{path}` cannot be indexed"),
            Self::Init => f.write_str("the model cannot be initialized"),
            Self::Evaluate(Shard { epoch, begin, end, .. }) => {
                write!(f, "validation records {begin} to {} cannot be measured after epoch {epoch}", end - 1)
            }
            Self::Export(_) => f.write_str("the model cannot be exported"),
        }
    }
}
