//! Shards of NumPy arrays: a file for each column.

use proto::column::ElementType;

use super::sink::{Shard, Sink};
use super::whole::Whole;
use super::written::Written;
use crate::column::Column;
use crate::error::Result;

/// Unit of the length of a header with what stands before it.
const ALIGNED: usize = 64;

/// A shard of npy files.
pub(super) struct Npy {
    files: Vec<Whole>,
}

impl Npy {
    pub(super) fn open(shard: &Shard<'_>) -> Result<Self> {
        let begin = |(name, column): (String, &Written)| {
            let mut file = Whole::create(shard.folder, &name)?;
            let shape = [&[shard.records as usize][..], &column.stored.shape].concat();
            file.append(&header(column.stored.dtype, &shape))?;
            Ok(file)
        };
        let files = shard.names().into_iter().zip(shard.columns).map(begin);
        Ok(Self { files: files.collect::<Result<_>>()? })
    }
}

impl Sink for Npy {
    fn add(&mut self, columns: &[Column]) -> Result<()> {
        self.files.iter_mut().zip(columns).try_for_each(|(file, column)| file.append(column.bytes()))
    }

    fn finish(self: Box<Self>) -> Result<Vec<Whole>> {
        Ok(self.files)
    }
}

/// Returns what stands before the values of an array (numpy.lib.format, versions 1.0 and 2.0).
pub(super) fn header(dtype: ElementType, shape: &[usize]) -> Vec<u8> {
    let descr = match dtype {
        ElementType::Bool => "|b1",
        ElementType::U8 => "|u1",
        ElementType::I8 => "|i1",
        ElementType::I16 => "<i2",
        ElementType::I32 => "<i4",
        ElementType::I64 => "<i8",
        ElementType::F16 => "<f2",
        // bf16 was widened before.
        ElementType::F32 | ElementType::BF16 => "<f4",
        ElementType::F64 => "<f8",
    };
    let sizes: Vec<_> = shape.iter().map(usize::to_string).collect();
    // A tuple of one has a comma.
    let sizes = sizes.join(", ") + if sizes.len() == 1 { "," } else { "" };
    let text = format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': ({sizes}), }}");
    let version = if text.len() + ALIGNED < usize::from(u16::MAX) { 1 } else { 2 };
    let before = 8 + if version == 1 { 2 } else { 4 };
    let length = (before + text.len() + 1).next_multiple_of(ALIGNED) - before;
    let mut bytes = b"\x93NUMPY".to_vec();
    bytes.extend([version, 0]);
    match version {
        1 => bytes.extend((length as u16).to_le_bytes()),
        _ => bytes.extend((length as u32).to_le_bytes()),
    }
    bytes.extend(text.as_bytes());
    bytes.resize(before + length - 1, b' ');
    bytes.push(b'\n');
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_is_that_of_numpy() {
        // The bytes of numpy.save(numpy.zeros((2, 3), "<f4")), without the values.
        let mut expected = b"\x93NUMPY\x01\x00v\x00".to_vec();
        expected.extend(b"{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }");
        expected.resize(127, b' ');
        expected.push(b'\n');
        assert_eq!(header(ElementType::F32, &[2, 3]), expected);
        let text = |shape: &[usize]| String::from_utf8_lossy(&header(ElementType::U8, shape)).into_owned();
        assert!(text(&[]).contains("'shape': (), }") && text(&[7]).contains("'shape': (7,), }"));
        for dimensions in [0, 9, 4000, 40_000] {
            assert!(header(ElementType::U8, &vec![1; dimensions]).len().is_multiple_of(ALIGNED));
        }
    }
}
