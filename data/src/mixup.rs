//! Mixup: each record of a batch mixed with the one before it, and its class with the other's
//! (Zhang et al. 2018), as torchvision's `MixUp` does it.
//!
//! ```text
//! share 0.75, records a b c  ->  0.75 a + 0.25 c,  0.75 b + 0.25 a,  0.75 c + 0.25 b
//! ```

use proto::spec::LABELS;

use crate::batch::{Batch, DeviceValues};
use crate::column::Column;
use crate::error::{Error, Result};

/// Mixes each record with the one before it, the first one with the last. Records keep `share` of
/// themselves. Labels become probabilities, f32 `[n, classes]`. All products and sums are those of
/// f32.
///
/// # Errors
/// An input is not f32, a record has several labels, or a label is none of the classes.
pub fn mixed(batch: Batch, share: f64, classes: usize) -> Result<Batch> {
    let wrong = |reason| Err(Error::Mixup(reason));
    let (own, other) = (share as f32, (1.0 - share) as f32);
    let samples = batch.samples;
    let mut inputs = Vec::with_capacity(batch.inputs.len());
    for input in &batch.inputs {
        let spec = input.spec();
        let Some(values) = input.values::<f32>() else {
            return wrong(format!(
                "input {spec} cannot be mixed, only f32 can; change its type by data.dtypes or a transform, or \
                 remove data.mixup"
            ));
        };
        let width = values.len() / samples.max(1);
        let mut mixed = Vec::with_capacity(values.len());
        for at in 0..samples {
            let before = (at + samples - 1) % samples;
            let pairs = values[at * width..][..width].iter().zip(&values[before * width..][..width]);
            mixed.extend(pairs.map(|(value, before)| before * other + value * own));
        }
        inputs.push(Column::floats(&spec.name, &spec.shape, samples, &mixed));
    }
    let Some(labels) = batch.classes().filter(|labels| labels.len() == samples) else {
        let found = batch.labels.spec();
        return wrong(format!("labels are {found}, expected one class for each record; remove data.mixup"));
    };
    let place = |at: usize| usize::try_from(labels[at]).ok().filter(|class| *class < classes);
    let mut probabilities = vec![0f32; samples * classes];
    for at in 0..samples {
        let before = (at + samples - 1) % samples;
        let (Some(class), Some(class_before)) = (place(at), place(before)) else {
            let at = if place(at).is_none() { at } else { before };
            return wrong(format!(
                "label {} of record {} is no class from 0 to {}, as data.mixup.classes = {classes} has it; mend the \
                 label, or raise classes",
                labels[at],
                batch.records[at],
                classes.saturating_sub(1)
            ));
        };
        let row = &mut probabilities[at * classes..][..classes];
        row[class_before] += other;
        row[class] += own;
    }
    let labels = Column::floats(LABELS, &[classes], samples, &probabilities);
    Ok(Batch { samples, inputs, labels, records: batch.records, placed: DeviceValues::default() })
}

#[cfg(test)]
mod tests {
    use proto::column::{ColumnSpec, ElementType};
    use proto::tensor::Values;
    use serde::Deserialize;

    use super::*;
    use crate::column::{Aligned, Memory};

    #[derive(Deserialize)]
    struct Case {
        share: f64,
        classes: usize,
        shape: Vec<usize>,
        features: Vec<f32>,
        labels: Vec<i64>,
        mixed_features: Vec<f32>,
        mixed_labels: Vec<f32>,
    }

    #[test]
    fn batches_are_those_of_the_definition() {
        #[derive(Deserialize)]
        struct File {
            batches: Vec<Case>,
        }
        let File { batches } = serde_json::from_str(include_str!("../../tests/golden/mixup.json")).unwrap();
        assert!(batches.len() > 3);
        for case in batches {
            let samples = case.labels.len();
            let batch = Batch::of(&case.features, &case.shape, &Values::I64(case.labels), samples);
            let found = mixed(batch.clone(), case.share, case.classes).unwrap();
            assert_eq!((found.samples, &found.records), (samples, &batch.records));
            assert_eq!(found.inputs[0].spec(), batch.inputs[0].spec());
            assert_eq!(found.features(), case.mixed_features, "share {}", case.share);
            assert_eq!(found.labels.spec(), &ColumnSpec::fixed(LABELS, ElementType::F32, [case.classes]));
            assert_eq!(found.values().unwrap(), case.mixed_labels, "share {}", case.share);
        }
    }

    #[test]
    fn a_batch_without_records_stays_without() {
        let batch = Batch::of(&[], &[2], &Values::I64(Vec::new()), 0);
        assert_eq!(mixed(batch, 0.5, 3).unwrap().labels.records(), 0);
    }

    #[test]
    fn what_cannot_be_mixed_is_named() {
        let error = |batch: Batch| mixed(batch, 0.5, 3).unwrap_err().to_string();
        let good = Batch::of(&[0.5, 1.0], &[1], &Values::I64(vec![0, 2]), 2);
        let mut memory = Aligned::with_capacity(16);
        memory.extend(bytemuck::cast_slice(&[1i64, 2]));
        let words = Column::fixed(ColumnSpec::fixed("word", ElementType::I64, []), 2, Memory::Owned(memory));
        let message = error(Batch { inputs: vec![words], ..good.clone() });
        assert!(message.contains("data.mixup: input `word` i64[] cannot be mixed"), "{message}");
        for (label, record) in [(3, 1), (-100, 1)] {
            let labels = Values::I64(vec![0, label]);
            let batch = Batch { records: vec![7, record], ..Batch::of(&[0.5, 1.0], &[1], &labels, 2) };
            let message = error(batch);
            assert!(message.contains(&format!("label {label} of record {record} is no class")), "{message}");
            assert!(message.contains("data.mixup.classes = 3"), "{message}");
        }
        let values = Batch::of(&[0.5, 1.0], &[1], &Values::F32(vec![0.5, 1.0]), 2);
        assert!(error(values).contains("labels are `labels` f32[1], expected one class for each record"));
    }
}
