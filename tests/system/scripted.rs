//! PyTorch's own layers as TorchScript modules: each builds, trains two steps, and ends with the
//! same bits for one worker and for three.
//!
//! The test runs a few of them, one for each kind of code. `scripted/train.py` has every layer of
//! `torch.nn`, and the models of torchvision.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]
#![cfg(feature = "torch")]

use std::process::Command;

use crate::harness::{python_with_torch, root, text};

/// Layers with lists of parameters and masks that are filled in place; running statistics, also
/// optional ones; calls with packed weights; parameters that are gathered; masks that are drawn;
/// several inputs; loops over modules.
const NAMES: [&str; 8] = [
    "TransformerEncoder",
    "MaskedTransformerEncoder",
    "BatchNorm2d",
    "InstanceNorm1d",
    "LSTM",
    "EmbeddingBag",
    "AlphaDropout",
    "ModuleList",
];

#[test]
fn layers_of_pytorch_train_as_scripts_and_do_not_depend_on_the_workers() {
    let Some(python) = python_with_torch() else { return };
    let mut command = Command::new(python);
    command
        .arg(root().join("tests/scripted/train.py"))
        .arg("--ebb")
        .arg(env!("CARGO_BIN_EXE_ebb"))
        .args(NAMES);
    let output = command.env("PYTHONDONTWRITEBYTECODE", "1").output().unwrap();
    assert!(output.status.success(), "{}", text(&output));
    assert!(text(&output).contains("8 modules, 0 wrong"), "{}", text(&output));
}
