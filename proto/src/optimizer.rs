//! The optimizer of a job: the `[optimizer]` table of `JOB.toml`, or JSON in the job's
//! specification.
//!
//! Two types answer two questions. [`OptimizerSpec`] is what the user wrote: flat, every setting
//! optional, so that one pass can name all violations. [`Rule`] is what a ps computes with: only
//! the settings of its kind, filled in and in range. [`OptimizerSpec::validate`] is the only way
//! from one to the other.
//!
//! Names and defaults are PyTorch's (`torch.optim`, 2.11), so that users can copy a configuration.
//! Those of ftrl and lamb are from their papers: `torch.optim` has neither.

mod groups;
mod rule;
mod schedule;

use std::fmt;

use serde::{Deserialize, Serialize};

pub use groups::{GROUPS_MAX, GroupSpec};
pub use rule::Rule;
pub use schedule::{Schedule, ScheduleKind, power};

/// The `[optimizer]` table of a job: how a step's mean gradient becomes new weights.
///
/// ```
/// use proto::optimizer::{OptimizerSpec, Rule};
///
/// let spec: OptimizerSpec = toml::from_str(
///     "kind = 'adam'\nlearning_rate = 1e-3\nschedule = { kind = 'cosine', warmup_steps = 100 }",
/// )?;
/// let Rule::Adam { betas, .. } = spec.validate()? else { unreachable!() };
/// assert_eq!(betas, [0.9, 0.999]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, expecting = "the settings of [optimizer]")]
pub struct OptimizerSpec {
    /// Update rule.
    pub kind: OptimizerKind,
    /// Step size before the schedule's factor; above 0. No default, because it always depends on
    /// the model. Usual first values: 0.1 for sgd and ftrl, 0.01 for momentum, nesterov, adagrad
    /// and rmsprop, 0.001 for adam, adamw, amsgrad and amsgradw, 0.002 for lamb, 1 for adadelta.
    pub learning_rate: f64,
    /// Change of the learning rate over the job's steps. Default: none.
    #[serde(default)]
    pub schedule: Schedule,
    /// momentum, nesterov, rmsprop: share of the velocity kept from one step to the next, in (0,
    /// 1). Default 0.9; rmsprop has no velocity unless this is set. Raise it towards 0.99 for very
    /// small batches, and lower the learning rate in proportion to `1 - momentum`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub momentum: Option<f64>,
    /// momentum: share of each gradient withheld from the velocity, in [0, 1). Default 0. Set it to
    /// the value of `momentum` to make the velocity an average of the gradients instead of a sum.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dampening: Option<f64>,
    /// All kinds but ftrl: pull of the weights towards zero, at least 0. Default 0; adamw, amsgradw
    /// and lamb 0.01. adamw and amsgradw shrink the weights by `learning_rate * weight_decay` at
    /// each step; lamb adds `weight_decay * weights` to Adam's step before it scales that step;
    /// every other kind adds it to the gradient.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub weight_decay: Option<f64>,
    /// adam, adamw, amsgrad, amsgradw, lamb: share kept of the running means of the gradient and of
    /// its square, each in [0, 1). Default [0.9, 0.999]. Lower the second (0.98, 0.95) when rare
    /// large gradients make the loss jump.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub betas: Option<[f64; 2]>,
    /// adam, adamw, amsgrad, amsgradw, adagrad, rmsprop, adadelta, lamb: added to the denominator
    /// (adadelta: under both roots); above 0 also as an f32. Default 1e-8; adagrad 1e-10; adadelta
    /// and lamb 1e-6. Raise it (1e-6 to 1e-3) when parameters with tiny gradients move too fast.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub eps: Option<f64>,
    /// adam, adamw, amsgrad, amsgradw, rmsprop: added to the square under the root of the
    /// denominator, at least 0. Default 0. Only for numbers that another library computes: optax
    /// calls it so, and the epsilon of RMSprop of Keras is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub eps_root: Option<f64>,
    /// adam and its relatives: `eps` and `eps_root` are added before the bias correction of the
    /// square instead of after it. Default false. Only for numbers that another library computes:
    /// Keras and TensorFlow do so. It is the "epsilon hat" of Adam's paper.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub eps_before_correction: Option<bool>,
    /// adagrad: the learning rate of step t (from 0) is divided by `1 + t * lr_decay`; at least 0.
    /// Default 0.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lr_decay: Option<f64>,
    /// adagrad, ftrl: first value of the sum of squared gradients, at least 0. Default 0. Raise it
    /// (0.1) to tame the first steps, whose size is otherwise the learning rate, however small the
    /// gradient.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub initial_accumulator_value: Option<f64>,
    /// rmsprop: share kept of the running mean of the squared gradient, in [0, 1). Default 0.99.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub alpha: Option<f64>,
    /// rmsprop: divide by the gradient's deviation from its running mean instead of by its root
    /// mean square. Default false. One slot more; steadier where gradients keep their sign for
    /// long.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub centered: Option<bool>,
    /// adadelta: share kept of the running means of the squared gradient and of the squared update,
    /// in [0, 1). Default 0.9.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rho: Option<f64>,
    /// ftrl: added to the root of the sum of squared gradients; above 0. Default 1. Larger: smaller
    /// first steps.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub beta: Option<f64>,
    /// ftrl: how much evidence (the sum of gradients) a weight needs to be other than exactly 0; at
    /// least 0. Default 0. Raise it for sparser models.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub l1: Option<f64>,
    /// ftrl: pull of the weights towards zero, at least 0. Default 0.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub l2: Option<f64>,
    /// All kinds but lamb: largest norm of a step's mean gradient over all parameters; above 0. A
    /// larger gradient is scaled down to this norm. Default: no limit. (PyTorch:
    /// `clip_grad_norm_`.) Set it (1 is customary) when rare large gradients make the loss jump.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub clip_norm: Option<f64>,
    /// Tensors with settings of their own. Default: none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub groups: Vec<GroupSpec>,
}

