//! Files of tokens: values of one type, little-endian, without a header. nanoGPT writes them as
//! `train.bin`, and Megatron beside an index, which is not needed.
//!
//! ```text
//! values      v0 v1 v2 v3 v4 v5 v6 v7 v8      block = 3, stride = 3
//! tokens      v0 v1 v2 | v3 v4 v5             labels    v1 v2 v3 | v4 v5 v6
//! ```
//!
//! Values at the end that fill no record are left out. A block has few records, so that one record
//! in a random order costs little.

use proto::column::{ColumnSpec, ElementType};
use proto::spec::{LABELS, TOKENS, TokenType, TokensSpec};

use crate::column::{ALIGNMENT, Aligned, Column, Memory};
use crate::error::{Result, wrong};
use crate::format::{Outline, Source};
use crate::object::Object;

/// Bytes of a column in a block, about.
const BLOCK_BYTES: usize = 32 << 10;

/// Most blocks of a file. Larger files have larger blocks, so that the list of blocks stays small.
const BLOCKS_MAX: usize = 1 << 18;

/// Index of the column `labels`. That of `tokens` is 0.
const LABELS_INDEX: usize = 1;

/// Opens a file.
///
/// # Errors
/// The job does not say how records are cut, or the file ends within a value or has no complete
/// record.
pub(crate) fn open(object: &Object, spec: Option<TokensSpec>) -> Result<Box<dyn Source>> {
    let Some(spec) = spec else {
        return wrong(object.path(), "data.tokens is missing; set the type of the values and the block");
    };
    let (stored, dtype) = match spec.dtype {
        TokenType::U16 => (size_of::<u16>(), ElementType::I32),
        TokenType::U32 => (size_of::<u32>(), ElementType::I64),
    };
    let (path, bytes) = (object.path(), object.len());
    if !bytes.is_multiple_of(stored) {
        return wrong(
            path,
            format!(
                "{bytes} bytes are no whole number of values of {stored} bytes; the file is cut off, or data.tokens.dtype \
                 is another"
            ),
        );
    }
    let values = bytes / stored;
    // The last token of a record needs one more value as its label.
    let Some(room) = values.checked_sub(spec.block.saturating_add(1)) else {
        return wrong(
            path,
            format!(
                "{values} values, a record needs data.tokens.block + 1 = {}; set a smaller block, or leave the file out",
                spec.block.saturating_add(1)
            ),
        );
    };
    let records = room / spec.stride().max(1) + 1;
    let in_block =
        (BLOCK_BYTES / (spec.block * dtype.size()).max(1)).max(records.div_ceil(BLOCKS_MAX)).max(1);
    let begins = (0..records).step_by(in_block);
    let blocks = begins.map(|begin| in_block.min(records - begin) as u64).collect();
    let columns = [TOKENS, LABELS].map(|name| ColumnSpec::fixed(name, dtype, [spec.block])).into();
    Ok(Box::new(Tokens { object: object.clone(), spec, in_block, outline: Outline { columns, blocks } }))
}

struct Tokens {
    object: Object,
    spec: TokensSpec,
    /// Records of each block but the last.
    in_block: usize,
    outline: Outline,
}

impl Source for Tokens {
    fn outline(&self) -> &Outline {
        &self.outline
    }

    fn is_direct(&self, _column: usize, dtype: ElementType) -> bool {
        self.object.is_here() && matches!(dtype, ElementType::I32 | ElementType::I64) && {
            self.spec.dtype == TokenType::U16 || dtype == ElementType::I64
        }
    }

    /// A block has 32 KiB, which are widened at once.
    fn is_in_place(&self) -> bool {
        self.object.is_here()
    }

    fn piece_bytes(&self, object: &Object) -> u64 {
        object.piece_bytes()
    }

    fn direct(&self, records: &[u64], column: usize, out: &mut Column) -> Result<()> {
        let bytes = self.object.slice(0..self.object.len())?;
        let dtype = out.spec().dtype;
        let room = out.room_for(records.len());
        for &record in records {
            self.append(&bytes, record as usize, column, dtype, room);
        }
        Ok(())
    }

    fn read(&self, block: usize, columns: &[usize]) -> Result<Vec<Column>> {
        let (first, records) = (block * self.in_block, self.outline.blocks[block] as usize);
        let size = self.stored();
        let begin = first * self.spec.stride();
        let end = (first + records - 1) * self.spec.stride() + self.spec.block + 1;
        let bytes = self.object.slice(begin * size..end * size)?;
        let column = |&at: &usize| {
            let spec = &self.outline.columns[at];
            let mut values = Aligned::with_capacity(records * self.spec.block * spec.dtype.size());
            for record in 0..records {
                self.append(&bytes, record, at, spec.dtype, &mut values);
            }
            Column::fixed(spec.clone(), records, Memory::Owned(values))
        };
        Ok(columns.iter().map(column).collect())
    }
}

