//! The model that records what was done to it.
//!
//! `counts[i]` is the counting oracle: each record i adds exactly 1 to it (gradient -1, and the
//! learning rate cancels the division by the records of the step). So the final weights *are* the
//! numbers of times that each record was applied. `bits` is a chain of floating-point operations
//! that depends on the order of every sum and on the weights from which each gradient was computed.
//! `running` and `seen` are no parameters: a step makes them the mean and the maximum of the
//! microbatches' reports, as in BatchNorm. With a loss scale, half of the microbatches overflow as
//! long as the scale is above 2^14.

use ebbflow::data::Batch;
use ebbflow::model::{Evaluation, Gradients, Model, Registry};
use ebbflow::tensor::{TensorSpec, Values};
use proto::loss_scale::LossScale;
use serde::Deserialize;

/// Values of the tensor `bits` in a small model.
pub(crate) const BITS: usize = 7;

/// Values of the tensor `running`.
pub(crate) const RUNNING: usize = 3;

/// The largest loss scale with which no gradient overflows.
const LARGEST: f32 = 16384.0;

/// Numerics classes, each of which computes other last bits.
pub(crate) const CLASSES: [&str; 2] = ["usual", "other"];

pub(crate) struct Oracle {
    records: usize,
    bits: usize,
    /// Numerics class, which decides the last bits of the gradients.
    class: String,
    /// Whether it has a loss scale.
    scaled: bool,
    weights: Vec<Values>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Options {
    /// Records of the training data.
    records: usize,
    #[serde(default = "few")]
    bits: usize,
    /// Whether the model has a loss scale.
    #[serde(default)]
    scaled: bool,
}

const fn few() -> usize {
    BITS
}

/// Returns Ebbflow's networks and `oracle`, which computes in this numerics class.
pub(crate) fn registry(class: &str) -> Registry {
    let class = class.to_owned();
    Registry::default().with("oracle", move |context| {
        let options: Options = context.options()?;
        Ok(Box::new(Oracle::new(options.records, options.bits, options.scaled, &class)))
    })
}

impl Oracle {
    pub(crate) fn new(records: usize, bits: usize, scaled: bool, class: &str) -> Self {
        Self { records, bits, class: class.to_owned(), scaled, weights: Vec::new() }
    }

    /// Returns the factor of the loss.
    fn factor(&self) -> f32 {
        let scale = self.weights.get(4).map(|values| match values {
            Values::I64(elements) => LossScale::read(elements).and_then(LossScale::factor),
            _ => None,
        });
        scale.map_or(1.0, |factor| factor.expect("a loss scale"))
    }
}

impl Model for Oracle {
    fn tensors(&self) -> Vec<TensorSpec> {
        let mut tensors = vec![
            TensorSpec::parameter("counts", [self.records]),
            TensorSpec::parameter("bits", [self.bits]),
            TensorSpec::state("running", [RUNNING]),
            TensorSpec::counter("seen", [1]),
        ];
        tensors.extend(self.scaled.then(LossScale::tensor));
        tensors
    }

    fn initial(&mut self, seed: u64) -> ebbflow::Result<Vec<Values>> {
        let mut keyed = ebbflow::random::Keyed::new(seed, "init/bits", 0);
        let bits = (0..self.bits).map(|_| keyed.uniform(-1.0, 1.0)).collect();
        let (counts, running) = (vec![0.0; self.records], vec![0.0; RUNNING]);
        let mut values =
            vec![Values::F32(counts), Values::F32(bits), Values::F32(running), Values::I64(vec![0])];
        values.extend(self.scaled.then(|| Values::I64(LossScale::FIRST.elements().to_vec())));
        Ok(values)
    }

    fn load(&mut self, weights: &[Values]) -> ebbflow::Result<()> {
        self.weights = weights.to_vec();
        Ok(())
    }

    fn gradients(&mut self, batch: &Batch, key: u64) -> ebbflow::Result<Gradients> {
        let mut counts = vec![0.0f32; self.records];
        let mut bits = vec![0.0f32; self.bits];
        let step = if self.class == CLASSES[0] { 1e-3 } else { 1.000_1e-3 };
        let weights = self.weights[1].as_f32().expect("bits are floats");
        for &record in &batch.records {
            counts[record as usize] -= 1.0;
            let (few, many) = bits.split_at_mut(BITS);
            for (j, (gradient, weight)) in few.iter_mut().zip(weights).enumerate() {
                *gradient +=
                    step * ((record as f32 + 0.3 * j as f32) * 0.7 + weight * 3.1 + (key % 97) as f32).sin();
            }
            // A sine for each of so many values would take too long.
            for (j, (gradient, weight)) in many.iter_mut().zip(&weights[BITS..]).enumerate() {
                *gradient += step * (few[j % BITS] + weight * 0.1);
            }
        }
        if self.factor() > LARGEST && key.is_multiple_of(2) {
            bits[0] = f32::INFINITY;
        }
        let running = self.weights[2].as_f32().expect("floats").iter().zip(0..);
        let running = running
            .map(|(value, j)| 0.9 * value + 0.1 * (batch.records[0] as f32 + j as f32).sin())
            .collect();
        let Values::I64(seen) = &self.weights[3] else { panic!("a counter") };
        let mut values = vec![
            // One for each record, in a step of equal microbatches: the trainer multiplies by n,
            // the optimizer divides by the step's records.
            Values::F32(counts),
            Values::F32(bits),
            Values::F32(running),
            Values::I64(vec![seen[0] + 1]),
        ];
        values.extend(self.weights.get(4).cloned());
        Ok(Gradients { loss: weights[0].abs(), values })
    }

    fn evaluate(&mut self, batch: &Batch) -> ebbflow::Result<Evaluation> {
        let loss = f64::from(self.weights[1].as_f32().expect("bits are floats")[0]);
        Ok(Evaluation {
            samples: batch.samples as u64,
            loss_sum: loss * batch.samples as f64,
            ..Evaluation::default()
        })
    }
}
