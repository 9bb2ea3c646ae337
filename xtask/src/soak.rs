//! `cargo xtask soak`: what is too long for the check, for nights: the whole matrix of chaos, many seeds of the simulation, and the
//! tests again and again, also on a machine that has other things to do.

use crate::{
    check::{
        self,
        programs::{self, Half, Program},
        runner::{self, Done, Task},
    },
    etcd, libtorch, moto, workspace,
};
use anyhow::{Result, bail, ensure};
use clap::ValueEnum;
use std::{
    ffi::OsString,
    hash::{BuildHasher as _, Hasher as _, RandomState},
    process::{Child, Command, Stdio},
    time::Duration,
};

/// Run the long matrix: chaos, crashes, many seeds of the simulation, and all tests again and again.
///
/// Everything runs to the end, whatever fails; then a table says what passed how often. By default a night on 2 cores: 16 scenarios of
/// chaos ({sync, pipelined} x {3, 5 workers} x {1, 2, 3 ps} and the counting oracle in all four modes), 10 rounds of the crashes, 10,000
/// seeds from a fresh base, 10 rounds of the test stage.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Only this part, may be repeated [default: all]
    #[arg(long, value_enum)]
    only: Vec<Part>,
    /// Rounds of the crashes, and of the tests
    #[arg(long, value_name = "N", default_value_t = 10)]
    rounds: u32,
    /// Loops that compute nothing on this many cores beside it
    #[arg(long, value_name = "N", default_value_t = 0)]
    busy: u32,
    /// In the part `tests`: only this program, for example `same_bits` or `master/lib`; may be repeated [default: all]
    #[arg(long, value_name = "NAME")]
    program: Vec<String>,
    /// In the part `tests`: only tests whose names have this in them
    #[arg(long, value_name = "TEXT")]
    test: Option<String>,
    /// Seeds of the simulation
    #[arg(long, value_name = "N", default_value_t = 10_000)]
    seeds: u64,
    /// The first of them [default: a fresh one, which is printed]; also which faults chaos makes in which order
    #[arg(long, value_name = "S")]
    seed: Option<u64>,
    /// The build without libtorch
    #[arg(long)]
    without_torch: bool,
    /// Test programs at once [default: one more than there are cores]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=64))]
    places: Option<u16>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Part {
    Chaos,
    Crashes,
    Simulation,
    Tests,
}

/// The scenarios of chaos without `--seed`.
const CHAOS_SEED: u64 = 7;

/// Longer than any of these takes.
const LIMIT: Duration = Duration::from_secs(12 * 3600);

pub(crate) fn run(args: &Args) -> Result<()> {
    let half = if args.without_torch { Half::WithoutTorch } else { Half::Whole };
    if half == Half::Whole {
        libtorch::ensure_installed()?;
    }
    let base = args.seed.unwrap_or_else(fresh_base);
    let folders: Vec<_> = [etcd::ensure()?, moto::ensure()?].into_iter().flatten().collect();
    let environment = vec![("PATH".to_owned(), workspace::path_with(&folders)?)];
    // As the whole check does it, so that nothing is compiled twice.
    let programs = programs::build(&format!("{} --all-targets", half.flags()))?;
    let mut examples = workspace::cargo();
    examples.arg("build").args(half.flags().split_whitespace()).arg("--examples");
    ensure!(examples.current_dir(workspace::root()).status()?.success(), "the examples do not build");

    let cores = std::thread::available_parallelism().map_or(2, usize::from);
    let places = args.places.map_or(cores + 1, usize::from);
    let _busy: Vec<Busy> = (0..args.busy).map(|_| Busy::start()).collect::<Result<_>>()?;
    let mut lines = Vec::new();
    for part in Part::value_variants() {
        if !args.only.is_empty() && !args.only.contains(part) {
            continue;
        }
        let soak = Soak { args, base, programs: &programs, environment: &environment };
        let tasks = soak.tasks(*part);
        ensure!(
            !tasks.is_empty(),
            "{part:?}: no program of this name with such a test; names are those that the tests print"
        );
        eprintln!(
            "\n== {part:?}: {} programs to run, {} loops beside them, seed {base}",
            tasks.len(),
            args.busy
        );
        let begin = check::now();
        let done = runner::run(tasks, places)?;
        lines.push(Line { part: *part, took: begin.elapsed(), done });
    }
    lines.iter().for_each(Line::print);
    if lines.iter().any(|line| line.failed().next().is_some()) {
        bail!(
            "a promise is broken, or a test failed by chance: see above, and target/check for all that was said"
        );
    }
    Ok(())
}

