//! An array as in its file: a shape, an element type, and the file's own bytes.
//!
//! Nothing is converted when a file is read, so a data set takes as much memory as its unpacked
//! files: a byte stays a byte. Elements are converted one record at a time, when a batch is made.

use std::path::Path;

use crate::error::{Result, wrong};

/// Type of a file's elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Element {
    U8,
    I8,
    U16,
    I16,
    U32,
    I32,
    I64,
    F32,
    F64,
}

impl Element {
    /// Returns the bytes of one element.
    pub(crate) const fn size(self) -> usize {
        match self {
            Self::U8 | Self::I8 => 1,
            Self::U16 | Self::I16 => 2,
            Self::U32 | Self::I32 | Self::F32 => 4,
            Self::I64 | Self::F64 => 8,
        }
    }
}

/// Order of an element's bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Endian {
    Little,
    Big,
}

/// An array of `shape[0]` records, row-major.
#[derive(Debug)]
pub(crate) struct Array {
    shape: Vec<usize>,
    element: Element,
    endian: Endian,
    /// Content of the whole file, header included.
    bytes: Vec<u8>,
    /// Offset of the first element in `bytes`.
    start: usize,
}

impl Array {
    /// Takes over a file whose elements start at `start`.
    ///
    /// # Errors
    /// The shape has no dimensions (one value, no records), or the file is shorter or longer than
    /// the shape says.
    pub(crate) fn new(
        path: &Path,
        shape: Vec<usize>,
        element: Element,
        endian: Endian,
        bytes: Vec<u8>,
        start: usize,
    ) -> Result<Self> {
        if shape.is_empty() {
            return wrong(
                path,
                "holds a single value without dimensions; the first dimension must be the records",
            );
        }
        // The product of all dimensions, with 0 taken as 1, bounds the product of any of them.
        let fits = shape.iter().try_fold(element.size(), |bytes, &size| bytes.checked_mul(size.max(1)));
        if fits.is_none() {
            return wrong(
                path,
                format!("the header's shape {shape:?} is larger than any memory; the file is damaged"),
            );
        }
        let expected = shape.iter().product::<usize>() * element.size();
        let found = bytes.len().saturating_sub(start);
        if found != expected {
            let what = if found < expected { "the file is cut off" } else { "something was appended to it" };
            return wrong(
                path,
                format!(
                    "the header's shape {shape:?} needs {expected} bytes of values, found {found}; {what}"
                ),
            );
        }
        Ok(Self { shape, element, endian, bytes, start })
    }

    /// Returns the number of records.
    pub(crate) fn records(&self) -> usize {
        self.shape[0]
    }

    /// Returns the shape of one record: the dimensions after the first, or `[1]` if there are none.
    pub(crate) fn record_shape(&self) -> &[usize] {
        if self.shape.len() == 1 { &[1] } else { &self.shape[1..] }
    }

    /// Returns the number of values of one record.
    pub(crate) fn width(&self) -> usize {
        self.record_shape().iter().product()
    }

    /// Converts one record's values. Integers beyond 2^53 are rounded.
    ///
    /// # Panics
    /// If there is no such record, or `out` does not have the record's width.
    pub(crate) fn read<T>(&self, record: usize, out: &mut [T], convert: impl Fn(f64) -> T) {
        assert_eq!(out.len(), self.width(), "room for one record");
        let bytes = self.width() * self.element.size();
        let raw = &self.bytes[self.start + record * bytes..][..bytes];
        let endian = self.endian;
        match self.element {
            Element::U8 => each(raw, endian, out, |[byte]: [u8; 1]| convert(f64::from(byte))),
            Element::I8 => each(raw, endian, out, |raw| convert(f64::from(i8::from_le_bytes(raw)))),
            Element::U16 => each(raw, endian, out, |raw| convert(f64::from(u16::from_le_bytes(raw)))),
            Element::I16 => each(raw, endian, out, |raw| convert(f64::from(i16::from_le_bytes(raw)))),
            Element::U32 => each(raw, endian, out, |raw| convert(f64::from(u32::from_le_bytes(raw)))),
            Element::I32 => each(raw, endian, out, |raw| convert(f64::from(i32::from_le_bytes(raw)))),
            Element::I64 => each(raw, endian, out, |raw| convert(i64::from_le_bytes(raw) as f64)),
            Element::F32 => each(raw, endian, out, |raw| convert(f64::from(f32::from_le_bytes(raw)))),
            Element::F64 => each(raw, endian, out, |raw| convert(f64::from_le_bytes(raw))),
        }
    }
}

/// Computes `out[i] = decode(element i of raw, in little-endian order)`.
fn each<T, const N: usize>(raw: &[u8], endian: Endian, out: &mut [T], decode: impl Fn([u8; N]) -> T) {
    for (out, &raw) in out.iter_mut().zip(raw.as_chunks::<N>().0) {
        let mut raw = raw;
        if endian == Endian::Big {
            raw.reverse();
        }
        *out = decode(raw);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn array(shape: &[usize], element: Element, endian: Endian, bytes: &[u8]) -> Result<Array> {
        Array::new(Path::new("a"), shape.to_vec(), element, endian, bytes.to_vec(), 0)
    }

    fn read(array: &Array, record: usize) -> Vec<f64> {
        let mut out = vec![0.0; array.width()];
        array.read(record, &mut out, |value| value);
        out
    }

    #[test]
    fn every_element_type_is_read_in_both_byte_orders() {
        macro_rules! check {
            ($($element:ident $type:ty: $($value:expr),+;)+) => {$(
                let values: Vec<$type> = vec![$($value),+];
                let little: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
                let big: Vec<u8> = values.iter().flat_map(|value| value.to_be_bytes()).collect();
                let expected: Vec<f64> = values.iter().map(|&value| value as f64).collect();
                for (endian, bytes) in [(Endian::Little, little), (Endian::Big, big)] {
                    let array = array(&[1, values.len()], Element::$element, endian, &bytes).unwrap();
                    assert_eq!(read(&array, 0), expected, "{endian:?} {}", stringify!($element));
                }
            )+};
        }
        check! {
            U8 u8: 0, 1, 255;
            I8 i8: -128, -1, 127;
            U16 u16: 1, 65_535;
            I16 i16: -32_768, 258;
            U32 u32: 1, u32::MAX;
            I32 i32: i32::MIN, 65_538;
            I64 i64: -1, 1 << 53;
            F32 f32: 0.1, -3.5;
            F64 f64: 0.1, 1e300;
        }
    }

    #[test]
    fn records_lie_one_after_the_other() {
        let array = array(&[2, 3], Element::U8, Endian::Little, &[1, 2, 3, 4, 5, 6]).unwrap();
        assert_eq!(
            (array.records(), array.record_shape(), read(&array, 1)),
            (2, &[3][..], vec![4.0, 5.0, 6.0])
        );
    }

    #[test]
    fn sizes_that_contradict_the_shape_are_refused() {
        let error = |shape: &[usize], len| {
            array(shape, Element::F32, Endian::Big, &vec![0; len]).unwrap_err().to_string()
        };
        assert!(error(&[2, 3], 20).contains("needs 24 bytes of values, found 20; the file is cut off"));
        assert!(error(&[2, 3], 25).contains("found 25; something was appended"));
        assert!(error(&[], 4).contains("single value"));
        assert!(error(&[0, usize::MAX], 0).contains("larger than any memory"));
        assert!(error(&[usize::MAX, usize::MAX], 0).contains("larger than any memory"));
    }
}
