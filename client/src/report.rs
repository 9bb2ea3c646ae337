//! A job in numbers: as JSON while it lives, as `summary.json` once it ended.

mod layout;

use std::collections::BTreeMap;

use proto::metrics::Confusion;
use proto::pb;
use serde::Serialize;
use serde_json::{Map, Value, json};

use crate::results::metrics;
use crate::{JobPurpose, JobStatus};

/// Name of the file that holds every weight and state tensor.
pub const MODEL: &str = "model.safetensors";

/// The content of `summary.json`, in the order of its fields.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Summary {
    /// `NAME-ID`.
    job: String,
    /// `succeeded`, `failed` or `cancelled`.
    status: String,
    /// Why the job ended so.
    reason: String,
    /// Passes over the data that the job file asks for.
    epochs: u64,
    /// Steps applied.
    steps: u64,
    /// Records in the steps applied.
    samples_applied: u64,
    /// Microbatches in the steps applied.
    microbatches_applied: u64,
    /// Pushes that brought nothing new.
    duplicates_dropped: u64,
    /// Steps that overflowed, so they changed no weight. Absent: none.
    #[serde(skip_serializing_if = "is_zero")]
    overflows: u64,
    /// Leases that ended without their task being done.
    leases_expired: u64,
    /// Distinct worker process starts that took part.
    workers_seen: u32,
    /// Time from submission to the end.
    wall_seconds: f64,
    /// Records applied per second of training. Records of an earlier run that this job resumed do
    /// not count.
    samples_per_second: f64,
    /// Share of the workers' time that they waited for records; the rest they computed. `null`: not
    /// known.
    data_wait: Option<f64>,
    /// Bad records that the job skipped: their numbers, and the first of them. Absent: none.
    #[serde(skip_serializing_if = "Option::is_none")]
    skipped: Option<Value>,
    /// Metrics of the last evaluation, or of the best version of a job that selects one. Those of
    /// named sets are `SET/METRIC`. Without an evaluation, the training loss of the newest step.
    #[serde(rename = "final")]
    metrics: BTreeMap<String, f64>,
    /// Confusion matrix of the last evaluation: a row for each class, with the number of its labels
    /// by predicted class. Absent if it is no metric of the job or an output was NaN.
    #[serde(skip_serializing_if = "Option::is_none")]
    confusion_matrix: Option<Vec<Vec<u64>>>,
    /// Confusion matrices of named validation sets, likewise, by the name of the set.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    confusion_matrices: BTreeMap<String, Vec<Vec<u64>>>,
    /// Metrics of each evaluation, in the order of the steps. Absent where events are not known.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    evaluations: Vec<Map<String, Value>>,
    /// The best version by `early_stopping.metric`, and whether training stopped because none got
    /// better. Absent if the job selects none.
    #[serde(skip_serializing_if = "Option::is_none")]
    best: Option<Value>,
    /// Name of the file with the worst records, beside this one. Absent: none are listed.
    #[serde(skip_serializing_if = "Option::is_none")]
    worst: Option<&'static str>,
    /// SHA-256 of `model.safetensors`; `null` when the job ended without a model.
    model_sha256: Option<String>,
    /// The numerics classes that computed the job, each with its facts and its first version: one,
    /// unless a user changed it. Empty for a job that took workers of every class.
    numerics: Vec<Value>,
    /// `evaluate` or `predict`. Absent for a job that trains.
    #[serde(skip_serializing_if = "Option::is_none")]
    purpose: Option<&'static str>,
    /// Records that a job which does not train evaluated or predicted.
    #[serde(skip_serializing_if = "Option::is_none")]
    records: Option<u64>,
    /// File of the predictions, or the manifest of their parts.
    #[serde(skip_serializing_if = "Option::is_none")]
    predictions: Option<String>,
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
const fn is_zero(count: &u64) -> bool {
    *count == 0
}

impl Summary {
    /// Returns the summary of a job that ended.
    pub fn new(status: &JobStatus) -> Self {
        let training_seconds = status.training_ms as f64 / 1e3;
        Self {
            job: status.name.clone(),
            status: status.state().name().to_owned(),
            reason: status.reason.clone(),
            epochs: status.epochs,
            steps: status.steps_done,
            samples_applied: status.samples_applied,
            microbatches_applied: status.microbatches_applied,
            duplicates_dropped: status.duplicates_dropped,
            overflows: status.overflows,
            leases_expired: status.leases_expired,
            workers_seen: status.workers_seen,
            wall_seconds: status.wall_ms as f64 / 1e3,
            samples_per_second: if training_seconds > 0.0 {
                status.samples_applied.saturating_sub(status.samples_before) as f64 / training_seconds
            } else {
                0.0
            },
            data_wait: status.data_wait,
            skipped: skipped(status),
            metrics: final_metrics(status),
            confusion_matrix: confusion(status),
            confusion_matrices: confusions(status),
            evaluations: Vec::new(),
            best: best(status),
            worst: None,
            model_sha256: model_sha256(status).map(str::to_owned),
            numerics: numerics(status),
            purpose: measures(status).map(JobPurpose::name),
            records: measures(status).map(|_| {
                let skipped = status.skipped.as_ref().map_or(0, |skipped| skipped.validation);
                status.records_done.saturating_sub(skipped)
            }),
            predictions: predictions(status).map(str::to_owned),
        }
    }

