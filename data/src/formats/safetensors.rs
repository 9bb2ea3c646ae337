//! Files of tensors (Hugging Face, "safetensors"): each tensor is a column, and its first dimension
//! counts the records.
//!
//! ```text
//! length of the header, little-endian u64 | header, JSON | values of all tensors, little-endian
//! ```
//!
//! Columns are sorted by name, because writers order tensors by their type.

use ::safetensors::Dtype;
use ::safetensors::tensor::Metadata;
use proto::column::ElementType;

use super::array::{self, Array, Endian, Stored};
use crate::error::{Flaw, Result, malformed, wrong};
use crate::format::Source;
use crate::guarded::guarded;
use crate::object::Object;

/// Bytes before the header.
const LENGTH_BYTES: usize = size_of::<u64>();

/// Most bytes of a header, as in the library of the format.
const HEADER_BYTES_MAX: u64 = 100_000_000;

/// Opens a file.
///
/// # Errors
/// The file is no safetensors file, a tensor's type is none of a column, or tensors have other
/// numbers of records.
pub(crate) fn open(object: &Object) -> Result<Box<dyn Source>> {
    let (start, metadata) = metadata(object).map_err(|flaw| {
        flaw.at(object.path(), |error| {
            format!(
                "no safetensors file, or a damaged one: {error}; copy it again, or save it with safetensors.save_file"
            )
        })
    })?;
    let mut columns = Vec::new();
    for name in metadata.offset_keys() {
        let Some(info) = metadata.info(&name) else { continue };
        let Some(stored) = stored(info.dtype) else {
            return wrong(
                object.path(),
                format!(
                    "tensor `{name}`: type {:?}, expected BOOL, U8, I8, U16, I16, U32, I32, I64, F16, BF16, F32 or F64; save \
                     another type, or leave the tensor out",
                    info.dtype
                ),
            );
        };
        let (begin, end) = info.data_offsets;
        let shape = info.shape.clone();
        let array = Array { shape, stored, endian: Endian::Little, range: start + begin..start + end };
        let values = array.values(object, &name);
        columns
            .push(values.map_err(|reason| malformed(object.path(), format!("tensor `{name}`: {reason}")))?);
    }
    columns.sort_by(|a, b| a.name().cmp(b.name()));
    array::open(object, columns)
}

/// Reads the header. Returns it, and the place of the first value.
///
/// # Errors
/// The header is damaged, or does not fit the length of the file.
fn metadata(object: &Object) -> Result<(usize, Metadata), Flaw> {
    let length = object.slice_to_keep(0..object.len().min(LENGTH_BYTES))?;
    let Some(length) = length.first_chunk().map(|length| u64::from_le_bytes(*length)) else {
        return Err(format!("{} bytes hold no length of a header", object.len()).into());
    };
    let start = usize::try_from(length.min(HEADER_BYTES_MAX + 1)).unwrap_or(usize::MAX) + LENGTH_BYTES;
    if length > HEADER_BYTES_MAX || start > object.len() {
        return Err(format!("a header of {length} bytes in a file of {}", object.len()).into());
    }
    let text = object.slice_to_keep(LENGTH_BYTES..start)?;
    let metadata = guarded(|| serde_json::from_slice::<Metadata>(&text))?;
    let (found, expected) = (object.len() - start, metadata.data_len());
    if found != expected {
        return Err(format!("{found} bytes of values, the header announces {expected}").into());
    }
    Ok((start, metadata))
}

