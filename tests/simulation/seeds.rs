//! Many seeds on all cores, each in a process of this program.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::io::{IsTerminal, Write};
use std::process::{Command, Output};
use std::sync::{Mutex, mpsc};
use std::time::{Duration, Instant};

use crate::plan::Plan;
use crate::run::Outcome;

/// Environment variable with the seed of a process.
pub(crate) const ONE: &str = "EBB_SIM_ONE";

/// Environment variable that switches the log on.
pub(crate) const LOG: &str = "EBB_SIM_LOG";

/// Name of the test that runs the seed.
pub(crate) const ENTRY: &str = "one_seed";

/// Prefix of the line with a seed's outcome.
const OUTCOME: &str = "outcome ";

/// A seed that broke a promise.
#[derive(Debug)]
pub(crate) struct Broken {
    seed: u64,
    said: String,
}

impl fmt::Display for Broken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { seed, said } = self;
        let plan = Plan::of(*seed);
        write!(
            f,
            "seed {seed} failed:\n{said}\n{plan:#?}\nagain, with its log: cargo xtask sim --seeds 1 --seed {seed}"
        )
    }
}

/// Prints an outcome for the parent process.
pub(crate) fn tell(outcome: &Outcome) {
    println!("\n{OUTCOME}{}", serde_json::to_string(outcome).expect("plain numbers"));
}

/// Runs each of `seeds`, each as often as it is named, on all cores. `each` gets the outcomes in
/// any order. After a failure no other seed is begun.
pub(crate) fn run(seeds: impl IntoIterator<Item = u64>, mut each: impl FnMut(Outcome)) -> Result<(), Broken> {
    let queue = Mutex::new(seeds.into_iter().collect::<VecDeque<_>>());
    let (done, outcomes) = mpsc::channel();
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(1, usize::from) {
            let (queue, done) = (&queue, done.clone());
            scope.spawn(move || {
                while let Some(seed) = { queue.lock().unwrap().pop_front() } {
                    let outcome = one(seed);
                    if outcome.is_err() {
                        queue.lock().unwrap().clear();
                    }
                    // The receiver lives as long as this scope.
                    let _ = done.send(outcome);
                }
            });
        }
        drop(done);
        let mut broken: Option<Broken> = None;
        for outcome in outcomes {
            match outcome {
                Ok(outcome) => each(outcome),
                Err(this) if broken.as_ref().is_none_or(|other| this.seed < other.seed) => {
                    broken = Some(this);
                }
                Err(_) => {}
            }
        }
        broken.map_or(Ok(()), Err)
    })
}

fn one(seed: u64) -> Result<Outcome, Broken> {
    let Output { status, stdout, stderr } = process(seed).output().expect("this program can be started");
    let stdout = String::from_utf8_lossy(&stdout);
    let outcome = stdout.lines().find_map(|line| line.strip_prefix(OUTCOME));
    match outcome.filter(|_| status.success()) {
        Some(outcome) => Ok(serde_json::from_str(outcome).expect("written by this program")),
        None => {
            let said = String::from_utf8_lossy(&stderr);
            Err(Broken { seed, said: format!("{}\n({status})", said.trim_end()) })
        }
    }
}

/// Runs one seed with its log, for people.
pub(crate) fn replay(seed: u64) -> Result<(), Broken> {
    println!("{:#?}", Plan::of(seed));
    let status = process(seed).env(LOG, "1").status().expect("this program can be started");
    if status.success() { Ok(()) } else { Err(Broken { seed, said: format!("{status}, see above") }) }
}

fn process(seed: u64) -> Command {
    let mut command = Command::new(std::env::current_exe().expect("this program has a path"));
    command.args(["--exact", ENTRY, "--nocapture", "--test-threads=1"]).env(ONE, seed.to_string());
    command
}

/// Runs seeds and shows the progress, then the counts of all events.
pub(crate) fn survey(seeds: impl IntoIterator<Item = u64>) -> Result<(), Broken> {
    let seeds: Vec<_> = seeds.into_iter().collect();
    let (begin, count) = (now(), seeds.len() as u64);
    let (mut done, mut shown, mut simulated_ms, mut digest) = (0u64, begin, 0, 0);
    let mut counts = BTreeMap::<String, (u64, u64)>::new();
    run(seeds, |outcome| {
        done += 1;
        simulated_ms += outcome.simulated_ms;
        // Seeds end in any order, so the combination must not depend on it.
        digest ^= outcome.digest.wrapping_mul(2 * outcome.seed + 1);
        for (what, amount) in outcome.counts {
            let (total, seeds) = counts.entry(what).or_default();
            (*total, *seeds) = (*total + amount, *seeds + u64::from(amount > 0));
        }
        let every = if std::io::stderr().is_terminal() {
            Duration::from_millis(200)
        } else {
            Duration::from_secs(10)
        };
        if shown.elapsed() >= every {
            shown = now();
            progress(done, count, begin.elapsed());
        }
    })?;
    println!("\n{:>10} {:>8}", "total", "in seeds");
    for (what, (total, seeds)) in counts {
        println!("{total:>10} {seeds:>8}  {what}");
    }
    let (simulated, wall) = (Duration::from_millis(simulated_ms).as_secs(), begin.elapsed().as_secs_f64());
    println!("{count} seeds: {simulated} s simulated in {wall:.1} s, digest {digest:016x}");
    Ok(())
}

fn progress(done: u64, count: u64, elapsed: Duration) {
    let rate = done as f64 / elapsed.as_secs_f64();
    let left = (count - done) as f64 / rate;
    let end = if std::io::stderr().is_terminal() { "\r" } else { "\n" };
    // An error of the terminal is no reason to stop.
    let _ = write!(std::io::stderr(), "{done}/{count} seeds, {rate:.1}/s, {left:.0} s left   {end}");
}

#[expect(clippy::disallowed_methods, reason = "seeds are timed for people")]
fn now() -> Instant {
    Instant::now()
}
