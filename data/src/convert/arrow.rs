//! Shards of Apache Parquet and Apache Arrow IPC.
//!
//! | column | Arrow |
//! | --- | --- |
//! | ragged u8 | Binary |
//! | other ragged | List of the elements |
//! | u8 `[n]` | FixedSizeBinary(n) |
//! | other shapes | FixedSizeList for each dimension |

use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use ::parquet::arrow::ArrowWriter;
use ::parquet::basic::Compression;
use ::parquet::file::properties::WriterProperties;
use arrow_array::types::{
    ArrowPrimitiveType, Float16Type, Float32Type, Float64Type, Int8Type, Int16Type, Int32Type, Int64Type,
    UInt8Type,
};
use arrow_array::{
    Array as _, ArrayRef, BinaryArray, BooleanArray, FixedSizeBinaryArray, FixedSizeListArray, ListArray,
    PrimitiveArray, RecordBatch,
};
use arrow_buffer::{Buffer, OffsetBuffer, ScalarBuffer};
use arrow_ipc::writer::FileWriter;
use arrow_schema::{ArrowError, DataType, Field, Schema, SchemaRef};
use proto::column::{ColumnSpec, ElementType};

use super::sink::{Shard, Sink};
use super::whole::{Whole, failed};
use super::written::is_bytes;
use crate::column::Column;
use crate::error::Result;

/// Bytes of a row group, about. A reader decodes a row group at once, and with the order `window`
/// it keeps those of all lanes. Larger ones compress better.
const ROW_GROUP_BYTES: usize = 4 << 20;

/// A shard of Parquet.
pub(super) struct Parquet {
    writer: ArrowWriter<Whole>,
    schema: SchemaRef,
    path: PathBuf,
}

impl Parquet {
    pub(super) fn open(shard: &Shard<'_>) -> Result<Self> {
        let file = shard.file()?;
        let (path, schema) = (file.path().to_owned(), schema(shard));
        let properties = WriterProperties::builder()
            .set_compression(Compression::SNAPPY)
            .set_max_row_group_bytes(Some(ROW_GROUP_BYTES))
            .build();
        let writer = ArrowWriter::try_new(file, schema.clone(), Some(properties));
        let writer = writer.map_err(|error| failed(&path)(io::Error::other(error)))?;
        Ok(Self { writer, schema, path })
    }
}

impl Sink for Parquet {
    fn add(&mut self, columns: &[Column]) -> Result<()> {
        let batch =
            batch(&self.schema, columns).map_err(|error| failed(&self.path)(io::Error::other(error)))?;
        self.writer.write(&batch).map_err(|error| failed(&self.path)(io::Error::other(error)))
    }

    fn finish(self: Box<Self>) -> Result<Vec<Whole>> {
        let file = self.writer.into_inner();
        Ok(vec![file.map_err(|error| failed(&self.path)(io::Error::other(error)))?])
    }
}

/// A shard of Arrow IPC.
pub(super) struct Arrow {
    writer: FileWriter<Whole>,
    schema: SchemaRef,
    path: PathBuf,
}

impl Arrow {
    pub(super) fn open(shard: &Shard<'_>) -> Result<Self> {
        let file = shard.file()?;
        let (path, schema) = (file.path().to_owned(), schema(shard));
        let writer = FileWriter::try_new(file, &schema);
        let writer = writer.map_err(|error| failed(&path)(io::Error::other(error)))?;
        Ok(Self { writer, schema, path })
    }
}

impl Sink for Arrow {
    fn add(&mut self, columns: &[Column]) -> Result<()> {
        let batch =
            batch(&self.schema, columns).map_err(|error| failed(&self.path)(io::Error::other(error)))?;
        self.writer.write(&batch).map_err(|error| failed(&self.path)(io::Error::other(error)))
    }

    fn finish(self: Box<Self>) -> Result<Vec<Whole>> {
        let file = self.writer.into_inner();
        Ok(vec![file.map_err(|error| failed(&self.path)(io::Error::other(error)))?])
    }
}

fn schema(shard: &Shard<'_>) -> SchemaRef {
    let columns = shard.columns.iter().map(|column| &column.stored);
    let field = |column: &ColumnSpec| Field::new(&column.name, data_type(column), false);
    Arc::new(Schema::new(columns.map(field).collect::<Vec<_>>()))
}

