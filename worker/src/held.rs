//! The leases this worker holds: heartbeats renew them, and the master says which are lost.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use proto::ids::LeaseId;
use proto::pb;
use proto::session::Session;
use tokio::sync::watch;

/// Shared by all who begin, advance and end leases.
#[derive(Clone, Debug)]
pub(crate) struct Held {
    session: Session,
    /// Microbatches done of each.
    leases: Arc<Mutex<BTreeMap<LeaseId, u64>>>,
    changes: Arc<watch::Sender<()>>,
}

impl Held {
    pub(crate) fn new(session: Session) -> Self {
        Self { session, leases: Arc::default(), changes: Arc::new(watch::Sender::new(())) }
    }

    pub(crate) fn insert(&self, lease: LeaseId) {
        self.edit(|leases| {
            leases.insert(lease, 0);
        });
    }

    pub(crate) fn progress(&self, lease: LeaseId, microbatches_done: u64) {
        self.edit(|leases| {
            if let Some(done) = leases.get_mut(&lease) {
                *done = microbatches_done;
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

    /// Ends when this worker no longer holds `lease`.
    pub(crate) async fn lost(&self, lease: LeaseId) {
        let mut changes = self.changes.subscribe();
        while self.has(lease) {
            if changes.changed().await.is_err() {
                std::future::pending::<()>().await;
            }
        }
    }

    fn edit(&self, edit: impl FnOnce(&mut BTreeMap<LeaseId, u64>)) {
        let mut leases = self.leases.lock().unwrap_or_else(PoisonError::into_inner);
        edit(&mut leases);
        let progress = |(lease, done): (&LeaseId, &u64)| pb::LeaseProgress {
            lease: lease.get(),
            microbatches_done: *done,
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
