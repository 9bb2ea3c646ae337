//! The optimizer of a job: weights of version v, the slots and a summed gradient in; weights of
//! version v + 1 out.
//!
//! Here are the scalars of a step and the choice of the kernel; each kernel is a file of `cpu/`.
//! Always true here:
//!
//! - Every output element depends on the elements at its own index and on scalars, nothing else. So
//!   the result does not depend on how a tensor is cut into chunks, nor on which thread or ps
//!   updates which part.
//! - Weights and gradient are only read; the new weights go to another storage. A pull or a
//!   checkpoint that holds the old one is not disturbed. Only the slots change in place, unless a
//!   checkpoint holds them: then they [move](crate::Slot).
//! - Only `+ - * /` and `sqrt` of f32, in the order of PyTorch's single-tensor CPU path, never
//!   fused: IEEE 754 rounds each exactly, so the bits are the same on every CPU (a NaN's payload
//!   aside). They are the bits of PyTorch 2.11's portable kernels with an IEEE square root. Its AVX
//!   kernels fuse multiply and add in some lanes; we do not, as that ties the result to the
//!   instruction set and the length.
//! - Scalars (learning rate, bias corrections) are computed in f64 and rounded to f32 once per
//!   call, as Python does.
//!
//! `CONTRIBUTING.md` says how to add an optimizer.

#[cfg(test)]
pub(crate) mod tests;

use std::sync::Arc;

use proto::optimizer::{InvalidOptimizer, OptimizerSpec, Rule, Schedule};

use crate::cpu::adadelta::Adadelta;
use crate::cpu::adagrad::Adagrad;
use crate::cpu::adam::{Adam, Epsilon};
use crate::cpu::dispatch::{Path, Write};
use crate::cpu::ftrl::Ftrl;
use crate::cpu::lamb::Lamb;
use crate::cpu::mean::Mean;
use crate::cpu::momentum::Momentum;
use crate::cpu::rmsprop::Rmsprop;
use crate::cpu::sgd::Sgd;

/// The update rule of one job or one group of its tensors, with its schedule.
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
/// kernels::cpu::apply(&optimizer.prepare(0, 0.5), &weights, &gradient, &mut slots, &mut next);
/// assert_eq!(next, [2.0, 3.0]);
/// assert_eq!(slots[0], [2.0, 0.0]);
/// # Ok::<(), proto::optimizer::InvalidOptimizer>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct Optimizer {
    rule: Rule,
    learning_rate: f64,
    clip_norm: Option<f64>,
    schedule: Arc<Schedule>,
    total_steps: u64,
}

/// One step's update with all its scalars worked out; made by [`Optimizer::prepare`], applied to
/// any number of chunks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Update {
    pub(crate) mean: Mean,
    pub(crate) rule: Prepared,
    /// What it waits for.
    pub(crate) norms: Norms,
    /// How the kernels of the CPU run.
    pub(crate) path: Path,
    pub(crate) write: Write,
}

/// The norms that an update lacks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Norms {
    /// The update lacks no norm.
    Complete,
    /// The norm of the whole gradient, which the update clips at this value.
    Gradient { clip_norm: f64 },
    /// The norms of each tensor's weights and of its direction.
    Tensors,
}

/// A rule with the scalars of one step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Prepared {
    Sgd(Sgd),
    Momentum(Momentum),
    Adam(Adam),
    Amsgrad(Adam),
    Adagrad(Adagrad),
    Rmsprop(Rmsprop<false>),
    RmspropMoving(Rmsprop<false>),
    RmspropCentered(Rmsprop<true>),
    RmspropCenteredMoving(Rmsprop<true>),
    Adadelta(Adadelta),
    Ftrl(Ftrl),
    Lamb(Lamb),
}

impl Optimizer {
    /// Returns the optimizer of a job that will make `total_steps` updates (the end of a cosine
    /// schedule).
    ///
    /// # Errors
    ///
    /// All violations of the specification; see [`OptimizerSpec::validate`].
    pub fn new(spec: &OptimizerSpec, total_steps: u64) -> Result<Self, InvalidOptimizer> {
        let rule = spec.validate()?;
        let (learning_rate, clip_norm, schedule) =
            (spec.learning_rate, spec.clip_norm, Arc::new(spec.schedule.clone()));
        Ok(Self { rule, learning_rate, clip_norm, schedule, total_steps })
    }

    /// Returns this optimizer with the memory of the schedule of another one, if both are equal.
    pub(crate) fn sharing_schedule(self, other: &Self) -> Self {
        let schedule = if self.schedule == other.schedule { other.schedule.clone() } else { self.schedule };
        Self { schedule, ..self }
    }

    /// Returns this optimizer with the norm of each gradient measured, so that an
    /// overflow is found. A gradient that nothing clips keeps its bits.
    pub(crate) fn measured(self) -> Self {
        Self { clip_norm: self.clip_norm.or(Some(f64::INFINITY)), ..self }
    }

