//! The optimizer as a job describes it: the `[optimizer]` table of `JOB.toml`, and as JSON in the job's specification.
//!
//! Two types, because they answer two questions. [`OptimizerSpec`] is what the user wrote: flat, every setting
//! optional, so that one pass can name everything that is wrong with it. [`Rule`] is what a ps computes with: only the
//! settings of its kind, every one filled in and in range. [`OptimizerSpec::validate`] is the only way from one to the
//! other. Names and defaults are PyTorch's (`torch.optim`, 2.11), so a configuration moves over by copying.

mod schedule;

use std::fmt;

use serde::{Deserialize, Serialize};

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
#[serde(deny_unknown_fields)]
pub struct OptimizerSpec {
    /// Which update rule.
    pub kind: OptimizerKind,
    /// Step size before the schedule's factor; above 0. No default: it is the one setting that always depends on the
    /// model. Customary first tries: 0.1 for sgd, 0.01 for momentum, nesterov and adagrad, 0.001 for adam and adamw.
    pub learning_rate: f64,
    /// How the learning rate changes over the job's steps. Default: not at all.
    #[serde(default)]
    pub schedule: Schedule,
    /// momentum, nesterov: share of the velocity kept from one step to the next, in (0, 1). Default 0.9. Raise it
    /// towards 0.99 for very small batches, and lower the learning rate by as much as `1 - momentum` shrinks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub momentum: Option<f64>,
    /// momentum: share of each gradient withheld from the velocity, in [0, 1). Default 0. Set it to the value of
    /// `momentum` to make the velocity an average of the gradients instead of a sum.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dampening: Option<f64>,
    /// All kinds: pull of the weights towards zero, at least 0. Default 0; adamw 0.01. adamw shrinks the weights
    /// by `learning_rate * weight_decay` at each step; every other kind adds `weight_decay * weights` to the gradient.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub weight_decay: Option<f64>,
    /// adam, adamw: share kept of the running means of the gradient and of its square, each in [0, 1). Default
    /// [0.9, 0.999]. Lower the second (0.98, 0.95) when rare large gradients make the loss jump.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub betas: Option<[f64; 2]>,
    /// adam, adamw, adagrad: added to the denominator; above 0 also as an f32. Default 1e-8; adagrad 1e-10. Raise it
    /// (1e-6 to 1e-3) when parameters with tiny gradients move too fast.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub eps: Option<f64>,
    /// adagrad: the learning rate of step t (from 0) is divided by `1 + t * lr_decay`; at least 0. Default 0.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lr_decay: Option<f64>,
    /// adagrad: first value of the sum of squared gradients, at least 0. Default 0. Raise it (0.1) to tame the first
    /// steps, whose size is otherwise the learning rate whatever the gradient.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub initial_accumulator_value: Option<f64>,
}

/// The update rules, by the name a job calls them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OptimizerKind {
    /// `torch.optim.SGD`: plain gradient descent.
    Sgd,
    /// `torch.optim.SGD(momentum=..)`: gradient descent with heavy-ball velocity.
    Momentum,
    /// `torch.optim.SGD(momentum=.., nesterov=True)`: the gradient is looked at one velocity ahead.
    Nesterov,
    /// `torch.optim.Adam` (Kingma and Ba, 2014).
    Adam,
    /// `torch.optim.AdamW`: Adam with decoupled weight decay (Loshchilov and Hutter, 2017).
    AdamW,
    /// `torch.optim.Adagrad` (Duchi, Hazan and Singer, 2011).
    Adagrad,
}

/// A validated update rule: the settings of its kind, defaults filled in. What [`OptimizerSpec::validate`] returns.
///
/// Kinds that differ in one scalar share a variant, as they share a kernel.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Rule {
    /// sgd.
    Sgd {
        /// See [`OptimizerSpec::weight_decay`].
        weight_decay: f64,
    },
    /// momentum and nesterov.
    Momentum {
        /// See [`OptimizerSpec::momentum`].
        momentum: f64,
        /// See [`OptimizerSpec::dampening`]; 0 for nesterov.
        dampening: f64,
        /// Step along `gradient + momentum * velocity` instead of along the velocity.
        nesterov: bool,
        /// See [`OptimizerSpec::weight_decay`].
        weight_decay: f64,
    },
    /// adam and adamw.
    Adam {
        /// See [`OptimizerSpec::betas`].
        betas: [f64; 2],
        /// See [`OptimizerSpec::eps`].
        eps: f64,
        /// See [`OptimizerSpec::weight_decay`].
        weight_decay: f64,
        /// adamw: decay the weights themselves instead of adding to the gradient.
        decoupled: bool,
    },
    /// adagrad.
    Adagrad {
        /// See [`OptimizerSpec::lr_decay`].
        lr_decay: f64,
        /// See [`OptimizerSpec::eps`].
        eps: f64,
        /// See [`OptimizerSpec::weight_decay`].
        weight_decay: f64,
        /// See [`OptimizerSpec::initial_accumulator_value`].
        initial_accumulator_value: f64,
    },
}

