//! Apache Parquet. A block is a row group.

use ::parquet::arrow::ProjectionMask;
use ::parquet::arrow::arrow_reader::{
    ArrowReaderMetadata, ArrowReaderOptions, ParquetRecordBatchReaderBuilder,
};
use ::parquet::errors::ParquetError;
use arrow_array::RecordBatch;
use bytes::Bytes;

use super::{arrow, arrow_columns, guarded};
use crate::column::{Column, FileBytes};
use crate::error::{Error, Result, malformed};
use crate::format::{Outline, Source};
use crate::object::Object;

/// Most records that are decoded before they are copied into columns. They stay in the processor's
/// cache.
const BATCH_RECORDS: usize = 8192;

/// Opens a file.
///
/// # Errors
/// The file is no Parquet file, or its footer is damaged.
pub(crate) fn open(object: Object) -> Result<Box<dyn Source>> {
    let bytes = Bytes::from_owner(Owner(object.share()));
    let metadata = guarded(|| ArrowReaderMetadata::load(&bytes, ArrowReaderOptions::new()));
    let metadata = metadata.map_err(|error| failed(&object, &error))?;
    let (fields, columns) = arrow::columns(metadata.schema());
    let groups = metadata.metadata().row_groups().iter();
    let blocks = groups.map(|group| u64::try_from(group.num_rows()).unwrap_or_default()).collect();
    Ok(Box::new(Parquet { object, bytes, metadata, fields, outline: Outline { columns, blocks } }))
}

/// Bytes of a file that outlive their reader.
struct Owner(std::sync::Arc<dyn FileBytes>);

impl AsRef<[u8]> for Owner {
    fn as_ref(&self) -> &[u8] {
        self.0.bytes()
    }
}

struct Parquet {
    object: Object,
    bytes: Bytes,
    metadata: ArrowReaderMetadata,
    /// Field of each column.
    fields: Vec<usize>,
    outline: Outline,
}

impl Source for Parquet {
    fn outline(&self) -> &Outline {
        &self.outline
    }

    fn read(&self, block: usize, columns: &[usize]) -> Result<Vec<Column>> {
        let failed = |error: String| failed(&self.object, &format!("row group {block}: {error}"));
        let roots = columns.iter().map(|&at| self.fields[at]);
        let mask = ProjectionMask::roots(self.metadata.parquet_schema(), roots);
        let decode = || {
            ParquetRecordBatchReaderBuilder::new_with_metadata(self.bytes.clone(), self.metadata.clone())
                .with_row_groups(vec![block])
                .with_projection(mask)
                .with_batch_size(BATCH_RECORDS)
                .build()?
                .collect::<Result<Vec<RecordBatch>, _>>()
                .map_err(ParquetError::from)
        };
        let batches = guarded(decode).map_err(failed)?;
        let found: u64 = batches.iter().map(|batch| batch.num_rows() as u64).sum();
        let (expected, first) = (self.outline.blocks[block], self.outline.blocks[..block].iter().sum());
        if found != expected {
            return Err(failed(format!("{found} records, the footer says {expected}")));
        }
        let column = |&at: &usize| {
            let spec = &self.outline.columns[at];
            let arrays: Option<Vec<_>> =
                batches.iter().map(|batch| batch.column_by_name(&spec.name).cloned()).collect();
            let arrays = arrays.ok_or_else(|| failed(format!("no column `{}`", spec.name)))?;
            arrow_columns::convert(self.object.path(), spec, &arrays, first)
        };
        columns.iter().map(column).collect()
    }
}

fn failed(object: &Object, error: &str) -> Error {
    malformed(object.path(), format!("no Parquet file, or a damaged one: {error}; copy it again"))
}
