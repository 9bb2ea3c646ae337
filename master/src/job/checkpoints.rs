//! The checkpoints of a job: what its partitions have reported, when one is complete, and which one
//! the job goes on from. Pure.
//!
//! ```text
//!   ps: saved v400 [0]  saved v400 [1]  saved v400 [2] --> all of one era, and measured
//!                              |                                       |
//!                              v or: not saved                         v
//!                       a warning; v400 is none                    manifest
//!                              |                                       |
//!                              +-----------> reports taken <-----------+
//! ```
//!
//! A report is repeated by its ps until it is taken, so nothing of this needs the journal: after a
//! restart the reports come again, and what is complete lies on the store.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use proto::artifact::SCRIPT;
use proto::checkpoint::AppliedSteps;
use proto::checkpoint::manifest::{File, Manifest, Script, digest, oldest};
use proto::ids::{Era, IncarnationId, LeaseId, Step, Version};
use proto::numerics::{Numerics, Since};
use proto::pb;
use proto::pb::event::Kind as Event;
use proto::plan::Plan;
use proto::selection::Selection;
use proto::spec::{CheckpointSpec, JobSpec, Order};
use proto::status::Failure;
use store::location::Location;

use super::closing::Closing;
use super::end::{Salvage, failed};
use super::index::Facts;
use super::partitions::{Holder, NotRestored};
use super::phase::{Begin, Model};
use super::work::Work;
use super::{Effect, Job, Outcome, ended};
use crate::checkpoints::{Candidate, Candidates, Place, Probed};
use crate::clock::Now;

/// Versions of which reports are remembered at most.
const REPORTED_MAX: usize = 64;

/// What a job knows of its checkpoints.
#[derive(Debug)]
pub(super) struct Checkpoints {
    pub(super) spec: CheckpointSpec,
    pub(super) place: Place,
    /// Which training the checkpoints are of; `None` until the store was looked at for the first
    /// time.
    pub(super) run: Option<String>,
    /// How the job is to go on from an earlier run; `None` once it has begun.
    pub(super) resume: Option<Resume>,
    /// Versions that could not be restored.
    bad: BTreeSet<Version>,
    /// Why not, for people.
    reasons: Vec<String>,
    /// What was reported in this era.
    reported: BTreeMap<Version, Reported>,
    /// Reports of this era up to this version are not needed any more.
    settled: Version,
    /// The manifest that is being written: its era, version and the bytes that it names.
    pub(super) writing: Option<(Era, Version, u64)>,
    /// Newest that is complete, as far as this start of the master knows.
    pub(super) newest: Option<Version>,
    /// The last reason why one was not made, to tell it once.
    told: String,
    /// The store cannot be read, and users know it.
    unreadable: bool,
    /// Time of the next checkpoint that `every_seconds` asks for.
    pub(super) due: Option<Duration>,
    /// Steps ahead of what is handed out that it asks for.
    pub(super) margin: u64,
    /// The version at which the job is being closed.
    pub(super) closing: Option<Closing>,
    /// What it began with, or went on from at the last loss.
    pub(super) begun: Version,
}

/// How a job goes on from what an earlier run left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Resume {
    /// The job continues with the checkpoint's seed, order and records. At the end of an epoch they
    /// may differ.
    Alike,
    /// The job continues with its own seed, order and records.
    Anyway,
}

impl Resume {
    /// Converts the two flags of messages and records; `None`: the job begins anew.
    pub(crate) fn of(resume: bool, anyway: bool) -> Option<Self> {
        resume.then_some(if anyway { Self::Anyway } else { Self::Alike })
    }
}

#[derive(Debug, Default)]
struct Reported {
    files: BTreeMap<u32, File>,
    failed: bool,
}

