//! Jobs whose master is started again: what was written down is all that is left of them.

use super::*;

impl World {
    /// The master dies and starts again; nobody has registered yet.
    pub(super) fn start_again(&mut self) {
        self.start_again_with(|_| {});
    }

    /// The master dies and another one starts, for which `change` writes the record.
    fn start_again_with(&mut self, change: impl FnOnce(&mut pb::JobRecord)) {
        let mut record = self.job.take_record(self.now).expect("something to write down");
        change(&mut record);
        let log = EventLog::restored(self.job.log.after(0, usize::MAX).expect("few"));
        let settings = self.job.settings;
        self.fleet = Membership::new(IncarnationId(1000), 5 * SECOND, 99);
        self.now = Now { since_start: Duration::ZERO, unix_ms: self.now.unix_ms + 7000 };
        self.job = Job::restore(record, log, settings, self.now).expect("its own record");
        self.look();
    }

    /// Everybody registers again; the ps have what they had.
    pub(super) fn come_back(&mut self, ps: &str, version: u64) {
        let workers = self.workers.len();
        self.workers =
            (0..workers).map(|w| join(&mut self.fleet, MemberRole::Worker, &format!("w{w}"))).collect();
        let again = join(&mut self.fleet, MemberRole::Ps, ps);
        self.pass(SECOND);
        assert!(
            self.effects().contains(&Effect::Verify(address(ps), again)),
            "it is asked before it is believed"
        );
        let ledger = pb::PartitionLedger { era: self.job.era.get(), ..ledger(version) };
        self.job.on_ps_answer(self.now, &address(ps), again, Ok(vec![ledger]));
        self.pass(SECOND);
    }
}

#[test]
fn training_goes_on_from_what_the_ps_have_applied() {
    let mut world = World::training(parse(""), 1);
    let old = world.lease(0).expect("work");
    world.start_again();
    assert_eq!(world.state(), JobState::Pending, "{}", world.reason());
    world.come_back("p", 1);
    world.survey(&[1]);
    assert_eq!(world.state(), JobState::Running, "{}", world.reason());
    assert!(!world.job.holds(world.workers[0], LeaseId(old.id)), "leases of the master before have ended");
    let status = world.status();
    assert_eq!((status.steps_done, status.samples_applied, status.steps), (1, 4, 4));
    world.work();
    assert_eq!(world.state(), JobState::Exporting);
    assert_eq!(world.status().wall_ms, 7000 + 2000, "time goes on from the submission");
}

#[test]
fn the_curve_of_a_job_does_not_go_back_when_the_ps_are_behind_the_reports() {
    // A step whose gradients are all there may not be applied yet: it waits for the norms of
    // another ps.
    for behind in [0, 1, 2] {
        let mut world = World::training(parse(""), 2);
        while world.told().len() < 2 {
            let lease = world.lease(0).expect("work");
            world.complete(0, &lease, report(&lease));
        }
        assert_eq!(world.told(), [0, 1]);
        world.start_again();
        world.come_back("p", behind);
        world.survey(&[behind]);
        world.work();
        assert_eq!(world.told(), [0, 1, 2, 3], "the ps had applied {behind} steps");
    }
}

#[test]
fn a_rewind_lets_the_curve_go_back_also_when_the_master_is_started_again_after_it() {
    let mut world = World::training(parse(""), 2);
    while world.told().len() < 2 {
        let lease = world.lease(0).expect("work");
        world.complete(0, &lease, report(&lease));
    }
    world.restart("p");
    world.start_again();
    world.workers = vec![join(&mut world.fleet, MemberRole::Worker, "w0")];
    join(&mut world.fleet, MemberRole::Ps, "p");
    world.pass(SECOND);
    world.initialize();
    world.work();
    assert_eq!(world.told(), [0, 1, 0, 1, 2, 3]);
    let rewinds = world.events().into_iter().filter(|event| matches!(event, Event::Rewind(_))).count();
    assert_eq!(rewinds, 1, "told once");
}

#[test]
fn the_journal_of_an_older_master_says_how_many_epochs_are_measured() {
    let steps = |world: &World| {
        let step = |event| match event {
            Event::Evaluation(event) => Some(event.step),
            _ => None,
        };
        world.events().into_iter().filter_map(step).collect::<Vec<_>>()
    };
    for (epochs, again) in [(0, vec![2, 2, 4]), (1, vec![2, 4])] {
        let mut world = World::training(parse(""), 1);
        while steps(&world).is_empty() {
            let lease = world.lease(0).expect("work");
            world.complete(0, &lease, report(&lease));
        }
        world.start_again_with(|record| {
            assert_eq!(record.measured.take(), Some(2));
            record.epochs_measured = epochs;
        });
        world.come_back("p", 2);
        world.survey(&[2]);
        world.work();
        assert_eq!(steps(&world), again, "{epochs} epochs were measured");
    }
}

#[test]
fn a_ps_that_lost_its_memory_meanwhile_rewinds_the_job() {
    let mut world = World::training(parse(""), 1);
    world.start_again();
    join(&mut world.fleet, MemberRole::Worker, "w0");
    world.restart("p");
    assert_eq!(world.job.era, Era(1));
    assert_eq!(world.state(), JobState::Indexing, "{}", world.reason());
}

