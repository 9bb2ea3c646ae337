//! What a partition does, told as it happens: events by which the simulation checks the promises
//! while a job runs.
//!
//! They are DEBUG events of the target `ebbflow::checks`, and their fields are numbers. What is not
//! there (the version of a partition without weights) is left out.

use proto::ids::{Era, Step, Version};
use proto::parameters::{Address, Want};
use tracing::debug;

use crate::error::Error;
use crate::ledger::Ledger;

const TARGET: &str = "ebbflow::checks";

/// Tells that an empty partition was opened.
pub(crate) fn opened(address: Address) {
    let Address { job, partition, era } = address;
    debug!(target: TARGET, job = job.get(), partition = partition.get(), era = era.get(), "opened");
}

/// Tells that a partition was restored from its checkpoint.
pub(crate) fn restored(address: Address, ledger: &Ledger) {
    let Address { job, partition, era } = address;
    debug!(
        target: TARGET,
        job = job.get(),
        partition = partition.get(),
        era = era.get(),
        version = ledger.version().get(),
        watermark = ledger.watermark().get(),
        "restored"
    );
}

/// Tells that a node from a worker of era `sender` was added to its step, or dropped as a
/// duplicate.
pub(crate) fn taken_up(address: Address, sender: Era, step: Step, ledger: &Ledger, delay: Option<u32>) {
    let Address { job, partition, era } = address;
    debug!(
        target: TARGET,
        job = job.get(),
        partition = partition.get(),
        era = era.get(),
        sender_era = sender.get(),
        step = step.get(),
        version = ledger.version().get(),
        watermark = ledger.watermark().get(),
        delay,
        "taken up"
    );
}

/// Tells that a step made the next version. `kept`: number of versions that are kept.
pub(crate) fn applied(address: Address, step: Step, version: Version, kept: usize) {
    let Address { job, partition, era } = address;
    let (step, version) = (step.get(), version.get());
    debug!(target: TARGET, job = job.get(), partition = partition.get(), era = era.get(), step, version, kept, "applied");
}

/// Tells that a version was given to a worker of era `sender`.
pub(crate) fn pulled(address: Address, sender: Era, want: Want, version: Version, ledger: &Ledger) {
    let Address { job, partition, era } = address;
    let (exact, at_least) = match want {
        Want::Exact(version) => (Some(version.get()), None),
        Want::AtLeast(steps) => (None, Some(steps.get())),
    };
    debug!(
        target: TARGET,
        job = job.get(),
        partition = partition.get(),
        era = era.get(),
        sender_era = sender.get(),
        exact,
        at_least,
        version = version.get(),
        watermark = ledger.watermark().get(),
        "pulled"
    );
}

/// Tells that a push or pull was refused.
pub(crate) fn refused(error: &Error) {
    debug!(target: TARGET, ?error, "refused");
}
