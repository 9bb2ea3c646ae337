//! Times of evaluations during training.

use serde::{Deserialize, Serialize};

use super::JobSpec;
use crate::plan::{Occasions, Plan};

/// Times of evaluations during training.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default, expecting = "the settings of [evaluation]")]
pub struct EvaluationSpec {
    /// Epochs between evaluations: the end of each epoch that is a multiple, and of the last one,
    /// is measured. Default: 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub every_epochs: Option<u64>,
    /// Steps between evaluations, beside those at the ends of epochs: each version that is a
    /// multiple is measured. Default: only at the ends of epochs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub every_steps: Option<u64>,
}

impl EvaluationSpec {
    pub(super) fn is_default(&self) -> bool {
        *self == Self::default()
    }
}

impl JobSpec {
    /// Returns the versions that a training with this plan measures. `None`: the job has no
    /// validation records.
    pub fn occasions(&self, plan: Plan) -> Option<Occasions> {
        let EvaluationSpec { every_epochs, every_steps } = self.evaluation;
        self.data.validates().then(|| Occasions::new(plan, every_epochs).and_every_steps(every_steps))
    }

    pub(super) fn validate_evaluation(&self, check: &mut impl FnMut(bool, String)) {
        let EvaluationSpec { every_epochs, every_steps } = self.evaluation;
        for (key, every) in [("every_epochs", every_epochs), ("every_steps", every_steps)] {
            let key = format!("evaluation.{key}");
            check(every != Some(0), format!("{key}: 0 is no distance; set 1 or more, or remove it"));
            check(
                every.is_none() || self.data.validates(),
                format!(
                    "{key}: the job has no validation records; give e.g. `data.validation`, or remove it"
                ),
            );
            check(
                every.is_none() || !self.is_driven(),
                format!("{key}: a program that drives its model measures it after each epoch; remove it"),
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::Version;

    fn spec(more: &str) -> crate::error::Result<JobSpec> {
        JobSpec::from_json(&format!(
            r#"{{
                "name": "digits", "epochs": 4, "model": {{ "builtin": "linear" }},
                "batch": {{ "micro": 2 }}, "optimizer": {{ "kind": "adam", "learning_rate": 0.1 }}, {more}
            }}"#
        ))
    }

    const DATA: &str = r#""data": { "format": "idx", "train": { "features": ["x"], "labels": ["y"] } }"#;

    fn with_validation(evaluation: &str) -> crate::error::Result<JobSpec> {
        let data = DATA.replace("} }", "}, \"validation_fraction\": 0.5 }");
        spec(&format!("{data}, \"evaluation\": {{ {evaluation} }}"))
    }

    #[test]
    fn times_count_from_the_begin_of_the_training() {
        let versions = |evaluation: &str| {
            let spec = with_validation(evaluation).unwrap();
            let occasions = spec.occasions(spec.plan(6)).unwrap();
            (1..=12).filter(|&version| occasions.contains(Version(version))).collect::<Vec<_>>()
        };
        assert_eq!(versions(""), [3, 6, 9, 12]);
        assert_eq!(versions(r#""every_epochs": 3"#), [9, 12]);
        assert_eq!(versions(r#""every_steps": 5"#), [3, 5, 6, 9, 10, 12]);
        assert_eq!(versions(r#""every_epochs": 3, "every_steps": 5"#), [5, 9, 10, 12]);
        let plain = spec(DATA).unwrap();
        assert_eq!(plain.occasions(plain.plan(6)), None);
    }

    #[test]
    fn times_that_cannot_be_kept_are_refused() {
        for every in ["every_steps", "every_epochs"] {
            let message = with_validation(&format!("\"{every}\": 0")).unwrap_err().to_string();
            assert!(message.contains(&format!("evaluation.{every}: 0 is no distance")), "{message}");
            let evaluation = format!("{DATA}, \"evaluation\": {{ \"{every}\": 2 }}");
            let message = spec(&evaluation).unwrap_err().to_string();
            assert!(message.contains(&format!("evaluation.{every}: the job has no validation")), "{message}");
            let driven = evaluation.replace("linear\"", "python\", \"loss\": \"module\"");
            let driven = driven
                .replace("idx", "index")
                .replace(r#""features": ["x"], "labels": ["y"]"#, r#""files": ["6"]"#);
            let message = spec(&driven).unwrap_err().to_string();
            assert!(
                message.contains("a program that drives its model measures it after each epoch"),
                "{message}"
            );
        }
    }
}
