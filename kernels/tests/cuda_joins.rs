//! Every order between streams, and between the device and the host, is needed: without any single
//! one of them a test sees it.
//!
//! The driver of `tests/cuda/driver.cpp` counts the places of three mutations while a chunk is
//! trained on it: waits that do nothing, operations that run early, and operations that run late.
//! Then the training is repeated once for each place, with the mutation there.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::Path;
use std::sync::Arc;

use kernels::cuda::{Device, Error};
use kernels::{Merge, Operand, Optimizer, Slot, Storage, dense};
use proto::ids::ChunkId;
use proto::optimizer::{OptimizerKind, OptimizerSpec};
use proto::placement::Layout;
use proto::tensor::{DType, TensorSpec};
use proto::wire::WireType;

use self::fake::{Driver, Mutation};

#[path = "cuda/fake.rs"]
#[allow(dead_code, unreachable_pub, reason = "shared with the tests of devices")]
mod fake;
#[path = "cuda/library.rs"]
#[allow(unreachable_pub, reason = "shared with the tests of the library")]
mod library;
#[allow(dead_code, unreachable_pub, reason = "shared with the tests of the whole program")]
#[path = "../../tests/harness/skip.rs"]
mod skip;

const LENGTH: usize = 600;
/// Half of the driver's memory, in bytes.
const MOST: usize = 1 << 19;
/// The driver's error for an access to memory that is not there.
const ILLEGAL_ADDRESS: i32 = 700;

/// One test, because it changes what the driver does to all of this process.
#[test]
fn without_any_single_join_or_order_the_result_is_another() {
    library::load_nvrtc();
    let driver = Driver::load();
    let cache = tempfile::tempdir().expect("a folder");
    match Device::open(0, Some(cache.path())) {
        Ok(_) => {}
        Err(Error::NoCompiler) => {
            return skip::skipped(skip::Lacks::Package, "no NVRTC: no join was left out");
        }
        Err(error) => panic!("{error}"),
    }
    driver.memory(2 * MOST);
    let (mut noticed, mut unnoticed) = (0, Vec::new());
    for pools in [true, false] {
        driver.pools(pools);
        let expected = if pools { trained(None) } else { summed(None) };
        let run = |mutation| scenario(driver, cache.path(), pools, mutation);
        let found = run((Mutation::Nothing, 0));
        assert!(found.as_ref() == Ok(&expected), "without a mutation, pools: {pools}, {found:?}");
        let mutations = [Mutation::Join, Mutation::Early, Mutation::Late];
        let counts = mutations.map(|mutation| (mutation, driver.counted(mutation)));
        println!("pools: {pools}, places: {counts:?}");
        for (mutation, count) in counts {
            // Nothing reads what the last kernel writes.
            let count = count - i64::from(mutation == Mutation::Late);
            for place in 0..count {
                if run((mutation, place)).as_ref() == Ok(&expected) {
                    unnoticed.push((pools, mutation, place));
                } else {
                    noticed += 1;
                }
                // What a mutation left behind is no mutation.
                let found = run((Mutation::Nothing, 0));
                assert!(found.as_ref() == Ok(&expected), "after {mutation:?} at {place}: {found:?}");
            }
        }
    }
    println!("{noticed} mutations were noticed");
    assert!(unnoticed.is_empty(), "nobody noticed {unnoticed:?}");
    assert!(noticed >= 100, "{noticed} mutations");
}

/// Computes on a new device, with a mutation at one place. Returns the bits, or what else is wrong.
fn scenario(
    driver: &Driver,
    cache: &Path,
    pools: bool,
    (mutation, place): (Mutation, i64),
) -> Result<Vec<Vec<u32>>, String> {
    driver.mutate(Mutation::Nothing, 0);
    let device = Device::open(0, Some(cache)).expect("it opens");
    driver.mutate(mutation, place);
    let run = catch_unwind(AssertUnwindSafe(|| {
        let values = if pools { trained(Some(&device)) } else { summed(Some(&device)) };
        // What is queued gives back the memory that is asked for.
        for _ in 0..2 {
            let most = Storage::on_device(&device, DType::F32, MOST / 4 + 1);
            drop(most.map_err(|error| error.to_string())?);
        }
        let mut storage = Storage::on_device(&device, DType::F32, 1).map_err(|error| error.to_string())?;
        driver.breaks(ILLEGAL_ADDRESS);
        storage.fill(1.0);
        let settled = device.settle();
        driver.breaks(0);
        if settled.is_ok() {
            return Err("a failure of a kernel is not reported".to_owned());
        }
        // It has not run when the device is closed.
        storage.fill(2.0);
        Ok(values)
    }));
    drop(device);
    match run {
        Ok(result) => driver.harm().map_or(result, |harm| Err(harm.to_owned())),
        // Without a mutation it is a fault of this test.
        Err(panic) if mutation == Mutation::Nothing => resume_unwind(panic),
        Err(_) => Err("a panic".to_owned()),
    }
}

/// Adds values on a device without pools, which frees memory only when nothing runs.
fn summed(device: Option<&Arc<Device>>) -> Vec<Vec<u32>> {
    let mut sum = zeros(device);
    with_payload(0.1, |payload| sum.write(Operand::Payload(payload)));
    let mut other = zeros(device);
    other.fill(2.0);
    sum.merge(Operand::Stored(&other), Merge::Sum(WireType::F32));
    // The sum has not read it yet.
    drop(other);
    vec![bits(&sum)]
}

