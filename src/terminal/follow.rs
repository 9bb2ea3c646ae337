//! Following a job to its end: events to the screen and to the folder of results.

use client::results::{Folder, Written};
use client::{Client, Event, Followed, JobStatus, Result};
use tokio_util::sync::CancellationToken;

use crate::terminal::screen::Screen;

/// A job that is being followed.
pub(crate) struct Follow<E> {
    client: Client,
    job: client::Follow,
    out: Option<Folder>,
    screen: Screen,
    on_event: E,
}

impl<E: FnMut(&Event)> Follow<E> {
    /// Follows `job` from its first event on. Its results go to `out`, each event to `on_event`.
    ///
    /// # Errors
    /// The folder cannot be written.
    pub(crate) fn new(
        client: Client,
        job: &str,
        mut out: Option<Folder>,
        screen: Screen,
        on_event: E,
    ) -> Result<Self> {
        if let Some(out) = &mut out {
            out.begin(job, client.notices())?;
        }
        let job = client.follow(job);
        Ok(Self { client, job, out, screen, on_event })
    }

    /// Follows until the job ends, and says how; `None` when `stop` came first. It may then be
    /// called again.
    ///
    /// # Errors
    /// The master does not answer any more, or does not know the job any more.
    pub(crate) async fn run(&mut self, stop: &CancellationToken) -> Result<Option<Box<JobStatus>>> {
        loop {
            let next = tokio::select! {
                biased;
                () = stop.cancelled() => return Ok(None),
                next = self.job.next() => next?,
            };
            match next {
                Followed::Event(event) => self.event(&event),
                Followed::Ended(status) => return Ok(Some(status)),
            }
        }
    }

    fn event(&mut self, event: &Event) {
        (self.on_event)(event);
        if let Some(out) = &mut self.out
            && let Err(error) = out.event(event)
        {
            let error = anyhow::Error::new(error);
            self.screen.line(&format!(
                "warning: {error:#}; training goes on, all events are written again at its end"
            ));
        }
    }

    /// Writes what the ended job left into the folder, if there is one.
    ///
    /// # Errors
    /// A file cannot be written or fetched.
    pub(crate) async fn finish(self, status: &JobStatus) -> Result<Option<Written>> {
        match self.out {
            Some(out) => out.finish(&self.client, status).await.map(Some),
            None => Ok(None),
        }
    }
}
