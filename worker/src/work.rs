//! What a worker works on: a lease, the task that it is for, and how urgent that is.

use std::ops::Range;
use std::sync::Arc;

use data::Batch;
use proto::ids::{Era, IncarnationId, LeaseId, MicrobatchId};
use proto::pb;
use proto::plan::Microbatch;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::Instant;
use tracing::Span;

use crate::error::Result;
use crate::job::Job;
use crate::other_tasks::Index;
use crate::progress::Progress;
use crate::trainer::Piece;

/// The order in which work is done, the lowest first: other tasks before training, then the lowest microbatch.
pub(crate) type Urgency = (bool, u64, LeaseId);

/// One lease with everything needed to work on it.
pub(crate) struct Work {
    pub(crate) lease: Lease,
    pub(crate) task: Task,
}

/// A lease that this worker holds, with what is told of the work on it.
pub(crate) struct Lease {
    /// The incarnation of this worker that it was granted to.
    pub(crate) incarnation: IncarnationId,
    pub(crate) id: LeaseId,
    /// How the work gets on.
    pub(crate) progress: Progress,
    /// All that happens for this lease, from asking for it on.
    pub(crate) span: Span,
}

/// What the lease is for.
pub(crate) enum Task {
    /// Microbatches, computed piece by piece.
    Train(Train),
    /// Everything else, done as a whole.
    Other(OtherTask),
}

/// A task that is no training.
pub(crate) enum OtherTask {
    Index(Index),
    Init(Arc<Job>, pb::InitTask),
    Evaluate(Arc<Job>, pb::EvaluateTask),
    Export(Arc<Job>, pb::ExportTask),
}

/// A run of microbatches, as far as it is not computed.
pub(crate) struct Train {
    pub(crate) job: Arc<Job>,
    pub(crate) era: Era,
    pub(crate) next: MicrobatchId,
    pub(crate) end: MicrobatchId,
    /// Records of `next` and the following, in order.
    pub(crate) batches: mpsc::Receiver<Result<(Microbatch, Batch)>>,
    pub(crate) reports: Vec<pb::MicrobatchReport>,
    pub(crate) pushes: JoinSet<Result<()>>,
    /// What gave way to more urgent work: it is of the step of `next`.
    pub(crate) piece: Option<Piece>,
    /// When this worker could begin: the job was open, and its first weights were there.
    pub(crate) began: Instant,
}

impl Work {
    /// Where it stands among all work of this worker.
    pub(crate) fn urgency(&self) -> Urgency {
        match &self.task {
            Task::Train(train) => train.urgency(self.lease.id),
            Task::Other(_) => (false, 0, self.lease.id),
        }
    }
}

impl Train {
    /// Where it stands among all work of this worker.
    pub(crate) const fn urgency(&self, lease: LeaseId) -> Urgency {
        (true, self.next.get(), lease)
    }

    /// Whether all of it is computed.
    pub(crate) fn is_computed(&self) -> bool {
        self.next == self.end
    }

    /// Leaves out the next microbatches, `indices` of a step that was applied without this worker.
    pub(crate) async fn skip(&mut self, indices: Range<u32>) {
        self.piece = None;
        for _ in indices.clone() {
            self.batches.recv().await;
            self.reports.push(pb::MicrobatchReport::default());
        }
        self.next = MicrobatchId(self.next.get() + u64::from(indices.end - indices.start));
    }
}
