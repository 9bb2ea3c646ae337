//! Apache Arrow IPC: files (`.arrow`, `.feather`) and streams (`.arrows`). A block is a batch of
//! records.
//!
//! A file ends with the places of its batches, so each batch is read when it is used. A stream has
//! no such list. Its batches are read when it is opened, and stay in memory.
//!
//! No length in a file is trusted before it is compared with the bytes that exist.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use arrow_array::{ArrayRef, RecordBatch};
use arrow_buffer::Buffer;
use arrow_ipc::convert::try_fb_to_schema;
use arrow_ipc::reader::{self, StreamReader, read_footer_length};
use arrow_ipc::{Block, Message, MetadataVersion, RecordBatch as Head, root_as_footer, root_as_message};
use arrow_schema::{ArrowError, Schema, SchemaRef};
use bytes::Bytes;

use super::arrow_columns;
use crate::column::Column;
use crate::error::{Error, Flaw, Result, malformed, wrong};
use crate::format::{Outline, Source};
use crate::guarded::guarded;
use crate::object::Object;
use crate::room::{self, Held};

/// First bytes of a file. A stream has none.
const MAGIC: &[u8] = b"ARROW1";

/// First bytes of a batch's head, which writers of the first versions leave out.
const CONTINUATION: [u8; 4] = [0xFF; 4];

/// Bytes behind the footer of a file: its length, and the first bytes again.
const TRAILER_BYTES: usize = size_of::<u32>() + MAGIC.len();

/// Most bytes that a codec makes of one byte, generously.
const RATIO_MAX: usize = 1 << 16;

/// Bytes of a batch from which on its head is fetched alone.
const HEADS_APART_BYTES: usize = 512 << 10;

/// Most records of a batch for each byte of its body. A record takes at least a bit.
const RECORDS_PER_BYTE_MAX: u64 = 8 * RATIO_MAX as u64;

/// Opens a file or a stream.
///
/// # Errors
/// The file is no Arrow IPC, or damaged.
pub(crate) fn open(object: &Object) -> Result<Box<dyn Source>> {
    let is_file = object.slice_to_keep(0..object.len().min(MAGIC.len()))? == MAGIC;
    if !is_file {
        return stream(object);
    }
    let file = File::open(object).map_err(|flaw| flaw.at(object.path(), |error| shown(&error)))?;
    let (fields, columns) = columns(&file.schema);
    let outline = Outline { columns, blocks: file.records.clone() };
    Ok(Box::new(Arrow { object: object.clone(), batches: Batches::File(file), fields, outline }))
}

fn stream(object: &Object) -> Result<Box<dyn Source>> {
    let bytes_max = room::bytes_max();
    if !object.is_here() && object.len() as u64 > bytes_max {
        return wrong(
            object.path(),
            format!(
                "an Arrow stream of {} bytes, more than the {bytes_max} of data_memory; streams are read as a whole: write \
                 an Arrow file",
                object.len()
            ),
        );
    }
    let bytes = object.reader(0);
    let failure = bytes.failure();
    let mut held = Held::default();
    let decode = || {
        let reader = StreamReader::try_new(bytes, None)?;
        let (schema, mut batches) = (reader.schema(), Vec::new());
        for batch in reader {
            let batch = batch?;
            held.grow(batch.get_array_memory_size() as u64).map_err(|full| {
                let what = "it is an Arrow stream, which is read as a whole";
                ArrowError::ExternalError(Box::new(failure.keep(full.at(object.path(), what))))
            })?;
            batches.push(batch);
        }
        Ok::<_, ArrowError>((schema, batches))
    };
    let (schema, batches) = guarded(decode).map_err(|error| failure.or(|| failed(object, &error)))?;
    let (fields, columns) = columns(&schema);
    let blocks = batches.iter().map(|batch| batch.num_rows() as u64).collect();
    let outline = Outline { columns, blocks };
    Ok(Box::new(Arrow {
        object: object.clone(),
        batches: Batches::Stream { batches, _held: held },
        fields,
        outline,
    }))
}

/// Returns the fields of which columns can be made, by index, and these columns.
pub(super) fn columns(schema: &Schema) -> (Vec<usize>, Vec<proto::column::ColumnSpec>) {
    let column = |(at, field): (usize, &std::sync::Arc<arrow_schema::Field>)| {
        Some((at, arrow_columns::column(field)?))
    };
    schema.fields().iter().enumerate().filter_map(column).unzip()
}

