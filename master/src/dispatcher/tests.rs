//! Traces of commands with what they must answer and why (`testdata/dispatcher`), and properties
//! over any sequence.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use proptest::prelude::*;

use super::*;

const A: IncarnationId = IncarnationId(1);
const B: IncarnationId = IncarnationId(2);
const C: IncarnationId = IncarnationId(3);
const CREW: [IncarnationId; 4] = [A, B, C, IncarnationId(4)];

fn limits() -> Limits {
    Limits {
        lease: Duration::from_secs(30),
        claim: Duration::from_secs(3),
        attempts_max: 3,
        deaths_max: 3,
        stall: Duration::from_secs(300),
    }
}

/// Runs one trace: a line is `command => answer`, `#` begins a reason, `job` a new dispatcher, `at`
/// sets the clock.
struct Trace {
    books: Dispatcher,
    ids: LeaseIds,
    now: Duration,
    crew: Vec<IncarnationId>,
    gone: Vec<IncarnationId>,
}

impl Trace {
    fn run(name: &str, text: &str) {
        let mut trace = None;
        for (number, line) in text.lines().enumerate() {
            let line = line.split('#').next().unwrap_or_default().trim();
            let Some((command, expected)) = line.split_once("=>") else {
                let words: Vec<_> = line.split_whitespace().collect();
                match (words.first().copied(), &mut trace) {
                    (None, _) => {}
                    (Some("job"), _) => trace = Some(Self::new(&words[1..])),
                    (Some("at"), Some(trace)) => trace.now = millis(words[1]),
                    _ => panic!("{name}:{}: `{line}`", number + 1),
                }
                continue;
            };
            let words: Vec<_> = command.split_whitespace().collect();
            let found = trace.as_mut().expect("`job` first").answer(&words);
            assert_eq!(found, expected.trim(), "{name}:{}: `{command}`", number + 1);
        }
        assert!(trace.is_some(), "{name} has no job");
    }

    fn new(words: &[&str]) -> Self {
        let settings: BTreeMap<_, _> =
            words.iter().map(|word| word.split_once('=').expect("key=value")).collect();
        let number =
            |key: &str, default| settings.get(key).map_or(default, |value| value.parse().expect("a number"));
        let plan = Plan {
            records: number("records", 1),
            micro: 1,
            microbatches_per_step: number("m", 1) as u32,
            epochs: number("epochs", 1),
        };
        let delay = (settings.get("delay") != Some(&"none")).then(|| number("delay", 0) as u32);
        Self {
            books: Dispatcher::new(plan, delay, limits()),
            ids: LeaseIds::starting_at(1),
            now: Duration::ZERO,
            crew: Vec::new(),
            gone: Vec::new(),
        }
    }

    /// The workers that take part when `worker` asks as one of so many: those who did before, as
    /// far as they fit, and new ones.
    fn join(&mut self, worker: IncarnationId, of: &str) {
        let of: usize = of.parse().expect("workers");
        let before = std::mem::take(&mut self.crew).into_iter();
        let known = before.chain((1..).map(IncarnationId));
        let mut crew: Vec<_> = [worker].into();
        for who in known {
            if crew.len() == of {
                break;
            }
            if !crew.contains(&who) && !self.gone.contains(&who) {
                crew.push(who);
            }
        }
        crew.sort_unstable();
        self.crew = crew;
    }

