//! Promises of the libtorch engine: equal inputs give equal bits, whatever was computed before or
//! at the same time; state is put back; errors say what to do.
#![cfg(feature = "torch")]

#[allow(dead_code, unreachable_pub, reason = "shared with the tests of the whole program")]
#[path = "../../tests/harness/skip.rs"]
mod skip;
mod torch;

use std::collections::BTreeMap;
use std::sync::Barrier;

use model::Device;
use model::export::{Dtype, safetensors};
use model::weights::Weights;
use model::{Context, Gradients, OwnMemory, Registry};
use proto::tensor::{TensorRole, Values};
use torch::{batch, batch_of_values, bits, context, fixture, labelled, script_context, start};

const SHAPE: [usize; 3] = [1, 8, 8];

fn jobs() -> Vec<(&'static str, Context)> {
    let dropping = "builtin = \"convnet\", options = { channels = [4], hidden = 16, dropout = 0.3 }";
    vec![
        ("batchnorm.pt", script_context("batchnorm.pt", "")),
        ("dropout.pt", script_context("dropout.pt", "")),
        ("noisy.pt", script_context("noisy.pt", "")),
        ("tied.pt", script_context("tied.pt", "")),
        ("convnet", context(dropping, &SHAPE)),
        ("mlp", context("builtin = \"mlp\", options = { dropout = 0.5, engine = \"torch\" }", &SHAPE)),
        ("resnet18", context("builtin = \"resnet18\"", &SHAPE)),
        ("batchnorm.pt in bf16", script_context("batchnorm.pt", BF16)),
        ("tied.pt in bf16", script_context("tied.pt", BF16)),
        (
            "mlp in bf16",
            context(&format!("builtin = \"mlp\", options = {{ engine = \"torch\" }}{BF16}"), &SHAPE),
        ),
    ]
}

/// Continues the model section with autocast.
const BF16: &str = ", autocast = \"bf16\"";

/// Returns the error of building a job's model.
fn refusal(context: &Context) -> String {
    match Registry::default().build(context) {
        Ok(_) => panic!("the model was built"),
        Err(error) => {
            assert!(error.is_fatal(), "another attempt cannot help: {error}");
            error.to_string()
        }
    }
}

fn says(message: &str, words: &[&str]) {
    for word in words {
        assert!(message.contains(word), "`{word}` is missing in: {message}");
    }
}

#[test]
fn predictions_are_the_outputs_of_evaluation_before_the_loss() {
    let ours = batch(6, &SHAPE);
    let labels = ours.classes().unwrap().to_vec();
    for (name, job) in jobs() {
        let mut model = start(&job);
        let outputs = model.predict(&ours).unwrap();
        assert_eq!((outputs.records(), outputs.spec().shape.len()), (6, 1), "{name}");
        let width = outputs.spec().shape[0];
        let rows = outputs.values::<f32>().unwrap().chunks_exact(width);
        let losses = rows.zip(&labels).map(|(logits, &label)| {
            let sum: f64 = logits.iter().map(|&logit| f64::from(logit).exp()).sum();
            sum.ln() - f64::from(logits[label as usize])
        });
        let (found, expected) = (losses.sum::<f64>(), model.evaluate(&ours).unwrap().loss_sum);
        assert!((found - expected).abs() < 1e-3, "{name}: {found}, the evaluation has {expected}");
        assert_eq!(outputs.bytes(), model.predict(&ours).unwrap().bytes(), "{name}: other bits");
    }
}

#[test]
fn the_first_and_the_twentieth_call_give_the_same_bits() {
    let (ours, other) = (batch(6, &SHAPE), batch(5, &SHAPE));
    for (name, job) in jobs() {
        let mut model = start(&job);
        let first = bits(&model.gradients(&ours, 41).unwrap());
        for call in 2..=20 {
            if call % 3 == 0 {
                model.gradients(&other, call).unwrap();
                model.evaluate(&other).unwrap();
            }
            assert!(bits(&model.gradients(&ours, 41).unwrap()) == first, "{name}: call {call} differs");
        }
        assert!(bits(&start(&job).gradients(&ours, 41).unwrap()) == first, "{name}: a fresh model differs");
        let elsewhere = std::thread::scope(|scope| {
            scope.spawn(|| bits(&start(&job).gradients(&ours, 41).unwrap())).join().unwrap()
        });
        assert!(elsewhere == first, "{name}: another thread differs");
        let moved = std::thread::scope(|scope| {
            scope.spawn(|| bits(&model.gradients(&ours, 41).unwrap())).join().unwrap()
        });
        assert!(moved == first, "{name}: a model that moved to another thread differs");
    }
}

