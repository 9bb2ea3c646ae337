//! A batch: some records of a data set, as the input of a model.

use proto::tensor::Values;

/// Some records of a data set, as the input of a model.
#[derive(Clone, Debug, PartialEq)]
pub struct Batch {
    /// Number of records `n`.
    pub samples: usize,
    /// Features, `[n, shape..]` row-major.
    pub features: Vec<f32>,
    /// Shape of one record's features.
    pub shape: Vec<usize>,
    /// Labels: classes as i64 `[n]`, or values as f32 `[n, k]`.
    pub labels: Values,
    /// Number of each record over all files of its data set, for errors.
    pub records: Vec<u64>,
}
