//! Arbitrary bytes in place of a checkpoint: changed bytes are always detected, nothing panics, and
//! no length is trusted before it is compared with the bytes that exist.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::alloc::{GlobalAlloc, Layout as Block, System};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};

use bytes::Bytes;
use proptest::prelude::*;
use proptest::sample::Index;
use proto::checkpoint::data::{Entry, Partition, Section};
use proto::checkpoint::manifest::{File, Manifest, Needs};
use proto::checkpoint::{AppliedSteps, Error, MANIFEST, Result, file_name};
use proto::ids::{Era, PartitionId, Step, Version};
use proto::optimizer::OptimizerKind;
use proto::placement::Layout;
use proto::spec::{JobSpec, Order};
use proto::tensor::{TensorSpec, Values};
use serde_json::{Value, json};
use store::data_file::{DataFile, weights};
use store::{Folder, Stores, found};

/// Largest allocation that these tests need.
const PIECE_BYTES_MAX: usize = 1 << 20;

/// Largest allocation so far.
static LARGEST: AtomicUsize = AtomicUsize::new(0);

struct Watched;

#[expect(unsafe_code, reason = "only the allocator sees how much memory a length would have taken")]
// SAFETY: each call is forwarded unchanged.
unsafe impl GlobalAlloc for Watched {
    unsafe fn alloc(&self, block: Block) -> *mut u8 {
        LARGEST.fetch_max(block.size(), Ordering::Relaxed);
        // SAFETY: the caller's promise.
        unsafe { System.alloc(block) }
    }

    unsafe fn dealloc(&self, at: *mut u8, block: Block) {
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(at, block) }
    }
}

#[global_allocator]
static ALLOCATOR: Watched = Watched;

fn assert_no_length_was_believed() {
    let largest = LARGEST.load(Ordering::Relaxed);
    assert!(largest <= PIECE_BYTES_MAX, "somebody asked for {largest} bytes in one piece");
}

const SPEC: &str = r#"{
    "name": "digits", "epochs": 4, "model": { "builtin": "linear" },
    "data": { "format": "idx", "train": { "features": ["x"], "labels": ["y"] } },
    "batch": { "micro": 2 }, "optimizer": { "kind": "momentum", "learning_rate": 0.1 },
    "consistency": { "mode": "sync" }
}"#;

const VERSION: Version = Version(7);

/// A checkpoint as two partitions and a master write it: the manifest, and the files of the
/// partitions.
#[derive(Clone, Debug)]
struct Checkpoint {
    manifest: Manifest,
    data: Vec<Vec<u8>>,
}

fn tensors() -> Vec<TensorSpec> {
    vec![
        TensorSpec::parameter("weight", [5, 3]),
        TensorSpec::state("mean/odd@name", [7]),
        TensorSpec::counter("batches", []),
    ]
}

fn checkpoint(values: &[u8]) -> Checkpoint {
    let spec = JobSpec::from_json(SPEC).unwrap();
    let slots: Vec<String> =
        spec.optimizer.validate().unwrap().slot_names().iter().map(ToString::to_string).collect();
    let layout = Layout::new(tensors(), 2).unwrap();
    let applied = AppliedSteps { watermark: Step(VERSION.get()), ..AppliedSteps::default() };
    let mut values = values.iter().copied().cycle();
    let (mut data, mut files) = (Vec::new(), Vec::new());
    for partition in [0, 1].map(PartitionId) {
        let (mut entries, mut content) = (Vec::new(), Vec::new());
        for &chunk in layout.members(partition) {
            let (place, tensor) = (layout.chunk(chunk), layout.tensor_of(chunk));
            let slots = slots.iter().cloned().map(Section::Slot);
            for section in [Section::Weights(VERSION)].into_iter().chain(slots) {
                let len = place.len * tensor.dtype().size();
                let bytes: Vec<u8> = values.by_ref().take(len).collect();
                let (tensor, dtype, crc32c) = (tensor.name.clone(), tensor.dtype(), crc32c::crc32c(&bytes));
                entries.push(Entry { section, tensor, offset: place.offset, dtype, len: place.len, crc32c });
                content.extend(bytes);
            }
        }
        let header =
            Partition { version: VERSION, partition, partitions: 2, applied: applied.clone(), entries };
        let header = header.encode();
        let crc32c = crc32c::crc32c(&header);
        let file = [&header[..], &content].concat();
        let (name, bytes) = (file_name(partition, 2, crc32c), file.len() as u64);
        files.push(File { name, bytes, crc32c, applied: applied.clone() });
        data.push(file);
    }
    let manifest = Manifest {
        job: spec.name.clone(),
        run: "0123456789abcdef".to_owned(),
        digest: proto::checkpoint::manifest::digest(&spec),
        version: VERSION,
        oldest: VERSION,
        era: Era(1),
        order: Order::Canonical,
        plan: spec.plan(20),
        tensors: tensors(),
        optimizer: OptimizerKind::Momentum,
        slots,
        files,
        script: None,
        numerics: Vec::new(),
        trained_on: None,
        selection: None,
        created_unix_secs: 1_700_000_000,
    };
    Checkpoint { manifest, data }
}

