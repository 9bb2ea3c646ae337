//! Storage on a device has the bits of storage on the host, and what fails there is named.
//!
//! The driver is the one of `tests/cuda/driver.cpp`, which runs the kernels on the host and each
//! operation as late as it may. With `EBB_TEST_DRIVER=real` it is the machine's own.

use std::fs;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};

use bytes::Bytes;
use kernels::cuda::{Device, Error};
use kernels::dense::{self, Input};
use kernels::{Merge, Operand, Optimizer, Slot, Storage, Update};
use proptest::collection::vec;
use proptest::prelude::*;
use proto::ids::ChunkId;
use proto::optimizer::{OptimizerKind, OptimizerSpec};
use proto::placement::Layout;
use proto::tensor::{DType, TensorSpec};
use proto::wire::WireType;
use sha2::{Digest as _, Sha256};

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

/// Orders of streams that are tried.
const SEEDS: u64 = 4;

/// The device of most tests. `None`: there is no NVRTC.
fn device() -> Option<Arc<Device>> {
    devices().first().cloned()
}

/// The device as often as there are orders of its streams. None: there is no NVRTC.
fn devices() -> &'static [Arc<Device>] {
    static DEVICES: OnceLock<Vec<Arc<Device>>> = OnceLock::new();
    DEVICES.get_or_init(|| {
        library::load_nvrtc();
        let cache = tempfile::tempdir().expect("a folder");
        let open = |seed| {
            if !is_real() {
                Driver::load().seed(seed);
            }
            match Device::open(0, Some(cache.path())) {
                Ok(device) => Some(device),
                Err(Error::NoCompiler) => {
                    skip::skipped(skip::Lacks::Package, "no NVRTC: no kernel ran by a driver");
                    None
                }
                Err(error) => panic!("{error}"),
            }
        };
        (0..SEEDS).map_while(open).collect()
    })
}

#[expect(clippy::disallowed_methods, reason = "a person says through the environment which driver to use")]
fn is_real() -> bool {
    std::env::var("EBB_TEST_DRIVER").is_ok_and(|driver| driver == "real")
}

/// Storage with these values, on the device or on the host.
fn storage(device: Option<&Arc<Device>>, values: &[f32]) -> Storage {
    let mut storage = zeros(device, DType::F32, values.len());
    storage.write(Operand::Payload(bytemuck::cast_slice(values)));
    storage
}

fn zeros(device: Option<&Arc<Device>>, dtype: DType, len: usize) -> Storage {
    device.map_or_else(
        || Storage::zeros(dtype, len),
        |device| Storage::on_device(device, dtype, len).expect("memory"),
    )
}

/// Returns the bits of floats. All NaNs are one.
fn bits(storage: &Storage) -> Vec<u32> {
    let bytes = storage.bytes();
    let values = bytes.as_chunks().0.iter().map(|value| f32::from_le_bytes(*value));
    values.map(|value| if value.is_nan() { f32::NAN } else { value }.to_bits()).collect()
}

fn value() -> impl Strategy<Value = f32> {
    let special = prop::sample::select(vec![0.0, -0.0, 1e-42, f32::MAX, f32::INFINITY, f32::NAN]);
    prop_oneof![8 => -10.0f32..10.0, 2 => any::<u32>().prop_map(f32::from_bits), 1 => special]
}

/// Columns of one length.
fn columns(count: usize) -> impl Strategy<Value = Vec<Vec<f32>>> {
    prop_oneof![0..40_usize, 250..700_usize].prop_flat_map(move |length| vec(vec(value(), length), count))
}

/// Returns each optimizer as it comes, and with what makes more of its kernel run.
fn optimizers() -> Vec<Optimizer> {
    let mut specs = Vec::new();
    for kind in OptimizerKind::ALL {
        let plain = OptimizerSpec::new(kind, 0.03);
        let mut tuned = plain.clone();
        let has = |name| kind.settings().contains(&name);
        tuned.momentum = has("momentum").then_some(0.7);
        tuned.weight_decay = has("weight_decay").then_some(0.05);
        tuned.betas = has("betas").then_some([0.4, 0.95]);
        tuned.centered = has("centered").then_some(true);
        tuned.l1 = has("l1").then_some(0.2);
        specs.extend([plain, tuned]);
    }
    specs.iter().map(|spec| Optimizer::new(spec, 50).expect("valid")).collect()
}

