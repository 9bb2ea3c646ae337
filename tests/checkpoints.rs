//! What users do with checkpoints: list, verify, export, and begin another job with their weights.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod harness;

use std::path::{Path, PathBuf};

use harness::{Cluster, ebb, events, fail, model, root, succeed, text};

/// Runs digits with these settings; answers what it said.
fn run(out: &Path, sets: &[String]) -> String {
    let sets = sets.iter().flat_map(|set| ["--set", set]);
    let job = root().join("examples/digits/job.toml");
    let output =
        ebb(["run", "--workers", "1", "--ps", "2", "--out"]).arg(out).args(sets).arg(job).output().unwrap();
    assert!(output.status.success(), "{}", text(&output));
    text(&output)
}

/// A trained job with three checkpoints in `folder/checkpoints`, and its results in `folder/out`.
fn trained(folder: &Path) -> PathBuf {
    let checkpoints = folder.join("checkpoints");
    let url = format!("checkpoint.url={}", checkpoints.display());
    run(&folder.join("out"), &["epochs=3".into(), url, "checkpoint.every_epochs=1".into()]);
    checkpoints
}

fn some_file(checkpoints: &Path, version: &str) -> PathBuf {
    let folder = std::fs::read_dir(checkpoints.join("digits").join(version)).unwrap();
    let mut files: Vec<_> = folder.map(|entry| entry.unwrap().path()).collect();
    files.retain(|path| path.extension().is_some_and(|extension| extension == "safetensors"));
    files.sort();
    files.remove(0)
}

#[test]
fn checkpoints_are_listed_verified_and_exported() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoints = trained(folder.path());
    let place = checkpoints.to_str().unwrap();
    let listed = succeed(["checkpoint", "list", "--json", place]);
    let listed: Vec<serde_json::Value> =
        listed.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(listed.iter().map(|line| line["partitions"].as_u64().unwrap()).collect::<Vec<_>>(), [2, 2, 2]);
    let versions: Vec<_> = listed.iter().map(|line| line["version"].as_u64().unwrap()).collect();
    assert_eq!(versions, [versions[0], 2 * versions[0], 3 * versions[0]]);
    let told: Vec<_> = events(&folder.path().join("out"), "checkpoint")
        .iter()
        .map(|event| event["version"].as_u64())
        .collect();
    assert_eq!(told, versions.iter().copied().map(Some).collect::<Vec<_>>());
    assert_eq!(succeed(["checkpoint", "verify", place]).matches("intact").count(), 3);

    // The last checkpoint is of the trained model.
    let exported = folder.path().join("exported.safetensors");
    succeed(["checkpoint", "export", place, "--out", exported.to_str().unwrap()]);
    assert!(std::fs::read(&exported).unwrap() == model(&folder.path().join("out")));

    let damaged = some_file(&checkpoints, &format!("v{:010}", versions[2]));
    let mut bytes = std::fs::read(&damaged).unwrap();
    // The first weight: after the header, whose length comes first.
    let header = u64::from_le_bytes(*bytes.first_chunk().unwrap()) as usize;
    bytes[8 + header] ^= 1;
    std::fs::write(&damaged, bytes).unwrap();
    let said = fail(["checkpoint", "verify", place]);
    assert!(said.matches("intact").count() == 2 && said.contains("is damaged: checksum"), "{said}");
    let said = fail(["checkpoint", "export", place, "--out", exported.to_str().unwrap()]);
    assert!(said.contains(damaged.to_str().unwrap()), "{said}");
    let said = fail(["checkpoint", "list", folder.path().to_str().unwrap()]);
    assert!(said.contains("has no checkpoints"), "{said}");
}

#[test]
fn checkpoints_of_a_job_are_found_through_the_master() {
    let cluster = Cluster::start(1, 1);
    let (out, url) =
        (cluster.dir.path().join("out"), cluster.dir.path().join("checkpoints").display().to_string());
    let url = format!("checkpoint.url={url}");
    let sets =
        ["--set", "epochs=2", "--set", "fleet.ps=1", "--set", &url, "--set", "checkpoint.every_epochs=1"];
    let output = cluster.submit(&root().join("examples/digits/job.toml"), &out, &sets);
    assert!(output.status.success(), "{}", text(&output));
    let listed = succeed(["checkpoint", "list", "--job", "digits", "--master", &cluster.url]);
    assert_eq!(listed.lines().count(), 2, "{listed}");
}

#[test]
fn another_job_begins_with_the_weights_of_a_checkpoint_or_a_file_where_they_fit() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoints = trained(folder.path());
    let trained = model(&folder.path().join("out"));
    let exported = folder.path().join("out/model.safetensors");
    // So small a rate that no weight changes.
    let still = ["epochs=1", "optimizer.kind=sgd", "optimizer.learning_rate=1e-30"].map(str::to_owned);
    for (name, initial) in [("folder", checkpoints.display()), ("file", exported.display())] {
        let out = folder.path().join(name);
        let said = run(&out, &[&still[..], &[format!("model.initial={initial}")]].concat());
        assert!(said.contains("warm start: 4 of 4 tensors are from model.initial"), "{said}");
        assert!(model(&out) == trained, "{name}: other weights");
    }
    let initial = format!("model.initial={}", exported.display());
    let wider = "model.options={ hidden = [64] }".to_owned();
    let said = run(&folder.path().join("wider"), &[&still[..], &[initial, wider]].concat());
    assert!(said.contains("warm start: 1 of 4 tensors") && said.contains("in the model, F32"), "{said}");
    let missing = format!("model.initial={}", folder.path().join("none").display());
    let job = root().join("examples/digits/job.toml");
    let said = fail(["run", job.to_str().unwrap(), "--set", &missing]);
    assert!(said.contains("model.initial"), "{said}");
}