#[test]
fn gradients_are_handed_over_as_they_are_made_with_the_same_bits() {
    let batch = batch(6, &SHAPE);
    for (name, job) in jobs() {
        let mut model = start(&job);
        let expected = model.weighted_gradients(&batch, 41, &OwnMemory).unwrap();
        // Hooks stay from call to call.
        for call in 1..=3 {
            let mut made = Vec::new();
            let mut take = |tensor, values| made.push((tensor, values));
            let loss = model.gradients_as_made(&batch, 41, &OwnMemory, &mut take).unwrap();
            let first = model.tensors()[made[0].0].name.clone();
            made.sort_by_key(|(tensor, _)| *tensor);
            assert!(made.iter().map(|(tensor, _)| *tensor).eq(0..expected.values.len()), "{name}");
            let values = made.into_iter().map(|(_, values)| values).collect();
            assert!(bits(&Gradients { loss, values }) == bits(&expected), "{name}: call {call} differs");
            if name.contains(".pt") {
                continue;
            }
            let mut parameters =
                model.tensors().into_iter().filter(|spec| spec.role == TensorRole::Parameter);
            let last = parameters.next_back().expect("a network has parameters").name;
            let layer = |name: &str| name.rsplit_once('.').map(|(layer, _)| layer.to_owned());
            assert_eq!(layer(&first), layer(&last), "{name}: {first} came first");
        }
    }
}

#[test]
fn a_receiver_of_gradients_that_panics_is_an_error_and_the_model_goes_on() {
    let (batch, (_, job)) = (batch(6, &SHAPE), jobs().swap_remove(5));
    let mut model = start(&job);
    let expected = bits(&model.weighted_gradients(&batch, 41, &OwnMemory).unwrap());
    let mut take = |_, _| panic!("on purpose");
    let error = model.gradients_as_made(&batch, 41, &OwnMemory, &mut take).unwrap_err().to_string();
    says(&error, &["gradients", "a gradient was not taken"]);
    assert!(bits(&model.weighted_gradients(&batch, 41, &OwnMemory).unwrap()) == expected);
}

#[test]
fn dropout_follows_the_key_and_nothing_else() {
    for (name, job) in jobs() {
        let (mut model, batch) = (start(&job), batch(6, &SHAPE));
        let drops = matches!(name, "dropout.pt" | "noisy.pt" | "convnet" | "mlp");
        let [one, two] = [1, 2].map(|key| bits(&model.gradients(&batch, key).unwrap()));
        assert_eq!(one != two, drops, "{name}");
        let evaluation = model.evaluate(&batch).unwrap();
        model.gradients(&batch, 3).unwrap();
        assert_eq!(
            model.evaluate(&batch).unwrap(),
            evaluation,
            "{name}: evaluation is a function of the weights"
        );
    }
}

/// Without a CUDA device the test checks nothing, and says so.
#[test]
fn cuda_gives_the_same_bits_each_time_and_nearly_those_of_the_cpu() {
    if model::engines::cuda_devices().unwrap_or(0) == 0 {
        // Written past the test runner, which hides the output of a passing test.
        skip::skipped(skip::Lacks::Machine, "no CUDA device");
        return;
    }
    let batch = batch(6, &SHAPE);
    let draws = |name: &str| name == "noisy.pt" || name == "dropout.pt";
    for (name, job) in jobs().into_iter().filter(|(name, _)| !draws(name)) {
        let on_cpu = start(&job).gradients(&batch, 41).unwrap();
        let job = Context { device: Device::Cuda(0), ..job };
        let first = start(&job).gradients(&batch, 41).unwrap();
        for call in 1..=20 {
            assert!(
                bits(&start(&job).gradients(&batch, 41).unwrap()) == bits(&first),
                "{name}: call {call} differs"
            );
        }
        let error = (on_cpu.loss - first.loss).abs() / on_cpu.loss.abs();
        let tolerance = if job.spec.model.autocast.is_some() { 1e-2 } else { 1e-4 };
        assert!(error < tolerance, "{name}: loss {} on the CPU, {} with CUDA", on_cpu.loss, first.loss);
    }
}