/// The update rules, by their names in a job file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OptimizerKind {
    /// `torch.optim.SGD`: plain gradient descent.
    Sgd,
    /// `torch.optim.SGD(momentum=..)`: gradient descent with heavy-ball velocity.
    Momentum,
    /// `torch.optim.SGD(momentum=.., nesterov=True)`: gradient descent with Nesterov's look-ahead
    /// of one velocity.
    Nesterov,
    /// `torch.optim.Adam` (Kingma and Ba, 2014).
    Adam,
    /// `torch.optim.AdamW`: Adam with decoupled weight decay (Loshchilov and Hutter, 2017).
    AdamW,
    /// `torch.optim.Adam(amsgrad=True)`: Adam whose denominator never shrinks (Reddi, Kale and
    /// Kumar, 2018).
    Amsgrad,
    /// `torch.optim.AdamW(amsgrad=True)`: the denominator of amsgrad and the weight decay of adamw.
    Amsgradw,
    /// `torch.optim.Adagrad` (Duchi, Hazan and Singer, 2011).
    Adagrad,
    /// `torch.optim.RMSprop` (Hinton, Srivastava and Swersky, 2012; centered: Graves, 2013).
    Rmsprop,
    /// `torch.optim.Adadelta` (Zeiler, 2012).
    Adadelta,
    /// FTRL-Proximal, per coordinate (McMahan et al., 2013), for linear models on sparse features.
    /// The weights are a function of the slots alone, so the first step forgets initial weights
    /// other than 0.
    Ftrl,
    /// LAMB (You et al., 2019), for very large batches: Adam whose step for each tensor has the
    /// length of the learning rate times the tensor's norm.
    Lamb,
}

/// All violations of an [`OptimizerSpec`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}", violations.join("; "))]
pub struct InvalidOptimizer {
    /// One message per violation; each begins with the setting, as in `optimizer.eps`.
    pub violations: Vec<String>,
}

impl OptimizerSpec {
    /// Returns a specification with the defaults of `kind`.
    pub fn new(kind: OptimizerKind, learning_rate: f64) -> Self {
        Self {
            kind,
            learning_rate,
            schedule: Schedule::default(),
            momentum: None,
            dampening: None,
            weight_decay: None,
            betas: None,
            eps: None,
            eps_root: None,
            eps_before_correction: None,
            lr_decay: None,
            initial_accumulator_value: None,
            alpha: None,
            centered: None,
            rho: None,
            beta: None,
            l1: None,
            l2: None,
            clip_norm: None,
            groups: Vec::new(),
        }
    }

    /// Checks every setting and fills in the defaults. The rule is that of the tensors without a
    /// group.
    ///
    /// # Errors
    /// All violations at once: settings that the kind does not have, values out of range, a
    /// schedule that lacks a setting, and the same in groups.
    pub fn validate(&self) -> Result<Rule, InvalidOptimizer> {
        let mut violations = Vec::new();
        self.check(&mut violations);
        self.check_groups(&mut violations);
        if violations.is_empty() { Ok(self.rule()) } else { Err(InvalidOptimizer { violations }) }
    }

    /// Checks every setting but the groups.
    fn check(&self, violations: &mut Vec<String>) {
        self.check_foreign(violations);
        self.check_ranges(violations);
        self.schedule.check(violations);
    }

