//! Optimizers: weights of version v, the slots and a summed gradient in; weights of version v + 1 out.
//!
//! One file of `cpu/` per kernel, each a free function on slices that makes one pass over memory. Always true here:
//!
//! - Every output element depends on the elements at its own index and on scalars, nothing else. So the result does not
//!   depend on how a tensor is cut into chunks, nor on which thread or ps updates which part.
//! - Weights and gradient are only read; the new weights go to another buffer. A pull or a checkpoint that holds the
//!   old buffer is not disturbed. Only the slots change in place, unless a checkpoint holds them: then they [move](Slot).
//! - Only `+ - * /` and `sqrt` of f32, in the order of PyTorch's single-tensor CPU path, never fused: IEEE 754 rounds
//!   each exactly, so the bits are the same on every CPU (a NaN's payload aside). They are the bits of PyTorch 2.11's
//!   portable kernels with an IEEE square root. Its AVX kernels fuse multiply and add in some lanes; we do not, as that
//!   ties the result to the instruction set and the length.
//! - A kernel is written once, over vectors of any width, and runs with the widest that the machine
//!   has. Its scalar twin is the same function on single floats.
//! - Scalars (learning rate, bias corrections) are computed in f64 and rounded to f32 once per call, as Python does.
//!
//! A new optimizer: a kind, a rule and the names of its slots in `proto::optimizer`, a kernel file in `cpu/`, one line in each
//! `match` below, a case in the golden script.

#[cfg(test)]
mod tests;

use proto::optimizer::{InvalidOptimizer, OptimizerSpec, Rule, Schedule};

use crate::cpu::adadelta::Adadelta;
use crate::cpu::adagrad::Adagrad;
use crate::cpu::adam::{Adam, Amsgrad};
use crate::cpu::dispatch::{Path, Slot, Write, apply};
use crate::cpu::ftrl::Ftrl;
use crate::cpu::lamb::Lamb;
use crate::cpu::mean::Mean;
use crate::cpu::momentum::Momentum;
use crate::cpu::rmsprop::{self, Rmsprop};
use crate::cpu::sgd::Sgd;
use crate::cpu::sum;

/// The update rule of one job, with its schedule.
///
/// ```
/// use proto::optimizer::{OptimizerKind, OptimizerSpec};
///
/// let optimizer = kernels::Optimizer::new(&OptimizerSpec::new(OptimizerKind::Momentum, 0.5), 10)?;
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
    clip_norm: Option<f64>,
    schedule: Schedule,
    total_steps: u64,
}

/// One step's update with all its scalars worked out; made by [`Optimizer::prepare`], applied to any number of slices.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Update {
    pub(crate) rule: Prepared,
    /// What it waits for.
    pub(crate) norms: Norms,
    pub(crate) path: Path,
    pub(crate) write: Write,
}

/// The norms that an update lacks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Norms {
    /// None.
    Complete,
    /// That of the whole gradient, to be clipped at this value.
    Gradient { clip_norm: f64 },
    /// Those of each tensor's weights and of their direction.
    Tensors,
}

/// A kernel with the scalars of one step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Prepared {
    Sgd(Sgd),
    Momentum(Momentum),
    Adam(Adam),
    Amsgrad(Amsgrad),
    Adagrad(Adagrad),
    Rmsprop(Rmsprop),
    RmspropMoving(rmsprop::Moving),
    RmspropCentered(rmsprop::Centered),
    RmspropCenteredMoving(rmsprop::CenteredMoving),
    Adadelta(Adadelta),
    Ftrl(Ftrl),
    Lamb(Lamb),
}

