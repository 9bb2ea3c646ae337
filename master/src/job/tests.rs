//! A job with a scripted fleet: every way it can go, without a clock or a network.

mod checkpoints;
mod control;
mod measuring;
mod numerics;

use std::path::Path;

use proto::ids::Step;
use proto::pb::complete_request::Result as Report;
use proto::spec;

use super::*;
use crate::lease::{Asker, LeaseIds};
use crate::membership::{MemberRole, Process};
use crate::scheduler;

const SECOND: Duration = Duration::from_secs(1);

const JOB: &str = r#"
name = "digits"
epochs = 2
model = { builtin = "softmax", metrics = ["accuracy"] }
data = { format = "idx", train = { features = ["x.gz"], labels = ["y.gz"] }, validation_fraction = 0.2 }
batch = { micro = 1, effective = 4 }
optimizer = { kind = "sgd", learning_rate = 0.5, schedule = { kind = "step", every_steps = 2, factor = 0.5 } }
limits = { attempts_max = 2, deaths_max = 2 }
"#;

pub(super) fn spec() -> JobSpec {
    let mut spec = parse("");
    spec.data.validation_fraction = None;
    spec
}

fn parse(more: &str) -> JobSpec {
    spec::parse(&format!("{JOB}{more}"), Path::new("job.toml"), &[]).expect("a good job")
}

/// A job, its fleet and its time. 10 records: 8 train (2 steps of 4 an epoch), 2 validate.
struct World {
    job: Job,
    fleet: Membership,
    now: Now,
    ids: LeaseIds,
    workers: Vec<IncarnationId>,
}

impl World {
    fn new(spec: JobSpec, workers: usize, ps: &[&str]) -> Self {
        let mut fleet = Membership::new(IncarnationId(1), 5 * SECOND, 99);
        for name in ps {
            join(&mut fleet, MemberRole::Ps, name);
        }
        let now = Now::default();
        let workers = (0..workers).map(|w| join(&mut fleet, MemberRole::Worker, &format!("w{w}"))).collect();
        let settings = Settings { claim: 3 * SECOND, ps_grace: 30 * SECOND, stop: 10 * SECOND };
        let job = Job::new(JobId(1), spec, Vec::new(), settings, now);
        let mut world = Self { job, fleet, now, ids: LeaseIds::starting_at(1), workers };
        world.look();
        world
    }

    /// The job looks at the fleet.
    fn look(&mut self) {
        self.schedule();
        self.job.on_fleet(self.now, &self.fleet);
    }

    /// The crew follows the demand of the job.
    fn schedule(&mut self) {
        let able = scheduler::able(&self.fleet);
        let crews = scheduler::schedule(&able, [(self.job.id, self.job.demand(), self.job.crew())]);
        crews.into_iter().for_each(|(_, crew)| self.job.on_crew(crew));
    }

    fn resume(&mut self, numerics: &str) -> Result<(), Failure> {
        self.job.resume(self.now, numerics, &self.fleet)?;
        self.look();
        Ok(())
    }

    /// Creates a job that trains on one ps.
    fn training(spec: JobSpec, workers: usize) -> Self {
        let mut world = Self::new(spec, workers, &["p"]);
        world.index();
        world.initialize();
        world
    }

    fn pass(&mut self, time: Duration) {
        self.now.since_start += time;
        // Everybody who is there says so.
        let ps: Vec<_> = self.fleet.ps().map(|(id, _)| id).collect();
        for id in self.workers.iter().chain(&ps) {
            let _ = self.fleet.beat(self.now.since_start, *id, false);
        }
        self.job.on_tick(self.now, &self.fleet);
        self.look();
    }

    fn state(&self) -> JobState {
        self.job.state().0
    }

    fn reason(&self) -> String {
        self.job.state().1
    }

    fn lease(&mut self, worker: usize) -> Option<pb::Lease> {
        if self.job.is_unscheduled() {
            self.schedule();
        }
        self.job.lease(self.now, &mut self.ids, Asker::new(self.workers[worker], 0)).ok()
    }

    /// Returns why a worker gets no work.
    fn refused(&mut self, worker: usize) -> Why {
        if self.job.is_unscheduled() {
            self.schedule();
        }
        let asker = Asker::new(self.workers[worker], 0);
        self.job.lease(self.now, &mut self.ids, asker).expect_err("no work")
    }