impl Checkpoint {
    fn files(&self) -> BTreeMap<String, Vec<u8>> {
        let names = self.manifest.files.iter().map(|file| file.name.clone());
        let data = names.zip(self.data.iter().cloned());
        data.chain([(MANIFEST.to_owned(), self.manifest.encode().into_bytes())]).collect()
    }
}

/// Writes files into an empty folder, and reads the whole checkpoint in it.
fn read(files: &BTreeMap<String, Vec<u8>>) -> Result<Vec<Values>> {
    let folder = Stores::default().open("memory://here").unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    runtime.block_on(async {
        for (name, bytes) in files {
            folder.write(name, Bytes::copy_from_slice(bytes)).await.unwrap();
        }
        read_all(&folder).await
    })
}

async fn read_all(folder: &Folder) -> Result<Vec<Values>> {
    let manifest = found::read(folder, VERSION).await?;
    for partition in (0..manifest.files.len() as u32).map(PartitionId) {
        DataFile::open(folder, &manifest, partition).await?.verify().await?;
    }
    weights(folder, &manifest).await
}

/// A change to the bytes of a file.
#[derive(Clone, Debug)]
enum Change {
    Flip(Index, u8),
    Truncate(Index),
    Insert(Index, Vec<u8>),
    Remove(Index, usize),
    Overwrite(Index, u64),
    Replace(Vec<u8>),
}

fn changes() -> impl Strategy<Value = Vec<Change>> {
    let bytes = |most| proptest::collection::vec(any::<u8>(), 1..most);
    let lengths =
        prop_oneof![any::<u64>(), 0u64..400, Just(u64::MAX), Just(100_000_000), Just(i64::MAX as u64)];
    let change = prop_oneof![
        4 => (any::<Index>(), 1u8..).prop_map(|(at, flip)| Change::Flip(at, flip)),
        2 => any::<Index>().prop_map(Change::Truncate),
        2 => (any::<Index>(), bytes(20)).prop_map(|(at, bytes)| Change::Insert(at, bytes)),
        2 => (any::<Index>(), 1usize..20).prop_map(|(at, count)| Change::Remove(at, count)),
        2 => (any::<Index>(), lengths).prop_map(|(at, length)| Change::Overwrite(at, length)),
        1 => bytes(300).prop_map(Change::Replace),
    ];
    proptest::collection::vec(change, 1..5)
}

fn changed(bytes: &[u8], changes: &[Change]) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    for change in changes {
        let place = |at: &Index| at.index(bytes.len().max(1)).min(bytes.len());
        match change {
            Change::Flip(at, flip) => {
                let at = place(at);
                bytes.iter_mut().skip(at).take(1).for_each(|byte| *byte ^= flip);
            }
            Change::Truncate(at) => bytes.truncate(place(at)),
            Change::Insert(at, more) => {
                let at = place(at);
                drop(bytes.splice(at..at, more.iter().copied()));
            }
            Change::Remove(at, count) => {
                let at = place(at);
                drop(bytes.drain(at..bytes.len().min(at + count)));
            }
            Change::Overwrite(at, length) => {
                // Every other time it overwrites the length of a data file's header.
                let at = if length % 2 == 0 { 0 } else { place(at) };
                bytes.iter_mut().skip(at).zip(length.to_le_bytes()).for_each(|(byte, new)| *byte = new);
            }
            Change::Replace(other) => bytes.clone_from(other),
        }
    }
    bytes
}

/// Returns values that no writer produces, to be sealed with a valid checksum.
fn extremes() -> Vec<Value> {
    let numbers = [0, 1, 1 << 32, 1 << 48, 1 << 62, u64::MAX - 1, u64::MAX];
    let texts = ["", "x", "../x", "a/b@c", "18446744073709551615", "4294967296", "ffffffff 0 1"];
    let others =
        [json!(null), json!(-1), json!(1e300), json!([]), json!({}), json!([0, u64::MAX]), json!(true)];
    numbers.into_iter().map(Value::from).chain(texts.map(Value::from)).chain(others).collect()
}

/// Replaces leaves of a JSON text by extremes.
fn with_extremes(text: &[u8], changes: &[(Index, Index)]) -> Vec<u8> {
    fn leaves<'a>(value: &'a mut Value, found: &mut Vec<&'a mut Value>) {
        match value {
            Value::Array(items) => items.iter_mut().for_each(|item| leaves(item, found)),
            Value::Object(map) => map.values_mut().for_each(|item| leaves(item, found)),
            leaf => found.push(leaf),
        }
    }
    let mut value: Value = serde_json::from_slice(text).unwrap();
    for (leaf, extreme) in changes {
        let mut found = Vec::new();
        leaves(&mut value, &mut found);
        **leaf.get_mut(&mut found) = extreme.get(&extremes()).clone();
    }
    serde_json::to_vec(&value).unwrap()
}

fn sealed(body: &[u8]) -> Vec<u8> {
    let begin = format!("{{\"format\":1,\"crc32c\":\"{:08x}\",\"checkpoint\":", crc32c::crc32c(body));
    [begin.as_bytes(), body, b"}\n"].concat()
}

