//! The loss scale of a job that computes in f16, see
//! [`TensorRole::LossScale`](crate::tensor::TensorRole).
//!
//! Values below 2^-24 are 0 in f16. So a worker multiplies the loss by a power of two before the
//! backward pass, and divides the gradients by it afterwards. A scale that is too large makes
//! gradients infinite: the step *overflows*. It changes no weight, and halves the scale.
//!
//! The scale is a function of the steps alone, as in PyTorch's `torch.amp.GradScaler` with its
//! defaults: 2^16 at first, doubled after 2000 steps in a row without an overflow.
//!
//! Micikevicius et al., "Mixed Precision Training" (ICLR 2018).

use crate::tensor::TensorSpec;

/// Name of the tensor. No PyTorch module has a tensor of this name, because of the colon.
pub const NAME: &str = "ebbflow:loss_scale";

/// Number of elements of the tensor.
const ELEMENTS: usize = 2;

/// Steps without an overflow after which the scale is doubled.
const DOUBLED_AFTER: i64 = 2000;

/// Exponents of the scale. 2^-24 is the smallest number of f16.
const EXPONENTS: std::ops::RangeInclusive<i64> = -24..=64;

/// A loss scale, and how long it has been good.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LossScale {
    /// The scale is two to this power.
    exponent: i64,
    /// Steps without an overflow since the scale changed.
    good: i64,
}

impl LossScale {
    /// The scale of version 0.
    pub const FIRST: Self = Self { exponent: 16, good: 0 };

    /// Describes the tensor that holds it.
    pub fn tensor() -> TensorSpec {
        TensorSpec::loss_scale(NAME, [ELEMENTS])
    }

    /// Reads the elements of the tensor. `None`: there are more or fewer.
    pub fn read(elements: &[i64]) -> Option<Self> {
        let &[exponent, good] = elements else { return None };
        Some(Self { exponent, good })
    }

    /// Returns the elements of the tensor.
    pub const fn elements(self) -> [i64; ELEMENTS] {
        [self.exponent, self.good]
    }

    /// Returns the factor of the loss. `None`: a step has overflowed with the smallest one.
    ///
    /// ```
    /// use proto::loss_scale::LossScale;
    ///
    /// assert_eq!(LossScale::FIRST.factor(), Some(65536.0));
    /// ```
    pub fn factor(self) -> Option<f32> {
        let exponent = i32::try_from(self.exponent).ok().filter(|_| EXPONENTS.contains(&self.exponent));
        exponent.map(|exponent| 2f32.powi(exponent))
    }

    /// Returns the scale after a step that was computed somewhere.
    #[must_use]
    pub fn after(self, overflowed: bool) -> Self {
        if overflowed {
            return Self { exponent: (self.exponent - 1).max(EXPONENTS.start() - 1), good: 0 };
        }
        match self.good + 1 {
            DOUBLED_AFTER.. => Self { exponent: (self.exponent + 1).min(*EXPONENTS.end()), good: 0 },
            good => Self { good, ..self },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn after(scale: LossScale, steps: u32, overflowed: bool) -> LossScale {
        (0..steps).fold(scale, |scale, _| scale.after(overflowed))
    }

    #[test]
    fn the_scale_is_halved_by_an_overflow_and_doubled_by_2000_steps_without_one() {
        let first = LossScale::FIRST;
        assert_eq!(first.after(true).factor(), Some(32768.0));
        assert_eq!(after(first, 1999, false).factor(), Some(65536.0));
        assert_eq!(after(first, 2000, false).elements(), [17, 0]);
        let disturbed = after(after(first, 1999, false).after(true), 1999, false);
        assert_eq!(disturbed.elements(), [15, 1999], "an overflow begins the count anew");
        assert_eq!(disturbed.after(false).elements(), [16, 0]);
    }

    #[test]
    fn a_scale_that_cannot_be_halved_any_more_is_none() {
        let smallest = after(LossScale::FIRST, 40, true);
        assert_eq!(smallest.factor(), Some(2f32.powi(-24)));
        assert_eq!(smallest.after(true).factor(), None);
        assert_eq!(after(smallest, 9, true), smallest.after(true));
        let largest = after(LossScale::FIRST, 2000 * 50, false);
        assert_eq!(largest.factor(), Some(2f32.powi(64)));
    }

    #[test]
    fn elements_of_a_tensor_give_the_scale_back() {
        let scale = LossScale::FIRST.after(true).after(false);
        assert_eq!(LossScale::read(&scale.elements()), Some(scale));
        assert_eq!(LossScale::read(&[16]), None);
        assert_eq!(LossScale::tensor().len(), scale.elements().len());
        assert_eq!(LossScale::read(&[i64::MAX, 0]).and_then(LossScale::factor), None);
    }
}
