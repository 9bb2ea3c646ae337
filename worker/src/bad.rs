//! Bad records: those that the job skips already, and the question to the master before a worker
//! leaves out others.
//!
//! Always true here: gradients or metrics without a bad record leave this worker only after the
//! master has said that the job skips it. The master forgets no such answer, so every other worker
//! leaves the record out too.

use std::collections::BTreeSet;

use data::BadRecord;
use proto::ids::{IncarnationId, LeaseId};
use proto::pb;
use proto::spec::DataSet;

use crate::error::Result;
use crate::master_client::MasterClient;

/// Most records of one question.
const ASKED_MAX: usize = 1000;

/// Most characters of a reason that the master keeps.
const REASON_CHARACTERS: usize = 300;

/// Records that the job skips, by their numbers over all files, as the master named them last.
#[derive(Debug, Default)]
pub(crate) struct Skipped {
    pub(crate) train: BTreeSet<u64>,
    pub(crate) validation: BTreeSet<u64>,
}

impl Skipped {
    /// Reads what the master says of a job.
    pub(crate) fn of(reply: &pb::JobReply) -> Self {
        let set = |records: &[u64]| records.iter().copied().collect();
        Self { train: set(&reply.skipped_train), validation: set(&reply.skipped_validation) }
    }

    /// Returns the number of skipped records. The master counts them in each lease.
    pub(crate) fn count(&self) -> u64 {
        (self.train.len() + self.validation.len()) as u64
    }
}

/// The holder of a lease, which may ask about its records.
#[derive(Clone, Debug)]
pub(crate) struct Asker {
    pub(crate) master: MasterClient,
    pub(crate) incarnation: IncarnationId,
    pub(crate) lease: LeaseId,
}

impl Asker {
    /// Returns when the master has said that the job skips these records. It asks nothing about no
    /// records.
    ///
    /// # Errors
    /// The job fails, because it would skip too many records; or the lease has ended.
    pub(crate) async fn skip(&self, set: DataSet, bad: &[BadRecord]) -> Result<()> {
        let set = match set {
            DataSet::Train => pb::DataSet::Train,
            DataSet::Validation => pb::DataSet::Validation,
        };
        for some in bad.chunks(ASKED_MAX) {
            let cut = |BadRecord { record, reason }: &BadRecord| pb::BadRecord {
                record: *record,
                reason: reason.chars().take(REASON_CHARACTERS).collect(),
            };
            let records: Vec<_> = some.iter().map(cut).collect();
            tracing::warn!(lease = %self.lease, records = records.len(), first = records[0].reason, "bad records");
            self.master.skip(self.incarnation, self.lease, set, records).await?;
        }
        Ok(())
    }
}
