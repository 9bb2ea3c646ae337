//! Scripts with several inputs and with labels of several classes, against PyTorch's numbers
//! (`fixtures/columns.py`).
#![cfg(feature = "torch")]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::collections::BTreeMap;
use std::sync::Arc;

use data::Batch;
use data::column::{Aligned, Column, Element, Memory};
use model::{Context, Device, Gradients, Model, Registry};
use proto::column::ColumnSpec;
use serde_json::Value;

mod torch;

fn column<T: Element>(name: &str, shape: &[usize], records: usize, values: &[T]) -> Column {
    let mut memory = Aligned::default();
    memory.extend(bytemuck::cast_slice(values));
    Column::fixed(ColumnSpec::fixed(name, T::DTYPE, shape), records, Memory::Owned(memory))
}

fn golden(case: &str) -> Value {
    let text = std::fs::read_to_string(torch::fixture("columns.json")).unwrap();
    serde_json::from_str::<Value>(&text).unwrap()[case].clone()
}

/// Returns the context of a job with the script `file`. `data` continues its data section.
fn context(file: &str, loss: &str, data: &str, inputs: &[Column]) -> Context {
    let text = format!(
        "name = \"test\"\nepochs = 1\nbatch = {{ micro = 6 }}\n\
         model = {{ script = \"{file}\", loss = \"{loss}\", metrics = [\"accuracy\"] }}\n\
         optimizer = {{ kind = \"sgd\", learning_rate = 0.1 }}\n\
         [data]\nformat = \"parquet\"\ntrain = {{ files = [\"x\"] }}\n{data}\n"
    );
    let spec = proto::spec::parse(&text, std::path::Path::new("test.toml"), &[]).unwrap();
    Context {
        spec: Arc::new(spec),
        inputs: inputs.iter().map(|input| input.spec().clone()).collect(),
        label_max: None,
        artifacts: BTreeMap::from([("model.pt".to_owned(), torch::fixture(file))]),
        device: Device::Cpu,
        devices: Default::default(),
        threads: 1,
    }
}

fn refusal(context: &Context) -> String {
    Registry::default().build(context).err().expect("it is refused").to_string()
}

fn agrees(model: &dyn Model, found: &Gradients, golden: &Value) {
    let close = |found: f32, expected: &Value| {
        let expected = expected.as_f64().unwrap();
        assert!((f64::from(found) - expected).abs() < 1e-6, "{found}, PyTorch has {expected}");
    };
    close(found.loss, &golden["loss"]);
    for (tensor, values) in model.tensors().iter().zip(&found.values) {
        let expected = golden["gradients"][&tensor.name].as_array().unwrap();
        let values = values.as_f32().unwrap();
        assert_eq!(values.len(), expected.len(), "{}", tensor.name);
        values.iter().zip(expected).for_each(|(&value, expected)| close(value, expected));
    }
}

fn towers() -> Batch {
    Batch {
        samples: 3,
        inputs: vec![
            column("user", &[], 3, &[4i64, 0, 3]),
            column("item", &[], 3, &[1i32, 3, 3]),
            column("numbers", &[2], 3, &[0.5f32, -1.0, 2.0, 0.0, 0.25, 1.5]),
        ],
        labels: column("labels", &[], 3, &[1.0f32, 0.0, 1.0]),
        records: vec![0, 1, 2],
        placed: Default::default(),
    }
}

const BY_NAME: &str = "inputs = { user = \"u\", item = \"i\", numbers = [\"a\", \"b\"] }";

#[test]
fn inputs_reach_a_script_by_position_by_name_and_as_a_dictionary() {
    let batch = towers();
    let mut swapped = batch.clone();
    swapped.inputs.swap(0, 2);
    for (file, data, batch) in [
        ("towers.pt", "inputs = [\"user\", \"item\", \"numbers\"]", &batch),
        ("towers.pt", BY_NAME, &batch),
        ("towers.pt", BY_NAME, &swapped),
        ("dictionary.pt", BY_NAME, &swapped),
    ] {
        let mut model = torch::start(&context(file, "bce_with_logits", data, &batch.inputs));
        let found = model.gradients(batch, 0).unwrap();
        agrees(model.as_ref(), &found, &golden("towers"));
    }
}

