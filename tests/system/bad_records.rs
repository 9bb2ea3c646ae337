//! Records that cannot be decoded or lack a value: any fleet skips the same ones and trains the
//! same bits, whatever dies meanwhile.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use serde_json::Value;

use crate::harness::{Cluster, digits, fail, model, root, succeed, summary, text, told};

const JOB: &str = r#"
name = "bad"
epochs = 12
seed = 4
[model]
builtin = "softmax"
metrics = ["accuracy"]
[data]
format = "images"
train = { files = ["train"] }
validation = { files = ["validation"] }
inputs = ["image"]
label = "class"
on_error = "skip"
max_bad = 0.05
[data.transforms]
image = [{ op = "decode" }, { op = "resize", size = [6, 8] }, { op = "normalize", mean = 0.45, std = 0.22 }]
[batch]
micro = 4
effective = 12
[optimizer]
kind = "momentum"
learning_rate = 0.01
"#;

/// Images of the golden files of decoders.
const IMAGES: [&str; 8] =
    ["420.jpg", "422.jpg", "444.jpg", "progressive.jpg", "grey.png", "rgb.png", "rgba.png", "lossy.webp"];

/// Images that are cut off, with the numbers of their records.
const BAD: [(&str, &str, u64); 4] = [
    ("train", "ant/002-444.jpg", 2),
    ("train", "bee/000-420.jpg", 100),
    ("train", "bee/097-422.jpg", 197),
    ("validation", "bee/002-444.jpg", 12),
];

/// Writes a job and its images: 2 classes with 100 images each that train, and 10 that validate.
fn write(folder: &Path, job: &str) -> PathBuf {
    let golden = root().join("data/src/pixels/golden");
    for (set, images) in [("train", 100), ("validation", 10)] {
        for class in ["ant", "bee"] {
            let place = folder.join(set).join(class);
            std::fs::create_dir_all(&place).unwrap();
            for number in 0..images {
                let name = IMAGES[number % IMAGES.len()];
                std::fs::copy(golden.join(name), place.join(format!("{number:03}-{name}"))).unwrap();
            }
        }
    }
    for (set, name, _) in BAD {
        let path = folder.join(set).join(name);
        let whole = std::fs::read(&path).unwrap();
        std::fs::write(&path, &whole[..whole.len() / 2]).unwrap();
    }
    let path = folder.join("job.toml");
    std::fs::write(&path, job).unwrap();
    path
}

/// Checks that a summary lists exactly the images that are cut off, in the order of the files.
fn check(skipped: &Value) {
    assert_eq!((&skipped["train"], &skipped["validation"]), (&3.into(), &1.into()), "{skipped}");
    let records = skipped["records"].as_array().unwrap();
    assert_eq!(records.len(), BAD.len(), "{skipped}");
    for (record, (set, name, number)) in records.iter().zip(BAD) {
        assert_eq!((&record["set"], &record["file"]), (&set.into(), &set.into()), "{record}");
        assert_eq!(record["record"], number, "{record}");
        let place = format!("column `image` of record {number}, `{name}`: ");
        assert!(record["reason"].as_str().unwrap().starts_with(&place), "{record}");
    }
}

