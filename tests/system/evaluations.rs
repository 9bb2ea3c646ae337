//! Evaluations during training with real processes: equal numbers for any fleet, also when workers,
//! ps and the master are lost, and the version that a job selects by them.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use serde_json::Value;

use crate::harness::{self, Cluster, digits, events, root, succeed, summary, text, told};

/// Steps in an epoch of the example.
const EPOCH: u64 = 23;

fn job() -> PathBuf {
    root().join("examples/digits/job.toml")
}

fn arguments<'a>(sets: &[&'a str]) -> Vec<&'a str> {
    sets.iter().flat_map(|set| ["--set", set]).collect()
}

/// Trains in one process with one worker. Returns the folder of the results.
fn alone(out: &Path, sets: &[&str], more: &[&str]) -> PathBuf {
    let (job, path) = (job().display().to_string(), out.display().to_string());
    let run = ["run", &job, "--workers", "1", "--ps", "1", "--out", &path];
    succeed([&run[..], &arguments(sets), more].concat());
    out.to_owned()
}

/// What befalls a cluster once so many evaluations are reported.
type Blow = (usize, fn(&mut Cluster));

const KILLED_WORKER: fn(&mut Cluster) = |cluster| cluster.workers[0].signal("KILL");
const LOST_PS: fn(&mut Cluster) = |cluster| cluster.restart_ps(1);
const RESTARTED_MASTER: fn(&mut Cluster) = Cluster::restart_master;

/// Trains on a cluster of `digits::program` with two ps. Returns the folder of the results.
fn together(cluster: &mut Cluster, sets: &[&str], blows: &[Blow]) -> PathBuf {
    let out = cluster.dir.path().join("together");
    let sets = digits::arguments(&[sets, &["fleet.ps=2"]].concat());
    let mut submission = cluster.submission(&job(), &out, &sets);
    let mut child = submission.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    for (before, blow) in blows {
        while told(&out, "eval") < *before {
            assert!(child.try_wait().unwrap().is_none(), "it ended before it told {before} evaluations");
            std::thread::park_timeout(Duration::from_millis(5));
        }
        blow(cluster);
    }
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{}", text(&output));
    out
}

fn evaluations(out: &Path) -> Value {
    summary(out)["evaluations"].clone()
}

/// Returns the file of the worst records.
fn worst(out: &Path) -> Vec<u8> {
    std::fs::read(out.join("worst.jsonl")).unwrap()
}

/// Returns the steps of the evaluations of one validation set.
fn steps(out: &Path, set: &Value) -> Vec<u64> {
    let all = evaluations(out);
    let of_set = all.as_array().unwrap().iter().filter(|evaluation| evaluation["set"] == *set);
    of_set.map(|evaluation| evaluation["step"].as_u64().unwrap()).collect()
}

/// Returns the files of the example, cut to a range of records.
fn files(begin: u64, end: u64) -> String {
    format!(
        "{{ features = [\"images.idx3.gz\"], labels = [\"labels.idx1.gz\"], records = [{begin}, {end}] }}"
    )
}

/// Returns the data section of the example with other validation records. An epoch has as many
/// steps.
fn data(validation: &str) -> String {
    format!(
        "data={{ format = \"idx\", train = {}, {validation}, normalize = {{ scale = 16, mean = 0.305, std = 0.376 }} }}",
        files(0, 64 * EPOCH)
    )
}

