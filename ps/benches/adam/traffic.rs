//! What a step of Adam reads and writes, with additions for arithmetic.
#![expect(unsafe_code, reason = "stores past the caches, as the ps has them")]

use std::sync::Mutex;

/// Elements of a chunk on the ps.
const CHUNK: usize = 1 << 18;

/// Vectors of one turn of the loop: fewer were slower.
#[cfg(target_arch = "x86_64")]
const AT_ONCE: usize = 4;

/// Weights of two versions, a gradient and two slots. The five places of one moment lie side by
/// side, as chunks that were allocated one after the other: far apart at distances of powers of two
/// they were up to twice as slow.
pub(crate) struct Traffic {
    chunks: Vec<[Vec<f32>; 5]>,
}

impl Traffic {
    pub(crate) fn new(parameters: usize) -> Self {
        let chunk = |_| [0.5, 0.25, 1e-3, 1e-3, 1e-3].map(|value| vec![value; CHUNK]);
        Self { chunks: (0..parameters / CHUNK).map(chunk).collect() }
    }

    /// Reads and writes everything once.
    pub(crate) fn pass(&mut self, threads: usize) {
        let queue = Mutex::new(self.chunks.iter_mut());
        let run = || {
            while let Some([weights, next, gradient, mean, square]) = crate::take(&queue) {
                add(weights, gradient, mean, square, next);
                std::mem::swap(weights, next);
            }
        };
        std::thread::scope(|scope| {
            (1..threads).for_each(|_| drop(scope.spawn(run)));
            run();
        });
    }
}

/// `mean += gradient; square += gradient; next = weights + mean + square`.
fn add(weights: &[f32], gradient: &[f32], mean: &mut [f32], square: &mut [f32], next: &mut [f32]) {
    let length = next.len();
    assert!([weights.len(), gradient.len(), mean.len(), square.len()].iter().all(|len| *len == length));
    #[cfg(target_arch = "x86_64")]
    {
        let pointers = (weights.as_ptr(), gradient.as_ptr(), mean.as_mut_ptr(), square.as_mut_ptr());
        if is_x86_feature_detected!("avx512f") {
            // SAFETY: the machine has it, and all slices have one length.
            return unsafe { avx512(pointers, next.as_mut_ptr(), length) };
        }
        if is_x86_feature_detected!("avx2") {
            // SAFETY: the same.
            return unsafe { avx2(pointers, next.as_mut_ptr(), length) };
        }
    }
    for at in 0..length {
        mean[at] += gradient[at];
        square[at] += gradient[at];
        next[at] = weights[at] + mean[at] + square[at];
    }
}

#[cfg(target_arch = "x86_64")]
type Pointers = (*const f32, *const f32, *mut f32, *mut f32);

#[cfg(target_arch = "x86_64")]
macro_rules! streamed {
    ($name:ident, $feature:literal, $lanes:literal, $load:ident, $add:ident, $store:ident, $stream:ident) => {
        /// # Safety
        /// All pointers lead to `length` values, nobody else has those that are written, and the
        /// machine has the instructions.
        #[target_feature(enable = $feature)]
        unsafe fn $name((weights, gradient, mean, square): Pointers, next: *mut f32, length: usize) {
            use std::arch::x86_64::{_mm_sfence, $add, $load, $store, $stream};
            assert!(
                next.addr() % ($lanes * 4) == 0 && length % (AT_ONCE * $lanes) == 0,
                "chunks are whole, aligned vectors"
            );
            for first in (0..length).step_by(AT_ONCE * $lanes) {
                for at in (first..first + AT_ONCE * $lanes).step_by($lanes) {
                    // SAFETY: the caller's promise, and `next` is aligned.
                    unsafe {
                        let gradient = $load(gradient.add(at));
                        let (m, v) =
                            ($add($load(mean.add(at)), gradient), $add($load(square.add(at)), gradient));
                        $store(mean.add(at), m);
                        $store(square.add(at), v);
                        $stream(next.add(at), $add($load(weights.add(at)), $add(m, v)));
                    }
                }
            }
            _mm_sfence();
        }
    };
}

#[cfg(target_arch = "x86_64")]
streamed!(avx512, "avx512f", 16, _mm512_loadu_ps, _mm512_add_ps, _mm512_storeu_ps, _mm512_stream_ps);
#[cfg(target_arch = "x86_64")]
streamed!(avx2, "avx2", 8, _mm256_loadu_ps, _mm256_add_ps, _mm256_storeu_ps, _mm256_stream_ps);
