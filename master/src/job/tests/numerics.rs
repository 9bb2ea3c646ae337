//! Jobs in canonical order on fleets of several numerics classes.

use std::sync::Arc;

use proto::numerics::{Numerics, Since};

use super::*;
use crate::checkpoints::{Candidate, Candidates};
use crate::membership::Capacity;

const SAVES: &str = "\n[checkpoint]\nurl = \"memory://ck\"\nevery_steps = 1\n";

fn class(name: &str) -> Numerics {
    Numerics { class: name.to_owned(), facts: format!("facts of {name}") }
}

impl World {
    /// Creates a job that is indexed, with one worker of each of these classes.
    fn of_classes(spec: JobSpec, classes: &[&str]) -> Self {
        let mut world = Self::new(spec, 0, &["p"]);
        classes.iter().for_each(|name| world.join_class(name));
        world.index();
        world
    }

    fn join_class(&mut self, name: &str) {
        let capacity = Capacity { cuda: 0, threads: 1 };
        let numerics = Arc::new(class(name));
        let process = Process { numerics, capacity, ..Process::new(MemberRole::Worker, name, "") };
        let (incarnation, _) = self.fleet.register(self.now.since_start, process).expect("room");
        self.fleet.beat(self.now.since_start, incarnation, false).expect("known");
        self.workers.push(incarnation);
        self.look();
    }

    fn leave(&mut self, worker: usize) {
        let gone = self.workers[worker];
        let stream = self.fleet.stream_opened(gone).expect("known");
        self.fleet.stream_broken(gone, stream);
        self.job.worker_gone(self.now, gone);
        self.look();
    }

    /// This worker describes the model and the ps answers that it has applied so many steps.
    fn begin(&mut self, worker: usize, version: u64) {
        let lease = self.lease(worker).expect("a model to initialize");
        let tensors = vec![TensorSpec::parameter("w", [3])];
        let (id, lease_id) = (self.workers[worker], LeaseId(lease.id));
        self.job.describe(id, lease_id, tensors, &self.fleet, &BTreeMap::new()).expect("a placement");
        self.job.described(id, lease_id).expect("a good lease");
        self.complete(worker, &lease, Report::Initialized(pb::Initialized::default()));
        self.survey(&[version]);
    }

    /// The store has one checkpoint of this version, which these classes computed.
    fn finds(&mut self, version: u64, history: &[(u64, &str)]) {
        let since =
            |&(version, name): &(u64, &str)| Since { version: Version(version), numerics: class(name) };
        let run = self.job.checkpoints.as_ref().and_then(|checkpoints| checkpoints.run.clone());
        let candidate = Candidate {
            version: Version(version),
            run: run.unwrap_or_else(|| "run".to_owned()),
            plan: self.job.spec.plan(10),
            ends_epoch: false,
            trained_on: None,
            selection: None,
        };
        let found = Candidates {
            intact: vec![candidate],
            numerics: [(Version(version), history.iter().map(since).collect())].into(),
            ..Candidates::default()
        };
        self.job.on_found(self.now, Ok(found));
    }

    fn history(&self) -> Vec<(u64, String)> {
        let one = |since: pb::NumericsSince| (since.version, since.numerics.expect("it is there").class);
        self.status().numerics.into_iter().map(one).collect()
    }

    fn warned_of(&self, words: &str) -> usize {
        let tells =
            |event: &Event| matches!(event, Event::Warning(warning) if warning.message.contains(words));
        self.events().iter().filter(|event| tells(event)).count()
    }
}

#[test]
fn workers_of_another_class_count_records_and_then_stand_by() {
    let mut world = World::of_classes(parse(""), &["a", "b", "b"]);
    assert_eq!(world.refused(0), Why::OtherClass(Arc::new(class("a"))), "`b` has more capacity");
    world.begin(1, 0);
    assert!(world.lease(0).is_none());
    let status = world.status();
    assert_eq!((status.workers, status.workers_standby), (2, 1));
    assert_eq!(status.numerics_class, Some(class("b").into()));
    assert_eq!(world.refused(0), Why::OtherClass(Arc::new(class("a"))));
    for _ in 0..2 {
        world.pass(SECOND);
        assert_eq!(world.warned_of("workers of numerics class a (facts of a) stand by"), 1, "once");
    }
    assert_eq!(world.history(), [(0, "b".to_owned())]);
}

#[test]
fn a_job_none_of_whose_class_is_left_waits_and_says_how_to_go_on() {
    let mut world = World::of_classes(parse(""), &["a", "b", "b"]);
    world.begin(1, 0);
    world.leave(1);
    assert_eq!(world.state(), JobState::Running, "one is left");
    world.leave(2);
    assert_eq!(world.state(), JobState::Pending);
    let reason = world.reason();
    for part in [
        "workers (0 of 1 live) of numerics class b (facts of b)",
        "1 of class a (facts of a) stand by",
        "`ebb resume digits-1 --numerics CLASS`",
        "from version 0",
    ] {
        assert!(reason.contains(part), "{part} missing in: {reason}");
    }
    assert!(world.lease(0).is_none());
    world.join_class("b");
    assert_eq!(world.state(), JobState::Running);
    assert!(world.lease(3).is_some(), "another worker of the class goes on");
}

