//! What the master is told of checkpoints, and told again until it has taken it.

use std::collections::VecDeque;
use std::sync::Arc;

use proto::checkpoint::AppliedSteps;
use proto::ids::{Era, JobId, Step, Version};
use proto::pb;
use tokio::sync::watch;

use crate::opening::Place;

/// Most reports that wait; then the oldest are forgotten. A checkpoint that lacks one gets no
/// manifest, the next one will.
const REPORTS_MAX: usize = 256;

/// A partition's file lies safe on the store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Saved {
    /// Which partition.
    pub place: Place,
    /// Era that it works in.
    pub era: Era,
    /// The version that was saved.
    pub version: Version,
    /// Name of the file in the checkpoint's folder.
    pub file: String,
    /// Size of the file.
    pub bytes: u64,
    /// Checksum of the file's header.
    pub crc32c: u32,
    /// Which steps are applied in it.
    pub applied: AppliedSteps,
}

/// A partition could not write its file. It goes on training.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SaveFailed {
    /// Which partition.
    pub place: Place,
    /// Era that it works in.
    pub era: Era,
    /// The version that is not saved.
    pub version: Version,
    /// The reason.
    pub message: String,
}

/// How the writing of a checkpoint ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Report {
    /// Well.
    Saved(Saved),
    /// The checkpoint could not be written.
    Failed(SaveFailed),
}

/// Reports that the master has not taken, each with its number, oldest first.
#[derive(Clone, Debug, Default)]
pub struct Reported {
    last: u64,
    waiting: VecDeque<(u64, Report)>,
}

/// The reports of one ps; clones are the same.
#[derive(Clone, Debug, Default)]
pub(crate) struct Reports(Arc<watch::Sender<Reported>>);

impl Reports {
    /// Adds one.
    pub(crate) fn add(&self, report: Report) {
        self.0.send_modify(|reported| {
            reported.last += 1;
            reported.waiting.push_back((reported.last, report));
            if reported.waiting.len() > REPORTS_MAX {
                reported.waiting.pop_front();
            }
        });
    }

    /// Removes the reports with these numbers, which the master has taken.
    pub(crate) fn taken(&self, numbers: &[u64]) {
        self.retain(|number, _| !numbers.contains(&number));
    }

    /// Removes the reports of a job that is over.
    pub(crate) fn forget(&self, job: JobId) {
        self.retain(|_, report| report.place().job != job);
    }

    /// Changes of what waits.
    pub(crate) fn changes(&self) -> watch::Receiver<Reported> {
        self.0.subscribe()
    }

    fn retain(&self, keep: impl Fn(u64, &Report) -> bool) {
        self.0.send_if_modified(|reported| {
            let before = reported.waiting.len();
            reported.waiting.retain(|(number, report)| keep(*number, report));
            reported.waiting.len() < before
        });
    }
}

impl Report {
    const fn place(&self) -> Place {
        match self {
            Self::Saved(saved) => saved.place,
            Self::Failed(failed) => failed.place,
        }
    }
}

impl Reported {
    /// Returns the reports, oldest first.
    pub fn reports(&self) -> impl Iterator<Item = &Report> {
        self.waiting.iter().map(|(_, report)| report)
    }

    /// Writes them into a heartbeat.
    pub(crate) fn fill(&self, beat: &mut pb::HeartbeatRequest) {
        beat.saved.clear();
        beat.save_failed.clear();
        for (report, what) in &self.waiting {
            match what {
                Report::Saved(Saved { place, era, version, file, bytes, crc32c, applied }) => {
                    beat.saved.push(pb::SavedPartition {
                        report: *report,
                        job: place.job.get(),
                        partition: place.partition.get(),
                        era: era.get(),
                        version: version.get(),
                        file: file.clone(),
                        bytes: *bytes,
                        crc32c: *crc32c,
                        watermark: applied.watermark.get(),
                        applied_above: applied.above.iter().copied().map(Step::get).collect(),
                        samples_skipped: applied.samples_skipped,
                        overflows: applied.overflows,
                    });
                }
                Report::Failed(SaveFailed { place, era, version, message }) => {
                    beat.save_failed.push(pb::SaveFailed {
                        report: *report,
                        job: place.job.get(),
                        partition: place.partition.get(),
                        era: era.get(),
                        version: version.get(),
                        message: message.clone(),
                    });
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proto::ids::PartitionId;

    use super::*;

    fn failed(job: u64, version: u64) -> Report {
        let place = Place { job: JobId(job), partition: PartitionId(0) };
        Report::Failed(SaveFailed { place, era: Era(0), version: Version(version), message: "full".into() })
    }

    fn waiting(reports: &Reports) -> Vec<u64> {
        let mut beat = pb::HeartbeatRequest::default();
        reports.changes().borrow().fill(&mut beat);
        beat.save_failed.iter().map(|failed| failed.report).collect()
    }

    #[test]
    fn a_report_is_repeated_until_it_is_taken_or_its_job_is_over() {
        let reports = Reports::default();
        [failed(1, 4), failed(2, 4), failed(1, 8)].into_iter().for_each(|report| reports.add(report));
        assert_eq!(waiting(&reports), [1, 2, 3]);
        reports.taken(&[1, 9]);
        assert_eq!(waiting(&reports), [2, 3]);
        reports.forget(JobId(2));
        assert_eq!(waiting(&reports), [3]);
        reports.add(failed(1, 12));
        assert_eq!(waiting(&reports), [3, 4], "a number is never used again");
    }

    #[test]
    fn a_master_that_takes_nothing_costs_no_more_than_the_limit() {
        let reports = Reports::default();
        (0..300).for_each(|version| reports.add(failed(1, version)));
        assert_eq!(waiting(&reports).len(), REPORTS_MAX);
        assert_eq!(waiting(&reports).last(), Some(&300));
    }
}
