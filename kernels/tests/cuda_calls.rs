//! A step on a device makes as many launches, waits and allocations for many chunks as for one. A
//! read waits for nothing that the device was told after the values were sealed.
//!
//! The driver of `tests/cuda/driver.cpp` counts them.

use std::ffi::CStr;

use kernels::{Device, Error, Gradient, Measurement, Operand, Optimizer, Pass, Slot, Storage, Update};
use proto::ids::ChunkId;
use proto::optimizer::{OptimizerKind, OptimizerSpec};
use proto::placement::Layout;
use proto::tensor::{DType, TensorSpec};
use proto::wire::WireType;

use self::fake::{Call, Driver};

#[path = "cuda/fake.rs"]
#[allow(dead_code, unreachable_pub, reason = "shared with the tests of devices")]
mod fake;
#[path = "cuda/library.rs"]
#[allow(unreachable_pub, reason = "shared with the tests of the library")]
mod library;
#[allow(dead_code, unreachable_pub, reason = "shared with the tests of the whole program")]
#[path = "../../tests/harness/skip.rs"]
mod skip;

/// Launches, waits and allocations.
type Calls = [i64; 3];

/// A model whose tensors have a chunk each.
struct Model {
    layout: Layout,
    chunks: Vec<Chunk>,
}

struct Chunk {
    weights: Storage,
    left: Storage,
    right: Storage,
    slots: Vec<Storage>,
    next: Storage,
}

/// One test, because the driver counts the calls of all threads.
#[test]
fn a_step_makes_as_many_calls_for_many_chunks_as_for_one() {
    library::load_nvrtc();
    let driver = Driver::load();
    let device = match Device::cuda(0, None) {
        Ok(device) => device,
        Err(Error::NoCompiler) => {
            return skip::skipped(skip::Lacks::Package, "no NVRTC: no call was counted");
        }
        Err(error) => panic!("{error}"),
    };
    let clipped = OptimizerSpec { clip_norm: Some(0.5), ..OptimizerSpec::new(OptimizerKind::Momentum, 0.1) };
    let others = [OptimizerKind::Adam, OptimizerKind::Lamb].map(|kind| OptimizerSpec::new(kind, 0.1));
    for spec in others.into_iter().chain([clipped]) {
        let optimizer = Optimizer::new(&spec, 10).expect("valid");
        for halves in [false, true] {
            // The first steps on a device allocate its page-locked memory.
            let calls = [4, 1, 37].map(|chunks| {
                let lengths: Vec<_> = (0..chunks).map(|number| 3 + number + 700 * (number % 4)).collect();
                let [mut here, mut there] = Model::twins(&device, &optimizer, &lengths);
                step(driver, &device, &optimizer, [&mut here, &mut there], halves)
            });
            // Each launch has a table. Its copy to the device waits until a piece of page-locked
            // memory is free. The host waits for norms, and for the end.
            let needs_norms = optimizer.prepare(0, 1.0).needs_norms();
            let expected = if needs_norms { [2, 4, 3] } else { [1, 2, 1] };
            assert_eq!(calls[1..], [expected; 2], "{spec:?}, halves: {halves}");
        }
    }
    a_read_waits_once_for_many_chunks(driver, &device);
    sealed_values_are_read_while_later_operations_wait(driver, &device);
    a_sealed_read_that_fails_is_an_error_and_too_little_memory_disturbs_nothing(driver);
    gradients_on_the_host_are_copied_a_few_at_a_time(driver, &device);
}

/// Makes a step of a model on the device, and of an equal one on the host chunk by chunk. Compares
/// the bits. Returns the calls of the driver for the update.
fn step(
    driver: &Driver,
    device: &Device,
    optimizer: &Optimizer,
    [here, there]: [&mut Model; 2],
    halves: bool,
) -> Calls {
    device.settle().expect("nothing failed");
    driver.count();
    let update = optimizer.prepare(1, 0.3);
    let updates = there.updates(&update, |chunks| Update::measure_all(3, chunks.collect()), halves);
    let passes = there.chunks.iter_mut().zip(updates).map(|(chunk, update)| chunk.pass(update, halves));
    Update::apply_all(3, passes.collect());
    device.settle().expect("nothing failed");
    let calls = [Call::Launch, Call::Wait, Call::Allocation].map(|call| driver.called(call));

    let updates = here.updates(&update, |chunks| chunks.map(alone).collect(), halves);
    for (chunk, update) in here.chunks.iter_mut().zip(updates) {
        let Pass { update, weights, gradient, slots, next } = chunk.pass(update, halves);
        match gradient {
            Gradient::Sum(sum) => update.apply(weights, sum, slots, next),
            Gradient::Halves(left, right) => update.apply_halves(weights, (left, right), slots, next),
        }
    }
    for (here, there) in here.chunks.iter().zip(&there.chunks) {
        let values = |chunk: &Chunk| -> Vec<_> {
            let slots = chunk.slots.iter().map(|slot| slot.bytes().into_owned());
            slots.chain([chunk.next.bytes().into_owned()]).collect()
        };
        assert!(values(here) == values(there), "{optimizer:?}, halves: {halves}");
    }
    calls
}

