//! The training of a job: its books, its losses and its evaluations, kept in step with each other.
//! A job that only evaluates or predicts has books without microbatches. Pure.

use std::time::Duration;

use proto::ids::{IncarnationId, LeaseId, MicrobatchId, Step, Version};
use proto::optimizer::OptimizerSpec;
use proto::pb;
use proto::plan::Plan;
use proto::spec::{JobSpec, Order, Purpose};
use proto::status::{Failure, Kind};

use super::ended;
use super::evaluations::{Evaluations, When};
use super::index::Facts;
use super::losses::{Losses, Told};
use super::parts::Predictions;
use super::work::Work;
use crate::applied::Applied;
use crate::dispatcher::Dispatcher;
use crate::lease::Limits;
use crate::scheduler::Crew;

/// A job that trains.
#[derive(Debug)]
pub(super) struct Training {
    plan: Plan,
    optimizer: OptimizerSpec,
    /// Whether the job may skip records.
    skips: bool,
    /// Whether an epoch begins only when the one before it is measured.
    measures_between: bool,
    pub(super) books: Dispatcher,
    pub(super) losses: Losses,
    pub(super) evaluations: Evaluations,
    /// Only in a job that predicts.
    pub(super) predictions: Option<Predictions>,
    purpose: Purpose,
    /// Records of all microbatches that are done, without skipped ones, as far as workers reported
    /// them.
    pub(super) samples_done: u64,
}

impl Training {
    /// Returns the books when these steps are applied on all partitions. `before`: the training as
    /// it was before a ps was lost; without one the master was started again, or nothing is trained
    /// yet. All versions up to `measured` were measured.
    ///
    /// In canonical order the whole job was rewound, so what comes after is told and measured
    /// again, with the same numbers. In arrival order only one partition was, and what was told of
    /// a step or an evaluation stays told. `trained`: see [`advance`](Self::advance).
    pub(super) fn new(
        spec: &JobSpec,
        facts: &Facts,
        limits: Limits,
        trained: Duration,
        applied: &Applied,
        mut before: Option<Self>,
        measured: Option<Version>,
    ) -> Self {
        let mut books = Dispatcher::new(facts.plan, spec.consistency.resolve().delay, limits)
            .with_lanes(facts.lanes(spec))
            .after(applied);
        // Workers are as fast as before.
        books.speeds =
            before.as_mut().map(|before| std::mem::take(&mut before.books.speeds)).unwrap_or_default();
        if !spec.purpose.trains() {
            // Nothing is handed out at version 0, where such a job stays.
            books.close();
        }
        let (plan, watermark, consistency) = (facts.plan, applied.watermark(), spec.consistency.resolve());
        let from_here = || Losses::new(plan, watermark, trained);
        let (when, sets) = match (spec.purpose, spec.occasions(plan)) {
            (Purpose::Train, Some(occasions)) => (When::During(occasions), facts.sets.clone()),
            (Purpose::Evaluate, _) => (When::Once, facts.sets.clone()),
            (Purpose::Train, None) | (Purpose::Predict, _) => (When::Once, Vec::new()),
        };
        let (losses, evaluations) = match before {
            None => {
                // A program that drives the model names metrics only when it measures.
                let metrics = (!spec.is_driven()).then(|| spec.model.metrics.clone());
                let evaluations = Evaluations::new(when, sets, metrics, measured);
                (from_here(), evaluations.listing(spec.worst()))
            }
            Some(before) if consistency.order == Order::Arrival => (before.losses, before.evaluations),
            Some(before) => (from_here(), before.evaluations),
        };
        let rewound = (consistency.order == Order::Canonical).then_some(watermark);
        let evaluations = evaluations.again(rewound);
        let above = applied.above().map(|step| plan.samples_of(step)).sum::<u64>();
        Self {
            plan,
            optimizer: spec.optimizer.clone(),
            skips: spec.data.may_skip(),
            measures_between: spec.is_driven(),
            books,
            losses,
            evaluations,
            predictions: (spec.purpose == Purpose::Predict).then(|| Predictions::new(facts.measured(spec))),
            purpose: spec.purpose,
            samples_done: plan.samples_before(watermark) + above,
        }
    }

    /// Returns the step below which all steps are done.
    pub(super) fn watermark(&self) -> Step {
        let watermark = self.books.watermark();
        let done = watermark.get() == self.plan.microbatches();
        if done { Step(self.plan.steps()) } else { self.plan.microbatch(watermark).step }
    }

    /// Returns whether everything that the job is for is done.
    pub(super) fn is_done(&self) -> bool {
        let trained = !self.trains() || self.books.is_done();
        let predicted = self.predictions.as_ref().is_none_or(Predictions::are_done);
        trained && predicted && self.evaluations.is_done()
    }

    /// Returns whether the job computes gradients.
    pub(super) const fn trains(&self) -> bool {
        self.purpose.trains()
    }

