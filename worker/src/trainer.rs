//! Turns the weights of a step into nodes to push: pull -> gradients -> reduce adjacent nodes ->
//! push.
//!
//! The unit is a *piece*: the microbatches of a lease that belong to one step. Leaves are reduced
//! on a stack along the canonical tree as they are computed. A node is pushed as soon as its parent
//! reaches beyond the piece.
//!
//! A job that exchanges a 16-bit type rounds every node to it, and leaves the sum of a whole step
//! to the ps. So that sum is the same wherever the nodes were made.

use std::ops::Range;
use std::sync::Arc;

use data::Batch;
use kernels::values;
use model::weights::Weights;
use model::{Evaluation, Gradients, Model};
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
use crate::job::Job;
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
    stack: Vec<(Node, u64, Vec<Values>)>,
}

/// The sum of the gradients below one node of the reduction tree.
pub(crate) struct Sum {
    pub(crate) node: StepNode,
    /// Number of records in the sum.
    pub(crate) samples: u64,
    /// Values of each of the model's tensors.
    pub(crate) values: Vec<Values>,
}

impl Piece {
    pub(crate) fn new(job: &Job, step: Step, indices: Range<u32>) -> Result<Self> {
        let tensors = job.placed()?.layout.tensors().into();
        let (of, wire) = (job.plan.of(step), job.spec.exchange.dtype);
        Ok(Self { step, of, indices, wire, tensors, stack: Vec::new() })
    }

    /// Computes one microbatch on the model's thread and reduces it with the nodes on the stack. A
    /// microbatch without good records has no gradient, and leaves the state as it was.
    pub(crate) async fn add(
        self,
        job: &Job,
        weights: &Weights,
        microbatch: Microbatch,
        batch: Batch,
        progress: &Progress,
    ) -> Result<(Self, pb::MicrobatchReport)> {
        let key = random::microbatch_key(job.spec.seed, microbatch.id);
        let (weights, place, warning) = (weights.clone(), progress.clone(), job.warning());
        job.compute
            .call(move |loaded| {
                let _place = place;
                let (mut piece, samples) = (self, batch.samples as u64);
                let skipped = microbatch.samples().saturating_sub(samples);
                if samples == 0 {
                    let nothing = nothing(&piece.tensors, &weights);
                    piece.reduce(microbatch.leaf(), 0, nothing);
                    return Ok((piece, pb::MicrobatchReport { loss_sum: 0.0, samples, skipped }));
                }
                // A loop that drives the model keeps the values without a copy of its own.
                let batch = batch.shared();
                let gradients = loaded.gradients(&weights, &microbatch, &batch, key)?;
                if !gradients.loss.is_finite() {
                    return Err(Error::Diverged {
                        step: microbatch.step.get(),
                        microbatch: microbatch.id.get(),
                        loss: gradients.loss,
                        warning,
                    });
                }
                let loss_sum = f64::from(gradients.loss) * samples as f64;
                piece.reduce(microbatch.leaf(), samples, checked(&piece.tensors, gradients)?);
                Ok((piece, pb::MicrobatchReport { loss_sum, samples, skipped }))
            })
            .await
    }

    /// Takes the sums that cannot grow any more within this piece, to be pushed. With `all`, it
    /// takes those that could grow too.
    pub(crate) fn take(&mut self, all: bool) -> Vec<Sum> {
        let piece = Node::new(self.indices.start, self.indices.end);
        let grows = |node: Node| {
            let parent = node.parent_and_sibling(self.of).map(|(parent, _)| parent);
            parent.is_some_and(|parent| piece.covers(parent) && self.wire.worker_sums(parent, self.of))
        };
        let (keep, ready): (Vec<_>, Vec<_>) = self.stack.drain(..).partition(|entry| !all && grows(entry.0));
        self.stack = keep;
        let whole = |node| StepNode { step: self.step, node, of: self.of };
        let sum = |(node, samples, values)| Sum { node: whole(node), samples, values };
        ready.into_iter().map(sum).collect()
    }

