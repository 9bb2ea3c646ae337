//! A small job whose every number is known: its specification, its values, and the serial reference
//! that a ps must match bit for bit.

use std::time::Duration;

use kernels::cpu::{self, cast, state};
use kernels::{Optimizers, Update, Updates};
use proptest::prelude::*;
use proto::ids::{ChunkId, Era, JobId, PartitionId, Step, Version};
use proto::loss_scale::LossScale;
use proto::parameters::{Address, Pull, Pulled, Push, Target, Want};
use proto::pb;
use proto::placement::{ChunkSpec, Layout};
use proto::plan::Plan;
use proto::random::Keyed;
use proto::spec::JobSpec;
use proto::tensor::{Chunk, DType, TensorRole, TensorSpec, Values};
use proto::tree::{Node, StepNode, cover};
use proto::wire::WireType;
use ps::{Opening, Options, Ps};
use serde_json::json;
use store::Stores;

/// Far more than anything here takes.
const PATIENCE: Duration = Duration::from_secs(120);

/// One job, as its master, its workers and the reference see it.
#[derive(Clone, Debug)]
pub(crate) struct Job {
    pub(crate) id: JobId,
    pub(crate) era: Era,
    pub(crate) spec: JobSpec,
    pub(crate) plan: Plan,
    pub(crate) layout: Layout,
    /// Where its partitions live, for a job that needs to know.
    pub(crate) homes: Vec<String>,
    pub(crate) placement: u64,
    /// Steps whose gradient overflows.
    pub(crate) overflows: Vec<u64>,
}

/// What a test varies.
#[derive(Clone, Debug)]
pub(crate) struct Shape {
    pub(crate) tensors: Vec<TensorSpec>,
    pub(crate) partitions: u32,
    /// M.
    pub(crate) microbatches_per_step: u32,
    pub(crate) records: u64,
    pub(crate) epochs: u64,
    pub(crate) consistency: serde_json::Value,
    pub(crate) optimizer: serde_json::Value,
    pub(crate) evaluates: bool,
    pub(crate) checkpoint: serde_json::Value,
    /// What is exchanged.
    pub(crate) wire: WireType,
    /// Steps whose gradient overflows.
    pub(crate) overflows: Vec<u64>,
}

impl Default for Shape {
    /// Two steps an epoch, the second with M = 2 instead of 4 and a last microbatch of one record;
    /// every role.
    fn default() -> Self {
        Self {
            tensors: vec![
                TensorSpec::parameter("weight", [5, 3]),
                TensorSpec::state("mean", [4]),
                TensorSpec::counter("batches", []),
                TensorSpec::parameter("bias", [3]),
            ],
            partitions: 1,
            microbatches_per_step: 4,
            records: 11,
            epochs: 3,
            consistency: json!({ "mode": "sync" }),
            optimizer: json!({ "kind": "adam", "learning_rate": 0.01 }),
            evaluates: false,
            checkpoint: json!(null),
            wire: WireType::F32,
            overflows: Vec::new(),
        }
    }
}

impl Job {
    pub(crate) fn new(shape: Shape) -> Self {
        let files = json!({ "features": ["x.npy"], "labels": ["y.npy"] });
        let fraction = if shape.evaluates { json!(0.5) } else { json!(null) };
        let spec = json!({
            "name": "test",
            "epochs": shape.epochs,
            "model": { "builtin": "linear", "loss": "mse" },
            "data": { "format": "npy", "train": files, "validation_fraction": fraction },
            "batch": { "micro": 2, "effective": 2 * shape.microbatches_per_step },
            "optimizer": shape.optimizer,
            "consistency": shape.consistency,
            "fleet": { "ps": shape.partitions },
            "checkpoint": shape.checkpoint,
            "exchange": { "dtype": shape.wire },
        });
        let spec = JobSpec::from_json(&spec.to_string()).expect("a valid specification");
        let layout = Layout::new(shape.tensors, shape.partitions).expect("a valid model");
        Self {
            id: JobId(1),
            era: Era(0),
            plan: spec.plan(shape.records),
            spec,
            layout,
            homes: Vec::new(),
            placement: 0,
            overflows: shape.overflows,
        }
    }

    pub(crate) fn partitions(&self) -> impl Iterator<Item = PartitionId> + use<> {
        (0..self.layout.partitions() as u32).map(PartitionId)
    }

    pub(crate) const fn address(&self, partition: PartitionId) -> Address {
        Address { job: self.id, partition, era: self.era }
    }

