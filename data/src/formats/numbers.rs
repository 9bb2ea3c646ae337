//! Columns of numbers in Parquet, decoded from their pages into one piece of memory (ADR 59).
//!
//! ```text
//! a page of data      levels (if values may be missing) | values
//!                     levels (if values may be missing) | width | places in the dictionary
//! a dictionary        values, each once
//! runs                count << 1     | one number, in whole bytes
//!                     count << 1 | 1 | 8 * count numbers of `width` bits
//! ```
//!
//! Levels and places are runs. A level is 1 where a record has a value.

use std::borrow::Cow;

use ::parquet::basic::Encoding;
use ::parquet::column::page::{Page, PageReader};
use ::parquet::errors::ParquetError;
use bytes::Bytes;

use crate::element::Element;

/// Most values for which memory is taken before they are decoded: a damaged footer may announce
/// more than there are.
const RESERVED_MAX: usize = 1 << 20;

/// Numbers of a run that are unpacked together.
const UNPACKED: usize = 32;

/// Returns whether the pages of a column with these encodings are decoded here.
pub(super) fn are_read(mut encodings: impl Iterator<Item = Encoding>) -> bool {
    // Levels are `RLE`.
    encodings.all(|encoding| {
        matches!(
            encoding,
            Encoding::PLAIN | Encoding::RLE | Encoding::RLE_DICTIONARY | Encoding::PLAIN_DICTIONARY
        )
    })
}

/// The values of a column.
#[derive(Debug)]
pub(super) struct Numbers<E> {
    /// A value for each record, 0 where it is missing.
    pub(super) values: Vec<E>,
    /// Records whose value is missing, ascending.
    pub(super) missing: Vec<usize>,
}

/// Decodes the pages of a column with `records` records.
///
/// # Errors
/// A page is damaged, or they have more records.
pub(super) fn read<E: Element>(
    pages: &mut dyn PageReader,
    is_optional: bool,
    records: usize,
) -> Result<Numbers<E>, ParquetError> {
    let values = Vec::with_capacity(records.min(RESERVED_MAX));
    let mut numbers = Numbers { values, missing: Vec::new() };
    let mut dictionary = Bytes::new();
    while let Some(page) = pages.get_next_page()? {
        let (count, encoding) = (page.num_values() as usize, page.encoding());
        let parts = match &page {
            Page::DictionaryPage { buf, .. } => {
                dictionary = buf.clone();
                continue;
            }
            Page::DataPage { buf, def_level_encoding: Encoding::RLE, .. } if is_optional => buf
                .split_first_chunk()
                .and_then(|(&length, rest)| rest.split_at_checked(u32::from_le_bytes(length) as usize)),
            Page::DataPage { .. } if is_optional => None,
            Page::DataPage { buf, .. } => Some((&[][..], &buf[..])),
            Page::DataPageV2 { buf, def_levels_byte_len, rep_levels_byte_len, .. } => buf
                .get(*rep_levels_byte_len as usize..)
                .and_then(|rest| rest.split_at_checked(*def_levels_byte_len as usize)),
        };
        let (levels, values) = parts.ok_or_else(|| damaged("a page has no such levels"))?;
        if count > records - numbers.values.len() {
            return Err(damaged(format!("more records than the {records} of the footer")));
        }
        let levels = Some(levels).filter(|_| is_optional);
        numbers.append(count, levels, values, encoding, &dictionary)?;
    }
    Ok(numbers)
}

impl<E: Element> Numbers<E> {
    /// Appends the values of a page. `levels` say which are missing, if any may be.
    ///
    /// # Errors
    /// The page is damaged.
    fn append(
        &mut self,
        count: usize,
        levels: Option<&[u8]>,
        values: &[u8],
        encoding: Encoding,
        dictionary: &[u8],
    ) -> Result<(), ParquetError> {
        let (begin, already) = (self.values.len(), self.missing.len());
        if let Some(levels) = levels {
            self.levels(levels, count)?;
        }
        let missing = &self.missing[already..];
        let present = count - missing.len();
        match encoding {
            Encoding::PLAIN => {
                let bytes =
                    values.get(..present * size_of::<E>()).ok_or_else(|| damaged("a page ends early"))?;
                self.values.extend(bytes.chunks_exact(size_of::<E>()).map(bytemuck::pod_read_unaligned::<E>));
            }
            Encoding::RLE_DICTIONARY | Encoding::PLAIN_DICTIONARY => {
                places(values, present, &words(dictionary), &mut self.values)?;
            }
            other => return Err(damaged(format!("the footer does not name the encoding {other} of a page"))),
        }
        if !missing.is_empty() {
            spread(&mut self.values, begin + present, begin..begin + count, missing);
        }
        Ok(())
    }