    fn answer(&mut self, words: &[&str]) -> String {
        let worker = |name: &str| IncarnationId(u64::from(name.as_bytes()[0] - b'a' + 1));
        let lease = |number: &str| LeaseId(number.parse().expect("a lease number"));
        if let ["lease", who, "of", workers, ..] = *words {
            self.join(worker(who), workers);
        }
        let Self { books, ids, now, crew, gone } = self;
        match *words {
            ["lease", who, "of", _] => leased(books.lease(*now, ids, idle_elsewhere(worker(who)), crew)),
            ["lease", who, "of", _, "elsewhere", held] => {
                let asker = Asker::new(worker(who), held.parse().expect("leases"));
                leased(books.lease(*now, ids, asker, crew))
            }
            ["copy", who] => match books.copy(*now, ids, idle_elsewhere(worker(who))) {
                Ok(grant) => granted(&grant),
                Err(Some(from)) => format!("from {}ms", from.as_millis()),
                Err(None) => "nothing".to_owned(),
            },
            ["renew", who, id] => books.renew(*now, worker(who), lease(id)).to_string(),
            ["complete", who, id] => {
                let completed = books.complete(*now, worker(who), lease(id), None);
                let beaten = completed.iter().flat_map(|completed| &completed.beaten);
                let beaten: String = beaten.map(|(_, lease)| format!(", ends {lease}")).collect();
                done(completed.map(|completed| completed.run)) + &beaten
            }
            ["release", who, id, "done", count] => {
                done(books.release(*now, worker(who), lease(id), count.parse().expect("a count")))
            }
            ["fail", who, id, message] => books
                .fail(worker(who), lease(id), message)
                .map_or("late".to_owned(), |lost| lost_list(&[lost])),
            ["expire"] => lost_list(&books.expire(*now)),
            ["gone", who] => {
                gone.push(worker(who));
                crew.retain(|&other| other != worker(who));
                lost_list(&books.worker_gone(worker(who)))
            }
            ["watermark"] => books.watermark().to_string(),
            ["done"] => format!("{}{}", books.done(), if books.is_done() { ", all" } else { "" }),
            _ => panic!("no command {words:?}"),
        }
    }
}

fn millis(word: &str) -> Duration {
    Duration::from_millis(word.trim_end_matches("ms").parse().expect("milliseconds"))
}

/// Returns a worker that holds no lease of another job.
fn idle_elsewhere(worker: IncarnationId) -> Asker {
    Asker::new(worker, 0)
}

fn leased(leased: Result<TrainGrant, Why>) -> String {
    match leased {
        Ok(grant) => granted(&grant),
        Err(why) => format!("nothing: {}", why.word().name()),
    }
}

fn granted(grant: &TrainGrant) -> String {
    let again = if grant.attempt > 1 { format!(", attempt {}", grant.attempt) } else { String::new() };
    format!("{}: [{}, {}){again}", grant.lease, grant.run.start, grant.run.end)
}

fn done(run: Option<Range<MicrobatchId>>) -> String {
    run.map_or("late".to_owned(), |run| format!("[{}, {})", run.start, run.end))
}

fn lost_list(lost: &[Lost]) -> String {
    let mut text = String::from("lost");
    for lost in lost {
        write!(text, " {}", lost.lease).expect("a string");
        if let Some(why) = &lost.exhausted {
            write!(text, " for good: {why}").expect("a string");
        }
    }
    text
}

macro_rules! traces {
    ($($name:ident)*) => {
        $(
            #[test]
            fn $name() {
                let file = concat!(stringify!($name), ".txt");
                Trace::run(file, include_str!(concat!("../testdata/dispatcher/", stringify!($name), ".txt")));
            }
        )*
    };
}

traces! {
    workers_share_a_step
    small_steps_go_in_runs
    what_comes_back_goes_first
    late_reports_change_nothing
    stragglers_are_copied
    too_many_attempts_end_the_job
}

/// What a random schedule does next.
#[derive(Clone, Debug)]
enum Action {
    Lease(u8),
    Copy(u8),
    Renew(u8, u8),
    Complete(u8, u8),
    Fail(u8, u8),
    Release(u8, u8, u8),
    Gone(u8),
    Wait(u16),
}

fn actions() -> impl Strategy<Value = Vec<Action>> {
    let (worker, pick) = (0u8..4, any::<u8>());
    let action = prop_oneof![
        8 => worker.clone().prop_map(Action::Lease),
        2 => worker.clone().prop_map(Action::Copy),
        1 => (worker.clone(), pick).prop_map(|(w, p)| Action::Renew(w, p)),
        6 => (worker.clone(), pick).prop_map(|(w, p)| Action::Complete(w, p)),
        1 => (worker.clone(), pick).prop_map(|(w, p)| Action::Fail(w, p)),
        1 => (worker.clone(), pick, any::<u8>()).prop_map(|(w, p, d)| Action::Release(w, p, d)),
        1 => worker.prop_map(Action::Gone),
        2 => (0u16..4000).prop_map(Action::Wait),
    ];
    proptest::collection::vec(action, 1..200)
}

