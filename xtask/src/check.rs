//! The whole check, in the order in which a mistake is found soonest. The CI runs exactly this.
//!
//! All stages use one profile, so libtorch's C++ bindings compile once. All take the whole workspace: another choice of
//! packages is another choice of their dependencies' features, and would compile half of those again. What was built runs beside each
//! other, because most tests wait most of the time (`check/runner.rs`).

mod dependencies;
pub(crate) mod programs;
pub(crate) mod runner;

use crate::{
    bench::peers,
    etcd, libtorch, moto, packages,
    workspace::{self, requires_all},
};
use anyhow::{Context, Result, bail};
use clap::builder::PossibleValuesParser;
use programs::{Half, Program};
use runner::{Done, Task};
use std::{
    collections::BTreeMap,
    ffi::OsString,
    fmt::Write as _,
    path::PathBuf,
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

/// Run the whole check: format, lints, build with and without libtorch, tests, deploy/, doctests, benches once, dependencies.
///
/// Ends with a table of results and times, and a list of what could not be tested here. With EBB_REQUIRE_ALL=1, as in the CI, a test
/// whose program or package is missing fails instead of being skipped. Fetches what it needs (etcd, moto, packages of Debian where
/// that disturbs nobody); 544 MB for libtorch.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Only these stages [default: all, in this order]
    #[arg(value_name = "STAGE", value_parser = PossibleValuesParser::new(STAGES))]
    stages: Vec<String>,
    /// Test programs at once [default: one more than there are cores]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=64))]
    places: Option<u16>,
}

const STAGES: [&str; 11] = [
    "format",
    "dependencies",
    "lint-without-torch",
    "build-without-torch",
    "lint",
    "build",
    "test-without-torch",
    "test",
    "test-deploy",
    "doctest",
    "bench-smoke",
];

/// What a stage before the tests runs.
const COMMANDS: [(&str, &str); 3] = [
    ("format", "fmt --all --check"),
    ("lint", "clippy --workspace --all-targets -- -D warnings"),
    ("lint-without-torch", "clippy --workspace --no-default-features --all-targets -- -D warnings"),
];

/// Real containers, a real Slurm, a real sshd: with the build without libtorch, whose images are small.
const DEPLOY: [&str; 4] = ["compose", "slurm", "hosts", "deploy"];

/// Libraries and tests that run in both halves, because they do something else without libtorch.
const BOTH: [&str; 3] = ["ebbflow/lib", "model/lib", "checkpoints"];

/// Tests of what engines compute: with libtorch only. Other tests of `tests/` that are there in both halves run without it: each process
/// that loads libtorch computes for a third of a second before it begins, and tests start thousands of them.
const WITH_TORCH: [&str; 5] = ["chaos", "custom_model", "matches_pytorch", "same_bits", "shared_memory"];

/// Those that take longest, the longest first: they begin first. Nothing depends on a name that is missing here.
const LONGEST: [&str; 13] = [
    "compose",
    "simulation",
    "doctest",
    "chaos",
    "security",
    "checkpoint_s3",
    "takeover",
    "crashes",
    "slurm",
    "restore",
    "ps_loss",
    "master_loss",
    "leaving",
];

/// Whose processes compute all the time, on more than one core.
const HEAVY: [&str; 2] = ["chaos", "compose"];

/// After which a test program is ended. A test that hangs ends itself before (`tests/harness/watchdog.rs`).
const LIMIT: Duration = Duration::from_secs(40 * 60);

/// One line of the table.
enum Outcome {
    Passed(Duration),
    Failed(Duration),
    /// Programs that ran: until the last of them had ended.
    Ran(Ran),
    NotRun,
}

/// The programs of a stage.
struct Ran {
    took: Duration,
    programs: usize,
    tests: u64,
    failed: Vec<String>,
    skipped: usize,
}

