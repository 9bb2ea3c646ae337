//! Adam (Kingma and Ba, 2014), AdamW (Loshchilov and Hutter, 2017) and AMSGrad (Reddi, Kale and
//! Kumar, 2018): `torch.optim.Adam`, `torch.optim.AdamW`, `torch.optim.Adam(amsgrad=True)`.
//!
//! Slots `exp_avg` (m, running mean of the gradient) and `exp_avg_sq` (v, of its square). Moves 28
//! bytes per parameter: reads w, g, m, v, writes m, v and the next w. AMSGrad has `max_exp_avg_sq`
//! (the largest v so far) beside them and moves 36.

use proto::optimizer::power;

use super::dispatch::Kernel;
use super::lanes::Lanes;
use super::mean::{Mean, interpolate};

/// The scalars of one step, with the weight decay that is decoupled. The coupled one is in
/// [`Mean`].
#[derive(Clone, Copy, Debug, PartialEq)]
#[repr(C)]
pub(crate) struct Adam {
    /// Decoupled: what the weight is multiplied by.
    shrink: f32,
    /// `1 - betas[0]`.
    average_share: f32,
    /// `betas[1]` and `1 - betas[1]`.
    square_kept: f32,
    square_share: f32,
    /// `sqrt(1 - betas[1]^t)`.
    square_correction: f32,
    /// `eps_root * (1 - betas[1]^t)`: under the root, the square is not corrected yet.
    eps_root: f32,
    eps: f32,
    /// `learning_rate / (1 - betas[0]^t)`.
    step_size: f32,
}

/// What is added to the denominator.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Epsilon {
    /// To the root.
    pub(crate) beside: f64,
    /// Under the root.
    pub(crate) under: f64,
    /// Both to the root of v as it is, and not of the corrected v. `step_size` then has the
    /// correction of the square, and `square_correction` is 1.
    pub(crate) uncorrected: bool,
}

impl Adam {
    pub(crate) fn new(
        [beta1, beta2]: [f64; 2],
        epsilon: Epsilon,
        shrink: f64,
        learning_rate: f64,
        step: u64,
    ) -> Self {
        let count = step + 1; // PyTorch counts this step already
        let (square, rate) = (1.0 - power(beta2, count), learning_rate / (1.0 - power(beta1, count)));
        let (square, step_size) =
            if epsilon.uncorrected { (1.0, rate * square.sqrt()) } else { (square, rate) };
        Self {
            shrink: shrink as f32,
            average_share: (1.0 - beta1) as f32,
            square_kept: beta2 as f32,
            square_share: (1.0 - beta2) as f32,
            square_correction: square.sqrt() as f32,
            eps_root: (epsilon.under * square) as f32,
            eps: epsilon.beside as f32,
            step_size: step_size as f32,
        }
    }
}

impl<const SLOTS: usize> Kernel<SLOTS> for Adam {
    /// `m += (1 - b1)(g - m); v = b2 v + (1 - b2) g^2;`
    /// `next = w - step_size * m / (sqrt(v + eps_root) / square_correction + eps)`.
    ///
    /// With a third slot the root is that of `v_max = max(v_max, v)`.
    #[inline(always)]
    fn update<V: Lanes>(
        &self,
        mean: &Mean,
        weight: V,
        gradient: V,
        mut slots: [V; SLOTS],
    ) -> (V, [V; SLOTS]) {
        const { assert!(SLOTS == 2 || SLOTS == 3, "m and v, and for AMSGrad the largest v") };
        let gradient = mean.of(weight, gradient);
        let average = interpolate(slots[0], gradient, self.average_share);
        let square = slots[1] * gradient.splat(self.square_kept)
            + gradient.splat(self.square_share) * gradient * gradient;
        (slots[0], slots[1]) = (average, square);
        if SLOTS == 3 {
            slots[2] = slots[2].max(square);
        }
        // A sum with 0 has the bits of the square, and a quotient by 1 those of the root.
        let square = slots[SLOTS - 1] + gradient.splat(self.eps_root);
        let root = square.sqrt() / gradient.splat(self.square_correction);
        let denominator = root + gradient.splat(self.eps);
        let next =
            weight * gradient.splat(self.shrink) - gradient.splat(self.step_size) * average / denominator;
        (next, slots)
    }
}
