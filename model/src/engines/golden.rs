//! Metrics equal those of scikit-learn and PyTorch. `tests/golden/metrics.py` wrote the numbers.

use data::Batch;
use data::column::{Aligned, Column, Element, Memory};
use proptest::prelude::*;
use proto::column::ColumnSpec;
use proto::metrics::{Evaluation, Merger, Metric};
use proto::spec::Loss;
use serde::Deserialize;

use super::loss::Target;

/// One set of predictions, and what the references make of it.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct Case {
    pub(super) name: String,
    pub(super) loss: Loss,
    /// Shape of the outputs.
    pub(super) shape: Vec<usize>,
    pub(super) outputs: Vec<f32>,
    labels: Vec<f64>,
    labels_shape: Vec<usize>,
    pub(super) values: serde_json::Map<String, serde_json::Value>,
    /// Class that does not count.
    pub(super) ignored: Option<i64>,
}

/// Reads the cases.
pub(super) fn cases() -> Vec<Case> {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden/metrics.json");
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

/// Outputs of a network with smoothed or mixed labels, and the loss that PyTorch defines.
/// `tests/golden/soft_labels.py` wrote it.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct Soft {
    pub(super) classes: usize,
    pub(super) label_smoothing: f64,
    /// Class that does not count, in a record of several labels.
    pub(super) ignored: Option<i64>,
    /// Outputs `[.., classes]`.
    pub(super) outputs: Vec<f32>,
    /// Classes, as many as outputs divided by `classes`.
    labels: Option<Vec<i64>>,
    /// Probabilities, as many as outputs.
    mixed: Option<Vec<f32>>,
    pub(super) loss: f64,
    /// Gradient of the loss with respect to the outputs.
    pub(super) gradient: Vec<f64>,
    /// Loss without smoothing.
    pub(super) plain_loss: f64,
}

/// Reads the cases of smoothed and mixed labels.
pub(super) fn soft() -> Vec<Soft> {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden/soft_labels.json");
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

impl Soft {
    /// Returns the number of labels.
    pub(super) fn samples(&self) -> usize {
        self.outputs.len() / self.classes
    }

    /// Returns the labels as a batch without inputs: records of one label each, or one record of
    /// all labels if some do not count.
    pub(super) fn batch(&self) -> Batch {
        let samples = if self.ignored.is_some() { 1 } else { self.samples() };
        let labels = match (&self.labels, &self.mixed) {
            (Some(labels), _) if self.ignored.is_some() => column(&[1, self.samples()], labels),
            (Some(labels), _) => column(&[samples], labels),
            (None, mixed) => column(&[samples, self.classes], mixed.as_deref().unwrap_or_default()),
        };
        Batch {
            samples,
            inputs: Vec::new(),
            labels,
            records: (0..samples as u64).collect(),
            placed: Default::default(),
        }
    }
}

fn column<T: Element>(shape: &[usize], values: &[T]) -> Column {
    let mut memory = Aligned::default();
    memory.extend(bytemuck::cast_slice(values));
    let spec = ColumnSpec::fixed("labels", T::DTYPE, &shape[1..]);
    Column::fixed(spec, shape[0], Memory::Owned(memory))
}

impl Case {
    /// Returns the metrics of the case.
    pub(super) fn metrics(&self) -> Vec<Metric> {
        self.values.keys().map(|name| name.parse().unwrap()).collect()
    }

    /// Returns records `[begin, end)` as a batch without inputs, and their outputs.
    pub(super) fn part(&self, begin: usize, end: usize) -> (Batch, &[f32]) {
        let records = self.shape[0];
        let (width, each) = (self.outputs.len() / records, self.labels.len() / records);
        let labels = &self.labels[begin * each..end * each];
        let mut shape = self.labels_shape.clone();
        shape[0] = end - begin;
        let labels = if self.loss.wants_classes() {
            column(&shape, &labels.iter().map(|&label| label as i64).collect::<Vec<_>>())
        } else {
            column(&shape, &labels.iter().map(|&label| label as f32).collect::<Vec<_>>())
        };
        let records = (begin as u64..end as u64).collect();
        let batch =
            Batch { samples: end - begin, inputs: Vec::new(), labels, records, placed: Default::default() };
        (batch, &self.outputs[begin * width..end * width])
    }

    /// Compares the metrics of all records.
    pub(super) fn check(&self, found: &Evaluation) {
        let values = found.values();
        for (metric, expected) in &self.values {
            let name = format!("{}: {metric}", self.name);
            if let Some(rows) = expected.as_array() {
                let matrix = found.confusion().expect(&name);
                let found: Vec<_> = matrix.rows().map(|row| serde_json::json!(row)).collect();
                assert_eq!(&found, rows, "{name}");
                continue;
            }
            let (value, expected) = (values[metric], expected.as_f64().unwrap());
            let error = (value - expected).abs();
            assert!(error <= 1e-12 * expected.abs().max(1.0), "{name}: {value}, expected {expected}");
        }
    }
}

/// Evaluates a part of a case with the pure-Rust engine's code.
fn evaluate(case: &Case, begin: usize, end: usize) -> Evaluation {
    let (batch, outputs) = case.part(begin, end);
    let width = outputs.len() / (end - begin);
    let target = Target::new(case.loss, &batch, width).unwrap();
    target.evaluate(case.loss, &case.metrics(), outputs, width).unwrap()
}

#[test]
fn the_pure_engine_has_the_metrics_of_scikit_learn() {
    let cases: Vec<_> = cases().into_iter().filter(|case| case.ignored.is_none()).collect();
    assert!(cases.len() >= 9);
    let metrics: std::collections::BTreeSet<_> = cases.iter().flat_map(Case::metrics).collect();
    for metric in Metric::ALL {
        assert!(metrics.contains(&metric), "{metric} is not compared");
    }
    for case in cases {
        case.check(&evaluate(&case, 0, case.shape[0]));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(30))]

    #[test]
    fn any_data_shards_have_the_metrics_of_the_whole(size in 1usize..30, reverse in any::<bool>()) {
        for case in cases().into_iter().filter(|case| case.ignored.is_none()) {
            let records = case.shape[0];
            let mut shards: Vec<_> = (0..records).step_by(size).enumerate().collect();
            let mut merger = Merger::new(shards.len());
            if reverse {
                shards.reverse();
            }
            for (at, begin) in shards {
                merger.add(at, evaluate(&case, begin, records.min(begin + size))).unwrap();
            }
            case.check(&merger.finish().unwrap());
        }
    }
}
