//! Adagrad (Duchi, Hazan and Singer, 2011): `torch.optim.Adagrad`.
//!
//! The slot `sum` holds the sum of the squared gradients. Moves 20 bytes per parameter.

use super::dispatch::Kernel;
use super::lanes::Lanes;
use super::mean::Mean;

/// The scalars of one step.
#[derive(Clone, Copy, Debug, PartialEq)]
#[repr(C)]
pub(crate) struct Adagrad {
    /// The learning rate after `lr_decay`.
    pub(crate) learning_rate: f32,
    pub(crate) eps: f32,
}

impl Kernel<1> for Adagrad {
    /// `s += g^2; next = w - learning_rate * g / (sqrt(s) + eps)`; with s = 0, g = 2: 1 - 0.1 * 2 /
    /// 2 = 0.9.
    #[inline(always)]
    fn update<V: Lanes>(&self, mean: &Mean, weight: V, gradient: V, [sum]: [V; 1]) -> (V, [V; 1]) {
        let gradient = mean.of(weight, gradient);
        let sum = sum + gradient * gradient;
        (
            weight - gradient.splat(self.learning_rate) * gradient / (sum.sqrt() + gradient.splat(self.eps)),
            [sum],
        )
    }
}
