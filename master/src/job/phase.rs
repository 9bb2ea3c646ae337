//! Where a job is in its life, with the data that it has there. Pure.
//!
//! ```text
//!   Indexing --> Beginning --> Training --------------------> Ending
//!       |         |  ^ ^          |  |                         | |
//!       |         |  | +----------+  |  a ps lost its part     | |
//!       |         |  +---------------|-------------------------+ |
//!       +---------+------------------+------------------------> Ending
//! ```
//!
//! Each phase owns its data, so that no other field of a job must agree with it. A value moves from
//! phase to phase: the [`Model`] from `Indexing` on, the [`Training`] once there is one, and the
//! [`End`] once it is decided.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use proto::ids::{IncarnationId, LeaseId};

use super::end::{End, Salvage, failed};
use super::index::{Facts, Index};
use super::partitions::Partitions;
use super::training::Training;

/// The phase of a job.
#[derive(Debug)]
pub(super) enum Phase {
    /// Workers count the records of the job's files.
    Indexing {
        index: Index,
        /// The end that an earlier start of the master decided.
        end: Option<End>,
    },
    /// The partitions get version 0 or a checkpoint: for the first time, or after a loss.
    Beginning(Beginning),
    /// Workers train.
    Training {
        model: Model,
        training: Training,
        /// The end of a job that is closed before it ends.
        end: Option<End>,
    },
    /// Nothing more is trained.
    Ending(Ending),
}

/// The data of a job, and the ps on which its model lives.
#[derive(Debug)]
pub(super) struct Model {
    /// Every file is indexed.
    pub(super) index: Index,
    pub(super) facts: Facts,
    pub(super) partitions: Partitions,
}

/// A job that is to train.
#[derive(Debug)]
pub(super) struct Beginning {
    pub(super) model: Model,
    pub(super) stage: Begin,
    /// The training before a ps was lost, or the one that begins next.
    pub(super) before: Option<Training>,
    /// The end that an earlier start of the master decided.
    pub(super) end: Option<End>,
}

/// A stage of a beginning.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Begin {
    /// The store is asked for checkpoints, and a worker describes the model.
    Initializing,
    /// The ps are asked what they have applied; not `asked` when that is to be done (again).
    Surveying { asked: bool },
    /// The ps have what a training needs. It begins when the journal knows that there is something
    /// to lose: a master that was started again would place a partition anew beside trained ones.
    Ready,
}

/// A job that trains no more.
#[derive(Debug)]
pub(super) struct Ending {
    /// `None`: the job ended before its files were indexed.
    pub(super) model: Option<Model>,
    /// `None`: the job ended before it trained.
    pub(super) training: Option<Training>,
    pub(super) end: End,
    pub(super) stage: Stage,
}

/// A stage of an ending.
#[derive(Debug)]
pub(super) enum Stage {
    /// The job ends early. Its workers are told, so that the version to export stays within reach.
    Stopping {
        salvage: Salvage,
        /// Workers that held training leases, and their heartbeats without one since.
        holders: BTreeMap<IncarnationId, u32>,
        leases: BTreeSet<LeaseId>,
        until: Duration,
    },
    /// The ps are asked how far they are.
    Asking,
    /// A worker saves the model.
    Exporting,
    /// The last checkpoint is being written.
    Saving { until: Duration },
    /// The ps are asked for their numbers.
    Finishing,
    /// The end is decided and told.
    Ended,
}

impl Phase {
    /// Returns the phase of a new job.
    pub(super) const fn new(index: Index) -> Self {
        Self::Indexing { index, end: None }
    }

    // The data, wherever it is.

    /// Returns what is known of the files.
    pub(super) fn index(&self) -> Option<&Index> {
        match self {
            Self::Indexing { index, .. } => Some(index),
            _ => self.model().map(|model| &model.index),
        }
    }

    /// Returns what is known of the files while they are indexed.
    pub(super) const fn indexing(&mut self) -> Option<&mut Index> {
        match self {
            Self::Indexing { index, .. } => Some(index),
            _ => None,
        }
    }

    /// Returns the model, once all files are indexed.
    pub(super) const fn model(&self) -> Option<&Model> {
        match self {
            Self::Indexing { .. } => None,
            Self::Beginning(Beginning { model, .. }) | Self::Training { model, .. } => Some(model),
            Self::Ending(ending) => ending.model.as_ref(),
        }
    }

    /// Returns the model, to change it.
    pub(super) const fn model_mut(&mut self) -> Option<&mut Model> {
        match self {
            Self::Indexing { .. } => None,
            Self::Beginning(Beginning { model, .. }) | Self::Training { model, .. } => Some(model),
            Self::Ending(ending) => ending.model.as_mut(),
        }
    }

    /// Returns what is known of the data, once all files are indexed.
    pub(super) fn facts(&self) -> Option<&Facts> {
        self.model().map(|model| &model.facts)
    }

    /// Returns the partitions, once all files are indexed.
    pub(super) fn partitions(&self) -> Option<&Partitions> {
        self.model().map(|model| &model.partitions)
    }

    /// Returns the partitions, to change them.
    pub(super) fn partitions_mut(&mut self) -> Option<&mut Partitions> {
        self.model_mut().map(|model| &mut model.partitions)
    }

    /// Returns the newest training, also that of before a loss, and that of a job which ends.
    pub(super) const fn training(&self) -> Option<&Training> {
        match self {
            Self::Indexing { .. } => None,
            Self::Beginning(beginning) => beginning.before.as_ref(),
            Self::Training { training, .. } => Some(training),
            Self::Ending(ending) => ending.training.as_ref(),
        }
    }

