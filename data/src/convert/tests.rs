//! What a conversion writes is what its reader finds.

use std::path::Path;

use proptest::prelude::*;
use proto::ids::Epoch;
use proto::random::Keyed;
use proto::spec::DataSet;
use tempfile::TempDir;

use super::*;
use crate::Dataset;
use crate::formats::idx::tests::write as idx;

/// Kinds of columns that Arrow holds, without a name.
fn kinds() -> Vec<ColumnSpec> {
    let types = ElementType::ALL.into_iter().filter(|dtype| *dtype != ElementType::BF16);
    let shapes: [Vec<usize>; 3] = [vec![], vec![3], vec![2, 2]];
    let of_type = |dtype| {
        let fixed = shapes.clone().map(|shape| ColumnSpec::fixed("", dtype, shape));
        let ragged = [vec![], vec![2]].map(|shape: Vec<usize>| ColumnSpec::ragged("", dtype, shape));
        fixed.into_iter().chain(ragged).collect::<Vec<_>>()
    };
    types.flat_map(of_type).collect()
}

/// Returns a value that every type of its kind holds exactly.
fn element(dtype: ElementType, bits: u64) -> Vec<u8> {
    let small = (bits % 100) as f64 - 40.0;
    let value = match dtype {
        // A letter, so that bytes are a text.
        ElementType::U8 => f64::from(b'a') + (bits % 26) as f64,
        ElementType::Bool => (bits % 2) as f64,
        dtype if dtype.is_float() => small / 4.0,
        _ => small,
    };
    let mut out = vec![0; dtype.size()];
    cast(ElementType::F64, &value.to_le_bytes(), dtype, &mut out).unwrap();
    out
}

fn column(spec: &ColumnSpec, records: usize, seed: u64) -> Column {
    let mut random = Keyed::new(seed, &spec.name, 0);
    let mut column = Column::with_capacity(spec.clone(), records);
    for _ in 0..records {
        let lists = if spec.ragged { (random.next_u64() % 4) as usize } else { 1 };
        let count = lists * spec.shape.iter().product::<usize>();
        let values = (0..count).flat_map(|_| element(spec.dtype, random.next_u64()));
        column.push(&values.collect::<Vec<_>>());
    }
    column
}

fn part(column: &Column, records: Range<usize>) -> Column {
    let mut part = Column::with_capacity(column.spec().clone(), 0);
    records.for_each(|record| part.push(column.record(record)));
    part
}

/// Writes columns as one file, and returns its path.
fn write(folder: &Path, format: Format, number: usize, columns: &[Column]) -> String {
    let specs: Vec<_> = columns.iter().map(|column| column.spec().clone()).collect();
    let written = written::all(format, &specs, None).unwrap();
    let records = columns[0].records() as u64;
    let shard = Shard { folder, format, columns: &written, number, first: 0, records };
    let mut sink = writers::open(&shard).unwrap();
    sink.add(columns).unwrap();
    whole::keep(sink.finish().unwrap()).unwrap();
    folder.join(&shard.names()[0]).display().to_string()
}

/// Returns an order to convert `files` below a temporary folder.
fn order(dir: &TempDir, from: Format, files: Vec<String>, to: Format) -> Conversion {
    let lists = BTreeMap::from([(FILES.to_owned(), files)]);
    Conversion {
        source: DataSpec::of(from, FilesSpec { records: None, lists }),
        format: to,
        folder: dir.path().join(to.name()),
        store: None,
        size: ShardSize::Records(100),
        shuffle: None,
        threads: 2,
        overwrite: false,
    }
}

fn done(order: &Conversion) -> Converted {
    convert(order, &|_, _| true).unwrap().unwrap()
}

fn error(order: &Conversion) -> String {
    convert(order, &|_, _| true).unwrap_err().to_string()
}

