//! The leases that this worker holds. Heartbeats name them with their progress, and the master
//! answers which ones are lost.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use kernels::telemetry::LatestReading;
use net::session::Session;
use proto::ids::{IncarnationId, JobId, LeaseId};
use proto::pb;
use tokio::sync::watch;

use crate::device;
use crate::progress::{Activity, Progress};
use crate::waits::Waits;

/// The leases of a worker, shared by all that begin, advance and end leases.
#[derive(Clone, Debug)]
pub(crate) struct Held {
    session: Session,
    leases: Arc<Mutex<BTreeMap<LeaseId, Lease>>>,
    /// Microbatches of each job that this worker computed.
    computed: Arc<Mutex<BTreeMap<JobId, Computed>>>,
    /// Ended leases with which a place may still be busy.
    lingering: Arc<Mutex<Vec<(LeaseId, Lease)>>>,
    worker: Activity,
    changes: Arc<watch::Sender<()>>,
    /// State of the worker's device.
    device: LatestReading,
    /// What its computation waits for.
    waits: Waits,
}

#[derive(Clone, Debug)]
struct Lease {
    incarnation: IncarnationId,
    job: JobId,
    microbatches_done: u64,
    progress: Progress,
}

/// Computed microbatches of one job.
#[derive(Clone, Copy, Debug, Default)]
struct Computed {
    count: u64,
    /// Time of the newest microbatch.
    took: Duration,
}

impl Computed {
    /// Returns the expected time of the next microbatch. The first one of a process does not
    /// predict it.
    fn expected(self) -> Option<Duration> {
        (self.count > 1).then_some(self.took)
    }
}

impl Held {
    pub(crate) fn new(session: Session, device: LatestReading, waits: Waits) -> Self {
        let (leases, computed, lingering, worker) = Default::default();
        let changes = Arc::new(watch::Sender::new(()));
        Self { session, leases, computed, lingering, worker, changes, device, waits }
    }

    /// Adds a lease that the master has granted.
    pub(crate) fn insert(&self, incarnation: IncarnationId, lease: &pb::Lease) {
        let (id, job, progress) = (LeaseId(lease.id), JobId(lease.job), Progress::of(&self.worker));
        self.edit(|leases| {
            leases.insert(id, Lease { incarnation, job, microbatches_done: 0, progress });
        });
    }

    /// Returns the progress of a lease, for the places that work on it. Nobody reads it once the
    /// lease is lost.
    pub(crate) fn progress_of(&self, lease: LeaseId) -> Progress {
        let leases = self.leases.lock().unwrap_or_else(PoisonError::into_inner);
        leases.get(&lease).map_or_else(|| Progress::of(&self.worker), |lease| lease.progress.clone())
    }

    /// Notes that a microbatch of `job` was computed, for a lease that may have ended meanwhile.
    pub(crate) fn computed(&self, job: JobId, took: Duration) {
        let mut computed = self.computed.lock().unwrap_or_else(PoisonError::into_inner);
        let of_job = computed.entry(job).or_default();
        *of_job = Computed { count: of_job.count + 1, took };
    }

    /// Forgets the computed microbatches of jobs that do not live.
    pub(crate) fn retain_jobs(&self, lives: impl Fn(JobId) -> bool) {
        self.computed.lock().unwrap_or_else(PoisonError::into_inner).retain(|&job, _| lives(job));
    }

    /// Sets how many microbatches of a lease are computed.
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

    /// Returns all leases, each with the incarnation to which it was granted.
    pub(crate) fn all(&self) -> Vec<(IncarnationId, LeaseId)> {
        let leases = self.leases.lock().unwrap_or_else(PoisonError::into_inner);
        leases.iter().map(|(&id, lease)| (lease.incarnation, id)).collect()
    }

    /// Drops the leases that the master reports as lost, and updates the heartbeats after each
    /// answer. Never ends.
    pub(crate) async fn follow(&self) -> Infallible {
        let mut replies = self.session.replies();
        while replies.changed().await.is_ok() {
            let lost = replies.borrow_and_update().leases_lost.clone();
            lost.into_iter().for_each(|lease| self.remove(LeaseId(lease)));
            // Updated for the next heartbeat, because a place that hangs updates nothing.
            self.say(&self.leases.lock().unwrap_or_else(PoisonError::into_inner));
        }
        std::future::pending().await
    }

    /// Waits until the leases differ from those at this call.
    pub(crate) fn changed(&self) -> impl Future<Output = ()> + use<> {
        let mut changes = self.changes.subscribe();
        async move {
            if changes.changed().await.is_err() {
                std::future::pending::<()>().await;
            }
        }
    }

    /// Waits until this worker no longer holds `lease`.
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

    /// Sets the content of heartbeats.
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
            heartbeat.device = Some(device::said(self.device.get().as_ref(), self.waits.shares()));
            false
        });
    }
}
