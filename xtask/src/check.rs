//! The whole check, in the order in which a mistake is found soonest. The CI runs exactly this.
//!
//! All stages use one profile, so libtorch's C++ bindings compile once. All take the whole
//! workspace: another choice of packages is another choice of their dependencies' features, and
//! would compile half of those again. What was built runs beside each other, because most tests
//! wait most of the time (`check/runner.rs`).

mod dependencies;
pub(crate) mod programs;
mod python;
pub(crate) mod runner;

use crate::{
    libtorch,
    needs::{self, DEPLOY, TESTS},
    workspace::{self, requires_all, run_cargo},
};
use anyhow::{Context, Result, bail};
use clap::builder::PossibleValuesParser;
use programs::{Program, WHOLE, WITHOUT_TORCH};
use runner::{Done, Task};
use std::{
    collections::BTreeSet,
    ffi::OsString,
    fmt::Write as _,
    fs,
    path::PathBuf,
    process::Command,
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

/// Run the whole check: format, lints, build with and without libtorch, the Python package, tests,
/// deploy/, doctests, benches once, dependencies.
///
/// Ends with a table of results and times, and a list of what could not be tested here. With
/// EBB_REQUIRE_ALL=1, as in the CI, a test whose program or package is missing fails instead of
/// being skipped. Fetches what it needs (etcd, moto, packages of Debian where that disturbs
/// nobody); 544 MB for libtorch.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Only these stages [default: all, in this order]
    #[arg(value_name = "STAGE", value_parser = PossibleValuesParser::new(STAGES.map(|(stage, _)| stage)))]
    stages: Vec<String>,
    /// Test programs at once [default: two for each core]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=64))]
    places: Option<u16>,
}

/// The stages, and the command of cargo that one of them is.
const STAGES: [(&str, &str); 13] = [
    ("format", "fmt --all --check"),
    ("dependencies", ""),
    // The features of the other lints, but for libtorch: what both compile is compiled once.
    (
        "lint-without-torch",
        "clippy --workspace --no-default-features --features cloud,cuda --all-targets -- -D warnings",
    ),
    ("build-without-torch", ""),
    ("python", ""),
    ("lint", "clippy --workspace --features ebbflow-python/extension --all-targets -- -D warnings"),
    ("build", ""),
    ("test-without-torch", ""),
    ("test", ""),
    ("test-python", ""),
    ("test-deploy", ""),
    ("doctest", ""),
    ("bench-smoke", ""),
];

/// Stages that run what was built, all beside each other.
const RUNS: [&str; 6] =
    ["test-without-torch", "test", "test-python", "test-deploy", "doctest", "bench-smoke"];

/// Real containers, a real Slurm, a real sshd: with the build without libtorch, whose images are
/// small.
const OF_DEPLOY: [&str; 4] = ["compose", "slurm", "hosts", "deploy"];

/// Libraries and tests that run in both halves, because they do something else without libtorch.
const BOTH: [&str; 2] = ["model/lib", "checkpoints"];

/// Ends the name of a program that also runs without libtorch.
const WITH_LIBTORCH: &str = " with libtorch";

/// What tells cargo to build the tests of the kernels for CUDA devices alone. They need no device.
pub(crate) const CUDA: &str = "--package ebbflow-kernels --features cuda --lib --test cuda_absent --test cuda_calls --test cuda_device --test cuda_ipc --test cuda_joins --test cuda_values --test nvml";

/// Tests of what engines compute: with libtorch only. Other tests of `tests/` that are there in
/// both halves run without it: each process that loads libtorch computes for a third of a second
/// before it begins, and tests start thousands of them.
const WITH_TORCH: [&str; 5] = ["autocast", "custom_model", "matches_pytorch", "same_bits", "shared_memory"];

/// Packages whose own tests run without libtorch alone, so cargo need not compile them once more.
/// Leaving out others would change the features of third-party crates.
const NOT_WITH_TORCH: [&str; 4] = ["ebbflow-client", "ebbflow-master", "ebbflow-ps", "ebbflow-worker"];