    /// Reads the levels of a page of `count` records, and keeps the records without a value.
    ///
    /// # Errors
    /// They are damaged.
    fn levels(&mut self, levels: &[u8], count: usize) -> Result<(), ParquetError> {
        let mut record = self.values.len();
        runs(levels, 1, count, |run| {
            match run {
                Run::Same(1, length) => record += length,
                Run::Same(0, length) => {
                    self.missing.extend(record..record + length);
                    record += length;
                }
                Run::Same(..) => return Err(damaged("a level is neither 0 nor 1")),
                Run::Different(levels) => {
                    self.missing
                        .extend((record..).zip(levels).filter(|(_, level)| **level == 0).map(|(at, _)| at));
                    record += levels.len();
                }
            }
            Ok(())
        })
    }
}

/// Appends the values at `count` places of a dictionary.
///
/// # Errors
/// The places are damaged, or the dictionary has no such place.
fn places<E: Element>(
    bytes: &[u8],
    count: usize,
    dictionary: &[E],
    values: &mut Vec<E>,
) -> Result<(), ParquetError> {
    if count == 0 {
        return Ok(());
    }
    let beyond = |place| damaged(format!("value {place} of a dictionary of {}", dictionary.len()));
    let Some(last) = dictionary.len().checked_sub(1) else { return Err(beyond(0)) };
    let (&width, bytes) = bytes.split_first().ok_or_else(|| damaged("a page ends early"))?;
    runs(bytes, width, count, |run| {
        match run {
            Run::Same(place, length) => {
                let value = *dictionary.get(place as usize).ok_or_else(|| beyond(place))?;
                values.extend(std::iter::repeat_n(value, length));
            }
            Run::Different(places) => {
                // All are looked up, and judged together behind that: quicker than one by one.
                let mut largest = 0;
                values.extend(places.iter().map(|&place| {
                    largest = largest.max(place);
                    dictionary[last.min(place as usize)]
                }));
                if largest as usize > last {
                    return Err(beyond(largest));
                }
            }
        }
        Ok(())
    })
}

/// Returns a page's bytes as values, without a copy if they are aligned.
fn words<E: Element>(bytes: &[u8]) -> Cow<'_, [E]> {
    let whole = &bytes[..bytes.len() - bytes.len() % size_of::<E>()];
    match bytemuck::try_cast_slice(whole) {
        Ok(values) => Cow::Borrowed(values),
        Err(_) => Cow::Owned(whole.chunks_exact(size_of::<E>()).map(bytemuck::pod_read_unaligned).collect()),
    }
}

/// Moves values to the records that have one, and puts zeros between them. The values of `records`
/// lie one after the other from the first of them on, up to `end`.
fn spread<E: Element>(
    values: &mut Vec<E>,
    mut end: usize,
    records: std::ops::Range<usize>,
    missing: &[usize],
) {
    values.resize(records.end, E::zeroed());
    let mut missing = missing.iter().rev().peekable();
    for record in records.rev() {
        values[record] = match missing.next_if_eq(&&record) {
            Some(_) => E::zeroed(),
            None => {
                end -= 1;
                values[end]
            }
        };
    }
}

/// Some numbers of a list.
enum Run<'a> {
    Same(u32, usize),
    Different(&'a [u32]),
}

