//! Shared code of the libtorch engine's tests: fixtures, contexts, batches, and the comparison of
//! bits.
#![expect(clippy::unwrap_used, reason = "test support: a panic is a failed test")]
#![allow(dead_code, reason = "each test program uses a part")]
#![allow(unreachable_pub, reason = "a test program has no public items, its modules do")]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use data::Batch;
use model::Device;
use model::{Context, Gradients, Model, Registry};
use proto::column::{ColumnSpec, ElementType};
use proto::tensor::Values;

/// Returns the path of a file in `tests/fixtures`.
pub fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

/// Returns a job whose model section is `model`, on the CPU with one thread.
pub fn context(model: &str, features: &[usize]) -> Context {
    let text = format!(
        "name = \"test\"\nepochs = 1\nmodel = {{ {model} }}\nbatch = {{ micro = 6 }}\n\
         data = {{ format = \"npy\", train = {{ features = [\"x\"], labels = [\"y\"] }} }}\n\
         optimizer = {{ kind = \"sgd\", learning_rate = 0.1 }}\n"
    );
    let spec = proto::spec::parse(&text, Path::new("test.toml"), &[]).unwrap();
    Context {
        spec: Arc::new(spec),
        inputs: vec![ColumnSpec::fixed("features", ElementType::F32, features)],
        label_max: Some(2),
        artifacts: BTreeMap::new(),
        device: Device::Cpu,
        devices: Default::default(),
        threads: 1,
    }
}

/// Returns a job with the script `name` of the fixtures. `more` continues the model section, e.g.
/// `, loss = "mse"`.
pub fn script_context(name: &str, more: &str) -> Context {
    let mut context = context(&format!("script = \"{name}\"{more}"), &[1, 8, 8]);
    context.artifacts.insert("model.pt".to_owned(), fixture(name));
    context
}

/// Builds the model and loads its initial weights.
pub fn start(context: &Context) -> Box<dyn Model> {
    let mut model = Registry::default().build(context).unwrap();
    let initial = model.initial(7).unwrap();
    model.load(&initial).unwrap();
    model
}

/// Returns records whose features follow the formula of `make.py`, labelled 0, 1, 2, 0, ...
pub fn batch(samples: usize, shape: &[usize]) -> Batch {
    labelled(samples, shape, &Values::I64((0..samples as i64).map(|i| i % 3).collect()))
}

/// Returns the records of [`batch`] with other labels.
pub fn labelled(samples: usize, shape: &[usize], labels: &Values) -> Batch {
    let count = samples * shape.iter().product::<usize>();
    let features: Vec<_> = (0..count).map(|i| (((i * 37) % 101) as f64 / 50.0 - 1.0) as f32).collect();
    Batch { records: (100..100 + samples as u64).collect(), ..Batch::of(&features, shape, labels, samples) }
}

/// Returns the records of [`batch`] with `width` values as label: 0, 1, 2, ... divided by
/// `divisor`.
pub fn batch_of_values(samples: usize, shape: &[usize], width: usize, divisor: f32) -> Batch {
    let labels = (0..samples * width).map(|i| i as f32 / divisor).collect();
    labelled(samples, shape, &Values::F32(labels))
}

/// Returns the bits of everything that a microbatch contributes.
pub fn bits(gradients: &Gradients) -> Vec<Vec<u8>> {
    let loss = gradients.loss.to_le_bytes().to_vec();
    [loss].into_iter().chain(gradients.values.iter().map(|values| values.bytes().to_vec())).collect()
}
