//! Apache Parquet. A block is a row group.
//!
//! A column of numbers is decoded straight into its memory, if its pages are plain or have a
//! dictionary (`numbers.rs`). All others go through batches of Arrow, which costs one more copy.
//! Only the footer and the wanted columns of a row group are read.

use std::io::Read;
use std::sync::Arc;

use ::parquet::arrow::ProjectionMask;
use ::parquet::arrow::arrow_reader::{
    ArrowReaderMetadata, ArrowReaderOptions, ParquetRecordBatchReaderBuilder,
};
use ::parquet::basic::Type;
use ::parquet::errors::ParquetError;
use ::parquet::file::metadata::ColumnChunkMetaData;
use ::parquet::file::reader::{ChunkReader, Length};
use ::parquet::file::serialized_reader::SerializedPageReader;
use arrow_array::RecordBatch;
use arrow_schema::DataType;
use bytes::{Buf, Bytes};
use proto::column::ElementType;

use super::numbers::{self, Numbers};
use super::{arrow, arrow_columns, pages};
use crate::column::{Column, Decoded, Element, Memory};
use crate::error::{Error, Result, malformed, wrong};
use crate::format::{Outline, Source};
use crate::guarded::guarded;
use crate::object::{Failure, Object};
use crate::room;

/// Most records of a batch of Arrow.
const BATCH_RECORDS: usize = 8192;

/// About how many bytes of values are decoded into a batch of Arrow. The decoder needs several
/// times as much for lists: 32 bits for a value of fewer, and two levels for each.
const BATCH_BYTES: usize = 1 << 20;

/// Opens a file.
///
/// # Errors
/// The file is no Parquet file, or its footer is damaged.
pub(crate) fn open(object: Object) -> Result<Box<dyn Source>> {
    let chunks = Chunks::of(&object);
    let metadata = guarded(|| ArrowReaderMetadata::load(&chunks, ArrowReaderOptions::new()));
    let metadata = metadata.map_err(|error| chunks.failure.or(|| failed(&object, &error)))?;
    let (fields, columns) = arrow::columns(metadata.schema());
    let flat = fields.iter().map(|&field| flat(&metadata, field)).collect();
    let groups = metadata.metadata().row_groups().iter();
    let blocks = groups.map(|group| u64::try_from(group.num_rows()).unwrap_or_default()).collect();
    Ok(Box::new(Parquet { object, metadata, fields, flat, outline: Outline { columns, blocks } }))
}

struct Parquet {
    object: Object,
    metadata: ArrowReaderMetadata,
    /// Field of each column.
    fields: Vec<usize>,
    /// Leaf of each column whose numbers `numbers.rs` decodes.
    flat: Vec<Option<usize>>,
    outline: Outline,
}

/// Returns the leaf of a field whose values are stored in the column's type, one number a record,
/// and which `numbers.rs` decodes.
fn flat(metadata: &ArrowReaderMetadata, field: usize) -> Option<usize> {
    let schema = metadata.parquet_schema();
    let leaf = (0..schema.num_columns()).find(|&leaf| schema.get_column_root_idx(leaf) == field)?;
    let column = schema.column(leaf);
    let is_flat =
        column.path().parts().len() == 1 && column.max_rep_level() == 0 && column.max_def_level() <= 1;
    let data_type = metadata.schema().field(field).data_type();
    let is_same = match column.physical_type() {
        Type::INT32 => matches!(data_type, DataType::Int32 | DataType::Date32 | DataType::Time32(_)),
        Type::INT64 => {
            matches!(
                data_type,
                DataType::Int64 | DataType::Timestamp(..) | DataType::Time64(_) | DataType::Duration(_)
            )
        }
        Type::FLOAT => *data_type == DataType::Float32,
        Type::DOUBLE => *data_type == DataType::Float64,
        _ => false,
    };
    let mut groups = metadata.metadata().row_groups().iter();
    let mut is_read = || groups.all(|group| numbers::are_read(group.column(leaf).encodings()));
    (is_flat && is_same && is_read()).then_some(leaf)
}

impl Parquet {
    /// Decodes a flat column of a row group, with zeros in place of missing values.
    ///
    /// # Errors
    /// A page is damaged.
    fn number(&self, block: usize, at: usize, leaf: usize) -> Result<Column> {
        match self.outline.columns[at].dtype {
            ElementType::I32 => self.decode::<i32>(block, at, leaf),
            ElementType::I64 => self.decode::<i64>(block, at, leaf),
            ElementType::F32 => self.decode::<f32>(block, at, leaf),
            _ => self.decode::<f64>(block, at, leaf),
        }
    }

