//! `cargo xtask gpu`: what only a machine with an NVIDIA GPU can try, and a report on it.
//!
//! The tests of `kernels/tests/cuda_device.rs`, `kernels/tests/cuda_ipc.rs` and
//! `tests/system/on_device.rs` run everywhere with a driver of their own. Here they run with the
//! machine's driver.

use crate::{
    check::{now, seconds},
    libtorch, needs,
    workspace::{self, has_program, run_cargo},
};
use anyhow::{Context, Result, anyhow, bail, ensure};
use std::{
    fmt::{self, Write as _},
    fs,
    io::{BufRead, BufReader, Read},
    path::Path,
    process::{Command, Stdio},
    thread,
    time::Duration,
};

/// Run the tests of CUDA devices and their benches on this machine's GPU, and write
/// docs/measurements/gpu-NAME.md.
///
/// It needs NVIDIA's driver and a device. NVRTC is fetched with pip unless EBB_NVRTC names its
/// folder, and so are PyTorch (2.5 GB to download), which EBB_PYTHON may name, and the CUDA half of
/// libtorch (2.5 GB), which `training speed` needs. What is missing is named before anything is
/// built.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// NAME of the report [default: the name of the first device]
    #[arg(long)]
    name: Option<String>,
    /// Run only the steps whose name has this word, such as `speed`. May be repeated [default: all]
    #[arg(long, value_name = "WORD")]
    only: Vec<String>,
    /// Seconds after which a step is ended, its build included. The report says so
    #[arg(long, value_name = "SECONDS", default_value_t = 1800, value_parser = clap::value_parser!(u32).range(1..))]
    limit: u32,
}

/// What a test says when it could not test, see `tests/harness/skip.rs`.
const SKIPPED: &str = "SKIPPED: ";

/// How `timeout` of coreutils ends when it has ended a command.
const TIMED_OUT: i32 = 124;

/// The cargo benches of devices, which are no part of `cargo xtask bench`.
#[cfg(test)]
pub(crate) const BENCHES: [&str; 2] = ["device", "data_plane_on_device"];

/// The step that needs PyTorch and libtorch with CUDA, and the program for Python.
const TRAINING: (&str, &str) = ("training speed", "benches/gpu.py");

/// What runs, as people call it, and the words for cargo. [`TRAINING`] is the last one.
const STEPS: [(&str, &str); 9] = [
    (
        "kernels: the bits of the host",
        "test --release --package ebbflow-kernels --features cuda --test cuda_device",
    ),
    (
        "kernels: the bits of values that a worker passes on",
        "test --release --package ebbflow-kernels --features cuda --test cuda_values",
    ),
    (
        "kernels: memory that crosses between processes",
        "test --release --package ebbflow-kernels --features cuda --test cuda_ipc",
    ),
    (
        "ps: the bits of the host in all that a partition does",
        "test --release --package ebbflow-ps --features cuda --test on_device",
    ),
    (
        "pure engine: the bits of the host",
        "test --release --package ebbflow-model --no-default-features --features cuda --test pure_on_device",
    ),
    (
        "ps as processes: the bits of the host, and telemetry",
        "test --release --package ebbflow --no-default-features --features cuda --test system on_device::",
    ),
    ("speed", "bench --package ebbflow-kernels --features cuda --bench device"),
    (
        "speed between two processes",
        "bench --package ebbflow --no-default-features --features cuda --bench data_plane_on_device",
    ),
    TRAINING,
];

/// What the machine has.
#[derive(Debug, Default, PartialEq, Eq)]
struct Found {
    /// Whether `nvidia-smi`, which comes with the driver, is there.
    has_driver: bool,
    devices: Vec<Device>,
    /// What `nvidia-smi` says if it fails.
    refusal: String,
}

/// A device, as `nvidia-smi` tells it.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Device {
    name: String,
    memory: String,
    driver: String,
    capability: String,
}

/// How a step ended.
#[derive(Debug)]
struct Done {
    what: &'static str,
    command: &'static str,
    end: End,
    took: Duration,
    lines: Vec<String>,
}

/// What a step came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    Passed,
    Failed,
    /// It was ended after so many seconds.
    TimedOut(u32),
}

impl fmt::Display for End {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Passed => f.write_str("passed"),
            Self::Failed => f.write_str("FAILED"),
            Self::TimedOut(seconds) => write!(f, "ENDED after {seconds} s"),
        }
    }
}

