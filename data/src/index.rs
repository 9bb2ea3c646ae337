//! The index of a data file, which a job needs before it trains: the number of records, their
//! shape, and the file's checksum.

use std::path::Path;

use proto::spec::{DataSet, JobSpec};

use crate::cache;
use crate::error::{Error, Result};
use crate::observer::Observer;
use crate::table::Content;

/// Index of one file (pair).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Indexed {
    /// Number of records.
    pub records: u64,
    /// Shape of one record's features.
    pub shape: Vec<usize>,
    /// Smallest and largest class. `None` if labels are no classes or there are no records.
    pub labels: Option<(i64, i64)>,
    /// Size and checksum of the content.
    pub content: Content,
}

/// Indexes file (pair) number `file` of a data set's own files, below `root` if given. The call
/// reads the whole file and blocks.
///
/// # Errors
/// The file is missing, malformed, or does not fit the specification.
pub fn index(spec: &JobSpec, set: DataSet, file: usize, root: Option<&Path>) -> Result<Indexed> {
    index_observed(spec, set, file, root, &())
}

/// Indexes a file like [`index`], and reports the progress of the reading to `observer`.
///
/// # Errors
/// Those of [`index`].
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
