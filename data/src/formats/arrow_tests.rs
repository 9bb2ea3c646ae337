//! Parquet and Arrow files, written by their own crates.

use std::path::Path;
use std::sync::Arc;

use ::parquet::arrow::ArrowWriter;
use ::parquet::file::properties::WriterProperties;
use arrow_array::types::{Int8Type, Int32Type, UInt16Type};
use arrow_array::{
    ArrayRef, BinaryArray, BooleanArray, DictionaryArray, FixedSizeListArray, Float32Array, Float64Array,
    Int8Array, Int64Array, ListArray, RecordBatch, StringArray, UInt16Array, UInt64Array,
};
use arrow_ipc::CompressionType;
use arrow_ipc::writer::{FileWriter, IpcWriteOptions, StreamWriter};
use arrow_schema::Field;
use proto::column::{ColumnSpec, ElementType};

use super::{arrow, arrow_columns, parquet};
use crate::column::{Column, Fault};
use crate::error::Result;
use crate::format::Source;
use crate::object::Object;

fn batch(columns: Vec<(&str, ArrayRef)>) -> RecordBatch {
    RecordBatch::try_from_iter(columns).unwrap()
}

/// Returns a batch of three records with every kind of column.
fn every_kind() -> RecordBatch {
    let lists = [vec![1, 2], vec![], vec![3]];
    let lists = lists.map(|list| Some(list.into_iter().map(Some).collect::<Vec<_>>()));
    let pairs = [[1, 2], [3, 4], [5, 6]].map(|pair| Some(pair.map(Some)));
    batch(vec![
        ("id", Arc::new(Int64Array::from(vec![1, -2, 3]))),
        ("u16", Arc::new(UInt16Array::from(vec![1, 65_535, 3]))),
        ("price", Arc::new(Float64Array::from(vec![0.1, 0.2, 0.3]))),
        ("is_new", Arc::new(BooleanArray::from(vec![true, false, true]))),
        ("text", Arc::new(StringArray::from(vec!["Ann", "", "Bob"]))),
        ("raw", Arc::new(BinaryArray::from(vec![&b"\x00\xFF"[..], b"x", b""]))),
        ("city", Arc::new(DictionaryArray::<Int32Type>::from_iter(["Rome", "Oslo", "Rome"]))),
        ("tokens", Arc::new(ListArray::from_iter_primitive::<UInt16Type, _, _>(lists))),
        ("pair", Arc::new(FixedSizeListArray::from_iter_primitive::<Int32Type, _, _>(pairs, 2))),
    ])
}

fn parquet_file(batch: &RecordBatch, group: usize) -> Vec<u8> {
    let mut file = Vec::new();
    let properties = WriterProperties::builder().set_max_row_group_row_count(Some(group)).build();
    let mut writer = ArrowWriter::try_new(&mut file, batch.schema(), Some(properties)).unwrap();
    writer.write(batch).unwrap();
    writer.close().unwrap();
    file
}

fn arrow_file(batches: &[RecordBatch]) -> Vec<u8> {
    let mut writer = FileWriter::try_new(Vec::new(), &batches[0].schema()).unwrap();
    batches.iter().for_each(|batch| writer.write(batch).unwrap());
    writer.into_inner().unwrap()
}

fn arrow_stream(batches: &[RecordBatch]) -> Vec<u8> {
    let mut writer = StreamWriter::try_new(Vec::new(), &batches[0].schema()).unwrap();
    batches.iter().for_each(|batch| writer.write(batch).unwrap());
    writer.into_inner().unwrap()
}

fn open_parquet(file: &[u8]) -> Result<Box<dyn Source>> {
    parquet::open(Object::copy(Path::new("a.parquet"), file.to_vec()))
}

fn open_arrow(file: &[u8]) -> Result<Box<dyn Source>> {
    arrow::open(&Object::copy(Path::new("a.arrow"), file.to_vec()))
}

