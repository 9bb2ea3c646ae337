//! Records with a missing or a broken value: they fail, are filled, or are skipped.

use std::collections::BTreeSet;

use super::*;
use crate::{BadRecord, Batch};

const TABLE: &str = "age,city,income,y\n30,1,1.5,0\n,2,2.5,1\n40,3,,2\n50,x,3.5,1\n60,5,4.5,NA\n";

fn table(data: &str) -> Job {
    let data = format!("format = \"csv\"\ntrain = {{ files = [\"a.csv\"] }}\n{data}");
    Job::new(&data, "cross_entropy").file("a.csv", TABLE)
}

/// Returns the error of reading one record.
fn failure(job: &Job, record: u64) -> String {
    job.train().batch(Epoch(0), [record]).unwrap_err().to_string()
}

/// Reads all records. Returns the numbers of those in the batch, and of the bad ones.
fn read(job: &Job, skipped: &[u64]) -> (Vec<u64>, Vec<BadRecord>) {
    let (data, skipped) = (job.train(), skipped.iter().copied().collect::<BTreeSet<_>>());
    let (batch, bad) = data.read(Epoch(0), 0..data.len(), &skipped).unwrap();
    assert_eq!((batch.samples, batch.labels.records()), (batch.records.len(), batch.records.len()));
    (batch.records, bad)
}

#[test]
fn a_missing_value_fails_and_names_file_record_and_column() {
    let job = table("");
    assert!(job.train().batch(Epoch(0), [0]).is_ok(), "another record is good");
    for (record, column) in [(1, "age"), (2, "income"), (4, "y")] {
        let message = failure(&job, record);
        let expected = format!("/a.csv: column `{column}` of record {record} has no value; fill it, or set");
        assert!(message.contains(&expected) && message.contains("data.missing."), "{message}");
    }
    let message = failure(&job, 3);
    let expected = "/a.csv: column `city` of record 3: line 5, column 1 (`city`): `x` is no finite number";
    assert!(message.contains(expected), "{message}");
    assert!(job.index().unwrap_err().to_string().contains("column `y` of record 4 has no value"));
}

#[test]
fn a_value_of_the_job_takes_the_place_of_a_missing_one() {
    let job = table("missing = { age = 33, income = -0.5, y = 2 }");
    let batch = job.train().batch(Epoch(0), [1, 2, 4]).unwrap();
    assert_eq!(batch.features(), [33.0, 2.0, 2.5, 40.0, 3.0, -0.5, 60.0, 5.0, 4.5]);
    assert_eq!(batch.classes(), Some(&[1, 2, 2][..]));
    assert_eq!(job.index().unwrap().labels, Some((0, 2)));
    let message = table("missing = { ages = 1 }").error();
    assert!(message.contains("data.missing = \"ages\": no such column; there are age, city"), "{message}");
    let message = table("missing = { age = { value = \"old\" } }").error();
    assert!(message.contains("/a.csv: data.missing.age: column `age` f64[] holds numbers"), "{message}");
}

#[test]
fn a_value_passes_through_the_transforms_of_its_column() {
    let text = "{\"t\": \"b\", \"labels\": 1}\n{\"labels\": 0, \"t\": null}\n{\"labels\": 0}\n";
    let data = r#"format = "jsonl"
        train = { files = ["a.jsonl"] }
        inputs = ["t"]
        missing = { t = { value = "a" } }
        transforms = { t = [{ op = "vocabulary", values = ["a", "b"] }] }"#;
    let job = Job::new(data, "cross_entropy").file("a.jsonl", text);
    let batch = job.train().batch(Epoch(0), 0..3).unwrap();
    assert_eq!(batch.inputs[0].values(), Some(&[1i64, 0, 0][..]));
}

#[test]
fn records_are_skipped_only_for_what_the_job_says() {
    let everything = r#"missing = { age = "skip", income = "skip", y = "skip" }"#;
    let bad = |data: &str| {
        let (good, bad) = read(&table(data), &[]);
        (good, bad.into_iter().map(|bad| bad.record).collect::<Vec<_>>())
    };
    assert_eq!(bad(&format!("on_error = \"skip\"\n{everything}")), (vec![0], vec![1, 2, 3, 4]));
    let filled = "on_error = \"skip\"\nmissing = { age = 0, income = \"skip\", y = 1 }";
    assert_eq!(bad(filled), (vec![0, 1, 4], vec![2, 3]));

    let data = table(everything).train();
    let error = data.read(Epoch(0), 0..5, &BTreeSet::new()).unwrap_err().to_string();
    assert!(error.contains("`x` is no finite number"), "on_error is \"fail\": {error}");
    let data = table("on_error = \"skip\"").train();
    let error = data.read(Epoch(0), 0..5, &BTreeSet::new()).unwrap_err().to_string();
    assert!(error.contains("column `age` of record 1 has no value"), "missing.age is \"fail\": {error}");
}

#[test]
fn a_batch_has_the_bits_of_its_good_records_alone() {
    let job = table(
        r#"on_error = "skip"
        missing = { age = "skip", income = "skip", y = 1 }"#,
    );
    let data = job.train();
    let (batch, bad) = data.read(Epoch(0), 0..5, &BTreeSet::new()).unwrap();
    assert_eq!((batch, bad.len()), (data.batch(Epoch(0), [0, 4]).unwrap(), 3));
    assert_eq!(
        bad[2].reason,
        "column `city` of record 3: line 5, column 1 (`city`): `x` is no finite number; mend it, or encode it as \
         a number"
    );
    let (none, bad) = data.read(Epoch(0), [1, 3], &BTreeSet::new()).unwrap();
    assert_eq!((none.samples, none.features().len(), bad.len()), (0, 0, 2));
}