impl Checkpoints {
    pub(super) fn new(spec: CheckpointSpec, job: &str) -> Self {
        let place = Place { url: spec.url.clone(), job: job.to_owned() };
        Self {
            spec,
            place,
            run: None,
            resume: None,
            bad: BTreeSet::new(),
            reasons: Vec::new(),
            reported: BTreeMap::new(),
            settled: Version(0),
            writing: None,
            newest: None,
            told: String::new(),
            unreadable: false,
            due: None,
            margin: 1,
            closing: None,
            begun: Version(0),
        }
    }

    /// Returns which version to begin with, by what the store has. `new_run` names the training
    /// when it is another than those there. The job must come to the version `best` again, so it
    /// begins with no newer one.
    ///
    /// # Errors
    /// Why the job cannot begin.
    fn begin(
        &mut self,
        candidates: &Candidates,
        new_run: String,
        best: Option<Version>,
    ) -> Result<Version, String> {
        let (place, newest) = (&self.place, candidates.intact.last());
        let run = match (&self.run, newest) {
            (Some(run), _) => run.clone(),
            (None, Some(Candidate { run, .. })) if self.resume.is_some() => run.clone(),
            (None, None) if self.resume.is_some() => {
                let damaged =
                    candidates.damaged.iter().map(|(_, what)| format!("; {what}")).collect::<String>();
                return Err(format!("nothing to resume from: no intact checkpoint in {place}{damaged}"));
            }
            (None, None) if candidates.damaged.is_empty() => new_run,
            (None, _) => {
                let newest = newest.map(|newest| format!(", the newest of version {}", newest.version));
                return Err(format!(
                    "{place} has checkpoints of an earlier run{}; go on from them with --resume, or remove them, or set another \
                     checkpoint.url or name",
                    newest.unwrap_or_default()
                ));
            }
        };
        let ours = candidates.intact.iter().rev().filter(|of| of.run == run).map(|of| of.version);
        let may_begin =
            |version: &Version| !self.bad.contains(version) && best.is_none_or(|best| *version <= best);
        let begin = ours.clone().find(may_begin).unwrap_or(Version(0));
        if self.resume.is_some() && begin == Version(0) {
            return Err(format!("no checkpoint in {place} can be restored: {}", self.reasons.join("; ")));
        }
        self.newest = self.newest.or(ours.max());
        self.run = Some(run);
        self.unreadable = false;
        Ok(begin)
    }

    /// Returns the selection that an earlier run left, if there is one. Each ps keeps its best
    /// version only if that is measured.
    ///
    /// # Errors
    /// The job does not come to the best version of that run again: why not.
    fn selection_of(
        &self,
        candidates: &Candidates,
        spec: &JobSpec,
        plan: Plan,
    ) -> Result<Option<Selection>, String> {
        let run = candidates.intact.last().map(|newest| &newest.run);
        let ours = candidates.intact.iter().filter(|of| Some(&of.run) == run);
        let good: Vec<_> = ours.filter(|of| !self.bad.contains(&of.version)).collect();
        let left = good.last().and_then(|of| of.selection.clone());
        let (Some(left), Some(criterion)) = (left, spec.criterion()) else { return Ok(None) };
        let (best, metric) = (left.best, left.criterion.metric.clone());
        let lost = |why: &str| {
            let of_before = format!("version {best}, the best one of the earlier run by {metric}");
            Err(format!("{of_before}, does not count any more: {why}; the selection begins anew"))
        };
        let Some(selection) = left.under(criterion) else {
            return lost("[early_stopping] has another metric, set or mode now");
        };
        if !spec.occasions(plan).is_some_and(|occasions| occasions.contains(best)) {
            return lost("[evaluation] does not measure it now");
        }
        if good.iter().all(|of| of.version > best) {
            return lost("every checkpoint is newer");
        }
        Ok(Some(selection))
    }

