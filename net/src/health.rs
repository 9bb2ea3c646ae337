//! Health: the service names that each process answers by the gRPC health protocol, and their
//! meaning.
//!
//! Alive and ready are two questions. A supervisor that restarts processes asks the first: a ps
//! without its master is alive, and a restart would lose its weights. A load balancer or a rolling
//! update asks the second.

use std::convert::Infallible;

use tonic_health::ServingStatus;
use tonic_health::server::HealthReporter;

use crate::session::Session;

/// Service name for "the process answers": the protocol's own name for a whole server. Kubernetes
/// asks for it when a probe names no service.
pub const LIVE: &str = "";

/// Service name for "the process takes part": a master takes jobs (the leader, if there are
/// several), a ps or a worker is a member of the fleet.
pub const READY: &str = "ready";

/// Sets whether this process is ready.
pub async fn set_ready(health: &HealthReporter, ready: bool) {
    let status = if ready { ServingStatus::Serving } else { ServingStatus::NotServing };
    health.set_service_status(READY, status).await;
}

/// Keeps a member of the fleet ready exactly while the master knows it. Never ends by itself.
pub async fn follow(health: &HealthReporter, session: &Session) -> Infallible {
    let mut incarnations = session.incarnations();
    loop {
        let registered = incarnations.borrow_and_update().is_some();
        set_ready(health, registered).await;
        if incarnations.changed().await.is_err() {
            // The session's driver is gone, and this process is about to end.
            set_ready(health, false).await;
            return std::future::pending().await;
        }
    }
}