fn batch(schema: &SchemaRef, columns: &[Column]) -> Result<RecordBatch, ArrowError> {
    let arrays = columns.iter().map(array).collect::<Result<Vec<_>, _>>()?;
    RecordBatch::try_new(schema.clone(), arrays)
}

fn data_type(column: &ColumnSpec) -> DataType {
    let number = match column.dtype {
        ElementType::Bool => DataType::Boolean,
        ElementType::U8 => DataType::UInt8,
        ElementType::I8 => DataType::Int8,
        ElementType::I16 => DataType::Int16,
        ElementType::I32 => DataType::Int32,
        ElementType::I64 => DataType::Int64,
        ElementType::F16 => DataType::Float16,
        // bf16 was widened before.
        ElementType::F32 | ElementType::BF16 => DataType::Float32,
        ElementType::F64 => DataType::Float64,
    };
    match column.shape[..] {
        [] if is_bytes(column) => DataType::Binary,
        [size] if !column.ragged && column.dtype == ElementType::U8 => DataType::FixedSizeBinary(size as i32),
        _ => {
            let nested = |inner, &size: &usize| DataType::FixedSizeList(item(inner), size as i32);
            let one = column.shape.iter().rev().fold(number, nested);
            if column.ragged { DataType::List(item(one)) } else { one }
        }
    }
}

/// Returns the field of a list's items.
fn item(data_type: DataType) -> Arc<Field> {
    Arc::new(Field::new_list_field(data_type, true))
}

/// Copies a column into an array.
///
/// # Errors
/// A batch has more elements than 32-bit offsets reach.
fn array(column: &Column) -> Result<ArrayRef, ArrowError> {
    let (spec, bytes) = (column.spec(), column.bytes());
    if is_bytes(spec) {
        return Ok(Arc::new(BinaryArray::try_new(offsets(column)?, Buffer::from(bytes), None)?));
    }
    if let (false, ElementType::U8, &[size]) = (spec.ragged, spec.dtype, &spec.shape[..]) {
        let size = size_of_list(size)?;
        return Ok(Arc::new(FixedSizeBinaryArray::try_new(size, Buffer::from(bytes), None)?));
    }
    let values: ArrayRef = match spec.dtype {
        ElementType::Bool => {
            Arc::new(BooleanArray::from(bytes.iter().map(|&byte| byte != 0).collect::<Vec<_>>()))
        }
        ElementType::U8 => numbers::<UInt8Type>(bytes),
        ElementType::I8 => numbers::<Int8Type>(bytes),
        ElementType::I16 => numbers::<Int16Type>(bytes),
        ElementType::I32 => numbers::<Int32Type>(bytes),
        ElementType::I64 => numbers::<Int64Type>(bytes),
        ElementType::F16 => numbers::<Float16Type>(bytes),
        ElementType::F32 | ElementType::BF16 => numbers::<Float32Type>(bytes),
        ElementType::F64 => numbers::<Float64Type>(bytes),
    };
    let one = spec.shape.iter().rev().try_fold(values, |values: ArrayRef, &size| {
        let field = item(values.data_type().clone());
        let list = FixedSizeListArray::try_new(field, size_of_list(size)?, values, None)?;
        Ok::<ArrayRef, ArrowError>(Arc::new(list))
    })?;
    if !spec.ragged {
        return Ok(one);
    }
    Ok(Arc::new(ListArray::try_new(item(one.data_type().clone()), offsets(column)?, one, None)?))
}

fn numbers<T: ArrowPrimitiveType>(bytes: &[u8]) -> ArrayRef {
    Arc::new(PrimitiveArray::<T>::new(ScalarBuffer::from(Buffer::from(bytes)), None))
}

/// Returns the places of a ragged column's records, one more than there are records.
fn offsets(column: &Column) -> Result<OffsetBuffer<i32>, ArrowError> {
    let ends = [0].iter().chain(column.ends().unwrap_or_default());
    let offsets = ends.map(|&end| i32::try_from(end).map_err(|_| too_large()));
    Ok(OffsetBuffer::new(offsets.collect::<Result<Vec<_>, _>>()?.into()))
}

fn size_of_list(size: usize) -> Result<i32, ArrowError> {
    i32::try_from(size).map_err(|_| too_large())
}

fn too_large() -> ArrowError {
    ArrowError::InvalidArgumentError(
        "a record has more than 2147483647 values, which is the most of Arrow's lists; choose tar".to_owned(),
    )
}
