//! The loss of each record, from the outputs of any engine.
//!
//! Outputs are those of [`Model::predict`](crate::Model::predict). Losses are computed in f64, one
//! record at a time, so they do not depend on the other records of a batch.

use data::{Batch, Column};
use proto::spec::{Loss, ModelSpec};

use super::loss::{Target, mismatch};
use crate::error::{Error, Result};

/// Returns the loss of each record of a batch: the job's loss, with its `label_smoothing`. A record
/// with several classes has the mean over those that count, and 0 without any.
///
/// `outputs` are f32 `[n, shape..]` for the n records of the batch.
///
/// # Errors
/// Labels or outputs do not fit the loss, or only the script can compute it (`module`).
pub fn losses(spec: &ModelSpec, batch: &Batch, outputs: &Column) -> Result<Vec<f64>> {
    if batch.samples == 0 {
        return Ok(Vec::new());
    }
    let shape = &outputs.spec().shape;
    let width: usize = shape.iter().product();
    let fits = |values: &&[f32]| width > 0 && values.len() == batch.samples * width;
    let Some(values) = outputs.values::<f32>().filter(fits) else {
        let expected = format!("f32 outputs for {} records", batch.samples);
        return Err(mismatch(spec.loss, &expected, format!("{} for {}", outputs.spec(), outputs.records())));
    };
    let rows = values.chunks_exact(width);
    match batch.classes().filter(|_| spec.loss.wants_classes() && !batch.labels.spec().shape.is_empty()) {
        Some(classes) => {
            let several = Several::new(spec, batch, shape)?;
            let each = classes.chunks_exact((classes.len() / batch.samples).max(1));
            rows.zip(each).zip(&batch.records).map(|((row, own), &at)| several.mean(row, own, at)).collect()
        }
        None => {
            let target = Target::new(spec.loss, batch, width)?.smoothed(spec.label_smoothing);
            Ok(rows.enumerate().map(|(record, row)| target.loss(record, row)).collect())
        }
    }
}

/// Several classes in each record, such as one for each token of a text.
struct Several<'a> {
    spec: &'a ModelSpec,
    /// Number of classes of the network.
    width: usize,
    /// Whether outputs of a record are `[classes, ..]`. Otherwise they are `[.., classes]`.
    classes_first: bool,
}

impl<'a> Several<'a> {
    fn new(spec: &'a ModelSpec, batch: &Batch, shape: &[usize]) -> Result<Self> {
        let of_one = &batch.labels.spec().shape;
        let (first, last) = (shape.split_first(), shape.split_last());
        let first = first.filter(|(_, rest)| rest == of_one).map(|(&width, _)| width);
        let last = last.filter(|(_, rest)| rest == of_one).map(|(&width, _)| width);
        match (first, last) {
            (Some(width), None) => Ok(Self { spec, width, classes_first: true }),
            (None, Some(width)) => Ok(Self { spec, width, classes_first: false }),
            _ => {
                let expected = format!("outputs of shape [classes, {of_one:?}] or [{of_one:?}, classes]");
                Err(mismatch(spec.loss, &expected, format!("{shape:?}")))
            }
        }
    }

    /// Returns the mean loss over the classes of a record that count.
    fn mean(&self, outputs: &[f32], classes: &[i64], record: u64) -> Result<f64> {
        let (mut sum, mut count) = (0.0, 0u64);
        let mut row = vec![0.0; self.width];
        for (at, &class) in classes.iter().enumerate() {
            if class == self.spec.ignore_index {
                continue;
            }
            if !usize::try_from(class).is_ok_and(|class| class < self.width) {
                return Err(Error::Label { record, label: class, classes: self.width });
            }
            let (begin, step) = if self.classes_first { (at, classes.len()) } else { (at * self.width, 1) };
            row.iter_mut().enumerate().for_each(|(class, value)| *value = outputs[begin + class * step]);
            let label = [class];
            let target = match self.spec.loss {
                Loss::Nll => Target::Nll(&label),
                _ => Target::CrossEntropy(&label).smoothed(self.spec.label_smoothing),
            };
            sum += target.loss(0, &row);
            count += 1;
        }
        Ok(if count == 0 { 0.0 } else { sum / count as f64 })
    }
}

#[cfg(test)]
mod tests {
    use data::predictions::PREDICTION;
    use proto::column::{ColumnSpec, ElementType};
    use proto::tensor::Values;

    use super::*;

    fn spec(loss: &str, label_smoothing: f64) -> ModelSpec {
        let spec =
            serde_json::json!({ "builtin": "linear", "loss": loss, "label_smoothing": label_smoothing });
        serde_json::from_value(spec).unwrap()
    }

    fn outputs(shape: &[usize], samples: usize, values: &[f32]) -> Column {
        Column::floats(PREDICTION, shape, samples, values)
    }

