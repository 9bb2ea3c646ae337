//! A fleet in simulated time around the dispatcher: workers with given speeds, no network. What can
//! be reached at best.

use std::collections::{BTreeMap, VecDeque};

use proptest::prelude::*;

use super::*;

const TICK: Duration = Duration::from_millis(100);
const MICROBATCH: Duration = Duration::from_millis(10);

struct Worker {
    id: IncarnationId,
    /// How much slower than the usual.
    slower: u32,
    /// What its next microbatches take besides computing: opening the job, then the first pull into
    /// memory that it never touched.
    prepares: VecDeque<Duration>,
    loading: bool,
    /// It works for another job and asks for nothing.
    elsewhere: bool,
    /// Lease, next microbatch and end, by the first one.
    held: BTreeMap<u64, (LeaseId, u64, u64)>,
    /// What it computes, and until when.
    busy: Option<(LeaseId, Duration)>,
    /// Since when it computes that lease, by what it reports.
    since: Duration,
    /// Microbatches that it has computed.
    computed: u32,
}

struct Fleet {
    books: Dispatcher,
    ids: LeaseIds,
    now: Duration,
    workers: Vec<Worker>,
    /// Percent that a microbatch may take longer or shorter.
    noise: u64,
    random: u64,
    copies: u32,
    /// When steps became complete.
    steps: Vec<Duration>,
    /// Why the last request of a worker was refused, if it was.
    refused: BTreeMap<IncarnationId, Why>,
}

impl Fleet {
    fn new(m: u32, steps: u64, delay: Option<u32>, slower: &[u32]) -> Self {
        let plan = Plan { records: u64::from(m) * steps, micro: 1, microbatches_per_step: m, epochs: 1 };
        let limits = Limits {
            lease: Duration::from_secs(30),
            claim: Duration::from_secs(30),
            attempts_max: 3,
            deaths_max: 3,
            stall: Duration::from_secs(300),
        };
        let mut fleet = Self {
            books: Dispatcher::new(plan, delay, limits),
            ids: LeaseIds::starting_at(1),
            now: Duration::ZERO,
            workers: Vec::new(),
            noise: 0,
            random: 1,
            copies: 0,
            steps: Vec::new(),
            refused: BTreeMap::new(),
        };
        for &slower in slower {
            fleet.join(slower, Duration::ZERO);
        }
        fleet
    }

    fn with_lanes(self, lanes: usize) -> Self {
        Self { books: self.books.with_lanes(lanes), ..self }
    }

    fn join(&mut self, slower: u32, loads: Duration) {
        let id = IncarnationId(self.workers.last().map_or(1, |worker| worker.id.get() + 1));
        self.workers.push(Worker {
            id,
            slower,
            prepares: [loads].into(),
            loading: !loads.is_zero(),
            elsewhere: false,
            held: BTreeMap::new(),
            busy: None,
            since: Duration::ZERO,
            computed: 0,
        });
    }

    /// The oldest one dies, and the master hears of it.
    fn kill(&mut self) {
        let worker = self.workers.remove(0);
        self.books.worker_gone(worker.id);
    }

    /// Everybody who may hold more asks; answers when somebody should look again.
    fn ask(&mut self) -> Option<Duration> {
        let crew: Vec<_> = self.workers.iter().map(|worker| worker.id).collect();
        let mut again = None;
        for worker in &mut self.workers {
            // A worker that opens a job asks for nothing meanwhile.
            let opens = worker.loading && !(worker.held.is_empty() && worker.busy.is_none());
            while !opens && !worker.elsewhere {
                let asker = Asker::new(worker.id, 0);
                let grant = self.books.lease(self.now, &mut self.ids, asker, &crew).or_else(|why| {
                    let lanes = why.again();
                    self.refused.insert(worker.id, why);
                    let copy = self.books.copy(self.now, &mut self.ids, asker);
                    self.copies += u32::from(copy.is_ok());
                    copy.map_err(|from| from.into_iter().chain(lanes).min())
                });
                match grant {
                    Ok(grant) => {
                        self.refused.remove(&worker.id);
                        let run = grant.run.start.get()..grant.run.end.get();
                        worker.held.insert(run.start, (grant.lease, run.start, run.end));
                    }
                    Err(from) => {
                        again = again.into_iter().chain(from).min();
                        break;
                    }
                }
            }
        }
        again
    }

