//! The MNIST example through separate processes: it learns, and PyTorch loads its file.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]
#![cfg(feature = "torch")]

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::harness::{self, Cluster, mnist, mnist_sets, model, root, summary, text};

fn submit(cluster: &Cluster, data: &Path, out: &str, sets: &[&str]) -> PathBuf {
    let out = cluster.dir.path().join(out);
    let mut more = mnist_sets(data);
    more.extend(sets.iter().map(|&set| set.to_owned()));
    let more: Vec<&str> = more.iter().flat_map(|set| ["--set", set]).collect();
    let output = cluster.submit(&root().join("examples/mnist/job.toml"), &out, &more);
    assert!(output.status.success(), "{}", text(&output));
    out
}

#[test]
fn three_worker_processes_learn_mnist_and_pytorch_agrees() {
    let Some(data) = mnist() else { return };
    let cluster = Cluster::start(2, 3);
    let out = submit(&cluster, &data, "three", &[]);
    let three = summary(&out);
    let accuracy = three["final"]["accuracy"].as_f64().unwrap();
    assert!(accuracy >= 0.975, "accuracy {accuracy}");
    assert!(out.join("model.pt").exists());
    pytorch_agrees(&data, &out, accuracy);
}

#[test]
fn one_worker_and_one_ps_give_the_same_script_model() {
    let Some(data) = mnist() else { return };
    let short = ["epochs=1", "data.train.records=[0, 1024]", "data.validation.records=[8000, 8200]"];
    let several = Cluster::start(3, 3);
    let reference = model(&submit(&several, &data, "several", &[&short[..], &["fleet.ps=3"]].concat()));
    drop(several);
    let one = Cluster::start(1, 1);
    let alone = model(&submit(&one, &data, "one", &[&short[..], &["fleet.ps=1"]].concat()));
    assert!(reference == alone, "1 worker and 1 ps: other bits than 3 and 3");
}

/// Runs the example's check, where PyTorch is installed.
fn pytorch_agrees(data: &Path, out: &Path, accuracy: f64) {
    let Some(python) = harness::python_with_torch() else { return };
    let output = Command::new(&python)
        .arg(root().join("examples/mnist/check.py"))
        .arg(out.join("model.safetensors"))
        .arg("--data")
        .arg(data)
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", text(&output));
    let said = text(&output);
    let (correct, total) =
        said.trim().rsplit(' ').find_map(|word| word.split_once('/')).expect("correct/total");
    let (correct, total): (f64, f64) = (correct.parse().unwrap(), total.parse().unwrap());
    assert!(
        (correct - accuracy * total).abs() < 0.5,
        "PyTorch: {correct} of {total}, Ebbflow: {}",
        accuracy * total
    );
}
