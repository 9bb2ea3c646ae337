//! One event as one line of `metrics.jsonl`. A number that JSON lacks, such as a loss that is not
//! finite, becomes `null`.

use proto::pb;
use serde_json::{Map, Value, json};

use crate::{Event, Kind};

/// Returns the line of an event, without its line end. `None` for an event that is no measurement.
pub fn line(event: &Event) -> Option<String> {
    let value = match &event.kind {
        Kind::Train(train) => json!({
            "event": "train",
            "step": train.step,
            "epoch": train.epoch,
            "loss": train.loss,
            "samples": train.samples,
            "samples_per_second": train.samples_per_second,
            "workers": train.workers,
            "learning_rate": train.learning_rate,
        }),
        Kind::Evaluation(evaluation) => {
            let mut line = Map::from_iter([("event".to_owned(), "eval".into())]);
            line.extend(self::evaluation(evaluation));
            Value::Object(line)
        }
        Kind::Fleet(fleet) => json!({
            "event": "fleet",
            "generation": fleet.generation,
            "workers": fleet.workers,
            "reason": fleet.reason,
        }),
        Kind::Checkpoint(checkpoint) => json!({
            "event": "checkpoint",
            "version": checkpoint.version,
            "bytes": checkpoint.bytes,
        }),
        Kind::Rewind(rewind) => json!({
            "event": "rewind",
            "version": rewind.version,
            "era": rewind.era,
        }),
        Kind::State(_) | Kind::Warning(_) | Kind::Indexing(_) => return None,
    };
    Some(value.to_string())
}

/// Returns the epoch, the step and the metrics of an evaluation, with the name of a named set.
pub(crate) fn evaluation(evaluation: &pb::EvaluationEvent) -> Map<String, Value> {
    let mut values = Map::new();
    values.insert("epoch".to_owned(), evaluation.epoch.into());
    values.insert("step".to_owned(), evaluation.step.into());
    if !evaluation.set.is_empty() {
        values.insert("set".to_owned(), evaluation.set.clone().into());
    }
    // The loss first, whatever the other metrics are called.
    let loss = evaluation.metrics.get_key_value("loss");
    let others = evaluation.metrics.iter().filter(|(name, _)| *name != "loss");
    values.extend(loss.into_iter().chain(others).map(|(name, &value)| (name.clone(), json!(value))));
    values
}

/// Returns the line of any event with its number and time, as `ebb watch --json` prints it.
pub fn full_line(event: &Event) -> Option<String> {
    let line = match &event.kind {
        Kind::State(state) => {
            json!({ "event": "state", "state": state.state().name(), "reason": state.reason }).to_string()
        }
        Kind::Warning(warning) => json!({ "event": "warning", "message": warning.message }).to_string(),
        Kind::Indexing(indexing) => json!({
            "event": "indexing",
            "files_done": indexing.files_done,
            "files": indexing.files,
            "bytes_done": indexing.bytes_done,
        })
        .to_string(),
        _ => line(event)?,
    };
    let mut value: Map<String, Value> = serde_json::from_str(&line).ok()?;
    value.insert("sequence".to_owned(), event.sequence.into());
    value.insert("unix_ms".to_owned(), event.unix_ms.into());
    Some(Value::Object(value).to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake::{evaluation, event, state, train};

    #[test]
    fn lines_have_exactly_the_documented_fields_in_order() {
        assert_eq!(
            line(&train(3)).unwrap(),
            r#"{"event":"train","step":3,"epoch":1,"loss":0.5,"samples":8,"samples_per_second":100.0,"workers":3,"learning_rate":0.1}"#
        );
        assert_eq!(
            line(&evaluation(1)).unwrap(),
            r#"{"event":"eval","epoch":1,"step":4,"loss":0.25,"accuracy":0.75}"#
        );
        let mut named = evaluation(1);
        if let Kind::Evaluation(evaluation) = &mut named.kind {
            evaluation.set = "test".to_owned();
        }
        assert_eq!(
            line(&named).unwrap(),
            r#"{"event":"eval","epoch":1,"step":4,"set":"test","loss":0.25,"accuracy":0.75}"#
        );
        let fleet = pb::FleetEvent { generation: 4, workers: 2, ps: 1, reason: "worker `b` left".to_owned() };
        assert_eq!(
            line(&event(1, Kind::Fleet(fleet))).unwrap(),
            r#"{"event":"fleet","generation":4,"workers":2,"reason":"worker `b` left"}"#
        );
        let rewind = pb::RewindEvent { version: 4, era: 1 };
        assert_eq!(
            line(&event(1, Kind::Rewind(rewind))).unwrap(),
            r#"{"event":"rewind","version":4,"era":1}"#
        );
        assert_eq!(line(&state(1, pb::JobState::Running, "")), None);
    }

    #[test]
    fn a_loss_that_is_not_finite_is_null() {
        let mut diverged = train(0);
        if let Kind::Train(train) = &mut diverged.kind {
            train.loss = f64::NAN;
        }
        assert!(line(&diverged).unwrap().contains(r#""loss":null"#));
    }

    #[test]
    fn watching_shows_states_and_warnings_too() {
        let shown = full_line(&state(7, pb::JobState::Failed, "no data")).unwrap();
        assert_eq!(
            shown,
            r#"{"event":"state","state":"failed","reason":"no data","sequence":7,"unix_ms":1700000003500}"#
        );
        let warning = pb::WarningEvent { message: "slow".to_owned() };
        assert!(full_line(&event(1, Kind::Warning(warning))).unwrap().contains(r#""message":"slow""#));
        let indexing = pb::Indexing { files_done: 3, files: 7, bytes_done: 4096 };
        let indexed = event(1, Kind::Indexing(indexing));
        assert!(
            full_line(&indexed)
                .unwrap()
                .starts_with(r#"{"event":"indexing","files_done":3,"files":7,"bytes_done":4096,"#)
        );
        assert_eq!(line(&indexed), None);
    }
}
