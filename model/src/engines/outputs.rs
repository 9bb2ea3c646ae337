//! What all engines with losses of PyTorch check of a network's outputs before the loss, and count
//! of them after it. Nothing here calls libtorch.

use data::Batch;
use proto::loss_scale::LossScale;
use proto::metrics::{Evaluation, Metric, Tallies};
use proto::spec::{Loss, ModelSpec};
use proto::tensor::Values;

use super::loss::{Target, mismatch, name};
use crate::error::{Error, Result};
use crate::metrics::ClassMeter;

/// A tensor that a network returned, without its values.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Returned {
    /// Its type, as the engine calls it.
    pub kind: String,
    /// Whether it has floats of a type in which the job computes: f32, or that of `model.autocast`.
    pub is_float: bool,
    /// Its shape.
    pub shape: Vec<usize>,
}

/// Where the classes or values of a batch are in its outputs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rows {
    /// A row for each record.
    Records,
    /// A row for each of several labels of a record, such as one for each token of a text.
    Positions {
        /// Whether the classes are in dimension 1. They are in the last one otherwise.
        is_second: bool,
        /// Number of labels that count: those that are not `ignore_index`.
        counted: usize,
    },
}

/// Returns the name of a loss in job files.
pub fn loss_name(loss: Loss) -> String {
    name(loss)
}

/// Checks that a script computed one mean loss.
///
/// # Errors
/// It is something else.
pub fn check_own_loss(mean: &Returned) -> Result<()> {
    if mean.is_float && mean.shape.iter().product::<usize>() == 1 {
        return Ok(());
    }
    let found = format!("{} of shape {:?}", mean.kind, mean.shape);
    Err(mismatch(Loss::Module, "one mean loss, Float", found))
}

/// Returns the factor of the loss from the elements of a loss scale.
///
/// # Errors
/// There is no scale with which gradients fit f16.
pub fn loss_scale(elements: &[i64]) -> Result<f32> {
    LossScale::read(elements).and_then(LossScale::factor).ok_or_else(|| Error::Engine {
        what: "the loss scale".to_owned(),
        reason: "gradients overflow f16 with every loss scale down to 2^-24; compute in bf16, which has the range of f32 \
                 (model.autocast = \"bf16\", or torch.bfloat16 in a loop), or lower the learning rate"
            .to_owned(),
    })
}

/// Returns the error of a loss without gradients.
pub fn detached(loss: Loss) -> Error {
    let found = "a value without gradients; does forward detach it?".to_owned();
    mismatch(loss, "a value that depends on the parameters", found)
}

/// Checks the outputs and the labels of a batch for a loss other than the script's own.
///
/// # Errors
/// They do not fit the loss, or each other.
pub fn rows(spec: &ModelSpec, outputs: &Returned, batch: &Batch) -> Result<Rows> {
    if let Some(positions) = Positions::of(spec, batch) {
        return positions.rows(outputs);
    }
    Target::new(spec.loss, batch, width(spec.loss, outputs, batch)?)?;
    match spec.loss {
        Loss::Module => Err(mismatch(spec.loss, "the script's own loss", "outputs only".to_owned())),
        Loss::CrossEntropy | Loss::Nll | Loss::Mse | Loss::BceWithLogits => Ok(Rows::Records),
    }
}

/// Returns whether the outputs of a batch have a row for each of several labels of a record.
pub fn has_positions(spec: &ModelSpec, batch: &Batch) -> bool {
    Positions::of(spec, batch).is_some()
}

