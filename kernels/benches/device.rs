//! CUDA device 0: updates and norms of 1 Gi parameters beside a copy within the device and beside
//! `torch.optim.Adam(fused=True)`, and copies across the bus beside those of the driver from and to
//! page-locked memory. `EBB_PYTHON` names a Python with PyTorch; without one its row is missing.
//! Then the device beside one core of the host: an update of fewer chunks, and copies both ways.
//!
//! Each line is a name, a value and a unit, with tabs between them. `cargo xtask gpu` puts them
//! into its report. Without a device it says why, and that is no failure. With the argument
//! `--bench`, which cargo gives, it measures; otherwise it shows that it works.
//!
//! The limit of an update is the memory of the device. A copy within the device is the peer: its
//! bytes count twice, as they are read and written. A ratio divides bytes per second by bytes per
//! second of the copy that runs right after it. `docs/performance.md` has the bytes and the limit.

#![expect(unsafe_code, reason = "the peer calls the driver itself")]

use std::hint::black_box;
use std::slice;
use std::time::Instant;

use cudarc::driver::result::{self, stream};
use cudarc::driver::sys;
use kernels::{Device, Gradient, Measurement, Operand, Optimizer, Pass, Slot, Storage, Update};
use proto::optimizer::{OptimizerKind, OptimizerSpec};
use proto::tensor::DType;

#[path = "../../benches/support/fused.rs"]
mod fused;

use fused::Peer;

/// Values of a chunk of 1 MiB.
const LEN: usize = 1 << 18;

/// Bytes of a chunk.
const CHUNK_BYTES: f64 = (LEN * 4) as f64;

/// Bytes that adam moves for each byte of weights.
const ADAM: f64 = 7.0;

/// Chunks of 1 Gi parameters.
const CHUNKS_MAX: usize = 4096;

/// Chunks that a device holds for each chunk of the model: weights, two halves of the gradient, two
/// slots, the next weights, and both sides of a copy.
const HELD: usize = 8;

/// Chunks at a time, and how often they are measured.
struct Size {
    chunks: usize,
    rounds: usize,
}

/// One part of a model, as a ps holds it.
struct Chunk {
    weights: Storage,
    halves: [Storage; 2],
    slots: Vec<Storage>,
    next: Storage,
}

fn main() {
    let measures = std::env::args().any(|argument| argument == "--bench");
    let device = match Device::cuda(0, None) {
        Ok(device) => device,
        Err(reason) => return println!("no device is measured: {reason}"),
    };
    let chunks = if measures { chunks_that_fit(&device) } else { 2 };
    at_memory_speed(&device, &Size { chunks, rounds: if measures { 9 } else { 1 } });

    if measures {
        beside_pytorch(&device, &Size { chunks, rounds: 5 });
    }
    across_the_bus(
        &device,
        &Size { chunks: if measures { 1024 } else { 2 }, rounds: if measures { 9 } else { 1 } },
    );

    let size = if measures { Size { chunks: 256, rounds: 9 } } else { Size { chunks: 2, rounds: 1 } };
    for (place, device) in [("device", &device), ("one core", &Device::default())] {
        let gib = |bytes: f64, seconds: f64| bytes / seconds / f64::from(1_u32 << 30);
        let bytes = size.chunks as f64 * CHUNK_BYTES;
        println!(
            "adam, {} chunks, {place}\t{:.1}\tGiB/s",
            size.chunks,
            gib(ADAM * bytes, adam(device, &size))
        );
        println!("values to the {place}\t{:.1}\tGiB/s", gib(bytes, writes(device, &size)));
        println!("values from the {place}\t{:.1}\tGiB/s", gib(bytes, reads(device, &size)));
    }
}

/// Returns how many chunks of a model fit on the device, of [`CHUNKS_MAX`].
fn chunks_that_fit(device: &Device) -> usize {
    let (free, _) = device.memory().expect("the driver says it").expect("it is no host");
    // The driver and the tables of launches need some.
    let room = free / 8 * 7;
    (room as usize / (HELD * LEN * 4)).clamp(1, CHUNKS_MAX)
}

