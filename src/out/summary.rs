//! `summary.json`: what a job did and what it ended with, in numbers.

use std::collections::BTreeMap;

use proto::pb;
use serde::Serialize;

use crate::terminal::report;

/// Name of the file that holds every weight and state tensor.
pub(crate) const MODEL: &str = "model.safetensors";

/// The content of `summary.json`, in the order of its fields.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Summary {
    /// `NAME-ID`.
    job: String,
    /// `succeeded`, `failed` or `cancelled`.
    status: String,
    /// Why it ended so.
    reason: String,
    /// Passes over the data that the job asked for.
    epochs: u64,
    /// Steps applied.
    steps: u64,
    /// Records in them.
    samples_applied: u64,
    /// Microbatches in them.
    microbatches_applied: u64,
    /// Pushes that brought nothing new.
    duplicates_dropped: u64,
    /// Leases that ended without their task being done.
    leases_expired: u64,
    /// Distinct worker process starts that took part.
    workers_seen: u32,
    /// From submission to the end.
    wall_seconds: f64,
    /// Records that this job applied per second of training; those of an earlier run, which it resumed, do not count.
    samples_per_second: f64,
    /// Metrics of the last evaluation; without one, the training loss of the newest step.
    #[serde(rename = "final")]
    metrics: BTreeMap<String, f64>,
    /// SHA-256 of `model.safetensors`; `null` when the job ended without a model.
    model_sha256: Option<String>,
    /// The numerics classes that computed it, each with its facts and the first version that it computed from: one, unless a user
    /// changed it. Empty for a job that took workers of every class.
    numerics: Vec<serde_json::Value>,
}

impl Summary {
    /// From the status of a job that ended.
    pub(crate) fn new(status: &pb::JobStatus) -> Self {
        let training_seconds = status.training_ms as f64 / 1e3;
        Self {
            job: status.name.clone(),
            status: report::state(status.state).to_owned(),
            reason: status.reason.clone(),
            epochs: status.epochs,
            steps: status.steps_done,
            samples_applied: status.samples_applied,
            microbatches_applied: status.microbatches_applied,
            duplicates_dropped: status.duplicates_dropped,
            leases_expired: status.leases_expired,
            workers_seen: status.workers_seen,
            wall_seconds: status.wall_ms as f64 / 1e3,
            samples_per_second: if training_seconds > 0.0 {
                status.samples_applied.saturating_sub(status.samples_before) as f64 / training_seconds
            } else {
                0.0
            },
            metrics: final_metrics(status),
            model_sha256: model_sha256(status).map(str::to_owned),
            numerics: report::numerics(status),
        }
    }

    /// One JSON object over several lines, for the file.
    pub(crate) fn to_text(&self) -> String {
        serde_json::to_string_pretty(self).expect("plain fields") + "\n"
    }

    /// One JSON object on one line, for `--json`.
    pub(crate) fn to_line(&self) -> String {
        serde_json::to_string(self).expect("plain fields")
    }
}

/// Metrics of the last evaluation; without one, the training loss of the newest step.
pub(crate) fn final_metrics(status: &pb::JobStatus) -> BTreeMap<String, f64> {
    if !status.final_metrics.is_empty() {
        return status.final_metrics.clone();
    }
    status.loss.into_iter().map(|loss| ("loss".to_owned(), loss)).collect()
}

/// SHA-256 of the trained model, once there is one.
pub(crate) fn model_sha256(status: &pb::JobStatus) -> Option<&str> {
    status.artifacts.iter().find(|artifact| artifact.name == MODEL).map(|model| model.sha256.as_str())
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn succeeded() -> pb::JobStatus {
        pb::JobStatus {
            job: 3,
            name: "line-3".to_owned(),
            state: pb::JobState::Succeeded.into(),
            reason: "all steps applied".to_owned(),
            epochs: 2,
            steps: 4,
            steps_done: 4,
            microbatches_applied: 8,
            samples_applied: 32,
            workers: 3,
            workers_seen: 3,
            wall_ms: 2500,
            training_ms: 2000,
            loss: Some(0.5),
            final_metrics: [("accuracy".to_owned(), 0.75), ("loss".to_owned(), 0.25)].into(),
            artifacts: vec![proto::artifact::describe(MODEL, b"weights")],
            numerics: vec![pb::NumericsSince {
                version: 0,
                numerics: Some(pb::Numerics { class: "pure-1".to_owned(), facts: "pure Rust".to_owned() }),
            }],
            ..pb::JobStatus::default()
        }
    }

    #[test]
    fn it_has_exactly_the_documented_fields_in_order() {
        let hash = proto::artifact::sha256_hex(b"weights");
        assert_eq!(
            Summary::new(&succeeded()).to_line(),
            format!(
                r#"{{"job":"line-3","status":"succeeded","reason":"all steps applied","epochs":2,"steps":4,"samples_applied":32,"microbatches_applied":8,"duplicates_dropped":0,"leases_expired":0,"workers_seen":3,"wall_seconds":2.5,"samples_per_second":16.0,"final":{{"accuracy":0.75,"loss":0.25}},"model_sha256":"{hash}","numerics":[{{"version":0,"class":"pure-1","facts":"pure Rust"}}]}}"#
            )
        );
    }

    #[test]
    fn without_evaluation_the_training_loss_is_final_and_without_model_there_is_no_hash() {
        let status = pb::JobStatus {
            final_metrics: BTreeMap::new(),
            artifacts: Vec::new(),
            training_ms: 0,
            ..succeeded()
        };
        let line = Summary::new(&status).to_line();
        assert!(
            line.contains(r#""samples_per_second":0.0,"final":{"loss":0.5},"model_sha256":null"#),
            "{line}"
        );
    }

    #[test]
    fn what_an_earlier_run_trained_is_no_speed_of_this_one() {
        let status = pb::JobStatus { samples_before: 24, ..succeeded() };
        let line = Summary::new(&status).to_line();
        assert!(
            line.contains(r#""samples_applied":32,"#) && line.contains(r#""samples_per_second":4.0,"#),
            "{line}"
        );
    }
}