/// Sums losses over the records, and counts their metrics. `mean` is the mean loss. `outputs` are
/// all outputs, the classes of a row beside each other; `width` is the length of a row.
///
/// # Errors
/// A metric does not fit the labels, or so many classes.
pub fn evaluate(
    spec: &ModelSpec,
    mean: f64,
    outputs: &[f32],
    width: usize,
    batch: &Batch,
) -> Result<Evaluation> {
    let metrics = &spec.metrics;
    let samples = batch.samples as u64;
    let evaluation = Evaluation { samples, loss_sum: mean * samples as f64, ..Evaluation::default() };
    if let Some(positions) = Positions::of(spec, batch) {
        if metrics.is_empty() {
            return Ok(evaluation);
        }
        let tallies = positions.count(metrics, outputs, width)?;
        return Ok(Evaluation { tallies, ..evaluation });
    }
    if spec.loss != Loss::Module {
        let target = Target::new(spec.loss, batch, width)?.smoothed(spec.label_smoothing);
        return target.evaluate(spec.loss, metrics, outputs, width);
    }
    if metrics.is_empty() {
        return Ok(evaluation);
    }
    // The script's labels are values. One value beside several outputs is a class.
    let labels = match (batch.values(), batch.classes()) {
        (Some(labels), _) if labels.len() == batch.samples && width > 1 => {
            Values::I64(labels.iter().map(|&label| label as i64).collect())
        }
        (Some(labels), _) => Values::F32(labels.to_vec()),
        (None, Some(classes)) => Values::I64(classes.to_vec()),
        (None, None) => {
            let found = batch.labels.spec().to_string();
            return Err(mismatch(Loss::Module, "labels of f32 or i64 for its metrics", found));
        }
    };
    let like = if labels.as_f32().is_none() { Loss::CrossEntropy } else { Loss::Mse };
    let labelled = Batch { records: batch.records.clone(), ..Batch::of(&[], &[0], &labels, batch.samples) };
    let counted = Target::new(like, &labelled, width)?.evaluate(Loss::Module, metrics, outputs, width)?;
    Ok(Evaluation { tallies: counted.tallies, ..evaluation })
}

/// Several classes in each record, such as one for each token of a text.
struct Positions<'a> {
    loss: Loss,
    ignored: i64,
    batch: &'a Batch,
    classes: &'a [i64],
}

impl<'a> Positions<'a> {
    /// Returns the positions of a batch. `None`: its records have one label, or values.
    fn of(spec: &ModelSpec, batch: &'a Batch) -> Option<Self> {
        let classes = batch.classes().filter(|_| spec.loss.wants_classes())?;
        let several = !batch.labels.spec().shape.is_empty();
        several.then_some(Self { loss: spec.loss, ignored: spec.ignore_index, batch, classes })
    }

    fn rows(&self, outputs: &Returned) -> Result<Rows> {
        let (size, n) = (&outputs.shape, self.batch.samples);
        let of_one = &self.batch.labels.spec().shape;
        let rank = of_one.len() + 2;
        let first = size.len() == rank && size[0] == n && size[2..] == **of_one;
        let last = size.len() == rank && size[0] == n && size[1..rank - 1] == **of_one;
        if !outputs.is_float || first == last {
            let expected = if first && last {
                format!(
                    "outputs of which it is clear where the classes are, and both [{n}, classes, {of_one:?}] and \
                     [{n}, {of_one:?}, classes] fit (loss = \"module\" with a loss of the script's own can say it)"
                )
            } else {
                format!("Float outputs of shape [{n}, classes, {of_one:?}] or [{n}, {of_one:?}, classes]")
            };
            return Err(mismatch(self.loss, &expected, format!("{} of shape {size:?}", outputs.kind)));
        }
        let width = if first { size[1] } else { size[rank - 1] };
        let wrong = self
            .classes
            .iter()
            .position(|&class| class != self.ignored && !(0..width as i64).contains(&class));
        if let Some(at) = wrong {
            let record = self.batch.records[at / (self.classes.len() / self.batch.samples)];
            return Err(Error::Label { record, label: self.classes[at], classes: width });
        }
        let counted = self.classes.iter().filter(|&&class| class != self.ignored).count();
        Ok(Rows::Positions { is_second: first, counted })
    }

