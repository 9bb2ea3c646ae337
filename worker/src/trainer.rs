//! Turns the weights of a step into nodes to push: pull -> gradients -> reduce adjacent nodes ->
//! push.
//!
//! The unit is a *piece*: the microbatches of a lease that belong to one step. Leaves are reduced
//! on a stack along the canonical tree as they are computed. A node whose parent reaches beyond the
//! piece is pushed while its last leaf is computed: each tensor as soon as it is made.
//!
//! A job that exchanges a 16-bit type rounds every node to it, and leaves the sum of a whole step
//! to the ps. So that sum is the same wherever the nodes were made.

use std::ops::Range;
use std::sync::Arc;

use data::Batch;
use model::weights::Weights;
use model::{Evaluation, Model};
use proto::convert;
use proto::ids::{Step, Version};
use proto::parameters::Want;
use proto::pb;
use proto::plan::Microbatch;
use proto::random;
use proto::spec::{Consistency, Order};
use proto::tensor::{TensorRole, TensorSpec, Values};
use proto::tree::{Node, StepNode};
use proto::wire::WireType;

use crate::error::{Error, Result};
use crate::exchange::{ComingSum, SumMaker};
use crate::job::Job;
use crate::merging::{Merging, Reduced};
use crate::progress::Progress;
use crate::worst::WorstRecords;

/// Returns the weights from which a step is computed.
pub(crate) fn want(consistency: Consistency, step: Step) -> Want {
    let Consistency { order, delay } = consistency;
    let ago = |steps: u32| Version(step.get().saturating_sub(u64::from(steps)));
    match (order, delay) {
        (Order::Canonical, delay) => Want::Exact(ago(delay.unwrap_or(0))),
        (Order::Arrival, Some(delay)) => Want::AtLeast(ago(delay)),
        (Order::Arrival, None) => Want::AtLeast(Version(0)),
    }
}

/// The computed gradients of a piece.
pub(crate) struct Piece {
    step: Step,
    of: u32,
    indices: Range<u32>,
    wire: WireType,
    tensors: Arc<[TensorSpec]>,
    /// Nodes from left to right. None is the sibling of the next.
    stack: Vec<Reduced>,
}

/// The sum of the gradients below one node of the reduction tree.
pub(crate) struct Sum {
    pub(crate) node: StepNode,
    /// Number of records in the sum.
    pub(crate) samples: u64,
    /// Values of each of the model's tensors.
    pub(crate) values: ComingSum,
}

impl Piece {
    pub(crate) fn new(job: &Job, step: Step, indices: Range<u32>) -> Result<Self> {
        let tensors = job.placed()?.layout.tensors().into();
        let (of, wire) = (job.plan.of(step), job.spec.exchange.dtype);
        Ok(Self { step, of, indices, wire, tensors, stack: Vec::new() })
    }

    /// Begins the sum that a leaf with these records completes. `None`: the sum that it joins can
    /// still grow within this piece.
    pub(crate) fn begin(&self, leaf: Node, samples: u64) -> Option<(SumMaker, Sum)> {
        let (_, node, samples) = self.joined(leaf, samples);
        (!self.grows(node)).then(|| {
            let (maker, values) = ComingSum::new();
            (maker, Sum { node: self.whole(node), samples, values })
        })
    }