#[test]
fn a_user_goes_on_in_another_class_from_the_newest_checkpoint() {
    let mut spec = parse(SAVES);
    spec.data.validation_fraction = None;
    let mut world = World::of_classes(spec, &["a", "b", "b"]);
    world.finds_nothing();
    world.begin(1, 0);
    let resume = |world: &mut World, class: &str| world.resume(class);
    let refused = resume(&mut world, "c").unwrap_err();
    assert!(refused.message.contains("there are b (facts of b), a (facts of a)"), "{refused}");
    resume(&mut world, "b").expect("it is that class");
    assert_eq!(world.state(), JobState::Running, "nothing changed");
    resume(&mut world, "a").expect("a worker of it stands by");
    assert!(world.lease(0).is_none() && world.lease(1).is_none(), "the store is looked at first");
    world.finds(2, &[(0, "b")]);
    assert!(world.lease(1).is_none());
    world.begin(0, 2);
    assert_eq!(world.history(), [(0, "b".to_owned()), (2, "a".to_owned())]);
    assert_eq!(world.warned_of("a user changed the numerics class from b (facts of b) to a (facts of a)"), 1);
    world.effects();
    world.job.on_saved(
        world.now,
        &pb::SavedPartition {
            report: 1,
            job: 1,
            era: 1,
            version: 3,
            file: "f".to_owned(),
            bytes: 1,
            watermark: 3,
            ..Default::default()
        },
    );
    let manifest = world.effects().into_iter().find_map(|effect| match effect {
        Effect::Publish(_, manifest, _) => Some(manifest),
        _ => None,
    });
    let numerics = manifest.map(|manifest| manifest.numerics);
    let expected = [(0, "b"), (2, "a")]
        .map(|(version, name)| Since { version: Version(version), numerics: class(name) });
    assert_eq!(numerics.as_deref(), Some(&expected[..]), "the manifest names both");
}

#[test]
fn a_resumed_job_goes_on_in_the_class_of_its_checkpoint_or_waits_for_it() {
    let mut world = World::new(parse(SAVES), 0, &["p"]);
    world.job.resume_run(Resume::Alike);
    world.join_class("b");
    world.index();
    world.finds(3, &[(0, "a")]);
    world.pass(SECOND);
    assert_eq!(world.state(), JobState::Pending);
    assert!(world.reason().contains("of numerics class a (facts of a)"), "{}", world.reason());
    assert!(world.lease(0).is_none());
    world.join_class("a");
    world.begin(1, 3);
    assert_eq!((world.state(), world.history()), (JobState::Running, vec![(0, "a".to_owned())]));
}

#[test]
fn any_class_takes_part_where_the_bits_are_not_promised() {
    for more in ["\n[consistency]\nmode = \"async\"\n", ""] {
        let mut spec = parse(more);
        if more.is_empty() {
            spec.numerics = proto::spec::NumericsSpec::Any;
        }
        let mut world = World::of_classes(spec, &["a", "b"]);
        world.begin(0, 0);
        assert!(world.lease(0).is_some() && world.lease(1).is_some());
        let status = world.status();
        assert_eq!((status.workers, status.numerics_class, status.numerics.len()), (2, None, 0));
        assert!(world.resume("b").is_err(), "there is no class to change");
    }
}

#[test]
fn a_restarted_master_knows_the_class() {
    let mut world = World::of_classes(parse(""), &["a", "b", "b"]);
    world.begin(1, 0);
    let record = world.job.take_record(world.now).expect("news");
    let settings = Settings { claim: 3 * SECOND, ps_grace: 30 * SECOND, stop: 10 * SECOND };
    let log = crate::events::EventLog::default();
    let job = Job::restore(record, log, settings, world.now).expect("a good record");
    assert_eq!(job.status(world.now).numerics_class, Some(class("b").into()));
    assert_eq!(job.status(world.now).numerics.len(), 1);
}

#[test]
fn a_model_that_is_trained_is_exported_by_whoever_is_there() {
    let mut spec = spec();
    spec.epochs = 1;
    let mut world = World::of_classes(spec, &["b", "a"]);
    world.begin(0, 0);
    world.work();
    world.leave(0);
    assert_eq!(world.state(), JobState::Exporting);
    assert!(matches!(world.lease(1).and_then(|lease| lease.work), Some(pb::lease::Work::Export(_))));
}

impl World {
    fn finds_nothing(&mut self) {
        self.job.on_found(self.now, Ok(Candidates::default()));
    }
}

#[test]
fn a_class_counts_from_the_first_version_even_if_the_journal_never_had_it() {
    let mut spec = parse(SAVES);
    spec.data.validation_fraction = None;
    let mut world = World::of_classes(spec, &["a"]);
    world.finds_nothing();
    let lease = world.lease(0).expect("a model to initialize");
    world.describe(&lease);
    let record = world.job.take_record(world.now).expect("a placement and a class");
    world.complete(0, &lease, Report::Initialized(pb::Initialized::default()));
    world.survey(&[0]);
    assert_eq!(world.history(), [(0, "a".to_owned())]);
    // The master is killed, and its journal could not be written. The ps has trained two steps
    // meanwhile.
    let (log, settings) = (crate::events::EventLog::default(), world.job.settings);
    world.job = Job::restore(record, log, settings, world.now).expect("its own record");
    world.look();
    world.begin(0, 2);
    assert_eq!(world.history(), [(0, "a".to_owned())], "the manifest of version 1 names a class, too");
}
