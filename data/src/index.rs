//! What a job learns of a data file before it trains: the number of its records, their shape, and its checksum.

use std::path::Path;

use proto::spec::{DataSet, JobSpec};

use crate::cache;
use crate::error::{Error, Result};
use crate::observer::Observer;
use crate::table::Content;

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

/// Looks at file (pair) number `file` of a data set's own files, below `root` when given. Reads the whole file, so call
/// it where blocking is fine.
///
/// # Errors
/// The file is missing, is not what the format says, or does not fit the specification.
pub fn index(spec: &JobSpec, set: DataSet, file: usize, root: Option<&Path>) -> Result<Indexed> {
    index_observed(spec, set, file, root, &())
}

/// As [`index`], and tells `observer` how the reading gets on.
///
/// # Errors
/// As [`index`].
pub fn index_observed(
    spec: &JobSpec,
    set: DataSet,
    file: usize,
    root: Option<&Path>,
    observer: &dyn Observer,
) -> Result<Indexed> {
    let files = spec.data.files(set).ok_or(Error::NoSuchSet(set))?;
    let table = cache::open(&spec.data, files, file, root, observer)?;
    let labels = match spec.model.loss.wants_classes() {
        true => table.classes()?,
        false => table.label_width(None).map(|_| None)?,
    };
    let shape = table.shape(spec.data.shape.as_deref())?;
    Ok(Indexed { records: table.features.records() as u64, shape, labels, content: table.content })
}
