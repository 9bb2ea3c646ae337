//! Good inputs of each decoder: files that Ebbflow or another program wrote.

use std::collections::BTreeMap;
use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};

use bytes::{BufMut as _, Bytes};
use data::{Conversion, ShardSize};
use flate2::write::{DeflateEncoder, GzEncoder};
use flate2::{Compression, Crc};
use net::security::TokenRole;
use net::security::tokens::{entry, written};
use prost::Message as _;
use proto::pb;
use proto::spec::{DataSpec, FilesSpec, Format, JobSpec};

use crate::messages;

/// A table with columns of all kinds that JSON Lines have.
const TABLE: &str = r#"{"id": 7, "new": true, "text": "Ann", "list": [1, 2.5, -3e2]}
{"id": 8, "new": false, "text": "", "list": []}
{"id": 9, "new": true, "text": "né\n", "list": [0]}
"#;

/// Zstandard frames of 5 bytes: as they are, and one byte repeated.
const ZSTD: [&[u8]; 2] = [b"\x28\xB5\x2F\xFD\x20\x05\x29\0\0hello", b"\x28\xB5\x2F\xFD\x20\x05\x2B\0\0a"];

/// Returns good inputs by the name of the decoder. Files are made in `folder`.
pub(crate) fn all(folder: &Path) -> BTreeMap<&'static str, Vec<Vec<u8>>> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let made = |to| made(folder, to);
    let images = |ending| golden(&root.join("data/src/pixels/golden"), ending);
    let saved = root.join("tests/golden/upgrade/checkpoints/kept/v0000000900");
    let manifest = fs::read(saved.join("manifest.json")).expect("a manifest");
    let partition = headers(&saved);
    let jobs = ["digits", "mnist", "tabular", "gpt", "imagenet", "custom_model"]
        .map(|name| fs::read(root.join("examples").join(name).join("job.toml")).expect("a job file"));
    let tokenizers = ["bpe", "wordpiece"]
        .map(|name| fs::read(root.join(format!("tests/golden/tokens/{name}.json"))).expect("a tokenizer"));
    let tar = made(Format::Tar);
    let tfrecord = made(Format::Tfrecord);
    let csv = vec![b"a,b,label\n1,2.5,0\n-4,5e1,1\n".to_vec(), b"1,\"2\"\r\n\r\n3,4".to_vec()];
    let tsv = vec![b"a\tb\tlabel\n1\t2.5\t0\n-4\t5e1\t1\n".to_vec(), b"a\t\"b,c\"\r\n3\t4".to_vec()];
    let mut arrow = made(Format::Arrow);
    // A stream is a file without what lies before its first message. What follows the end of the
    // stream is not read.
    let stream = |file: &Vec<u8>| {
        let begin = file.windows(4).position(|bytes| bytes == [0xFF; 4]).expect("a first message");
        file[begin..].to_vec()
    };
    arrow.extend(arrow.iter().map(stream).collect::<Vec<_>>());
    let body = |text: &[u8]| {
        let begin = text.windows(14).position(|window| window == b"\"checkpoint\":{").map_or(0, |at| at + 13);
        text[begin..text.len().saturating_sub(2)].to_vec()
    };
    let specs = jobs.iter().filter_map(|text| {
        let text = std::str::from_utf8(text).ok()?;
        proto::spec::parse(text, Path::new("job.toml"), &[]).ok()
    });
    let specs: Vec<JobSpec> = specs.collect();
    let token = |name, role, number| {
        entry(name, role, &written([number; 32]), Some(3), None, role == TokenRole::Submit)
    };
    let tokens = token("ann", TokenRole::Submit, 7) + &token("workers", TokenRole::Worker, 8);
    BTreeMap::from([
        ("arrow", arrow),
        ("bundle", vec![bundle()]),
        ("chunks", vec![chunks()]),
        ("csv", csv.clone()),
        ("csv_without_header", csv),
        ("evaluated", vec![evaluated()]),
        // The data of a record, between its length and its checksum.
        ("example", tfrecord.iter().map(|file| first_record(file)).collect()),
        ("idx", vec![idx(&[3, 2, 2], 12), idx(&[4], 4)]),
        ("job_file", jobs.to_vec()),
        ("job_json", specs.iter().map(|spec| spec.to_json().into_bytes()).collect()),
        ("jpeg", images("jpg")),
        ("jsonl", vec![TABLE.into()]),
        ("manifest", vec![manifest.clone()]),
        ("manifest_with_checksum", vec![body(&manifest)]),
        ("npy", made(Format::Npy)),
        ("npz", vec![npz(folder, false), npz(folder, true)]),
        ("numerics", vec![numerics().encode_to_vec()]),
        ("open", specs.iter().map(open).collect()),
        ("packed", packed()),
        ("parquet", made(Format::Parquet)),
        ("partition", partition.clone()),
        ("partition_with_length", partition.iter().map(|header| header[8..].to_vec()).collect()),
        ("png", images("png")),
        ("pull", vec![pull()]),
        ("push", vec![push(pb::WireType::F32), push(pb::WireType::Bf16)]),
        ("pushed", vec![pushed()]),
        ("record", specs.iter().flat_map(records).collect()),
        ("requirements", vec![REQUIREMENTS.into()]),
        ("safetensors", made(Format::Safetensors)),
        ("tar", tar.clone()),
        ("tar_with_checksums", tar),
        ("tfrecord", tfrecord),
        ("token_list", vec![tokens.into_bytes()]),
        ("tokenizer", tokenizers.to_vec()),
        ("tokens", (0..8).map(|cut| [&[cut * 35][..], &[1; 200]].concat()).collect()),
        ("tsv", tsv),
        ("webp", images("webp")),
    ])
}

