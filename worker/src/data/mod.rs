//! From files to batches: a data set is the records of its files in order; a batch is any list of them.
//!
//! All files of a data set are in memory, once per process, as compact as on disk ([`array`], [`cache`]); every format is
//! one file here that turns a file's bytes into arrays. What a record's features and labels are depends only on the
//! specification and the files, never on who reads them or with which others.

mod array;
mod cache;
mod csv;
mod idx;
mod npy;
mod table;
#[cfg(test)]
mod tests;

use std::path::Path;
use std::sync::Arc;

use proto::spec::{DataSet, JobSpec, Normalize, Records};
use proto::tensor::Values;

use self::table::Table;
use crate::error::{Error, Result};
use crate::progress::Progress;

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

/// What one file (pair) holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Indexed {
    /// Number of records.
    pub records: u64,
    /// Shape of one record's features.
    pub shape: Vec<usize>,
    /// Smallest and largest class; `None` when labels are no classes or there are no records.
    pub labels: Option<(i64, i64)>,
    /// What tells its content from another.
    pub content: Content,
}

/// What tells the content of one file (pair) from another: of the features, then of the labels, without compression.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Content {
    /// Its size.
    pub bytes: u64,
    /// Its CRC-32C.
    pub crc32c: u32,
}

impl Content {
    fn and(self, bytes: &[u8]) -> Self {
        Self { bytes: self.bytes + bytes.len() as u64, crc32c: crc32c::crc32c_append(self.crc32c, bytes) }
    }
}

/// Looks at file (pair) number `file` of a data set's own files, below `root` when given. Reads the whole file, so call
/// it where blocking is fine.
///
/// # Errors
/// The file is missing, is not what the format says, or does not fit the specification.
pub fn index(spec: &JobSpec, set: DataSet, file: usize, root: Option<&Path>) -> Result<Indexed> {
    index_saying(spec, set, file, root, &Progress::default())
}

/// The same for a lease: says how it gets on.
pub(crate) fn index_saying(
    spec: &JobSpec,
    set: DataSet,
    file: usize,
    root: Option<&Path>,
    progress: &Progress,
) -> Result<Indexed> {
    let files = spec.data.files(set).ok_or_else(|| no_such_set(set))?;
    let table = Table::open(&spec.data, files, file, root, progress)?;
    let labels = match spec.model.loss.wants_classes() {
        true => table.classes()?,
        false => table.label_width(None).map(|_| None)?,
    };
    let shape = shape(spec, &table)?;
    Ok(Indexed { records: table.features.records() as u64, shape, labels, content: table.content })
}

/// The records of one data set of a job, for random access.
#[derive(Debug)]
pub struct Dataset {
    tables: Vec<Arc<Table>>,
    /// For each table, the number of its first record over all files.
    starts: Vec<u64>,
    records: Records,
    shape: Vec<usize>,
    /// Values of one label; `None`: it is a class.
    label_width: Option<usize>,
    label_range: Option<(i64, i64)>,
    normalize: Normalize,
}

impl Dataset {
    /// Reads the files of a data set, below `root` when given, or finds them in memory: those that another data set of
    /// this process has open are shared. Reads whole files, so call it where blocking is fine.
    ///
    /// # Errors
    /// The job has no such set; a file is missing, is not what the format says, or does not fit the specification or the
    /// other files.
    pub fn open(spec: &JobSpec, set: DataSet, root: Option<&Path>) -> Result<Arc<Self>> {
        Self::open_saying(spec, set, root, &Progress::default())
    }

    /// The same for a lease: says how it gets on.
    pub(crate) fn open_saying(
        spec: &JobSpec,
        set: DataSet,
        root: Option<&Path>,
        progress: &Progress,
    ) -> Result<Arc<Self>> {
        let source = spec.data.files_of(set).ok_or_else(|| no_such_set(set))?;
        let files = spec.data.files(source).ok_or_else(|| no_such_set(set))?;
        let open = |file| Table::open(&spec.data, files, file, root, progress);
        let tables: Vec<_> = (0..files.features.len()).map(open).collect::<Result<_>>()?;
        let Some(first) = tables.first() else { return Err(no_such_set(set)) };

        let (shape, first_width) = (shape(spec, first)?, first.label_width(None)?);
        let mut label_range: Option<(i64, i64)> = None;
        for table in &tables {
            if table.features.record_shape() != first.features.record_shape() {
                let (found, expected) = (table.features.record_shape(), first.features.record_shape());
                let first = first.path.display();
                return wrong(
                    &table.path,
                    format!(
                        "records of shape {found:?}, those of {first} have {expected:?}; all files of a set must agree"
                    ),
                );
            }
            if spec.model.loss.wants_classes() {
                label_range = [label_range, table.classes()?]
                    .into_iter()
                    .flatten()
                    .reduce(|a, b| (a.0.min(b.0), a.1.max(b.1)));
            } else {
                table.label_width(Some(first_width))?;
            }
        }
        let in_files: Vec<u64> = tables.iter().map(|table| table.features.records() as u64).collect();
        let records = spec.data.records(set, &in_files, spec.seed).map_err(Error::Specification)?;
        let starts = in_files.iter().scan(0, |next, &records| Some(std::mem::replace(next, *next + records)));
        Ok(Arc::new(Self {
            starts: starts.collect(),
            records: records.ok_or_else(|| no_such_set(set))?,
            shape,
            label_width: (!spec.model.loss.wants_classes()).then_some(first_width),
            label_range,
            normalize: spec.data.normalize,
            tables,
        }))
    }

