//! Losses, gradients and new running statistics are PyTorch's, to 1e-5; `fixtures/make.py` wrote the numbers.
#![cfg(feature = "torch")]
#![expect(clippy::unwrap_used, reason = "a panic is a failed test")]

mod torch;

use serde_json::Value;
use torch::{batch, batch_of_values, context, fixture, script_context, start};
use worker::data::Batch;
use worker::model::Context;

fn close(what: &str, found: f64, expected: f64, scale: f64) {
    let error = (found - expected).abs();
    assert!(
        error <= 1e-5 * scale,
        "{what}: found {found}, PyTorch {expected}, difference {error:e} of {scale:e}"
    );
}

fn check(name: &str, context: &Context, batch: &Batch) {
    let text = std::fs::read_to_string(fixture("pytorch.json")).unwrap();
    let golden: Value = serde_json::from_str(&text).unwrap();
    let golden = &golden["cases"][name];
    let mut model = start(context);
    let evaluation = model.evaluate(batch).unwrap();
    let mean = golden["evaluation"].as_f64().unwrap();
    close(&format!("{name}: evaluation"), evaluation.loss_sum / batch.samples as f64, mean, mean.abs());

    let gradients = model.gradients(batch, 0).unwrap();
    let loss = golden["loss"].as_f64().unwrap();
    close(&format!("{name}: loss"), gradients.loss.into(), loss, loss.abs());
    let tensors = model.tensors();
    assert_eq!(tensors.len(), golden["values"].as_object().unwrap().len(), "{name}: number of tensors");
    for (tensor, values) in tensors.iter().zip(&gradients.values) {
        let what = format!("{name}: {}", tensor.name);
        let golden = &golden["values"][&tensor.name];
        assert!(golden.is_object(), "{what} is no tensor of PyTorch's");
        let values: Vec<f64> = match values {
            proto::tensor::Values::F32(values) => values.iter().map(|&value| value.into()).collect(),
            proto::tensor::Values::I64(values) => values.iter().map(|&value| value as f64).collect(),
        };
        let number = |key: &str| golden[key].as_f64().unwrap();
        let total = number("abs");
        close(&what, values.iter().sum(), number("sum"), total.max(1e-4));
        close(&what, values.iter().map(|value| value.abs()).sum(), total, total.max(1e-4));
        for (at, expected) in golden["head"].as_array().unwrap().iter().enumerate() {
            let expected = expected.as_f64().unwrap();
            close(
                &format!("{what}[{at}]"),
                values[at],
                expected,
                (total / values.len() as f64).max(expected.abs()).max(1e-5),
            );
        }
    }
}

const SHAPE: [usize; 3] = [1, 8, 8];

#[test]
fn scripts_compute_what_pytorch_computes() {
    check("batchnorm.pt", &script_context("batchnorm.pt", ""), &batch(6, &SHAPE));
    check("tied.pt", &script_context("tied.pt", ""), &batch(6, &SHAPE));
    check(
        "own_loss.pt",
        &script_context("own_loss.pt", ", loss = \"module\""),
        &batch_of_values(6, &SHAPE, 2, 4.0),
    );
}

#[test]
fn mlp_computes_what_pytorch_computes_for_each_loss() {
    let job = |more: &str| {
        let model = format!("builtin = \"mlp\", options = {{ hidden = [10, 8], engine = \"torch\"{more}");
        context(&model, &SHAPE)
    };
    check("mlp", &job(" }"), &batch(6, &SHAPE));
    check("mlp mse", &job(", outputs = 3 }, loss = \"mse\""), &batch_of_values(6, &SHAPE, 3, 9.0));
    check(
        "mlp bce",
        &job(", outputs = 3 }, loss = \"bce_with_logits\""),
        &batch_of_values(6, &SHAPE, 3, 18.0),
    );
}

#[test]
fn convnet_computes_what_pytorch_computes() {
    let job = context("builtin = \"convnet\", options = { channels = [4, 6], hidden = 16 }", &SHAPE);
    check("convnet", &job, &batch(6, &SHAPE));
}

#[test]
fn resnet18_computes_what_pytorch_computes_at_any_image_size() {
    let (large, small) = ([1, 40, 48], [1, 16, 16]);
    check("resnet18", &context("builtin = \"resnet18\"", &large), &batch(6, &large));
    let job = context("builtin = \"resnet18\", options = { small_input = true }", &small);
    check("resnet18 small", &job, &batch(6, &small));
}
