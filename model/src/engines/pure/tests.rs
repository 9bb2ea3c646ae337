//! Tests of the networks as jobs build them.

use std::sync::Arc;

use data::Batch;
use proptest::prelude::*;
use proto::column::{ColumnSpec, ElementType};
use proto::spec::JobSpec;
use proto::tensor::Values;

use crate::device::Device;
use crate::engines::Registry;
use crate::error::{Error, Result};
use crate::model::{Context, Model, OwnMemory};

fn context(model: &str, inputs: usize, label_max: Option<i64>) -> Context {
    let text = format!(
        r#"name = "t"
        epochs = 1
        model = {{ {model} }}
        batch = {{ micro = 2 }}
        data = {{ format = "csv", train = {{ features = ["a"] }} }}
        optimizer = {{ kind = "sgd", learning_rate = 0.1 }}"#
    );
    let spec: JobSpec = proto::spec::parse(&text, std::path::Path::new("job.toml"), &[]).unwrap();
    Context {
        spec: Arc::new(spec),
        inputs: vec![ColumnSpec::fixed("features", ElementType::F32, [inputs])],
        label_max,
        artifacts: Default::default(),
        device: Device::Cpu,
        devices: Default::default(),
        threads: 1,
    }
}

fn build(model: &str, inputs: usize, label_max: Option<i64>) -> Result<Box<dyn Model>> {
    Registry::default().build(&context(model, inputs, label_max))
}

fn error(model: &str, label_max: Option<i64>) -> String {
    build(model, 3, label_max).err().expect("the network is refused").to_string()
}

fn tensors(model: &str, label_max: Option<i64>) -> Vec<(String, Vec<usize>)> {
    let tensors = build(model, 3, label_max).unwrap().tensors();
    tensors.into_iter().map(|tensor| (tensor.name, tensor.shape)).collect()
}

#[allow(clippy::needless_pass_by_value, reason = "each call makes its values")]
fn batch(features: Vec<f32>, samples: usize, labels: Values) -> Batch {
    Batch::of(&features, &[features.len() / samples], &labels, samples)
}