/// Requirements with each part that a line may have.
const REQUIREMENTS: &str = "# all\nnumpy >= 1.26, <3  # arrays\nray[tune,a-b]~=2.30 ; python_version >= '3.10'\n\
    x==1 \\\n  --hash=sha256:0000000000000000000000000000000000000000000000000000000000000000\n";

/// Returns a bundle of some files.
fn bundle() -> Vec<u8> {
    let file = |path, executable, content| proto::bundle::File { path, executable, content };
    let files = vec![file("a/b", false, &b"12"[..]), file("run", true, b"#!"), file("train.py", false, b"")];
    proto::bundle::encode(files).expect("good paths")
}

/// Converts tables of several kinds into a format, as far as it holds them, and returns the files.
fn made(folder: &Path, to: Format) -> Vec<Vec<u8>> {
    let numbers = folder.join("numbers.csv");
    let (table, arrays) = (folder.join("table.jsonl"), folder.join("arrays.idx"));
    fs::write(&numbers, "a,b\n1,2.5\n-3,4\n").expect("a file");
    fs::write(&table, TABLE).expect("a file");
    fs::write(&arrays, idx(&[5, 2, 3], 30)).expect("a file");
    let sources =
        [(Format::Csv, "files", numbers), (Format::Jsonl, "files", table), (Format::Idx, "x", arrays)];
    let mut found = Vec::new();
    for (number, (from, key, source)) in sources.into_iter().enumerate() {
        let lists = BTreeMap::from([(key.to_owned(), vec![source.display().to_string()])]);
        let order = Conversion {
            source: DataSpec::of(from, FilesSpec { records: None, lists }),
            format: to,
            folder: folder.join(format!("{}-{number}", to.name())),
            store: None,
            size: ShardSize::Records(100),
            shuffle: None,
            threads: 1,
            overwrite: true,
        };
        let Ok(Some(converted)) = data::convert(&order, &|_, _| true) else { continue };
        let files = converted.data.train.lists.values().flatten();
        found.extend(files.map(|file| fs::read(file).expect("a file")));
    }
    assert!(!found.is_empty(), "no table can be written as {}", to.name());
    found
}

/// Returns the files of a folder with this ending.
fn golden(folder: &Path, ending: &str) -> Vec<Vec<u8>> {
    let entries = fs::read_dir(folder).expect("golden files").map(|entry| entry.expect("an entry").path());
    let mut paths: Vec<PathBuf> =
        entries.filter(|path| path.extension().is_some_and(|found| found == ending)).collect();
    paths.sort();
    paths.iter().map(|path| fs::read(path).expect("a file")).collect()
}