    /// Compares what the checkpoint to resume was trained with and what the job trains on; answers
    /// what to warn of.
    ///
    /// # Errors
    /// They differ within an epoch, so that some records would train more than once and others
    /// never.
    fn compare(
        &self,
        candidates: &Candidates,
        version: Version,
        facts: &Facts,
    ) -> Result<Option<String>, String> {
        let chosen = candidates.intact.iter().find(|candidate| candidate.version == version);
        let (Some(resume), Some(chosen)) = (self.resume, chosen) else { return Ok(None) };
        let (Some(was), Some(is)) = (&chosen.trained_on, &facts.trained_on) else {
            return Ok(Some(format!(
                "the checkpoint of version {version} does not say with which seed, order and data it was trained, because an \
                 older version wrote it; the job goes on as if with the same"
            )));
        };
        let differences = was.differences(is).join("; ");
        if differences.is_empty() {
            return Ok(None);
        }
        let epoch = chosen.plan.epochs_before(version).get() + 1;
        let other_numbers = Plan { epochs: 0, ..chosen.plan } != Plan { epochs: 0, ..facts.plan };
        if other_numbers {
            return Err(format!(
                "the checkpoint of version {version} was trained with other records or another batch, so the job cannot go on from \
                 it: {differences}; set these back, or begin anew with another name"
            ));
        }
        let what = format!(
            "the checkpoint of version {version} {} epoch {epoch}",
            match chosen.ends_epoch {
                true => "ends",
                false => "lies within",
            }
        );
        match (chosen.ends_epoch, resume) {
            (true, _) => Ok(Some(format!("{what}; the next epoch trains with others: {differences}"))),
            (false, Resume::Anyway) => Ok(Some(format!(
                "{what} and was trained with others, so some records of this epoch train more than once and others never: \
                 {differences}"
            ))),
            (false, Resume::Alike) => Err(format!(
                "{what} and was trained with others, so some records would train more than once and others never: {differences}; \
                 set these back, or go on all the same with --resume-anyway"
            )),
        }
    }

    /// Partitions are begun anew in another era: what was reported in the one before is void.
    pub(super) fn rewound(&mut self) {
        self.reported.clear();
        self.settled = Version(0);
    }

    /// Records that a version could not be restored.
    pub(super) fn cannot_restore(&mut self, version: Version, reason: String) {
        if self.bad.insert(version) {
            self.reasons.push(reason);
        }
    }

    fn reported(&mut self, version: Version) -> &mut Reported {
        while self.reported.len() >= REPORTED_MAX && !self.reported.contains_key(&version) {
            self.reported.pop_first();
        }
        self.reported.entry(version).or_default()
    }

    /// Returns whether reports of a version are of no more use.
    pub(super) fn is_settled(&self, version: Version) -> bool {
        version <= self.settled || self.reported.get(&version).is_some_and(|reported| reported.failed)
    }

    /// Records that a version could not be saved. Returns the warning, unless users had the same.
    fn fails(&mut self, version: Version, reason: &str) -> Option<Outcome> {
        self.reported(version).failed = true;
        let message = format!("no checkpoint of version {version}: {reason}; training goes on");
        (std::mem::replace(&mut self.told, reason.to_owned()) != reason).then(|| Outcome::warning(message))
    }

    /// Returns the oldest version that every partition has saved.
    fn complete(&self, partitions: usize) -> Option<Version> {
        let whole =
            |(_, reported): &(&Version, &Reported)| !reported.failed && reported.files.len() == partitions;
        let version = self.reported.iter().find(whole).map(|(&version, _)| version);
        version.filter(|_| self.writing.is_none())
    }
}

