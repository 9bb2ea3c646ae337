//! The end of a lease: its pushes are acknowledged, the report goes to the master, and the answer
//! may bring the next lease.

use std::sync::Arc;
use std::time::Duration;

use proto::ids::{IncarnationId, LeaseId};
use proto::pb;
use proto::pb::complete_request::Result as Report;
use tokio::sync::mpsc;

use crate::error::{Error, Result};
use crate::held::Held;
use crate::master_client::MasterClient;
use crate::work::{Lease, Train};

/// Wait before a report without losses. Another worker computed a step that was applied before this
/// worker began, and is about to report its losses. This worker knows none, so its report must not
/// come first.
const LOSSES_COME: Duration = Duration::from_millis(200);

/// Reports to the master how leases ended. Clones report to the same master.
#[derive(Clone, Debug)]
pub(crate) struct Reporter {
    pub(crate) master: MasterClient,
    pub(crate) held: Held,
    /// Channel of granted leases to the fetcher.
    pub(crate) granted: mpsc::UnboundedSender<Granted>,
    /// The device that computes, with its memory.
    pub(crate) device: Arc<str>,
}

/// A lease in the answer to a report.
#[derive(Debug)]
pub(crate) struct Granted {
    pub(crate) incarnation: IncarnationId,
    pub(crate) lease: pb::Lease,
    /// The reported lease.
    pub(crate) after: LeaseId,
}

impl Reporter {
    /// Waits for the pushes of a lease and reports it.
    ///
    /// # Errors
    /// Those of [`report`](Self::report).
    pub(crate) async fn finish(self, lease: Lease, mut train: Train) -> Result<()> {
        let Lease { incarnation, id, progress, .. } = lease;
        let pushing = async {
            let mut result = Ok(());
            while let Some(pushed) = train.pushes.join_next().await {
                let pushed = pushed.unwrap_or_else(|panic| Err(Error::from_panic("a push", &panic)));
                progress.advance();
                result = result.and(pushed);
            }
            result
        };
        let (reports, warning) = (train.reports, train.job.warning());
        let unknown = reports.iter().any(|report| (report.samples, report.skipped) == (0, 0));
        let result = async {
            let result = pushing.await;
            let took = train.began.elapsed();
            if unknown && result.is_ok() {
                tokio::time::sleep(LOSSES_COME).await;
            }
            result.map(|()| took)
        };
        let result = tokio::select! {
            biased;
            result = result => result,
            () = self.held.lost(id) => return Ok(()),
        };
        // A place that still has a handle is busy with the lease.
        drop(progress);
        let us = |time: Duration| u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
        let (load_us, compute_us) = (us(train.loading), us(train.computing));
        let result = result.map(|took| {
            Report::Trained(pb::Trained {
                microbatches: reports,
                took_us: us(took).max(1),
                load_us,
                compute_us,
            })
        });
        self.report(incarnation, id, result, warning).await
    }

    /// Reports to the master how a lease ended: done, or failed with the error. A result that is no
    /// longer wanted is not a failure. `warning` is what this worker noticed in the job's records.
    ///
    /// # Errors
    /// The worker cannot go on: a ps or the master stays unreachable, or the device is lost.
    pub(crate) async fn report(
        &self,
        incarnation: IncarnationId,
        lease: LeaseId,
        result: Result<Report>,
        warning: Option<String>,
    ) -> Result<()> {
        let reported = match result {
            Ok(report) => self.complete(incarnation, lease, report, warning).await,
            Err(error) => Err(error),
        };
        let reported = match reported.map_err(|error| error.on(&self.device)) {
            Err(error) if error.is_device_lost() => {
                self.give_up(incarnation, lease, &error).await;
                Err(error)
            }
            Err(error) if error.is_fenced() => {
                tracing::info!(%lease, reason = %error, "this work is no longer wanted");
                Ok(())
            }
            Err(Error::NotHeld { what, partition, failure }) => {
                tracing::info!(%lease, reason = %failure, "{what}: telling the master, and handing this work back");
                self.master.release_not_held(incarnation, lease, partition).await.or_else(forgive_fenced)
            }
            Err(error) if error.is_not_yet() => {
                tracing::info!(%lease, reason = %error, "handing this work back until it can be done");
                self.master.release(incarnation, lease, Vec::new()).await.or_else(forgive_fenced)
            }
            Err(error) if !error.is_unreachable() => {
                tracing::warn!(%lease, reason = %error, "task failed");
                self.master.fail(incarnation, lease, &error).await.or_else(forgive_fenced)
            }
            reported => reported,
        };
        self.held.remove(lease);
        reported
    }

    /// Gives up a lease because the device is lost. The lease fails if its task may be the reason.
    async fn give_up(&self, incarnation: IncarnationId, lease: LeaseId, error: &Error) {
        tracing::error!(%lease, reason = %error, "this worker cannot compute any more");
        let given = match error.is_for_others() {
            true => self.master.release(incarnation, lease, Vec::new()).await,
            false => self.master.fail(incarnation, lease, error).await,
        };
        if let Err(error) = given.or_else(forgive_fenced) {
            tracing::warn!(%lease, reason = %error, "the master did not take this lease back; it expires");
        }
    }

    async fn complete(
        &self,
        incarnation: IncarnationId,
        lease: LeaseId,
        report: Report,
        warning: Option<String>,
    ) -> Result<()> {
        let reply = self.master.complete(incarnation, lease, report, warning).await?;
        let pb::CompleteReply { accepted, next } = reply;
        tracing::debug!(%lease, accepted, "task reported");
        if let Some(next) = next {
            // Inserted now, because a draining worker hands back all its leases, including those
            // that are never fetched.
            self.held.insert(incarnation, &next);
            let _ = self.granted.send(Granted { incarnation, lease: next, after: lease });
        }
        Ok(())
    }
}

/// Ignores the error of a master that no longer knows this incarnation: it has given the leases to
/// others.
fn forgive_fenced(error: Error) -> Result<()> {
    if error.is_fenced() { Ok(()) } else { Err(error) }
}
