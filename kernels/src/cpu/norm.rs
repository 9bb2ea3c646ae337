//! Sums of squares of one chunk, in f64.
//!
//! Always true here: element i is added to sum i mod 16, and the sixteen are added as a tree.
//! Squares of f32 are exact in f64, and no sum of them overflows.

use super::dispatch::{SUMS, Write, add_squares, apply};
use super::lamb::{Direction, Lamb};
use crate::norm::Squares;
use crate::optimizer::{Prepared, Update};
use crate::slot::Slot;

/// Elements of which a direction is made at a time: the slots after it, which nobody needs, stay in
/// the first cache.
const BLOCK: usize = 1024;

/// Returns what a chunk in slices of host memory contributes to the norms; see [`Update::measure`].
/// The gradient is little-endian f32 at any alignment.
///
/// # Panics
/// The panics of [`Update::measure`].
pub fn measure(update: &Update, weights: &[f32], gradient: &[u8], slots: &[&[f32]]) -> Squares {
    assert_eq!(gradient.len(), size_of_val(weights), "bytes of the gradient");
    match (update.rule, slots) {
        (Prepared::Lamb(lamb), &[average, square]) => {
            measure_direction(update, lamb, weights, gradient, [average, square])
        }
        (Prepared::Lamb(_), _) => panic!("{} slots given, the update rule has 2", slots.len()),
        _ => measure_gradient(update, gradient),
    }
}

fn measure_gradient(update: &Update, gradient: &[u8]) -> Squares {
    let mut sums = [0.0; SUMS];
    let mut block = [0.0; BLOCK];
    for raw in gradient.chunks(4 * BLOCK) {
        let block = &mut block[..raw.len() / 4];
        for (value, raw) in block.iter_mut().zip(raw.as_chunks().0) {
            *value = f32::from_le_bytes(*raw) * update.mean.scale;
        }
        add_squares(update.path, &mut sums, block);
    }
    Squares([total(sums), 0.0])
}

fn measure_direction(
    update: &Update,
    lamb: Lamb,
    weights: &[f32],
    gradient: &[u8],
    [average, square]: [&[f32]; 2],
) -> Squares {
    let (mut of_weights, mut of_direction) = ([0.0; SUMS], [0.0; SUMS]);
    let [mut direction, mut next_average, mut next_square] = [[0.0; BLOCK]; 3];
    for begin in (0..weights.len()).step_by(BLOCK) {
        let range = begin..(begin + BLOCK).min(weights.len());
        let len = range.len();
        let slots = [(average, &mut next_average), (square, &mut next_square)];
        let slots =
            slots.map(|(slot, next)| Slot::Moved { from: &slot[range.clone()], to: &mut next[..len] });
        let gradient = &gradient[4 * range.start..4 * range.end];
        let (weights, direction) = (&weights[range], &mut direction[..len]);
        let (how, raw) = ((update.path, Write::Cached), bytemuck::cast_slice(weights));
        apply(how, &update.mean, &Direction(lamb), raw, gradient, slots, direction);
        add_squares(update.path, &mut of_weights, weights);
        add_squares(update.path, &mut of_direction, direction);
    }
    Squares([total(of_weights), total(of_direction)])
}

/// Returns what a chunk contributes to the norms, from the sums of squares that a device made of
/// it: those of the gradient, or those of the weights and of the direction.
#[cfg(any(test, feature = "cuda"))]
pub(crate) fn squares_of(update: &Update, sums: &[f64; 2 * SUMS]) -> Squares {
    let (first, second) = (sums.first_chunk(), sums.last_chunk());
    let [first, second] = [first, second].map(|sums| sums.copied().unwrap_or_default());
    match update.rule {
        Prepared::Lamb(_) => Squares([total(first), total(second)]),
        _ => Squares([total(first), 0.0]),
    }
}

/// Returns the sixteen sums as one: each half onto the other.
fn total(mut sums: [f64; SUMS]) -> f64 {
    let mut half = SUMS / 2;
    while half > 0 {
        let (left, right) = sums.split_at_mut(half);
        left.iter_mut().zip(right).for_each(|(left, right)| *left += *right);
        half /= 2;
    }
    sums[0]
}
