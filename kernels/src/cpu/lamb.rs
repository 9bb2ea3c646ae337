//! LAMB (You et al., "Large batch optimization for deep learning", 2019, algorithm 2), with the
//! identity as phi.
//!
//! Slots as Adam's. A tensor's step has the length `learning_rate * |w|`, whatever its gradient:
//! the direction `u = m / (sqrt(v) + eps) + weight_decay * w` (both means corrected) is divided by
//! its norm over the whole tensor. That norm is [measured](super::norm) before the update, from the
//! same operands and without changing them, so the update is one pass as every other: it moves 28
//! bytes per parameter, and measuring 16 before it.

use proto::optimizer::power;

use super::dispatch::Kernel;
use super::lanes::Lanes;
use super::mean::{Mean, interpolate};

/// The scalars of one step and one tensor. Weight decay is part of the direction, and [`Mean`] has
/// none.
#[derive(Clone, Copy, Debug, PartialEq)]
#[repr(C)]
pub(crate) struct Lamb {
    /// First, so that no bytes lie between the scalars, which travel to devices.
    learning_rate: f64,
    weight_decay: f32,
    /// `1 - betas[0]`.
    average_share: f32,
    /// `1 - betas[0]^t`.
    average_correction: f32,
    /// `betas[1]` and `1 - betas[1]`.
    square_kept: f32,
    square_share: f32,
    /// `1 - betas[1]^t`.
    square_correction: f32,
    eps: f32,
    /// `learning_rate * |w| / |u|`.
    step_size: f32,
}

/// The kernel that gives the direction instead of the next weights.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Direction(pub(crate) Lamb);

impl Lamb {
    pub(crate) fn new(
        [beta1, beta2]: [f64; 2],
        eps: f64,
        weight_decay: f64,
        learning_rate: f64,
        step: u64,
    ) -> Self {
        let count = step + 1; // the paper counts from 1
        Self {
            weight_decay: weight_decay as f32,
            average_share: (1.0 - beta1) as f32,
            average_correction: (1.0 - power(beta1, count)) as f32,
            square_kept: beta2 as f32,
            square_share: (1.0 - beta2) as f32,
            square_correction: (1.0 - power(beta2, count)) as f32,
            eps: eps as f32,
            learning_rate,
            step_size: learning_rate as f32,
        }
    }

    /// Scales the step size for a tensor by the trust ratio |weights| / |direction|. The arguments
    /// are sums of squares. The ratio is 1 if one of them is zero.
    pub(crate) fn scaled(self, weights: f64, direction: f64) -> Self {
        // A norm that is NaN is not zero.
        let still = weights == 0.0 || direction == 0.0;
        let ratio = if still { 1.0 } else { weights.sqrt() / direction.sqrt() };
        Self { step_size: (self.learning_rate * ratio) as f32, ..self }
    }

    /// `m += (1 - b1)(g - m); v = b2 v + (1 - b2) g^2;`
    /// `u = (m / c1) / (sqrt(v / c2) + eps) + weight_decay * w`.
    #[inline(always)]
    fn direction<V: Lanes>(
        &self,
        mean: &Mean,
        weight: V,
        gradient: V,
        [average, square]: [V; 2],
    ) -> (V, [V; 2]) {
        let gradient = mean.only(gradient);
        let average = interpolate(average, gradient, self.average_share);
        let square = square * gradient.splat(self.square_kept)
            + gradient.splat(self.square_share) * gradient * gradient;
        let root = (square / gradient.splat(self.square_correction)).sqrt() + gradient.splat(self.eps);
        let direction = average / gradient.splat(self.average_correction) / root
            + gradient.splat(self.weight_decay) * weight;
        (direction, [average, square])
    }
}

impl Kernel<2> for Lamb {
    /// `next = w - learning_rate * |w| / |u| * u`.
    #[inline(always)]
    fn update<V: Lanes>(&self, mean: &Mean, weight: V, gradient: V, slots: [V; 2]) -> (V, [V; 2]) {
        let (direction, slots) = self.direction(mean, weight, gradient, slots);
        (weight - gradient.splat(self.step_size) * direction, slots)
    }
}

impl Kernel<2> for Direction {
    /// `u` in place of the next weights.
    #[inline(always)]
    fn update<V: Lanes>(&self, mean: &Mean, weight: V, gradient: V, slots: [V; 2]) -> (V, [V; 2]) {
        self.0.direction(mean, weight, gradient, slots)
    }
}
