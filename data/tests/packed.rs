//! Compressed files larger than the memory for data give the records of the plain files.
//!
//! The memory of a process has one limit, so this test has a process of its own.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use data::{Dataset, index, limit_memory, unpacked_bytes};
use flate2::Compression;
use flate2::write::GzEncoder;
use proto::ids::Epoch;
use proto::spec::{DataSet, JobSpec};

/// Bytes for data, and those of each of the two files without compression, about.
const MEMORY: u64 = 12 << 20;
const FILE: usize = 24 << 20;

const WINDOW: &str = "shuffle = \"window\"\nwindow = 2000\ninterleave = 1";

/// How a test writes a file.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Packing {
    Plain,
    Gzip,
    Zstandard,
}

fn write(path: &Path, packing: Packing, records: usize, record: &dyn Fn(usize) -> Vec<u8>) {
    let file = BufWriter::new(File::create(path).unwrap());
    let fill = |out: &mut dyn Write| (0..records).for_each(|at| out.write_all(&record(at)).unwrap());
    match packing {
        Packing::Plain => {
            let mut file = file;
            fill(&mut file);
            file.flush().unwrap();
        }
        Packing::Gzip => {
            let mut encoder = GzEncoder::new(file, Compression::fast());
            fill(&mut encoder);
            encoder.finish().unwrap().flush().unwrap();
        }
        Packing::Zstandard => {
            let mut encoder = zstd::Encoder::new(file, 1).unwrap();
            fill(&mut encoder);
            encoder.finish().unwrap().flush().unwrap();
        }
    }
}

/// Returns the bytes of record `at` of file `file`. Record 0 of a CSV file is the header.
fn record(format: &str, file: usize, at: usize) -> Vec<u8> {
    let (x, y) = ((file * 1_000_003 + at * 7) % 100_003, at % 10);
    let wide = "5".repeat(400);
    match format {
        "csv" if at == 0 => b"x,z,y\n".to_vec(),
        "csv" => format!("{x},0.{wide},{y}\n").into_bytes(),
        "jsonl" => format!("{{\"z\": \"{wide}\", \"x\": {x}, \"y\": {y}}}\n").into_bytes(),
        _ => framed(&example(x as f32, y as u8, wide.as_bytes())),
    }
}

/// Returns a field of Protocol Buffers with a length.
fn field(number: u8, bytes: &[u8]) -> Vec<u8> {
    let (mut out, mut length) = (vec![number << 3 | 2], bytes.len());
    while length >= 128 {
        out.push(length as u8 | 128);
        length >>= 7;
    }
    out.push(length as u8);
    out.extend(bytes);
    out
}

/// Returns a `tf.train.Example` of a float, a class and bytes.
fn example(x: f32, y: u8, z: &[u8]) -> Vec<u8> {
    let feature =
        |name: &str, list: Vec<u8>| field(1, &[field(1, name.as_bytes()), field(2, &list)].concat());
    let features = [
        feature("x", field(2, &field(1, &x.to_le_bytes()))),
        feature("y", field(3, &field(1, &[y]))),
        feature("z", field(1, &field(1, z))),
    ];
    field(1, &features.concat())
}

fn framed(data: &[u8]) -> Vec<u8> {
    let masked =
        |bytes: &[u8]| crc32c::crc32c(bytes).rotate_right(15).wrapping_add(0xA282_EAD8).to_le_bytes();
    let length = (data.len() as u64).to_le_bytes();
    [&length[..], &masked(&length), data, &masked(data)].concat()
}

fn job(format: &str, files: &[PathBuf], order: &str) -> JobSpec {
    let files: Vec<_> = files.iter().map(|file| file.display().to_string()).collect();
    let lengths = if format == "tfrecord" { "lengths = { x = 1, y = 1 }\n" } else { "" };
    let text = format!(
        "name = \"t\"\nepochs = 2\nmodel = {{ builtin = \"softmax\" }}\nbatch = {{ micro = 256 }}\n\
         optimizer = {{ kind = \"sgd\", learning_rate = 0.1 }}\n[data]\nformat = \"{format}\"\nlabel = \"y\"\n\
         inputs = [\"x\"]\n{lengths}{order}\ntrain = {{ files = {files:?} }}\n"
    );
    proto::spec::parse(&text, Path::new("/job.toml"), &[]).unwrap()
}

fn open(spec: &JobSpec) -> Arc<Dataset> {
    Dataset::open(spec, DataSet::Train, None).unwrap()
}

/// Returns a checksum of each microbatch of an epoch, from microbatch `from` up to `to`.
fn microbatches(spec: &JobSpec, data: &Dataset, epoch: u64, from: u64, to: u64) -> Vec<u32> {
    let order = spec.order(&data.shards(), Epoch(epoch));
    let ends = (from..to).map(|at| (at * 256, ((at + 1) * 256).min(data.len())));
    let checksum = |(begin, end)| {
        let batch = data.batch(Epoch(epoch), order.records(begin..end)).unwrap();
        let inputs = crc32c::crc32c(batch.inputs[0].bytes());
        crc32c::crc32c_append(inputs, batch.labels.bytes())
    };
    ends.map(checksum).collect()
}