#[test]
fn inputs_that_a_script_does_not_take_are_named() {
    let (batch, loss) = (towers(), "bce_with_logits");
    let said = refusal(&context("towers.pt", loss, BY_NAME, &batch.inputs[..2]));
    assert!(
        said.contains("forward needs the argument `numbers`; forward takes user, item, numbers"),
        "{said}"
    );
    let renamed = [batch.inputs[0].clone().named("person"), batch.inputs[1].clone(), batch.inputs[2].clone()];
    let said = refusal(&context("towers.pt", loss, BY_NAME, &renamed));
    assert!(said.contains("forward has no argument `person`"), "{said}");
    let list = "inputs = [\"item\", \"user\", \"numbers\"]";
    let swapped = [batch.inputs[1].clone(), batch.inputs[0].clone(), batch.inputs[2].clone()];
    let said = refusal(&context("towers.pt", loss, list, &swapped));
    assert!(said.contains("data.inputs gives `item` as argument 0"), "{said}");
    let said = refusal(&context("towers.pt", loss, "inputs = [\"user\"]", &batch.inputs[..1]));
    assert!(
        said.contains("forward takes 3 to 3 arguments") && said.contains("calls forward(user)"),
        "{said}"
    );
}

#[test]
fn floats_where_a_script_wants_integers_are_named_with_type_and_shape() {
    let mut batch = towers();
    batch.inputs[0] = column("user", &[], 3, &[4f32, 0.0, 3.0]);
    let mut model = torch::start(&context("towers.pt", "bce_with_logits", BY_NAME, &batch.inputs));
    let error = model.gradients(&batch, 0).unwrap_err();
    assert!(error.is_fatal());
    let said = error.to_string();
    assert!(said.contains("forward fails on user Float of shape [3], item Int of shape [3]"), "{said}");
}

fn tokens() -> Batch {
    Batch {
        samples: 2,
        inputs: vec![column("tokens", &[3], 2, &[1i64, 2, 3, 4, 5, 6])],
        labels: column("labels", &[3], 2, &[0i64, 4, -100, -100, 2, 2]),
        records: vec![10, 11],
        placed: Default::default(),
    }
}

#[test]
fn a_class_for_each_token_has_pytorchs_loss_wherever_the_classes_lie() {
    let batch = tokens();
    for file in ["tokens_first.pt", "tokens_last.pt"] {
        let mut model = torch::start(&context(file, "cross_entropy", "inputs = [\"tokens\"]", &batch.inputs));
        let golden = golden("tokens");
        let found = model.gradients(&batch, 0).unwrap();
        agrees(model.as_ref(), &found, &golden);
        let measured = model.evaluate(&batch).unwrap();
        let mean = |sum: f64| sum / measured.samples as f64;
        assert!((mean(measured.loss_sum) - golden["loss"].as_f64().unwrap()).abs() < 1e-6);
        let accuracy = measured.values()["accuracy"];
        assert!((accuracy - golden["accuracy"].as_f64().unwrap()).abs() < 1e-6, "{accuracy}");
    }
}

#[test]
fn a_record_of_ignored_classes_alone_changes_nothing() {
    let mut batch = tokens();
    batch.labels = column("labels", &[3], 2, &[-100i64; 6]);
    let mut model =
        torch::start(&context("tokens_last.pt", "cross_entropy", "inputs = [\"tokens\"]", &batch.inputs));
    let found = model.gradients(&batch, 0).unwrap();
    assert_eq!(found.loss, 0.0);
    assert!(found.values.iter().all(|values| values.as_f32().unwrap().iter().all(|&value| value == 0.0)));
}

#[test]
fn a_class_beyond_the_outputs_names_its_record() {
    let mut batch = tokens();
    batch.labels = column("labels", &[3], 2, &[0i64, 0, 0, 0, 5, 0]);
    let mut model =
        torch::start(&context("tokens_last.pt", "cross_entropy", "inputs = [\"tokens\"]", &batch.inputs));
    let said = model.gradients(&batch, 0).unwrap_err().to_string();
    assert!(said.contains("record 11: label 5 is outside 0..5"), "{said}");
}

#[test]
fn outputs_that_fit_in_two_ways_are_refused() {
    let mut batch = tokens();
    batch.inputs = vec![column("tokens", &[5], 2, &[1i64; 10])];
    batch.labels = column("labels", &[5], 2, &[1i64; 10]);
    let mut model =
        torch::start(&context("tokens_last.pt", "cross_entropy", "inputs = [\"tokens\"]", &batch.inputs));
    let said = model.gradients(&batch, 0).unwrap_err().to_string();
    assert!(said.contains("of which it is clear where the classes are"), "{said}");
}

#[test]
fn a_network_of_ours_refuses_other_inputs() {
    let spec = "inputs = [\"user\", \"item\"]";
    let mut job = context("towers.pt", "bce_with_logits", spec, &towers().inputs[..2]);
    let mut with_network = (*job.spec).clone();
    (with_network.model.script, with_network.model.builtin) = (None, Some("mlp".to_owned()));
    job.spec = Arc::new(with_network);
    let said = refusal(&job);
    assert!(said.contains("takes one input of type f32, the job gives `user` i64[], `item` i32[]"), "{said}");
}
