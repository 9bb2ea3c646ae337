//! `ebb run SCRIPT.py`: a training loop in Python, in processes of this host. The master and the ps
//! are in this process. [`submit`] sends a script to a cluster instead, and [`launch`] starts a
//! cluster for it on machines of a platform.

mod fleet;
mod launch;
pub(super) mod submit;

use std::convert::Infallible;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use client::results::{Folder, Written};
use client::{Client, JobStatus};
use futures::StreamExt as _;
use futures::stream::FuturesUnordered;
use model::device::{Choice, Device, spread};
use tokio_util::sync::CancellationToken;

use self::fleet::Fleet;
use super::run::{PATIENCE, RESULTS};
use crate::app::App;
use crate::launch::devices;
use crate::launch::guard::Guard;
use crate::launch::processors;
use crate::launch::restarts::{Left, Stage};
use crate::launch::slot::{Gone, Script, Slot};
use crate::launch::variables::usual;
use crate::terminal::follow::Follow;
use crate::terminal::progress::Progress;
use crate::terminal::report::duration;
use crate::{args, config};

/// Time from SIGTERM to SIGKILL for processes that are to end.
const GRACE: Duration = Duration::from_secs(30);

/// Time between two looks for a new job.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// End of the name of a job that only elects which process calls callbacks (ADR 34).
const ELECTION: &str = ".callbacks";

/// Refuses what only a script has, for a job file.
///
/// # Errors
/// It names the first such argument.
pub(super) fn refuse_for_job(script: &args::Script, launch: &args::Launch) -> Result<()> {
    let args::Script { python, variables, arguments } = script;
    let given = [
        ("--on", launch.on.is_some()),
        ("--python", python.is_some()),
        ("--env", !variables.is_empty()),
        ("arguments after `--`", !arguments.is_empty()),
    ];
    match given.into_iter().find(|(_, is_given)| *is_given) {
        Some((what, _)) => bail!("{what}: only for a Python script, whose name ends in .py"),
        None => Ok(()),
    }
}

/// Refuses what only a job file has, for a script.
fn refuse_for_script(args: &args::Run) -> Result<()> {
    let args::Run { compute, resume, .. } = args;
    let in_join = "set it in the script, in ebbflow.join";
    let given = [
        ("--set", !args.overrides.is_empty(), in_join),
        ("--threads", compute.threads != 1, in_join),
        ("--data-patience", compute.data_patience != data::PATIENCE, in_join),
        ("--data-root", compute.data_root.is_some(), "the script opens its data"),
        ("--resume", resume.resume, "jobs of a script have no checkpoints"),
        ("--resume-anyway", resume.resume_anyway, "jobs of a script have no checkpoints"),
        ("--upload", args.upload.url.is_some(), "copy the folder of --out"),
    ];
    match given.into_iter().find(|(_, is_given, _)| *is_given) {
        Some((flag, _, instead)) => bail!("{flag}: not for a Python script; {instead}"),
        None => Ok(()),
    }
}

/// Returns the device of each process; `None`: it sees what this process sees. `found` looks for
/// devices.
///
/// # Errors
/// A device is not there, or the user has set the variable that shows devices.
fn processes(
    args: &args::Run,
    found: impl FnOnce(&Choice) -> worker::Result<Vec<Device>>,
) -> Result<Vec<Option<Device>>> {
    let choice = &args.compute.device;
    let is_set = args.script.variables.iter().any(|(name, _)| name == devices::VISIBLE);
    if is_set && *choice != Choice::Auto {
        bail!("--env {}: --device sets it for each process; leave one of both out", devices::VISIBLE);
    }
    let devices = if is_set { Vec::new() } else { found(choice)? };
    let each = match choice {
        Choice::Auto => 1,
        _ => u32::try_from(devices.len()).unwrap_or(u32::MAX),
    };
    let count = args.workers.unwrap_or(each);
    let mut placed: Vec<_> = spread(&devices, count).into_iter().map(Some).collect();
    placed.resize(count as usize, None);
    Ok(placed)
}