#[test]
fn evaluations_have_the_same_numbers_for_any_fleet_and_after_losses() {
    let dir = tempfile::tempdir().unwrap();
    let named = format!("validation_sets = {{ dev = {}, test = {} }}", files(1472, 1600), files(1600, 1797));
    let times = ["evaluation.every_epochs=4", "evaluation.every_steps=10"];
    let data = data(&named);
    let sets = [&times[..], &["epochs=20", "evaluation.worst=20", &data]].concat();
    let calm = alone(&dir.path().join("out"), &sets, &[]);
    let due = |step: &u64| step.is_multiple_of(10) || step.is_multiple_of(4 * EPOCH);
    let due: Vec<_> = (1..=20 * EPOCH).filter(due).collect();
    assert_eq!((steps(&calm, &"dev".into()), steps(&calm, &"test".into())), (due.clone(), due));
    let mut cluster = Cluster::of(&digits::program(), 2, 3);
    let out = together(&mut cluster, &sets, &[(4, KILLED_WORKER), (8, RESTARTED_MASTER), (16, LOST_PS)]);
    assert!(!events(&out, "rewind").is_empty(), "nothing was lost");
    assert!(evaluations(&out) == evaluations(&calm), "other numbers than an undisturbed run");
    assert!(worst(&out) == worst(&calm), "other worst records than an undisturbed run");
    assert_eq!(worst(&out).iter().filter(|byte| **byte == b'\n').count(), 40);
    assert!(harness::model(&out) == harness::model(&calm), "other bits than an undisturbed run");
}

#[test]
fn each_validation_set_has_the_numbers_that_it_has_alone() {
    let dir = tempfile::tempdir().unwrap();
    let (dev, test) = (files(1472, 1600), files(1600, 1797));
    let several = data(&format!("validation = {dev}, validation_sets = {{ test = {test} }}"));
    let both = alone(&dir.path().join("both"), &["epochs=2", &several], &[]);
    let of_set = |out: &Path, set: &Value| -> Vec<Value> {
        let all = events(out, "eval");
        all.into_iter().filter(|event| event["set"] == *set).map(|event| event["accuracy"].clone()).collect()
    };
    let own = data(&format!("validation = {test}"));
    let only = alone(&dir.path().join("only"), &["epochs=2", &own], &[]);
    assert_eq!(of_set(&both, &"test".into()), of_set(&only, &Value::Null));
    assert_eq!(of_set(&both, &Value::Null).len(), 2);
    let last = &summary(&both)["final"];
    assert_eq!(last["test/accuracy"], summary(&only)["final"]["accuracy"]);
    assert!(last["accuracy"].is_f64(), "{last}");
    assert!(harness::model(&both) == harness::model(&only), "what is measured changes no weights");

    let cluster = Cluster::start(2, 3);
    let (job, model) = (job().display().to_string(), both.display().to_string());
    let command = ["evaluate", &job, "--model", &model, "--master", &cluster.url, "--set", &several];
    let said = succeed(command);
    assert!(said.contains("325 of 325 records evaluated"), "{said}");
    assert!(said.contains("validation") && said.contains("test"), "{said}");
    let output = harness::ebb([&command[..], &["--json"]].concat()).output().unwrap();
    assert!(output.status.success(), "{}", text(&output));
    let together: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(&together["final"], last);
}