/// Prints the speed of updates and norms of a whole model, each beside a copy.
fn at_memory_speed(device: &Device, size: &Size) {
    let optimizer = |kind| Optimizer::new(&OptimizerSpec::new(kind, 1e-3), 1000).expect("valid");
    let clipped = OptimizerSpec { clip_norm: Some(1.0), ..OptimizerSpec::new(OptimizerKind::Adam, 1e-3) };
    let clipped = Optimizer::new(&clipped, 1000).expect("valid");
    let (adam, lamb) = (optimizer(OptimizerKind::Adam), optimizer(OptimizerKind::Lamb));
    let mut chunks: Vec<_> = (0..size.chunks).map(|_| Chunk::new(device, &adam)).collect();
    let large = || device.zeros(DType::F32, size.chunks * LEN).expect("the device has room for a copy");
    let mut copy = (large(), large());
    settle(device);

    let mut print = |name: &str, bytes_for_each: f64, act: &mut dyn FnMut(&mut [Chunk])| {
        let bytes = size.chunks as f64 * CHUNK_BYTES;
        let mut rounds: Vec<[f64; 3]> = Vec::new();
        for _ in 0..=size.rounds {
            let mut queued = 0.0;
            let acted = seconds(|| {
                queued = seconds(|| act(&mut chunks));
                settle(device);
            });
            let copied = seconds(|| {
                copy.1.write(Operand::Stored(&copy.0));
                settle(device);
            });
            let (speed, of_copy) = (bytes_for_each * bytes / acted, 2.0 * bytes / copied);
            rounds.push([speed / of_copy, speed / f64::from(1_u32 << 30), queued * 1e3]);
        }
        // The first round does not count.
        let median = |number: usize| {
            let mut values: Vec<_> = rounds[1..].iter().map(|round| round[number]).collect();
            values.sort_by(f64::total_cmp);
            values[values.len() / 2]
        };
        let name = format!("{name}, {} chunks", size.chunks);
        println!("{name}, of a copy within the device\t{:.3}\tratio", median(0));
        println!("{name}\t{:.1}\tGiB/s", median(1));
        println!("{name}, until the call returns\t{:.2}\tms", median(2));
    };
    print("adam", ADAM, &mut |chunks| apply(adam.prepare(7, 0.125), chunks, false));
    print("adam on halves", ADAM + 1.0, &mut |chunks| apply(adam.prepare(7, 0.125), chunks, true));
    print("norm of the gradient", 1.0, &mut |chunks| measure(clipped.prepare(7, 0.125), chunks));
    print("norms of lamb", 4.0, &mut |chunks| measure(lamb.prepare(7, 0.125), chunks));
}

/// Prints the speed of copies from and to the host, each beside one of the driver alone.
fn across_the_bus(device: &Device, size: &Size) {
    let floats = size.chunks * LEN;
    let mut there = device.zeros(DType::F32, floats).expect("the device has room for a copy");
    let (mut locked, ordinary) = (device.staging(DType::F32, floats), vec![1_u8; floats * 4]);
    let driver = Driver::new(device, floats * 4);
    let print = |name: &str, act: &mut dyn FnMut(), peer: &dyn Fn()| {
        let mut ratios = Vec::new();
        for _ in 0..=size.rounds {
            let acted = seconds(&mut *act);
            ratios.push([seconds(peer) / acted, (floats * 4) as f64 / acted / f64::from(1_u32 << 30)]);
        }
        let median = |number: usize| {
            let mut values: Vec<_> = ratios[1..].iter().map(|ratio| ratio[number]).collect();
            values.sort_by(f64::total_cmp);
            values[values.len() / 2]
        };
        println!("{name}, of the driver's copy (target 0.9)\t{:.3}\tratio", median(0));
        println!("{name}\t{:.1}\tGiB/s", median(1));
    };
    print("values to page-locked memory", &mut || locked.receive(&there).expect("the device works"), &|| {
        driver.download();
    });
    let mut place = |bytes: &[u8]| {
        there.place(0, bytes);
        settle(device);
    };
    print("values from ordinary memory", &mut || place(black_box(&ordinary)), &|| driver.upload());
    print("values from page-locked memory", &mut || place(&locked.bytes()), &|| driver.upload());
}

/// The driver itself, with memory of the device and page-locked memory of its own, for as long as
/// the process lives.
struct Driver {
    device: u64,
    host: *mut u8,
    bytes: usize,
    stream: sys::CUstream,
}

impl Driver {
    fn new(device: &Device, bytes: usize) -> Self {
        // The calls before have bound this thread to the device.
        settle(device);
        // SAFETY: the memory is nobody else's, and there are so many bytes.
        unsafe {
            let host = result::malloc_host(bytes, 0).expect("the system locks so much memory").cast::<u8>();
            host.write_bytes(1, bytes);
            let memory = result::malloc_sync(bytes).expect("the device has room for a copy");
            let stream = stream::create(stream::StreamKind::NonBlocking).expect("a stream");
            Self { device: memory, host, bytes, stream }
        }
    }

    fn upload(&self) {
        // SAFETY: both have so many bytes, and nothing else uses them before the stream has ended.
        unsafe {
            let host = slice::from_raw_parts(self.host, self.bytes);
            result::memcpy_htod_async(self.device, host, self.stream).expect("a copy");
            stream::synchronize(self.stream).expect("the device works");
        }
    }

    fn download(&self) {
        // SAFETY: both have so many bytes, and nothing else uses them before the stream has ended.
        unsafe {
            let host = slice::from_raw_parts_mut(self.host, self.bytes);
            result::memcpy_dtoh_async(host, self.device, self.stream).expect("a copy");
            stream::synchronize(self.stream).expect("the device works");
        }
    }
}

