//! Jobs whose ps die, come back with and without what they had, or are replaced.

use proptest::prelude::*;
use proto::pb::lease::Work as Wire;

use super::*;

/// Returns a job that trains on two ps, `p` and `q`.
fn on_two(more: &str, workers: usize) -> World {
    let spec = parse(&format!("[fleet]\nps = 2\n{more}"));
    let mut world = World::new(spec, workers, &["p", "q"]);
    world.index();
    let lease = world.lease(0).expect("a model to initialize");
    world.describe(&lease);
    world.complete(0, &lease, Report::Initialized(pb::Initialized::default()));
    world.survey(&[0, 0]);
    assert_eq!(world.state(), JobState::Running, "{}", world.reason());
    world
}

impl World {
    fn warned(&self, text: &str) -> bool {
        let warns = |event: &Event| matches!(event, Event::Warning(event) if event.message.contains(text));
        self.events().iter().any(warns)
    }

    fn measured(&self) -> Vec<u64> {
        let step = |event| match event {
            Event::Evaluation(event) => Some(event.step),
            _ => None,
        };
        self.events().into_iter().filter_map(step).collect()
    }

    /// Does the `Init` task of a recovery; answers its era and which partitions go where.
    pub(super) fn initialize_again(&mut self) -> (u64, Vec<String>) {
        let lease = self.lease(0).unwrap_or_else(|| panic!("no work: {}", self.reason()));
        let Some(Wire::Init(task)) = lease.work else { panic!("{lease:?}") };
        let open = self.describe(&lease);
        assert!(open.iter().all(|(_, request)| request.era == task.era));
        self.complete(0, &lease, Report::Initialized(pb::Initialized::default()));
        (task.era, open.into_iter().map(|(ps, _)| ps.name).collect())
    }
}

#[test]
fn a_ps_that_lost_only_its_connection_goes_on_with_nothing_rewound() {
    let mut world = on_two("", 1);
    let lease = world.lease(0).expect("work");
    world.cut("q");
    assert_eq!(world.state(), JobState::Running);
    assert!(world.warned("ps `q` is gone; training waits up to 30s"));
    let again = join(&mut world.fleet, MemberRole::Ps, "q");
    world.pass(SECOND);
    let ledgers = Ok(vec![pb::PartitionLedger { partition: 1, ..ledger(0) }]);
    world.job.on_ps_answer(world.now, &address("q"), again, ledgers);
    assert!(world.warned("ps `q` is back with its partitions"));
    world.complete(0, &lease, report(&lease));
    assert_eq!((world.job.era, world.status().leases_expired), (Era(0), 0));
}

#[test]
fn in_canonical_order_a_lost_ps_rewinds_all_of_the_job() {
    let mut world = on_two("", 2);
    while world.measured().is_empty() {
        let lease = world.lease(0).expect("work");
        world.complete(0, &lease, report(&lease));
    }
    let (held, told) = (world.lease(1).expect("work"), world.told());
    assert_eq!((held.placement, &told), (1, &vec![0, 1]));
    world.restart("q");
    assert!(world.warned(
        "ps `q` lost its part of the model; no checkpoint, so training starts again from version 0 (era 1)"
    ));
    assert!(!world.job.holds(world.workers[1], LeaseId(held.id)));
    assert_eq!(world.job.renew(world.now, world.workers[1], &[LeaseId(held.id)]), []);
    assert_eq!((world.status().leases_expired, world.job.leases_taken_back()), (1, 1));
    assert_eq!(world.initialize_again(), (1, vec!["p".into(), "q".into()]));
    world.survey(&[0, 0]);
    let lease = world.lease(1).expect("work");
    let Some(Wire::Train(task)) = lease.work else { panic!("{lease:?}") };
    assert_eq!((task.first, task.era, lease.placement, lease.attempt), (0, 1, 2, 1));
    world.complete(1, &lease, report(&lease));
    world.work();
    assert_eq!(world.state(), JobState::Exporting, "{}", world.reason());
    assert_eq!((world.measured(), world.told()), (vec![2, 2, 4], vec![0, 1, 0, 1, 2, 3]));
    let rewind = Event::Rewind(pb::RewindEvent { version: 0, era: 1 });
    let at = world.events().iter().position(|event| *event == rewind).expect("it is told");
    let again =
        world.events().iter().rposition(|event| matches!(event, Event::Train(event) if event.step == 0));
    assert!(at < again.expect("told again"), "before the curve goes back");
    assert_eq!(world.status().samples_applied, 16);
}