/// Returns all records of all columns, each as bytes.
fn records(source: &dyn Source) -> Vec<(ColumnSpec, Vec<Vec<u8>>)> {
    let outline = source.outline().clone();
    let all: Vec<usize> = (0..outline.columns.len()).collect();
    let blocks: Vec<Vec<Column>> =
        (0..outline.blocks.len()).map(|block| source.read(block, &all).unwrap()).collect();
    let of_column = |(at, spec): (usize, &ColumnSpec)| {
        let records = blocks
            .iter()
            .flat_map(|block| (0..block[at].records()).map(move |record| block[at].record(record).to_vec()));
        (spec.clone(), records.collect())
    };
    outline.columns.iter().enumerate().map(of_column).collect()
}

fn bytes<T: bytemuck::Pod>(records: &[&[T]]) -> Vec<Vec<u8>> {
    records.iter().map(|record| bytemuck::cast_slice(record).to_vec()).collect()
}

#[test]
fn every_kind_of_column_is_read_from_both_formats() {
    let fixed = |name: &str, dtype, shape: &[usize]| ColumnSpec::fixed(name, dtype, shape);
    let ragged = |name: &str, dtype| ColumnSpec::ragged(name, dtype, []);
    let expected = [
        (fixed("id", ElementType::I64, &[]), bytes(&[&[1i64], &[-2], &[3]])),
        (fixed("u16", ElementType::I32, &[]), bytes(&[&[1i32], &[65_535], &[3]])),
        (fixed("price", ElementType::F64, &[]), bytes(&[&[0.1f64], &[0.2], &[0.3]])),
        (fixed("is_new", ElementType::Bool, &[]), bytes(&[&[1u8], &[0], &[1]])),
        (ragged("text", ElementType::U8), bytes(&[&b"Ann"[..], b"", b"Bob"])),
        (ragged("raw", ElementType::U8), bytes(&[&b"\x00\xFF"[..], b"x", b""])),
        (ragged("city", ElementType::U8), bytes(&[&b"Rome"[..], b"Oslo", b"Rome"])),
        (ragged("tokens", ElementType::I32), bytes(&[&[1i32, 2][..], &[], &[3]])),
        (fixed("pair", ElementType::I32, &[2]), bytes(&[&[1i32, 2], &[3, 4], &[5, 6]])),
    ];
    let all = every_kind();
    let halves = [all.slice(0, 1), all.slice(1, 2)];
    for source in [
        open_parquet(&parquet_file(&all, 2)).unwrap(),
        open_parquet(&parquet_file(&all, 100)).unwrap(),
        open_arrow(&arrow_file(&halves)).unwrap(),
        open_arrow(&arrow_stream(&halves)).unwrap(),
    ] {
        assert_eq!(source.outline().records(), 3);
        assert_eq!(records(source.as_ref()), expected);
    }
}

#[test]
fn columns_are_decoded_in_the_order_in_which_they_are_wanted() {
    for source in [
        open_parquet(&parquet_file(&every_kind(), 2)).unwrap(),
        open_arrow(&arrow_file(&[every_kind()])).unwrap(),
    ] {
        let columns = source.read(0, &[3, 0]).unwrap();
        let names: Vec<_> = columns.iter().map(|column| column.spec().name.as_str()).collect();
        assert_eq!(names, ["is_new", "id"]);
    }
}

/// Returns the faults of one column, over all blocks.
fn faults(source: &dyn Source, column: usize) -> Vec<Option<String>> {
    let said = |fault: Fault<'_>| match fault {
        Fault::Missing => "missing".to_owned(),
        Fault::Broken(reason) => reason.to_owned(),
    };
    let blocks = (0..source.outline().blocks.len()).map(|block| source.read(block, &[column]).unwrap());
    let faults = blocks.flat_map(|columns| {
        let column = &columns[0];
        (0..column.records()).map(|record| column.fault(record).map(said)).collect::<Vec<_>>()
    });
    faults.collect()
}