/// Calls `take` with the first `count` numbers of a list of runs.
///
/// # Errors
/// The runs are damaged or end early, or the error of `take`.
fn runs(
    mut bytes: &[u8],
    width: u8,
    mut count: usize,
    mut take: impl FnMut(Run<'_>) -> Result<(), ParquetError>,
) -> Result<(), ParquetError> {
    if width == 0 {
        return take(Run::Same(0, count));
    }
    let early = || damaged("a run ends early");
    let width = usize::from(width);
    if width > 32 {
        return Err(damaged(format!("numbers of {width} bits")));
    }
    while count > 0 {
        let head = head(&mut bytes).ok_or_else(early)?;
        let length = (head >> 1) as usize;
        if head & 1 == 0 {
            let (value, rest) = bytes.split_at_checked(width.div_ceil(8)).ok_or_else(early)?;
            let length = length.min(count);
            take(Run::Same(number(value), length))?;
            (bytes, count) = (rest, count - length);
            continue;
        }
        // The last group may be cut off behind the last number.
        let mut length = length.saturating_mul(8).min(count);
        let rest = bytes.get((length * width).div_ceil(8)..).ok_or_else(early)?;
        let mut groups = std::mem::replace(&mut bytes, rest);
        count -= length;
        while length > 0 {
            let mut numbers = [0; UNPACKED];
            unpack(groups, width, &mut numbers);
            let here = length.min(UNPACKED);
            take(Run::Different(&numbers[..here]))?;
            length -= here;
            groups = groups.get(UNPACKED * width / 8..).unwrap_or_default();
        }
    }
    Ok(())
}

/// Reads a number of 7 bits a byte, the lowest ones first. `None`: it has more than 32 bits, or
/// ends early.
fn head(bytes: &mut &[u8]) -> Option<u32> {
    let mut value = 0u64;
    for shift in (0..35).step_by(7) {
        let (&first, rest) = bytes.split_first()?;
        *bytes = rest;
        value |= u64::from(first & 127) << shift;
        if first < 128 {
            return u32::try_from(value).ok();
        }
    }
    None
}

/// Returns a number of at most 4 bytes.
fn number(bytes: &[u8]) -> u32 {
    bytes.iter().rev().fold(0, |number, &byte| number << 8 | u32::from(byte))
}

/// Bytes of [`UNPACKED`] numbers of any width, and of one more word.
const UNPACKED_BYTES: usize = UNPACKED * 4 + 8;

/// Unpacks the first numbers of `width` bits. Those whose bytes are not there are 0.
fn unpack(bytes: &[u8], width: usize, numbers: &mut [u32; UNPACKED]) {
    let mut padded;
    let bytes = match bytes.first_chunk() {
        Some(bytes) => bytes,
        None => {
            padded = [0; UNPACKED_BYTES];
            padded[..bytes.len()].copy_from_slice(bytes);
            &padded
        }
    };
    /// Numbers of `W` bits. All places and shifts are constants.
    fn constant<const W: usize>(bytes: &[u8; UNPACKED_BYTES]) -> [u32; UNPACKED] {
        macro_rules! numbers {
            ($($at:literal)+) => {
                [$({
                    let (byte, shift) = ($at * W / 8, $at * W % 8);
                    let word = bytes[byte..].first_chunk().copied().unwrap_or_default();
                    (u64::from_le_bytes(word) >> shift) as u32 & (u32::MAX >> (32 - W))
                }),+]
            };
        }
        numbers!(0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31)
    }
    macro_rules! widths {
        ($($width:literal)+) => {
            match width {
                $($width => *numbers = constant::<$width>(bytes),)+
                _ => {}
            }
        };
    }
    widths!(1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31 32);
}

fn damaged(reason: impl Into<String>) -> ParquetError {
    ParquetError::General(reason.into())
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use ::parquet::arrow::ArrowWriter;
    use ::parquet::basic::Compression;
    use ::parquet::column::page::PageMetadata;
    use ::parquet::errors::Result as Parsed;
    use ::parquet::file::properties::{WriterProperties, WriterVersion};
    use ::parquet::file::reader::{FileReader, SerializedFileReader};
    use arrow_array::{ArrayRef, Float32Array, Int64Array, RecordBatch};
    use proptest::prelude::*;

    use super::*;

    /// Pages that are there already.
    struct Pages(std::vec::IntoIter<Page>);

    impl Iterator for Pages {
        type Item = Parsed<Page>;

        fn next(&mut self) -> Option<Self::Item> {
            self.get_next_page().transpose()
        }
    }

    impl PageReader for Pages {
        fn get_next_page(&mut self) -> Parsed<Option<Page>> {
            Ok(self.0.next())
        }

        fn peek_next_page(&mut self) -> Parsed<Option<PageMetadata>> {
            unreachable!("pages are read one after the other")
        }

        fn skip_next_page(&mut self) -> Parsed<()> {
            unreachable!("no page is passed over")
        }
    }

    fn data(encoding: Encoding, bytes: &[u8], num_values: u32) -> Page {
        Page::DataPage {
            buf: Bytes::copy_from_slice(bytes),
            num_values,
            encoding,
            def_level_encoding: Encoding::RLE,
            rep_level_encoding: Encoding::RLE,
            statistics: None,
        }
    }

    fn dictionary(values: &[i32]) -> Page {
        Page::DictionaryPage {
            buf: Bytes::copy_from_slice(bytemuck::cast_slice(values)),
            num_values: values.len() as u32,
            encoding: Encoding::PLAIN,
            is_sorted: false,
        }
    }

    /// Decodes pages of a column whose values are never missing.
    fn decoded(pages: Vec<Page>, records: usize) -> Result<Vec<i32>, String> {
        let found = read::<i32>(&mut Pages(pages.into_iter()), false, records);
        found.map(|numbers| numbers.values).map_err(|error| error.to_string())
    }

    #[test]
    fn places_are_runs_of_one_number_or_of_packed_ones() {
        // 5 times place 2, then 8 places of 2 bits: 0 1 2 3 3 2 1 0.
        let bytes = [2, 5 << 1, 2, 1 << 1 | 1, 0b1110_0100, 0b0001_1011];
        let pages = || vec![dictionary(&[10, 11, 12, 13]), data(Encoding::RLE_DICTIONARY, &bytes, 13)];
        let all = [12, 12, 12, 12, 12, 10, 11, 12, 13, 13, 12, 11, 10];
        assert_eq!(decoded(pages(), 13), Ok(all.to_vec()));
        // The last group is longer than the page, or cut off.
        let short = vec![dictionary(&[10, 11, 12, 13]), data(Encoding::RLE_DICTIONARY, &bytes[..5], 9)];
        assert_eq!(decoded(short, 9), Ok(all[..9].to_vec()));
        // A dictionary of one value needs no bits.
        let one = vec![dictionary(&[7]), data(Encoding::PLAIN_DICTIONARY, &[0], 3)];
        assert_eq!(decoded(one, 3), Ok(vec![7; 3]));
    }

    #[test]
    fn damaged_pages_say_what_is_wrong() {
        let of = |bytes: &[u8], count| {
            decoded(vec![dictionary(&[10, 11]), data(Encoding::RLE_DICTIONARY, bytes, count)], 9).unwrap_err()
        };
        assert!(of(&[2, 5 << 1, 2], 5).contains("value 2 of a dictionary of 2"));
        assert!(of(&[2, 3, 0b10], 3).contains("value 2 of a dictionary of 2"));
        assert!(of(&[2, 5 << 1, 1], 6).contains("a run ends early"));
        assert!(of(&[2, 3], 6).contains("a run ends early"));
        assert!(of(&[1, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF], 6).contains("a run ends early"));
        assert!(of(&[33, 2, 0, 0, 0, 0, 0], 1).contains("numbers of 33 bits"));
        assert!(of(&[], 1).contains("a page ends early"));
        assert!(of(&[0], 10).contains("more records than the 9 of the footer"));
        assert!(
            decoded(vec![data(Encoding::PLAIN, &[0; 7], 2)], 2).unwrap_err().contains("a page ends early")
        );
        let unknown = decoded(vec![data(Encoding::BYTE_STREAM_SPLIT, &[0; 8], 2)], 2).unwrap_err();
        assert!(unknown.contains("the footer does not name the encoding BYTE_STREAM_SPLIT"), "{unknown}");
        // The levels of two records, of which a page of 4 bytes has none.
        let optional = |bytes: &[u8]| {
            let pages = vec![data(Encoding::PLAIN, bytes, 2)];
            read::<i32>(&mut Pages(pages.into_iter()), true, 2).unwrap_err().to_string()
        };
        assert!(optional(&[9, 0, 0, 0]).contains("a page has no such levels"));
        assert!(optional(&[2, 0, 0, 0, 2 << 1, 2]).contains("a level is neither 0 nor 1"));
    }

    proptest! {
        #[test]
        fn numbers_of_each_width_are_unpacked(
            width in 1usize..=32,
            numbers: [u32; UNPACKED],
            behind in proptest::collection::vec(any::<u8>(), 0..200),
        ) {
            let numbers = numbers.map(|number| number & (u32::MAX >> (32 - width)));
            let bits = numbers.iter().flat_map(|number| (0..width).map(move |bit| number >> bit & 1 == 1));
            let mut bytes = vec![0u8; UNPACKED * width / 8];
            bits.enumerate().filter(|(_, bit)| *bit).for_each(|(at, _)| bytes[at / 8] |= 1 << (at % 8));
            bytes.extend(behind);
            let mut found = [0; UNPACKED];
            unpack(&bytes, width, &mut found);
            prop_assert_eq!(found, numbers);
        }

        #[test]
        fn values_are_those_that_the_library_wrote(
            values in proptest::collection::vec((proptest::option::weighted(0.8, 0i64..900), any::<bool>()), 1..3000),
            has_missing: bool,
            has_dictionary: bool,
            is_second_version: bool,
            is_packed: bool,
            in_page in 1usize..2000,
        ) {
            // A record is often like the one before it, so that there are runs of each kind.
            let mut before = Some(1);
            let values: Vec<Option<i64>> = values.into_iter().map(|(value, is_new)| {
                before = if is_new { value } else { before };
                if has_missing { before } else { before.or(Some(0)) }
            }).collect();
            let floats: Vec<_> = values.iter().map(|value| value.map(|value| value as f32 / 8.0)).collect();
            let batch = RecordBatch::try_from_iter([
                ("i", Arc::new(Int64Array::from(values.clone())) as ArrayRef),
                ("f", Arc::new(Float32Array::from(floats))),
            ]).unwrap();
            let properties = WriterProperties::builder()
                .set_dictionary_enabled(has_dictionary)
                .set_data_page_row_count_limit(in_page)
                .set_write_batch_size(100)
                .set_encoding(Encoding::PLAIN)
                .set_writer_version(if is_second_version { WriterVersion::PARQUET_2_0 } else { WriterVersion::PARQUET_1_0 })
                .set_compression(if is_packed { Compression::SNAPPY } else { Compression::UNCOMPRESSED })
                .build();
            let mut file = Vec::new();
            let mut writer = ArrowWriter::try_new(&mut file, batch.schema(), Some(properties)).unwrap();
            writer.write(&batch).unwrap();
            writer.close().unwrap();

            let file = SerializedFileReader::new(Bytes::from(file)).unwrap();
            let group = file.get_row_group(0).unwrap();
            prop_assert!(are_read(group.metadata().column(0).encodings()));
            let is_optional = group.metadata().column(0).column_descr().max_def_level() > 0;
            let mut pages = group.get_column_page_reader(0).unwrap();
            let found = read::<i64>(pages.as_mut(), is_optional, values.len()).unwrap();
            let missing: Vec<usize> = (0..values.len()).filter(|&at| values[at].is_none()).collect();
            prop_assert_eq!(found.missing, missing);
            prop_assert_eq!(found.values, values.iter().map(|value| value.unwrap_or(0)).collect::<Vec<_>>());
            let mut pages = group.get_column_page_reader(1).unwrap();
            let found = read::<f32>(pages.as_mut(), is_optional, values.len()).unwrap();
            let expected: Vec<f32> = values.iter().map(|value| value.unwrap_or(0) as f32 / 8.0).collect();
            prop_assert_eq!(found.values, expected);
        }
    }
}