impl Checkpoints {
    /// Records that a partition's file lies on the store; answers whether that need not be told
    /// again.
    fn on_saved(&mut self, now: Now, seen: &Seen<'_>, saved: &pb::SavedPartition) -> (bool, Vec<Outcome>) {
        let version = Version(saved.version);
        if saved.era != seen.era.get() || self.is_settled(version) {
            return (true, Vec::new());
        }
        let applied = AppliedSteps {
            watermark: Step(saved.watermark),
            above: saved.applied_above.iter().copied().map(Step).collect(),
            samples_skipped: saved.samples_skipped,
            overflows: saved.overflows,
        };
        let named = proto::convert::artifact_name(&saved.file).is_ok();
        let partition = saved.partition < seen.spec.fleet.ps;
        if !named || !partition || !applied.is_valid(version, seen.model.facts.plan.steps()) {
            let warning = self.fails(version, &format!("partition {} reports nonsense", saved.partition));
            return (true, warning.into_iter().collect());
        }
        let file = File { name: saved.file.clone(), bytes: saved.bytes, crc32c: saved.crc32c, applied };
        self.reported(version).files.insert(saved.partition, file);
        (false, self.maybe_publish(now, seen))
    }

    /// Records that a partition of this era could not be saved.
    fn on_save_failed(&mut self, failed: &pb::SaveFailed) -> Vec<Outcome> {
        let version = Version(failed.version);
        if self.is_settled(version) {
            return Vec::new();
        }
        let warning = self.fails(version, &format!("partition {}: {}", failed.partition, failed.message));
        warning.into_iter().collect()
    }

    /// Writes the manifest of what is complete. Not before every older version is measured that is
    /// to be: after a restore from there, its weights would be gone.
    fn maybe_publish(&mut self, now: Now, seen: &Seen<'_>) -> Vec<Outcome> {
        let complete = self.complete(seen.spec.fleet.ps as usize);
        let complete = complete.filter(|&version| seen.is_measured_before(version));
        let (Some(version), Some(run)) = (complete, &self.run) else { return Vec::new() };
        let files = self.reported[&version].files.values().cloned().collect();
        let manifest = seen.manifest(now, run, self.begun, version, files);
        let bytes = manifest.files.iter().map(|file| file.bytes).sum();
        self.writing = Some((seen.era, version, bytes));
        let publish = Effect::Publish(self.place.clone(), Box::new(manifest), self.spec.keep);
        vec![Outcome::Effect(publish)]
    }

    /// Records that the manifest is written, or cannot be.
    fn on_published(&mut self, now: Now, seen: &Seen<'_>, written: Result<(), String>) -> Vec<Outcome> {
        let Some((era, version, bytes)) = self.writing.take() else { return Vec::new() };
        let mut outcomes = Vec::new();
        match written {
            Ok(()) => {
                if era == seen.era {
                    self.settled = version;
                    self.reported = self.reported.split_off(&version.next());
                }
                self.newest = Some(version);
                self.bad.remove(&version);
                self.due = self.spec.every_seconds.map(|every| now.since_start + Duration::from_secs(every));
                let event = pb::CheckpointEvent { version: version.get(), bytes };
                outcomes.push(Outcome::Event(Event::Checkpoint(event)));
            }
            Err(reason) => outcomes.extend(self.fails(version, &reason)),
        }
        outcomes.extend(self.maybe_publish(now, seen));
        outcomes
    }
}

/// The parts of a job that its checkpoints depend on.
#[derive(Debug)]
pub(super) struct Seen<'a> {
    spec: &'a JobSpec,
    input: &'a [pb::Artifact],
    pub(super) model: &'a Model,
    era: Era,
    numerics: &'a [Since],
    /// Class of the job, `None` before it is decided.
    class: Option<&'a Numerics>,
    measured: Option<Version>,
    selection: Option<&'a Selection>,
}

