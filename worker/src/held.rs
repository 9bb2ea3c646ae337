//! The leases this worker holds: heartbeats renew them, and the master says which are lost.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use proto::ids::{IncarnationId, JobId, LeaseId};
use proto::pb;
use proto::session::Session;
use tokio::sync::watch;

/// Shared by all who begin, advance and end leases.
#[derive(Clone, Debug)]
pub(crate) struct Held {
    session: Session,
    leases: Arc<Mutex<BTreeMap<LeaseId, Lease>>>,
    /// Of each job that it computed for.
    computed: Arc<Mutex<BTreeMap<JobId, Computed>>>,
    changes: Arc<watch::Sender<()>>,
}

#[derive(Clone, Copy, Debug)]
struct Lease {
    incarnation: IncarnationId,
    job: JobId,
    microbatches_done: u64,
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
        let (leases, computed) = Default::default();
        Self { session, leases, computed, changes: Arc::new(watch::Sender::new(())) }
    }

    /// A lease that the master has granted.
    pub(crate) fn insert(&self, incarnation: IncarnationId, lease: &pb::Lease) {
        let (id, job) = (LeaseId(lease.id), JobId(lease.job));
        self.edit(|leases| {
            leases.insert(id, Lease { incarnation, job, microbatches_done: 0 });
        });
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

    pub(crate) fn progress(&self, lease: LeaseId, microbatches_done: u64) {
        self.edit(|leases| {
            if let Some(lease) = leases.get_mut(&lease) {
                lease.microbatches_done = microbatches_done;
            }
        });
    }

    pub(crate) fn remove(&self, lease: LeaseId) {
        self.edit(|leases| {
            leases.remove(&lease);
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

    /// Drops the leases that the master says are lost, for ever.
    pub(crate) async fn follow(&self) {
        let mut replies = self.session.replies();
        while replies.changed().await.is_ok() {
            let lost = replies.borrow_and_update().leases_lost.clone();
            lost.into_iter().for_each(|lease| self.remove(LeaseId(lease)));
        }
        std::future::pending::<()>().await;
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
        let computed = self.computed.lock().unwrap_or_else(PoisonError::into_inner);
        let microbatch = |job: &JobId| computed.get(job).and_then(|computed| computed.expected());
        let progress = |(id, lease): (&LeaseId, &Lease)| pb::LeaseProgress {
            lease: id.get(),
            microbatches_done: lease.microbatches_done,
            microbatch_us: microbatch(&lease.job).map_or(0, |time| time.as_micros() as u64),
        };
        let list = leases.iter().map(progress).collect();
        self.session.report(|heartbeat| {
            heartbeat.leases = list;
            false
        });
        drop((leases, computed));
        self.changes.send_replace(());
    }
}
