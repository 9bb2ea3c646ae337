//! Groups of tensors with settings of their own: `[[optimizer.groups]]` of a job file.
//!
//! A group is the job's optimizer with some settings replaced. [`OptimizerSpec::grouped`] makes one
//! specification of each, so ranges and defaults have no second home.

use std::collections::HashMap;

use serde::{Deserialize, Serialize};

use super::{InvalidOptimizer, OptimizerSpec, Rule, Schedule};
use crate::hint;
use crate::tensor::{TensorRole, TensorSpec};

/// Most groups of one job.
pub const GROUPS_MAX: usize = 1024;

/// Settings of some tensors, in place of those of the whole job. A setting that a group lacks is
/// the job's.
///
/// The kind of the rule, `centered`, the place of `eps` and `clip_norm` are the same for all
/// tensors. The settings of a group have the ranges of the fields of [`OptimizerSpec`] with their
/// names.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, expecting = "the settings of a group of [optimizer]")]
pub struct GroupSpec {
    /// Names of parameters. A `*` stands for any characters, so `*.bias` are the biases of all
    /// layers. Each name or pattern needs a parameter, and a parameter has one group at most.
    pub tensors: Vec<String>,
    /// Step size before the factor of the schedule.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub learning_rate: Option<f64>,
    /// Change of the learning rate over the steps.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub schedule: Option<Schedule>,
    /// momentum, nesterov: share of the velocity that a step keeps. rmsprop: the same, if the job
    /// has a velocity.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub momentum: Option<f64>,
    /// momentum: share of each gradient withheld from the velocity.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dampening: Option<f64>,
    /// All kinds but ftrl: pull of the weights towards zero.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub weight_decay: Option<f64>,
    /// adam, adamw, amsgrad, amsgradw, lamb: share kept of the running means.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub betas: Option<[f64; 2]>,
    /// adam and its relatives, adagrad, rmsprop, adadelta, lamb: added to the denominator.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub eps: Option<f64>,
    /// adagrad: divides the learning rate of step t by `1 + t * lr_decay`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lr_decay: Option<f64>,
    /// adagrad, ftrl: first value of the sum of squared gradients.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub initial_accumulator_value: Option<f64>,
    /// rmsprop: share kept of the running mean of the squared gradient.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub alpha: Option<f64>,
    /// adadelta: share kept of both running means.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rho: Option<f64>,
    /// ftrl: added to the root of the sum of squared gradients.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub beta: Option<f64>,
    /// ftrl: evidence that a weight needs to be other than exactly 0.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub l1: Option<f64>,
    /// ftrl: pull of the weights towards zero.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub l2: Option<f64>,
}

impl GroupSpec {
    /// Returns a group without settings of its own.
    pub const fn new(tensors: Vec<String>) -> Self {
        Self {
            tensors,
            learning_rate: None,
            schedule: None,
            momentum: None,
            dampening: None,
            weight_decay: None,
            betas: None,
            eps: None,
            lr_decay: None,
            initial_accumulator_value: None,
            alpha: None,
            rho: None,
            beta: None,
            l1: None,
            l2: None,
        }
    }

    /// Returns an optimizer with the settings of this group, and those of `job` that it lacks.
    fn over(&self, job: &OptimizerSpec) -> OptimizerSpec {
        OptimizerSpec {
            kind: job.kind,
            learning_rate: self.learning_rate.unwrap_or(job.learning_rate),
            schedule: self.schedule.clone().unwrap_or_else(|| job.schedule.clone()),
            momentum: self.momentum.or(job.momentum),
            dampening: self.dampening.or(job.dampening),
            weight_decay: self.weight_decay.or(job.weight_decay),
            betas: self.betas.or(job.betas),
            eps: self.eps.or(job.eps),
            eps_root: job.eps_root,
            eps_before_correction: job.eps_before_correction,
            lr_decay: self.lr_decay.or(job.lr_decay),
            initial_accumulator_value: self.initial_accumulator_value.or(job.initial_accumulator_value),
            alpha: self.alpha.or(job.alpha),
            centered: job.centered,
            rho: self.rho.or(job.rho),
            beta: self.beta.or(job.beta),
            l1: self.l1.or(job.l1),
            l2: self.l2.or(job.l2),
            clip_norm: job.clip_norm,
            groups: Vec::new(),
        }
    }
}

