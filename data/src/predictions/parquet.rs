//! Apache Parquet with the columns `record` (i64) and `prediction`: f32, or a list of fixed size,
//! in a list for each further dimension.
//!
//! Values are neither compressed nor in a dictionary, because outputs hardly repeat.

use std::sync::Arc;

use ::parquet::arrow::ArrowWriter;
use ::parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;
use ::parquet::errors::ParquetError;
use ::parquet::file::properties::WriterProperties;
use arrow_array::{Array as _, ArrayRef, FixedSizeListArray, Float32Array, Int64Array, RecordBatch};
use arrow_schema::{ArrowError, Field, Schema, SchemaRef};
use bytes::Bytes;

use super::{PREDICTION, RECORD, wrong};
use crate::error::{Error, Result};
use crate::guarded::guarded;

/// Bytes of one row group, from which on the next one begins. One is in memory while parts are
/// joined.
const GROUP_BYTES: usize = 64 << 20;

/// Returns a whole file.
pub(super) fn encode(records: &[u64], shape: &[usize], values: &[f32]) -> Result<Vec<u8>> {
    let batch = batch(records, shape, values).map_err(|error| failed(&error))?;
    let mut writer = writer(batch.schema()).map_err(|error| failed(&error))?;
    writer.write(&batch).and_then(|()| writer.into_inner()).map_err(|error| failed(&error))
}

fn batch(records: &[u64], shape: &[usize], values: &[f32]) -> Result<RecordBatch, ArrowError> {
    let mut predictions: ArrayRef = Arc::new(Float32Array::from(values.to_vec()));
    for &size in shape.iter().rev() {
        let item = Field::new("item", predictions.data_type().clone(), false);
        let size = i32::try_from(size).map_err(|error| ArrowError::ComputeError(error.to_string()))?;
        predictions = Arc::new(FixedSizeListArray::try_new(Arc::new(item), size, predictions, None)?);
    }
    let numbers = Int64Array::from_iter_values(records.iter().map(|&record| record as i64));
    let numbers: ArrayRef = Arc::new(numbers);
    let fields = [(RECORD, &numbers), (PREDICTION, &predictions)]
        .map(|(name, array)| Field::new(name, array.data_type().clone(), false));
    RecordBatch::try_new(Arc::new(Schema::new(Vec::from(fields))), vec![numbers, predictions])
}

fn writer(schema: SchemaRef) -> Result<ArrowWriter<Vec<u8>>, ParquetError> {
    let properties = WriterProperties::builder().set_dictionary_enabled(false).build();
    ArrowWriter::try_new(Vec::new(), schema, Some(properties))
}

/// A file that is being joined.
#[derive(Debug)]
pub(super) struct Join {
    /// The file so far. `None`: there was no part yet.
    writer: Option<ArrowWriter<Vec<u8>>>,
    schema: Option<SchemaRef>,
}

impl Join {
    pub(super) const fn new() -> Self {
        Self { writer: None, schema: None }
    }

    /// Returns the number of records of a part, and the bytes of the file that are complete.
    pub(super) fn add(&mut self, part: Bytes) -> Result<(u64, Bytes)> {
        let batches = guarded(|| {
            ParquetRecordBatchReaderBuilder::try_new(part)?
                .build()?
                .collect::<Result<Vec<RecordBatch>, _>>()
                .map_err(ParquetError::from)
        });
        let batches = batches.map_err(|error| failed(&error))?;
        let mut records = 0;
        for batch in &batches {
            records += batch.num_rows() as u64;
            let schema = self.schema.get_or_insert_with(|| batch.schema());
            if schema.fields() != batch.schema().fields() {
                return Err(wrong(format!(
                    "a part has columns {:?}, those before have {:?}",
                    batch.schema().fields(),
                    schema.fields()
                )));
            }
            if self.writer.is_none() {
                self.writer = Some(writer(schema.clone()).map_err(|error| failed(&error))?);
            }
            if let Some(writer) = &mut self.writer {
                writer.write(batch).map_err(|error| failed(&error))?;
            }
        }
        let Some(writer) = &mut self.writer else { return Ok((records, Bytes::new())) };
        if writer.in_progress_size() >= GROUP_BYTES {
            writer.flush().map_err(|error| failed(&error))?;
        }
        writer.sync().map_err(|error| failed(&error))?;
        // Where the bytes are counted, nothing is taken away.
        Ok((records, std::mem::take(writer.inner_mut()).into()))
    }

    /// Returns the rest of the file.
    pub(super) fn finish(self) -> Result<Bytes> {
        let writer = self.writer.ok_or_else(|| wrong("no parts"))?;
        Ok(writer.into_inner().map_err(|error| failed(&error))?.into())
    }
}

fn failed(error: &impl std::fmt::Display) -> Error {
    wrong(format!("Parquet: {error}"))
}