#[test]
fn in_arrival_order_only_the_lost_partition_is_trained_again() {
    let mut world = on_two("[consistency]\nmode = 'bounded'\n", 2);
    while world.told().len() < 3 {
        let lease = world.lease(0).expect("work");
        world.complete(0, &lease, report(&lease));
    }
    let measured = world.measured();
    world.restart("p");
    assert!(world.warned("ps `p` lost its part of the model; no checkpoint, so that part is trained again"));
    assert_eq!(world.initialize_again(), (0, vec!["p".into()]), "the other one is open");
    world.survey(&[0, 3]);
    world.work();
    assert_eq!(world.state(), JobState::Exporting, "{}", world.reason());
    assert_eq!(measured, [2]);
    assert_eq!((world.measured(), world.told()), (vec![2, 4], vec![0, 1, 2, 3]), "each once");
    assert!(!world.events().iter().any(|event| matches!(event, Event::Rewind(_))), "the curve goes on");
}

#[test]
fn without_a_spare_the_job_waits_and_a_ps_that_registers_ends_the_wait() {
    for name in ["q", "r"] {
        let mut world = on_two("", 1);
        let lease = world.lease(0).expect("work");
        world.cut("q");
        for _ in 0..1000 {
            world.pass(SECOND);
        }
        assert_eq!(
            (world.state(), world.reason().as_str()),
            (JobState::Pending, "waits for ps `q` to come back or for another ps")
        );
        assert!(world.lease(0).is_none() && !world.job.holds(world.workers[0], LeaseId(lease.id)));
        join(&mut world.fleet, MemberRole::Ps, name);
        world.pass(SECOND);
        assert_eq!(world.initialize_again(), (1, vec!["p".into(), name.into()]));
        world.survey(&[0, 0]);
        assert_eq!(world.state(), JobState::Running);
    }
}

#[test]
fn a_spare_takes_over_after_the_grace_and_not_before() {
    let mut world = on_two("", 1);
    join(&mut world.fleet, MemberRole::Ps, "r");
    world.cut("q");
    world.pass(29 * SECOND);
    assert!(!world.warned("lost its part"));
    world.pass(SECOND);
    assert_eq!(world.initialize_again(), (1, vec!["p".into(), "r".into()]));
}

#[test]
fn a_ps_that_is_lost_again_while_it_is_replaced_begins_the_same_again() {
    let mut world = on_two("", 1);
    world.restart("q");
    let lease = world.lease(0).expect("a model to initialize");
    world.describe(&lease);
    // It dies before version 0 is there, and then after it was there and before it was asked.
    join(&mut world.fleet, MemberRole::Ps, "q");
    world.pass(SECOND);
    assert!(!world.job.holds(world.workers[0], LeaseId(lease.id)));
    world.initialize_again();
    join(&mut world.fleet, MemberRole::Ps, "q");
    world.pass(SECOND);
    assert_eq!(world.initialize_again(), (1, vec!["p".into(), "q".into()]), "nothing was lost in between");
    // An answer to a question of before means nothing.
    world.job.on_ledgers(world.now, 2, Ok(vec![ledger(4), ledger(4)]));
    world.survey(&[0, 0]);
    world.work();
    assert_eq!(world.state(), JobState::Exporting, "{}", world.reason());
}

