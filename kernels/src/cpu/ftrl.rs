//! FTRL-Proximal, per coordinate (McMahan et al., "Ad click prediction: a view from the trenches",
//! 2013, algorithm 1).
//!
//! Slots `z` (sum of the gradients, less what the learning rates take back) and `n` (sum of the
//! squared gradients). The weights are a function of both. Moves 28 bytes per parameter. The paper
//! makes the weights when they are read; here they are made when the slots change, which is the
//! same weights.

use super::dispatch::Kernel;
use super::lanes::Lanes;
use super::mean::Mean;

/// The scalars of one step. [`Mean`] has no weight decay.
#[derive(Clone, Copy, Debug, PartialEq)]
#[repr(C)]
pub(crate) struct Ftrl {
    /// The paper's alpha, at this step.
    pub(crate) learning_rate: f32,
    pub(crate) beta: f32,
    pub(crate) l1: f32,
    pub(crate) l2: f32,
}

impl Kernel<2> for Ftrl {
    /// `s = (sqrt(n + g^2) - sqrt(n)) / alpha; z += g - s w; n += g^2;`
    /// `next = 0 if |z| <= l1, otherwise -(z - sgn(z) l1) / ((beta + sqrt(n)) / alpha + l2)`.
    ///
    /// With z = n = w = 0, g = 2, alpha = 0.5, beta = 1, l1 = 0.5, l2 = 0: z = 2, n = 4, next =
    /// -1.5 / (3 / 0.5) = -0.25.
    #[inline(always)]
    fn update<V: Lanes>(&self, mean: &Mean, weight: V, gradient: V, [z, n]: [V; 2]) -> (V, [V; 2]) {
        let rate = gradient.splat(self.learning_rate);
        let gradient = mean.only(gradient);
        let more = n + gradient * gradient;
        let root = more.sqrt();
        let sigma = (root - n.sqrt()) / rate;
        let z = z + (gradient - sigma * weight);
        // Zero first: a NaN is not lost in it.
        let beyond = gradient.splat(0.0).max(z.abs() - gradient.splat(self.l1));
        let denominator = (gradient.splat(self.beta) + root) / rate + gradient.splat(self.l2);
        let size = beyond / denominator;
        (gradient.splat(0.0) - size.abs().with_sign_of(z), [z, more])
    }
}