impl Rule {
    /// Names of the optimizer's slots: those of PyTorch's `optimizer.state_dict()`.
    pub const fn slot_names(&self) -> &'static [&'static str] {
        match self {
            Self::Sgd { .. } => &[],
            Self::Momentum { .. } => &["momentum_buffer"],
            Self::Adam { .. } => &["exp_avg", "exp_avg_sq"],
            Self::Adagrad { .. } => &["sum"],
        }
    }
}

/// Everything that is wrong with an [`OptimizerSpec`], not only the first of it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}", violations.join("; "))]
pub struct InvalidOptimizer {
    /// One message per violation; each begins with the setting, as in `optimizer.eps`.
    pub violations: Vec<String>,
}

impl OptimizerSpec {
    /// A specification with the defaults of `kind`.
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
            lr_decay: None,
            initial_accumulator_value: None,
        }
    }

    /// Checks every setting and fills in the defaults.
    ///
    /// # Errors
    ///
    /// All violations at once: settings that the kind does not have, values out of range, a schedule that lacks a
    /// setting.
    pub fn validate(&self) -> Result<Rule, InvalidOptimizer> {
        let mut violations = Vec::new();
        self.check_foreign(&mut violations);
        self.check_ranges(&mut violations);
        self.schedule.check(&mut violations);
        if violations.is_empty() { Ok(self.rule()) } else { Err(InvalidOptimizer { violations }) }
    }

    /// A setting of another kind is an error, not a no-op: the user believes that it does something.
    fn check_foreign(&self, violations: &mut Vec<String>) {
        let kind = self.kind;
        for (name, given) in [
            ("momentum", self.momentum.is_some()),
            ("dampening", self.dampening.is_some()),
            ("weight_decay", self.weight_decay.is_some()),
            ("betas", self.betas.is_some()),
            ("eps", self.eps.is_some()),
            ("lr_decay", self.lr_decay.is_some()),
            ("initial_accumulator_value", self.initial_accumulator_value.is_some()),
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
        check("lr_decay", self.lr_decay, at_least_zero, "a finite number, at least 0");
        check(
            "initial_accumulator_value",
            self.initial_accumulator_value,
            at_least_zero,
            "a finite number, at least 0",
        );
    }

    /// The defaults of `torch.optim`, in one place.
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
            OptimizerKind::Adam | OptimizerKind::AdamW => {
                let decoupled = self.kind == OptimizerKind::AdamW;
                Rule::Adam {
                    betas: self.betas.unwrap_or([0.9, 0.999]),
                    eps: self.eps.unwrap_or(1e-8),
                    weight_decay: self.weight_decay.unwrap_or(if decoupled { 1e-2 } else { 0.0 }),
                    decoupled,
                }
            }
            OptimizerKind::Adagrad => Rule::Adagrad {
                lr_decay: self.lr_decay.unwrap_or(0.0),
                eps: self.eps.unwrap_or(1e-10),
                weight_decay,
                initial_accumulator_value: self.initial_accumulator_value.unwrap_or(0.0),
            },
        }
    }
}

impl OptimizerKind {
    /// Every kind, in the order of the documentation.
    pub const ALL: [Self; 6] =
        [Self::Sgd, Self::Momentum, Self::Nesterov, Self::Adam, Self::AdamW, Self::Adagrad];

    /// The settings of this kind beside `learning_rate` and `schedule`, which all have.
    pub fn settings(self) -> &'static [&'static str] {
        match self {
            Self::Sgd => &["weight_decay"],
            Self::Momentum => &["momentum", "dampening", "weight_decay"],
            // PyTorch: "Nesterov momentum requires a momentum and zero dampening".
            Self::Nesterov => &["momentum", "weight_decay"],
            Self::Adam | Self::AdamW => &["betas", "eps", "weight_decay"],
            Self::Adagrad => &["lr_decay", "eps", "weight_decay", "initial_accumulator_value"],
        }
    }
}

impl fmt::Display for OptimizerKind {
    /// The name in the job file.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Sgd => "sgd",
            Self::Momentum => "momentum",
            Self::Nesterov => "nesterov",
            Self::Adam => "adam",
            Self::AdamW => "adamw",
            Self::Adagrad => "adagrad",
        })
    }
}

