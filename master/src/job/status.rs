//! What users are told of a job: its state with a reason, its numbers, and the event when the state
//! changes. Pure.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use proto::ids::{IncarnationId, Version};
use proto::pb;
use proto::pb::JobState;
use proto::pb::event::Kind as Event;
use proto::predictions::folder_of;
use proto::spec::{DataSet, Format, Purpose};
use proto::worst::RecordLoss;

use super::evaluations::MeasuredSet;
use super::phase::{Begin, Beginning, Ending, Phase, Stage};
use super::predictions::Delivery;
use super::{Effect, Job};
use crate::clock::Now;
use crate::indexes::Indexes;
use crate::scheduler::Crew;

/// Most bytes of what is known of files in a reply to a worker.
const KNOWN_BYTES_MAX: usize = 1 << 20;

/// When what happened.
#[derive(Debug)]
pub(super) struct Times {
    submitted: Duration,
    submitted_unix_ms: u64,
    /// Between the submission and this start of the master.
    earlier: Duration,
    ended: Option<Duration>,
    /// Time in `Running`, up to `running_since`.
    training: Duration,
    running_since: Option<Duration>,
    /// The state that was told last.
    told: Option<(JobState, String)>,
}

impl Times {
    /// Returns how long it was in `Running` so far.
    pub(super) fn training(&self, now: Now) -> Duration {
        let until = self.ended.unwrap_or(now.since_start);
        let running = self.running_since.map_or(Duration::ZERO, |since| until.saturating_sub(since));
        self.training + running
    }

    pub(super) const fn submitted(now: Now) -> Self {
        Self {
            submitted: now.since_start,
            submitted_unix_ms: now.unix_ms,
            earlier: Duration::ZERO,
            ended: None,
            training: Duration::ZERO,
            running_since: None,
            told: None,
        }
    }

    /// Returns the times of a job that was submitted to an earlier start of the master.
    pub(super) fn restored(now: Now, submitted_unix_ms: u64, training_ms: u64) -> Self {
        let earlier = Duration::from_millis(now.unix_ms.saturating_sub(submitted_unix_ms));
        let training = Duration::from_millis(training_ms);
        Self { submitted_unix_ms, earlier, training, ..Self::submitted(now) }
    }

    pub(super) const fn submitted_unix_ms(&self) -> u64 {
        self.submitted_unix_ms
    }
}

/// Counts that outlive the training.
#[derive(Debug, Default)]
pub(super) struct Numbers {
    pub(super) leases_expired: u64,
    /// Leases that this start of the master took back without a report of a worker.
    pub(super) taken_back: u64,
    /// Records that an earlier run had applied, which this job went on from.
    pub(super) samples_before: u64,
    /// Workers that earlier starts of the master saw.
    workers_seen_before: u64,
    pub(super) workers_seen: BTreeSet<IncarnationId>,
    pub(super) final_metrics: BTreeMap<String, f64>,
    /// Time for which workers waited for records, and computed gradients, since this start of the
    /// master, in microseconds.
    load_us: u64,
    compute_us: u64,
    /// Confusion matrices of the last evaluation, by set. The name of `data.validation` is empty.
    pub(super) confusions: BTreeMap<String, pb::ConfusionMatrix>,
    /// Records with the largest losses in the last evaluation.
    pub(super) worst: Vec<pb::WorstRecord>,
    ledger: Option<Ledger>,
}

/// What the partitions say at the end.
#[derive(Debug)]
struct Ledger {
    version: u64,
    microbatches_applied: u64,
    samples_applied: u64,
    duplicates_dropped: u64,
    overflows: u64,
}

impl Numbers {
    /// Goes on counting where an earlier start of the master was.
    pub(super) fn restore(
        &mut self,
        leases_expired: u64,
        workers_seen: u64,
        final_metrics: BTreeMap<String, f64>,
    ) {
        (self.leases_expired, self.workers_seen_before) = (leases_expired, workers_seen);
        self.final_metrics = final_metrics;
    }

    /// Returns the confusion matrices of named sets.
    pub(super) fn named_confusions(&self) -> BTreeMap<String, pb::ConfusionMatrix> {
        self.confusions
            .iter()
            .filter(|(set, _)| !set.is_empty())
            .map(|(set, of)| (set.clone(), of.clone()))
            .collect()
    }

