//! Ebbflow in the end-to-end runs: a fleet of separate processes that stays up, or all in one process for each job.

use crate::bench::read;
use anyhow::{Context, Result, ensure};
use serde_json::Value;
use std::{
    fs::{self, File},
    io::{BufRead as _, BufReader, Read as _},
    path::{Path, PathBuf},
    process::{Child, ChildStdout, Command, Stdio},
};

const WORKERS: usize = 2;

/// Where jobs run.
pub(super) enum Where {
    /// In one process.
    Embedded,
    Fleet(Fleet),
}

/// Samples a second of a job.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Rate {
    /// Without the first steps.
    pub(super) steady: f64,
    /// From the submission to the end of the job, with its start and its results.
    pub(super) whole: f64,
}

impl Where {
    /// Trains the job, with its files in `folder`. The first `warmup` steps are not in the steady rate.
    pub(super) fn rate(&self, program: &Path, job: &str, warmup: usize, folder: &Path) -> Result<Rate> {
        let (file, out) = (folder.join("job.toml"), folder.join("out"));
        fs::write(&file, job).with_context(|| format!("write `{}`", file.display()))?;
        let mut command = match self {
            Self::Embedded => {
                let mut command = ebb(program, "run");
                command.args(["--workers", &WORKERS.to_string(), "--ps", "1", "--device", "cpu"]);
                command
            }
            Self::Fleet(fleet) => {
                let mut command = ebb(program, "submit");
                command.args(["--master", &fleet.url, "--follow"]);
                command
            }
        };
        command.arg(&file).arg("--out").arg(&out).stdout(Stdio::null());
        let log = folder.join("job.log");
        let status = command.stderr(log_file(&log)?).status().context("start ebb")?;
        ensure!(status.success(), "{command:?}: {status}; see `{}`", log.display());
        let steady = rate_of(&read(&out.join("metrics.jsonl"))?, warmup);
        let whole = whole_rate_of(&read(&out.join("summary.json"))?);
        // What is gone before it was written to the disk cannot disturb who comes next.
        remove(&out)?;
        if let Self::Fleet(fleet) = self {
            remove(&fleet.jobs)?;
        }
        Ok(Rate { steady: steady?, whole: whole? })
    }
}

/// A master, a ps and two workers of one thread each.
pub(super) struct Fleet {
    /// The master first.
    children: Vec<Child>,
    /// Kept open: who prints more must not fail.
    outputs: Vec<BufReader<ChildStdout>>,
    url: String,
    /// Where the master has the files of its jobs.
    jobs: PathBuf,
}

impl Fleet {
    /// `program` is an `ebb`, `environment` that of the ps and the workers, `arguments` more of those of the workers; `folder` is for
    /// their files.
    pub(super) fn start(
        program: &Path,
        environment: &[(&str, &str)],
        arguments: &[&str],
        folder: &Path,
    ) -> Result<Self> {
        fs::create_dir_all(folder).with_context(|| format!("create `{}`", folder.display()))?;
        let data = folder.join("data");
        let mut master = ebb(program, "master");
        master.args(["--listen", "127.0.0.1:0", "--data-dir"]).arg(&data);
        let mut fleet =
            Self { children: Vec::new(), outputs: Vec::new(), url: String::new(), jobs: data.join("jobs") };
        fleet.url = fleet.started(&mut master, &folder.join("master.log"))?;
        let url = fleet.url.clone();
        let mut ps = ebb(program, "ps");
        ps.args(["--master", &url, "--listen", "127.0.0.1:0"]).envs(environment.iter().copied());
        fleet.started(&mut ps, &folder.join("ps.log"))?;
        for number in 0..WORKERS {
            let mut worker = ebb(program, "worker");
            worker
                .args(["--master", &url, "--device", "cpu"])
                .args(arguments)
                .envs(environment.iter().copied());
            worker.stdout(Stdio::null()).stderr(log_file(&folder.join(format!("worker-{number}.log")))?);
            fleet.children.push(worker.spawn().context("start a worker")?);
        }
        Ok(fleet)
    }

