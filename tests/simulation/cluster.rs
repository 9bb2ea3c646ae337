//! A cluster in one thread: the real master, ps and worker code on a simulated network.

use std::io;
use std::net::{IpAddr, Ipv4Addr};
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use futures::Stream;
use proto::channel::{Accepted, Dialer};
use proto::pb;
use proto::pb::jobs_client::JobsClient;
use tokio_util::sync::CancellationToken;
use turmoil::net::{TcpListener, TcpStream};

use crate::model;

const PORT: u16 = 4700;

type Failed = Box<dyn std::error::Error>;

/// What the user saw.
#[derive(Clone, Debug, Default)]
pub(crate) struct Seen {
    pub(crate) events: Vec<pb::Event>,
    pub(crate) status: Option<pb::JobStatus>,
    /// `model.safetensors`.
    pub(crate) model: Vec<u8>,
}

/// Opens simulated connections.
pub(crate) fn dialer() -> Dialer {
    Dialer::new(|uri| async move { TcpStream::connect((uri.host().unwrap_or_default(), PORT)).await })
}

async fn accept() -> io::Result<impl Stream<Item = io::Result<Accepted<TcpStream>>> + Send> {
    let listener = TcpListener::bind((IpAddr::from(Ipv4Addr::UNSPECIFIED), PORT)).await?;
    Ok(futures::stream::unfold(listener, |listener| async move {
        let accepted = listener.accept().await.map(|(stream, _)| Accepted(stream));
        Some((accepted, listener))
    }))
}

pub(crate) async fn master(folder: PathBuf) -> Result<(), Failed> {
    let options = master::Options { data_dir: folder, ..master::Options::default() };
    Ok(master::run(options, accept().await?, dialer(), CancellationToken::new()).await?)
}

pub(crate) async fn ps(name: String) -> Result<(), Failed> {
    let url = format!("http://{name}:{PORT}");
    let options = ps::Options {
        name,
        url,
        master: format!("http://master:{PORT}"),
        threads: 1,
        ..ps::Options::default()
    };
    Ok(ps::run(ps::Ps::new(options)?, accept().await?, dialer(), CancellationToken::new()).await?)
}

pub(crate) async fn worker(name: String, folder: PathBuf) -> Result<(), Failed> {
    let options = worker::Options { name, scratch: folder, threaded: false, ..worker::Options::default() };
    let connector = worker::Connector::grpc(dialer());
    let master = format!("http://master:{PORT}");
    let shutdown = CancellationToken::new();
    Ok(worker::run(options, &master, dialer(), connector, model::registry(), shutdown).await?)
}

/// Submits the job, follows it to its end, and fetches its model.
pub(crate) async fn user(spec: String, seen: Arc<Mutex<Seen>>) -> Result<(), Failed> {
    let channel = dialer().channel(&format!("http://master:{PORT}"), proto::channel::Purpose::Control)?;
    let mut jobs = JobsClient::new(channel);
    let part = pb::submit_request::Part::SpecJson(spec);
    let submit = tokio_stream::iter([pb::SubmitRequest { part: Some(part) }]);
    let job = jobs.submit(submit).await?.into_inner().name;
    let mut events = jobs.watch(pb::WatchRequest { job: job.clone(), after: 0 }).await?.into_inner();
    while let Some(event) = events.message().await? {
        seen.lock().unwrap().events.push(event);
    }
    let status = jobs.status(pb::StatusRequest { job: job.clone() }).await?.into_inner();
    let mut files = jobs.fetch(pb::FetchRequest { job }).await?.into_inner();
    let mut model = Vec::new();
    while let Some(part) = files.message().await? {
        if let Some(pb::artifact_part::Part::Content(content)) = part.part {
            model.extend_from_slice(&content);
        }
    }
    let mut seen = seen.lock().unwrap();
    (seen.status, seen.model) = (Some(status), model);
    Ok(())
}
