//! What a worker does with values on a device has the bits of what it does on the host: it places
//! and reads parts of them, rounds them, and merges nodes of the tree.
//!
//! The driver is the one of `tests/cuda/driver.cpp`.

use std::sync::{Arc, OnceLock};

use kernels::{Device, Levels, Storage, values};
use proptest::collection::vec;
use proptest::prelude::*;
use proto::ids::ChunkId;
use proto::tensor::{Chunk, ChunkValues, DType, TensorRole, Values};
use proto::wire::WireType;

use self::fake::Driver;

#[allow(dead_code, unreachable_pub, reason = "shared with the tests of joins")]
#[path = "cuda/fake.rs"]
mod fake;
#[allow(unreachable_pub, reason = "shared with the tests of the library")]
#[path = "cuda/library.rs"]
mod library;
#[allow(dead_code, unreachable_pub, reason = "shared with the tests of the whole program")]
#[path = "../../tests/harness/skip.rs"]
mod skip;

/// Two openings of one device, whose streams do not wait for each other. `None`: there is no NVRTC.
fn devices() -> Option<[Device; 2]> {
    static DEVICES: OnceLock<Option<[Device; 2]>> = OnceLock::new();
    let opened = || {
        library::load_nvrtc();
        Driver::load();
        match Device::cuda(0, None) {
            Ok(device) => Some([device, Device::cuda(0, None).expect("it opens again")]),
            Err(kernels::Error::NoCompiler) => {
                skip::skipped(skip::Lacks::Package, "no NVRTC: no kernel ran by a driver");
                None
            }
            Err(error) => panic!("{error}"),
        }
    };
    DEVICES.get_or_init(opened).clone()
}

fn stored(device: &Device, floats: &[f32]) -> Storage {
    let mut storage = device.zeros(DType::F32, floats.len()).expect("memory");
    storage.place(0, bytemuck::cast_slice(floats));
    storage
}

fn host(values: &Values) -> Vec<u8> {
    values.on_host().expect("a device that works").bytes().to_vec()
}

fn wire() -> impl Strategy<Value = WireType> {
    prop::sample::select(vec![WireType::F32, WireType::Bf16, WireType::F16])
}

/// Floats, and a part of them: its first element and its length.
fn parted() -> impl Strategy<Value = (Vec<f32>, usize, usize)> {
    (vec(-1e5f32..1e5, 1..300), any::<prop::sample::Index>(), any::<prop::sample::Index>()).prop_map(
        |(floats, begin, len)| {
            let begin = begin.index(floats.len());
            let len = len.index(floats.len() - begin + 1);
            (floats, begin, len)
        },
    )
}

proptest! {
    #[test]
    fn parts_are_placed_rounded_and_read_as_on_the_host(
        (floats, begin, len) in parted(), came in wire(), round in wire(),
    ) {
        let Some([device, other]) = devices() else { return Ok(()) };
        let part = begin * 4..(begin + len) * 4;
        let run = |of: &Device, from: &Device| {
            let source = stored(from, &floats);
            let mut storage = stored(of, &vec![0.25; floats.len()]);
            // What travelled as `came` is placed in front, and what lies in storage behind it.
            let sent = source.read_part(came, part.clone()).expect("a device that works");
            storage.place_as(0, (came, &sent), round);
            let front = storage.bytes().into_owned();
            // Nothing has waited for these values, and others lie there soon.
            let mut source = stored(from, &floats);
            storage.place_part(part.start, &source, part.clone());
            source.fill(9.0);
            from.settle().expect("a device that works");
            storage.round_part(round, part.clone());
            let read = storage.read_part(round, part.clone()).expect("a device that works");
            (sent, front, storage.bytes().into_owned(), read)
        };
        let expected = run(&Device::default(), &Device::default());
        prop_assert_eq!(&run(&device, &device), &expected);
        prop_assert_eq!(&run(&device, &other), &expected, "streams that do not wait for each other");
    }

    #[test]
    fn nodes_are_rounded_and_merged_as_on_the_host(left in vec(-1e5f32..1e5, 1..300), wire in wire()) {
        let Some([device, _]) = devices() else { return Ok(()) };
        let right: Vec<f32> = left.iter().map(|value| value * 0.37 - 1.0).collect();
        let merged = |of: &Device, is_shared: bool| {
            let [mut sum, right] = [&left, &right].map(|floats| Values::from(stored(of, floats)));
            let reader = is_shared.then(|| sum.clone());
            values::round(wire, &mut sum);
            values::merge(TensorRole::Parameter, wire, &mut sum, &right);
            (host(&sum), reader.map(|reader| host(&reader)))
        };
        let (expected, _) = merged(&Device::default(), false);
        prop_assert_eq!(&merged(&device, false).0, &expected);
        let (found, reader) = merged(&device, true);
        prop_assert_eq!(&found, &expected);
        let before = bytemuck::cast_slice::<f32, u8>(&left).to_vec();
        prop_assert_eq!(reader, Some(before), "what somebody else reads does not change");
    }
}

/// Returns the floats of bytes that lie `shift` bytes off alignment. Nothing waits for them before
/// the bytes are others, and the tables are gone.
fn looked_up(device: &Device, tables: &[f32], run: usize, (shift, bytes): (usize, &[u8])) -> Storage {
    let mut moved = [&vec![9; shift][..], bytes].concat();
    let levels = Levels::new(device, tables, run).expect("memory");
    let floats = levels.of(&moved[shift..]).expect("memory");
    moved.fill(1);
    floats
}

