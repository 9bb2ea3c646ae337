//! The worst records of a data shard: those with the largest losses, with their labels and outputs.

use data::{Batch, Column, Dataset};
use model::engines::per_record;
use model::{Evaluation, Model};
use proto::pb;
use proto::spec::{JobSpec, Loss, ModelSpec};
use proto::worst::{Label, Preview, RecordLoss, Worst};

use crate::error::Result;

/// Collects the worst records while batches are evaluated.
pub(crate) struct WorstRecords<'a> {
    spec: &'a ModelSpec,
    /// Whether a program drives the model. Only its loop knows the losses of records.
    is_driven: bool,
    found: Worst,
}

impl<'a> WorstRecords<'a> {
    /// Creates the collection of a job. `None`: the job lists no records.
    pub(crate) fn of(spec: &'a JobSpec) -> Option<Self> {
        let found = spec.worst();
        (found.most() > 0).then(|| Self { spec: &spec.model, is_driven: spec.is_driven(), found })
    }

    /// Evaluates a batch with the loaded weights, and notes its worst records.
    pub(crate) fn evaluate(&mut self, model: &mut dyn Model, batch: &Batch) -> Result<Evaluation> {
        if self.is_driven {
            let (evaluation, records) = model.evaluate_and_list(batch, self.found.most())?;
            self.found.extend(records);
            return Ok(evaluation);
        }
        if self.spec.loss == Loss::Module {
            return self.evaluate_script(model, batch);
        }
        let (evaluation, outputs) = model.evaluate_and_predict(batch)?;
        let losses = per_record::losses(self.spec, batch, &outputs)?;
        let width = outputs.spec().shape.iter().product();
        // `losses` has checked them.
        let rows = outputs.values::<f32>().unwrap_or_default().chunks_exact(width);
        for (at, (loss, row)) in losses.into_iter().zip(rows).enumerate() {
            self.note(batch, at, loss, row);
        }
        Ok(evaluation)
    }

    /// Evaluates a batch with a script that computes the mean loss of a batch: for the loss of a
    /// record it gets the record alone. Its outputs may mean anything, so none are noted.
    fn evaluate_script(&mut self, model: &mut dyn Model, batch: &Batch) -> Result<Evaluation> {
        for at in 0..batch.samples {
            let loss = model.evaluate(&batch.one(at))?.loss_sum;
            self.note(batch, at, loss, &[]);
        }
        Ok(model.evaluate(batch)?)
    }

    fn note(&mut self, batch: &Batch, at: usize, loss: f64, outputs: &[f32]) {
        let record = batch.records[at];
        if self.found.takes(record, loss) {
            self.found.add(RecordLoss::new(record, loss, label(&batch.labels, at), outputs));
        }
    }

    /// Returns the worst records for the report.
    pub(crate) fn finish(self) -> Vec<pb::RecordLoss> {
        self.found.into_records().into_iter().map(pb::RecordLoss::from).collect()
    }
}

/// Adds previews to the first `previews` records of a list that have none.
///
/// # Errors
/// A file of the data is damaged or has changed.
pub(crate) fn show(worst: &mut [pb::RecordLoss], data: &Dataset, previews: usize) -> Result<()> {
    let first = previews.min(worst.len());
    let shown = &mut worst[..first];
    let records: Vec<_> = shown.iter().map(|found| found.record).collect();
    for (found, preview) in shown.iter_mut().zip(data.previews(&records)?) {
        // The loop of a program may have made one.
        if found.preview.is_none() {
            found.preview = preview.map(|Preview { png, text }| pb::Preview { png, text });
        }
    }
    Ok(())
}

/// Returns the label of a record.
fn label(labels: &Column, at: usize) -> Label {
    let width = labels.spec().shape.iter().product::<usize>();
    match (labels.values::<i64>(), labels.values::<f32>()) {
        (Some(classes), _) => Label::Classes(classes[at * width..][..width].to_vec()),
        (None, Some(values)) => Label::Values(values[at * width..][..width].to_vec()),
        (None, None) => Label::Long,
    }
}

#[cfg(test)]
mod tests {
    use model::Gradients;
    use proto::tensor::{TensorSpec, Values};

    use super::*;

