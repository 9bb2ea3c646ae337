//! Following a job to its end: events to a function of Python, and to a folder of results.

use std::path::Path;

use client::results::{Folder, metrics};
use client::{Client, Event, Followed, JobStatus, Kind, Local};
use pyo3::prelude::*;

use super::error::raised;
use super::wait::wait;
use crate::failure;

/// Opens a folder for results.
///
/// # Errors
/// It cannot be written.
pub(super) fn folder(dir: &Path, resumes: bool) -> PyResult<Folder> {
    let folder = Folder::prepare(dir).and_then(|folder| if resumes { folder.resuming() } else { Ok(folder) });
    folder.map_err(|error| raised(&error))
}

/// Returns an event as JSON, and the number of steps of its job, which is 0 where the event does
/// not have it. `None` for an event that only newer programs know.
pub(super) fn line(event: &Event) -> Option<(String, u64)> {
    let steps = match &event.kind {
        Kind::Train(train) => train.steps,
        _ => 0,
    };
    Some((metrics::full_line(event)?, steps))
}

/// Follows a job to its end. Its results go to `out`, each event to `on_event`. The failure of a
/// cluster in this process ends it.
///
/// # Errors
/// The master does not answer any more, `out` cannot be written, `on_event` raised an exception, or
/// the user pressed Ctrl-C.
pub(super) fn follow(
    py: Python<'_>,
    client: &Client,
    job: &str,
    mut out: Option<Folder>,
    on_event: &Bound<'_, PyAny>,
    mut local: Option<&mut Local>,
) -> PyResult<Box<JobStatus>> {
    if let Some(out) = &mut out {
        out.begin(job, client.notices()).map_err(|error| raised(&error))?;
    }
    let mut follow = client.follow(job);
    let status = loop {
        let (follow, local) = (&mut follow, local.as_deref_mut());
        let next = wait(py, || async {
            match local {
                None => follow.next().await,
                Some(local) => tokio::select! {
                    next = follow.next() => next,
                    error = local.failure() => Err(error),
                },
            }
        })?;
        match next.map_err(|error| raised(&error))? {
            Followed::Ended(status) => break status,
            Followed::Event(event) => {
                if let Some(out) = &mut out
                    && let Err(error) = out.event(&event)
                {
                    let why = failure::message(&error);
                    super::log(&format!("{why}; training goes on, all events are written again at its end"));
                }
                if let Some(line) = line(&event) {
                    on_event.call1(line)?;
                }
            }
        }
    };
    if let Some(out) = out {
        let (client, ended) = (client.clone(), status.clone());
        let written = wait(py, || async move { out.finish(&client, &ended).await })?;
        written.map_err(|error| raised(&error))?;
    }
    Ok(status)
}