    /// Each file of features with its number of records, in the order of the specification.
    pub(crate) fn files(&self) -> impl Iterator<Item = (&Path, u64)> {
        self.tables.iter().map(|table| (table.path.as_path(), table.features.records() as u64))
    }

    /// Number of records.
    pub const fn len(&self) -> u64 {
        self.records.len()
    }

    /// Never: a data set has at least one record.
    pub const fn is_empty(&self) -> bool {
        self.records.is_empty()
    }

    /// Shape of one record's features.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Smallest and largest class in the files; `None` when labels are no classes.
    pub const fn label_range(&self) -> Option<(i64, i64)> {
        self.label_range
    }

    /// The records with these numbers within this data set, in this order.
    ///
    /// # Errors
    /// There is no such record.
    pub fn batch(&self, records: impl IntoIterator<Item = u64>) -> Result<Batch> {
        let in_files = |record| {
            let exists = record < self.len();
            exists
                .then(|| self.records.in_files(record))
                .ok_or(Error::NoRecord { record, records: self.len() })
        };
        let records: Vec<u64> = records.into_iter().map(in_files).collect::<Result<_>>()?;
        let (samples, width) = (records.len(), self.shape.iter().product());
        let mut features = vec![0.0; samples * width];
        let Normalize { scale, mean, std } = self.normalize;
        for (&record, features) in records.iter().zip(features.chunks_exact_mut(width)) {
            let (table, row) = self.locate(record);
            table.features.read(row, features, |raw| (raw as f32 / scale - mean) / std);
        }
        let labels = match self.label_width {
            None => Values::I64(self.labels(&records, 1, |class| class as i64)),
            Some(width) => Values::F32(self.labels(&records, width, |value| value as f32)),
        };
        Ok(Batch { samples, features, shape: self.shape.clone(), labels, records })
    }

    fn labels<T: Copy + Default>(&self, records: &[u64], width: usize, convert: fn(f64) -> T) -> Vec<T> {
        let mut labels = vec![T::default(); records.len() * width];
        for (&record, labels) in records.iter().zip(labels.chunks_exact_mut(width)) {
            let (table, row) = self.locate(record);
            table.labels.read(row, labels, convert);
        }
        labels
    }

    /// The file that holds a record, and the record's number within it.
    fn locate(&self, record: u64) -> (&Table, usize) {
        let file = self.starts.partition_point(|&start| start <= record) - 1;
        (&self.tables[file], (record - self.starts[file]) as usize)
    }
}

/// The shape that a record's features are given.
fn shape(spec: &JobSpec, table: &Table) -> Result<Vec<usize>> {
    let found = table.features.record_shape();
    let Some(shape) = &spec.data.shape else { return Ok(found.to_vec()) };
    let values = shape.iter().try_fold(1usize, |values, &size| values.checked_mul(size));
    if values != Some(table.features.width()) {
        return wrong(
            &table.path,
            format!(
                "records of shape {found:?}, {} values, cannot be given data.shape = {shape:?}",
                table.features.width()
            ),
        );
    }
    Ok(shape.clone())
}

fn no_such_set(set: DataSet) -> Error {
    let reason =
        format!("the job has no {} data", if set == DataSet::Train { "training" } else { "validation" });
    Error::Engine { what: "data".to_owned(), reason }
}

fn data_error(path: &Path, reason: impl Into<String>) -> Error {
    Error::Data { path: path.to_owned(), reason: reason.into() }
}

fn wrong<T>(path: &Path, reason: impl Into<String>) -> Result<T> {
    Err(data_error(path, reason))
}