    /// Every worker that can begin a microbatch does.
    fn begin(&mut self) {
        let applied = self.books.step_at(self.books.watermark().get()).get();
        for worker in self.workers.iter_mut().filter(|worker| worker.busy.is_none()) {
            let Some((&first, &(lease, next, _))) = worker.held.first_key_value() else { continue };
            let step = |microbatch| self.books.step_at(microbatch).get();
            // All steps before this one are needed; those of the lease itself are there.
            if step(next).saturating_sub(self.books.ahead()).min(step(first)) <= applied {
                self.random = self.random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                let percent = 100 - self.noise + (self.random >> 33) % (2 * self.noise + 1);
                let time = MICROBATCH * worker.slower * percent as u32 / 100;
                let begins = self.now + worker.prepares.pop_front().unwrap_or_default();
                if next == first {
                    worker.since = begins;
                }
                worker.busy = Some((lease, begins + time));
            }
        }
    }

    /// Until `until` or the end of the job.
    fn run(&mut self, until: Duration) {
        while self.now < until && !self.books.is_done() {
            let again = self.ask();
            self.begin();
            let ends = self.workers.iter().filter_map(|worker| Some(worker.busy?.1)).min();
            let tick = TICK * (self.now.as_nanos() / TICK.as_nanos() + 1) as u32;
            self.now = [Some(until), Some(tick), ends, again].into_iter().flatten().min().expect("a tick");
            self.books.expire(self.now);
            for index in 0..self.workers.len() {
                let worker = &mut self.workers[index];
                let Some((lease, _)) = worker.busy.take_if(|(_, until)| *until <= self.now) else { continue };
                worker.loading = false;
                worker.computed += 1;
                if worker.computed > 1 {
                    // Its next heartbeat says so.
                    self.books.speeds.computes(worker.id, MICROBATCH * worker.slower);
                }
                let Some((&first, work)) = worker.held.iter_mut().find(|(_, work)| work.0 == lease) else {
                    continue;
                };
                work.1 += 1;
                if work.1 == work.2 {
                    worker.held.remove(&first);
                    let took = Some(self.now - worker.since);
                    let completed =
                        self.books.complete(self.now, worker.id, lease, took).expect("a good lease");
                    for (other, lease) in completed.beaten {
                        for worker in self.workers.iter_mut().filter(|worker| worker.id == other) {
                            worker.held.retain(|_, work| work.0 != lease);
                        }
                    }
                }
            }
            let step = self.books.step_at(self.books.watermark().get()).get();
            self.steps.resize(step as usize, self.now);
        }
    }

    /// Microbatches per second until the end of the job.
    fn throughput(mut self) -> f64 {
        self.run(Duration::from_secs(3600));
        assert!(self.books.is_done());
        self.books.done() as f64 / self.now.as_secs_f64()
    }

    /// Returns the longest time between two completed steps, from this one on.
    fn pause_since(&self, step: usize) -> Duration {
        self.steps[step..].windows(2).map(|pair| pair[1] - pair[0]).max().unwrap_or_default()
    }
}

#[test]
fn a_worker_that_is_ten_times_slower_does_not_slow_the_other_three() {
    for delay in [Some(0), Some(1), Some(3), None] {
        for (m, noise) in [4, 8, 16, 32].into_iter().flat_map(|m| [(m, 0), (m, 30)]) {
            let throughput = |slower: &[u32], lanes| {
                let mut fleet = Fleet::new(m, 150, delay, slower).with_lanes(lanes);
                fleet.noise = noise;
                fleet.throughput()
            };
            let (without, with) = (throughput(&[1, 1, 1], 0), throughput(&[1, 1, 10, 1], 0));
            let ratio = with / without;
            let lanes = throughput(&[1, 1, 10, 1], 16) / without;
            assert!(lanes >= 0.88, "M {m}, delay {delay:?}, noise {noise} %, lanes: {lanes}");
            println!(
                "M {m}, delay {delay:?}, noise {noise} %: {with:.0} of {without:.0} microbatches/s, {ratio:.3}"
            );
            assert!(ratio >= 0.9, "M {m}, delay {delay:?}, noise {noise} %: {ratio}");
        }
    }
}