/// Measures one chunk on the host, with a sum that is made before.
fn alone(chunk: Measurement<'_>) -> kernels::Squares {
    let Measurement { update, weights, gradient, slots } = chunk;
    match gradient {
        Gradient::Sum(sum) => update.measure(weights, sum, slots),
        Gradient::Halves(left, right) => {
            let mut sum = Storage::zeros(DType::F32, weights.len());
            sum.merge_of(left, right, kernels::Merge::root(DType::F32));
            update.measure(weights, Operand::Stored(&sum), slots)
        }
    }
}

impl Model {
    /// Returns two equal models, one on the host and one on the device.
    fn twins(device: &Device, optimizer: &Optimizer, lengths: &[usize]) -> [Self; 2] {
        [&Device::default(), device].map(|device| Self::new(device, optimizer, lengths))
    }

    fn new(device: &Device, optimizer: &Optimizer, lengths: &[usize]) -> Self {
        let tensor = |(number, &length)| TensorSpec::parameter(format!("w{number}"), [length]);
        let tensors = lengths.iter().enumerate().map(tensor);
        let layout = Layout::new(tensors.collect(), 1).expect("a model");
        let chunks = lengths.iter().map(|&length| {
            let values = |seed: f32| {
                let values: Vec<f32> = (0..length).map(|at| (at as f32 * 0.3 + seed).sin()).collect();
                let mut storage = device.zeros(DType::F32, length).expect("memory");
                storage.write(Operand::Payload(bytemuck::cast_slice(&values)));
                storage
            };
            let slot = |_| {
                let mut slot = device.zeros(DType::F32, length).expect("memory");
                slot.fill(0.25);
                slot
            };
            let slots = (0..optimizer.slots()).map(slot).collect();
            Chunk { weights: values(1.0), left: values(2.0), right: values(3.0), slots, next: values(4.0) }
        });
        Self { layout, chunks: chunks.collect() }
    }

    /// Returns the update of each chunk, with norms over the model if it needs them.
    fn updates(
        &self,
        update: &Update,
        measure: impl FnOnce(&mut dyn Iterator<Item = Measurement<'_>>) -> Vec<kernels::Squares>,
        halves: bool,
    ) -> Vec<Update> {
        if !update.needs_norms() {
            return vec![*update; self.chunks.len()];
        }
        let squares = measure(&mut self.chunks.iter().map(|chunk| chunk.measurement(*update, halves)));
        let ids: Vec<_> = (0..self.chunks.len() as u32).map(ChunkId).collect();
        let squares: Vec<_> = ids.iter().copied().zip(squares).collect();
        update.with_norms(&self.layout, &squares, &ids)
    }
}

impl Chunk {
    fn measurement(&self, update: Update, halves: bool) -> Measurement<'_> {
        let gradient = gradient(&self.left, &self.right, halves);
        Measurement { update, weights: &self.weights, gradient, slots: self.slots.iter().collect() }
    }

    fn pass(&mut self, update: Update, halves: bool) -> Pass<'_> {
        let gradient = gradient(&self.left, &self.right, halves);
        let slots = self.slots.iter_mut().map(Slot::InPlace).collect();
        Pass { update, weights: &self.weights, gradient, slots, next: &mut self.next }
    }
}

fn gradient<'a>(left: &'a Storage, right: &'a Storage, halves: bool) -> Gradient<'a> {
    let (left, right) = (Operand::Stored(left), Operand::Stored(right));
    if halves { Gradient::Halves(left, right) } else { Gradient::Sum(left) }
}

/// A pull reads all chunks of a version.
fn a_read_waits_once_for_many_chunks(driver: &Driver, device: &Device) {
    let optimizer = Optimizer::new(&OptimizerSpec::new(OptimizerKind::Sgd, 0.1), 10).expect("valid");
    for chunks in [1, 37] {
        let model = Model::new(device, &optimizer, &(1..=chunks).collect::<Vec<_>>());
        let mut read: Vec<_> =
            model.chunks.iter().map(|chunk| Storage::zeros(DType::F32, chunk.weights.len())).collect();
        driver.count();
        let pairs = read.iter_mut().zip(&model.chunks).map(|(to, chunk)| (to, &chunk.weights));
        Storage::receive_all(pairs.collect()).expect("nothing failed");
        assert_eq!([Call::Launch, Call::Wait, Call::Allocation].map(|call| driver.called(call)), [0, 1, 0]);
        assert!(read.iter().zip(&model.chunks).all(|(read, chunk)| read.bytes() == chunk.weights.bytes()));
    }
}