/// Trains a chunk for two steps, with every kind of operation. Every payload is overwritten when
/// the call with it returns. Returns weights, slots and what was sent.
fn trained(device: Option<&Arc<Device>>) -> Vec<Vec<u32>> {
    let spec = OptimizerSpec::new(OptimizerKind::Lamb, 0.03);
    let optimizer = Optimizer::new(&spec, 50).expect("valid");
    let layout = Layout::new(vec![TensorSpec::parameter("w", [LENGTH])], 1).expect("a model");
    let mut weights = zeros(device);
    with_payload(0.1, |payload| weights.write(Operand::Payload(payload)));
    let mut slots: Vec<_> = (0..optimizer.slots()).map(|_| zeros(device)).collect();
    let mut sent = Vec::new();
    for step in 0..2 {
        let factor = 0.2 + step as f32;
        let mut first = zeros(device);
        let halves: Vec<u16> = (0..LENGTH).map(|at| 0x3f80 + at as u16 % 64).collect();
        first.decode(bytemuck::cast_slice(&halves), WireType::Bf16);
        with_payload(factor, |payload| {
            first.merge(Operand::Payload(payload), Merge::Sum(WireType::F16));
        });
        // More than there are pieces of page-locked memory.
        for number in 0..6 {
            with_payload(factor - number as f32, |payload| {
                first.merge(Operand::Payload(payload), Merge::Sum(WireType::F32));
            });
        }
        let mut second = zeros(device);
        with_payload(factor + 0.3, |payload| {
            second.merge_of(Operand::Stored(&first), Operand::Payload(payload), Merge::Sum(WireType::F32));
        });
        second.round(WireType::Bf16);
        // Nothing has read it yet.
        drop(first);
        let squares = optimizer.prepare(step, 0.25).measure(&weights, Operand::Stored(&second), &slots);
        let update =
            optimizer.prepare(step, 0.25).with_norms(&layout, &[(ChunkId(0), squares)], &[ChunkId(0)])[0];
        let mut next = zeros(device);
        let mut there: Vec<_> = slots.iter().map(|_| zeros(device)).collect();
        let given: Vec<_> = slots.iter().zip(&mut there).map(|(from, to)| Slot::Moved { from, to }).collect();
        update.apply(&weights, Operand::Stored(&second), given, &mut next);
        (weights, slots) = (next, there);
        drop(second);
        let mut mean = zeros(device);
        mean.mean_of(Operand::Stored(&weights), 3);
        // A copy in place of the weights, whose memory is freed while nothing has run.
        let mut copy = zeros(device);
        copy.write(Operand::Stored(&mean));
        drop(mean);
        sent.push(copy.encode(WireType::F16).iter().map(|byte| u32::from(*byte)).collect());
    }
    weights.round(WireType::Bf16);
    sent.extend(std::iter::once(&weights).chain(&slots).map(bits));
    sent.extend(layer(device));
    sent
}

/// Computes a dense layer forth and back, with weights that change between two products. Whatever
/// was uploaded is used before the next upload, which would wait for it too.
fn layer(device: Option<&Arc<Device>>) -> Vec<Vec<u32>> {
    let (records, inputs, outputs) = (10, 20, 30);
    let stored = |factor: f32, length: usize| {
        let mut values = sines(factor, length);
        let mut storage = match device {
            Some(device) => Storage::uploaded(device, &values).expect("memory"),
            None => kernels::Device::default().upload(&values[..]).expect("the host"),
        };
        values.fill(f32::NAN);
        storage.scale(0.3);
        storage
    };
    let x = stored(0.7, records * inputs);
    let mut b = stored(0.8, outputs);
    let mut w = stored(0.1, LENGTH);
    let first = dense::forward(Operand::Stored(&x), &w, &b).expect("memory");
    // The product above has not read them yet.
    with_payload(0.2, |payload| w.place(0, payload));
    w.scale(0.7);
    // The page-locked memory of that copy is needed again.
    for number in 1..5 {
        let payload = sines(number as f32, outputs);
        b.merge(Operand::Payload(bytemuck::cast_slice(&payload)), Merge::Sum(WireType::F32));
    }
    let mut second = dense::forward(Operand::Stored(&x), &w, &b).expect("memory");
    second.relu();
    let mut slope = stored(0.3, records * outputs);
    slope.relu_slope(&second);
    slope.tanh_slope(&first);
    let [mut dw, db] = dense::weight_gradient(&slope, Operand::Stored(&x), outputs, inputs).expect("memory");
    drop(x);
    dw.scale(0.3);
    let dx = dense::input_gradient(&slope, &w, outputs, inputs).expect("memory");
    drop((w, slope));
    // What was written last is read first.
    [dx, dw, db, second, first].iter().map(bits).collect()
}

fn sines(factor: f32, length: usize) -> Vec<f32> {
    (0..length).map(|at| (at as f32 * factor).sin()).collect()
}

fn zeros(device: Option<&Arc<Device>>) -> Storage {
    match device {
        Some(device) => Storage::on_device(device, DType::F32, LENGTH).expect("memory"),
        None => Storage::zeros(DType::F32, LENGTH),
    }
}

/// Calls an operation with a payload, and overwrites the payload when the call returns.
fn with_payload(factor: f32, operation: impl FnOnce(&[u8])) {
    let mut payload = sines(factor, LENGTH);
    operation(bytemuck::cast_slice(&payload));
    payload.fill(f32::NAN);
}

fn bits(storage: &Storage) -> Vec<u32> {
    storage.bytes().as_chunks().0.iter().map(|value| u32::from_le_bytes(*value)).collect()
}
