//! One file for each format, and the choice among them.

mod array;
pub(crate) mod arrow;
mod arrow_columns;
#[cfg(test)]
mod arrow_tests;
pub(crate) mod csv;
pub(crate) mod idx;
pub(crate) mod images;
pub(crate) mod index;
pub(crate) mod jsonl;
pub(crate) mod npy;
pub(crate) mod npz;
mod numbers;
mod pages;
pub(crate) mod parquet;
pub(crate) mod safetensors;
pub(crate) mod tar;
pub(crate) mod tfrecord;
pub(crate) mod tokens;

use std::path::Path;

use proto::column::ColumnSpec;
use proto::spec::{DataSpec, Format};

use crate::error::Result;
use crate::format::Source;
use crate::lengths;
use crate::object::Object;
use crate::observer::Observer;
use crate::pass::Pass;

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
    open_collecting(spec, object, column, first, Pass { observer, ..Pass::plain() })
}

/// Opens a file like [`open`]. If opening it reads all of it, the values of a column are collected.
///
/// # Errors
/// Those of [`open`].
pub(crate) fn open_collecting(
    spec: &DataSpec,
    object: &Object,
    column: &str,
    first: &Path,
    pass: Pass<'_>,
) -> Result<Box<dyn Source>> {
    let collects = |columns: &[ColumnSpec]| {
        // Lists of another length than the job says are broken, which is found only later.
        (pass.collects)(columns).filter(|&at| !spec.lengths.contains_key(&columns[at].name))
    };
    let pass = Pass { collects: &collects, ..pass };
    let source = match spec.format {
        Format::Idx => idx::open(object, column),
        Format::Npy => npy::open(object, column),
        Format::Csv => csv::open(object, csv::Dialect { header: spec.header, delimiter: b',' }, pass),
        Format::Tsv => csv::open(object, csv::Dialect { header: spec.header, delimiter: b'\t' }, pass),
        Format::Parquet => parquet::open(object.clone()),
        Format::Arrow => arrow::open(object),
        Format::Tokens => tokens::open(object, spec.tokens),
        Format::Safetensors => safetensors::open(object),
        Format::Npz => npz::open(object),
        Format::Jsonl => jsonl::open(object, pass),
        Format::Tfrecord => tfrecord::open(object, pass.cuts),
        Format::Tar => tar::open(object, pass.cuts),
        Format::Images => images::open(object.folder(pass.observer)?, first),
        Format::Index => index::open(object.path()),
    };
    lengths::fix(source?, object, &spec.lengths)
}
