//! What every rule does to a gradient first: from the sum over the samples to their mean, clipping,
//! and PyTorch's coupled weight decay.

use super::lanes::Lanes;

/// The scalars of one step, for every rule.
#[derive(Clone, Copy, Debug, PartialEq)]
#[repr(C)]
pub(crate) struct Mean {
    /// One over the number of samples.
    pub(crate) scale: f32,
    /// What a clipped mean is multiplied by; otherwise 1, which changes no bit.
    pub(crate) clip: f32,
    /// Coupled weight decay: this share of the weight is added to the gradient.
    pub(crate) weight_decay: f32,
}

impl Mean {
    /// Leaves the sum as it is.
    pub(crate) const NONE: Self = Self { scale: 1.0, clip: 1.0, weight_decay: 0.0 };

    /// `sum * scale * clip + weight_decay * w`, each operation rounded.
    #[inline(always)]
    pub(crate) fn of<V: Lanes>(&self, weight: V, sum: V) -> V {
        self.only(sum) + sum.splat(self.weight_decay) * weight
    }

    /// `sum * scale * clip`: the mean without weight decay, for rules that have none or have it
    /// elsewhere.
    #[inline(always)]
    pub(crate) fn only<V: Lanes>(&self, sum: V) -> V {
        sum * sum.splat(self.scale) * sum.splat(self.clip)
    }
}

/// `torch.lerp`: from `start` to `end`, computed from the nearer one.
#[inline(always)]
pub(crate) fn interpolate<V: Lanes>(start: V, end: V, share: f32) -> V {
    if share < 0.5 {
        start + start.splat(share) * (end - start)
    } else {
        end - (end - start) * start.splat(1.0 - share)
    }
}
