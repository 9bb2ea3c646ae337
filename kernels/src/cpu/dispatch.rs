//! One pass of a kernel over the slices of an update, by the widest vectors that the machine has.
//!
//! Always true here: every path gives the bits of the scalar one, at any length and alignment, so a
//! fleet of unlike machines trains the same model. Which elements a path leaves to the scalar
//! kernel (those before an aligned address, those after the last whole vector) does therefore not
//! matter.
#![expect(
    unsafe_code,
    reason = "raw pointers into checked slices, and functions compiled for other instruction sets"
)]

use std::ops::Range;
use std::sync::OnceLock;

use super::lanes::Lanes;
use super::mean::Mean;
use crate::slot::Slot;

/// An update rule with `SLOTS` values of state beside each weight, and the scalars of one step.
pub(crate) trait Kernel<const SLOTS: usize>: Copy {
    /// Returns the next weights and the next slots of some elements. `gradient` is their sum;
    /// `mean` makes it the mean.
    fn update<V: Lanes>(&self, mean: &Mean, weight: V, gradient: V, slots: [V; SLOTS]) -> (V, [V; SLOTS]);
}

/// A way to run kernels, and the witness that this machine has it: only [`Path::available`] makes
/// one that is not scalar.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Path(Set);

/// The instruction sets that kernels are compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Set {
    /// One element after the other, or what the compiler makes of that.
    Scalar,
    /// 8 lanes.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// 16 lanes.
    #[cfg(target_arch = "x86_64")]
    Avx512,
    /// 4 lanes.
    #[cfg(target_arch = "aarch64")]
    Neon,
}

impl Path {
    /// What every machine has.
    #[cfg(test)]
    pub(crate) const SCALAR: Self = Self(Set::Scalar);

    /// Returns what this machine can do, the widest last.
    pub(crate) fn available() -> Vec<Self> {
        let mut sets = vec![Set::Scalar];
        #[cfg(target_arch = "x86_64")]
        {
            if is_x86_feature_detected!("avx2") {
                sets.push(Set::Avx2);
            }
            if is_x86_feature_detected!("avx512f") {
                sets.push(Set::Avx512);
            }
        }
        #[cfg(target_arch = "aarch64")]
        if std::arch::is_aarch64_feature_detected!("neon") {
            sets.push(Set::Neon);
        }
        sets.into_iter().map(Self).collect()
    }

    /// Returns the widest one.
    pub(crate) fn widest() -> Self {
        static WIDEST: OnceLock<Path> = OnceLock::new();
        *WIDEST.get_or_init(|| Self::available().pop().expect("the scalar one is always there"))
    }
}

/// How memory that is only written is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Write {
    /// Into the caches: whoever sends them finds them there.
    Cached,
    /// Past the caches, which are too small for them: saves reading the lines that are overwritten.
    Streamed,
}

impl Slot<'_, [f32]> {
    /// Returns the slot of some of the elements.
    pub(crate) fn part(&mut self, elements: Range<usize>) -> Slot<'_, [f32]> {
        match self {
            Self::InPlace(slot) => Slot::InPlace(&mut slot[elements]),
            Self::Moved { from, to } => Slot::Moved { from: &from[elements.clone()], to: &mut to[elements] },
        }
    }

    /// Returns where the update reads and writes, and how many values each has.
    fn pointers(&mut self) -> ((*const f32, *mut f32), [usize; 2]) {
        match self {
            Self::InPlace(slot) => {
                let (to, len) = (slot.as_mut_ptr(), slot.len());
                ((to.cast_const(), to), [len; 2])
            }
            Self::Moved { from, to } => ((from.as_ptr(), to.as_mut_ptr()), [from.len(), to.len()]),
        }
    }
}

/// The slices of one update, checked to have one length.
#[derive(Clone, Copy)]
struct Operands<const SLOTS: usize> {
    /// Maybe not aligned.
    weights: *const f32,
    /// Maybe not aligned.
    gradient: *const f32,
    /// Each is read at one place and written at another, which may be the same.
    slots: [(*const f32, *mut f32); SLOTS],
    next: *mut f32,
    length: usize,
}

