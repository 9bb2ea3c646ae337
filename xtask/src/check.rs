//! The whole check, in the order in which a mistake is found soonest. The CI runs exactly this.
//!
//! All stages use one profile, so libtorch's C++ bindings compile once. All take the whole workspace: another choice of
//! packages is another choice of their dependencies' features, and would compile half of those again.

use crate::{etcd, libtorch, moto, packages, workspace};
use anyhow::{Context, Result, bail};
use clap::builder::PossibleValuesParser;
use std::{
    fmt::Write as _,
    path::PathBuf,
    process::Stdio,
    time::{Duration, Instant},
};

/// Run the whole check: format, lints, build without libtorch, tests, deploy/, doctests, benches once, licences.
///
/// Stops at the first stage that fails and ends with a table of results and times. From a fresh clone about 40 minutes
/// on 2 cores, with 544 MB to download; a few minutes when only our own code has changed.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Only these stages [default: all, in this order]
    #[arg(value_name = "STAGE", value_parser = PossibleValuesParser::new(STAGES.map(|stage| stage.name)))]
    stages: Vec<String>,
}

struct Stage {
    name: &'static str,
    cargo: &'static str,
}

const STAGES: [Stage; 11] = [
    Stage { name: "format", cargo: "fmt --all --check" },
    Stage { name: "lint", cargo: "clippy --workspace --all-targets -- -D warnings" },
    Stage {
        name: "lint-without-torch",
        cargo: "clippy --workspace --no-default-features --all-targets -- -D warnings",
    },
    Stage { name: "test-without-torch", cargo: "test --workspace --no-default-features --lib" },
    // Everything in one go, so that both cores stay busy; the stages that follow only run.
    Stage { name: "build", cargo: "test --workspace --all-targets --no-run" },
    // Tests start example programs; `--all-targets` builds only the tests in them.
    Stage { name: "build-examples", cargo: "build --workspace --examples" },
    Stage { name: "test", cargo: "test --workspace --lib --bins --tests --examples" },
    // With the build without libtorch, whose images are small. Real containers, a real Slurm, a real sshd.
    Stage {
        name: "test-deploy",
        cargo: "test --workspace --no-default-features --test deploy --test hosts --test slurm --test compose",
    },
    Stage { name: "doctest", cargo: "test --workspace --doc" },
    // Without `--bench` on its command line a criterion bench runs each of its functions once.
    Stage { name: "bench-smoke", cargo: "test --workspace --bench *" },
    // Not advisories: a new one must not fail a change that has nothing to do with it. `cargo deny check` has them.
    Stage { name: "deny", cargo: "deny check bans licenses sources" },
];

/// One line of the table.
enum Outcome {
    Passed(Duration),
    Failed(Duration),
    Skipped(&'static str),
    NotRun,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    libtorch::ensure_installed()?;
    let stages: Vec<_> = STAGES
        .iter()
        .filter(|stage| args.stages.is_empty() || args.stages.iter().any(|name| name == stage.name))
        .collect();
    let deploys = stages.iter().any(|stage| stage.name == "test-deploy");
    let packages = if deploys { packages::ensure()? } else { None };
    let programs: Vec<_> = [etcd::ensure()?, moto::ensure()?, packages].into_iter().flatten().collect();
    let mut outcomes = Vec::new();
    let mut failed = None;
    for stage in stages {
        let outcome = if failed.is_some() { Outcome::NotRun } else { stage.run(&programs)? };
        if matches!(outcome, Outcome::Failed(_)) {
            failed = Some(stage);
        }
        outcomes.push((stage.name, outcome));
    }
    eprint!("\n{}", table(&outcomes));
    match failed {
        Some(Stage { name, cargo }) => bail!("stage `{name}` failed; repeat it alone: cargo {cargo}"),
        None => Ok(()),
    }
}

impl Stage {
    /// `programs`: folders to add to the PATH.
    fn run(&self, programs: &[PathBuf]) -> Result<Outcome> {
        if self.name == "deny" && !has_cargo_deny()? {
            eprintln!(
                "\n== deny: SKIPPED, cargo-deny is not installed; licences, bans and sources are NOT checked"
            );
            eprintln!("   to check them: cargo install --locked cargo-deny");
            return Ok(Outcome::Skipped("cargo-deny is not installed"));
        }
        eprintln!("\n== {}: cargo {}", self.name, self.cargo);
        let start = now();
        let mut command = workspace::cargo();
        command.args(self.cargo.split_whitespace()).current_dir(workspace::root());
        if !programs.is_empty() {
            command.env("PATH", workspace::path_with(programs)?);
        }
        let status = command.status().with_context(|| format!("run cargo {}", self.cargo))?;
        Ok(if status.success() { Outcome::Passed(start.elapsed()) } else { Outcome::Failed(start.elapsed()) })
    }
}

#[expect(clippy::disallowed_methods, reason = "a stage is timed for people")]
fn now() -> Instant {
    Instant::now()
}

fn has_cargo_deny() -> Result<bool> {
    let mut command = workspace::cargo();
    command.args(["deny", "--version"]).stdout(Stdio::null()).stderr(Stdio::null());
    Ok(command.status().context("run cargo")?.success())
}

fn table(outcomes: &[(&str, Outcome)]) -> String {
    let width = outcomes.iter().map(|(name, _)| name.len()).max().unwrap_or(0);
    let mut table = String::new();
    let mut total = Duration::ZERO;
    for (name, outcome) in outcomes {
        let (word, note) = match outcome {
            Outcome::Passed(time) | Outcome::Failed(time) => {
                total += *time;
                let word = if matches!(outcome, Outcome::Passed(_)) { "passed" } else { "FAILED" };
                (word, seconds(*time))
            }
            Outcome::Skipped(why) => ("SKIPPED", (*why).to_owned()),
            Outcome::NotRun => ("not run", String::new()),
        };
        let line = format!("{name:width$}  {word:7}  {note}");
        let _ = writeln!(table, "{}", line.trim_end());
    }
    let _ = writeln!(table, "{:width$}  {:7}  {}", "total", "", seconds(total));
    table
}

/// `7.2 s`, or `3 min 07 s` from two minutes on.
fn seconds(time: Duration) -> String {
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

    #[test]
    fn table_says_what_passed_failed_was_skipped_and_was_not_reached() {
        let outcomes = [
            ("format", Outcome::Passed(Duration::from_millis(1250))),
            ("lint", Outcome::Failed(Duration::from_secs(187))),
            ("test", Outcome::NotRun),
            ("deny", Outcome::Skipped("cargo-deny is not installed")),
        ];
        let expected = "\
format  passed   1.2 s
lint    FAILED   3 min 07 s
test    not run
deny    SKIPPED  cargo-deny is not installed
total            3 min 08 s
";
        assert_eq!(table(&outcomes), expected);
    }
}
