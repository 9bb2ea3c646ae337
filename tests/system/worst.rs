//! The records with the largest losses: the same as in the predictions of the model, for any
//! fleet, with their images and texts.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::fmt::Write as _;
use std::fs;
use std::ops::Range;
use std::path::Path;

use serde_json::Value;

use crate::harness::{fail, succeed, summary};
use crate::images;

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

/// Returns the content of the only TensorBoard file of results.
fn board(out: &Path) -> Vec<u8> {
    let mut files = fs::read_dir(out.join("tensorboard")).unwrap();
    let file = fs::read(files.next().unwrap().unwrap().path()).unwrap();
    assert!(files.next().is_none());
    file
}

/// Returns the PNG files within a file, in their order.
fn pngs(mut file: &[u8]) -> Vec<Vec<u8>> {
    let find = |file: &[u8], part: &[u8]| file.windows(part.len()).position(|window| window == part);
    let mut found = Vec::new();
    while let Some(begin) = find(file, b"\x89PNG\r\n\x1a\n") {
        file = &file[begin..];
        // The type of the last chunk, and its checksum.
        let end = find(file, b"IEND").unwrap() + 8;
        found.push(file[..end].to_vec());
        file = &file[end..];
    }
    found
}

#[test]
fn images_of_the_worst_records_are_in_tensorboard_and_the_same_for_any_fleet() {
    let dir = tempfile::tempdir().unwrap();
    let job = images::write(dir.path()).display().to_string();
    let [out, again, none] = ["out", "again", "none"].map(|name| dir.path().join(name));
    let worst = ["--set", "evaluation.worst=5"];
    let [trained, first, second] = [&out, &again, &none].map(|out| out.display().to_string());
    succeed([&["run", &job, "--workers", "1", "--out", &trained][..], &worst].concat());
    let (file, shown) = (board(&out), pngs(&board(&out)));
    assert_eq!(shown.len(), 5);
    assert_eq!(lines(&out.join("worst.jsonl")).len(), 5);
    for tag in ["validation/worst", "validation/worst/images"] {
        assert!(file.windows(tag.len()).any(|window| window == tag.as_bytes()), "{tag}");
    }

    let evaluate = ["evaluate", &job, "--model", &trained, "--workers", "3", "--out"];
    succeed([&evaluate[..], &[first.as_str()], &worst].concat());
    assert!(pngs(&board(&again)) == shown, "an evaluation by 3 workers has other images");
    succeed([&evaluate[..], &[second.as_str()]].concat());
    assert!(pngs(&board(&none)).is_empty());
}

const TEXTS: &str = r#"
name = "texts"
epochs = 2
[model]
builtin = "softmax"
[data]
format = "jsonl"
train = { files = ["texts.jsonl"] }
validation = { files = ["texts.jsonl"] }
inputs = ["text"]
label = "class"
[data.transforms]
text = [{ op = "hash", buckets = 8 }, { op = "one_hot", classes = 8 }]
[batch]
micro = 10
[optimizer]
kind = "sgd"
learning_rate = 0.1
[evaluation]
worst = 20
"#;

#[test]
fn texts_of_the_worst_records_are_listed_for_the_first_ones() {
    let dir = tempfile::tempdir().unwrap();
    let text = |record: u64| format!("text {record}");
    let record = |record: u64| format!("{{\"text\": \"{}\", \"class\": {}}}\n", text(record), record % 2);
    fs::write(dir.path().join("texts.jsonl"), (0..50).map(record).collect::<String>()).unwrap();
    fs::write(dir.path().join("job.toml"), TEXTS).unwrap();
    let (job, out) = (dir.path().join("job.toml"), dir.path().join("out"));
    succeed([Path::new("run"), &job, Path::new("--out"), &out]);
    let worst = lines(&out.join("worst.jsonl"));
    assert_eq!(worst.len(), 20);
    for (at, found) in worst.iter().enumerate() {
        let expected = (at < 16).then(|| Value::from(text(found["record"].as_u64().unwrap())));
        assert_eq!(found.get("text"), expected.as_ref(), "{found}");
    }
}
