//! Losses, gradients and new running statistics equal PyTorch's, to 1e-5 where PyTorch itself is
//! equal on every CPU. `fixtures/make.py` wrote the numbers.
#![cfg(feature = "torch")]
#![expect(clippy::unwrap_used, reason = "a panic is a failed test")]

mod torch;

use std::collections::BTreeMap;
use std::path::Path;

use data::{Batch, Dataset};
use model::Context;
use proto::ids::{Epoch, Step};
use proto::spec::DataSet;
use proto::tensor::{TensorRole, Values};
use serde_json::Value;
use torch::{batch, batch_of_values, context, fixture, script_context, start};

fn close(what: &str, found: f64, expected: f64, scale: f64) {
    close_to(1e-5, what, found, expected, scale);
}

fn close_to(tolerance: f64, what: &str, found: f64, expected: f64, scale: f64) {
    let error = (found - expected).abs();
    assert!(
        error <= tolerance * scale,
        "{what}: found {found}, PyTorch {expected}, difference {error:e} of {scale:e}"
    );
}

fn check(name: &str, context: &Context, batch: &Batch) {
    check_to(1e-5, name, context, batch);
}

/// Compares gradients to `tolerance`.
fn check_to(tolerance: f64, name: &str, context: &Context, batch: &Batch) {
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
            Values::I64(values) => values.iter().map(|&value| value as f64).collect(),
            floats => floats.as_f32().unwrap().iter().map(|&value| value.into()).collect(),
        };
        let number = |key: &str| golden[key].as_f64().unwrap();
        let total = number("abs");
        close_to(tolerance, &what, values.iter().sum(), number("sum"), total.max(1e-4));
        close_to(tolerance, &what, values.iter().map(|value| value.abs()).sum(), total, total.max(1e-4));
        for (at, expected) in golden["head"].as_array().unwrap().iter().enumerate() {
            let expected = expected.as_f64().unwrap();
            close_to(
                tolerance,
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

/// PyTorch's numbers under `torch.autocast("cpu", torch.bfloat16)` are the same on every CPU where
/// no convolution computes them. f32 differs by more than the tolerances in every case.
#[test]
fn autocast_computes_what_pytorch_computes_under_it() {
    const BF16: &str = ", autocast = \"bf16\"";
    let values = batch_of_values(6, &SHAPE, 2, 4.0);
    let own_loss = format!(", loss = \"module\"{BF16}");
    check_to(1e-4, "tied.pt in bf16", &script_context("tied.pt", BF16), &batch(6, &SHAPE));
    check_to(1e-4, "own_loss.pt in bf16", &script_context("own_loss.pt", &own_loss), &values);
    check_to(4e-3, "batchnorm.pt in bf16", &script_context("batchnorm.pt", BF16), &batch(6, &SHAPE));
    let mlp = |outputs: &str, loss: &str| {
        let options = format!("{{ hidden = [10, 8], engine = \"torch\"{outputs} }}");
        context(&format!("builtin = \"mlp\", options = {options}{loss}{BF16}"), &SHAPE)
    };
    check_to(1e-4, "mlp in bf16", &mlp("", ""), &batch(6, &SHAPE));
    let (values, mse) = (batch_of_values(6, &SHAPE, 3, 9.0), ", loss = \"mse\"");
    check_to(1e-4, "mlp mse in bf16", &mlp(", outputs = 3", mse), &values);
    let (values, bce) = (batch_of_values(6, &SHAPE, 3, 18.0), ", loss = \"bce_with_logits\"");
    check_to(1e-4, "mlp bce in bf16", &mlp(", outputs = 3", bce), &values);
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
    // The gradients go back through twenty normalisations, the last over 24 values. Convolutions of
    // two CPUs move PyTorch's own gradients by 7e-4. A wrong layer changes them completely.
    check_to(5e-3, "resnet18", &context("builtin = \"resnet18\"", &large), &batch(6, &large));
    let job = context("builtin = \"resnet18\", options = { small_input = true }", &small);
    check_to(1e-4, "resnet18 small", &job, &batch(6, &small));
}

/// Trains fifty steps of `tests/golden/torch_steps.py` through the interface of the engine:
/// gradients to the optimizer, state carried from step to step by the rules of its role.
#[test]
fn fifty_steps_of_a_script_with_batchnorm_have_pytorchs_losses() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden");
    let text = std::fs::read_to_string(folder.join("torch_steps.json")).unwrap();
    let golden: Value = serde_json::from_str(&text).unwrap();
    let path = folder.join("torch_steps.toml");
    let text = std::fs::read_to_string(&path).unwrap();
    for (case, micro) in [("one", 32), ("two", 16)] {
        let spec = proto::spec::parse(&text, &path, &[format!("batch.micro={micro}")]).unwrap();
        let data = Dataset::open(&spec, DataSet::Train, None).unwrap();
        let mut job = context("builtin = \"mlp\"", &data.inputs()[0].shape);
        job.artifacts.insert("model.pt".to_owned(), folder.join("torch_steps.pt"));
        job.spec = spec.into();
        let (losses, weights) = train(&job, &data, 50);
        let golden = &golden["cases"][case];
        for (step, loss) in losses.into_iter().enumerate() {
            let expected = golden["losses"][step].as_f64().unwrap();
            close(&format!("case {case}: loss of step {step}"), loss, expected, expected);
        }
        for (name, values) in
            [("running_mean", &weights["bn.running_mean"]), ("running_var", &weights["bn.running_var"])]
        {
            for (at, &value) in values.as_f32().unwrap().iter().enumerate() {
                let expected = golden[name][at].as_f64().unwrap();
                close(&format!("case {case}: {name}[{at}]"), value.into(), expected, expected.abs().max(0.1));
            }
        }
        assert_eq!(
            weights["bn.num_batches_tracked"],
            Values::I64(vec![50]),
            "case {case}: counted once a step"
        );
    }
}

/// Trains `steps` steps of plain gradient descent in the order of the data. Returns their losses
/// and the final weights.
fn train(job: &Context, data: &Dataset, steps: u64) -> (Vec<f64>, BTreeMap<String, Values>) {
    let mut model = start(job);
    let (tensors, plan) = (model.tensors(), job.spec.plan(data.len()));
    let (mut weights, mut losses) = (model.initial(0).unwrap(), Vec::new());
    for step in (0..steps).map(Step) {
        model.load(&weights).unwrap();
        let (samples, of) = (plan.samples_of(step) as f32, plan.of(step));
        let (mut loss, mut sums) = (0.0, Vec::<Values>::new());
        for index in 0..of {
            let microbatch = plan.microbatch((plan.first_of(step).get() + u64::from(index)).into());
            let (begin, end) = microbatch.positions;
            let batch = data.batch(Epoch(0), begin..end).unwrap();
            let gradients = model.gradients(&batch, 0).unwrap();
            loss += f64::from(gradients.loss) * batch.samples as f64 / f64::from(samples);
            let mut values = gradients.values;
            for (values, _) in
                values.iter_mut().zip(&tensors).filter(|(_, tensor)| tensor.role == TensorRole::Parameter)
            {
                values.as_f32_mut().unwrap().iter_mut().for_each(|value| *value *= batch.samples as f32);
            }
            if sums.is_empty() {
                sums = values;
            } else {
                sums.iter_mut().zip(&values).for_each(|(sum, values)| sum.merge(values));
            }
        }
        losses.push(loss);
        for ((weights, sums), tensor) in weights.iter_mut().zip(&sums).zip(&tensors) {
            let rate = job.spec.optimizer.learning_rate as f32;
            let pairs = weights.as_f32_mut().into_iter().flatten().zip(sums.as_f32().into_iter().flatten());
            match tensor.role {
                TensorRole::Parameter => pairs.for_each(|(weight, sum)| *weight -= rate * sum / samples),
                TensorRole::State => pairs.for_each(|(state, sum)| *state = sum / of as f32),
                TensorRole::Counter | TensorRole::Register => weights.clone_from(sums),
                TensorRole::LossScale => unreachable!("no job here computes in f16"),
            }
        }
    }
    (losses, tensors.into_iter().map(|tensor| tensor.name).zip(weights).collect())
}