#[test]
fn models_side_by_side_compute_what_each_computes_alone() {
    for (name, job) in jobs() {
        // The script's generator belongs to the process. With so many calls, some would overlap.
        let calls = if name == "dropout.pt" { 200 } else { 4 };
        let batch = batch(6, &SHAPE);
        let run = |first: u64| -> Vec<_> {
            let mut model = start(&job);
            (first..first + calls).map(|key| bits(&model.gradients(&batch, key).unwrap())).collect()
        };
        let (left, right) = (run(0), run(1000));
        // A third model, with another number of threads, must not change their results.
        let wide = Context { threads: 2, ..job.clone() };
        let beside = || {
            let mut model = start(&wide);
            (0..4).for_each(|key| drop(model.gradients(&batch, key).unwrap()));
        };
        let barrier = &Barrier::new(3);
        std::thread::scope(|scope| {
            let one = scope.spawn(|| (barrier.wait(), run(0)).1);
            let two = scope.spawn(|| (barrier.wait(), run(1000)).1);
            let three = scope.spawn(|| (barrier.wait(), beside()).1);
            assert!(one.join().unwrap() == left, "{name}: the first differs");
            assert!(two.join().unwrap() == right, "{name}: the second differs");
            three.join().unwrap();
        });
    }
}

#[test]
fn a_training_forward_reports_new_state_and_keeps_the_loaded_one() {
    let (mut model, batch) = (start(&script_context("batchnorm.pt", "")), batch(6, &SHAPE));
    let tensors = model.tensors();
    let at = |name: &str| tensors.iter().position(|tensor| tensor.name == name).unwrap();
    assert_eq!(tensors[at("bn.running_mean")].role, TensorRole::State);
    assert_eq!(tensors[at("bn.num_batches_tracked")].role, TensorRole::Counter);
    let mut weights = model.initial(7).unwrap();
    let before = model.evaluate(&batch).unwrap();
    let first = model.gradients(&batch, 0).unwrap();
    assert_eq!(first.values[at("bn.num_batches_tracked")], Values::I64(vec![1]));
    assert_ne!(first.values[at("bn.running_mean")], weights[at("bn.running_mean")]);
    assert_eq!(model.gradients(&batch, 0).unwrap(), first, "it starts again from the loaded state");
    assert_eq!(model.evaluate(&batch).unwrap(), before);

    weights[at("bn.num_batches_tracked")] = Values::I64(vec![41]);
    model.load(&weights).unwrap();
    assert_eq!(
        model.gradients(&batch, 0).unwrap().values[at("bn.num_batches_tracked")],
        Values::I64(vec![42])
    );
    let wrong = Values::F32(vec![1.0]);
    says(&model.load(&[wrong]).unwrap_err().to_string(), &["load weights"]);
}

#[test]
fn weights_are_computed_with_where_they_lie_and_never_written_to() {
    let (context, batch) = (script_context("batchnorm.pt", ""), batch(6, &SHAPE));
    let (mut copying, mut sharing) = (start(&context), start(&context));
    let initial = copying.initial(7).unwrap();
    let scaled = |by: f32| {
        let mut values = initial.clone();
        values.iter_mut().filter_map(Values::as_f32_mut).flatten().for_each(|value| *value *= by);
        values
    };
    let mut kept = Vec::new();
    for by in [0.5, 2.0, 0.25] {
        copying.load(&scaled(by)).unwrap();
        let shared = Weights::from(scaled(by));
        sharing.load_shared(&shared).unwrap();
        assert!(
            bits(&sharing.gradients(&batch, 3).unwrap()) == bits(&copying.gradients(&batch, 3).unwrap()),
            "{by}"
        );
        kept.push((by, shared));
    }
    // A copying load must not write to the shared memory.
    copying.load(&scaled(3.0)).unwrap();
    sharing.load(&scaled(3.0)).unwrap();
    assert!(bits(&sharing.gradients(&batch, 3).unwrap()) == bits(&copying.gradients(&batch, 3).unwrap()));
    for (by, shared) in &kept {
        assert_eq!(**shared, *scaled(*by), "{by}");
    }
    let (_, last) = kept.pop().unwrap();
    sharing.load_shared(&last).unwrap();
    assert!(sharing.load_shared(&Weights::from(vec![Values::F32(vec![1.0])])).is_err());
    copying.load(&last).unwrap();
    drop(last);
    assert!(
        bits(&sharing.gradients(&batch, 3).unwrap()) == bits(&copying.gradients(&batch, 3).unwrap()),
        "after a failure"
    );
}