#[test]
fn a_record_that_is_known_to_be_bad_is_not_read() {
    let job = table("missing = { age = 1, income = 1, y = 1 }");
    assert_eq!(read(&job, &[3]), (vec![0, 1, 2, 4], vec![]));
    assert_eq!(read(&job, &[3, 0]).0, [1, 2, 4], "nor is a good one");
}

#[test]
fn labels_of_skipped_records_are_in_no_range() {
    let text = "x,y\n1,1\n1,2.5\n1,cat\n1,\n1,3\n";
    let csv = "format = \"csv\"\ntrain = { files = [\"a.csv\"] }\n";
    let index = |data: &str| Job::new(&format!("{csv}{data}"), "cross_entropy").file("a.csv", text).index();
    assert_eq!(index("on_error = \"skip\"\nmissing = { y = \"skip\" }").unwrap().labels, Some((1, 3)));
    assert_eq!(index("on_error = \"skip\"\nmissing = { y = 9 }").unwrap().labels, Some((1, 9)));
    for (data, expected) in [
        ("missing = { y = 1 }", "label 2.5 of record 1 is no class number"),
        ("on_error = \"skip\"", "column `y` of record 3 has no value"),
    ] {
        let message = index(data).unwrap_err().to_string();
        assert!(message.contains(expected), "{message}");
    }
}

#[test]
fn images_that_cannot_be_decoded_are_skipped_and_lost_ones_are_not() {
    let data = r#"format = "images"
        train = { files = ["train"] }
        inputs = ["image"]
        label = "class"
        on_error = "skip"
        transforms = { image = [{ op = "decode" }, { op = "resize", size = [2, 2] }] }"#;
    let job = Job::new(data, "cross_entropy");
    let golden = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("src/pixels/golden");
    let whole = std::fs::read(golden.join("444.jpg")).unwrap();
    std::fs::create_dir_all(job.path("train/cat")).unwrap();
    let job = job.file("train/cat/1.jpg", &whole).file("train/cat/2.jpg", &whole[..whole.len() / 2]);
    let job = job.file("train/cat/3.jpg", "GIF89a").file("train/cat/4.jpg", &whole);
    let (good, bad) = read(&job, &[]);
    assert_eq!((good, bad.iter().map(|bad| bad.record).collect::<Vec<_>>()), (vec![0, 3], vec![1, 2]));
    for (bad, name) in bad.iter().zip(["cat/2.jpg", "cat/3.jpg"]) {
        assert!(bad.reason.starts_with(&format!("column `image` of record {}, `{name}`: ", bad.record)));
    }
    let data = job.train();
    std::fs::remove_file(job.path("train/cat/4.jpg")).unwrap();
    let lost = data.read(Epoch(0), 0..4, &BTreeSet::new()).unwrap_err();
    assert!(matches!(lost, Error::File { .. }) && !lost.is_fatal(), "{lost}");
}

#[test]
fn numbers_of_bad_records_are_those_over_all_files() {
    let data = r#"format = "csv"
        header = false
        train = { files = ["a", "b"], records = [1, 5] }
        on_error = "skip"
        shuffle = "none""#;
    let job = Job::new(data, "mse").file("a", "1,1\n2,x\n3,3\n").file("b", "x,4\n5,5\nx,6\n");
    let (good, bad) = read(&job, &[]);
    assert_eq!((good, bad.iter().map(|bad| bad.record).collect::<Vec<_>>()), (vec![2, 4], vec![1, 3]));
    assert!(bad[1].reason.starts_with("column `0` of record 0: line 1, column 0: `x`"), "{:?}", bad[1]);
}

proptest::proptest! {
    #[test]
    fn records_of_a_batch_are_those_that_are_read_one_by_one(
        records in proptest::collection::vec(0u64..60, 0..80)
    ) {
        // The second file has a record without a value, the others are copied block by block.
        let line = |n: u64, value: &str| format!("{{\"t\": {value}, \"labels\": {}}}\n", n % 3);
        let file = |first: u64, hole: Option<u64>| -> String {
            (first..first + 20).map(|n| line(n, &if hole == Some(n) { "null".to_owned() } else { n.to_string() })).collect()
        };
        let data = "format = \"jsonl\"
            train = { files = [\"a\", \"b\", \"c\"] }
            inputs = [\"t\"]
            label = \"labels\"
            missing = { t = \"skip\" }";
        let job = Job::new(data, "cross_entropy");
        let job = job.file("a", file(0, None)).file("b", file(20, Some(25))).file("c", file(40, None));
        let (data, none) = (job.train(), BTreeSet::new());
        let (batch, bad) = data.read(Epoch(0), records.iter().copied(), &none).unwrap();
        let alone: Vec<_> = records.iter().map(|&record| data.read(Epoch(0), [record], &none).unwrap()).collect();
        let bytes = |of: fn(&Batch) -> &[u8]| alone.iter().flat_map(|(batch, _)| of(batch)).copied().collect::<Vec<_>>();
        proptest::prop_assert_eq!(batch.inputs[0].bytes(), bytes(|batch| batch.inputs[0].bytes()));
        proptest::prop_assert_eq!(batch.labels.bytes(), bytes(|batch| batch.labels.bytes()));
        let numbers: Vec<_> = alone.iter().flat_map(|(batch, _)| batch.records.clone()).collect();
        proptest::prop_assert_eq!(&batch.records, &numbers);
        let all_bad: Vec<_> = alone.iter().flat_map(|(_, bad)| bad.clone()).collect();
        proptest::prop_assert_eq!(bad, all_bad);
    }
}