fn jobs() -> impl Strategy<Value = (Plan, Option<u32>)> {
    let plan = (1u64..60, 1u32..4, 1u32..20, 1u64..3).prop_map(|(records, micro, m, epochs)| Plan {
        records,
        micro,
        microbatches_per_step: m,
        epochs,
    });
    (plan, proptest::option::of(0u32..4))
}

/// Four workers, of which any may have any leases, and what was counted as done.
struct Fleet {
    books: Dispatcher,
    ids: LeaseIds,
    now: Duration,
    /// Every lease ever granted, by worker: ended ones too, so that late reports are tried.
    leases: [Vec<LeaseId>; 4],
    finished: Vec<u32>,
}

impl Fleet {
    fn new(plan: Plan, delay: Option<u32>) -> Self {
        let limits = Limits { attempts_max: u32::MAX, deaths_max: u32::MAX, ..limits() };
        let finished = vec![0; plan.microbatches() as usize];
        let books = Dispatcher::new(plan, delay, limits);
        Self {
            books,
            ids: LeaseIds::starting_at(1),
            now: Duration::ZERO,
            leases: Default::default(),
            finished,
        }
    }

    fn with_lanes(self, lanes: usize) -> Self {
        Self { books: self.books.with_lanes(lanes), ..self }
    }

    fn act(&mut self, action: &Action) {
        let worker = |w: u8| IncarnationId(u64::from(w) + 1);
        let pick = |fleet: &Self, w: u8, p: u8| {
            let leases = &fleet.leases[usize::from(w)];
            (!leases.is_empty()).then(|| leases[leases.len() - 1 - usize::from(p) % leases.len().min(4)])
        };
        match *action {
            Action::Lease(w) => {
                let grant = self.books.lease(self.now, &mut self.ids, idle_elsewhere(worker(w)), &CREW);
                self.granted(w, grant.ok());
            }
            Action::Copy(w) => {
                let grant = self.books.copy(self.now, &mut self.ids, idle_elsewhere(worker(w)));
                self.granted(w, grant.ok());
            }
            Action::Renew(w, p) => {
                if let Some(lease) = pick(self, w, p) {
                    self.books.renew(self.now, worker(w), lease);
                }
            }
            Action::Complete(w, p) => {
                if let Some(lease) = pick(self, w, p) {
                    let done = self.books.complete(self.now, worker(w), lease, None);
                    self.count(done.map(|done| done.run));
                }
            }
            Action::Fail(w, p) => {
                if let Some(lease) = pick(self, w, p) {
                    self.books.fail(worker(w), lease, "no");
                }
            }
            Action::Release(w, p, d) => {
                if let Some(lease) = pick(self, w, p) {
                    let done = self.books.release(self.now, worker(w), lease, d.into());
                    self.count(done);
                }
            }
            Action::Gone(w) => drop(self.books.worker_gone(worker(w))),
            Action::Wait(ms) => {
                self.now += Duration::from_millis(ms.into());
                self.books.expire(self.now);
            }
        }
    }

    fn granted(&mut self, worker: u8, grant: Option<TrainGrant>) {
        let Some(grant) = grant else { return };
        let plan = self.books.plan;
        let pieces = plan.by_step(grant.run.clone());
        for (step, indices) in &pieces {
            let whole = *indices == (0..plan.of(*step));
            let node = tree::Node::new(indices.start, indices.end).is_in(plan.of(*step));
            assert!(if pieces.len() == 1 { node } else { whole }, "{grant:?} is no node and no whole steps");
        }
        for id in grant.run.start.get()..grant.run.end.get() {
            assert_eq!(self.finished[id as usize], 0, "microbatch {id} is done and was granted again");
        }
        self.leases[usize::from(worker)].push(grant.lease);
    }

    fn count(&mut self, done: Option<Range<MicrobatchId>>) {
        for id in done.map_or(0..0, |run| run.start.get()..run.end.get()) {
            self.finished[id as usize] += 1;
        }
    }

