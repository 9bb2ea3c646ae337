//! `cargo xtask soak`: what is too long for the check, for nights: the whole matrix of chaos, many
//! seeds of the simulation, and the tests again and again, also on a machine that has other things
//! to do.

use crate::{
    check::{
        self, Line,
        programs::{self, Program, WHOLE, WITHOUT_TORCH},
        runner::{self, Task},
    },
    libtorch, workspace,
};
use anyhow::{Result, ensure};
use clap::builder::PossibleValuesParser;
use std::{
    ffi::OsString,
    process::{Child, Command, Stdio},
    time::Duration,
};

/// Run the long matrix: chaos, crashes, damaged bytes, many seeds of the simulation, and all tests
/// again and again.
///
/// Everything runs to the end, whatever fails; then a table says what passed how often. By default
/// a night on 2 cores: 16 scenarios of chaos ({sync, pipelined} x {3, 5 workers} x {1, 2, 3 ps} and
/// the counting oracle in all four modes), 10 rounds of the crashes, an hour of damaged
/// bytes, 10,000 seeds from a fresh base, 10 rounds of the test stage.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Only this part, may be repeated [default: all]
    #[arg(long, value_name = "PART", value_parser = PossibleValuesParser::new(PARTS))]
    only: Vec<String>,
    /// Rounds of the crashes, and of the tests
    #[arg(long, value_name = "N", default_value_t = 10)]
    rounds: u32,
    /// Loops that compute nothing on this many cores beside it
    #[arg(long, value_name = "N", default_value_t = 0)]
    busy: u32,
    /// In the part `tests`: only this program, for example `same_bits` or `master/lib`; may be
    /// repeated [default: all]
    #[arg(long, value_name = "NAME")]
    program: Vec<String>,
    /// In the part `tests`: only tests whose names have this in them
    #[arg(long, value_name = "TEXT")]
    test: Option<String>,
    /// Seeds of the simulation
    #[arg(long, value_name = "N", default_value_t = 10_000)]
    seeds: u64,
    /// The first of them [default: a fresh one, which is in the log]; also which faults chaos makes
    /// in which order, and the seed of damaged bytes
    #[arg(long, value_name = "S")]
    seed: Option<u64>,
    /// Time for damaged bytes, in seconds
    #[arg(long, value_name = "N", default_value_t = 3600)]
    fuzz_seconds: u64,
    /// The build without libtorch
    #[arg(long)]
    without_torch: bool,
    /// Test programs at once [default: two for each core]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=64))]
    places: Option<u16>,
}

const PARTS: [&str; 5] = ["chaos", "crashes", "fuzz", "simulation", "tests"];

/// Longer than any of these takes.
const LIMIT: Duration = Duration::from_secs(12 * 3600);

pub(crate) fn run(args: &Args) -> Result<()> {
    let half = if args.without_torch { WITHOUT_TORCH } else { WHOLE };
    if !args.without_torch {
        libtorch::ensure_installed()?;
    }
    let environment = check::environment(true, true)?;
    let programs = programs::build(&format!("{half} --all-targets"))?;
    workspace::run_cargo(&format!("build {half} --examples"))?;

    let _busy: Vec<Busy> = (0..args.busy).map(|_| Busy::start()).collect::<Result<_>>()?;
    let (begin, mut lines, mut all) = (check::now(), Vec::new(), Vec::new());
    for part in
        PARTS.into_iter().filter(|part| args.only.is_empty() || args.only.iter().any(|only| only == part))
    {
        let tasks = args.tasks(part, &programs, &environment);
        let unknown = "no program of this name with such a test; names are those that the tests print";
        ensure!(!tasks.is_empty(), "{part}: {unknown}");
        eprintln!("\n== {part}: {} programs to run, {} loops beside them", tasks.len(), args.busy);
        let done = runner::run(tasks, check::places(args.places))?;
        lines.extend(Line::of(part, &done));
        all.extend(done);
    }
    print!("\n{}", check::summary(&lines, begin.elapsed(), &all));
    let promise =
        "a promise is broken, or a test failed by chance: see above, and target/check for all that was said";
    ensure!(all.iter().all(|done| done.failure.is_none()), "{promise}");
    Ok(())
}

impl Args {
    /// Returns what a part runs, one round after the other.
    fn tasks(
        &self,
        part: &'static str,
        programs: &[Program],
        environment: &[(String, OsString)],
    ) -> Vec<Task> {
        let seed = |name: &'static str| self.seed.map(|seed| (name, seed.to_string()));
        let (rounds, text, args, more): (_, _, &[&str], _) = match part {
            "chaos" => {
                let whole = Some(("EBB_CHAOS_WHOLE", "1".to_owned()));
                (1, "", &["--nocapture", "--test-threads", "1"], [whole, seed("EBB_CHAOS_SEED")])
            }
            "simulation" => {
                let seeds = Some(("EBB_SIM_SEEDS", self.seeds.to_string()));
                (1, "seeds", &["--nocapture"], [seeds, seed("EBB_SIM_SEED")])
            }
            "fuzz" => {
                let seconds = Some(("EBB_FUZZ_SECONDS", self.fuzz_seconds.to_string()));
                (1, "decoders", &["--nocapture"], [seconds, seed("EBB_FUZZ_SEED")])
            }
            "crashes" => (self.rounds, "", &[], [None, None]),
            _ => (self.rounds, self.test.as_deref().unwrap_or_default(), &[], [None, None]),
        };
        let is_chosen = |program: &&Program| match part {
            _ if program.is_bench => false,
            // The seeds of the simulation are a part of their own.
            "tests" if self.program.is_empty() => program.label != "simulation",
            "tests" => self.program.contains(&program.label),
            _ => program.label == part,
        };
        let task = |round: u32, program: &Program| {
            let mut task = check::task(part, program, text, environment)?;
            task.label += &format!(" round {round}");
            task.command.args(args).envs(more.iter().flatten().cloned());
            // One of these is a whole matrix.
            if more[0].is_some() {
                task.command.env("EBB_TEST_LIMIT", LIMIT.as_secs().to_string());
                task.limit = LIMIT;
            }
            Some(task)
        };
        let round = |round| programs.iter().filter(is_chosen).filter_map(move |program| task(round, program));
        (1..=rounds).flat_map(round).collect()
    }
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
