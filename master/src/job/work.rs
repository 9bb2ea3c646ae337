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
    /// Write the predictions of some records.
    Predict(Part),
    /// Join the parts of the predictions of so many records, or write the manifest of those that
    /// stay.
    Join { records: u64, keep: bool },
    /// Remove the parts that are joined.
    Clear,
}

/// A part of the records that are predicted: `[begin, end)`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Part {
    pub(crate) begin: u64,
    pub(crate) end: u64,
}

/// A data shard of the validation records, and the version to measure on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Shard {
    /// Epoch of the last step below the version.
    pub(crate) epoch: Epoch,
    pub(crate) version: Version,
    /// Index of the validation set.
    pub(crate) set: usize,
    /// Index of the shard in its set.
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
            Self::Evaluate(Shard { version, begin, end, .. }) => {
                format!("measure version {version} on validation records {begin} to {}", end - 1)
            }
            Self::Export(_) => "export the model".to_owned(),
            Self::Predict(Part { begin, end }) => format!("predict records {begin} to {}", end - 1),
            Self::Join { keep: false, .. } => "join the predictions".to_owned(),
            Self::Join { keep: true, .. } => "write the manifest of the predictions".to_owned(),
            Self::Clear => "remove the parts of the predictions".to_owned(),
        }
    }

    /// Converts the work to its message, for `era`.
    pub(super) fn wire(&self, era: Era) -> Wire {
        let era = era.get();
        match *self {
            Self::Index { validation, file, .. } => {
                let set = if validation { pb::DataSet::Validation } else { pb::DataSet::Train };
                Wire::Index(pb::IndexTask { set: set.into(), file: file as u32, known: None })
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
            Self::Predict(Part { begin, end }) => Wire::Predict(pb::PredictTask { era, begin, end }),
            Self::Join { records, keep } => Wire::Join(pb::JoinTask { records, keep }),
            Self::Clear => Wire::Clear(pb::ClearTask {}),
        }
    }
}

impl fmt::Display for Work {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Index { path, .. } => write!(f, "`{path}` cannot be indexed"),
            Self::Init => f.write_str("the model cannot be initialized"),
            Self::Evaluate(Shard { version, begin, end, .. }) => {
                write!(f, "version {version} cannot be measured on validation records {begin} to {}", end - 1)
            }
            Self::Export(_) => f.write_str("the model cannot be exported"),
            Self::Predict(Part { begin, end }) => {
                write!(f, "records {begin} to {} cannot be predicted", end - 1)
            }
            Self::Join { .. } => f.write_str("the predictions cannot be joined"),
            Self::Clear => f.write_str("the parts of the predictions cannot be removed"),
        }
    }
}
