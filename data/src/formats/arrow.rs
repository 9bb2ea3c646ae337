//! Apache Arrow IPC: files (`.arrow`, `.feather`) and streams (`.arrows`). A block is a batch of
//! records.

use std::io::Cursor;

use arrow_array::RecordBatch;
use arrow_ipc::reader::{FileReader, StreamReader};
use arrow_schema::{ArrowError, Schema};

use super::{arrow_columns, guarded};
use crate::column::Column;
use crate::error::{Error, Result, malformed};
use crate::format::{Outline, Source};
use crate::object::Object;

/// First bytes of a file. A stream has none.
const MAGIC: &[u8] = b"ARROW1";

/// Opens a file or a stream.
///
/// # Errors
/// The file is no Arrow IPC, or damaged.
pub(crate) fn open(object: &Object) -> Result<Box<dyn Source>> {
    let bytes = Cursor::new(object.bytes());
    let decode = || {
        if object.bytes().starts_with(MAGIC) {
            let reader = FileReader::try_new(bytes, None)?;
            Ok((reader.schema(), reader.collect::<Result<Vec<_>, _>>()?))
        } else {
            let reader = StreamReader::try_new(bytes, None)?;
            Ok::<_, ArrowError>((reader.schema(), reader.collect::<Result<Vec<_>, _>>()?))
        }
    };
    let (schema, batches) = guarded(decode).map_err(|error| failed(object, &error))?;
    let (fields, columns) = columns(&schema);
    let blocks = batches.iter().map(|batch| batch.num_rows() as u64).collect();
    Ok(Box::new(Arrow { object: object.clone(), batches, fields, outline: Outline { columns, blocks } }))
}

/// Returns the fields of which columns can be made, by index, and these columns.
pub(super) fn columns(schema: &Schema) -> (Vec<usize>, Vec<proto::column::ColumnSpec>) {
    let column = |(at, field): (usize, &std::sync::Arc<arrow_schema::Field>)| {
        Some((at, arrow_columns::column(field)?))
    };
    schema.fields().iter().enumerate().filter_map(column).unzip()
}

struct Arrow {
    object: Object,
    batches: Vec<RecordBatch>,
    /// Field of each column.
    fields: Vec<usize>,
    outline: Outline,
}

impl Source for Arrow {
    fn outline(&self) -> &Outline {
        &self.outline
    }

    fn read(&self, block: usize, columns: &[usize]) -> Result<Vec<Column>> {
        let batch = &self.batches[block];
        let column = |&at: &usize| {
            let array = batch.column(self.fields[at]).clone();
            arrow_columns::convert(self.object.path(), &self.outline.columns[at], &[array])
        };
        columns.iter().map(column).collect()
    }
}

fn failed(object: &Object, error: &str) -> Error {
    malformed(object.path(), format!("no Arrow IPC file or stream, or a damaged one: {error}; copy it again"))
}
