//! The best version of a training, and when training stops because nothing gets better.

use serde::{Deserialize, Serialize};

use super::JobSpec;
use crate::metric::Metric;
use crate::selection::Criterion;

/// Selection of the version that is exported, by a metric of the evaluations.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, expecting = "the settings of [early_stopping]")]
pub struct EarlyStoppingSpec {
    /// `loss`, or a metric of `model.metrics`.
    pub metric: String,
    /// Name of the validation set that counts. Default: `data.validation` or the fraction; without
    /// these the only named set.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub set: Option<String>,
    /// Whether a smaller or a larger value is better. Default: what the metric means.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mode: Option<Better>,
    /// Evaluations without a better value after which training stops, 1 or more. Default: training
    /// never stops early.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub patience: Option<u32>,
    /// Difference that a better value must exceed. Default: 0.
    #[serde(default)]
    pub min_delta: f64,
}

/// Direction in which values get better.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Better {
    /// Smaller values are better.
    Min,
    /// Larger values are better.
    Max,
}

impl EarlyStoppingSpec {
    fn mode(&self) -> Better {
        let usual = || match self.metric.parse() {
            Ok(Metric::Accuracy | Metric::TopK(_) | Metric::Auc | Metric::F1) => Better::Max,
            _ => Better::Min,
        };
        self.mode.unwrap_or_else(usual)
    }
}

impl JobSpec {
    /// Returns what makes a version the best one. `None`: the job exports its last version.
    pub fn criterion(&self) -> Option<Criterion> {
        let spec = self.early_stopping.as_ref().filter(|_| self.purpose.trains())?;
        let set = self.watched_set().unwrap_or_default();
        Some(Criterion {
            metric: if set.is_empty() { spec.metric.clone() } else { format!("{set}/{}", spec.metric) },
            larger: spec.mode() == Better::Max,
            min_delta: spec.min_delta,
        })
    }

    /// Returns the evaluations without a better value after which training stops.
    pub fn patience(&self) -> Option<u32> {
        self.early_stopping.as_ref().and_then(|spec| spec.patience)
    }

    /// Returns the name of the set whose metric counts; empty for the one without a name. `None`:
    /// there is no such set, or several are named and none chosen.
    fn watched_set(&self) -> Option<&str> {
        let data = &self.data;
        let named = || data.validation_sets.keys().map(String::as_str);
        match self.early_stopping.as_ref()?.set.as_deref() {
            Some(set) => named().find(|name| *name == set),
            None if data.validation.is_some() || data.validation_fraction.is_some() => Some(""),
            None => named().next().filter(|_| data.validation_sets.len() == 1),
        }
    }

    pub(super) fn validate_early_stopping(&self, check: &mut impl FnMut(bool, String)) {
        let Some(spec) = &self.early_stopping else { return };
        let EarlyStoppingSpec { metric, patience, min_delta, .. } = spec;
        let is_number = |known: &Metric| *known != Metric::ConfusionMatrix && known.name() == *metric;
        check(
            metric == "loss" || self.model.metrics.iter().any(is_number),
            format!(
                "early_stopping.metric: `{metric}` is neither \"loss\" nor a number of model.metrics; add it there, or choose \
                 another"
            ),
        );
        let names: Vec<_> = self.data.validation_sets.keys().map(|name| format!("`{name}`")).collect();
        check(
            self.watched_set().is_some(),
            match (&spec.set, names.is_empty()) {
                (None, true) => {
                    "early_stopping: the job has no validation records; give e.g. `data.validation`"
                        .to_owned()
                }
                (None, false) => format!("early_stopping.set: choose one of {}", names.join(", ")),
                (Some(set), _) => format!(
                    "early_stopping.set: `{set}` is no name in data.validation_sets, which has {}; leave `set` out for \
                     data.validation",
                    if names.is_empty() { "none".to_owned() } else { names.join(", ") }
                ),
            },
        );
        check(
            !self.is_driven(),
            "early_stopping: a program that drives its model names its metrics only when it measures; remove it"
                .to_owned(),
        );
        check(
            *patience != Some(0),
            "early_stopping.patience: 0 would stop at once; set 1 or more, or leave it out to select without stopping"
                .to_owned(),
        );
        check(
            min_delta.is_finite() && *min_delta >= 0.0,
            format!("early_stopping.min_delta = {min_delta}: must be finite and not negative"),
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A job with these validation records and this selection.
    fn spec(validation: &str, stopping: &str) -> crate::error::Result<JobSpec> {
        JobSpec::from_json(&format!(
            r#"{{
                "name": "digits", "epochs": 4,
                "model": {{ "builtin": "softmax", "metrics": ["accuracy", "log_loss", "confusion_matrix"] }},
                "data": {{ "format": "csv", "train": {{ "files": ["t.csv"] }}{validation} }},
                "batch": {{ "micro": 2 }}, "optimizer": {{ "kind": "adam", "learning_rate": 0.1 }},
                "early_stopping": {{ {stopping} }}
            }}"#
        ))
    }

