//! Adam (Kingma and Ba, 2014), AdamW (Loshchilov and Hutter, 2017) and AMSGrad (Reddi, Kale and Kumar, 2018):
//! `torch.optim.Adam`, `torch.optim.AdamW`, `torch.optim.Adam(amsgrad=True)`.
//!
//! Slots `exp_avg` (m, running mean of the gradient) and `exp_avg_sq` (v, of its square). Moves 28 bytes per parameter:
//! reads w, g, m, v, writes m, v and the next w. AMSGrad has `max_exp_avg_sq` (the largest v so far) beside them and
//! moves 36.

use proto::optimizer::power;

use super::dispatch::Kernel;
use super::lanes::Lanes;
use super::mean::{Mean, interpolate};

/// The scalars of one step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Adam {
    /// With the coupled weight decay.
    pub(crate) mean: Mean,
    /// Decoupled: what the weight is multiplied by.
    shrink: f32,
    /// `1 - betas[0]`.
    mean_share: f32,
    /// `betas[1]` and `1 - betas[1]`.
    square_kept: f32,
    square_share: f32,
    /// `sqrt(1 - betas[1]^t)`.
    square_correction: f32,
    eps: f32,
    /// `learning_rate / (1 - betas[0]^t)`.
    step_size: f32,
}

/// The scalars of one step of AMSGrad.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Amsgrad(pub(crate) Adam);

impl Adam {
    pub(crate) fn new(
        [beta1, beta2]: [f64; 2],
        eps: f64,
        weight_decay: f64,
        decoupled: bool,
        learning_rate: f64,
        step: u64,
        mean: Mean,
    ) -> Self {
        let count = step + 1; // PyTorch counts this step already
        let (coupled, shrink) =
            if decoupled { (0.0, 1.0 - learning_rate * weight_decay) } else { (weight_decay, 1.0) };
        Self {
            mean: Mean { weight_decay: coupled as f32, ..mean },
            shrink: shrink as f32,
            mean_share: (1.0 - beta1) as f32,
            square_kept: beta2 as f32,
            square_share: (1.0 - beta2) as f32,
            square_correction: (1.0 - power(beta2, count)).sqrt() as f32,
            eps: eps as f32,
            step_size: (learning_rate / (1.0 - power(beta1, count))) as f32,
        }
    }
}

impl Adam {
    /// The next weight, mean and mean square; `largest` gives the square to divide by.
    #[inline(always)]
    fn step<V: Lanes>(
        &self,
        weight: V,
        gradient: V,
        mean: V,
        square: V,
        largest: impl FnOnce(V) -> V,
    ) -> (V, V, V) {
        let gradient = self.mean.of(weight, gradient);
        let mean = interpolate(mean, gradient, self.mean_share);
        let square = square * V::splat(self.square_kept) + V::splat(self.square_share) * gradient * gradient;
        let root = largest(square).sqrt() / V::splat(self.square_correction);
        let denominator = root + V::splat(self.eps);
        let next = weight * V::splat(self.shrink) - V::splat(self.step_size) * mean / denominator;
        (next, mean, square)
    }
}

impl Kernel<2> for Adam {
    /// `m += (1 - b1)(g - m); v = b2 v + (1 - b2) g^2; next = w - step_size * m / (sqrt(v) / square_correction + eps)`.
    #[inline(always)]
    fn update<V: Lanes>(&self, weight: V, gradient: V, [mean, square]: [V; 2]) -> (V, [V; 2]) {
        let (next, mean, square) = self.step(weight, gradient, mean, square, |square| square);
        (next, [mean, square])
    }
}

impl Kernel<3> for Amsgrad {
    /// As Adam, with the root of `max(v_max, v)`.
    #[inline(always)]
    fn update<V: Lanes>(&self, weight: V, gradient: V, [mean, square, largest]: [V; 3]) -> (V, [V; 3]) {
        let mut now = largest;
        let (next, mean, square) = self.0.step(weight, gradient, mean, square, |square| {
            now = largest.max(square);
            now
        });
        (next, [mean, square, now])
    }
}