/// Prints the speed of Adam beside that of PyTorch, in another process on the same device.
fn beside_pytorch(device: &Device, size: &Size) {
    // PyTorch has no room beside the largest model: weights, gradient and two slots.
    let chunks = size.chunks * HELD / (HELD + 4);
    let Some(mut peer) = Peer::start(chunks * LEN, &format!("cuda:{}", device.ordinal().unwrap_or(0))) else {
        return;
    };
    let optimizer = Optimizer::new(&OptimizerSpec::new(OptimizerKind::Adam, 1e-3), 1000).expect("valid");
    let mut held: Vec<_> = (0..chunks).map(|_| Chunk::new(device, &optimizer)).collect();
    settle(device);
    let mut ratios = Vec::new();
    for _ in 0..=size.rounds {
        let ours = seconds(|| {
            apply(optimizer.prepare(7, 0.125), &mut held, false);
            settle(device);
        });
        let steps = peer.steps(1);
        ratios.push(steps.iter().sum::<f64>() / steps.len() as f64 / ours);
    }
    ratios.remove(0);
    ratios.sort_by(f64::total_cmp);
    let name = format!("adam, {chunks} chunks, of torch.optim.Adam(fused=True) (target 1.0)");
    println!("{name}\t{:.3}\tratio", ratios[ratios.len() / 2]);
}

impl Chunk {
    fn new(device: &Device, optimizer: &Optimizer) -> Self {
        let slots = (0..optimizer.slots()).map(|_| zeros(device)).collect();
        let halves = [zeros(device), zeros(device)];
        Self { weights: zeros(device), halves, slots, next: zeros(device) }
    }
}

fn apply(update: Update, chunks: &mut [Chunk], on_halves: bool) {
    let passes = chunks.iter_mut().map(|Chunk { weights, halves: [left, right], slots, next }| {
        let (left, right) = (Operand::Stored(left), Operand::Stored(right));
        let gradient = if on_halves { Gradient::Halves(left, right) } else { Gradient::Sum(left) };
        let slots = slots.iter_mut().map(Slot::InPlace).collect();
        Pass { update, weights, gradient, slots, next }
    });
    Update::apply_all(1, passes.collect());
}

/// Measures chunks for an update with two slots.
fn measure(update: Update, chunks: &[Chunk]) {
    let chunks = chunks.iter().map(|Chunk { weights, halves: [left, _], slots, .. }| {
        let gradient = Gradient::Sum(Operand::Stored(left));
        Measurement { update, weights, gradient, slots: slots.iter().collect() }
    });
    black_box(Update::measure_all(1, chunks.collect()));
}

/// Returns how long something takes.
#[expect(clippy::disallowed_methods, reason = "a bench measures time")]
fn seconds(act: impl FnOnce()) -> f64 {
    let begin = Instant::now();
    act();
    begin.elapsed().as_secs_f64()
}

/// Returns the median of the seconds of a round. The first round does not count.
fn median(rounds: usize, mut round: impl FnMut()) -> f64 {
    round();
    let mut all: Vec<f64> = (0..rounds).map(|_| seconds(&mut round)).collect();
    all.sort_by(f64::total_cmp);
    all[rounds / 2]
}

fn zeros(device: &Device) -> Storage {
    device.zeros(DType::F32, LEN).expect("the device has room for the chunks")
}

fn settle(device: &Device) {
    device.settle().expect("the device works");
}

fn adam(device: &Device, size: &Size) -> f64 {
    let optimizer = Optimizer::new(&OptimizerSpec::new(OptimizerKind::Adam, 1e-3), 1000).expect("valid");
    let mut chunks: Vec<_> = (0..size.chunks).map(|_| Chunk::new(device, &optimizer)).collect();
    settle(device);
    median(size.rounds, || {
        apply(optimizer.prepare(7, 0.125), &mut chunks, false);
        settle(device);
    })
}

fn writes(device: &Device, size: &Size) -> f64 {
    let payload = vec![1_u8; LEN * 4];
    let mut chunks: Vec<_> = (0..size.chunks).map(|_| zeros(device)).collect();
    settle(device);
    median(size.rounds, || {
        chunks.iter_mut().for_each(|chunk| chunk.write(Operand::Payload(black_box(&payload))));
        settle(device);
    })
}

fn reads(device: &Device, size: &Size) -> f64 {
    let chunks: Vec<_> = (0..size.chunks).map(|_| zeros(device)).collect();
    settle(device);
    let mut target = vec![0_u8; LEN * 4];
    median(size.rounds, || {
        for chunk in &chunks {
            black_box(&mut target).copy_from_slice(&chunk.bytes());
        }
    })
}
