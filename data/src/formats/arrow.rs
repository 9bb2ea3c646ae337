//! Apache Arrow IPC: files (`.arrow`, `.feather`) and streams (`.arrows`). A block is a batch of
//! records.
//!
//! Arrays of a file lie where the file is, mapped or in memory, unless they are compressed. A
//! stream is copied.

use std::io::Cursor;
use std::sync::Arc;

use arrow_array::RecordBatch;
use arrow_buffer::Buffer;
use arrow_ipc::convert::try_fb_to_schema;
use arrow_ipc::reader::{FileDecoder, StreamReader, read_footer_length};
use arrow_ipc::{Block, root_as_footer, root_as_message};
use arrow_schema::{ArrowError, Schema, SchemaRef};

use super::{arrow_columns, guarded};
use crate::column::Column;
use crate::error::{Error, Result, malformed};
use crate::format::{Outline, Source};
use crate::object::Object;

/// First bytes of a file. A stream has none.
const MAGIC: &[u8] = b"ARROW1";

/// Last bytes of a file: the length of the footer before them, and the first bytes again.
const TRAILER_BYTES: usize = size_of::<u32>() + MAGIC.len();

/// Begin of a message, before its length. Old writers leave it out.
const CONTINUATION: &[u8] = &[0xFF; 4];

/// Most bytes that a codec makes of one byte, generously.
const RATIO_MAX: usize = 1 << 16;

/// Opens a file or a stream.
///
/// # Errors
/// The file is no Arrow IPC, or damaged.
pub(crate) fn open(object: &Object) -> Result<Box<dyn Source>> {
    let decode = || {
        if object.bytes().starts_with(MAGIC) {
            file(&Buffer::from(object.buffer()))
        } else {
            let reader = StreamReader::try_new(Cursor::new(object.bytes()), None)?;
            Ok::<_, ArrowError>((reader.schema(), reader.collect::<Result<Vec<_>, _>>()?))
        }
    };
    let (schema, batches) = guarded(decode).map_err(|error| failed(object, &error))?;
    let (fields, columns) = columns(&schema);
    let blocks = batches.iter().map(|batch| batch.num_rows() as u64).collect();
    Ok(Box::new(Arrow { object: object.clone(), batches, fields, outline: Outline { columns, blocks } }))
}

/// Reads a file. No length in it is trusted before it is compared with the bytes that exist.
fn file(bytes: &Buffer) -> Result<(SchemaRef, Vec<RecordBatch>), ArrowError> {
    let cut_off = || wrong("the file is cut off");
    let trailer = bytes.len().checked_sub(TRAILER_BYTES).ok_or_else(cut_off)?;
    let length = read_footer_length(bytes[trailer..].try_into().map_err(|_| cut_off())?)?;
    let footer = trailer.checked_sub(length).ok_or_else(cut_off)?;
    let footer = root_as_footer(&bytes[footer..trailer]);
    let footer = footer.map_err(|error| wrong(&format!("its footer: {error:?}")))?;
    let schema = footer.schema().ok_or_else(|| wrong("its footer has no schema"))?;
    if !schema.endianness().equals_to_target_endianness() {
        return Err(wrong("its numbers have another byte order than this machine's"));
    }
    let schema = Arc::new(try_fb_to_schema(schema)?);
    let mut decoder = FileDecoder::new(schema.clone(), footer.version());
    for block in footer.dictionaries().into_iter().flatten() {
        decoder.read_dictionary(block, &part(bytes, block)?)?;
    }
    let mut batches = Vec::new();
    for block in footer.recordBatches().into_iter().flatten() {
        batches.extend(decoder.read_record_batch(block, &part(bytes, block)?)?);
    }
    Ok((schema, batches))
}

/// Returns the part of a file with a message and its body.
fn part(bytes: &Buffer, block: &Block) -> Result<Buffer, ArrowError> {
    let outside = || wrong("its footer names a part outside of the file");
    let place = |number: i64| usize::try_from(number).map_err(|_| outside());
    let (begin, before) = (place(block.offset())?, place(block.metaDataLength().into())?);
    let length = before.checked_add(place(block.bodyLength())?).ok_or_else(outside)?;
    if begin.checked_add(length).is_none_or(|end| end > bytes.len()) {
        return Err(outside());
    }
    let part = bytes.slice_with_length(begin, length);
    check_sizes(&part, before)?;
    Ok(part)
}

/// Checks the sizes that compressed arrays announce, because a decoder takes so much memory before
/// it reads them. `before` is the length of the message, which the body follows.
fn check_sizes(part: &[u8], before: usize) -> Result<(), ArrowError> {
    let begin = if part.starts_with(CONTINUATION) { 8 } else { 4 };
    let message = part.get(begin..before).ok_or_else(|| wrong("a message is cut off"))?;
    let message = root_as_message(message).map_err(|error| wrong(&format!("a message: {error:?}")))?;
    let of_dictionary = || message.header_as_dictionary_batch().and_then(|dictionary| dictionary.data());
    let Some(batch) = message.header_as_record_batch().or_else(of_dictionary) else { return Ok(()) };
    if batch.compression().is_none() {
        return Ok(());
    }
    // An array without bytes has no size before it.
    for array in batch.buffers().into_iter().flatten().filter(|array| array.length() > 0) {
        let size =
            usize::try_from(array.offset()).ok().and_then(|at| part.get(before..)?.get(at..)?.first_chunk());
        let size = size.map_or(0, |size| i64::from_le_bytes(*size));
        let packed = usize::try_from(array.length()).unwrap_or_default().min(part.len());
        if usize::try_from(size).is_ok_and(|size| size > packed.saturating_mul(RATIO_MAX)) {
            return Err(wrong(&format!("a compressed array of {packed} bytes cannot become {size}")));
        }
    }
    Ok(())
}

fn wrong(what: &str) -> ArrowError {
    ArrowError::ParseError(what.to_owned())
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
