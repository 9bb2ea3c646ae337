//! `ebb run`: a job from its file to its results, with everything it needs in this process. A job
//! of a Python script is in `script.rs`.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use client::results::{Folder, Written};
use client::{Client, Event, JobStatus, Local, Submission};
use model::device::{spread, workers as workers_on};
use tokio_util::sync::CancellationToken;
use worker::device::{self, Chosen};

use crate::app::App;
use crate::args;
use crate::terminal::follow::Follow;
use crate::terminal::progress::Progress;
use crate::verbs::script;

/// Time for the export once the user asked to leave.
const LEAVE_WITHIN: Duration = Duration::from_secs(10);

/// Time for the export of a job with checkpoints once the user asked to leave. It also finishes and
/// saves the steps that it has begun.
const SAVE_WITHIN: Duration = Duration::from_secs(60);

/// Longest time of a call inside this process.
pub(super) const PATIENCE: Duration = Duration::from_secs(30);

/// The folder of the default results: each job has a folder with its name in it.
pub(super) const RESULTS: &str = "out";

/// # Errors
/// The job file is wrong, the folder cannot be written, or the job cannot start.
pub(crate) async fn run(args: args::Run, app: &App) -> Result<bool> {
    if client::is_script(&args.job) {
        return script::run(args, app).await;
    }
    script::refuse_for_job(&args.script, &args.launch)?;
    let mut submission = Submission::read(&args.job, &args.overrides)?;
    submission.start = args.resume.start();
    if args.resume.is_asked() && submission.spec.checkpoint.is_none() {
        return Err(client::Error::NothingToResume.into());
    }
    // Patterns are replaced before a worker starts.
    data::be_patient_for(args.compute.data_patience);
    let root = args.compute.data_root.as_deref();
    submission.ready_for_here(&app.environment.stores, &app.registry, root).await?;
    let folder = args.out.unwrap_or_else(|| Path::new(RESULTS).join(&submission.spec.name));
    let out = super::results(Some(&folder), &args.upload, args.resume.is_asked(), app);
    let fleet = Fleet { workers: args.workers, ps: args.ps, ps_memory: args.ps_memory };
    here(submission, fleet, args.compute, out, args.json, app).await
}

/// What the user says of the roles of this process.
#[derive(Default)]
pub(super) struct Fleet {
    pub(super) workers: Option<u32>,
    pub(super) ps: Option<u32>,
    pub(super) ps_memory: args::PsMemory,
}

/// Returns where the ps of this process keep the model.
///
/// # Errors
/// The user named a device that is not there.
pub(super) fn memory(memory: args::PsMemory) -> Result<client::PsMemory> {
    let args::PsMemory { ps_device, ps_device_bytes_max: bytes_max } = memory;
    let named = |choice| device::of_driver(&choice).with_context(|| format!("--ps-device {choice}"));
    let device = ps_device.map(named).transpose()?.map_or_else(Default::default, |devices| devices[0]);
    Ok(client::PsMemory { device, bytes_max })
}

/// Runs a job in this process to its end, and shows its result. Its files go to `out`, which is
/// made once nothing else is wrong.
///
/// # Errors
/// The network is unknown, data files cannot be read, a device is not there, `out` cannot be
/// written, or the job cannot start.
pub(super) async fn here(
    mut submission: Submission,
    Fleet { workers, ps, ps_memory }: Fleet,
    compute: args::Compute,
    out: impl Future<Output = Result<Option<Folder>>>,
    json: bool,
    app: &App,
) -> Result<bool> {
    submission.check_here(&app.registry, compute.data_root.as_deref())?;
    submission.fit_fleet(workers, ps);
    let fleet = submission.spec.fleet;
    let choice = compute.device.for_job(fleet.device)?;
    // It may load libtorch.
    let chosen = tokio::task::spawn_blocking(move || device::chosen(&choice));
    let Chosen { devices, fallback } = chosen.await.context("look for devices")??;
    if let Some(reason) = fallback {
        app.screen.line(&format!("computing on the CPU: {reason}"));
    }
    let out = out.await?;
    let count = workers_on(&devices, workers, fleet.workers.min, fleet.workers.max);
    let options = client::Options {
        devices: spread(&devices, count),
        ps: fleet.ps,
        ps_memory: memory(ps_memory)?,
        open: app.environment.devices(),
        threads: compute.threads as usize,
        data_root: compute.data_root,
        data_patience: compute.data_patience,
        ..client::Options::default()
    };
    let registry = app.registry.clone().for_job(&submission.spec);
    let mut local = Local::start(options, app.environment.stores.clone(), registry).await?;
    let client = local.client(PATIENCE).with_notices(app.notices());
    let result = tokio::select! {
        result = train(&client, submission, out, app) => result,
        error = local.failure() => Err(error.into()),
    };
    local.stop().await;
    let (status, written) = result?;
    app.show_result(&status, written, "", json)
}

type Ended = (Box<JobStatus>, client::Result<Option<Written>>);

async fn train(client: &Client, submission: Submission, out: Option<Folder>, app: &App) -> Result<Ended> {
    let saves = submission.spec.checkpoint.is_some();
    let reply = client.submit(submission).await?;
    let mut progress = Progress::new(app.screen.clone());
    let mut follow = Follow::new(client.clone(), &reply.name, out, app.screen.clone(), |event| {
        progress.event(event);
    })?;
    let status = match follow.run(app.stop.token()).await? {
        Some(status) => status,
        None => {
            app.screen.line(match saves {
                true => "stopping: a checkpoint is written and what is trained so far is kept; once more leaves at once",
                false => "stopping: what is trained so far is kept; once more leaves at once",
            });
            leave(client, &reply.name, &mut follow, if saves { SAVE_WITHIN } else { LEAVE_WITHIN }).await?
        }
    };
    let written = follow.finish(&status).await;
    Ok((status, written))
}

/// Ends the job `within` that time with its model and its checkpoint, or later without them.
async fn leave<E: FnMut(&Event)>(
    client: &Client,
    job: &str,
    follow: &mut Follow<E>,
    within: Duration,
) -> Result<Box<JobStatus>> {
    let never = CancellationToken::new();
    for (force, within) in [(false, within), (true, LEAVE_WITHIN)] {
        client.cancel(job, force).await?;
        if let Ok(followed) = tokio::time::timeout(within, follow.run(&never)).await
            && let Some(status) = followed?
        {
            return Ok(status);
        }
    }
    bail!("{job} did not stop within {:?}; nothing more of it is kept", within + LEAVE_WITHIN)
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;
    use client::pipe::Network;

    use super::*;
    use crate::args::{Cli, Command};
    use crate::fake::{JOB, app, job_file};

    #[tokio::test]
    async fn a_device_that_is_not_there_is_named_before_the_folder_is_made() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("line.csv"), "x,y\n1,2\n").unwrap();
        let (job, out) = (job_file(dir.path(), JOB), dir.path().join("out"));
        let line = ["ebb", "run", "--device", "cuda:4095", "--out"].map(Into::into);
        let line = line.into_iter().chain([out.clone().into_os_string(), job.into_os_string()]);
        let Command::Run(args) = Cli::try_parse_from(line).unwrap().command else { panic!("no run") };
        let error = run(args, &app(&Network::new())).await.unwrap_err().to_string();
        assert!(error.contains("cuda:4095"), "{error}");
        assert!(!out.exists());
    }
}