#[test]
fn training_begins_when_the_journal_knows_that_there_is_something_to_lose() {
    let mut world = on_two("", 1);
    world.restart("q");
    world.initialize_again();
    world.answer_survey(&[0, 0]);
    assert!(world.job.take_record(world.now).is_some_and(|record| record.fresh == [false, false]));
    assert!(world.lease(0).is_none(), "a master that is started again would begin them anew");
    let stale = world.job.placement() - 1;
    world.job.train(world.now, stale);
    assert!(world.lease(0).is_none(), "what is written is of an earlier placement");
    world.write();
    assert_eq!(world.state(), JobState::Running, "{}", world.reason());
    assert!(world.lease(0).is_some());
}

#[test]
fn ps_are_asked_until_all_partitions_are_there() {
    let mut world = on_two("", 1);
    world.restart("q");
    world.initialize_again();
    for ledgers in [Err(Failure::new(Kind::Unavailable, "down")), Ok(vec![]), Ok(vec![ledger(0)])] {
        let Some(Effect::Ask(placement, _)) = world.effects().pop() else { panic!("nobody asks") };
        world.job.on_ledgers(world.now, placement, ledgers);
        assert!(world.effects().iter().all(|effect| !matches!(effect, Effect::Train(_))));
        assert!(world.lease(0).is_none());
        world.pass(SECOND);
    }
    world.survey(&[0, 0]);
    assert!(world.lease(0).is_some());
}

#[test]
fn a_ps_that_is_lost_during_the_export_is_trained_again() {
    let mut world = on_two("", 1);
    world.work();
    assert_eq!(world.state(), JobState::Exporting);
    world.restart("p");
    assert_eq!(world.state(), JobState::Running, "{}", world.reason());
    world.initialize_again();
    world.survey(&[0, 0]);
    world.work();
    world.pass(3 * SECOND);
    let lease = world.lease(0).expect("an export");
    assert_eq!(lease.work, Some(Wire::Export(pb::ExportTask { version: Some(4), era: 1 })));
}

#[test]
fn a_ps_that_is_lost_while_a_cancelled_job_is_saved_leaves_it_without_a_model() {
    let mut world = on_two("", 1);
    world.job.cancel(world.now, false);
    world.job.on_ledgers(
        world.now,
        1,
        Ok(vec![ledger(2), pb::PartitionLedger { partition: 1, ..ledger(2) }]),
    );
    world.restart("q");
    assert_eq!(world.effects(), [Effect::Finish(vec![address("p")])]);
    world.job.on_finished(world.now, Ok(vec![]));
    assert_eq!(world.state(), JobState::Cancelled);
    assert!(world.reason().contains("ps `q` lost its part of the model"), "{}", world.reason());
}

/// What a random life of a job does next.
#[derive(Clone, Debug)]
enum Action {
    Lease(usize),
    Complete(usize),
    Die(usize),
    Restart(usize),
    Ledgers,
    Pass(u64),
}

fn actions() -> impl Strategy<Value = Vec<Action>> {
    let action = prop_oneof![
        6 => (0usize..2).prop_map(Action::Lease),
        6 => (0usize..2).prop_map(Action::Complete),
        1 => (0usize..3).prop_map(Action::Die),
        1 => (0usize..3).prop_map(Action::Restart),
        3 => Just(Action::Ledgers),
        2 => (1u64..20).prop_map(Action::Pass),
    ];
    proptest::collection::vec(action, 1..150)
}

const PS: [&str; 3] = ["p", "q", "r"];

/// A ps as far as a master sees it: partitions with their era and how often each microbatch was
/// added.
#[derive(Clone, Debug, Default)]
struct Held {
    era: u64,
    version_0: bool,
    added: Vec<bool>,
}

/// A job, and ps that apply whatever a worker reports as done, as real ones do.
struct Life {
    world: World,
    ps: BTreeMap<String, BTreeMap<u32, Held>>,
    held: Vec<Vec<pb::Lease>>,
}

impl Life {
    fn new(mode: &str) -> Self {
        let spec = parse(&format!("[fleet]\nps = 2\n[consistency]\nmode = '{mode}'\n"));
        let world = World::new(spec, 2, &PS);
        Self { world, ps: BTreeMap::new(), held: vec![Vec::new(), Vec::new()] }
    }