/// Trains a chunk for three steps as a ps does, and returns weights and slots. Nothing is read
/// between operations.
fn trained(
    device: Option<&Arc<Device>>,
    optimizer: &Optimizer,
    columns: &[Vec<f32>],
    moves: bool,
) -> Vec<Vec<u32>> {
    let [weights, left, right, other] = columns else { unreachable!("four columns") };
    let len = weights.len();
    let layout = Layout::new(vec![TensorSpec::parameter("w", [len.max(1)])], 1).expect("a model");
    let mut weights = storage(device, weights);
    let mut slots: Vec<_> = (0..optimizer.slots())
        .map(|slot| {
            let mut storage = zeros(device, DType::F32, len);
            storage.fill(optimizer.slot_initial(slot));
            storage
        })
        .collect();
    for step in 0..3 {
        let mut first = zeros(device, DType::F32, len);
        let encoded = storage(None, left).encode(WireType::Bf16);
        first.decode(&encoded, WireType::Bf16);
        let mut raw = vec![0; 1];
        raw.extend_from_slice(bytemuck::cast_slice(right));
        first.merge(Operand::Payload(&raw[1..]), Merge::Sum(WireType::F16));
        let mut second = zeros(device, DType::F32, len);
        let (other, stored) = (bytemuck::cast_slice(other), Operand::Stored(&first));
        second.merge_of(stored, Operand::Payload(other), Merge::Sum(WireType::F32));
        // The payload is the caller's again, although no kernel needs to have run.
        drop(encoded);

        // No power of two, which would be exact wherever it is multiplied.
        let mut update = optimizer.prepare(step, 0.3);
        if update.needs_norms() {
            let squares = update.measure(&weights, Operand::Stored(&second), &slots);
            update = update.with_norms(&layout, &[(ChunkId(0), squares)], &[ChunkId(0)])[0];
        }
        let mut next = zeros(device, DType::F32, len);
        let mut there: Vec<_> = slots.iter().map(|_| zeros(device, DType::F32, len)).collect();
        let given: Vec<_> = if moves {
            let moved = slots.iter().zip(&mut there);
            moved.map(|(from, to)| Slot::Moved { from, to }).collect()
        } else {
            slots.iter_mut().map(Slot::InPlace).collect()
        };
        if step == 1 && !optimizer.prepare(0, 1.0).needs_norms() {
            update.apply_halves(
                &weights,
                (Operand::Stored(&first), Operand::Payload(other)),
                given,
                &mut next,
            );
        } else {
            update.apply(&weights, Operand::Stored(&second), given, &mut next);
        }
        weights = next;
        if moves {
            slots = there;
        }
    }
    std::iter::once(&weights).chain(&slots).map(bits).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn a_chunk_trained_on_a_device_has_the_bits_of_one_on_the_host(
        columns in columns(4), moves in any::<bool>(),
    ) {
        for optimizer in optimizers() {
            let expected = trained(None, &optimizer, &columns, moves);
            for (seed, device) in devices().iter().enumerate() {
                let found = trained(Some(device), &optimizer, &columns, moves);
                prop_assert_eq!(&found, &expected, "{:?}, seed {}", optimizer, seed);
            }
        }
        devices().iter().for_each(|device| device.settle().expect("nothing failed"));
    }

    #[test]
    fn state_and_casts_on_a_device_have_the_bits_of_the_host(
        columns in columns(1), counters in vec(any::<[i64; 2]>(), 0..70), count in 1..=1_u64 << 24,
    ) {
        let pairs = counters.iter().map(|[left, right]| (*left, *right));
        let (counted, others): (Vec<i64>, Vec<i64>) = pairs.unzip();
        let (counted, others) = (bytemuck::cast_slice(&counted), bytemuck::cast_slice(&others));
        let run = |device: Option<&Arc<Device>>| {
            let values = storage(device, &columns[0]);
            let mut mean = zeros(device, DType::F32, values.len());
            mean.mean_of(Operand::Stored(&values), count);
            let mut rounded = storage(device, &columns[0]);
            rounded.round(WireType::Bf16);
            rounded.round(WireType::F32);
            let mut merged = zeros(device, DType::I64, counters.len());
            merged.write(Operand::Payload(counted));
            merged.merge(Operand::Payload(others), Merge::Max);
            let mut both = zeros(device, DType::I64, counters.len());
            both.merge_of(Operand::Payload(others), Operand::Stored(&merged), Merge::Max);
            let encoded = [WireType::F32, WireType::Bf16, WireType::F16].map(|wire| values.encode(wire));
            (bits(&mean), bits(&rounded), merged.bytes().into_owned(), both.bytes().into_owned(), encoded)
        };
        let expected = run(None);
        for device in devices() {
            prop_assert_eq!(&run(Some(device)), &expected);
        }
    }
}

