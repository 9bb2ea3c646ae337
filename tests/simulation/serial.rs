//! The serial reference: the same job as a loop, with no cluster in sight. Canonical runs must end with its bits.

use ebbflow::data::{Batch, Dataset};
use ebbflow::model::Model;
use ebbflow::random;
use ebbflow::spec::{JobSpec, Shuffle};
use ebbflow::tensor::Values;
use proto::ids::{ChunkId, MicrobatchId, Step};
use proto::placement::Layout;
use proto::plan::RecordOrder;
use proto::tree::Node;
use ps::optim::Update;

use crate::model::Oracle;

/// Every version of the weights of a canonical job with the oracle model.
pub(crate) fn train(spec: &JobSpec, data: &Dataset, records: u64) -> Vec<Vec<Values>> {
    let plan = spec.plan(data.len());
    let delay = spec.consistency.resolve().delay.expect("canonical modes have a delay") as u64;
    let optimizer = ps::optim::Optimizer::new(&spec.optimizer, plan.steps()).expect("a valid optimizer");
    let mut model = Oracle::new(records as usize);
    let mut versions = vec![model.initial(spec.seed).expect("initial values")];
    for step in (0..plan.steps()).map(Step) {
        let mut weights = versions[step.get().saturating_sub(delay) as usize].clone();
        round(spec, &mut weights);
        model.load(&weights).expect("weights fit");
        let leaf = |model: &mut Oracle, index: u32| {
            let id = MicrobatchId(plan.first_of(step).get() + u64::from(index));
            let microbatch = plan.microbatch(id);
            let shuffle = spec.data.shuffle == Shuffle::Records;
            let order = RecordOrder::new(plan.records, spec.seed, microbatch.epoch, shuffle);
            let records = (microbatch.positions.0..microbatch.positions.1).map(|at| order.record(at));
            let batch: Batch = data.batch(records).expect("records");
            let key = random::key(spec.seed, "dropout", id.get());
            let mut values = model.gradients(&batch, key).expect("gradients").values;
            for values in &mut values {
                values.as_f32_mut().unwrap().iter_mut().for_each(|value| *value *= batch.samples as f32);
            }
            values
        };
        let sum = reduce(spec, &mut model, Node::root(plan.of(step)), plan.of(step), &leaf);
        let scale = 1.0 / plan.samples_of(step) as f32;
        let current = versions.last().expect("version 0");
        let update = with_norms(&model, optimizer.prepare(step.get(), scale), current, &sum);
        let next = current.iter().zip(&sum).map(|(weights, gradient)| {
            let mut next = vec![0.0; weights.len()];
            let none: &mut [Vec<f32>] = &mut [];
            update.apply(weights.as_f32().unwrap(), gradient.as_f32().unwrap(), none, &mut next);
            Values::F32(next)
        });
        let next = next.collect();
        versions.push(next);
    }
    versions
}

/// The update with the norm of the whole gradient, when it needs that. Every tensor is one chunk.
fn with_norms(model: &Oracle, update: Update, weights: &[Values], sum: &[Values]) -> Update {
    if !update.needs_norms() {
        return update;
    }
    let layout = Layout::new(model.tensors(), 1).expect("a model");
    let measure =
        |(weights, sum): (&Values, &Values)| update.measure(weights.as_f32().unwrap(), sum.bytes(), &[]);
    let squares: Vec<_> = (0..).map(ChunkId).zip(weights.iter().zip(sum).map(measure)).collect();
    update.with_norms(&layout, &squares, &[ChunkId(0)])[0]
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
    // The sum of a whole step is what the update takes, not what travels.
    if of == 1 || node != Node::root(of) {
        round(spec, &mut values);
    }
    values
}

/// To the type that the job exchanges; the model has parameters only.
fn round(spec: &JobSpec, values: &mut [Values]) {
    values.iter_mut().for_each(|values| spec.exchange.dtype.round(values.as_f32_mut().unwrap()));
}