    /// Returns the number of slots: f32 values of state beside each parameter.
    pub fn slots(&self) -> usize {
        self.slot_names().len()
    }

    /// Names of the slots, in the order in which an update takes them: those of PyTorch's
    /// `optimizer.state_dict()`.
    pub const fn slot_names(&self) -> &'static [&'static str] {
        self.rule.slot_names()
    }

    /// Returns what every element of slot number `slot` is before the first step.
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

    /// Returns the learning rate of `step` (from 0): the base rate times the schedule's factor.
    pub fn learning_rate(&self, step: u64) -> f64 {
        self.learning_rate * self.schedule.factor(step, self.total_steps)
    }

    /// Works out the scalars of one step.
    ///
    /// `step` is the number of updates that these weights have had (0 for the first one). Gradients
    /// are sums over the step's samples and `scale` is one over their number. The product is
    /// rounded to f32 before anything else, as if the mean had been stored.
    pub fn prepare(&self, step: u64, scale: f32) -> Update {
        self.prepare_after(step, 0, scale)
    }

    /// Works out the scalars of one step, as [`prepare`](Self::prepare) does. `overflows` of the
    /// steps before changed no weight. They count for the schedule, and not for the rule, as with a
    /// `torch.amp.GradScaler` and a scheduler that is stepped each time.
    pub fn prepare_after(&self, step: u64, overflows: u64, scale: f32) -> Update {
        let rate = self.learning_rate(step);
        let step = step.saturating_sub(overflows);
        let learning_rate = rate as f32;
        // The coupled weight decay, and the rule.
        let (weight_decay, rule) = match self.rule {
            Rule::Sgd { weight_decay } => (weight_decay, Prepared::Sgd(Sgd { learning_rate })),
            Rule::Momentum { momentum, dampening, nesterov, weight_decay } => {
                let momentum = Momentum {
                    first: u32::from(step == 0),
                    momentum: momentum as f32,
                    undamped: (1.0 - dampening) as f32,
                    nesterov: u32::from(nesterov),
                    learning_rate,
                };
                (weight_decay, Prepared::Momentum(momentum))
            }
            Rule::Adam { betas, eps, eps_root, eps_before_correction, weight_decay, decoupled, amsgrad } => {
                let (coupled, shrink) =
                    if decoupled { (0.0, 1.0 - rate * weight_decay) } else { (weight_decay, 1.0) };
                let epsilon = Epsilon { beside: eps, under: eps_root, uncorrected: eps_before_correction };
                let adam = Adam::new(betas, epsilon, shrink, rate, step);
                (coupled, if amsgrad { Prepared::Amsgrad(adam) } else { Prepared::Adam(adam) })
            }
            Rule::Adagrad { lr_decay, eps, weight_decay, .. } => {
                let learning_rate = (rate / (1.0 + step as f64 * lr_decay)) as f32;
                (weight_decay, Prepared::Adagrad(Adagrad { learning_rate, eps: eps as f32 }))
            }
            Rule::Rmsprop { alpha, eps, eps_root, weight_decay, momentum, centered } => {
                let plain = Rmsprop::new(alpha, eps, eps_root, momentum, learning_rate);
                let central = Rmsprop::new(alpha, eps, eps_root, momentum, learning_rate);
                let rule = match (momentum > 0.0, centered) {
                    (false, false) => Prepared::Rmsprop(plain),
                    (true, false) => Prepared::RmspropMoving(plain),
                    (false, true) => Prepared::RmspropCentered(central),
                    (true, true) => Prepared::RmspropCenteredMoving(central),
                };
                (weight_decay, rule)
            }
            Rule::Adadelta { rho, eps, weight_decay } => {
                let (kept, share) = (rho as f32, (1.0 - rho) as f32);
                let adadelta = Adadelta { kept, share, eps: eps as f32, learning_rate };
                (weight_decay, Prepared::Adadelta(adadelta))
            }
            Rule::Ftrl { beta, l1, l2, .. } => {
                let ftrl = Ftrl { learning_rate, beta: beta as f32, l1: l1 as f32, l2: l2 as f32 };
                (0.0, Prepared::Ftrl(ftrl))
            }
            Rule::Lamb { betas, eps, weight_decay } => {
                (0.0, Prepared::Lamb(Lamb::new(betas, eps, weight_decay, rate, step)))
            }
        };
        let mean = Mean { scale, clip: 1.0, weight_decay: weight_decay as f32 };
        let norms = match (rule, self.clip_norm) {
            (Prepared::Lamb(_), _) => Norms::Tensors,
            (_, Some(clip_norm)) => Norms::Gradient { clip_norm },
            (_, None) => Norms::Complete,
        };
        Update { mean, rule, norms, path: Path::widest(), write: Write::Cached }
    }
}

impl Update {
    /// Writes the next weights and slots that move past the caches, with the same bits. This pays
    /// if weights and slots exceed the caches: the old content of their memory is not read.
    #[must_use]
    pub const fn past_the_caches(self) -> Self {
        Self { write: Write::Streamed, ..self }
    }
}