/// When and of what a report is.
#[derive(Debug)]
struct Origin {
    date: String,
    commit: String,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let found = found()?;
    if let Some(missing) = missing(&found) {
        bail!("{missing}");
    }
    let nvrtc = match needs::nvrtc()? {
        Some(folder) => Some(folder),
        None if workspace::is_set("EBB_NVRTC") => None,
        None => {
            bail!("no NVRTC: pip cannot fetch it, see above; set EBB_NVRTC to the folder with libnvrtc.so")
        }
    };
    let origin = Origin {
        date: said(Command::new("date").arg("+%F"))?,
        commit: said(Command::new("git").args(["rev-parse", "--short", "HEAD"]))?,
    };
    let chosen = chosen(&args.only)?;
    let measures = chosen.iter().any(|(what, _)| what.contains("speed"));
    let python = if measures { needs::torch()? } else { None };
    if chosen.contains(&TRAINING) {
        libtorch::ensure_cuda()?;
        // As `cargo xtask run` does.
        run_cargo("build --release --package ebbflow --bin ebb")?;
    }
    let mut done = Vec::new();
    for chosen in chosen {
        eprintln!("\n== {}", chosen.0);
        let Some(program) = program(chosen, python.as_deref()) else {
            eprintln!("{SKIPPED}there is no PyTorch, see above");
            continue;
        };
        done.push(step(chosen, &program, nvrtc.as_deref(), python.as_deref(), args.limit)?);
    }
    let name = args.name.clone().unwrap_or_else(|| slug(&found.devices[0].name));
    let path = workspace::root().join(format!("docs/measurements/gpu-{name}.md"));
    fs::write(&path, report(&name, &found.devices, &origin, &done))
        .with_context(|| format!("write `{}`", path.display()))?;
    println!("{}", path.display());
    let failed: Vec<_> = done.iter().filter(|done| done.end != End::Passed).map(|done| done.what).collect();
    ensure!(failed.is_empty(), "failed: {}; the report says so too", failed.join(", "));
    Ok(())
}

/// Returns the steps whose name has one of the words; without words, all.
fn chosen(only: &[String]) -> Result<Vec<(&'static str, &'static str)>> {
    if let Some(word) = only.iter().find(|word| STEPS.iter().all(|(what, _)| !what.contains(*word))) {
        let names: Vec<_> = STEPS.iter().map(|(what, _)| format!("  {what}")).collect();
        bail!("--only {word}: no step has this word in its name; the steps are\n{}", names.join("\n"));
    }
    let is_chosen = |what: &str| only.is_empty() || only.iter().any(|word| what.contains(word));
    Ok(STEPS.into_iter().filter(|(what, _)| is_chosen(what)).collect())
}

/// Asks the driver for its devices.
fn found() -> Result<Found> {
    if !has_program("nvidia-smi") {
        return Ok(Found::default());
    }
    let mut command = Command::new("nvidia-smi");
    command.args(["--query-gpu=name,memory.total,driver_version,compute_cap", "--format=csv,noheader"]);
    let output = command.output().context("run nvidia-smi")?;
    let text = String::from_utf8_lossy(&output.stdout);
    let devices = if output.status.success() { devices(&text) } else { Vec::new() };
    let refusal = if output.status.success() { String::new() } else { text.trim().to_owned() };
    Ok(Found { has_driver: true, devices, refusal })
}

/// Reads what `nvidia-smi` says: one device in each line.
fn devices(text: &str) -> Vec<Device> {
    let device = |line: &str| {
        let mut parts = line.split(',').map(|part| part.trim().to_owned());
        Some(Device {
            name: parts.next().filter(|name| !name.is_empty())?,
            memory: parts.next()?,
            driver: parts.next()?,
            capability: parts.next()?,
        })
    };
    text.lines().filter_map(device).collect()
}

/// Returns the first thing that this machine lacks; `None`: nothing.
fn missing(found: &Found) -> Option<String> {
    if !found.has_driver {
        let what = "no NVIDIA driver: no `nvidia-smi` on the PATH; the tests of devices run without one: \
                    cargo xtask test";
        return Some(what.to_owned());
    }
    if found.devices.is_empty() {
        let why = if found.refusal.is_empty() { "it shows none" } else { &found.refusal };
        return Some(format!("no NVIDIA device: `nvidia-smi` is there, and {why}"));
    }
    None
}

/// Returns what runs a step. `None`: it needs a Python with PyTorch.
fn program((what, words): (&str, &str), python: Option<&Path>) -> Option<Command> {
    if what != TRAINING.0 {
        let mut cargo = workspace::cargo();
        cargo.args(words.split_whitespace());
        return Some(cargo);
    }
    let mut command = Command::new(python?);
    let target = workspace::target_dir();
    command.arg(words).arg(target.join("release/ebb")).arg(target.join("bench"));
    Some(command)
}

