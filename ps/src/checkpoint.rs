//! Checkpoints without a pause: a [cut] of chunks is [written](write) in the background and
//! [reported](report) to the master. A partition makes its cuts and loads its checkpoint itself;
//! this folder knows chunks only.
//!
//! Always true here:
//!
//! - The caller takes a cut between two updates of the partition: weights, slots and ledger are of
//!   one version. It takes references, not copies, so it costs microseconds; updates that follow
//!   leave what it holds as it is.
//! - One checkpoint at a time is being written; one that is due meanwhile is skipped and reported,
//!   but one that the master asked for waits for its turn, because a job may end with it. So cuts
//!   cost at most two copies of the slots and of the weights that they save, until they are
//!   written. All of it is held to the end, because a store that fails is tried again from the
//!   beginning.
//! - Whatever the store does, training goes on.

mod cut;
mod report;
mod write;

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use net::timeline;
use proto::checkpoint::{self, folder};
use proto::ids::{Era, Version};
use proto::plan::Plan;
use proto::spec::CheckpointSpec;
use store::Stores;
use tokio_util::sync::CancellationToken;
use tracing::Instrument as _;

pub(crate) use self::cut::Cut;
pub(crate) use self::report::Reports;
pub use self::report::{Report, Reported, SaveFailed, Saved};
use crate::device::DeviceMemory;
use crate::metrics::Metrics;
use crate::opening::Place;

/// Saves one partition, once at a time.
#[derive(Debug)]
pub(crate) struct Saver {
    pub(crate) place: Place,
    pub(crate) era: Era,
    /// Name of the job.
    pub(crate) job: String,
    pub(crate) spec: CheckpointSpec,
    pub(crate) stores: Stores,
    pub(crate) reports: Reports,
    pub(crate) metrics: Arc<Metrics>,
    /// The device on which the values lie.
    pub(crate) device: Arc<DeviceMemory>,
    /// Cancelled when the partition is closed: nobody wants the file any more.
    pub(crate) ended: CancellationToken,
    /// See [`Options`](crate::Options).
    pub(crate) inline_bytes_max: usize,
    pub(crate) wishes: Mutex<Wishes>,
}

/// What is to be saved beside the versions of the specification.
#[derive(Debug, Default)]
pub(crate) struct Wishes {
    /// The version that the master asked for, until it comes.
    asked: Option<Version>,
    /// The newest version that was begun; it is not begun again.
    begun: Option<Version>,
    /// Whether a checkpoint is being written.
    writing: bool,
    /// The cut to write after that.
    next: Option<Cut>,
    /// Whether the last due version was skipped and this was logged.
    skipped: bool,
}

impl Saver {
    /// Asks for a version beside those of the specification.
    pub(crate) fn ask(&self, version: Version) {
        self.wishes().asked = Some(version);
    }

    /// Returns whether a version is to be cut now. One that is due while another is being written
    /// is reported as skipped, unless the master asked for it or it is the job's last: those wait
    /// for their turn.
    pub(crate) fn begins(&self, plan: &Plan, version: Version) -> bool {
        let mut wishes = self.wishes();
        let asked = wishes.asked.take_if(|asked| *asked <= version) == Some(version);
        if wishes.begun == Some(version) || (!asked && !self.spec.saves(plan, version)) {
            return false;
        }
        let begins = asked || version == plan.final_version() || !wishes.writing;
        if begins {
            wishes.begun = Some(version);
        }
        let skipped_before = std::mem::replace(&mut wishes.skipped, !begins);
        drop(wishes);
        if !begins {
            let reason = "the one before is still being written; save less often, or to a faster store";
            // A store that is too slow is one fact, and not a line for each version.
            match skipped_before {
                true => tracing::debug!(place = %self.place, %version, reason, "checkpoint not written"),
                false => tracing::warn!(place = %self.place, %version, reason, "checkpoints are skipped"),
            }
            self.report(version, reason.to_owned());
        }
        begins
    }

    /// Writes a cut in the background, after the one that is being written.
    /// [`begins`](Self::begins) has said so.
    pub(crate) fn save(self: &Arc<Self>, cut: Cut) {
        let mut wishes = self.wishes();
        if std::mem::replace(&mut wishes.writing, true) {
            // It may wait for long, and holds no memory of the device meanwhile.
            let cut = match cut.on_host() {
                Ok(cut) => cut,
                Err((version, error)) => {
                    drop(wishes);
                    return self.device_failed(version, &error);
                }
            };
            let passed = wishes.next.replace(cut);
            drop(wishes);
            passed
                .inspect(|cut| self.failed(cut.version(), &"a later one was asked for before its turn came"));
            return;
        }
        drop(wishes);
        let saver = self.clone();
        tokio::spawn(async move {
            let mut turn = Some((cut, Turn(&saver.wishes)));
            while let Some((cut, this)) = turn {
                let version = cut.version();
                let Place { job, partition } = saver.place;
                let span = tracing::debug_span!(
                    target: timeline::TARGET, parent: None, "checkpoint",
                    job = job.get(), partition = partition.get(), version = version.get()
                );
                let cut = match saver.on_host(cut).await {
                    Ok(cut) => cut,
                    Err((version, error)) => return saver.device_failed(version, &error),
                };
                tokio::select! {
                    biased;
                    () = saver.ended.cancelled() => return,
                    saved = saver.write(cut).instrument(span) => match saved {
                        Ok(saved) => {
                            saver.metrics.saves.add(1);
                            saver.metrics.save_bytes.add(saved.bytes);
                            saver.reports.add(Report::Saved(saved));
                        }
                        Err(error) => saver.failed(version, &error),
                    },
                }
                turn = this.next();
            }
        });
    }

