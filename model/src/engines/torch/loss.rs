//! Losses with gradients. Outputs and labels are checked before libtorch sees them.

use data::Batch;
use proto::metrics::Evaluation;
use proto::spec::{Loss, ModelSpec};
use tch::{Kind, Reduction, Tensor};

use super::network::{Output, failed};
use super::shim;
use crate::engines::outputs::{self, Returned, Rows, check_own_loss};
use crate::error::Result;

/// Computes the mean loss over the records, a scalar from which gradients flow. `labels` are the
/// batch's, on the device.
pub(super) fn mean(spec: &ModelSpec, output: &Output, labels: &Tensor, batch: &Batch) -> Result<Tensor> {
    if let Some(mean) = &output.loss {
        check_own_loss(&returned(spec, mean)?)?;
        return mean.f_view([0i64; 0]).map_err(failed("loss"));
    }
    let (outputs, loss, none) = (&output.outputs, spec.loss, None::<&Tensor>);
    // Labels are checked, so none of one class a record is the class to ignore.
    let (rows, labels, ignored) = match outputs::rows(spec, &returned(spec, outputs)?, batch)? {
        Rows::Records => (outputs.shallow_clone(), labels.shallow_clone(), -100),
        Rows::Positions { counted: 0, is_second } => {
            let rows = of_positions(outputs, is_second).map_err(failed("outputs"))?;
            let zero = || rows.f_sum(Kind::Float)?.f_mul_scalar(0.0);
            return zero().map_err(failed("loss"));
        }
        Rows::Positions { is_second, .. } => {
            let rows = of_positions(outputs, is_second).map_err(failed("outputs"))?;
            (rows, labels.f_view([-1]).map_err(failed("loss"))?, spec.ignore_index)
        }
    };
    let like_outputs = || labels.f_view_as(&rows);
    let value = match loss {
        Loss::CrossEntropy => {
            rows.f_cross_entropy_loss(&labels, none, Reduction::Mean, ignored, spec.label_smoothing)
        }
        Loss::Nll => rows.f_nll_loss(&labels, none, Reduction::Mean, ignored),
        Loss::Mse => like_outputs().and_then(|labels| rows.f_mse_loss(&labels, Reduction::Mean)),
        // `outputs::rows` refuses a script without a loss of its own.
        Loss::BceWithLogits | Loss::Module => like_outputs()
            .and_then(|labels| rows.f_binary_cross_entropy_with_logits(&labels, none, none, Reduction::Mean)),
    };
    value.map_err(failed("loss"))
}

/// Sums losses over the records, and counts their metrics. `mean` is the mean loss.
pub(super) fn evaluate(spec: &ModelSpec, mean: f64, outputs: &Tensor, batch: &Batch) -> Result<Evaluation> {
    if !outputs::has_positions(spec, batch) {
        let width = (outputs.numel() / batch.samples.max(1)).max(1);
        return with_rows(outputs, |rows| outputs::evaluate(spec, mean, rows, width, batch));
    }
    if spec.metrics.is_empty() {
        return outputs::evaluate(spec, mean, &[], 1, batch);
    }
    let is_second = matches!(
        outputs::rows(spec, &returned(spec, outputs)?, batch)?,
        Rows::Positions { is_second: true, .. }
    );
    let rows = of_positions(outputs, is_second).map_err(failed("outputs"))?;
    let width = rows.size()[1] as usize;
    with_rows(&rows, |rows| outputs::evaluate(spec, mean, rows, width, batch))
}

/// Calls `of` with all outputs, row-major. Outputs in host memory are not copied.
fn with_rows<T>(outputs: &Tensor, of: impl FnOnce(&[f32]) -> Result<T>) -> Result<T> {
    let rows = outputs.f_to_kind(Kind::Float).and_then(|outputs| super::model::with_elements(&outputs, of));
    rows.map_err(failed("evaluation"))?
}

/// Returns the outputs of positions as `[positions, classes]`.
fn of_positions(outputs: &Tensor, is_second: bool) -> tch::Result<Tensor> {
    let outputs = if is_second { outputs.f_movedim_int(1, -1)? } else { outputs.shallow_clone() };
    let classes = outputs.size().last().copied().unwrap_or(1);
    outputs.f_contiguous()?.f_view([-1, classes])
}

fn returned(spec: &ModelSpec, tensor: &Tensor) -> Result<Returned> {
    let kind = tensor.f_kind().map_err(failed("outputs"))?;
    let shape = tensor.size().into_iter().map(|size| size as usize).collect();
    let lower = spec.autocast.map(shim::kind);
    Ok(Returned { kind: format!("{kind:?}"), is_float: kind == Kind::Float || Some(kind) == lower, shape })
}

#[cfg(test)]
mod tests {
    use proto::metrics::Metric;

    use super::*;
    use crate::engines::golden;

    fn spec(loss: Loss, ignore_index: i64, metrics: Vec<Metric>) -> ModelSpec {
        let text = "name = \"x\"\nepochs = 1\nbatch = { micro = 1 }\noptimizer = { kind = \"sgd\", learning_rate = 1 }\n\
             model = { script = \"x.pt\" }\ndata = { format = \"csv\", train = { files = [\"x\"] } }\n";
        let job = proto::spec::parse(text, std::path::Path::new("x.toml"), &[]).unwrap();
        ModelSpec { loss, ignore_index, metrics, ..job.model }
    }

