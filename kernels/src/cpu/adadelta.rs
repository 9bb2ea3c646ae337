//! Adadelta (Zeiler, 2012): `torch.optim.Adadelta`.
//!
//! Slots `square_avg` (running mean of the squared gradient) and `acc_delta` (of the squared
//! update). Moves 28 bytes per parameter.

use super::dispatch::Kernel;
use super::lanes::Lanes;
use super::mean::Mean;

/// The scalars of one step.
#[derive(Clone, Copy, Debug, PartialEq)]
#[repr(C)]
pub(crate) struct Adadelta {
    /// `rho` and `1 - rho`.
    pub(crate) kept: f32,
    pub(crate) share: f32,
    pub(crate) eps: f32,
    pub(crate) learning_rate: f32,
}

impl Kernel<2> for Adadelta {
    /// `s = rho s + (1 - rho) g^2; d = sqrt(a + eps) / sqrt(s + eps) * g;`
    /// `a = rho a + (1 - rho) d^2; next = w - learning_rate d`.
    #[inline(always)]
    fn update<V: Lanes>(
        &self,
        mean: &Mean,
        weight: V,
        gradient: V,
        [square, updates]: [V; 2],
    ) -> (V, [V; 2]) {
        let (kept, share, eps) =
            (gradient.splat(self.kept), gradient.splat(self.share), gradient.splat(self.eps));
        let gradient = mean.of(weight, gradient);
        let square = square * kept + share * gradient * gradient;
        let delta = (updates + eps).sqrt() / (square + eps).sqrt() * gradient;
        let updates = updates * kept + share * delta * delta;
        (weight - gradient.splat(self.learning_rate) * delta, [square, updates])
    }
}