impl Optimizer {
    /// The optimizer of a job that will make `total_steps` updates (the end of a cosine schedule).
    ///
    /// # Errors
    ///
    /// All violations of the specification; see [`OptimizerSpec::validate`].
    pub fn new(spec: &OptimizerSpec, total_steps: u64) -> Result<Self, InvalidOptimizer> {
        let rule = spec.validate()?;
        let OptimizerSpec { learning_rate, clip_norm, schedule, .. } = *spec;
        Ok(Self { rule, learning_rate, clip_norm, schedule, total_steps })
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
        match (self.rule, self.slot_names()[slot]) {
            (Rule::Adagrad { initial_accumulator_value, .. }, _)
            | (Rule::Ftrl { initial_accumulator_value, .. }, "n") => initial_accumulator_value as f32,
            _ => 0.0,
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
    /// If the number of slots or a length is wrong: the caller has checked what came over the network. If the update
    /// [needs norms](Update::needs_norms): one slice does not know them.
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
        let mean = |weight_decay: f64| Mean { scale, clip: 1.0, weight_decay: weight_decay as f32 };
        let rule = match self.rule {
            Rule::Sgd { weight_decay } => {
                Prepared::Sgd(Sgd { mean: mean(weight_decay), learning_rate: learning_rate as f32 })
            }
            Rule::Momentum { momentum, dampening, nesterov, weight_decay } => Prepared::Momentum(Momentum {
                mean: mean(weight_decay),
                first: step == 0,
                momentum: momentum as f32,
                undamped: (1.0 - dampening) as f32,
                nesterov,
                learning_rate: learning_rate as f32,
            }),
            Rule::Adam { betas, eps, weight_decay, decoupled, amsgrad } => {
                let adam = Adam::new(betas, eps, weight_decay, decoupled, learning_rate, step, mean(0.0));
                if amsgrad { Prepared::Amsgrad(Amsgrad(adam)) } else { Prepared::Adam(adam) }
            }
            Rule::Adagrad { lr_decay, eps, weight_decay, .. } => Prepared::Adagrad(Adagrad {
                mean: mean(weight_decay),
                learning_rate: (learning_rate / (1.0 + step as f64 * lr_decay)) as f32,
                eps: eps as f32,
            }),
            Rule::Rmsprop { alpha, eps, weight_decay, momentum, centered } => {
                let rmsprop = Rmsprop {
                    mean: mean(weight_decay),
                    kept: alpha as f32,
                    share: (1.0 - alpha) as f32,
                    eps: eps as f32,
                    momentum: momentum as f32,
                    learning_rate: learning_rate as f32,
                };
                match (momentum > 0.0, centered) {
                    (false, false) => Prepared::Rmsprop(rmsprop),
                    (true, false) => Prepared::RmspropMoving(rmsprop::Moving(rmsprop)),
                    (false, true) => Prepared::RmspropCentered(rmsprop::Centered(rmsprop)),
                    (true, true) => Prepared::RmspropCenteredMoving(rmsprop::CenteredMoving(rmsprop)),
                }
            }
            Rule::Adadelta { rho, eps, weight_decay } => Prepared::Adadelta(Adadelta {
                mean: mean(weight_decay),
                kept: rho as f32,
                share: (1.0 - rho) as f32,
                eps: eps as f32,
                learning_rate: learning_rate as f32,
            }),
            Rule::Ftrl { beta, l1, l2, .. } => Prepared::Ftrl(Ftrl {
                mean: mean(0.0),
                learning_rate: learning_rate as f32,
                beta: beta as f32,
                l1: l1 as f32,
                l2: l2 as f32,
            }),
            Rule::Lamb { betas, eps, weight_decay } => {
                Prepared::Lamb(Lamb::new(betas, eps, weight_decay, learning_rate, step, mean(0.0)))
            }
        };
        let norms = match (rule, self.clip_norm) {
            (Prepared::Lamb(_), _) => Norms::Tensors,
            (_, Some(clip_norm)) => Norms::Gradient { clip_norm },
            (_, None) => Norms::Complete,
        };
        Update { rule, norms, path: Path::widest(), write: Write::Cached }
    }
}

impl Update {
    /// For weights that do not fit into the caches with their slots: the next ones, and slots that move, are written past
    /// them, which saves reading what is overwritten. The bits are the same.
    #[must_use]
    pub const fn past_the_caches(self) -> Self {
        Self { write: Write::Streamed, ..self }
    }

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
        let slots = slots.iter_mut().map(|slot| Slot::InPlace(slot.as_mut())).collect();
        self.apply_bytes(weights, bytemuck::cast_slice(gradient), slots, next);
    }