#[test]
fn a_job_that_did_not_train_yet_begins_anew() {
    let mut world = World::new(parse(""), 1, &["p"]);
    world.start_again();
    world.workers = vec![join(&mut world.fleet, MemberRole::Worker, "w0")];
    join(&mut world.fleet, MemberRole::Ps, "p");
    world.pass(SECOND);
    assert_eq!(world.state(), JobState::Indexing);
    world.index();
    world.start_again();
    world.workers = vec![join(&mut world.fleet, MemberRole::Worker, "w0")];
    join(&mut world.fleet, MemberRole::Ps, "p");
    world.pass(SECOND);
    world.initialize();
}

#[test]
fn a_job_that_was_being_stopped_is_stopped() {
    let mut world = World::training(parse(""), 1);
    let held = world.lease(0).expect("work");
    world.job.cancel(world.now, false);
    world.start_again();
    world.come_back("p", 2);
    world.survey(&[2]);
    assert_eq!(world.state(), JobState::Exporting, "{}", world.reason());
    let lease = world.lease(0).expect("an export");
    assert!(lease.id != held.id && matches!(lease.work, Some(pb::lease::Work::Export(_))), "{lease:?}");
    assert!(world.reason().contains("cancelled by a user"), "{}", world.reason());
}

#[test]
fn what_a_user_set_stays_set() {
    let mut world = World::training(parse(""), 3);
    world.job.scale(world.now, 2, &world.fleet).expect("it goes on");
    world.job.pause(world.now).expect("it goes on");
    world.start_again();
    world.come_back("p", 1);
    world.survey(&[1]);
    let status = world.status();
    assert_eq!((world.state(), status.workers, status.workers_standby), (JobState::Paused, 2, 1));
}

#[test]
fn a_paused_job_that_was_being_stopped_is_stopped_and_cannot_be_paused_again() {
    let mut world = World::training(parse(""), 1);
    world.lease(0).expect("work");
    world.job.pause(world.now).expect("it goes on");
    world.job.cancel(world.now, false);
    world.start_again();
    assert_ne!(world.state(), JobState::Paused);
    assert_eq!(world.job.pause(world.now).unwrap_err().kind, Kind::Ended);
    world.come_back("p", 1);
    world.survey(&[1]);
    assert_eq!(world.state(), JobState::Exporting, "{}", world.reason());
}

#[test]
fn what_was_measured_is_not_measured_again() {
    let mut world = World::training(parse(""), 1);
    while world.status().final_metrics.is_empty() {
        let lease = world.lease(0).expect("work");
        world.complete(0, &lease, report(&lease));
    }
    let measured = world.status().final_metrics;
    world.start_again();
    assert_eq!(world.status().final_metrics, measured);
    world.come_back("p", 2);
    world.survey(&[2]);
    world.work();
    let told = world.events().into_iter().filter(|event| matches!(event, Event::Evaluation(_))).count();
    assert_eq!(told, 2, "one for each epoch");
}

#[test]
fn a_record_that_does_not_fit_together_is_refused() {
    let mut world = World::training(parse(""), 1);
    let record = world.job.take_record(world.now).expect("something to write down");
    let restore = |record: pb::JobRecord| {
        let settings = Settings { claim: SECOND, ps_grace: SECOND, stop: SECOND };
        Job::restore(record, EventLog::default(), settings, Now::default())
    };
    assert!(restore(pb::JobRecord { spec_json: "{}".to_owned(), ..record.clone() }).is_err());
    let mut wrong = record.clone();
    wrong.train[0].label_min = Some(-1);
    assert!(restore(wrong).expect_err("a label").contains("label -1"));
    let mut wrong = record;
    wrong.fresh.clear();
    assert!(restore(wrong).expect_err("a partition").contains("partitions"));
}

/// Returns a job that has exported its model on the one ps; it trained to its end, or was
/// cancelled.
fn exported_job(cancelled: bool) -> World {
    let mut world = World::training(parse(""), 1);
    if cancelled {
        world.job.cancel(world.now, false);
        world.survey(&[2]);
    } else {
        world.work();
        world.pass(3 * SECOND);
    }
    let lease = world.lease(0).expect("an export");
    let artifacts = vec![proto::artifact::describe("model.safetensors", b"weights")];
    world.complete(0, &lease, Report::Exported(pb::Exported { artifacts }));
    world
}

#[test]
fn a_job_that_is_exported_only_ends() {
    for (cancelled, state, version) in [(false, JobState::Succeeded, 4), (true, JobState::Cancelled, 2)] {
        let mut world = exported_job(cancelled);
        let reason = world.job.phase.end().cloned().expect("it is decided").reason;
        world.start_again();
        assert_eq!(world.state(), JobState::Exporting, "{}", world.reason());
        world.job.cancel(world.now, false);
        world.come_back("p", version);
        world.survey(&[version]);
        assert_eq!(world.effects(), [Effect::Finish(vec![address("p")])]);
        world.job.on_finished(world.now, Ok(vec![ledger(version)]));
        let status = world.status();
        assert_eq!((status.state(), status.reason, status.steps_done), (state, reason, version));
        assert_eq!(status.artifacts.len(), 1);
    }
}

#[test]
fn a_job_that_is_exported_ends_with_its_model_also_when_its_ps_have_lost_theirs() {
    let mut world = exported_job(true);
    world.start_again();
    join(&mut world.fleet, MemberRole::Worker, "w0");
    world.restart("p");
    assert_eq!(world.effects(), [Effect::Finish(vec![])]);
    world.job.on_finished(world.now, Ok(vec![]));
    let status = world.status();
    assert_eq!((status.state(), status.artifacts.len(), world.job.era), (JobState::Cancelled, 1, Era(0)));
}
