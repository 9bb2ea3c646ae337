//! What users change while a job goes on: the number of workers, and whether it rests.

use proptest::prelude::*;

use super::*;

impl World {
    fn join_worker(&mut self) {
        let name = format!("w{}", self.workers.len());
        self.workers.push(join(&mut self.fleet, MemberRole::Worker, &name));
        self.look();
    }

    fn kill_worker(&mut self, worker: usize) {
        let gone = self.workers[worker];
        let Ok(stream) = self.fleet.stream_opened(gone) else { return };
        self.fleet.stream_broken(gone, stream);
        self.job.worker_gone(self.now, gone);
        self.look();
    }

    fn scale(&mut self, workers: u32) {
        self.job.scale(self.now, workers, &self.fleet).expect("it goes on");
        self.look();
    }

    fn workers(&self) -> (u32, u32, u32, u32) {
        let status = self.status();
        (status.workers, status.workers_standby, status.workers_min, status.workers_max)
    }
}

/// Steps of four microbatches, one for each lease when four workers share them.
fn shared_steps() -> World {
    World::training(parse("[fleet]\nworkers = { min = 2, max = 4 }\n"), 4)
}

fn train(lease: &pb::Lease) -> (u64, u32) {
    match &lease.work {
        Some(pb::lease::Work::Train(task)) => (task.first, task.count),
        other => panic!("expected training, found {other:?}"),
    }
}

#[test]
fn scaling_down_lets_workers_finish_what_they_hold_and_gives_them_nothing_new() {
    let mut world = shared_steps();
    assert_eq!(world.workers(), (4, 0, 2, 4));
    let held = world.lease(3).expect("work");
    world.scale(1);
    assert_eq!(world.workers(), (1, 3, 1, 1));
    assert_eq!(world.job.renew(world.now, world.workers[3], &[LeaseId(held.id)]), [LeaseId(held.id)]);
    world.complete(3, &held, report(&held));
    assert_eq!(
        [1, 3].map(|worker| world.refused(worker)),
        [Why::StandsBy { max: 1 }, Why::StandsBy { max: 1 }]
    );
    assert!(world.lease(0).is_some());
    world.scale(3);
    assert_eq!(world.workers(), (3, 1, 2, 3));
    assert!(world.lease(2).is_some());
    assert_eq!(world.state(), JobState::Running);
}

#[test]
fn each_change_of_the_number_is_told_once() {
    let mut world = shared_steps();
    for workers in [2, 2, 3] {
        world.scale(workers);
    }
    let told: Vec<_> = world
        .events()
        .into_iter()
        .filter_map(|event| if let Event::Fleet(event) = event { Some(event.reason) } else { None })
        .collect();
    assert_eq!(
        told,
        [
            "a user scaled the job to 2 workers (at least 2)",
            "a user scaled the job to 3 workers (at least 2)"
        ]
    );
}

#[test]
fn who_stands_by_takes_over_at_once_what_a_dead_one_held() {
    let mut world = shared_steps();
    world.scale(1);
    let held = world.lease(0).expect("work");
    assert!(world.lease(1).is_none());
    world.kill_worker(0);
    assert_eq!(world.workers(), (1, 2, 1, 1));
    let again = world.lease(1).expect("the work of the dead");
    assert_eq!((train(&again), again.attempt), (train(&held), 2));
    world.join_worker();
    assert_eq!(world.workers(), (1, 3, 1, 1));
    assert!(world.lease(2).is_none() && world.lease(4).is_none(), "a join moves nobody");
}

#[test]
fn a_paused_job_hands_out_nothing_and_takes_what_is_held() {
    let mut world = World::training(parse(""), 2);
    let held = world.lease(0).expect("work");
    world.pass(SECOND);
    world.job.renew(world.now, world.workers[0], &[LeaseId(held.id)]);
    for _ in 0..2 {
        world.job.pause(world.now).expect("it goes on");
        assert_eq!(world.state(), JobState::Paused);
        assert_eq!([0, 1].map(|worker| world.refused(worker)), [Why::Paused, Why::Paused]);
    }
    world.pass(9 * SECOND);
    world.complete(0, &held, report(&held));
    assert!(world.status().samples_applied > 0);
    for _ in 0..2 {
        world.resume("").expect("it goes on");
        assert_eq!(world.state(), JobState::Running);
    }
    world.pass(SECOND);
    let events = world.states();
    assert_eq!(events[events.len() - 3..], [JobState::Running, JobState::Paused, JobState::Running]);
    assert_eq!(world.status().training_ms, 2000, "paused time is no training");
    assert!(world.lease(0).is_some());
}

