//! What moving 64 MiB between a worker and a ps costs, against raw TCP and memcpy in the same run.
//!
//! Two processes on loopback; each round takes every figure once, so that a row's ratio is of neighbours in time. *Pull*: from the
//! ps's weights into the worker's tensors. *Push*: from the worker's tensors until the ps has acknowledged, the optimizer off: of
//! every two pushes of a step with many microbatches the second is added to the first. *Raw TCP*: a blocking write of 64 MiB, one
//! reader into one buffer, an answer of one byte; same congestion control. *Embedded*: the worker's calls without a socket.
//!
//! Expected: the bytes cross the kernel once in (copy) and once out (copy), so raw TCP is at most half of memcpy; pull and push
//! over gRPC add one pass each (into the tensors; into the sum for every second push), overlapped with the transfer on another core.
//! `cargo bench --no-default-features --bench data_plane` takes half a minute.
#![expect(clippy::disallowed_methods, reason = "a bench measures real time")]

mod peer;
#[path = "../support/report.rs"]
mod report;

use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::Arc;
use std::time::Instant;

use proto::channel::Dialer;
use proto::ids::{Era, JobId, PartitionId, Step, Version};
use proto::parameters::{Address, Parameters, Target, Want};
use proto::pb::PartitionAddress;
use proto::placement::Layout;
use proto::spec::JobSpec;
use proto::tensor::{TensorSpec, Values};
use proto::tree::{Node, StepNode};
use ps::{Opening, Ps};
use report::{Figure, Target as Goal};
use tokio::runtime::Runtime;
use tokio_util::sync::CancellationToken;
use worker::ps_client::{Connector, PsClient};

/// As `ebb` has it.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

const BYTES: usize = 64 << 20;
/// Microbatches of a step: more than pushes in a run.
const OF: u32 = 1 << 16;
const JOB: JobId = JobId(1);

const SPEC: &str = r#"{
    "name": "bench", "epochs": 1, "model": { "builtin": "linear" },
    "data": { "format": "idx", "train": { "features": ["x"], "labels": ["y"] } },
    "batch": { "micro": 1, "effective": 65536 },
    "optimizer": { "kind": "sgd", "learning_rate": 0.01 }
}"#;

fn main() -> ExitCode {
    match std::env::args().nth(1).as_deref() {
        Some("serve-ps") => serve_ps(),
        Some("serve-raw") => peer::serve(BYTES),
        _ => {
            let full = std::env::args().any(|arg| arg == "--bench");
            let figures = measure(if full { 31 } else { 2 });
            report::print(&figures);
            if full {
                report::write(
                    &figures,
                    &Path::new(env!("CARGO_MANIFEST_DIR")).join("target/bench/data_plane.json"),
                );
            }
            ExitCode::SUCCESS
        }
    }
}

fn tensors() -> Vec<TensorSpec> {
    vec![TensorSpec::parameter("weight", [BYTES / 4])]
}

/// A ps with one partition, empty.
fn partition() -> Ps {
    let spec = JobSpec::from_json(SPEC).expect("a valid specification");
    let ps = Ps::new(ps::Options::default()).expect("valid options");
    let address = Address { job: JOB, partition: PartitionId(0), era: Era(0) };
    let plan = spec.plan(1 << 40);
    ps.open(Opening { address, partitions: 1, tensors: tensors(), plan, spec, restore: None })
        .expect("a valid opening");
    ps
}

/// The child that is the ps.
fn serve_ps() -> ExitCode {
    let serving = async {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
        println!("{}", listener.local_addr()?);
        ps::server::serve(partition(), proto::channel::accept(listener), CancellationToken::new()).await?;
        Ok::<_, Box<dyn std::error::Error>>(())
    };
    Runtime::new().expect("a runtime").block_on(serving).expect("the ps serves");
    ExitCode::SUCCESS
}

/// A process of this program in another role; ends with its owner.
struct Served {
    child: Child,
    address: String,
}

