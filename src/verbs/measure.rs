//! What `ebb evaluate` and `ebb predict` share: a job that does not train, in this process or at a
//! master.

use anyhow::Result;
use client::results::Folder;
use client::{Submission, absolute};
use proto::spec::{PredictSpec, Purpose};

use crate::app::App;
use crate::args;
use crate::verbs::{run, submit};

/// Reads the job file and the weights, and runs the job to its end. Its files go to `out`, which is
/// made once nothing else is wrong. Returns true if the job succeeded.
///
/// # Errors
/// The job file is wrong, the weights cannot be read, the predictions exist, `out` cannot be
/// written, or the job cannot start.
pub(super) async fn measure(
    args: args::Measure,
    purpose: Purpose,
    predict: Option<PredictSpec>,
    out: impl Future<Output = Result<Option<Folder>>>,
    app: &App,
) -> Result<bool> {
    let stores = &app.environment.stores;
    let (job, overrides) = (&args.file.job, &args.file.overrides);
    let mut submission = Submission::read_measuring(job, overrides, purpose, &args.model, predict)?;
    client::check_predictions(&submission.spec)?;
    submission.check_free(stores).await?;
    submission.read_initial(stores).await?;
    // Patterns are replaced before a worker starts.
    data::be_patient_for(args.compute.data_patience);
    let is_here = args.reach.master.url.is_none();
    let root = args.compute.data_root.as_deref().filter(|_| is_here);
    client::replace_patterns(&mut submission.spec, root).await?;
    if is_here {
        let fleet = run::Fleet { workers: args.workers, ps: args.ps, ..run::Fleet::default() };
        return run::here(submission, fleet, args.compute, out, args.json, app).await;
    }
    let client = app.client(&args.reach)?;
    let out = out.await?;
    let job = client.submit(submission).await?.name;
    app.screen.line(&format!("submitted {job}"));
    submit::to_its_end(client, &job, out, &args.reach, args.json, app).await
}

/// Returns the place of the predictions in `out`, a path or a URL, on the records of a data set.
///
/// # Errors
/// The system does not know the current folder.
pub(super) fn place(on: args::On, out: &str, join_bytes_max: Option<u64>) -> Result<PredictSpec> {
    let mut place = PredictSpec::new(on.set(), absolute(out)?);
    place.join_bytes_max = join_bytes_max.unwrap_or(place.join_bytes_max);
    Ok(place)
}
