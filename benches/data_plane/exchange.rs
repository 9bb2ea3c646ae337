//! A worker's side of the exchange, and the ps on the other side.

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Instant;

use kernels::Device;
use net::channel::Listener;
use net::memory::{Memory, Regions};
use proto::ids::{Era, JobId, PartitionId, Step, Version};
use proto::parameters::{Address, Target, Want};
use proto::pb::PartitionAddress;
use proto::placement::Layout;
use proto::spec::JobSpec;
use proto::tensor::{DType, TensorSpec, Values};
use proto::tree::{Node, StepNode};
use proto::wire::WireType;
use ps::{Opening, Ps};
use store::Stores;
use tokio::runtime::Runtime;
use tokio_util::sync::CancellationToken;
use worker::exchange::{Connector, Partitions};

const JOB: JobId = JobId(1);

/// Kind of an exchange.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Case {
    /// Optimizer. `sgd` is timed on the first two of a step's four microbatches, `adam` on every
    /// push, which is a step.
    pub(crate) optimizer: &'static str,
    /// Number of tensors, all of one size.
    pub(crate) tensors: usize,
    /// Type of the exchange.
    pub(crate) wire: WireType,
    /// Bytes of all tensors, in f32.
    pub(crate) bytes: usize,
}

impl Case {
    /// Returns the microbatches of a step.
    const fn of(self) -> u32 {
        if matches!(self.optimizer.as_bytes(), b"sgd") { 4 } else { 1 }
    }

    fn spec(self) -> JobSpec {
        let text = format!(
            r#"{{
                "name": "bench", "epochs": 1, "model": {{ "builtin": "linear" }},
                "data": {{ "format": "idx", "train": {{ "features": ["x"], "labels": ["y"] }} }},
                "batch": {{ "micro": 1, "effective": {} }},
                "optimizer": {{ "kind": "{}", "learning_rate": 0.001 }},
                "exchange": {{ "dtype": "{}" }}
            }}"#,
            self.of(),
            self.optimizer,
            self.wire
        );
        JobSpec::from_json(&text).expect("a valid specification")
    }

    fn tensors(self) -> Vec<TensorSpec> {
        let len = self.bytes / 4 / self.tensors;
        (0..self.tensors).map(|number| TensorSpec::parameter(format!("weight{number}"), [len])).collect()
    }

    /// Creates a ps with one empty partition on a device.
    pub(crate) fn partition(self, device: Device, memory: Option<Memory>) -> Ps {
        let spec = self.spec();
        let ps = Ps::on(device, ps::Options::default(), Stores::default(), memory).expect("valid options");
        let address = Address { job: JOB, partition: PartitionId(0), era: Era(0) };
        let plan = spec.plan(1 << 40);
        ps.open(Opening {
            address,
            partitions: 1,
            tensors: self.tensors(),
            plan,
            spec,
            restore: None,
            homes: Vec::new(),
            placement: 0,
            script: None,
        })
        .expect("a valid opening");
        ps
    }

    /// Runs the child process that is the ps, with its partition on a device.
    pub(crate) fn serve(self, device: Device) -> ExitCode {
        let serving = async {
            let listener = Listener::beside(tokio::net::TcpListener::bind("127.0.0.1:0").await?)?;
            println!("{}", listener.address()?);
            ps::server::serve_on_threads(
                self.partition(device, Memory::new().ok()),
                listener,
                CancellationToken::new(),
            )
            .await?;
            Ok::<_, Box<dyn std::error::Error>>(())
        };
        crate::runtime().block_on(serving).expect("the ps serves");
        ExitCode::SUCCESS
    }
}

/// Where gradients of a worker lie.
enum Gradients {
    Heap,
    /// In memory that the ps may read.
    Lent(Regions),
    Device(Device),
}

/// A worker's side.
pub(crate) struct Exchange {
    case: Case,
    client: Partitions,
    /// Where gradients lie.
    gradients: Gradients,
    step: Step,
}

impl Exchange {
    /// Connects to a partition of the case, and pushes version 0.
    pub(crate) fn new(case: Case, connector: &Connector, url: &str, runtime: &Runtime) -> Self {
        let _entered = runtime.enter();
        let layout = Arc::new(Layout::new(case.tensors(), 1).expect("a valid model"));
        let address = PartitionAddress { ps: "ps".to_owned(), url: url.to_owned() };
        let client =
            Partitions::new(connector, JOB, layout, &[address], case.spec().limits, 1).expect("a URL");
        let client = client.exchanging(case.wire);
        let zeros = case.tensors().iter().map(TensorSpec::zeros).collect();
        runtime.block_on(client.push(Target::Initial, zeros)).expect("version 0");
        Self { case, client, gradients: Gradients::Heap, step: Step(0) }
    }

    /// Puts gradients into `regions`, where those of a TorchScript module lie.
    #[allow(dead_code, reason = "each bench uses a part of it")]
    pub(crate) fn lending(self, regions: Regions) -> Self {
        Self { gradients: Gradients::Lent(regions), ..self }
    }

    /// Puts gradients into memory of a device, and pulls weights into it, as for a model there.
    #[allow(dead_code, reason = "each bench uses a part of it")]
    pub(crate) fn on(self, device: Device) -> Self {
        let client = self.client.on(device.clone());
        Self { client, gradients: Gradients::Device(device), ..self }
    }

    /// Returns the seconds of a pull of the newest version.
    pub(crate) fn pull(&self, runtime: &Runtime) -> f64 {
        let newest = Want::Exact(Version(self.step.get()));
        let begin = Instant::now();
        let weights = runtime.block_on(self.client.pull_rounded(newest)).expect("a pull");
        let took = begin.elapsed().as_secs_f64();
        assert_eq!(weights.expect("it is kept").len(), self.case.tensors);
        took
    }

    /// Returns the mean seconds of the timed pushes until each is acknowledged. Without an
    /// optimizer two are timed: one that is kept until its sibling comes, and the sibling, which is
    /// added to it. Then the step is ended.
    pub(crate) fn push(&mut self, runtime: &Runtime) -> f64 {
        let timed = if self.case.of() == 1 { 1 } else { 2 };
        let took = (0..timed).map(|leaf| self.push_node(Node::leaf(leaf), runtime)).sum::<f64>();
        if timed < self.case.of() {
            self.push_node(Node::new(timed, self.case.of()), runtime);
        }
        self.step = self.step.next();
        took / f64::from(timed)
    }

    fn push_node(&self, node: Node, runtime: &Runtime) -> f64 {
        let gradients = self.case.tensors().iter().map(|tensor| self.ones(tensor.len())).collect();
        let target = Target::Node {
            node: StepNode { step: self.step, node, of: self.case.of() },
            samples: node.len().into(),
        };
        let begin = Instant::now();
        runtime.block_on(self.client.push(target, gradients)).expect("a push");
        begin.elapsed().as_secs_f64()
    }

    fn ones(&self, len: usize) -> Values {
        let floats = match &self.gradients {
            Gradients::Heap => None,
            Gradients::Lent(regions) => regions.floats(len),
            Gradients::Device(device) => {
                let mut storage = device.zeros(DType::F32, len).expect("the device has room for a gradient");
                storage.fill(1.0);
                device.settle().expect("the device works");
                return storage.into();
            }
        };
        let Some(mut shared) = floats else { return Values::F32(vec![1.0; len]) };
        shared.as_f32_mut().expect("floats").fill(1.0);
        shared
    }
}
