//! Turns the losses of microbatches into one number a step, and into as many events as people want
//! to read. Pure.
//!
//! The loss of a step is sum(loss) / sum(samples) over its microbatches in their order, in f64. Its
//! bits depend neither on which workers report nor on the order of reports. A microbatch that a
//! worker found applied contributes nothing. A step without a known loss has no event.

use std::collections::BTreeMap;
use std::time::Duration;

use proto::ids::{MicrobatchId, Step};
use proto::pb;
use proto::plan::Plan;

/// Events of a job's steps that are told to people, about.
const EVENTS: u64 = 2000;

/// The losses of the steps that are not told yet.
#[derive(Debug)]
pub(super) struct Losses {
    plan: Plan,
    /// Reports of each step at or past `next`, by index.
    steps: BTreeMap<Step, Vec<pb::MicrobatchReport>>,
    /// All steps before this one are told.
    next: Step,
    /// Mean loss of the newest step that has one.
    newest: Option<f64>,
    /// Records since the last event, and when that was.
    window: (u64, Duration),
    samples_per_second: f64,
}

/// One step that is complete and worth an event.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Told {
    pub(super) step: Step,
    pub(super) loss: f64,
    pub(super) samples: u64,
    pub(super) samples_per_second: f64,
}

impl Losses {
    /// Creates the losses of a job. Steps before `next` are told or need not be.
    pub(super) const fn new(plan: Plan, next: Step, now: Duration) -> Self {
        let steps = BTreeMap::new();
        Self { plan, steps, next, newest: None, window: (0, now), samples_per_second: 0.0 }
    }

    /// Steps before this one were told, by an earlier start of the master.
    pub(super) fn skip_to(&mut self, step: Step) {
        self.next = self.next.max(step);
    }

    /// Returns the mean loss of the newest complete step.
    pub(super) const fn newest(&self) -> Option<f64> {
        self.newest
    }

    /// Takes what a worker reports of consecutive microbatches.
    pub(super) fn record(&mut self, first: MicrobatchId, reports: &[pb::MicrobatchReport]) {
        for (id, report) in (first.get()..).zip(reports) {
            let microbatch = self.plan.microbatch(MicrobatchId(id));
            if microbatch.step < self.next {
                // Trained again, because a ps lost it.
                continue;
            }
            let of = microbatch.of as usize;
            let step = self.steps.entry(microbatch.step).or_insert_with(|| vec![Default::default(); of]);
            step[microbatch.index as usize] = *report;
        }
    }

    /// Returns the events of new complete steps: every step below `watermark` is complete.
    pub(super) fn advance(&mut self, now: Duration, watermark: Step) -> Vec<Told> {
        let mut told = Vec::new();
        while self.next < watermark {
            let step = self.next;
            self.next = step.next();
            let reports = self.steps.remove(&step).unwrap_or_default();
            let skipped: u64 = reports.iter().map(|report| report.skipped).sum();
            let records = self.plan.samples_of(step).saturating_sub(skipped);
            self.window.0 += records;
            let sum = |sum: (f64, u64), report: &pb::MicrobatchReport| {
                (sum.0 + report.loss_sum, sum.1 + report.samples)
            };
            let (loss, samples) = reports.iter().fold((0.0, 0), sum);
            if samples == 0 {
                continue;
            }
            let loss = loss / samples as f64;
            self.newest = Some(loss);
            if self.is_told(step) {
                told.push(Told { step, loss, samples: records, samples_per_second: 0.0 });
            }
        }
        if told.is_empty() {
            return told;
        }
        let (samples, since) = self.window;
        let elapsed = now.saturating_sub(since).as_secs_f64();
        if elapsed > 0.0 {
            self.samples_per_second = samples as f64 / elapsed;
            self.window = (0, now);
        }
        told.iter_mut().for_each(|told| told.samples_per_second = self.samples_per_second);
        told
    }