    /// Counts the metrics of the positions that count, from all outputs `[positions, width]`.
    fn count(&self, metrics: &[Metric], rows: &[f32], width: usize) -> Result<Tallies> {
        let mut meter = ClassMeter::new(metrics, width)?;
        let target = match self.loss {
            Loss::Nll => Target::Nll(self.classes),
            _ => Target::CrossEntropy(self.classes),
        };
        for (at, outputs) in rows.chunks_exact(width).enumerate() {
            let class = self.classes[at];
            if class != self.ignored {
                meter.add(outputs, class as usize, || target.loss(at, outputs));
            }
        }
        Ok(meter.finish())
    }
}

/// Returns the number of values of one record's outputs, if their shape fits the loss.
fn width(loss: Loss, outputs: &Returned, batch: &Batch) -> Result<usize> {
    let (size, n) = (&outputs.shape, batch.samples);
    if !outputs.is_float {
        return Err(mismatch(loss, "outputs of type Float", outputs.kind.clone()));
    }
    let is_row = if loss.wants_classes() { size.len() == 2 } else { !size.is_empty() };
    let elements = size.iter().product::<usize>();
    if !is_row || size[0] != n || elements == 0 {
        let rest = if loss.wants_classes() { "classes" } else { ".." };
        return Err(mismatch(loss, &format!("outputs of shape [{n}, {rest}]"), format!("{size:?}")));
    }
    Ok(elements / n)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engines::golden;

    fn spec(loss: Loss, ignore_index: i64, metrics: Vec<Metric>) -> ModelSpec {
        let text = "name = \"x\"\nepochs = 1\nbatch = { micro = 1 }\noptimizer = { kind = \"sgd\", learning_rate = 1 }\n\
             model = { script = \"x.pt\" }\ndata = { format = \"csv\", train = { files = [\"x\"] } }\n";
        let job = proto::spec::parse(text, std::path::Path::new("x.toml"), &[]).unwrap();
        ModelSpec { loss, ignore_index, metrics, ..job.model }
    }

    fn floats(shape: &[usize]) -> Returned {
        Returned { kind: "Float".to_owned(), is_float: true, shape: shape.to_vec() }
    }

    #[test]
    fn the_metrics_are_those_of_scikit_learn() {
        for case in golden::cases() {
            let spec = spec(case.loss, case.ignored.unwrap_or(-100), case.metrics());
            let (batch, outputs) = case.part(0, case.shape[0]);
            let rows = rows(&spec, &floats(&case.shape), &batch).unwrap();
            assert_eq!(rows != Rows::Records, has_positions(&spec, &batch), "{}", case.name);
            let records = outputs.len() / batch.samples;
            let width = if rows == Rows::Records { records } else { case.shape[case.shape.len() - 1] };
            case.check(&evaluate(&spec, 0.5, outputs, width, &batch).unwrap());
        }
    }

    #[test]
    fn outputs_that_do_not_fit_are_refused_with_their_shape() {
        let batch = Batch::of(&[0.0; 4], &[2], &Values::I64(vec![0, 3]), 2);
        let cross = spec(Loss::CrossEntropy, -100, Vec::new());
        let said = |outputs: &Returned| rows(&cross, outputs, &batch).unwrap_err().to_string();
        assert!(said(&floats(&[2, 3])).contains("record 1: label 3 is outside 0..3"));
        assert!(said(&floats(&[3, 4])).contains("outputs of shape [2, classes], found [3, 4]"));
        let halves = Returned { kind: "Half".to_owned(), is_float: false, shape: vec![2, 4] };
        assert!(said(&halves).contains("outputs of type Float, found Half"));
        assert_eq!(rows(&cross, &floats(&[2, 4]), &batch).unwrap(), Rows::Records);
        assert!(check_own_loss(&floats(&[2])).is_err() && check_own_loss(&floats(&[])).is_ok());
    }
}