    fn complete(&mut self, worker: usize, lease: &pb::Lease, report: Report) {
        self.job.complete(self.now, self.workers[worker], LeaseId(lease.id), report).expect("a good report");
    }

    fn index(&mut self) {
        let lease = self.lease(0).expect("a file to index");
        let found = pb::Indexed {
            records: 10,
            shape: vec![2],
            label_min: Some(0),
            label_max: Some(9),
            crc32c: Some(7),
            bytes: 80,
            ..Default::default()
        };
        self.complete(0, &lease, Report::Indexed(found));
    }

    fn describe(&mut self, lease: &pb::Lease) -> Vec<(PsAddress, pb::OpenRequest)> {
        let (worker, id) = (self.workers[0], LeaseId(lease.id));
        let tensors = vec![TensorSpec::parameter("w", [3])];
        let open =
            self.job.describe(worker, id, tensors, &self.fleet, &BTreeMap::new()).expect("a placement");
        self.job.described(worker, id).expect("a good lease");
        open
    }

    fn initialize(&mut self) {
        let lease = self.lease(0).expect("a model to initialize");
        self.describe(&lease);
        self.complete(0, &lease, Report::Initialized(pb::Initialized::default()));
        self.survey(&[0]);
        assert_eq!(self.state(), JobState::Running, "{}", self.reason());
    }

    /// The ps answer how many steps each partition has applied, and the journal takes what follows.
    fn survey(&mut self, versions: &[u64]) {
        self.answer_survey(versions);
        self.write();
    }

    /// The journal takes what there is, so that a training which waits for that begins.
    fn write(&mut self) {
        let effects = std::mem::take(&mut self.job.effects);
        for effect in effects {
            match effect {
                Effect::Train(placement) => self.job.train(self.now, placement),
                other => self.job.effects.push(other),
            }
        }
    }

    /// The ps answer how many steps each partition has applied.
    fn answer_survey(&mut self, versions: &[u64]) {
        let effects = self.effects();
        let asked = effects.iter().rev().find_map(|effect| match effect {
            Effect::Ask(placement, _) => Some(*placement),
            _ => None,
        });
        let asked = asked.unwrap_or_else(|| panic!("nobody asks the ps: {effects:?}"));
        let era = self.job.era.get();
        let ledgers = (0..).zip(versions).map(|(partition, &version)| pb::PartitionLedger {
            partition,
            era,
            ..ledger(version)
        });
        self.job.on_ledgers(self.now, asked, Ok(ledgers.collect()));
    }

    /// The connection of a ps breaks.
    fn cut(&mut self, name: &str) {
        let ps = self.fleet.ps_named(name).expect("it lives").0;
        let stream = self.fleet.stream_opened(ps).expect("known");
        self.fleet.stream_broken(ps, stream);
        self.pass(SECOND);
    }

    /// A ps is started again, without what it had.
    fn restart(&mut self, name: &str) {
        let again = join(&mut self.fleet, MemberRole::Ps, name);
        self.pass(SECOND);
        let asks =
            |effect: &Effect| matches!(effect, Effect::Verify(ps, of) if ps.name == name && *of == again);
        assert!(self.effects().iter().any(asks));
        self.job.on_ps_answer(self.now, &address(name), again, Ok(vec![]));
        self.pass(SECOND);
    }

    /// Worker 0 trains and measures all that there is for it.
    fn work(&mut self) {
        while let Some(lease) = self.lease(0) {
            if let Some(pb::lease::Work::Export(_)) = lease.work {
                return;
            }
            self.complete(0, &lease, report(&lease));
        }
    }

    fn effects(&mut self) -> Vec<Effect> {
        let effects = self.job.take_effects();
        effects.into_iter().filter(|effect| !matches!(effect, Effect::Tell(..) | Effect::Lost(_))).collect()
    }

    fn events(&self) -> Vec<Event> {
        self.job.log.after(0, usize::MAX).expect("few").into_iter().filter_map(|event| event.kind).collect()
    }

    fn states(&self) -> Vec<JobState> {
        let state = |event| match event {
            Event::State(event) => Some(event.state()),
            _ => None,
        };
        self.events().into_iter().filter_map(state).collect()
    }