#[test]
fn equal_workers_get_equal_shares_and_no_copies_whatever_the_noise() {
    for (m, noise, least) in [(4, 0, 398.0), (8, 0, 398.0), (8, 30, 340.0), (32, 0, 398.0), (32, 30, 365.0)] {
        let mut fleet = Fleet::new(m, 200, Some(0), &[1, 1, 1, 1]);
        fleet.noise = noise;
        fleet.run(Duration::from_secs(3600));
        let throughput = fleet.books.done() as f64 / fleet.now.as_secs_f64();
        assert!(throughput >= least, "M {m}, noise {noise} %: {throughput} of 400 microbatches/s");
        assert!(fleet.copies <= 2, "M {m}, noise {noise} %: {} copies", fleet.copies);
    }
}

#[test]
fn lanes_stay_with_their_workers_and_that_costs_no_throughput() {
    // Five workers share eight lanes: three have two of them, two have one, and all are as fast.
    let cases = [(8, 8, 5, 0.2), (8, 16, 5, 0.02), (8, 8, 3, 0.08), (64, 16, 4, 0.05), (16, 16, 8, 0.0)];
    for (m, lanes, workers, most) in cases {
        for noise in [0, 30] {
            let run = |lanes| {
                let mut fleet = Fleet::new(m, 200, Some(0), &vec![1; workers]).with_lanes(lanes);
                fleet.noise = noise;
                fleet.run(Duration::from_secs(3600));
                assert!(fleet.books.is_done());
                let moved = fleet.books.take_moved_lanes() as f64 / fleet.books.done() as f64;
                (moved, fleet.books.done() as f64 / fleet.now.as_secs_f64())
            };
            let ((moved, with), (_, without)) = (run(lanes), run(0));
            println!(
                "M {m}, {lanes} lanes, {workers} workers, noise {noise} %: {moved:.3}, {with:.0} of {without:.0}/s"
            );
            let most = if noise == 0 { 0.01 } else { most };
            assert!(moved <= most, "M {m}, {lanes} lanes, {workers} workers, noise {noise} %: {moved}");
            assert!(with >= 0.97 * without, "M {m}, {lanes} lanes: {with} of {without} microbatches/s");
        }
    }
}

#[test]
fn a_worker_that_is_busy_elsewhere_does_not_keep_its_lanes() {
    for delay in [Some(0), Some(1), None] {
        let mut fleet = Fleet::new(8, 10_000, delay, &[1, 1, 1, 1]).with_lanes(8);
        fleet.run(Duration::from_secs(2));
        fleet.workers[0].elsewhere = true;
        fleet.run(Duration::from_secs(3));
        let left = fleet.steps.len();
        fleet.run(Duration::from_secs(5));
        let (pause, rate) = (fleet.pause_since(left), (fleet.steps.len() - left) * 8 / 2);
        assert!(rate >= 250, "delay {delay:?}: {rate} of 300 microbatches/s");
        assert!(delay != Some(0) || pause <= 4 * MICROBATCH, "{pause:?}");
    }
}

#[test]
fn a_look_at_a_part_of_a_large_fleet_is_enough() {
    // More workers than `speeds::SAMPLE_MAX`. In the first steps nobody knows who is slow.
    for (delay, noise, least) in [(Some(0), 30, 0.5), (Some(1), 0, 0.75), (None, 30, 0.78)] {
        // Of every ten workers one takes two times as long and one ten times: they work as 8.6
        // would.
        let slower: Vec<_> = (0..80).map(|worker| [1, 1, 1, 2, 1, 1, 1, 10, 1, 1][worker % 10]).collect();
        let mut fleet = Fleet::new(1280, 10, delay, &slower);
        fleet.noise = noise;
        let (throughput, most) = (fleet.throughput(), 0.86 * 80.0 * 100.0);
        let ratio = throughput / most;
        println!("delay {delay:?}, noise {noise} %: {throughput:.0} of {most:.0} microbatches/s, {ratio:.3}");
        assert!(ratio >= least, "delay {delay:?}, noise {noise} %: {ratio}");
    }
}

