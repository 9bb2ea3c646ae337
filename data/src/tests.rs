//! Data sets from files on disk.

use std::io::Write;
use std::path::PathBuf;
use std::sync::Arc;

use flate2::{Compression, write::GzEncoder};
use proto::column::{ColumnSpec, ElementType};
use proto::ids::Epoch;
use proto::spec::{DataSet, JobSpec, Loss, PROGRAM, PredictSpec, Purpose};
use tempfile::TempDir;

use crate::error::{Error, Result};
use crate::formats::idx::tests::write as idx;
use crate::{Content, Dataset, Indexed, NotFinite, index};

mod bad;
mod bytes;

/// A folder with data files, and a job that reads them.
struct Job {
    folder: TempDir,
    spec: JobSpec,
}

impl Job {
    fn new(data: &str, loss: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let text = format!(
            r#"name = "t"
            epochs = 1
            seed = 5
            model = {{ builtin = "mlp", loss = "{loss}" }}
            batch = {{ micro = 2 }}
            optimizer = {{ kind = "sgd", learning_rate = 0.1 }}
            [data]
            {data}"#
        );
        let spec = proto::spec::parse(&text, &folder.path().join("job.toml"), &[]).unwrap();
        Self { folder, spec }
    }

    fn file(self, name: &str, content: impl AsRef<[u8]>) -> Self {
        std::fs::write(self.path(name), content).unwrap();
        self
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn open(&self, set: DataSet) -> Result<Arc<Dataset>> {
        Dataset::open(&self.spec, set, None)
    }

    fn train(&self) -> Arc<Dataset> {
        self.open(DataSet::Train).unwrap()
    }

    fn error(&self) -> String {
        self.open(DataSet::Train).unwrap_err().to_string()
    }

    fn index(&self) -> Result<Indexed> {
        index(&self.spec, DataSet::Train, 0, None)
    }
}

fn gz(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::default());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

const IDX: &str = r#"format = "idx"
    train = { features = ["x"], labels = ["y"] }
"#;

/// Returns `n` images of 2x2 with value `10 * record + pixel`. Their labels are `record % 3`.
fn images(n: u8) -> Vec<u8> {
    idx(
        &[n.into(), 2, 2],
        &(0..n).flat_map(|record| (0..4).map(move |pixel| 10 * record + pixel)).collect::<Vec<_>>(),
    )
}

fn labels(n: u8) -> Vec<u8> {
    idx(&[n.into()], &(0..n).map(|record| record % 3).collect::<Vec<_>>())
}

/// Returns the identity of files that have these bytes without compression.
fn content(files: &[&[u8]]) -> Content {
    let all = files.concat();
    Content { bytes: all.len() as u64, crc32c: crc32c::crc32c(&all) }
}

#[test]
fn a_batch_holds_the_asked_records_in_the_asked_order() {
    let job = Job::new(IDX, "cross_entropy").file("x", images(5)).file("y", gz(&labels(5)));
    let data = job.train();
    let features = ColumnSpec::fixed("features", ElementType::F32, [2, 2]);
    assert_eq!(
        (data.len(), data.inputs(), data.label_range().unwrap()),
        (5, vec![features.clone()], Some((0, 2)))
    );
    let batch = data.batch(Epoch(0), [4, 0]).unwrap();
    assert_eq!((batch.samples, batch.inputs[0].spec(), &batch.records[..]), (2, &features, &[4, 0][..]));
    assert_eq!(batch.features(), [40.0, 41.0, 42.0, 43.0, 0.0, 1.0, 2.0, 3.0]);
    assert_eq!(batch.classes(), Some(&[1, 0][..]));
    assert!(data.batch(Epoch(0), [5]).unwrap_err().to_string().contains("record 5: the data set has 5"));
    let expected = Indexed {
        records: 5,
        inputs: vec![features],
        labels: Some((0, 2)),
        content: content(&[&images(5), &labels(5)]),
        version: String::new(),
        stamp: String::new(),
        cuts: None,
    };
    let found = job.index().unwrap();
    assert_eq!(found.stamp.split(' ').count(), 2, "both files: {}", found.stamp);
    assert_eq!(found.version.split(' ').count(), 2, "both files: {}", found.version);
    assert_eq!(Indexed { stamp: String::new(), version: String::new(), ..found }, expected);
}

#[test]
fn features_are_scaled_in_the_documented_order() {
    let job = Job::new(
        &format!("{IDX} normalize = {{ scale = 255, mean = 0.1307, std = 0.3081 }}"),
        "cross_entropy",
    );
    let data = job.file("x", images(2)).file("y", labels(2)).train();
    let expected: Vec<f32> =
        [10.0f32, 11.0, 12.0, 13.0].iter().map(|raw| (raw / 255.0 - 0.1307) / 0.3081).collect();
    assert_eq!(data.batch(Epoch(0), [1]).unwrap().features(), expected);
}

#[test]
fn records_are_counted_over_all_files() {
    let files = r#"format = "csv"
        header = false
        train = { features = ["a", "empty", "b"], records = [1, 5] }
        "#;
    let job = Job::new(files, "mse")
        .file("a", "1,-1\n2,-2\n")
        .file("empty", "")
        .file("b", "3,-3\n4,-4\n5,-5\n6,-6\n");
    // An empty file has no columns that could agree.
    assert!(job.error().contains("empty: 0 columns"));
    let job = job.file("empty", "9,9\n");
    let batch = job.train().batch(Epoch(0), 0..4).unwrap();
    assert_eq!((batch.features(), &batch.records[..]), (&[2.0, 9.0, 3.0, 4.0][..], &[1, 2, 3, 4][..]));
    assert_eq!(batch.values(), Some(&[-2.0, 9.0, -3.0, -4.0][..]));
    let inputs = vec![ColumnSpec::fixed("features", ElementType::F32, [1])];
    let found = job.index().unwrap();
    assert!(found.stamp.starts_with("10@"), "{}", found.stamp);
    assert!(found.version.starts_with("local/"), "{}", found.version);
    assert_eq!(
        Indexed { stamp: String::new(), version: String::new(), ..found },
        Indexed {
            records: 2,
            inputs,
            labels: None,
            content: content(&[b"1,-1\n2,-2\n"]),
            version: String::new(),
            stamp: String::new(),
            cuts: None,
        }
    );
}

#[test]
fn a_fraction_validates_with_records_that_do_not_train() {
    let job = Job::new(&format!("{IDX} validation_fraction = 0.3"), "cross_entropy");
    let job = job.file("x", images(10)).file("y", labels(10));
    let (train, validation) = (job.train(), job.open(DataSet::Validation).unwrap());
    assert_eq!((train.len(), validation.len()), (7, 3));
    let mut all = train.batch(Epoch(0), 0..7).unwrap().records;
    all.extend(validation.batch(Epoch(0), 0..3).unwrap().records);
    all.sort_unstable();
    assert_eq!(all, (0..10).collect::<Vec<_>>());
}

#[test]
fn own_validation_files_are_another_data_set() {
    let job =
        Job::new(&format!(r#"{IDX} validation = {{ features = ["vx"], labels = ["vy"] }}"#), "cross_entropy");
    let job = job.file("x", images(5)).file("y", labels(5)).file("vx", images(2)).file("vy", labels(2));
    assert_eq!((job.train().len(), job.open(DataSet::Validation).unwrap().len()), (5, 2));
    let without = Job::new(IDX, "cross_entropy");
    assert!(without.open(DataSet::Validation).unwrap_err().to_string().contains("no validation data"));
}

#[test]
fn one_process_holds_a_file_once_and_lets_it_go() {
    let job = Job::new(&format!("{IDX} validation_fraction = 0.5"), "cross_entropy");
    let job = job.file("x", images(4)).file("y", labels(4));
    let (first, second) = (job.train(), job.open(DataSet::Validation).unwrap());
    assert!(Arc::ptr_eq(&first.tables[0], &second.tables[0]));
    let weak = Arc::downgrade(&first.tables[0]);
    drop((first, second));
    assert!(weak.upgrade().is_none(), "nobody reads the file any more");

    let old = job.train();
    let job = job.file("x", images(6)).file("y", labels(6));
    assert_eq!((old.len(), job.train().len()), (2, 3), "a changed file is read anew");
}

#[test]
fn data_shape_gives_records_another_shape() {
    let job =
        Job::new(&format!("{IDX} shape = [1, 4]"), "cross_entropy").file("x", images(2)).file("y", labels(2));
    assert_eq!(job.train().batch(Epoch(0), [0]).unwrap().inputs[0].spec().shape, [1, 4]);
    assert_eq!(job.index().unwrap().inputs[0].shape, [1, 4]);
    let job =
        Job::new(&format!("{IDX} shape = [3]"), "cross_entropy").file("x", images(2)).file("y", labels(2));
    assert!(
        job.error().contains("shape [2, 2], 4 values, cannot be given data.shape = [3]"),
        "{}",
        job.error()
    );
}

#[test]
fn a_data_root_moves_the_files() {
    let job = Job::new(IDX, "cross_entropy").file("x", images(2)).file("y", labels(2));
    let mut spec = job.spec.clone();
    spec.data.base = Some("/nowhere".into());
    assert!(matches!(Dataset::open(&spec, DataSet::Train, None), Err(Error::File { .. })));
    assert_eq!(Dataset::open(&spec, DataSet::Train, Some(job.folder.path())).unwrap().len(), 2);
}

#[test]
fn partners_that_do_not_fit_are_both_named() {
    let job = Job::new(IDX, "cross_entropy").file("x", images(5)).file("y", labels(4));
    let message = job.error();
    assert!(message.contains("/y: 4 records, 5 in") && message.contains("/x"), "{message}");
    let job = Job::new(
        r#"format = "idx"
        train = { features = ["x", "x2"], labels = ["y", "y"] }"#,
        "mse",
    );
    let job = job.file("x", images(5)).file("y", labels(5)).file("x2", idx(&[5, 3], &[0; 15]));
    let message = job.error();
    assert!(
        message.contains("/x2: records have `features` f32[3], those of")
            && message.contains("/x have `features` f32[2, 2]"),
        "{message}"
    );
}

#[test]
fn files_whose_columns_have_other_names_are_refused_with_both() {
    let files = r#"format = "csv"
        train = { files = ["a", "b"] }
        "#;
    let rows =
        |job: Job, second: &str| job.file("a", "x,y,price\n1,2,3\n").file("b", format!("{second}\n2,1,3\n"));
    let job = rows(Job::new(files, "mse"), "y,x,price");
    let message = job.error();
    assert!(
        message.contains("/b: its columns are `y`, `x`, `price`; those of")
            && message.contains("/a are `x`, `y`, `price`"),
        "{message}"
    );
    let job = rows(job, "x,y,cost");
    let message = job.error();
    assert!(message.contains("/b: its columns are `x`, `y`, `cost`"), "{message}");
    let message = job.file("b", "x,price\n1,2\n").error();
    assert!(message.contains("/b: its columns are `x`, `price`; those of"), "{message}");
    // Columns that the job names are found wherever they stand.
    let named = format!("{files} inputs = [\"x\", \"y\"]\n label = \"price\"");
    let batch = rows(Job::new(&named, "mse"), "y,x,price").train().batch(Epoch(0), [0, 1]).unwrap();
    assert_eq!(batch.inputs[0].values(), Some(&[1f32, 1.0][..]));
    assert_eq!(batch.inputs[1].values(), Some(&[2f32, 2.0][..]));
}

#[test]
fn a_long_list_of_names_shows_the_first_that_differs() {
    let columns = |last: &str| {
        let names: Vec<_> =
            (0..50).map(|at| format!("c{at}")).chain([last.to_owned(), "z".to_owned()]).collect();
        format!("{}\n{}\n", names.join(","), vec!["1"; 52].join(","))
    };
    let job = Job::new("format = \"csv\"\n train = { files = [\"a\", \"b\"] }", "mse");
    let message = job.file("a", columns("here")).file("b", columns("there")).error();
    assert!(message.contains("its columns are .., `there`, `z`;"), "{message}");
}

#[test]
fn class_labels_must_be_whole_numbers() {
    let csv = r#"format = "csv"
        train = { features = ["a"] }"#;
    let job = Job::new(csv, "cross_entropy").file("a", "x,y\n1,0\n1,3.0\n");
    assert_eq!(job.train().batch(Epoch(0), [1]).unwrap().classes(), Some(&[3][..]));
    let job = job.file("a", "x,y\n1,0\n1,2.5\n");
    let message = job.index().unwrap_err().to_string();
    assert!(message.contains("label 2.5 of record 1 is no class number"), "{message}");
    let message = job.train().batch(Epoch(0), [1]).unwrap_err().to_string();
    assert!(message.contains("column `y`: 2.5 of record 1 is no value of type i64"), "{message}");
    let job = Job::new(csv, "mse").file("a", "x,y\n1,0\n1,2.5\n");
    assert_eq!(
        (job.train().batch(Epoch(0), [1]).unwrap().values(), job.train().label_range().unwrap()),
        (Some(&[2.5][..]), None)
    );
}

#[test]
fn missing_and_damaged_files_are_named() {
    let job = Job::new(IDX, "cross_entropy").file("x", images(5));
    assert!(matches!(job.open(DataSet::Train), Err(Error::File { path, .. }) if path == job.path("y")));
    let packed = gz(&labels(5));
    let job = job.file("y", &packed[..packed.len() - 6]);
    assert!(job.error().contains("/y: damaged gzip"), "{}", job.error());
    let job = job.file("y", [packed, b"tail".to_vec()].concat());
    assert!(job.error().contains("/y: damaged gzip"), "{}", job.error());
    let job = job.file("x", idx(&[5, 0], &[])).file("y", labels(5));
    assert!(job.error().contains("a record of shape [0] has no values"), "{}", job.error());
}

/// Returns a NumPy file of i64.
fn npy(values: &[i64], of_one: usize) -> Vec<u8> {
    let (records, one) =
        (values.len() / of_one, if of_one == 1 { String::new() } else { format!(" {of_one}") });
    let header = format!("{{'descr': '<i8', 'fortran_order': False, 'shape': ({records},{one}), }}\n");
    let length = (header.len() as u16).to_le_bytes();
    let values = values.iter().flat_map(|value| value.to_le_bytes());
    [b"\x93NUMPY\x01\x00", &length[..], header.as_bytes()].concat().into_iter().chain(values).collect()
}

const TWO_TOWERS: &str = r#"format = "npy"
    train = { user = ["u"], history = ["h"], labels = ["y"] }
"#;

fn two_towers(data: &str, loss: &str) -> Job {
    let job = Job::new(&format!("{TWO_TOWERS}{data}"), loss);
    let job = job.file("u", npy(&[7, 8, 9], 1)).file("h", npy(&[1, 2, 3, 4, 5, 6], 2));
    job.file("y", npy(&[0, 1, 1], 1))
}

#[test]
fn named_inputs_keep_their_type_and_shape() {
    let job = two_towers(r#"inputs = { id = "user", past = "history" }"#, "bce_with_logits");
    let batch = job.train().batch(Epoch(0), [2, 0]).unwrap();
    let named = |name: &str| batch.inputs.iter().find(|input| input.spec().name == name).unwrap();
    assert_eq!(named("id").spec(), &ColumnSpec::fixed("id", ElementType::I64, []));
    assert_eq!(named("id").values(), Some(&[9i64, 7][..]));
    assert_eq!(named("past").spec(), &ColumnSpec::fixed("past", ElementType::I64, [2]));
    assert_eq!(named("past").values(), Some(&[5i64, 6, 1, 2][..]));
    assert_eq!((batch.labels.spec().shape.len(), batch.values()), (0, Some(&[1.0, 0.0][..])));
    assert!(batch.features().is_empty(), "there is no single input of f32");
}

#[test]
fn a_type_of_the_job_wins_and_what_does_not_fit_it_is_named() {
    let inputs = r#"inputs = ["user"]
        "#;
    let job = two_towers(&format!("{inputs}dtypes = {{ user = \"f32\" }}"), "mse");
    assert_eq!(job.train().batch(Epoch(0), [1]).unwrap().inputs[0].values(), Some(&[8f32][..]));
    let job = two_towers(&format!("{inputs}dtypes = {{ user = \"bool\" }}"), "mse");
    let message = job.train().batch(Epoch(0), [1]).unwrap_err().to_string();
    assert!(message.contains("/u: column `user`: 8 of record 1 is no value of type bool"), "{message}");
}

#[test]
fn columns_of_a_csv_file_make_several_inputs() {
    let data = r#"format = "csv"
        train = { files = ["a"] }
        label = "clicked"
        dtypes = { user = "i64" }
        inputs = { id = "user", dense = ["age", "income"] }"#;
    let text = "name,age,user,income,clicked\nAnn,30,123456789012,1.5,1\nBob,40,7,2.5,0\n";
    let job = Job::new(data, "bce_with_logits").file("a", text);
    let batch = job.train().batch(Epoch(0), [0, 1]).unwrap();
    assert_eq!(
        batch.inputs.iter().map(|input| input.spec().to_string()).collect::<Vec<_>>(),
        ["`dense` f32[2]", "`id` i64[]"]
    );
    assert_eq!(batch.inputs[0].values(), Some(&[30f32, 1.5, 40.0, 2.5][..]));
    assert_eq!(batch.inputs[1].values(), Some(&[123_456_789_012i64, 7][..]));
    let wrong = data.replace("income", "wealth");
    let message = Job::new(&wrong, "mse").file("a", text).error();
    assert!(
        message.contains("data.inputs = \"wealth\": no such column; there are name, age, user"),
        "{message}"
    );
}

#[test]
fn labels_of_several_classes_keep_their_shape() {
    let job = Job::new(
        r#"format = "npy"
        train = { tokens = ["t"], labels = ["l"] }
        inputs = ["tokens"]"#,
        "cross_entropy",
    );
    let job = job.file("t", npy(&[1, 2, 3, 4], 2)).file("l", npy(&[2, 3, 4, -100], 2));
    let batch = job.train().batch(Epoch(0), [1]).unwrap();
    assert_eq!(batch.labels.spec(), &ColumnSpec::fixed("labels", ElementType::I64, [2]));
    assert_eq!(batch.classes(), Some(&[4, -100][..]));
}

/// Returns a token file.
fn tokens(values: impl IntoIterator<Item = u16>) -> Vec<u8> {
    values.into_iter().flat_map(u16::to_le_bytes).collect()
}

const TOKENS: &str = r#"format = "tokens"
    train = { files = ["t.bin"] }
    tokens = { dtype = "u16", block = 4 }
"#;

#[test]
fn a_model_of_token_files_takes_tokens_as_integers() {
    let job = Job::new(TOKENS, "cross_entropy").file("t.bin", tokens(10..20));
    let data = job.train();
    assert_eq!((data.len(), data.label_range().unwrap()), (2, Some((11, 18))));
    let batch = data.batch(Epoch(0), [1, 0]).unwrap();
    assert_eq!(batch.inputs[0].spec(), &ColumnSpec::fixed("tokens", ElementType::I32, [4]));
    assert_eq!(batch.inputs[0].values(), Some(&[14i32, 15, 16, 17, 10, 11, 12, 13][..]));
    assert_eq!(batch.labels.spec(), &ColumnSpec::fixed("labels", ElementType::I64, [4]));
    assert_eq!(batch.classes(), Some(&[15, 16, 17, 18, 11, 12, 13, 14][..]));
    let job = Job::new(&format!("{TOKENS} dtypes = {{ tokens = \"i64\" }}"), "cross_entropy");
    let job = job.file("t.bin", tokens(10..20));
    assert_eq!(job.train().batch(Epoch(0), [0]).unwrap().inputs[0].values(), Some(&[10i64, 11, 12, 13][..]));
}

#[test]
fn jobs_that_cut_one_token_file_differently_have_their_own_records() {
    let job = Job::new(TOKENS, "cross_entropy").file("t.bin", tokens(0..100));
    let (first, mut other) = (job.train(), job.spec.clone());
    other.data.tokens.as_mut().unwrap().block = 9;
    let other = Dataset::open(&other, DataSet::Train, None).unwrap();
    assert_eq!((first.len(), other.len()), (24, 11));
    assert_eq!(other.batch(Epoch(0), [1]).unwrap().classes(), Some(&(10..19).collect::<Vec<_>>()[..]));
}

const LISTS: &str = r#"format = "jsonl"
    train = { files = ["a.jsonl"] }
    label = "y"
    inputs = ["x"]
"#;

#[test]
fn lists_of_one_length_reach_a_model_and_others_are_refused() {
    let text = "{\"y\": 1, \"x\": [1, 2]}\n{\"x\": [3, 4], \"y\": 0}\n";
    let job = Job::new(LISTS, "cross_entropy").file("a.jsonl", text);
    let message = job.error();
    assert!(message.contains("column `x` f64[any] has no fixed size: record 0 has 2 elements;"), "{message}");
    assert!(message.contains("give its length in data.lengths"), "{message}");
    // A record without a value has no length.
    let lines = "{\"y\": 1, \"x\": [1, 2]}\n{\"x\": null, \"y\": 0}\n{\"x\": [], \"y\": 0}\n";
    let message = Job::new(LISTS, "cross_entropy").file("a.jsonl", lines).error();
    let found =
        "a.jsonl: column `x` f64[any] has no fixed size: record 0 has 2 elements, record 2 has 0 elements; ";
    assert!(message.contains(found), "{message}");
    let fixed = Job::new(&format!("{LISTS} lengths = {{ x = 2 }}"), "cross_entropy").file("a.jsonl", text);
    // Stays open, so that a job with another length could find it.
    let data = fixed.train();
    let batch = data.batch(Epoch(0), [1, 0]).unwrap();
    assert_eq!(batch.inputs[0].spec(), &ColumnSpec::fixed("x", ElementType::F32, [2]));
    assert_eq!(
        (batch.inputs[0].values(), batch.classes()),
        (Some(&[3f32, 4.0, 1.0, 2.0][..]), Some(&[0, 1][..]))
    );
    let mut wrong = fixed.spec.clone();
    wrong.data.lengths.insert("x".to_owned(), 3);
    let message =
        Dataset::open(&wrong, DataSet::Train, None).unwrap().batch(Epoch(0), [0]).unwrap_err().to_string();
    assert!(message.contains("record 0 of the file has 2 elements, data.lengths.x is 3"), "{message}");
    drop(data);
}

#[test]
fn a_program_gets_labels_in_their_own_type_also_without_named_inputs() {
    let mut job = Job::new(IDX, "mse").file("x", images(4)).file("y", labels(4));
    let values = job.train().batch(Epoch(0), [1]).unwrap().labels;
    assert_eq!(values.spec(), &ColumnSpec::fixed("labels", ElementType::F32, [1]));
    job.spec.model.builtin = Some(PROGRAM.to_owned());
    job.spec.model.loss = Loss::Module;
    let batch = job.train().batch(Epoch(0), [1]).unwrap();
    assert_eq!(batch.labels.spec(), &ColumnSpec::fixed("labels", ElementType::U8, []));
    assert_eq!(batch.inputs[0].spec().dtype, ElementType::F32);
}

#[test]
fn columns_without_an_order_need_the_name_of_the_label() {
    let job = Job::new("format = \"jsonl\"\n train = { files = [\"a\"] }", "mse");
    let job = job.file("a", "{\"b\": 1, \"a\": 2}\n");
    assert!(
        job.error().contains("data.label = \"labels\": no such column; there are a, b"),
        "{}",
        job.error()
    );
    let job = job.file("a", "{\"b\": 1, \"labels\": 2, \"a\": 3}\n");
    let batch = job.train().batch(Epoch(0), [0]).unwrap();
    assert_eq!((batch.features(), batch.values()), (&[3.0, 1.0][..], Some(&[2.0][..])));
}

#[test]
fn a_file_that_changes_while_it_is_open_is_refused() {
    let job = Job::new(IDX, "cross_entropy").file("x", images(4)).file("y", labels(4));
    let data = job.train();
    assert!(data.batch(Epoch(0), [1]).is_ok());
    let job = job.file("x", images(5));
    let message = data.batch(Epoch(0), [1]).unwrap_err().to_string();
    assert!(message.contains("/x: the file has changed since this worker opened it"), "{message}");
    drop(job);
}

#[test]
fn files_that_differ_from_the_indexed_ones_are_refused() {
    let job = Job::new(IDX, "cross_entropy").file("x", images(4)).file("y", labels(4));
    let data = job.train();
    let bytes = (images(4).len() + labels(4).len()) as u64;
    assert!(
        [&[bytes][..], &[0], &[]].iter().all(|known| data.check(&[4], known, &[]).is_ok()),
        "0 bytes are unknown"
    );
    let message = data.check(&[4], &[bytes], &["\"tag\" \"tag\"".to_owned()]).unwrap_err().to_string();
    assert!(message.contains("the file has changed since the job was indexed"), "{message}");
    let message = data.check(&[4], &[bytes + 1], &[]).unwrap_err().to_string();
    assert!(
        message.contains(&format!("/x: 4 records and {bytes} bytes here, 4 records and {} bytes", bytes + 1))
    );
    assert!(data.check(&[5], &[bytes], &[]).is_err());
}

#[test]
fn files_that_are_predicted_need_no_labels_and_theirs_are_not_read() {
    let predicted = |new: &str| {
        let job = Job::new(
            "format = \"csv\"\nlabel = \"y\"\ntrain = { files = [\"a.csv\"] }\nvalidation = { files = [\"b.csv\"] }\n\
             transforms = { y = [{ op = \"cast\", dtype = \"i64\" }] }",
            "cross_entropy",
        );
        let mut job = job.file("a.csv", "x,y,z\n1,0,2\n3,4,5\n").file("b.csv", new);
        let predict = PredictSpec::new(DataSet::Validation, "/p.jsonl".to_owned());
        job.spec = job.spec.measuring(Purpose::Predict, "w".to_owned(), Some(predict)).unwrap();
        job
    };
    for (new, labels) in [
        ("x,z\n6,7\n8,9\n", None),
        ("x,y,z\n6,3,7\n8,0,9\n", Some((0, 3))),
        ("x,y,z\n6,,7\n8,?,9\n", None),
        ("x,y,z\n6,0.5,7\n8,2,9\n", Some((2, 2))),
    ] {
        let job = predicted(new);
        let data = job.open(DataSet::Validation).unwrap();
        let batch = data.batch(Epoch(0), [0, 1]).unwrap();
        assert_eq!((batch.samples, batch.features()), (2, &[6.0, 7.0, 8.0, 9.0][..]), "{new}");
        assert_eq!(batch.classes(), Some(&[0, 0][..]), "{new}");
        assert_eq!(index(&job.spec, DataSet::Validation, 0, None).unwrap().labels, labels, "{new}");
        // Other files of the job have their labels.
        assert_eq!(job.train().batch(Epoch(0), [1]).unwrap().classes(), Some(&[4][..]));
    }
    let job = predicted("x,z\n6,7\n").file("a.csv", "x,z\n1,2\n");
    assert!(job.error().contains("\"y\": no such column"), "{}", job.error());
}

#[test]
fn values_that_are_not_finite_are_named_by_column_and_record() {
    // Beyond f32 when divided by the scale.
    let spec = "format = \"csv\"\ntrain = { files = [\"a.csv\"] }\nnormalize = { scale = 0.1 }";
    let job = Job::new(spec, "cross_entropy").file("a.csv", "age,income,y\n1,2,0\n3,1e38,1\n1e38,-1e38,0\n");
    let data = job.train();
    let found = |records: &[u64]| data.not_finite(&data.batch(Epoch(0), records.iter().copied()).unwrap());
    assert_eq!(found(&[0]), None);
    let expected = NotFinite { column: "income".to_owned(), record: 1, is_nan: false, count: 3, samples: 3 };
    assert_eq!(found(&[0, 1, 2]), Some(expected));
    let said = found(&[2, 1]).unwrap().to_string();
    let expected = "3 values are NaN or infinite in a batch of 2 records: the first one is infinite, in column `age` of \
                    record 2;";
    assert!(said.contains(expected), "{said}");
    let job = Job::new(
        "format = \"csv\"\ntrain = { files = [\"a.csv\"] }\ninputs = { x = \"b\", y = \"a\" }\ntransforms = { a = [{ op = \"cast\", dtype = \"f32\" }] }",
        "cross_entropy",
    )
    .file("a.csv", "a,b,y\n1,2,0\n3,1,1\n");
    assert_eq!(job.train().not_finite(&job.train().batch(Epoch(0), [0, 1]).unwrap()), None);
}

#[test]
fn a_person_sees_images_and_texts_of_inputs_before_their_transforms() {
    let job = Job::new(
        &IDX.replace(r#"["x"]"#, r#"["x", "z"]"#).replace(r#"["y"]"#, r#"["y", "y"]"#),
        "cross_entropy",
    );
    let job = job.file("x", images(5)).file("z", gz(&images(5))).file("y", labels(5));
    let seen = job.train().previews(&[7, 1]).unwrap();
    let pixels = seen.iter().map(|seen| {
        let seen = seen.as_ref().unwrap();
        assert_eq!(seen.text, "");
        crate::pixels::decode(&seen.png, 1).unwrap().values
    });
    assert_eq!(pixels.collect::<Vec<_>>(), [[20, 21, 22, 23], [10, 11, 12, 13]]);

    let job = Job::new(
        r#"format = "jsonl"
        train = { files = ["a.jsonl"] }
        inputs = ["text", "age"]
        label = "other"
        missing = { text = { value = "none" } }
        dtypes = { age = "f32" }
        [data.transforms]
        text = [{ op = "hash", buckets = 9 }]
        other = [{ op = "hash", buckets = 2 }]"#,
        "cross_entropy",
    );
    let lines = [r#"{"age": 4, "other": "no", "text": "Ann"}"#, r#"{"age": 5, "other": "no", "text": null}"#];
    let job = job.file("a.jsonl", lines.join("\n"));
    let seen = job.train().previews(&[1, 0]).unwrap();
    let ann = proto::worst::Preview { text: "Ann".to_owned(), ..Default::default() };
    assert_eq!(seen, [None, Some(ann)], "a missing value shows nothing, and neither does a label");

    let job = two_towers(r#"inputs = ["user", "history"]"#, "bce_with_logits");
    assert_eq!(job.train().previews(&[2, 0]).unwrap(), [None, None]);
}

#[test]
fn a_file_that_changed_shows_nothing_of_itself() {
    let job = Job::new(IDX, "cross_entropy").file("x", images(5)).file("y", labels(5));
    let data = job.train();
    let job = job.file("x", images(6));
    let said = data.previews(&[0]).unwrap_err().to_string();
    assert!(said.contains("/x"), "{said}");
    drop(job);
}
