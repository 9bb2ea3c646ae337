//! Cost of workers that die, join, are slow and leave: real processes on loopback.
//!
//! Four workers train digits' MLP in `sync` with 8 microbatches in each step. Each microbatch takes
//! 20 ms, most of it slept away (`tests/harness/paced.rs`). So two cores are no limit, and
//! Ebbflow's own cost is measured. In `sync` a step begins when the one before it was applied, so
//! the workers' traces show when each step was applied.
//!
//! Expected, with c = 20 ms, M = 8, W = 4 and no cost but compute; a step takes c M / W = 40 ms:
//!
//! | figure                     | limit | because                                              |
//! | -------------------------- | ----- | ---------------------------------------------------- |
//! | killed and added each 5 s  | 0.99  | in 5 s the survivors wait 40 ms for its microbatches |
//! | pause after a SIGKILL      | 40 ms | one survivor computes its microbatches, M / W = 2    |
//! | pause when a worker joins  | 0     | no worker waits for it                               |
//! | join to first applied      | 80 ms | half a step to find work, its share, the step's rest |
//! | one slowed 10 times        | 1     | the other three take its work over                   |
//! | drain: SIGTERM to exit     | 10 ms | half a microbatch                                    |
//! | pause when a worker drains | 20 ms | one that stays computes its other microbatch         |
//!
//! Pauses are relative to the median step before the event, so a step that takes longer because one
//! worker is missing counts, too. `cargo bench --no-default-features --bench elastic` takes 3
//! minutes. Without `--bench` one tiny round of each runs, which shows that it works.
#![expect(clippy::disallowed_methods, reason = "a bench measures real processes in real time")]

#[path = "../support/fleet.rs"]
mod fleet;
#[path = "../../tests/harness/mod.rs"]
mod harness;
#[path = "../../tests/harness/paced.rs"]
mod paced;
#[path = "../support/report.rs"]
mod report;
#[path = "../support/trace.rs"]
mod trace;

use std::fs;
use std::ops::Range;
use std::path::PathBuf;
use std::process::ExitCode;
use std::thread::sleep;
use std::time::Duration;

use fleet::{Job, PER_STEP, now};
use harness::Cluster;
use report::{Figure, Target, median};
use trace::Trace;

const COMPUTE_MS: u64 = 20;
const WORKERS: usize = 4;

const JOB: Job = Job {
    name: "elastic",
    compute_ms: COMPUTE_MS,
    optimizer: "kind = \"sgd\"\nlearning_rate = 0.01",
    more: "limits = { deaths_max = 1000 }",
};

/// Length and number of rounds.
struct Scale {
    rounds: u32,
    /// Length of an undisturbed stretch, and of one with two events.
    stretch: Duration,
}

fn main() -> ExitCode {
    fleet::main("elastic", |full| {
        let scale = match full {
            true => Scale { rounds: 5, stretch: Duration::from_secs(10) },
            false => Scale { rounds: 1, stretch: Duration::from_secs(2) },
        };
        let mut figures = kills_and_joins(&scale);
        figures.extend(slow(&scale));
        figures.extend(drains(&scale));
        figures
    })
}

/// A cluster that trains, and the lives of its workers.
struct Fleet {
    cluster: Cluster,
    traces: PathBuf,
    /// Life of each worker, by its index. The end is far away while it lives.
    lives: Vec<Range<Duration>>,
}

impl Fleet {
    /// Starts the cluster and waits until all workers compute.
    fn start(workers: usize) -> Self {
        let (cluster, traces) = JOB.start(workers);
        let lives = vec![now()..Duration::MAX; workers];
        let fleet = Self { cluster, traces, lives };
        (0..workers).for_each(|worker| fleet.wait_for(worker));
        fleet
    }

    /// Waits until a worker has computed something.
    fn wait_for(&self, worker: usize) {
        let trace = self.traces.join(self.pid(worker).to_string());
        while fs::metadata(&trace).is_ok_and(|file| file.len() == 0) || !trace.exists() {
            sleep(Duration::from_millis(5));
        }
    }

    fn pid(&self, worker: usize) -> u32 {
        self.cluster.workers[worker].child.id()
    }

    /// Returns the worker that lives longest.
    fn oldest(&self) -> usize {
        self.lives.iter().position(|life| life.end == Duration::MAX).expect("a live worker")
    }

    fn kill(&mut self, worker: usize) -> Duration {
        let at = now();
        self.cluster.workers[worker].child.kill().expect("the worker lives");
        self.lives[worker].end = at;
        at
    }

    fn add(&mut self, environment: &[(&str, &str)]) -> (usize, Duration) {
        let at = now();
        self.cluster.add_worker_with(environment);
        self.lives.push(at..Duration::MAX);
        (self.lives.len() - 1, at)
    }

    /// Returns the sum of the seconds that workers lived in `window`.
    fn lived(&self, window: &Range<Duration>) -> f64 {
        let overlap =
            |life: &Range<Duration>| life.end.min(window.end).saturating_sub(life.start.max(window.start));
        self.lives.iter().map(|life| overlap(life).as_secs_f64()).sum()
    }

    fn trace(&self) -> Trace {
        fleet::trace(&self.traces)
    }
}