    /// The lowest undone microbatch is held by somebody who has nothing before it, or is granted to
    /// whoever asks, except to those who hold work of the same step, which waits for nobody.
    fn check_progress(&mut self) {
        let lowest = self.books.watermark();
        if lowest.get() == self.books.plan.microbatches() {
            return;
        }
        if let Some(run) = self.books.runs.get(&lowest.get()) {
            assert!(!run.holders.is_empty());
            return;
        }
        let step = self.books.step_at(lowest.get());
        for worker in (1..=4).map(IncarnationId) {
            let held = self.books.runs.iter().find(|(_, run)| run.is_held_by(worker));
            let same_step = held.is_some_and(|(&first, _)| self.books.step_at(first) == step);
            let grantable = self.books.may_hold(idle_elsewhere(worker), lowest.get())
                && self.books.step_at(self.books.lowest_without(worker)) == step;
            assert!(grantable || same_step, "{worker} cannot get microbatch {lowest} of step {step}");
        }
    }
}

proptest! {
    #[test]
    fn any_order_of_events_finishes_each_microbatch_once(
        (plan, delay) in jobs(),
        lanes in 0usize..6,
        actions in actions(),
    ) {
        let mut fleet = Fleet::new(plan, delay).with_lanes(lanes);
        for action in &actions {
            fleet.act(action);
            fleet.check_progress();
            let done = fleet.finished.iter().map(|&count| u64::from(count)).sum::<u64>();
            prop_assert_eq!(fleet.books.done(), done);
            let first_undone = fleet.finished.iter().position(|&count| count == 0).unwrap_or(fleet.finished.len());
            prop_assert_eq!(fleet.books.watermark(), MicrobatchId(first_undone as u64));
            prop_assert!(fleet.finished.iter().all(|&count| count <= 1));
        }
        // Whatever happened, one worker can finish the job, even if it is slow and the others only
        // seem to live.
        for dead in 2..=4 {
            fleet.books.worker_gone(IncarnationId(dead));
        }
        let (mut rounds, until) = (0, 4 * fleet.now + Duration::from_secs(100));
        while !fleet.books.is_done() {
            fleet.act(&Action::Lease(0));
            let mut held: Vec<_> = fleet.books.holders().map(|(_, lease)| lease).collect();
            held.sort_by_key(|lease| fleet.books.leases[lease]);
            if held.is_empty() {
                fleet.now += Duration::from_secs(1);
                prop_assert!(fleet.now < until, "it gets nothing");
                continue;
            }
            let done = fleet.books.complete(fleet.now, A, held[0], None);
            prop_assert!(done.is_some());
            fleet.count(done.map(|done| done.run));
            rounds += 1;
            prop_assert!(rounds <= plan.microbatches() + 8, "no progress");
        }
        prop_assert!(fleet.finished.iter().all(|&count| count == 1), "{:?}", fleet.finished);
        prop_assert!(fleet.books.leases.is_empty() && fleet.books.runs.is_empty());
    }

    #[test]
    fn after_a_recovery_exactly_what_is_not_applied_is_handed_out(
        (plan, delay) in jobs(),
        applied in proptest::collection::btree_set(0u64..200, 0..40),
    ) {
        let applied: Vec<_> = applied.into_iter().filter(|&step| step < plan.steps()).collect();
        let watermark = (0..).find(|step| !applied.contains(step)).expect("finite");
        let applied_above = applied.iter().copied().filter(|&step| step > watermark).collect();
        let ledger = proto::pb::PartitionLedger { watermark, applied_above, ..Default::default() };
        let mut fleet = Fleet::new(plan, delay);
        fleet.books = fleet.books.after(&Applied::on_all(&[ledger]));
        for &step in &applied {
            let first = plan.first_of(Step(step)).get();
            (first..first + u64::from(plan.of(Step(step)))).for_each(|id| fleet.finished[id as usize] = 1);
        }
        prop_assert_eq!(fleet.books.done(), fleet.finished.iter().map(|&count| u64::from(count)).sum::<u64>());
        while !fleet.books.is_done() {
            fleet.check_progress();
            fleet.act(&Action::Lease(0));
            fleet.act(&Action::Complete(0, 0));
        }
        prop_assert!(fleet.finished.iter().all(|&count| count == 1), "{:?}", fleet.finished);
    }

    #[test]
    fn workers_that_compute_in_order_never_wait_in_a_circle(
        (plan, delay) in jobs(),
        lanes in 0usize..6,
        schedule in proptest::collection::vec((0u64..4, 0u8..20), 10..400),
    ) {
        // Each worker asks as often as it may and works on its lowest lease only, as real ones do;
        // some die.
        let mut fleet = Fleet::new(plan, delay).with_lanes(lanes);
        let mut turns = schedule.into_iter().chain((0..4).cycle().map(|worker| (worker, 1)).take(100_000));
        while !fleet.books.is_done() {
            let (worker, dice) = turns.next().expect("the job ends");
            let who = IncarnationId(worker + 1);
            if dice == 0 {
                fleet.books.worker_gone(who);
                continue;
            }
            fleet.act(&Action::Lease(worker as u8));
            let lowest = fleet.books.runs.iter().find(|(_, run)| run.is_held_by(who));
            let Some((&first, run)) = lowest else { continue };
            let lease = run.holders.iter().find(|grant| grant.worker == who).expect("its own").lease;
            // Step t waits for all steps below t - delay, except for what the run itself brings
            // before.
            let outside = (0..plan.microbatches()).find(|id| {
                fleet.finished[*id as usize] == 0 && !(first..run.end).contains(id)
            });
            let applied = fleet.books.step_at(outside.unwrap_or(plan.microbatches())).get();
            if fleet.books.step_at(run.end - 1).get() <= applied + delay.map_or(LOOK_AHEAD, u64::from) {
                let done = fleet.books.complete(fleet.now, who, lease, None);
                fleet.count(done.map(|done| done.run));
            }
        }
        prop_assert!(fleet.finished.iter().all(|&count| count == 1));
    }
}

