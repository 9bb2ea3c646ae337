//! Jobs with checkpoints: what completes one, what a job goes on from, and how it ends with one.

use proto::checkpoint::manifest::Manifest;
use proto::checkpoint::trained_on::TrainedOn;

use super::*;
use crate::checkpoints::{Candidate, Candidates, Place};

const EVERY_STEP: &str = "\n[checkpoint]\nurl = \"memory://ck\"\nevery_steps = 1\n";

fn candidates(intact: &[(u64, &str)]) -> Candidates {
    let candidate = |&(version, run): &(u64, &str)| Candidate {
        version: Version(version),
        run: run.to_owned(),
        plan: parse(EVERY_STEP).plan(10),
        ends_epoch: false,
        trained_on: None,
        selection: None,
    };
    Candidates { intact: intact.iter().map(candidate).collect(), ..Candidates::default() }
}

fn saved(report: u64, era: u64, version: u64) -> pb::SavedPartition {
    let file = format!("file-{version}");
    let (job, bytes, watermark) = (1, 100, version);
    pb::SavedPartition { report, job, era, version, file, bytes, watermark, ..Default::default() }
}

impl World {
    /// Creates a job that saves, up to where the store is looked at.
    fn saving(resume: bool) -> Self {
        let mut world = Self::new(parse(EVERY_STEP), 1, &["p"]);
        if resume {
            world.job.resume_run(Resume::Alike);
        }
        world.index();
        world
    }

    /// The store is asked, and has these.
    fn found(&mut self, intact: &[(u64, &str)]) {
        let look = Effect::Look(Place { url: "memory://ck".to_owned(), job: "digits".to_owned() });
        let effects = self.effects();
        assert!(effects.contains(&look), "the store is not looked at: {effects:?}");
        self.job.on_found(self.now, Ok(candidates(intact)));
    }

    /// A worker describes the model; answers what the partition is opened with.
    fn open(&mut self) -> Option<pb::Restore> {
        let lease = self.lease(0).expect("a model to describe");
        let open = self.describe(&lease);
        self.complete(0, &lease, Report::Initialized(pb::Initialized::default()));
        open[0].1.restore.clone()
    }

    /// Returns the run that the job is of.
    fn run(&self) -> String {
        self.job.checkpoints.as_ref().and_then(|checkpoints| checkpoints.run.clone()).expect("it has begun")
    }

    fn manifest(&mut self) -> Option<Manifest> {
        let published = |effect| match effect {
            Effect::Publish(_, manifest, keep) => Some((*manifest, keep)),
            _ => None,
        };
        let (manifest, keep) = self.effects().into_iter().find_map(published)?;
        assert_eq!(keep, 3);
        Some(manifest)
    }

    fn was_warned(&self, words: &str) -> bool {
        self.events()
            .iter()
            .any(|event| matches!(event, Event::Warning(warning) if warning.message.contains(words)))
    }

    /// The ps says that it cannot load the checkpoint.
    fn not_restored(&mut self, reason: &str) {
        let asked = self.effects().into_iter().rev().find_map(|effect| match effect {
            Effect::Ask(placement, _) => Some(placement),
            _ => None,
        });
        let ledger = pb::PartitionLedger {
            era: self.job.era.get(),
            restore_error: reason.to_owned(),
            ..Default::default()
        };
        self.job.on_ledgers(self.now, asked.expect("the ps is asked"), Ok(vec![ledger]));
    }
}

#[test]
fn a_checkpoint_is_complete_when_its_manifest_is_written_and_then_the_reports_are_taken() {
    let mut world = World::saving(false);
    world.found(&[]);
    assert_eq!(world.open(), None);
    world.survey(&[0]);
    assert!(!world.job.on_saved(world.now, &saved(1, 0, 1)), "it is kept until the manifest is there");
    let manifest = world.manifest().expect("complete");
    assert_eq!((manifest.version, manifest.run, manifest.files.len()), (Version(1), world.run(), 1));
    assert!(!world.job.on_saved(world.now, &saved(1, 0, 1)));
    assert_eq!(world.manifest(), None, "once");
    world.job.on_published(world.now, Ok(()));
    assert!(world.job.on_saved(world.now, &saved(1, 0, 1)));
    assert!(world.events().contains(&Event::Checkpoint(pb::CheckpointEvent { version: 1, bytes: 100 })));
    assert_eq!(world.status().checkpoint, Some(1));
    assert!(world.job.on_saved(world.now, &saved(2, 7, 2)), "of another era");
}