    /// Adds the metrics of each evaluation.
    #[must_use]
    pub fn with_evaluations<'a>(self, events: impl IntoIterator<Item = &'a pb::EvaluationEvent>) -> Self {
        Self { evaluations: events.into_iter().map(metrics::evaluation).collect(), ..self }
    }

    /// Names the file with the worst records.
    #[must_use]
    pub fn with_worst(self, file: &'static str) -> Self {
        Self { worst: Some(file), ..self }
    }

    /// Returns the summary as a JSON object over several lines, for the file.
    pub fn to_text(&self) -> String {
        layout::to_text(self)
    }

    /// Returns the summary as a JSON object on one line.
    pub fn to_line(&self) -> String {
        serde_json::to_string(self).expect("plain fields")
    }
}

/// Metrics of the last evaluation; without one, the training loss of the newest step.
pub fn final_metrics(status: &JobStatus) -> BTreeMap<String, f64> {
    if !status.final_metrics.is_empty() {
        return status.final_metrics.clone();
    }
    status.loss.into_iter().map(|loss| ("loss".to_owned(), loss)).collect()
}

/// Returns the purpose of a job that does not train.
pub fn measures(status: &JobStatus) -> Option<JobPurpose> {
    Some(status.purpose()).filter(|purpose| *purpose != JobPurpose::Train)
}

/// Returns the place of the predictions of a job, once they are whole.
pub fn predictions(status: &JobStatus) -> Option<&str> {
    Some(status.predictions.as_str()).filter(|place| !place.is_empty())
}

/// Returns the best version of a job that selects one.
fn best(status: &JobStatus) -> Option<Value> {
    let pb::Selection { metric, best, value, last, stopped, .. } = status.selection.as_ref()?;
    Some(json!({
        "step": best, "metric": metric, "value": value, "last_step": last, "stopped_early": stopped,
    }))
}

/// Returns the rows of the confusion matrix of the last evaluation.
fn confusion(status: &JobStatus) -> Option<Vec<Vec<u64>>> {
    rows(status.confusion.as_ref()?)
}

/// Returns the rows of the confusion matrices of named validation sets.
fn confusions(status: &JobStatus) -> BTreeMap<String, Vec<Vec<u64>>> {
    status.confusions.iter().filter_map(|(set, matrix)| Some((set.clone(), rows(matrix)?))).collect()
}

fn rows(matrix: &pb::ConfusionMatrix) -> Option<Vec<Vec<u64>>> {
    let matrix = Confusion::try_from(matrix.clone()).ok()?;
    Some(matrix.rows().map(<[u64]>::to_vec).collect())
}

/// Returns the bad records that a job skipped: how many, and the first of them. `None`: none.
fn skipped(status: &JobStatus) -> Option<Value> {
    let pb::Skipped { train, validation, records, .. } = status.skipped.as_ref()?;
    let record = |skipped: &pb::SkippedRecord| {
        json!({
            "set": if skipped.validation { "validation" } else { "train" },
            "file": skipped.file,
            "record": skipped.record,
            "reason": skipped.reason,
        })
    };
    let records: Vec<_> = records.iter().map(record).collect();
    Some(json!({ "train": train, "validation": validation, "records": records }))
}

/// SHA-256 of the trained model. `None` before there is a model.
pub fn model_sha256(status: &JobStatus) -> Option<&str> {
    status.artifacts.iter().find(|artifact| artifact.name == MODEL).map(|model| model.sha256.as_str())
}