    fn tensor(shape: &[usize], values: &[f32]) -> Tensor {
        let shape: Vec<_> = shape.iter().map(|&size| size as i64).collect();
        Tensor::from_slice(values).view(shape.as_slice())
    }

    #[test]
    fn the_metrics_are_those_of_scikit_learn() {
        for case in golden::cases() {
            let spec = spec(case.loss, case.ignored.unwrap_or(-100), case.metrics());
            let (batch, outputs) = case.part(0, case.shape[0]);
            let outputs = tensor(&case.shape, outputs);
            case.check(&evaluate(&spec, 0.5, &outputs, &batch).unwrap());
            if case.shape.len() == 3 {
                let first = outputs.movedim_int(-1, 1);
                case.check(&evaluate(&spec, 0.5, &first, &batch).unwrap());
            }
        }
    }

    #[test]
    fn smoothed_and_mixed_labels_have_the_losses_of_pytorchs_definition() {
        for case in golden::soft() {
            let (batch, width) = (case.batch(), case.classes);
            let mut spec = spec(Loss::CrossEntropy, case.ignored.unwrap_or(-100), vec![Metric::LogLoss]);
            spec.label_smoothing = case.label_smoothing;
            let mut shape = vec![batch.samples];
            shape.extend(case.ignored.map(|_| case.samples()));
            shape.push(width);
            let outputs = tensor(&shape, &case.outputs).set_requires_grad(true);
            let labels = match (batch.classes(), batch.values()) {
                (Some(classes), _) => Tensor::from_slice(classes).view_as(&outputs.select(-1, 0)),
                (None, values) => Tensor::from_slice(values.unwrap()).view_as(&outputs),
            };
            let output = Output { outputs: outputs.shallow_clone(), loss: None };
            let loss = mean(&spec, &output, &labels, &batch).unwrap();
            let close =
                |found: f64, expected: f64| (found - expected).abs() <= 1e-6 * expected.abs().max(1.0);
            assert!(close(loss.double_value(&[]), case.loss), "{case:?}: {loss:?}");
            loss.backward();
            let gradient: Vec<f32> = Vec::try_from(outputs.grad().view(-1)).unwrap();
            for (found, expected) in gradient.iter().zip(&case.gradient) {
                assert!(close(f64::from(*found), *expected), "{case:?}: {found}, expected {expected}");
            }
            let found = evaluate(&spec, loss.double_value(&[]), &outputs.detach(), &batch).unwrap();
            assert!(close(found.loss_sum / batch.samples as f64, case.loss), "{case:?}: {found:?}");
            assert!(close(found.values()["log_loss"], case.plain_loss), "{case:?}: {found:?}");
        }
    }

    #[test]
    fn outputs_of_a_scripts_own_loss_have_metrics_by_their_labels() {
        for case in golden::cases().into_iter().filter(|case| case.ignored.is_none()) {
            let (batch, outputs) = case.part(0, case.shape[0]);
            let outputs = tensor(&case.shape, outputs);
            // Outputs of classes count as logits, and logits of values as values.
            let is_loss = |metric: &Metric| matches!(metric, Metric::LogLoss | Metric::Perplexity);
            let metrics = case.metrics().into_iter().filter(|metric| !is_loss(metric)).collect::<Vec<_>>();
            let found = evaluate(&spec(Loss::Module, -100, metrics), 0.5, &outputs, &batch).unwrap();
            assert_eq!(found.loss_sum, 0.5 * batch.samples as f64);
            let mut case = case;
            case.values.retain(|metric, _| found.tallies.contains_key(&metric.parse().unwrap()));
            case.check(&found);
        }
    }

    #[test]
    fn outputs_that_are_nan_have_metrics_that_are() {
        for mut case in golden::cases() {
            *case.outputs.last_mut().unwrap() = f32::NAN;
            let spec = spec(case.loss, case.ignored.unwrap_or(-100), case.metrics());
            let (batch, outputs) = case.part(0, case.shape[0]);
            let found = evaluate(&spec, f64::NAN, &tensor(&case.shape, outputs), &batch).unwrap();
            for (name, value) in found.values().iter().filter(|(name, _)| *name != "loss") {
                assert!(value.is_nan(), "{}: {name} is {value}", case.name);
            }
            assert!(found.confusion().is_none());
        }
    }

    #[test]
    fn a_position_that_does_not_count_may_have_any_outputs() {
        let mut case = golden::cases().into_iter().find(|case| case.ignored.is_some()).unwrap();
        case.outputs[0] = f32::NAN;
        let spec = spec(case.loss, -100, case.metrics());
        let (batch, outputs) = case.part(0, case.shape[0]);
        assert_eq!(batch.classes().unwrap()[0], -100);
        case.check(&evaluate(&spec, 0.5, &tensor(&case.shape, outputs), &batch).unwrap());
    }
}