    /// Steps of the training events, in the order in which a user sees them.
    fn told(&self) -> Vec<u64> {
        let step = |event| match event {
            Event::Train(event) => Some(event.step),
            _ => None,
        };
        self.events().into_iter().filter_map(step).collect()
    }

    fn fail(&mut self, worker: usize, lease: &pb::Lease, fatal: bool, diverged_at: Option<u64>) {
        let request =
            pb::FailRequest { message: "boom".to_owned(), fatal, diverged_at, ..Default::default() };
        assert!(self.job.fail(self.now, self.workers[worker], "worker `w`", LeaseId(lease.id), &request));
    }

    fn status(&self) -> pb::JobStatus {
        self.job.status(self.now)
    }
}

fn join(fleet: &mut Membership, role: MemberRole, name: &str) -> IncarnationId {
    let process = Process::new(role, name, &format!("http://{name}"));
    let (incarnation, _) = fleet.register(Duration::ZERO, process).expect("room");
    fleet.beat(Duration::ZERO, incarnation, false).expect("known");
    incarnation
}

fn address(name: &str) -> PsAddress {
    PsAddress { name: name.to_owned(), url: format!("http://{name}"), partitions: vec![0] }
}

fn report(lease: &pb::Lease) -> Report {
    match lease.work.as_ref().expect("work") {
        pb::lease::Work::Train(task) => {
            let loss = |id: u64| pb::MicrobatchReport { loss_sum: id as f64, samples: 1, skipped: 0 };
            let ids = task.first..task.first + u64::from(task.count);
            Report::Trained(pb::Trained { microbatches: ids.map(loss).collect(), ..pb::Trained::default() })
        }
        pb::lease::Work::Evaluate(task) => Report::Evaluated(pb::Evaluated {
            loss_sum: 3.0,
            samples: task.end - task.begin,
            metric_sums: BTreeMap::from([("accuracy".to_owned(), 1.0)]),
            ..pb::Evaluated::default()
        }),
        pb::lease::Work::Predict(task) => {
            Report::Predicted(pb::Predicted { samples: task.end - task.begin, bytes: 10 })
        }
        other => panic!("{other:?}"),
    }
}

fn ledger(version: u64) -> pb::PartitionLedger {
    pb::PartitionLedger {
        version: Some(version),
        watermark: version,
        microbatches_applied: 4 * version,
        samples_applied: 4 * version,
        duplicates_dropped: 3,
        ..Default::default()
    }
}

fn exported(version: Option<u64>) -> Option<pb::lease::Work> {
    Some(pb::lease::Work::Export(pb::ExportTask { version, era: 0 }))
}

#[test]
fn a_job_goes_from_submission_to_success() {
    let mut world = World::new(parse(""), 0, &[]);
    assert_eq!(world.state(), JobState::Pending);
    assert_eq!(world.reason(), "waits for ps (0 of 1 live) and workers (0 of 1 live)");
    join(&mut world.fleet, MemberRole::Ps, "p");
    world.workers = vec![join(&mut world.fleet, MemberRole::Worker, "w")];
    assert!(world.lease(0).is_none(), "nobody told the job yet");
    world.pass(SECOND);
    world.index();
    assert_eq!((world.state(), world.status().steps), (JobState::Indexing, 4));

    let lease = world.lease(0).expect("a model to initialize");
    assert_eq!(world.job.reply(&Indexes::default()).placement, None);
    let open = world.describe(&lease);
    assert_eq!(
        (open[0].0.clone(), open[0].1.partitions, open[0].1.plan.unwrap().records),
        (address("p"), 1, 8)
    );
    let placement = world.job.reply(&Indexes::default()).placement.expect("open");
    assert_eq!(
        (placement.partitions[0].ps.as_str(), world.job.reply(&Indexes::default()).label_max),
        ("p", Some(9))
    );
    world.complete(0, &lease, Report::Initialized(pb::Initialized::default()));
    assert_eq!(world.refused(0), Why::Surveying, "the ps are asked first");
    world.survey(&[0]);

    world.pass(2 * SECOND);
    world.work();
    assert_eq!(world.state(), JobState::Exporting, "{}", world.reason());
    let unpin = |version| Effect::Unpin(vec![address("p")], Era(0), Version(version), None);
    assert_eq!(world.effects(), [unpin(2), unpin(4)]);
    // The lease that `work` found and left was lost on its way; it comes back.
    world.pass(3 * SECOND);
    let lease = world.lease(0).expect("an export");
    assert_eq!((lease.work.clone(), lease.attempt), (exported(Some(4)), 2));
    let artifacts = vec![proto::artifact::describe("model.safetensors", b"weights")];
    world.complete(0, &lease, Report::Exported(pb::Exported { artifacts: artifacts.clone() }));
    assert_eq!(world.effects(), [Effect::Finish(vec![address("p")])]);
    assert!(!world.job.is_ended());
    world.job.on_finished(world.now, Ok(vec![ledger(4)]));
    assert_eq!(world.effects(), [Effect::Close(vec![address("p")], Era(0))]);
    assert!(world.job.is_ended());

    let status = world.status();
    assert_eq!((status.state(), status.reason.as_str()), (JobState::Succeeded, "trained 2 epochs"));
    assert_eq!((status.steps_done, status.microbatches_applied, status.samples_applied), (4, 16, 16));
    assert_eq!((status.duplicates_dropped, status.leases_expired, status.workers_seen), (3, 1, 1));
    assert_eq!((status.wall_ms, status.training_ms, status.artifacts), (6000, 2000, artifacts));
    assert_eq!(
        status.final_metrics,
        BTreeMap::from([("accuracy".to_owned(), 0.5), ("loss".to_owned(), 1.5)])
    );
    assert_eq!(
        world.states(),
        [
            JobState::Pending,
            JobState::Indexing,
            JobState::Indexing,
            JobState::Running,
            JobState::Exporting,
            JobState::Exporting,
            JobState::Succeeded
        ]
    );
}