/// What one part of it ended with.
struct Line {
    part: Part,
    took: Duration,
    done: Vec<Done>,
}

impl Line {
    fn failed(&self) -> impl Iterator<Item = &Done> {
        self.done.iter().filter(|done| done.failure.is_some())
    }

    fn print(&self) {
        let (failed, took) = (self.failed().count(), check::seconds(self.took));
        println!("{:?}: {} of {} passed, in {took}", self.part, self.done.len() - failed, self.done.len());
        for done in self.failed() {
            println!("  FAILED {}: {}", done.label, done.failure.as_deref().unwrap_or_default());
        }
        for (what, programs) in runner::skipped(&self.done) {
            println!("  SKIPPED {what} ({} times)", programs.len());
        }
    }
}

struct Soak<'a> {
    args: &'a Args,
    base: u64,
    programs: &'a [Program],
    environment: &'a [(String, OsString)],
}

impl Soak<'_> {
    fn tasks(&self, part: Part) -> Vec<Task> {
        let set = |name: &str, value: String| (name.to_owned(), OsString::from(value));
        match part {
            Part::Chaos => {
                let seed = self.args.seed.unwrap_or(CHAOS_SEED).to_string();
                let whole = [set("EBB_CHAOS_WHOLE", "1".into()), set("EBB_CHAOS_SEED", seed)];
                let args = ["--nocapture", "--test-threads", "1"].map(OsString::from);
                self.rounds(1, |label| label == "chaos", "", &args, &whole, Some(LIMIT))
            }
            Part::Crashes => self.rounds(self.args.rounds, |label| label == "crashes", "", &[], &[], None),
            Part::Simulation => {
                let seeds = [("EBB_SIM_SEEDS", self.args.seeds), ("EBB_SIM_SEED", self.base)];
                let seeds = seeds.map(|(name, number)| set(name, number.to_string()));
                self.rounds(
                    1,
                    |label| label == "simulation",
                    "seeds",
                    &["--nocapture"].map(OsString::from),
                    &seeds,
                    Some(LIMIT),
                )
            }
            Part::Tests => {
                let chosen = |label: &str| {
                    let named = self.args.program.iter().any(|program| program == label);
                    // Their seeds are the part `simulation`.
                    named || (self.args.program.is_empty() && label != "simulation")
                };
                let text = self.args.test.as_deref().unwrap_or_default();
                self.rounds(self.args.rounds, chosen, text, &[], &[], None)
            }
        }
    }

    /// All chosen programs, so many times, one round after the other, with those of their tests that have `text` in their names; with
    /// another limit than the check's, or not.
    fn rounds(
        &self,
        rounds: u32,
        chosen: impl Fn(&str) -> bool,
        text: &str,
        args: &[OsString],
        more: &[(String, OsString)],
        limit: Option<Duration>,
    ) -> Vec<Task> {
        let mut tasks = Vec::new();
        for round in 1..=rounds {
            for program in self.programs.iter().filter(|program| !program.is_bench && chosen(&program.label))
            {
                let environment = [self.environment, more].concat();
                let Some(tests) = program.args(text) else { continue };
                let mut task = check::task("soak", program, &environment);
                task.args = [&tests[..], args].concat();
                task.label = format!("{} round {round}", task.label);
                if let Some(limit) = limit {
                    task.environment.push(("EBB_TEST_LIMIT".to_owned(), limit.as_secs().to_string().into()));
                    task.limit = limit;
                }
                tasks.push(task);
            }
        }
        tasks
    }
}

/// A base that hardly any run before had.
#[expect(clippy::disallowed_methods, reason = "it is printed, and given again with --seed")]
fn fresh_base() -> u64 {
    RandomState::new().build_hasher().finish() % 1_000_000_000
}

/// A loop that takes a core; it ends with its handle.
struct Busy(Child);

impl Busy {
    fn start() -> Result<Self> {
        let mut command = Command::new("sh");
        command.args(["-c", "while :; do :; done"]).stdin(Stdio::null());
        Ok(Self(command.spawn()?))
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