    /// Returns the training of a job that trains.
    pub(super) const fn trains(&self) -> Option<&Training> {
        match self {
            Self::Training { training, .. } => Some(training),
            _ => None,
        }
    }

    /// Returns the training of a job that trains, to change it.
    pub(super) const fn trains_mut(&mut self) -> Option<&mut Training> {
        match self {
            Self::Training { training, .. } => Some(training),
            _ => None,
        }
    }

    /// Returns how the job ends, once that is decided.
    pub(super) const fn end(&self) -> Option<&End> {
        match self {
            Self::Indexing { end, .. } | Self::Training { end, .. } => end.as_ref(),
            Self::Beginning(beginning) => beginning.end.as_ref(),
            Self::Ending(ending) => Some(&ending.end),
        }
    }

    /// Returns the stage of an ending.
    pub(super) const fn ends(&self) -> Option<&Stage> {
        match self {
            Self::Ending(ending) => Some(&ending.stage),
            _ => None,
        }
    }

    /// Returns the stage of an ending, to change it.
    pub(super) const fn ends_mut(&mut self) -> Option<&mut Stage> {
        match self {
            Self::Ending(ending) => Some(&mut ending.stage),
            _ => None,
        }
    }

    /// Returns the stage of a beginning.
    pub(super) const fn begins(&self) -> Option<Begin> {
        match self {
            Self::Beginning(beginning) => Some(beginning.stage),
            _ => None,
        }
    }

    /// Returns whether nothing but the numbers of the ps, or nothing at all, is still to come.
    pub(super) const fn is_over(&self) -> bool {
        matches!(self.ends(), Some(Stage::Finishing | Stage::Ended))
    }

    /// Returns a number of the phase with its stage, to see whether it changed.
    pub(super) const fn number(&self) -> u8 {
        match self {
            Self::Indexing { .. } => 0,
            Self::Beginning(Beginning { stage: Begin::Initializing, .. }) => 1,
            Self::Beginning(Beginning { stage: Begin::Surveying { .. } | Begin::Ready, .. }) => 2,
            Self::Training { .. } => 3,
            Self::Ending(Ending { stage, .. }) => match stage {
                Stage::Stopping { .. } => 4,
                Stage::Asking => 5,
                Stage::Exporting => 6,
                Stage::Saving { .. } => 7,
                Stage::Finishing => 8,
                Stage::Ended => 9,
            },
        }
    }

    // From phase to phase.

    /// Decides how the job ends, or decides it anew.
    pub(super) fn decide(&mut self, decided: End) {
        match self {
            Self::Indexing { end, .. } | Self::Training { end, .. } => *end = Some(decided),
            Self::Beginning(beginning) => beginning.end = Some(decided),
            Self::Ending(ending) => ending.end = decided,
        }
    }

    /// Records that all files are indexed: the job begins.
    pub(super) fn on_indexed(&mut self, facts: Facts, partitions: Partitions) {
        let Self::Indexing { index, end } = self else { return };
        let model = Model { index: std::mem::take(index), facts, partitions };
        let stage = Begin::Initializing;
        *self = Self::Beginning(Beginning { model, stage, before: None, end: end.take() });
    }

    /// Begins the job, for the first time or again; `end`: its end, if that is decided. A job whose
    /// files are not indexed stays as it is.
    pub(super) fn begin(&mut self, end: Option<End>) {
        if self.model().is_none() {
            return;
        }
        if let (Some(model), before, _) = self.take() {
            *self = Self::Beginning(Beginning { model, stage: Begin::Initializing, before, end });
        }
    }

    /// Records that a job that begins is at this stage.
    pub(super) fn set_begin(&mut self, begin: Begin) {
        if let Self::Beginning(Beginning { stage, .. }) = self {
            *stage = begin;
        }
    }

    /// Records that the ps have what this training needs.
    pub(super) fn prepare(&mut self, training: Training) {
        if let Self::Beginning(Beginning { stage, before, .. }) = self {
            (*stage, *before) = (Begin::Ready, Some(training));
        }
    }

    /// Begins the training that is ready.
    pub(super) fn train(&mut self) {
        if self.begins() != Some(Begin::Ready) {
            return;
        }
        if let (Some(model), Some(training), end) = self.take() {
            *self = Self::Training { model, training, end };
        }
    }

    /// Records that the job trains no more, and is at this stage of its end. Without a decided end
    /// it has failed for no known reason.
    pub(super) fn set_end(&mut self, stage: Stage) {
        if let Self::Ending(ending) = self {
            ending.stage = stage;
            return;
        }
        let (model, training, end) = self.take();
        let end = end.unwrap_or_else(|| failed(String::new()));
        *self = Self::Ending(Ending { model, training, end, stage });
    }

    /// Takes the phase apart. The caller puts another one in its place.
    fn take(&mut self) -> (Option<Model>, Option<Training>, Option<End>) {
        match std::mem::replace(self, Self::new(Index::default())) {
            Self::Indexing { end, .. } => (None, None, end),
            Self::Beginning(Beginning { model, before, end, .. }) => (Some(model), before, end),
            Self::Training { model, training, end } => (Some(model), Some(training), end),
            Self::Ending(Ending { model, training, end, .. }) => (model, training, Some(end)),
        }
    }
}
