//! `cargo xtask bench`: every bench, one after the other, and one report on all of them.
//!
//! A part is one cargo bench, or the end-to-end runs beside peers (`benches/end_to_end.py`). Each
//! says its rows in the file `PART.rows`, Criterion's benches in a folder of its own;
//! `benches/report.py` makes the report of them. Everything is built before anything is measured.

use crate::{
    check::now,
    libtorch,
    needs::{self, PLOTS, TENSORFLOW},
    workspace::{self, run_cargo, succeed},
};
use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};
use std::{
    fs,
    io::ErrorKind,
    path::{self, Path, PathBuf},
    process::{Command, Stdio},
};

/// Run all benches and write target/bench/report.md, report.json and a plot for each part.
///
/// About 25 minutes on 2 cores once everything is built. It installs its peers by itself, PyTorch
/// (2.5 GB to download) and TensorFlow (0.4 GB), beside libtorch in the cache; EBB_PYTHON names a
/// Python that has PyTorch already. Nothing else should run meanwhile. A missed target is shown and
/// is no failure.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// One round of everything: shows that it works, its numbers mean little
    #[arg(long)]
    quick: bool,
    /// Only this part, may be repeated: micro, adam, checkpoint, end_to_end, or a folder of
    /// benches/ [default: all but large_data, which needs root, Docker and an hour]
    #[arg(long, value_name = "NAME")]
    only: Vec<String>,
    /// Train end to end with this `ebb`, for example an earlier one [default: built for it]
    #[arg(long, value_name = "FILE")]
    ebb: Option<PathBuf>,
}

/// Benches of crates that say their rows.
const OF_CRATES: [&str; 2] = ["adam", "checkpoint"];

/// The part `micro`.
const CRITERION: [&str; 2] = ["optimizers", "aggregate"];

/// The part that runs only when it is named.
const LARGE: &str = "large_data";

/// The part that is no cargo bench.
const END_TO_END: &str = "end_to_end";

/// Returns all parts, the short ones first.
fn parts() -> Result<Vec<String>> {
    let mut of_root = Vec::new();
    for entry in fs::read_dir(workspace::root().join("benches")).context("list benches/")? {
        let path = entry?.path();
        if path.join("main.rs").exists() {
            of_root.extend(path.file_name().map(|name| name.to_string_lossy().into_owned()));
        }
    }
    of_root.sort();
    let named = ["micro"].into_iter().chain(OF_CRATES).map(str::to_owned);
    Ok(named.chain(of_root).chain([END_TO_END.to_owned()]).collect())
}

/// Returns the cargo benches of a part.
fn benches(part: &str) -> Vec<&str> {
    match part {
        "micro" => CRITERION.to_vec(),
        END_TO_END => Vec::new(),
        name => vec![name],
    }
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let mut parts = parts()?;
    if let Some(unknown) = args.only.iter().find(|name| !parts.contains(name)) {
        bail!("--only {unknown}: there is no such part; there are {}", parts.join(", "));
    }
    parts.retain(|part| if args.only.is_empty() { part != LARGE } else { args.only.contains(part) });
    let load = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    let load = load.split(' ').next().unwrap_or_default();
    let folder = workspace::root().join("target/bench");
    fs::create_dir_all(&folder).with_context(|| format!("create `{}`", folder.display()))?;
    let bench = Bench::prepared(args, &parts, &folder)?;
    let plots = PLOTS.interpreter()?.unwrap_or_else(|| "python3".into());

    let mut done: Vec<Value> = Vec::new();
    for (number, part) in parts.iter().enumerate() {
        eprintln!("\n== {part} ({} of {})", number + 1, parts.len());
        let begin = now();
        let error = bench.measure(part).err().map(|error| format!("{error:#}"));
        if let Some(error) = &error {
            eprintln!("== {part}: FAILED: {error}");
        }
        done.push(json!({ "name": part, "seconds": begin.elapsed().as_secs_f64(), "error": error }));
        // After each part, so that what was measured is never lost.
        println!();
        report(&plots, &folder, &json!({ "load": load, "quick": args.quick, "parts": done }))?;
    }
    println!("{}", folder.join("report.md").display());
    let failed = done.iter().filter(|part| !part["error"].is_null()).count();
    ensure!(failed == 0, "{failed} parts failed, see above");
    Ok(())
}