#[test]
fn a_pause_does_not_look_like_slowness() {
    let mut world = World::training(parse(""), 1);
    let lease = world.lease(0).expect("a step");
    world.pass(SECOND);
    world.job.renew(world.now, world.workers[0], &[LeaseId(lease.id)]);
    world.job.pause(world.now).expect("it goes on");
    world.pass(20 * SECOND);
    world.resume("").expect("it goes on");
    world.pass(SECOND);
    world.complete(0, &lease, report(&lease));
    let rates: Vec<_> = world
        .events()
        .into_iter()
        .filter_map(
            |event| if let Event::Train(event) = event { Some(event.samples_per_second) } else { None },
        )
        .collect();
    assert_eq!(rates[0], 2.0, "4 records in 2 s of training: {rates:?}");
}

#[test]
fn a_job_may_be_paused_before_it_trains_and_holds_at_the_next_lease() {
    let mut world = World::new(parse(""), 1, &["p"]);
    let lease = world.lease(0).expect("a file to index");
    world.job.pause(world.now).expect("it goes on");
    let found = pb::Indexed {
        records: 10,
        shape: vec![2],
        label_min: Some(0),
        label_max: Some(9),
        crc32c: Some(7),
        bytes: 80,
        ..Default::default()
    };
    world.complete(0, &lease, Report::Indexed(found));
    assert_eq!(world.state(), JobState::Paused);
    assert!(world.lease(0).is_none());
    world.resume("").expect("it goes on");
    world.initialize();
}

#[test]
fn a_paused_job_can_be_scaled_and_cancelled() {
    let mut world = World::training(parse(""), 2);
    let lease = world.lease(0).expect("work");
    world.complete(0, &lease, report(&lease));
    world.job.pause(world.now).expect("it goes on");
    world.scale(1);
    assert_eq!((world.state(), world.workers()), (JobState::Paused, (1, 1, 1, 1)));
    world.job.cancel(world.now, false);
    world.job.on_ledgers(world.now, 1, Ok(vec![ledger(2)]));
    let lease = world.lease(0).expect("an export, though it was paused");
    assert_eq!(lease.work, exported(Some(2)));
}

#[test]
fn a_paused_job_whose_last_step_is_done_exports_once_it_is_resumed() {
    let mut spec = parse("");
    spec.data.validation_fraction = None;
    let mut world = World::training(spec, 1);
    let first = world.lease(0).expect("a step");
    world.complete(0, &first, report(&first));
    let mut held = Vec::new();
    while let Some(lease) = world.lease(0) {
        held.push(lease);
    }
    world.job.pause(world.now).expect("it goes on");
    held.iter().for_each(|lease| world.complete(0, lease, report(lease)));
    assert!(world.job.phase.training().is_some_and(Training::is_done), "{held:?}");
    world.pass(SECOND);
    assert_eq!((world.state(), world.lease(0)), (JobState::Paused, None));
    world.resume("").expect("it goes on");
    assert_eq!(world.state(), JobState::Exporting);
    assert!(matches!(world.lease(0).expect("an export").work, Some(pb::lease::Work::Export(_))));
}

#[test]
fn a_job_that_ends_cannot_be_changed_any_more() {
    let mut world = World::training(parse(""), 2);
    world.job.cancel(world.now, true);
    for _ in 0..2 {
        let refused =
            [world.job.scale(world.now, 1, &world.fleet), world.job.pause(world.now), world.resume("")];
        for (refused, what) in refused.into_iter().zip(["scaled", "paused", "resumed"]) {
            let failure = refused.unwrap_err();
            assert_eq!(failure.kind, Kind::Ended);
            let state = world.state().name();
            let expected = format!("digits-1 cannot be {what} any more, it is {state}: cancelled by a user");
            assert!(failure.message.starts_with(&expected), "{failure}");
        }
        world.job.on_finished(world.now, Ok(vec![]));
        assert_eq!(world.workers(), (0, 0, 1, 64), "nobody takes part in what has ended");
    }
}