/// Returns all records of a column that a job reads.
fn read(data: &DataSpec, column: &ColumnSpec) -> Vec<Vec<u8>> {
    let files = 0..data.train.len();
    let of_file = |file| {
        let table = Arc::new(Table::open(data, &data.train, file, None, &()).unwrap());
        let place = table.columns().iter().find(|place| place.spec == *column);
        let place = place.unwrap_or_else(|| panic!("no column {column} in {:?}", table.columns()));
        let (mut reader, mut records) = (table.reader(std::slice::from_ref(place)), Vec::new());
        for record in 0..table.records() {
            reader.record(record, |_, column, row| records.push(column.record(row).to_vec())).unwrap();
        }
        records
    };
    files.flat_map(of_file).collect()
}

/// Returns all records of a column, in another type.
fn expected(column: &Column, dtype: ElementType) -> Vec<Vec<u8>> {
    let from = column.spec().dtype;
    let record = |record| {
        let raw = column.record(record);
        let mut out = vec![0; raw.len() / from.size() * dtype.size()];
        cast(from, raw, dtype, &mut out).unwrap();
        out
    };
    (0..column.records()).map(record).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn every_format_gives_back_the_records_that_it_holds(
        chosen in proptest::collection::vec(any::<prop::sample::Index>(), 1..5),
        records in 1usize..40,
        second in any::<prop::sample::Index>(),
        each in 4u64..20,
        threads in 1usize..4,
        seed in any::<u64>(),
        shuffle in proptest::option::of(any::<u64>()),
    ) {
        let (dir, kinds) = (tempfile::tempdir().unwrap(), kinds());
        let specs = chosen.iter().enumerate().map(|(at, kind)| {
            ColumnSpec { name: format!("c{at}"), ..kind.get(&kinds).clone() }
        });
        let columns: Vec<_> = specs.map(|spec| column(&spec, records, seed)).collect();
        let specs: Vec<_> = columns.iter().map(|column| column.spec().clone()).collect();
        // Two files, of which one may be empty; shards do not end where files do.
        let cut = second.index(records + 1);
        let parts = [0..cut, cut..records].into_iter().filter(|part| !part.is_empty());
        let files = parts.enumerate().map(|(number, records)| {
            let columns: Vec<_> = columns.iter().map(|column| part(column, records.clone())).collect();
            write(dir.path(), Format::Arrow, number, &columns)
        });
        let files: Vec<_> = files.collect();
        for to in written::FORMATS {
            let order = Conversion {
                size: ShardSize::Records(each),
                shuffle,
                threads,
                ..order(&dir, Format::Arrow, files.clone(), to)
            };
            let Ok(written) = written::all(to, &specs, None) else {
                prop_assert!(convert(&order, &|_, _| true).is_err(), "{}", to.name());
                prop_assert!(!order.folder.exists(), "nothing is written of what cannot be");
                continue;
            };
            let converted = done(&order);
            prop_assert_eq!(converted.records, records as u64);
            prop_assert_eq!(converted.shards as u64, (records as u64).div_ceil(each));
            prop_assert_eq!(converted.data.train.len(), converted.shards);
            for ((column, written), found) in columns.iter().zip(&written).zip(&converted.columns) {
                prop_assert_eq!(&written.column(), found);
                let in_order = expected(column, found.dtype);
                let drawn = RecordOrder::new(records as u64, shuffle.unwrap_or(0), Epoch(0), shuffle.is_some());
                let drawn = (0..records as u64).map(|place| drawn.record(place) as usize);
                let expected: Vec<_> = drawn.map(|record| in_order[record].clone()).collect();
                prop_assert_eq!(read(&converted.data, found), expected, "{} as {}", column.spec(), to.name());
            }
        }
    }
}

