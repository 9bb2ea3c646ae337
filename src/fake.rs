//! A scripted master in this process, for the tests of users' commands: real gRPC over the in-memory network.

use std::collections::VecDeque;
use std::path::Path;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use futures::{Stream, StreamExt as _};
use proto::artifact;
use proto::pb;
use proto::pb::artifact_part::Part;
use proto::pb::jobs_server::{Jobs, JobsServer};
use proto::status::{Failure, Kind};
use tonic::{Request, Response, Status, Streaming};

use crate::app::App;
use crate::args::{JobFile, KeyFiles, MasterUrl, Reach};
use crate::config::Environment;
use crate::out::metrics::tests::{evaluation, state, train};
use crate::out::summary::MODEL;
use crate::out::summary::tests::succeeded;
use crate::pipe::Network;
use crate::signals::Stop;
use crate::telemetry::metrics::Numbers;
use crate::terminal::screen::Screen;

/// What the master knows and does; clones are the same one.
#[derive(Clone, Debug)]
pub(crate) struct Fake(Arc<Mutex<Script>>);

#[derive(Debug)]
pub(crate) struct Script {
    /// The only job.
    pub(crate) status: pb::JobStatus,
    /// Its events.
    pub(crate) events: Vec<pb::Event>,
    /// Its files.
    pub(crate) files: Vec<(String, Bytes)>,
    /// For each `Watch` that shall break: after how many events.
    pub(crate) breaks: VecDeque<usize>,
    /// Whether the job goes on after its events.
    pub(crate) endless: bool,
    /// Specifications that were submitted.
    pub(crate) submitted: Vec<String>,
    /// Requests to cancel: whether by force.
    pub(crate) cancelled: Vec<bool>,
}

impl Fake {
    /// A master whose job has trained, been measured and succeeded.
    pub(crate) fn new() -> Self {
        let files = vec![(MODEL.to_owned(), Bytes::from_static(b"weights"))];
        let events = vec![
            state(1, pb::JobState::Running, "3 workers"),
            train(0),
            train(1),
            evaluation(0),
            state(20, pb::JobState::Succeeded, "all steps applied"),
        ];
        Self(Arc::new(Mutex::new(Script {
            status: succeeded(),
            events,
            files,
            breaks: VecDeque::new(),
            endless: false,
            submitted: Vec::new(),
            cancelled: Vec::new(),
        })))
    }

    /// A master whose job trains, with 3 workers.
    pub(crate) fn running() -> Self {
        let fake = Self::new();
        fake.script().status = pb::JobStatus {
            state: pb::JobState::Running.into(),
            reason: "workers train".to_owned(),
            workers: 3,
            artifacts: Vec::new(),
            ..succeeded()
        };
        fake
    }

    /// The script, to change it or to look at it.
    pub(crate) fn script(&self) -> MutexGuard<'_, Script> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A user's program that reaches this master. Serves until the runtime ends.
    pub(crate) fn app(&self) -> App {
        let network = Network::new();
        let incoming = network.listen("127.0.0.1").expect("a new network");
        let service = JobsServer::new(self.clone());
        tokio::spawn(net::channel::server().add_service(service).serve_with_incoming(incoming));
        app(&network)
    }

    fn find(&self, job: &str) -> Result<MutexGuard<'_, Script>, Status> {
        let script = self.script();
        let status = &script.status;
        if [status.name.as_str(), &status.job.to_string(), "line"].contains(&job) {
            return Ok(script);
        }
        Err(Failure::new(Kind::NotFound, format!("no job `{job}`; `ebb jobs` lists all")).into())
    }
}

impl Fake {
    /// Changes the job unless it has ended.
    fn change(
        &self,
        job: &str,
        changed: &str,
        change: impl FnOnce(&mut pb::JobStatus),
    ) -> Result<Response<pb::JobStatus>, Status> {
        let mut script = self.find(job)?;
        let status = &mut script.status;
        let (state, name) = (status.state(), &status.name);
        if crate::terminal::report::is_end(status.state) {
            let message = format!("{name} cannot be {changed} any more, it is {}", state.name());
            return Err(Failure::new(Kind::Ended, message).into());
        }
        change(status);
        Ok(Response::new(status.clone()))
    }
}

/// A user's program on `network`, with nobody else there.
pub(crate) fn app(network: &Network) -> App {
    App {
        environment: Environment::default(),
        registry: model::Registry::default(),
        screen: Screen::default(),
        stop: Stop::default(),
        dialer: network.dialer(),
        numbers: Numbers::default(),
    }
}

