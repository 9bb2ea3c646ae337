//! What every rule does to a gradient first: from the sum over the samples to their mean, clipping, and PyTorch's coupled
//! weight decay.

use super::lanes::Lanes;

/// The scalars of it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Mean {
    /// One over the number of samples.
    pub(crate) scale: f32,
    /// What a clipped mean is multiplied by; otherwise 1, which changes no bit.
    pub(crate) clip: f32,
    pub(crate) weight_decay: f32,
}

impl Mean {
    /// `sum * scale * clip + weight_decay * w`, each operation rounded.
    #[inline(always)]
    pub(crate) fn of<V: Lanes>(&self, weight: V, sum: V) -> V {
        self.only(sum) + V::splat(self.weight_decay) * weight
    }

    /// The same without weight decay.
    #[inline(always)]
    pub(crate) fn only<V: Lanes>(&self, sum: V) -> V {
        sum * V::splat(self.scale) * V::splat(self.clip)
    }
}

/// `torch.lerp`: from `start` to `end`, computed from the nearer one.
#[inline(always)]
pub(crate) fn interpolate<V: Lanes>(start: V, end: V, share: f32) -> V {
    if share < 0.5 {
        start + V::splat(share) * (end - start)
    } else {
        end - (end - start) * V::splat(1.0 - share)
    }
}