/// Returns the headers of the files of a checkpoint.
fn headers(folder: &Path) -> Vec<Vec<u8>> {
    let files = golden(folder, "safetensors").into_iter();
    let header = |file: Vec<u8>| {
        let length = u64::from_le_bytes(*file.first_chunk()?) as usize;
        Some(file.get(..8 + length)?.to_vec())
    };
    files.filter_map(header).collect()
}

/// Returns an idx file of bytes.
fn idx(shape: &[u32], values: u8) -> Vec<u8> {
    let mut bytes = vec![0, 0, 8, shape.len() as u8];
    bytes.extend(shape.iter().flat_map(|size| size.to_be_bytes()));
    bytes.extend(0..values);
    bytes
}

/// Returns the data of the first record of a TFRecord file.
fn first_record(file: &[u8]) -> Vec<u8> {
    let length = u64::from_le_bytes(*file.first_chunk().expect("a length")) as usize;
    file[12..12 + length].to_vec()
}

/// Returns an archive of arrays.
fn npz(folder: &Path, deflate: bool) -> Vec<u8> {
    let (mut file, mut directory) = (Vec::new(), Vec::new());
    let arrays = made(folder, Format::Npy);
    for (number, array) in arrays.iter().take(2).enumerate() {
        let name = format!("{number}.npy");
        let mut crc = Crc::new();
        crc.update(array);
        let mut packed = array.clone();
        if deflate {
            let mut encoder = DeflateEncoder::new(Vec::new(), Compression::default());
            encoder.write_all(array).expect("memory");
            packed = encoder.finish().expect("memory");
        }
        let begin = file.len() as u32;
        let method = [if deflate { 8 } else { 0 }, 0];
        let sizes = [crc.sum(), packed.len() as u32, array.len() as u32].map(u32::to_le_bytes).concat();
        let lengths = [name.len() as u8, 0, 0, 0];
        file.extend([&b"PK\x03\x04\x14\0\0\0"[..], &method, &[0; 4], &sizes, &lengths].concat());
        file.extend([name.as_bytes(), &packed].concat());
        directory.extend([&b"PK\x01\x02\x14\0\x14\0\0\0"[..], &method, &[0; 4], &sizes, &lengths].concat());
        directory.extend([&[0; 10][..], &begin.to_le_bytes(), name.as_bytes()].concat());
    }
    let (at, size) = (file.len() as u32, directory.len() as u32);
    file.extend(directory);
    file.extend(
        [&b"PK\x05\x06\0\0\0\0\x02\0\x02\0"[..], &size.to_le_bytes(), &at.to_le_bytes(), &[0; 2]].concat(),
    );
    file
}

/// Returns compressed texts.
fn packed() -> Vec<Vec<u8>> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::default());
    encoder.write_all(TABLE.repeat(9).as_bytes()).expect("memory");
    let gzip = encoder.finish().expect("memory");
    [&gzip[..]].into_iter().chain(ZSTD).map(<[u8]>::to_vec).collect()
}

/// Returns a stream of two messages.
fn chunks() -> Vec<u8> {
    let chunk = |id, bytes| pb::Chunk { id, values: Bytes::from(vec![7; bytes]), region: None };
    let region = Some(pb::Region { offset: 4096, bytes: 8 });
    let messages = [
        pb::Chunks { chunks: vec![chunk(0, 16), chunk(1, 300)] },
        pb::Chunks { chunks: vec![pb::Chunk { region, ..chunk(2, 0) }] },
    ];
    stream(messages)
}

/// Returns a stream of messages.
fn stream(messages: impl IntoIterator<Item = impl prost::Message>) -> Vec<u8> {
    let mut bytes = Vec::new();
    for message in messages {
        bytes.put_u8(0);
        bytes.put_u32(message.encoded_len() as u32);
        message.encode(&mut bytes).expect("memory");
    }
    bytes
}

/// Returns what a worker counted in an evaluation.
fn evaluated() -> Vec<u8> {
    let metric_sums = [("accuracy".to_owned(), 3.0), ("mae".to_owned(), 1.0)].into();
    let record = |record| pb::RecordLoss {
        record,
        loss: 2.5,
        classes: vec![1],
        outputs: vec![0.5; 3],
        preview: Some(pb::Preview { png: b"\x89PNG".to_vec().into(), text: "a text".to_owned() }),
        ..Default::default()
    };
    let worst = vec![record(7), record(3)];
    pb::Evaluated { loss_sum: 2.0, samples: 4, metric_sums, worst, ..Default::default() }.encode_to_vec()
}