/// # Errors
/// An argument is not for scripts, a device or the interpreter is not there, the folder cannot be
/// written, the script never joins, or no process of it is left before its job ends.
pub(super) async fn run(args: args::Run, app: &App) -> Result<bool> {
    refuse_for_script(&args)?;
    if let Some(on) = args.launch.on {
        return launch::become_launcher(&args, on, app);
    }
    let placed = processes(&args, worker::device::for_scripts)?;
    let devices: Vec<_> = placed.iter().copied().flatten().collect();
    let job = &args.job;
    std::fs::File::open(job).with_context(|| format!("script {} cannot be read", job.display()))?;
    let name = job.file_stem().unwrap_or(job.as_os_str());
    let folder = args.out.clone().unwrap_or_else(|| Path::new(RESULTS).join(name));
    let out = app.out(&folder, false)?;
    let logs = folder.join("logs");
    std::fs::create_dir_all(&logs).with_context(|| format!("--out: cannot make {}", logs.display()))?;
    let (visible, near) = (config::visible_devices(), processors::near(&devices));
    let slot = |(index, device): (usize, Option<Device>)| -> Result<Slot> {
        let slot = Slot::new(format!("worker-{index}"), &logs, app.screen.clone())?;
        let slot = slot.with(devices::variables(device, visible.as_deref()));
        Ok(slot.on(device.and_then(|device| near.get(&device).cloned())))
    };
    let slots = placed.into_iter().enumerate().map(slot);
    let slots = slots.collect::<Result<Vec<_>>>()?;

    let memory = super::run::memory(args.ps_memory.clone())?;
    let mut fleet = Fleet::start(args.ps.unwrap_or(1), memory, devices, app).await?;
    let script = script(&args, slots.len(), &fleet.url, app.guard()?, app);
    let client = Client::new(&app.dialer, &fleet.url, PATIENCE)?.with_notices(app.notices());
    let run =
        Run { client, app, folder, halt: app.stop.token().child_token(), all_left: CancellationToken::new() };
    let stopping = async {
        app.stop.token().cancelled().await;
        app.screen.line(&format!(
            "stopping: the processes are asked to end, and killed after {}; once more leaves at once",
            duration(GRACE)
        ));
        std::future::pending::<Infallible>().await
    };
    let ended = tokio::select! {
        ended = run.run(slots, &script, out) => ended,
        error = fleet.failure() => Err(error),
        never = stopping => match never {},
    };
    fleet.stop().await;
    let (gone, Jobs { ended, deserted }) = ended?;
    let (count, mut success) = (ended.len(), true);
    for (status, written) in ended {
        success &= app.show_result(&status, written, "", args.json)?;
    }
    if app.stop.token().is_cancelled() {
        return Ok(false);
    }
    // Processes of a job that failed fail too. Its reason is shown.
    match problem(&gone, count, deserted.as_deref()).filter(|_| success) {
        Some(problem) => bail!("{}: {problem}", args.job.display()),
        None => Ok(success),
    }
}

/// Returns what went wrong in a run with so many jobs that have ended; `None`: nothing. `gone` are
/// its processes in the order in which they left, and `deserted` is a job that none of them trains.
fn problem(gone: &[Gone], ended: usize, deserted: Option<&str>) -> Option<String> {
    let is_wrong = |gone: &&Gone| matches!(gone.left, Left::Unjoined(exit) if !exit.is_good());
    let last = gone.last()?;
    let (what, of) = if let Some(job) = deserted {
        (format!("no process is left, and {job} has not ended"), last)
    } else if ended == 0 {
        let of = gone.iter().find(is_wrong).unwrap_or(last);
        let what = match of.left {
            Left::Unjoined(exit) | Left::GaveUp(exit) => format!("{} {exit}", of.name),
            _ => format!("{} has left", of.name),
        };
        (format!("{what}, and no process has joined a job of this run by ebbflow.join"), of)
    } else {
        let late = gone.iter().find(|gone| matches!(gone.left, Left::FailedLate(_)))?;
        let Left::FailedLate(exit) = late.left else { return None };
        (format!("{} {exit} after the end of the job", late.name), late)
    };
    Some(match of.last.as_slice() {
        [] => format!("{what}; {} said nothing", of.name),
        lines => format!("{what}; {} said last:\n    {}", of.name, lines.join("\n    ")),
    })
}

