//! TensorFlow's record files (`tf.io.TFRecordWriter`) of `tf.train.Example`. A feature is a column.
//!
//! ```text
//! length, u64 | its checksum | data, Example | its checksum        all little-endian
//! ```
//!
//! A checksum is the CRC-32C `c` of the bytes, as `c.rotate_right(15) + 0xa282ead8`. The data is an
//! Example of Protocol Buffers (tensorflow/core/example/example.proto).
//!
//! | list in the first record | column |
//! | --- | --- |
//! | `int64_list` | ragged `i64` |
//! | `float_list` | ragged `f32` |
//! | `bytes_list` | ragged `u8`: one text or image; a list of several is refused |
//! | none | none |
//!
//! A file does not say whether a feature has one length in all records, so every column is ragged.
//! `data.lengths` gives it a fixed shape. A feature that a record lacks is a missing value. It is
//! an empty list unless the job says otherwise, as in TensorFlow. Columns are sorted by name,
//! because features have no order. A record with a damaged checksum of its data is broken, and so
//! is a feature of another type than in the first record.

use std::collections::BTreeMap;
use std::ops::Range;

use bytes::Bytes;
use prost::Message;
use proto::column::{ColumnSpec, ElementType};

use crate::column::Column;
use crate::cuts::Cuts;
use crate::error::{Flaw, Result, malformed, wrong};
use crate::format::{Outline, Source};
use crate::object::{Object, Scan};

/// Bytes of a record before its data, and behind it.
const HEADER_BYTES: usize = 12;
const FOOTER_BYTES: usize = 4;