/// What the footer of a file says, and its dictionaries.
struct File {
    schema: SchemaRef,
    version: MetadataVersion,
    /// Place of each batch.
    batches: Vec<Block>,
    /// Number of records of each batch.
    records: Vec<u64>,
    dictionaries: HashMap<i64, ArrayRef>,
}

impl File {
    /// Reads the footer, the head of each batch, and all dictionaries.
    ///
    /// # Errors
    /// The file is damaged, or cannot be read.
    fn open(object: &Object) -> Result<Self, Flaw> {
        let trailer_begin =
            object.len().checked_sub(TRAILER_BYTES).ok_or("the file has no footer".to_owned())?;
        let trailer = object.slice_to_keep(trailer_begin..object.len())?;
        let trailer = trailer.first_chunk().copied().unwrap_or_default();
        let footer_bytes = guarded(|| read_footer_length(trailer))?;
        let footer_begin = trailer_begin
            .checked_sub(footer_bytes)
            .ok_or_else(|| format!("a footer of {footer_bytes} bytes, which the file does not have"))?;
        let footer = object.slice_to_keep(footer_begin..trailer_begin)?;
        let (schema, version, batches, dictionaries) = guarded(|| {
            let footer = root_as_footer(&footer).map_err(|error| error.to_string())?;
            let schema = footer.schema().ok_or("the footer has no schema")?;
            if !schema.endianness().equals_to_target_endianness() {
                return Err("the values have the byte order of another kind of machine".to_owned());
            }
            let schema = try_fb_to_schema(schema).map_err(|error| error.to_string())?;
            let batches = footer.recordBatches().ok_or("the footer lists no batches")?;
            let batches: Vec<Block> = batches.iter().copied().collect();
            let dictionaries: Vec<Block> = footer.dictionaries().iter().flatten().copied().collect();
            Ok((Arc::new(schema), footer.version(), batches, dictionaries))
        })?;
        let mut file = Self { schema, version, batches, records: Vec::new(), dictionaries: HashMap::new() };
        for block in &dictionaries {
            let (head, body) = read(object, block)?;
            file.dictionary(&head, &body)?;
        }
        for (at, block) in file.batches.clone().iter().enumerate() {
            let (head, body) = place(object, block)?;
            // Heads of small batches are fetched together, with what lies between them.
            let head = match body.len() < HEADS_APART_BYTES {
                true => object.slice(head)?,
                false => object.slice_to_keep(head)?,
            };
            let records = guarded(|| {
                let batch = file.message(&head)?.header_as_record_batch().ok_or("no batch of records")?;
                let records = u64::try_from(batch.length()).map_err(|error| error.to_string())?;
                match records <= RECORDS_PER_BYTE_MAX.saturating_mul(body.len() as u64) {
                    true => Ok(records),
                    false => Err(format!("{records} records do not lie in {} bytes", body.len())),
                }
            });
            file.records.push(records.map_err(|error| format!("batch {at}: {error}"))?);
        }
        Ok(file)
    }

    fn dictionary(&mut self, head: &[u8], body: &Buffer) -> Result<(), String> {
        let (schema, mut dictionaries) = (self.schema.clone(), std::mem::take(&mut self.dictionaries));
        self.dictionaries = guarded(|| {
            let message = self.message(head)?;
            let batch = message.header_as_dictionary_batch().ok_or("no dictionary")?;
            batch.data().map_or(Ok(()), |values| check_sizes(&values, body))?;
            let version = message.version();
            let read = reader::read_dictionary(body, batch, &schema, &mut dictionaries, &version);
            read.map_err(|error| error.to_string())?;
            Ok::<_, String>(dictionaries)
        })?;
        Ok(())
    }

    /// Decodes the fields of a batch.
    ///
    /// # Errors
    /// The batch is damaged, or cannot be read.
    fn batch(&self, object: &Object, at: usize, fields: &[usize]) -> Result<RecordBatch, Flaw> {
        let (head, body) = read(object, &self.batches[at])?;
        let decoded = guarded(|| {
            let message = self.message(&head)?;
            let batch = message.header_as_record_batch().ok_or("no batch of records")?;
            check_sizes(&batch, &body)?;
            let (schema, version) = (self.schema.clone(), message.version());
            let read =
                reader::read_record_batch(&body, batch, schema, &self.dictionaries, Some(fields), &version);
            read.map_err(|error| error.to_string())
        })?;
        if decoded.num_rows() as u64 != self.records[at] {
            return Err(format!("{} records, its head said {}", decoded.num_rows(), self.records[at]).into());
        }
        Ok(decoded)
    }