    /// Returns a batch whose records have several classes each.
    fn several(classes: &[i64], samples: usize) -> Batch {
        let own = classes.len() / samples;
        let mut labels = Column::with_capacity(ColumnSpec::fixed("labels", ElementType::I64, [own]), samples);
        for record in classes.chunks_exact(own) {
            labels.push(&record.iter().flat_map(|class| class.to_le_bytes()).collect::<Vec<_>>());
        }
        let nothing = Batch::of(&vec![0.0; samples], &[1], &Values::I64(vec![0; samples]), samples);
        Batch { labels, ..nothing }
    }

    fn close(found: &[f64], expected: &[f64]) {
        let near = |(found, expected): (&f64, &f64)| (found - expected).abs() < 1e-12;
        assert!(
            found.len() == expected.len() && found.iter().zip(expected).all(near),
            "{found:?}, {expected:?}"
        );
    }

    #[test]
    fn each_record_has_the_loss_that_it_has_alone() {
        let classes = Batch::of(&[0.0; 2], &[1], &Values::I64(vec![0, 1]), 2);
        let values = Batch::of(&[0.0; 2], &[1], &Values::F32(vec![1.0, 0.0, 1.0, 0.0]), 2);
        let of = |loss: &str, smoothing: f64, batch: &Batch| {
            losses(&spec(loss, smoothing), batch, &outputs(&[2], 2, &[0.0, 0.0, 2.0, 0.0])).unwrap()
        };
        let wrong = (2f64.exp() + 1.0).ln();
        close(&of("cross_entropy", 0.0, &classes), &[2f64.ln(), wrong]);
        close(&of("cross_entropy", 0.5, &classes), &[2f64.ln(), wrong - 0.5]);
        close(&of("nll", 0.0, &classes), &[0.0, 0.0]);
        close(&of("mse", 0.0, &values), &[0.5, 0.5]);
        let first = 2f64.ln();
        let second = f64::midpoint((-2f64).exp().ln_1p(), 2f64.ln());
        close(&of("bce_with_logits", 0.0, &values), &[first, second]);
    }

    #[test]
    fn several_classes_have_their_mean_wherever_the_outputs_have_the_classes() {
        let batch = several(&[0, 2, -100, 1, -100, -100], 2);
        let last = [0.0, 1.0, 2.0, 0.5, 0.5, 3.0, 9.0, 9.0, 9.0, 0.1, 0.2, 0.3, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0];
        let mut first = [0.0; 18];
        for (record, at, class) in
            (0..2).flat_map(|r| (0..3).flat_map(move |a| (0..3).map(move |c| (r, a, c))))
        {
            first[9 * record + 3 * class + at] = last[9 * record + 3 * at + class];
        }
        let loss =
            |row: &[f64], class: usize| row.iter().map(|value| value.exp()).sum::<f64>().ln() - row[class];
        let expected = [
            f64::midpoint(loss(&[0.0, 1.0, 2.0], 0), loss(&[0.5, 0.5, 3.0], 2)),
            loss(&[f64::from(0.1f32), f64::from(0.2f32), f64::from(0.3f32)], 1),
        ];
        // With three places and three classes both orders fit, so a fourth class tells them apart.
        let wide = |values: &[f32], first: bool| -> Vec<f32> {
            let lowest = [f32::MIN; 3];
            values
                .chunks_exact(9)
                .flat_map(|record| match first {
                    true => [record, &lowest].concat(),
                    false => record.chunks_exact(3).flat_map(|row| [row, &lowest[..1]].concat()).collect(),
                })
                .collect()
        };
        let spec = spec("cross_entropy", 0.0);
        close(&losses(&spec, &batch, &outputs(&[3, 4], 2, &wide(&last, false))).unwrap(), &expected);
        close(&losses(&spec, &batch, &outputs(&[4, 3], 2, &wide(&first, true))).unwrap(), &expected);
        let said = losses(&spec, &batch, &outputs(&[3, 3], 2, &last)).unwrap_err().to_string();
        assert!(said.contains("[classes, [3]] or [[3], classes]") && said.contains("[3, 3]"), "{said}");
        let ignored = several(&[-100; 3], 1);
        close(&losses(&spec, &ignored, &outputs(&[3, 4], 1, &[0.0; 12])).unwrap(), &[0.0]);
        let said = losses(&spec, &several(&[0, 4, 1], 1), &outputs(&[3, 4], 1, &[0.0; 12]));
        assert!(said.unwrap_err().to_string().contains("label 4 is outside 0..4"));
    }

    #[test]
    fn outputs_and_losses_that_do_not_fit_are_refused() {
        let batch = Batch::of(&[0.0; 2], &[1], &Values::I64(vec![0, 1]), 2);
        let said =
            |loss: &str, found: &Column| losses(&spec(loss, 0.0), &batch, found).unwrap_err().to_string();
        assert!(said("cross_entropy", &outputs(&[2], 1, &[0.0; 2])).contains("f32 outputs for 2 records"));
        assert!(said("cross_entropy", &outputs(&[1], 2, &[0.0; 2])).contains("label 1 is outside 0..1"));
        assert!(said("module", &outputs(&[2], 2, &[0.0; 4])).contains("a script that returns its loss"));
    }
}
