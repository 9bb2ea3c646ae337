//! The leases this worker holds: heartbeats renew them, and the master says which are lost.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use proto::ids::{IncarnationId, LeaseId};
use proto::pb;
use proto::session::Session;
use tokio::sync::watch;

/// Shared by all who begin, advance and end leases.
#[derive(Clone, Debug)]
pub(crate) struct Held {
    session: Session,
    leases: Arc<Mutex<BTreeMap<LeaseId, Lease>>>,
    changes: Arc<watch::Sender<()>>,
}

#[derive(Clone, Copy, Debug)]
struct Lease {
    incarnation: IncarnationId,
    microbatches_done: u64,
}

impl Held {
    pub(crate) fn new(session: Session) -> Self {
        Self { session, leases: Arc::default(), changes: Arc::new(watch::Sender::new(())) }
    }

    pub(crate) fn insert(&self, incarnation: IncarnationId, lease: LeaseId) {
        self.edit(|leases| {
            leases.insert(lease, Lease { incarnation, microbatches_done: 0 });
        });
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
        let progress = |(id, lease): (&LeaseId, &Lease)| pb::LeaseProgress {
            lease: id.get(),
            microbatches_done: lease.microbatches_done,
        };
        let list = leases.iter().map(progress).collect();
        self.session.report(|heartbeat| {
            heartbeat.leases = list;
            false
        });
        drop(leases);
        self.changes.send_replace(());
    }
}