/// Computes a dense layer forth and back, as the pure engine does: two products forth with relu
/// between them, and all gradients. Nothing is read between operations.
fn layers(
    device: Option<&Arc<Device>>,
    records: usize,
    [inputs, hidden, outputs]: [usize; 3],
) -> Vec<Vec<u32>> {
    let host = kernels::Device::default();
    let stored = |seed: u32, length: usize| {
        let values: Vec<f32> = ordinary(seed, length);
        match device {
            Some(device) => Storage::uploaded(device, &values).expect("memory"),
            None => host.upload(values).expect("the host"),
        }
    };
    let x = ordinary(1, records * inputs);
    let lent = match device {
        Some(device) => Input::Stored(Storage::uploaded(device, &x).expect("memory")),
        None => Input::on(&host, &x).expect("the host"),
    };
    let (first, bias) = (stored(2, hidden * inputs), stored(3, hidden));
    let (second, other_bias) = (stored(4, outputs * hidden), stored(5, outputs));
    let mut between = dense::forward(lent.operand(), &first, &bias).expect("memory");
    between.relu();
    let y = dense::forward(Operand::Stored(&between), &second, &other_bias).expect("memory");
    let mut answers = stored(6, records * hidden);
    answers
        .change(|values| values.iter_mut().for_each(|value| *value = value.abs().sqrt()))
        .expect("it works");

    let dy = stored(7, records * outputs);
    let [mut dw, db] =
        dense::weight_gradient(&dy, Operand::Stored(&between), outputs, hidden).expect("memory");
    let mut dx = dense::input_gradient(&dy, &second, outputs, hidden).expect("memory");
    dx.relu_slope(&between);
    dx.tanh_slope(&answers);
    let [first_dw, first_db] = dense::weight_gradient(&dx, lent.operand(), hidden, inputs).expect("memory");
    dw.scale(records as f32);
    let all = [&between, &y, &dw, &db, &dx, &first_dw, &first_db];
    all.map(bits).into()
}

/// Returns ordinary values from a seed.
fn ordinary(seed: u32, length: usize) -> Vec<f32> {
    let values = mixed(seed, length).into_iter();
    values.map(|value| if value.abs() < 8.0 && value.is_normal() { value } else { -0.75 }).collect()
}

#[test]
fn dense_layers_on_a_device_have_the_bits_of_the_host_at_odd_shapes() {
    let Some(device) = device() else { return };
    let widths = (1..=33).map(|width| (3, [width, 34 - width, width % 5 + 1]));
    for (records, shape) in
        widths.chain([(0, [3, 2, 1]), (1, [1, 1, 1]), (17, [100, 65, 10]), (300, [7, 9, 2])])
    {
        let expected = layers(None, records, shape);
        assert!(layers(Some(&device), records, shape) == expected, "{records} records, {shape:?}");
    }
    device.settle().expect("nothing failed");
}

