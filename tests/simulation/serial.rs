//! The serial reference: the same job as a loop without a cluster. Canonical runs must end with its
//! bits.

use std::cell::Cell;
use std::collections::BTreeSet;

use ebbflow::data::{Batch, Dataset};
use ebbflow::model::{Model, OwnMemory};
use ebbflow::random;
use ebbflow::spec::JobSpec;
use ebbflow::tensor::{TensorRole, TensorSpec, Values};
use kernels::{Optimizers, Update, Updates, cpu};
use proto::ids::{ChunkId, MicrobatchId, Step};
use proto::loss_scale::LossScale;
use proto::placement::Layout;
use proto::tree::Node;

use crate::model::Oracle;
use crate::plan::Plan;

/// Returns every version of the weights of a canonical job with the oracle model, as workers of a
/// numerics class compute it.
pub(crate) fn train(spec: &JobSpec, data: &Dataset, plan_of: &Plan, class: &str) -> Vec<Vec<Values>> {
    let plan = spec.plan(data.len());
    let delay = spec.consistency.resolve().delay.expect("canonical modes have a delay") as u64;
    let scaled = spec.model.options.get("scaled") == Some(&serde_json::Value::Bool(true));
    let mut model = Oracle::new(plan_of.records as usize, plan_of.bits(), scaled, class);
    let optimizers =
        Optimizers::new(&spec.optimizer, &model.tensors(), plan.steps()).expect("a valid optimizer");
    let mut versions = vec![model.initial(spec.seed).expect("initial values")];
    let slots = |(tensor, values): (usize, &Values)| {
        let slot = |slot| vec![optimizers.of(tensor).slot_initial(slot); values.len()];
        (0..optimizers.slots()).map(slot).collect()
    };
    let mut overflows = 0;
    let mut slots: Vec<Vec<Vec<f32>>> = versions[0].iter().enumerate().map(slots).collect();
    for step in (0..plan.steps()).map(Step) {
        let mut weights = versions[step.get().saturating_sub(delay) as usize].clone();
        round(spec, &model, &mut weights);
        model.load(&weights).expect("weights fit");
        let samples = Cell::new(0);
        let leaf = |model: &mut Oracle, index: u32| {
            let id = MicrobatchId(plan.first_of(step).get() + u64::from(index));
            let microbatch = plan.microbatch(id);
            let order = spec.order(&data.shards(), microbatch.epoch);
            let records = order.records(microbatch.positions.0..microbatch.positions.1);
            let (batch, _): (Batch, _) =
                data.read(microbatch.epoch, records, &BTreeSet::new()).expect("records");
            samples.set(samples.get() + batch.samples);
            if batch.samples == 0 {
                return nothing(model, &weights);
            }
            let key = random::microbatch_key(spec.seed, id);
            model.weighted_gradients(&batch, key, &OwnMemory).expect("gradients").values
        };
        let sum = reduce(spec, &mut model, Node::root(plan.of(step)), plan.of(step), &leaf);
        let current = versions.last().expect("version 0");
        if samples.get() == 0 {
            let next = current.clone();
            versions.push(next);
            continue;
        }
        let scale = 1.0 / samples.get() as f32;
        let updates = optimizers.prepare(step.get(), overflows, scale);
        let overflowed = scaled && !floats(&sum[..2]).all(f32::is_finite);
        let next_scale = |scale: &Values| {
            let Values::I64(elements) = scale else { panic!("integers") };
            let scale = LossScale::read(elements).expect("a loss scale").after(overflowed);
            Values::I64(scale.elements().to_vec())
        };
        if overflowed {
            overflows += 1;
            let mut next = current.clone();
            next[4] = next_scale(&next[4]);
            versions.push(next);
            continue;
        }
        let updates = with_norms(&model, &updates, current, &sum, &slots);
        let tensors = model.tensors();
        let next = (0..tensors.len()).map(|at| match tensors[at].role {
            TensorRole::Parameter => {
                let mut next = vec![0.0; current[at].len()];
                let (weights, gradient) = (current[at].as_f32().unwrap(), sum[at].as_f32().unwrap());
                cpu::apply(&updates[at], weights, gradient, &mut slots[at], &mut next);
                Values::F32(next)
            }
            TensorRole::State => {
                let mut next = vec![0.0; current[at].len()];
                cpu::state::mean(sum[at].bytes(), plan.of(step).into(), &mut next);
                Values::F32(next)
            }
            TensorRole::Counter => sum[at].clone(),
            TensorRole::Register => {
                let mut next = current[at].clone();
                next.merge(&sum[at]);
                next
            }
            TensorRole::LossScale => next_scale(&current[at]),
        });
        let next = next.collect();
        versions.push(next);
    }
    versions
}

/// Returns the floats of tensors.
fn floats(values: &[Values]) -> impl Iterator<Item = f32> {
    values.iter().flat_map(|values| values.as_f32().expect("floats").iter().copied())
}

/// Returns what a microbatch without good records adds to its step.
fn nothing(model: &Oracle, weights: &[Values]) -> Vec<Values> {
    let nothing = |(tensor, values): (&TensorSpec, &Values)| match tensor.role {
        TensorRole::Parameter => tensor.zeros(),
        TensorRole::State | TensorRole::Counter | TensorRole::Register | TensorRole::LossScale => {
            values.clone()
        }
    };
    model.tensors().iter().zip(weights).map(nothing).collect()
}

/// Updates each parameter, with the norms over the whole model if it needs them. In that case every
/// tensor is one chunk, and parameters come first.
fn with_norms(
    model: &Oracle,
    updates: &Updates,
    weights: &[Values],
    sum: &[Values],
    slots: &[Vec<Vec<f32>>],
) -> Vec<Update> {
    let parameters = model.tensors().iter().filter(|tensor| tensor.role == TensorRole::Parameter).count();
    if !updates.needs_norms() {
        return (0..parameters).map(|tensor| *updates.of(tensor)).collect();
    }
    let layout = Layout::new(model.tensors(), 1).expect("a model");
    let chunks: Vec<_> = (0..parameters as u32).map(ChunkId).collect();
    let measure = |&chunk: &ChunkId| {
        let at = chunk.0 as usize;
        let slots: Vec<&[f32]> = slots[at].iter().map(Vec::as_slice).collect();
        (chunk, cpu::measure(updates.of(at), weights[at].as_f32().unwrap(), sum[at].bytes(), &slots))
    };
    let squares: Vec<_> = chunks.iter().map(measure).collect();
    updates.with_norms(&layout, &squares, &chunks)
}

fn reduce(
    spec: &JobSpec,
    model: &mut Oracle,
    node: Node,
    of: u32,
    leaf: &impl Fn(&mut Oracle, u32) -> Vec<Values>,
) -> Vec<Values> {
    let mut values = match node.children() {
        None => leaf(model, node.begin),
        Some((left, right)) => {
            let (mut sum, right) =
                (reduce(spec, model, left, of, leaf), reduce(spec, model, right, of, leaf));
            sum.iter_mut().zip(&right).for_each(|(left, right)| left.merge(right));
            sum
        }
    };
    // The sum of a whole step goes into the update and does not travel.
    if of == 1 || node != Node::root(of) {
        round(spec, model, &mut values);
    }
    values
}

/// Rounds parameters to the type that the job exchanges.
fn round(spec: &JobSpec, model: &Oracle, values: &mut [Values]) {
    for (tensor, values) in model.tensors().iter().zip(values) {
        if let Some(values) = values.as_f32_mut() {
            cpu::cast::round(spec.exchange.dtype.of(tensor.role), values);
        }
    }
}