#[test]
fn autocast_computes_from_the_weights_that_were_loaded_last() {
    let (context, batch) = (script_context("tied.pt", BF16), batch(6, &SHAPE));
    let (mut kept, mut sharing) = (start(&context), start(&context));
    let initial = kept.initial(7).unwrap();
    for by in [0.5, 2.0] {
        let mut weights = initial.clone();
        weights.iter_mut().filter_map(Values::as_f32_mut).flatten().for_each(|value| *value *= by);
        let mut fresh = start(&context);
        fresh.load(&weights).unwrap();
        let expected = bits(&fresh.gradients(&batch, 3).unwrap());
        kept.load(&weights).unwrap();
        assert!(bits(&kept.gradients(&batch, 3).unwrap()) == expected, "loaded times {by}");
        sharing.load_shared(&Weights::from(weights)).unwrap();
        assert!(bits(&sharing.gradients(&batch, 3).unwrap()) == expected, "shared times {by}");
    }
}

#[test]
fn autocast_leaves_gradients_predictions_and_metrics_in_f32_and_other_jobs_alone() {
    let batch = batch(6, &SHAPE);
    let (mut plain, mut lower) =
        (start(&script_context("batchnorm.pt", "")), start(&script_context("batchnorm.pt", BF16)));
    let before = bits(&plain.gradients(&batch, 0).unwrap());
    let (gradients, evaluation) = (lower.gradients(&batch, 0).unwrap(), lower.evaluate(&batch).unwrap());
    let predictions = lower.predict(&batch).unwrap();
    assert!(bits(&gradients) != before, "bf16 has other bits");
    let is_bf16 = |value: &f32| value.to_bits() & 0xffff == 0;
    assert!(predictions.values::<f32>().unwrap().iter().all(is_bf16), "the last layer computes in bf16");
    // Gradients of weights come from products in bf16; those of BatchNorm are sums in f32.
    let at = lower.tensors().iter().position(|tensor| tensor.name == "bn.bias").unwrap();
    assert!(!gradients.values[at].as_f32().unwrap().iter().all(is_bf16), "{:?}", gradients.values[at]);
    let plain_loss = plain.evaluate(&batch).unwrap().loss_sum;
    let error = (evaluation.loss_sum - plain_loss).abs() / plain_loss;
    assert!(error > 0.0 && error < 0.02, "{error:e}");
    assert!(bits(&plain.gradients(&batch, 0).unwrap()) == before, "a job in f32 on the same thread");
}

#[test]
fn a_loss_of_the_scripts_own_may_be_of_autocasts_type() {
    let values = batch_of_values(6, &SHAPE, 2, 4.0);
    let context = |more: &str| script_context("own_loss.pt", &format!(", loss = \"module\"{more}"));
    let [plain, lower] = ["", BF16].map(|more| start(&context(more)).gradients(&values, 0).unwrap());
    let error = (plain.loss - lower.loss).abs() / plain.loss;
    assert!(error > 0.0 && error < 0.02, "{error:e}");
}

#[test]
fn a_failed_forward_leaves_the_loaded_state_too() {
    let (mut model, mut bad) = (start(&script_context("batchnorm.pt", "")), batch(6, &SHAPE));
    let good = bits(&model.gradients(&bad, 0).unwrap());
    bad.labels = labelled(6, &SHAPE, &Values::I64(vec![0, 1, 2, 3, 0, 0])).labels;
    let error = model.gradients(&bad, 0).unwrap_err();
    assert_eq!(
        error.to_string(),
        "record 103: label 3 is outside 0..3; the network has 3 outputs, give it more or mend the labels"
    );
    assert!(bits(&model.gradients(&batch(6, &SHAPE), 0).unwrap()) == good);
}

