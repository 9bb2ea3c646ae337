//! The records with the largest losses: the same as in the predictions of the model, for any
//! fleet.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::fmt::Write as _;
use std::fs;
use std::ops::Range;
use std::path::Path;

use serde_json::Value;

use crate::harness::{fail, succeed, summary};

const JOB: &str = r#"
name = "worst"
epochs = 1
[model]
builtin = "softmax"
metrics = ["accuracy"]
[data]
format = "csv"
train = { files = ["t.csv"] }
validation = { files = ["a.csv", "b.csv"], records = [100, 3100] }
validation_sets = { late = { files = ["c.csv"] } }
[batch]
micro = 50
[optimizer]
kind = "adam"
learning_rate = 0.05
[evaluation]
worst = 20
"#;

/// Records with equal values come again after so many, so each loss occurs several times.
const PERIOD: u64 = 500;

/// Files of validation: names, and the records of all of these files that they have.
const FILES: [(&str, Range<u64>); 3] = [("a.csv", 0..1700), ("b.csv", 1700..3200), ("c.csv", 3200..3700)];

/// Returns the label of a record.
const fn label(record: u64) -> u64 {
    let record = record % PERIOD;
    (record * record / 7 + record) % 3
}

fn write(path: &Path, records: Range<u64>) {
    let mut text = "x,y,label\n".to_owned();
    for record in records {
        let at = record % PERIOD;
        writeln!(text, "{}.{},{}.5,{}", at % 7, at % 10, at * 37 % 11, label(record)).unwrap();
    }
    fs::write(path, text).unwrap();
}

fn lines(path: &Path) -> Vec<Value> {
    fs::read_to_string(path).unwrap().lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn numbers(value: &Value) -> Vec<f32> {
    value.as_array().unwrap().iter().map(|number| number.as_f64().unwrap() as f32).collect()
}

#[test]
fn the_worst_records_are_those_of_the_predictions_with_the_largest_losses() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).display().to_string();
    write(&dir.path().join("t.csv"), 0..2000);
    FILES.into_iter().for_each(|(name, records)| write(&dir.path().join(name), records));
    fs::write(dir.path().join("job.toml"), JOB).unwrap();
    let (job, out, again) = (path("job.toml"), path("out"), path("again"));
    succeed(["run", &job, "--workers", "1", "--out", &out]);
    assert_eq!(summary(Path::new(&out))["worst"], "worst.jsonl");
    let worst = lines(&dir.path().join("out/worst.jsonl"));
    assert_eq!(worst.len(), 40);

    // The predictions are of the set without a name.
    let predicted = path("predicted.jsonl");
    succeed(["predict", &job, "--model", &out, "--out", &predicted]);
    let losses = lines(Path::new(&predicted)).into_iter().map(|line| {
        let (record, outputs) = (line["record"].as_u64().unwrap(), numbers(&line["prediction"]));
        let sum: f64 = outputs.iter().map(|&output| f64::from(output).exp()).sum();
        (sum.ln() - f64::from(outputs[label(record) as usize]), record, outputs)
    });
    let mut expected: Vec<_> = losses.collect();
    assert_eq!((expected.len(), expected[0].1), (3000, 100));
    expected.sort_by(|one, other| other.0.total_cmp(&one.0).then(one.1.cmp(&other.1)));
    let (unnamed, late) = worst.split_at(20);
    for (found, (loss, record, outputs)) in unnamed.iter().zip(expected) {
        let (file, begin) = if record < 1700 { ("a.csv", 0) } else { ("b.csv", 1700) };
        assert_eq!(found.get("set"), None);
        assert_eq!(found["record"], record, "{found}");
        assert_eq!((&found["file"], &found["row"]), (&file.into(), &(record - begin).into()));
        assert_eq!((&found["label"], numbers(&found["outputs"])), (&label(record).into(), outputs));
        assert!((found["loss"].as_f64().unwrap() - loss).abs() < 1e-9, "{found}, expected {loss}");
    }
    for found in late {
        assert_eq!((&found["set"], &found["file"]), (&"late".into(), &"c.csv".into()));
        assert_eq!(found["record"], found["row"]);
        assert_eq!(found["label"], label(3200 + found["row"].as_u64().unwrap()));
    }
    let falls = |list: &[Value]| list.is_sorted_by(|one, next| one["loss"].as_f64() >= next["loss"].as_f64());
    assert!(falls(unnamed) && falls(late));

    succeed(["evaluate", &job, "--model", &out, "--out", &again, "--workers", "3"]);
    let [first, second] =
        ["out", "again"].map(|out| fs::read(dir.path().join(out).join("worst.jsonl")).unwrap());
    assert!(first == second, "an evaluation by 3 workers has other records");

    let none = path("none");
    succeed(["evaluate", &job, "--model", &out, "--out", &none, "--set", "evaluation.worst=0"]);
    assert!(!dir.path().join("none/worst.jsonl").exists());
    let said = fail(["evaluate", &job, "--model", &out, "--set", "evaluation.worst=501"]);
    assert!(said.contains("evaluation.worst = 501: at most 1000 records are listed, 500 of each"), "{said}");
}
