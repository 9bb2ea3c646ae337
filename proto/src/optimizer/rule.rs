//! The update rule with which a ps computes, with all its settings and the names of its slots.

/// A validated update rule: the settings of its kind, defaults filled in.
/// [`OptimizerSpec::validate`] returns it.
///
/// Kinds that differ in one scalar share a variant, as they share a kernel. [`OptimizerSpec`]
/// explains each setting at the field of the same name.
///
/// [`OptimizerSpec`]: super::OptimizerSpec [`OptimizerSpec::validate`]:
/// super::OptimizerSpec::validate
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Rule {
    /// sgd.
    Sgd {
        /// Added to the gradient, times the weights.
        weight_decay: f64,
    },
    /// momentum and nesterov.
    Momentum {
        /// Share of the velocity that is kept.
        momentum: f64,
        /// Share of the gradient withheld; 0 for nesterov.
        dampening: f64,
        /// Step along `gradient + momentum * velocity` instead of along the velocity.
        nesterov: bool,
        /// Added to the gradient, times the weights.
        weight_decay: f64,
    },
    /// adam, adamw, amsgrad and amsgradw.
    Adam {
        /// Shares of the running means that are kept.
        betas: [f64; 2],
        /// Added to the denominator.
        eps: f64,
        /// Added under the root of the denominator.
        eps_root: f64,
        /// Add both before the bias correction of the square.
        eps_before_correction: bool,
        /// Added to the gradient, times the weights; or see `decoupled`.
        weight_decay: f64,
        /// adamw, amsgradw: decay the weights themselves instead of adding to the gradient.
        decoupled: bool,
        /// amsgrad, amsgradw: divide by the largest mean square so far, not by the current one.
        amsgrad: bool,
    },
    /// adagrad.
    Adagrad {
        /// Decay of the learning rate.
        lr_decay: f64,
        /// Added to the denominator.
        eps: f64,
        /// Added to the gradient, times the weights.
        weight_decay: f64,
        /// First value of the sum of squares.
        initial_accumulator_value: f64,
    },
    /// rmsprop.
    Rmsprop {
        /// Share of the running mean square that is kept.
        alpha: f64,
        /// Added to the denominator.
        eps: f64,
        /// Added under the root of the denominator.
        eps_root: f64,
        /// Added to the gradient, times the weights.
        weight_decay: f64,
        /// Share of the velocity that is kept. 0 means that there is no velocity.
        momentum: f64,
        /// Divide by the deviation from the running mean instead of by the root mean square.
        centered: bool,
    },
    /// adadelta.
    Adadelta {
        /// Share of both running mean squares that is kept.
        rho: f64,
        /// Added under both roots.
        eps: f64,
        /// Added to the gradient, times the weights.
        weight_decay: f64,
    },
    /// ftrl.
    Ftrl {
        /// Added to the root of the sum of squares.
        beta: f64,
        /// Evidence below which a coordinate's weight is 0.
        l1: f64,
        /// Pull of the weights towards zero.
        l2: f64,
        /// First value of the sum of squares.
        initial_accumulator_value: f64,
    },
    /// lamb.
    Lamb {
        /// Shares of the running means that are kept.
        betas: [f64; 2],
        /// Added to the denominator.
        eps: f64,
        /// Added to the direction, times the weights.
        weight_decay: f64,
    },
}

impl Rule {
    /// Returns the names of the slots, in the order of kernels and checkpoints. They are PyTorch's
    /// names in `optimizer.state_dict()`. The names of ftrl are from its paper, those of lamb are
    /// Adam's.
    pub const fn slot_names(&self) -> &'static [&'static str] {
        match self {
            Self::Sgd { .. } => &[],
            Self::Momentum { .. } => &["momentum_buffer"],
            Self::Adam { amsgrad: false, .. } | Self::Lamb { .. } => &["exp_avg", "exp_avg_sq"],
            Self::Adam { amsgrad: true, .. } => &["exp_avg", "exp_avg_sq", "max_exp_avg_sq"],
            Self::Adagrad { .. } => &["sum"],
            Self::Rmsprop { momentum, centered, .. } => match (*momentum > 0.0, *centered) {
                (false, false) => &["square_avg"],
                (true, false) => &["square_avg", "momentum_buffer"],
                (false, true) => &["square_avg", "grad_avg"],
                (true, true) => &["square_avg", "momentum_buffer", "grad_avg"],
            },
            Self::Adadelta { .. } => &["square_avg", "acc_delta"],
            Self::Ftrl { .. } => &["z", "n"],
        }
    }
}