#[test]
fn a_lease_of_another_worker_is_foreign() {
    let plan = Plan { records: 8, micro: 1, microbatches_per_step: 4, epochs: 1 };
    let mut books = Dispatcher::new(plan, Some(0), limits());
    let mut ids = LeaseIds::starting_at(1);
    let lease = books.lease(Duration::ZERO, &mut ids, idle_elsewhere(A), &[A, B]).expect("work").lease;
    assert!(!books.renew(Duration::ZERO, B, lease));
    assert_eq!(books.complete(Duration::ZERO, B, lease, None), None);
    assert_eq!(books.fail(B, lease, "no"), None);
    assert_eq!(books.release(Duration::ZERO, B, lease, 1), None);
    assert_eq!(books.run_of(A, lease), Some(MicrobatchId(0)..MicrobatchId(2)));
}

/// Returns a heartbeat that says of a lease that its place has not advanced since `since`.
fn idle(lease: LeaseId, phase: pb::Phase, now: Duration, since: Duration) -> pb::LeaseProgress {
    let idle_ms = (now - since).as_millis() as u64;
    pb::LeaseProgress { lease: lease.get(), phase: phase.into(), idle_ms, ..Default::default() }
}

#[test]
fn a_run_whose_two_holders_hang_is_copied_to_a_third() {
    let plan = Plan { records: 4, micro: 1, microbatches_per_step: 4, epochs: 1 };
    let crew = [A, B, C];
    let mut books = Dispatcher::new(plan, Some(0), limits());
    let mut ids = LeaseIds::starting_at(1);
    let at = Duration::from_secs;
    let first = books.lease(at(0), &mut ids, idle_elsewhere(A), &[A]).expect("work");
    assert_eq!(first.run, MicrobatchId(0)..MicrobatchId(4));
    assert_eq!(books.lease(at(31), &mut ids, idle_elsewhere(B), &crew), Err(Why::NothingLeft { epochs: 1 }));
    let second =
        books.copy(at(31), &mut ids, idle_elsewhere(B)).expect("nobody knows speeds, and a lease is over");
    // Both live for ever after and get on with nothing.
    for now in [at(32), at(200), at(330)] {
        assert!(books.renew(now, A, first.lease) && books.renew(now, B, second.lease));
        books.progress(now, A, &idle(first.lease, pb::Phase::Reading, now, at(0)));
        books.progress(now, B, &idle(second.lease, pb::Phase::Opening, now, at(31)));
        assert_eq!(books.copy(now, &mut ids, idle_elsewhere(C)), Err(Some(at(331))), "at {now:?}");
    }
    assert_eq!(books.expire(at(331)), []);
    assert!(books.hanging(at(331)).all(|(_, _, taken_over)| !taken_over));
    assert!(books.hangs(at(331), A) && books.hangs(at(331), B));
    let third = books.copy(at(331), &mut ids, idle_elsewhere(C)).expect("both hang");
    assert!(books.hanging(at(331)).all(|(_, _, taken_over)| taken_over));
    let done = books.complete(at(332), C, third.lease, None).expect("a good lease");
    assert_eq!(done.beaten, [(A, first.lease), (B, second.lease)]);
    assert!(books.is_done() && !books.hangs(at(999), A));
}

