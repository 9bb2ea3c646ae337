//! Following a job to its end: events to the screen and to the results' folder, across broken connections.

use anyhow::{Context as _, Result};
use proto::pb;
use proto::retry::Retry;
use tokio_util::sync::CancellationToken;

use crate::client::{self, Client};
use crate::out::{Out, Written};
use crate::terminal::report;

/// A job that is being followed, up to its event number `after`.
pub(crate) struct Follow<E> {
    client: Client,
    /// `NAME-ID`.
    job: String,
    out: Option<Out>,
    on_event: E,
    after: u64,
}

impl<E: FnMut(&pb::Event)> Follow<E> {
    /// Follows `job` from its first event on. Its results go to `out`, each event to `on_event`.
    ///
    /// # Errors
    /// The folder cannot be written.
    pub(crate) fn new(client: Client, job: &str, mut out: Option<Out>, on_event: E) -> Result<Self> {
        if let Some(out) = &mut out {
            out.begin(job, client.screen())?;
        }
        Ok(Self { client, job: job.to_owned(), out, on_event, after: 0 })
    }

    /// Follows until the job ends, and says how; `None` when `stop` came first. Then it may be called again.
    ///
    /// # Errors
    /// The master does not answer any more, or does not know the job any more.
    pub(crate) async fn run(&mut self, stop: &CancellationToken) -> Result<Option<pb::JobStatus>> {
        tokio::select! {
            biased;
            () = stop.cancelled() => Ok(None),
            status = self.until_end() => status.map(Some),
        }
    }

    async fn until_end(&mut self) -> Result<pb::JobStatus> {
        loop {
            let mut events = self.client.watch(&self.job, self.after).await?;
            let broken = loop {
                match events.message().await.map_err(client::failure) {
                    Ok(Some(event)) => self.event(&event),
                    Ok(None) => break None,
                    Err(failure) if failure.is_retryable() => break Some(failure),
                    Err(failure) => return Err(failure).with_context(|| format!("watching {}", self.job)),
                }
            };
            if let Some(failure) = broken {
                self.client.screen().line(&format!("lost sight of {}: {failure}; looking again", self.job));
            } else {
                let status = self.client.status(&self.job).await?;
                if report::is_end(status.state) {
                    return Ok(status);
                }
            }
            tokio::time::sleep(Retry::default().first).await;
        }
    }

    fn event(&mut self, event: &pb::Event) {
        self.after = event.sequence;
        (self.on_event)(event);
        if let Some(out) = &mut self.out
            && let Err(error) = out.event(event)
        {
            let screen = self.client.screen();
            screen.line(&format!(
                "warning: {error:#}; training goes on, all events are written again at its end"
            ));
        }
    }

    /// Writes what the ended job left into the folder, when there is one.
    ///
    /// # Errors
    /// A file cannot be written or fetched.
    pub(crate) async fn finish(self, status: &pb::JobStatus) -> Result<Option<Written>> {
        match self.out {
            Some(out) => out.finish(&self.client, status).await.map(Some),
            None => Ok(None),
        }
    }
}