    fn act(&mut self, action: &Action) {
        match *action {
            Action::Lease(worker) => {
                if let Some(lease) = self.world.lease(worker) {
                    self.held[worker].push(lease);
                }
            }
            Action::Complete(worker) => {
                if !self.held[worker].is_empty() {
                    let lease = self.held[worker].remove(0);
                    self.work(worker, &lease);
                }
            }
            Action::Die(ps) => {
                self.ps.remove(PS[ps]);
                if let Some((id, _)) = self.world.fleet.ps_named(PS[ps]) {
                    let stream = self.world.fleet.stream_opened(id).expect("known");
                    self.world.fleet.stream_broken(id, stream);
                }
            }
            Action::Restart(ps) => {
                self.ps.remove(PS[ps]);
                join(&mut self.world.fleet, MemberRole::Ps, PS[ps]);
            }
            Action::Ledgers => {}
            Action::Pass(seconds) => self.world.pass(Duration::from_secs(seconds)),
        }
        if matches!(action, Action::Die(_) | Action::Restart(_)) {
            self.world.look();
        }
        if matches!(action, Action::Ledgers | Action::Pass(_)) {
            self.answer();
        }
    }

    fn ledgers(&self, ps: &[PsAddress]) -> Vec<pb::PartitionLedger> {
        let plan = self.world.job.phase.facts().expect("indexed").plan;
        let ledger = |(&partition, held): (&u32, &Held)| {
            let whole = |step: &u64| {
                let first = plan.first_of(Step(*step)).get() as usize;
                held.added[first..first + plan.of(Step(*step)) as usize].iter().all(|&added| added)
            };
            let applied: Vec<u64> = (0..plan.steps()).filter(whole).collect();
            let watermark = (0..).find(|step| !applied.contains(step)).expect("finite");
            pb::PartitionLedger {
                partition,
                era: held.era,
                version: held.version_0.then_some(applied.len() as u64),
                watermark,
                applied_above: applied.into_iter().filter(|&step| step > watermark).collect(),
                ..Default::default()
            }
        };
        ps.iter().filter_map(|ps| self.ps.get(&ps.name)).flatten().map(ledger).collect()
    }

    /// Every question to a ps is answered.
    fn answer(&mut self) {
        for effect in self.world.effects() {
            match effect {
                Effect::Ask(placement, ps) => {
                    let ledgers = self.ledgers(&ps);
                    self.world.job.on_ledgers(self.world.now, placement, Ok(ledgers));
                    self.world.write();
                }
                Effect::Verify(ps, incarnation) => {
                    let ledgers = self.ledgers(std::slice::from_ref(&ps));
                    self.world.job.on_ps_answer(self.world.now, &ps, incarnation, Ok(ledgers));
                }
                _ => {}
            }
        }
    }