/// The default master, for which the user waits as long.
pub(crate) fn reach(master_timeout: Duration) -> Reach {
    Reach { master: MasterUrl { url: None, keys: KeyFiles::default() }, master_timeout }
}

/// A valid job file in `dir`.
pub(crate) fn job_file(dir: &Path) -> JobFile {
    crate::job_file::tests::write(dir, crate::job_file::tests::JOB)
}

impl App {
    /// What it wrote to stdout.
    pub(crate) fn facts(&self) -> String {
        self.screen.facts.lock().unwrap_or_else(PoisonError::into_inner).join("\n")
    }

    /// What it wrote to stderr.
    pub(crate) fn said(&self) -> String {
        self.screen.lines.lock().unwrap_or_else(PoisonError::into_inner).join("\n")
    }
}

type Answers<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

#[async_trait::async_trait]
impl Jobs for Fake {
    type WatchStream = Answers<pb::Event>;
    type FetchStream = Answers<pb::ArtifactPart>;

    async fn submit(
        &self,
        request: Request<Streaming<pb::SubmitRequest>>,
    ) -> Result<Response<pb::SubmitReply>, Status> {
        let mut messages = request.into_inner();
        while let Some(message) = messages.message().await? {
            if let Some(pb::submit_request::Part::SpecJson(json)) = message.part {
                self.script().submitted.push(json);
            }
        }
        let script = self.script();
        Ok(Response::new(pb::SubmitReply { job: script.status.job, name: script.status.name.clone() }))
    }

    async fn list(&self, _: Request<pb::ListRequest>) -> Result<Response<pb::ListReply>, Status> {
        Ok(Response::new(pb::ListReply { jobs: vec![self.script().status.clone()], next: 0 }))
    }

    async fn status(&self, request: Request<pb::StatusRequest>) -> Result<Response<pb::JobStatus>, Status> {
        Ok(Response::new(self.find(&request.into_inner().job)?.status.clone()))
    }

    async fn watch(&self, request: Request<pb::WatchRequest>) -> Result<Response<Self::WatchStream>, Status> {
        let request = request.into_inner();
        let mut script = self.find(&request.job)?;
        let events: Vec<_> =
            script.events.iter().filter(|event| event.sequence > request.after).cloned().map(Ok).collect();
        let events = match script.breaks.pop_front() {
            Some(at) => {
                let broken = Err(Status::unavailable("the cable was pulled"));
                events.into_iter().take(at).chain([broken]).collect()
            }
            None => events,
        };
        let events = futures::stream::iter(events);
        let events: Self::WatchStream =
            if script.endless { events.chain(futures::stream::pending()).boxed() } else { events.boxed() };
        Ok(Response::new(events))
    }

    async fn cancel(&self, request: Request<pb::CancelRequest>) -> Result<Response<pb::JobStatus>, Status> {
        let request = request.into_inner();
        let mut script = self.find(&request.job)?;
        script.cancelled.push(request.force);
        script.endless = false;
        script.status.state = pb::JobState::Cancelled.into();
        script.status.reason = "a user stopped it".to_owned();
        Ok(Response::new(script.status.clone()))
    }

    async fn scale(&self, request: Request<pb::ScaleRequest>) -> Result<Response<pb::JobStatus>, Status> {
        let pb::ScaleRequest { job, workers } = request.into_inner();
        self.change(&job, "scaled", |status| {
            (status.workers_min, status.workers_max) = (1, workers);
            (status.workers, status.workers_standby) = (workers.min(3), 3 - workers.min(3));
        })
    }

    async fn pause(&self, request: Request<pb::PauseRequest>) -> Result<Response<pb::JobStatus>, Status> {
        self.change(&request.into_inner().job, "paused", |status| {
            status.state = pb::JobState::Paused.into();
            status.reason = "a user paused it".to_owned();
        })
    }

    async fn resume(&self, request: Request<pb::ResumeRequest>) -> Result<Response<pb::JobStatus>, Status> {
        self.change(&request.into_inner().job, "resumed", |status| {
            status.state = pb::JobState::Running.into();
            status.reason = "workers train".to_owned();
        })
    }

    async fn fetch(&self, request: Request<pb::FetchRequest>) -> Result<Response<Self::FetchStream>, Status> {
        let part = |part| Ok(pb::ArtifactPart { part: Some(part) });
        let mut parts = Vec::new();
        let script = self.find(&request.into_inner().job)?;
        for (described, (_, content)) in script.status.artifacts.iter().zip(&script.files) {
            parts.push(part(Part::Header(described.clone())));
            parts.extend(artifact::slices(content).map(|slice| part(Part::Content(slice))));
        }
        Ok(Response::new(futures::stream::iter(parts).boxed()))
    }
}
