//! Arrays of a file: the first dimension counts the records.
//!
//! Values in a column's own type and in little-endian order stay where they are in a file that is
//! in memory. Others are converted once, when the file is opened: u16 becomes i32, and u32 becomes
//! i64. Arrays on another machine are blocks of some records, which are fetched and converted when
//! they are used.

use std::ops::Range;

use proto::column::{ColumnSpec, ElementType};

use crate::column::{Aligned, Column, Memory};
use crate::error::{Result, malformed, wrong};
use crate::format::{Outline, Source};
use crate::object::Object;
use crate::packed::Access;

/// Bytes of a block of an array on another machine, about: records that are read in sequence, and
/// records in any order, of which the others of a block are mostly read in vain.
const BLOCK_BYTES: usize = 4 << 20;
const ANY_BLOCK_BYTES: usize = 128 << 10;

/// Most blocks of such a file, so that the list of blocks stays small.
const BLOCKS_MAX: usize = 1 << 18;

/// Type of a file's elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stored {
    /// A column's own type.
    As(ElementType),
    U16,
    U32,
}

impl Stored {
    /// Returns the bytes of one element.
    const fn size(self) -> usize {
        match self {
            Self::As(dtype) => dtype.size(),
            Self::U16 => 2,
            Self::U32 => 4,
        }
    }

    /// Returns the type of the column.
    pub(super) const fn dtype(self) -> ElementType {
        match self {
            Self::As(dtype) => dtype,
            Self::U16 => ElementType::I32,
            Self::U32 => ElementType::I64,
        }
    }
}

/// Order of an element's bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Endian {
    Little,
    Big,
}

/// An array of a file.
#[derive(Debug)]
pub(crate) struct Array {
    /// Sizes of the dimensions; the first one counts the records.
    pub(crate) shape: Vec<usize>,
    pub(crate) stored: Stored,
    pub(crate) endian: Endian,
    /// Part of the file with the values.
    pub(crate) range: Range<usize>,
}

impl Array {
    /// Opens the array as the only column of a file.
    ///
    /// # Errors
    /// Those of [`values`](Self::values), or the values cannot be read.
    pub(crate) fn open(self, object: &Object, name: &str) -> Result<Box<dyn Source>> {
        let values = self.values(object, name).map_err(|reason| malformed(object.path(), reason))?;
        open(object, vec![values])
    }

    /// Returns the array of `object` as the column `name`. It reads no values.
    ///
    /// # Errors
    /// The shape has no dimensions (one value, no records), or does not fit the length of the
    /// values.
    pub(crate) fn values(self, object: &Object, name: &str) -> Result<Values, String> {
        let (spec, records) = self.checked(name)?;
        let Self { shape, stored, endian, range } = self;
        // Not zero: all sizes behind the first are at least 1.
        let record_bytes = shape.iter().skip(1).product::<usize>() * stored.size();
        Ok(Values { object: object.clone(), spec, stored, endian, begin: range.start, records, record_bytes })
    }

    /// Returns the array as the column `name`. Its range is a part of `bytes`, which are copied.
    ///
    /// # Errors
    /// Those of [`values`](Self::values).
    pub(crate) fn column(self, bytes: &[u8], name: &str) -> Result<Column, String> {
        let (spec, records) = self.checked(name)?;
        let memory = Memory::Owned(converted(self.stored, self.endian, &bytes[self.range]));
        Ok(Column::fixed(spec, records, memory))
    }

    /// Returns the column, and the number of records.
    ///
    /// # Errors
    /// Those of [`values`](Self::values).
    fn checked(&self, name: &str) -> Result<(ColumnSpec, usize), String> {
        let Self { shape, stored, range, .. } = self;
        let Some((&records, of_one)) = shape.split_first() else {
            return Err(
                "holds a single value without dimensions; the first dimension must be the records".to_owned()
            );
        };
        let spec = ColumnSpec::fixed(name, stored.dtype(), of_one);
        // The product of all dimensions, with 0 taken as 1, bounds the product of any of them.
        let fits = shape.iter().try_fold(8usize, |bytes, &size| bytes.checked_mul(size.max(1)));
        if spec.width().is_none() || fits.is_none() {
            return Err(format!(
                "the header's shape {shape:?} is larger than any memory; the file is damaged"
            ));
        }
        let expected = shape.iter().product::<usize>() * stored.size();
        let found = range.len();
        if found != expected {
            let what = if found < expected { "the file is cut off" } else { "something was appended to it" };
            return Err(format!(
                "the header's shape {shape:?} needs {expected} bytes of values, found {found}; {what}"
            ));
        }
        if spec.width() == Some(0) {
            return Err(format!("a record of shape {of_one:?} has no values"));
        }
        Ok((spec, records))
    }
}