    /// Starts a role and waits for the URL that it says it listens on.
    fn started(&mut self, command: &mut Command, log: &Path) -> Result<String> {
        command.stdout(Stdio::piped()).stderr(log_file(log)?);
        let mut child = command.spawn().with_context(|| format!("start {command:?}"))?;
        let stdout = child.stdout.take().context("its output is piped")?;
        self.children.push(child);
        let says = || format!("{command:?} does not say where it listens; see `{}`", log.display());
        let mut output = BufReader::new(stdout);
        let mut lines = output.by_ref().lines().map_while(Result::ok);
        let url = lines.find_map(|line| Some(line.split_once("listening on ")?.1.trim().to_owned()));
        self.outputs.push(output);
        url.with_context(says)
    }
}

impl Drop for Fleet {
    fn drop(&mut self) {
        for child in &mut self.children {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn ebb(program: &Path, verb: &str) -> Command {
    let mut command = Command::new(program);
    command.arg(verb).env_remove("EBB_MASTER").env("EBB_LOG", "warn").stdin(Stdio::null());
    command
}

fn log_file(path: &Path) -> Result<File> {
    File::create(path).with_context(|| format!("create `{}`", path.display()))
}

/// Samples a second of all steps from number `warmup` on, from the events of a job. Each has the records of its step and the rate since
/// the event before, so their quotient is the time of the step.
fn rate_of(metrics: &str, warmup: usize) -> Result<f64> {
    let events = metrics.lines().map(serde_json::from_str).collect::<Result<Vec<Value>, _>>()?;
    let train = events.iter().filter(|event| event["event"] == "train").skip(warmup);
    let (mut samples, mut seconds) = (0.0, 0.0);
    for event in train {
        let (of_step, rate) = (event["samples"].as_f64(), event["samples_per_second"].as_f64());
        let (of_step, rate) = of_step.zip(rate).with_context(|| format!("an event has no rate: {event}"))?;
        samples += of_step;
        seconds += of_step / rate;
    }
    ensure!(seconds > 0.0, "the job had no step beyond the first {warmup}");
    Ok(samples / seconds)
}

/// Samples a second from the submission to the end of a job, of its summary.
fn whole_rate_of(summary: &str) -> Result<f64> {
    let summary: Value = serde_json::from_str(summary)?;
    let (samples, seconds) = (summary["samples_applied"].as_f64(), summary["wall_seconds"].as_f64());
    let (samples, seconds) = samples.zip(seconds).context("summary.json has no samples or seconds")?;
    ensure!(seconds > 0.0, "summary.json: expected wall_seconds above 0, found {seconds}");
    Ok(samples / seconds)
}

fn remove(folder: &Path) -> Result<()> {
    if folder.exists() {
        fs::remove_dir_all(folder).with_context(|| format!("remove `{}`", folder.display()))?;
    }
    Ok(())
}

/// The folder, empty.
pub(super) fn empty(folder: PathBuf) -> Result<PathBuf> {
    remove(&folder)?;
    fs::create_dir_all(&folder).with_context(|| format!("create `{}`", folder.display()))?;
    Ok(folder)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rate_of_a_job_is_that_of_its_steps_after_the_warm_up() {
        let metrics = r#"{"event":"fleet","workers":2}
{"event":"train","step":0,"samples":128,"samples_per_second":1.0}
{"event":"train","step":1,"samples":128,"samples_per_second":64.0}
{"event":"train","step":2,"samples":128,"samples_per_second":32.0}
"#;
        // 2 s and 4 s for 128 each.
        assert!((rate_of(metrics, 1).unwrap() - 256.0 / 6.0).abs() < 1e-9);
        assert!(rate_of(metrics, 3).is_err());
    }

    #[test]
    fn the_whole_rate_counts_from_the_submission() {
        let summary = r#"{"samples_applied":1000,"wall_seconds":4.0,"training_seconds":2.0}"#;
        assert_eq!(whole_rate_of(summary).unwrap(), 250.0);
        assert!(whole_rate_of("{}").is_err());
    }
}