#[derive(Clone, PartialEq, prost::Message)]
struct Example {
    #[prost(message, optional, tag = "1")]
    features: Option<Features>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct Features {
    #[prost(btree_map = "string, message", tag = "1")]
    feature: BTreeMap<String, Feature>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct Feature {
    #[prost(oneof = "List", tags = "1, 2, 3")]
    list: Option<List>,
}

#[derive(Clone, PartialEq, prost::Oneof)]
pub(crate) enum List {
    #[prost(message, tag = "1")]
    Bytes(BytesList),
    #[prost(message, tag = "2")]
    Floats(FloatList),
    #[prost(message, tag = "3")]
    Integers(IntegerList),
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct BytesList {
    #[prost(bytes = "bytes", repeated, tag = "1")]
    pub(crate) value: Vec<Bytes>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct FloatList {
    #[prost(float, repeated, tag = "1")]
    pub(crate) value: Vec<f32>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct IntegerList {
    #[prost(int64, repeated, tag = "1")]
    pub(crate) value: Vec<i64>,
}

impl List {
    /// Returns the type of the column.
    const fn dtype(&self) -> ElementType {
        match self {
            Self::Bytes(_) => ElementType::U8,
            Self::Floats(_) => ElementType::F32,
            Self::Integers(_) => ElementType::I64,
        }
    }
}

/// Opens a file. `known` says where its blocks are; then only the first record is read.
///
/// # Errors
/// A record's length is damaged, the file is cut off, or the first record is no Example.
pub(crate) fn open(object: &Object, known: Option<&Cuts>) -> Result<Box<dyn Source>> {
    let mut file = File(Scan::new(object, known.is_some()));
    let (mut cuts, mut at) = (known.cloned().unwrap_or_default(), 0);
    while known.is_none() && at < object.len() {
        cuts.add(at);
        at = file.frame(at)?.end + FOOTER_BYTES;
    }
    if cuts.records().is_empty() {
        return wrong(object.path(), "no record, so that the columns are unknown; leave the file out");
    }
    let frame = file.frame(0)?;
    let first = file.example(frame).map_err(|flaw| flaw.at(object.path(), |reason| reason))?;
    let column =
        |(name, feature): (String, Feature)| Some(ColumnSpec::ragged(name, feature.list?.dtype(), []));
    let columns: Vec<_> = first.into_iter().filter_map(column).collect();
    if columns.is_empty() {
        return wrong(
            object.path(),
            "the first record has no features with values; expected records of tf.train.Example",
        );
    }
    let outline = Outline { columns, blocks: cuts.records().to_vec() };
    Ok(Box::new(Tfrecord { object: object.clone(), cuts, outline }))
}

struct Tfrecord {
    object: Object,
    cuts: Cuts,
    outline: Outline,
}

impl Source for Tfrecord {
    fn outline(&self) -> &Outline {
        &self.outline
    }

    fn cuts(&self) -> Option<&Cuts> {
        Some(&self.cuts)
    }

    /// Decodes columns. A record is broken if its data is damaged, and a value if it has another
    /// type than in the first record.
    ///
    /// # Errors
    /// The length of a record is damaged, or the file cannot be read.
    fn read(&self, block: usize, columns: &[usize]) -> Result<Vec<Column>> {
        let records = self.outline.blocks[block];
        let column = |&at: &usize| Column::with_capacity(self.outline.columns[at].clone(), records as usize);
        let mut out: Vec<_> = columns.iter().map(column).collect();
        let range = self.cuts.range(block, self.object.len());
        let mut at = range.start;
        let mut file = File(Scan::over(&self.object, range)?);
        for _ in 0..records {
            let frame = file.frame(at)?;
            at = frame.end + FOOTER_BYTES;
            let features = match file.example(frame) {
                Ok(features) => features,
                Err(Flaw::Unread(error)) => return Err(error),
                Err(Flaw::Malformed(reason)) => {
                    out.iter_mut().for_each(|column| column.push_broken(|| reason.as_str().into()));
                    continue;
                }
            };
            for column in &mut out {
                let list = features.get(&column.spec().name).and_then(|feature| feature.list.as_ref());
                if let Err(reason) = append(column, list) {
                    column.push_broken(|| reason.into());
                }
            }
        }
        Ok(out)
    }
}

/// Appends the values of one record.
///
/// # Errors
/// The values do not fit the column, and why. Then nothing is appended.
fn append(column: &mut Column, list: Option<&List>) -> Result<(), String> {
    let dtype = column.spec().dtype;
    if let Some(other) = list.filter(|list| list.dtype() != dtype) {
        let found = other.dtype();
        return Err(format!(
            "type {found}, in the first record {dtype}; all records must have one type: write the files anew"
        ));
    }
    match list {
        None => column.push_missing(),
        Some(List::Floats(list)) => column.push(bytemuck::cast_slice(&list.value)),
        Some(List::Integers(list)) => column.push(bytemuck::cast_slice(&list.value)),
        Some(List::Bytes(list)) => match list.value.as_slice() {
            [] => column.push(&[]),
            [one] => column.push(one),
            several => {
                return Err(format!(
                    "{} texts, a column has one in each record; write them as features of their own",
                    several.len()
                ));
            }
        },
    }
    Ok(())
}

/// The bytes of a file, as records.
struct File<'a>(Scan<'a>);

impl File<'_> {
    /// Returns the place of the data of the record that begins at byte `at`. Its length is checked,
    /// its data is not.
    ///
    /// # Errors
    /// The file is cut off, or the length is damaged.
    fn frame(&mut self, at: usize) -> Result<Range<usize>> {
        let object = self.0.object();
        let cut_off = |what: &str| {
            malformed(
                object.path(),
                format!(
                    "the file of {} bytes ends within the {what} of the record at byte {at}; the file is cut off, copy it \
                         again",
                    object.len()
                ),
            )
        };
        let header = self.0.get(at..at + HEADER_BYTES)?;
        let header = header.as_deref().and_then(<[u8]>::first_chunk::<HEADER_BYTES>);
        let header = header.ok_or_else(|| cut_off("length"))?;
        let [l0, l1, l2, l3, l4, l5, l6, l7, checksum @ ..] = *header;
        let length = [l0, l1, l2, l3, l4, l5, l6, l7];
        if u32::from_le_bytes(checksum) != masked(&length) {
            let what = if at == 0 { "no TFRecord file, or a damaged one" } else { "the file is damaged" };
            return wrong(
                object.path(),
                format!("byte {at}: the checksum of a record's length does not fit: {what}; copy it again"),
            );
        }
        let begin = at + HEADER_BYTES;
        let end =
            usize::try_from(u64::from_le_bytes(length)).ok().and_then(|length| begin.checked_add(length));
        let fits = |end: &usize| end.checked_add(FOOTER_BYTES).is_some_and(|end| end <= object.len());
        let end = end.filter(fits).ok_or_else(|| cut_off("data"))?;
        Ok(begin..end)
    }

    /// Checks and decodes the data of a record.
    ///
    /// # Errors
    /// The data is damaged, or no Example, with its place and what to do; or it cannot be read.
    fn example(&mut self, frame: Range<usize>) -> Result<BTreeMap<String, Feature>, Flaw> {
        let (begin, bytes) = (frame.start - HEADER_BYTES, frame.end - frame.start);
        let data = self.0.get(frame.start..frame.end + FOOTER_BYTES)?.unwrap_or_default();
        let checksum =
            data.get(bytes..).and_then(<[u8]>::first_chunk).map(|bytes| u32::from_le_bytes(*bytes));
        let data = data.slice(..bytes.min(data.len()));
        if checksum != Some(masked(&data)) {
            let reason = format!("byte {begin}: the checksum of the data does not fit; copy the file again");
            return Err(reason.into());
        }
        let example = Example::decode(data).map_err(|error| {
            format!(
                "byte {begin}: no tf.train.Example: {error}; write the file with one Example in each record"
            )
        })?;
        Ok(example.features.unwrap_or_default().feature)
    }
}

/// Returns a record of these features, as it lies in a file.
pub(crate) fn record(features: impl IntoIterator<Item = (String, List)>) -> Vec<u8> {
    let feature = |(name, list)| (name, Feature { list: Some(list) });
    let features = Features { feature: features.into_iter().map(feature).collect() };
    framed(&Example { features: Some(features) }.encode_to_vec())
}

/// Returns data between its length and its checksum, as it lies in a file.
pub(crate) fn framed(data: &[u8]) -> Vec<u8> {
    let length = (data.len() as u64).to_le_bytes();
    let (of_length, of_data) = (masked(&length).to_le_bytes(), masked(data).to_le_bytes());
    [&length[..], &of_length, data, &of_data].concat()
}

/// Returns the checksum of bytes.
fn masked(bytes: &[u8]) -> u32 {
    crc32c::crc32c(bytes).rotate_right(15).wrapping_add(0xa282_ead8)
}

#[cfg(test)]
pub(crate) mod tests {
    use std::path::Path;

    use proptest::prelude::*;

    use super::*;
    use crate::column::Fault;

    /// A file of the Python package `tfrecord` 1.14.6: one Example with `a`, `int64_list` of 1.
    pub(crate) const BY_ANOTHER_WRITER: &[u8] =
        b"\x0e\0\0\0\0\0\0\0\xc5\xe5i?\n\x0c\n\n\n\x01a\x12\x05\x1a\x03\n\x01\x019\xe8xP";

    fn write(records: &[&[(&str, Option<List>)]]) -> Vec<u8> {
        let example = |features: &&[(&str, Option<List>)]| {
            let feature =
                |(name, list): &(&str, Option<List>)| (name.to_string(), Feature { list: list.clone() });
            let features = Features { feature: features.iter().map(feature).collect() };
            framed(&Example { features: Some(features) }.encode_to_vec())
        };
        records.iter().flat_map(example).collect()
    }

    fn integers(value: &[i64]) -> Option<List> {
        Some(List::Integers(IntegerList { value: value.to_vec() }))
    }

    fn floats(value: &[f32]) -> Option<List> {
        Some(List::Floats(FloatList { value: value.to_vec() }))
    }

    fn texts(value: &[&'static [u8]]) -> Option<List> {
        Some(List::Bytes(BytesList { value: value.iter().map(|text| Bytes::from_static(text)).collect() }))
    }

    fn source(bytes: &[u8]) -> Result<Box<dyn Source>> {
        open(&Object::copy(Path::new("a.tfrecord"), bytes.to_vec()), None)
    }

    fn read(bytes: &[u8]) -> Result<Vec<Column>> {
        let source = source(bytes)?;
        let all: Vec<_> = (0..source.outline().columns.len()).collect();
        let mut blocks = (0..source.outline().blocks.len()).map(|block| source.read(block, &all));
        blocks.next().expect("a file has a record")
    }

    fn error(bytes: &[u8]) -> String {
        read(bytes).unwrap_err().to_string()
    }

    /// Returns why record 1 of a file has no value of the first column.
    fn broken(bytes: &[u8]) -> String {
        let column = read(bytes).unwrap().remove(0);
        assert_eq!((column.records(), column.fault(0)), (2, None));
        match column.fault(1) {
            Some(Fault::Broken(reason)) => reason.to_owned(),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn features_are_ragged_columns_sorted_by_name() {
        let file = write(&[
            &[("x", floats(&[0.5, 1.5])), ("label", integers(&[-3])), ("t", texts(&[b"Ann"])), ("no", None)],
            &[("label", integers(&[])), ("t", texts(&[])), ("more", integers(&[1]))],
        ]);
        let columns = read(&file).unwrap();
        let specs: Vec<_> = columns.iter().map(|column| column.spec().to_string()).collect();
        assert_eq!(specs, ["`label` i64[any]", "`t` u8[any]", "`x` f32[any]"]);
        assert_eq!((columns[0].values(), columns[0].ends()), (Some(&[-3i64][..]), Some(&[1, 1][..])));
        assert_eq!((columns[1].bytes(), columns[1].ends()), (&b"Ann"[..], Some(&[3, 3][..])));
        assert_eq!((columns[2].values(), columns[2].ends()), (Some(&[0.5f32, 1.5][..]), Some(&[2, 2][..])));
        let faults = columns.iter().map(|column| column.fault(1)).collect::<Vec<_>>();
        assert_eq!(faults, [None, None, Some(Fault::Missing)], "an empty list is a value");
    }

    #[test]
    fn files_of_another_writer_are_read() {
        let columns = read(BY_ANOTHER_WRITER).unwrap();
        assert_eq!((columns[0].spec().name.as_str(), columns[0].values()), ("a", Some(&[1i64][..])));
    }

    #[test]
    fn damaged_records_are_refused_with_their_place() {
        let first = write(&[&[("x", integers(&[1, 2]))]]);
        let at = first.len();
        let good = [first.clone(), first].concat();
        let spoiled = |place: usize| {
            let mut bad = good.clone();
            bad[place] ^= 1;
            bad
        };
        let damaged = |place: usize| error(&spoiled(place));
        assert!(
            damaged(0)
                .contains("a.tfrecord: byte 0: the checksum of a record's length does not fit: no TFRecord")
        );
        assert!(
            damaged(at + 9)
                .contains(&format!("byte {at}: the checksum of a record's length does not fit: the file"))
        );
        for place in [at + 13, 2 * at - 1] {
            let reason = broken(&spoiled(place));
            assert!(
                reason.contains(&format!("byte {at}: the checksum of the data does not fit")),
                "{reason}"
            );
        }
        assert!(
            error(&good[..at + 3])
                .contains(&format!("ends within the length of the record at byte {at}; the file is"))
        );
        assert!(
            error(&good[..2 * at - 1]).contains(&format!("ends within the data of the record at byte {at}"))
        );
        assert!(error(&framed(b"\xFF")).contains("byte 0: no tf.train.Example"));
        assert!(error(b"").contains("a.tfrecord: no record"));
        assert!(error(&framed(b"")).contains("the first record has no features"));
    }

    #[test]
    fn a_feature_of_another_type_is_broken() {
        let reason = broken(&write(&[&[("x", integers(&[1]))], &[("x", floats(&[1.0]))]]));
        assert!(reason.contains("type f32, in the first record i64"), "{reason}");
        let reason = broken(&write(&[&[("x", texts(&[b"a"]))], &[("x", texts(&[b"a", b"b"]))]]));
        assert!(reason.contains("2 texts, a column has one"), "{reason}");
    }

    #[test]
    fn large_files_have_several_blocks() {
        let record = write(&[&[("x", floats(&vec![1.0; 1 << 18])), ("n", integers(&[7]))]]);
        let source = source(&record.repeat(9)).unwrap();
        assert_eq!(source.outline().blocks, [4, 4, 1]);
        for (block, &records) in source.outline().blocks.iter().enumerate() {
            assert_eq!(
                source.read(block, &[0]).unwrap()[0].values(),
                Some(&vec![7i64; records as usize][..])
            );
        }
    }

    proptest! {
        #[test]
        fn what_is_written_is_read(
            rows in proptest::collection::vec(
                (proptest::collection::vec(any::<i64>(), 0..4), proptest::collection::vec(-1e9f32..1e9, 0..4)),
                1..6,
            ),
        ) {
            let records: Vec<_> = rows.iter().map(|(a, b)| [("a", integers(a)), ("b", floats(b))]).collect();
            let records: Vec<_> = records.iter().map(|record| &record[..]).collect();
            let columns = read(&write(&records)).unwrap();
            for (at, (a, b)) in rows.iter().enumerate() {
                prop_assert_eq!(columns[0].record(at), bytemuck::cast_slice::<i64, u8>(a));
                prop_assert_eq!(columns[1].record(at), bytemuck::cast_slice::<f32, u8>(b));
            }
        }

        #[test]
        fn damaged_files_never_panic(
            edits in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..5),
            cut in 0usize..200,
        ) {
            let mut bytes = write(&[&[("x", floats(&[1.0, 2.0])), ("t", texts(&[b"a"]))], &[("t", texts(&[b"b"]))]]);
            for (at, value) in edits {
                let at = at.index(bytes.len());
                bytes[at] = value;
            }
            bytes.truncate(cut);
            let _ = read(&bytes);
        }

        #[test]
        fn data_with_fitting_checksums_never_panics(data in proptest::collection::vec(any::<u8>(), 0..60)) {
            let good = write(&[&[("x", floats(&[1.0])), ("t", texts(&[b"a"]))]]);
            let _ = (read(&framed(&data)), read(&[good, framed(&data)].concat()));
        }
    }
}
