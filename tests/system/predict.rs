//! A trained model is evaluated and predicts, in one process and by a cluster of which a worker is
//! killed: equal numbers, and equal bytes with every record once.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use serde_json::Value;

use crate::harness::tmpfs::Tmpfs;
use crate::harness::{self, Cluster, example, fail, root, succeed, summary, text};

/// Records of the example, and those of three times its files.
const RECORDS: u64 = 1797;
const THRICE: u64 = 3 * RECORDS;

/// The network of the example.
pub(crate) const MLP: &str =
    "model={ builtin = \"mlp\", options = { hidden = [128] }, metrics = [\"accuracy\"] }";

/// A network with these weights that takes 20 ms for each microbatch. A part of 256 records takes
/// 320 ms.
pub(crate) const PACED: &str =
    "model={ builtin = \"paced\", options = { of = \"mlp\", millis = 20, hidden = [128] } }";

pub(crate) fn job() -> String {
    root().join("examples/digits/job.toml").display().to_string()
}

/// Returns the data section of the example with its files `times` times, and no validation.
pub(crate) fn data(times: usize) -> String {
    let files = |name: &str| vec![format!("\"{name}\""); times].join(", ");
    format!(
        "data={{ format = \"idx\", train = {{ features = [{}], labels = [{}] }}, normalize = {{ scale = 16, mean = 0.305, \
         std = 0.376 }} }}",
        files("images.idx3.gz"),
        files("labels.idx1.gz")
    )
}

pub(crate) fn sets<'a>(sets: &[&'a str]) -> Vec<&'a str> {
    sets.iter().flat_map(|&set| ["--set", set]).collect()
}

/// Trains the example for a moment. Returns the folder of its results.
pub(crate) fn trained(dir: &Path) -> PathBuf {
    let out = dir.join("model");
    let path = out.display().to_string();
    succeed([&["run", &job(), "--workers", "1", "--out", &path][..], &sets(&["epochs=2", MLP])].concat());
    out
}

/// Predicts in one process with one worker. Returns what the command printed.
pub(crate) fn alone(model: &Path, out: &Path, times: usize, more: &[&str]) -> String {
    predicted("1", model, out, times, more)
}

/// Predicts in one process with so many workers. Returns what the command printed.
fn predicted(workers: &str, model: &Path, out: &Path, times: usize, more: &[&str]) -> String {
    let (job, data) = (job(), data(times));
    let (model, out) = (model.display().to_string(), out.display().to_string());
    let command = ["predict", &job, "--model", &model, "--out", &out, "--on", "train", "--workers", workers];
    succeed([&command[..], &sets(&[&data, MLP, "fleet.ps=1"]), more].concat())
}

/// Returns the folder of the parts of a file of predictions.
fn parts(out: &Path) -> PathBuf {
    PathBuf::from(format!("{}.parts", out.display()))
}

/// Returns the parts that are written. Each job has a folder of its own.
fn written(out: &Path) -> Vec<String> {
    let jobs = fs::read_dir(parts(out)).into_iter().flatten().flatten();
    let names = jobs.flat_map(|job| fs::read_dir(job.path()).into_iter().flatten().flatten());
    let names = names.map(|entry| entry.file_name().to_string_lossy().into_owned());
    names.filter(|name| name.starts_with("part-") && name.ends_with(".jsonl")).collect()
}

