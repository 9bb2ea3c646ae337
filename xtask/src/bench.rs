//! `cargo xtask bench`: every bench, one after the other, and one report on all of them.
//!
//! A part is one cargo bench, or the end-to-end runs beside peers (`end_to_end.rs`). Benches of ours say their rows in the file that
//! `EBB_BENCH_ROWS` names (`benches/support/report.rs`), Criterion's in its own folder. Everything is built before anything is measured.

mod criterion;
mod end_to_end;
mod ours;
pub(crate) mod peers;
mod plot;
mod report;
mod rows;

use crate::{libtorch, workspace};
use anyhow::{Context, Result, bail, ensure};
use report::Report;
use rows::Row;
use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
    time::Instant,
};

/// Run all benches and write target/bench/report.md, report.json and a plot for each part.
///
/// About 25 minutes on 2 cores once everything is built. It installs its peers by itself, PyTorch (2.5 GB to download) and
/// TensorFlow (0.4 GB), beside libtorch in the cache; EBB_PYTHON names a Python that has PyTorch already. Nothing else should run
/// meanwhile. A missed target is shown and is no failure.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// One round of everything: shows that it works, its numbers mean little
    #[arg(long)]
    quick: bool,
    /// Only this part, may be repeated: micro, adam, checkpoint, end_to_end, or a folder of benches/ [default: all]
    #[arg(long, value_name = "NAME")]
    only: Vec<String>,
    /// Train end to end with this `ebb`, for example an earlier one [default: built for it]
    #[arg(long, value_name = "FILE")]
    ebb: Option<PathBuf>,
}

/// How cargo is told not to build libtorch's half: as the benches' own commands are.
const WITHOUT_TORCH: [&str; 2] = ["--workspace", "--no-default-features"];

/// What is measured in one go.
#[derive(Debug, PartialEq)]
enum Part {
    /// The Criterion benches.
    Micro,
    /// A bench that says its rows.
    Bench(String),
    /// Whole trainings beside peers.
    EndToEnd,
}

/// Benches of crates that say their rows.
const OF_CRATES: [&str; 2] = ["adam", "checkpoint"];

const CRITERION: [&str; 2] = ["optimizers", "aggregate"];

impl Part {
    fn name(&self) -> &str {
        match self {
            Self::Micro => "micro",
            Self::Bench(name) => name,
            Self::EndToEnd => "end_to_end",
        }
    }

    /// The cargo benches that it runs.
    fn benches(&self) -> Vec<&str> {
        match self {
            Self::Micro => CRITERION.to_vec(),
            Self::Bench(name) => vec![name],
            Self::EndToEnd => Vec::new(),
        }
    }

    /// All, the short ones first.
    fn all() -> Result<Vec<Self>> {
        let mut of_root = Vec::new();
        for entry in fs::read_dir(workspace::root().join("benches")).context("list benches/")? {
            let path = entry?.path();
            if path.join("main.rs").exists() {
                of_root.extend(path.file_name().map(|name| name.to_string_lossy().into_owned()));
            }
        }
        of_root.sort();
        let named = OF_CRATES.map(str::to_owned).into_iter().chain(of_root).map(Self::Bench);
        Ok([Self::Micro].into_iter().chain(named).chain([Self::EndToEnd]).collect())
    }

    fn measure(&self, bench: &Bench) -> Result<Vec<Row>> {
        match self {
            Self::Micro => bench.micro(),
            Self::Bench(name) => bench.rows_of(name),
            Self::EndToEnd => end_to_end::measure(&bench.ebb, &bench.folder, bench.quick),
        }
    }
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let mut parts = Part::all()?;
    if let Some(unknown) = args.only.iter().find(|name| parts.iter().all(|part| part.name() != *name)) {
        let names: Vec<_> = parts.iter().map(Part::name).collect();
        bail!("--only {unknown}: there is no such part; there are {}", names.join(", "));
    }
    parts.retain(|part| args.only.is_empty() || args.only.iter().any(|name| name == part.name()));
    let folder = workspace::root().join("target/bench");
    fs::create_dir_all(&folder).with_context(|| format!("create `{}`", folder.display()))?;
    let ebb = args.ebb.clone().unwrap_or_else(|| workspace::target_dir().join("release/ebb"));
    let bench = Bench { folder, quick: args.quick, ebb, python: None };
    let bench = bench.prepared(&parts, args.ebb.is_none())?;

    let mut report = Report::begin(args.quick);
    for (number, part) in parts.iter().enumerate() {
        let name = part.name();
        eprintln!("\n== {name} ({} of {})", number + 1, parts.len());
        let begin = now();
        let measured = part.measure(&bench);
        let took = begin.elapsed();
        match &measured {
            Ok(rows) => eprintln!("== {name}: {} rows in {:.0} s", rows.len(), took.as_secs_f64()),
            Err(error) => eprintln!("== {name}: FAILED: {error:#}"),
        }
        report.add(name, measured.map_err(|error| format!("{error:#}")), took);
        // After each part, so that what was measured is never lost.
        report.write(&bench.folder)?;
    }
    println!("\n{}", report.summary());
    println!("{}", bench.folder.join("report.md").display());
    ensure!(report.failed().is_empty(), "these parts failed: {}", report.failed().join(", "));
    Ok(())
}