    fn decode<E>(&self, block: usize, at: usize, leaf: usize) -> Result<Column>
    where
        E: Element + std::fmt::Debug + Send + Sync,
    {
        let group = self.metadata.metadata().row_group(block);
        let (spec, records) = (&self.outline.columns[at], self.outline.blocks[block] as usize);
        let is_optional = self.metadata.parquet_schema().column(leaf).max_def_level() > 0;
        check_values(records, size_of::<E>(), room::bytes_max()).or_else(|reason| {
            wrong(self.object.path(), format!("row group {block}, column `{}`: {reason}", spec.name))
        })?;
        let mut chunks = Chunks::of(&self.object);
        let failure = chunks.failure.clone();
        let decode = || {
            chunks.hold(group.column(leaf))?;
            let mut pages = SerializedPageReader::new(Arc::new(chunks), group.column(leaf), records, None)?;
            numbers::read::<E>(&mut pages, is_optional, records)
        };
        let failed = |error: String| {
            failed(&self.object, &format!("row group {block}, column `{}`: {error}", spec.name))
        };
        let Numbers { values, missing } = guarded(decode).map_err(|error| failure.or(|| failed(error)))?;
        if values.len() != records {
            return Err(failed(format!("{} records, the footer says {records}", values.len())));
        }
        let range = 0..size_of_val(values.as_slice());
        let memory = Memory::File { bytes: Arc::new(Decoded(values)), range };
        let mut column = Column::fixed(spec.clone(), records, memory);
        missing.into_iter().for_each(|record| column.set_missing(record));
        Ok(column)
    }
}

impl Source for Parquet {
    fn outline(&self) -> &Outline {
        &self.outline
    }

    fn read(&self, block: usize, columns: &[usize]) -> Result<Vec<Column>> {
        let others: Vec<usize> = columns.iter().copied().filter(|&at| self.flat[at].is_none()).collect();
        let mut others = self.through_arrow(block, &others)?.into_iter();
        let column = |&at: &usize| match self.flat[at] {
            Some(leaf) => self.number(block, at, leaf),
            None => Ok(others.next().expect("one for each column that is not flat")),
        };
        columns.iter().map(column).collect()
    }
}

impl Parquet {
    /// Decodes columns of a row group into batches of Arrow, and these into columns.
    ///
    /// # Errors
    /// A page is damaged.
    fn through_arrow(&self, block: usize, columns: &[usize]) -> Result<Vec<Column>> {
        if columns.is_empty() {
            return Ok(Vec::new());
        }
        let failed = |error: String| failed(&self.object, &format!("row group {block}: {error}"));
        let roots = columns.iter().map(|&at| self.fields[at]);
        let mask = ProjectionMask::roots(self.metadata.parquet_schema(), roots);
        let mut chunks = Chunks::of(&self.object);
        let failure = chunks.failure.clone();
        let expected = self.outline.blocks[block];
        let decode = || {
            let group = self.metadata.metadata().row_group(block);
            let mut bytes = 0;
            for leaf in (0..group.num_columns()).filter(|&leaf| mask.leaf_included(leaf)) {
                chunks.hold(group.column(leaf))?;
                bytes += usize::try_from(group.column(leaf).uncompressed_size()).unwrap_or_default();
            }
            ParquetRecordBatchReaderBuilder::new_with_metadata(chunks, self.metadata.clone())
                .with_row_groups(vec![block])
                .with_projection(mask)
                .with_batch_size(batch_records(bytes, expected as usize))
                .build()?
                .collect::<Result<Vec<RecordBatch>, _>>()
                .map_err(ParquetError::from)
        };
        let batches = guarded(decode).map_err(|error| failure.or(|| failed(error)))?;
        let found: u64 = batches.iter().map(|batch| batch.num_rows() as u64).sum();
        if found != expected {
            return Err(failed(format!("{found} records, the footer says {expected}")));
        }
        let column = |&at: &usize| {
            let spec = &self.outline.columns[at];
            let arrays: Option<Vec<_>> =
                batches.iter().map(|batch| batch.column_by_name(&spec.name).cloned()).collect();
            let arrays = arrays.ok_or_else(|| failed(format!("no column `{}`", spec.name)))?;
            arrow_columns::convert(self.object.path(), spec, &arrays)
        };
        columns.iter().map(column).collect()
    }
}

/// Checks that the values of a column of a row group fit into memory. A run of one value takes few
/// bytes of a file, whatever its length.
///
/// # Errors
/// They do not.
fn check_values(records: usize, size: usize, bytes_max: u64) -> Result<(), String> {
    let bytes = (records as u64).saturating_mul(size as u64);
    if bytes > bytes_max {
        return Err(format!(
            "{records} values take {bytes} bytes, more than the {bytes_max} of data_memory; raise it, or write the file \
             with smaller row groups"
        ));
    }
    Ok(())
}

