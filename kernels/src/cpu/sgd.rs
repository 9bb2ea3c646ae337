//! Stochastic gradient descent: `torch.optim.SGD` without momentum.
//!
//! Moves 12 bytes per parameter: reads weight and gradient, writes the next weight.

use super::dispatch::Kernel;
use super::lanes::Lanes;
use super::mean::Mean;

/// The scalars of one step.
#[derive(Clone, Copy, Debug, PartialEq)]
#[repr(C)]
pub(crate) struct Sgd {
    pub(crate) learning_rate: f32,
}

impl Kernel<0> for Sgd {
    /// `next = w - learning_rate * (g + weight_decay * w)`; 1 - 0.5 * (2 + 0.1 * 1) = -0.05.
    #[inline(always)]
    fn update<V: Lanes>(&self, mean: &Mean, weight: V, gradient: V, []: [V; 0]) -> (V, [V; 0]) {
        let gradient = mean.of(weight, gradient);
        (weight - gradient.splat(self.learning_rate) * gradient, [])
    }
}