    const FRACTION: &str = r#", "validation_fraction": 0.5"#;
    const NAMED: &str =
        r#", "validation_sets": { "dev": { "files": ["d.csv"] }, "test": { "files": ["e.csv"] } }"#;

    #[test]
    fn the_metric_says_which_values_are_better_and_the_set_whose_they_are() {
        let criterion = |validation: &str, stopping: &str| {
            let Criterion { metric, larger, min_delta } =
                spec(validation, stopping).unwrap().criterion().unwrap();
            (metric, larger, min_delta)
        };
        let of = |metric: &str, larger, min_delta| (metric.to_owned(), larger, min_delta);
        assert_eq!(criterion(FRACTION, r#""metric": "accuracy""#), of("accuracy", true, 0.0));
        assert_eq!(criterion(FRACTION, r#""metric": "log_loss""#), of("log_loss", false, 0.0));
        assert_eq!(
            criterion(FRACTION, r#""metric": "loss", "mode": "max", "min_delta": 0.5"#),
            of("loss", true, 0.5)
        );
        assert_eq!(criterion(NAMED, r#""metric": "loss", "set": "test""#), of("test/loss", false, 0.0));
        let only = r#", "validation_sets": { "dev": { "files": ["d.csv"] } }"#;
        assert_eq!(criterion(only, r#""metric": "loss""#), of("dev/loss", false, 0.0));
        let own = format!("{NAMED}, \"validation\": {{ \"files\": [\"v.csv\"] }}");
        assert_eq!(criterion(&own, r#""metric": "loss""#), of("loss", false, 0.0));
    }

    #[test]
    fn a_selection_that_cannot_be_is_refused() {
        for (validation, stopping, expected) in [
            (FRACTION, r#""metric": "auc""#, "early_stopping.metric: `auc` is neither \"loss\" nor a number"),
            (
                FRACTION,
                r#""metric": "confusion_matrix""#,
                "`confusion_matrix` is neither \"loss\" nor a number",
            ),
            (FRACTION, r#""metric": "loss", "patience": 0"#, "early_stopping.patience: 0 would stop at once"),
            (FRACTION, r#""metric": "loss", "min_delta": -0.5"#, "early_stopping.min_delta = -0.5"),
            (
                FRACTION,
                r#""metric": "loss", "set": "dev""#,
                "`dev` is no name in data.validation_sets, which has none",
            ),
            ("", r#""metric": "loss""#, "early_stopping: the job has no validation records"),
            (NAMED, r#""metric": "loss""#, "early_stopping.set: choose one of `dev`, `test`"),
            (
                NAMED,
                r#""metric": "loss", "set": "tset""#,
                "`tset` is no name in data.validation_sets, which has `dev`, `test`",
            ),
        ] {
            let message = spec(validation, stopping).unwrap_err().to_string();
            assert!(message.contains(expected), "{stopping}: {message}");
        }
    }
}
