//! NumPy's array files (numpy.lib.format, versions 1.0 to 3.0).
//!
//! ```text
//! \x93NUMPY  major  minor | header length, u16 (1.0) or u32 little-endian | header | values
//! {'descr': '<f4', 'fortran_order': False, 'shape': (1797, 64), }
//! ```
//!
//! The header is a Python literal. A parser for this one dictionary is a page; crates for it need a
//! parser generator and big integers.

use std::ops::Range;

use proto::column::ElementType;

use super::array::{Array, Endian, Stored};
use crate::error::{Flaw, Result};
use crate::format::Source;
use crate::object::Object;

/// Opens a file as the column `name`.
///
/// # Errors
/// The file is no array of numbers in row-major order, or shorter or longer than its header says.
pub(crate) fn open(object: &Object, name: &str) -> Result<Box<dyn Source>> {
    let array = array(object, 0..object.len()).map_err(|flaw| flaw.at(object.path(), |reason| reason))?;
    array.open(object, name)
}

/// Reads the header of an array that lies in a part of a file.
///
/// # Errors
/// The part is no array of numbers in row-major order, or cannot be read.
pub(super) fn array(object: &Object, range: Range<usize>) -> Result<Array, Flaw> {
    let part = |bytes: usize| object.slice_to_keep(range.start..range.start + bytes.min(range.len()));
    let mut head = part(HEAD_BYTES)?;
    let needed = head_bytes(&head).min(HEAD_BYTES_MAX);
    if needed > head.len() {
        head = part(needed)?;
    }
    let Array { shape, stored, endian, range: values } = header(&head)?;
    Ok(Array { shape, stored, endian, range: range.start + values.start..range.end })
}

/// Bytes up to the end of the longer form of the header's length.
const LENGTH_END: usize = 12;

/// Bytes in which most headers end.
const HEAD_BYTES: usize = 1024;

/// Most bytes of a header. NumPy itself reads 10,000.
const HEAD_BYTES_MAX: usize = 16 << 20;

/// Returns the bytes of a header and what is before it, from its first bytes.
fn head_bytes(first: &[u8]) -> usize {
    match first {
        [_, _, _, _, _, _, 1, _, a, b, ..] => 10 + usize::from(u16::from_le_bytes([*a, *b])),
        [_, _, _, _, _, _, 2 | 3, _, a, b, c, d, ..] => {
            LENGTH_END.saturating_add(u32::from_le_bytes([*a, *b, *c, *d]) as usize)
        }
        _ => first.len(),
    }
}

/// Reads the header of an array. Its range has the bytes behind the header.
///
/// # Errors
/// The bytes do not begin with the header of an array of numbers in row-major order.
pub(crate) fn header(bytes: &[u8]) -> Result<Array, String> {
    let Some(rest) = bytes.strip_prefix(b"\x93NUMPY") else {
        return Err("no npy file: expected to start with \\x93NUMPY; save it with numpy.save".to_owned());
    };
    let (length, rest) = match rest {
        [1, _, a, b, rest @ ..] => (usize::from(u16::from_le_bytes([*a, *b])), rest),
        [2 | 3, _, a, b, c, d, rest @ ..] => (u32::from_le_bytes([*a, *b, *c, *d]) as usize, rest),
        [major, minor, ..] if !(1..=3).contains(major) => {
            return Err(format!("npy version {major}.{minor}, expected 1.0 to 3.0"));
        }
        _ => return Err("the file ends within its header; the file is cut off".to_owned()),
    };
    let Some(text) = rest.get(..length) else {
        return Err(format!("a header of {length} bytes, found {}; the file is cut off", rest.len()));
    };
    let start = bytes.len() - rest.len() + length;
    let header = Header::parse(text).ok_or_else(|| {
        let text = String::from_utf8_lossy(&text[..text.len().min(200)]);
        let text = text.trim();
        format!("header `{text}`: not that of an array of numbers; save it with numpy.save")
    })?;
    if header.fortran_order {
        return Err("the array is in column-major order; save numpy.ascontiguousarray(array)".to_owned());
    }
    let Some((stored, endian)) = dtype(&header.descr) else {
        let descr = header.descr;
        return Err(format!(
            "dtype `{descr}`, expected bool, u1, i1, u2, i2, u4, i4, i8, f2, f4 or f8; save array.astype(numpy.float32)"
        ));
    };
    Ok(Array { shape: header.shape, stored, endian, range: start..bytes.len() })
}