#[test]
fn who_waits_in_the_middle_of_a_copy_for_steps_that_hang_gets_a_copy_of_these() {
    let plan = Plan { records: 35, micro: 1, microbatches_per_step: 5, epochs: 1 };
    let mut books = Dispatcher::new(plan, Some(3), limits());
    let mut ids = LeaseIds::starting_at(1);
    let at = Duration::from_secs;
    // A is known to be quick, so it gets runs of three steps.
    let step_0 = books.lease(at(0), &mut ids, idle_elsewhere(A), &[A]).expect("work").lease;
    books.complete(at(0), A, step_0, None).expect("a good lease");
    let [early, late] =
        [A, A].map(|worker| books.lease(at(0), &mut ids, idle_elsewhere(worker), &[A]).expect("work"));
    let [again, copy] =
        [B, C].map(|worker| books.copy(at(31), &mut ids, idle_elsewhere(worker)).expect("a lease is over"));
    let [steps_1_to_3, steps_4_to_6] =
        [5..20, 20..35].map(|run| MicrobatchId(run.start)..MicrobatchId(run.end));
    let runs = [early.run, again.run, late.run, copy.run];
    assert_eq!(runs, [steps_1_to_3.clone(), steps_1_to_3.clone(), steps_4_to_6.clone(), steps_4_to_6]);
    // A and B hang. C has computed step 4. Step 5 waits for step 1.
    let now = at(400);
    for (worker, lease, since) in [(A, early.lease, 0), (A, late.lease, 0), (B, again.lease, 31)] {
        books.progress(now, worker, &idle(lease, pb::Phase::Reading, now, at(since)));
    }
    books.progress(now, C, &idle(copy.lease, pb::Phase::Pulling, now, at(399)));
    let third = books.copy(now, &mut ids, idle_elsewhere(C)).map(|grant| grant.run);
    assert_eq!(third, Ok(steps_1_to_3));
}

#[test]
fn who_gets_on_or_waits_for_weights_does_not_hang() {
    let plan = Plan { records: 8, micro: 1, microbatches_per_step: 4, epochs: 1 };
    let mut books = Dispatcher::new(plan, Some(0), limits());
    let mut ids = LeaseIds::starting_at(1);
    let at = Duration::from_secs;
    let [first, other, next] = [A, B, A]
        .map(|worker| books.lease(at(0), &mut ids, idle_elsewhere(worker), &[A, B]).expect("work").lease);
    let now = at(10_000);
    books.progress(now, A, &idle(first, pb::Phase::Computing, now, at(9_990)));
    // Of the next step, whose weights do not exist as long as the other two are not done.
    books.progress(now, A, &idle(next, pb::Phase::Pulling, now, at(0)));
    books.progress(now, B, &idle(other, pb::Phase::Reading, now, at(0)));
    let hanging: Vec<_> = books.hanging(now).map(|(_, grant, _)| grant.lease).collect();
    assert_eq!((hanging, books.hangs(now, A), books.hangs(now, B)), (vec![other], false, true));
}

