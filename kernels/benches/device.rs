//! CUDA device 0 beside one core of the host: an update of many chunks, and copies both ways.
//!
//! Each line is a name, a value and a unit, with tabs between them. `cargo xtask gpu` puts them
//! into its report. Without a device it says why, and that is no failure. With the argument
//! `--bench`, which cargo gives, it measures; otherwise it shows that it works.
//!
//! An update by adam moves 28 bytes for each parameter (`optimizers.rs` has the sum). So it cannot
//! be faster than the memory of the device: 28 bytes at 3.35 TB/s, as NVIDIA states for an H100,
//! are 120 billion parameters a second.

use std::hint::black_box;
use std::time::Instant;

use kernels::{Device, Operand, Optimizer, Slot, Storage};
use proto::optimizer::{OptimizerKind, OptimizerSpec};
use proto::tensor::DType;

/// Values of a chunk of 1 MiB.
const LEN: usize = 1 << 18;

/// Bytes of a chunk.
const CHUNK_BYTES: f64 = (LEN * 4) as f64;

/// Bytes that adam moves for each byte of weights.
const ADAM: f64 = 7.0;

/// Chunks at a time, and how often they are measured.
struct Size {
    chunks: usize,
    rounds: usize,
}

/// One part of a model, as a ps holds it.
struct Chunk {
    weights: Storage,
    gradient: Storage,
    slots: Vec<Storage>,
    next: Storage,
}

fn main() {
    let measures = std::env::args().any(|argument| argument == "--bench");
    let size = if measures { Size { chunks: 256, rounds: 9 } } else { Size { chunks: 2, rounds: 1 } };
    let device = match Device::cuda(0, None) {
        Ok(device) => device,
        Err(reason) => return println!("no device is measured: {reason}"),
    };
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

/// Returns the median of the seconds of a round. The first round does not count.
#[expect(clippy::disallowed_methods, reason = "a bench measures time")]
fn median(rounds: usize, mut round: impl FnMut()) -> f64 {
    round();
    let mut seconds: Vec<f64> = (0..rounds)
        .map(|_| {
            let begin = Instant::now();
            round();
            begin.elapsed().as_secs_f64()
        })
        .collect();
    seconds.sort_by(f64::total_cmp);
    seconds[rounds / 2]
}

fn zeros(device: &Device) -> Storage {
    device.zeros(DType::F32, LEN).expect("the device has room for the chunks")
}

fn settle(device: &Device) {
    device.settle().expect("the device works");
}

fn adam(device: &Device, size: &Size) -> f64 {
    let optimizer = Optimizer::new(&OptimizerSpec::new(OptimizerKind::Adam, 1e-3), 1000).expect("valid");
    let chunk = |_| Chunk {
        weights: zeros(device),
        gradient: zeros(device),
        slots: (0..optimizer.slots()).map(|_| zeros(device)).collect(),
        next: zeros(device),
    };
    let mut chunks: Vec<_> = (0..size.chunks).map(chunk).collect();
    settle(device);
    median(size.rounds, || {
        let update = optimizer.prepare(7, 0.125);
        for Chunk { weights, gradient, slots, next } in &mut chunks {
            let slots = slots.iter_mut().map(Slot::InPlace);
            update.apply(weights, Operand::Stored(gradient), slots, next);
        }
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
