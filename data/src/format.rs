//! The interface of a format: from a file's bytes to columns of records.
//!
//! A file is a sequence of *blocks*. A block is what a format decodes at once: a row group of
//! Parquet, a batch of Arrow, a whole array in memory, 4 MiB of a CSV file, of a tar archive or of
//! an array elsewhere, and 128 KiB of the latter if any of its records may be next. Some records of
//! a block cost as much as all of them, so decoded blocks stay in memory for a while (`cache.rs`).
//!
//! A format asks an `Object` for the parts that it needs (`Object::slice`), because the file may
//! lie on another machine.

use proto::column::{ColumnSpec, ElementType};

use crate::column::Column;
use crate::cuts::Cuts;
use crate::error::Result;
use crate::object::{Content, Object};
use crate::observer::Observer;
use crate::pass::Distinct;

/// The columns and blocks of one file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Outline {
    /// Columns, in the order of the file.
    pub(crate) columns: Vec<ColumnSpec>,
    /// Number of records of each block, in order.
    pub(crate) blocks: Vec<u64>,
}

impl Outline {
    /// Returns the number of records.
    pub(crate) fn records(&self) -> u64 {
        // A damaged file may say anything.
        self.blocks.iter().fold(0, |all, &records| all.saturating_add(records))
    }
}

/// A file of a format.
pub(crate) trait Source: Send + Sync {
    /// Returns the columns and blocks.
    fn outline(&self) -> &Outline;

    /// Decodes the columns with these indices, in their order, of one block.
    ///
    /// # Errors
    /// The block is damaged, or has a value for which a column has no place.
    fn read(&self, block: usize, columns: &[usize]) -> Result<Vec<Column>>;

    /// Returns whether [`direct`](Self::direct) gives any record of the column with this index as
    /// values of `dtype`, for less than a block costs. Default: it does not.
    fn is_direct(&self, _column: usize, _dtype: ElementType) -> bool {
        false
    }

    /// Appends the values of records in the column with this index to `out`. Only where it
    /// [`is_direct`](Self::is_direct) for the type of `out`.
    ///
    /// # Errors
    /// The file cannot be read.
    fn direct(&self, _records: &[u64], _column: usize, _out: &mut Column) -> Result<()> {
        unreachable!("this format decodes blocks")
    }

    /// Returns whether any record is read without the rest of its block: the values stay where they
    /// are in memory or in a mapped file. Default: it is not.
    fn is_in_place(&self) -> bool {
        false
    }

    /// Returns the bytes of `object` that are read with any block at least. Default: those of the
    /// block alone.
    fn piece_bytes(&self, _object: &Object) -> u64 {
        0
    }

    /// Returns what a record is called in the file, for errors. Default: it has a number alone.
    fn name(&self, _record: u64) -> Option<String> {
        None
    }

    /// Returns the bytes of the content without compression. Default: those of the file.
    fn bytes(&self, object: &Object) -> u64 {
        object.len() as u64
    }

    /// Returns the identity of the content. Default: that of the file's bytes.
    ///
    /// # Errors
    /// The file cannot be read, or has changed.
    fn content(&self, object: &Object, content: Content, observer: &dyn Observer) -> Result<Content> {
        object.hash(content, observer)
    }

    /// Returns where the blocks are, if only the whole file says so and whoever opens it may be
    /// told instead. Default: the file says it in one place, or the format needs more.
    fn cuts(&self) -> Option<&Cuts> {
        None
    }

    /// Returns the distinct values of a column, if they were collected when the file was opened.
    /// Default: they were not.
    fn distinct(&self, _column: usize) -> Option<&Distinct> {
        None
    }
}