    /// Returns the number of records that a job which does not train has evaluated or predicted.
    pub(super) fn records_done(&self) -> u64 {
        match (&self.predictions, self.trains()) {
            (Some(predictions), _) => predictions.records_done(),
            (None, true) => 0,
            (None, false) => self.evaluations.records_done(),
        }
    }

    /// Holds back what must wait for an evaluation.
    pub(super) fn hold_back(&mut self) {
        let unmeasured = self.evaluations.first_unmeasured().filter(|_| self.measures_between);
        if let Some(version) = unmeasured {
            self.books.hold_back(self.plan.first_of(Step(version.get())));
        }
    }

    /// Records that the run of a lease is done; answers whose leases ended by that.
    pub(super) fn complete(
        &mut self,
        now: Duration,
        worker: IncarnationId,
        lease: LeaseId,
        trained: &pb::Trained,
    ) -> Result<Vec<(IncarnationId, LeaseId)>, Failure> {
        let run = self.books.run_of(worker, lease).ok_or_else(|| ended(lease))?;
        let (count, found) = (run.end.get() - run.start.get(), trained.microbatches.len() as u64);
        if found != count {
            return Err(Failure::new(
                Kind::Malformed,
                format!("Trained.microbatches: expected {count} reports, found {found}"),
            ));
        }
        self.check(run.start, &trained.microbatches)?;
        let took = (trained.took_us > 0).then(|| Duration::from_micros(trained.took_us));
        let completed = self.books.complete(now, worker, lease, took);
        self.record(run.start, &trained.microbatches);
        Ok(completed.map(|completed| completed.beaten).unwrap_or_default())
    }

    /// Records that the beginning of the run of a lease is done, the rest comes back.
    pub(super) fn release(
        &mut self,
        now: Duration,
        worker: IncarnationId,
        lease: LeaseId,
        trained: &pb::Trained,
    ) -> Result<(), Failure> {
        let run = self.books.run_of(worker, lease).ok_or_else(|| ended(lease))?;
        let (count, found) = (run.end.get() - run.start.get(), trained.microbatches.len() as u64);
        if found > count {
            return Err(Failure::new(
                Kind::Malformed,
                format!("Trained.microbatches: expected at most {count} reports, found {found}"),
            ));
        }
        self.check(run.start, &trained.microbatches)?;
        if let Some(done) = self.books.release(now, worker, lease, found) {
            let done = (done.end.get() - done.start.get()) as usize;
            self.record(run.start, &trained.microbatches[..done]);
        }
        Ok(())
    }

    /// Brings losses and evaluations up to the books: events to tell, shards to measure or parts to
    /// predict. `trained`: how long the job trained so far, pauses left out, so that they do not
    /// look like slowness.
    pub(super) fn advance(&mut self, trained: Duration, crew: &Crew) -> (Vec<pb::TrainEvent>, Vec<Work>) {
        let watermark = self.watermark();
        let told = self.losses.advance(trained, watermark);
        let events = told.into_iter().map(|told| self.event(told, crew)).collect();
        let shards = self.evaluations.begin(watermark).into_iter().map(Work::Evaluate);
        let parts = self.predictions.as_mut().map(Predictions::begin).unwrap_or_default();
        (events, shards.chain(parts.into_iter().map(Work::Predict)).collect())
    }

    fn event(&self, told: Told, crew: &Crew) -> pb::TrainEvent {
        let Told { step, loss, samples, samples_per_second } = told;
        let steps = self.plan.steps();
        let factor = self.optimizer.schedule.factor(step.get(), steps);
        pb::TrainEvent {
            step: step.get(),
            epoch: self.plan.epoch_of(step).get(),
            loss,
            samples,
            samples_per_second,
            workers: crew.len(),
            workers_standby: crew.standby(),
            learning_rate: self.optimizer.learning_rate * factor,
            steps,
            epochs: self.plan.epochs,
        }
    }

    fn check(&self, first: MicrobatchId, reports: &[pb::MicrobatchReport]) -> Result<(), Failure> {
        for (id, report) in (first.get()..).zip(reports) {
            let expected = self.plan.microbatch(MicrobatchId(id)).samples();
            let (samples, skipped) = (report.samples, report.skipped);
            let wrong = if (samples, skipped) != (0, 0) && samples.checked_add(skipped) != Some(expected) {
                format!(
                    "samples: expected {expected} with those skipped, or 0, found {samples} and {skipped}"
                )
            } else if skipped > 0 && !self.skips {
                format!("skipped: expected 0, because the job skips nothing, found {skipped}")
            } else if !report.loss_sum.is_finite() {
                format!(
                    "loss_sum: expected a finite number, found {}; report it as diverged",
                    report.loss_sum
                )
            } else {
                continue;
            };
            return Err(Failure::new(Kind::Malformed, format!("MicrobatchReport of {id}: {wrong}")));
        }
        Ok(())
    }

    fn record(&mut self, first: MicrobatchId, reports: &[pb::MicrobatchReport]) {
        self.losses.record(first, reports);
        for (id, report) in (first.get()..).zip(reports) {
            self.samples_done += self.plan.microbatch(MicrobatchId(id)).samples() - report.skipped;
        }
    }
}
