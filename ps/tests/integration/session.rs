//! A ps in its fleet: it registers, closes the jobs that are over, survives its master, and leaves.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use futures::{Stream, StreamExt};
use net::channel::Dialer;
use proto::ids::{JobId, PartitionId, Step, Version};
use proto::pb;
use proto::pb::fleet_server::{Fleet, FleetServer};
use ps::{Options, Ps};
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status, Streaming};

use crate::harness::{self, Job, Shape, options, soon, until};
use crate::served::Client;

const PARTITION: PartitionId = PartitionId(0);

/// What the test makes the master say.
#[derive(Clone, Debug)]
struct Script {
    /// The process start of the master.
    start: u64,
    jobs: Vec<u64>,
    newest_job: u64,
    /// Whether it takes reports of checkpoints and lets a ps leave.
    takes: bool,
}

/// A master that knows one ps and says what the script says, at each heartbeat.
#[derive(Clone, Debug)]
struct Master {
    script: watch::Receiver<Script>,
    registered: Arc<watch::Sender<Option<pb::RegisterRequest>>>,
    /// Each heartbeat.
    heard: Arc<watch::Sender<Vec<pb::HeartbeatRequest>>>,
}

type Reply<T> = Result<Response<T>, Status>;
type Replies<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

#[tonic::async_trait]
impl Fleet for Master {
    type HeartbeatStream = Replies<pb::HeartbeatReply>;
    type DownloadStream = Replies<pb::ArtifactPart>;

    async fn register(&self, request: Request<pb::RegisterRequest>) -> Reply<pb::RegisterReply> {
        let request = request.into_inner();
        if request.name == "nobody" {
            return Err(Status::invalid_argument("no ps may be called nobody"));
        }
        self.registered.send_replace(Some(request));
        let master = self.script.borrow().start;
        Ok(Response::new(pb::RegisterReply {
            incarnation: 5,
            heartbeat_ms: 10,
            master,
            starts: 1,
            secret: vec![7; 16].into(),
        }))
    }

    async fn heartbeat(
        &self,
        request: Request<Streaming<pb::HeartbeatRequest>>,
    ) -> Reply<Self::HeartbeatStream> {
        let (script, start) = (self.script.clone(), self.script.borrow().start);
        let heard = self.heard.clone();
        let replies = request.into_inner().map(move |request| {
            let request = request?;
            let Script { start: now, jobs, newest_job, takes } = script.borrow().clone();
            // Another start of the master knows nothing of this stream.
            if now != start {
                return Err(Status::unavailable("restarted"));
            }
            let numbers = request.saved.iter().map(|saved| saved.report);
            let reports_taken = if takes { numbers.collect() } else { Vec::new() };
            let may_leave = takes && request.draining;
            heard.send_modify(|all| all.push(request));
            Ok(pb::HeartbeatReply { jobs, newest_job, reports_taken, may_leave, ..Default::default() })
        });
        Ok(Response::new(Box::pin(replies)))
    }

