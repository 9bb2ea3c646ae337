//! MNIST's format (Y. LeCun, "The MNIST database", section "the IDX file format").
//!
//! ```text
//! 0  0  type  dimensions | size of dimension, big-endian u32, each | values, big-endian, row-major
//! ```

use proto::column::ElementType;

use super::array::{Array, Endian, Stored};
use crate::error::{Result, wrong};
use crate::format::Source;
use crate::object::Object;

/// Bytes of the longest header: 255 dimensions.
const HEAD_BYTES_MAX: usize = 4 + 4 * 255;

/// Opens a file as the column `name`.
///
/// # Errors
/// The file is no idx file, or shorter or longer than its header says.
pub(crate) fn open(object: &Object, name: &str) -> Result<Box<dyn Source>> {
    let path = object.path();
    let head = object.slice_to_keep(0..object.len().min(HEAD_BYTES_MAX))?;
    let bytes = &*head;
    let [0, 0, code, dimensions, sizes @ ..] = bytes else {
        let found = &bytes[..bytes.len().min(4)];
        return wrong(
            path,
            format!("no idx file: expected to start with the bytes 0, 0, type, dimensions, found {found:?}"),
        );
    };
    let dtype = match code {
        0x08 => ElementType::U8,
        0x09 => ElementType::I8,
        0x0B => ElementType::I16,
        0x0C => ElementType::I32,
        0x0D => ElementType::F32,
        0x0E => ElementType::F64,
        _ => {
            return wrong(
                path,
                format!(
                    "no idx file: element type {code:#04x}, expected 0x08, 0x09, 0x0b, 0x0c, 0x0d or 0x0e"
                ),
            );
        }
    };
    let dimensions = usize::from(*dimensions);
    let Some((sizes, _)) = sizes.as_chunks::<4>().0.split_at_checked(dimensions) else {
        return wrong(
            path,
            format!(
                "the header announces {dimensions} dimensions and the file ends within it; the file is cut off"
            ),
        );
    };
    let shape = sizes.iter().map(|&size| u32::from_be_bytes(size) as usize).collect();
    let range = 4 + 4 * dimensions..object.len();
    Array { shape, stored: Stored::As(dtype), endian: Endian::Big, range }.open(object, name)
}

#[cfg(test)]
pub(crate) mod tests {
    use std::path::Path;

    use proptest::prelude::*;

    use super::*;
    use crate::column::Column;

    /// Writes an idx file of bytes.
    pub(crate) fn write(shape: &[u32], values: &[u8]) -> Vec<u8> {
        let mut bytes = vec![0, 0, 0x08, shape.len() as u8];
        bytes.extend(shape.iter().flat_map(|size| size.to_be_bytes()));
        bytes.extend(values);
        bytes
    }

    fn read(bytes: &[u8]) -> Result<Column> {
        let object = Object::copy(Path::new("images.idx"), bytes.to_vec());
        Ok(open(&object, "x")?.read(0, &[0])?.remove(0))
    }

    fn error(bytes: &[u8]) -> String {
        read(bytes).unwrap_err().to_string()
    }

    #[test]
    fn files_that_are_no_idx_say_what_they_start_with() {
        assert!(error(b"").contains("found []"));
        assert!(
            error(b"PK\x03\x04zip").contains("images.idx: no idx file")
                && error(b"PK\x03\x04").contains("[80, 75, 3, 4]")
        );
        assert!(error(&[0, 0, 7, 1, 0, 0, 0, 0]).contains("element type 0x07"));
    }

    #[test]
    fn truncated_and_padded_files_are_refused() {
        let whole = write(&[2, 2, 2], &[7; 8]);
        assert!(error(&whole[..9]).contains("announces 3 dimensions"));
        assert!(error(&whole[..whole.len() - 1]).contains("needs 8 bytes of values, found 7"));
        assert!(error(&[whole, vec![0]].concat()).contains("found 9"));
        assert!(error(&write(&[], &[3])).contains("single value"));
    }

    proptest! {
        #[test]
        fn what_is_written_is_read(records in 0u32..5, width in 1u32..7, seed in any::<u8>()) {
            let values: Vec<u8> = (0..records * width).map(|i| seed.wrapping_add(i as u8)).collect();
            let column = read(&write(&[records, width], &values)).unwrap();
            prop_assert_eq!((column.records(), column.spec().shape.clone()), (records as usize, vec![width as usize]));
            prop_assert_eq!(column.bytes(), values);
        }

        #[test]
        fn damaged_files_never_panic(
            mut bytes in Just(write(&[3, 2, 2], &[9; 12])),
            edits in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
            length in 0usize..40,
        ) {
            for (at, value) in edits {
                let at = at.index(bytes.len().min(16));
                bytes[at] = value;
            }
            bytes.resize(length, 0);
            if let Ok(column) = read(&bytes) {
                (0..column.records().min(50)).for_each(|record| drop(column.record(record).to_vec()));
            }
        }
    }
}