#[test]
fn a_job_stops_early_at_the_same_version_with_the_same_model_for_any_fleet_and_after_losses() {
    let dir = tempfile::tempdir().unwrap();
    let saves = format!("checkpoint.url={}", dir.path().join("saved").display());
    let early = "early_stopping={ metric = \"loss\", patience = 60 }";
    for (mode, saves) in [
        ("sync", None),
        ("pipelined", Some([saves.as_str(), "checkpoint.every_steps=20", "checkpoint.keep=1"])),
    ] {
        let mode = format!("consistency.mode={mode}");
        let sets = ["epochs=400", "evaluation.every_steps=5", "evaluation.worst=3", early, &mode];
        let calm = alone(&dir.path().join(&mode), &sets, &[]);
        let best = summary(&calm)["best"].clone();
        assert_eq!(best["stopped_early"], Value::from(true), "{best}");
        assert!(best["step"].as_u64() < best["last_step"].as_u64(), "{best}");
        assert_eq!(steps(&calm, &Value::Null).last().copied(), best["last_step"].as_u64());

        // The model is that of the best version, and so are the final metrics and the worst
        // records.
        assert_eq!(summary(&calm)["final"]["loss"], best["value"]);
        let (job, model) = (job().display().to_string(), calm.display().to_string());
        let measured = dir.path().join(format!("{mode}-measured"));
        let out = measured.display().to_string();
        succeed(["evaluate", &job, "--model", &model, "--out", &out, "--set", "evaluation.worst=3"]);
        assert_eq!(summary(&measured)["final"], summary(&calm)["final"]);
        assert!(worst(&measured) == worst(&calm), "other worst records than those of the best version");

        let mut cluster = Cluster::of(&digits::program(), 2, 3);
        let sets = [&sets[..], saves.as_ref().map_or(&[][..], |saves| &saves[..])].concat();
        let blows = [(3, KILLED_WORKER), (6, RESTARTED_MASTER), (12, LOST_PS), (24, RESTARTED_MASTER)];
        let out = together(&mut cluster, &sets, &blows);
        assert!(!events(&out, "rewind").is_empty(), "nothing was lost");
        assert_eq!(summary(&out)["best"], best);
        assert_eq!(summary(&out)["final"], summary(&calm)["final"]);
        assert!(evaluations(&out) == evaluations(&calm), "other numbers than an undisturbed run");
        assert!(worst(&out) == worst(&calm), "other worst records than an undisturbed run");
        assert_eq!(summary(&out)["model_sha256"], summary(&calm)["model_sha256"]);
        assert!(harness::model(&out) == harness::model(&calm), "another model than an undisturbed run");
    }
}

#[test]
fn a_resumed_job_exports_the_best_version_of_both_runs() {
    let dir = tempfile::tempdir().unwrap();
    let saves = format!("checkpoint.url={}", dir.path().join("saved").display());
    let sets = |epochs| {
        let early = "early_stopping={ metric = \"loss\" }";
        [epochs, "evaluation.every_steps=5", early, "optimizer.schedule={ kind = \"constant\" }"]
    };
    let whole = alone(&dir.path().join("whole"), &sets("epochs=40"), &[]);
    let saving = |epochs| [&sets(epochs)[..], &[&saves, "checkpoint.every_steps=5"]].concat();
    let first = alone(&dir.path().join("first"), &saving("epochs=20"), &[]);
    let resumed = alone(&dir.path().join("second"), &saving("epochs=40"), &["--resume"]);
    let best = &summary(&whole)["best"];
    assert!(best["step"].as_u64() < Some(20 * EPOCH), "the first run has the best version: {best}");
    assert_eq!((&summary(&first)["best"]["step"], &summary(&resumed)["best"]), (&best["step"], best));
    assert!(harness::model(&resumed) == harness::model(&whole), "another model than one run");
    assert!(harness::model(&first) == harness::model(&whole), "the same version is the best one");
}

#[test]
fn selections_and_times_that_cannot_be_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let (job, out) = (job().display().to_string(), dir.path().join("out").display().to_string());
    for (set, said) in [
        ("early_stopping={ metric = \"auc\" }", "early_stopping.metric: `auc` is neither \"loss\" nor"),
        (
            "early_stopping={ metric = \"loss\", patience = 0 }",
            "early_stopping.patience: 0 would stop at once",
        ),
        ("early_stopping={ metric = \"loss\", set = \"dev\" }", "`dev` is no name in data.validation_sets"),
        ("early_stopping={ metric = \"loss\", pace = 3 }", "unknown field `pace`"),
        ("evaluation.every_steps=0", "evaluation.every_steps: 0 is no distance"),
        ("evaluation.every_step=5", "did you mean `every_steps`?"),
        ("data.validation_sets={ dev = { features = [\"a\"], labels = [\"b\"] } }", "validation_fraction"),
    ] {
        let refused = harness::fail(["run", &job, "--out", &out, "--set", set]);
        assert!(refused.contains(said), "{set}: {refused}");
        assert!(!Path::new(&out).join("summary.json").exists());
    }
}
