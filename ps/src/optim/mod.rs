//! Optimizers: weights of version v, the slots and a summed gradient in; weights of version v + 1 out.
//!
//! One file per kernel, each a free function on slices that makes one pass over memory. Always true here:
//!
//! - Every output element depends on the elements at its own index and on scalars, nothing else. So the result does not
//!   depend on how a tensor is cut into chunks, nor on which thread or ps updates which part.
//! - Weights and gradient are only read; the new weights go to another buffer. A pull or a checkpoint that holds the
//!   old buffer is not disturbed. Only the slots change in place.
//! - Only `+ - * /` and `sqrt` of f32, in the order of PyTorch's single-tensor CPU path, never fused: IEEE 754 rounds
//!   each exactly, so the bits are the same on every CPU (a NaN's payload aside). They are the bits of PyTorch 2.11's
//!   portable kernels with an IEEE square root. Its AVX kernels fuse multiply and add in some lanes; we do not, as that
//!   ties the result to the instruction set and the length. A SIMD kernel has to give the bits of the scalar one.
//! - Scalars (learning rate, bias corrections) are computed in f64 and rounded to f32 once per call, as Python does.
//!
//! A new optimizer: a kind and a rule in `proto::optimizer`, a kernel file here, one line in each `match` below, a case
//! in the golden script.

mod adagrad;
mod adam;
mod momentum;
mod sgd;
pub mod state;
#[cfg(test)]
mod tests;

use proto::optimizer::{InvalidOptimizer, OptimizerSpec, Rule, Schedule};

/// The update rule of one job, with its schedule.
///
/// ```
/// use proto::optimizer::{OptimizerKind, OptimizerSpec};
///
/// let optimizer = ps::optim::Optimizer::new(&OptimizerSpec::new(OptimizerKind::Momentum, 0.5), 10)?;
/// assert_eq!(optimizer.slot_names(), ["momentum_buffer"]);
///
/// // Two samples gave the summed gradient 4: their mean is 2, the step is 0.5 * 2.
/// let (weights, gradient) = (vec![3.0, 3.0], vec![4.0, 0.0]);
/// let mut slots = vec![vec![optimizer.slot_initial(0); 2]];
/// let mut next = vec![0.0; 2];
/// optimizer.update(0, &weights, &gradient, 0.5, &mut slots, &mut next);
/// assert_eq!(next, [2.0, 3.0]);
/// assert_eq!(slots[0], [2.0, 0.0]);
/// # Ok::<(), proto::optimizer::InvalidOptimizer>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Optimizer {
    rule: Rule,
    learning_rate: f64,
    schedule: Schedule,
    total_steps: u64,
}

/// One step's update with all its scalars worked out; made by [`Optimizer::prepare`], applied to any number of slices.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Update(Kernel);

#[derive(Clone, Copy, Debug, PartialEq)]
enum Kernel {
    Sgd(sgd::Sgd),
    Momentum(momentum::Momentum),
    Adam(adam::Adam),
    Adagrad(adagrad::Adagrad),
}

impl Optimizer {
    /// The optimizer of a job that will make `total_steps` updates (the end of a cosine schedule).
    ///
    /// # Errors
    ///
    /// All violations of the specification; see [`OptimizerSpec::validate`].
    pub fn new(spec: &OptimizerSpec, total_steps: u64) -> Result<Self, InvalidOptimizer> {
        let rule = spec.validate()?;
        Ok(Self { rule, learning_rate: spec.learning_rate, schedule: spec.schedule, total_steps })
    }

    /// Number of slots: f32 values of state beside each parameter.
    pub fn slots(&self) -> usize {
        self.slot_names().len()
    }

