//! RMSProp (Hinton, Srivastava and Swersky, 2012; centered: Graves, 2013): `torch.optim.RMSprop`.
//!
//! The slot `square_avg` holds the running mean of the squared gradient, `grad_avg` that of the
//! gradient (centered only), `momentum_buffer` the velocity (with momentum only). Moves 20 bytes
//! per parameter, and 8 for each of the two others.

use super::dispatch::Kernel;
use super::lanes::Lanes;
use super::mean::{Mean, interpolate};

/// The scalars of one step. There is a velocity if there is a slot for it.
#[derive(Clone, Copy, Debug, PartialEq)]
#[repr(C)]
pub(crate) struct Rmsprop<const CENTERED: bool> {
    /// `alpha` and `1 - alpha`.
    kept: f32,
    share: f32,
    eps_root: f32,
    eps: f32,
    momentum: f32,
    learning_rate: f32,
}

impl<const CENTERED: bool> Rmsprop<CENTERED> {
    pub(crate) const fn new(alpha: f64, eps: f64, eps_root: f64, momentum: f64, learning_rate: f32) -> Self {
        let (kept, share) = (alpha as f32, (1.0 - alpha) as f32);
        let (eps_root, eps) = (eps_root as f32, eps as f32);
        Self { kept, share, eps_root, eps, momentum: momentum as f32, learning_rate }
    }
}

impl<const CENTERED: bool, const SLOTS: usize> Kernel<SLOTS> for Rmsprop<CENTERED> {
    /// `s = alpha s + (1 - alpha) g^2; next = w - learning_rate * g / (sqrt(s + eps_root) + eps)`.
    ///
    /// Centered, `s - a^2` is in the place of s under the root, with `a += (1 - alpha)(g - a)`.
    /// With a velocity, `v = momentum * v + g / (sqrt(s + eps_root) + eps)` and `next = w -
    /// learning_rate * v`.
    #[inline(always)]
    fn update<V: Lanes>(
        &self,
        mean: &Mean,
        weight: V,
        gradient: V,
        mut slots: [V; SLOTS],
    ) -> (V, [V; SLOTS]) {
        let moves = const {
            let others = SLOTS - 1 - CENTERED as usize;
            assert!(others < 2, "the square, the velocity, the average");
            others == 1
        };
        let gradient = mean.of(weight, gradient);
        let square = slots[0] * gradient.splat(self.kept) + gradient.splat(self.share) * gradient * gradient;
        slots[0] = square;
        let variance = if CENTERED {
            let average = interpolate(slots[SLOTS - 1], gradient, self.share);
            slots[SLOTS - 1] = average;
            square - average * average
        } else {
            square
        };
        let root = (variance + gradient.splat(self.eps_root)).sqrt();
        let denominator = root + gradient.splat(self.eps);
        let rate = gradient.splat(self.learning_rate);
        if !moves {
            return (weight - rate * gradient / denominator, slots);
        }
        slots[1] = slots[1] * gradient.splat(self.momentum) + gradient / denominator;
        (weight - rate * slots[1], slots)
    }
}