impl OptimizerSpec {
    /// Returns the optimizers of all groups: first that of the tensors without a group, then those
    /// of `groups`. None of them has groups.
    pub fn grouped(&self) -> Vec<Self> {
        let rest = Self { groups: Vec::new(), ..self.clone() };
        let groups: Vec<_> = self.groups.iter().map(|group| group.over(&rest)).collect();
        [vec![rest], groups].concat()
    }

    /// Returns the index into [`grouped`](Self::grouped) for each tensor of the model.
    ///
    /// # Errors
    /// All violations at once: a name or pattern without a parameter, a parameter in two groups.
    pub fn groups_of(&self, tensors: &[TensorSpec]) -> Result<Vec<usize>, InvalidOptimizer> {
        let mut groups = vec![0; tensors.len()];
        if self.groups.is_empty() {
            return Ok(groups);
        }
        let mut violations = Vec::new();
        let by_name: HashMap<_, _> =
            tensors.iter().enumerate().map(|(at, tensor)| (tensor.name.as_str(), at)).collect();
        let is_parameter = |at: &usize| tensors[*at].role == TensorRole::Parameter;
        for (number, group) in self.groups.iter().enumerate() {
            for pattern in &group.tensors {
                let found: Vec<usize> = match by_name.get(pattern.as_str()) {
                    Some(at) => vec![*at],
                    None => (0..tensors.len()).filter(|at| matches(pattern, &tensors[*at].name)).collect(),
                };
                if !found.iter().any(is_parameter) {
                    violations.push(unknown(number, pattern, tensors, !found.is_empty()));
                }
                for at in found.into_iter().filter(is_parameter) {
                    let before = std::mem::replace(&mut groups[at], number + 1);
                    if before != 0 && before != number + 1 {
                        violations.push(format!(
                            "optimizer.groups[{number}].tensors: `{}` is in optimizer.groups[{}] too; a tensor has one \
                             group",
                            tensors[at].name,
                            before - 1
                        ));
                    }
                }
            }
        }
        if violations.is_empty() { Ok(groups) } else { Err(InvalidOptimizer { violations }) }
    }

    /// Checks the groups by themselves; the tensors of a model are not known here.
    pub(super) fn check_groups(&self, violations: &mut Vec<String>) {
        if self.groups.len() > GROUPS_MAX {
            let found = self.groups.len();
            violations.push(format!("optimizer.groups: {found} groups, expected at most {GROUPS_MAX}"));
        }
        for (number, group) in self.groups.iter().enumerate() {
            let place = format!("optimizer.groups[{number}]");
            if group.tensors.is_empty() {
                violations.push(format!("{place}.tensors: the list is empty; name at least one tensor"));
            }
            // Only what the group sets itself, so that a wrong setting of the job is named once.
            let alone = group.over(&Self::new(self.kind, 1.0));
            let mut found = Vec::new();
            alone.check(&mut found);
            if found.is_empty() && slots(&group.over(self).rule()) != slots(&self.rule()) {
                found.push(
                    "optimizer.momentum: the tensors without a group have no velocity; set optimizer.momentum \
                     too, or remove it here"
                        .to_owned(),
                );
            }
            let name = |found: String| found.replacen("optimizer", &place, 1);
            violations.extend(found.into_iter().map(name));
        }
    }
}

/// Returns the slots of a rule.
const fn slots(rule: &Rule) -> usize {
    rule.slot_names().len()
}

/// Returns the message about a name or pattern without a parameter. `other`: it is there, in
/// another role.
fn unknown(number: usize, pattern: &str, tensors: &[TensorSpec], other: bool) -> String {
    let place = format!("optimizer.groups[{number}].tensors");
    if other {
        return format!(
            "{place}: `{pattern}` is no parameter, and no optimizer changes its values; remove it from the group"
        );
    }
    let parameters = tensors.iter().filter(|tensor| tensor.role == TensorRole::Parameter);
    let meant = hint::nearest(pattern, parameters.map(|tensor| tensor.name.as_str()));
    let meant = meant.map(|name| format!("; did you mean `{name}`?")).unwrap_or_default();
    format!("{place}: the model has no parameter `{pattern}`{meant}")
}

