//! Gradient descent with velocity: `torch.optim.SGD(momentum=.., dampening=.., nesterov=..)`.
//!
//! The velocity is the slot `momentum_buffer`; it starts as the first gradient, undamped (PyTorch's
//! way, in contrast to Sutskever et al., 2013, and the learning rate is not part of it). Moves 20
//! bytes per parameter.

use super::dispatch::Kernel;
use super::lanes::Lanes;
use super::mean::Mean;

/// The scalars of one step. Flags are 0 or 1: no bytes lie between the scalars, which travel to
/// devices.
#[derive(Clone, Copy, Debug, PartialEq)]
#[repr(C)]
pub(crate) struct Momentum {
    /// Whether this is the first step: the velocity becomes the gradient.
    pub(crate) first: u32,
    pub(crate) momentum: f32,
    /// `1 - dampening`.
    pub(crate) undamped: f32,
    pub(crate) nesterov: u32,
    pub(crate) learning_rate: f32,
}

impl Kernel<1> for Momentum {
    /// `v = momentum * v + (1 - dampening) * g; next = w - learning_rate * v`; nesterov:
    /// `.. * (g + momentum * v)`.
    #[inline(always)]
    fn update<V: Lanes>(&self, mean: &Mean, weight: V, gradient: V, [velocity]: [V; 1]) -> (V, [V; 1]) {
        let (momentum, undamped) = (gradient.splat(self.momentum), gradient.splat(self.undamped));
        let gradient = mean.of(weight, gradient);
        let velocity = if self.first != 0 { gradient } else { velocity * momentum + undamped * gradient };
        let direction = if self.nesterov != 0 { gradient + momentum * velocity } else { velocity };
        (weight - gradient.splat(self.learning_rate) * direction, [velocity])
    }
}