/// A backward pass goes on while gradients that it has made are sent.
fn sealed_values_are_read_while_later_operations_wait(driver: &Driver, device: &Device) {
    let floats: Vec<f32> = (0..700).map(|at| (at as f32 * 0.3).sin()).collect();
    let mut here = Storage::from(floats.clone());
    let mut there = device.zeros(DType::F32, floats.len()).expect("memory");
    let mut later = device.zeros(DType::F32, floats.len()).expect("memory");
    there.write(Operand::Payload(bytemuck::cast_slice(&floats)));
    device.settle().expect("nothing failed");
    let part = 4..4 * 600;
    for wire in [WireType::F32, WireType::Bf16, WireType::F16] {
        here.scale(0.7);
        there.scale(0.7);
        there.seal();
        later.fill(3.0);
        for _ in 0..2 {
            let read = there.read_part(wire, part.clone()).expect("nothing failed");
            assert!(read == here.read_part(wire, part.clone()).expect("the host"), "{wire:?}");
            assert_eq!(driver.waiting(), 1, "the fill has not run, {wire:?}");
        }
    }
    // What was sealed may change. Then a read waits for the change, which follows the fill.
    here.scale(0.5);
    there.scale(0.5);
    assert!(there.read_part(WireType::F32, part.clone()).expect("nothing failed") == here.bytes()[part]);
    assert_eq!(driver.waiting(), 0, "the fill has run");
    device.settle().expect("nothing failed");
    assert!(later.bytes() == Storage::from(vec![3.0; floats.len()]).bytes());
}

/// What fails during a read of sealed values is told, or the values are right.
fn a_sealed_read_that_fails_is_an_error_and_too_little_memory_disturbs_nothing(driver: &Driver) {
    const OUT_OF_MEMORY: i32 = 2;
    const ILLEGAL_ADDRESS: i32 = 700;
    let filled = |device: &Device| {
        let mut storage = device.zeros(DType::F32, 50).expect("memory");
        storage.fill(3.0);
        storage
    };
    // The second call too, which is made when the device has run everything.
    let fail = |function: &CStr, error| driver.fail(function, 0, 2, error);
    let nothing = || driver.fail(c"", 0, 0, 0);
    let read = |storage: &Storage| storage.read_part(WireType::Bf16, 0..200);

    let device = Device::cuda(0, None).expect("it opens");
    let mut storage = filled(&device);
    storage.seal();
    fail(c"cuMemAllocAsync", OUT_OF_MEMORY);
    let refused = read(&storage);
    nothing();
    assert!(matches!(refused, Err(Error::OutOfMemory { .. })), "{refused:?}");
    device.settle().expect("the device goes on");
    assert_eq!(read(&storage).expect("there is memory"), [64, 64].repeat(50));
    drop((storage, device));

    for function in [
        c"cuEventCreate",
        c"cuEventRecord",
        c"cuEventSynchronize",
        c"cuMemAllocAsync",
        c"cuLaunchKernel",
        c"cuMemcpyDtoHAsync_v2",
        c"cuStreamSynchronize",
        c"cuMemFreeAsync",
    ] {
        let device = Device::cuda(0, None).expect("it opens");
        let mut storage = filled(&device);
        fail(function, ILLEGAL_ADDRESS);
        storage.seal();
        let failed = read(&storage);
        assert!(failed.is_err() && driver.calls(function) > 0, "{function:?}: {failed:?}");
        device.settle().expect_err("the device has failed");
        // It works again only when nothing is left that it was told.
        drop((storage, device));
        nothing();
    }
}

/// All gradients at once find no room on the device.
fn gradients_on_the_host_are_copied_a_few_at_a_time(driver: &Driver, device: &Device) {
    const CHUNKS: usize = 24;
    let spec = OptimizerSpec { clip_norm: Some(0.5), ..OptimizerSpec::new(OptimizerKind::Momentum, 0.1) };
    let optimizer = Optimizer::new(&spec, 10).expect("valid");
    driver.memory(1 << 30);
    let [mut here, mut there] = Model::twins(device, &optimizer, &[1 << 18; CHUNKS]);
    for (here, there) in here.chunks.iter().zip(&mut there.chunks) {
        let mut left = Storage::zeros(DType::F32, here.left.len());
        left.write(Operand::Stored(&here.left));
        there.left = left;
    }
    device.settle().expect("nothing failed");
    // Each chunk has weights, a half, a slot and the next weights there.
    driver.memory((4 * CHUNKS + CHUNKS / 2) << 20);
    step(driver, device, &optimizer, [&mut here, &mut there], false);
}