    /// Computes one microbatch on the model's thread and reduces it with the nodes on the stack. If
    /// it completes a sum, `maker` tells that. A microbatch without good records has no gradient,
    /// and leaves the state as it was.
    pub(crate) async fn add(
        self,
        job: &Job,
        weights: &Weights,
        microbatch: Microbatch,
        batch: Batch,
        progress: &Progress,
        maker: Option<SumMaker>,
    ) -> Result<(Self, pb::MicrobatchReport)> {
        let key = random::microbatch_key(job.spec.seed, microbatch.id);
        let (weights, place, warning) = (weights.clone(), progress.clone(), job.warning());
        let maker = maker.map(|maker| job.compute.maker(maker, key));
        job.compute
            .call(move |loaded| {
                let _place = place;
                let (mut piece, samples) = (self, batch.samples as u64);
                let skipped = microbatch.samples().saturating_sub(samples);
                let mut merging = piece.merge(microbatch.leaf(), samples, maker);
                if samples == 0 {
                    let nothing = nothing(&piece.tensors, &weights);
                    nothing.into_iter().enumerate().for_each(|(tensor, values)| merging.take(tensor, values));
                    piece.keep(merging.finish()?);
                    return Ok((piece, pb::MicrobatchReport { loss_sum: 0.0, samples, skipped }));
                }
                // A loop that drives the model keeps the values without a copy of its own.
                let batch = batch.shared();
                let mut take = |tensor, values| merging.take(tensor, values);
                let loss = loaded.gradients(&weights, &microbatch, &batch, key, &mut take)?;
                if !loss.is_finite() {
                    return Err(Error::Diverged {
                        step: microbatch.step.get(),
                        microbatch: microbatch.id.get(),
                        loss,
                        warning,
                    });
                }
                let loss_sum = f64::from(loss) * samples as f64;
                piece.keep(merging.finish()?);
                Ok((piece, pb::MicrobatchReport { loss_sum, samples, skipped }))
            })
            .await
    }

    /// Takes the sums that could still grow within this piece, to be pushed as they are.
    pub(crate) fn take(&mut self) -> Vec<Sum> {
        let stack = std::mem::take(&mut self.stack).into_iter();
        let sum = |(node, samples, values)| Sum {
            node: self.whole(node),
            samples,
            values: ComingSum::whole(values),
        };
        stack.map(sum).collect()
    }

    /// Begins to merge a leaf with the nodes of the stack that it joins.
    fn merge(&mut self, leaf: Node, samples: u64, maker: Option<SumMaker>) -> Merging {
        let (count, node, samples) = self.joined(leaf, samples);
        let lefts = self.stack.drain(self.stack.len() - count..).rev();
        let lefts = lefts.map(|(_, _, values)| values.into_iter().map(Some).collect()).collect();
        Merging::new(self.tensors.clone(), self.wire, (node, samples), lefts, maker)
    }

    /// Keeps a sum that can still grow.
    fn keep(&mut self, sum: Option<Reduced>) {
        self.stack.extend(sum);
    }

    /// Returns how many nodes of the stack are merged with a leaf of these records, and the node
    /// and the records of their sum.
    fn joined(&self, leaf: Node, samples: u64) -> (usize, Node, u64) {
        let (mut count, mut node, mut samples) = (0, leaf, samples);
        for (left, records, _) in self.stack.iter().rev() {
            let Some((parent, sibling)) = node.parent_and_sibling(self.of) else { break };
            let is_left = *left == sibling && sibling.begin < node.begin;
            if !is_left || !self.wire.worker_sums(parent, self.of) {
                break;
            }
            (count, node, samples) = (count + 1, parent, samples + records);
        }
        (count, node, samples)
    }

    /// Returns whether the sum of a node can grow within this piece.
    fn grows(&self, node: Node) -> bool {
        let piece = Node::new(self.indices.start, self.indices.end);
        let parent = node.parent_and_sibling(self.of).map(|(parent, _)| parent);
        parent.is_some_and(|parent| piece.covers(parent) && self.wire.worker_sums(parent, self.of))
    }

    fn whole(&self, node: Node) -> StepNode {
        StepNode { step: self.step, node, of: self.of }
    }
}

/// Returns what a microbatch without records adds to its step: no gradient, and the state from
/// which it would have been computed.
fn nothing(tensors: &[TensorSpec], weights: &[Values]) -> Vec<Values> {
    let nothing = |(tensor, values): (&TensorSpec, &Values)| match tensor.role {
        TensorRole::Parameter => tensor.zeros(),
        TensorRole::State | TensorRole::Counter | TensorRole::Register | TensorRole::LossScale => {
            values.clone()
        }
    };
    tensors.iter().zip(weights).map(nothing).collect()
}