    /// Returns all steps of a short job; of a long one evenly many, and the last of each epoch.
    fn is_told(&self, step: Step) -> bool {
        let every = self.plan.steps().div_ceil(EVENTS);
        step.produces().get().is_multiple_of(every) || self.plan.ends_epoch(step.produces())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn report(loss_sum: f64, samples: u64) -> pb::MicrobatchReport {
        pb::MicrobatchReport { loss_sum, samples, skipped: 0 }
    }

    #[test]
    fn a_steps_loss_is_the_mean_over_its_records() {
        // 7 records of an epoch: steps of 4 (2 + 2) and 3 (2 + 1).
        let plan = Plan { records: 7, micro: 2, microbatches_per_step: 2, epochs: 1 };
        let mut losses = Losses::new(plan, Step(0), Duration::ZERO);
        losses.record(MicrobatchId(1), &[report(2.0, 2), report(3.0, 2)]);
        losses.record(MicrobatchId(0), &[report(6.0, 2)]);
        assert_eq!(losses.advance(SECOND, Step(0)), []);
        let told = losses.advance(2 * SECOND, Step(1));
        assert_eq!(told, [Told { step: Step(0), loss: 2.0, samples: 4, samples_per_second: 2.0 }]);
        losses.record(MicrobatchId(3), &[report(3.0, 1)]);
        let told = losses.advance(5 * SECOND, Step(2));
        assert_eq!(told, [Told { step: Step(1), loss: 2.0, samples: 3, samples_per_second: 1.0 }]);
        assert_eq!(losses.newest(), Some(2.0));
    }

    #[test]
    fn skipped_records_are_no_records_of_a_step() {
        let plan = Plan { records: 8, micro: 2, microbatches_per_step: 2, epochs: 1 };
        let mut losses = Losses::new(plan, Step(0), Duration::ZERO);
        let skipped = |report, skipped| pb::MicrobatchReport { skipped, ..report };
        losses.record(MicrobatchId(0), &[report(6.0, 2), skipped(report(1.5, 1), 1)]);
        losses.record(MicrobatchId(2), &[skipped(report(0.0, 0), 2); 2]);
        let told = losses.advance(SECOND, Step(2));
        assert_eq!(told, [Told { step: Step(0), loss: 2.5, samples: 3, samples_per_second: 3.0 }]);
    }

    #[test]
    fn the_sum_does_not_depend_on_the_order_of_reports() {
        let plan = Plan { records: 3, micro: 1, microbatches_per_step: 3, epochs: 1 };
        let values = [1e16, 1.0, -1e16];
        let loss = |order: [u64; 3]| {
            let mut losses = Losses::new(plan, Step(0), Duration::ZERO);
            for id in order {
                losses.record(MicrobatchId(id), &[report(values[id as usize], 1)]);
            }
            losses.advance(SECOND, Step(1))[0].loss
        };
        assert_eq!(loss([0, 1, 2]).to_bits(), loss([2, 0, 1]).to_bits());
    }

    #[test]
    fn what_was_applied_already_brings_no_loss() {
        let plan = Plan { records: 4, micro: 1, microbatches_per_step: 2, epochs: 1 };
        let mut losses = Losses::new(plan, Step(0), Duration::ZERO);
        losses.record(MicrobatchId(0), &[report(0.0, 0), report(0.0, 0), report(0.0, 0), report(5.0, 1)]);
        let told = losses.advance(SECOND, Step(2));
        assert_eq!(told.iter().map(|told| (told.step, told.loss)).collect::<Vec<_>>(), [(Step(1), 5.0)]);
        assert_eq!(told[0].samples_per_second, 4.0);
    }

    #[test]
    fn what_is_told_or_was_done_before_is_not_told_again() {
        let plan = Plan { records: 4, micro: 1, microbatches_per_step: 1, epochs: 1 };
        let mut losses = Losses::new(plan, Step(2), Duration::ZERO);
        losses.record(MicrobatchId(1), &[report(1.0, 1), report(2.0, 1)]);
        let told = losses.advance(SECOND, Step(3));
        assert_eq!(told.iter().map(|told| (told.step, told.loss)).collect::<Vec<_>>(), [(Step(2), 2.0)]);
        assert_eq!(losses.advance(SECOND, Step(0)), [], "the watermark fell");
        losses.record(MicrobatchId(0), &[report(9.0, 1); 3]);
        assert_eq!(losses.advance(SECOND, Step(3)), []);
        assert!(losses.steps.is_empty());
    }

    #[test]
    fn a_long_job_tells_some_steps_and_the_last_of_each_epoch() {
        let plan = Plan { records: 9_999, micro: 1, microbatches_per_step: 1, epochs: 2 };
        let mut losses = Losses::new(plan, Step(0), Duration::ZERO);
        losses.record(MicrobatchId(0), &vec![report(1.0, 1); 19_998]);
        let told = losses.advance(SECOND, Step(19_998));
        assert_eq!(told.len(), 1999 + 2);
        for step in [9, 9_998, 19_997] {
            assert!(told.iter().any(|told| told.step == Step(step)), "{step}");
        }
        assert!(losses.steps.is_empty());
    }
}
