//! Ebbflow makes the same 50 steps as plain PyTorch, to 1e-4 of the loss at each, with equal
//! initial weights, record order and hyperparameters.
//!
//! `golden/training.py` rebuilds all of them from their definitions and writes the losses.
//! `golden/torch_steps.py` trains a TorchScript module with BatchNorm.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use crate::harness::{events, root, succeed};

/// Runs a job with 2 workers and 2 ps, and compares the loss of each step.
fn losses_agree(job: &str, sets: &[&str], expected: &serde_json::Value) {
    let out = tempfile::tempdir().unwrap();
    let mut args = vec!["run".to_owned(), root().join(job).display().to_string()];
    args.extend(["--workers", "2", "--ps", "2", "--out"].map(str::to_owned));
    args.push(out.path().display().to_string());
    args.extend(sets.iter().flat_map(|set| ["--set".to_owned(), (*set).to_owned()]));
    succeed(args);
    let train = events(out.path(), "train");
    let expected = expected.as_array().unwrap();
    assert_eq!(expected.len(), 50);
    for (step, expected) in expected.iter().enumerate() {
        assert_eq!(train[step]["step"], step, "every step is reported");
        let (expected, found) = (expected.as_f64().unwrap(), train[step]["loss"].as_f64().unwrap());
        let error = (found - expected).abs() / expected.abs();
        assert!(
            error <= 1e-4,
            "{job} {sets:?}, step {step}: PyTorch {expected}, Ebbflow {found}, off by {error:e}"
        );
    }
}

fn golden(name: &str) -> serde_json::Value {
    let text = std::fs::read_to_string(root().join("tests/golden").join(name)).unwrap();
    serde_json::from_str(&text).unwrap()
}

#[test]
fn fifty_steps_of_the_pure_engine_have_the_losses_of_plain_pytorch() {
    let golden = golden("training.json");
    let adam = ["optimizer.kind=adam", "optimizer.learning_rate=3e-3"];
    let momentum = ["optimizer.kind=momentum", "optimizer.learning_rate=0.1", "optimizer.momentum=0.9"];
    losses_agree("tests/golden/training.toml", &adam, &golden["losses"]["adam"]);
    losses_agree("tests/golden/training.toml", &momentum, &golden["losses"]["momentum"]);
}

#[cfg(feature = "torch")]
#[test]
fn fifty_steps_of_a_torchscript_module_have_the_losses_of_plain_pytorch() {
    let golden = golden("torch_steps.json");
    losses_agree("tests/golden/torch_steps.toml", &[], &golden["cases"]["one"]["losses"]);
    losses_agree("tests/golden/torch_steps.toml", &["batch.micro=16"], &golden["cases"]["two"]["losses"]);
}