#[test]
fn an_evaluation_gives_the_numbers_of_the_last_one_of_the_training_with_any_fleet() {
    let dir = tempfile::tempdir().unwrap();
    let model = trained(dir.path());
    let expected = summary(&model)["final"].clone();
    let (job, model, out) = (job(), model.display().to_string(), dir.path().join("measured"));
    let out_path = out.display().to_string();
    let command = ["evaluate", &job, "--model", &model, "--out", &out_path, "--workers", "2"];
    let said = succeed([&command[..], &sets(&[MLP])].concat());
    assert!(said.contains("359 of 359 records evaluated") && said.contains("validation   loss"), "{said}");
    let measured = summary(&out);
    assert_eq!((&measured["final"], &measured["purpose"]), (&expected, &"evaluate".into()));
    assert_eq!((&measured["steps"], &measured["samples_applied"]), (&0.into(), &0.into()));
    let lines = harness::events(&out, "eval");
    assert_eq!((lines.len(), &lines[0]["loss"]), (1, &expected["loss"]));
    assert!(harness::events(&out, "train").is_empty());

    let cluster = Cluster::start(2, 3);
    let weights = format!("{model}/model.safetensors");
    let command = ["evaluate", &job, "--model", &weights, "--master", &cluster.url, "--json"];
    let output = harness::ebb([&command[..], &sets(&[MLP])].concat()).output().unwrap();
    assert!(output.status.success(), "{}", text(&output));
    let together: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&together["final"], &together["records"]), (&expected, &359.into()));

    let said =
        fail([&command[..], &sets(&["model={ builtin = \"mlp\", options = { hidden = [64] } }"])].concat());
    assert!(
        said.contains("none of the model's tensors fits") || said.contains("tensors do not fit"),
        "{said}"
    );
}

#[test]
fn predictions_are_the_same_bytes_when_a_worker_is_killed_and_absent_before_the_end() {
    let dir = tempfile::tempdir().unwrap();
    let model = trained(dir.path());
    let calm = dir.path().join("calm.jsonl");
    let said = alone(&model, &calm, 3, &[]);
    assert!(said.contains(&format!("{THRICE} of {THRICE} records predicted")), "{said}");

    // A worker that is alone has a lease until the last of 22 parts is done, which takes 7 s.
    let mut cluster = Cluster::of(&example("oracle"), 1, 1);
    let out = dir.path().join("together.jsonl");
    let (job, data) = (job(), data(3));
    let (weights, out_path) = (model.display().to_string(), out.display().to_string());
    let command =
        ["predict", &job, "--model", &weights, "--out", &out_path, "--on", "train", "--master", &cluster.url];
    let mut command =
        harness::ebb([&command[..], &sets(&[&data, PACED, "fleet.ps=1"]), &["--json"]].concat());
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    while written(&out).is_empty() {
        assert!(child.try_wait().unwrap().is_none(), "it ended before a part was written");
        std::thread::park_timeout(Duration::from_millis(5));
    }
    (0..2).for_each(|_| cluster.add_worker());
    cluster.workers[0].signal("KILL");
    assert!(!out.exists(), "a file before all parts");
    let _ = cluster.workers[0].child.wait();
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{}", text(&output));
    let told: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&told["predictions"], &told["records"]), (&out_path.into(), &THRICE.into()));
    assert!(told["leases_expired"].as_u64() >= Some(1), "the killed worker held nothing: {told}");

    assert!(fs::read(&calm).unwrap() == fs::read(&out).unwrap(), "3 workers: other bytes than 1");
    let lines = fs::read_to_string(&out).unwrap();
    let lines: Vec<Value> = lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(lines.len() as u64, THRICE);
    for (record, line) in (0..).zip(&lines) {
        assert_eq!(
            (&line["record"], line["prediction"].as_array().unwrap().len()),
            (&Value::from(record), 10)
        );
    }
    let again = (RECORDS as usize, &lines[0]["prediction"]);
    assert_eq!(&lines[again.0]["prediction"], again.1, "the same record in another place");
    for out in [&calm, &out] {
        assert!(!parts(out).exists(), "parts are left of {}", out.display());
    }
}

/// Copies of the example's files with more than 100,000 records, and how many records they have.
const MANY_TIMES: usize = 56;
const MANY: u64 = MANY_TIMES as u64 * RECORDS;

/// The network of [`PACED`] that takes 4 ms for each microbatch.
const QUICK: &str = "model={ builtin = \"paced\", options = { of = \"mlp\", millis = 4, hidden = [128] } }";

