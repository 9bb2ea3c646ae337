//! Some records of a data set, side by side: what a model is given.

use proto::tensor::Values;

/// Records side by side, as a model takes them.
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
    /// Where each record comes from: its number over all files of its data set, for errors.
    pub records: Vec<u64>,
}