#[test]
fn a_product_without_memory_is_refused_with_the_figures_and_disturbs_nothing() {
    let Some(device) = device() else { return };
    let stored = |length| Storage::uploaded(&device, &vec![1.0; length]).expect("memory");
    let (x, w, b) = (stored(1 << 21), stored(1 << 21), stored(1 << 21));
    let refused = dense::forward(Operand::Stored(&x), &w, &b).expect_err("more than any device has");
    assert!(matches!(refused, Error::OutOfMemory { bytes: 0x1000_0000_0000, .. }), "{refused:?}");
    device.settle().expect("the refused call changed nothing");
    assert_eq!(x.read().expect("it works")[..2], [1.0, 1.0]);
}

/// Returns values from a seed, some of them special.
fn mixed(seed: u32, length: usize) -> Vec<f32> {
    let special = [0.0, -0.0, 1e-42, f32::MIN_POSITIVE, f32::MAX, f32::INFINITY, f32::NAN];
    let values = (0..length as u32).map(|at| {
        let bits = (at ^ seed.rotate_left(16)).wrapping_mul(0x9e37_79b1) ^ seed;
        let bits = bits ^ bits >> 15;
        match bits % 16 {
            0 => special[(bits >> 8) as usize % special.len()],
            1 => f32::from_bits(bits.wrapping_mul(0x85eb_ca6b)),
            _ => (bits >> 8) as f32 / (1 << 20) as f32 - 8.0,
        }
    });
    values.collect()
}

#[test]
fn chunks_of_every_small_width_and_of_1_mib_have_the_bits_of_the_host() {
    let whole = (1 << 20) / 4;
    for length in (1..=33).chain([whole - 1, whole]) {
        let columns: Vec<_> = (1..5).map(|seed| mixed(seed, length)).collect();
        for optimizer in optimizers() {
            let expected = trained(None, &optimizer, &columns, true);
            for (seed, device) in devices().iter().enumerate() {
                let found = trained(Some(device), &optimizer, &columns, true);
                assert!(found == expected, "{length} elements, {optimizer:?}, seed {seed}");
            }
        }
    }
    devices().iter().for_each(|device| device.settle().expect("nothing failed"));
}

#[test]
fn a_payload_is_the_callers_again_when_the_call_returns() {
    let Some(device) = device() else { return };
    let mut payload = vec![1.5_f32; 1000];
    let mut storage = storage(Some(&device), &payload);
    let mut sum = zeros(Some(&device), DType::F32, payload.len());
    sum.merge(Operand::Payload(bytemuck::cast_slice(&payload)), Merge::Sum(WireType::F32));
    payload.fill(f32::NAN);
    storage.merge(Operand::Stored(&sum), Merge::Sum(WireType::F32));
    assert_eq!(bits(&storage), vec![3.0_f32.to_bits(); 1000]);
}

#[test]
fn values_move_between_device_and_host() {
    let Some(device) = device() else { return };
    let values: Vec<f32> = (0..777).map(|at| at as f32).collect();
    let mut there = storage(Some(&device), &values);
    there.populate();
    let mut here = zeros(None, DType::F32, values.len());
    here.write(Operand::Stored(&there));
    assert_eq!(bits(&here), bits(&there));
    here.fill(2.0);
    there.write(Operand::Stored(&here));
    assert_eq!(there.bytes(), here.bytes());
    let shared: Bytes = Storage::share(Arc::new(Box::new(there)));
    assert_eq!(shared, Storage::share(Arc::new(Box::new(here))));
}

#[test]
fn threads_share_a_device() {
    let Some(device) = device() else { return };
    std::thread::scope(|scope| {
        for number in 1..5 {
            let device = &device;
            scope.spawn(move || {
                let mut sum = zeros(Some(device), DType::F32, 500);
                let payload = vec![number as f32; 500];
                for _ in 0..100 {
                    sum.merge(Operand::Payload(bytemuck::cast_slice(&payload)), Merge::Sum(WireType::F32));
                }
                assert_eq!(bits(&sum), vec![(100.0 * number as f32).to_bits(); 500]);
            });
        }
    });
}