    /// Returns the setting that makes a step need norms over more than one chunk: `clip_norm` or
    /// the kind `lamb`.
    pub fn needs_norms(&self) -> Option<&'static str> {
        match self.kind {
            OptimizerKind::Lamb => Some("kind = \"lamb\""),
            _ => self.clip_norm.map(|_| "clip_norm"),
        }
    }

    /// Checks for settings of other kinds. They are errors, because the user expects an effect.
    fn check_foreign(&self, violations: &mut Vec<String>) {
        let kind = self.kind;
        for (name, given) in [
            ("momentum", self.momentum.is_some()),
            ("dampening", self.dampening.is_some()),
            ("weight_decay", self.weight_decay.is_some()),
            ("betas", self.betas.is_some()),
            ("eps", self.eps.is_some()),
            ("eps_root", self.eps_root.is_some()),
            ("eps_before_correction", self.eps_before_correction.is_some()),
            ("lr_decay", self.lr_decay.is_some()),
            ("initial_accumulator_value", self.initial_accumulator_value.is_some()),
            ("alpha", self.alpha.is_some()),
            ("centered", self.centered.is_some()),
            ("rho", self.rho.is_some()),
            ("beta", self.beta.is_some()),
            ("l1", self.l1.is_some()),
            ("l2", self.l2.is_some()),
            ("clip_norm", self.clip_norm.is_some()),
        ] {
            if given && !kind.settings().contains(&name) {
                let owners: Vec<_> = OptimizerKind::ALL
                    .into_iter()
                    .filter(|other| other.settings().contains(&name))
                    .map(|other| other.to_string())
                    .collect();
                violations.push(format!(
                    "optimizer.{name}: not a setting of kind `{kind}` (which has {}); remove it or choose a kind that \
                     has it: {}",
                    kind.settings().join(", "),
                    owners.join(", ")
                ));
            }
        }
    }

    fn check_ranges(&self, violations: &mut Vec<String>) {
        let mut check = |name: &str, value: Option<f64>, valid: fn(f64) -> bool, expected: &str| {
            if let Some(value) = value.filter(|&value| !valid(value)) {
                violations.push(format!("optimizer.{name} = {value}, expected {expected}"));
            }
        };
        let at_least_zero = |value: f64| value >= 0.0 && fits_f32(value);
        let above_zero = |value: f64| value as f32 > 0.0 && fits_f32(value);
        let share = |value: f64| (0.0..1.0).contains(&value);
        check("learning_rate", Some(self.learning_rate), above_zero, "a number above 0 that fits an f32");
        check("momentum", self.momentum, |value| value > 0.0 && value < 1.0, "a number in (0, 1)");
        check("dampening", self.dampening, share, "a number in [0, 1)");
        check("weight_decay", self.weight_decay, at_least_zero, "a finite number, at least 0");
        check("betas[0]", self.betas.map(|betas| betas[0]), share, "a number in [0, 1)");
        check("betas[1]", self.betas.map(|betas| betas[1]), share, "a number in [0, 1)");
        check(
            "eps",
            self.eps,
            |value| fits_f32(value) && value >= f64::from(f32::MIN_POSITIVE),
            "at least 1.2e-38, the smallest normal f32: without it a gradient of zero divides 0 by 0",
        );
        check("eps_root", self.eps_root, at_least_zero, "a finite number, at least 0");
        check("lr_decay", self.lr_decay, at_least_zero, "a finite number, at least 0");
        check(
            "initial_accumulator_value",
            self.initial_accumulator_value,
            at_least_zero,
            "a finite number, at least 0",
        );
        check("alpha", self.alpha, share, "a number in [0, 1)");
        check("rho", self.rho, share, "a number in [0, 1)");
        check("beta", self.beta, above_zero, "a number above 0 that fits an f32");
        check("l1", self.l1, at_least_zero, "a finite number, at least 0");
        check("l2", self.l2, at_least_zero, "a finite number, at least 0");
        check("clip_norm", self.clip_norm, above_zero, "a number above 0 that fits an f32");
    }

    /// Fills in the defaults: those of `torch.optim`, or of the paper for ftrl and lamb. No other
    /// code has them.
    fn rule(&self) -> Rule {
        let weight_decay = self.weight_decay.unwrap_or(0.0);
        match self.kind {
            OptimizerKind::Sgd => Rule::Sgd { weight_decay },
            OptimizerKind::Momentum | OptimizerKind::Nesterov => Rule::Momentum {
                momentum: self.momentum.unwrap_or(0.9),
                dampening: self.dampening.unwrap_or(0.0),
                nesterov: self.kind == OptimizerKind::Nesterov,
                weight_decay,
            },
            OptimizerKind::Adam | OptimizerKind::AdamW | OptimizerKind::Amsgrad | OptimizerKind::Amsgradw => {
                let decoupled = matches!(self.kind, OptimizerKind::AdamW | OptimizerKind::Amsgradw);
                Rule::Adam {
                    betas: self.betas.unwrap_or([0.9, 0.999]),
                    eps: self.eps.unwrap_or(1e-8),
                    eps_root: self.eps_root.unwrap_or(0.0),
                    eps_before_correction: self.eps_before_correction.unwrap_or(false),
                    weight_decay: self.weight_decay.unwrap_or(if decoupled { 1e-2 } else { 0.0 }),
                    decoupled,
                    amsgrad: matches!(self.kind, OptimizerKind::Amsgrad | OptimizerKind::Amsgradw),
                }
            }
            OptimizerKind::Adagrad => Rule::Adagrad {
                lr_decay: self.lr_decay.unwrap_or(0.0),
                eps: self.eps.unwrap_or(1e-10),
                weight_decay,
                initial_accumulator_value: self.initial_accumulator_value.unwrap_or(0.0),
            },
            OptimizerKind::Rmsprop => Rule::Rmsprop {
                alpha: self.alpha.unwrap_or(0.99),
                eps: self.eps.unwrap_or(1e-8),
                eps_root: self.eps_root.unwrap_or(0.0),
                weight_decay,
                momentum: self.momentum.unwrap_or(0.0),
                centered: self.centered.unwrap_or(false),
            },
            OptimizerKind::Adadelta => {
                Rule::Adadelta { rho: self.rho.unwrap_or(0.9), eps: self.eps.unwrap_or(1e-6), weight_decay }
            }
            OptimizerKind::Ftrl => Rule::Ftrl {
                beta: self.beta.unwrap_or(1.0),
                l1: self.l1.unwrap_or(0.0),
                l2: self.l2.unwrap_or(0.0),
                initial_accumulator_value: self.initial_accumulator_value.unwrap_or(0.0),
            },
            OptimizerKind::Lamb => Rule::Lamb {
                betas: self.betas.unwrap_or([0.9, 0.999]),
                eps: self.eps.unwrap_or(1e-6),
                weight_decay: self.weight_decay.unwrap_or(1e-2),
            },
        }
    }
}