/// Writes the report of what was measured so far.
fn report(python: &Path, folder: &Path, state: &Value) -> Result<()> {
    let mut command = Command::new(python);
    command.env("PYTHONDONTWRITEBYTECODE", "1").arg("benches/report.py").arg(folder).stdin(Stdio::piped());
    let mut child =
        command.current_dir(workspace::root()).spawn().with_context(|| format!("run {command:?}"))?;
    serde_json::to_writer(child.stdin.take().context("its input is piped")?, state)?;
    ensure!(child.wait()?.success(), "{command:?} failed, see above");
    Ok(())
}

/// Where and how it is measured.
struct Bench<'a> {
    folder: &'a Path,
    quick: bool,
    ebb: PathBuf,
    /// With PyTorch, where there is one.
    python: Option<PathBuf>,
    tensorflow: Option<PathBuf>,
}

impl<'a> Bench<'a> {
    /// Builds and installs what the parts need.
    fn prepared(args: &Args, parts: &[String], folder: &'a Path) -> Result<Self> {
        let has = |part: &str| parts.iter().any(|name| name == part);
        let python = if has(END_TO_END) || has("adam") { needs::torch()? } else { None };
        let tensorflow = if has(END_TO_END) { TENSORFLOW.interpreter()? } else { None };
        let built = workspace::target_dir().join("release/ebb");
        let ebb = path::absolute(args.ebb.as_ref().unwrap_or(&built))?;
        let bench = Self { folder, quick: args.quick, ebb, python, tensorflow };
        let names: Vec<_> = parts.iter().flat_map(|part| benches(part)).collect();
        if !names.is_empty() {
            eprintln!("\n== building {}", names.join(", "));
            succeed(bench.cargo(args.quick, &names).arg("--no-run"))?;
        }
        if args.ebb.is_none() && has(END_TO_END) {
            libtorch::ensure_installed()?;
            eprintln!("\n== building ebb");
            // As `cargo xtask run` does.
            run_cargo("build --release --package ebbflow --bin ebb")?;
        }
        Ok(bench)
    }

    /// Returns the cargo command that runs these benches. Only `cargo bench` adds `--bench`;
    /// without it a bench of ours takes one small round.
    fn cargo(&self, once: bool, names: &[&str]) -> Command {
        let mut command = workspace::cargo();
        command.args(if once { &["test", "--release"][..] } else { &["bench"] });
        command.args(["--workspace", "--no-default-features"]);
        command.args(names.iter().flat_map(|name| ["--bench", name]));
        command
    }