    /// Returns distinct worker incarnations that held a lease.
    pub(super) fn workers_seen(&self) -> u64 {
        self.workers_seen_before + self.workers_seen.len() as u64
    }

    /// Takes the metrics of the newest evaluation. Those of named sets have the set's name before
    /// theirs.
    pub(super) fn take_measured(&mut self, sets: &[MeasuredSet]) {
        self.final_metrics.clear();
        self.confusions.clear();
        for set in sets {
            let named = |metric: &String| match set.name.is_empty() {
                true => metric.clone(),
                false => format!("{}/{metric}", set.name),
            };
            self.final_metrics.extend(set.metrics.iter().map(|(metric, &value)| (named(metric), value)));
            self.confusions.extend(set.confusion.iter().map(|matrix| (set.name.clone(), matrix.into())));
        }
    }

    /// Adds what a worker says of its time on a lease.
    pub(super) fn add_work(&mut self, load_us: u64, compute_us: u64) {
        self.load_us = self.load_us.saturating_add(load_us);
        self.compute_us = self.compute_us.saturating_add(compute_us);
    }

    /// Returns the share of the workers' time that they waited for records. `None`: nobody said.
    fn data_wait(&self) -> Option<f64> {
        let all = self.load_us as f64 + self.compute_us as f64;
        (all > 0.0).then(|| self.load_us as f64 / all)
    }

    /// Takes the least progress of all partitions as applied, and the sum of dropped duplicates.
    pub(super) fn take_ledgers(&mut self, ledgers: &[pb::PartitionLedger]) {
        let min = |number: fn(&pb::PartitionLedger) -> u64| ledgers.iter().map(number).min().unwrap_or(0);
        self.ledger = (!ledgers.is_empty()).then(|| Ledger {
            version: min(|ledger| ledger.version.unwrap_or(0)),
            microbatches_applied: min(|ledger| ledger.microbatches_applied),
            samples_applied: min(|ledger| ledger.samples_applied),
            duplicates_dropped: ledgers.iter().map(|ledger| ledger.duplicates_dropped).sum(),
            overflows: min(|ledger| ledger.overflows),
        });
    }
}

impl Job {
    /// Returns the name `NAME-ID`.
    pub(crate) fn name(&self) -> String {
        format!("{}-{}", self.spec.name, self.id)
    }

    /// Returns where it is in its life, and why.
    pub(crate) fn state(&self) -> (JobState, String) {
        if self.paused() {
            return (JobState::Paused, "a user paused it; what its workers hold is finished".to_owned());
        }
        if let Some(waits) = self.waits() {
            return (JobState::Pending, waits.to_owned());
        }
        let end = self.phase.end();
        let reason = end.map(|end| end.reason.as_str()).unwrap_or_default();
        match &self.phase {
            Phase::Beginning(Beginning { stage: Begin::Surveying { .. }, .. }) if self.is_exported() => {
                (JobState::Exporting, format!("{reason}; the ps tell their numbers"))
            }
            Phase::Indexing { .. } => {
                (JobState::Indexing, "workers count the records of its files".to_owned())
            }
            Phase::Beginning(Beginning { stage: Begin::Ready, .. }) => {
                (JobState::Running, "workers train once the journal knows of it".to_owned())
            }
            Phase::Beginning(Beginning { before: Some(_), .. }) => {
                (JobState::Running, "a worker makes anew what a ps lost".to_owned())
            }
            Phase::Beginning(_) => (JobState::Indexing, "a worker builds the model".to_owned()),
            Phase::Training { end: None, .. } if self.is_closing() => (
                JobState::Running,
                "a ps leaves; the steps that were begun are finished and saved".to_owned(),
            ),
            Phase::Training { .. } if self.is_closing() => {
                (JobState::Exporting, format!("{reason}; the steps that were begun are finished and saved"))
            }
            Phase::Training { .. } => (
                JobState::Running,
                match self.spec.purpose {
                    Purpose::Train => "workers train",
                    Purpose::Evaluate => "workers evaluate",
                    Purpose::Predict => "workers predict",
                }
                .to_owned(),
            ),
            Phase::Ending(Ending { stage, end, .. }) => match stage {
                Stage::Stopping { .. } | Stage::Asking => (
                    JobState::Exporting,
                    format!("{reason}; its workers stop, then what is trained is saved"),
                ),
                Stage::Exporting => (
                    JobState::Exporting,
                    match (self.spec.purpose, self.delivery) {
                        (Purpose::Predict, None) => format!("{reason}; a worker joins the predictions"),
                        (Purpose::Predict, Some(Delivery::Joined)) => {
                            format!("{reason}; a worker removes the parts")
                        }
                        (Purpose::Predict, Some(Delivery::Kept)) => format!("{reason}; the parts stay"),
                        _ => format!("{reason}; a worker saves the model"),
                    },
                ),
                Stage::Saving { .. } => {
                    (JobState::Exporting, format!("{reason}; the last checkpoint is written"))
                }
                Stage::Finishing => (JobState::Exporting, format!("{reason}; the ps tell their numbers")),
                Stage::Ended => (end.state, end.reason.clone()),
            },
        }
    }

