//! Data sets from files on disk.

use std::io::Write;
use std::path::PathBuf;
use std::sync::Arc;

use flate2::{Compression, write::GzEncoder};
use proto::spec::{DataSet, JobSpec};
use proto::tensor::Values;
use tempfile::TempDir;

use crate::error::{Error, Result};
use crate::idx::tests::write as idx;
use crate::{Content, Dataset, Indexed, index};

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
    assert_eq!((data.len(), data.shape(), data.label_range()), (5, &[2, 2][..], Some((0, 2))));
    let batch = data.batch([4, 0]).unwrap();
    assert_eq!((batch.samples, &batch.shape[..], &batch.records[..]), (2, &[2, 2][..], &[4, 0][..]));
    assert_eq!(batch.features, [40.0, 41.0, 42.0, 43.0, 0.0, 1.0, 2.0, 3.0]);
    assert_eq!(batch.labels, Values::I64(vec![1, 0]));
    assert!(data.batch([5]).unwrap_err().to_string().contains("record 5: the data set has 5"));
    let expected = Indexed {
        records: 5,
        shape: vec![2, 2],
        labels: Some((0, 2)),
        content: content(&[&images(5), &labels(5)]),
    };
    assert_eq!(job.index().unwrap(), expected);
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
    assert_eq!(data.batch([1]).unwrap().features, expected);
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
    let batch = job.train().batch(0..4).unwrap();
    assert_eq!((batch.features, batch.records), (vec![2.0, 9.0, 3.0, 4.0], vec![1, 2, 3, 4]));
    assert_eq!(batch.labels, Values::F32(vec![-2.0, 9.0, -3.0, -4.0]));
    assert_eq!(
        job.index().unwrap(),
        Indexed { records: 2, shape: vec![1], labels: None, content: content(&[b"1,-1\n2,-2\n"]) }
    );
}

#[test]
fn a_fraction_validates_with_records_that_do_not_train() {
    let job = Job::new(&format!("{IDX} validation_fraction = 0.3"), "cross_entropy");
    let job = job.file("x", images(10)).file("y", labels(10));
    let (train, validation) = (job.train(), job.open(DataSet::Validation).unwrap());
    assert_eq!((train.len(), validation.len()), (7, 3));
    let mut all = train.batch(0..7).unwrap().records;
    all.extend(validation.batch(0..3).unwrap().records);
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
    assert_eq!(job.train().batch([0]).unwrap().shape, [1, 4]);
    assert_eq!(job.index().unwrap().shape, [1, 4]);
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
    assert!(message.contains("/y: 4 labels for the 5 records of") && message.contains("/x"), "{message}");
    let job = Job::new(IDX, "cross_entropy").file("x", labels(5)).file("y", images(5));
    assert!(
        job.error().contains("/y: a label has shape [2, 2], 4 values, expected 1; are features"),
        "{}",
        job.error()
    );
    let job = Job::new(
        r#"format = "idx"
        train = { features = ["x", "x2"], labels = ["y", "y"] }"#,
        "mse",
    );
    let job = job.file("x", images(5)).file("y", labels(5)).file("x2", idx(&[5, 3], &[0; 15]));
    let message = job.error();
    assert!(
        message.contains("/x2: records of shape [3], those of") && message.contains("/x have [2, 2]"),
        "{message}"
    );
}

#[test]
fn class_labels_must_be_whole_numbers() {
    let csv = r#"format = "csv"
        train = { features = ["a"] }"#;
    let job = Job::new(csv, "cross_entropy").file("a", "x,y\n1,0\n1,3.0\n");
    assert_eq!(job.train().batch([1]).unwrap().labels, Values::I64(vec![3]));
    let job = job.file("a", "x,y\n1,0\n1,2.5\n");
    assert!(job.error().contains("label 2.5 of record 1 is no class number"), "{}", job.error());
    assert!(job.index().unwrap_err().to_string().contains("label 2.5"));
    let job = Job::new(csv, "mse").file("a", "x,y\n1,0\n1,2.5\n");
    assert_eq!(
        (job.train().batch([1]).unwrap().labels, job.train().label_range()),
        (Values::F32(vec![2.5]), None)
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
