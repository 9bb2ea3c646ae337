//! A shard on its way: records go in as columns, files of a format come out.

use std::path::Path;

use proto::spec::Format;

use super::whole::Whole;
use super::written::Written;
use crate::column::Column;
use crate::error::Result;

/// A shard on its way.
pub(super) trait Sink {
    /// Appends records: the stored columns, in their order, each with as many records.
    ///
    /// # Errors
    /// A file cannot be written, or the format has no place for a value.
    fn add(&mut self, columns: &[Column]) -> Result<()>;

    /// Ends the content, and returns the files, which then only need their names.
    ///
    /// # Errors
    /// A file cannot be written.
    fn finish(self: Box<Self>) -> Result<Vec<Whole>>;
}

/// Shard to be written.
#[derive(Clone, Copy, Debug)]
pub(super) struct Shard<'a> {
    pub(super) folder: &'a Path,
    pub(super) format: Format,
    /// Columns, in the order of the source.
    pub(super) columns: &'a [Written],
    /// Number of the shard, from 0.
    pub(super) number: usize,
    /// Number of the shard's first record over all shards.
    pub(super) first: u64,
    /// Number of records.
    pub(super) records: u64,
}

impl Shard<'_> {
    /// Returns the names of the shard's files: one, or one for each column.
    pub(super) fn names(&self) -> Vec<String> {
        let number = self.number;
        match self.format {
            Format::Npy => {
                let names = self.columns.iter().map(|column| &column.found.name);
                names.map(|name| format!("{PART}{number:05}.{name}.npy")).collect()
            }
            format => vec![format!("{PART}{number:05}.{}", format.name())],
        }
    }

    /// Begins the only file of the shard.
    ///
    /// # Errors
    /// The file cannot be created.
    pub(super) fn file(&self) -> Result<Whole> {
        Whole::create(self.folder, &self.names()[0])
    }
}

/// Begin of the name of each file of a shard.
pub(super) const PART: &str = "part-";