/// Parses an element type such as `<f4`: byte order, kind, bytes.
fn dtype(descr: &str) -> Option<(Stored, Endian)> {
    let (order, kind) = descr.split_at_checked(1)?;
    let endian = match order {
        "<" | "|" => Endian::Little,
        ">" => Endian::Big,
        _ => return None,
    };
    let stored = match kind {
        "b1" => Stored::As(ElementType::Bool),
        "u1" => Stored::As(ElementType::U8),
        "i1" => Stored::As(ElementType::I8),
        "u2" => Stored::U16,
        "i2" => Stored::As(ElementType::I16),
        "u4" => Stored::U32,
        "i4" => Stored::As(ElementType::I32),
        "i8" => Stored::As(ElementType::I64),
        "f2" => Stored::As(ElementType::F16),
        "f4" => Stored::As(ElementType::F32),
        "f8" => Stored::As(ElementType::F64),
        _ => return None,
    };
    Some((stored, endian))
}

/// Content of the header's dictionary.
#[derive(Debug, PartialEq)]
struct Header {
    descr: String,
    fortran_order: bool,
    shape: Vec<usize>,
}

impl Header {
    /// Parses the three keys in any order, as `numpy.lib.format` demands.
    fn parse(text: &[u8]) -> Option<Self> {
        let mut at = Cursor(std::str::from_utf8(text).ok()?);
        let (mut descr, mut fortran_order, mut shape) = (None, None, None);
        at.eat("{")?;
        while at.eat("}").is_none() {
            let key = at.string()?;
            at.eat(":")?;
            match key {
                "descr" => descr = Some(at.string()?.to_owned()),
                "fortran_order" => fortran_order = Some(at.boolean()?),
                "shape" => shape = Some(at.tuple()?),
                _ => return None,
            }
            if at.eat(",").is_none() && !at.0.trim_start().starts_with('}') {
                return None;
            }
        }
        let header = Self { descr: descr?, fortran_order: fortran_order?, shape: shape? };
        at.0.trim().is_empty().then_some(header)
    }
}

/// The unread rest of the text.
struct Cursor<'a>(&'a str);

impl<'a> Cursor<'a> {
    fn eat(&mut self, token: &str) -> Option<()> {
        self.0 = self.0.trim_start().strip_prefix(token)?;
        Some(())
    }

