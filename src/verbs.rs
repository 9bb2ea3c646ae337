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

use anyhow::{Result, bail};
use client::results::{Copy, Folder};

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
