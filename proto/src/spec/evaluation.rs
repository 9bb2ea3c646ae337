//! Times of evaluations during training.

use serde::{Deserialize, Serialize};

use super::JobSpec;
use crate::plan::{Occasions, Plan};
use crate::worst::{PREVIEWS_MAX, Worst};

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
    /// Number of records with the largest losses in the last evaluation that the results list, of
    /// each validation set. Default: 0, none.
    #[serde(skip_serializing_if = "is_zero")]
    pub worst: u32,
}

/// Most records that [`EvaluationSpec::worst`] may ask for, over all validation sets, because a
/// job's status has them.
pub const WORST_MAX: u32 = 1000;

/// serde passes a reference.
#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde calls it so")]
const fn is_zero(number: &u32) -> bool {
    *number == 0
}

impl EvaluationSpec {
    pub(super) fn is_default(&self) -> bool {
        *self == Self::default()
    }

    /// Returns the settings that count in a job that does not train.
    pub(super) fn measuring(self) -> Self {
        Self { worst: self.worst, ..Self::default() }
    }
}

impl JobSpec {
    /// Returns the versions that a training with this plan measures. `None`: the job has no
    /// validation records.
    pub fn occasions(&self, plan: Plan) -> Option<Occasions> {
        let EvaluationSpec { every_epochs, every_steps, .. } = self.evaluation;
        self.data.validates().then(|| Occasions::new(plan, every_epochs).and_every_steps(every_steps))
    }

    /// Returns the empty list of the worst records of a validation set.
    pub fn worst(&self) -> Worst {
        Worst::new(self.evaluation.worst as usize).with_previews(self.previews())
    }

    /// Returns how many of the worst records of each validation set have a preview: the first ones.
    pub fn previews(&self) -> usize {
        let sets = self.data.validation_files().count().max(1);
        (PREVIEWS_MAX as usize / sets).min(self.evaluation.worst as usize)
    }

    pub(super) fn validate_evaluation(&self, check: &mut impl FnMut(bool, String)) {
        let EvaluationSpec { every_epochs, every_steps, worst } = self.evaluation;
        let sets = self.data.validation_files().count().max(1);
        let all = u64::from(worst).saturating_mul(sets as u64);
        check(
            all <= u64::from(WORST_MAX),
            format!(
                "evaluation.worst = {worst}: at most {WORST_MAX} records are listed, {} of each of {sets} validation sets",
                u64::from(WORST_MAX) / sets as u64
            ),
        );
        check(
            worst == 0 || self.data.validates(),
            "evaluation.worst: the job has no validation records; give e.g. `data.validation`, or remove it"
                .to_owned(),
        );
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
    fn worst_records_that_cannot_be_listed_are_refused() {
        let refused = |made: crate::error::Result<JobSpec>| made.unwrap_err().to_string();
        assert_eq!(with_validation(r#""worst": 1000"#).unwrap().evaluation.worst, 1000);
        let message = refused(with_validation(r#""worst": 1001"#));
        assert!(message.contains("evaluation.worst = 1001: at most 1000 records are listed"), "{message}");
        let own = r#"{ "features": ["v"], "labels": ["w"] }"#;
        let sets = format!("}}, \"validation_sets\": {{ \"a\": {own}, \"b\": {own}, \"c\": {own} }} }}");
        let message =
            refused(spec(&format!("{}, \"evaluation\": {{ \"worst\": 334 }}", DATA.replace("} }", &sets))));
        assert!(message.contains("are listed, 333 of each of 3 validation sets"), "{message}");
        let message = refused(spec(&format!("{DATA}, \"evaluation\": {{ \"worst\": 2 }}")));
        assert!(message.contains("evaluation.worst: the job has no validation records"), "{message}");
        let driven =
            r#""data": { "format": "index", "train": { "files": ["6"] }, "validation": { "files": ["6"] } }"#;
        let driven = format!("{driven}, \"evaluation\": {{ \"worst\": 2 }}");
        let json = format!(
            r#"{{ "name": "x", "epochs": 4, "model": {{ "builtin": "python", "loss": "module" }}, "batch": {{ "micro": 2 }},
                "optimizer": {{ "kind": "adam", "learning_rate": 0.1 }}, {driven} }}"#
        );
        // The loop tells the losses of its records.
        assert_eq!(JobSpec::from_json(&json).unwrap().evaluation.worst, 2);
    }

    #[test]
    fn previews_are_divided_among_the_validation_sets() {
        let own = r#"{ "features": ["v"], "labels": ["w"] }"#;
        let previews = |worst: u32, sets: usize| {
            let named: Vec<_> = (0..sets).map(|set| format!("\"set-{set}\": {own}")).collect();
            let sets = format!("}}, \"validation_sets\": {{ {} }} }}", named.join(", "));
            let data = DATA.replace("} }", &sets);
            spec(&format!("{data}, \"evaluation\": {{ \"worst\": {worst} }}")).unwrap().previews()
        };
        assert_eq!([previews(3, 1), previews(20, 1), previews(20, 3)], [3, 16, 5]);
        assert_eq!([previews(2, 5), previews(10, 17), previews(0, 2)], [2, 0, 0]);
        assert_eq!(with_validation(r#""worst": 7"#).unwrap().previews(), 7);
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