/// What the stages need and build.
struct Check {
    fetching: Fetching,
    environment: Vec<(String, OsString)>,
    places: usize,
    /// Programs of the build stages, by the stage that runs them.
    programs: Vec<(&'static str, Program)>,
}

/// What comes over the network while the half without libtorch compiles; `None`: it was waited for, or nothing needs it.
struct Fetching {
    libtorch: Option<JoinHandle<Result<()>>>,
    /// Programs that tests start. Answers the variables by which they are found.
    programs: Option<JoinHandle<Result<Environment>>>,
}

/// Variables for the tests.
type Environment = Vec<(String, OsString)>;

pub(crate) fn run(args: &Args) -> Result<()> {
    let begin = now();
    let chosen = |stage: &&str| args.stages.is_empty() || args.stages.iter().any(|name| name == stage);
    let mut stages: Vec<&'static str> = STAGES.into_iter().filter(chosen).collect();
    // What a stage runs is built before it.
    for (build, needed) in [
        ("build-without-torch", &["test-without-torch", "test-deploy"][..]),
        ("build", &["test", "bench-smoke"]),
    ] {
        if !stages.contains(&build)
            && let Some(at) = stages.iter().position(|stage| needed.contains(stage))
        {
            stages.insert(at, build);
        }
    }
    let mut check = Check::new(&stages, args.places);
    let mut outcomes = Vec::new();
    let mut done = Vec::new();
    let mut failed = None;
    let is_run = |stage: &&str| !COMMANDS.iter().any(|(name, _)| name == stage);
    for stage in stages.iter().copied() {
        let start = now();
        let passed = match stage {
            _ if failed.is_some() => None,
            "dependencies" => Some(check.dependencies()),
            "build" | "build-without-torch" => Some(check.build(stage)),
            "lint" => Some(check.has_libtorch().and_then(|()| command(stage))),
            _ if !is_run(&stage) => Some(command(stage)),
            _ => None,
        };
        match passed {
            Some(Ok(())) => outcomes.push((stage, Outcome::Passed(start.elapsed()))),
            Some(Err(error)) => {
                eprintln!("{stage}: {error:#}");
                outcomes.push((stage, Outcome::Failed(start.elapsed())));
                failed = Some(stage);
            }
            None => outcomes.push((stage, Outcome::NotRun)),
        }
    }
    check.has_programs()?;
    let tasks = check.tasks(&stages);
    if failed.is_none() && !tasks.is_empty() {
        eprintln!("\n== {} programs, in {} places beside each other", tasks.len(), check.places);
        done = runner::run(tasks, check.places)?;
        for (stage, outcome) in &mut outcomes {
            if let Some(ran) = Ran::of(stage, &done) {
                failed = failed.or((!ran.failed.is_empty()).then_some(*stage));
                *outcome = Outcome::Ran(ran);
            }
        }
    }
    eprint!("\n{}{}", table(&outcomes, begin.elapsed()), skips(&done));
    match failed {
        Some(stage) => bail!("stage `{stage}` failed; repeat it alone: cargo xtask test {stage}"),
        None => Ok(()),
    }
}

/// Fetches the programs that tests start; answers the variables by which they are found.
fn fetch_programs(tests: bool, deploy: bool) -> Result<Environment> {
    let packages = if tests || deploy { packages::ensure()? } else { None };
    let folders: Vec<PathBuf> = [etcd::ensure()?, moto::ensure()?, packages].into_iter().flatten().collect();
    let mut environment = Vec::new();
    if !folders.is_empty() {
        environment.push(("PATH".to_owned(), workspace::path_with(&folders)?));
    }
    // PyTorch scripts its layers, and judges what was trained on MNIST.
    if requires_all() && tests {
        let python = peers::Python::torch()?;
        environment.extend(python.map(|python| ("EBB_PYTHON".to_owned(), python.program.into())));
    }
    Ok(environment)
}

fn joined<T>(fetching: JoinHandle<Result<T>>) -> Result<T> {
    fetching.join().unwrap_or_else(|_| bail!("what fetches has panicked, see above"))
}

/// A stage that is one command of cargo.
fn command(stage: &str) -> Result<()> {
    let (_, cargo) = COMMANDS.iter().find(|(name, _)| *name == stage).context("a stage of this list")?;
    eprintln!("\n== {stage}: cargo {cargo}");
    let mut command = workspace::cargo();
    command.args(cargo.split_whitespace()).current_dir(workspace::root());
    let status = command.status().with_context(|| format!("run cargo {cargo}"))?;
    if status.success() { Ok(()) } else { bail!("cargo {cargo}: {status}") }
}

impl Check {
    /// Begins to fetch what the stages need.
    fn new(stages: &[&'static str], places: Option<u16>) -> Self {
        let of = |names: &[&str]| stages.iter().any(|stage| names.contains(stage));
        let (tests, deploy) = (of(&["test"]), of(&["test-deploy"]));
        let libtorch = of(&["lint", "build", "doctest"]).then(|| thread::spawn(libtorch::ensure_installed));
        let any = tests || deploy || of(&["test-without-torch"]);
        let programs = any.then(|| thread::spawn(move || fetch_programs(tests, deploy)));
        let cores = thread::available_parallelism().map_or(2, usize::from);
        let places = places.map_or(cores + 1, usize::from);
        let fetching = Fetching { libtorch, programs };
        Self { fetching, environment: Vec::new(), places, programs: Vec::new() }
    }

    /// Waits until libtorch is there.
    fn has_libtorch(&mut self) -> Result<()> {
        self.fetching.libtorch.take().map_or(Ok(()), joined)
    }

    /// Waits until the programs that tests start are there.
    fn has_programs(&mut self) -> Result<()> {
        if let Some(fetching) = self.fetching.programs.take() {
            self.environment = joined(fetching)?;
        }
        Ok(())
    }

    fn dependencies(&self) -> Result<()> {
        eprintln!("\n== dependencies: licences, bans and sources of deny.toml");
        let count = dependencies::check()?;
        eprintln!("{count} packages keep the rules");
        Ok(())
    }

    fn build(&mut self, stage: &'static str) -> Result<()> {
        if stage == "build-without-torch" {
            let args = format!("{} --lib --test system --test simulation", Half::WithoutTorch.flags());
            eprintln!("\n== {stage}: cargo test --no-run {args}");
            let programs = programs::build(&args)?;
            let mut names = DEPLOY.iter().chain(&BOTH).chain(&WITH_TORCH);
            if let Some(lost) = names.find(|name| programs.iter().all(|program| program.label != **name)) {
                bail!("there is no test program `{lost}`");
            }
            self.programs.extend(programs.into_iter().filter_map(|program| {
                let stage = stage_without_torch(&program)?;
                Some((stage, program))
            }));
            // The programs that these tests start have to outlive the next build, which makes others in their place.
            return self.keep_programs();
        }
        self.has_libtorch()?;
        // Everything in one go, so that all cores stay busy.
        let args = format!("{} --all-targets", Half::Whole.flags());
        eprintln!("\n== {stage}: cargo test --no-run {args}");
        let programs = programs::build(&args)?;
        let rest: Vec<_> =
            programs.into_iter().filter_map(|program| self.not_run_without_torch(program)).collect();
        for program in rest {
            let stage = if program.is_bench { "bench-smoke" } else { "test" };
            self.programs.push((stage, program));
        }
        // Tests start example programs; `--all-targets` builds only the tests in them.
        let mut command = workspace::cargo();
        command.args(["build", "--workspace", "--examples"]).current_dir(workspace::root());
        if command.status().context("run cargo")?.success() {
            Ok(())
        } else {
            bail!("the examples do not build")
        }
    }

    /// The program with the tests that do not run without libtorch already, if it has any.
    fn not_run_without_torch(&self, program: Program) -> Option<Program> {
        let same = |other: &&Program| other.label == program.label && !BOTH.contains(&other.label.as_str());
        match self.programs.iter().map(|(_, other)| other).find(same) {
            Some(other) => program.without(&other.tests),
            None => Some(program),
        }
    }

    /// Builds the examples without libtorch, and copies them and `ebb` away, before the next build makes others in their place.
    fn keep_programs(&mut self) -> Result<()> {
        let examples = format!("build {} --example oracle", Half::WithoutTorch.flags());
        let mut command = workspace::cargo();
        command.args(examples.split_whitespace()).current_dir(workspace::root());
        if !command.status().context("run cargo")?.success() {
            bail!("the examples do not build");
        }
        let (from, to) = (workspace::target_dir().join("debug"), without_torch());
        let examples = to.join("examples");
        std::fs::create_dir_all(&examples).with_context(|| format!("create `{}`", examples.display()))?;
        for name in ["ebb", "examples/oracle"] {
            let (from, to) = (from.join(name), to.join(name));
            std::fs::copy(&from, &to)
                .with_context(|| format!("copy `{}` to `{}`", from.display(), to.display()))?;
        }
        Ok(())
    }

    /// What the stages run, in the order in which it should begin.
    fn tasks(&self, stages: &[&'static str]) -> Vec<Task> {
        let programs = self.programs.iter().filter(|(stage, _)| stages.contains(stage));
        let mut tasks: Vec<Task> = programs.map(|(stage, program)| self.task(stage, program)).collect();
        if stages.contains(&"doctest") {
            let args = ["test", "--workspace", "--doc"].map(OsString::from).to_vec();
            let program = workspace::cargo().get_program().into();
            tasks.push(Task { program, args, ..self.task("doctest", &Program::nowhere("doctest")) });
        }
        tasks.sort_by_key(|task| {
            let rank = LONGEST.iter().position(|name| *name == task.label);
            (rank.unwrap_or(LONGEST.len()), task.stage == "bench-smoke")
        });
        tasks
    }

    fn task(&self, stage: &'static str, program: &Program) -> Task {
        task(stage, program, &self.environment)
    }
}

/// How a program is run.
pub(crate) fn task(stage: &'static str, program: &Program, environment: &[(String, OsString)]) -> Task {
    let Program { label, path, folder, .. } = program.clone();
    let name = label.as_str();
    let in_background = name == "simulation";
    let mut environment = environment.to_vec();
    if matches!(stage, "test-deploy" | "test-without-torch") {
        environment.push(("EBB_TEST_PROGRAM".to_owned(), without_torch().join("ebb").into()));
    }
    Task {
        stage,
        program: path,
        args: program.args("").unwrap_or_default(),
        folder,
        environment,
        // What computes in the background leaves its place to those that wait.
        places: if HEAVY.contains(&name) { 2 } else { usize::from(!in_background) },
        in_background,
        limit: LIMIT,
        label: if stage == "test-without-torch" && BOTH.contains(&name) {
            format!("{label} without libtorch")
        } else {
            label
        },
    }
}

/// The stage that runs a program of the half without libtorch. The libraries that never see libtorch are the same programs in both halves.
fn stage_without_torch(program: &Program) -> Option<&'static str> {
    let is = |names: &[&str]| names.contains(&program.label.as_str());
    let is_library = program.label.contains('/');
    match () {
        () if is(&DEPLOY) => Some("test-deploy"),
        () if is(&BOTH) => Some("test-without-torch"),
        () if is(&WITH_TORCH) || is_library => None,
        () => Some("test-without-torch"),
    }
}

/// Where programs without libtorch are kept.
fn without_torch() -> PathBuf {
    workspace::target_dir().join("check/without-torch")
}

impl Ran {
    /// What ran of a stage, if anything did.
    fn of(stage: &str, done: &[Done]) -> Option<Self> {
        let of_stage: Vec<_> = done.iter().filter(|done| done.stage == stage).collect();
        let failed = of_stage.iter().filter(|done| done.failure.is_some());
        (!of_stage.is_empty()).then(|| Self {
            took: of_stage.iter().map(|done| done.ended).max().unwrap_or_default(),
            programs: of_stage.len(),
            tests: of_stage.iter().map(|done| done.tests).sum(),
            failed: failed.map(|done| done.label.clone()).collect(),
            skipped: of_stage.iter().map(|done| done.skipped.len()).sum(),
        })
    }
}

#[expect(clippy::disallowed_methods, reason = "a stage is timed for people")]
pub(crate) fn now() -> Instant {
    Instant::now()
}

fn table(outcomes: &[(&str, Outcome)], total: Duration) -> String {
    let width = outcomes.iter().map(|(name, _)| name.len()).max().unwrap_or(0);
    let mut table = String::new();
    for (name, outcome) in outcomes {
        let (word, note) = match outcome {
            Outcome::Passed(time) => ("passed", seconds(*time)),
            Outcome::Failed(time) => ("FAILED", seconds(*time)),
            Outcome::NotRun => ("not run", String::new()),
            Outcome::Ran(ran) => {
                let word = if ran.failed.is_empty() { "passed" } else { "FAILED" };
                let mut note =
                    format!("{:12}  {} tests in {} programs", seconds(ran.took), ran.tests, ran.programs);
                if ran.skipped > 0 {
                    let _ = write!(note, ", {} SKIPPED", ran.skipped);
                }
                if !ran.failed.is_empty() {
                    let _ = write!(note, ", failed: {}", ran.failed.join(", "));
                }
                (word, note)
            }
        };
        let line = format!("{name:width$}  {word:7}  {note}");
        let _ = writeln!(table, "{}", line.trim_end());
    }
    let _ = writeln!(table, "{:width$}  {:7}  {}", "total", "", seconds(total));
    table
}

/// What was not tested, and by which programs.
fn skips(done: &[Done]) -> String {
    let mut text = String::new();
    let skipped: BTreeMap<_, _> = runner::skipped(done);
    if !skipped.is_empty() {
        let _ = writeln!(text, "\nSKIPPED, and so not tested here:");
    }
    for (what, programs) in skipped {
        let _ = writeln!(text, "  {what} ({})", programs.join(", "));
    }
    text
}

/// `7.2 s`, or `3 min 07 s` from two minutes on.
pub(crate) fn seconds(time: Duration) -> String {
    let whole = time.as_secs();
    if whole < 120 {
        format!("{:.1} s", time.as_secs_f64())
    } else {
        format!("{} min {:02} s", whole / 60, whole % 60)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn done(stage: &'static str, label: &str, failure: Option<&str>, ended: u64, skipped: &[&str]) -> Done {
        Done {
            stage,
            label: label.to_owned(),
            failure: failure.map(str::to_owned),
            took: Duration::from_secs(1),
            ended: Duration::from_secs(ended),
            tests: 4,
            skipped: skipped.iter().map(|&what| what.to_owned()).collect(),
        }
    }

    #[test]
    fn table_says_what_passed_failed_was_skipped_and_was_not_reached() {
        let done = [
            done("test", "chaos", None, 187, &["no MNIST"]),
            done("test", "mnist", None, 12, &["no MNIST", "no GPU"]),
            done("test-deploy", "compose", Some("exit status: 101"), 90, &[]),
        ];
        let outcomes = [
            ("format", Outcome::Passed(Duration::from_millis(1250))),
            ("lint", Outcome::Failed(Duration::from_secs(187))),
            ("build", Outcome::NotRun),
            ("test", Outcome::Ran(Ran::of("test", &done).unwrap())),
            ("test-deploy", Outcome::Ran(Ran::of("test-deploy", &done).unwrap())),
        ];
        let expected = "\
format       passed   1.2 s
lint         FAILED   3 min 07 s
build        not run
test         passed   3 min 07 s    8 tests in 2 programs, 3 SKIPPED
test-deploy  FAILED   90.0 s        4 tests in 1 programs, failed: compose
total                 6 min 40 s
";
        assert_eq!(table(&outcomes, Duration::from_secs(400)), expected);
        let expected = "\nSKIPPED, and so not tested here:\n  no GPU (mnist)\n  no MNIST (chaos, mnist)\n";
        assert_eq!(skips(&done), expected);
        assert_eq!(skips(&done[2..]), "");
    }

    #[test]
    fn longest_programs_begin_first_and_benches_last() {
        let program = |label: &str| Program { label: label.to_owned(), ..Program::nowhere("") };
        let programs = ["tidy", "security", "chaos"].map(|label| ("test", program(label)));
        let fetching = Fetching { libtorch: None, programs: None };
        let mut check = Check { fetching, environment: Vec::new(), places: 3, programs: programs.to_vec() };
        check.programs.insert(0, ("bench-smoke", program("adam")));
        check.programs.push(("test-without-torch", program("model/lib")));
        let tasks = check.tasks(&["test", "bench-smoke", "test-without-torch", "doctest"]);
        let labels: Vec<_> = tasks.iter().map(|task| task.label.as_str()).collect();
        assert_eq!(labels, ["doctest", "chaos", "security", "tidy", "model/lib without libtorch", "adam"]);
        assert_eq!(check.tasks(&["format"]).len(), 0);
    }
}