#[test]
fn a_null_is_a_missing_value_in_every_kind_of_column() {
    let missing = || Some("missing".to_owned());
    let lists = [Some(vec![Some(1), Some(2)]), None, Some(vec![Some(3)]), Some(vec![])];
    let pairs = [Some([Some(1), Some(2)]), None, Some([Some(3), Some(4)]), Some([Some(5), Some(6)])];
    let nulls = batch(vec![
        ("flat", Arc::new(Float64Array::from(vec![Some(1.0), None, Some(3.0), Some(4.0)]))),
        ("price", Arc::new(Float32Array::from(vec![Some(1.0), None, Some(3.0), Some(4.0)]))),
        ("u16", Arc::new(UInt16Array::from(vec![Some(1), None, Some(3), Some(4)]))),
        ("is_new", Arc::new(BooleanArray::from(vec![Some(true), None, Some(true), Some(false)]))),
        ("text", Arc::new(StringArray::from(vec![Some("Ann"), None, Some("Bob"), Some("")]))),
        (
            "city",
            Arc::new(DictionaryArray::<Int32Type>::from_iter([Some("Rome"), None, Some("Oslo"), Some("")])),
        ),
        ("tokens", Arc::new(ListArray::from_iter_primitive::<UInt16Type, _, _>(lists))),
        ("pair", Arc::new(FixedSizeListArray::from_iter_primitive::<Int32Type, _, _>(pairs, 2))),
    ]);
    for source in [
        open_parquet(&parquet_file(&nulls, 3)).unwrap(),
        open_arrow(&arrow_file(&[nulls.slice(0, 1), nulls.slice(1, 3)])).unwrap(),
    ] {
        for column in 0..nulls.num_columns() {
            let name = &source.outline().columns[column].name;
            assert_eq!(faults(source.as_ref(), column), [None, missing(), None, None], "{name}");
        }
        let all = records(source.as_ref());
        assert_eq!(all[0].1, bytes(&[&[1.0f64], &[0.0], &[3.0], &[4.0]]));
        assert_eq!((&all[4].1[2][..], &all[6].1[2][..]), (&b"Bob"[..], bytemuck::cast_slice(&[3i32])));
        assert_eq!(all[7].1[3], bytemuck::cast_slice::<i32, u8>(&[5, 6]));
    }
}

#[test]
fn a_list_with_a_null_is_broken() {
    let lists = [Some(vec![Some(1), Some(2)]), Some(vec![Some(3), None]), None, Some(vec![])];
    let pairs = [[Some(1), Some(2)], [Some(3), Some(4)], [None, Some(6)], [Some(7), Some(8)]].map(Some);
    let nulls = batch(vec![
        ("tokens", Arc::new(ListArray::from_iter_primitive::<UInt16Type, _, _>(lists))),
        ("pair", Arc::new(FixedSizeListArray::from_iter_primitive::<Int32Type, _, _>(pairs, 2))),
    ]);
    for source in
        [open_parquet(&parquet_file(&nulls, 3)).unwrap(), open_arrow(&arrow_file(&[nulls])).unwrap()]
    {
        let broken =
            |fault: &Option<String>| fault.as_ref().map(|said| said.starts_with("a list with a null"));
        let tokens = faults(source.as_ref(), 0);
        assert_eq!(tokens.iter().map(broken).collect::<Vec<_>>(), [None, Some(true), Some(false), None]);
        assert_eq!(tokens[2].as_deref(), Some("missing"));
        let pair = faults(source.as_ref(), 1);
        assert_eq!(pair.iter().map(broken).collect::<Vec<_>>(), [None, None, Some(true), None]);
    }
}

#[test]
fn an_integer_beyond_a_column_is_broken() {
    let large = batch(vec![("id", Arc::new(UInt64Array::from(vec![7, u64::MAX])))]);
    let source = open_parquet(&parquet_file(&large, 2)).unwrap();
    let faults = faults(source.as_ref(), 0);
    assert_eq!(faults[0], None);
    assert!(faults[1].as_ref().unwrap().contains("18446744073709551615 is beyond"), "{faults:?}");
}