#[test]
fn every_step_is_told_with_its_loss_and_learning_rate() {
    let mut world = World::training(parse(""), 1);
    world.pass(2 * SECOND);
    world.work();
    let train = |event| match event {
        Event::Train(event) => Some(event),
        _ => None,
    };
    let told: Vec<_> = world.events().into_iter().filter_map(train).collect();
    let numbers: Vec<_> =
        told.iter().map(|event| (event.step, event.epoch, event.loss, event.learning_rate)).collect();
    // Step t has the microbatches 4t to 4t + 3, each with its number as loss.
    assert_eq!(numbers, [(0, 0, 1.5, 0.5), (1, 0, 5.5, 0.5), (2, 1, 9.5, 0.25), (3, 1, 13.5, 0.25)]);
    assert_eq!((told[0].samples, told[0].steps, told[0].epochs, told[0].workers), (4, 4, 2, 1));
    assert_eq!(told[0].samples_per_second, 2.0);
}

#[test]
fn measuring_goes_before_training_and_training_goes_on_meanwhile() {
    let mut spec = parse("");
    spec.epochs = 9;
    let mut world = World::training(spec, 2);
    while world.job.phase.training().expect("it trains").watermark() < Step(2) {
        let lease = world.lease(0).expect("training");
        world.complete(0, &lease, report(&lease));
    }
    let measuring = world.lease(0).expect("work");
    let task = pb::EvaluateTask { epoch: 0, version: 2, era: 0, begin: 0, end: 2 };
    assert_eq!(measuring.work, Some(pb::lease::Work::Evaluate(task)));
    let training = world.lease(1).expect("work");
    assert!(matches!(training.work, Some(pb::lease::Work::Train(_))), "{training:?}");
    assert_eq!(world.effects(), []);
    world.complete(0, &measuring, report(&measuring));
    assert_eq!(world.effects(), [Effect::Unpin(vec![address("p")], Era(0), Version(2), None)]);
    assert!(world.events().iter().any(|event| matches!(event, Event::Evaluation(event) if event.step == 2)));
}

#[test]
fn whoever_is_beaten_by_a_copy_is_told_at_once() {
    let mut world = World::training(spec(), 2);
    let [slow, fast] = [world.lease(1), world.lease(0)].map(|lease| lease.expect("half a step"));
    world.pass(SECOND);
    world.complete(0, &fast, report(&fast));
    world.pass(SECOND + Duration::from_millis(1));
    let copy = world.job.copy(world.now, &mut world.ids, Asker::new(world.workers[0], 0)).expect("a copy");
    assert_eq!(copy.task, slow.task);
    world.effects();
    world.complete(0, &copy, report(&copy));
    assert_eq!(world.effects(), [Effect::Recall(world.workers[1], LeaseId(slow.id))]);
}

