//! The pure-Rust engine gives PyTorch 2.11's losses, metrics and gradients, for tensors of
//! PyTorch's names and shapes. `tests/golden/pure_engine.py` wrote the reference, computed in f64.
//!
//! The error of a gradient is relative to `max(|torch|, mean of |torch| over the tensor)`. An
//! element is a sum over the records. Where its terms cancel, it keeps the rounding errors of terms
//! as large as its neighbours.
#![expect(clippy::unwrap_used, reason = "a panic is a failed test")]

use std::path::Path;
use std::sync::Arc;

use data::Batch;
use model::Device;
use model::{Context, Registry};
use proto::column::{ColumnSpec, ElementType};
use proto::spec::JobSpec;
use proto::tensor::Values;
use serde_json::{Value, json};

const TOLERANCE: f64 = 1e-5;

#[test]
fn every_network_and_loss_is_within_one_hundred_thousandth_of_torch() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/pure_engine.json");
    let golden: Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    let (inputs, samples) = (size(&golden["inputs"]), size(&golden["records"]));
    let cases = golden["cases"].as_array().unwrap();
    assert!(cases.len() >= 9);
    let mut worst = 0f64;
    for case in cases {
        let name = case["name"].as_str().unwrap();
        let mut close = |what: &str, ours: f64, torch: f64, floor: f64| {
            let error = (ours - torch).abs() / torch.abs().max(floor);
            assert!(
                error <= TOLERANCE,
                "{name}, {what}: {ours:e}, torch has {torch:e}, relative error {error:e}"
            );
            worst = worst.max(error);
        };
        let batch = batch(case, inputs, samples);
        let mut model = Registry::default().build(&context(case, inputs, &batch)).unwrap();
        let tensors = case["tensors"].as_array().unwrap();
        let ours: Vec<_> =
            model.tensors().into_iter().map(|tensor| json!([tensor.name, tensor.shape])).collect();
        let torch: Vec<_> = tensors.iter().map(|tensor| json!([tensor["name"], tensor["shape"]])).collect();
        assert_eq!(ours, torch, "{name}");
        let weights: Vec<_> = tensors.iter().map(|tensor| Values::F32(floats(&tensor["weights"]))).collect();
        model.load(&weights).unwrap();

        let evaluation = model.evaluate(&batch).unwrap();
        let gradients = model.gradients(&batch, 0).unwrap();
        let loss = case["loss"].as_f64().unwrap();
        close("loss", gradients.loss.into(), loss, 0.0);
        close("evaluated loss", evaluation.loss_sum / samples as f64, loss, 0.0);
        let metrics = case["metric_sums"].as_object().unwrap();
        assert_eq!(evaluation.tallies.len(), metrics.len(), "{name}");
        let values = evaluation.values();
        for (metric, torch) in metrics {
            close(metric, values[metric] * samples as f64, torch.as_f64().unwrap(), 1e-9);
        }
        for (tensor, ours) in tensors.iter().zip(&gradients.values) {
            let (ours, torch) = (ours.as_f32().unwrap(), numbers(&tensor["gradients"]));
            assert_eq!(ours.len(), torch.len());
            let mean = torch.iter().map(|value| value.abs()).sum::<f64>() / torch.len() as f64;
            for (&ours, &torch) in ours.iter().zip(&torch) {
                close(tensor["name"].as_str().unwrap(), ours.into(), torch, mean);
            }
        }
    }
    println!("largest relative error {worst:e}");
    assert!(worst > 0.0, "f32 and f64 differ somewhere; was anything compared?");
}

fn context(case: &Value, inputs: usize, batch: &Batch) -> Context {
    let spec = json!({
        "name": "golden",
        "epochs": 1,
        "model": case["model"],
        "data": { "format": "csv", "train": { "features": ["none.csv"] } },
        "batch": { "micro": 1 },
        "optimizer": { "kind": "sgd", "learning_rate": 1 },
    });
    let label_max = batch.classes().and_then(|labels| labels.iter().copied().max());
    Context {
        spec: Arc::new(JobSpec::from_json(&spec.to_string()).unwrap()),
        inputs: vec![ColumnSpec::fixed("features", ElementType::F32, [inputs])],
        label_max,
        artifacts: Default::default(),
        device: Device::Cpu,
        devices: Default::default(),
        threads: 1,
    }
}

fn batch(case: &Value, inputs: usize, samples: usize) -> Batch {
    let labels = &case["labels"];
    let is_class = case["model"].get("loss").is_none();
    let labels = match is_class {
        true => Values::I64(numbers(labels).iter().map(|&label| label as i64).collect()),
        false => Values::F32(floats(labels)),
    };
    Batch::of(&floats(&case["features"]), &[inputs], &labels, samples)
}

fn size(value: &Value) -> usize {
    value.as_u64().unwrap() as usize
}

fn numbers(list: &Value) -> Vec<f64> {
    list.as_array().unwrap().iter().map(|value| value.as_f64().unwrap()).collect()
}

fn floats(list: &Value) -> Vec<f32> {
    numbers(list).into_iter().map(|value| value as f32).collect()
}