impl OptimizerKind {
    /// All kinds, in the order of the documentation.
    pub const ALL: [Self; 12] = [
        Self::Sgd,
        Self::Momentum,
        Self::Nesterov,
        Self::Adam,
        Self::AdamW,
        Self::Amsgrad,
        Self::Amsgradw,
        Self::Adagrad,
        Self::Rmsprop,
        Self::Adadelta,
        Self::Ftrl,
        Self::Lamb,
    ];

    /// Returns the settings of this kind beside `learning_rate` and `schedule`, which every kind
    /// has.
    pub fn settings(self) -> &'static [&'static str] {
        match self {
            Self::Sgd => &["weight_decay", "clip_norm"],
            Self::Momentum => &["momentum", "dampening", "weight_decay", "clip_norm"],
            // PyTorch: "Nesterov momentum requires a momentum and zero dampening".
            Self::Nesterov => &["momentum", "weight_decay", "clip_norm"],
            Self::Adam | Self::AdamW | Self::Amsgrad | Self::Amsgradw => {
                &["betas", "eps", "eps_root", "eps_before_correction", "weight_decay", "clip_norm"]
            }
            Self::Adagrad => &["lr_decay", "eps", "weight_decay", "initial_accumulator_value", "clip_norm"],
            Self::Rmsprop => {
                &["alpha", "eps", "eps_root", "weight_decay", "momentum", "centered", "clip_norm"]
            }
            Self::Adadelta => &["rho", "eps", "weight_decay", "clip_norm"],
            Self::Ftrl => &["beta", "l1", "l2", "initial_accumulator_value", "clip_norm"],
            // The weights' norms decide the length of a lamb step, so `clip_norm` would have no
            // effect.
            Self::Lamb => &["betas", "eps", "weight_decay"],
        }
    }
}

impl fmt::Display for OptimizerKind {
    /// Writes the name in the job file.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Sgd => "sgd",
            Self::Momentum => "momentum",
            Self::Nesterov => "nesterov",
            Self::Adam => "adam",
            Self::AdamW => "adamw",
            Self::Amsgrad => "amsgrad",
            Self::Amsgradw => "amsgradw",
            Self::Adagrad => "adagrad",
            Self::Rmsprop => "rmsprop",
            Self::Adadelta => "adadelta",
            Self::Ftrl => "ftrl",
            Self::Lamb => "lamb",
        })
    }
}

/// Returns whether `value` fits into an f32. Kernels compute in f32: a setting that overflows it
/// would poison every weight in one step.
fn fits_f32(value: f64) -> bool {
    (value as f32).is_finite()
}

#[cfg(test)]
mod tests;
