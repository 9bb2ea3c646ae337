//! Where a ps is, and what of a job lives there.

use proto::pb;

/// A ps to speak to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PsAddress {
    pub(crate) name: String,
    pub(crate) url: String,
    /// What lives there of the job. It may hold more, left from an earlier placement.
    pub(crate) partitions: Vec<u32>,
}

impl PsAddress {
    /// Returns what it says of the partitions that live there.
    pub(crate) fn own(&self, mut ledgers: Vec<pb::PartitionLedger>) -> Vec<pb::PartitionLedger> {
        ledgers.retain(|ledger| self.partitions.contains(&ledger.partition));
        ledgers
    }
}