    /// Copies a cut from the device to the host, where it is written from.
    async fn on_host(&self, cut: Cut) -> Result<Cut, (Version, kernels::Error)> {
        if self.device.device().is_host() || cut.data_bytes() <= self.inline_bytes_max as u64 {
            return cut.on_host();
        }
        let copying = tokio::task::spawn_blocking(|| cut.on_host());
        copying.await.expect("copies do not panic and are not cancelled")
    }

    /// Reports that a cut was lost with the device.
    fn device_failed(&self, version: Version, error: &kernels::Error) {
        self.device.fails(error);
        self.failed(version, error);
    }

    async fn write(&self, cut: Cut) -> checkpoint::Result<Saved> {
        let version = cut.version();
        let folder = self.stores.open(&self.spec.url)?.below(&folder(&self.job, version));
        let cut = Arc::new(cut);
        let tell = |error: &checkpoint::Error| {
            let place = self.place;
            tracing::warn!(%place, %version, %error, "the checkpoint store fails; trying again");
        };
        let write = || write::write(&folder, &cut, self.spec.bandwidth, self.inline_bytes_max);
        let header = self.stores.patiently(tell, write).await?;
        Ok(Saved {
            place: self.place,
            era: self.era,
            version,
            file: header.file_name(),
            bytes: header.file_bytes(),
            crc32c: header.crc32c(),
            applied: header.applied().clone(),
        })
    }

    fn failed(&self, version: Version, reason: &dyn fmt::Display) {
        let place = self.place;
        let message = reason.to_string();
        tracing::warn!(%place, %version, reason = message, "checkpoint not written");
        self.report(version, message);
    }

    fn report(&self, version: Version, message: String) {
        let Self { place, era, .. } = *self;
        self.metrics.saves_failed.add(1);
        self.reports.add(Report::Failed(SaveFailed { place, era, version, message }));
    }

    fn wishes(&self) -> MutexGuard<'_, Wishes> {
        lock(&self.wishes)
    }
}

fn lock(wishes: &Mutex<Wishes>) -> MutexGuard<'_, Wishes> {
    wishes.lock().unwrap_or_else(PoisonError::into_inner)
}

/// However the writing ends, the next checkpoint may begin.
struct Turn<'a>(&'a Mutex<Wishes>);

impl Turn<'_> {
    /// Returns what waits for its turn. Without one nothing is being written any more, from the
    /// same moment on.
    fn next(self) -> Option<(Cut, Self)> {
        let mut wishes = lock(self.0);
        let next = wishes.next.take();
        wishes.writing = next.is_some();
        drop(wishes);
        match next {
            Some(cut) => Some((cut, self)),
            None => {
                // Another one may have begun.
                std::mem::forget(self);
                None
            }
        }
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        let mut wishes = lock(self.0);
        wishes.writing = false;
        let next = wishes.next.take();
        drop((wishes, next));
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use proto::ids::{JobId, PartitionId};
    use tracing::span::{Attributes, Id, Record};
    use tracing::{Event, Level, Metadata, Subscriber};

    use super::*;

    const PLAN: Plan = Plan { records: 1000, micro: 1, microbatches_per_step: 1, epochs: 1 };

    /// Counts warnings.
    #[derive(Clone, Default)]
    struct Warnings(Arc<AtomicUsize>);

    impl Subscriber for Warnings {
        fn enabled(&self, _: &Metadata<'_>) -> bool {
            true
        }
        fn new_span(&self, _: &Attributes<'_>) -> Id {
            Id::from_u64(1)
        }
        fn record(&self, _: &Id, _: &Record<'_>) {}
        fn record_follows_from(&self, _: &Id, _: &Id) {}
        fn event(&self, event: &Event<'_>) {
            self.0.fetch_add(usize::from(*event.metadata().level() == Level::WARN), Ordering::Relaxed);
        }
        fn enter(&self, _: &Id) {}
        fn exit(&self, _: &Id) {}
    }

    #[test]
    fn a_store_that_is_too_slow_is_one_warning_however_many_checkpoints_are_skipped() {
        let spec = r#"{ "url": "memory://c", "every_steps": 1 }"#;
        let saver = Saver {
            place: Place { job: JobId(1), partition: PartitionId(0) },
            era: Era(0),
            job: "test".to_owned(),
            spec: serde_json::from_str(spec).unwrap(),
            stores: Stores::default(),
            reports: Reports::default(),
            metrics: Arc::default(),
            ended: CancellationToken::new(),
            device: Arc::default(),
            inline_bytes_max: usize::MAX,
            wishes: Mutex::default(),
        };
        let warnings = Warnings::default();
        tracing::subscriber::with_default(warnings.clone(), || {
            let begins = |versions: std::ops::Range<u64>| {
                versions.filter(|&version| saver.begins(&PLAN, Version(version))).count() as u64
            };
            let told = || warnings.0.load(Ordering::Relaxed);
            saver.wishes().writing = true;
            assert_eq!((begins(1..101), told()), (0, 1));
            // In time again, and then too slow once more.
            saver.wishes().writing = false;
            assert_eq!((begins(101..102), told()), (1, 1));
            saver.wishes().writing = true;
            assert_eq!((begins(102..202), told()), (0, 2));
        });
        assert_eq!(saver.metrics.saves_failed.get(), 200, "each is reported to the master");
    }
}