#[test]
fn a_worker_that_dies_and_one_that_joins_hold_up_nobody() {
    for (m, lanes) in [4, 8, 16, 32].into_iter().flat_map(|m| [(m, 0), (m, 8)]) {
        let mut fleet = Fleet::new(m, 10_000, Some(0), &[1, 1, 1, 1]).with_lanes(lanes);
        fleet.run(Duration::from_millis(2003));
        let calm = fleet.pause_since(10);
        let step = fleet.steps.len();
        fleet.kill();
        fleet.run(Duration::from_secs(4));
        // What three need for a step, and what the dead one had begun.
        let three = MICROBATCH * m.div_ceil(3);
        let killed = fleet.pause_since(step - 1);
        assert!(killed <= three + calm, "M {m}: {killed:?} after a death");
        let step = fleet.steps.len();
        fleet.join(1, Duration::from_millis(200));
        fleet.run(Duration::from_secs(6));
        let joined = fleet.pause_since(step - 1);
        assert!(joined <= three + 2 * MICROBATCH, "M {m}: {joined:?} after a join, {three:?} is usual");
    }
}

#[test]
fn a_fleet_that_loses_and_gains_a_worker_every_five_seconds_works_on() {
    for (m, lanes) in [4, 8, 16, 32].into_iter().flat_map(|m| [(m, 0), (m, 8)]) {
        let mut fleet = Fleet::new(m, 10_000, Some(0), &[1, 1, 1, 1]).with_lanes(lanes);
        for _ in 0..6 {
            fleet.run(fleet.now + Duration::from_secs(5));
            fleet.kill();
            fleet.join(1, Duration::from_millis(100));
        }
        let throughput = fleet.books.done() as f64 / fleet.now.as_secs_f64();
        assert!(throughput >= 0.97 * 400.0, "M {m}: {throughput} of 400 microbatches/s");
    }
}

#[test]
fn a_slow_worker_comes_back_when_it_is_fast_again_and_is_alone_when_the_others_die() {
    for m in [4, 8, 32] {
        let mut fleet = Fleet::new(m, 10_000, Some(0), &[1, 1, 10, 1]);
        fleet.run(Duration::from_secs(10));
        fleet.workers[2].slower = 1;
        fleet.run(Duration::from_secs(16));
        let before = fleet.books.done();
        fleet.run(Duration::from_secs(18));
        assert!(fleet.books.done() - before >= 760, "M {m}: {} of 800", fleet.books.done() - before);
        fleet.workers[0].slower = 10;
        fleet.run(Duration::from_secs(20));
        for _ in 0..3 {
            fleet.workers.rotate_left(1);
            fleet.kill();
        }
        let before = fleet.books.done();
        fleet.run(Duration::from_secs(30));
        assert!(fleet.books.done() - before >= 64, "M {m}: {} of 100", fleet.books.done() - before);
    }
}

#[test]
fn a_worker_that_was_slow_to_open_the_job_has_its_part_a_few_steps_later() {
    for (m, opens) in [2, 4, 8, 32].into_iter().flat_map(|m| [(m, 500), (m, 4_000), (m, 10_000)]) {
        let opens = Duration::from_millis(opens);
        let mut fleet = Fleet::new(m, 10_000, Some(0), &[1, 1]);
        // Then the first pull, which takes longer than a copy as well.
        fleet.workers[1].prepares = [opens, 30 * MICROBATCH].into();
        fleet.workers[1].loading = true;
        fleet.run(opens + 30 * MICROBATCH + 4 * MICROBATCH);
        let step = fleet.steps.len();
        while fleet.steps.len() < step + 4 {
            fleet.run(fleet.now + MICROBATCH);
        }
        let before = fleet.books.done();
        fleet.run(fleet.now + 64 * MICROBATCH);
        let done = (fleet.books.done() - before) as f64 / 64.0;
        assert!(done >= 1.8, "M {m}, opened for {opens:?}: as much as {done} workers");
    }
}