#[test]
fn too_few_workers_pause_a_running_job_and_too_many_stand_by() {
    let spec = parse("[fleet]\nworkers = { min = 2, max = 2 }\n");
    let mut world = World::training(spec, 3);
    let first = world.lease(0).expect("work");
    assert!(world.lease(2).is_none(), "the third stands by");
    let gone = world.workers[1];
    let stream = world.fleet.stream_opened(gone).expect("known");
    world.fleet.stream_broken(gone, stream);
    world.job.worker_gone(world.now, gone);
    world.pass(SECOND);
    assert!(world.lease(2).is_some(), "and takes the place of one that is gone");
    let stream = world.fleet.stream_opened(world.workers[2]).expect("known");
    world.fleet.stream_broken(world.workers[2], stream);
    world.job.worker_gone(world.now, world.workers[2]);
    world.pass(SECOND);
    assert_eq!(
        (world.state(), world.reason().as_str()),
        (JobState::Pending, "waits for workers (1 of 2 live)")
    );
    assert!(world.lease(0).is_none());
    world.complete(0, &first, report(&first));
    world.workers[2] = join(&mut world.fleet, MemberRole::Worker, "w3");
    world.pass(SECOND);
    assert_eq!((world.state(), world.status().training_ms), (JobState::Running, 2000));
    assert!(world.lease(0).is_some());
}

#[test]
fn files_that_do_not_go_together_fail_the_job_at_once() {
    let mut world = World::new(parse(""), 1, &["p"]);
    let lease = world.lease(0).expect("a file to index");
    let found = pb::Indexed {
        records: 10,
        shape: vec![2],
        label_min: Some(-3),
        label_max: Some(9),
        crc32c: Some(7),
        bytes: 80,
        ..Default::default()
    };
    world.complete(0, &lease, Report::Indexed(found));
    assert_eq!(world.state(), JobState::Failed);
    assert!(world.reason().contains("`x.gz` has label -3"), "{}", world.reason());
    assert_eq!(world.effects(), [Effect::Close(vec![], Era(0))]);
}

#[test]
fn what_fails_too_often_fails_the_job_with_its_last_error() {
    let mut world = World::new(parse(""), 1, &["p"]);
    let lease = world.lease(0).expect("a file to index");
    world.fail(0, &lease, false, None);
    let warning = Event::Warning(pb::WarningEvent { message: "worker `w`: boom".to_owned() });
    assert!(world.events().contains(&warning));
    assert_eq!(world.state(), JobState::Indexing);
    let lease = world.lease(0).expect("a second attempt");
    world.fail(0, &lease, false, None);
    assert_eq!(world.state(), JobState::Failed);
    assert!(world.reason().starts_with("`x.gz` cannot be indexed: 2 attempts failed"), "{}", world.reason());
    assert!(world.reason().ends_with("last error: worker `w`: boom"), "{}", world.reason());
    assert_eq!(world.status().leases_expired, 2);
}

#[test]
fn a_fatal_failure_saves_what_all_partitions_have() {
    let mut world = World::training(parse(""), 2);
    let (mine, other) = (world.lease(0).expect("work"), world.lease(1).expect("work"));
    world.fail(0, &mine, true, None);
    assert_eq!(world.state(), JobState::Exporting);
    let report = report(&other);
    assert!(
        world.job.complete(world.now, world.workers[1], LeaseId(other.id), report).is_err(),
        "nothing counts any more"
    );
    // The two hear of it with their heartbeats, and then list no lease twice.
    for worker in [0, 1, 0] {
        assert_eq!(world.job.renew(world.now, world.workers[worker], &[]), []);
        assert_eq!(world.effects(), []);
    }
    world.job.renew(world.now, world.workers[1], &[LeaseId(other.id)]);
    world.job.renew(world.now, world.workers[1], &[]);
    assert_eq!(world.effects(), []);
    world.job.renew(world.now, world.workers[1], &[]);
    assert_eq!(world.effects(), [Effect::Ask(1, vec![address("p")])]);
    world.job.on_ledgers(world.now, 1, Ok(vec![ledger(3)]));
    let lease = world.lease(1).expect("an export");
    assert_eq!(lease.work, exported(Some(3)));
    world.complete(1, &lease, Report::Exported(pb::Exported { artifacts: vec![pb::Artifact::default()] }));
    world.job.on_finished(world.now, Ok(vec![ledger(3)]));
    let status = world.status();
    assert_eq!(
        (status.state(), status.reason.as_str(), status.steps_done),
        (JobState::Failed, "worker `w`: boom", 3)
    );
    assert_eq!(status.artifacts.len(), 1);
}

