//! Types of tensor elements, and the effect of a step on a tensor.

use serde::{Deserialize, Serialize};

/// Type of a tensor's elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DType {
    /// 32-bit IEEE float.
    F32,
    /// 64-bit signed integer.
    I64,
}

impl DType {
    /// Returns the bytes of one element.
    pub const fn size(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::I64 => 8,
        }
    }
}

/// Effect of a step on a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TensorRole {
    /// The optimizer updates it from the mean gradient (f32).
    Parameter,
    /// The tensor becomes the mean of the M values that the microbatches report (f32).
    State,
    /// The tensor becomes the maximum of the M values that the microbatches report (i64).
    Counter,
    /// Each element becomes the maximum of what it was and of the M values that the microbatches
    /// report (i64). [`register`](crate::register) keeps bytes in it.
    Register,
    /// The tensor becomes what follows from its value and from whether the step overflowed (i64).
    /// [`LossScale`](crate::loss_scale::LossScale) has the values. What microbatches report does
    /// not matter. In a job with such a tensor, a step whose gradient is not finite changes neither
    /// parameters nor state.
    LossScale,
}

impl TensorRole {
    /// Returns the only element type a tensor of this role may have.
    pub const fn dtype(self) -> DType {
        match self {
            Self::Parameter | Self::State => DType::F32,
            Self::Counter | Self::Register | Self::LossScale => DType::I64,
        }
    }
}
