//! Gradient descent with velocity: `torch.optim.SGD(momentum=.., dampening=.., nesterov=..)`.
//!
//! The velocity is the slot `momentum_buffer`; it starts as the first gradient, undamped (PyTorch's way, in contrast to
//! Sutskever et al., 2013, and the learning rate is not part of it). Moves 20 bytes per parameter.

/// The scalars of one step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Momentum {
    pub(super) scale: f32,
    pub(super) weight_decay: f32,
    /// Whether this is the first step: the velocity becomes the gradient.
    pub(super) first: bool,
    pub(super) momentum: f32,
    /// `1 - dampening`.
    pub(super) undamped: f32,
    pub(super) nesterov: bool,
    pub(super) learning_rate: f32,
}

/// `v = momentum * v + (1 - dampening) * g; next = w - learning_rate * v`; nesterov: `.. * (g + momentum * v)`.
pub(super) fn update(
    scalars: &Momentum,
    weights: &[f32],
    gradient: &[f32],
    velocity: &mut [f32],
    next: &mut [f32],
) {
    let &Momentum { scale, weight_decay, first, momentum, undamped, nesterov, learning_rate } = scalars;
    for (((next, velocity), &weight), &gradient) in next.iter_mut().zip(velocity).zip(weights).zip(gradient) {
        let gradient = gradient * scale + weight_decay * weight;
        *velocity = if first { gradient } else { *velocity * momentum + undamped * gradient };
        let direction = if nesterov { gradient + momentum * *velocity } else { *velocity };
        *next = weight - learning_rate * direction;
    }
}
