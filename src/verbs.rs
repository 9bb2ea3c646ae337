//! The verbs of `ebb`, one file each. A verb gets its parsed arguments and the
//! [`App`](crate::app::App).

pub(crate) mod cancel;
pub(crate) mod certs;
pub(crate) mod checkpoint;
pub(crate) mod completions;
pub(crate) mod config;
pub(crate) mod data;
pub(crate) mod evaluate;
pub(crate) mod fetch;
pub(crate) mod health;
pub(crate) mod jobs;
mod measure;
pub(crate) mod pause;
pub(crate) mod predict;
pub(crate) mod resume;
pub(crate) mod run;
pub(crate) mod scale;
pub(crate) mod status;
pub(crate) mod submit;
pub(crate) mod watch;

use std::path::Path;

use anyhow::{Context as _, Result, bail};
use client::results::{Copy, Folder};
use proto::spec::JobSpec;

/// Checks that somebody can read the job's predictions when its processes have ended.
///
/// # Errors
/// They would be in the memory of a process.
fn check_predictions(spec: &JobSpec) -> Result<()> {
    if spec.predict.as_ref().is_some_and(|predict| predict.url.starts_with("memory:")) {
        bail!(
            "predictions: memory:// is the memory of one process, and nothing could read them afterwards; set a path or \
             another URL"
        );
    }
    Ok(())
}

/// Returns the folder of results with their copy at `--upload`.
///
/// # Errors
/// There is a copy and no folder.
fn copied(out: Option<Folder>, upload: Option<Copy>) -> Result<Option<Folder>> {
    if out.is_none() && upload.is_some() {
        bail!("--upload: what is copied are the files of --out DIR; set it too");
    }
    Ok(out.map(|out| out.with_copy(upload)))
}

/// Replaces patterns in the job's lists of files by the files that fit them.
///
/// # Errors
/// A folder cannot be listed, no file fits, or the lists do not fit each other then.
pub(crate) async fn replace_patterns(spec: &mut JobSpec, root: Option<&Path>) -> Result<()> {
    let (data, root) = (spec.data.clone(), root.map(Path::to_owned));
    let replace = move || ::data::without_patterns(&data, root.as_deref());
    spec.data = tokio::task::spawn_blocking(replace).await.context("the reader of folders panicked")??;
    Ok(spec.validate()?)
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use proto::spec::{DataSet, PredictSpec};

    use super::*;

    #[test]
    fn predictions_in_the_memory_of_a_process_are_refused() {
        let job = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("examples/digits/job.toml");
        let mut spec = client::Submission::read(&job, &[]).unwrap().spec;
        assert!(check_predictions(&spec).is_ok());
        for (url, is_good) in [("memory://p.npy", false), ("/out/p.npy", true), ("s3://b/p.npy", true)] {
            spec.predict = Some(PredictSpec::new(DataSet::Train, url.to_owned()));
            assert_eq!(check_predictions(&spec).is_ok(), is_good, "{url}");
        }
    }
}
