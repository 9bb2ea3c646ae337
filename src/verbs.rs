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

use anyhow::{Context as _, Result};
use proto::spec::JobSpec;

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