    /// Returns the worst records of a validation set for users: where they are, and numbers that
    /// count over the files of the set.
    pub(super) fn worst_of(&self, set: &MeasuredSet) -> Vec<pb::WorstRecord> {
        let data = &self.spec.data;
        // Records of a loop have no files: names in its lists are numbers of records.
        let source = data.files_of(DataSet::Validation).filter(|_| data.format != Format::Index);
        let files = source.and_then(|source| data.files(source));
        let first_file = data.first_validation_file(&set.name);
        let before: u64 = self.records_of(DataSet::Validation).iter().take(first_file).sum();
        let record = |found: &RecordLoss| {
            let (file, row) = self.place_of(DataSet::Validation, found.record);
            let found = RecordLoss { record: found.record.saturating_sub(before), ..found.clone() };
            pb::WorstRecord {
                set: set.name.clone(),
                file: files.as_ref().map(|files| files.name(file).to_owned()).unwrap_or_default(),
                row,
                found: Some(found.into()),
            }
        };
        set.worst.iter().map(record).collect()
    }

    /// Tells the state when it is another than before, and keeps the times of it.
    pub(super) fn tell_state(&mut self, now: Now) {
        let told = self.state();
        if self.times.told.as_ref() == Some(&told) {
            return;
        }
        let (state, reason) = told.clone();
        self.times.training = self.times.training(now);
        self.times.running_since = (state == JobState::Running).then_some(now.since_start);
        if self.is_ended() {
            self.times.ended = Some(now.since_start);
        }
        self.times.told = Some(told);
        self.changed = true;
        self.effects.push(Effect::Tell(state, reason.clone()));
        self.log.append(now.unix_ms, Event::State(pb::StateEvent { state: state.into(), reason }));
    }

    /// Tells how far the files are indexed, from time to time.
    pub(super) fn tell_indexed(&mut self, now: Now) {
        if let Some(news) = self.phase.indexing().and_then(|index| index.news()) {
            self.log.append(now.unix_ms, Event::Indexing(news));
        }
    }