/// Returns how `guard` starts the processes that reach the master at `url`.
fn script(args: &args::Run, processes: usize, url: &str, guard: Guard, app: &App) -> Script {
    let mut variables = usual(config::is_set);
    variables.push(("EBBFLOW_MASTER".to_owned(), url.to_owned()));
    variables.push(("EBBFLOW_WORKERS".to_owned(), processes.to_string()));
    // The user's own come last and win.
    variables.extend(args.script.variables.iter().cloned());
    Script {
        python: app.environment.python(args.script.python.as_deref()),
        arguments: std::iter::once(args.job.clone().into_os_string())
            .chain(args.script.arguments.iter().cloned())
            .collect::<Vec<OsString>>(),
        folder: None,
        variables,
        // Keys and URLs of another cluster.
        hidden: app.environment.own_variables().map(str::to_owned).collect(),
        user: None,
        guard,
        grace: GRACE,
    }
}

/// The jobs of a run.
#[derive(Debug, Default)]
struct Jobs {
    /// Those that have ended, oldest first, each with its files.
    ended: Vec<(Box<JobStatus>, client::Result<Option<Written>>)>,
    /// Name of one that nobody trains any more.
    deserted: Option<String>,
}

/// One run of a script.
struct Run<'a> {
    client: Client,
    app: &'a App,
    /// Folder for the results of the first job.
    folder: PathBuf,
    /// All processes are to end.
    halt: CancellationToken,
    /// All processes have left.
    all_left: CancellationToken,
}

