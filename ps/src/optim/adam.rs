//! Adam (Kingma and Ba, 2014) and AdamW (Loshchilov and Hutter, 2017): `torch.optim.Adam`, `torch.optim.AdamW`.
//!
//! Slots `exp_avg` (m, running mean of the gradient) and `exp_avg_sq` (v, of its square). Moves 28 bytes per parameter:
//! reads w, g, m, v, writes m, v and the next w.

use proto::optimizer::power;

/// The scalars of one step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Adam {
    scale: f32,
    /// Coupled: what `weight_decay * w` adds to the gradient.
    weight_decay: f32,
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

impl Adam {
    pub(super) fn new(
        [beta1, beta2]: [f64; 2],
        eps: f64,
        weight_decay: f64,
        decoupled: bool,
        learning_rate: f64,
        step: u64,
        scale: f32,
    ) -> Self {
        let count = step + 1; // PyTorch counts this step already
        let (coupled, shrink) =
            if decoupled { (0.0, 1.0 - learning_rate * weight_decay) } else { (weight_decay, 1.0) };
        Self {
            scale,
            weight_decay: coupled as f32,
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

/// `m += (1 - b1)(g - m); v = b2 v + (1 - b2) g^2; next = w - step_size * m / (sqrt(v) / square_correction + eps)`.
pub(super) fn update(
    scalars: &Adam,
    weights: &[f32],
    gradient: &[f32],
    mean: &mut [f32],
    square: &mut [f32],
    next: &mut [f32],
) {
    let &Adam {
        scale,
        weight_decay,
        shrink,
        mean_share,
        square_kept,
        square_share,
        square_correction,
        eps,
        step_size,
    } = scalars;
    for ((((next, mean), square), &weight), &gradient) in
        next.iter_mut().zip(mean).zip(square).zip(weights).zip(gradient)
    {
        let gradient = gradient * scale + weight_decay * weight;
        *mean = interpolate(*mean, gradient, mean_share);
        *square = *square * square_kept + square_share * gradient * gradient;
        let denominator = square.sqrt() / square_correction + eps;
        *next = weight * shrink - step_size * *mean / denominator;
    }
}

/// `torch.lerp`: from `start` to `end`, computed from the nearer one.
fn interpolate(start: f32, end: f32, share: f32) -> f32 {
    if share < 0.5 { start + share * (end - start) } else { end - (end - start) * (1.0 - share) }
}