/// Returns a checkpoint whose first data file has `header`, with a manifest that matches it.
fn with_header(mut checkpoint: Checkpoint, header: &[u8]) -> Checkpoint {
    let old = 8 + u64::from_le_bytes(*checkpoint.data[0].first_chunk().unwrap()) as usize;
    checkpoint.data[0] = [header, &checkpoint.data[0][old..]].concat();
    let file = &mut checkpoint.manifest.files[0];
    file.bytes = checkpoint.data[0].len() as u64;
    let framed = header.first_chunk().map_or(0, |length| u64::from_le_bytes(*length).saturating_add(8));
    let framed = checkpoint.data[0].get(..usize::try_from(framed).unwrap_or(usize::MAX));
    file.crc32c = crc32c::crc32c(framed.unwrap_or_default());
    checkpoint
}

fn assert_shapes(values: &[Values]) {
    let lens: Vec<_> = values.iter().map(Values::len).collect();
    assert_eq!(lens, tensors().iter().map(TensorSpec::len).collect::<Vec<_>>());
}

#[test]
fn what_was_written_is_read() {
    let values = read(&checkpoint(&[1, 2, 3, 5, 8, 13, 21]).files()).unwrap();
    assert_shapes(&values);
    let other = read(&checkpoint(&[1, 2, 3, 5, 8, 13, 22]).files()).unwrap();
    assert_ne!(values, other);
    assert_no_length_was_believed();
}

proptest! {
    #[test]
    fn a_changed_file_is_never_taken_for_what_was_written(
        values in proptest::collection::vec(any::<u8>(), 1..99), which in any::<Index>(), changes in changes(),
    ) {
        let mut files = checkpoint(&values).files();
        let names: Vec<_> = files.keys().cloned().collect();
        let file = files.get_mut(which.get(&names)).unwrap();
        let spoilt = changed(file, &changes);
        prop_assume!(spoilt != *file);
        *file = spoilt;
        let error = read(&files).unwrap_err();
        prop_assert!(
            matches!(error, Error::Damaged { .. } | Error::Truncated { .. } | Error::Future { .. }), "{}", error
        );
        prop_assert!(error.to_string().contains(which.get(&names)), "it names another file: {}", error);
        assert_no_length_was_believed();
    }

    #[test]
    fn a_missing_file_is_named(which in any::<Index>()) {
        let mut files = checkpoint(&[1]).files();
        let names: Vec<_> = files.keys().cloned().collect();
        files.remove(which.get(&names));
        let error = read(&files).unwrap_err();
        let missing = matches!(&error, Error::Missing { file } if file.ends_with(which.get(&names)));
        prop_assert!(missing, "{}", error);
    }

    #[test]
    fn a_manifest_with_any_values_and_a_fitting_checksum_is_read_or_refused(
        changes in proptest::collection::vec(any::<(Index, Index)>(), 1..4),
    ) {
        let checkpoint = checkpoint(&[1, 2, 3]);
        let body = serde_json::to_vec(&checkpoint.manifest).unwrap();
        let text = sealed(&with_extremes(&body, &changes));
        let mut files = checkpoint.files();
        files.insert(MANIFEST.to_owned(), text.clone());
        let _ = read(&files);
        if let Ok(manifest) = Manifest::decode("m", &text) {
            prop_assert_eq!(&Manifest::decode("m", manifest.encode().as_bytes()).unwrap(), &manifest);
            let spec = JobSpec::from_json(SPEC).unwrap();
            let (tensors, plan) = (tensors(), spec.plan(20));
            let _ = manifest.check("m", &Needs { tensors: &tensors, plan: &plan, spec: &spec, version: VERSION });
            let _ = manifest.applied("m", PartitionId(0), 3);
            let _ = manifest.plan.epochs_before(manifest.version);
        }
        assert_no_length_was_believed();
    }

    #[test]
    fn a_header_with_any_values_and_a_fitting_checksum_is_read_or_refused(
        changes in proptest::collection::vec(any::<(Index, Index)>(), 1..4),
    ) {
        let checkpoint = checkpoint(&[1, 2, 3]);
        let length = u64::from_le_bytes(*checkpoint.data[0].first_chunk().unwrap()) as usize;
        let text = with_extremes(&checkpoint.data[0][8..8 + length], &changes);
        let header = [&(text.len() as u64).to_le_bytes()[..], &text].concat();
        if let Ok(values) = read(&with_header(checkpoint, &header).files()) {
            assert_shapes(&values);
        }
        assert_no_length_was_believed();
    }

    #[test]
    fn a_header_of_any_bytes_and_a_fitting_checksum_is_read_or_refused(changes in changes()) {
        let checkpoint = checkpoint(&[1, 2, 3]);
        let length = u64::from_le_bytes(*checkpoint.data[0].first_chunk().unwrap()) as usize;
        let header = changed(&checkpoint.data[0][..8 + length], &changes);
        if let Ok(values) = read(&with_header(checkpoint, &header).files()) {
            assert_shapes(&values);
        }
        assert_no_length_was_believed();
    }
}
