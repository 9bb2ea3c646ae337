//! Norms that a step needs before it can be applied: of the whole gradient (clipping), or of each
//! tensor (LAMB).
//!
//! A norm is a sum over elements that lie in different chunks, so its bits depend on the order of
//! the additions. Always true here: that order is fixed by the model alone. Within a chunk, element
//! i is added to sum i mod 16 in f64, and the sixteen are added as a tree; chunks are added in the
//! order of their numbers. Neither vectors nor threads nor the number of partitions can be seen in
//! it. Squares of f32 are exact in f64, and no sum of them overflows.

use proto::ids::ChunkId;
use proto::placement::Layout;
use proto::tensor::TensorRole;

use crate::optimizer::{Norms, Prepared, Update};

/// Sums of squares of one chunk: of the mean gradient, or of the weights and of the direction they
/// shall go.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Squares(pub [f64; 2]);

impl Squares {
    /// Returns whether they are of finite values. Squares of finite f32 have a finite sum in f64.
    pub const fn is_finite(self) -> bool {
        let Self([one, other]) = self;
        one.is_finite() && other.is_finite()
    }
}

impl Update {
    /// Returns whether [`Update::measure`] has to be called for all chunks of the model, and
    /// [`Update::with_norms`] with what it gave, before this update may be applied.
    pub const fn needs_norms(&self) -> bool {
        !matches!(self.norms, Norms::Complete)
    }

    /// Returns the updates of some chunks, one for each of `chunks`, from the squares of all
    /// parameter chunks of the model in the order of their numbers.
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
        let parameters = parameters.filter(|&id| layout.tensor_of(id).role == TensorRole::Parameter);
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

    /// Clips like `torch.nn.utils.clip_grad_norm_`: gradients times
    /// `min(1, clip_norm / (norm + 1e-6))`.
    fn clipped(&self, clip_norm: f64, squares: f64) -> Self {
        let factor = clip_norm / (squares.sqrt() + 1e-6);
        // Not `min`, which would make a NaN a 1: a gradient that is no number has to be seen in the
        // weights.
        let factor = if factor > 1.0 { 1.0 } else { factor };
        let mut clipped = Self { norms: Norms::Complete, ..*self };
        clipped.mean.clip = factor as f32;
        clipped
    }
}