/// Books in which A holds [0, 2) of one step and hangs, B holds [2, 4) and [6, 7), C holds [4, 6).
/// The ps has no room for what B and C have computed before it gets [0, 2).
fn books_without_room(ids: &mut LeaseIds) -> (Dispatcher, LeaseId) {
    let plan = Plan { records: 8, micro: 1, microbatches_per_step: 8, epochs: 1 };
    let mut books = Dispatcher::new(plan, Some(0), limits());
    let at = Duration::from_secs;
    let grants =
        [A, B, C, B].map(|worker| books.lease(at(0), ids, idle_elsewhere(worker), &[A, B, C]).expect("work"));
    let runs = grants.each_ref().map(|grant| grant.run.start.get()..grant.run.end.get());
    assert_eq!(runs, [0..2, 2..4, 4..6, 6..7]);
    let [hanging, _, _, queued] = grants.each_ref().map(|grant| grant.lease);
    books.progress(at(31), A, &idle(hanging, pb::Phase::Reading, at(31), at(0)));
    for (worker, grant) in [B, C, B].into_iter().zip(&grants[1..]) {
        assert_eq!(
            books.copy(at(31), ids, idle_elsewhere(worker)),
            Err(None),
            "it is busy with what it holds"
        );
        // In memory there is no room to compute this one.
        let phase = if grant.lease == queued { pb::Phase::Queued } else { pb::Phase::WaitingForRoom };
        books.progress(at(31), worker, &idle(grant.lease, phase, at(31), at(31)));
    }
    (books, hanging)
}

#[test]
fn who_waits_for_room_on_a_ps_takes_a_copy_of_what_goes_before_and_of_nothing_else() {
    let mut ids = LeaseIds::starting_at(1);
    let (mut books, hanging) = books_without_room(&mut ids);
    let at = Duration::from_secs;
    let copy = books
        .copy(at(31), &mut ids, idle_elsewhere(B))
        .expect("it is late, and goes before all that B holds");
    assert_eq!(copy.run, MicrobatchId(0)..MicrobatchId(2));
    assert_eq!(books.copy(at(31), &mut ids, idle_elsewhere(B)), Err(None), "now it is busy with that");
    let next = books
        .copy(at(31), &mut ids, idle_elsewhere(C))
        .expect("it is late as well, and goes before all that C holds");
    assert_eq!(next.run, MicrobatchId(2)..MicrobatchId(4));
    let done = books.complete(at(32), B, copy.lease, None).expect("a good lease");
    assert_eq!(done.beaten, [(A, hanging)]);
}

#[test]
fn who_waits_for_room_on_a_ps_takes_what_came_back_and_goes_before() {
    let mut ids = LeaseIds::starting_at(1);
    let (mut books, hanging) = books_without_room(&mut ids);
    let at = Duration::from_secs;
    assert_eq!(books.worker_gone(A).len(), 1);
    let run = books.lease(at(31), &mut ids, idle_elsewhere(B), &[B, C]).map(|grant| grant.run);
    assert_eq!(run, Ok(MicrobatchId(0)..MicrobatchId(2)), "and not {hanging}, which has ended");
}

#[test]
fn a_huge_job_costs_no_memory() {
    let plan = Plan { records: 1 << 40, micro: 1, microbatches_per_step: 65_536, epochs: 1000 };
    let mut books = Dispatcher::new(plan, None, limits());
    let mut ids = LeaseIds::starting_at(1);
    for _ in 0..1000 {
        let lease = books.lease(Duration::ZERO, &mut ids, idle_elsewhere(A), &[A]).expect("work").lease;
        books.complete(Duration::ZERO, A, lease, None);
    }
    assert_eq!(books.done(), 1000 * LEASE_MAX);
    assert!(books.runs.is_empty() && books.returned.is_empty() && books.leases.is_empty());
}

