//! RMSProp (Hinton, Srivastava and Swersky, 2012; centered: Graves, 2013): `torch.optim.RMSprop`.
//!
//! The slot `square_avg` holds the running mean of the squared gradient, `grad_avg` that of the gradient (centered only),
//! `momentum_buffer` the velocity (with momentum only). Moves 20 bytes per parameter, and 8 for each of the two others.

use super::dispatch::Kernel;
use super::lanes::Lanes;
use super::mean::{Mean, interpolate};

/// The scalars of one step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Rmsprop {
    pub(crate) mean: Mean,
    /// `alpha` and `1 - alpha`.
    pub(crate) kept: f32,
    pub(crate) share: f32,
    pub(crate) eps: f32,
    pub(crate) momentum: f32,
    pub(crate) learning_rate: f32,
}

/// With a velocity.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Moving(pub(crate) Rmsprop);

/// Centered.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Centered(pub(crate) Rmsprop);

/// Centered, with a velocity.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct CenteredMoving(pub(crate) Rmsprop);

impl Rmsprop {
    /// `s = alpha s + (1 - alpha) g^2`.
    #[inline(always)]
    fn square<V: Lanes>(&self, gradient: V, square: V) -> V {
        square * V::splat(self.kept) + V::splat(self.share) * gradient * gradient
    }

    /// `sqrt(s) + eps`.
    #[inline(always)]
    fn root<V: Lanes>(&self, square: V) -> V {
        square.sqrt() + V::splat(self.eps)
    }

    /// `sqrt(s - a^2) + eps` with `a += (1 - alpha)(g - a)`.
    #[inline(always)]
    fn deviation<V: Lanes>(&self, gradient: V, square: V, average: V) -> (V, V) {
        let average = interpolate(average, gradient, self.share);
        (self.root(square - average * average), average)
    }

    #[inline(always)]
    fn still<V: Lanes>(&self, weight: V, gradient: V, denominator: V) -> V {
        weight - V::splat(self.learning_rate) * gradient / denominator
    }

    #[inline(always)]
    fn moving<V: Lanes>(&self, weight: V, gradient: V, denominator: V, velocity: V) -> (V, V) {
        let velocity = velocity * V::splat(self.momentum) + gradient / denominator;
        (weight - V::splat(self.learning_rate) * velocity, velocity)
    }
}

impl Kernel<1> for Rmsprop {
    /// `next = w - learning_rate * g / (sqrt(s) + eps)`.
    #[inline(always)]
    fn update<V: Lanes>(&self, weight: V, gradient: V, [square]: [V; 1]) -> (V, [V; 1]) {
        let gradient = self.mean.of(weight, gradient);
        let square = self.square(gradient, square);
        (self.still(weight, gradient, self.root(square)), [square])
    }
}

impl Kernel<2> for Moving {
    /// `v = momentum * v + g / (sqrt(s) + eps); next = w - learning_rate * v`.
    #[inline(always)]
    fn update<V: Lanes>(&self, weight: V, gradient: V, [square, velocity]: [V; 2]) -> (V, [V; 2]) {
        let gradient = self.0.mean.of(weight, gradient);
        let square = self.0.square(gradient, square);
        let (next, velocity) = self.0.moving(weight, gradient, self.0.root(square), velocity);
        (next, [square, velocity])
    }
}

impl Kernel<2> for Centered {
    /// As without centering, and the root is that of `s - a^2`.
    #[inline(always)]
    fn update<V: Lanes>(&self, weight: V, gradient: V, [square, average]: [V; 2]) -> (V, [V; 2]) {
        let gradient = self.0.mean.of(weight, gradient);
        let square = self.0.square(gradient, square);
        let (denominator, average) = self.0.deviation(gradient, square, average);
        (self.0.still(weight, gradient, denominator), [square, average])
    }
}

impl Kernel<3> for CenteredMoving {
    /// Both.
    #[inline(always)]
    fn update<V: Lanes>(&self, weight: V, gradient: V, [square, velocity, average]: [V; 3]) -> (V, [V; 3]) {
        let gradient = self.0.mean.of(weight, gradient);
        let square = self.0.square(gradient, square);
        let (denominator, average) = self.0.deviation(gradient, square, average);
        let (next, velocity) = self.0.moving(weight, gradient, denominator, velocity);
        (next, [square, velocity, average])
    }
}