/// Returns how many records of a row group are decoded into a batch of Arrow. `bytes` is the size
/// of all `records`, encoded and not compressed.
fn batch_records(bytes: usize, records: usize) -> usize {
    let of_a_record = bytes / records.max(1);
    (BATCH_BYTES / of_a_record.max(1)).clamp(1, BATCH_RECORDS)
}

/// A file as the decoder of Parquet reads it.
struct Chunks {
    object: Object,
    /// Columns of a row group that were fetched as a whole, each with its place.
    held: Vec<(usize, Bytes)>,
    failure: Failure,
}

impl Chunks {
    fn of(object: &Object) -> Self {
        Self { object: object.clone(), held: Vec::new(), failure: Failure::default() }
    }

    /// Checks the pages of a column of a row group, and fetches them at once if they are not in
    /// memory. Otherwise the decoder would wait for each page.
    ///
    /// # Errors
    /// The file has no such bytes, or cannot be read, or a page is too large.
    fn hold(&mut self, column: &ColumnChunkMetaData) -> Result<(), ParquetError> {
        let (begin, bytes) = column.byte_range();
        let begin = begin as usize;
        let pages = self.object.slice_to_keep(begin..begin.saturating_add(bytes as usize));
        let pages = pages.map_err(|error| ParquetError::from(self.failure.keep(error)))?;
        pages::check(&pages, room::bytes_max()).map_err(|reason| {
            let reason = format!("column `{}`: {reason}", column.column_path().string());
            ParquetError::from(self.failure.keep(malformed(self.object.path(), reason)))
        })?;
        if !self.object.is_here() {
            self.held.push((begin, pages));
        }
        Ok(())
    }

    fn part(&self, begin: usize, end: usize) -> Result<Bytes, ParquetError> {
        // The decoder asks for all from a place on. In memory that costs nothing.
        let read = match self.object.is_here() {
            true => self.object.slice(begin..end),
            false => self.object.slice_to_keep(begin..end),
        };
        read.map_err(|error| ParquetError::from(self.failure.keep(error)))
    }

    /// Returns held bytes from `begin` on.
    fn held(&self, begin: usize) -> Option<Bytes> {
        let inside = |(at, held): &&(usize, Bytes)| (*at..*at + held.len()).contains(&begin);
        self.held.iter().find(inside).map(|(at, held)| held.slice(begin - at..))
    }
}

impl Length for Chunks {
    fn len(&self) -> u64 {
        self.object.len() as u64
    }
}

impl ChunkReader for Chunks {
    type T = Box<dyn Read>;

    fn get_read(&self, start: u64) -> Result<Self::T, ParquetError> {
        let begin = start as usize;
        if begin > self.object.len() {
            return Err(ParquetError::EOF(format!("byte {begin} of a file of {}", self.object.len())));
        }
        Ok(match self.held(begin) {
            Some(held) => Box::new(held.reader()),
            None if self.object.is_here() => Box::new(self.part(begin, self.object.len())?.reader()),
            None => Box::new(self.object.reader_for(begin, &self.failure)),
        })
    }

    fn get_bytes(&self, start: u64, length: usize) -> Result<Bytes, ParquetError> {
        let begin = start as usize;
        match self.held(begin) {
            Some(held) if held.len() >= length => Ok(held.slice(..length)),
            _ => self.part(begin, begin.saturating_add(length)),
        }
    }
}

fn failed(object: &Object, error: &str) -> Error {
    malformed(object.path(), format!("no Parquet file, or a damaged one: {error}; copy it again"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_that_do_not_fit_into_memory_are_refused() {
        assert_eq!(check_values(100, 8, 800), Ok(()));
        let said = check_values(101, 8, 800).unwrap_err();
        assert!(said.contains("101 values take 808 bytes, more than the 800 of data_memory"), "{said}");
        assert!(check_values(usize::MAX, 8, 1 << 40).is_err());
    }

    #[test]
    fn a_batch_has_about_a_mebibyte_of_values_and_at_least_one_record() {
        let records_of = |bytes: usize| batch_records(bytes * 1000, 1000);
        assert_eq!(records_of(128 << 10), 8);
        assert_eq!(records_of(5 << 20), 1, "a record that is larger than a batch");
        assert_eq!(records_of(4), BATCH_RECORDS);
        assert_eq!(batch_records(0, 1000), BATCH_RECORDS, "a column of nulls");
        assert_eq!(batch_records(0, 0), BATCH_RECORDS, "no record");
    }
}
