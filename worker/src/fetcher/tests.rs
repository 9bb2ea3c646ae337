//! A fetcher beside a master that grants work while the fetcher is still busy.

use std::pin::Pin;

use futures::{Stream, StreamExt as _};
use kernels::telemetry::LatestReading;
use net::channel::{Dialer, Purpose};
use net::failover::Failover;
use proto::pb::fleet_server::{Fleet, FleetServer};
use tokio::net::TcpListener;
use tokio::sync::watch;
use tonic::{Request, Response, Status, Streaming};

use super::*;
use crate::waits::Waits;

/// Far more than any machine needs for what a test waits for.
const LONG: Duration = Duration::from_secs(120);

const INCARNATION: IncarnationId = IncarnationId(5);
const JOB: u64 = 9;

/// The lease that came with the answer to a report.
const FIRST: u64 = 1;

/// The lease that the fetcher asked for.
const SECOND: u64 = 2;

/// A master that never says what a job is, and grants [`SECOND`] once it was asked.
#[derive(Debug)]
struct Master {
    /// Somebody wants to know what the job is.
    opening: watch::Sender<bool>,
    /// The leases that the newest heartbeat named.
    named: watch::Sender<Vec<u64>>,
}

type Reply<T> = Result<Response<T>, Status>;
type Replies<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

#[tonic::async_trait]
impl Fleet for Master {
    type HeartbeatStream = Replies<pb::HeartbeatReply>;
    type DownloadStream = Replies<pb::ArtifactPart>;

    async fn register(&self, _: Request<pb::RegisterRequest>) -> Reply<pb::RegisterReply> {
        Ok(Response::new(pb::RegisterReply {
            incarnation: INCARNATION.get(),
            heartbeat_ms: 10,
            master: 70,
            starts: 1,
            secret: vec![7; 16].into(),
        }))
    }

    async fn heartbeat(
        &self,
        request: Request<Streaming<pb::HeartbeatRequest>>,
    ) -> Reply<Self::HeartbeatStream> {
        let named = self.named.clone();
        let replies = request.into_inner().map(move |request| {
            named.send_replace(request?.leases.iter().map(|lease| lease.lease).collect());
            Ok(pb::HeartbeatReply { jobs: vec![JOB], newest_job: JOB, ..Default::default() })
        });
        Ok(Response::new(Box::pin(replies)))
    }

    async fn lease(&self, _: Request<pb::LeaseRequest>) -> Reply<pb::LeaseReply> {
        let mut opening = self.opening.subscribe();
        let _ = opening.wait_for(|opening| *opening).await;
        Ok(Response::new(pb::LeaseReply { lease: Some(lease(SECOND)) }))
    }

    async fn job(&self, _: Request<pb::JobRequest>) -> Reply<pb::JobReply> {
        self.opening.send_replace(true);
        std::future::pending().await
    }

    async fn describe(&self, _: Request<pb::DescribeRequest>) -> Reply<pb::DescribeReply> {
        Err(Status::unimplemented("describe"))
    }
    async fn complete(&self, _: Request<pb::CompleteRequest>) -> Reply<pb::CompleteReply> {
        Err(Status::unimplemented("complete"))
    }
    async fn skip(&self, _: Request<pb::SkipRequest>) -> Reply<pb::SkipReply> {
        Err(Status::unimplemented("skip"))
    }
    async fn fail(&self, _: Request<pb::FailRequest>) -> Reply<pb::FailReply> {
        Err(Status::unimplemented("fail"))
    }
    async fn release(&self, _: Request<pb::ReleaseRequest>) -> Reply<pb::ReleaseReply> {
        Err(Status::unimplemented("release"))
    }
    async fn download(&self, _: Request<pb::DownloadRequest>) -> Reply<Self::DownloadStream> {
        Err(Status::unimplemented("download"))
    }
    async fn upload(&self, _: Request<Streaming<pb::UploadRequest>>) -> Reply<pb::UploadReply> {
        Err(Status::unimplemented("upload"))
    }
}

fn lease(id: u64) -> pb::Lease {
    let work = Some(Wire::Train(pb::TrainTask::default()));
    pb::Lease { id, job: JOB, work, ..Default::default() }
}

#[tokio::test]
async fn heartbeats_name_a_lease_that_comes_while_another_one_opens_its_job() {
    let (opening, named) = (watch::Sender::new(false), watch::Sender::new(Vec::new()));
    let mut heard = named.subscribe();
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let url = format!("http://{}", listener.local_addr().expect("an address"));
    let service = FleetServer::new(Master { opening, named });
    let incoming = net::channel::accept(listener);
    let serving = net::channel::server().add_service(service).serve_with_incoming(incoming);
    let _serving = AbortOnDropHandle::new(tokio::spawn(serving));

    let masters = Failover::new(&Dialer::tcp(), &url, Purpose::Control).expect("a URL");
    let (session, driver) = Session::start(masters, pb::RegisterRequest::default());
    let _driving = AbortOnDropHandle::new(tokio::spawn(driver));
    let held = Held::new(session.clone(), LatestReading::default(), Waits::new(Arc::default()));
    let (granted_tx, granted) = mpsc::unbounded_channel();
    let (arrivals, _arrived) = mpsc::channel(1);
    let fetcher = Fetcher::new(
        &Options::default(),
        Device::Cpu,
        Arc::from("cpu"),
        Connector::socket(Dialer::tcp()),
        Registry::default(),
        MasterClient::new(session.fleet(), &url, 0),
        session.clone(),
        held.clone(),
        Arc::from("cpu"),
        granted,
        arrivals,
        mpsc::unbounded_channel().0,
    );
    held.insert(INCARNATION, &lease(FIRST));
    let after = LeaseId(0);
    granted_tx.send(Granted { incarnation: INCARNATION, lease: lease(FIRST), after }).expect("it listens");
    let _fetching = AbortOnDropHandle::new(tokio::spawn(fetcher.run()));

    let both = heard.wait_for(|named| named.contains(&FIRST) && named.contains(&SECOND));
    tokio::time::timeout(LONG, both).await.expect("heartbeats name both").expect("the master lives");
}
