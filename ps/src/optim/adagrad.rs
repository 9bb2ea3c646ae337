//! Adagrad (Duchi, Hazan and Singer, 2011): `torch.optim.Adagrad`.
//!
//! The slot `sum` holds the sum of the squared gradients. Moves 20 bytes per parameter.

/// The scalars of one step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Adagrad {
    pub(super) scale: f32,
    pub(super) weight_decay: f32,
    /// After `lr_decay`.
    pub(super) learning_rate: f32,
    pub(super) eps: f32,
}

/// `s += g^2; next = w - learning_rate * g / (sqrt(s) + eps)`; with s = 0, g = 2: 1 - 0.1 * 2 / 2 = 0.9.
pub(super) fn update(
    scalars: &Adagrad,
    weights: &[f32],
    gradient: &[f32],
    sum: &mut [f32],
    next: &mut [f32],
) {
    let &Adagrad { scale, weight_decay, learning_rate, eps } = scalars;
    for (((next, sum), &weight), &gradient) in next.iter_mut().zip(sum).zip(weights).zip(gradient) {
        let gradient = gradient * scale + weight_decay * weight;
        *sum += gradient * gradient;
        *next = weight - learning_rate * gradient / (sum.sqrt() + eps);
    }
}