    /// Returns everything that a user may ask.
    pub(crate) fn status(&self, now: Now) -> pb::JobStatus {
        let (state, reason) = self.state();
        let Self { times, numbers, .. } = self;
        let until = times.ended.unwrap_or(now.since_start);
        let crew = Some(&self.crew).filter(|_| !self.is_ended());
        let training = self.phase.training();
        let books = training.map(|training| &training.books);
        let ledger = numbers.ledger.as_ref();
        // Trained to its end, and then both the master and a ps died: nobody is left to ask, and
        // all of it is done.
        let whole = self.phase.end().is_some_and(|end| end.state == JobState::Succeeded);
        let facts = self.phase.facts();
        let records = facts.map_or(0, |facts| facts.measured(&self.spec));
        // A master that starts again before the join has all parts predicted again.
        let is_whole = whole && (self.delivery.is_some() || self.spec.purpose != Purpose::Predict);
        let records_done = match is_whole {
            true => records,
            false => training.map_or(0, super::Training::records_done),
        };
        let plan = facts.map(|facts| facts.plan).filter(|_| self.spec.purpose.trains());
        let whole = plan.filter(|_| whole);
        let delivered = self.delivery.zip(self.spec.predict.as_ref());
        let skipped = self.skips.records(DataSet::Train).len() as u64;
        let whole_samples = whole.map(|plan| plan.records.saturating_sub(skipped) * plan.epochs);
        pb::JobStatus {
            job: self.id.get(),
            name: self.name(),
            state: state.into(),
            reason,
            epochs: self.spec.epochs,
            steps: plan.map_or(0, |plan| plan.steps()),
            steps_done: ledger
                .map(|ledger| ledger.version)
                .or_else(|| training.map(|training| training.watermark().get()))
                .or_else(|| whole.map(|plan| plan.steps()))
                .unwrap_or(0),
            microbatches_applied: ledger
                .map(|ledger| ledger.microbatches_applied)
                .or_else(|| books.map(crate::dispatcher::Dispatcher::done))
                .or_else(|| whole.map(|plan| plan.microbatches()))
                .unwrap_or(0),
            samples_applied: ledger
                .map(|ledger| ledger.samples_applied)
                // Nobody told this start of the master what was skipped before.
                .or_else(|| whole_samples.filter(|_| skipped > 0))
                .or_else(|| training.map(|training| training.samples_done))
                .or(whole_samples)
                .unwrap_or(0),
            duplicates_dropped: ledger.map_or(0, |ledger| ledger.duplicates_dropped),
            overflows: ledger.map_or(0, |ledger| ledger.overflows),
            leases_expired: numbers.leases_expired,
            workers: crew.map_or(0, Crew::len),
            workers_seen: numbers.workers_seen() as u32,
            wall_ms: millis(times.earlier + until.saturating_sub(times.submitted)),
            training_ms: millis(times.training(now)),
            loss: training.and_then(|training| training.losses.newest()),
            final_metrics: numbers.final_metrics.clone(),
            artifacts: if self.is_ended() { self.output.clone() } else { Vec::new() },
            workers_standby: crew.map_or(0, Crew::standby),
            workers_min: self.control.demand.bounds().min,
            workers_max: self.control.demand.bounds().max,
            checkpoint: self
                .checkpoints
                .as_ref()
                .and_then(|checkpoints| checkpoints.newest)
                .map(Version::get),
            checkpoints: self
                .checkpoints
                .as_ref()
                .map(|checkpoints| checkpoints.place.to_string())
                .unwrap_or_default(),
            samples_before: numbers.samples_before,
            hangs: Vec::new(),
            idle: Vec::new(),
            devices: Vec::new(),
            numerics: self.numerics.iter().map(Into::into).collect(),
            data_wait: numbers.data_wait(),
            numerics_class: self.control.demand.class().cloned().map(Into::into),
            confusion: numbers.confusions.get("").cloned(),
            confusions: numbers.named_confusions(),
            worst: numbers.worst.clone(),
            selection: self.selection_message(),
            purpose: pb::JobPurpose::from(self.spec.purpose).into(),
            records,
            records_done,
            predictions: delivered.map(|(delivery, predict)| delivery.place(predict)).unwrap_or_default(),
            skipped: self.skipped(),
            indexing: match &self.phase {
                Phase::Indexing { index, .. } => Some(index.progress()),
                _ => None,
            },
        }
    }

    /// Returns what a worker needs to build its model and read its data.
    pub(crate) fn reply(&self, indexes: &Indexes) -> pb::JobReply {
        let facts = self.phase.facts();
        let mut bytes_left = KNOWN_BYTES_MAX;
        let index = facts.and_then(|_| self.phase.index());
        let [train_known, validation_known] = [false, true].map(|validation| {
            index.map(|index| index.known_files(validation, indexes, &mut bytes_left)).unwrap_or_default()
        });
        let placed = self.phase.partitions().filter(|partitions| partitions.open);
        pb::JobReply {
            spec_json: self.spec.to_json(),
            artifacts: self.input.clone(),
            train_records: facts.map(|facts| facts.train_records.clone()).unwrap_or_default(),
            validation_records: facts.map(|facts| facts.validation_records.clone()).unwrap_or_default(),
            placement: placed.map(super::Partitions::placement),
            label_max: facts.and_then(|facts| facts.label_max),
            train_bytes: facts.map(|facts| facts.train_bytes.clone()).unwrap_or_default(),
            validation_bytes: facts.map(|facts| facts.validation_bytes.clone()).unwrap_or_default(),
            train_versions: facts.map(|facts| facts.train_versions.clone()).unwrap_or_default(),
            validation_versions: facts.map(|facts| facts.validation_versions.clone()).unwrap_or_default(),
            skipped_train: self.skips.records(DataSet::Train),
            skipped_validation: self.skips.records(DataSet::Validation),
            parts: folder_of(self.times.submitted_unix_ms(), self.id),
            train_known,
            validation_known,
        }
    }
}

pub(super) fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}