#[test]
fn constants_are_exported_and_never_sent() {
    let mut model = start(&script_context("batchnorm.pt", ""));
    let names: Vec<String> = model.tensors().into_iter().map(|tensor| tensor.name).collect();
    let constants = model.constants().unwrap();
    let kept: BTreeMap<&str, (Dtype, &[usize])> =
        constants.iter().map(|c| (c.name.as_str(), (c.dtype, c.shape.as_slice()))).collect();
    let expected = [
        ("mask", (Dtype::BOOL, [6, 6].as_slice())),
        ("offset", (Dtype::F32, &[4, 1, 1])),
        ("scale", (Dtype::F32, &[4, 1, 1])),
    ];
    assert_eq!(kept, expected.into());
    assert!(!names.iter().any(|name| kept.contains_key(name.as_str())), "{names:?}");
    let initial = model.initial(0).unwrap();
    assert!(safetensors(&model.tensors(), &initial, &constants).is_ok());
}

#[test]
fn the_exported_script_holds_the_loaded_weights_and_computes_the_same() {
    let folder = tempfile::tempdir().unwrap();
    for name in ["batchnorm.pt", "dropout.pt", "tied.pt"] {
        let mut job = script_context(name, ", metrics = [\"accuracy\"]");
        let (mut model, batch) = (start(&job), batch(6, &SHAPE));
        let mut weights = model.initial(0).unwrap();
        for value in weights.iter_mut().filter_map(Values::as_f32_mut).flatten() {
            *value = *value * 0.5 + 0.125;
        }
        model.load(&weights).unwrap();
        assert_ne!(
            model.initial(0).unwrap(),
            weights,
            "{name}: version 0 is the file's, whatever was loaded"
        );
        model.gradients(&batch, 1).unwrap();
        let files = model.export().unwrap();
        let path = folder.path().join(name);
        std::fs::write(&path, &files["model.pt"]).unwrap();
        job.artifacts.insert("model.pt".to_owned(), path);
        let mut exported = start(&job);
        assert_eq!(exported.initial(0).unwrap(), weights, "{name}");
        assert_eq!(exported.evaluate(&batch).unwrap(), model.evaluate(&batch).unwrap(), "{name}");
        assert_eq!(exported.constants().unwrap(), model.constants().unwrap(), "{name}");
        assert!(
            bits(&exported.gradients(&batch, 5).unwrap()) == bits(&model.gradients(&batch, 5).unwrap()),
            "{name}"
        );
    }
    assert!(start(&context("builtin = \"convnet\"", &SHAPE)).export().unwrap().is_empty());
}

#[test]
fn tied_weights_get_the_sum_of_their_gradients_under_each_name() {
    let mut model = start(&script_context("tied.pt", ""));
    let tensors = model.tensors();
    let at = |name: &str| tensors.iter().position(|tensor| tensor.name == name).unwrap();
    let values = model.gradients(&batch(6, &SHAPE), 0).unwrap().values;
    assert_eq!(values[at("first.weight")], values[at("second.weight")]);
    assert_ne!(values[at("first.bias")], values[at("second.bias")]);
}

#[test]
fn files_that_are_no_script_say_how_to_write_one() {
    let mut job = script_context("state_dict.pt", "");
    says(
        &refusal(&job),
        &["model script `model.pt`", "not a TorchScript file", "torch.jit.script(model).save"],
    );
    job.artifacts.insert("model.pt".to_owned(), fixture("make.py"));
    says(&refusal(&job), &["not a TorchScript file", "torch.jit.script"]);
    job.artifacts.insert("model.pt".to_owned(), fixture("missing.pt"));
    says(&refusal(&job), &["missing.pt is gone"]);
    job.artifacts.clear();
    says(&refusal(&job), &["came without this file"]);
}

#[test]
fn scripts_that_keep_state_nobody_keeps_are_refused() {
    says(&refusal(&script_context("counts_calls.pt", "")), &["attribute `calls`", "register_buffer"]);
    says(&refusal(&script_context("clamped.pt", "")), &["parameter `fc.weight`", "only the optimizer"]);
}

#[test]
fn parameters_of_another_type_are_named() {
    let message = refusal(&script_context("half.pt", ", loss = \"module\""));
    says(&message, &["parameter `fc.weight` is Half", "model.float()"]);
}

