//! Kernels for memory of the host, as functions on slices.
//!
//! A kernel is written once, over [vectors of any width](lanes), and runs with the widest that the
//! [machine](dispatch) has. Its scalar twin is the same function on single floats. Each kernel
//! makes one pass over memory.

pub(crate) mod adadelta;
pub(crate) mod adagrad;
pub(crate) mod adam;
pub mod cast;
pub mod dense;
pub(crate) mod dispatch;
pub(crate) mod ftrl;
pub(crate) mod lamb;
mod lanes;
pub mod levels;
pub(crate) mod mean;
pub(crate) mod momentum;
mod norm;
pub(crate) mod rmsprop;
pub(crate) mod sgd;
pub mod state;
pub mod sum;

use self::dispatch::{Kernel, Path, Write};
use self::mean::Mean;
pub use self::norm::measure;
#[cfg(any(test, feature = "cuda"))]
pub(crate) use self::norm::squares_of;
use crate::optimizer::{Prepared, Update};
use crate::slot::Slot;

/// Applies a step to slices of host memory; see [`Update::apply`]. Slots change in place.
///
/// # Panics
///
/// The panics of [`Update::apply`].
pub fn apply<S: AsMut<[f32]>>(
    update: &Update,
    weights: &[f32],
    gradient: &[f32],
    slots: &mut [S],
    next: &mut [f32],
) {
    let slots = slots.iter_mut().map(|slot| Slot::InPlace(slot.as_mut())).collect();
    apply_bytes(update, weights, bytemuck::cast_slice(gradient), slots, next);
}

/// Applies a step to slices of host memory. The gradient is little-endian f32 at any alignment, and
/// slots may move.
///
/// # Panics
///
/// The panics of [`Update::apply`].
pub(crate) fn apply_bytes(
    update: &Update,
    weights: &[f32],
    gradient: &[u8],
    slots: Vec<Slot<'_, [f32]>>,
    next: &mut [f32],
) {
    assert!(!update.needs_norms(), "an update without the norms that it needs: {update:?}");
    let (how, mean) = ((update.path, update.write), update.mean);
    let pass = Pass { how, mean, weights: bytemuck::cast_slice(weights), gradient, slots, next };
    match &update.rule {
        Prepared::Sgd(kernel) => pass.run(kernel),
        Prepared::Momentum(kernel) => pass.run(kernel),
        Prepared::Adam(kernel) => pass.run::<_, 2>(kernel),
        Prepared::Amsgrad(kernel) => pass.run::<_, 3>(kernel),
        Prepared::Adagrad(kernel) => pass.run(kernel),
        Prepared::Rmsprop(kernel) => pass.run::<_, 1>(kernel),
        Prepared::RmspropMoving(kernel) => pass.run::<_, 2>(kernel),
        Prepared::RmspropCentered(kernel) => pass.run::<_, 2>(kernel),
        Prepared::RmspropCenteredMoving(kernel) => pass.run::<_, 3>(kernel),
        Prepared::Adadelta(kernel) => pass.run(kernel),
        Prepared::Ftrl(kernel) => pass.run(kernel),
        Prepared::Lamb(kernel) => pass.run(kernel),
    }
}

/// Applies a step to slices of host memory, with a gradient that is the sum of two: little-endian
/// f32 at any alignment. The sum stays in the nearest cache.
///
/// # Panics
///
/// The panics of [`Update::apply`].
pub(crate) fn apply_halves(
    update: &Update,
    weights: &[f32],
    (left, right): (&[u8], &[u8]),
    mut slots: Vec<Slot<'_, [f32]>>,
    next: &mut [f32],
) {
    assert!(left.len() == right.len() && left.len() == size_of_val(weights), "sum of different lengths");
    let mut sum = [0.0; BLOCK_LEN];
    for begin in (0..weights.len()).step_by(BLOCK_LEN) {
        let elements = begin..(begin + BLOCK_LEN).min(weights.len());
        let bytes = elements.start * size_of::<f32>()..elements.end * size_of::<f32>();
        let sum = &mut sum[..elements.len()];
        sum::add(&left[bytes.clone()], &right[bytes], sum);
        let slots = slots.iter_mut().map(|slot| slot.part(elements.clone())).collect();
        let (weights, next) = (&weights[elements.clone()], &mut next[elements]);
        apply_bytes(update, weights, bytemuck::cast_slice(sum), slots, next);
    }
}

/// Values of a gradient that is added up while it is applied: they stay in the nearest cache
/// between the two.
const BLOCK_LEN: usize = 2048;

/// What one pass of a kernel reads and writes.
struct Pass<'a> {
    how: (Path, Write),
    mean: Mean,
    weights: &'a [u8],
    gradient: &'a [u8],
    slots: Vec<Slot<'a, [f32]>>,
    next: &'a mut [f32],
}

impl Pass<'_> {
    /// Runs a kernel that has `SLOTS` slots.
    fn run<K: Kernel<SLOTS>, const SLOTS: usize>(self, kernel: &K) {
        let Self { how, mean, weights, gradient, slots, next } = self;
        let slots: [_; SLOTS] = slots.try_into().unwrap_or_else(|slots: Vec<_>| {
            panic!("{} slots given, the update rule has {SLOTS}", slots.len())
        });
        dispatch::apply(how, &mean, kernel, weights, gradient, slots, next);
    }
}