#[test]
fn a_checkpoint_waits_for_the_last_partition() {
    let spec = parse(&format!("{EVERY_STEP}[fleet]\nps = 2\n"));
    let mut world = World::new(spec, 1, &["p", "q"]);
    world.index();
    world.found(&[]);
    world.open();
    world.survey(&[0, 0]);
    let of_second = |report| pb::SavedPartition { partition: 1, ..saved(report, 0, 1) };
    for report in [1, 2] {
        assert!(!world.job.on_saved(world.now, &of_second(report)));
        assert_eq!(world.manifest(), None, "one of two partitions is saved");
    }
    assert!(!world.job.on_saved(world.now, &saved(1, 0, 1)));
    assert_eq!(world.manifest().expect("complete").files.len(), 2);
}

#[test]
fn a_version_that_one_partition_could_not_save_is_given_up_and_told_once() {
    let mut world = World::saving(false);
    world.found(&[]);
    world.open();
    world.survey(&[0]);
    let failed = |version| pb::SaveFailed { version, message: "disk full".to_owned(), ..Default::default() };
    for version in [1, 4] {
        world.job.on_save_failed(world.now, &failed(version));
        assert!(world.job.on_saved(world.now, &saved(9, 0, version)), "its report is of no use");
    }
    let told = world.events().into_iter().filter(|event| matches!(event, Event::Warning(_))).count();
    assert_eq!(told, 1);
    world.job.on_saved(world.now, &saved(3, 0, 2));
    assert!(world.manifest().is_some());
    world.job.on_published(world.now, Err("no space".to_owned()));
    assert!(world.was_warned("no checkpoint of version 2: no space"));
}

#[test]
fn a_checkpoint_waits_until_all_that_is_older_is_measured() {
    let mut world = World::saving(false);
    world.found(&[]);
    world.open();
    world.survey(&[0]);
    let mut measure = None;
    while measure.is_none() {
        let lease = world.lease(0).expect("work");
        match lease.work {
            Some(pb::lease::Work::Evaluate(_)) => measure = Some(lease),
            _ => world.complete(0, &lease, report(&lease)),
        }
    }
    world.job.on_saved(world.now, &saved(1, 0, 2));
    assert!(world.manifest().is_some(), "the weights of version 2 are in it");
    world.job.on_published(world.now, Ok(()));
    world.job.on_saved(world.now, &saved(2, 0, 3));
    assert_eq!(world.manifest(), None, "with it, version 2 could not be measured any more");
    world.complete(
        0,
        &measure.expect("seen"),
        Report::Evaluated(pb::Evaluated {
            loss_sum: 3.0,
            samples: 2,
            metric_sums: BTreeMap::from([("accuracy".to_owned(), 1.0)]),
            ..pb::Evaluated::default()
        }),
    );
    assert_eq!(world.manifest().map(|manifest| manifest.version), Some(Version(3)));
}

#[test]
fn checkpoints_of_an_earlier_run_are_neither_mixed_nor_lost() {
    let mut world = World::saving(false);
    world.found(&[(2, "other")]);
    assert_eq!(world.state(), JobState::Failed);
    assert!(
        world.reason().contains("the newest of version 2; go on from them with --resume"),
        "{}",
        world.reason()
    );
}

#[test]
fn a_job_resumes_from_the_newest_checkpoint_and_its_run_goes_on() {
    let mut world = World::saving(true);
    world.found(&[(1, "older"), (2, "before"), (3, "before")]);
    let restore = world.open().expect("a checkpoint");
    assert_eq!((restore.url.as_str(), restore.version), ("memory://ck/digits/v0000000003", 3));
    assert_eq!(world.run(), "before");
    world.survey(&[3]);
    assert_eq!((world.state(), world.status().steps_done), (JobState::Running, 3));
    world.work();
    let status = world.status();
    assert_eq!((status.samples_before, status.samples_applied), (12, 16), "of 4 steps of 4 it trained one");
    let measured = |event: &Event| matches!(event, Event::Evaluation(_));
    assert_eq!(world.events().into_iter().filter(measured).count(), 1, "the first epoch was measured before");
}

#[test]
fn with_another_seed_a_job_resumes_where_an_epoch_ends_or_when_it_is_forced() {
    for (ends_epoch, resume, said) in [
        (false, Resume::Alike, Err("lies within epoch 2")),
        (false, Resume::Anyway, Ok("lies within epoch 2")),
        (true, Resume::Alike, Ok("ends epoch 2")),
    ] {
        let mut world = World::new(parse(EVERY_STEP), 1, &["p"]);
        world.job.resume_run(resume);
        world.index();
        let facts = world.job.phase.facts().expect("its files are indexed");
        let (plan, trained_on) = (facts.plan, facts.trained_on.clone().expect("with checksums"));
        let mut found = candidates(&[(4, "before")]);
        found.intact[0].trained_on = Some(TrainedOn { seed: 99, ..trained_on });
        (found.intact[0].plan, found.intact[0].ends_epoch) = (plan, ends_epoch);
        world.job.on_found(world.now, Ok(found));
        match said {
            Ok(said) => {
                assert!(world.was_warned(said) && world.was_warned("seed: 99 in the checkpoint"), "{said}");
                assert_eq!(world.open().map(|restore| restore.version), Some(4));
            }
            Err(said) => {
                let reason = world.reason();
                assert!(reason.contains(said) && reason.contains("seed: 99 in the checkpoint"), "{reason}");
                assert!(reason.contains("--resume-anyway"), "{reason}");
            }
        }
    }
}

