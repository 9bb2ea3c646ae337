//! One file for each format, and the choice among them.

mod array;
pub(crate) mod arrow;
mod arrow_columns;
#[cfg(test)]
mod arrow_tests;
pub(crate) mod csv;
mod cuts;
pub(crate) mod idx;
pub(crate) mod images;
pub(crate) mod jsonl;
pub(crate) mod npy;
pub(crate) mod npz;
pub(crate) mod parquet;
pub(crate) mod safetensors;
pub(crate) mod tar;
pub(crate) mod tfrecord;
pub(crate) mod tokens;

use std::path::Path;

use proto::spec::{DataSpec, Format};

use crate::error::Result;
use crate::format::Source;
use crate::lengths;
use crate::object::Object;
use crate::observer::Observer;

/// Opens a file of the job's format. `column` names the column of a format whose files have one.
/// `first` is the first training folder of a format whose files are folders.
///
/// # Errors
/// The file is no file of this format.
pub(crate) fn open(
    spec: &DataSpec,
    object: &Object,
    column: &str,
    first: &Path,
    observer: &dyn Observer,
) -> Result<Box<dyn Source>> {
    let source = match spec.format {
        Format::Idx => idx::open(object, column),
        Format::Npy => npy::open(object, column),
        Format::Csv => csv::open(object, spec.header),
        Format::Parquet => parquet::open(object.clone()),
        Format::Arrow => arrow::open(object),
        Format::Tokens => tokens::open(object, spec.tokens),
        Format::Safetensors => safetensors::open(object),
        Format::Npz => npz::open(object),
        Format::Jsonl => jsonl::open(object),
        Format::Tfrecord => tfrecord::open(object),
        Format::Tar => tar::open(object),
        Format::Images => images::open(object.folder(observer)?, first),
    };
    lengths::fix(source?, object, &spec.lengths)
}