    /// Names of the slots, in the order of [`update`](Self::update)'s argument: those of PyTorch's
    /// `optimizer.state_dict()`.
    pub const fn slot_names(&self) -> &'static [&'static str] {
        self.rule.slot_names()
    }

    /// What every element of slot number `slot` is before the first step.
    ///
    /// # Panics
    ///
    /// If there is no such slot.
    pub fn slot_initial(&self, slot: usize) -> f32 {
        assert!(slot < self.slots(), "slot {slot} of an optimizer with {} slots", self.slots());
        match self.rule {
            Rule::Adagrad { initial_accumulator_value, .. } => initial_accumulator_value as f32,
            Rule::Sgd { .. } | Rule::Momentum { .. } | Rule::Adam { .. } => 0.0,
        }
    }

    /// The learning rate of `step` (from 0): the base rate times the schedule's factor.
    pub fn learning_rate(&self, step: u64) -> f64 {
        self.learning_rate * self.schedule.factor(step, self.total_steps)
    }

    /// Applies one step to one slice, in one pass over memory.
    ///
    /// `step` is the number of updates that these weights have had (0 for the first one). `gradient` is the sum over
    /// the step's samples and `scale` is one over their number; the product is rounded to f32 before anything else, as
    /// if the mean had been stored. `weights`, `gradient`, each of `slots` and `next` have the same length; what `next`
    /// holds before does not matter.
    ///
    /// # Panics
    ///
    /// If the number of slots or a length is wrong: the caller has checked what came over the network.
    pub fn update<S: AsMut<[f32]>>(
        &self,
        step: u64,
        weights: &[f32],
        gradient: &[f32],
        scale: f32,
        slots: &mut [S],
        next: &mut [f32],
    ) {
        self.prepare(step, scale).apply(weights, gradient, slots, next);
    }

    /// Works out the scalars of one step, for callers with many small slices (the rows of a table).
    pub fn prepare(&self, step: u64, scale: f32) -> Update {
        let learning_rate = self.learning_rate(step);
        Update(match self.rule {
            Rule::Sgd { weight_decay } => Kernel::Sgd(sgd::Sgd {
                scale,
                weight_decay: weight_decay as f32,
                learning_rate: learning_rate as f32,
            }),
            Rule::Momentum { momentum, dampening, nesterov, weight_decay } => {
                Kernel::Momentum(momentum::Momentum {
                    scale,
                    weight_decay: weight_decay as f32,
                    first: step == 0,
                    momentum: momentum as f32,
                    undamped: (1.0 - dampening) as f32,
                    nesterov,
                    learning_rate: learning_rate as f32,
                })
            }
            Rule::Adam { betas, eps, weight_decay, decoupled } => {
                Kernel::Adam(adam::Adam::new(betas, eps, weight_decay, decoupled, learning_rate, step, scale))
            }
            Rule::Adagrad { lr_decay, eps, weight_decay, .. } => Kernel::Adagrad(adagrad::Adagrad {
                scale,
                weight_decay: weight_decay as f32,
                learning_rate: (learning_rate / (1.0 + step as f64 * lr_decay)) as f32,
                eps: eps as f32,
            }),
        })
    }
}

impl Update {
    /// Applies the step to one slice; see [`Optimizer::update`].
    ///
    /// # Panics
    ///
    /// As [`Optimizer::update`].
    pub fn apply<S: AsMut<[f32]>>(
        &self,
        weights: &[f32],
        gradient: &[f32],
        slots: &mut [S],
        next: &mut [f32],
    ) {
        let length = weights.len();
        let check = |what: &str, found: usize| {
            assert_eq!(found, length, "{what} has {found} values, the weights have {length}");
        };
        check("the gradient", gradient.len());
        check("the buffer of the next weights", next.len());
        for (number, slot) in slots.iter_mut().enumerate() {
            check(&format!("slot {number}"), slot.as_mut().len());
        }
        match (&self.0, slots) {
            (Kernel::Sgd(kernel), []) => sgd::update(kernel, weights, gradient, next),
            (Kernel::Momentum(kernel), [buffer]) => {
                momentum::update(kernel, weights, gradient, buffer.as_mut(), next);
            }
            (Kernel::Adam(kernel), [mean, square]) => {
                adam::update(kernel, weights, gradient, mean.as_mut(), square.as_mut(), next);
            }
            (Kernel::Adagrad(kernel), [sum]) => {
                adagrad::update(kernel, weights, gradient, sum.as_mut(), next);
            }
            (kernel, slots) => panic!("{} slots given, which is wrong for {kernel:?}", slots.len()),
        }
    }
}