#[test]
fn every_change_removes_the_mark_of_final_values() {
    let Some(device) = device() else { return };
    let payload: Vec<f32> = (0..40).map(|at| at as f32 * 0.7 - 9.0).collect();
    let payload = bytemuck::cast_slice::<f32, u8>(&payload);
    let update = Optimizer::new(&OptimizerSpec::new(OptimizerKind::Momentum, 0.1), 10).expect("valid");
    let update = update.prepare(1, 0.3);
    let applied = |on: Option<&Arc<Device>>, to: &mut Storage, is_slot: bool| {
        let mut weights = zeros(on, DType::F32, 40);
        weights.fill(2.0);
        let (mut slot, mut next) = (zeros(on, DType::F32, 40), zeros(on, DType::F32, 40));
        let (slot, next) = if is_slot { (to, &mut next) } else { (&mut slot, to) };
        update.apply(&weights, Operand::Payload(payload), vec![Slot::InPlace(slot)], next);
    };
    let other = |on: Option<&Arc<Device>>| {
        let mut other = zeros(on, DType::F32, 40);
        other.fill(0.3);
        other
    };
    let changes: [fn(&mut Storage, &[u8], &Storage); 15] = [
        |to, _, _| to.fill(5.0),
        |to, _, _| to.scale(0.3),
        |to, payload, _| to.write(Operand::Payload(payload)),
        |to, payload, _| to.place(40, &payload[..80]),
        |to, _, other| to.place_part(40, other, 0..80),
        |to, payload, _| to.place_as(40, (WireType::Bf16, &payload[..40]), WireType::F32),
        |to, _, _| to.round(WireType::Bf16),
        |to, _, _| to.round_part(WireType::F16, 40..80),
        |to, payload, _| to.decode(&payload[..80], WireType::F16),
        |to, _, _| to.change(<[f32]>::reverse).expect("it works"),
        |to, payload, _| to.merge(Operand::Payload(payload), Merge::Sum(WireType::F32)),
        |to, payload, other| {
            to.merge_of(Operand::Payload(payload), Operand::Stored(other), Merge::Sum(WireType::F32));
        },
        |to, payload, _| to.mean_of(Operand::Payload(payload), 3),
        |to, _, _| to.relu(),
        |to, _, other| to.tanh_slope(other),
    ];
    let read = |on: Option<&Arc<Device>>, change: &dyn Fn(&mut Storage)| {
        let mut values = zeros(on, DType::F32, 40);
        values.write(Operand::Payload(payload));
        values.seal();
        change(&mut values);
        values.read_part(WireType::F32, 0..160).expect("it works")
    };
    for (number, change) in changes.iter().enumerate() {
        let of = |on| read(on, &|values| change(values, payload, &other(on)));
        assert!(of(Some(&device)) == of(None), "change {number}");
    }
    for is_slot in [false, true] {
        let of = |on| read(on, &|values| applied(on, values, is_slot));
        assert!(of(Some(&device)) == of(None), "an update, of a slot: {is_slot}");
    }
}

#[test]
fn memory_that_goes_on_a_thread_of_others_gives_that_thread_no_device() {
    let Some(device) = device() else { return };
    if is_real() {
        return skip::skipped(skip::Lacks::Machine, "EBB_TEST_DRIVER=real: no thread was asked");
    }
    let own = zeros(Some(&device), DType::F32, 8);
    let (exported, _) = Storage::exported(&device, DType::F32, 8).expect("memory");
    assert!(Driver::load().is_current(), "this thread has used the device");
    let ends = |storage: Storage| {
        let thread = std::thread::spawn(move || {
            drop(storage);
            Driver::load().is_current()
        });
        thread.join().expect("no panic")
    };
    let mut sealed = zeros(Some(&device), DType::F32, 8);
    sealed.seal();
    assert!(!ends(own) && !ends(exported) && !ends(sealed));
    device.settle().expect("the device goes on");
}

#[test]
fn too_little_memory_is_refused_with_the_figures_and_disturbs_nothing() {
    let Some(device) = device() else { return };
    let storage = storage(Some(&device), &[1.0, 2.0]);
    let refused = Storage::on_device(&device, DType::F32, 1 << 44).expect_err("more than any device has");
    assert!(matches!(refused, Error::OutOfMemory { bytes: 0x4000_0000_0000, .. }), "{refused:?}");
    let text = refused.to_string();
    assert!(text.starts_with("CUDA device 0 has no 70368744177664 bytes left: "), "{text}");
    device.settle().expect("the refused call changed nothing");
    assert_eq!(bits(&storage), [1.0_f32.to_bits(), 2.0_f32.to_bits()]);
}

