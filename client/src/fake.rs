//! A scripted master in this process, for tests of clients: real gRPC over the in-memory network.
//!
//! The tests of the program's verbs compile this file too.

use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use client::pipe::Network;
use client::report::MODEL;
use client::{Client, Event, Kind, Notices};
use futures::{Stream, StreamExt as _};
use proto::artifact;
use proto::pb;
use proto::pb::artifact_part::Part;
use proto::pb::jobs_server::{Jobs, JobsServer};
use proto::status::Failure;
use tonic::{Request, Response, Status, Streaming};

/// A valid job file.
pub(crate) const JOB: &str = "name = 'line'\nepochs = 2\n[model]\nbuiltin = 'linear'\nloss = 'mse'\n[data]\n\
    format = 'csv'\ntrain = { features = ['line.csv'] }\n[batch]\nmicro = 4\n[optimizer]\nkind = 'sgd'\n\
    learning_rate = 0.1\n";

/// Writes a job file into `dir`.
pub(crate) fn job_file(dir: &Path, text: &str) -> PathBuf {
    let path = dir.join("job.toml");
    std::fs::write(&path, text).expect("a folder for the job file");
    path
}

/// Returns a client of the master at the default address of `network`, and what it tells.
pub(crate) fn client(network: &Network, patience: Duration) -> (Client, Told) {
    let told = Told::default();
    let hear = told.clone();
    let client = Client::new(&network.dialer(), "http://127.0.0.1:4700", patience).expect("a URL");
    (client.with_notices(Notices::new(move |notice| hear.add(&notice.to_string()))), told)
}

/// Lines that a client told; clones share them.
#[derive(Clone, Debug, Default)]
pub(crate) struct Told(Arc<Mutex<Vec<String>>>);

impl Told {
    fn add(&self, line: &str) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(line.to_owned());
    }

    /// Returns the lines so far.
    pub(crate) fn lines(&self) -> Vec<String> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// A master. Clones share the script.
#[derive(Clone, Debug)]
pub(crate) struct Fake(Arc<Mutex<Script>>);

#[derive(Debug)]
pub(crate) struct Script {
    /// The only job.
    pub(crate) status: pb::JobStatus,
    /// The job's events.
    pub(crate) events: Vec<Event>,
    /// The job's files.
    pub(crate) files: Vec<(String, Bytes)>,
    /// Number of events after which each next `Watch` breaks.
    pub(crate) breaks: VecDeque<usize>,
    /// The job goes on after its events.
    pub(crate) endless: bool,
    /// Specifications that were submitted.
    pub(crate) submitted: Vec<String>,
    /// Requests to cancel: true by force.
    pub(crate) cancelled: Vec<bool>,
}

impl Fake {
    /// Creates a master whose job has trained, been measured and succeeded.
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

    /// Returns the script, to change it or to look at it.
    pub(crate) fn script(&self) -> MutexGuard<'_, Script> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Serves on `network`, at the default address, until the runtime ends.
    pub(crate) fn serve(&self, network: &Network) {
        let incoming = network.listen("127.0.0.1").expect("a free name");
        let service = JobsServer::new(self.clone());
        tokio::spawn(net::channel::server().add_service(service).serve_with_incoming(incoming));
    }

    /// Returns a patient client of this master, and what it tells.
    pub(crate) fn client(&self) -> (Client, Told) {
        let network = Network::new();
        self.serve(&network);
        client(&network, Duration::from_secs(120))
    }

    fn find(&self, job: &str) -> Result<MutexGuard<'_, Script>, Status> {
        let script = self.script();
        let status = &script.status;
        if [status.name.as_str(), &status.job.to_string(), "line"].contains(&job) {
            return Ok(script);
        }
        Err(Failure::new(proto::status::Kind::NotFound, format!("no job `{job}`; `ebb jobs` lists all"))
            .into())
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
        if state.is_end() {
            let message = format!("{name} cannot be {changed} any more, it is {}", state.name());
            return Err(Failure::new(proto::status::Kind::Ended, message).into());
        }
        change(status);
        Ok(Response::new(status.clone()))
    }
}

/// Returns a step of 4, in 2 epochs.
pub(crate) fn train(step: u64) -> Event {
    let train = pb::TrainEvent {
        step,
        epoch: step / 2,
        loss: 0.5,
        samples: 8,
        samples_per_second: 100.0,
        workers: 3,
        learning_rate: 0.1,
        steps: 4,
        epochs: 2,
        workers_standby: 0,
    };
    event(step + 2, Kind::Train(train))
}

/// Returns the evaluation of an epoch.
pub(crate) fn evaluation(epoch: u64) -> Event {
    let metrics = [("accuracy".to_owned(), 0.75), ("loss".to_owned(), 0.25)].into();
    let evaluation = pb::EvaluationEvent {
        epoch,
        step: 2 * (epoch + 1),
        metrics,
        samples: 20,
        within_epoch: false,
        set: String::new(),
        sums: [].into(),
    };
    event(10 + epoch, Kind::Evaluation(evaluation))
}

/// Returns a change of a job's state.
pub(crate) fn state(sequence: u64, state: pb::JobState, reason: &str) -> Event {
    event(sequence, Kind::State(pb::StateEvent { state: state.into(), reason: reason.to_owned() }))
}

/// Any event; their times are half a second apart.
pub(crate) fn event(sequence: u64, kind: Kind) -> Event {
    Event { sequence, unix_ms: 1_700_000_000_000 + 500 * sequence, kind }
}

/// Returns the status of a job that succeeded.
pub(crate) fn succeeded() -> pb::JobStatus {
    pb::JobStatus {
        job: 3,
        name: "line-3".to_owned(),
        state: pb::JobState::Succeeded.into(),
        reason: "all steps applied".to_owned(),
        epochs: 2,
        steps: 4,
        steps_done: 4,
        microbatches_applied: 8,
        samples_applied: 32,
        workers: 3,
        workers_seen: 3,
        wall_ms: 2500,
        training_ms: 2000,
        data_wait: Some(0.25),
        loss: Some(0.5),
        final_metrics: [("accuracy".to_owned(), 0.75), ("loss".to_owned(), 0.25)].into(),
        artifacts: vec![proto::artifact::describe(MODEL, b"weights")],
        numerics: vec![pb::NumericsSince {
            version: 0,
            numerics: Some(pb::Numerics { class: "pure-1".to_owned(), facts: "pure Rust".to_owned() }),
        }],
        ..pb::JobStatus::default()
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
        let sent =
            |Event { sequence, unix_ms, kind }: Event| pb::Event { sequence, unix_ms, kind: Some(kind) };
        let events = script.events.iter().filter(|event| event.sequence > request.after);
        let events: Vec<_> = events.cloned().map(|event| Ok(sent(event))).collect();
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