impl Seen<'_> {
    /// Returns the classes that computed the job, which began with the version `begun`. The history
    /// is empty if the master was killed before its journal had the first class. The class of the
    /// job computed all versions then.
    fn classes(&self, begun: Version) -> Vec<Since> {
        let first = || self.class.map(|class| Since { version: begun, numerics: class.clone() });
        if self.numerics.is_empty() { first().into_iter().collect() } else { self.numerics.to_vec() }
    }

    fn is_measured_before(&self, version: Version) -> bool {
        is_measured_before(self.spec, &self.model.facts, self.measured, version)
    }

    fn manifest(&self, now: Now, run: &str, begun: Version, version: Version, files: Vec<File>) -> Manifest {
        let Self { spec, model: Model { facts, partitions, .. }, .. } = self;
        let consistency = spec.consistency.resolve();
        let slots = spec.optimizer.validate().map(|rule| rule.slot_names()).unwrap_or_default();
        Manifest {
            job: spec.name.clone(),
            run: run.to_owned(),
            digest: digest(spec),
            version,
            oldest: oldest(consistency.order, consistency.delay, version),
            era: self.era,
            order: consistency.order,
            plan: facts.plan,
            tensors: partitions.tensors().to_vec(),
            optimizer: spec.optimizer.kind,
            slots: slots.iter().map(ToString::to_string).collect(),
            files,
            script: spec.model.script.is_some().then(|| script(self.input)).flatten(),
            numerics: self.classes(begun).into_iter().filter(|since| since.version <= version).collect(),
            trained_on: facts.trained_on.clone(),
            selection: self.selection.cloned(),
            created_unix_secs: now.unix_ms / 1000,
        }
    }
}

/// Returns whether every older version is measured that is to be. All up to `measured` are.
fn is_measured_before(spec: &JobSpec, facts: &Facts, measured: Option<Version>, version: Version) -> bool {
    let last = spec.occasions(facts.plan).and_then(|occasions| occasions.before(version));
    last.is_none_or(|last| measured.is_some_and(|measured| measured >= last))
}

impl Job {
    /// Makes the job go on from the checkpoints of an earlier run.
    pub(crate) fn resume_run(&mut self, resume: Resume) {
        self.checkpoints.iter_mut().for_each(|checkpoints| checkpoints.resume = Some(resume));
    }

    /// Returns whether its checkpoints would mix with those of a job of this specification.
    pub(crate) fn saves_like(&self, spec: &JobSpec) -> bool {
        let place = |spec: &JobSpec| Location::of(&spec.checkpoint.as_ref()?.url).ok();
        self.spec.name == spec.name && place(&self.spec).is_some_and(|ours| place(spec) == Some(ours))
    }

    // What partitions report.

    /// Returns whether the process `ps` called `name` holds a partition, and so may report of it.
    pub(crate) fn holder(&self, partition: u32, ps: IncarnationId, name: &str) -> Holder {
        self.phase.partitions().map_or(Holder::Another, |partitions| partitions.holder(partition, ps, name))
    }

    /// Records that a partition's file lies on the store; answers whether that need not be told
    /// again.
    pub(crate) fn on_saved(&mut self, now: Now, saved: &pb::SavedPartition) -> bool {
        let Some((checkpoints, seen)) = self.checkpoints_seen() else { return true };
        let (taken, effects) = checkpoints.on_saved(now, &seen, saved);
        self.take_up(now, effects);
        taken
    }

    /// Records that a partition could not be saved; always taken.
    pub(crate) fn on_save_failed(&mut self, now: Now, failed: &pb::SaveFailed) {
        let era = self.era;
        let Some(checkpoints) = self.checkpoints.as_mut().filter(|_| failed.era == era.get()) else { return };
        let effects = checkpoints.on_save_failed(failed);
        self.take_up(now, effects);
        self.maybe_saved(now);
    }

    /// Writes the manifest of what is complete.
    pub(super) fn maybe_publish(&mut self, now: Now) {
        let Some((checkpoints, seen)) = self.checkpoints_seen() else { return };
        let effects = checkpoints.maybe_publish(now, &seen);
        self.take_up(now, effects);
    }

    /// Returns whether every older version is measured that is to be.
    pub(super) fn is_measured_before(&self, version: Version) -> bool {
        let facts = self.phase.facts();
        facts.is_none_or(|facts| is_measured_before(&self.spec, facts, self.measured, version))
    }

