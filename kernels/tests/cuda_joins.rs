//! Every order between streams, and between the device and the host, is needed: without any single
//! one of them a test sees it.
//!
//! The driver of `tests/cuda/driver.cpp` counts the places of three mutations while values are
//! computed on it: waits that do nothing, operations that run early, and operations that run late.
//! Then the computation is repeated once for each place, with the mutation there.
//!
//! A seed says which stream goes first when several may. Without a mutation all seeds have one
//! result. So an order that the product forgets is noticed too, whatever the mutations are.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::Path;
use std::sync::Arc;

use kernels::cuda::{Device, Error, Opened};
use kernels::{Levels, Merge, Operand, Optimizer, Slot, Storage, dense};
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
/// Values for two and a half pieces of page-locked memory.
const LONG: usize = 5 << 17;
/// Half of the driver's memory, in bytes.
const MOST: usize = 7 << 20;
/// Values of a part that crosses: a multiple of what a part begins at.
const PART: usize = 256;
/// Orders of streams that are tried. Among these each stream goes before each other one.
const SEEDS: u64 = 8;
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
    driver.own(true);
    let (mut noticed, mut unnoticed) = (0, Vec::new());
    for (pools, compute) in [
        (true, trained as Computation),
        (true, placed),
        (true, looked_up),
        (true, sealed),
        (true, taken_over),
        (false, sealed),
        (true, crossed),
        (false, summed),
        (false, crossed),
    ] {
        driver.pools(pools);
        let expected = compute(None);
        let run = |seed, mutation| scenario(driver, cache.path(), compute, seed, mutation);
        let is_right = |found: &Found| found.as_ref() == Ok(&expected);
        for seed in 0..SEEDS {
            let found = run(seed, (Mutation::Nothing, 0));
            assert!(is_right(&found), "seed {seed}, pools: {pools}, {}", said(&found));
        }
        let mutations = [Mutation::Join, Mutation::Early, Mutation::Late];
        run(0, (Mutation::Nothing, 0)).expect("it was right before");
        let counts = mutations.map(|mutation| (mutation, driver.counted(mutation)));
        println!("pools: {pools}, places: {counts:?}");
        for (mutation, count) in counts {
            // Nothing reads what the last two kernels write.
            let count = count - if mutation == Mutation::Late { 2 } else { 0 };
            for place in 0..count {
                if is_right(&run(0, (mutation, place))) {
                    unnoticed.push((pools, mutation, place));
                } else {
                    noticed += 1;
                }
                // What a mutation left behind is no mutation.
                let found = run(0, (Mutation::Nothing, 0));
                assert!(is_right(&found), "after {mutation:?} at {place}: {}", said(&found));
            }
        }
    }
    println!("{noticed} mutations were noticed");
    assert!(unnoticed.is_empty(), "nobody noticed {unnoticed:?}");
    assert!(noticed >= 200, "{noticed} mutations");
}

/// Computes on a device, or on the host. Returns the bits.
type Computation = fn(Option<&Place>) -> Vec<Vec<u32>>;

/// The bits that were computed, or what else is wrong.
type Found = Result<Vec<Vec<u32>>, String>;

/// A device, and the same one as another process opens it.
struct Place {
    device: Arc<Device>,
    other: Arc<Device>,
    levels: Levels,
}

/// Returns what is wrong, without the bits.
fn said(found: &Found) -> &str {
    found.as_ref().map_or_else(String::as_str, |_| "the bits differ")
}