#[test]
fn an_integer_of_a_dictionary_beyond_a_column_is_broken() {
    let values: ArrayRef = Arc::new(UInt64Array::from(vec![7, u64::MAX]));
    let keys = Int8Array::from(vec![Some(0), Some(1), None, Some(0)]);
    let ids: ArrayRef = Arc::new(DictionaryArray::<Int8Type>::new(keys, values));
    let source = open_arrow(&arrow_file(&[batch(vec![("id", ids.clone())])])).unwrap();
    let faults = faults(source.as_ref(), 0);
    assert_eq!((&faults[0], &faults[3]), (&None, &None));
    assert!(faults[1].as_ref().unwrap().contains("an integer beyond 64 bits"), "{faults:?}");
    assert_eq!(faults[2].as_deref(), Some("missing"));

    let item = Arc::new(Field::new("item", ids.data_type().clone(), true));
    let pairs: ArrayRef = Arc::new(FixedSizeListArray::new(item, 2, ids.slice(0, 2), None));
    let spec = ColumnSpec::fixed("pair", ElementType::I64, [2]);
    let column = arrow_columns::convert(Path::new("a.arrow"), &spec, &[pairs]).unwrap();
    assert!(matches!(column.fault(0), Some(Fault::Broken(_))), "{:?}", column.fault(0));

    let none: ArrayRef = Arc::new(UInt64Array::from(Vec::<u64>::new()));
    let empty: ArrayRef = Arc::new(DictionaryArray::<Int8Type>::new(Int8Array::from(vec![None::<i8>]), none));
    let spec = ColumnSpec::fixed("id", ElementType::I64, []);
    let column = arrow_columns::convert(Path::new("a.arrow"), &spec, &[empty]).unwrap();
    assert_eq!(column.fault(0), Some(Fault::Missing));
}

#[test]
fn files_that_are_no_such_files_say_so() {
    let good = parquet_file(&every_kind(), 2);
    for bad in [&b""[..], b"PAR1", &good[..good.len() - 9]] {
        let message = open_parquet(bad).err().expect("no Parquet").to_string();
        assert!(message.contains("a.parquet: no Parquet file, or a damaged one"), "{message}");
    }
    let good = arrow_file(&[every_kind()]);
    for bad in [&b""[..], b"ARROW1", &good[..good.len() / 2]] {
        assert!(open_arrow(bad).is_err());
    }
}

#[test]
fn damaged_pages_are_refused_or_read_and_never_panic() {
    let good = parquet_file(&every_kind(), 2);
    for at in 4..good.len() - 8 {
        let mut bad = good.clone();
        bad[at] ^= 0xFF;
        if let Ok(source) = open_parquet(&bad) {
            let all: Vec<usize> = (0..source.outline().columns.len()).collect();
            (0..source.outline().blocks.len()).for_each(|block| drop(source.read(block, &all)));
        }
    }
}

#[test]
fn damaged_arrow_files_are_refused_or_read_and_never_panic() {
    let good = arrow_file(&[every_kind()]);
    for at in 8..good.len() {
        let mut bad = good.clone();
        bad[at] ^= 0xFF;
        if let Ok(source) = open_arrow(&bad) {
            let all: Vec<usize> = (0..source.outline().columns.len()).collect();
            let read = |block| drop(source.read(block, &all));
            (0..source.outline().blocks.len()).for_each(read);
        }
    }
}

#[test]
fn compressed_arrow_files_are_read_and_announce_no_more_than_they_can_have() {
    let batch = batch(vec![("x", Arc::new(Int64Array::from(vec![7; 1000])))]);
    for compression in [CompressionType::LZ4_FRAME, CompressionType::ZSTD] {
        let options = IpcWriteOptions::default().try_with_compression(Some(compression)).unwrap();
        let mut writer = FileWriter::try_new_with_options(Vec::new(), &batch.schema(), options).unwrap();
        writer.write(&batch).unwrap();
        let mut file = writer.into_inner().unwrap();
        let column = open_arrow(&file).unwrap().read(0, &[0]).unwrap().remove(0);
        assert_eq!(column.values(), Some(&[7i64; 1000][..]));
        let size = 8000u64.to_le_bytes();
        let at = file.windows(8).position(|window| window == size).expect("the size of the array");
        file[at..at + 8].copy_from_slice(&(1u64 << 50).to_le_bytes());
        let message = open_arrow(&file).unwrap().read(0, &[0]).unwrap_err().to_string();
        assert!(message.contains("batch 0: a compressed array of "), "{message}");
        assert!(message.contains("cannot become 1125899906842624"), "{message}");
    }
}