/// Returns the type of values. `None`: no column has it.
fn stored(dtype: Dtype) -> Option<Stored> {
    Some(match dtype {
        Dtype::BOOL => Stored::As(ElementType::Bool),
        Dtype::U8 => Stored::As(ElementType::U8),
        Dtype::I8 => Stored::As(ElementType::I8),
        Dtype::U16 => Stored::U16,
        Dtype::I16 => Stored::As(ElementType::I16),
        Dtype::U32 => Stored::U32,
        Dtype::I32 => Stored::As(ElementType::I32),
        Dtype::I64 => Stored::As(ElementType::I64),
        Dtype::F16 => Stored::As(ElementType::F16),
        Dtype::BF16 => Stored::As(ElementType::BF16),
        Dtype::F32 => Stored::As(ElementType::F32),
        Dtype::F64 => Stored::As(ElementType::F64),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use ::safetensors::tensor::TensorView;
    use proptest::prelude::*;
    use proto::column::ColumnSpec;

    use super::*;
    use crate::column::Column;

    type Tensor<'a> = (&'a str, Dtype, &'a [usize], &'a [u8]);

    fn write(tensors: &[Tensor<'_>]) -> Vec<u8> {
        let views = tensors.iter().map(|&(name, dtype, shape, values)| {
            (name.to_owned(), TensorView::new(dtype, shape.to_vec(), values).unwrap())
        });
        ::safetensors::serialize(views, None).unwrap()
    }

    fn read(bytes: &[u8]) -> Result<Vec<Column>> {
        let source = open(&Object::copy(Path::new("a.safetensors"), bytes.to_vec()))?;
        source.read(0, &(0..source.outline().columns.len()).collect::<Vec<_>>())
    }

    fn error(tensors: &[Tensor<'_>]) -> String {
        read(&write(tensors)).unwrap_err().to_string()
    }

    #[test]
    fn each_tensor_is_a_column_and_columns_are_sorted_by_name() {
        let columns = read(&write(&[
            ("y", Dtype::I64, &[2], bytemuck::cast_slice(&[1i64, -2])),
            ("ids", Dtype::U16, &[2], bytemuck::cast_slice(&[7u16, 65_535])),
            ("x", Dtype::F32, &[2, 3], bytemuck::cast_slice(&[0.5f32; 6])),
        ]))
        .unwrap();
        let specs: Vec<_> = columns.iter().map(|column| column.spec().to_string()).collect();
        assert_eq!(specs, ["`ids` i32[]", "`x` f32[3]", "`y` i64[]"]);
        assert_eq!(columns[0].record(1), 65_535i32.to_le_bytes());
        assert_eq!(columns[2].record(1), (-2i64).to_le_bytes());
    }

    #[test]
    fn values_in_a_columns_type_stay_in_the_file() {
        let columns = read(&write(&[("x", Dtype::BF16, &[4], &[7; 8])])).unwrap();
        assert_eq!(columns[0].spec(), &ColumnSpec::fixed("x", ElementType::BF16, []));
        assert_eq!(columns[0].owned_bytes(), 0);
    }

    #[test]
    fn tensors_that_are_no_columns_say_why() {
        let message = error(&[("x", Dtype::F32, &[2], &[0; 8]), ("y", Dtype::U8, &[3], &[0; 3])]);
        assert!(
            message.contains("a.safetensors: array `y` has 3 records, array `x` has 2; the first dimension"),
            "{message}"
        );
        let message = error(&[("x", Dtype::F32, &[], &[0; 4])]);
        assert!(message.contains("tensor `x`: holds a single value without dimensions"), "{message}");
        let message = error(&[("x", Dtype::U64, &[1], &[0; 8])]);
        assert!(message.contains("tensor `x`: type U64, expected BOOL, U8"), "{message}");
        assert!(error(&[]).contains("the file has no arrays"));
    }

    #[test]
    fn files_that_are_no_safetensors_say_so() {
        let good = write(&[("x", Dtype::F32, &[2], &[0; 8])]);
        for bad in [&b""[..], b"\x93NUMPY\x01\x00", &good[..good.len() - 1], &good[..20]] {
            let message = read(bad).unwrap_err().to_string();
            assert!(message.contains("no safetensors file, or a damaged one"), "{message}");
        }
    }

    proptest! {
        #[test]
        fn what_is_written_is_read(rows in proptest::collection::vec(any::<([i16; 3], u8)>(), 1..6)) {
            let pairs: Vec<i16> = rows.iter().flat_map(|(pair, _)| *pair).collect();
            let bytes: Vec<u8> = rows.iter().map(|(_, byte)| *byte).collect();
            let columns = read(&write(&[
                ("pairs", Dtype::I16, &[rows.len(), 3], bytemuck::cast_slice(&pairs)),
                ("bytes", Dtype::U8, &[rows.len()], &bytes),
            ])).unwrap();
            prop_assert_eq!(columns[0].bytes(), bytes);
            prop_assert_eq!(columns[1].bytes(), bytemuck::cast_slice::<i16, u8>(&pairs));
        }

        #[test]
        fn damaged_files_never_panic(
            edits in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..5),
            cut in 0usize..200,
        ) {
            let mut bytes = write(&[("x", Dtype::F32, &[2, 2], &[1; 16]), ("y", Dtype::U32, &[2], &[1; 8])]);
            for (at, value) in edits {
                let at = at.index(bytes.len());
                bytes[at] = value;
            }
            bytes.truncate(cut);
            for column in read(&bytes).into_iter().flatten() {
                (0..column.records().min(50)).for_each(|record| drop(column.record(record).to_vec()));
            }
        }
    }
}