/// Returns all that the master says of a job, as one object.
pub fn json(status: &JobStatus) -> Value {
    let artifact =
        |file: &pb::Artifact| json!({ "name": file.name, "size": file.size, "sha256": file.sha256 });
    let hang = |hang: &pb::Hang| {
        json!({
            "worker": hang.worker,
            "phase": hang.phase().name(),
            "what": hang.what,
            "idle_seconds": hang.idle_ms as f64 / 1e3,
            "work": Some(&hang.work).filter(|work| !work.is_empty()),
            "taken_over": hang.taken_over,
        })
    };
    let mut value = json!({
        "job": status.name,
        "id": status.job,
        "status": status.state().name(),
        "reason": status.reason,
        "epochs": status.epochs,
        "steps": status.steps,
        "steps_done": status.steps_done,
        "samples_applied": status.samples_applied,
        "samples_before": status.samples_before,
        "microbatches_applied": status.microbatches_applied,
        "duplicates_dropped": status.duplicates_dropped,
        "overflows": status.overflows,
        "leases_expired": status.leases_expired,
        "workers": status.workers,
        "workers_standby": status.workers_standby,
        "workers_min": status.workers_min,
        "workers_max": status.workers_max,
        "workers_seen": status.workers_seen,
        "hangs": status.hangs.iter().map(hang).collect::<Vec<_>>(),
        "idle": status.idle.iter().map(idle).collect::<Vec<_>>(),
        "wall_seconds": status.wall_ms as f64 / 1e3,
        "training_seconds": status.training_ms as f64 / 1e3,
        "data_wait": status.data_wait,
        "skipped": skipped(status),
        "loss": status.loss,
        "final": final_metrics(status),
        "confusion_matrix": confusion(status),
        "model_sha256": model_sha256(status),
        "artifacts": status.artifacts.iter().map(artifact).collect::<Vec<_>>(),
        "checkpoint": status.checkpoint,
        "checkpoints": Some(&status.checkpoints).filter(|folder| !folder.is_empty()),
        "numerics_class": status.numerics_class.as_ref().map(|numerics| &numerics.class),
        "numerics_facts": status.numerics_class.as_ref().map(|numerics| &numerics.facts),
        "numerics": numerics(status),
    });
    value["confusion_matrices"] = json!(confusions(status));
    value["best"] = json!(best(status));
    value["purpose"] = json!(status.purpose().name());
    value["records"] = json!(status.records);
    value["records_done"] = json!(status.records_done);
    value["predictions"] = json!(predictions(status));
    value["devices"] = status.devices.iter().map(device).collect();
    let indexing = |indexing: &pb::Indexing| {
        json!({
            "files_done": indexing.files_done,
            "files": indexing.files,
            "bytes_done": indexing.bytes_done,
        })
    };
    value["indexing"] = json!(status.indexing.as_ref().map(indexing));
    value
}

/// Workers that take part, by device.
fn device(group: &pb::WorkersOnDevice) -> Value {
    json!({
        "device": group.device,
        "memory_bytes": Some(group.memory_bytes).filter(|bytes| *bytes > 0),
        "numerics_class": group.numerics.as_ref().map(|numerics| &numerics.class),
        "count": group.count,
        "workers": group.workers,
        "busy_percent": group.busy_percent,
        "waits_data_percent": group.waits_data_percent,
        "waits_weights_percent": group.waits_weights_percent,
        "waits_push_percent": group.waits_push_percent,
        "memory_used_bytes": Some(group.memory_used_bytes).filter(|bytes| *bytes > 0),
        "throttled": group.throttled,
        "failing": group.failing,
    })
}

/// Workers without work, with the reason.
fn idle(idle: &pb::Idle) -> Value {
    let mut value = json!({
        "why": idle.why().name(),
        "reason": idle.reason,
        "count": idle.count,
        "workers": idle.workers,
    });
    if let Some(pb::Numerics { class, facts }) = &idle.numerics {
        (value["numerics_class"], value["numerics_facts"]) = (json!(class), json!(facts));
    }
    if let Some(slow) = &idle.slow {
        value["microbatch_seconds"] = json!(slow.microbatch_us as f64 / 1e6);
        value["usual_seconds"] = json!(slow.usual_us as f64 / 1e6);
        value["again_seconds"] = json!(slow.again_ms as f64 / 1e3);
    }
    value
}