/// Returns a number of `/proc/self/status` in bytes.
fn status(key: &str) -> u64 {
    let text = fs::read_to_string("/proc/self/status").unwrap();
    let value = text.lines().find_map(|line| line.strip_prefix(key)).unwrap();
    value.trim_start_matches(':').trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10
}

#[test]
fn compressed_files_larger_than_the_memory_are_read_in_sequence_and_have_the_records_of_plain_ones() {
    limit_memory(MEMORY);
    let folder = tempfile::tempdir().unwrap();
    for (format, packing) in
        [("csv", Packing::Gzip), ("jsonl", Packing::Zstandard), ("tfrecord", Packing::Gzip)]
    {
        let records = FILE / record(format, 0, 1).len();
        let files = |packing: Packing| -> Vec<PathBuf> {
            let file = |number: usize| {
                let path = folder.path().join(format!("{number}.{format}.{packing:?}"));
                write(&path, packing, records, &|at| record(format, number, at));
                path
            };
            (0..2).map(file).collect()
        };
        let plain_files = files(Packing::Plain);
        let size: u64 = plain_files.iter().map(|file| fs::metadata(file).unwrap().len()).sum();
        let plain = job(format, &plain_files, WINDOW);
        let packed_files = files(packing);
        let packed = job(format, &packed_files, WINDOW);

        let data = open(&plain);
        let (len, count) = (data.len(), data.len().div_ceil(256));
        let expected = [0, 1].map(|epoch| microbatches(&plain, &data, epoch, 0, count));
        drop(data);
        let found = [&plain, &packed].map(|spec| index(spec, DataSet::Train, 1, None).unwrap());
        assert_eq!(found[0].content, found[1].content, "{format}");
        assert_eq!((found[0].records, found[0].labels), (found[1].records, found[1].labels), "{format}");
        assert!(size > 3 * MEMORY, "{size}");

        // The system forgets the peak of what was before. If it cannot, the peak says less.
        let _ = fs::write("/proc/self/clear_refs", "5");
        let before = status("VmHWM");
        let data = open(&packed);
        assert_eq!(data.len(), len, "{format}");
        for epoch in [0, 1] {
            let unpacked = unpacked_bytes();
            let found = microbatches(&packed, &data, epoch, 0, count);
            assert!(found == expected[epoch as usize], "{format}: other records in epoch {epoch}");
            let unpacked = unpacked_bytes() - unpacked;
            assert!(unpacked <= size, "{format}: {unpacked} bytes of {size} were unpacked in one epoch");
            assert!(
                unpacked >= size - MEMORY,
                "{format}: {unpacked} bytes of {size} come from somewhere else"
            );
        }
        // A lane that moves to another reader costs one more beginning.
        let unpacked = unpacked_bytes();
        let first = microbatches(&packed, &data, 0, 0, count / 3);
        drop(data);
        let opening = unpacked_bytes();
        let data = open(&packed);
        let opening = unpacked_bytes() - opening;
        let rest = microbatches(&packed, &data, 0, count / 3, count);
        assert!([first, rest].concat() == expected[0], "{format}: other records after a move");
        let unpacked = unpacked_bytes() - unpacked - opening;
        assert!(unpacked <= size + size / 2, "{format}: {unpacked} bytes of {size} in two parts");
        // Opening counts the bytes, and a text is read for its records.
        assert!(
            opening <= 2 * size + size / 4,
            "{format}: {opening} bytes of {size} were unpacked to open the files"
        );
        drop(data);
        let peak = status("VmHWM") - before;
        assert!(peak < size - MEMORY, "{format}: the peak has {peak} bytes more");

        let any = job(format, &packed_files, "");
        for error in [
            Dataset::open(&any, DataSet::Train, None).unwrap_err(),
            index(&any, DataSet::Train, 0, None).unwrap_err(),
        ] {
            assert!(error.is_fatal());
            let said = error.to_string();
            for word in
                ["more than 12582912 bytes", "data_memory", "shuffle = \"window\"", "ebb data convert"]
            {
                assert!(said.contains(word), "{word} missing in {said}");
            }
        }
        let wide = job(format, &packed_files, "shuffle = \"window\"\nwindow = 60000\ninterleave = 2");
        let said = Dataset::open(&wide, DataSet::Train, None).unwrap_err().to_string();
        for word in ["windows of 60000 records", "12582912 of data_memory", "data.interleave"] {
            assert!(said.contains(word), "{word} missing in {said}");
        }
        for file in fs::read_dir(folder.path()).unwrap() {
            fs::remove_file(file.unwrap().path()).unwrap();
        }
    }
    // A frame that says that it needs a window of 128 MiB.
    let path = folder.path().join("long.csv.zst");
    let mut encoder = zstd::Encoder::new(File::create(&path).unwrap(), 1).unwrap();
    encoder.long_distance_matching(true).unwrap();
    encoder.window_log(27).unwrap();
    encoder.write_all(b"x,y\n1,2\n").unwrap();
    encoder.finish().unwrap();
    let long = job("csv", &[path], WINDOW);
    let said = Dataset::open(&long, DataSet::Train, None).unwrap_err().to_string();
    assert!(said.contains("a window of more than 8388608 bytes; raise data_memory"), "{said}");
}