/// Computes on a new device, with a mutation at one place.
fn scenario(
    driver: &Driver,
    cache: &Path,
    compute: Computation,
    seed: u64,
    (mutation, at): (Mutation, i64),
) -> Found {
    driver.mutate(Mutation::Nothing, 0);
    driver.seed(seed);
    let open = || Device::open(0, Some(cache)).expect("it opens");
    let (device, other) = (open(), open());
    let levels = levels(&device.clone().into());
    let place = Place { device, other, levels };
    let device = &place.device;
    // What is tried when devices are opened is not for mutations.
    [device, &place.other].into_iter().for_each(|device| device.settle().expect("it works"));
    driver.mutate(mutation, at);
    let run = catch_unwind(AssertUnwindSafe(|| {
        let values = compute(Some(&place));
        // What is queued gives back the memory that is asked for.
        for _ in 0..2 {
            let most = Storage::on_device(device, DType::F32, MOST / 4 + 1);
            drop(most.map_err(|error| error.to_string())?);
        }
        let one = |device| Storage::on_device(device, DType::F32, 1).map_err(|error| error.to_string());
        let (mut storage, mut other) = (one(device)?, one(&place.other)?);
        other.fill(1.0);
        if *other.bytes() != 1_f32.to_le_bytes() {
            return Err("the other device computes wrong".to_owned());
        }
        driver.breaks(ILLEGAL_ADDRESS);
        storage.fill(1.0);
        let settled = device.settle();
        driver.breaks(0);
        if settled.is_ok() {
            return Err("a failure of a kernel is not reported".to_owned());
        }
        // They have not run when the devices are closed.
        storage.fill(2.0);
        other.fill(2.0);
        Ok(values)
    }));
    drop(place);
    match run {
        Ok(result) => driver.harm().map_or(result, |harm| Err(harm.to_owned())),
        // Without a mutation it is a fault of this test.
        Err(panic) if mutation == Mutation::Nothing => resume_unwind(panic),
        Err(_) => Err("a panic".to_owned()),
    }
}

/// Copies bytes of the host over a part of what kernels write before and read after, and reads a
/// part back. The copies take more than the pieces of page-locked memory.
fn placed(place: Option<&Place>) -> Vec<Vec<u32>> {
    let (mut values, mut sum, mut short) = (zeros_of(place, LONG), zeros_of(place, LONG), zeros(place));
    values.fill(2.0);
    for number in 1..3 {
        // The sum of the turn before has not read the values yet.
        with_payload(LONG - 100 * number, 0.1 * number as f32, |payload| values.place(52 * number, payload));
        sum.merge(Operand::Stored(&values), Merge::Sum(WireType::F32));
    }
    with_payload(LONG, 0.3, |payload| sum.merge(Operand::Payload(payload), Merge::Sum(WireType::F32)));
    // Every piece of the copies before is used again.
    for number in 0..5 {
        with_payload(LENGTH, number as f32, |payload| {
            short.merge(Operand::Payload(payload), Merge::Sum(WireType::F32));
        });
    }
    let mut part = Storage::zeros(DType::F32, LENGTH);
    part.receive_part(&sum, 4 * LENGTH, 4 * LENGTH - 8).expect("it works");
    [values, sum, short, part].iter().map(bits).collect()
}

/// Reads sealed values while the device has other ones to compute, and changes them afterwards.
fn sealed(place: Option<&Place>) -> Vec<Vec<u32>> {
    let (mut values, mut later) = (zeros(place), zeros(place));
    let mut found = Vec::new();
    for number in 1..3 {
        // What was read before is changed by this.
        with_payload(LENGTH, 0.1 * number as f32, |payload| {
            values.merge(Operand::Payload(payload), Merge::Sum(WireType::F32));
        });
        values.scale(0.3);
        values.seal();
        later.merge(Operand::Stored(&values), Merge::Sum(WireType::F32));
        for wire in [WireType::F32, WireType::Bf16, WireType::F16] {
            let part = values.read_part(wire, 4 * number..4 * (LENGTH - number)).expect("it works");
            found.push(part.iter().map(|byte| u32::from(*byte)).collect());
        }
    }
    // The reads have not waited for it.
    drop(values);
    found.push(bits(&later));
    found
}

/// Takes over what another library computes on a stream of its own. The host waits for the end
/// alone.
#[expect(unsafe_code, reason = "another library of the process calls the driver too")]
fn taken_over(place: Option<&Place>) -> Vec<Vec<u32>> {
    use cudarc::driver::{result, sys};
    const BYTES: usize = 4 * LENGTH;
    let mut values = zeros(place);
    let Some(Place { device, .. }) = place else {
        values.place(0, &[63; BYTES]);
        values.scale(0.3);
        return vec![bits(&values)];
    };
    // SAFETY: nothing else knows of what is made here, and it is given up when nothing uses it.
    unsafe {
        let stream = result::stream::create(result::stream::StreamKind::NonBlocking).expect("a stream");
        let memory = result::malloc_sync(BYTES).expect("memory");
        result::memset_d8_async(memory, 63, BYTES, stream).expect("it works");
        let event = result::event::create(sys::CUevent_flags::CU_EVENT_DISABLE_TIMING).expect("an event");
        result::event::record(event, stream).expect("it works");
        let foreign = kernels::Device::from(device.clone()).foreign(event.cast()).expect("it works");
        result::event::destroy(event).expect("it works");
        foreign.wait().expect("it works");
        values.copy_from_foreign(memory);
        values.scale(0.3);
        let found = vec![bits(&values)];
        result::stream::destroy(stream).expect("it works");
        result::free_sync(memory).expect("it works");
        found
    }
}