    /// Reads the head of a batch or of a dictionary.
    fn message<'a>(&self, head: &'a [u8]) -> Result<Message<'a>, String> {
        let skipped = if head.starts_with(&CONTINUATION) { 8 } else { 4 };
        let head = head.get(skipped..).ok_or("no head of a batch")?;
        let message = root_as_message(head).map_err(|error| error.to_string())?;
        if self.version != MetadataVersion::V1 && message.version() != self.version {
            return Err("its version of the format is another than that of the file".to_owned());
        }
        Ok(message)
    }
}

/// Checks the sizes that compressed arrays announce, because a decoder takes so much memory before
/// it reads them.
///
/// # Errors
/// An array announces more than its bytes can become, or more than fits into `data_memory`.
fn check_sizes(head: &Head<'_>, body: &[u8]) -> Result<(), String> {
    if head.compression().is_none() {
        return Ok(());
    }
    // An array without bytes has no size before it.
    for array in head.buffers().into_iter().flatten().filter(|array| array.length() > 0) {
        let at = usize::try_from(array.offset()).ok();
        let size =
            at.and_then(|at| body.get(at..)?.first_chunk()).map_or(0, |size| i64::from_le_bytes(*size));
        let packed = usize::try_from(array.length()).unwrap_or_default().min(body.len());
        if usize::try_from(size).is_ok_and(|size| size > packed.saturating_mul(RATIO_MAX)) {
            return Err(format!("a compressed array of {packed} bytes cannot become {size}"));
        }
        let bytes_max = room::bytes_max();
        if u64::try_from(size).is_ok_and(|size| size > bytes_max) {
            return Err(format!(
                "a compressed array becomes {size} bytes, more than the {bytes_max} of data_memory; raise it, or write \
                 smaller batches"
            ));
        }
    }
    Ok(())
}

/// Returns the head and the body that a footer names.
///
/// # Errors
/// The footer names bytes that the file does not have.
fn place(object: &Object, block: &Block) -> Result<(Range<usize>, Range<usize>), Flaw> {
    let range = || {
        let begin = usize::try_from(block.offset()).ok()?;
        let middle = begin.checked_add(usize::try_from(block.metaDataLength()).ok()?)?;
        let end = middle.checked_add(usize::try_from(block.bodyLength()).ok()?)?;
        (end <= object.len()).then_some((begin..middle, middle..end))
    };
    range().ok_or_else(|| "the footer names bytes that the file does not have".to_owned().into())
}

/// Reads the head and the body that a footer names. The body is a copy with Arrow's alignment,
/// which nobody else can change after Arrow has checked it.
///
/// # Errors
/// The footer names bytes that the file does not have, or they cannot be read.
fn read(object: &Object, block: &Block) -> Result<(Bytes, Buffer), Flaw> {
    let (head, body) = place(object, block)?;
    let (begin, middle) = (head.start, head.end);
    let all = object.slice_to_keep(begin..body.end)?;
    Ok((all.slice(..middle - begin), Buffer::from(&all[middle - begin..])))
}

enum Batches {
    File(File),
    Stream {
        batches: Vec<RecordBatch>,
        /// Their place in the memory for data.
        _held: Held,
    },
}

struct Arrow {
    object: Object,
    batches: Batches,
    /// Field of each column.
    fields: Vec<usize>,
    outline: Outline,
}

impl Source for Arrow {
    fn outline(&self) -> &Outline {
        &self.outline
    }

    fn read(&self, block: usize, columns: &[usize]) -> Result<Vec<Column>> {
        let fields: Vec<usize> = columns.iter().map(|&at| self.fields[at]).collect();
        let arrays: Vec<ArrayRef> = match &self.batches {
            Batches::File(file) => {
                let batch = file.batch(&self.object, block, &fields);
                let named = |error: String| shown(&format!("batch {block}: {error}"));
                batch.map_err(|flaw| flaw.at(self.object.path(), named))?.columns().to_vec()
            }
            Batches::Stream { batches, .. } => {
                fields.iter().map(|&field| batches[block].column(field).clone()).collect()
            }
        };
        let column = |(&at, array): (&usize, ArrayRef)| {
            arrow_columns::convert(self.object.path(), &self.outline.columns[at], &[array])
        };
        columns.iter().zip(arrays).map(column).collect()
    }
}

fn failed(object: &Object, error: &str) -> Error {
    malformed(object.path(), shown(error))
}

fn shown(error: &str) -> String {
    format!("no Arrow IPC file or stream, or a damaged one: {error}; copy it again")
}