#[test]
fn shards_in_a_drawn_order_have_records_of_all_files() {
    let dir = tempfile::tempdir().unwrap();
    let spec = ColumnSpec::fixed("x", ElementType::I64, []);
    let file = |number: usize| {
        let mut column = Column::with_capacity(spec.clone(), 50);
        (0..50).for_each(|_| column.push(&(number as i64).to_le_bytes()));
        write(dir.path(), Format::Npy, number, &[column])
    };
    let files: Vec<_> = (0..4).map(file).collect();
    let shuffled = |seed, to: Format| {
        let lists = BTreeMap::from([("x".to_owned(), files.clone())]);
        let plain = order(&dir, Format::Npy, Vec::new(), to);
        let source = DataSpec::of(Format::Npy, FilesSpec { records: None, lists });
        let size = ShardSize::Records(50);
        let converted = done(&Conversion { source, size, shuffle: Some(seed), overwrite: true, ..plain });
        read(&converted.data, &converted.columns[0])
    };
    let first = shuffled(1, Format::Parquet);
    for shard in first.chunks(50) {
        let of_file = |number: i64| shard.iter().filter(|value| ***value == number.to_le_bytes()).count();
        assert!((0..4).all(|number| (3..30).contains(&of_file(number))), "{:?}", [0, 1, 2, 3].map(of_file));
    }
    assert_eq!(shuffled(1, Format::Arrow), first, "the seed decides");
    assert_ne!(shuffled(2, Format::Arrow), first);
}

#[test]
fn values_of_16_bits_become_floats_that_arrow_has() {
    let dir = tempfile::tempdir().unwrap();
    let spec = ColumnSpec::fixed("x", ElementType::BF16, [2]);
    let column = column(&spec, 5, 7);
    let file = write(dir.path(), Format::Safetensors, 0, std::slice::from_ref(&column));
    for to in [Format::Parquet, Format::Npy, Format::Tar, Format::Tfrecord, Format::Jsonl] {
        let converted = done(&order(&dir, Format::Safetensors, vec![file.clone()], to));
        let found = &converted.columns[0];
        assert_eq!(read(&converted.data, found), expected(&column, found.dtype), "{}", to.name());
    }
}

#[test]
fn the_section_is_one_of_a_job_that_reads_the_records() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("a.csv");
    std::fs::write(&file, "x,a \"b\",labels\n1,2.5,0\n3,4,1\n5,6,2\n").unwrap();
    for to in [Format::Parquet, Format::Tfrecord, Format::Tar, Format::Npy] {
        let order = Conversion {
            size: ShardSize::Records(2),
            ..order(&dir, Format::Csv, vec![file.display().to_string()], to)
        };
        let converted = done(&order);
        let section = std::fs::read_to_string(order.folder.join("data.toml")).unwrap();
        assert_eq!(section, converted.section());
        let label = converted.columns[2].name.clone();
        let section = section.replace("# label = \"..\" ", &format!("label = \"{label}\" #"));
        let text = format!(
            "name = \"t\"\nepochs = 1\nmodel = {{ builtin = \"linear\", loss = \"mse\" }}\nbatch = {{ micro = 1 }}\n\
             optimizer = {{ kind = \"sgd\", learning_rate = 0.1 }}\n{section}"
        );
        let spec = proto::spec::parse(&text, &dir.path().join("job.toml"), &[]).unwrap();
        let data = Dataset::open(&spec, DataSet::Train, None).unwrap();
        let batch = data.batch(Epoch(0), [2, 0]).unwrap();
        let mut features = batch.features().to_vec();
        features.sort_by(f32::total_cmp);
        assert_eq!((features, batch.values()), (vec![1.0, 2.5, 5.0, 6.0], Some(&[2.0, 0.0][..])), "{text}");
    }
}