    pub(crate) fn opening(&self, partition: PartitionId) -> Opening {
        Opening {
            address: self.address(partition),
            partitions: self.layout.partitions() as u32,
            tensors: self.layout.tensors().to_vec(),
            plan: self.plan,
            spec: self.spec.clone(),
            restore: None,
            homes: self.homes.clone(),
            placement: self.placement,
            script: None,
        }
    }

    pub(crate) fn open_request(&self, partition: PartitionId) -> pb::OpenRequest {
        pb::OpenRequest {
            job: self.id.get(),
            era: self.era.get(),
            partition: partition.get(),
            partitions: self.layout.partitions() as u32,
            tensors: self.layout.tensors().iter().map(Into::into).collect(),
            plan: Some(self.plan.into()),
            spec_json: self.spec.to_json(),
            restore: None,
            homes: self.homes.clone(),
            placement: self.placement,
            script: 0,
        }
    }

    /// Returns the part of `values` (all tensors) that a partition holds.
    pub(crate) fn chunks(&self, partition: PartitionId, values: &[Values]) -> Vec<Chunk> {
        let members = self.layout.members(partition).iter();
        let chunk = |&id| {
            let spec = self.layout.chunk(id);
            let size = self.layout.tensor_of(id).dtype().size();
            let range = spec.offset * size..(spec.offset + spec.len) * size;
            let (role, values) = (self.layout.tensor_of(id).role, &values[spec.tensor].bytes()[range]);
            Chunk { id, role, values: values.to_vec().into() }
        };
        members.map(chunk).collect()
    }

    pub(crate) fn push_initial(&self, partition: PartitionId) -> Push {
        let chunks = self.chunks(partition, &self.initial());
        Push { address: self.address(partition), target: Target::Initial, wire: WireType::F32, chunks }
    }

    pub(crate) fn push(&self, partition: PartitionId, step: Step, node: Node) -> Push {
        let chunks = self.chunks(partition, &self.sum(step, node));
        Push {
            address: self.address(partition),
            target: self.target(step, node),
            wire: self.spec.exchange.dtype,
            chunks,
        }
    }

    pub(crate) fn push_step(&self, partition: PartitionId, step: Step) -> Push {
        self.push(partition, step, Node::root(self.plan.of(step)))
    }

    pub(crate) fn target(&self, step: Step, node: Node) -> Target {
        let samples = self.plan.samples_below(step, node);
        Target::Node { node: StepNode { step, node, of: self.plan.of(step) }, samples }
    }

    pub(crate) const fn pull(&self, partition: PartitionId, want: Want) -> Pull {
        Pull {
            address: self.address(partition),
            want,
            wait: Duration::ZERO,
            wire: WireType::F32,
            on_device: false,
        }
    }

    /// Asserts that a pull brought these bits.
    pub(crate) fn assert_pulled(&self, partition: PartitionId, pulled: &Pulled, values: &[Values]) {
        let expected = self.chunks(partition, values);
        assert_eq!(pulled.chunks.len(), expected.len());
        for (found, expected) in pulled.chunks.iter().zip(&expected) {
            assert_eq!(found.id, expected.id);
            assert!(
                found.values.host() == expected.values.host(),
                "chunk {} of version {}",
                found.id,
                pulled.version
            );
        }
    }

    /// Version 0 of all tensors.
    pub(crate) fn initial(&self) -> Vec<Values> {
        let mut values = self.values(u64::MAX);
        for (tensor, values) in self.layout.tensors().iter().zip(&mut values) {
            if tensor.role == TensorRole::LossScale {
                *values = Values::I64(LossScale::FIRST.elements().to_vec());
            }
        }
        values
    }

    /// Returns what one microbatch brings: values whose sum depends on the order of the additions.
    fn leaf(&self, step: Step, index: u32) -> Vec<Values> {
        let mut values = self.values(step.get() * 1000 + u64::from(index));
        if index == 1 && self.overflows.contains(&step.get()) {
            let mut parameters = self.layout.tensors().iter().zip(&mut values);
            let parameter = parameters.rfind(|(tensor, _)| tensor.role == TensorRole::Parameter);
            let (_, values) = parameter.expect("a parameter");
            values.as_f32_mut().expect("floats")[1] = f32::INFINITY;
        }
        values
    }