/// Measures rows 1 to 4.
fn kills_and_joins(scale: &Scale) -> Vec<Figure> {
    let mut fleet = Fleet::start(WORKERS);
    let half = scale.stretch / 4;
    let (mut stretches, mut kills, mut joins) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..scale.rounds {
        let calm = during(|| sleep(scale.stretch));
        let disturbed = during(|| {
            for _ in 0..2 {
                kills.push((fleet.kill(fleet.oldest()), calm.clone()));
                sleep(half);
                joins.push(fleet.add(&[]));
                sleep(half);
            }
        });
        // The last one may not have begun in a short round.
        fleet.wait_for(fleet.lives.len() - 1);
        stretches.push((calm, disturbed));
    }
    let trace = fleet.trace();
    let rate = |window: &Range<Duration>| trace.progress(window) as f64 / fleet.lived(window);
    let kept = stretches.iter().map(|(calm, disturbed)| rate(disturbed) / rate(calm)).collect();
    let noise = stretches.iter().map(|(calm, _)| {
        let quarter = calm.start..calm.start + half;
        longest(&trace, &quarter) - median_ms(&trace, calm)
    });
    let noise: Vec<f64> = noise.collect();
    let after = |at: Duration| at..at + half;
    let pauses =
        kills.iter().map(|(at, calm)| longest(&trace, &after(*at)) - median_ms(&trace, calm)).collect();
    let repeated: Vec<_> = kills.iter().map(|(at, _)| trace.repeated(&after(*at))).collect();
    let (twice, redone): (Vec<_>, Vec<_>) =
        repeated.iter().map(|&(twice, redone)| (twice as f64, redone as f64)).unzip();
    let join_pauses = joins.iter().map(|&(_, at)| {
        let before = at - half + half / 5..at;
        (longest(&trace, &after(at)) - median_ms(&trace, &before)).max(0.0)
    });
    let join_pauses = join_pauses.collect();
    let firsts: Vec<_> =
        joins.iter().filter_map(|&(worker, at)| Some((trace.first_of(fleet.pid(worker))?, at))).collect();
    let begun = firsts.iter().map(|(first, at)| ms(first.begin - *at)).collect();
    let applied =
        firsts.iter().filter_map(|(first, at)| Some(ms(trace.applied(trace.step(first.microbatch))? - *at)));
    let applied = applied.collect();
    let held = (COMPUTE_MS * PER_STEP / WORKERS as u64) as f64;
    vec![
        Figure::new(
            "killed and added each 5 s: samples/s per live worker, of calm",
            "ratio",
            kept,
            0.99,
            Some(Target::AtLeast(0.95)),
        ),
        Figure::new("longest step of a calm stretch, beyond its median", "ms", noise, 0.0, None),
        Figure::new("pause after a SIGKILL", "ms", pauses, held, Some(Target::Below(100.0 + held))),
        Figure::new("microbatches computed twice after a SIGKILL", "", twice, 0.0, None),
        Figure::new("  of them of steps that were applied", "", redone, 0.0, Some(Target::Below(1.0))),
        Figure::new(
            "pause of the others when a worker joins",
            "ms",
            join_pauses,
            0.0,
            Some(Target::Below(50.0)),
        ),
        Figure::new("join to first microbatch begun", "ms", begun, held / 2.0, None),
        Figure::new("join to first applied gradient", "ms", applied, 2.0 * held, Some(Target::Below(300.0))),
    ]
}

/// Measures row 5.
fn slow(scale: &Scale) -> Vec<Figure> {
    let mut fleet = Fleet::start(WORKERS - 1);
    let stretch = scale.stretch / 2;
    let mut stretches = Vec::new();
    for _ in 0..scale.rounds {
        let alone = during(|| sleep(stretch));
        let (slow, _) = fleet.add(&[("PACED_FACTOR", "10")]);
        fleet.wait_for(slow);
        stretches.push((alone, during(|| sleep(stretch))));
        fleet.kill(slow);
        sleep(stretch / 5);
    }
    let trace = fleet.trace();
    let rate =
        |window: &Range<Duration>| trace.progress(window) as f64 / (window.end - window.start).as_secs_f64();
    let kept = stretches.iter().map(|(alone, with)| rate(with) / rate(alone)).collect();
    vec![Figure::new(
        "one of 4 slowed 10 times: samples/s, of the other 3 alone",
        "ratio",
        kept,
        1.0,
        Some(Target::AtLeast(0.8)),
    )]
}

/// Measures rows 6 and 7.
fn drains(scale: &Scale) -> Vec<Figure> {
    let mut fleet = Fleet::start(WORKERS);
    let half = scale.stretch / 4;
    let mut drains = Vec::new();
    for _ in 0..scale.rounds {
        let calm = during(|| sleep(half));
        let worker = fleet.oldest();
        let at = now();
        fleet.cluster.workers[worker].signal("TERM");
        let status = fleet.cluster.workers[worker].child.wait().expect("the worker ends");
        assert!(status.success(), "a drained worker ended with {status}");
        let took = now() - at;
        fleet.lives[worker].end = at + took;
        sleep(half);
        drains.push((at, took, calm));
        let (joined, _) = fleet.add(&[]);
        fleet.wait_for(joined);
    }
    let trace = fleet.trace();
    let took = drains.iter().map(|(_, took, _)| ms(*took)).collect();
    let pause = |(at, _, calm): &(Duration, Duration, Range<Duration>)| {
        longest(&trace, &(*at..*at + half)) - median_ms(&trace, calm)
    };
    let pauses = drains.iter().map(pause).collect();
    vec![
        Figure::new("drain: SIGTERM to exit", "ms", took, COMPUTE_MS as f64 / 2.0, None),
        Figure::new("pause of the others when a worker drains", "ms", pauses, COMPUTE_MS as f64, None),
    ]
}

fn longest(trace: &Trace, window: &Range<Duration>) -> f64 {
    trace.intervals(window).into_iter().max().map_or(f64::NAN, ms)
}

fn median_ms(trace: &Trace, window: &Range<Duration>) -> f64 {
    median(&trace.intervals(window).into_iter().map(ms).collect::<Vec<_>>())
}

fn during(act: impl FnOnce()) -> Range<Duration> {
    let start = now();
    act();
    start..now()
}

fn ms(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}