/// Makes floats of bytes, as the inputs of a model are made. The bytes are others when the call
/// with them returns. What was uploaded is used before the next upload, which would wait for it
/// too.
fn looked_up(place: Option<&Place>) -> Vec<Vec<u32>> {
    let here = levels(&kernels::Device::default());
    let levels = place.map_or(&here, |place| &place.levels);
    let of = |number: u8| {
        let mut bytes: Vec<u8> = (0..LENGTH).map(|at| (at * 7) as u8 ^ number).collect();
        let mut floats = levels.of(&bytes).expect("memory");
        bytes.fill(0);
        floats.scale(0.7);
        bits(&floats)
    };
    (1..4).map(of).collect()
}

/// Returns levels with several tables and short runs. The device has them.
fn levels(device: &kernels::Device) -> Levels {
    let levels = Levels::new(device, &sines(0.1, 3 * 256), 5).expect("memory");
    device.settle().expect("it works");
    levels
}

/// Moves values between devices of two processes, which are one here. The first one exports memory.
/// The second one writes a part, the first one another, and both read what the other wrote.
fn crossed(place: Option<&Place>) -> Vec<Vec<u32>> {
    let Some(Place { device, other, .. }) = place else {
        let mut exported = zeros_of(None, LENGTH);
        let mut part = Storage::zeros(DType::F32, PART);
        part.fill(3.0);
        with_payload(PART, 0.1, |payload| part.merge(Operand::Payload(payload), Merge::Sum(WireType::F32)));
        exported.place(0, &part.bytes());
        let mut sum = zeros_of(None, LENGTH);
        sum.merge(Operand::Stored(&exported), Merge::Sum(WireType::F32));
        with_payload(PART, 0.2, |payload| exported.place(PART * 4, payload));
        let mut there = Storage::zeros(DType::F32, PART);
        there.fill(10.0);
        with_payload(PART, 0.2, |payload| there.merge(Operand::Payload(payload), Merge::Sum(WireType::F32)));
        return [part, there, sum, exported].iter().map(bits).collect();
    };
    let (mut exported, handle) = Storage::exported(device, DType::F32, LENGTH).expect("memory");
    let opened = Arc::new(Opened::open(other, DType::F32, &handle).expect("the driver passes it"));
    let on_other = |value| {
        let mut storage = Storage::on_device(other, DType::F32, PART).expect("memory");
        storage.fill(value);
        storage
    };

    let mut values = on_other(3.0);
    with_payload(PART, 0.1, |payload| values.merge(Operand::Payload(payload), Merge::Sum(WireType::F32)));
    opened.part(DType::F32, 0, PART * 4).write(Operand::Stored(&values));
    drop(values);
    other.settle().expect("it works");

    let mut part = Storage::zeros(DType::F32, PART);
    part.receive_part(&exported, 0, PART * 4).expect("it works");
    let mut sum = zeros_of(place, LENGTH);
    sum.merge(Operand::Stored(&exported), Merge::Sum(WireType::F32));
    // The sum has not read it before.
    with_payload(PART, 0.2, |payload| exported.place(PART * 4, payload));
    device.settle().expect("it works");

    let mut there = on_other(10.0);
    there.merge(Operand::Stored(&opened.part(DType::F32, PART * 4, PART * 4)), Merge::Sum(WireType::F32));
    // The sum has not read it before.
    drop(opened);
    let mut found = vec![bits(&part), bits(&there), bits(&sum)];
    sum.write(Operand::Stored(&exported));
    // Nothing has read it before.
    drop(exported);
    found.push(bits(&sum));
    found
}

/// Adds values on a device without pools, which frees memory only when nothing runs.
fn summed(place: Option<&Place>) -> Vec<Vec<u32>> {
    let mut sum = zeros(place);
    with_payload(LENGTH, 0.1, |payload| sum.write(Operand::Payload(payload)));
    let mut other = zeros(place);
    other.fill(2.0);
    sum.merge(Operand::Stored(&other), Merge::Sum(WireType::F32));
    // The sum has not read it yet.
    drop(other);
    vec![bits(&sum)]
}