    /// Returns what a node brings: the tree as a recursion.
    pub(crate) fn sum(&self, step: Step, node: Node) -> Vec<Values> {
        let of = self.plan.of(step);
        let mut values = match node.children() {
            None => self.leaf(step, node.begin),
            Some((left, right)) => {
                let mut sum = self.sum(step, left);
                sum.iter_mut().zip(&self.sum(step, right)).for_each(|(left, right)| left.merge(right));
                sum
            }
        };
        if of == 1 || node != Node::root(of) {
            self.round(&mut values);
        }
        values
    }

    /// Rounds the parameters to what the job exchanges.
    pub(crate) fn round(&self, values: &mut [Values]) {
        let parameters = self
            .layout
            .tensors()
            .iter()
            .zip(values)
            .filter(|(tensor, _)| tensor.role == TensorRole::Parameter);
        for (_, values) in parameters {
            cast::round(self.spec.exchange.dtype, values.as_f32_mut().expect("floats"));
        }
    }

    /// Returns the weights of every version up to `last`, computed on whole tensors, one step after
    /// the other.
    pub(crate) fn reference(&self, last: Version) -> Vec<Vec<Values>> {
        self.reference_of((0..last.get()).map(Step))
    }

    /// Computes the weights of every version when the steps are applied in the given order.
    pub(crate) fn reference_of(&self, steps: impl Iterator<Item = Step>) -> Vec<Vec<Values>> {
        let tensors = self.layout.tensors();
        let optimizers =
            Optimizers::new(&self.spec.optimizer, tensors, self.plan.steps()).expect("a valid optimizer");
        let slots = |(index, tensor): (usize, &TensorSpec)| {
            let slot = |slot| vec![optimizers.of(index).slot_initial(slot); tensor.len()];
            (0..optimizers.slots()).map(slot).collect::<Vec<_>>()
        };
        let mut slots: Vec<_> = tensors.iter().enumerate().map(slots).collect();
        let mut versions = vec![self.initial()];
        let mut overflows = 0;
        for (version, step) in steps.enumerate() {
            let of = self.plan.of(step);
            let sum = self.sum(step, Node::root(of));
            let scale = 1.0 / self.plan.samples_of(step) as f32;
            let weights = versions.last().expect("version 0").clone();
            let updates = optimizers.prepare(version as u64, overflows, scale);
            if self.overflows.contains(&step.get()) {
                overflows += 1;
                versions.push(self.overflowed(&weights, &sum));
                continue;
            }
            let updates = self.updates(&updates, &weights, &sum, &slots);
            let next = |(index, tensor): (usize, &TensorSpec)| {
                let mut next = tensor.zeros();
                match (tensor.role, &mut next, &sum[index], &weights[index]) {
                    (TensorRole::Parameter, Values::F32(next), Values::F32(sum), Values::F32(weights)) => {
                        cpu::apply(&updates[index], weights, sum, &mut slots[index], next);
                    }
                    (TensorRole::State, Values::F32(next), Values::F32(sum), _) => {
                        state::mean(bytemuck::cast_slice(sum), of.into(), next);
                    }
                    (TensorRole::Register, next, sum, weights) => {
                        *next = weights.clone();
                        next.merge(sum);
                    }
                    (TensorRole::LossScale, next, _, weights) => *next = scaled(weights, false),
                    (_, next, sum, _) => *next = sum.clone(),
                }
                next
            };
            let next = self.layout.tensors().iter().enumerate().map(next).collect();
            versions.push(next);
        }
        versions
    }

    /// Returns the values after a step that overflowed.
    fn overflowed(&self, weights: &[Values], sum: &[Values]) -> Vec<Values> {
        let tensors = self.layout.tensors().iter().zip(weights).zip(sum);
        let next = |((tensor, weights), sum): ((&TensorSpec, &Values), &Values)| match tensor.role {
            TensorRole::LossScale => scaled(weights, true),
            TensorRole::Register => {
                let mut next = weights.clone();
                next.merge(sum);
                next
            }
            _ => weights.clone(),
        };
        tensors.map(next).collect()
    }