    /// A script whose loss is the mean of its labels.
    struct Script;

    impl Model for Script {
        fn tensors(&self) -> Vec<TensorSpec> {
            Vec::new()
        }

        fn initial(&mut self, _: u64) -> model::Result<Vec<Values>> {
            Ok(Vec::new())
        }

        fn load(&mut self, _: &[Values]) -> model::Result<()> {
            Ok(())
        }

        fn gradients(&mut self, _: &Batch, _: u64) -> model::Result<Gradients> {
            Ok(Gradients { loss: 0.0, values: Vec::new() })
        }

        fn evaluate(&mut self, batch: &Batch) -> model::Result<Evaluation> {
            let loss_sum = batch.values().into_iter().flatten().map(|&label| f64::from(label)).sum();
            Ok(Evaluation { samples: batch.samples as u64, loss_sum, ..Evaluation::default() })
        }

        fn evaluate_and_list(
            &mut self,
            batch: &Batch,
            most: usize,
        ) -> model::Result<(Evaluation, Vec<RecordLoss>)> {
            let mut found = Worst::new(most).with_previews(most);
            for (&record, &loss) in batch.records.iter().zip(batch.values().unwrap_or_default()) {
                let preview = Some(Preview { text: format!("record {record}"), ..Preview::default() });
                let told = RecordLoss::new(record, f64::from(loss), Label::Long, &[]);
                found.add(RecordLoss { preview, ..told });
            }
            Ok((self.evaluate(batch)?, found.into_records()))
        }
    }

    fn spec(model: &str) -> JobSpec {
        JobSpec::from_json(&format!(
            r#"{{
                "name": "x", "epochs": 1, "model": {{ {model} }}, "batch": {{ "micro": 4 }},
                "data": {{ "format": "csv", "train": {{ "files": ["t.csv"] }}, "validation_fraction": 0.5 }},
                "optimizer": {{ "kind": "sgd", "learning_rate": 0.1 }}, "evaluation": {{ "worst": 2 }}
            }}"#
        ))
        .unwrap()
    }

    #[test]
    fn a_script_that_computes_its_loss_gets_each_record_alone() {
        let spec = spec(r#""script": "x.pt", "loss": "module""#);
        let mut worst = WorstRecords::of(&spec).unwrap();
        let batch = Batch::of(&[0.0; 3], &[1], &Values::F32(vec![0.5, 2.0, 1.0]), 3);
        assert_eq!(worst.evaluate(&mut Script, &batch).unwrap().loss_sum, 3.5);
        let found: Vec<_> = worst.finish().into_iter().map(|found| (found.record, found.loss)).collect();
        assert_eq!(found, [(1, 2.0), (2, 1.0)]);
    }

    #[test]
    fn a_loop_tells_the_losses_of_its_records_and_their_previews() {
        let spec = spec(r#""builtin": "python", "loss": "module""#);
        let mut worst = WorstRecords::of(&spec).unwrap();
        for (first, labels) in [(0, [0.5, 2.0, 1.0]), (3, [0.25, 1.5, 0.0])] {
            let batch = Batch::of(&[0.0; 3], &[1], &Values::F32(labels.to_vec()), 3);
            let batch = Batch { records: (first..first + 3).collect(), ..batch };
            assert_eq!(worst.evaluate(&mut Script, &batch).unwrap().samples, 3);
        }
        let shown = |found: pb::RecordLoss| (found.record, found.loss, found.preview.unwrap().text);
        let found: Vec<_> = worst.finish().into_iter().map(shown).collect();
        assert_eq!(found, [(1, 2.0, "record 1".to_owned()), (4, 1.5, "record 4".to_owned())]);
    }

    #[test]
    fn a_network_without_outputs_is_refused_with_the_setting() {
        let spec = spec(r#""script": "x.pt", "loss": "mse""#);
        let batch = Batch::of(&[0.0], &[1], &Values::F32(vec![0.5]), 1);
        let error = WorstRecords::of(&spec).unwrap().evaluate(&mut Script, &batch).unwrap_err().to_string();
        assert!(
            error.contains("implement `Model::predict`") && error.contains("evaluation.worst"),
            "{error}"
        );
    }
}