impl Tokens {
    /// Returns the bytes of a value in the file.
    const fn stored(&self) -> usize {
        match self.spec.dtype {
            TokenType::U16 => size_of::<u16>(),
            TokenType::U32 => size_of::<u32>(),
        }
    }

    /// Appends the values of a record in a column as those of `dtype`. `bytes` begin with record 0.
    fn append(&self, bytes: &[u8], record: usize, column: usize, dtype: ElementType, out: &mut Aligned) {
        let size = self.stored();
        let begin = (record * self.spec.stride() + usize::from(column == LABELS_INDEX)) * size;
        let values = &bytes[begin..begin + self.spec.block * size];
        match (self.spec.dtype, dtype) {
            (TokenType::U16, ElementType::I32) => {
                widen(values, out, |value: [u8; 2]| i32::from(u16::from_le_bytes(value)).to_le_bytes());
            }
            (TokenType::U16, _) => {
                widen(values, out, |value: [u8; 2]| i64::from(u16::from_le_bytes(value)).to_le_bytes());
            }
            (TokenType::U32, _) => {
                widen(values, out, |value: [u8; 4]| i64::from(u32::from_le_bytes(value)).to_le_bytes());
            }
        }
    }
}

/// Appends values of `FROM` bytes as those of `TO` bytes.
fn widen<const FROM: usize, const TO: usize>(
    values: &[u8],
    out: &mut Aligned,
    wide: impl Fn([u8; FROM]) -> [u8; TO],
) {
    let (values, _) = values.as_chunks::<FROM>();
    let copy = |places: &mut [u8], values: &[[u8; FROM]]| {
        let places = places.as_chunks_mut::<TO>().0.iter_mut();
        places.zip(values).for_each(|(place, value)| *place = wide(*value));
    };
    let mut rest = values;
    if out.len().is_multiple_of(ALIGNMENT) {
        let lines = values.chunks_exact(ALIGNMENT / TO);
        rest = lines.remainder();
        out.extend_lines(lines.map(|values| {
            let mut line = [0; ALIGNMENT];
            copy(&mut line, values);
            line
        }));
    }
    copy(out.grow(rest.len() * TO), rest);
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use proptest::prelude::*;

    use super::*;
    use crate::column::each_f64;

    fn source(
        bytes: &[u8],
        dtype: TokenType,
        block: usize,
        stride: Option<usize>,
    ) -> Result<Box<dyn Source>> {
        let object = Object::copy(Path::new("train.bin"), bytes.to_vec());
        open(&object, Some(TokensSpec { dtype, block, stride }))
    }

    fn u16s(values: &[u16]) -> Vec<u8> {
        values.iter().flat_map(|value| value.to_le_bytes()).collect()
    }

    #[test]
    fn labels_are_the_tokens_one_place_further() {
        let values: Vec<u16> = (65_530..=65_535).chain([0, 1]).collect();
        let columns = source(&u16s(&values), TokenType::U16, 3, None).unwrap().read(0, &[0, 1]).unwrap();
        assert_eq!(columns[0].spec(), &ColumnSpec::fixed("tokens", ElementType::I32, [3]));
        assert_eq!(columns[0].values(), Some(&[65_530i32, 65_531, 65_532, 65_533, 65_534, 65_535][..]));
        assert_eq!(columns[1].values(), Some(&[65_531i32, 65_532, 65_533, 65_534, 65_535, 0][..]));
    }

    #[test]
    fn values_of_32_bits_are_never_negative() {
        let bytes: Vec<u8> = [7, u32::MAX].iter().flat_map(|value: &u32| value.to_le_bytes()).collect();
        let labels = source(&bytes, TokenType::U32, 1, None).unwrap().read(0, &[1]).unwrap().remove(0);
        assert_eq!(labels.values(), Some(&[i64::from(u32::MAX)][..]));
    }

    #[test]
    fn a_stride_below_the_block_repeats_values() {
        let source = source(&u16s(&[0, 1, 2, 3, 4]), TokenType::U16, 3, Some(1)).unwrap();
        assert_eq!(source.outline().records(), 2);
        assert_eq!(source.read(0, &[0]).unwrap()[0].values(), Some(&[0i32, 1, 2, 1, 2, 3][..]));
    }

    #[test]
    fn one_record_of_a_large_file_decodes_few_bytes() {
        let source = source(&vec![1; 8 << 20], TokenType::U16, 1024, None).unwrap();
        let columns = source.read(source.outline().blocks.len() - 1, &[0, 1]).unwrap();
        assert!(columns.iter().all(|column| (1..=BLOCK_BYTES).contains(&column.owned_bytes())));
    }

    #[test]
    fn a_file_of_many_short_records_has_a_bounded_number_of_blocks() {
        let source = source(&vec![1; 6 << 20], TokenType::U16, 16_384, Some(1)).unwrap();
        assert!(source.outline().records() > 3_000_000);
        assert!(source.outline().blocks.len() <= BLOCKS_MAX, "{}", source.outline().blocks.len());
    }

    #[test]
    fn files_that_hold_no_record_say_what_one_needs() {
        let error =
            |bytes: &[u8], dtype| source(bytes, dtype, 4, None).err().expect("no records").to_string();
        assert!(
            error(&[0; 9], TokenType::U16).contains("train.bin: 9 bytes are no whole number of values of 2")
        );
        assert!(error(&[0; 10], TokenType::U32).contains("10 bytes are no whole number of values of 4"));
        assert!(
            error(&[0; 8], TokenType::U16).contains("4 values, a record needs data.tokens.block + 1 = 5")
        );
        assert!(error(&[], TokenType::U16).contains("0 values"));
    }

    proptest! {
        #[test]
        fn a_record_alone_is_that_of_its_block(
            bytes in proptest::collection::vec(any::<u8>(), 400..800),
            block in 1usize..40,
            stride in 1usize..20,
            is_wide: bool,
        ) {
            let dtype = if is_wide { TokenType::U32 } else { TokenType::U16 };
            let source = source(&bytes[..bytes.len() / 4 * 4], dtype, block, Some(stride)).unwrap();
            let own = if is_wide { ElementType::I64 } else { ElementType::I32 };
            prop_assert!(source.is_direct(0, own) && source.is_direct(1, ElementType::I64));
            prop_assert!(!source.is_direct(0, ElementType::F32));
            prop_assert_eq!(source.is_direct(0, ElementType::I32), !is_wide);
            let mut record = 0;
            for at in 0..source.outline().blocks.len() {
                for (index, column) in source.read(at, &[0, 1]).unwrap().iter().enumerate() {
                    for row in 0..column.records() {
                        let rows = [record + row as u64; 2];
                        let mut out = Column::with_capacity(column.spec().clone(), 2);
                        source.direct(&rows, index, &mut out).unwrap();
                        prop_assert_eq!([out.record(0), out.record(1)], [column.record(row); 2]);
                        let spec = ColumnSpec { dtype: ElementType::I64, ..column.spec().clone() };
                        let mut wide = Column::with_capacity(spec, 1);
                        source.direct(&rows[..1], index, &mut wide).unwrap();
                        let as_f64 = |column: &Column| {
                            let mut values = Vec::new();
                            each_f64(column.spec().dtype, column.record(0), |value| values.push(value));
                            values
                        };
                        prop_assert_eq!(as_f64(&wide), as_f64(&out));
                    }
                }
                record += source.outline().blocks[at];
            }
        }

        #[test]
        fn what_is_written_is_read(
            values in proptest::collection::vec(any::<u16>(), 0..200),
            block in 1usize..20,
            stride in 1usize..20,
        ) {
            let expected: Vec<_> = values.windows(block + 1).step_by(stride).collect();
            let Ok(source) = source(&u16s(&values), TokenType::U16, block, Some(stride)) else {
                prop_assert!(expected.is_empty());
                return Ok(());
            };
            prop_assert_eq!(source.outline().records(), expected.len() as u64);
            let mut expected = expected.into_iter();
            for at in 0..source.outline().blocks.len() {
                let columns = source.read(at, &[1, 0]).unwrap();
                for record in 0..columns[0].records() {
                    let read = |column: &Column| {
                        let values = column.record(record).as_chunks().0.iter();
                        values.map(|&value| i32::from_le_bytes(value) as u16).collect::<Vec<_>>()
                    };
                    let values = expected.next().unwrap();
                    prop_assert_eq!(read(&columns[1]), &values[..block]);
                    prop_assert_eq!(read(&columns[0]), &values[1..]);
                }
            }
            prop_assert_eq!(expected.next(), None);
        }

        #[test]
        fn any_bytes_are_read_or_refused(
            bytes in proptest::collection::vec(any::<u8>(), 0..60),
            block in 1usize..9,
            wide in any::<bool>(),
        ) {
            let dtype = if wide { TokenType::U32 } else { TokenType::U16 };
            if let Ok(source) = source(&bytes, dtype, block, None) {
                (0..source.outline().blocks.len()).for_each(|at| drop(source.read(at, &[0, 1]).unwrap()));
            }
        }
    }
}