    fn reduce(&mut self, leaf: Node, samples: u64, mut values: Vec<Values>) {
        for (tensor, values) in self.tensors.iter().zip(&mut values) {
            values::round(self.wire.of(tensor.role), values);
        }
        let mut right = (leaf, samples, values);
        while let Some((parent, sibling)) = right.0.parent_and_sibling(self.of) {
            if !self.wire.worker_sums(parent, self.of) {
                break;
            }
            let Some(left) = self.stack.pop_if(|left| left.0 == sibling && sibling.begin < right.0.begin)
            else {
                break;
            };
            let (_, left_samples, mut sum) = left;
            for ((left, right), tensor) in sum.iter_mut().zip(&right.2).zip(&*self.tensors) {
                values::merge(tensor.role, self.wire, left, right);
            }
            right = (parent, left_samples + right.1, sum);
        }
        self.stack.push(right);
    }
}

/// Returns what a microbatch without records adds to its step: no gradient, and the state from
/// which it would have been computed.
fn nothing(tensors: &[TensorSpec], weights: &[Values]) -> Vec<Values> {
    let nothing = |(tensor, values): (&TensorSpec, &Values)| match tensor.role {
        TensorRole::Parameter => tensor.zeros(),
        TensorRole::State | TensorRole::Counter | TensorRole::Register => values.clone(),
    };
    tensors.iter().zip(weights).map(nothing).collect()
}

/// Returns the gradients if they fit the job's tensors.
fn checked(tensors: &[TensorSpec], gradients: Gradients) -> Result<Vec<Values>> {
    let fits = gradients.values.len() == tensors.len()
        && tensors
            .iter()
            .zip(&gradients.values)
            .all(|(tensor, values)| values.dtype() == tensor.dtype() && values.len() == tensor.len());
    if !fits {
        return Err(Error::Task {
            what: "gradients".to_owned(),
            reason: "their number, types or lengths differ from the model's tensors; the model must return one for each, in order"
                .to_owned(),
        });
    }
    Ok(gradients.values)
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
    use kernels::cpu::cast;
    use proptest::prelude::*;

    use super::*;

    fn piece(of: u32, indices: Range<u32>, wire: WireType) -> Piece {
        let tensors = [TensorSpec::parameter("w", [1]), TensorSpec::counter("n", [1])].into();
        Piece { step: Step(3), of, indices, wire, tensors, stack: Vec::new() }
    }

    proptest! {
        #[test]
        fn a_piece_pushes_exactly_its_cover(of in 1u32..40, a in 0u32..40, b in 0u32..40) {
            let (begin, end) = (a.min(b).min(of - 1), (a.max(b) + 1).min(of));
            let mut piece = piece(of, begin..end, WireType::F32);
            let mut pushed = Vec::new();
            for index in begin..end {
                let values = vec![Values::F32(vec![index as f32]), Values::I64(vec![i64::from(index)])];
                piece.reduce(Node::leaf(index), 2, values);
                pushed.extend(piece.take(false));
            }
            prop_assert!(piece.stack.is_empty());
            let nodes: Vec<Node> = pushed.iter().map(|sum| sum.node.node).collect();
            prop_assert_eq!(&nodes, &proto::tree::cover(begin, end, of));
            for (node, Sum { samples, values, .. }) in nodes.iter().zip(&pushed) {
                let sum: u32 = (node.begin..node.end).sum();
                let counter = Values::I64(vec![i64::from(node.end) - 1]);
                prop_assert_eq!(values, &vec![Values::F32(vec![sum as f32]), counter]);
                prop_assert_eq!(*samples, u64::from(2 * node.len()));
            }
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
                        let values = vec![Values::F32(vec![values[index as usize]]), Values::I64(vec![i64::from(index)])];
                        piece.reduce(Node::leaf(index), 2, values);
                        pushed.extend(piece.take(false));
                    }
                    assert!(piece.stack.is_empty());
                    let node = |sum: Sum| (sum.node.node, sum.values[0].as_f32().unwrap()[0]);
                    pushed.into_iter().map(node).collect::<Vec<_>>()
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

    #[test]
    fn gradients_of_another_model_are_refused() {
        let tensors = [TensorSpec::parameter("w", [2])];
        let gradients = Gradients { loss: 0.0, values: vec![Values::F32(vec![1.0])] };
        assert!(checked(&tensors, gradients).unwrap_err().to_string().contains("gradients"));
        let gradients = Gradients { loss: 0.0, values: vec![Values::F32(vec![1.0, -0.5])] };
        assert_eq!(checked(&tensors, gradients).unwrap(), [Values::F32(vec![1.0, -0.5])]);
    }
}
