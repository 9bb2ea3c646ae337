//! The leases this worker holds: heartbeats name them and say how it gets on with each, and the master says which are lost.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use net::session::Session;
use proto::ids::{IncarnationId, JobId, LeaseId};
use proto::pb;
use tokio::sync::watch;

use crate::progress::{Activity, Progress};

/// Shared by all who begin, advance and end leases.
#[derive(Clone, Debug)]
pub(crate) struct Held {
    session: Session,
    leases: Arc<Mutex<BTreeMap<LeaseId, Lease>>>,
    /// The microbatches of each job that this worker computed for.
    computed: Arc<Mutex<BTreeMap<JobId, Computed>>>,
    /// Leases that have ended, with which a place may still be busy.
    lingering: Arc<Mutex<Vec<(LeaseId, Lease)>>>,
    worker: Activity,
    changes: Arc<watch::Sender<()>>,
}

#[derive(Clone, Debug)]
struct Lease {
    incarnation: IncarnationId,
    job: JobId,
    microbatches_done: u64,
    progress: Progress,
}

/// Microbatches of one job.
#[derive(Clone, Copy, Debug, Default)]
struct Computed {
    count: u64,
    /// How long the newest one took.
    took: Duration,
}

impl Computed {
    /// What the next one is expected to take. The first one of a process says nothing about it.
    fn expected(self) -> Option<Duration> {
        (self.count > 1).then_some(self.took)
    }
}

impl Held {
    pub(crate) fn new(session: Session) -> Self {
        let (leases, computed, lingering, worker) = Default::default();
        Self { session, leases, computed, lingering, worker, changes: Arc::new(watch::Sender::new(())) }
    }

    /// A lease that the master has granted.
    pub(crate) fn insert(&self, incarnation: IncarnationId, lease: &pb::Lease) {
        let (id, job, progress) = (LeaseId(lease.id), JobId(lease.job), Progress::of(&self.worker));
        self.edit(|leases| {
            leases.insert(id, Lease { incarnation, job, microbatches_done: 0, progress });
        });
    }

    /// The progress of a lease, for the places that work on it. Nobody reads it once the lease is lost.
    pub(crate) fn progress_of(&self, lease: LeaseId) -> Progress {
        let leases = self.leases.lock().unwrap_or_else(PoisonError::into_inner);
        leases.get(&lease).map_or_else(|| Progress::of(&self.worker), |lease| lease.progress.clone())
    }

    /// A microbatch of `job` was computed, for a lease that may have ended meanwhile.
    pub(crate) fn computed(&self, job: JobId, took: Duration) {
        let mut computed = self.computed.lock().unwrap_or_else(PoisonError::into_inner);
        let of_job = computed.entry(job).or_default();
        *of_job = Computed { count: of_job.count + 1, took };
    }

    /// Forgets what was computed for other jobs than these.
    pub(crate) fn retain_jobs(&self, lives: impl Fn(JobId) -> bool) {
        self.computed.lock().unwrap_or_else(PoisonError::into_inner).retain(|&job, _| lives(job));
    }

    /// So many microbatches of a lease are computed.
    pub(crate) fn progress(&self, lease: LeaseId, microbatches_done: u64) {
        self.edit(|leases| {
            if let Some(lease) = leases.get_mut(&lease) {
                lease.microbatches_done = microbatches_done;
                lease.progress.advance();
            }
        });
    }

    pub(crate) fn remove(&self, lease: LeaseId) {
        self.edit(|leases| {
            if let Some(removed) = leases.remove(&lease) {
                self.lingering.lock().unwrap_or_else(PoisonError::into_inner).push((lease, removed));
            }
        });
    }

    pub(crate) fn has(&self, lease: LeaseId) -> bool {
        self.leases.lock().unwrap_or_else(PoisonError::into_inner).contains_key(&lease)
    }

    /// All of them, with the incarnation that each was granted to.
    pub(crate) fn all(&self) -> Vec<(IncarnationId, LeaseId)> {
        let leases = self.leases.lock().unwrap_or_else(PoisonError::into_inner);
        leases.iter().map(|(&id, lease)| (lease.incarnation, id)).collect()
    }

    /// Drops the leases that the master says are lost, and says how this worker gets on, for ever.
    pub(crate) async fn follow(&self) -> Infallible {
        let mut replies = self.session.replies();
        while replies.changed().await.is_ok() {
            let lost = replies.borrow_and_update().leases_lost.clone();
            lost.into_iter().for_each(|lease| self.remove(LeaseId(lease)));
            // For the next heartbeat: a place that hangs changes nothing that would say so.
            self.say(&self.leases.lock().unwrap_or_else(PoisonError::into_inner));
        }
        std::future::pending().await
    }

    /// Ends when the leases are others than at this call.
    pub(crate) fn changed(&self) -> impl Future<Output = ()> + use<> {
        let mut changes = self.changes.subscribe();
        async move {
            if changes.changed().await.is_err() {
                std::future::pending::<()>().await;
            }
        }
    }

    /// Ends when this worker no longer holds `lease`.
    pub(crate) async fn lost(&self, lease: LeaseId) {
        let mut changes = self.changes.subscribe();
        while self.has(lease) {
            if changes.changed().await.is_err() {
                std::future::pending::<()>().await;
            }
        }
    }

    fn edit(&self, edit: impl FnOnce(&mut BTreeMap<LeaseId, Lease>)) {
        let mut leases = self.leases.lock().unwrap_or_else(PoisonError::into_inner);
        edit(&mut leases);
        self.say(&leases);
        drop(leases);
        self.changes.send_replace(());
    }

    /// What heartbeats say from now on.
    fn say(&self, leases: &BTreeMap<LeaseId, Lease>) {
        let computed = self.computed.lock().unwrap_or_else(PoisonError::into_inner);
        let microbatch = |job: &JobId| computed.get(job).and_then(|computed| computed.expected());
        let progress = |id: &LeaseId, lease: &Lease| {
            let mut said = pb::LeaseProgress {
                lease: id.get(),
                microbatches_done: lease.microbatches_done,
                microbatch_us: microbatch(&lease.job).map_or(0, |time| time.as_micros() as u64),
                ..Default::default()
            };
            lease.progress.say(&mut said);
            said
        };
        let held = leases.iter().map(|(id, lease)| progress(id, lease)).collect();
        let mut lingering = self.lingering.lock().unwrap_or_else(PoisonError::into_inner);
        lingering.retain(|(_, lease)| lease.progress.lingers());
        let still = lingering
            .iter()
            .map(|(id, lease)| pb::Lingering { job: lease.job.get(), place: Some(progress(id, lease)) })
            .collect();
        self.session.report(|heartbeat| {
            (heartbeat.leases, heartbeat.lingering) = (held, still);
            false
        });
    }
}
