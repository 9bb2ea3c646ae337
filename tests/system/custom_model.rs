//! The example program with a network of its own: it has the same commands, and reaches the loss
//! that it names.

use std::process::Command;

use crate::harness::{self, root, summary, text};

#[test]
fn a_network_of_a_users_own_program_learns() {
    let program = harness::example("custom_model");
    let out = tempfile::tempdir().expect("a temporary folder");
    let job = root().join("examples/custom_model/job.toml");
    let output = Command::new(&program).arg("run").arg(&job).arg("--out").arg(out.path()).output();
    let output = output.expect("the example starts");
    assert!(output.status.success(), "{}", text(&output));
    let loss = summary(out.path())["final"]["loss"].as_f64().expect("a validation loss");
    assert!(loss < 0.012, "validation loss {loss}");

    let help = Command::new(&program).arg("--help").output().expect("the example starts");
    assert!(text(&help).contains("Usage: custom_model"), "{}", text(&help));
}
