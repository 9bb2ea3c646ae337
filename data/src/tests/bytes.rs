//! Inputs that are read as bytes, against the floats of the same records.

use std::collections::BTreeSet;

use super::*;
use crate::Levels;

/// Records of a file.
const RECORDS: usize = 5;

/// A record, as it lies in a file.
const SHAPE: [usize; 3] = [4, 6, 3];

fn npy(dtype: &str, shape: &str, values: &[u8]) -> Vec<u8> {
    let header = format!("{{'descr': '{dtype}', 'fortran_order': False, 'shape': ({shape}), }}\n");
    let length = (header.len() as u16).to_le_bytes();
    [b"\x93NUMPY\x01\x00", &length[..], header.as_bytes(), values].concat()
}

/// Returns a job with two files of images, whose bytes are all there are.
fn job(data: &str) -> Job {
    let files = r#"format = "npy"
        train = { image = ["a", "b"], labels = ["y", "y"] }
        "#;
    let values = |salt: usize| -> Vec<u8> {
        (0..RECORDS * SHAPE.iter().product::<usize>()).map(|at| (at * 37 + salt) as u8).collect()
    };
    let images = |salt| npy("|u1", "5, 4, 6, 3", &values(salt));
    let job = Job::new(&format!("{files}{data}"), "cross_entropy");
    job.file("a", images(0)).file("b", images(91)).file("y", npy("|u1", "5", &[0, 1, 2, 1, 0]))
}

/// Returns the bits of the floats that bytes become.
fn looked_up(levels: &Levels, bytes: &[u8]) -> Vec<u32> {
    let count = levels.tables().len() / 256;
    let float = |(at, byte): (usize, &u8)| levels.table(at / levels.run() % count)[usize::from(*byte)];
    bytes.iter().enumerate().map(float).map(f32::to_bits).collect()
}

/// Checks that the bytes of all records become their floats. Returns the input that has bytes, and
/// what they become.
fn kept(data: &str) -> (String, Levels) {
    let job = job(data);
    let data = job.train();
    let [Some(levels)] = data.levels() else { panic!("no input keeps its bytes: {:?}", data.levels()) };
    let records = [7, 0, 3, 9, 4, 8];
    for (epoch, skipped) in [(0, vec![]), (3, vec![3, 9])] {
        let (epoch, skipped) = (Epoch(epoch), BTreeSet::from_iter(skipped));
        let (floats, _) = data.read(epoch, records, &skipped).unwrap();
        let (bytes, _) = data.read_bytes(epoch, records, &skipped).unwrap();
        let expected = floats.inputs[0].values::<f32>().unwrap();
        assert!(expected.len() > 100 && !expected.iter().all(|value| *value == expected[0]));
        let expected: Vec<_> = expected.iter().map(|value| value.to_bits()).collect();
        assert!(looked_up(levels, bytes.inputs[0].bytes()) == expected);
        assert_eq!(
            (bytes.samples, &bytes.records, &bytes.labels),
            (floats.samples, &floats.records, &floats.labels)
        );
        assert_eq!(bytes.inputs[0].spec().shape, floats.inputs[0].spec().shape);
    }
    let (bytes, _) = data.read_bytes(Epoch(0), [1], &BTreeSet::new()).unwrap();
    (bytes.inputs[0].spec().to_string(), levels.clone())
}

const CUT: &str = r#"{ op = "horizontal_flip" }, { op = "random_crop", size = [3, 5] }"#;
const NORMALIZE: &str = r#"{ op = "normalize", mean = [0.485, 0.456, 0.406], std = [0.229, 0.224, 0.225] }"#;

#[test]
fn bytes_of_images_become_the_floats_of_normalize() {
    let data = format!("inputs = [\"image\"]\n transforms = {{ image = [{CUT}, {NORMALIZE}] }}");
    let (input, levels) = kept(&data);
    assert_eq!((&*input, levels.tables().len(), levels.run()), ("`image` u8[3, 3, 5]", 3 * 256, 15));
    // The only input is scaled, too.
    let data = format!(
        "normalize = {{ scale = 3, mean = 0.1, std = 0.7 }}\n transforms = {{ image = [{CUT}, {NORMALIZE}] }}"
    );
    let (input, scaled) = kept(&data);
    assert_eq!((&*input, scaled.tables().len(), scaled.run()), ("`features` u8[3, 3, 5]", 3 * 256, 15));
    assert_ne!(scaled, levels);
}

#[test]
fn bytes_become_the_floats_of_scaled_features() {
    let scaled = "normalize = { scale = 255, mean = 0.1307, std = 0.3081 }";
    let (input, levels) = kept(scaled);
    assert_eq!((&*input, levels.tables().len()), ("`features` u8[4, 6, 3]", 256));
    assert_eq!(kept(&format!("{scaled}\n shape = [72]")), ("`features` u8[72]".to_owned(), levels.clone()));
    let cut = format!("{scaled}\n transforms = {{ image = [{CUT}] }}");
    assert_eq!(kept(&cut), ("`features` u8[3, 3, 5]".to_owned(), levels));
}

#[test]
fn bytes_become_the_floats_of_numbers() {
    for (transform, tables) in [
        (r#"{ op = "cast", dtype = "f32" }"#, 1),
        (r#"{ op = "log", add = 1 }"#, 1),
        (r#"{ op = "normalize", mean = 7, std = 3 }"#, 1),
        (r#"{ op = "normalize", mean = [7, 100, 1.5], std = 3 }"#, 3),
        (r#"{ op = "clip", max = 200 }, { op = "normalize", mean = 7, std = [3, 1, 7] }"#, 3),
    ] {
        let (input, levels) =
            kept(&format!("inputs = [\"image\"]\n transforms = {{ image = [{transform}] }}"));
        assert_eq!((&*input, levels.tables().len()), ("`image` u8[4, 6, 3]", tables * 256), "{transform}");
    }
    let (input, levels) = kept("inputs = [\"image\"]\n dtypes = { image = \"f32\" }");
    assert_eq!((&*input, levels.table(0)[9]), ("`image` u8[4, 6, 3]", 9.0));
}

#[test]
fn other_inputs_are_read_as_ever() {
    let list = |transforms: &str| format!("inputs = [\"image\"]\n transforms = {{ image = [{transforms}] }}");
    for data in [
        // Bytes are what the model takes.
        "inputs = [\"image\"]".to_owned(),
        list(CUT),
        // Their result has another type, or not each float is of one byte.
        format!("{}\n dtypes = {{ image = \"f16\" }}", list(&format!("{CUT}, {NORMALIZE}"))),
        list(r#"{ op = "cast", dtype = "f64" }, { op = "normalize", mean = 1, std = 2 }"#),
        list(&format!(r#"{CUT}, {NORMALIZE}, {{ op = "clip", max = 1 }}"#)),
        list(r#"{ op = "one_hot", classes = 256 }"#),
        // A look for infinite values has to find this one.
        list(r#"{ op = "log" }"#),
    ] {
        let job = job(&data);
        let data_set = job.train();
        assert_eq!(data_set.levels(), [None], "{data}");
        let (plain, _) = data_set.read(Epoch(1), [4, 6], &BTreeSet::new()).unwrap();
        let (same, _) = data_set.read_bytes(Epoch(1), [4, 6], &BTreeSet::new()).unwrap();
        assert_eq!(same, plain, "{data}");
    }
}
