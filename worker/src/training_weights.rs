//! The weights from which this worker computes gradients, and the pull of the next ones.
//!
//! In canonical order with a delay (the mode `pipelined`), the version of the next step may exist
//! while this worker computes a step. So its pull runs beside the computation, and a step costs the
//! longer one of the two. In the mode `sync` that version needs the very step that is computed. In
//! arrival order a pull takes the newest version, and an early pull would take an older one.
//!
//! Always true here: at most one pull runs ahead, so it costs memory for one more set of weights.
//! It belongs to a lease that this worker holds, and ends with that lease. A pull ahead that fails
//! is only lost: the step makes an ordinary pull, with its retries and its error.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use model::weights::Weights;
use proto::ids::{Era, JobId, LeaseId, Step};
use proto::parameters::Want;
use tokio_util::task::AbortOnDropHandle;

use crate::held::Held;
use crate::job::Job;
use crate::trainer;
use crate::work::{Lease, Task, Train, Work};

/// The weights that a step of a job reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Wanted {
    job: JobId,
    era: Era,
    want: Want,
}

/// The weights of one worker.
#[derive(Default)]
pub(crate) struct TrainingWeights {
    /// The newest exact version that was pulled.
    current: Option<(Wanted, Weights)>,
    ahead: Option<PullAhead>,
}

/// A pull that was begun while an earlier step was computed.
pub(crate) struct PullAhead {
    wanted: Wanted,
    lease: LeaseId,
    /// Whether the lease waits for it.
    waited: Arc<AtomicBool>,
    pull: AbortOnDropHandle<Option<Pulled>>,
}

/// Weights of a pull that ended well. `None`: the version is gone.
pub(crate) type Pulled = Option<Weights>;

/// A piece that is computed after the present one, and its weights.
pub(crate) struct Next<'a> {
    pub(crate) lease: &'a Lease,
    pub(crate) step: Step,
    pub(crate) wanted: Wanted,
}

impl Wanted {
    pub(crate) fn of(job: &Job, era: Era, step: Step) -> Self {
        Self { job: job.id, era, want: trainer::want(job.consistency, step) }
    }

    pub(crate) const fn want(self) -> Want {
        self.want
    }

    /// Returns whether these weights may exist while `step` of their job is computed.
    const fn may_precede(self, step: Step) -> bool {
        matches!(self.want, Want::Exact(version) if version.get() <= step.get())
    }
}

impl TrainingWeights {
    /// Returns the weights that were pulled last, if they are wanted.
    pub(crate) fn current(&self, wanted: Wanted) -> Option<Weights> {
        self.current.as_ref().filter(|(of, _)| *of == wanted).map(|(_, weights)| weights.clone())
    }

    /// Keeps pulled weights for further pieces. In arrival order the next piece pulls again.
    pub(crate) fn keep(&mut self, wanted: Wanted, weights: &Weights) {
        if matches!(wanted.want, Want::Exact(_)) {
            self.current = Some((wanted, weights.clone()));
        }
    }

    /// Returns whether a pull runs ahead, or has, for a lease that is still held.
    pub(crate) fn pulls_ahead(&self, held: &Held) -> bool {
        self.ahead.as_ref().is_some_and(|ahead| held.has(ahead.lease))
    }

    /// Begins a pull ahead for a lease. Another one that runs is aborted.
    pub(crate) fn pull_ahead(
        &mut self,
        wanted: Wanted,
        lease: LeaseId,
        waited: Arc<AtomicBool>,
        pull: impl Future<Output = Option<Pulled>> + Send + 'static,
    ) {
        let pull = AbortOnDropHandle::new(tokio::spawn(pull));
        self.ahead = Some(PullAhead { wanted, lease, waited, pull });
    }

    /// Takes the pull ahead of these weights. A pull ahead for another job or another era is
    /// aborted.
    pub(crate) fn take_ahead(&mut self, wanted: Wanted) -> Option<PullAhead> {
        let ahead = self.ahead.take()?;
        if ahead.wanted == wanted {
            return Some(ahead);
        }
        if (ahead.wanted.job, ahead.wanted.era) == (wanted.job, wanted.era) {
            self.ahead = Some(ahead);
        }
        None
    }
}

impl PullAhead {
    /// Waits for the weights. `None`: the pull has failed, or was aborted.
    pub(crate) async fn pulled(self) -> Option<Pulled> {
        self.waited.store(true, Ordering::Relaxed);
        self.pull.await.ok().flatten()
    }
}

/// Returns what to pull while `step` of `train` is computed: the weights of the most urgent piece
/// of the job that reads another version, if that version may exist by then.
pub(crate) fn next<'a>(
    (lease, train): (&'a Lease, &Train),
    step: Step,
    ready: impl Iterator<Item = &'a Work>,
) -> Option<Next<'a>> {
    let Train { job, era, end, .. } = train;
    if job.consistency.delay.unwrap_or(0) == 0 {
        return None;
    }
    let after = job.plan.first_of(step.next());
    let own = (after < *end).then_some((after, lease));
    let others = ready.filter_map(|Work { lease, task }| match task {
        Task::Train(other) if (other.job.id, other.era) == (job.id, *era) => Some((other.next, lease)),
        _ => None,
    });
    let pieces = own.into_iter().chain(others).map(|(first, lease)| {
        let step = job.plan.microbatch(first).step;
        (first, Next { lease, step, wanted: Wanted::of(job, *era, step) })
    });
    let now = Wanted::of(job, *era, step);
    let of_others = pieces.filter(|(_, next)| next.wanted != now);
    let (_, next) = of_others.min_by_key(|(first, next)| (*first, next.lease.id))?;
    next.wanted.may_precede(step).then_some(next)
}