/// Kernels compute in f32: a setting that overflows it would poison every weight in one step.
fn fits_f32(value: f64) -> bool {
    (value as f32).is_finite()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> OptimizerSpec {
        toml::from_str(text).expect("a readable table")
    }

    fn violations(text: &str) -> Vec<String> {
        parse(text).validate().expect_err("an invalid table").violations
    }

    #[test]
    fn defaults_are_those_of_pytorch() {
        let rule = |kind| OptimizerSpec::new(kind, 0.1).validate().expect("valid");
        assert_eq!(rule(OptimizerKind::Sgd), Rule::Sgd { weight_decay: 0.0 });
        assert_eq!(
            rule(OptimizerKind::Nesterov),
            Rule::Momentum { momentum: 0.9, dampening: 0.0, nesterov: true, weight_decay: 0.0 }
        );
        assert_eq!(
            rule(OptimizerKind::Adam),
            Rule::Adam { betas: [0.9, 0.999], eps: 1e-8, weight_decay: 0.0, decoupled: false }
        );
        assert_eq!(
            rule(OptimizerKind::AdamW),
            Rule::Adam { betas: [0.9, 0.999], eps: 1e-8, weight_decay: 0.01, decoupled: true }
        );
        assert_eq!(
            rule(OptimizerKind::Adagrad),
            Rule::Adagrad { lr_decay: 0.0, eps: 1e-10, weight_decay: 0.0, initial_accumulator_value: 0.0 }
        );
    }

    #[test]
    fn all_violations_are_reported_at_once() {
        let found = violations(
            "kind = 'sgd'\nlearning_rate = -1\neps = 1e-8\nweight_decay = nan\n\
             schedule = { kind = 'step', factor = 2 }",
        );
        assert_eq!(
            found,
            [
                "optimizer.eps: not a setting of kind `sgd` (which has weight_decay); remove it or choose a kind \
                 that has it: adam, adamw, adagrad",
                "optimizer.learning_rate = -1, expected a number above 0 that fits an f32",
                "optimizer.weight_decay = NaN, expected a finite number, at least 0",
                "optimizer.schedule.every_steps: missing, kind `step` needs it",
                "optimizer.schedule.factor = 2, expected a number in (0, 1]",
            ]
        );
    }

    #[test]
    fn each_setting_has_its_range() {
        for (table, setting) in [
            ("kind = 'sgd'\nlearning_rate = 0", "learning_rate"),
            ("kind = 'sgd'\nlearning_rate = nan", "learning_rate"),
            ("kind = 'sgd'\nlearning_rate = 1e39", "learning_rate"),
            ("kind = 'sgd'\nlearning_rate = 1e-46", "learning_rate"),
            ("kind = 'momentum'\nlearning_rate = 1\nmomentum = 0", "momentum"),
            ("kind = 'nesterov'\nlearning_rate = 1\nmomentum = 1.0", "momentum"),
            ("kind = 'nesterov'\nlearning_rate = 1\ndampening = 0.0", "dampening"),
            ("kind = 'momentum'\nlearning_rate = 1\ndampening = 1", "dampening"),
            ("kind = 'adam'\nlearning_rate = 1\nbetas = [1.0, 0.9]", "betas[0]"),
            ("kind = 'adam'\nlearning_rate = 1\nbetas = [0.9, -0.1]", "betas[1]"),
            ("kind = 'adam'\nlearning_rate = 1\neps = 0", "eps"),
            ("kind = 'adamw'\nlearning_rate = 1\nweight_decay = -0.1", "weight_decay"),
            ("kind = 'adagrad'\nlearning_rate = 1\neps = 1e-46", "eps"),
            ("kind = 'adagrad'\nlearning_rate = 1\nlr_decay = inf", "lr_decay"),
            (
                "kind = 'adagrad'\nlearning_rate = 1\ninitial_accumulator_value = -1",
                "initial_accumulator_value",
            ),
        ] {
            let found = violations(table);
            assert_eq!(found.len(), 1, "{table}: {found:?}");
            assert!(found[0].starts_with(&format!("optimizer.{setting}")), "{table}: {found:?}");
        }
    }

    #[test]
    fn an_unknown_key_is_an_error_that_lists_the_known_ones() {
        let error = toml::from_str::<OptimizerSpec>("kind = 'sgd'\nlearning_rate = 1\nmomentun = 0.9")
            .expect_err("a misspelt key")
            .to_string();
        assert!(error.contains("unknown field `momentun`") && error.contains("`momentum`"), "{error}");
        assert!(toml::from_str::<OptimizerSpec>("kind = 'sgdm'\nlearning_rate = 1").is_err());
        assert!(toml::from_str::<Schedule>("kind = 'cosine'\nwarmup = 3").is_err());
    }

    #[test]
    fn the_table_survives_json_and_toml() {
        let spec = parse(
            "kind = 'adamw'\nlearning_rate = 3e-4\nbetas = [0.9, 0.95]\neps = 1e-6\nweight_decay = 0.1\n\
             schedule = { kind = 'cosine', warmup_steps = 100, total_steps = 5000, minimum_factor = 0.1 }",
        );
        let json = serde_json::to_string(&spec).expect("serialisable");
        assert_eq!(serde_json::from_str::<OptimizerSpec>(&json).expect("readable"), spec);
        assert!(!json.contains("null") && !json.contains("momentum"), "{json}");
        assert_eq!(parse(&toml::to_string(&spec).expect("serialisable")), spec);
    }

    #[test]
    fn every_kind_prints_the_name_it_is_read_by() {
        for kind in OptimizerKind::ALL {
            assert_eq!(serde_json::to_value(kind).expect("serialisable"), kind.to_string());
        }
    }
}