/// Trains a chunk for two steps, with every kind of operation. Every payload is overwritten when
/// the call with it returns. Returns weights, slots and what was sent.
fn trained(place: Option<&Place>) -> Vec<Vec<u32>> {
    let spec = OptimizerSpec::new(OptimizerKind::Lamb, 0.03);
    let optimizer = Optimizer::new(&spec, 50).expect("valid");
    let layout = Layout::new(vec![TensorSpec::parameter("w", [LENGTH])], 1).expect("a model");
    let mut weights = zeros(place);
    with_payload(LENGTH, 0.1, |payload| weights.write(Operand::Payload(payload)));
    let mut slots: Vec<_> = (0..optimizer.slots()).map(|_| zeros(place)).collect();
    let mut sent = Vec::new();
    for step in 0..2 {
        let factor = 0.2 + step as f32;
        let mut first = zeros(place);
        let halves: Vec<u16> = (0..LENGTH).map(|at| 0x3f80 + at as u16 % 64).collect();
        first.decode(bytemuck::cast_slice(&halves), WireType::Bf16);
        with_payload(LENGTH, factor, |payload| {
            first.merge(Operand::Payload(payload), Merge::Sum(WireType::F16));
        });
        // More than there are pieces of page-locked memory.
        for number in 0..6 {
            with_payload(LENGTH, factor - number as f32, |payload| {
                first.merge(Operand::Payload(payload), Merge::Sum(WireType::F32));
            });
        }
        let mut second = zeros(place);
        with_payload(LENGTH, factor + 0.3, |payload| {
            second.merge_of(Operand::Stored(&first), Operand::Payload(payload), Merge::Sum(WireType::F32));
        });
        second.round(WireType::Bf16);
        // Nothing has read it yet.
        drop(first);
        let squares = optimizer.prepare(step, 0.25).measure(&weights, Operand::Stored(&second), &slots);
        let update =
            optimizer.prepare(step, 0.25).with_norms(&layout, &[(ChunkId(0), squares)], &[ChunkId(0)])[0];
        let mut next = zeros(place);
        let mut there: Vec<_> = slots.iter().map(|_| zeros(place)).collect();
        let given: Vec<_> = slots.iter().zip(&mut there).map(|(from, to)| Slot::Moved { from, to }).collect();
        update.apply(&weights, Operand::Stored(&second), given, &mut next);
        (weights, slots) = (next, there);
        drop(second);
        let mut mean = zeros(place);
        mean.mean_of(Operand::Stored(&weights), 3);
        // A copy in place of the weights, whose memory is freed while nothing has run.
        let mut copy = zeros(place);
        copy.write(Operand::Stored(&mean));
        drop(mean);
        sent.push(copy.encode(WireType::F16).iter().map(|byte| u32::from(*byte)).collect());
    }
    weights.round(WireType::Bf16);
    sent.extend(std::iter::once(&weights).chain(&slots).map(bits));
    sent.extend(layer(place));
    sent
}

/// Computes a dense layer forth and back, with weights that change between two products. Whatever
/// was uploaded is used before the next upload, which would wait for it too.
fn layer(place: Option<&Place>) -> Vec<Vec<u32>> {
    let (records, inputs, outputs) = (10, 20, 30);
    let stored = |factor: f32, length: usize| {
        let mut values = sines(factor, length);
        let mut storage = match place {
            Some(Place { device, .. }) => Storage::uploaded(device, &values).expect("memory"),
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
    with_payload(LENGTH, 0.2, |payload| w.place(0, payload));
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

fn zeros(place: Option<&Place>) -> Storage {
    zeros_of(place, LENGTH)
}

fn zeros_of(place: Option<&Place>, length: usize) -> Storage {
    match place {
        Some(Place { device, .. }) => Storage::on_device(device, DType::F32, length).expect("memory"),
        None => Storage::zeros(DType::F32, length),
    }
}

/// Calls an operation with a payload, and overwrites the payload when the call returns.
fn with_payload(length: usize, factor: f32, operation: impl FnOnce(&[u8])) {
    let mut payload: Vec<f32> = (0..length).map(|at| at as f32 * factor % 7.0 - 3.0).collect();
    operation(bytemuck::cast_slice(&payload));
    payload.fill(f32::NAN);
}

fn bits(storage: &Storage) -> Vec<u32> {
    storage.bytes().as_chunks().0.iter().map(|value| u32::from_le_bytes(*value)).collect()
}