#[test]
fn a_job_that_cannot_resume_says_why() {
    let mut world = World::saving(true);
    world.found(&[]);
    assert_eq!(world.state(), JobState::Failed);
    assert!(world.reason().contains("nothing to resume from"), "{}", world.reason());
    let mut world = World::saving(true);
    world.found(&[(3, "before")]);
    world.open();
    world.not_restored("it has another tensor");
    world.found(&[(3, "before")]);
    world.job.on_finished(world.now, Ok(vec![]));
    assert_eq!(world.state(), JobState::Failed);
    assert!(world.reason().contains("it has another tensor"), "{}", world.reason());
}

#[test]
fn a_lost_ps_brings_the_newest_checkpoint_back_then_an_older_one_then_version_0() {
    let mut world = World::saving(false);
    world.found(&[]);
    world.open();
    world.survey(&[0]);
    let run = world.run();
    let both = [(1, run.as_str()), (2, run.as_str())];
    world.restart("p");
    world.found(&both);
    assert_eq!(world.open().map(|restore| restore.version), Some(2));
    assert!(world.was_warned("training goes on from the checkpoint of version 2 (era 1)"));
    world.not_restored("torn");
    assert!(world.was_warned("the checkpoint of version 2 cannot be restored: torn"));
    world.found(&both);
    assert_eq!((world.job.era, world.open().map(|restore| restore.version)), (Era(2), Some(1)));
    world.not_restored("torn too");
    world.found(&both);
    assert_eq!((world.job.era, world.open()), (Era(3), None));
    world.survey(&[0]);
    assert_eq!(world.state(), JobState::Running, "{}", world.reason());
}

#[test]
fn a_store_that_cannot_be_read_is_waited_for_once_there_is_something_to_lose() {
    let unreadable = || {
        Err(proto::checkpoint::Error::Store { what: "list", file: "x".to_owned(), reason: "down".to_owned() })
    };
    let mut world = World::saving(false);
    world.job.on_found(world.now, unreadable());
    assert_eq!(world.state(), JobState::Failed, "nothing is begun");
    let mut world = World::saving(false);
    world.found(&[]);
    world.open();
    world.survey(&[0]);
    world.restart("p");
    world.job.on_found(world.now, unreadable());
    assert!(world.was_warned("training waits for the store"));
    let run = world.run();
    world.found(&[(2, &run)]);
    assert_eq!(world.open().map(|restore| restore.version), Some(2));
}

#[test]
fn a_cancelled_job_finishes_what_is_begun_and_ends_with_a_checkpoint_of_it() {
    let mut spec = parse(EVERY_STEP);
    (spec.epochs, spec.data.validation_fraction) = (20, None);
    let mut world = World::new(spec, 1, &["p"]);
    world.index();
    world.found(&[]);
    world.open();
    world.survey(&[0]);
    let held = world.lease(0).expect("work");
    world.job.cancel(world.now, false);
    let effects = world.effects();
    let version = effects.iter().find_map(|effect| match effect {
        Effect::Save(_, version) => Some(*version),
        _ => None,
    });
    let version = version.unwrap_or_else(|| panic!("no checkpoint is asked for: {effects:?}"));
    world.job.on_save_answered(world.now, version, Ok(true));
    assert_eq!(world.state(), JobState::Exporting, "{}", world.reason());
    world.complete(0, &held, report(&held));
    while world.effects().iter().all(|effect| !matches!(effect, Effect::Ask(..))) {
        let lease = world.lease(0).expect("the rest of the steps that were begun");
        world.complete(0, &lease, report(&lease));
    }
    let placement = world.job.phase.partitions().map_or(0, Partitions::number);
    world.job.on_ledgers(world.now, placement, Ok(vec![ledger(version.get())]));
    let lease = world.lease(0).expect("an export");
    assert_eq!(lease.work, exported(Some(version.get())));
    world.complete(0, &lease, Report::Exported(pb::Exported::default()));
    assert!(world.reason().contains("the last checkpoint is written"), "{}", world.reason());
    for version in 1..=version.get() {
        world.job.on_saved(world.now, &saved(version, 0, version));
        assert_eq!(world.manifest().map(|manifest| manifest.version), Some(Version(version)));
        world.job.on_published(world.now, Ok(()));
    }
    assert!(world.effects().iter().any(|effect| matches!(effect, Effect::Finish(_))));
    world.job.on_finished(world.now, Ok(vec![ledger(version.get())]));
    assert_eq!(world.state(), JobState::Cancelled);
}