    fn string(&mut self) -> Option<&'a str> {
        let quote = if self.eat("'").is_some() { '\'' } else { self.eat("\"").map(|()| '"')? };
        let (string, rest) = self.0.split_once(quote)?;
        self.0 = rest;
        Some(string)
    }

    fn boolean(&mut self) -> Option<bool> {
        if self.eat("True").is_some() { Some(true) } else { self.eat("False").map(|()| false) }
    }

    fn tuple(&mut self) -> Option<Vec<usize>> {
        self.eat("(")?;
        let (inside, rest) = self.0.split_once(')')?;
        self.0 = rest;
        let inside = inside.trim().trim_end_matches(',');
        // Python 2 wrote `3L`.
        let size = |size: &str| size.trim().trim_end_matches('L').parse().ok();
        if inside.is_empty() { Some(Vec::new()) } else { inside.split(',').map(size).collect() }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::path::Path;

    use proptest::prelude::*;

    use super::*;
    use crate::column::Column;

    fn read(bytes: &[u8]) -> Result<Column> {
        let object = Object::copy(Path::new("x.npy"), bytes.to_vec());
        Ok(open(&object, "x")?.read(0, &[0])?.remove(0))
    }

    /// Writes a file of a version.
    pub(crate) fn write(version: u8, header: &str, values: &[u8]) -> Vec<u8> {
        let mut bytes = b"\x93NUMPY".to_vec();
        bytes.extend([version, 0]);
        match version {
            1 => bytes.extend((header.len() as u16).to_le_bytes()),
            _ => bytes.extend((header.len() as u32).to_le_bytes()),
        }
        bytes.extend(header.as_bytes());
        bytes.extend(values);
        bytes
    }

    /// Writes the text of a header.
    pub(crate) fn header(descr: &str, fortran_order: &str, shape: &str) -> String {
        format!("{{'descr': '{descr}', 'fortran_order': {fortran_order}, 'shape': {shape}, }}          \n")
    }

    fn error(bytes: &[u8]) -> String {
        read(bytes).unwrap_err().to_string()
    }

    #[test]
    fn all_three_versions_are_read() {
        for version in 1..=3 {
            let bytes = write(version, &header("|u1", "False", "(2, 3)"), &[1, 2, 3, 4, 5, 6]);
            let column = read(&bytes).unwrap();
            assert_eq!((column.records(), column.record(1)), (2, &[4, 5, 6][..]), "version {version}");
        }
    }

    #[test]
    fn headers_are_read_as_python_writes_them() {
        let parse = |text: &str| Header::parse(text.as_bytes());
        let expected = Header { descr: "<f4".to_owned(), fortran_order: false, shape: vec![3] };
        assert_eq!(
            parse("{'descr': '<f4', 'fortran_order': False, 'shape': (3,), }  \n").as_ref(),
            Some(&expected)
        );
        assert_eq!(
            parse("{\"shape\":(3L,),\"fortran_order\":False,\"descr\":\"<f4\"}").as_ref(),
            Some(&expected)
        );
        assert_eq!(
            parse("{'descr': '<f4', 'fortran_order': False, 'shape': (), }").unwrap().shape,
            [0usize; 0]
        );
        for text in ["", "{", "{'descr': '<f4'}", "{'descr' '<f4'}", "{'shape': (1 2)}", "{'shape': (-1,)}"] {
            assert_eq!(parse(text), None, "{text}");
        }
        assert_eq!(parse("{'descr': '<f4' 'fortran_order': False, 'shape': (3,)}"), None);
        assert_eq!(parse("{'descr': '<f4', 'fortran_order': False, 'shape': (3,)} x"), None);
    }

    #[test]
    fn every_number_type_of_numpy_has_its_element() {
        for (descr, expected) in [
            ("|b1", (Stored::As(ElementType::Bool), Endian::Little)),
            ("|i1", (Stored::As(ElementType::I8), Endian::Little)),
            ("<u2", (Stored::U16, Endian::Little)),
            ("<i2", (Stored::As(ElementType::I16), Endian::Little)),
            ("<u4", (Stored::U32, Endian::Little)),
            ("<i4", (Stored::As(ElementType::I32), Endian::Little)),
            ("<i8", (Stored::As(ElementType::I64), Endian::Little)),
            ("<f4", (Stored::As(ElementType::F32), Endian::Little)),
            (">f8", (Stored::As(ElementType::F64), Endian::Big)),
        ] {
            assert_eq!(dtype(descr), Some(expected));
        }
        assert_eq!(
            (dtype(""), dtype("é"), dtype("<c8"), dtype("|O"), dtype("=f4")),
            (None, None, None, None, None)
        );
    }

    #[test]
    fn files_that_cannot_be_read_say_why() {
        assert!(error(b"PK\x03\x04").contains("x.npy: no npy file"));
        assert!(error(b"\x93NUMPY\x01\x00").contains("ends within its header"));
        assert!(error(b"\x93NUMPY\x04\x00\x00\x00").contains("npy version 4.0"));
        assert!(error(&write(1, &header("<f4", "False", "(1,)"), &[])[..40]).contains("cut off"));
        assert!(error(&write(1, &header("<f4", "True", "(1, 1)"), &[0; 4])).contains("ascontiguousarray"));
        assert!(error(&write(1, &header("<U3", "False", "(1,)"), &[0; 12])).contains("dtype `<U3`"));
        assert!(error(&write(1, "{'descr': [('a', '<f4')]}", &[])).contains("header `{'descr': [('a'"));
        assert!(
            error(&write(2, &header("<f4", "False", "(2, 2)"), &[0; 15]))
                .contains("needs 16 bytes of values, found 15")
        );
        assert!(error(&write(1, &header("<f4", "False", "()"), &[0; 4])).contains("single value"));
    }

    proptest! {
        #[test]
        fn what_is_written_is_read(rows in proptest::collection::vec(any::<[i16; 3]>(), 0..6)) {
            let values: Vec<u8> = rows.iter().flatten().flat_map(|value| value.to_le_bytes()).collect();
            let shape = format!("({}, 3)", rows.len());
            let column = read(&write(1, &header("<i2", "False", &shape), &values)).unwrap();
            prop_assert_eq!(column.records(), rows.len());
            prop_assert_eq!(column.bytes(), values);
        }

        #[test]
        fn damaged_files_never_panic(
            version in 1u8..4,
            edits in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..5),
            cut in 0usize..110,
        ) {
            let mut bytes = write(version, &header("<f4", "False", "(2, 2)"), &[1; 16]);
            for (at, value) in edits {
                let at = at.index(bytes.len());
                bytes[at] = value;
            }
            bytes.truncate(cut);
            if let Ok(column) = read(&bytes) {
                (0..column.records().min(50)).for_each(|record| drop(column.record(record).to_vec()));
            }
        }
    }
}
