//! `ebb run`: a job from its file to its results, with everything it needs in this process.

use std::path::Path;
use std::time::Duration;

use anyhow::{Result, bail};
use client::results::{Folder, Written};
use client::{Client, Event, JobStatus, Local, Submission};
use proto::spec::{DataSet, FleetSpec, Format, JobSpec, data_url};
use tokio_util::sync::CancellationToken;

use crate::app::App;
use crate::args;
use crate::terminal::follow::Follow;
use crate::terminal::progress::Progress;

/// Time for the export once the user asked to leave.
const LEAVE_WITHIN: Duration = Duration::from_secs(10);

/// Time for the export of a job with checkpoints once the user asked to leave. It also finishes and
/// saves the steps that it has begun.
const SAVE_WITHIN: Duration = Duration::from_secs(60);

/// Longest time of a call inside this process.
const PATIENCE: Duration = Duration::from_secs(30);

/// The folder of the default results: each job has a folder with its name in it.
const RESULTS: &str = "out";

/// # Errors
/// The job file is wrong, the folder cannot be written, or the job cannot start.
pub(crate) async fn run(args: args::Run, app: &App) -> Result<bool> {
    let mut submission = Submission::read(&args.file.job, &args.file.overrides)?;
    submission.check_free(&app.environment.stores).await?;
    submission.read_initial(&app.environment.stores).await?;
    submission.start = args.resume.start();
    if args.resume.is_asked() && submission.spec.checkpoint.is_none() {
        bail!("--resume: the job file has no [checkpoint] section that says where its checkpoints are");
    }
    super::replace_patterns(&mut submission.spec, args.compute.data_root.as_deref()).await?;
    check(&submission.spec, args.compute.data_root.as_deref(), app)?;
    let folder = args.out.unwrap_or_else(|| Path::new(RESULTS).join(&submission.spec.name));
    let upload = app.upload(args.upload.url.as_deref(), args.resume.is_asked()).await?;
    let out = app.out(&folder, args.resume.is_asked())?.with_copy(upload);
    here(submission, args.workers, args.ps, args.compute, Some(out), args.json, app).await
}

/// Checks what only this process can know, before anything is written or started.
///
/// # Errors
/// The network is unknown, or data files cannot be read.
fn check(spec: &JobSpec, data_root: Option<&Path>, app: &App) -> Result<()> {
    if let Some(name) = &spec.model.builtin
        && !app.registry.names().contains(&name.as_str())
    {
        bail!("model.builtin: no network `{name}`; known are {}", app.registry.names().join(", "));
    }
    find_data(spec, data_root)
}

/// Runs a job in this process to its end, and shows its result. Its files go to `out`.
///
/// # Errors
/// The network is unknown, data files cannot be read, or the job cannot start.
pub(super) async fn here(
    mut submission: Submission,
    workers: Option<u32>,
    ps: Option<u32>,
    compute: args::Compute,
    out: Option<Folder>,
    json: bool,
    app: &App,
) -> Result<bool> {
    check(&submission.spec, compute.data_root.as_deref(), app)?;
    fit_fleet(&mut submission.spec.fleet, workers, ps);
    let fleet = submission.spec.fleet;
    let options = client::Options {
        workers: workers.unwrap_or(fleet.workers.min),
        ps: fleet.ps,
        threads: compute.threads as usize,
        device: compute.device,
        data_root: compute.data_root,
    };
    let mut local = Local::start(options, app.environment.stores.clone(), app.registry.clone()).await?;
    let client = local.client(PATIENCE).with_notices(app.notices());
    let result = tokio::select! {
        result = train(&client, submission, out, app) => result,
        error = local.failure() => Err(error.into()),
    };
    local.stop().await;
    let (status, written) = result?;
    app.show_result(&status, written, "", json)
}

/// Checks that all local data files can be read, before anything is started.
///
/// # Errors
/// Some files cannot be read: all of them, with the reasons.
fn find_data(spec: &JobSpec, root: Option<&Path>) -> Result<()> {
    let sets = [DataSet::Train, DataSet::Validation].into_iter().filter_map(|set| spec.data.files(set));
    let files = sets.flat_map(|files| files.lists.values().flatten());
    let local = files.filter(|file| !data_url::is_remote(file));
    let files: Vec<_> = local.map(|file| spec.data.locate(file, root)).collect();
    let wants_folders = spec.data.format == Format::Images;
    let why = |path: &Path| match std::fs::metadata(path) {
        Ok(found) if wants_folders => (!found.is_dir()).then(|| "it is no folder".to_owned()),
        Ok(found) => found.is_dir().then(|| "it is a folder".to_owned()),
        Err(error) => Some(error.to_string()),
    };
    let missing: Vec<_> = files.iter().filter_map(|path| Some((path, why(path)?))).collect();
    if missing.is_empty() {
        return Ok(());
    }
    let lines: String =
        missing.iter().map(|(path, why)| format!("\n  - {}: {why}", path.display())).collect();
    bail!(
        "{} of {} data files cannot be read; mend [data] in the job file, or say with --data-root where its paths start:{lines}",
        missing.len(),
        files.len()
    )
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

/// Changes the job's fleet to the one of the command line, which wins over the file.
fn fit_fleet(fleet: &mut FleetSpec, workers: Option<u32>, ps: Option<u32>) {
    if let Some(workers) = workers {
        fleet.workers.min = fleet.workers.min.min(workers);
        fleet.workers.max = fleet.workers.max.max(workers);
    }
    fleet.ps = ps.unwrap_or(fleet.ps);
}

#[cfg(test)]
mod tests {
    use proto::spec::WorkersSpec;

    use super::*;

    #[test]
    fn the_fleet_of_the_command_line_wins_over_the_file() {
        let fitted = |workers, ps| {
            let mut fleet = FleetSpec { workers: WorkersSpec { min: 2, max: 4 }, ps: 2 };
            fit_fleet(&mut fleet, workers, ps);
            (fleet.workers.min, fleet.workers.max, fleet.ps)
        };
        assert_eq!(fitted(None, None), (2, 4, 2));
        assert_eq!(fitted(Some(1), None), (1, 4, 2));
        assert_eq!(fitted(Some(7), Some(3)), (2, 7, 3));
    }
}