    /// Records that the manifest is written, or cannot be.
    pub(crate) fn on_published(&mut self, now: Now, written: Result<(), String>) {
        if self.is_ended() {
            return;
        }
        let Some((checkpoints, seen)) = self.checkpoints_seen() else { return };
        let effects = checkpoints.on_published(now, &seen, written);
        self.take_up(now, effects);
        self.maybe_saved(now);
    }

    /// Returns the checkpoints of a job that saves some, and what they see of the job.
    pub(super) fn checkpoints_seen(&mut self) -> Option<(&mut Checkpoints, Seen<'_>)> {
        let seen = Seen {
            spec: &self.spec,
            input: &self.input,
            model: self.phase.model()?,
            era: self.era,
            numerics: &self.numerics,
            class: self.control.demand.class(),
            measured: self.measured,
            selection: self.selection.as_ref(),
        };
        Some((self.checkpoints.as_mut()?, seen))
    }

    // The beginning, and every beginning after a loss.

    /// Returns where its checkpoints shall lie.
    pub(crate) fn place(&self) -> Option<Place> {
        self.checkpoints.as_ref().map(|checkpoints| checkpoints.place.clone())
    }

    /// Checks whether the ps that are to hold the model see the store that the master sees. A job
    /// whose checkpoints nobody could restore does not begin, nor does it go on from version 0
    /// because a new ps cannot find them.
    ///
    /// # Errors
    /// They do not: the job has failed.
    pub(crate) fn on_probed(&mut self, now: Now, lease: LeaseId, probed: Probed) -> Result<(), Failure> {
        match probed {
            Probed::Shared => Ok(()),
            Probed::Apart(reason) => {
                self.stop(now, failed(reason), Salvage::Nothing);
                Err(ended(lease))
            }
            Probed::Unclear(reason) => {
                let told = self.checkpoints.as_mut().map(|checkpoints| &mut checkpoints.told);
                if told.is_some_and(|told| std::mem::replace(told, reason.clone()) != reason) {
                    let message = format!(
                        "it is not known whether all ps and the master see one store: {reason}; training goes on"
                    );
                    self.warn(now, message);
                }
                Ok(())
            }
        }
    }

    /// Decides what the fresh partitions begin with; false when the store is asked first.
    pub(super) fn decide_beginning(&mut self) -> bool {
        let Some(partitions) = self.phase.partitions_mut() else { return false };
        match &self.checkpoints {
            Some(checkpoints) if partitions.undecided() => {
                self.effects.push(Effect::Look(checkpoints.place.clone()));
                false
            }
            _ => {
                partitions.decide(Version(0));
                true
            }
        }
    }

    /// Records that the store has said which checkpoints there are.
    pub(crate) fn on_found(&mut self, now: Now, found: Result<Candidates, proto::checkpoint::Error>) {
        let looking = self.phase.begins() == Some(Begin::Initializing) && self.queue.is_empty();
        let (Some(checkpoints), Some(Model { facts, partitions, .. })) =
            (&mut self.checkpoints, self.phase.model_mut())
        else {
            return;
        };
        if !looking || !partitions.undecided() {
            return;
        }
        let (mut damaged, mut history) = (Vec::new(), None);
        let begin = match found {
            Ok(mut candidates) => {
                let new_run =
                    format!("{:016x}", proto::random::key(now.unix_ms, &self.spec.name, self.id.get()));
                if checkpoints.resume.is_some() {
                    let left = checkpoints.selection_of(&candidates, &self.spec, facts.plan);
                    self.selection = left.unwrap_or_else(|lost| {
                        damaged.push(lost);
                        None
                    });
                }
                let best = self.selection.as_ref().map(|selection| selection.best);
                let begin = checkpoints.begin(&candidates, new_run, best);
                let newer =
                    |(version, _): &(Version, String)| begin.as_ref().is_ok_and(|begin| begin < version);
                damaged.extend(
                    candidates.damaged.iter().filter(|damaged| newer(damaged)).map(|(_, what)| what.clone()),
                );
                let version = begin.as_ref().ok().filter(|_| checkpoints.resume.is_some());
                history = version.and_then(|version| candidates.numerics.remove(version));
                begin.and_then(|version| {
                    damaged.extend(checkpoints.compare(&candidates, version, facts)?);
                    Ok(version)
                })
            }
            // Nothing is begun, or could be restored otherwise: a user must look at it, now or
            // before anything is lost.
            Err(error) if checkpoints.run.is_none() || !error.is_retryable() => Err(error.to_string()),
            Err(error) => {
                let place = checkpoints.place.clone();
                let told = std::mem::replace(&mut checkpoints.unreadable, true);
                self.effects.push(Effect::Look(place));
                if !told {
                    self.warn(
                        now,
                        format!("the checkpoints cannot be read: {error}; training waits for the store"),
                    );
                }
                return;
            }
        };
        match begin {
            Ok(version) => {
                partitions.decide(version);
                damaged.into_iter().for_each(|damaged| self.warn(now, damaged));
                self.changed = true;
                self.tell_beginning(now, version);
                self.queue.push(Work::Init);
                history.into_iter().for_each(|history| self.take_over_classes(history));
                self.unscheduled = true;
                self.tell_state(now);
            }
            Err(reason) => self.stop(now, failed(reason), Salvage::Nothing),
        }
    }

