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
pub(crate) mod logs;
mod measure;
pub(crate) mod pause;
pub(crate) mod predict;
pub(crate) mod resume;
pub(crate) mod run;
pub(crate) mod scale;
mod script;
pub(crate) mod status;
pub(crate) mod submit;
pub(crate) mod watch;

use std::path::Path;

use anyhow::{Result, bail};
use client::results::Folder;

use crate::app::App;
use crate::args;

/// Returns the folder of `--out`, whose files go to `--upload` too. `resumes`: the job goes on from
/// an earlier run.
///
/// # Errors
/// There is a copy and no folder, or one of them cannot be written.
async fn results(
    out: Option<&Path>,
    upload: &args::Upload,
    resumes: bool,
    app: &App,
) -> Result<Option<Folder>> {
    let Some(dir) = out else {
        if upload.url.is_some() {
            bail!("--upload: what is copied are the files of --out DIR; set it too");
        }
        return Ok(None);
    };
    let copy = app.upload(upload.url.as_deref(), resumes).await?;
    Ok(Some(app.out(dir, resumes)?.with_copy(copy)))
}