    /// The same from two gradients as they were received: their sum is made on the way, and nowhere written to memory.
    ///
    /// # Panics
    ///
    /// As [`Optimizer::update`].
    pub fn apply_sum(
        &self,
        weights: &[f32],
        (left, right): (&[u8], &[u8]),
        mut slots: Vec<Slot<'_>>,
        next: &mut [f32],
    ) {
        assert!(left.len() == right.len() && left.len() == size_of_val(weights), "sum of different lengths");
        let mut sum = [0.0; BLOCK_LEN];
        for begin in (0..weights.len()).step_by(BLOCK_LEN) {
            let elements = begin..(begin + BLOCK_LEN).min(weights.len());
            let bytes = elements.start * size_of::<f32>()..elements.end * size_of::<f32>();
            let sum = &mut sum[..elements.len()];
            sum::add(&left[bytes.clone()], &right[bytes], sum);
            let slots = slots.iter_mut().map(|slot| slot.part(elements.clone())).collect();
            self.apply_bytes(
                &weights[elements.clone()],
                bytemuck::cast_slice(sum),
                slots,
                &mut next[elements],
            );
        }
    }

    /// The same from a gradient as it was received: little-endian f32 at any alignment. Slots may move to other memory.
    ///
    /// # Panics
    ///
    /// As [`Optimizer::update`].
    pub fn apply_bytes(&self, weights: &[f32], gradient: &[u8], slots: Vec<Slot<'_>>, next: &mut [f32]) {
        assert!(!self.needs_norms(), "an update without the norms that it needs: {self:?}");
        let weights = bytemuck::cast_slice(weights);
        let how = (self.path, self.write);
        match &self.rule {
            Prepared::Sgd(kernel) => apply(how, kernel, weights, gradient, all(slots), next),
            Prepared::Momentum(kernel) => apply(how, kernel, weights, gradient, all(slots), next),
            Prepared::Adam(kernel) => apply(how, kernel, weights, gradient, all(slots), next),
            Prepared::Amsgrad(kernel) => apply(how, kernel, weights, gradient, all(slots), next),
            Prepared::Adagrad(kernel) => apply(how, kernel, weights, gradient, all(slots), next),
            Prepared::Rmsprop(kernel) => apply(how, kernel, weights, gradient, all(slots), next),
            Prepared::RmspropMoving(kernel) => apply(how, kernel, weights, gradient, all(slots), next),
            Prepared::RmspropCentered(kernel) => apply(how, kernel, weights, gradient, all(slots), next),
            Prepared::RmspropCenteredMoving(kernel) => {
                apply(how, kernel, weights, gradient, all(slots), next);
            }
            Prepared::Adadelta(kernel) => apply(how, kernel, weights, gradient, all(slots), next),
            Prepared::Ftrl(kernel) => apply(how, kernel, weights, gradient, all(slots), next),
            Prepared::Lamb(kernel) => apply(how, kernel, weights, gradient, all(slots), next),
        }
    }
}

impl Prepared {
    /// What is done to the gradient first.
    pub(crate) const fn mean_mut(&mut self) -> &mut Mean {
        match self {
            Self::Sgd(kernel) => &mut kernel.mean,
            Self::Momentum(kernel) => &mut kernel.mean,
            Self::Adam(kernel) | Self::Amsgrad(Amsgrad(kernel)) => &mut kernel.mean,
            Self::Adagrad(kernel) => &mut kernel.mean,
            Self::Rmsprop(kernel)
            | Self::RmspropMoving(rmsprop::Moving(kernel))
            | Self::RmspropCentered(rmsprop::Centered(kernel))
            | Self::RmspropCenteredMoving(rmsprop::CenteredMoving(kernel)) => &mut kernel.mean,
            Self::Adadelta(kernel) => &mut kernel.mean,
            Self::Ftrl(kernel) => &mut kernel.mean,
            Self::Lamb(kernel) => &mut kernel.mean,
        }
    }
}

/// Values of a gradient that is added up while it is applied: they stay in the nearest cache between the two.
const BLOCK_LEN: usize = 2048;

/// The slots of a kernel that has `SLOTS` of them.
fn all<const SLOTS: usize>(slots: Vec<Slot<'_>>) -> [Slot<'_>; SLOTS] {
    let slots = slots.try_into();
    slots.unwrap_or_else(|slots: Vec<_>| panic!("{} slots given, the update rule has {SLOTS}", slots.len()))
}