#[test]
fn any_fleet_skips_the_same_images_and_trains_the_same_bits() {
    let data = tempfile::tempdir().unwrap();
    let (job, alone) = (write(data.path(), JOB), data.path().join("alone"));
    succeed(["run", &job.display().to_string(), "--workers", "1", "--out", &alone.display().to_string()]);
    let of_one = summary(&alone);
    check(&of_one["skipped"]);
    let lines = std::fs::read_to_string(alone.join("skipped.jsonl")).unwrap();
    let lines: Vec<Value> = lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(Value::from(lines), of_one["skipped"]["records"]);
    assert_eq!(of_one["samples_applied"], 12 * 197);

    // The first worker begins alone, so it trains before it is killed. It alone takes 6 s.
    let mut cluster = Cluster::of(&digits::program(), 2, 1);
    let together = cluster.dir.path().join("out");
    let pace = ["--set", "model.builtin=paced", "--set", r#"model.options={ of = "softmax", millis = 10 }"#];
    let mut submission = cluster.submission(&job, &together, &pace);
    let mut submission = submission.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    while told(&together, "train") == 0 {
        assert!(submission.try_wait().unwrap().is_none(), "the job ended before its first step was told");
        std::thread::park_timeout(Duration::from_millis(5));
    }
    (0..2).for_each(|_| cluster.add_worker());
    cluster.wait_for_workers();
    cluster.workers[0].signal("KILL");
    let output = submission.wait_with_output().unwrap();
    assert!(output.status.success(), "{}", text(&output));
    let of_three = summary(&together);
    assert!(model(&alone) == model(&together), "3 workers: other bits than 1");
    for key in ["model_sha256", "samples_applied", "skipped", "final", "evaluations"] {
        assert_eq!(of_one[key], of_three[key], "3 workers: another `{key}` than 1");
    }
    let status = succeed(["status", "bad", "--master", &cluster.url]);
    let line =
        "skipped    3 training records and 1 validation record; the first: train, record 2: column `image`";
    assert!(status.contains(line), "{status}");
}

#[test]
fn by_default_a_bad_image_is_the_end_and_has_its_name() {
    let data = tempfile::tempdir().unwrap();
    let job = JOB.replace("on_error = \"skip\"\nmax_bad = 0.05\n", "shuffle = \"none\"\n");
    let job = write(data.path(), &job).display().to_string();
    let said = fail(["run", &job, "--out", &data.path().join("out").display().to_string()]);
    assert!(said.contains("/train: column `image` of record 2, `ant/002-444.jpg`: "), "{said}");
}

#[test]
fn more_bad_images_than_the_job_may_skip_are_its_end() {
    let data = tempfile::tempdir().unwrap();
    let (job, out) = (write(data.path(), JOB).display().to_string(), data.path().join("out"));
    let said = fail(["run", &job, "--out", &out.display().to_string(), "--set", "data.max_bad=0.01"]);
    assert!(said.contains("3 of 200 training records are bad, at most 2 may be skipped"), "{said}");
    assert!(said.contains("`train`, record 2: column `image` of record 2, `ant/002-444.jpg`"), "{said}");
    assert!(said.contains("clean the data, or raise data.max_bad"), "{said}");
    let summary = summary(&out);
    assert_eq!((&summary["status"], &summary["skipped"]["train"]), (&"failed".into(), &3.into()));
}

const TABLE: &str = r#"
name = "table"
epochs = 5
[model]
builtin = "linear"
loss = "mse"
[data]
format = "csv"
train = { files = ["a.csv"] }
on_error = "skip"
max_bad = 0.2
missing = { age = 33.5, income = "skip", y = "skip" }
[batch]
micro = 1
effective = 3
[optimizer]
kind = "adam"
learning_rate = 0.01
"#;

/// Returns a table of 60 records. Number 7 lacks what the job fills, 21 and 23 lack what it skips,
/// and 22 has no number.
fn table() -> String {
    let mut text = "age,income,y\n".to_owned();
    for record in 0..60 {
        let (age, income, y) = (20 + record, 2 * record, record % 7);
        text += &match record {
            7 => format!(",{income},{y}\n"),
            21 => format!("{age},NA,{y}\n"),
            22 => format!("{age},much,{y}\n"),
            23 => format!("{age},{income},\n"),
            _ => format!("{age},{income},{y}\n"),
        };
    }
    text
}

#[test]
fn a_step_without_a_good_record_changes_nothing_with_any_fleet() {
    let data = tempfile::tempdir().unwrap();
    let (job, file) = (data.path().join("job.toml"), data.path().join("a.csv"));
    std::fs::write(&job, TABLE).unwrap();
    std::fs::write(&file, table()).unwrap();
    let run = |workers: &str, order: &str| {
        let out = data.path().join(format!("{workers}-{order}"));
        let (job, path) = (job.display().to_string(), out.display().to_string());
        let order = format!("data.shuffle={order}");
        succeed(["run", &job, "--workers", workers, "--ps", workers, "--out", &path, "--set", &order]);
        let summary = summary(&out);
        assert_eq!(
            (&summary["samples_applied"], &summary["skipped"]["train"]),
            (&(5 * 57).into(), &3.into())
        );
        (model(&out), summary["skipped"].clone())
    };
    // In the order of the files, records 21 to 23 are one step.
    for order in ["records", "none"] {
        assert!(run("1", order) == run("3", order), "{order}: 3 workers differ from 1");
    }
    // Without the value for record 7 it is the end.
    let out = data.path().join("out").display().to_string();
    let missing = "data.missing={ income = \"skip\", y = \"skip\" }";
    let said = fail(["run", &job.display().to_string(), "--out", &out, "--set", missing]);
    assert!(
        said.contains("/a.csv: column `age` of record 7 has no value; fill it, or set data.missing"),
        "{said}"
    );
}