    /// Returns the update of each tensor, with the norms that it needs over the whole model.
    fn updates(
        &self,
        updates: &Updates,
        weights: &[Values],
        sum: &[Values],
        slots: &[Vec<Vec<f32>>],
    ) -> Vec<Update> {
        if !updates.needs_norms() {
            return (0..weights.len()).map(|tensor| *updates.of(tensor)).collect();
        }
        let whole = Layout::new(self.layout.tensors().to_vec(), 1).expect("a model");
        let chunks = (0..).map(ChunkId).zip(whole.chunks());
        let measure = |(id, chunk): (ChunkId, &ChunkSpec)| {
            let range = chunk.offset..chunk.offset + chunk.len;
            let (weights, sum) = (weights[chunk.tensor].as_f32()?, sum[chunk.tensor].as_f32()?);
            let slots: Vec<_> = slots[chunk.tensor].iter().map(|slot| &slot[range.clone()]).collect();
            let update = updates.of(chunk.tensor);
            let squares =
                cpu::measure(update, &weights[range.clone()], bytemuck::cast_slice(&sum[range]), &slots);
            (whole.tensor_of(id).role == TensorRole::Parameter).then_some((id, squares))
        };
        let squares: Vec<_> = chunks.filter_map(measure).collect();
        let first_of = |tensor| {
            let of = |chunk: &ChunkSpec| chunk.tensor == tensor;
            ChunkId(whole.chunks().iter().position(of).expect("every tensor has a chunk") as u32)
        };
        let tensors: Vec<_> = (0..weights.len()).map(first_of).collect();
        updates.with_norms(&whole, &squares, &tensors)
    }

    fn values(&self, seed: u64) -> Vec<Values> {
        let float = |bits: u64| {
            let scale = [1e-3, 1.0, 50.0][(bits % 3) as usize];
            ((bits >> 11) as f64 / (1u64 << 53) as f64 - 0.5) as f32 * scale
        };
        let tensors = self.layout.tensors().iter().zip(0..);
        let values = tensors.map(|(tensor, position)| {
            let mut random = Keyed::new(seed, "values", position);
            let mut number = || random.next_u64();
            match tensor.dtype() {
                DType::F32 => Values::F32((0..tensor.len()).map(|_| float(number())).collect()),
                DType::I64 => Values::I64((0..tensor.len()).map(|_| (number() >> 40) as i64).collect()),
            }
        });
        values.collect()
    }
}

/// Returns the loss scale after a step.
fn scaled(scale: &Values, overflowed: bool) -> Values {
    let Values::I64(elements) = scale else { panic!("integers") };
    let scale = LossScale::read(elements).expect("a loss scale");
    Values::I64(scale.after(overflowed).elements().to_vec())
}

/// Covers of `0..of` by nodes of any size, shuffled; each alone would complete the step.
pub(crate) fn covers(of: u32) -> impl Strategy<Value = Vec<Node>> {
    let cuts = proptest::collection::vec(1..of.max(2), 0..4);
    proptest::collection::vec(cuts, 1..3).prop_flat_map(move |covers| {
        let nodes = covers.into_iter().flat_map(move |mut cuts| {
            cuts.retain(|&cut| cut < of);
            cuts.extend([0, of]);
            cuts.sort_unstable();
            cuts.windows(2).flat_map(|pair| cover(pair[0], pair[1], of)).collect::<Vec<_>>()
        });
        Just(nodes.collect::<Vec<_>>()).prop_shuffle()
    })
}

/// Options for tests: nothing depends on the machine.
pub(crate) fn options() -> Options {
    Options { threads: 2, ..Options::default() }
}

/// Creates a ps on the device that this program tests.
pub(crate) fn ps(options: Options) -> ps::Result<Ps> {
    ps_with(options, Stores::default())
}

/// Creates a ps on the device that this program tests, whose checkpoints lie in these stores.
pub(crate) fn ps_with(options: Options, stores: Stores) -> ps::Result<Ps> {
    Ps::on(crate::device(), options, stores, None)
}

/// Returns a ps that holds all partitions of a job, empty.
pub(crate) fn opened(job: &Job, options: Options) -> Ps {
    let ps = ps(options).expect("valid options");
    for partition in job.partitions() {
        assert_eq!(ps.open(job.opening(partition)).expect("a valid opening"), None);
    }
    ps
}

/// Waits until a condition holds; the test fails when it never does.
pub(crate) async fn until(what: &str, holds: impl Fn() -> bool) {
    let waiting = async {
        while !holds() {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(PATIENCE, waiting).await.unwrap_or_else(|_| panic!("never: {what}"));
}

/// Returns what a future gives; the test fails when it takes too long.
pub(crate) async fn soon<T>(future: impl Future<Output = T>) -> T {
    tokio::time::timeout(PATIENCE, future).await.expect("an answer in time")
}