proptest! {
    #[test]
    fn floats_of_bytes_are_those_of_the_host_at_any_length_and_alignment(
        bytes in prop_oneof![vec(any::<u8>(), 0..70), vec(any::<u8>(), 1000..3000)],
        count in 1..4_usize, run in prop_oneof![1..9_usize, 20..300_usize], shift in 0..5_usize,
    ) {
        let Some([device, _]) = devices() else { return Ok(()) };
        let tables: Vec<f32> = (0..count * 256).map(|at| (at as f32).sin() / 3.0).collect();
        let found = looked_up(&device, &tables, run, (shift, &bytes));
        let expected = looked_up(&Device::default(), &tables, run, (shift, &bytes));
        prop_assert_eq!(found.bytes(), expected.bytes());
    }
}

#[test]
fn floats_of_bytes_that_take_several_pieces_are_those_of_the_host() {
    let Some([device, _]) = devices() else { return };
    let bytes: Vec<u8> = (0..5_000_003_u32).map(|at| (at.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    let tables: Vec<f32> = (0..3 * 256).map(|at| at as f32 / 255.0).collect();
    let there = looked_up(&device, &tables, 224 * 224, (1, &bytes));
    let here = looked_up(&Device::default(), &tables, 224 * 224, (0, &bytes));
    assert!(there.bytes() == here.bytes());
}

#[test]
fn floats_of_bytes_without_memory_are_refused_and_the_device_goes_on() {
    let Some([device, _]) = devices() else { return };
    let levels = Levels::new(&device, &[0.5; 256], 1).expect("memory");
    let driver = Driver::load();
    for allocation in 0..2 {
        driver.fail(c"cuMemAllocAsync", allocation, 2, 2);
        let refused = levels.of(&[1; 40]).expect_err("no memory");
        assert!(matches!(refused, kernels::Error::OutOfMemory { .. }), "{refused:?}");
        driver.fail(c"", 0, 0, 0);
        device.settle().expect("the refused call changed nothing");
        assert_eq!(*levels.of(&[1; 3]).expect("memory").read().expect("it works"), [0.5; 3]);
    }
}

#[test]
fn chunks_cross_to_the_host_in_the_type_in_which_they_travel() {
    let Some([device, _]) = devices() else { return };
    let floats: Vec<f32> = (0..50).map(|at| at as f32 * 1.001).collect();
    let chunk = |role, values| Chunk { id: ChunkId(3), role, values };
    let whole = ChunkValues::from(Values::from(stored(&device, &floats)));
    assert_eq!(whole.len(), 200);
    let counter = ChunkValues::from(Values::I64(vec![7]));
    let chunks = [
        chunk(TensorRole::Parameter, whole.slice(40..160).slice(0..80)),
        chunk(TensorRole::State, whole.slice(0..8)),
        chunk(TensorRole::Counter, counter.clone()),
    ];
    let fetched = values::fetched(&chunks, WireType::Bf16).expect("it works").expect("not all are here");
    let encoded = kernels::cpu::cast::encode(WireType::Bf16, bytemuck::cast_slice(&floats[10..30]));
    assert_eq!(*fetched[0].values.host(), encoded, "a parameter travels rounded");
    assert_eq!(*fetched[1].values.host(), bytemuck::cast_slice::<f32, u8>(&floats[..2]), "state does not");
    assert_eq!(fetched[2].values.host(), counter.host());
    let here = values::fetched(&fetched[2..], WireType::Bf16).expect("it works");
    assert!(here.is_none(), "what is on the host already is not touched");
}

#[test]
#[expect(unsafe_code, reason = "memory that another library has allocated is known by its address")]
fn values_are_copied_from_and_to_memory_of_another_library() {
    let Some([device, _]) = devices() else { return };
    let floats = [1.5f32, -2.0, 3.25];
    let mut storage = stored(&device, &floats);
    device.settle().expect("a device that works");
    // The calls above have bound this thread to the device.
    // SAFETY: 12 bytes are allocated, used and freed; nothing else knows of them.
    let back = unsafe {
        let address = cudarc::driver::result::malloc_sync(12).expect("memory");
        storage.copy_to_foreign(address);
        storage.fill(0.0);
        let mut back = device.zeros(DType::F32, 3).expect("memory");
        back.copy_from_foreign(address);
        device.settle().expect("a device that works");
        cudarc::driver::result::free_sync(address).expect("it was allocated");
        back
    };
    assert_eq!(*back.bytes(), *bytemuck::cast_slice::<f32, u8>(&floats));
    assert_eq!(*storage.bytes(), [0; 12], "the copy came before");
}

#[test]
fn values_of_the_host_are_passed_on_without_a_copy() {
    let Values::F32(floats) = Values::from(stored(&Device::default(), &[1.0, 2.0])) else {
        panic!("memory of this process")
    };
    assert_eq!(floats, [1.0, 2.0]);
    let values = Values::F32(floats);
    assert!(values::on_device(&values).is_none());
    let unknown: Arc<dyn proto::tensor::DeviceMemory> = Arc::new(Unknown);
    assert!(values::storage(unknown.as_ref()).is_none(), "another crate's memory");
}

/// Memory of a device that these kernels do not know.
#[derive(Debug)]
struct Unknown;

impl proto::tensor::DeviceMemory for Unknown {
    fn size(&self) -> usize {
        0
    }

    fn read(&self, _: WireType, _: std::ops::Range<usize>) -> Result<Vec<u8>, String> {
        Err("no device".to_owned())
    }
}