/// Returns whether a name has the form of a pattern, in which `*` stands for any characters.
fn matches(pattern: &str, name: &str) -> bool {
    let mut parts = pattern.split('*');
    let Some(mut rest) = parts.next().and_then(|first| name.strip_prefix(first)) else { return false };
    let Some(last) = parts.next_back() else { return rest.is_empty() };
    for part in parts {
        let Some(at) = rest.find(part) else { return false };
        rest = &rest[at + part.len()..];
    }
    rest.ends_with(last)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::optimizer::OptimizerKind;

    fn model() -> Vec<TensorSpec> {
        vec![
            TensorSpec::parameter("body.0.weight", [4, 4]),
            TensorSpec::parameter("body.0.bias", [4]),
            TensorSpec::state("norm.running_mean", [4]),
            TensorSpec::parameter("norm.weight", [4]),
            TensorSpec::parameter("head.weight", [4, 2]),
            TensorSpec::parameter("head.bias", [2]),
        ]
    }

    fn groups(patterns: &[&[&str]]) -> OptimizerSpec {
        let group = |patterns: &&[&str]| GroupSpec::new(patterns.iter().map(ToString::to_string).collect());
        let groups = patterns.iter().map(group).collect();
        OptimizerSpec { groups, ..OptimizerSpec::new(OptimizerKind::AdamW, 0.1) }
    }

    fn violations(table: &str) -> Vec<String> {
        let spec: OptimizerSpec = toml::from_str(table).expect("a table");
        spec.validate().err().map(|invalid| invalid.violations).unwrap_or_default()
    }

    #[test]
    fn names_and_patterns_lead_to_parameters() {
        let of = |patterns: &[&[&str]]| groups(patterns).groups_of(&model()).expect("valid");
        assert_eq!(of(&[]), [0; 6]);
        assert_eq!(of(&[&["*.bias", "norm.*"], &["head.weight"]]), [0, 1, 0, 1, 2, 1]);
        assert_eq!(of(&[&["b*0*ight"], &["*"; 0]]), [1, 0, 0, 0, 0, 0]);
        assert_eq!(of(&[&["*", "head.bias"]]), [1, 1, 0, 1, 1, 1], "twice in one group is once");
    }

    #[test]
    fn a_pattern_matches_the_whole_name() {
        for (pattern, name) in [("*", ""), ("*", "a.b"), ("a*", "a"), ("*b*", "abc"), ("a*b*c", "a.b.b.c")] {
            assert!(matches(pattern, name), "{pattern} {name}");
        }
        for (pattern, name) in [("a", "ab"), ("a*", "ba"), ("*a", "ab"), ("ab*b", "ab"), ("a*b*c", "acb")] {
            assert!(!matches(pattern, name), "{pattern} {name}");
        }
    }

    #[test]
    fn names_without_a_parameter_and_tensors_of_two_groups_are_refused_by_name() {
        let refused = |patterns: &[&[&str]]| {
            groups(patterns).groups_of(&model()).expect_err("refused").violations.join("; ")
        };
        assert_eq!(
            refused(&[&["head.bias"], &["head.weigth"]]),
            "optimizer.groups[1].tensors: the model has no parameter `head.weigth`; did you mean `head.weight`?"
        );
        assert_eq!(
            refused(&[&["*.bias"], &["head.*"]]),
            "optimizer.groups[1].tensors: `head.bias` is in optimizer.groups[0] too; a tensor has one group"
        );
        assert_eq!(
            refused(&[&["norm.running_mean"]]),
            "optimizer.groups[0].tensors: `norm.running_mean` is no parameter, and no optimizer changes its values; \
             remove it from the group"
        );
    }

    #[test]
    fn a_group_replaces_what_it_sets() {
        let spec: OptimizerSpec = toml::from_str(
            "kind = 'adamw'\nlearning_rate = 1e-3\neps = 1e-6\nclip_norm = 1\n\
             [[groups]]\ntensors = ['*.bias']\nweight_decay = 0\n\
             [[groups]]\ntensors = ['head.*']\nlearning_rate = 1e-2\nschedule = { kind = 'cosine' }",
        )
        .expect("a table");
        spec.validate().expect("valid");
        let rest = OptimizerSpec { groups: Vec::new(), ..spec.clone() };
        let [base, bias, head] = spec.grouped().try_into().expect("three");
        assert_eq!(base, rest);
        assert_eq!(bias, OptimizerSpec { weight_decay: Some(0.0), ..rest.clone() });
        let schedule = spec.groups[1].schedule.clone().expect("its own");
        assert_eq!(head, OptimizerSpec { learning_rate: 1e-2, schedule, ..rest });
        let json = serde_json::to_string(&spec).expect("serialisable");
        assert_eq!(serde_json::from_str::<OptimizerSpec>(&json).expect("readable"), spec);
        assert_eq!(
            toml::from_str::<OptimizerSpec>(&toml::to_string(&spec).expect("text")).expect("readable"),
            spec
        );
    }

    #[test]
    fn a_job_without_groups_is_written_as_if_there_were_none() {
        let json = serde_json::to_string(&OptimizerSpec::new(OptimizerKind::Sgd, 0.5)).expect("serialisable");
        assert_eq!(
            json,
            r#"{"kind":"sgd","learning_rate":0.5,"schedule":{"kind":"constant","warmup_steps":0}}"#
        );
    }

    #[test]
    fn settings_of_a_group_are_checked_and_named_with_its_place() {
        let job = "kind = 'sgd'\nlearning_rate = 1\n[[groups]]\ntensors = ['a']\n[[groups]]\n";
        for (lines, place) in [
            ("tensors = []", "optimizer.groups[1].tensors: the list is empty"),
            ("tensors = ['b']\nlearning_rate = 0", "optimizer.groups[1].learning_rate = 0, expected"),
            ("tensors = ['b']\nweight_decay = -1", "optimizer.groups[1].weight_decay = -1, expected"),
            ("tensors = ['b']\neps = 1e-8", "optimizer.groups[1].eps: not a setting of kind `sgd`"),
            (
                "tensors = ['b']\nschedule = { kind = 'step' }",
                "optimizer.groups[1].schedule.every_steps: missing",
            ),
        ] {
            let found = violations(&format!("{job}{lines}"));
            assert_eq!(found.len(), 1, "{lines}: {found:?}");
            assert!(found[0].starts_with(place), "{lines}: {found:?}");
        }
        let once = violations("kind = 'sgd'\nlearning_rate = 0\n[[groups]]\ntensors = ['a']");
        assert_eq!(once.len(), 1, "a wrong setting of the job is named once: {once:?}");
        let many = "[[groups]]\ntensors = ['a']\n".repeat(GROUPS_MAX + 1);
        let found = violations(&format!("kind = 'sgd'\nlearning_rate = 1\n{many}"));
        assert_eq!(found, ["optimizer.groups: 1025 groups, expected at most 1024"]);
    }

    #[test]
    fn all_tensors_have_the_same_slots() {
        let job = "kind = 'rmsprop'\nlearning_rate = 1\n";
        let group = "[[groups]]\ntensors = ['a']\nmomentum = 0.5";
        assert_eq!(violations(&format!("{job}momentum = 0.9\n{group}")), [""; 0]);
        let found = violations(&format!("{job}{group}"));
        assert_eq!(found.len(), 1, "{found:?}");
        assert!(
            found[0].starts_with("optimizer.groups[0].momentum: the tensors without a group"),
            "{found:?}"
        );
    }

    #[test]
    fn what_is_one_for_the_job_is_no_setting_of_a_group() {
        for line in ["kind = 'adam'", "clip_norm = 1", "centered = true"] {
            let table = format!("kind = 'rmsprop'\nlearning_rate = 1\n[[groups]]\ntensors = ['a']\n{line}");
            let error = toml::from_str::<OptimizerSpec>(&table).expect_err("refused").to_string();
            assert!(error.contains("unknown field"), "{line}: {error}");
        }
    }
}
