//! One update of one slice, for each optimizer, in and out of the caches.
//!
//! The bound is memory: a kernel does a handful of flops per value and touches each value once.
//! Bytes per parameter, with W, G for reading weight and gradient, N for writing the next weight,
//! and 8 for a slot read and written:
//!
//! | kernel             | bytes per parameter | a chunk of 1 MiB moves |
//! | ------------------ | ------------------- | ---------------------- |
//! | sgd                | W + G + N = 12      | 3 MiB                  |
//! | momentum, nesterov | 12 + 8 = 20         | 5 MiB                  |
//! | adam, adamw        | 12 + 16 = 28        | 7 MiB                  |
//! | amsgrad            | 12 + 24 = 36        | 9 MiB                  |
//! | adagrad, rmsprop   | 12 + 8 = 20         | 5 MiB                  |
//! | adadelta, ftrl     | 12 + 16 = 28        | 7 MiB                  |
//! | lamb               | 12 + 16 = 28        | 7 MiB                  |
//!
//! The bytes that a norm reads are not counted. lamb reads W, G and its slots once more for its
//! norms. Clipping reads G once more.
//!
//! The throughput printed is these bytes over time, to be held against `memcpy`'s (2 bytes per
//! byte). Out of the caches the line of N is fetched before it is written, 4 B more, so sgd cannot
//! pass 12/16 and adam 28/32 of memcpy's.
//!
//! Expected with memcpy at 31 GiB/s out of the caches (2 cores of an AMD EPYC): sgd 23, momentum
//! 26, adam 27 GiB/s. Measured there, in GiB/s, with the vectors of the x86-64 baseline (4 lanes):
//!
//! | kernel   | 64 KiB | 1 MiB | 32 MiB |
//! | -------- | ------ | ----- | ------ |
//! | memcpy   | 105    | 87    | 31     |
//! | sgd      | 85     | 90    | 24     |
//! | momentum | 81     | 80    | 20     |
//! | nesterov | 63     | 63    | 21     |
//! | adam     | 31     | 31    | 16     |
//! | adagrad  | 30     | 30    | 16     |
//!
//! So sgd is at the bound; adam and adagrad are held by square root and division, 0.22 ms per chunk
//! of 1 MiB for adam. That is what wider vectors can win: since then kernels run with the widest
//! that the machine has. A model of 100 MiB costs one core 43 ms per adam step out of the caches.

use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use kernels::{Optimizer, Update, cpu};
use proto::ids::ChunkId;
use proto::optimizer::{OptimizerKind, OptimizerSpec};
use proto::placement::{ChunkSpec, Layout};
use proto::tensor::TensorSpec;

/// Within a core's cache; a chunk; well beyond the last-level cache.
const SIZES: [(&str, usize); 3] = [("64KiB", 64 << 10), ("1MiB", 1 << 20), ("32MiB", 32 << 20)];

fn optimizers(criterion: &mut Criterion) {
    let plain = OptimizerKind::ALL.map(|kind| (kind.to_string(), OptimizerSpec::new(kind, 1e-3)));
    let clipped = OptimizerSpec { clip_norm: Some(1.0), ..OptimizerSpec::new(OptimizerKind::Adam, 1e-3) };
    for (name, spec) in plain.into_iter().chain([("adam, clipped".to_owned(), clipped)]) {
        let optimizer = Optimizer::new(&spec, 1000).expect("valid");
        let mut group = criterion.benchmark_group(name);
        for (name, bytes) in SIZES {
            let length = bytes / 4;
            let layout = Layout::new(vec![TensorSpec::parameter("w", [length])], 1).expect("a model");
            let weights = vec![0.5_f32; length];
            let gradient: Vec<f32> = (0..length).map(|index| (index % 1000) as f32 * 1e-3 - 0.5).collect();
            let mut next = vec![0.0_f32; length];
            let mut slots: Vec<Vec<f32>> =
                (0..optimizer.slots()).map(|slot| vec![optimizer.slot_initial(slot); length]).collect();
            group.throughput(Throughput::Bytes((bytes * (3 + 2 * optimizer.slots())) as u64));
            group.bench_function(BenchmarkId::from_parameter(format!("chunk={name}")), |bencher| {
                bencher.iter(|| {
                    let update = optimizer.prepare(7, 0.125);
                    let update = with_norms(update, &layout, black_box(&weights), &gradient, &slots);
                    cpu::apply(&update, &weights, &gradient, &mut slots, &mut next);
                    black_box(&mut next);
                });
            });
        }
        group.finish();
    }
}

/// Measures every chunk first, when the update needs norms.
fn with_norms(
    update: Update,
    layout: &Layout,
    weights: &[f32],
    gradient: &[f32],
    slots: &[Vec<f32>],
) -> Update {
    if !update.needs_norms() {
        return update;
    }
    let measure = |chunk: &ChunkSpec| {
        let range = chunk.offset..chunk.offset + chunk.len;
        let slots: Vec<_> = slots.iter().map(|slot| &slot[range.clone()]).collect();
        cpu::measure(&update, &weights[range.clone()], bytemuck::cast_slice(&gradient[range]), &slots)
    };
    let squares: Vec<_> = (0..).map(ChunkId).zip(layout.chunks().iter().map(measure)).collect();
    update.with_norms(layout, &squares, &[ChunkId(0)])[0]
}

fn memcpy(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("memcpy");
    for (name, bytes) in SIZES {
        let (source, mut target) = (vec![1_u8; bytes], vec![0_u8; bytes]);
        group.throughput(Throughput::Bytes(2 * bytes as u64));
        group.bench_function(BenchmarkId::from_parameter(format!("chunk={name}")), |bencher| {
            bencher.iter(|| black_box(&mut target).copy_from_slice(black_box(&source)));
        });
    }
    group.finish();
}

criterion_group!(benches, optimizers, memcpy);
criterion_main!(benches);