/// Those that take longest, the longest first: they begin first. Nothing depends on a name that is
/// missing here.
const LONGEST: [&str; 21] = [
    "compose",
    "slurm",
    "images with libtorch",
    "doctest",
    "simulation",
    "on_device",
    "chaos",
    "evaluations",
    "takeover",
    "python/test_keras",
    "python/test_examples",
    "python/test_keras_cluster",
    "python/test_scripts",
    "python/test_elastic_cluster",
    "security",
    "crashes",
    "full_journal",
    "master_loss",
    "checkpoint_s3",
    "client/lib",
    "master/lib",
];

/// Whose processes compute all the time, on more than one core.
const HEAVY: [&str; 1] = ["compose"];

/// Silence after which a test program is ended. A test that hangs ends itself before
/// (`tests/harness/watchdog.rs`).
const LIMIT: Duration = Duration::from_secs(40 * 60);

/// Programs that were built, by the stage that runs them.
type Built = Vec<(&'static str, Program)>;

/// Variables for the tests.
type Environment = Vec<(String, OsString)>;

pub(crate) fn run(args: &Args) -> Result<()> {
    let begin = now();
    let stages = stages(&args.stages);
    let has = |names: &[&str]| stages.iter().any(|stage| names.contains(stage));
    // What comes over the network comes while the half without libtorch compiles.
    let (tests, deploy) = (has(&["test"]), has(&["test-deploy"]));
    let mut libtorch = has(&["lint", "build", "doctest"]).then(|| thread::spawn(libtorch::ensure_installed));
    let mut packages = has(&["python"]).then(|| thread::spawn(python::fetch));
    let mut programs = (tests || deploy || has(&["test-without-torch"]))
        .then(|| thread::spawn(move || environment(tests, deploy)));

    let (mut built, mut lines, mut failed) = (Built::new(), Vec::<Line>::new(), None);
    for stage in stages.iter().copied() {
        if failed.is_some() || RUNS.contains(&stage) {
            lines.push(Line { stage, word: "not run", note: String::new() });
            continue;
        }
        let start = now();
        eprintln!("\n== {stage}");
        let with_torch = if ["lint", "build"].contains(&stage) { fetched(&mut libtorch) } else { Ok(()) };
        let result = with_torch.and_then(|()| match stage {
            "dependencies" => dependencies::check(),
            "build-without-torch" => build_without_torch(&mut built),
            "build" => build(&mut built),
            "python" => fetched(&mut packages)
                .and_then(|()| python::build())
                .map(|tests| built.extend(tests.into_iter().map(|test| ("test-python", test)))),
            _ => run_cargo(STAGES.iter().find(|(name, _)| *name == stage).context("a stage")?.1),
        });
        let word = if result.is_ok() { PASSED } else { FAILED };
        lines.push(Line { stage, word, note: seconds(start.elapsed()) });
        if let Err(error) = result {
            eprintln!("{stage}: {error:#}");
            failed = Some(stage);
        }
    }
    let environment = fetched(&mut programs)?;
    let mut done = Vec::new();
    if failed.is_none() && has(&RUNS) {
        fetched(&mut libtorch)?;
        let (tasks, places) = (tasks(&built, &stages, &environment), places(args.places));
        eprintln!("\n== {} programs, in {places} places beside each other", tasks.len());
        done = runner::run(tasks, places)?;
        for line in &mut lines {
            *line = Line::of(line.stage, &done).unwrap_or_else(|| line.clone());
        }
        failed = lines.iter().find(|line| line.word == FAILED).map(|line| line.stage);
    }
    eprint!("\n{}", summary(&lines, begin.elapsed(), &done));
    match failed {
        Some(stage) => bail!("stage `{stage}` failed; repeat it alone: cargo xtask test {stage}"),
        None => Ok(()),
    }
}

/// Returns the chosen stages in their order. What a stage runs is built before it.
fn stages(chosen: &[String]) -> Vec<&'static str> {
    let is_chosen = |stage: &str| chosen.is_empty() || chosen.iter().any(|name| name == stage);
    let is_needed = |stage: &str| match stage {
        // A test that libtorch cannot change is left out of `test`, if the other half has it.
        "build-without-torch" => {
            ["test-without-torch", "test", "test-deploy", "bench-smoke"].into_iter().any(is_chosen)
        }
        "python" => is_chosen("test-python"),
        "build" => is_chosen("test"),
        _ => false,
    };
    STAGES.map(|(stage, _)| stage).into_iter().filter(|stage| is_chosen(stage) || is_needed(stage)).collect()
}