/// An array whose shape is checked, as a column.
#[derive(Clone, Debug)]
pub(crate) struct Values {
    /// File with the values.
    object: Object,
    spec: ColumnSpec,
    stored: Stored,
    endian: Endian,
    /// Place of the first value.
    begin: usize,
    records: usize,
    /// Bytes of one record in the file.
    record_bytes: usize,
}

impl Values {
    /// Returns the name.
    pub(crate) fn name(&self) -> &str {
        &self.spec.name
    }

    /// Reads some records.
    ///
    /// # Errors
    /// The file has changed, or cannot be read.
    fn read(&self, records: Range<usize>) -> Result<Column> {
        let place = |record: usize| self.begin + record * self.record_bytes;
        let range = place(records.start)..place(records.end);
        let memory = match is_as_in_a_column(self.stored, self.endian) {
            true => self.object.memory(range)?,
            false => Memory::Owned(converted(self.stored, self.endian, &self.object.slice_to_keep(range)?)),
        };
        Ok(Column::fixed(self.spec.clone(), records.len(), memory))
    }
}

/// Returns whether values have the type and the order of bytes that they have in a column.
fn is_as_in_a_column(stored: Stored, endian: Endian) -> bool {
    matches!(stored, Stored::As(dtype) if dtype.size() == 1 || endian == Endian::Little)
}

/// Returns values of a file as those of a column.
fn converted(stored: Stored, endian: Endian, values: &[u8]) -> Aligned {
    let is_big = endian == Endian::Big;
    match stored {
        _ if is_as_in_a_column(stored, endian) => {
            let mut own = Aligned::with_capacity(values.len());
            own.extend(values);
            own
        }
        Stored::As(dtype) => match dtype.size() {
            2 => each(values, |value: [u8; 2]| u16::from_be_bytes(value).to_le_bytes()),
            4 => each(values, |value: [u8; 4]| u32::from_be_bytes(value).to_le_bytes()),
            _ => each(values, |value: [u8; 8]| u64::from_be_bytes(value).to_le_bytes()),
        },
        Stored::U16 => each(values, |value: [u8; 2]| {
            let value = if is_big { u16::from_be_bytes(value) } else { u16::from_le_bytes(value) };
            i32::from(value).to_le_bytes()
        }),
        Stored::U32 => each(values, |value: [u8; 4]| {
            let value = if is_big { u32::from_be_bytes(value) } else { u32::from_le_bytes(value) };
            i64::from(value).to_le_bytes()
        }),
    }
}

/// Returns `decode(element)` of each element of `values`.
fn each<const N: usize, const M: usize>(values: &[u8], decode: impl Fn([u8; N]) -> [u8; M]) -> Aligned {
    let values = values.as_chunks::<N>().0;
    let mut out = Aligned::zeros(values.len() * M);
    let places = out.as_chunks_mut::<M>().0;
    places.iter_mut().zip(values).for_each(|(out, &value)| *out = decode(value));
    out
}

/// Opens a file with these columns: one block of all records if the values are in memory, otherwise
/// blocks of some records.
///
/// # Errors
/// A column has another number of records than the first one, there is none, or the values cannot
/// be read.
pub(crate) fn open(object: &Object, columns: Vec<Values>) -> Result<Box<dyn Source>> {
    let Some(first) = columns.first() else {
        return wrong(object.path(), "the file has no arrays; a record needs at least one");
    };
    let records = first.records;
    if let Some(other) = columns.iter().find(|column| column.records != records) {
        let (first, name, found) = (first.name(), other.name(), other.records);
        return wrong(
            object.path(),
            format!(
                "array `{name}` has {found} records, array `{first}` has {records}; the first dimension of all arrays \
                 counts the records: save those that differ in other files"
            ),
        );
    }
    let specs = columns.iter().map(|column| column.spec.clone()).collect();
    if columns.iter().all(|column| column.object.is_here()) {
        let outline = Outline { columns: specs, blocks: vec![records as u64] };
        let read = |values: &Values| Ok(values.read(0..records)?.shared());
        return Ok(Box::new(Whole { columns: columns.iter().map(read).collect::<Result<_>>()?, outline }));
    }
    let widest = columns.iter().map(|column| column.record_bytes).max().unwrap_or_default();
    let block_bytes = match object.remote_access() {
        Some(Access::Anywhere) => ANY_BLOCK_BYTES,
        Some(Access::InSequence) | None => BLOCK_BYTES,
    };
    let in_block = (block_bytes / widest.max(1)).max(records.div_ceil(BLOCKS_MAX)).max(1);
    let begins = (0..records).step_by(in_block);
    let blocks = begins.map(|begin| in_block.min(records - begin) as u64).collect();
    Ok(Box::new(Parts { columns, in_block, outline: Outline { columns: specs, blocks } }))
}

