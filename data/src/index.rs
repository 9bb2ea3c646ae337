//! The index of a data file, which a job needs before it trains: the number of records, their
//! shape, and the file's checksum.

use std::path::Path;

use proto::column::ColumnSpec;
use proto::spec::{DataSet, JobSpec};

use crate::any_order;
use crate::cuts::Cuts;
use crate::error::{Error, Result};
use crate::object::Content;
use crate::observer::Observer;
use crate::packed::Access;
use crate::pass::Pass;
use crate::room;
use crate::schema::{self, Schema};
use crate::table::Named;
use crate::tables;

/// Index of one group of files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Indexed {
    /// Number of records.
    pub records: u64,
    /// Inputs of the model.
    pub inputs: Vec<ColumnSpec>,
    /// Smallest and largest class. `None` if labels are no classes or there are no records.
    pub labels: Option<(i64, i64)>,
    /// Size and checksum of the content.
    pub content: Content,
    /// What the servers of files on other machines say of this content: ETags, or times of the last
    /// modification. Empty: nothing.
    pub version: String,
    /// State of the files before they were read: their sizes, and their versions or times of
    /// modification. Files with this state have this index. Empty: the state says too little.
    pub stamp: String,
    /// Where the blocks of the file are, in a format of which only the whole file says so.
    pub cuts: Option<Cuts>,
}

/// What an earlier index found in files, for those who open them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KnownIndex {
    /// State of the files then. It counts only if they are the same now.
    pub stamp: String,
    /// Where the blocks of the file are.
    pub cuts: Cuts,
}

/// Indexes file number `file` of each list of a data set's own files, below `root` if given. The
/// call reads the whole files and blocks.
///
/// # Errors
/// A file is missing, malformed, or does not fit the specification.
pub fn index(spec: &JobSpec, set: DataSet, file: usize, root: Option<&Path>) -> Result<Indexed> {
    index_observed(spec, set, file, root, &())
}

/// Returns whether files are in the state that `stamp` of their index says. It looks at each file
/// and reads none. The call blocks.
///
/// # Errors
/// A file is missing, or its server does not say what it has.
pub fn is_unchanged(
    spec: &JobSpec,
    set: DataSet,
    file: usize,
    root: Option<&Path>,
    stamp: &str,
    observer: &dyn Observer,
) -> Result<bool> {
    let files = spec.data.files(set).ok_or(Error::NoSuchSet(set))?;
    Ok(!stamp.is_empty() && stamp == Named::stamp(&Named::all(&spec.data, &files, file, root, observer)?))
}

/// Indexes files like [`index`], and reports the progress of the reading to `observer`.
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
    // The labels of a file that is read to be opened are looked at on the way.
    let label = |columns: &[ColumnSpec]| {
        let names: Vec<_> = columns.iter().map(|column| column.name.as_str()).collect();
        schema::label_index(&spec.data, &names).filter(|_| spec.model.loss.wants_classes())
    };
    let pass = Pass { observer, collects: &label, cuts: None, access: Access::of(spec, set) };
    let table = tables::open(&spec.data, &files, file, root, None, pass)?;
    let schema = Schema::new(spec, set, &table)?;
    // A file that alone does not suit the order is refused before the rest of it is read.
    let is_whole = files.records.is_none() && spec.data.validation_fraction.is_none();
    if set == DataSet::Train && any_order::is_order_of(spec) && is_whole {
        any_order::check(&[(&*table, &schema, table.records())], room::bytes_max())?;
    }
    let labels = schema.label_range(&table, observer)?;
    let content = table.content(observer)?;
    Ok(Indexed {
        records: table.records(),
        inputs: schema.inputs(),
        labels,
        content,
        version: table.version(),
        stamp: table.stamp().to_owned(),
        cuts: table.cuts().filter(|cuts| cuts.travel()).cloned(),
    })
}