#[test]
fn a_worker_that_does_not_listen_cannot_hold_up_the_end() {
    let mut world = World::training(parse(""), 2);
    let (mine, _other) = (world.lease(0).expect("work"), world.lease(1).expect("work"));
    world.fail(0, &mine, true, None);
    world.job.worker_gone(world.now, world.workers[0]);
    world.pass(9 * SECOND);
    assert_eq!(world.effects(), []);
    world.pass(SECOND);
    assert_eq!(world.effects(), [Effect::Ask(1, vec![address("p")])]);
}

#[test]
fn divergence_exports_the_last_version_with_a_finite_loss() {
    // Step t is computed from version max(0, t - delay); the one before that is the last good one.
    for (consistency, step, expected) in [
        ("mode = 'sync'", 3, Some(exported(Some(2)))),
        ("mode = 'pipelined'", 3, Some(exported(Some(1)))),
        ("mode = 'sync'", 1, None),
        ("mode = 'pipelined'", 2, None),
        ("mode = 'async'", 3, None),
        ("mode = 'sync'", 99, None),
    ] {
        let mut world = World::training(parse(&format!("[consistency]\n{consistency}\n")), 1);
        let lease = world.lease(0).expect("work");
        world.fail(0, &lease, true, Some(step));
        world.job.worker_gone(world.now, world.workers[0]);
        let exports = world.lease(0).map(|lease| lease.work);
        assert_eq!(exports, expected, "{consistency}, step {step}");
        let next = if expected.is_some() { vec![] } else { vec![Effect::Finish(vec![address("p")])] };
        assert_eq!(world.effects(), next);
    }
}

#[test]
fn cancel_saves_what_is_trained_unless_forced_or_nothing_is() {
    for (version, force, asked) in [(2, false, true), (0, false, true), (2, true, false)] {
        let mut world = World::training(parse(""), 1);
        world.job.cancel(world.now, force);
        if asked {
            assert_eq!(world.effects(), [Effect::Ask(1, vec![address("p")])]);
            world.job.on_ledgers(world.now, 1, Ok(vec![ledger(version)]));
        }
        if asked && version > 0 {
            let lease = world.lease(0).expect("an export");
            assert_eq!(lease.work, exported(Some(version)));
            world.job.cancel(world.now, false);
            assert_eq!(world.state(), JobState::Exporting, "a second cancel changes nothing");
            world.job.cancel(world.now, true);
        }
        assert_eq!(world.effects(), [Effect::Finish(vec![address("p")])]);
        world.job.on_finished(world.now, Ok(vec![]));
        assert_eq!((world.state(), world.reason().as_str()), (JobState::Cancelled, "cancelled by a user"));
    }
}

#[test]
fn a_job_that_waits_is_cancelled_at_once() {
    let mut world = World::new(parse(""), 0, &[]);
    world.job.cancel(world.now, false);
    assert_eq!(world.states(), [JobState::Pending, JobState::Cancelled]);
    world.job.cancel(world.now, true);
    assert_eq!(world.states().len(), 2);
}

#[test]
fn in_arrival_order_the_newest_is_exported() {
    let mut spec = parse("[consistency]\nmode = 'async'\n");
    spec.data.validation_fraction = None;
    let mut world = World::training(spec, 1);
    let lease = world.lease(0).expect("work");
    world.complete(0, &lease, report(&lease));
    world.work();
    world.pass(3 * SECOND);
    assert_eq!(world.lease(0).and_then(|lease| lease.work), exported(None));
}

#[test]
fn an_export_that_fails_too_often_fails_the_job_with_both_reasons() {
    let mut world = World::training(parse(""), 1);
    world.job.cancel(world.now, false);
    world.job.on_ledgers(world.now, 1, Ok(vec![ledger(2)]));
    for _ in 0..2 {
        let lease = world.lease(0).expect("an export");
        world.fail(0, &lease, false, None);
    }
    world.job.on_finished(world.now, Ok(vec![]));
    assert_eq!(world.state(), JobState::Cancelled);
    let reason = world.reason();
    assert!(reason.starts_with("cancelled by a user; the model cannot be exported: 2 attempts"), "{reason}");
}