#[test]
fn a_hundred_thousand_records_are_predicted_once_while_workers_and_the_master_die() {
    const { assert!(MANY > 100_000) };
    let dir = tempfile::tempdir().unwrap();
    let model = trained(dir.path());
    let once = dir.path().join("once.jsonl");
    alone(&model, &once, 1, &[]);
    let once = fs::read_to_string(&once).unwrap();
    let once: Vec<Value> = once.lines().map(|line| serde_json::from_str(line).unwrap()).collect();

    let mut cluster = Cluster::of(&example("oracle"), 1, 3);
    let out = dir.path().join("many.jsonl");
    let (job, data) = (job(), data(MANY_TIMES));
    let (weights, out_path) = (model.display().to_string(), out.display().to_string());
    let command =
        ["predict", &job, "--model", &weights, "--out", &out_path, "--on", "train", "--master", &cluster.url];
    let mut command =
        harness::ebb([&command[..], &sets(&[&data, QUICK, "fleet.ps=1"]), &["--json"]].concat());
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    let all = MANY.div_ceil(256) as usize;
    // The last kill meets the task that joins the parts, if it has not ended.
    for (strike, wanted) in [all / 8, all / 4, all / 2, all].into_iter().enumerate() {
        loop {
            let has_ended = child.try_wait().unwrap().is_some();
            if written(&out).len() >= wanted || out.exists() {
                break;
            }
            assert!(!has_ended, "it ended before the parts were written");
            std::thread::park_timeout(Duration::from_millis(2));
        }
        let victims = if wanted == all { strike..strike + 3 } else { strike..strike + 1 };
        if wanted == all / 2 {
            cluster.restart_master();
        }
        for victim in victims {
            cluster.workers[victim].signal("KILL");
            cluster.add_worker();
        }
        // The file is absent, or it is whole.
        if let Ok(lines) = fs::read_to_string(&out) {
            assert_eq!(lines.lines().count() as u64, MANY, "after kill {strike}");
        }
    }
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{}", text(&output));
    let lines = fs::read_to_string(&out).unwrap();
    let mut records = 0;
    for (record, line) in lines.lines().enumerate() {
        let line: Value = serde_json::from_str(line).unwrap();
        let expected = &once[record % once.len()]["prediction"];
        assert_eq!((&line["record"], &line["prediction"]), (&record.into(), expected));
        records += 1;
    }
    assert_eq!(records, MANY);
    assert!(!parts(&out).exists(), "parts are left");
}

#[test]
fn predictions_for_a_full_disk_fail_with_the_cause_and_leave_no_file() {
    let Some(mut disk) = Tmpfs::mount("4m") else { return };
    let dir = tempfile::tempdir().unwrap();
    let model = trained(dir.path());
    let (calm, out) = (dir.path().join("calm.npy"), disk.path().join("full.npy"));
    alone(&model, &calm, 1, &[]);
    disk.fill();
    let (job, data, out_path) = (job(), data(1), out.display().to_string());
    let weights = model.display().to_string();
    let command =
        ["predict", &job, "--model", &weights, "--out", &out_path, "--on", "train", "--workers", "1"];
    let command = [&command[..], &sets(&[&data, MLP, "fleet.ps=1"])].concat();
    let said = fail(&command);
    assert!(said.contains("No space left on device") && said.contains("full.npy"), "{said}");
    assert!(!out.exists());
    disk.free();
    succeed(&command);
    assert!(fs::read(&calm).unwrap() == fs::read(&out).unwrap(), "other bytes after the full disk");
}

