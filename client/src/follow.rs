//! A job's events up to its end, across broken connections.

use proto::pb;
use proto::retry::Retry;
use tonic::Streaming;

use crate::{Client, Error, Event, JobStatus, Notice, Result, failure};

/// A job that is being followed, from its first event on.
#[derive(Debug)]
pub struct Follow {
    client: Client,
    /// `NAME-ID`.
    job: String,
    /// Number of the newest event that was seen.
    after: u64,
    /// `None` before the first event and after a break.
    events: Option<Streaming<pb::Event>>,
}

/// The result of [`Follow::next`].
#[derive(Clone, Debug, PartialEq)]
pub enum Followed {
    /// The next event.
    Event(Event),
    /// The job ended, and all its events were returned before.
    Ended(Box<JobStatus>),
}

impl Follow {
    pub(crate) fn new(client: Client, job: &str) -> Self {
        Self { client, job: job.to_owned(), after: 0, events: None }
    }

    /// Waits for the next event, or for the job's end.
    ///
    /// A dropped call loses no event: the next call returns it.
    ///
    /// # Errors
    /// The master does not answer any more, or does not know the job any more.
    pub async fn next(&mut self) -> Result<Followed> {
        loop {
            let events = match &mut self.events {
                Some(events) => events,
                None => self.events.insert(self.client.watch(&self.job, self.after).await?),
            };
            match events.message().await.map_err(failure) {
                Ok(Some(message)) => {
                    self.after = message.sequence;
                    match Event::of(message) {
                        Some(event) => return Ok(Followed::Event(event)),
                        None => continue,
                    }
                }
                Ok(None) => {
                    self.events = None;
                    let status = self.client.status(&self.job).await?;
                    if status.state().is_end() {
                        return Ok(Followed::Ended(Box::new(status)));
                    }
                }
                Err(failure) if failure.is_retryable() => {
                    self.events = None;
                    let job = self.job.clone();
                    self.client.notices().tell(&Notice::LostSight { job, failure });
                }
                Err(source) => {
                    self.events = None;
                    return Err(Error::Watch { job: self.job.clone(), source });
                }
            }
            tokio::time::sleep(Retry::default().first).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake::Fake;

    async fn all(follow: &mut Follow) -> (Vec<u64>, Box<JobStatus>) {
        let mut seen = Vec::new();
        loop {
            match follow.next().await.unwrap() {
                Followed::Event(event) => seen.push(event.sequence),
                Followed::Ended(status) => return (seen, status),
            }
        }
    }

    #[tokio::test]
    async fn events_come_once_and_in_order_across_broken_connections() {
        let fake = Fake::new();
        fake.script().breaks = [2, 1].into();
        let (client, told) = fake.client();
        let (seen, status) = all(&mut client.follow("line-3")).await;
        assert_eq!(seen, [1, 2, 3, 10, 20]);
        assert_eq!(status.name, "line-3");
        let told = told.lines();
        assert_eq!(told.len(), 2, "{told:?}");
        assert!(told[0].contains("the cable was pulled"), "{told:?}");
    }

    #[tokio::test]
    async fn a_dropped_call_loses_no_event() {
        let fake = Fake::new();
        fake.script().endless = true;
        let mut follow = fake.client().0.follow("line-3");
        for _ in 0..5 {
            follow.next().await.unwrap();
        }
        let waiting = tokio::time::timeout(std::time::Duration::from_millis(10), follow.next());
        waiting.await.unwrap_err();
        fake.script().endless = false;
        drop(follow.events.take());
        assert_eq!(all(&mut follow).await.0, [0; 0]);
    }

    #[tokio::test]
    async fn a_job_that_the_master_does_not_know_is_an_error() {
        let error = Fake::new().client().0.follow("square").next().await.unwrap_err();
        assert!(error.to_string().contains("no job `square`"), "{error}");
    }
}
