//! Files that must be in memory as a whole have one limit together, with decoded blocks. Records in
//! any order need a memory that holds the blocks.
//!
//! The memory of a process has one limit, so this test has a process of its own.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::io::Write as _;
use std::path::Path;

use data::{Dataset, Error, index, limit_memory};
use flate2::Compression;
use flate2::write::GzEncoder;
use proto::ids::Epoch;
use proto::spec::{DataSet, JobSpec, Shuffle};

/// Bytes for data, and those of each file without compression.
const MEMORY: usize = 4 << 20;
const FILE: usize = 3 << 20;

fn job(files: &[&Path]) -> JobSpec {
    let files: Vec<_> = files.iter().map(|file| file.display().to_string()).collect();
    let text = format!(
        "name = \"t\"\nepochs = 1\nmodel = {{ builtin = \"linear\", loss = \"mse\" }}\nbatch = {{ micro = 1 }}\n\
         optimizer = {{ kind = \"sgd\", learning_rate = 0.1 }}\n[data]\nformat = \"csv\"\ntrain = {{ files = {files:?} }}\n"
    );
    proto::spec::parse(&text, Path::new("/job.toml"), &[]).unwrap()
}

fn open(files: &[&Path]) -> data::Result<std::sync::Arc<Dataset>> {
    Dataset::open(&job(files), DataSet::Train, None)
}

#[test]
fn compressed_files_that_do_not_fit_beside_others_are_refused_until_those_are_closed() {
    limit_memory(MEMORY as u64);
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, bytes: usize| {
        let path = folder.path().join(name);
        let line = "1.25,2\n";
        let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
        encoder.write_all(&line.as_bytes().repeat(bytes / line.len())).unwrap();
        std::fs::write(&path, encoder.finish().unwrap()).unwrap();
        path
    };
    let (one, other) = (write("one.gz", FILE), write("other.gz", FILE));
    let (small, large) = (write("small.gz", MEMORY - FILE - 1000), write("large.gz", MEMORY + 1000));

    let first = open(&[&one]).unwrap();
    let error = open(&[&other]).unwrap_err();
    assert!(!error.is_fatal(), "another worker may have the memory");
    let Error::Full { held, limit, .. } = error else { panic!("{error}") };
    assert!(held <= FILE as u64 && held > FILE as u64 - 10, "{held}");
    assert_eq!(limit, MEMORY as u64);
    let said = open(&[&other]).unwrap_err().to_string();
    for word in [
        "other.gz: without gzip it has more than",
        "of the 4194304 bytes",
        "(data_memory)",
        "a worker of its own",
    ] {
        assert!(said.contains(word), "{word} missing in {said}");
    }
    // What failed has given its bytes back, and a file that fits beside the first one is read.
    let second = open(&[&small]).unwrap();
    // Decoded blocks have almost no room now. They are decoded again.
    for data in [&first, &second, &first] {
        let batch = data.batch(Epoch(0), [0, data.len() - 1, 7]).unwrap();
        assert_eq!(batch.features(), [1.25; 3]);
    }
    drop((first, second));
    let data = open(&[&other]).unwrap();
    assert_eq!(data.len(), (FILE / 7 - 1) as u64, "all lines but the header");
    drop(data);
    let error = open(&[&one, &other]).unwrap_err();
    assert!(matches!(error, Error::Full { .. }), "{error}");
    let error = open(&[&large]).unwrap_err();
    assert!(error.is_fatal() && error.to_string().contains("more than 4194304 bytes, the limit"), "{error}");
    // What was refused has given its bytes back here, too.
    assert!(open(&[&one]).is_ok());

    // A line becomes 16 bytes, and all lines of a file lie in one block.
    let plain = |name: &str, records: usize| {
        let path = folder.path().join(name);
        std::fs::write(&path, "1.25,2\n".repeat(records + 1)).unwrap();
        path
    };
    let (large, half, other) = (plain("a.csv", 400_000), plain("b.csv", 200_000), plain("c.csv", 200_000));
    let refused = |error: Error, path: &Path| {
        let (said, path) = (error.to_string(), path.display().to_string());
        assert!(error.is_fatal() && said.starts_with(&path), "{said}");
        for word in
            ["records of data.train one by one", "a record has 7: at most 4", "6400000 bytes", "4194304"]
        {
            assert!(said.contains(word), "{word} missing in {said}");
        }
        assert!(said.contains("set data.shuffle = \"window\""), "{said}");
    };
    refused(index(&job(&[&large]), DataSet::Train, 0, None).unwrap_err(), &large);
    let (both, set) = (job(&[&half, &other]), DataSet::Train);
    let data = open(&[&half, &other]).unwrap();
    refused(data.check_order(&both).unwrap_err(), &half);
    for file in 0..2 {
        assert_eq!(index(&both, set, file, None).unwrap().records, 200_000, "a file alone fits");
    }
    open(&[&half]).unwrap().check_order(&job(&[&half])).unwrap();
    for shuffle in [Shuffle::Window, Shuffle::None] {
        let with = |mut spec: JobSpec| {
            spec.data.shuffle = shuffle;
            // Blocks of two lanes would not fit either.
            spec.data.interleave = Some(1);
            spec
        };
        assert_eq!(index(&with(job(&[&large])), set, 0, None).unwrap().records, 400_000, "{shuffle:?}");
        data.check_order(&with(both.clone())).unwrap();
    }
    let mut wide = both;
    wide.data.shuffle = Shuffle::Window;
    let error = data.check_order(&wide).unwrap_err().to_string();
    for word in ["windows of 10000 records of the 16 files", "about 6400000 bytes", "4194304", "interleave"] {
        assert!(error.contains(word), "{word} missing in {error}");
    }
}