#[test]
fn predictions_have_the_format_that_their_name_says_and_large_ones_a_manifest() {
    let dir = tempfile::tempdir().unwrap();
    let model = trained(dir.path());
    let out = |name: &str| dir.path().join(name);
    for name in ["p.jsonl", "p.npy", "p.parquet"] {
        alone(&model, &out(name), 1, &[]);
        assert!(!parts(&out(name)).exists(), "parts are left of {name}");
        let of_three = out(&format!("three-{name}"));
        predicted("3", &model, &of_three, 1, &[]);
        assert!(fs::read(&of_three).unwrap() == fs::read(out(name)).unwrap(), "{name}: 3 workers differ");
    }
    let inspect =
        |name: &str| succeed(["data", "inspect", &out(name).display().to_string(), "--records", "1"]);
    assert!(inspect("p.npy").contains(&format!("{RECORDS} records")), "{}", inspect("p.npy"));
    assert!(inspect("p.npy").contains("f32[10]"), "{}", inspect("p.npy"));
    let said = inspect("p.parquet");
    for part in [&format!("{RECORDS} records"), "`record` i64[]", "`prediction` f32[10]"] {
        assert!(said.contains(part), "`{part}` missing in {said}");
    }

    let said = predicted("3", &model, &out("large.jsonl"), 1, &["--join-bytes-max", "1000"]);
    let manifest = parts(&out("large.jsonl")).join("manifest.json");
    assert!(said.contains(&manifest.display().to_string()), "{said}");
    assert!(!out("large.jsonl").exists(), "it is too large to be joined");
    let manifest: Value = serde_json::from_str(&fs::read_to_string(&manifest).unwrap()).unwrap();
    assert_eq!((&manifest["records"], &manifest["format"]), (&RECORDS.into(), &"jsonl".into()));
    let files = manifest["files"].as_array().unwrap();
    assert_eq!(files.len(), 8);
    let read =
        |file: &Value| fs::read(parts(&out("large.jsonl")).join(file["file"].as_str().unwrap())).unwrap();
    let together: Vec<u8> = files.iter().flat_map(read).collect();
    assert!(together == fs::read(out("p.jsonl")).unwrap(), "the parts are the file");
}

#[test]
fn predictions_are_refused_where_something_is() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("p.jsonl");
    fs::write(&out, "something").unwrap();
    let (job, path) = (job(), out.display().to_string());
    let said = fail(["predict", &job, "--model", "none", "--out", &path]);
    assert!(said.contains("p.jsonl exists; choose another file"), "{said}");
    assert_eq!(fs::read_to_string(&out).unwrap(), "something");
    let said = fail(["predict", &job, "--model", "none", "--out", "p.csv"]);
    assert!(said.contains("must end in one of .jsonl, .npy, .parquet"), "{said}");
}

#[test]
fn files_without_labels_are_predicted_like_those_with_labels() {
    let dir = tempfile::tempdir().unwrap();
    let model = trained(dir.path());
    let (labelled, new, only) =
        (dir.path().join("l.jsonl"), dir.path().join("n.jsonl"), dir.path().join("o.jsonl"));
    alone(&model, &labelled, 1, &[]);
    let expected = fs::read(&labelled).unwrap();

    let features = "{ features = [\"images.idx3.gz\"] }";
    let predict = |out: &Path, sets_of: &[&str]| {
        let (job, model, out) = (job(), model.display().to_string(), out.display().to_string());
        let command = ["predict", &job, "--model", &model, "--out", &out, "--workers", "1"];
        harness::ebb([&command[..], &sets(sets_of)].concat()).output().unwrap()
    };
    // The number of classes comes from the labels of the training.
    let data_set = |train: &str, more: &str| {
        format!(
            "data={{ format = \"idx\", train = {train}{more}, normalize = {{ scale = 16, mean = 0.305, std = 0.376 }} }}"
        )
    };
    let with_labels = "{ features = [\"images.idx3.gz\"], labels = [\"labels.idx1.gz\"] }";
    let data = data_set(with_labels, &format!(", validation = {features}"));
    let output = predict(&new, &[&data, MLP, "fleet.ps=1"]);
    assert!(output.status.success(), "{}", text(&output));
    assert!(fs::read(&new).unwrap() == expected, "the file without labels has other predictions");

    // Nothing has labels, so the job says how many classes there are.
    let (data, on) = (data_set(features, ""), ["--on", "train"]);
    let said = fail(
        [
            &[
                "predict",
                &job(),
                "--model",
                &model.display().to_string(),
                "--out",
                &only.display().to_string(),
            ][..],
            &on,
            &sets(&[&data, MLP]),
        ]
        .concat(),
    );
    assert!(said.contains("`classes` is not given"), "{said}");
    let mlp = "model={ builtin = \"mlp\", options = { hidden = [128], classes = 10 } }";
    succeed(
        [
            &[
                "predict",
                &job(),
                "--model",
                &model.display().to_string(),
                "--out",
                &only.display().to_string(),
            ][..],
            &on,
            &["--workers", "1"],
            &sets(&[&data, mlp, "fleet.ps=1"]),
        ]
        .concat(),
    );
    assert!(fs::read(&only).unwrap() == expected, "a job without labels has other predictions");
}
