//! Times of evaluations during training.

use serde::{Deserialize, Serialize};

use super::JobSpec;
use crate::plan::{Occasions, Plan};

/// Times of evaluations during training.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default, expecting = "the settings of [evaluation]")]
pub struct EvaluationSpec {
    /// Steps between evaluations, beside those at the end of each epoch: each version that is a
    /// multiple is measured. Default: only at the end of each epoch.
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
        self.data.validates().then(|| Occasions::new(plan, self.evaluation.every_steps))
    }

    pub(super) fn validate_evaluation(&self, check: &mut impl FnMut(bool, String)) {
        let EvaluationSpec { every_steps } = self.evaluation;
        check(
            every_steps != Some(0),
            "evaluation.every_steps: 0 is no distance; set 1 or more, or remove it".to_owned(),
        );
        check(
            every_steps.is_none() || self.data.validates(),
            "evaluation.every_steps: the job has no validation records; give e.g. `data.validation`, or remove it"
                .to_owned(),
        );
        check(
            every_steps.is_none() || !self.is_driven(),
            "evaluation.every_steps: a program that drives its model measures it after each epoch; remove it"
                .to_owned(),
        );
    }
}
