//! What a step does to received values before the update: they are decoded and merged along the
//! reduction tree.
//!
//! State tensors have no update rule: the mean of their sum is their next version.

use proto::tensor::{DType, TensorRole};
use proto::wire::WireType;

use crate::cpu::{cast, state, sum};
use crate::storage::{Operand, Storage};

/// How the values of two nodes become those of their parent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Merge {
    /// Their sum, rounded to this type.
    Sum(WireType),
    /// The larger one, for integers.
    Max,
}

impl Merge {
    /// Returns the merge for a tensor of this role at a node below the root. Parameters and state
    /// round to their type in a job that exchanges `wire`.
    pub const fn of(role: TensorRole, wire: WireType) -> Self {
        match role {
            TensorRole::Counter | TensorRole::Register | TensorRole::LossScale => Self::Max,
            TensorRole::Parameter | TensorRole::State => Self::Sum(wire.of(role)),
        }
    }

    /// Returns the merge at the root of a step's tree, where the sum is not rounded.
    pub const fn root(dtype: DType) -> Self {
        match dtype {
            DType::F32 => Self::Sum(WireType::F32),
            DType::I64 => Self::Max,
        }
    }

    /// Returns the element type of the values.
    pub const fn dtype(self) -> DType {
        match self {
            Self::Sum(_) => DType::F32,
            Self::Max => DType::I64,
        }
    }
}

impl Storage {
    /// Writes the values of a payload that was encoded as `wire`, as f32.
    ///
    /// # Panics
    /// If there are more or fewer values than elements, or the elements are integers.
    pub fn decode(&mut self, payload: &[u8], wire: WireType) {
        #[cfg(feature = "cuda")]
        if let Some(buffer) = self.elements_on_device(DType::F32) {
            return buffer.decode(payload, wire);
        }
        cast::decode(wire, payload, self.floats_mut());
    }

    /// Rounds the values to the type `wire`, in place.
    ///
    /// # Panics
    /// If the elements are integers.
    pub fn round(&mut self, wire: WireType) {
        #[cfg(feature = "cuda")]
        if let Some(buffer) = self.elements_on_device(DType::F32) {
            return buffer.round(wire);
        }
        cast::round(wire, self.floats_mut());
    }

    /// Returns the values in the type `wire`, little-endian in memory of the host, rounded where
    /// that is not done yet.
    ///
    /// # Panics
    /// If the elements are integers, or lie on a device that failed.
    pub fn encode(&self, wire: WireType) -> Vec<u8> {
        assert_eq!(self.dtype(), DType::F32, "integers taken as floats");
        #[cfg(feature = "cuda")]
        if let Some(buffer) = self.on_any_device() {
            return buffer.encode(wire).unwrap_or_else(|error| panic!("{error}"));
        }
        cast::encode(wire, self.host())
    }

    /// Merges the values of another node into these.
    ///
    /// # Panics
    /// If types or lengths differ.
    pub fn merge(&mut self, other: Operand<'_>, merge: Merge) {
        #[cfg(feature = "cuda")]
        if let Some(buffer) = self.elements_on_device(merge.dtype()) {
            return match merge {
                Merge::Sum(wire) => buffer.add(other.source(), wire),
                Merge::Max => buffer.max(other.source()),
            };
        }
        match merge {
            Merge::Sum(wire) => cast::add_assign(wire, self.floats_mut(), &other.host()),
            Merge::Max => state::max(self.integers_mut(), &other.host()),
        }
    }

    /// Merges two nodes into memory of its own, in one pass. What this storage held before does not
    /// matter.
    ///
    /// # Panics
    /// If types or lengths differ.
    pub fn merge_of(&mut self, left: Operand<'_>, right: Operand<'_>, merge: Merge) {
        #[cfg(feature = "cuda")]
        if let Some(buffer) = self.elements_on_device(merge.dtype()) {
            return match merge {
                Merge::Sum(wire) => buffer.sum_of(left.source(), right.source(), wire),
                Merge::Max => buffer.max_of(left.source(), right.source()),
            };
        }
        match merge {
            Merge::Sum(wire) if wire.rounds() => {
                cast::add(wire, &left.host(), &right.host(), self.floats_mut());
            }
            Merge::Sum(_) => sum::add(&left.host(), &right.host(), self.floats_mut()),
            Merge::Max => {
                self.write(left);
                self.merge(right, merge);
            }
        }
    }

    /// Writes the next values of a state tensor: the mean of the `count` values that were summed.
    ///
    /// # Panics
    /// If types or lengths differ, or `count` is 0 or above 2^24.
    pub fn mean_of(&mut self, sum: Operand<'_>, count: u64) {
        #[cfg(feature = "cuda")]
        if let Some(buffer) = self.elements_on_device(DType::F32) {
            return buffer.mean_of(sum.source(), count);
        }
        state::mean(&sum.host(), count, self.floats_mut());
    }
}
