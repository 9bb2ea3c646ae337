//! The same 50 steps as plain PyTorch, to 1e-4 of the loss at each: same initial weights, record order, hyperparameters.
//! `golden/training.py` rebuilds all of them from their definitions and writes the losses.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod harness;

use harness::{events, root, succeed};

#[test]
fn fifty_steps_have_the_losses_of_plain_pytorch() {
    let text = std::fs::read_to_string(root().join("tests/golden/training.json")).unwrap();
    let golden: serde_json::Value = serde_json::from_str(&text).unwrap();
    for (name, sets) in [
        ("adam", ["optimizer.kind=adam", "optimizer.learning_rate=3e-3"].as_slice()),
        ("momentum", &["optimizer.kind=momentum", "optimizer.learning_rate=0.1", "optimizer.momentum=0.9"]),
    ] {
        let out = tempfile::tempdir().unwrap();
        let job = root().join("tests/golden/training.toml");
        let mut args = vec!["run".into(), job.display().to_string()];
        args.extend(["--workers", "2", "--ps", "2", "--out"].map(str::to_owned));
        args.push(out.path().display().to_string());
        args.extend(sets.iter().flat_map(|set| ["--set".to_owned(), (*set).to_owned()]));
        succeed(args);
        let train = events(out.path(), "train");
        let expected = golden["losses"][name].as_array().unwrap();
        assert_eq!(expected.len(), 50);
        for (step, expected) in expected.iter().enumerate() {
            assert_eq!(train[step]["step"], step, "every step is reported");
            let (expected, found) = (expected.as_f64().unwrap(), train[step]["loss"].as_f64().unwrap());
            let error = (found - expected).abs() / expected.abs();
            assert!(
                error <= 1e-4,
                "{name}, step {step}: PyTorch {expected}, Ebbflow {found}, relative error {error:e}"
            );
        }
    }
}