/// Evaluates batches with the loaded weights. Sums are in their order. Batches without records
/// count nothing. `worst` takes the losses of the records, if the job lists the worst ones.
pub(crate) fn evaluate(
    model: &mut dyn Model,
    batches: impl Iterator<Item = data::Result<Batch>>,
    mut worst: Option<WorstRecords<'_>>,
) -> Result<pb::Evaluated> {
    let mut total = Evaluation::default();
    for batch in batches {
        let batch = batch?.shared();
        if batch.samples > 0 {
            let found = match &mut worst {
                Some(worst) => worst.evaluate(model, &batch)?,
                None => model.evaluate(&batch)?,
            };
            total.merge(found)?;
        }
    }
    let worst = worst.map(WorstRecords::finish).unwrap_or_default();
    Ok(pb::Evaluated { worst, ..convert::evaluated(total)? })
}

#[cfg(test)]
mod tests {
    use futures::FutureExt as _;
    use kernels::cpu::cast;
    use proptest::prelude::*;

    use super::*;

    fn piece(of: u32, indices: Range<u32>, wire: WireType) -> Piece {
        let tensors = [TensorSpec::parameter("w", [1]), TensorSpec::counter("n", [1])].into();
        Piece { step: Step(3), of, indices, wire, tensors, stack: Vec::new() }
    }

    /// Adds a microbatch of two records, and returns the sum that it completes. Tensors are made
    /// from the last to the first.
    fn add(piece: &mut Piece, index: u32, values: [Values; 2]) -> Option<Made> {
        let (maker, sum) = piece.begin(Node::leaf(index), 2).unzip();
        let mut merging = piece.merge(Node::leaf(index), 2, maker);
        for (tensor, values) in values.into_iter().enumerate().rev() {
            assert!(sum.as_ref().is_none_or(|sum| !sum.values.is_whole()));
            merging.take(tensor, values);
        }
        piece.keep(merging.finish().unwrap());
        sum.map(read)
    }

    /// A whole sum: its node, its records, the value of the parameter, and the counter.
    type Made = (Node, u64, f32, i64);

    fn read(Sum { node, samples, values }: Sum) -> Made {
        let made = values.made().now_or_never().expect("it is there").expect("it is whole");
        let [value, counter] = &*made else { panic!("two tensors") };
        let value = f32::from_le_bytes(*value.host().first_chunk().unwrap());
        (node.node, samples, value, i64::from_le_bytes(*counter.host().first_chunk().unwrap()))
    }

    proptest! {
        #[test]
        fn a_piece_pushes_exactly_its_cover(of in 1u32..40, a in 0u32..40, b in 0u32..40) {
            let (begin, end) = (a.min(b).min(of - 1), (a.max(b) + 1).min(of));
            let mut piece = piece(of, begin..end, WireType::F32);
            let mut pushed = Vec::new();
            for index in begin..end {
                let values = [Values::F32(vec![index as f32]), Values::I64(vec![i64::from(index)])];
                pushed.extend(add(&mut piece, index, values));
            }
            prop_assert!(piece.stack.is_empty());
            let nodes: Vec<Node> = pushed.iter().map(|sum| sum.0).collect();
            prop_assert_eq!(&nodes, &proto::tree::cover(begin, end, of));
            for (node, samples, value, counter) in pushed {
                let sum: u32 = (node.begin..node.end).sum();
                prop_assert_eq!((value, counter), (sum as f32, i64::from(node.end) - 1));
                prop_assert_eq!(samples, u64::from(2 * node.len()));
            }
        }

        /// A worker that leaves in the middle of a piece pushes the rest.
        #[test]
        fn what_can_still_grow_is_pushed_in_the_end(of in 1u32..40, done in 0u32..40) {
            let done = done.min(of);
            let mut piece = piece(of, 0..of, WireType::F32);
            let mut nodes = Vec::new();
            for index in 0..done {
                let values = [Values::F32(vec![1.0]), Values::I64(vec![0])];
                nodes.extend(add(&mut piece, index, values).map(|sum| sum.0));
            }
            nodes.extend(piece.take().into_iter().map(|sum| read(sum).0));
            prop_assert!(piece.stack.is_empty());
            prop_assert_eq!(nodes, if done == 0 { Vec::new() } else { proto::tree::cover(0, done, of) });
        }
    }