impl<const SLOTS: usize> Operands<SLOTS> {
    /// Returns what may be streamed in vectors of so many bytes.
    fn streams(&self, write: Write, vector_bytes: usize) -> Streams {
        let aligned = |to: *mut f32| to.addr() % vector_bytes == self.next.addr() % vector_bytes;
        let moved = |&(from, to): &(*const f32, *mut f32)| from != to.cast_const() && aligned(to);
        match write {
            Write::Cached => Streams::Nothing,
            Write::Streamed if SLOTS > 0 && self.slots.iter().all(moved) => Streams::NextAndSlots,
            Write::Streamed => Streams::Next,
        }
    }
}

/// What is written past the caches.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Streams {
    Nothing,
    Next,
    NextAndSlots,
}

/// Applies `kernel` to all elements. `weights` and `gradient` are little-endian f32 at any
/// alignment.
///
/// # Panics
/// If the lengths differ.
pub(crate) fn apply<K: Kernel<SLOTS>, const SLOTS: usize>(
    (path, write): (Path, Write),
    mean: &Mean,
    kernel: &K,
    weights: &[u8],
    gradient: &[u8],
    mut slots: [Slot<'_, [f32]>; SLOTS],
    next: &mut [f32],
) {
    const { assert!(cfg!(target_endian = "little"), "values travel as they lie in memory: little-endian") };
    let length = weights.len() / 4;
    let check = |what: &str, found: usize| {
        assert_eq!(found, length, "{what} has {found} values, the weights have {length}");
    };
    assert_eq!(weights.len() % 4, 0, "the weights end within a value");
    assert_eq!(gradient.len() % 4, 0, "the gradient ends within a value");
    check("the gradient", gradient.len() / 4);
    check("the buffer of the next weights", next.len());
    let slots = slots.each_mut().map(Slot::pointers);
    for (number, (_, lengths)) in slots.iter().enumerate() {
        lengths.iter().for_each(|&found| check(&format!("slot {number}"), found));
    }
    let operands = Operands {
        weights: weights.as_ptr().cast(),
        gradient: gradient.as_ptr().cast(),
        slots: slots.map(|(pointers, _)| pointers),
        next: next.as_mut_ptr(),
        length,
    };
    // SAFETY: all slices have `length` values, and those that are written are borrowed alone.
    // `path` is the witness of its instruction set.
    unsafe {
        match path.0 {
            Set::Scalar => run::<f32, K, SLOTS>(write, mean, kernel, operands),
            #[cfg(target_arch = "x86_64")]
            Set::Avx2 => avx2(write, mean, kernel, operands),
            #[cfg(target_arch = "x86_64")]
            Set::Avx512 => avx512(write, mean, kernel, operands),
            #[cfg(target_arch = "aarch64")]
            Set::Neon => neon(write, mean, kernel, operands),
        }
    }
}

/// # Safety
/// The caller keeps the promises of [`run`], on a machine with AVX2.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn avx2<K: Kernel<SLOTS>, const SLOTS: usize>(
    write: Write,
    mean: &Mean,
    kernel: &K,
    operands: Operands<SLOTS>,
) {
    // SAFETY: the caller's promise.
    unsafe { run::<super::lanes::x86::Avx2, K, SLOTS>(write, mean, kernel, operands) }
    after_streaming(write);
}

/// # Safety
/// The caller keeps the promises of [`run`], on a machine with AVX-512F.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
unsafe fn avx512<K: Kernel<SLOTS>, const SLOTS: usize>(
    write: Write,
    mean: &Mean,
    kernel: &K,
    operands: Operands<SLOTS>,
) {
    // SAFETY: the caller's promise.
    unsafe { run::<super::lanes::x86::Avx512, K, SLOTS>(write, mean, kernel, operands) }
    after_streaming(write);
}

/// # Safety
/// The caller keeps the promises of [`run`], on a machine with NEON.
#[cfg(target_arch = "aarch64")]
#[target_feature(enable = "neon")]
unsafe fn neon<K: Kernel<SLOTS>, const SLOTS: usize>(
    write: Write,
    mean: &Mean,
    kernel: &K,
    operands: Operands<SLOTS>,
) {
    // SAFETY: the caller's promise.
    unsafe { run::<super::lanes::arm::Neon, K, SLOTS>(write, mean, kernel, operands) }
}

/// Number of partial sums of [`add_squares`].
pub(crate) const SUMS: usize = 16;

