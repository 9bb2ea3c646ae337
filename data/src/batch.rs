//! A batch: some records of a data set, as the input of a model.

use proto::column::{ColumnSpec, ElementType};
use proto::spec::{FEATURES, LABELS};
use proto::tensor::Values;

use crate::column::{Aligned, Column, Memory};

/// Some records of a data set, as the input of a model.
#[derive(Clone, Debug, PartialEq)]
pub struct Batch {
    /// Number of records `n`.
    pub samples: usize,
    /// Inputs of the model, each `[n, shape..]` row-major. A column is named after the argument
    /// that takes it.
    pub inputs: Vec<Column>,
    /// Labels `[n, shape..]`: classes as i64, or values as f32.
    pub labels: Column,
    /// Number of each record over all files of its data set, for errors.
    pub records: Vec<u64>,
}

impl Batch {
    /// Returns a batch of the only input `features`, f32 `[samples, shape..]`, and of labels:
    /// classes `[samples]`, or values `[samples, k]`. Its records have the numbers from 0. For
    /// tests and programs that make their own batches.
    ///
    /// # Panics
    /// If a length does not fit.
    pub fn of(features: &[f32], shape: &[usize], labels: &Values, samples: usize) -> Self {
        let column = |spec: ColumnSpec, bytes: &[u8]| {
            let mut memory = Aligned::with_capacity(bytes.len());
            memory.extend(bytes);
            Column::fixed(spec, samples, Memory::Owned(memory))
        };
        let features =
            column(ColumnSpec::fixed(FEATURES, ElementType::F32, shape), bytemuck::cast_slice(features));
        let labels = match labels {
            Values::I64(classes) => {
                column(ColumnSpec::fixed(LABELS, ElementType::I64, []), bytemuck::cast_slice(classes))
            }
            values => {
                let width = values.len() / samples.max(1);
                column(ColumnSpec::fixed(LABELS, ElementType::F32, [width]), values.bytes())
            }
        };
        Self { samples, inputs: vec![features], labels, records: (0..samples as u64).collect() }
    }

    /// Returns the values of the only input, f32 `[n, shape..]`; nothing if the job has other
    /// inputs. A network that takes one such input checks that when it is built.
    pub fn features(&self) -> &[f32] {
        match self.inputs.as_slice() {
            [features] if features.spec().dtype == ElementType::F32 => features.values().unwrap_or_default(),
            _ => &[],
        }
    }

    /// Returns the labels as classes. `None`: they are values.
    pub fn classes(&self) -> Option<&[i64]> {
        self.labels.values()
    }

    /// Returns the labels as values. `None`: they are classes.
    pub fn values(&self) -> Option<&[f32]> {
        self.labels.values()
    }
}
