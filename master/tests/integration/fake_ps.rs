//! A ps that holds nothing and remembers everything: which calls came, and how far a script says it
//! is.

use std::collections::BTreeMap;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures::{Stream, StreamExt as _};
use net::channel::{Dialer, Purpose};
use net::failover::Failover;
use net::session::Session;
use proto::pb;
use proto::pb::parameters_server::{Parameters, ParametersServer};
use proto::status::{Failure, Kind};
use store::Stores;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status, Streaming};

use crate::harness::soon;

/// What it remembers.
#[derive(Debug, Default)]
pub(crate) struct Accounts {
    /// Connections that it accepted.
    pub(crate) connections: usize,
    /// Calls in order, e.g. `unpin 1 at 4`.
    pub(crate) calls: Vec<String>,
    /// Partitions by job.
    pub(crate) open: BTreeMap<u64, Vec<pb::OpenRequest>>,
    /// Steps applied, as each ledger of a job but its first says: the first is asked for before
    /// anything is trained.
    pub(crate) version: u64,
    /// What it writes is not where the master looks.
    pub(crate) elsewhere: bool,
    /// Whether it leaves requests to close jobs unanswered.
    pub(crate) deaf_to_close: bool,
}

/// A running ps; dropped, it is gone.
#[derive(Debug)]
pub(crate) struct FakePs {
    pub(crate) accounts: Arc<Mutex<Accounts>>,
    pub(crate) session: Session,
    driving: JoinHandle<()>,
    /// Ends the server, with its connections.
    stop: CancellationToken,
}

impl Drop for FakePs {
    fn drop(&mut self) {
        self.driving.abort();
        self.stop.cancel();
    }
}

impl FakePs {
    /// Starts it and waits until the master knows it.
    pub(crate) async fn start(master: &str, name: &str) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let url = format!("http://{}", listener.local_addr().expect("bound"));
        let accounts = Arc::new(Mutex::new(Accounts::default()));
        let service = ParametersServer::new(Service(accounts.clone()));
        let counting = accounts.clone();
        let incoming = net::channel::accept(listener)
            .inspect(move |_| counting.lock().expect("unpoisoned").connections += 1);
        let stop = CancellationToken::new();
        let stopped = stop.clone().cancelled_owned();
        let serving = net::channel::server().add_service(service);
        let serving = serving.serve_with_incoming_shutdown(incoming, stopped);
        let masters = Failover::new(&Dialer::tcp(), master, Purpose::Control).expect("a URL");
        let register = pb::RegisterRequest {
            role: pb::ProcessRole::Ps.into(),
            name: name.to_owned(),
            program_version: proto::PROGRAM_VERSION.to_owned(),
            url,
            ..Default::default()
        };
        let (session, driver) = Session::start(masters, register);
        tokio::spawn(async move { serving.await.expect("serves until it is stopped") });
        let driving = tokio::spawn(async move { panic!("the session ended: {}", driver.await) });
        session.registered().await;
        Self { accounts, session, driving, stop }
    }

    /// Waits until the master has made this call.
    pub(crate) async fn called(&self, call: &str) {
        let calling = async {
            while !self.calls().iter().any(|made| made == call) {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        soon(call, calling).await;
    }

    pub(crate) fn calls(&self) -> Vec<String> {
        self.accounts.lock().expect("unpoisoned").calls.clone()
    }
}

struct Service(Arc<Mutex<Accounts>>);

type Pulls = Pin<Box<dyn Stream<Item = Result<pb::PullReply, Status>> + Send>>;

#[tonic::async_trait]
impl Parameters for Service {
    type PullStream = Pulls;

    async fn probe(&self, request: Request<pb::ProbeRequest>) -> Result<Response<pb::ProbeReply>, Status> {
        let pb::ProbeRequest { url, job, file } = request.into_inner();
        if !self.0.lock().expect("unpoisoned").elsewhere {
            let folder = Stores::default().open(&url).expect("a place").below(&job);
            folder.write(&file, "a ps".into()).await.expect("written");
        }
        Ok(Response::new(pb::ProbeReply {}))
    }

    async fn open(&self, request: Request<pb::OpenRequest>) -> Result<Response<pb::OpenReply>, Status> {
        let request = request.into_inner();
        let mut accounts = self.0.lock().expect("unpoisoned");
        accounts.calls.push(format!("open {} of job {}", request.partition, request.job));
        let open = accounts.open.entry(request.job).or_default();
        open.retain(|before| before.partition != request.partition);
        open.push(request);
        Ok(Response::new(pb::OpenReply { version: None }))
    }

    async fn ledger(&self, request: Request<pb::LedgerRequest>) -> Result<Response<pb::LedgerReply>, Status> {
        let pb::LedgerRequest { job } = request.into_inner();
        let mut accounts = self.0.lock().expect("unpoisoned");
        let call = format!("ledger of job {job}");
        let version = if accounts.calls.contains(&call) { accounts.version } else { 0 };
        accounts.calls.push(call);
        let ledger = |open: &pb::OpenRequest| pb::PartitionLedger {
            partition: open.partition,
            era: open.era,
            version: Some(version),
            watermark: version,
            microbatches_applied: 4 * version,
            samples_applied: 4 * version,
            duplicates_dropped: 1,
            ..Default::default()
        };
        let unknown = || Failure::new(Kind::NotFound, format!("no job {job} here"));
        let partitions = accounts.open.get(&job).ok_or_else(unknown)?.iter().map(ledger).collect();
        Ok(Response::new(pb::LedgerReply { partitions }))
    }

    async fn squares(&self, _: Request<pb::SquaresRequest>) -> Result<Response<pb::SquaresReply>, Status> {
        Err(Status::unimplemented("squares"))
    }

    async fn save(&self, _: Request<pb::SaveRequest>) -> Result<Response<pb::SaveReply>, Status> {
        Err(Status::unimplemented("save"))
    }

    async fn unpin(&self, request: Request<pb::UnpinRequest>) -> Result<Response<pb::UnpinReply>, Status> {
        let pb::UnpinRequest { job, version, .. } = request.into_inner();
        self.0.lock().expect("unpoisoned").calls.push(format!("unpin {version} of job {job}"));
        Ok(Response::new(pb::UnpinReply {}))
    }

    async fn attach(&self, _: Request<pb::AttachRequest>) -> Result<Response<pb::AttachReply>, Status> {
        Ok(Response::new(pb::AttachReply::default()))
    }

    async fn close(&self, request: Request<pb::CloseRequest>) -> Result<Response<pb::CloseReply>, Status> {
        let pb::CloseRequest { job, .. } = request.into_inner();
        let deaf = {
            let mut accounts = self.0.lock().expect("unpoisoned");
            accounts.calls.push(format!("close job {job}"));
            accounts.deaf_to_close
        };
        if deaf {
            std::future::pending::<()>().await;
        }
        self.0.lock().expect("unpoisoned").open.remove(&job);
        Ok(Response::new(pb::CloseReply {}))
    }

    async fn push(&self, _: Request<Streaming<pb::PushRequest>>) -> Result<Response<pb::PushReply>, Status> {
        Err(Status::unimplemented("a ps without parameters"))
    }

    async fn pull(&self, _: Request<pb::PullRequest>) -> Result<Response<Pulls>, Status> {
        Err(Status::unimplemented("a ps without parameters"))
    }
}