/// Fetches what tests start; answers the variables by which they find it.
pub(crate) fn environment(tests: bool, deploy: bool) -> Result<Environment> {
    let of_deploy = if tests || deploy { DEPLOY } else { &[] };
    let mut environment = vec![("PATH".to_owned(), needs::fetch(&[TESTS, of_deploy].concat())?)];
    environment.extend(needs::nvrtc()?.map(|folder| ("EBB_NVRTC".to_owned(), folder.into())));
    // PyTorch scripts layers and networks, and judges what was trained on MNIST.
    if requires_all() && tests {
        environment.extend(needs::torch()?.map(|python| ("EBB_PYTHON".to_owned(), python.into())));
    }
    Ok(environment)
}

/// Waits for what is being fetched, if anything is.
fn fetched<T: Default>(fetching: &mut Option<JoinHandle<Result<T>>>) -> Result<T> {
    let Some(fetching) = fetching.take() else { return Ok(T::default()) };
    fetching.join().unwrap_or_else(|_| bail!("what fetches has panicked, see above"))
}

/// Returns how many programs run at once. Most of them wait most of the time.
pub(crate) fn places(asked: Option<u16>) -> usize {
    asked.map_or_else(|| 2 * thread::available_parallelism().map_or(2, usize::from), usize::from)
}

fn build_without_torch(built: &mut Built) -> Result<()> {
    let programs = programs::build(&format!("{WITHOUT_TORCH} --all-targets"))?;
    let mut names = OF_DEPLOY.iter().chain(&BOTH).chain(&WITH_TORCH);
    if let Some(lost) = names.find(|name| programs.iter().all(|program| program.label != **name)) {
        bail!("there is no test program `{lost}`");
    }
    built.extend(programs.into_iter().filter_map(|program| Some((stage_without_torch(&program)?, program))));
    // The programs that these tests start have to outlive the next build, which makes others in
    // their place.
    run_cargo(&format!("build {WITHOUT_TORCH} --example oracle"))?;
    let (from, to) = (workspace::target_dir().join("debug"), without_torch());
    fs::create_dir_all(to.join("examples")).with_context(|| format!("create `{}`", to.display()))?;
    for name in ["ebb", "examples/oracle"] {
        // A process of an earlier check may still run it; a file that runs cannot be written.
        let _ = fs::remove_file(to.join(name));
        fs::copy(from.join(name), to.join(name))
            .with_context(|| format!("copy {name} to `{}`", to.display()))?;
    }
    Ok(())
}

/// Returns the stage that runs a program of the half without libtorch. `None`: only the other half
/// runs it, as all tests of the engines' crate.
fn stage_without_torch(program: &Program) -> Option<&'static str> {
    let is = |names: &[&str]| names.contains(&program.label.as_str());
    match () {
        () if program.is_bench => Some("bench-smoke"),
        () if is(&OF_DEPLOY) => Some("test-deploy"),
        () if is(&BOTH) => Some("test-without-torch"),
        () if is(&WITH_TORCH) || program.label.starts_with("model/") => None,
        () => Some("test-without-torch"),
    }
}

/// Returns where programs without libtorch are kept.
fn without_torch() -> PathBuf {
    workspace::target_dir().join("check/without-torch")
}

/// Builds what computes with libtorch, and leaves out the programs that run already.
fn build(built: &mut Built) -> Result<()> {
    let without_torch = built.clone();
    let left_out: String = NOT_WITH_TORCH.iter().map(|package| format!(" --exclude {package}")).collect();
    for program in programs::build(&format!("{WHOLE}{left_out} {}", of_torch()?))? {
        let other = without_torch.iter().map(|(_, other)| other).find(|other| other.label == program.label);
        let rest = match other {
            Some(other) if !BOTH.contains(&other.label.as_str()) => program.without(other),
            _ => Some(program),
        };
        built.extend(rest.map(|mut program| {
            if other.is_some() {
                program.label += WITH_LIBTORCH;
            }
            ("test", program)
        }));
    }
    // Tests start example programs; `cargo test` builds only the tests in them.
    run_cargo(&format!("build {WHOLE} --examples"))
}

