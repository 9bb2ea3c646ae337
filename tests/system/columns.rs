//! Tables: a Parquet file trains a network of Ebbflow's own, and one with three inputs of other
//! types.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

#[cfg(feature = "torch")]
use std::path::Path;
use std::path::PathBuf;

use crate::harness::{Cluster, fail, model, root, succeed, summary, text};

/// The job of the example, as a network without libtorch can train it: all columns but the label,
/// side by side.
const BUILTIN: [&str; 5] = [
    "model={ builtin = \"mlp\", loss = \"bce_with_logits\", metrics = \
     [\"accuracy\", \"log_loss\", \"mae\", \"auc\", \"f1\"] }",
    "data={ format = \"parquet\", train = { files = [\"clicks.parquet\"] }, validation_fraction = 0.2, label = \"clicked\", \
     normalize = { scale = 24 } }",
    "epochs=2",
    "optimizer.learning_rate=1e-3",
    "name=builtin",
];

fn job() -> PathBuf {
    root().join("examples/tabular/job.toml")
}

fn sets<'a>(sets: &[&'a str]) -> Vec<&'a str> {
    sets.iter().flat_map(|&set| ["--set", set]).collect()
}

#[test]
fn a_table_gives_the_same_bits_with_any_fleet() {
    let alone = tempfile::tempdir().unwrap();
    let (job, out) = (job().display().to_string(), alone.path().display().to_string());
    succeed([&["run", &job, "--workers", "1", "--out", &out][..], &sets(&BUILTIN)].concat());
    let cluster = Cluster::start(2, 3);
    let together = cluster.dir.path().join("out");
    let output = cluster.submit(&root().join("examples/tabular/job.toml"), &together, &sets(&BUILTIN));
    assert!(output.status.success(), "{}", text(&output));
    assert!(model(alone.path()) == model(&together), "3 workers: other bits than 1");
    let (alone, together) = (summary(alone.path()), summary(&together));
    assert_eq!(together["samples_applied"], 2 * 9600);
    // 2400 validation records are three data shards.
    assert_eq!(together["evaluations"].as_array().unwrap().len(), 2);
    for key in ["final", "evaluations"] {
        assert_eq!(alone[key], together[key], "3 workers: other metrics than 1");
    }
    let final_metrics = together["final"].as_object().unwrap();
    assert_eq!(
        final_metrics.keys().collect::<Vec<_>>(),
        ["accuracy", "auc", "f1", "log_loss", "loss", "mae"]
    );
    assert!(final_metrics.values().all(serde_json::Value::is_f64), "{final_metrics:?}");
}

#[test]
fn columns_that_do_not_fit_are_refused_with_what_there_is() {
    let (job, out) = (job().display().to_string(), tempfile::tempdir().unwrap());
    let out = out.path().display().to_string();
    let refuse = |set: &str| {
        let all = [&sets(&BUILTIN)[..], &["--set", set]].concat();
        fail([&["run", &job, "--out", &out][..], &all].concat())
    };
    let said = refuse("data.label=bought");
    assert!(
        said.contains("data.label = \"bought\": no such column; there are user, item, age, hour, clicked"),
        "{said}"
    );
    let said = refuse("data.inputs=[\"user\", \"age\"]");
    assert!(said.contains("data.normalize: it belongs to `features`"), "{said}");
    let said = refuse("data.format=arrow");
    assert!(said.contains("clicks.parquet: no Arrow IPC file or stream"), "{said}");
    let all = [
        &sets(&BUILTIN)[..4],
        &[
            "--set",
            "data={ format = \"parquet\", train = { files = [\"clicks.parquet\"] }, \
        label = \"clicked\", inputs = [\"user\", \"age\"] }",
        ],
    ]
    .concat();
    let said = fail([&["run", &job, "--out", &out][..], &all].concat());
    assert!(
        said.contains(
            "the network `mlp` takes one input of type f32, the job gives `user` i64[], `age` u8[]"
        ),
        "{said}"
    );
}