#[test]
fn a_loss_and_a_forward_that_do_not_fit_are_refused() {
    says(&refusal(&script_context("own_loss.pt", "")), &["2 to 2 arguments", "cross_entropy", "\"module\""]);
    says(
        &refusal(&script_context("dropout.pt", ", loss = \"module\"")),
        &["1 to 1", "forward(features, labels)"],
    );
    let mut model = start(&script_context("dropout.pt", ", loss = \"mse\""));
    let error = model.gradients(&batch_of_values(6, &SHAPE, 2, 1.0), 0).unwrap_err().to_string();
    says(&error, &["`mse` needs 3 values a record"]);
    let error = model.gradients(&batch(6, &SHAPE), 0).unwrap_err().to_string();
    says(&error, &["`mse`", "labels `labels` i64[]"]);
}

#[test]
fn features_of_another_shape_are_named() {
    let mut model = start(&script_context("dropout.pt", ""));
    let error = model.gradients(&batch(6, &[1, 7, 9]), 0).unwrap_err();
    assert!(error.is_fatal());
    says(&error.to_string(), &["model script `model.pt`", "[6, 1, 7, 9]", "63"]);
    let job = context("builtin = \"convnet\"", &[64]);
    says(&refusal(&job), &["`convnet`", "[channels, height, width]", "data has [64]"]);
    let job = context("builtin = \"convnet\", options = { dropout = 1.0 }", &SHAPE);
    says(&refusal(&job), &["`dropout` = 1"]);
    let job = context("builtin = \"mlp\", options = { dropout = 0.5 }", &SHAPE);
    says(&refusal(&job), &["`mlp`", "dropout", "engine = \"torch\""]);
    let job = context("builtin = \"resnet18\", options = { depth = 34 }", &SHAPE);
    says(&refusal(&job), &["depth", "small_input"]);
}

#[test]
fn networks_have_the_names_and_shapes_of_pytorchs() {
    let names = |model: &str, shape: &[usize]| -> Vec<String> {
        let tensors = start(&context(model, shape)).tensors();
        tensors.into_iter().map(|tensor| format!("{} {:?}", tensor.name, tensor.shape)).collect()
    };
    let mlp = "builtin = \"mlp\", options = { hidden = [5], dropout = 0.5, engine = \"torch\" }";
    assert_eq!(names(mlp, &[2, 2]), ["0.weight [5, 4]", "0.bias [5]", "3.weight [3, 5]", "3.bias [3]"]);
    let resnet = names("builtin = \"resnet18\", options = { classes = 1000 }", &[3, 224, 224]);
    assert_eq!(resnet.len(), 122, "as many as torchvision's state_dict");
    for tensor in [
        "conv1.weight [64, 3, 7, 7]",
        "layer2.0.downsample.0.weight [128, 64, 1, 1]",
        "layer4.1.bn2.running_var [512]",
        "fc.weight [1000, 512]",
    ] {
        assert!(resnet.iter().any(|name| name == tensor), "{tensor}");
    }
    says(&refusal(&context("builtin = \"resnet18\", loss = \"nll\"", &SHAPE)), &["`nll`", "`resnet18`"]);
}

#[test]
fn a_single_record_has_no_variance_to_normalise_by() {
    let mut model = start(&context("builtin = \"resnet18\"", &SHAPE));
    let error = model.gradients(&batch(1, &SHAPE), 0).unwrap_err().to_string();
    says(&error, &["resnet18", "1 value per channel", "batch.micro"]);
    assert!(model.evaluate(&batch(1, &SHAPE)).is_ok());
}

#[test]
fn a_scripts_own_loss_is_measured_with_metrics_of_its_outputs() {
    let mut model = start(&script_context("own_loss.pt", ", loss = \"module\", metrics = [\"mae\"]"));
    let batch = batch_of_values(6, &SHAPE, 2, 4.0);
    let evaluation = model.evaluate(&batch).unwrap();
    assert_eq!(evaluation.samples, 6);
    // The loss is the mean absolute error and a penalty.
    let (mae, loss) = (evaluation.values()["mae"], evaluation.loss_sum / 6.0);
    assert!(mae > 0.5 && loss > mae && loss < mae + 0.1, "mae {mae}, loss {loss}");
}
