//! The records of one data set of a job: all files one after the other, for random access.

use std::path::Path;
use std::sync::Arc;

use proto::spec::{DataSet, JobSpec, Normalize, Records};
use proto::tensor::Values;

use crate::batch::Batch;
use crate::cache;
use crate::error::{Error, Result, wrong};
use crate::observer::Observer;
use crate::table::Table;

/// The records of one data set of a job, for random access.
#[derive(Debug)]
pub struct Dataset {
    pub(crate) tables: Vec<Arc<Table>>,
    /// Number of each table's first record over all files.
    starts: Vec<u64>,
    records: Records,
    shape: Vec<usize>,
    /// Values of one label. `None`: labels are classes.
    label_width: Option<usize>,
    label_range: Option<(i64, i64)>,
    normalize: Normalize,
}

impl Dataset {
    /// Reads the files of a data set, below `root` if given. Files that another data set of this
    /// process has open are shared. The call reads whole files and blocks.
    ///
    /// # Errors
    /// The job has no such set, or a file is missing, malformed, or does not fit the specification
    /// or the other files.
    pub fn open(spec: &JobSpec, set: DataSet, root: Option<&Path>) -> Result<Arc<Self>> {
        Self::open_observed(spec, set, root, &())
    }

    /// Reads the files of a data set like [`open`](Self::open), and reports the progress of the
    /// reading to `observer`.
    ///
    /// # Errors
    /// Those of [`open`](Self::open).
    pub fn open_observed(
        spec: &JobSpec,
        set: DataSet,
        root: Option<&Path>,
        observer: &dyn Observer,
    ) -> Result<Arc<Self>> {
        let source = spec.data.files_of(set).ok_or(Error::NoSuchSet(set))?;
        let files = spec.data.files(source).ok_or(Error::NoSuchSet(set))?;
        let open = |file| cache::open(&spec.data, files, file, root, observer);
        let tables: Vec<_> = (0..files.features.len()).map(open).collect::<Result<_>>()?;
        let Some(first) = tables.first() else { return Err(Error::NoSuchSet(set)) };

        let (shape, first_width) = (first.shape(spec.data.shape.as_deref())?, first.label_width(None)?);
        let mut label_range: Option<(i64, i64)> = None;
        for table in &tables {
            if table.features.record_shape() != first.features.record_shape() {
                let (found, expected) = (table.features.record_shape(), first.features.record_shape());
                let first = first.path.display();
                return wrong(
                    &table.path,
                    format!(
                        "records of shape {found:?}, those of {first} have {expected:?}; all files of a set must \
                         agree: convert or leave out those that differ"
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
            records: records.ok_or(Error::NoSuchSet(set))?,
            shape,
            label_width: (!spec.model.loss.wants_classes()).then_some(first_width),
            label_range,
            normalize: spec.data.normalize,
            tables,
        }))
    }

    /// Checks that each file has as many records as when the job was indexed, because the order of
    /// records depends on the counts.
    ///
    /// # Errors
    /// The first file with another count.
    pub fn check_records(&self, indexed: &[u64]) -> Result<()> {
        for (table, &expected) in self.tables.iter().zip(indexed) {
            let found = table.features.records() as u64;
            if found != expected {
                return Err(Error::Records { path: table.path.clone(), expected, found });
            }
        }
        Ok(())
    }

    /// Returns the number of records.
    pub const fn len(&self) -> u64 {
        self.records.len()
    }

    /// Returns false: a data set has at least one record.
    pub const fn is_empty(&self) -> bool {
        self.records.is_empty()
    }

    /// Returns the shape of one record's features.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Returns the smallest and the largest class in the files, or `None` if labels are no classes.
    pub const fn label_range(&self) -> Option<(i64, i64)> {
        self.label_range
    }

    /// Returns the records with these numbers within this data set, in the order of `records`.
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

    /// Returns the file that holds a record, and the record's number within it.
    fn locate(&self, record: u64) -> (&Table, usize) {
        let file = self.starts.partition_point(|&start| start <= record) - 1;
        (&self.tables[file], (record - self.starts[file]) as usize)
    }
}