/// Returns the words of cargo that choose the tests which libtorch may change.
fn of_torch() -> Result<String> {
    let folder = workspace::root().join("model/tests");
    let files = fs::read_dir(&folder).with_context(|| format!("read `{}`", folder.display()))?;
    let name = |file: fs::DirEntry| Some(file.file_name().to_str()?.strip_suffix(".rs")?.to_owned());
    let names: BTreeSet<String> = files.filter_map(Result::ok).filter_map(name).collect();
    let tests = names.iter().map(|name| format!(" --test {name}")).collect::<String>();
    Ok(format!("--lib --test system{tests}"))
}

/// Returns what the stages run, in the order in which it should begin.
fn tasks(
    built: &[(&'static str, Program)],
    stages: &[&str],
    environment: &[(String, OsString)],
) -> Vec<Task> {
    // The programs without libtorch are elsewhere, so this one is linked to it.
    let linked = workspace::target_dir().join("debug/ebb").into();
    let linked = stages.contains(&"build").then(|| ("EBB_LINKED_PROGRAM".to_owned(), linked));
    let environment = &[environment, linked.as_slice()].concat();
    let programs = built.iter().filter(|(stage, _)| stages.contains(stage));
    let mut tasks: Vec<_> =
        programs.filter_map(|(stage, program)| task(stage, program, "", environment)).collect();
    if stages.contains(&"doctest") {
        let mut command = workspace::cargo();
        command.args(["test", "--workspace", "--doc"]).current_dir(workspace::root());
        command.envs(environment.iter().cloned());
        tasks.push(Task { stage: "doctest", label: "doctest".to_owned(), command, places: 1, limit: LIMIT });
    }
    tasks.sort_by_key(|task| {
        let rank = LONGEST.iter().position(|name| *name == task.label);
        (rank.unwrap_or(LONGEST.len()), task.stage == "bench-smoke")
    });
    tasks
}

/// Returns how a program runs its tests with `text` in their names. `None`: a part without such a
/// test.
pub(crate) fn task(
    stage: &'static str,
    program: &Program,
    text: &str,
    environment: &[(String, OsString)],
) -> Option<Task> {
    let Program { path, folder, .. } = program;
    let label = program.label.as_str();
    // The simulation computes all the time, so programs that mostly wait go before it. Nice 5 is a
    // third of a share: with less it stands still on a machine where all programs compute.
    let in_background = label == "simulation";
    let mut command = Command::new(if in_background { "nice".as_ref() } else { path.as_path() });
    if in_background {
        command.args(["-n", "5"]).arg(path);
    }
    command.args(program.args(text)?).current_dir(folder).env("CARGO_MANIFEST_DIR", folder);
    command.envs(environment.iter().cloned());
    if ["test-deploy", "test-without-torch", "bench-smoke"].contains(&stage) {
        command.env("EBB_TEST_PROGRAM", without_torch().join("ebb"));
    }
    let places = if HEAVY.contains(&label) { 2 } else { usize::from(!in_background) };
    Some(Task { stage, label: label.to_owned(), command, places, limit: LIMIT })
}

const PASSED: &str = "passed";
const FAILED: &str = "FAILED";

/// A stage in the table.
#[derive(Clone, Debug)]
pub(crate) struct Line {
    stage: &'static str,
    word: &'static str,
    note: String,
}

impl Line {
    /// Returns what ran of a stage, if anything did.
    pub(crate) fn of(stage: &'static str, done: &[Done]) -> Option<Self> {
        let done: Vec<_> = done.iter().filter(|done| done.stage == stage).collect();
        let took = done.iter().map(|done| done.ended).max()?;
        let tests = done.iter().map(|done| done.tests).sum::<u64>();
        let cpu = seconds(done.iter().map(|done| done.cpu).sum());
        let mut note =
            format!("{:12}  {tests} tests in {} programs, {cpu} of CPU", seconds(took), done.len());
        let skipped = done.iter().map(|done| done.skipped.len()).sum::<usize>();
        if skipped > 0 {
            let _ = write!(note, ", {skipped} SKIPPED");
        }
        let failed: Vec<_> = done.iter().filter(|done| done.failure.is_some()).collect();
        let failed: Vec<&str> = failed.iter().map(|done| &*done.label).collect();
        if failed.is_empty() {
            return Some(Self { stage, word: PASSED, note });
        }
        Some(Self { stage, word: FAILED, note: format!("{note}, failed: {}", failed.join(", ")) })
    }
}

/// Returns a table of all stages, and below it what was not tested, and by which programs.
pub(crate) fn summary(lines: &[Line], total: Duration, done: &[Done]) -> String {
    let width = lines.iter().map(|line| line.stage.len()).max().unwrap_or(0);
    let mut text = String::new();
    let total = Line { stage: "total", word: "", note: seconds(total) };
    for Line { stage, word, note } in lines.iter().chain([&total]) {
        text += format!("{stage:width$}  {word:7}  {note}").trim_end();
        text.push('\n');
    }
    let skipped = runner::skipped(done);
    if !skipped.is_empty() {
        text += "\nSKIPPED, and so not tested here:\n";
    }
    for (what, programs) in skipped {
        let _ = writeln!(text, "  {what} ({})", programs.join(", "));
    }
    text
}

#[expect(clippy::disallowed_methods, reason = "what runs is timed for people, and ended when it hangs")]
pub(crate) fn now() -> Instant {
    Instant::now()
}

/// Formats a duration: `7.2 s`, or `3 min 07 s` from two minutes on.
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
    use super::{programs::tests::labelled, *};

    fn done(stage: &'static str, label: &str, failure: Option<&str>, ended: u64, skipped: &[&str]) -> Done {
        Done {
            stage,
            label: label.to_owned(),
            failure: failure.map(str::to_owned),
            ended: Duration::from_secs(ended),
            cpu: Duration::from_secs(3),
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
        let lines = [
            Line { stage: "lint", word: FAILED, note: seconds(Duration::from_millis(1250)) },
            Line { stage: "build", word: "not run", note: String::new() },
            Line::of("test", &done).unwrap(),
            Line::of("test-deploy", &done).unwrap(),
        ];
        let expected = "\
lint         FAILED   1.2 s
build        not run
test         passed   3 min 07 s    8 tests in 2 programs, 6.0 s of CPU, 3 SKIPPED
test-deploy  FAILED   90.0 s        4 tests in 1 programs, 3.0 s of CPU, failed: compose
total                 6 min 40 s

SKIPPED, and so not tested here:
  no GPU (mnist)
  no MNIST (chaos, mnist)
";
        assert_eq!(summary(&lines, Duration::from_secs(400), &done), expected);
        assert!(Line::of("doctest", &done).is_none());
    }

    #[test]
    fn what_a_stage_runs_is_built_before_it() {
        let chosen = |names: &[&str]| stages(&names.iter().map(|&name| name.to_owned()).collect::<Vec<_>>());
        assert_eq!(chosen(&["test", "format"]), ["format", "build-without-torch", "build", "test"]);
        assert_eq!(chosen(&["test-deploy"]), ["build-without-torch", "test-deploy"]);
        assert_eq!(chosen(&["test-python"]), ["python", "test-python"]);
        assert_eq!(chosen(&[]).len(), STAGES.len());
    }

    #[test]
    fn each_program_runs_in_the_half_that_has_its_tests() {
        let stage = |label| stage_without_torch(&labelled(label, &[]));
        for label in ["model/lib", "checkpoints", "ps/lib", "crashes"] {
            assert_eq!(stage(label), Some("test-without-torch"), "{label}");
        }
        for label in ["model/torch_model", "same_bits"] {
            assert_eq!(stage(label), None, "{label}");
        }
        assert_eq!(stage("deploy"), Some("test-deploy"));
        let bench = Program { is_bench: true, ..labelled("benches/scale", &[]) };
        assert_eq!(stage_without_torch(&bench), Some("bench-smoke"));
    }

    #[test]
    fn longest_programs_begin_first_and_benches_last() {
        let mut built = vec![("bench-smoke", labelled("adam", &[]))];
        built.extend(["tidy", "security", "chaos"].map(|label| ("test", labelled(label, &[]))));
        built.push(("test-without-torch", labelled("model/lib", &[])));
        let tasks = |stages: &[&str]| tasks(&built, stages, &[]).into_iter().map(|task| task.label);
        let labels: Vec<_> = tasks(&["test", "bench-smoke", "test-without-torch", "doctest"]).collect();
        assert_eq!(labels, ["doctest", "chaos", "security", "tidy", "model/lib", "adam"]);
        assert_eq!(tasks(&["format"]).count(), 0);
    }
}
