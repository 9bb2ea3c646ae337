//! What every rule does to a gradient first: from the sum over the samples to their mean, and PyTorch's coupled weight decay.

use super::lanes::Lanes;

/// The scalars of it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Mean {
    /// One over the number of samples.
    pub(super) scale: f32,
    pub(super) weight_decay: f32,
}

impl Mean {
    /// `sum * scale + weight_decay * w`, each operation rounded.
    #[inline(always)]
    pub(super) fn of<V: Lanes>(&self, weight: V, sum: V) -> V {
        sum * V::splat(self.scale) + V::splat(self.weight_decay) * weight
    }
}

/// `torch.lerp`: from `start` to `end`, computed from the nearer one.
#[inline(always)]
pub(super) fn interpolate<V: Lanes>(start: V, end: V, share: f32) -> V {
    if share < 0.5 {
        start + V::splat(share) * (end - start)
    } else {
        end - (end - start) * V::splat(1.0 - share)
    }
}