    /// A worker does its task, as far as the ps are there; its report may come late.
    fn work(&mut self, worker: usize, lease: &pb::Lease) {
        let id = LeaseId(lease.id);
        match lease.work.as_ref().expect("work") {
            Wire::Index(_) => {
                let found = pb::Indexed {
                    records: 10,
                    shape: vec![2],
                    label_min: Some(0),
                    label_max: Some(9),
                    crc32c: Some(7),
                    bytes: 80,
                    ..Default::default()
                };
                let _ = self.world.job.complete(
                    self.world.now,
                    self.world.workers[worker],
                    id,
                    Report::Indexed(found),
                );
            }
            Wire::Init(task) => {
                let (who, tensors) = (self.world.workers[worker], vec![TensorSpec::parameter("w", [3])]);
                let Ok(open) = self.world.job.describe(who, id, tensors, &self.world.fleet, &BTreeMap::new())
                else {
                    return;
                };
                let homes = self.world.job.phase.partitions().expect("placed").addresses();
                let names: Vec<_> = homes.map(|home| home.name).collect();
                let all_live = names.iter().all(|name| self.world.fleet.ps_named(name).is_some());
                assert!(all_live && names[0] != names[1], "{names:?}");
                for (ps, request) in open {
                    let held = self.ps.entry(ps.name).or_default().entry(request.partition).or_default();
                    if held.era < request.era || held.added.is_empty() {
                        *held = Held { era: request.era, version_0: false, added: vec![false; 16] };
                    }
                    assert_eq!(held.era, task.era);
                    held.version_0 = true;
                }
                if self.world.job.described(who, id).is_ok() {
                    let report = Report::Initialized(pb::Initialized::default());
                    let _ = self.world.job.complete(self.world.now, who, id, report);
                }
            }
            Wire::Train(task) => {
                // Pushes go to where the lease's placement says; a ps of a newer era, or without
                // the partition, refuses.
                let homes = self.world.job.phase.partitions().expect("placed").addresses();
                let mut acknowledged = true;
                for (partition, home) in (0..).zip(homes) {
                    let held = self.ps.get_mut(&home.name).and_then(|ps| ps.get_mut(&partition));
                    match held.filter(|held| held.era == task.era && held.version_0) {
                        Some(held) => (task.first..task.first + u64::from(task.count))
                            .for_each(|id| held.added[id as usize] = true),
                        None => acknowledged = false,
                    }
                }
                if acknowledged {
                    let _ = self.world.job.complete(
                        self.world.now,
                        self.world.workers[worker],
                        id,
                        report(lease),
                    );
                }
            }
            Wire::Evaluate(_) => {
                let _ =
                    self.world.job.complete(self.world.now, self.world.workers[worker], id, report(lease));
            }
            Wire::Export(task) => {
                assert_eq!(task.version.unwrap_or(4), 4);
                let homes = self.world.job.phase.partitions().expect("placed").addresses();
                let held = |(partition, home): (u32, PsAddress)| self.ps.get(&home.name)?.get(&partition);
                let Some(pulled) = (0..).zip(homes).map(held).collect::<Option<Vec<_>>>() else { return };
                if pulled.iter().any(|held| held.era != task.era || !held.version_0) {
                    return;
                }
                if self.world.job.holds(self.world.workers[worker], id) {
                    assert!(pulled.iter().all(|held| held.added.iter().all(|&added| added)), "{pulled:?}");
                }
                let exported = pb::Exported { artifacts: vec![pb::Artifact::default()] };
                let report = Report::Exported(exported);
                let _ = self.world.job.complete(self.world.now, self.world.workers[worker], id, report);
            }
            work @ (Wire::Predict(_) | Wire::Join(_) | Wire::Clear(_)) => {
                panic!("a job that trains has no {work:?}")
            }
        }
    }

    /// What the books have as done, every partition has.
    fn check(&self) {
        let Some(training) = self.world.job.phase.trains() else {
            return;
        };
        let partitions = self.world.job.phase.partitions().expect("placed");
        if !partitions.are_all_here() {
            return;
        }
        for (partition, home) in (0..).zip(partitions.addresses()) {
            let added = &self.ps[&home.name][&partition].added;
            let done = training.books.watermark().get() as usize;
            assert!(added[..done].iter().all(|&added| added), "{} lacks what is done", home.name);
        }
    }
}

proptest! {
    #[test]
    fn whatever_becomes_of_the_ps_the_job_ends_with_each_microbatch_on_all_partitions(
        mode in prop_oneof![Just("sync"), Just("pipelined"), Just("bounded"), Just("async")],
        actions in actions(),
    ) {
        let mut life = Life::new(mode);
        for action in &actions {
            life.act(action);
            life.check();
        }
        // From now on nobody dies.
        (0..3).for_each(|ps| life.act(&Action::Restart(ps)));
        let mut rounds = 0;
        while !matches!(life.world.job.phase.ends(), Some(Stage::Finishing)) {
            for action in [Action::Lease(0), Action::Complete(0), Action::Pass(1)] {
                life.act(&action);
                life.check();
            }
            rounds += 1;
            prop_assert!(rounds < 500, "no progress: {:?} {}", life.world.state(), life.world.reason());
        }
        prop_assert_eq!(life.world.job.phase.end().expect("decided").state, JobState::Succeeded);
    }
}
