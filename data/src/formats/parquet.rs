//! Apache Parquet. A block is a row group.
//!
//! A column of numbers is decoded straight into its memory. All others go through batches of Arrow,
//! which costs one more copy. Only the footer and the wanted columns of a row group are read.

use std::io::Read;
use std::sync::Arc;

use ::parquet::arrow::ProjectionMask;
use ::parquet::arrow::arrow_reader::{
    ArrowReaderMetadata, ArrowReaderOptions, ParquetRecordBatchReaderBuilder,
};
use ::parquet::basic::Type;
use ::parquet::column::reader::ColumnReaderImpl;
use ::parquet::data_type::{DataType as ParquetType, DoubleType, FloatType, Int32Type, Int64Type};
use ::parquet::errors::ParquetError;
use ::parquet::file::metadata::ColumnChunkMetaData;
use ::parquet::file::reader::{ChunkReader, Length};
use ::parquet::file::serialized_reader::SerializedPageReader;
use arrow_array::RecordBatch;
use arrow_schema::DataType;
use bytes::{Buf, Bytes};
use proto::column::ElementType;

use super::{arrow, arrow_columns, pages};
use crate::column::{Column, Decoded, Element, FileBytes, Memory};
use crate::error::{Error, Result, malformed};
use crate::format::{Outline, Source};
use crate::guarded::guarded;
use crate::object::{Failure, Object};
use crate::room;

/// Most records of a batch of Arrow.
const BATCH_RECORDS: usize = 8192;

/// About how many bytes of values are decoded into a batch of Arrow. The decoder needs several
/// times as much for lists: 32 bits for a value of fewer, and two levels for each.
const BATCH_BYTES: usize = 1 << 20;

/// Most values for which memory is taken before they are decoded.
const RESERVED_RECORDS_MAX: usize = 1 << 20;

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
    /// Leaf of each column that is one number of Parquet's own types.
    flat: Vec<Option<usize>>,
    outline: Outline,
}

/// Returns the leaf of a field whose values are stored in the column's type: one number a record.
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
    (is_flat && is_same).then_some(leaf)
}

impl Parquet {
    /// Decodes a flat column of a row group.
    ///
    /// # Errors
    /// A page is damaged.
    fn number(&self, block: usize, at: usize, leaf: usize) -> Result<Column> {
        let spec = &self.outline.columns[at];
        let (memory, levels) = match spec.dtype {
            ElementType::I32 => self.decode::<Int32Type, i32>(block, at, leaf),
            ElementType::I64 => self.decode::<Int64Type, i64>(block, at, leaf),
            ElementType::F32 => self.decode::<FloatType, f32>(block, at, leaf),
            _ => self.decode::<DoubleType, f64>(block, at, leaf),
        }?;
        let range = 0..memory.bytes().len();
        let memory = Memory::File { bytes: memory, range };
        let mut column = Column::fixed(spec.clone(), self.outline.blocks[block] as usize, memory);
        let missing = levels.iter().enumerate().filter(|(_, level)| **level == 0);
        missing.for_each(|(record, _)| column.set_missing(record));
        Ok(column)
    }

    /// Decodes the values of a flat column, with zeros in place of missing ones, and a level for
    /// each record, which is 0 for a missing value. Without missing values there are no levels.
    fn decode<T, E>(&self, block: usize, at: usize, leaf: usize) -> Result<(Arc<dyn FileBytes>, Vec<i16>)>
    where
        T: ParquetType<T = E>,
        E: Element + std::fmt::Debug + Send + Sync,
    {
        let group = self.metadata.metadata().row_group(block);
        let records = self.outline.blocks[block] as usize;
        let name = &self.outline.columns[at].name;
        let mut chunks = Chunks::of(&self.object);
        let failure = chunks.failure.clone();
        let decode = || {
            chunks.hold(group.column(leaf))?;
            let pages = SerializedPageReader::new(Arc::new(chunks), group.column(leaf), records, None)?;
            let column = self.metadata.parquet_schema().column(leaf);
            let mut reader = ColumnReaderImpl::<T>::new(column, Box::new(pages));
            let (mut values, mut levels, mut read) = (Vec::new(), Vec::new(), 0);
            // A damaged footer may announce more than there is. Memory beyond this is taken as
            // values come.
            values.reserve_exact(records.min(RESERVED_RECORDS_MAX));
            while read < records {
                let (more, _, _) =
                    reader.read_records(records - read, Some(&mut levels), None, &mut values)?;
                if more == 0 {
                    break;
                }
                read += more;
            }
            Ok::<_, ParquetError>((values, levels, read))
        };
        let failed =
            |error: String| failed(&self.object, &format!("row group {block}, column `{name}`: {error}"));
        let (values, levels, read) = guarded(decode).map_err(|error| failure.or(|| failed(error)))?;
        if read != records {
            return Err(failed(format!("{read} records, the footer says {records}")));
        }
        if values.len() == records {
            return Ok((Arc::new(Decoded(values)), Vec::new()));
        }
        let missing = levels.iter().filter(|&&level| level == 0).count();
        if (levels.len(), values.len() + missing) != (records, records) {
            return Err(failed(format!("{} values and {missing} nulls of {records} records", values.len())));
        }
        let mut present = values.into_iter();
        let value = |&level: &i16| if level == 0 { None } else { present.next() };
        let zero = <E as bytemuck::Zeroable>::zeroed();
        let spread: Vec<E> = levels.iter().map(value).map(|value| value.unwrap_or(zero)).collect();
        Ok((Arc::new(Decoded(spread)), levels))
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
    fn a_batch_has_about_a_mebibyte_of_values_and_at_least_one_record() {
        let records_of = |bytes: usize| batch_records(bytes * 1000, 1000);
        assert_eq!(records_of(128 << 10), 8);
        assert_eq!(records_of(5 << 20), 1, "a record that is larger than a batch");
        assert_eq!(records_of(4), BATCH_RECORDS);
        assert_eq!(batch_records(0, 1000), BATCH_RECORDS, "a column of nulls");
        assert_eq!(batch_records(0, 0), BATCH_RECORDS, "no record");
    }
}