/// A file that is one block.
struct Whole {
    columns: Vec<Column>,
    outline: Outline,
}

impl Source for Whole {
    fn outline(&self) -> &Outline {
        &self.outline
    }

    fn read(&self, _block: usize, columns: &[usize]) -> Result<Vec<Column>> {
        Ok(columns.iter().map(|&at| self.columns[at].clone()).collect())
    }

    fn is_in_place(&self) -> bool {
        true
    }
}

/// A file whose values are fetched block by block.
struct Parts {
    columns: Vec<Values>,
    /// Records of each block but the last.
    in_block: usize,
    outline: Outline,
}

impl Source for Parts {
    fn outline(&self) -> &Outline {
        &self.outline
    }

    fn read(&self, block: usize, columns: &[usize]) -> Result<Vec<Column>> {
        let first = block * self.in_block;
        let records = first..first + self.outline.blocks[block] as usize;
        columns.iter().map(|&at| self.columns[at].read(records.clone())).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn open(shape: &[usize], stored: Stored, endian: Endian, bytes: &[u8]) -> Result<Column> {
        let object = Object::copy(Path::new("a"), bytes.to_vec());
        let array = Array { shape: shape.to_vec(), stored, endian, range: 0..bytes.len() };
        Ok(array.open(&object, "x")?.read(0, &[0])?.remove(0))
    }

    #[test]
    fn every_element_type_is_read_in_both_byte_orders() {
        macro_rules! check {
            ($($stored:expr, $type:ty => $column:ty: $($value:expr),+;)+) => {$(
                let values: Vec<$type> = vec![$($value),+];
                let little: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
                let big: Vec<u8> = values.iter().flat_map(|value| value.to_be_bytes()).collect();
                let expected: Vec<$column> = values.iter().map(|&value| <$column>::from(value)).collect();
                for (endian, bytes) in [(Endian::Little, little), (Endian::Big, big)] {
                    let column = open(&[1, values.len()], $stored, endian, &bytes).unwrap();
                    let expected: Vec<u8> = expected.iter().flat_map(|value| value.to_le_bytes()).collect();
                    assert_eq!(column.bytes(), expected, "{endian:?} {}", stringify!($type));
                }
            )+};
        }
        check! {
            Stored::As(ElementType::U8), u8 => u8: 0, 1, 255;
            Stored::As(ElementType::I8), i8 => i8: -128, -1, 127;
            Stored::U16, u16 => i32: 1, 65_535;
            Stored::As(ElementType::I16), i16 => i16: -32_768, 258;
            Stored::U32, u32 => i64: 1, u32::MAX;
            Stored::As(ElementType::I32), i32 => i32: i32::MIN, 65_538;
            Stored::As(ElementType::I64), i64 => i64: -1, 1 << 53;
            Stored::As(ElementType::F32), f32 => f32: 0.1, -3.5;
            Stored::As(ElementType::F64), f64 => f64: 0.1, 1e300;
        }
    }

    #[test]
    fn values_in_their_own_type_are_not_copied() {
        let column = open(&[2, 3], Stored::As(ElementType::F32), Endian::Little, &[7; 24]).unwrap();
        assert_eq!((column.records(), column.owned_bytes()), (2, 0));
        // Each read of a converted array gives the values of one conversion.
        let column = open(&[2, 3], Stored::As(ElementType::F32), Endian::Big, &[7; 24]).unwrap();
        assert_eq!((column.record(1).len(), column.owned_bytes()), (12, 0));
    }

    #[test]
    fn sizes_that_contradict_the_shape_are_refused() {
        let error = |shape: &[usize], len| {
            open(shape, Stored::As(ElementType::F32), Endian::Big, &vec![0; len]).unwrap_err().to_string()
        };
        assert!(error(&[2, 3], 20).contains("needs 24 bytes of values, found 20; the file is cut off"));
        assert!(error(&[2, 3], 25).contains("found 25; something was appended"));
        assert!(error(&[], 4).contains("single value"));
        assert!(error(&[5, 0], 0).contains("a record of shape [0] has no values"));
        assert!(error(&[0, usize::MAX], 0).contains("larger than any memory"));
        assert!(error(&[usize::MAX, usize::MAX], 0).contains("larger than any memory"));
    }
}