    async fn lease(&self, _: Request<pb::LeaseRequest>) -> Reply<pb::LeaseReply> {
        Err(Status::unimplemented("lease"))
    }
    async fn job(&self, _: Request<pb::JobRequest>) -> Reply<pb::JobReply> {
        Err(Status::unimplemented("job"))
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

struct Cluster {
    ps: Ps,
    client: Client,
    script: watch::Sender<Script>,
    registered: watch::Receiver<Option<pb::RegisterRequest>>,
    heard: watch::Receiver<Vec<pb::HeartbeatRequest>>,
    stop: CancellationToken,
    task: tokio::task::JoinHandle<ps::Result<()>>,
}

impl Cluster {
    /// Waits until the ps knows that it is registered, and returns what it said to the master. It
    /// sends its second heartbeat only then.
    async fn until_registered(&mut self) -> pb::RegisterRequest {
        let registered = soon(self.registered.wait_for(Option::is_some)).await.expect("a master").clone();
        drop(soon(self.heard.wait_for(|heard| heard.len() > 1)).await.expect("a master"));
        registered.expect("it was waited for")
    }
}

async fn cluster(name: &str) -> Cluster {
    cluster_with(name, options().drain).await
}

async fn cluster_with(name: &str, drain: Duration) -> Cluster {
    let bind = async || TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let (master, listener) = (bind().await, bind().await);
    let url = |listener: &TcpListener| format!("http://{}", listener.local_addr().expect("an address"));
    let (name, master_url, own_url) = (name.to_owned(), url(&master), url(&listener));
    let client = Client::new(listener.local_addr().expect("an address"));
    let (script, script_rx) = watch::channel(Script { start: 70, jobs: vec![], newest_job: 0, takes: false });
    let (registered, registered_rx) = watch::channel(None);
    let heard = Arc::new(watch::Sender::new(Vec::new()));
    let heard_rx = heard.subscribe();
    let service = FleetServer::new(Master { script: script_rx, registered: Arc::new(registered), heard });
    let serving =
        net::channel::server().add_service(service).serve_with_incoming(net::channel::accept(master));
    tokio::spawn(serving);
    let options = Options { name, master: master_url, url: own_url, drain, ..options() };
    let ps = harness::ps(options).expect("valid options");
    let stop = CancellationToken::new();
    let running = ps::run(ps.clone(), net::channel::accept(listener), Dialer::tcp(), stop.clone());
    Cluster {
        ps,
        client,
        script,
        registered: registered_rx,
        heard: heard_rx,
        stop,
        task: tokio::spawn(running),
    }
}

fn job(id: u64) -> Job {
    Job { id: JobId(id), ..Job::new(Shape::default()) }
}

#[tokio::test]
async fn a_ps_says_who_it_is_and_closes_jobs_that_are_over() {
    let mut cluster = cluster("east").await;
    let registered = cluster.until_registered().await;
    assert_eq!((registered.name.as_str(), registered.role()), ("east", pb::ProcessRole::Ps));
    assert_eq!(registered.url, cluster.ps.options().url);
    assert_eq!(registered.program_version, proto::PROGRAM_VERSION);

    for id in 1..=3 {
        cluster.client.0.open(job(id).open_request(PARTITION)).await.unwrap();
    }
    // Job 3 began after the master spoke.
    cluster.script.send_replace(Script { start: 70, jobs: vec![2], newest_job: 2, takes: false });
    until("job 1 is closed", || cluster.ps.ledger(JobId(1)).is_err()).await;
    assert!(cluster.ps.ledger(JobId(2)).is_ok() && cluster.ps.ledger(JobId(3)).is_ok());
    cluster.script.send_replace(Script { start: 70, jobs: vec![], newest_job: 3, takes: false });
    until("all jobs are closed", || cluster.ps.metrics().partitions.get() == 0).await;

    cluster.stop.cancel();
    soon(cluster.task).await.unwrap().unwrap();
}

#[tokio::test]
async fn jobs_of_a_master_that_is_gone_make_room_for_those_of_the_next() {
    let mut cluster = cluster("ps").await;
    cluster.until_registered().await;
    cluster.script.send_replace(Script { start: 70, jobs: vec![1, 2], newest_job: 2, takes: false });
    for job in [job(1), job(2)] {
        cluster.client.0.open(job.open_request(PARTITION)).await.unwrap();
        cluster.client.push(job.push_initial(PARTITION)).await.unwrap();
    }
    // A new master begins to count again and opens its own job 1.
    cluster.registered.mark_unchanged();
    cluster.script.send_replace(Script { start: 71, jobs: vec![1], newest_job: 1, takes: false });
    cluster.registered.changed().await.unwrap();
    until("job 2 of the old master is closed", || cluster.ps.ledger(JobId(2)).is_err()).await;
    let first = cluster.ps.ledger(JobId(1)).expect("the new master lists a job 1");
    assert_eq!(first[0].version, Some(Version(0)), "so far it is the old one");
    let reply = cluster.client.0.open(job(1).open_request(PARTITION)).await.unwrap().into_inner();
    assert_eq!(reply.version, None, "the new job 1 has no weights of the old one");
    cluster.stop.cancel();
    soon(cluster.task).await.unwrap().unwrap();
}

#[tokio::test]
async fn a_checkpoint_is_reported_at_each_heartbeat_until_the_master_has_taken_it() {
    let mut cluster = cluster("ps").await;
    cluster.until_registered().await;
    let script = Script { start: 70, jobs: vec![1], newest_job: 1, takes: false };
    cluster.script.send_replace(script.clone());
    let checkpoint = serde_json::json!({ "url": "memory://ck", "every_steps": 1 });
    let job = Job::new(Shape { checkpoint, ..Shape::default() });
    cluster.client.0.open(job.open_request(PARTITION)).await.unwrap();
    cluster.client.push(job.push_initial(PARTITION)).await.unwrap();
    cluster.client.push(job.push_step(PARTITION, Step(0))).await.unwrap();
    let twice =
        |heard: &Vec<pb::HeartbeatRequest>| heard.iter().filter(|beat| beat.saved.len() == 1).count() > 1;
    let reported = {
        let heard = soon(cluster.heard.wait_for(twice)).await.unwrap();
        heard.iter().flat_map(|beat| &beat.saved).next().cloned()
    };
    let reported = reported.expect("two of them");
    assert_eq!((reported.job, reported.partition, reported.version, reported.watermark), (1, 0, 1, 1));
    assert!(reported.file.ends_with(&format!("{:08x}.safetensors", reported.crc32c)), "{}", reported.file);
    cluster.script.send_replace(Script { takes: true, ..script });
    until("it is taken", || cluster.ps.reports().borrow().reports().count() == 0).await;
    let nothing = |heard: &Vec<pb::HeartbeatRequest>| heard.last().is_some_and(|beat| beat.saved.is_empty());
    drop(soon(cluster.heard.wait_for(nothing)).await.unwrap());
    cluster.stop.cancel();
    soon(cluster.task).await.unwrap().unwrap();
}

#[tokio::test]
async fn a_ps_that_is_told_to_leave_serves_until_the_master_lets_it_go_or_it_took_too_long() {
    for (drain, lets_go) in [(Duration::from_secs(3600), true), (Duration::from_millis(50), false)] {
        let mut cluster = cluster_with("ps", drain).await;
        cluster.until_registered().await;
        let script = Script { start: 70, jobs: vec![1], newest_job: 1, takes: false };
        cluster.script.send_replace(script.clone());
        let checkpoint = serde_json::json!({ "url": "memory://ck", "every_steps": 100 });
        let job = Job::new(Shape { checkpoint, ..Shape::default() });
        cluster.client.0.open(job.open_request(PARTITION)).await.unwrap();
        cluster.client.push(job.push_initial(PARTITION)).await.unwrap();
        cluster.client.push(job.push_step(PARTITION, Step(0))).await.unwrap();
        cluster.stop.cancel();
        let drains =
            |heard: &Vec<pb::HeartbeatRequest>| heard.iter().filter(|beat| beat.draining).count() > 1;
        if lets_go {
            drop(soon(cluster.heard.wait_for(drains)).await.unwrap());
            cluster.client.push(job.push_step(PARTITION, Step(1))).await.unwrap();
            assert!(!cluster.task.is_finished(), "it left before it might");
            cluster.script.send_replace(Script { takes: true, ..script });
        }
        soon(cluster.task).await.unwrap().unwrap();
    }
}

#[tokio::test]
async fn a_ps_that_the_master_refuses_stops_and_says_why() {
    let cluster = cluster("nobody").await;
    let error = soon(cluster.task).await.unwrap().unwrap_err().to_string();
    assert!(error.contains("does not take this ps: no ps may be called nobody"), "{error}");
}

#[tokio::test]
async fn options_without_a_usable_master_are_refused_before_anything_starts() {
    let error = harness::ps(Options { master: "localhost".to_owned(), ..options() }).unwrap_err().to_string();
    assert!(error.contains("master: `localhost` is no URL"), "{error}");
}
