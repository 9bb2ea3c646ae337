//! Norms that a step needs before it can be applied: of the whole gradient (clipping), or of each tensor (LAMB).
//!
//! A norm is a sum over elements that lie in different chunks, so its bits depend on the order of the additions. Always true
//! here: that order is fixed by the model alone. Within a chunk, element i is added to sum i mod 16 in f64, and the sixteen
//! are added as a tree; chunks are added in the order of their numbers. Neither vectors nor threads nor the number of
//! partitions can be seen in it. Squares of f32 are exact in f64, and no sum of them overflows.

use proto::ids::ChunkId;
use proto::placement::Layout;
use proto::tensor::Role;

use crate::cpu::dispatch::{SUMS, Slot, Write, add_squares, apply};
use crate::cpu::lamb::{Direction, Lamb};
use crate::optimizer::{Norms, Prepared, Update};

/// Sums of squares of one chunk: of the mean gradient, or of the weights and of the direction they shall go.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Squares(pub [f64; 2]);

/// Elements of which a direction is made at a time: the slots after it, which nobody needs, stay in the first cache.
const BLOCK: usize = 1024;

impl Update {
    /// Whether [`Update::measure`] has to be called for all chunks of the model, and [`Update::with_norms`] with what it gave,
    /// before this update may be applied.
    pub const fn needs_norms(&self) -> bool {
        !matches!(self.norms, Norms::Complete)
    }

    /// What one chunk contributes to the norms. Nothing is changed; repeating it gives the same.
    ///
    /// # Panics
    /// As [`Update::apply_bytes`].
    pub fn measure(&self, weights: &[f32], gradient: &[u8], slots: &[&[f32]]) -> Squares {
        assert_eq!(gradient.len(), 4 * weights.len(), "bytes of the gradient");
        match (self.rule, slots) {
            (Prepared::Lamb(lamb), &[mean, square]) => {
                self.measure_direction(lamb, weights, gradient, [mean, square])
            }
            (Prepared::Lamb(_), _) => panic!("{} slots given, the update rule has 2", slots.len()),
            (mut rule, _) => self.measure_gradient(rule.mean_mut().scale, gradient),
        }
    }

    fn measure_gradient(&self, scale: f32, gradient: &[u8]) -> Squares {
        let mut sums = [0.0; SUMS];
        let mut block = [0.0; BLOCK];
        for raw in gradient.chunks(4 * BLOCK) {
            let block = &mut block[..raw.len() / 4];
            for (value, raw) in block.iter_mut().zip(raw.as_chunks().0) {
                *value = f32::from_le_bytes(*raw) * scale;
            }
            add_squares(self.path, &mut sums, block);
        }
        Squares([total(sums), 0.0])
    }

    fn measure_direction(
        &self,
        lamb: Lamb,
        weights: &[f32],
        gradient: &[u8],
        [mean, square]: [&[f32]; 2],
    ) -> Squares {
        let (mut of_weights, mut of_direction) = ([0.0; SUMS], [0.0; SUMS]);
        let [mut direction, mut next_mean, mut next_square] = [[0.0; BLOCK]; 3];
        for begin in (0..weights.len()).step_by(BLOCK) {
            let range = begin..(begin + BLOCK).min(weights.len());
            let len = range.len();
            let slots = [(mean, &mut next_mean), (square, &mut next_square)];
            let slots =
                slots.map(|(slot, next)| Slot::Moved { from: &slot[range.clone()], to: &mut next[..len] });
            let gradient = &gradient[4 * range.start..4 * range.end];
            let (weights, direction) = (&weights[range], &mut direction[..len]);
            let (how, raw) = ((self.path, Write::Cached), bytemuck::cast_slice(weights));
            apply(how, &Direction(lamb), raw, gradient, slots, direction);
            add_squares(self.path, &mut of_weights, weights);
            add_squares(self.path, &mut of_direction, direction);
        }
        Squares([total(of_weights), total(of_direction)])
    }

    /// The updates of some chunks, one for each of `chunks`, from the squares of all parameter chunks of the model in the order
    /// of their numbers.
    ///
    /// # Panics
    /// If there are other squares: a norm that lacks some would be wrong without a sign of it.
    pub fn with_norms(
        &self,
        layout: &Layout,
        squares: &[(ChunkId, Squares)],
        chunks: &[ChunkId],
    ) -> Vec<Self> {
        let parameters = (0..layout.chunks().len() as u32).map(ChunkId);
        let parameters = parameters.filter(|&id| layout.tensor_of(id).role == Role::Parameter);
        assert!(parameters.eq(squares.iter().map(|(id, _)| *id)), "squares of other chunks: {squares:?}");
        let add = |[a, b]: [f64; 2], Squares([c, d])| [a + c, b + d];
        match (self.norms, self.rule) {
            (Norms::Tensors, Prepared::Lamb(lamb)) => {
                let mut tensors = vec![[0.0; 2]; layout.tensors().len()];
                for &(id, squares) in squares {
                    let sums = &mut tensors[layout.chunk(id).tensor];
                    *sums = add(*sums, squares);
                }
                let of = |&id: &ChunkId| {
                    let [weights, direction] = tensors[layout.chunk(id).tensor];
                    let rule = Prepared::Lamb(lamb.scaled(weights, direction));
                    Self { rule, norms: Norms::Complete, ..*self }
                };
                chunks.iter().map(of).collect()
            }
            (Norms::Gradient { clip_norm }, _) => {
                let [total, _] = squares.iter().fold([0.0; 2], |sums, &(_, squares)| add(sums, squares));
                vec![self.clipped(clip_norm, total); chunks.len()]
            }
            (norms, rule) => panic!("{rule:?} does not need {norms:?}"),
        }
    }

    /// `torch.nn.utils.clip_grad_norm_`: gradients times `min(1, clip_norm / (norm + 1e-6))`.
    fn clipped(&self, clip_norm: f64, squares: f64) -> Self {
        let factor = clip_norm / (squares.sqrt() + 1e-6);
        // Not `min`, which would make a NaN a 1: a gradient that is no number has to be seen in the weights.
        let factor = if factor > 1.0 { 1.0 } else { factor };
        let mut clipped = Self { norms: Norms::Complete, ..*self };
        clipped.rule.mean_mut().clip = factor as f32;
        clipped
    }
}

/// The sixteen sums as one: each half onto the other.
fn total(mut sums: [f64; SUMS]) -> f64 {
    let mut half = SUMS / 2;
    while half > 0 {
        let (left, right) = sums.split_at_mut(half);
        left.iter_mut().zip(right).for_each(|(left, right)| *left += *right);
        half /= 2;
    }
    sums[0]
}