#[test]
fn files_of_one_array_each_are_converted_together() {
    let dir = tempfile::tempdir().unwrap();
    let file = |name: &str, bytes: Vec<u8>| {
        let path = dir.path().join(name);
        std::fs::write(&path, bytes).unwrap();
        vec![path.display().to_string()]
    };
    let images = file("x", idx(&[3, 2, 2], &(0..12).collect::<Vec<_>>()));
    let labels = file("y", idx(&[3], &[7, 8, 9]));
    let mut order = order(&dir, Format::Idx, Vec::new(), Format::Tar);
    order.source.train.lists =
        BTreeMap::from([("features".to_owned(), images), ("labels".to_owned(), labels)]);
    let converted = done(&order);
    let shown: Vec<_> = converted.columns.iter().map(ToString::to_string).collect();
    assert_eq!(shown, ["`features.npy` u8[2, 2]", "`labels.cls` i64[]"]);
    assert_eq!(converted.data.lengths, BTreeMap::from([("features.npy".to_owned(), 2)]));
    let rows: Vec<Vec<u8>> = (0..3).map(|record| (4 * record..4 * record + 4).collect()).collect();
    assert_eq!(read(&converted.data, &converted.columns[0]), rows);
}

#[test]
fn images_keep_their_bytes_and_their_classes() {
    let dir = tempfile::tempdir().unwrap();
    let files: [(&str, &[u8]); 3] = [
        ("ant/1.png", include_bytes!("../pixels/golden/rgb.png")),
        ("bee/1.jpg", include_bytes!("../pixels/golden/grey.jpg")),
        ("bee/2.webp", include_bytes!("../pixels/golden/lossy.webp")),
    ];
    for (name, bytes) in files {
        let path = dir.path().join("train").join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, bytes).unwrap();
    }
    let folder = dir.path().join("train").display().to_string();
    let converted = done(&order(&dir, Format::Images, vec![folder], Format::Tar));
    let shown: Vec<_> = converted.columns.iter().map(ToString::to_string).collect();
    assert_eq!(shown, ["`png` u8[any]", "`cls` i64[]"]);
    assert_eq!(converted.data.label.as_deref(), Some("cls"));
    let found = read(&converted.data, &converted.columns[0]);
    assert!(found.iter().zip(files).all(|(found, (_, bytes))| found == bytes));
    let classes: Vec<Vec<u8>> = [0i64, 1, 1].map(|class| class.to_le_bytes().to_vec()).into();
    assert_eq!(read(&converted.data, &converted.columns[1]), classes);
}

#[test]
fn columns_are_found_by_their_names_and_others_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let file = |name: &str, text: &str| {
        let path = dir.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.display().to_string()
    };
    let (first, second) = (file("a.csv", "x,y\n1,2\n"), file("b.csv", "y,x\n4,3\n"));
    let converted = done(&order(&dir, Format::Csv, vec![first.clone(), second], Format::Parquet));
    let numbers = [1.0f64, 3.0].map(|number| number.to_le_bytes().to_vec());
    assert_eq!(read(&converted.data, &converted.columns[0]), numbers);
    let message = error(&order(&dir, Format::Csv, vec![first, file("c.csv", "x,z\n4,3\n")], Format::Arrow));
    assert!(
        message.contains("/c.csv: its columns are `x` f64[], `z` f64[]; those of")
            && message.contains("/a.csv are"),
        "{message}"
    );
    let message = error(&order(&dir, Format::Csv, vec![file("d.csv", "x,y\n")], Format::Arrow));
    assert!(message.contains("/d.csv: the source has no records"), "{message}");
}

#[test]
fn values_that_a_format_does_not_have_name_their_column_and_record() {
    let dir = tempfile::tempdir().unwrap();
    let floats = |value: f64| {
        let mut column = Column::with_capacity(ColumnSpec::fixed("x", ElementType::F64, []), 2);
        [0.5, value].iter().for_each(|value| column.push(&value.to_le_bytes()));
        column
    };
    let refused = |column: Column, to| {
        let file = write(dir.path(), Format::Parquet, 0, &[column]);
        let order = order(&dir, Format::Parquet, vec![file], to);
        let message = error(&order);
        let left = order.folder.read_dir().unwrap().count();
        assert_eq!(left, 0, "a part of a shard is there");
        message
    };
    let message = refused(floats(f64::NAN), Format::Jsonl);
    assert!(
        message.contains("part-00000.jsonl: column `x`, record 1 of the source: NaN is no number"),
        "{message}"
    );
    let message = refused(floats(0.1), Format::Tfrecord);
    assert!(message.contains("column `x`, record 1 of the source: 0.1 needs 64 bits"), "{message}");
    let mut large = Column::with_capacity(ColumnSpec::fixed("x", ElementType::I64, []), 1);
    large.push(&((1i64 << 53) + 1).to_le_bytes());
    assert!(refused(large, Format::Jsonl).contains("record 0 of the source: 9007199254740992 is no number"));
    let mut bytes = Column::with_capacity(ColumnSpec::ragged("x", ElementType::U8, []), 1);
    bytes.push(&[0xFF, 0xFE]);
    assert!(refused(bytes, Format::Jsonl).contains("its bytes are no text (UTF-8)"));
}

