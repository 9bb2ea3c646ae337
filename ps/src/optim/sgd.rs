//! Stochastic gradient descent: `torch.optim.SGD` without momentum.
//!
//! Moves 12 bytes per parameter: reads weight and gradient, writes the next weight.

/// The scalars of one step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Sgd {
    pub(super) scale: f32,
    pub(super) weight_decay: f32,
    pub(super) learning_rate: f32,
}

/// `next = w - learning_rate * (g + weight_decay * w)`; 1 - 0.5 * (2 + 0.1 * 1) = -0.05.
pub(super) fn update(scalars: &Sgd, weights: &[f32], gradient: &[f32], next: &mut [f32]) {
    let &Sgd { scale, weight_decay, learning_rate } = scalars;
    for ((next, &weight), &gradient) in next.iter_mut().zip(weights).zip(gradient) {
        let gradient = gradient * scale + weight_decay * weight;
        *next = weight - learning_rate * gradient;
    }
}