/// Returns the numerics classes that computed a job, each with the first version that it computed.
fn numerics(status: &JobStatus) -> Vec<Value> {
    let one = |since: &pb::NumericsSince| {
        let pb::Numerics { class, facts } = since.numerics.clone().unwrap_or_default();
        json!({ "version": since.version, "class": class, "facts": facts })
    };
    status.numerics.iter().map(one).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake::{evaluation, succeeded};

    #[test]
    fn it_has_exactly_the_documented_fields_in_order() {
        let hash = proto::artifact::sha256_hex(b"weights");
        assert_eq!(
            Summary::new(&succeeded()).to_line(),
            format!(
                r#"{{"job":"line-3","status":"succeeded","reason":"all steps applied","epochs":2,"steps":4,"samples_applied":32,"microbatches_applied":8,"duplicates_dropped":0,"leases_expired":0,"workers_seen":3,"wall_seconds":2.5,"samples_per_second":16.0,"data_wait":0.25,"final":{{"accuracy":0.75,"loss":0.25}},"model_sha256":"{hash}","numerics":[{{"version":0,"class":"pure-1","facts":"pure Rust"}}]}}"#
            )
        );
    }

    #[test]
    fn without_evaluation_the_training_loss_is_final_and_without_model_there_is_no_hash() {
        let status = JobStatus {
            final_metrics: BTreeMap::new(),
            artifacts: Vec::new(),
            training_ms: 0,
            ..succeeded()
        };
        let line = Summary::new(&status).to_line();
        assert!(
            line.contains(
                r#""samples_per_second":0.0,"data_wait":0.25,"final":{"loss":0.5},"model_sha256":null"#
            ),
            "{line}"
        );
    }

    #[test]
    fn a_job_with_a_best_version_names_it() {
        let selection = pb::Selection {
            metric: "dev/accuracy".to_owned(),
            larger: true,
            best: 460,
            value: 0.5,
            last: 690,
            waited: 2,
            stopped: true,
            ..Default::default()
        };
        let status = JobStatus { selection: Some(selection), ..succeeded() };
        let line = Summary::new(&status).to_line();
        assert!(
            line.contains(
                r#""best":{"step":460,"metric":"dev/accuracy","value":0.5,"last_step":690,"stopped_early":true}"#
            ),
            "{line}"
        );
        assert_eq!(json(&status)["best"]["step"], json!(460));
        assert!(json(&succeeded())["best"].is_null());
    }

    #[test]
    fn a_job_that_does_not_train_says_what_it_did() {
        let status = JobStatus {
            purpose: JobPurpose::Predict.into(),
            records: 600,
            records_done: 600,
            predictions: "/out/p.npy".to_owned(),
            ..succeeded()
        };
        let line = Summary::new(&status).to_line();
        assert!(line.ends_with(r#""purpose":"predict","records":600,"predictions":"/out/p.npy"}"#), "{line}");
        assert_eq!(
            (&json(&status)["purpose"], &json(&succeeded())["purpose"]),
            (&json!("predict"), &json!("train"))
        );
        assert!(json(&succeeded())["predictions"].is_null());
    }

    #[test]
    fn a_matrix_has_its_rows_and_each_epoch_its_metrics() {
        let confusion = pb::ConfusionMatrix { classes: 2, cells: vec![0, 2, 3], labels: vec![7, 1, 4] };
        let status = JobStatus { confusion: Some(confusion), ..succeeded() };
        let events: Vec<_> = [0, 1].map(|epoch| evaluation(epoch).kind).into();
        let events = events.iter().filter_map(|kind| match kind {
            crate::Kind::Evaluation(evaluation) => Some(evaluation),
            _ => None,
        });
        let text = Summary::new(&status).with_evaluations(events).to_text();
        assert!(text.contains("  \"confusion_matrix\": [\n    [7, 0],\n    [1, 4]\n  ],\n"), "{text}");
        let summary: Value = serde_json::from_str(&text).unwrap();
        assert_eq!(summary["confusion_matrix"], json!([[7, 0], [1, 4]]));
        assert_eq!(
            summary["evaluations"][1],
            json!({ "epoch": 1, "step": 4, "loss": 0.25, "accuracy": 0.75 })
        );
        assert_eq!(json(&status)["confusion_matrix"], summary["confusion_matrix"]);
        let damaged = pb::ConfusionMatrix { classes: 2, cells: vec![9], labels: vec![1] };
        let line = Summary::new(&JobStatus { confusion: Some(damaged), ..succeeded() }).to_line();
        assert!(!line.contains("confusion_matrix") && !line.contains("evaluations"), "{line}");
    }

    #[test]
    fn skipped_records_have_their_place_and_their_reason() {
        let record = |validation, record| pb::SkippedRecord {
            validation,
            file: "a.csv".to_owned(),
            record,
            reason: "column `x`".to_owned(),
        };
        let records = vec![record(false, 3), record(true, 0)];
        let skipped = pb::Skipped { train: 7, validation: 1, records, ..Default::default() };
        let status = JobStatus { skipped: Some(skipped), ..succeeded() };
        let summary: Value = serde_json::from_str(&Summary::new(&status).to_text()).unwrap();
        let expected = json!({ "train": 7, "validation": 1, "records": [
            { "set": "train", "file": "a.csv", "record": 3, "reason": "column `x`" },
            { "set": "validation", "file": "a.csv", "record": 0, "reason": "column `x`" },
        ] });
        assert_eq!(summary["skipped"], expected);
        assert_eq!(json(&status)["skipped"], expected);
        assert_eq!(json(&succeeded())["skipped"], Value::Null);
    }

    #[test]
    fn what_an_earlier_run_trained_is_no_speed_of_this_one() {
        let status = JobStatus { samples_before: 24, ..succeeded() };
        let line = Summary::new(&status).to_line();
        assert!(
            line.contains(r#""samples_applied":32,"#) && line.contains(r#""samples_per_second":4.0,"#),
            "{line}"
        );
    }
}