#[expect(clippy::disallowed_methods, reason = "a bench measures real time")]
fn now() -> Instant {
    Instant::now()
}

/// Where and how it is measured.
struct Bench {
    folder: PathBuf,
    quick: bool,
    ebb: PathBuf,
    /// With PyTorch, where there is one.
    python: Option<PathBuf>,
}

impl Bench {
    /// Builds and installs what the parts need.
    fn prepared(self, parts: &[Part], builds_ebb: bool) -> Result<Self> {
        let needs_torch =
            parts.iter().any(|part| *part == Part::EndToEnd || *part == Part::Bench("adam".to_owned()));
        let python = if needs_torch { peers::Python::torch()? } else { None };
        let names: Vec<_> = parts.iter().flat_map(Part::benches).collect();
        if !names.is_empty() {
            eprintln!("\n== building {}", names.join(", "));
            succeed(self.cargo(&names).arg("--no-run"))?;
        }
        if builds_ebb && parts.contains(&Part::EndToEnd) {
            libtorch::ensure_installed()?;
            eprintln!("\n== building ebb");
            // As `cargo xtask run` does.
            let mut command = workspace::cargo();
            command.args(["build", "--release", "--package", "ebbflow", "--bin", "ebb"]);
            succeed(&mut command)?;
        }
        Ok(Self { python: python.map(|python| python.program), ..self })
    }

    /// Cargo with these benches. Without `--bench` on its command line, which only `cargo bench` adds, one of ours takes one small round.
    fn cargo(&self, names: &[&str]) -> Command {
        Self::cargo_as(if self.quick { &["test", "--release"] } else { &["bench"] }, names)
    }

    fn cargo_as(verb: &[&str], names: &[&str]) -> Command {
        let mut command = workspace::cargo();
        command.args(verb).args(WITHOUT_TORCH).args(names.iter().flat_map(|name| ["--bench", name]));
        command
    }

    fn micro(&self) -> Result<Vec<Row>> {
        let home = self.folder.join("criterion");
        if home.exists() {
            fs::remove_dir_all(&home).with_context(|| format!("remove `{}`", home.display()))?;
        }
        let times = if self.quick { ["0.1", "0.2", "10"] } else { ["0.5", "1", "20"] };
        let [warm_up, measurement, samples] = times;
        // Otherwise Criterion would not measure.
        let mut command = Self::cargo_as(&["bench"], &CRITERION);
        command
            .args(["--", "--noplot", "--warm-up-time", warm_up, "--measurement-time", measurement])
            .args(["--sample-size", samples])
            .env("CRITERION_HOME", &home);
        succeed(&mut command)?;
        criterion::rows(&home)
    }

    fn rows_of(&self, name: &str) -> Result<Vec<Row>> {
        let path = self.folder.join(format!("{name}.rows"));
        if path.exists() {
            fs::remove_file(&path).with_context(|| format!("remove `{}`", path.display()))?;
        }
        let mut command = self.cargo(&[name]);
        command.env("EBB_BENCH_ROWS", &path);
        if name == "checkpoint" && !self.quick {
            command.env("EBB_BENCH_BYTES", (1_u64 << 30).to_string());
        }
        if let Some(python) = &self.python {
            command.env("EBB_PYTHON", python);
        }
        succeed(&mut command)?;
        rows::read(&path)
    }
}

fn succeed(command: &mut Command) -> Result<()> {
    let status =
        command.current_dir(workspace::root()).status().with_context(|| format!("run {command:?}"))?;
    ensure!(status.success(), "{command:?}: {status}");
    Ok(())
}

/// The file's text, or an error that names it.
fn read(path: &Path) -> Result<String> {
    fs::read_to_string(path).with_context(|| format!("read `{}`", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_bench_of_the_project_is_a_part() {
        let parts = Part::all().unwrap();
        let names: Vec<_> = parts.iter().map(Part::name).collect();
        let mut declared = Vec::new();
        for folder in [".", "proto", "net", "store", "kernels", "data", "model", "ps", "master", "worker", "client"] {
            let text = read(&workspace::root().join(folder).join("Cargo.toml")).unwrap();
            let benches = text.split("[[bench]]\nname = \"").skip(1);
            declared.extend(benches.filter_map(|rest| rest.split('"').next()).map(str::to_owned));
        }
        assert!(declared.len() >= 6, "{declared:?}");
        for name in &declared {
            assert!(
                names.contains(&name.as_str()) || CRITERION.contains(&name.as_str()),
                "no part has {name}"
            );
        }
        assert_eq!(names.last(), Some(&"end_to_end"));
    }
}