/// Returns a numerics class.
fn numerics() -> pb::Numerics {
    proto::numerics::Numerics::computed("avx2", b"bits").into()
}

/// Returns how a master opens the only partition of a job.
fn open(spec: &JobSpec) -> Vec<u8> {
    let restore = Some(pb::Restore { url: "memory:///kept".to_owned(), version: 3 });
    let request = pb::OpenRequest {
        job: 1,
        era: 1,
        partition: 0,
        partitions: 1,
        tensors: messages::layout().tensors().iter().map(Into::into).collect(),
        plan: Some(messages::plan().into()),
        spec_json: spec.to_json(),
        restore,
        homes: vec!["http://127.0.0.1:7000".to_owned()],
        placement: 1,
        script: 0,
    };
    request.encode_to_vec()
}

/// Returns the question for a version.
fn pull() -> Vec<u8> {
    let want = Some(pb::pull_request::Want::AtLeast(7));
    pb::PullRequest { job: 1, era: 1, want, wait_ms: 300, ..Default::default() }.encode_to_vec()
}

/// Returns the answer to a push.
fn pushed() -> Vec<u8> {
    pb::PushReply { outcome: pb::PushOutcome::Completed.into(), version: 70_000 }.encode_to_vec()
}

/// Returns the push of a sum of two gradients.
fn push(wire: pb::WireType) -> Vec<u8> {
    let node = pb::Node { step: 1, begin: 0, end: 2, of: 4, samples: 16 };
    let target = Some(pb::push_header::Target::Node(node));
    let header = pb::PushHeader { job: 1, era: 1, target, wire: wire.into(), ..Default::default() };
    let each = if wire == pb::WireType::F32 { 4 } else { 2 };
    let chunk = |id, bytes| pb::Chunk { id, values: Bytes::from(vec![7; bytes]), region: None };
    let chunks = pb::Chunks { chunks: vec![chunk(0, 30 * each), chunk(1, 8)] };
    let parts = [pb::push_request::Part::Header(header), pb::push_request::Part::Chunks(chunks)];
    stream(parts.map(|part| pb::PushRequest { part: Some(part) }))
}

/// Returns records of a journal: of a job that has begun, of one that trains, and of one that has
/// ended.
fn records(spec: &JobSpec) -> Vec<Vec<u8>> {
    let files = |lists: &BTreeMap<String, Vec<String>>| lists.values().map(Vec::len).max().unwrap_or(0);
    let indexed = |records, files| {
        let found = pb::Indexed { records, shape: vec![2], label_max: Some(1), ..Default::default() };
        vec![pb::Indexed { label_min: Some(0), crc32c: Some(7), bytes: 99, ..found }; files]
    };
    let begun = pb::JobRecord { job: 1, spec_json: spec.to_json(), era: 1, ..Default::default() };
    let validation = spec.data.validation.as_ref().map_or(0, |validation| files(&validation.lists));
    let home = pb::PartitionAddress { ps: "a".to_owned(), url: "http://127.0.0.1:7000".to_owned() };
    let tensors = messages::layout().tensors().iter().map(Into::into).collect();
    let trains = pb::JobRecord {
        train: indexed(20_000, files(&spec.data.train.lists)),
        validation: indexed(20_000, validation),
        placement: Some(pb::Placement { tensors, partitions: vec![home], number: 1 }),
        fresh: vec![false],
        begin: vec![0],
        numerics: vec![pb::NumericsSince { version: 0, numerics: Some(numerics()) }],
        numerics_class: Some(numerics()),
        measured: Some(5),
        ..begun.clone()
    };
    let status = pb::JobStatus { job: 1, name: "digits-1".to_owned(), ..Default::default() };
    let ended = pb::JobRecord { ended: Some(status), ..begun.clone() };
    [begun, trains, ended].map(|record| record.encode_to_vec()).to_vec()
}
