//! Mixed precision: `model.autocast` and `model.tf32` reach the engine in every process.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use crate::harness::{fail, root};

#[cfg(feature = "torch")]
use crate::harness::{Cluster, events, model, succeed, summary, text};

/// A TorchScript module with BatchNorm, and four microbatches in each step.
#[cfg(feature = "torch")]
const SETS: [&str; 6] = ["--set", "epochs=3", "--set", "batch.micro=8", "--set", "model.autocast=bf16"];

#[cfg(feature = "torch")]
#[test]
fn bf16_gives_the_same_bits_with_any_fleet_and_nearly_the_losses_of_f32() {
    let job = root().join("tests/golden/torch_steps.toml");
    let dir = tempfile::tempdir().unwrap();
    let alone = |name: &str, more: &[&str]| {
        let (file, out) = (job.display().to_string(), dir.path().join(name));
        let device = ["run", &file, "--device", "cpu", "--workers", "1", "--out", out.to_str().unwrap()];
        succeed([&device[..], &SETS, more].concat());
        (model(&out), out)
    };
    let (lower, out) = alone("bf16", &[]);
    let cluster = Cluster::start(2, 3);
    let together = cluster.dir.path().join("out");
    let output = cluster.submit(&job, &together, &SETS);
    assert!(output.status.success(), "{}", text(&output));
    assert!(model(&together) == lower, "3 workers: other bits than 1");
    assert_eq!(summary(&together)["model_sha256"], summary(&out)["model_sha256"]);

    // An override of the same key counts last. The CPU has no TF32.
    let (single, of_f32) = alone("f32", &["--set", "model={ script = \"torch_steps.pt\" }"]);
    assert!(single != lower, "bf16 has other bits");
    let (tf32, _) = alone("tf32", &["--set", "model={ script = \"torch_steps.pt\", tf32 = true }"]);
    assert!(single == tf32, "tf32 changes nothing on a CPU");
    for (found, expected) in events(&out, "train").iter().zip(events(&of_f32, "train")) {
        let [found, expected] = [found, &expected].map(|event| event["loss"].as_f64().unwrap());
        assert!((found - expected).abs() < 0.02 * expected, "{found}, in f32 {expected}");
    }

    // What was trained is measured and predicted in the same types.
    let (weights, measured) = (out.display().to_string(), dir.path().join("measured"));
    let measure = |verb: &str, more: &[&str]| {
        let (job, out) = (job.display().to_string(), measured.join(verb).display().to_string());
        let arguments = [verb, &job, "--device", "cpu", "--model", &weights, "--out", &out];
        succeed([&arguments[..], &SETS, more].concat());
    };
    let files = "{ features = [\"torch_steps_features.npy\"], labels = [\"torch_steps_labels.npy\"] }";
    measure("evaluate", &["--set", &format!("data.validation={files}")]);
    let loss = summary(&measured.join("evaluate"))["final"]["loss"].as_f64().unwrap();
    assert!(loss > 0.0 && loss.is_finite(), "{loss}");
}

/// What `tests/golden/loss_scale.py` trains with `torch.amp.GradScaler`.
#[cfg(feature = "torch")]
#[test]
fn f16_overflows_where_pytorch_does_and_trains_on_with_its_losses_in_any_fleet() {
    let folder = root().join("tests/golden");
    let golden = std::fs::read_to_string(folder.join("loss_scale.json")).unwrap();
    let golden: serde_json::Value = serde_json::from_str(&golden).unwrap();
    let (job, dir) = (folder.join("loss_scale.toml"), tempfile::tempdir().unwrap());
    let out = dir.path().join("out");
    let [file, folder] = [&job, &out].map(|path| path.display().to_string());
    succeed(["run", &file, "--device", "cpu", "--workers", "1", "--out", &folder]);
    let losses: Vec<f64> =
        events(&out, "train").iter().map(|event| event["loss"].as_f64().unwrap()).collect();
    let expected: Vec<f64> =
        golden["losses"].as_array().unwrap().iter().map(|loss| loss.as_f64().unwrap()).collect();
    assert_eq!(losses.len(), expected.len());
    for (step, (found, expected)) in losses.iter().zip(&expected).enumerate() {
        assert!(
            (found - expected).abs() < 2e-3 * expected.abs().max(0.1),
            "step {step}: {found}, {expected}"
        );
    }
    let overflows = golden["overflows"].as_array().unwrap().len();
    assert_eq!(summary(&out)["overflows"], overflows);

    let cluster = Cluster::start(2, 3);
    let together = cluster.dir.path().join("out");
    let output = cluster.submit(&job, &together, &[]);
    assert!(output.status.success(), "{}", text(&output));
    let steps = format!("{overflows} steps changed no weight, because the gradient overflowed");
    assert!(text(&output).contains(&steps), "{}", text(&output));
    assert_eq!(summary(&together)["model_sha256"], summary(&out)["model_sha256"]);
}

#[test]
fn an_engine_without_these_types_says_which_networks_have_them() {
    let (job, out) = (root().join("examples/digits/job.toml"), tempfile::tempdir().unwrap());
    let refuse = |set: &str| {
        let network = ["--set", "model.builtin=softmax", "--set", "model.options={}"];
        let arguments = ["run", job.to_str().unwrap(), "--out", out.path().to_str().unwrap(), "--set", set];
        fail([&arguments[..], &network].concat())
    };
    for (set, setting) in [("model.autocast=bf16", "autocast"), ("model.tf32=true", "tf32")] {
        let said = refuse(set);
        let expected = format!("model.{setting}: the pure engine computes `softmax` in f32; remove it");
        assert!(said.contains(&expected), "{said}");
    }
    assert!(refuse("model.autocast=f16").contains("model.autocast: the pure engine computes"));
}
