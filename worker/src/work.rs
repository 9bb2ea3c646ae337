//! A worker's unit of work: a lease, its task, and its urgency.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use data::Batch;
use proto::ids::{Era, IncarnationId, LeaseId, MicrobatchId};
use proto::pb;
use proto::plan::Microbatch;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::Instant;
use tracing::Span;

use crate::ahead::Place;
use crate::error::Result;
use crate::job::Job;
use crate::other_tasks::Index;
use crate::progress::Progress;
use crate::trainer::Piece;

/// Order of work, the lowest first: other tasks before training, then the lowest microbatch.
pub(crate) type Urgency = (bool, u64, LeaseId);

/// One lease with everything needed to work on it.
pub(crate) struct Work {
    pub(crate) lease: Lease,
    pub(crate) task: Task,
}

/// A lease that this worker holds, with the reports on its work.
pub(crate) struct Lease {
    /// Incarnation of this worker to which the lease was granted.
    pub(crate) incarnation: IncarnationId,
    pub(crate) id: LeaseId,
    /// Progress of the work.
    pub(crate) progress: Progress,
    /// Span of everything that happens for this lease, from the request on.
    pub(crate) span: Span,
}

/// Task of a lease.
pub(crate) enum Task {
    /// Microbatches, computed piece by piece.
    Train(Train),
    /// Another task, done as a whole.
    Other(OtherTask),
}

/// A task other than training.
pub(crate) enum OtherTask {
    Index(Box<Index>),
    Init(Arc<Job>, pb::InitTask),
    Evaluate(Arc<Job>, pb::EvaluateTask),
    Export(Arc<Job>, pb::ExportTask),
    Predict(Arc<Job>, pb::PredictTask),
    Join(Arc<Job>, pb::JoinTask),
    Clear(Arc<Job>),
}

impl OtherTask {
    /// Returns the job, if the task needs it open.
    pub(crate) const fn job(&self) -> Option<&Arc<Job>> {
        match self {
            Self::Index(_) => None,
            Self::Init(job, _)
            | Self::Evaluate(job, _)
            | Self::Export(job, _)
            | Self::Predict(job, _)
            | Self::Join(job, _)
            | Self::Clear(job) => Some(job),
        }
    }
}

/// The records of a microbatch, and their place in memory until the computation takes them.
pub(crate) type Ahead = (Result<(Microbatch, Batch)>, Option<Place>);

/// The part of a run of microbatches that is not computed yet.
pub(crate) struct Train {
    pub(crate) job: Arc<Job>,
    pub(crate) era: Era,
    pub(crate) next: MicrobatchId,
    pub(crate) end: MicrobatchId,
    /// Records of `next` and the following microbatches, in order, each with its place in memory.
    pub(crate) batches: mpsc::Receiver<Ahead>,
    pub(crate) reports: Vec<pb::MicrobatchReport>,
    pub(crate) pushes: JoinSet<Result<()>>,
    /// Piece of the step of `next` that gave way to more urgent work.
    pub(crate) piece: Option<Piece>,
    /// Time from which this worker could compute: the job was open, and its first weights were
    /// pulled.
    pub(crate) began: Instant,
    /// Time for which the computation waited for records.
    pub(crate) loading: Duration,
    /// Time of computing gradients.
    pub(crate) computing: Duration,
}

impl Work {
    /// Returns the place among all work of this worker.
    pub(crate) fn urgency(&self) -> Urgency {
        match &self.task {
            Task::Train(train) => train.urgency(self.lease.id),
            Task::Other(_) => (false, 0, self.lease.id),
        }
    }
}

impl Train {
    /// Returns the place among all work of this worker.
    pub(crate) const fn urgency(&self, lease: LeaseId) -> Urgency {
        (true, self.next.get(), lease)
    }

    /// Returns whether the whole run is computed.
    pub(crate) fn is_computed(&self) -> bool {
        self.next == self.end
    }

    /// Skips the next microbatches, `indices` of a step that was applied without this worker.
    pub(crate) async fn skip(&mut self, indices: Range<u32>) {
        self.piece = None;
        for _ in indices.clone() {
            self.batches.recv().await;
            self.reports.push(pb::MicrobatchReport::default());
        }
        self.next = MicrobatchId(self.next.get() + u64::from(indices.end - indices.start));
    }
}