impl Served {
    fn start(role: &str) -> Self {
        let program = std::env::current_exe().expect("this program");
        let mut child = Command::new(program).arg(role).stdout(Stdio::piped()).spawn().expect("it starts");
        let mut address = String::new();
        BufReader::new(child.stdout.take().expect("piped"))
            .read_line(&mut address)
            .expect("it says where it listens");
        Self { child, address: address.trim().to_owned() }
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A worker's side of the exchange.
struct Exchange {
    client: PsClient,
    gradients: Option<Vec<Values>>,
    next: u32,
}

impl Exchange {
    fn new(connector: &Connector, url: &str, runtime: &Runtime) -> Self {
        let _entered = runtime.enter();
        let layout = Arc::new(Layout::new(tensors(), 1).expect("a valid model"));
        let address = PartitionAddress { ps: "ps".to_owned(), url: url.to_owned() };
        let limits = JobSpec::from_json(SPEC).expect("a valid specification").limits;
        let client = PsClient::new(connector, JOB, layout, &[address], limits, 1).expect("a URL");
        let zeros = || tensors().iter().map(TensorSpec::zeros).collect::<Vec<_>>();
        runtime.block_on(client.push(Target::Initial, zeros())).expect("version 0");
        Self { client, gradients: Some(zeros()), next: 0 }
    }

    fn pull(&self, runtime: &Runtime) -> f64 {
        let begin = Instant::now();
        let weights = runtime.block_on(self.client.pull(Want::Exact(Version(0)))).expect("a pull");
        let took = begin.elapsed().as_secs_f64();
        assert_eq!(weights.expect("version 0 is kept")[0].len(), BYTES / 4);
        took
    }

    fn push(&mut self, runtime: &Runtime) -> f64 {
        let node = StepNode { step: Step(0), node: Node::leaf(self.next), of: OF };
        self.next += 1;
        let gradients = self.gradients.take().expect("made before");
        let begin = Instant::now();
        runtime.block_on(self.client.push(Target::Node { node, samples: 1 }, gradients)).expect("a push");
        let took = begin.elapsed().as_secs_f64();
        self.gradients = Some(vec![Values::F32(vec![1.0; BYTES / 4])]);
        took
    }
}

fn measure(rounds: usize) -> Vec<Figure> {
    let runtime = Runtime::new().expect("a runtime");
    let (ps, raw) = (Served::start("serve-ps"), Served::start("serve-raw"));
    let mut raw =
        peer::Client::connect(&raw.address, BYTES).map(|client| (client, raw)).expect("the raw peer answers");
    let mut remote =
        Exchange::new(&Connector::grpc(Dialer::tcp()), &format!("http://{}", ps.address), &runtime);
    let embedded: Arc<dyn Parameters> = Arc::new(partition());
    let connector = Connector::new(move |_| Ok(embedded.clone()));
    let mut local = Exchange::new(&connector, "http://embedded", &runtime);
    let mut copy = (vec![1_u8; BYTES], vec![2_u8; BYTES]);
    let mut rows: [Vec<f64>; 7] = Default::default();
    // The first round warms up.
    for round in 0..=rounds {
        let raw_pull = raw.0.pull().expect("raw TCP");
        let pull = remote.pull(&runtime);
        let raw_push = raw.0.push().expect("raw TCP");
        let push = remote.push(&runtime);
        let begin = Instant::now();
        copy.1.copy_from_slice(std::hint::black_box(&copy.0));
        std::hint::black_box(&mut copy.1);
        let memcpy = begin.elapsed().as_secs_f64();
        let taken = [
            BYTES as f64 / raw_pull / f64::from(1 << 30),
            BYTES as f64 / memcpy / f64::from(1 << 30),
            raw_pull / pull,
            raw_push / push,
            raw_pull / local.pull(&runtime),
            memcpy / local.pull(&runtime),
            memcpy / local.push(&runtime),
        ];
        if round > 0 {
            rows.iter_mut().zip(taken).for_each(|(row, one)| row.push(one));
        }
    }
    let [raw, memcpy, pull, push, local_tcp, local_pull, local_push] = rows;
    vec![
        Figure::new("raw TCP, 64 MiB from memory to memory", "GiB/s", raw, 0.0, None),
        Figure::new("memcpy, 64 MiB", "GiB/s", memcpy, 0.0, None),
        Figure::new("pull over gRPC/TCP, of raw TCP", "ratio", pull, 1.0, Some(Goal::AtLeast(0.95))),
        Figure::new("push over gRPC/TCP, of raw TCP", "ratio", push, 1.0, Some(Goal::AtLeast(0.95))),
        Figure::new("pull embedded, of raw TCP", "ratio", local_tcp, 0.0, Some(Goal::AtLeast(2.5))),
        Figure::new("pull embedded, of memcpy", "ratio", local_pull, 1.0, None),
        Figure::new("push embedded, of memcpy", "ratio", local_push, 1.0, Some(Goal::AtLeast(0.9))),
    ]
}