#[test]
fn a_file_can_be_looked_at_before_a_job_reads_it() {
    let file = root().join("examples/tabular/clicks.parquet").display().to_string();
    let said = succeed(["data", "inspect", &file, "--records", "1"]);
    assert!(said.contains("parquet, 12000 records in 3 blocks, 5 columns"), "{said}");
    assert!(
        said.contains("`item` i32[]") && said.contains("record 0: user ") && !said.contains("record 1"),
        "{said}"
    );
    let json: serde_json::Value =
        serde_json::from_str(&succeed(["data", "inspect", &file, "--json"])).unwrap();
    assert_eq!((&json["columns"][4]["dtype"], json["first"].as_array().unwrap().len()), (&"bool".into(), 3));
    let folder = tempfile::tempdir().unwrap();
    let other = folder.path().join("notes.txt");
    std::fs::write(&other, "1,2\n3,4\n").unwrap();
    let other = other.display().to_string();
    assert!(fail(["data", "inspect", &other]).contains("add --format"));
    assert!(succeed(["data", "inspect", &other, "--format", "csv", "--no-header"]).contains("2 records"));
    assert!(fail(["data", "inspect", &other, "--format", "cvs"]).contains("--format cvs: unknown variant"));
}

/// Trains an example alone. Returns the metric that it reached, and the one that the first line of
/// its job file states.
#[cfg(feature = "torch")]
pub(crate) fn reached(job: &Path, metric: &str) -> (f64, f64) {
    let alone = tempfile::tempdir().unwrap();
    let (path, out) = (job.display().to_string(), alone.path().display().to_string());
    let stated = std::fs::read_to_string(job).unwrap();
    let stated = stated.lines().next().unwrap().split(' ').find_map(|word| word.parse().ok()).unwrap();
    succeed(["run", &path, "--workers", "1", "--out", &out]);
    (summary(alone.path())["final"][metric].as_f64().unwrap(), stated)
}

/// Trains one epoch of an example alone and with three workers, and compares the bits.
#[cfg(feature = "torch")]
fn has_the_same_bits_with_any_fleet(job: &Path) {
    let (alone, sets) = (tempfile::tempdir().unwrap(), ["--set", "epochs=1"]);
    let (path, out) = (job.display().to_string(), alone.path().display().to_string());
    succeed([&["run", &path, "--workers", "1", "--out", &out][..], &sets].concat());
    let cluster = Cluster::start(1, 3);
    let together = cluster.dir.path().join("out");
    let output = cluster.submit(job, &together, &sets);
    assert!(output.status.success(), "{}", text(&output));
    assert!(model(alone.path()) == model(&together), "3 workers: other bits than 1");
}

/// Learns from three inputs: two of integers, which reach embeddings as they are, and one of two
/// columns.
#[cfg(feature = "torch")]
#[test]
fn a_script_with_three_inputs_learns_and_has_the_same_bits_with_any_fleet() {
    let (accuracy, stated) = reached(&job(), "accuracy");
    assert!(accuracy >= stated, "accuracy {accuracy}, stated is {stated}");
    has_the_same_bits_with_any_fleet(&job());
}

/// Learns from blocks of tokens, each with the class of the next token at every place.
#[cfg(feature = "torch")]
#[test]
fn a_gpt_learns_from_tokens_and_has_the_same_bits_with_any_fleet() {
    let job = root().join("examples/gpt/job.toml");
    let (perplexity, stated) = reached(&job, "perplexity");
    // Below the least perplexity of the stories, something would be counted wrongly.
    assert!((1.608..=stated).contains(&perplexity), "perplexity {perplexity}, stated is {stated}");
    has_the_same_bits_with_any_fleet(&job);
}

/// A script takes the same inputs by position, by name, and as a dictionary.
#[cfg(feature = "torch")]
#[test]
fn inputs_that_forward_does_not_take_are_refused_by_name() {
    let (job, out) = (job().display().to_string(), tempfile::tempdir().unwrap());
    let out = out.path().display().to_string();
    let run = |inputs: &str| ["run", &job, "--out", &out, "--set", inputs].map(str::to_owned);
    let said = fail(run("data.inputs={ person = \"user\", item = \"item\", numbers = [\"age\", \"hour\"] }"));
    assert!(said.contains("forward has no argument `person`; forward takes user, item, numbers"), "{said}");
    let said = fail(run("data.inputs={ user = \"user\", item = \"item\" }"));
    assert!(said.contains("forward needs the argument `numbers`"), "{said}");
    let said = fail(run("data.inputs=[\"item\", \"user\", \"age\"]"));
    assert!(said.contains("data.inputs gives `item` as argument 0"), "{said}");
}
