//! What of a job is written down, and how a job is made of it after a restart of the master. Pure.
//!
//! A job that had ended is no [`Job`] any more (`ended`). One that had not begun to train begins
//! anew, which is deterministic. One that trained asks the ps for their ledgers, like after any
//! other loss (`recovery`): nothing is rewound, and what the workers hold of the master before is
//! leased again, where it is not done. One whose model is exported only ends.

use std::sync::Arc;

use proto::ids::{Epoch, Era, JobId, Version};
use proto::numerics::Since;
use proto::pb;
use proto::pb::JobState;
use proto::spec::{DataSet, JobSpec};

use super::checkpoints::Resume;
use super::end::End;
use super::index::Index;
use super::partitions::Partitions;
use super::phase::{Begin, Phase};
use super::predictions::Delivery;
use super::status::millis;
use super::{Job, Settings};
use crate::clock::Now;
use crate::events::EventLog;
use crate::membership::Membership;

impl Job {
    /// Returns what is to be written down, when there is news since the last call.
    pub(crate) fn take_record(&mut self, now: Now) -> Option<pb::JobRecord> {
        std::mem::take(&mut self.changed).then(|| self.record(now))
    }

    fn record(&self, now: Now) -> pb::JobRecord {
        if self.is_ended() {
            return self.ended_record(now);
        }
        let (train, validation) = self.phase.index().and_then(Index::found).unwrap_or_default();
        let placed = self.phase.partitions().filter(|partitions| partitions.number() > 0);
        let resume = self.checkpoints.as_ref().and_then(|checkpoints| checkpoints.resume);
        let ending = self.phase.end();
        pb::JobRecord {
            job: self.id.get(),
            spec_json: self.spec.to_json(),
            input: self.input.clone(),
            submitted_unix_ms: self.times.submitted_unix_ms(),
            train,
            validation,
            placement: placed.map(Partitions::placement),
            fresh: placed.map(Partitions::fresh).unwrap_or_default(),
            era: self.era.get(),
            epochs_measured: 0,
            measured: self.measured.map(Version::get),
            selection: self.selection_message(),
            final_metrics: self.numbers.final_metrics.clone(),
            leases_expired: self.numbers.leases_expired,
            workers_seen: self.numbers.workers_seen(),
            training_ms: millis(self.times.training(now)),
            ending: ending.map(|end| pb::Ending { state: end.state.into(), reason: end.reason.clone() }),
            ended: None,
            paused: self.control.is_paused(),
            scaled_to: self.control.demand.scaled_to(),
            run: self
                .checkpoints
                .as_ref()
                .and_then(|checkpoints| checkpoints.run.clone())
                .unwrap_or_default(),
            resume: resume.is_some(),
            resume_anyway: resume == Some(Resume::Anyway),
            begin: placed.map(Partitions::begin).unwrap_or_default(),
            samples_before: self.numbers.samples_before,
            owner: self.owner.clone(),
            output: self.output.clone(),
            numerics: self.numerics.iter().map(Into::into).collect(),
            numerics_class: self.control.demand.class().cloned().map(Into::into),
            confusion: self.numbers.confusions.get("").cloned(),
            confusions: self.numbers.named_confusions(),
            worst: self.numbers.worst.clone(),
            delivery: Delivery::recorded(self.delivery).into(),
            skipped_train: self.skips.record(DataSet::Train),
            skipped_validation: self.skips.record(DataSet::Validation),
        }
    }

    /// Returns what is kept of a job that has ended.
    fn ended_record(&self, now: Now) -> pb::JobRecord {
        pb::JobRecord {
            job: self.id.get(),
            spec_json: self.spec.to_json(),
            submitted_unix_ms: self.times.submitted_unix_ms(),
            owner: self.owner.clone(),
            ended: Some(self.status(now)),
            ..Default::default()
        }
    }

    /// Returns the job of a record that has not ended, with its newest events.
    ///
    /// # Errors
    /// The record does not fit together; what does not.
    pub(crate) fn restore(
        record: pb::JobRecord,
        log: EventLog,
        settings: Settings,
        now: Now,
    ) -> Result<Self, String> {
        let spec = JobSpec::from_json(&record.spec_json).map_err(|error| error.to_string())?;
        let delivery = Delivery::of(record.delivery());
        let mut job = Self::new(JobId(record.job), spec, record.input, settings, now);
        // No process has registered yet.
        job.control.on_look(job.lacks(&Membership::nobody()));
        job.log = log;
        job.owner = record.owner;
        job.times = super::status::Times::restored(now, record.submitted_unix_ms, record.training_ms);
        job.numbers.restore(record.leases_expired, record.workers_seen, record.final_metrics);
        job.numbers.samples_before = record.samples_before;
        job.numbers.worst = record.worst;
        job.numbers.confusions = record.confusions;
        job.numbers.confusions.extend(record.confusion.map(|matrix| (String::new(), matrix)));
        job.skips.restore(record.skipped_train, record.skipped_validation);
        job.era = Era(record.era);
        job.measured = record.measured.map(Version);
        job.selection = record.selection.map(super::selection::read);
        if let Some(end) = record.ending {
            job.phase.decide(End { state: end.state(), reason: end.reason });
        }
        job.control.set_paused(record.paused);
        job.output = record.output;
        job.delivery = delivery;
        if let Some(checkpoints) = &mut job.checkpoints {
            checkpoints.run = Some(record.run).filter(|run| !run.is_empty());
            checkpoints.resume = Resume::of(record.resume, record.resume_anyway);
        }
        let wrong = |error: proto::Error| error.to_string();
        let history = record.numerics.into_iter().map(Since::try_from).collect::<Result<_, _>>();
        job.numerics = history.map_err(wrong)?;
        if let Some(class) = record.numerics_class {
            job.control.demand.set_class(Arc::new(class.try_into().map_err(wrong)?));
        }
        record.scaled_to.into_iter().for_each(|workers| job.control.demand.scale(workers));
        let mut facts = None;
        if let Phase::Indexing { index, .. } = &mut job.phase
            && index.restore(record.train, record.validation)
        {
            facts = Some(index.facts(&job.spec)?);
        }
        if let Some(facts) = facts {
            if let Some(last) = record.epochs_measured.checked_sub(1) {
                job.measured = job.measured.or(Some(match job.spec.purpose.trains() {
                    true => facts.plan.version_after(Epoch(last)),
                    false => Version(0),
                }));
            }
            job.queue.clear();
            let trained = record.placement.is_some() && record.fresh.iter().all(|fresh| !fresh);
            let partitions = match record.placement {
                Some(placement) => Partitions::restore(placement, &record.fresh, &record.begin)
                    .map_err(|error| error.to_string())?,
                None => Partitions::new(Vec::new(), job.spec.fleet.ps),
            };
            job.phase.on_indexed(facts, partitions);
            match trained {
                true => {
                    job.phase.set_begin(Begin::Surveying { asked: false });
                    let message = "the master was started again; the ps are asked what is trained";
                    job.warn(now, message.to_owned());
                }
                false => job.initialize(now),
            }
        }
        Ok(job)
    }

    /// Returns whether it was decided before it trained to its end.
    pub(crate) fn ends_early(&self) -> bool {
        self.phase.end().is_some_and(|end| end.state != JobState::Succeeded)
    }
}