/// Returns a job that trains, holds a lease, and whose ps wants to leave; the version that is to be
/// saved.
fn left() -> (World, IncarnationId, pb::Lease, Version) {
    let mut spec = parse("\n[checkpoint]\nurl = \"memory://ck\"\nevery_steps = 100\n");
    (spec.epochs, spec.data.validation_fraction) = (20, None);
    let mut world = World::new(spec, 1, &["p"]);
    world.index();
    world.found(&[]);
    world.open();
    world.survey(&[0]);
    let held = world.lease(0).expect("work");
    let ps = world.fleet.ps_named("p").expect("it lives").0;
    world.fleet.beat(world.now.since_start, ps, true).expect("known");
    world.look();
    let save = |effect: &Effect| match effect {
        Effect::Save(_, version) => Some(*version),
        _ => None,
    };
    let version = world.effects().iter().find_map(save).expect("a checkpoint is asked for");
    world.job.on_save_answered(world.now, version, Ok(true));
    (world, ps, held, version)
}

#[test]
fn a_ps_may_leave_when_what_was_begun_is_trained_and_saved_and_nothing_is_trained_again() {
    let (mut world, ps, held, version) = left();
    assert!(!world.job.lets_go(ps) && world.job.lets_go(ps.next()), "somebody else has nothing of it");
    world.complete(0, &held, report(&held));
    while let Some(lease) = world.lease(0) {
        world.complete(0, &lease, report(&lease));
    }
    assert_eq!((world.state(), world.status().steps_done), (JobState::Running, version.get()));
    assert!(!world.job.lets_go(ps), "it is not saved yet");
    world.job.on_saved(world.now, &saved(1, 0, version.get()));
    assert!(!world.job.lets_go(ps), "its manifest is not written yet");
    world.job.on_published(world.now, Ok(()));
    assert!(world.job.lets_go(ps));

    let run = world.run();
    world.restart("p");
    world.found(&[(version.get(), &run)]);
    assert_eq!(world.open().map(|restore| restore.version), Some(version.get()));
    world.survey(&[version.get()]);
    let next = world.lease(0).expect("it goes on");
    let Some(pb::lease::Work::Train(next)) = next.work else { panic!("{next:?}") };
    let plan = world.job.phase.facts().expect("indexed").plan;
    assert_eq!(next.first, plan.first_of(Step(version.get())).get(), "nothing is trained again");
}

#[test]
fn a_ps_may_leave_when_its_job_cannot_be_saved() {
    let (mut world, ps, _, version) = left();
    let failed =
        pb::SaveFailed { version: version.get(), message: "disk full".to_owned(), ..Default::default() };
    world.job.on_save_failed(world.now, &failed);
    assert!(world.job.lets_go(ps));
    let (mut world, ps, _, version) = left();
    world.job.on_save_answered(world.now, version, Ok(false));
    assert!(world.job.lets_go(ps), "a partition has passed it");
}

#[test]
fn a_job_that_is_cancelled_while_a_ps_leaves_ends_with_that_checkpoint() {
    let (mut world, ps, held, version) = left();
    world.job.cancel(world.now, false);
    assert!(!world.effects().iter().any(|effect| matches!(effect, Effect::Save(..))), "it is asked for once");
    world.complete(0, &held, report(&held));
    while world.effects().iter().all(|effect| !matches!(effect, Effect::Ask(..))) {
        let lease = world.lease(0).expect("the rest of the steps that were begun");
        world.complete(0, &lease, report(&lease));
    }
    assert!(!world.job.lets_go(ps), "the model is not exported yet");
    let placement = world.job.phase.partitions().map_or(0, Partitions::number);
    world.job.on_ledgers(world.now, placement, Ok(vec![ledger(version.get())]));
    assert_eq!(world.lease(0).expect("an export").work, exported(Some(version.get())));
}

#[test]
fn a_restarted_master_begins_with_what_was_decided() {
    let mut world = World::saving(true);
    world.found(&[(3, "before")]);
    let lease = world.lease(0).expect("a model to describe");
    world.describe(&lease);
    let record = world.job.take_record(world.now).expect("something to write down");
    assert_eq!((record.run.as_str(), record.resume, &record.begin[..]), ("before", true, &[4][..]));
    let (settings, log) = (world.job.settings, EventLog::default());
    world.job = Job::restore(record, log, settings, world.now).expect("its own record");
    world.look();
    assert!(!world.effects().iter().any(|effect| matches!(effect, Effect::Look(_))));
    world.pass(SECOND);
    assert_eq!(world.open().map(|restore| restore.version), Some(3));
}