#[test]
fn tensors_are_named_and_shaped_as_in_pytorch() {
    let named = |list: &[(&str, &[usize])]| {
        list.iter().map(|(name, shape)| ((*name).to_owned(), shape.to_vec())).collect::<Vec<_>>()
    };
    let single = |outputs| named(&[("weight", &[outputs, 3]), ("bias", &[outputs])]);
    assert_eq!(tensors(r#"builtin = "linear", loss = "mse""#, None), single(1));
    assert_eq!(tensors(r#"builtin = "linear", loss = "mse", options = { outputs = 2 }"#, None), single(2));
    assert_eq!(tensors(r#"builtin = "softmax""#, Some(4)), single(5));
    assert_eq!(tensors(r#"builtin = "softmax", options = { classes = 7 }"#, Some(4)), single(7));
    let mlp = r#"builtin = "mlp", options = { hidden = [8, 6] }"#;
    let expected: &[(&str, &[usize])] = &[
        ("0.weight", &[8, 3]),
        ("0.bias", &[8]),
        ("2.weight", &[6, 8]),
        ("2.bias", &[6]),
        ("4.weight", &[2, 6]),
        ("4.bias", &[2]),
    ];
    assert_eq!(tensors(mlp, Some(1)), named(expected));
    assert_eq!(tensors(r#"builtin = "mlp""#, Some(1))[0], ("0.weight".to_owned(), vec![128, 3]));
}

#[test]
fn initial_values_are_keyed_by_seed_and_name_and_within_their_bound() {
    let mlp = |hidden: &str| {
        build(&format!(r#"builtin = "mlp", options = {{ hidden = {hidden} }}"#), 16, Some(2)).unwrap()
    };
    let first = mlp("[40]").initial(1).unwrap();
    assert_eq!(first, mlp("[40]").initial(1).unwrap());
    assert_ne!(first, mlp("[40]").initial(2).unwrap());
    assert_eq!(first[0], mlp("[40, 5]").initial(1).unwrap()[0], "another layer behind it changes nothing");
    let weight = first[0].as_f32().unwrap();
    let bound = 0.25;
    assert!(weight.iter().all(|value| value.abs() <= bound));
    let variance = weight.iter().map(|value| value * value).sum::<f32>() / weight.len() as f32;
    assert!((variance - bound * bound / 3.0).abs() < 0.004, "variance {variance} of a uniform distribution");
}

#[test]
fn predictions_are_the_outputs_before_the_loss() {
    let mut model = build(r#"builtin = "linear", loss = "mse", options = { outputs = 2 }"#, 2, None).unwrap();
    model.load(&[Values::F32(vec![1.0, 2.0, 0.5, -1.0]), Values::F32(vec![0.25, 0.0])]).unwrap();
    let batch = batch(vec![1.0, 1.0, 2.0, 0.0], 2, Values::F32(vec![0.0; 4]));
    let found = model.predict(&batch).unwrap();
    assert_eq!(found.values::<f32>(), Some(&[3.25, -0.5, 2.25, 1.0][..]));
    assert_eq!((found.records(), &found.spec().shape[..]), (2, &[2][..]));
}

#[test]
fn options_that_contradict_the_job_are_refused() {
    assert!(
        error(r#"builtin = "mlp", options = { hiden = [8] }"#, Some(1)).contains("unknown field `hiden`")
    );
    assert!(error(r#"builtin = "mlp", options = { hidden = [0] }"#, Some(1)).contains("`hidden` = 0"));
    assert!(error(r#"builtin = "mlp", options = { classes = 2, outputs = 2 }"#, Some(1)).contains("either"));
    assert!(error(r#"builtin = "mlp""#, None).contains("no class labels to count"));
    assert!(error(r#"builtin = "softmax""#, Some(i64::MAX)).contains("mend the labels"));
    assert!(error(r#"builtin = "linear""#, Some(1)).contains("`cross_entropy` needs a logit for each class, found the outputs of `linear`, which are for mse or bce_with_logits"));
    assert!(error(r#"builtin = "softmax", loss = "mse""#, None).contains("which are for cross_entropy"));
    assert!(error(r#"builtin = "mlp", loss = "nll""#, Some(1)).contains("log-probability"));
}

#[test]
#[cfg(not(feature = "torch"))]
fn libtorch_is_named_where_it_is_missing() {
    let message = error(r#"builtin = "mlp", options = { engine = "torch" }"#, Some(1));
    assert!(message.contains("engine = \"torch\" needs libtorch"), "{message}");
}

#[test]
fn a_label_without_an_output_is_named_by_its_record() {
    let mut model = build(r#"builtin = "softmax", options = { classes = 3 }"#, 1, None).unwrap();
    let batch = batch(vec![0.0, 0.0], 2, Values::I64(vec![0, 3]));
    for result in [model.gradients(&batch, 0).map(drop), model.evaluate(&batch).map(drop)] {
        assert!(matches!(result, Err(Error::Label { record: 1, label: 3, classes: 3 })));
    }
}

#[test]
fn weights_and_records_of_another_network_are_refused() {
    let mut model = build(r#"builtin = "softmax""#, 3, Some(1)).unwrap();
    let values = |lengths: [usize; 2]| lengths.map(|len| Values::F32(vec![0.0; len]));
    model.load(&values([6, 2])).unwrap();
    assert!(
        model
            .load(&values([6, 3]))
            .unwrap_err()
            .to_string()
            .contains("[6, 3] values, the network has [6, 2]")
    );
    assert!(model.load(&values([6, 2])[..1]).is_err());
    assert!(model.load(&[Values::F32(vec![0.0; 6]), Values::I64(vec![0; 2])]).is_err());
    let message = model.evaluate(&batch(vec![0.0; 4], 2, Values::I64(vec![0, 1]))).unwrap_err().to_string();
    assert!(message.contains("`features` f32[2], the network was built for 3 f32 values"), "{message}");
}

#[test]
fn weights_that_are_not_finite_show_in_the_loss() {
    let mut model = build(r#"builtin = "mlp", options = { hidden = [4] }"#, 3, Some(1)).unwrap();
    let mut weights = model.initial(0).unwrap();
    weights[0].as_f32_mut().unwrap().fill(f32::NAN);
    model.load(&weights).unwrap();
    let gradients = model.gradients(&batch(vec![1.0; 3], 1, Values::I64(vec![0])), 0).unwrap();
    assert!(gradients.loss.is_nan());
}

const NETWORKS: [(&str, &str); 5] = [
    (r#"builtin = "linear", options = { outputs = 2 }"#, "mse"),
    (r#"builtin = "linear", options = { outputs = 2 }"#, "bce_with_logits"),
    (r#"builtin = "softmax", options = { classes = 2 }"#, "cross_entropy"),
    (r#"builtin = "mlp", options = { hidden = [5, 4], activation = "tanh", classes = 2 }"#, "cross_entropy"),
    (r#"builtin = "mlp", options = { hidden = [5], activation = "tanh", outputs = 2 }"#, "mse"),
];

proptest! {
    /// Compares with central differences of the f64 loss. The network uses tanh, because relu has a
    /// corner that a step may cross.
    #[test]
    fn gradients_are_the_slopes_of_the_mean_loss(
        network in prop::sample::select(NETWORKS.to_vec()),
        features in proptest::collection::vec(-1f32..1.0, 9),
        labels in proptest::collection::vec(0i64..2, 6),
        seed in any::<u64>(),
    ) {
        let (options, loss) = network;
        let mut model = build(&format!(r#"{options}, loss = "{loss}""#), 3, None).unwrap();
        let labels = match loss {
            "cross_entropy" => Values::I64(labels[..3].to_vec()),
            _ => Values::F32(labels.iter().map(|&label| label as f32).collect()),
        };
        let batch = batch(features, 3, labels);
        let weights = model.initial(seed).unwrap();
        model.load(&weights).unwrap();
        let gradients = model.gradients(&batch, 0).unwrap();
        prop_assert_eq!(&gradients, &model.gradients(&batch, 9).unwrap(), "the same three give the same bits");
        for (tensor, gradient) in gradients.values.iter().enumerate() {
            for (at, slope) in gradient.as_f32().unwrap().iter().enumerate() {
                let mut loss = |step: f32| {
                    let mut moved = weights.clone();
                    moved[tensor].as_f32_mut().unwrap()[at] += step;
                    model.load(&moved).unwrap();
                    model.evaluate(&batch).unwrap().loss_sum / 3.0
                };
                let expected = (loss(0.01) - loss(-0.01)) / 0.02;
                prop_assert!((f64::from(*slope) - expected).abs() < 2e-4, "tensor {tensor}, {at}: {slope}, not {expected}");
            }
        }
    }
}

#[test]
fn gradients_come_from_the_last_tensor_to_the_first_with_the_bits_of_those_that_come_together() {
    for (options, loss) in NETWORKS {
        let mut model = build(&format!(r#"{options}, loss = "{loss}""#), 3, None).unwrap();
        let labels = match loss {
            "cross_entropy" => Values::I64(vec![1, 0, 1]),
            _ => Values::F32(vec![0.5; 6]),
        };
        let batch = batch((0..9).map(|at| 0.1 * at as f32 - 0.3).collect(), 3, labels);
        let weights = model.initial(5).unwrap();
        model.load(&weights).unwrap();
        let expected = model.weighted_gradients(&batch, 0, &OwnMemory).unwrap();
        let mut made = Vec::new();
        let loss = model
            .gradients_as_made(&batch, 0, &OwnMemory, &mut |tensor, values| made.push((tensor, values)))
            .unwrap();
        assert_eq!(loss.to_bits(), expected.loss.to_bits());
        assert!(made.iter().map(|(tensor, _)| *tensor).eq((0..weights.len()).rev()));
        let made: Vec<_> = made.into_iter().rev().map(|(_, values)| values).collect();
        assert_eq!(made, expected.values);
    }
}

#[test]
fn types_of_libtorch_are_refused_with_the_networks_that_have_them() {
    let networks = [
        (r#"builtin = "linear", loss = "mse""#, None),
        (r#"builtin = "softmax""#, Some(2)),
        (r#"builtin = "mlp""#, Some(2)),
    ];
    for (network, label_max) in networks {
        for (setting, name) in [("autocast = \"bf16\"", "autocast"), ("tf32 = true", "tf32")] {
            let said = error(&format!("{network}, {setting}"), label_max);
            assert!(said.starts_with(&format!("model.{name}: the pure engine computes ")), "{said}");
            assert!(said.contains("remove it, or choose a network of libtorch: a script, convnet"), "{said}");
        }
    }
}