/// One test, because it changes what the driver says to all of this process.
#[test]
fn what_cannot_be_opened_is_named_and_damaged_caches_are_written_anew() {
    if device().is_none() || is_real() {
        return;
    }
    assert_eq!(Device::open(7, None).expect_err("one device"), Error::NoDevice { ordinal: 7, found: 1 });
    let open = || Device::open(0, None).expect_err("no device").to_string();
    let driver = Driver::load();
    driver.devices(0);
    let missing = open();
    driver.devices(1);
    assert!(
        missing.starts_with("no CUDA device 0: the driver shows 0 devices, counted from 0; "),
        "{missing}"
    );
    // NVRTC 13 writes for CUDA 13.
    driver.version(12_080);
    let old = open();
    driver.version(13_000);
    assert!(old.starts_with("the CUDA driver is too old: it supports CUDA 12.8, and NVRTC writes"), "{old}");

    let folder = tempfile::tempdir().expect("a folder");
    let cache = folder.path().join("kernels");
    // The driver does not load what was compiled, so the next compiler must not find it.
    driver.version(12_080);
    Device::open(0, Some(&cache)).expect_err("the driver is old");
    driver.version(13_000);
    assert!(!cache.exists(), "kernels were kept that no driver has loaded");

    let open = || Device::open(0, Some(&cache)).expect("it opens");
    let entries = || -> Vec<PathBuf> {
        let entries = fs::read_dir(&cache).expect("a cache");
        entries.map(|entry| entry.expect("an entry").path()).collect()
    };
    assert_eq!((open().ordinal(), open().name()), (0, "a host that plays a device"));
    let [entry] = &entries()[..] else { panic!("{:?}", entries()) };
    let good = fs::read(entry).expect("an entry");
    fs::write(entry, &good[..good.len() / 2]).expect("damaged");
    open();
    assert!(fs::read(entry).expect("an entry") == good, "written anew");

    // What another compiler has made is not read.
    let name = entry.to_str().expect("a text");
    let (key, version) = name.rsplit_once('-').expect("a version");
    let release = format!("release {}, ", version.trim_end_matches(".ptx"));
    assert!(String::from_utf8_lossy(&good).contains(&release), "the compiler says its {release}");
    let other = format!("{key}-1{version}");
    fs::rename(entry, &other).expect("renamed");
    open();
    assert!(entry.exists() && entries().len() == 2, "{:?}", entries());

    // The driver runs no kernel whose parameters are others than its twin's.
    let good = String::from_utf8(good).expect("a text");
    let (_, ptx) = good.split_once('\n').expect("a hash and a text");
    let parameter = |bits| format!(".param .u{bits} sum_param_3");
    assert!(ptx.contains(&parameter(64)), "{ptx}");
    let drifted = ptx.replace(&parameter(64), &parameter(32));
    let hash: String = Sha256::digest(&drifted).iter().map(|byte| format!("{byte:02x}")).collect();
    fs::write(entry, format!("{hash}\n{drifted}")).expect("written");
    let refused = Device::open(0, Some(&cache)).expect_err("another kernel").to_string();
    assert!(refused.starts_with("CUDA device 0 could not find a kernel: "), "{refused}");
}

#[test]
#[should_panic(expected = "a slot lies elsewhere than the next weights")]
fn slots_on_the_host_are_a_broken_invariant() {
    let Some(device) = device() else { panic!("a slot lies elsewhere than the next weights: not tested") };
    let update: Update = optimizers()[2].prepare(0, 1.0);
    let (weights, mut slot, mut next) =
        (storage(Some(&device), &[1.0]), zeros(None, DType::F32, 1), zeros(Some(&device), DType::F32, 1));
    update.apply(&weights, Operand::Stored(&weights), [Slot::InPlace(&mut slot)], &mut next);
}