#[test]
fn reports_that_do_not_fit_their_task_change_nothing() {
    let mut world = World::new(parse(""), 1, &["p"]);
    let refuse = |world: &mut World, lease: &pb::Lease, report: Report, expected: &str| {
        let failure = world.job.complete(world.now, world.workers[0], LeaseId(lease.id), report).unwrap_err();
        assert!(failure.kind == Kind::Malformed && failure.message.contains(expected), "{failure}");
        assert!(world.job.holds(world.workers[0], LeaseId(lease.id)));
    };
    let lease = world.lease(0).expect("a file to index");
    refuse(&mut world, &lease, Report::Initialized(pb::Initialized::default()), "expected `indexed`");
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
    let lease = world.lease(0).expect("a model to initialize");
    refuse(&mut world, &lease, Report::Initialized(pb::Initialized::default()), "call Describe first");
    world.describe(&lease);
    world.complete(0, &lease, Report::Initialized(pb::Initialized::default()));
    world.survey(&[0]);
    let lease = world.lease(0).expect("training");
    let trained = |loss_sum, samples, count| {
        Report::Trained(pb::Trained {
            microbatches: vec![pb::MicrobatchReport { loss_sum, samples, skipped: 0 }; count],
            ..pb::Trained::default()
        })
    };
    refuse(&mut world, &lease, Report::Initialized(pb::Initialized::default()), "expected `trained`");
    refuse(&mut world, &lease, trained(1.0, 1, 3), "expected 4 reports, found 3");
    refuse(&mut world, &lease, trained(1.0, 2, 4), "expected 1 with those skipped, or 0, found 2");
    refuse(&mut world, &lease, trained(f64::NAN, 1, 4), "expected a finite number");
    assert_eq!(world.status().samples_applied, 0);
    let (worker, id) = (world.workers[0], LeaseId(lease.id));
    let too_much =
        pb::Trained { microbatches: vec![pb::MicrobatchReport::default(); 5], ..pb::Trained::default() };
    assert!(world.job.release(world.now, worker, id, &too_much).is_err());
    let some = pb::Trained {
        microbatches: vec![pb::MicrobatchReport { loss_sum: 1.0, samples: 1, skipped: 0 }; 3],
        ..pb::Trained::default()
    };
    assert_eq!(world.job.release(world.now, worker, id, &some), Ok(true));
    assert_eq!(world.job.release(world.now, worker, id, &some), Ok(false), "it has ended");
    assert_eq!(
        (world.status().samples_applied, world.status().loss, world.status().leases_expired),
        (3, None, 0)
    );
}

#[test]
fn a_second_description_may_move_the_model_while_nothing_is_trained() {
    let mut world = World::new(parse(""), 1, &["p", "q"]);
    world.index();
    let lease = world.lease(0).expect("a model to initialize");
    assert_eq!(world.describe(&lease)[0].0, address("p"));
    assert_eq!(world.describe(&lease)[0].0, address("p"), "a repeat changes nothing");
    world.cut("p");
    let lease = world.lease(0).expect("another attempt: the first one's partition is gone");
    assert_eq!(world.describe(&lease)[0].0, address("q"));
    let foreign =
        world.job.describe(IncarnationId(99), LeaseId(lease.id), vec![], &world.fleet, &BTreeMap::new());
    assert_eq!(foreign.unwrap_err().kind, Kind::Fenced);
}

#[test]
fn what_workers_notice_in_the_records_is_told_once() {
    let mut world = World::new(parse(""), 2, &["p"]);
    world.job.warn_of_records(world.now, "");
    for _ in 0..2 {
        world.job.warn_of_records(world.now, "2 values are NaN");
        world.job.warn_of_records(world.now, &"x".repeat(1000));
    }
    let warning = |event| match event {
        Event::Warning(pb::WarningEvent { message }) => Some(message),
        _ => None,
    };
    let told: Vec<_> = world.events().into_iter().filter_map(warning).collect();
    assert_eq!(told, ["2 values are NaN"]);
}

mod losses_of_ps;
mod restarts;
mod selection;
mod skips;