/// Runs a step for so many seconds at most, shows what it prints, and keeps the lines.
fn step(
    (what, words): (&'static str, &'static str),
    program: &Command,
    nvrtc: Option<&Path>,
    python: Option<&Path>,
    limit: u32,
) -> Result<Done> {
    let begin = now();
    let mut command = Command::new("timeout");
    command.arg("--kill-after=10").arg(limit.to_string()).arg(program.get_program());
    command.args(program.get_args());
    command.current_dir(workspace::root()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command.env("EBB_TEST_DRIVER", "real").envs(python.map(|python| ("EBB_PYTHON", python)));
    // The bench finds NVRTC by the loader, as `ebb` does.
    if let Some(folder) = nvrtc {
        command.env("EBB_NVRTC", folder).env("LD_LIBRARY_PATH", workspace::library_path_with(folder)?);
    }
    let mut child = command.spawn().with_context(|| format!("run {command:?}"))?;
    let stdout = child.stdout.take().context("its output is piped")?;
    let stderr = child.stderr.take().context("its output is piped")?;
    // What a test could not try is said on stderr.
    let complaints = thread::spawn(move || kept(stderr, |line| eprintln!("{line}")));
    let mut lines = kept(stdout, |line| println!("{line}"))?;
    lines.extend(complaints.join().map_err(|_| anyhow!("reading the output of cargo panicked"))??);
    let status = child.wait().context("wait for cargo")?;
    let end = match status.code() {
        Some(0) => End::Passed,
        Some(TIMED_OUT) => End::TimedOut(limit),
        _ => End::Failed,
    };
    Ok(Done { what, command: words, end, took: begin.elapsed(), lines })
}

/// Shows lines as they come, and returns them all.
fn kept(from: impl Read, show: impl Fn(&str)) -> Result<Vec<String>> {
    let mut lines = Vec::new();
    for line in BufReader::new(from).lines() {
        let line = line.context("read the output of cargo")?;
        show(&line);
        lines.push(line);
    }
    Ok(lines)
}

/// Returns what a command prints, without the end of the line.
fn said(command: &mut Command) -> Result<String> {
    let output =
        command.current_dir(workspace::root()).output().with_context(|| format!("run {command:?}"))?;
    ensure!(output.status.success(), "{command:?}: {}", output.status);
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

/// Returns a name for a file: `nvidia-h100-80gb-hbm3`.
fn slug(name: &str) -> String {
    let letters = name.chars().map(|letter| if letter.is_ascii_alphanumeric() { letter } else { ' ' });
    letters.collect::<String>().split_whitespace().collect::<Vec<_>>().join("-").to_lowercase()
}

/// Returns the name of the program that these words are for.
fn runs(words: &str) -> &'static str {
    if words == TRAINING.1 { "python" } else { "cargo" }
}

/// Returns the number of tests that passed and failed, of what cargo prints.
fn counts(lines: &[String]) -> (u32, u32) {
    let (mut passed, mut failed) = (0, 0);
    for line in lines.iter().filter_map(|line| line.strip_prefix("test result: ")) {
        let number = |word: &str| {
            let before = line.split(word).next()?;
            before.split_whitespace().last()?.parse::<u32>().ok()
        };
        passed += number(" passed").unwrap_or(0);
        failed += number(" failed").unwrap_or(0);
    }
    (passed, failed)
}

/// Returns the figures of the bench: name, value and unit.
fn figures(lines: &[String]) -> Vec<[&str; 3]> {
    lines.iter().filter_map(|line| line.split('\t').collect::<Vec<_>>().try_into().ok()).collect()
}

/// Writes the report.
fn report(name: &str, devices: &[Device], origin: &Origin, done: &[Done]) -> String {
    let mut text = format!(
        "# A real device: {name}\n\n`cargo xtask gpu` wrote this file on {} at commit `{}`. It is a record: \
         nobody updates it.\n\n",
        origin.date, origin.commit
    );
    text += "| device | memory | driver | compute capability |\n| --- | --- | --- | --- |\n";
    for Device { name, memory, driver, capability } in devices {
        let _ = writeln!(text, "| {name} | {memory} | {driver} | {capability} |");
    }
    text += "\n## Tests\n\n| what | result | tests | time | command |\n| --- | --- | --- | --- | --- |\n";
    for Done { what, command, end, took, lines } in done {
        let tests = match counts(lines) {
            (0, 0) => "-".to_owned(),
            (passed, 0) => passed.to_string(),
            (passed, failed) => format!("{passed} passed, {failed} failed"),
        };
        let _ = writeln!(
            text,
            "| {what} | {end} | {tests} | {} | `{} {command}` |",
            seconds(*took),
            runs(command)
        );
    }
    let skipped: Vec<_> =
        done.iter().flat_map(|done| &done.lines).filter_map(|line| line.strip_prefix(SKIPPED)).collect();
    if !skipped.is_empty() {
        text +=
            "\n## Not tried\n\nThese tests count as passed above, and tried less than their names say.\n\n";
        for skipped in skipped {
            let _ = writeln!(text, "- {skipped}");
        }
    }
    let rows: Vec<_> = done.iter().flat_map(|done| figures(&done.lines)).collect();
    if !rows.is_empty() {
        text += "\n## Speed\n\n| what | value | unit |\n| --- | --- | --- |\n";
        for [what, value, unit] in rows {
            let _ = writeln!(text, "| {what} | {value} | {unit} |");
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn h100() -> Device {
        let [name, memory, driver, capability] =
            ["NVIDIA H100 80GB HBM3", "81559 MiB", "580.65.06", "9.0"].map(str::to_owned);
        Device { name, memory, driver, capability }
    }

    fn done(what: &'static str, end: End, lines: &[&str]) -> Done {
        let lines = lines.iter().map(|&line| line.to_owned()).collect();
        Done { what, command: "test x", end, took: Duration::from_millis(7200), lines }
    }

    #[test]
    fn devices_are_read_as_the_driver_tells_them() {
        let said = "NVIDIA H100 80GB HBM3, 81559 MiB, 580.65.06, 9.0\n\nnonsense\n";
        assert_eq!(devices(said), [h100()]);
        assert_eq!(slug(&h100().name), "nvidia-h100-80gb-hbm3");
    }

    #[test]
    fn the_first_thing_that_is_missing_is_named() {
        let of = |found: Found| missing(&found).unwrap_or_default();
        assert!(of(Found::default()).starts_with("no NVIDIA driver: "));
        let driver = || Found { has_driver: true, ..Found::default() };
        assert!(of(driver()).ends_with("it shows none"));
        let refusal = "NVIDIA-SMI has failed".to_owned();
        assert!(of(Found { refusal, ..driver() }).ends_with("NVIDIA-SMI has failed"));
        assert_eq!(of(Found { devices: vec![h100()], ..driver() }), "");
    }

    #[test]
    fn a_report_has_the_device_the_results_and_the_figures() {
        let origin = Origin { date: "2026-12-01".to_owned(), commit: "abc1234".to_owned() };
        let good = [
            "SKIPPED: no second device: copies between two",
            "running 4 tests",
            "test result: ok. 4 passed; 0 failed; 0 ignored; finished in 1.0s",
        ];
        let bad = ["test result: FAILED. 2 passed; 1 failed; 0 ignored; finished in 1.0s"];
        let bench = ["device\tone\ttwo\tthree", "adam, 256 chunks, device\t1234.5\tGiB/s"];
        let done = [
            done("kernels", End::Passed, &good),
            done("ps", End::Failed, &bad),
            done("speed", End::TimedOut(7), &bench),
        ];
        let text = report("h100", &[h100()], &origin, &done);
        for line in [
            "# A real device: h100\n",
            "wrote this file on 2026-12-01 at commit `abc1234`",
            "| NVIDIA H100 80GB HBM3 | 81559 MiB | 580.65.06 | 9.0 |\n",
            "| kernels | passed | 4 | 7.2 s | `cargo test x` |\n",
            "| ps | FAILED | 2 passed, 1 failed | 7.2 s | `cargo test x` |\n",
            "## Not tried\n",
            "- no second device: copies between two\n",
            "| speed | ENDED after 7 s | - | 7.2 s | `cargo test x` |\n",
            "| adam, 256 chunks, device | 1234.5 | GiB/s |\n",
        ] {
            assert!(text.contains(line), "no `{line}` in\n{text}");
        }
        assert_eq!(text.matches("GiB/s").count(), 1, "a line of four parts is no figure");
    }

    #[test]
    fn words_choose_steps_and_a_wrong_one_is_refused_with_the_names() {
        assert_eq!(chosen(&[]).unwrap().len(), STEPS.len());
        let found = chosen(&["speed".to_owned(), "pure engine".to_owned()]).unwrap();
        assert_eq!(
            found.iter().map(|(what, _)| *what).collect::<Vec<_>>(),
            ["pure engine: the bits of the host", "speed", "speed between two processes", "training speed"]
        );
        let refused = chosen(&["sped".to_owned()]).unwrap_err().to_string();
        assert!(refused.starts_with("--only sped: ") && refused.ends_with("\n  training speed"), "{refused}");
    }

    #[test]
    fn the_benches_of_devices_are_those_that_cargo_has() {
        let manifest = fs::read_to_string(workspace::root().join("kernels/Cargo.toml")).unwrap();
        let manifest = manifest + &fs::read_to_string(workspace::root().join("Cargo.toml")).unwrap();
        for bench in BENCHES {
            assert!(manifest.contains(&format!("name = \"{bench}\"")), "{bench}");
            assert!(STEPS.iter().any(|(_, words)| words.ends_with(&format!("--bench {bench}"))), "{bench}");
        }
    }
}