    /// Measures a part, whose rows are then in the folder.
    fn measure(&self, part: &str) -> Result<()> {
        let rows = self.folder.join(format!("{part}.rows"));
        let criterion = self.folder.join("criterion");
        let gone = if part == "micro" { fs::remove_dir_all(&criterion) } else { fs::remove_file(&rows) };
        gone.or_else(|error| if error.kind() == ErrorKind::NotFound { Ok(()) } else { Err(error) })?;
        // Criterion would not measure without `cargo bench`.
        let mut command = self.cargo(self.quick && part != "micro", &benches(part));
        command.env("EBB_BENCH_ROWS", &rows);
        match part {
            "micro" => {
                let times = if self.quick { ["0.1", "0.2", "10"] } else { ["0.5", "1", "20"] };
                let names = ["--warm-up-time", "--measurement-time", "--sample-size"];
                command
                    .args(["--", "--noplot"])
                    .args(names.iter().zip(&times).flat_map(|(name, time)| [name, time]));
                command.env("CRITERION_HOME", &criterion);
            }
            "checkpoint" if !self.quick => {
                command.env("EBB_BENCH_BYTES", (1_u64 << 30).to_string());
            }
            "adam" => {
                command.envs(self.python.as_ref().map(|python| ("EBB_PYTHON", python)));
            }
            END_TO_END => {
                let data = workspace::mnist().context(
                    "no MNIST: put t10k-*-ubyte.gz into examples/mnist/data, or set EBB_MNIST_DIR",
                )?;
                let python = self.python.as_ref().context("there is no PyTorch to compare with")?;
                command = Command::new(python);
                command
                    .arg("benches/end_to_end.py")
                    .args([&self.ebb, &path::absolute(data)?])
                    .arg(self.folder);
                command.args(self.quick.then_some("--quick"));
                command.args(
                    self.tensorflow.iter().flat_map(|python| ["--tensorflow".as_ref(), python.as_path()]),
                );
            }
            _ => {}
        }
        succeed(&mut command)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_bench_of_the_project_is_a_part() {
        let parts = parts().unwrap();
        let manifest = |folder: &str| {
            let text = fs::read_to_string(workspace::root().join(folder).join("Cargo.toml")).unwrap();
            text.parse::<toml::Table>().unwrap()
        };
        let list =
            |value: Option<&toml::Value>| value.and_then(toml::Value::as_array).cloned().unwrap_or_default();
        let root = manifest("");
        let members = list(root["workspace"].get("members"));
        let folders = members.iter().filter_map(toml::Value::as_str).chain([""]);
        let benches = folders.flat_map(|folder| list(manifest(folder).get("bench")));
        let declared: Vec<_> = benches.map(|bench| bench["name"].as_str().unwrap().to_owned()).collect();
        assert!(declared.len() >= 6, "{declared:?}");
        for name in &declared {
            let is_measured = parts.contains(name) || CRITERION.contains(&name.as_str());
            assert!(is_measured || crate::gpu::BENCHES.contains(&name.as_str()), "no part has {name}");
        }
        assert_eq!(parts.last().unwrap(), END_TO_END);
    }

    #[test]
    fn examples_in_the_scripts_are_right() {
        let mut command = Command::new("python3");
        command.env("PYTHONDONTWRITEBYTECODE", "1").args(["-m", "doctest"]);
        succeed(command.args(["benches/report.py", "benches/end_to_end.py"])).unwrap();
    }

    #[test]
    fn missed_targets_and_failed_parts_are_in_the_report() {
        let folder = tempfile::tempdir().unwrap();
        let put = |name: &str, text: &str| {
            let path = folder.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        // As `benches/support/report.rs` writes them.
        let row = r#""unit":"ratio","limit_or_peer":1.0,"ratio":0.9,"samples":[0.9,0.8,1.0]}"#;
        let lost = r#"{"name":"lost","value":null,"unit":"ms","limit_or_peer":0.0,"ratio":null,"target":{"below":1.0},"samples":[]}"#;
        put(
            "data_plane.rows",
            &format!(r#"{{"name":"pull","value":0.9,"target":{{"at_least":0.95}},{row}{}{lost}"#, "\n"),
        );
        for (name, nanos, bytes) in [("adam/1MiB", "1e9", "1073741824"), ("memcpy/1MiB", "5e8", "1073741824")]
        {
            let throughput = format!(r#"{{"full_id":"{name}","throughput":{{"Bytes":{bytes}}}}}"#);
            put(&format!("criterion/{name}/new/benchmark.json"), &throughput);
            put(
                &format!("criterion/{name}/new/sample.json"),
                &format!(r#"{{"iters":[1],"times":[{nanos}]}}"#),
            );
        }
        let part = |name: &str, error: Option<&str>| json!({ "name": name, "seconds": 61.0, "error": error });
        let parts = [part("micro", None), part("data_plane", None), part("adam", Some("exit status: 101"))];
        let state = json!({ "load": "0.00", "quick": false, "parts": parts });
        report("python3".as_ref(), folder.path(), &state).unwrap();

        let text = fs::read_to_string(folder.path().join("report.md")).unwrap();
        for line in [
            "4 rows, 0 of 2 targets met\nmissed: pull: 0.900, target >= 0.950\nmissed: lost: -, target < 1.00\n",
            "| adam/1MiB | 1.00 GiB/s | 2.00 | 0.500 | - | 1.00 to 1.00 | 1 |  |",
            "| pull | 0.900  | 1.000 | 0.900 | >= 0.950 | 0.800 to 1.000 | 3 | MISSED |",
            "FAILED: exit status: 101",
        ] {
            assert!(text.contains(line), "no `{line}` in\n{text}");
        }
        let list = fs::read_to_string(folder.path().join("report.json")).unwrap();
        let list: Vec<Value> = serde_json::from_str(&list).unwrap();
        assert_eq!(
            (list.len(), &list[2]["part"], &list[2]["target"]["at_least"]),
            (4, &json!("data_plane"), &json!(0.95))
        );
    }
}