#[test]
fn what_a_dead_worker_held_is_finished_even_while_paused_when_others_wait_for_it() {
    let mut world = shared_steps();
    // Every worker has a quarter of step 0; one of them holds work of step 1 too, which needs all
    // of step 0.
    let first: Vec<_> = (0..4).map(|worker| world.lease(worker).expect("work")).collect();
    let waiting = world.lease(0).expect("work of the next step");
    assert!(train(&waiting).0 >= 4, "{waiting:?}");
    world.job.pause(world.now).expect("it goes on");
    world.kill_worker(3);
    let again = world.lease(1).expect("what the dead one left");
    assert_eq!(train(&again), train(&first[3]));
    assert!(world.lease(1).is_none() && world.lease(2).is_none());
    for (worker, lease) in [(0, &first[0]), (1, &first[1]), (2, &first[2]), (1, &again), (0, &waiting)] {
        world.complete(worker, lease, report(lease));
    }
    assert!((0..3).all(|worker| world.lease(worker).is_none()));
    assert_eq!(world.state(), JobState::Paused);
}

/// Something that happens to a job.
#[derive(Clone, Copy, Debug)]
enum Act {
    Lease(usize),
    Complete(usize),
    Scale(u32),
    Pause,
    Resume,
    Join,
    Kill(usize),
}

fn act() -> impl Strategy<Value = Act> {
    prop_oneof![
        4 => (0usize..6).prop_map(Act::Lease),
        4 => (0usize..6).prop_map(Act::Complete),
        1 => (1u32..5).prop_map(Act::Scale),
        1 => Just(Act::Pause),
        1 => Just(Act::Resume),
        1 => Just(Act::Join),
        1 => (0usize..6).prop_map(Act::Kill),
    ]
}

proptest! {
    #[test]
    fn whatever_users_do_every_microbatch_is_trained_once(acts in proptest::collection::vec(act(), 0..120)) {
        let mut spec = parse("[fleet]\nworkers = { min = 2, max = 3 }\n");
        (spec.epochs, spec.data.validation_fraction) = (4, None);
        (spec.limits.deaths_max, spec.limits.attempts_max) = (1000, 1000);
        let mut world = World::training(spec, 3);
        let microbatches = world.job.phase.facts().expect("indexed").plan.microbatches();
        let mut held: Vec<(usize, pb::Lease)> = Vec::new();
        let mut done = std::collections::BTreeMap::new();
        let finish = [Act::Resume, Act::Scale(2), Act::Join, Act::Join];
        let rest = (0..1000).flat_map(|_| (0..99).map(Act::Lease).chain((0..9).map(Act::Complete)));
        for act in acts.into_iter().chain(finish).chain(rest) {
            if world.job.phase.training().is_some_and(Training::is_done) {
                break;
            }
            match act {
                Act::Lease(worker) if worker < world.workers.len() && held.len() < 99 => {
                    held.extend(world.lease(worker).map(|lease| (worker, lease)));
                }
                Act::Complete(lease) if lease < held.len() => {
                    let (worker, lease) = held.remove(lease);
                    if world.job.holds(world.workers[worker], LeaseId(lease.id)) {
                        let (first, count) = train(&lease);
                        (first..first + u64::from(count)).for_each(|id| *done.entry(id).or_insert(0) += 1);
                        world.complete(worker, &lease, report(&lease));
                    }
                }
                Act::Scale(workers) => world.scale(workers),
                Act::Pause => world.job.pause(world.now).expect("it goes on"),
                Act::Resume => world.resume("").expect("it goes on"),
                Act::Join if world.workers.len() < 40 => world.join_worker(),
                Act::Kill(worker) if worker < world.workers.len() => world.kill_worker(worker),
                _ => {}
            }
            let (crew, standby, min, max) = world.workers();
            prop_assert!(crew <= max && (standby == 0 || crew == max) && (1..=max).contains(&min));
        }
        prop_assert_eq!(done.len() as u64, microbatches);
        prop_assert!(done.values().all(|&times| times == 1), "{:?}", done);
    }
}