    proptest! {
        /// A worker with a whole step pushes its two halves. Any two workers push nodes from which
        /// the ps makes the same two halves.
        #[test]
        fn a_piece_of_a_16_bit_job_pushes_rounded_nodes_below_the_root(
            of in 1u32..40, cut in 0u32..40, values in proptest::collection::vec(-1e4f32..1e4, 40),
        ) {
            for wire in [WireType::Bf16, WireType::F16] {
                let pushed = |indices: Range<u32>| {
                    let mut piece = piece(of, indices.clone(), wire);
                    let mut pushed = Vec::new();
                    for index in indices {
                        let values = [Values::F32(vec![values[index as usize]]), Values::I64(vec![i64::from(index)])];
                        pushed.extend(add(&mut piece, index, values).map(|(node, _, value, _)| (node, value)));
                    }
                    assert!(piece.stack.is_empty());
                    pushed
                };
                let rounded = |value: f32| {
                    let mut value = [value];
                    cast::round(wire, &mut value);
                    value[0]
                };
                let sum = |node: Node, all: &[(Node, f32)]| -> f32 {
                    fn of(node: Node, all: &[(Node, f32)], rounded: &dyn Fn(f32) -> f32) -> f32 {
                        if let Some((_, value)) = all.iter().find(|(pushed, _)| *pushed == node) {
                            return *value;
                        }
                        let (left, right) = node.children().expect("a leaf that nobody pushed");
                        rounded(of(left, all, rounded) + of(right, all, rounded))
                    }
                    of(node, all, &rounded)
                };
                let alone = pushed(0..of);
                let halves = Node::root(of).children();
                let nodes: Vec<_> = alone.iter().map(|(node, _)| *node).collect();
                prop_assert_eq!(nodes, halves.map_or_else(|| vec![Node::root(of)], |(left, right)| vec![left, right]));
                let cut = cut.min(of);
                let both = [pushed(0..cut), pushed(cut..of)].concat();
                for (node, value) in &alone {
                    prop_assert_eq!(value.to_bits(), rounded(*value).to_bits());
                    prop_assert_eq!(sum(*node, &both).to_bits(), value.to_bits());
                }
            }
        }
    }

    #[test]
    fn steps_read_the_versions_that_their_mode_says() {
        let consistency = |order, delay| Consistency { order, delay };
        assert_eq!(want(consistency(Order::Canonical, Some(0)), Step(5)), Want::Exact(Version(5)));
        assert_eq!(want(consistency(Order::Canonical, Some(2)), Step(5)), Want::Exact(Version(3)));
        assert_eq!(want(consistency(Order::Canonical, Some(2)), Step(1)), Want::Exact(Version(0)));
        assert_eq!(want(consistency(Order::Arrival, Some(1)), Step(5)), Want::AtLeast(Version(4)));
        assert_eq!(want(consistency(Order::Arrival, None), Step(5)), Want::AtLeast(Version(0)));
    }

    #[test]
    fn a_microbatch_without_records_has_no_gradient_and_the_state_of_before() {
        let tensors =
            [TensorSpec::parameter("w", [2]), TensorSpec::state("mean", [1]), TensorSpec::counter("n", [1])];
        let weights = [Values::F32(vec![3.0, 4.0]), Values::F32(vec![0.5]), Values::I64(vec![7])];
        let expected = [Values::F32(vec![0.0, 0.0]), Values::F32(vec![0.5]), Values::I64(vec![7])];
        assert_eq!(nothing(&tensors, &weights), expected);
    }
}