#[test]
fn opening_the_job_is_not_speed() {
    let mut fleet = Fleet::new(2, 10_000, Some(0), &[1, 1]);
    fleet.workers[1].prepares = [Duration::from_secs(10)].into();
    fleet.workers[1].loading = true;
    // Nobody copies: the lease that it opened the job for is its own to complete.
    fleet.workers[0].prepares = [Duration::from_secs(10)].into();
    fleet.run(Duration::from_millis(10_015));
    let known = |worker| fleet.books.speeds.of(IncarnationId(worker), MICROBATCH).expected;
    assert_eq!((fleet.books.speeds.usual(), known(1), known(2)), (Some(MICROBATCH), MICROBATCH, MICROBATCH));
}

#[test]
fn a_trial_of_a_slow_worker_delays_no_step_and_comes_soon() {
    for m in [4, 8, 32] {
        let mut three = Fleet::new(m, 10_000, Some(0), &[1, 1, 1]);
        three.run(Duration::from_secs(6));
        let mut fleet = Fleet::new(m, 10_000, Some(0), &[1, 1, 10, 1]);
        fleet.run(Duration::from_secs(2));
        let (step, copies) = (fleet.steps.len(), fleet.copies);
        fleet.run(Duration::from_secs(6));
        let (pause, usual) = (fleet.pause_since(step), three.pause_since(10));
        assert!(pause <= usual + MICROBATCH, "M {m}: {pause:?}, without the slow worker {usual:?}");
        println!("M {m}: {} copies in 4 s, {pause:?} at most, {usual:?} without", fleet.copies - copies);
        fleet.workers[2].slower = 1;
        fleet.run(fleet.now + Duration::from_secs(1));
        let before = fleet.books.done();
        fleet.run(fleet.now + Duration::from_secs(1));
        let done = fleet.books.done() - before;
        assert!(done >= 380, "M {m}: {done} of 400 a second after it was fast again");
    }
}

#[test]
fn a_refusal_of_a_slow_worker_says_its_speed_and_when_it_is_tried_again() {
    let mut fleet = Fleet::new(4, 10_000, Some(0), &[1, 1, 20, 1]);
    let mut seen = Vec::new();
    while fleet.now < Duration::from_secs(5) {
        fleet.run(fleet.now + MICROBATCH);
        seen.extend(fleet.refused.iter().filter_map(|(&worker, why)| match why {
            Why::TooSlow { slow: Some(slow), .. } => Some((fleet.now, worker, *slow)),
            _ => None,
        }));
    }
    let (now, worker, slow) = *seen.last().expect("the slow one is refused");
    assert_eq!((worker, slow.usual), (IncarnationId(3), MICROBATCH));
    assert!(slow.time >= 2 * MICROBATCH, "{slow:?}");
    assert!(slow.again <= now + 32 * MICROBATCH, "{slow:?} at {now:?}");
    assert!(seen.iter().all(|(_, worker, _)| *worker == IncarnationId(3)), "{seen:?}");
}

proptest! {
    #[test]
    fn a_worker_that_stands_still_holds_up_a_step_by_little_more_than_a_copy(
        m in 1u32..40, workers in 2usize..6, who in 0usize..6, at in 500u64..1500, delay in 0u32..2,
    ) {
        let mut fleet = Fleet::new(m, 10_000, Some(delay), &vec![1; workers]);
        fleet.run(Duration::from_millis(at));
        let calm = fleet.pause_since(2);
        fleet.workers[who % workers].slower = 1_000_000;
        fleet.run(Duration::from_millis(at + 3000));
        // It is late after its lease, or three times that if it was slow lately; then as long again
        // as a copy takes; then the copy. So for each step that it may hold.
        let lease = MICROBATCH * m.div_ceil(workers as u32);
        let bound = calm.max(2 * lease) + (delay + 1) * 5 * lease + MICROBATCH;
        let pause = fleet.pause_since(2);
        prop_assert!(pause <= bound, "{pause:?} instead of {calm:?}, at most {bound:?}");
        prop_assert!(fleet.steps.len() > 2);
    }
}