impl Run<'_> {
    /// Runs the processes and follows their jobs, until all processes have left.
    async fn run(&self, slots: Vec<Slot>, script: &Script, out: Folder) -> Result<(Vec<Gone>, Jobs)> {
        let processes = async {
            let gone = self.processes(slots, script).await;
            self.all_left.cancel();
            gone
        };
        let jobs = async {
            let jobs = self.jobs(out).await;
            if jobs.is_err() {
                self.halt.cancel();
            }
            jobs
        };
        let (gone, jobs) = tokio::join!(processes, jobs);
        Ok((gone?, jobs?))
    }

    /// Runs the processes. Returns them in the order in which they left.
    async fn processes(&self, slots: Vec<Slot>, script: &Script) -> Result<Vec<Gone>> {
        let run = move |slot: Slot| slot.run(script, async move || self.stage().await, &self.halt);
        let mut running: FuturesUnordered<_> = slots.into_iter().map(run).collect();
        let (mut all, mut failure) = (Vec::new(), None);
        while let Some(gone) = running.next().await {
            match gone {
                Ok(gone) => {
                    self.tell(&gone);
                    // The others run the same script.
                    if matches!(gone.left, Left::Unjoined(exit) if !exit.is_good()) {
                        self.halt.cancel();
                    }
                    all.push(gone);
                }
                // The others are asked to end, too.
                Err(error) => {
                    self.halt.cancel();
                    failure.get_or_insert(error);
                }
            }
        }
        match failure {
            Some(error) => Err(error),
            None => Ok(all),
        }
    }

    fn tell(&self, gone: &Gone) {
        let name = &gone.name;
        let what = match gone.left {
            Left::Finished | Left::Stopped => return,
            Left::Drained => format!("{name} left before the end of the job"),
            Left::Unjoined(exit) => format!("{name} {exit} and never joined a job"),
            Left::FailedLate(exit) => format!("{name} {exit} after the end of the job"),
            Left::GaveUp(exit) => format!("{name} {exit} too often and is not started again"),
        };
        self.app.screen.line(&what);
    }

    /// Returns the jobs that the script trains, oldest first.
    async fn trained(&self) -> client::Result<Vec<JobStatus>> {
        let mut jobs = self.client.list().await?;
        // The master has put a number behind the name.
        jobs.retain(|job| job.name.rsplit_once('-').is_none_or(|(name, _)| !name.ends_with(ELECTION)));
        Ok(jobs)
    }

    /// Asks the master where the jobs are. Its answer is newer than any call of a process that has
    /// ended.
    async fn stage(&self) -> Result<Stage> {
        let jobs = self.trained().await?;
        Ok(match jobs.iter().any(|job| !job.state().is_end()) {
            true => Stage::Training,
            false if jobs.is_empty() => Stage::Unjoined,
            false => Stage::Ended,
        })
    }

    /// Follows each job, one after the other, and writes its results.
    async fn jobs(&self, out: Folder) -> Result<Jobs> {
        let (mut jobs, mut first) = (Jobs::default(), Some(out));
        while let Some(name) = self.next_job(jobs.ended.len()).await? {
            let out = match first.take() {
                Some(out) => out,
                None => self.app.out(&self.folder.join(&name), false)?,
            };
            let mut progress = Progress::new(self.app.screen.clone());
            let event = |event: &client::Event| progress.event(event);
            let mut follow =
                Follow::new(self.client.clone(), &name, Some(out), self.app.screen.clone(), event)?;
            let mut status = follow.run(&self.all_left).await?;
            if status.is_none() && self.client.status(&name).await?.state().is_end() {
                status = follow.run(&CancellationToken::new()).await?;
            }
            let Some(status) = status else {
                jobs.deserted = Some(name);
                break;
            };
            let written = follow.finish(&status).await;
            jobs.ended.push((status, written));
        }
        Ok(jobs)
    }

    /// Returns the name of the job number `index`, from 0. `None`: all processes have left without
    /// it.
    async fn next_job(&self, index: usize) -> Result<Option<String>> {
        loop {
            // Before the look, which then sees everything that they did.
            let all_left = self.all_left.is_cancelled();
            if let Some(job) = self.trained().await?.into_iter().nth(index) {
                return Ok(Some(job.name));
            }
            if all_left {
                return Ok(None);
            }
            tokio::select! {
                () = self.all_left.cancelled() => {}
                () = tokio::time::sleep(LOOK_EVERY) => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;
    use client::pipe::Network;

    use super::*;
    use crate::args::{Cli, Command};
    use crate::fake::app;
    use crate::launch::restarts::Exit;

    fn args(line: &str) -> args::Run {
        match Cli::try_parse_from(["ebb", "run"].into_iter().chain(line.split_whitespace())).unwrap().command
        {
            Command::Run(run) => run,
            other => panic!("{other:?}"),
        }
    }

    fn gone(number: u32, left: Left, last: &[&str]) -> Gone {
        let last = last.iter().map(|&line| line.to_owned()).collect();
        Gone { name: format!("worker-{number}"), left, last }
    }

    #[test]
    fn options_of_a_job_file_are_refused_for_a_script_by_name() {
        for (flag, instead) in [
            ("--set a=1", "ebbflow.join"),
            ("--threads 2", "ebbflow.join"),
            ("--data-patience 2m", "ebbflow.join"),
            ("--data-root /d", "data"),
            ("--resume", "checkpoints"),
            ("--resume-anyway", "checkpoints"),
            ("--upload /d", "--out"),
        ] {
            let said = refuse_for_script(&args(&format!("a.py {flag}"))).unwrap_err().to_string();
            let name = flag.split(' ').next().unwrap();
            assert!(said.starts_with(&format!("{name}: not for")) && said.contains(instead), "{said}");
        }
        refuse_for_script(&args("a.py --workers 3 --device all --ps 2 --out o --json --env A=1 -- --set 1"))
            .unwrap();
    }

    // S0-05, S1-04, S4-16
    #[test]
    fn processes_take_turns_on_the_devices() {
        let [a, b] = [Device::Cuda(0), Device::Cuda(2)];
        let placed = |line: &str, devices: &[Device]| {
            processes(&args(line), |_| Ok(devices.to_vec())).map_err(|error| error.to_string())
        };
        assert_eq!(placed("a.py --workers 3", &[a, b]).unwrap(), [Some(a), Some(b), Some(a)]);
        assert_eq!(placed("a.py --device all", &[a, b]).unwrap(), [Some(a), Some(b)]);
        assert_eq!(placed("a.py --device cuda:2", &[b]).unwrap(), [Some(b)]);
        assert_eq!(placed("a.py", &[a, b]).unwrap(), [Some(a)], "one process unless the user says more");
        assert_eq!(placed("a.py --workers 2", &[]).unwrap(), [None, None]);
        assert_eq!(placed("a.py --device cpu", &[Device::Cpu]).unwrap(), [Some(Device::Cpu)]);
        // The user's own choice counts, for all processes.
        assert_eq!(placed("a.py --env CUDA_VISIBLE_DEVICES=1", &[a, b]).unwrap(), [None]);
        let said = placed("a.py --device all --env CUDA_VISIBLE_DEVICES=1", &[a, b]).unwrap_err();
        assert!(said.contains("--device") && said.contains("CUDA_VISIBLE_DEVICES"), "{said}");
    }

    #[test]
    fn options_of_a_script_are_refused_for_a_job_file_by_name() {
        for (line, name) in [
            ("a.toml --python p", "--python"),
            ("a.toml --env A=1", "--env"),
            ("a.toml -- x", "arguments after `--`"),
        ] {
            let said = refuse_for_job(&args(line).script, &args(line).launch).unwrap_err().to_string();
            assert!(said.starts_with(name) && said.contains(".py"), "{said}");
        }
        refuse_for_job(&args("a.toml").script, &args("a.toml").launch).unwrap();
    }

    #[test]
    fn processes_get_the_master_of_the_run_and_what_the_user_says() {
        let mut app = app(&Network::new());
        app.environment = config::Environment::with(&[("EBB_TLS_CA", "ca.pem"), ("EBB_MASTER", "m:1")]);
        let args = args("a.py --python p --env OMP_NUM_THREADS=3 -- --lr 0.1");
        let script = script(&args, 2, "http://127.0.0.1:9", Guard::here(), &app);
        assert_eq!((script.python.as_path(), script.arguments.len()), (Path::new("p"), 3));
        let last = |name: &str| {
            script.variables.iter().rev().find(|(of, _)| of == name).map(|(_, value)| value.as_str())
        };
        assert_eq!(last("EBBFLOW_MASTER"), Some("http://127.0.0.1:9"));
        assert_eq!(last("EBBFLOW_WORKERS"), Some("2"));
        assert_eq!(last("OMP_NUM_THREADS"), Some("3"));
        assert_eq!(script.hidden, ["EBB_MASTER", "EBB_TLS_CA"]);
    }

    #[test]
    fn a_problem_is_told_with_the_last_lines_of_the_process_that_has_it() {
        let (good, bad, kill) = (Exit::Code(0), Exit::Code(1), Exit::Signal(9));
        let told = |gone: &[Gone], ended, deserted| problem(gone, ended, deserted).unwrap_or_default();
        let finished = gone(0, Left::Finished, &["done"]);
        assert_eq!(told(&[finished], 1, None), "");
        let drained = [gone(1, Left::Drained, &["x"]), gone(0, Left::GaveUp(kill), &["a", "b"])];
        assert_eq!(told(&drained, 1, None), "", "others ended the job");
        assert_eq!(
            told(&drained, 0, Some("job-1")),
            "no process is left, and job-1 has not ended; worker-0 said last:\n    a\n    b"
        );
        let wrong = [gone(1, Left::Unjoined(bad), &["SyntaxError"]), gone(0, Left::Stopped, &["x"])];
        let said = told(&wrong, 0, None);
        assert!(said.starts_with("worker-1 ended with exit code 1, and no process has joined"), "{said}");
        assert!(said.ends_with("worker-1 said last:\n    SyntaxError"), "{said}");
        let said = told(&[gone(0, Left::Unjoined(good), &[])], 0, None);
        assert!(said.contains("exit code 0") && said.ends_with("worker-0 said nothing"), "{said}");
        let late = [gone(0, Left::FailedLate(bad), &["no space"]), gone(1, Left::Finished, &[])];
        let said = told(&late, 1, None);
        assert!(said.contains("worker-0 ended with exit code 1 after the end of the job"), "{said}");
    }

    #[tokio::test]
    async fn a_script_that_cannot_be_read_is_named_before_anything_starts() {
        let dir = tempfile::tempdir().unwrap();
        let (script, out) = (dir.path().join("no.py"), dir.path().join("out"));
        let args = args(&format!("{} --out {}", script.display(), out.display()));
        let error = run(args, &app(&Network::new())).await.unwrap_err().to_string();
        assert!(error.contains("no.py cannot be read"), "{error}");
        assert!(!out.exists());
    }
}
