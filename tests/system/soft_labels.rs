//! Records and labels that a job file changes before training: mixup, smoothed labels, tokenized
//! texts, and the warning about values that are NaN or infinite.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::fmt::Write as _;
use std::path::Path;

use crate::harness::{Cluster, fail, model, root, succeed, summary, text};

const JOB: &str = r#"
name = "soft"
epochs = 3
seed = 4
[model]
builtin = "mlp"
options = { hidden = [8], classes = 3 }
label_smoothing = 0.1
metrics = ["log_loss"]
[data]
format = "csv"
train = { files = ["a.csv"] }
normalize = { scale = 31 }
validation_fraction = 0.25
mixup = { alpha = 0.4, classes = 3 }
[batch]
micro = 8
effective = 24
[optimizer]
kind = "sgd"
learning_rate = 0.1
"#;

/// Writes the job and its data. Returns the path of the job file.
fn write(folder: &Path, job: &str) -> String {
    let mut table = "x,y,class\n".to_owned();
    for at in 0..120u32 {
        writeln!(table, "{},{},{}", at * 7 % 31, at * 5 % 17, at % 3).unwrap();
    }
    std::fs::write(folder.join("a.csv"), table).unwrap();
    let path = folder.join("job.toml");
    std::fs::write(&path, job).unwrap();
    path.display().to_string()
}

#[test]
fn mixed_and_smoothed_labels_give_the_same_bits_with_any_fleet() {
    let data = tempfile::tempdir().unwrap();
    let (job, alone) = (write(data.path(), JOB), data.path().join("alone"));
    let out = alone.display().to_string();
    succeed(["run", &job, "--workers", "1", "--out", &out]);
    let cluster = Cluster::start(2, 3);
    let together = cluster.dir.path().join("out");
    let output = cluster.submit(Path::new(&job), &together, &[]);
    assert!(output.status.success(), "{}", text(&output));
    assert!(model(&alone) == model(&together), "3 workers: other bits than 1");
    let found = summary(&alone);
    assert_eq!(found["samples_applied"], 3 * 90);
    // Smoothing adds to the loss of an evaluation, and not to the metric.
    let of = |key: &str| found["final"][key].as_f64().unwrap();
    assert!(of("loss") != of("log_loss"), "{found}");

    for (name, key) in
        [("plain", "data.mixup={ alpha = 0.4, classes = 3, }"), ("sharp", "model.label_smoothing=0")]
    {
        let other = data.path().join(name);
        let out = other.display().to_string();
        succeed(["run", &job, "--workers", "2", "--out", &out, "--set", key]);
        assert_eq!(model(&alone) == model(&other), name == "plain", "{key}");
    }
}

#[test]
fn classes_that_are_not_the_networks_outputs_are_refused() {
    let data = tempfile::tempdir().unwrap();
    let (job, out) = (write(data.path(), JOB), data.path().join("out").display().to_string());
    let said = fail(["run", &job, "--out", &out, "--set", "data.mixup.classes=4"]);
    let expected =
        "needs labels of 3 classes, as many as the network has outputs, found 4 (data.mixup.classes)";
    assert!(said.contains(expected), "{said}");
    let said = fail(["run", &job, "--out", &out, "--set", "data.mixup.classes=2"]);
    assert!(said.contains("is no class from 0 to 1, as data.mixup.classes = 2 has it"), "{said}");
}

#[test]
fn texts_become_tokens_on_workers_that_lack_the_file() {
    let data = tempfile::tempdir().unwrap();
    let lines: String = (0..40)
        .map(|at| {
            format!("{{\"text\": \"the worker {}\", \"labels\": {}}}\n", "step ".repeat(at % 4), at % 2)
        })
        .collect();
    std::fs::write(data.path().join("a.jsonl"), lines).unwrap();
    let tokenizer = data.path().join("tokenizer.json");
    std::fs::copy(root().join("tests/golden/tokens/bpe.json"), &tokenizer).unwrap();
    let (before, rest) = JOB.split_once("format = \"csv\"").unwrap();
    let (_, after) = rest.split_once("[batch]").unwrap();
    let job = write(data.path(), &format!("{before}{DATA}[batch]{after}"));
    let cluster = Cluster::start(1, 2);
    let out = cluster.dir.path().join("out");
    let output = cluster.submit(Path::new(&job), &out, &[]);
    assert!(output.status.success(), "{}", text(&output));
    assert_eq!(summary(&out)["samples_applied"], 3 * 30);

    std::fs::write(&tokenizer, "{}").unwrap();
    let out = out.display().to_string();
    assert!(fail(["run", &job, "--out", &out]).contains("tokenizer.json: no tokenizer.json ("));
    std::fs::remove_file(&tokenizer).unwrap();
    assert!(fail(["run", &job, "--out", &out]).contains("tokenizer.json"));
}

const DATA: &str = r#"format = "jsonl"
train = { files = ["a.jsonl"] }
inputs = ["text"]
validation_fraction = 0.25
[data.transforms]
text = [
    { op = "tokenize", file = "tokenizer.json" },
    { op = "pad", length = 8 },
    { op = "normalize", std = 340 },
]
"#;

#[test]
fn a_loss_that_is_no_number_names_the_input_that_was_none() {
    let data = tempfile::tempdir().unwrap();
    let job = JOB.replace("mixup = { alpha = 0.4, classes = 3 }\n", "");
    let job = job.replace("validation_fraction = 0.25", "shuffle = \"none\"");
    let job = write(data.path(), &job.replace("scale = 31", "scale = 0.5"));
    let table = data.path().join("a.csv");
    let good = std::fs::read_to_string(&table).unwrap();
    // Beyond f32 when divided by the scale, so it becomes infinite.
    std::fs::write(&table, good.replacen("21,15,0\n", "21,3e38,0\n", 1)).unwrap();
    let out = data.path().join("out");
    let said = fail(["run", &job, "--out", &out.display().to_string()]);
    assert!(said.contains("in column `y` of record 3"), "{said}");
}

#[test]
fn values_that_are_not_finite_are_told_once() {
    let data = tempfile::tempdir().unwrap();
    let job = JOB.replace("mixup = { alpha = 0.4, classes = 3 }\n", "").replace("scale = 31", "scale = 0.5");
    let job = write(data.path(), &job.replace("validation_fraction = 0.25\n", ""));
    std::fs::write(data.path().join("b.csv"), "x,y,class\n1,2,0\n3,3e38,1\n4,5,2\n").unwrap();
    let [trained, measured] =
        ["trained", "measured"].map(|name| data.path().join(name).display().to_string());
    // An evaluation may report a loss that is no number, so both jobs end well.
    let set = "data.validation={ files = [\"b.csv\"] }";
    let run =
        succeed(["run", &job, "--out", &trained, "--set", set, "--set", "optimizer.learning_rate=1e-6"]);
    // The report of its last task ends this one.
    let evaluate = succeed(["evaluate", &job, "--model", &trained, "--out", &measured, "--set", set]);
    for said in [run, evaluate] {
        let told: Vec<_> = said.lines().filter(|line| line.starts_with("warning: ")).collect();
        let [about] = told[..] else { panic!("expected one warning: {said}") };
        assert!(about.contains("1 value is NaN or infinite in a batch of 3 records"), "{about}");
        assert!(about.contains("in column `y` of record 1"), "{about}");
    }
}