proptest! {
    #[test]
    fn closed_books_finish_the_steps_that_were_begun_and_no_more(
        records in 1u64..60,
        m in 1u32..7,
        delay in proptest::option::of(0u32..3),
        before in proptest::collection::vec((0usize..3, any::<bool>()), 0..30),
    ) {
        let plan = Plan { records, micro: 1, microbatches_per_step: m, epochs: 2 };
        let mut books = Dispatcher::new(plan, delay, limits());
        let (mut ids, mut held, crew) = (LeaseIds::starting_at(1), Vec::new(), &CREW[..3]);
        for (worker, completes) in before {
            let worker = crew[worker];
            if completes && !held.is_empty() {
                let (worker, lease) = held.remove(0);
                books.complete(Duration::ZERO, worker, lease, None);
            } else if let Ok(grant) = books.lease(Duration::ZERO, &mut ids, idle_elsewhere(worker), crew) {
                prop_assert!(grant.run.end <= plan.first_of(books.frontier()));
                held.push((worker, grant.lease));
            }
        }
        let step = books.close();
        for now in (1..1000).map(Duration::from_secs) {
            held.drain(..).for_each(|(worker, lease)| drop(books.complete(now, worker, lease, None)));
            for &worker in crew {
                held.extend(books.lease(now, &mut ids, idle_elsewhere(worker), crew).map(|grant| (worker, grant.lease)));
            }
        }
        prop_assert_eq!(books.watermark(), plan.first_of(step));
        prop_assert_eq!(books.close(), step);
    }
}

#[test]
fn microbatches_that_are_held_back_are_handed_out_later() {
    let plan = Plan { records: 8, micro: 1, microbatches_per_step: 4, epochs: 2 };
    let (mut books, mut ids) = (Dispatcher::new(plan, Some(0), limits()), LeaseIds::starting_at(1));
    let mut lease = |books: &mut Dispatcher| {
        books
            .lease(Duration::ZERO, &mut ids, Asker::new(A, 0), &CREW[..1])
            .map(|grant| (grant.lease, grant.run))
    };
    let (first, run) = lease(&mut books).unwrap();
    assert_eq!(run, MicrobatchId(0)..MicrobatchId(4));
    books.complete(Duration::ZERO, A, first, None).unwrap();
    books.hold_back(MicrobatchId(12));
    let (first, run) = lease(&mut books).unwrap();
    assert_eq!(run, MicrobatchId(4)..MicrobatchId(12), "no lease crosses the bound");
    assert_eq!(lease(&mut books), Err(Why::Measuring));
    books.complete(Duration::ZERO, A, first, None).unwrap();
    assert_eq!(lease(&mut books), Err(Why::Measuring));
    books.hold_back(MicrobatchId(16));
    assert_eq!(lease(&mut books).unwrap().1, MicrobatchId(12)..MicrobatchId(16));
    assert_eq!(lease(&mut books), Err(Why::NothingLeft { epochs: 2 }));
}

#[test]
fn a_worker_is_given_the_lanes_that_it_had_whoever_asks_first() {
    let plan = Plan { records: 80, micro: 1, microbatches_per_step: 4, epochs: 1 };
    let (mut books, mut ids) =
        (Dispatcher::new(plan, Some(0), limits()).with_lanes(8), LeaseIds::starting_at(1));
    let (crew, mut lanes) = (&CREW[..2], BTreeMap::<u64, BTreeSet<IncarnationId>>::new());
    for step in 0..20u64 {
        // Both ask until nothing is left of the step, in another order in each step.
        let mut leases = Vec::new();
        for turn in 0..8 {
            let worker = crew[((turn + step / 3) % 2) as usize];
            let asker = idle_elsewhere(worker);
            let Ok(grant) = books.lease(Duration::from_secs(step), &mut ids, asker, crew) else { continue };
            assert_eq!(plan.microbatch(grant.run.start).step, Step(step), "another step for its lanes");
            for microbatch in grant.run.start.get()..grant.run.end.get() {
                lanes.entry(microbatch % 8).or_default().insert(worker);
            }
            leases.push((worker, grant.lease));
            if books.next == plan.first_of(Step(step + 1)).get() && books.returned.is_empty() {
                break;
            }
        }
        for (worker, lease) in leases {
            books.complete(Duration::from_secs(step + 1), worker, lease, None).expect("a good lease");
        }
        assert_eq!(books.watermark(), plan.first_of(Step(step + 1)), "step {step} is not whole");
    }
    assert_eq!(lanes.len(), 8);
    assert!(lanes.values().all(|workers| workers.len() == 1), "{lanes:?}");
}