#[test]
fn a_conversion_that_is_stopped_leaves_whole_shards_only() {
    let dir = tempfile::tempdir().unwrap();
    let spec = ColumnSpec::fixed("x", ElementType::I32, []);
    let file = write(dir.path(), Format::Arrow, 0, &[column(&spec, 30, 1)]);
    let order = Conversion {
        size: ShardSize::Records(10),
        threads: 1,
        ..order(&dir, Format::Arrow, vec![file], Format::Jsonl)
    };
    let stopped = convert(&order, &|done, all| all == 0 || done < 20).unwrap();
    assert_eq!(stopped, None);
    let names = |folder: &Path| {
        let entries =
            folder.read_dir().unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let mut names: Vec<_> = entries.collect();
        names.sort();
        names
    };
    assert_eq!(names(&order.folder), ["part-00000.jsonl", "part-00001.jsonl"]);
    assert!(error(&order).contains("--overwrite"));
    let again = Conversion { overwrite: true, ..order.clone() };
    assert_eq!(done(&again).shards, 3);
    assert_eq!(
        names(&order.folder),
        ["data.toml", "part-00000.jsonl", "part-00001.jsonl", "part-00002.jsonl"]
    );
    assert_eq!(convert(&Conversion { overwrite: true, ..order }, &|_, _| false).unwrap(), None);
}

#[test]
fn shards_of_a_size_have_about_as_many_bytes() {
    let dir = tempfile::tempdir().unwrap();
    let fixed = column(&ColumnSpec::fixed("x", ElementType::F64, [4]), 100, 1);
    let mut ragged = Column::with_capacity(ColumnSpec::ragged("t", ElementType::U8, []), 100);
    (0..100).for_each(|record| ragged.push(&vec![b'a'; 64 + record % 2 * 8]));
    let file = write(dir.path(), Format::Arrow, 0, &[fixed, ragged]);
    // A record has 32 and 68 bytes.
    let shards = |bytes| {
        let order = Conversion {
            size: ShardSize::Bytes(bytes),
            overwrite: true,
            ..order(&dir, Format::Arrow, vec![file.clone()], Format::Parquet)
        };
        done(&order).shards
    };
    assert_eq!((shards(100 * 100), shards(100 * 40), shards(1)), (1, 3, 100));
    assert_eq!((even(100, 40), even(10, 0), even(7, 100)), (34, 1, 7));
}

#[test]
fn the_number_of_threads_changes_no_byte() {
    let dir = tempfile::tempdir().unwrap();
    let spec = ColumnSpec::ragged("t", ElementType::I64, []);
    let file = write(dir.path(), Format::Arrow, 0, &[column(&spec, 500, 1)]);
    for to in [Format::Parquet, Format::Tar] {
        let shards = |threads| {
            let order = Conversion {
                size: ShardSize::Records(60),
                threads,
                overwrite: true,
                ..order(&dir, Format::Arrow, vec![file.clone()], to)
            };
            let converted = done(&order);
            let files = converted.data.train.lists[FILES].iter();
            files.map(|file| std::fs::read(file).unwrap()).collect::<Vec<_>>()
        };
        assert!(shards(1) == shards(3), "{}", to.name());
    }
}
