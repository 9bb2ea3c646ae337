//! Work that is not training, as the master thinks of it and as it travels.

use std::fmt;

use proto::ids::{Epoch, Era, Version};
use proto::pb;
use proto::pb::lease::Work as Wire;

/// A task that is not training.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Work {
    /// Count the records of one file (pair).
    Index {
        /// Whether it is a validation file; otherwise it is a training file.
        validation: bool,
        /// Index of the file in its set.
        file: usize,
        /// Path of the file, for people.
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
    /// Index of the shard in its epoch.
    pub(crate) index: usize,
    /// Validation records `[begin, end)`.
    pub(crate) begin: u64,
    pub(crate) end: u64,
}

impl Work {
    /// Describes the work for people.
    pub(super) fn title(&self) -> String {
        match self {
            Self::Index { path, .. } => format!("count the records of `{path}`"),
            Self::Init => "initialize the model".to_owned(),
            Self::Evaluate(Shard { epoch, begin, end, .. }) => {
                format!("measure validation records {begin} to {} after epoch {epoch}", end - 1)
            }
            Self::Export(_) => "export the model".to_owned(),
        }
    }

    /// Converts the work to its message, for `era`.
    pub(super) fn wire(&self, era: Era) -> Wire {
        let era = era.get();
        match *self {
            Self::Index { validation, file, .. } => {
                let set = if validation { pb::DataSet::Validation } else { pb::DataSet::Train };
                Wire::Index(pb::IndexTask { set: set.into(), file: file as u32 })
            }
            Self::Init => Wire::Init(pb::InitTask { era }),
            Self::Evaluate(Shard { epoch, version, begin, end, .. }) => Wire::Evaluate(pb::EvaluateTask {
                epoch: epoch.get(),
                version: version.get(),
                era,
                begin,
                end,
            }),
            Self::Export(version) => Wire::Export(pb::ExportTask { version: version.map(Version::get), era }),
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
