//! A batch: some records of a data set, as the input of a model.

use std::sync::Arc;

use proto::column::{ColumnSpec, ElementType};
use proto::spec::{FEATURES, LABELS};
use proto::tensor::{DeviceMemory, Values};

use crate::column::{Aligned, Column, Memory};

/// Some records of a data set, as the input of a model.
#[derive(Clone, Debug, PartialEq)]
pub struct Batch {
    /// Number of records `n`.
    pub samples: usize,
    /// Inputs of the model, each `[n, shape..]` row-major. A column is named after the argument
    /// that takes it. An input with a copy in `placed` may be bytes where the model takes floats:
    /// the copy has the floats.
    pub inputs: Vec<Column>,
    /// Labels `[n, shape..]`: classes as i64, or values as f32.
    pub labels: Column,
    /// Number of each record over all files of its data set, for errors.
    pub records: Vec<u64>,
    /// Copies of inputs in memory of the device that computes.
    pub placed: DeviceValues,
}

/// Copies of a batch's inputs in memory of a device, in the order of the inputs. All are equal:
/// they say what the inputs say.
#[derive(Clone, Debug, Default)]
pub struct DeviceValues(Vec<Option<Arc<dyn DeviceMemory>>>);

impl DeviceValues {
    /// Keeps copies of the inputs of a batch, each of which may lack one.
    pub fn new(copies: Vec<Option<Arc<dyn DeviceMemory>>>) -> Self {
        Self(copies)
    }

    /// Returns the copy of an input by its index. `None`: it lies on the host alone.
    pub fn get(&self, index: usize) -> Option<&Arc<dyn DeviceMemory>> {
        self.0.get(index)?.as_ref()
    }
}

impl PartialEq for DeviceValues {
    fn eq(&self, _: &Self) -> bool {
        true
    }
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
        Self {
            samples,
            inputs: vec![features],
            labels,
            records: (0..samples as u64).collect(),
            placed: DeviceValues::default(),
        }
    }

    /// Returns a batch of one record of this one: the record with this index.
    ///
    /// # Panics
    /// If the batch has no such record, or a column is ragged.
    #[must_use]
    pub fn one(&self, index: usize) -> Self {
        let one = |column: &Column| {
            let width = column.bytes().len() / self.samples;
            let mut alone = Column::with_capacity(column.spec().clone(), 1);
            alone.push(&column.bytes()[index * width..][..width]);
            alone
        };
        let inputs = self.inputs.iter().map(one).collect();
        Self {
            samples: 1,
            inputs,
            labels: one(&self.labels),
            records: vec![self.records[index]],
            placed: DeviceValues::default(),
        }
    }

    /// Makes copies of the batch share its values, instead of each having its own.
    #[must_use]
    pub fn shared(mut self) -> Self {
        self.inputs = self.inputs.into_iter().map(Column::shared).collect();
        self.labels = self.labels.shared();
        self
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_record_has_its_own_part_of_every_column() {
        let labels = Values::F32(vec![7.0, 8.0, 9.0]);
        let batch = Batch::of(&[0.0, 1.0, 2.0, 3.0, 4.0, 5.0], &[2], &labels, 3);
        let one = Batch { records: vec![40, 41, 42], ..batch }.one(1);
        assert_eq!((one.samples, one.features(), &*one.records), (1, &[2.0, 3.0][..], &[41][..]));
        assert_eq!(one.values(), Some(&[8.0][..]));
    }
}