    fn tell_beginning(&mut self, now: Now, version: Version) {
        let canonical = self.spec.consistency.resolve().order == Order::Canonical;
        let begun = self.era > Era(0) || self.phase.training().is_some();
        let (era, checkpoint) = (self.era, format!("the checkpoint of version {version}"));
        let message = match (version, canonical || !begun) {
            (Version(0), _) if !begun => return,
            (Version(0), true) => {
                format!("no checkpoint, so training starts again from version 0 (era {era})")
            }
            (Version(0), false) => "no checkpoint, so that part is trained again from version 0".to_owned(),
            (_, true) => format!("training goes on from {checkpoint} (era {era})"),
            (_, false) => format!("that part is trained again from {checkpoint}"),
        };
        self.warn(now, message);
        if canonical && begun {
            self.tell_rewind(now, version);
        }
    }

    /// Partitions could not load their checkpoint: an older one, or version 0 in the end.
    pub(super) fn on_restore_failed(&mut self, now: Now, failed: Vec<NotRestored>) {
        let canonical = self.spec.consistency.resolve().order == Order::Canonical;
        let (Some(checkpoints), Some(partitions)) = (&mut self.checkpoints, self.phase.partitions_mut())
        else {
            return;
        };
        let mut told = BTreeMap::new();
        for failed in failed {
            checkpoints.cannot_restore(failed.version, failed.reason.clone());
            partitions.begin_again(failed.partition);
            told.entry(failed.version).or_insert(failed.reason);
        }
        if canonical {
            // The others may have it already, and cannot go back to an older one within an era.
            self.era = self.era.next();
            partitions.lose(|_| true);
            checkpoints.rewound();
        }
        for (version, reason) in told {
            self.warn(now, format!("the checkpoint of version {version} cannot be restored: {reason}"));
        }
        self.initialize(now);
    }

    /// Records the version with which training begins. An earlier run measured what is older than a
    /// restored version.
    pub(super) fn on_begun(&mut self, begun: Option<Version>) {
        let (Some(version), Some(facts)) = (begun, self.phase.facts()) else { return };
        let older = self.spec.occasions(facts.plan).and_then(|occasions| occasions.before(version));
        self.measured = self.measured.max(older);
        if let Some(checkpoints) = &mut self.checkpoints {
            checkpoints.resume = None;
            checkpoints.begun = version;
            checkpoints.reasons.clear();
        }
    }
}

/// Returns the job's module among the files that it came with.
fn script(input: &[pb::Artifact]) -> Option<Script> {
    let script = input.iter().find(|artifact| artifact.name == SCRIPT)?;
    Some(Script { bytes: script.size, sha256: script.sha256.clone() })
}