/// Adds the square of value i to sum i mod 16. The compiler makes vectors of it; which ones does
/// not reach the bits, as each sum is added to in the order of the values.
pub(crate) fn add_squares(path: Path, sums: &mut [f64; SUMS], values: &[f32]) {
    match path.0 {
        Set::Scalar => squares(sums, values),
        // SAFETY: `path` is the witness.
        #[cfg(target_arch = "x86_64")]
        Set::Avx2 => unsafe { squares_avx2(sums, values) },
        // SAFETY: `path` is the witness.
        #[cfg(target_arch = "x86_64")]
        Set::Avx512 => unsafe { squares_avx512(sums, values) },
        #[cfg(target_arch = "aarch64")]
        Set::Neon => squares(sums, values),
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn squares_avx2(sums: &mut [f64; SUMS], values: &[f32]) {
    squares(sums, values);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
fn squares_avx512(sums: &mut [f64; SUMS], values: &[f32]) {
    squares(sums, values);
}

#[inline(always)]
fn squares(sums: &mut [f64; SUMS], values: &[f32]) {
    let (whole, rest) = values.as_chunks::<SUMS>();
    for values in whole {
        for (sum, &value) in sums.iter_mut().zip(values) {
            *sum += f64::from(value) * f64::from(value);
        }
    }
    for (sum, &value) in sums.iter_mut().zip(rest) {
        *sum += f64::from(value) * f64::from(value);
    }
}

/// Fences streamed stores: other threads see them in no order before that.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
fn after_streaming(write: Write) {
    if write == Write::Streamed {
        // SAFETY: every x86-64 machine has SSE.
        unsafe { std::arch::x86_64::_mm_sfence() }
    }
}

/// # Safety
/// All pointers lead to `length` values; those of slots and next weights to nothing that anybody
/// else reads or writes. The machine has the instructions of `V`.
#[inline(always)]
unsafe fn run<V: Lanes, K: Kernel<SLOTS>, const SLOTS: usize>(
    write: Write,
    mean: &Mean,
    kernel: &K,
    operands: Operands<SLOTS>,
) {
    let length = operands.length;
    let bytes = V::WIDTH * size_of::<f32>();
    let streams = if V::WIDTH > 1 { operands.streams(write, bytes) } else { Streams::Nothing };
    let head = if streams == Streams::Nothing { 0 } else { operands.next.align_offset(bytes).min(length) };
    let vectors = head + (length - head) / V::WIDTH * V::WIDTH;
    // SAFETY: each index is below `length` by `WIDTH` or more; `next + head` is aligned and every
    // vector after it too, and with `NextAndSlots` those of the slots.
    unsafe {
        for at in 0..head {
            element::<f32, K, SLOTS>(mean, kernel, operands, at, Streams::Nothing);
        }
        // The choice is made once, outside the loops.
        match streams {
            Streams::Nothing => {
                for at in (head..vectors).step_by(V::WIDTH) {
                    element::<V, K, SLOTS>(mean, kernel, operands, at, Streams::Nothing);
                }
            }
            Streams::Next => {
                for at in (head..vectors).step_by(V::WIDTH) {
                    element::<V, K, SLOTS>(mean, kernel, operands, at, Streams::Next);
                }
            }
            Streams::NextAndSlots => {
                for at in (head..vectors).step_by(V::WIDTH) {
                    element::<V, K, SLOTS>(mean, kernel, operands, at, Streams::NextAndSlots);
                }
            }
        }
        for at in vectors..length {
            element::<f32, K, SLOTS>(mean, kernel, operands, at, Streams::Nothing);
        }
    }
}

/// # Safety
/// The caller keeps the promises of [`run`], and `at + WIDTH <= length`. The memory that `streams`
/// names is aligned to `V` there.
#[inline(always)]
unsafe fn element<V: Lanes, K: Kernel<SLOTS>, const SLOTS: usize>(
    mean: &Mean,
    kernel: &K,
    operands: Operands<SLOTS>,
    at: usize,
    streams: Streams,
) {
    let Operands { weights, gradient, slots, next, .. } = operands;
    // SAFETY: the caller's promise.
    unsafe {
        let here = slots.map(|(from, _)| V::load(from.add(at)));
        let (weight, after) = kernel.update(mean, V::load(weights.add(at)), V::load(gradient.add(at)), here);
        for ((_, to), value) in slots.into_iter().zip(after) {
            if streams == Streams::NextAndSlots { value.stream(to.add(at)) } else { value.store(to.add(at)) }
        }
        if streams == Streams::Nothing { weight.store(next.add(at)) } else { weight.stream(next.add(at)) }
    }
}
