//! The type in which the values of parameters are exchanged: which values are rounded to it, and
//! how many bytes they travel in.
//!
//! Rounding and encoding do not need each other (ADR 18). *Rounding* is part of what a job
//! computes: every node of the reduction tree below the root, and the weights that gradients are
//! computed from, have values of this type wherever they are. *Encoding* is how those values travel
//! where bytes are dear: two for each value, without loss. The crate `kernels` has the conversions.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::dtype::TensorRole;
use crate::tree::Node;

/// Type in which the values of parameters are exchanged between workers and ps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WireType {
    /// 32-bit IEEE float: values are not rounded.
    #[default]
    F32,
    /// bfloat16: the range of f32, 8 significant bits.
    Bf16,
    /// 16-bit IEEE float: up to 65504, 11 significant bits.
    F16,
}

impl fmt::Display for WireType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
            Self::F16 => "f16",
        })
    }
}

impl WireType {
    /// Returns whether values are rounded to this type.
    pub const fn rounds(self) -> bool {
        !matches!(self, Self::F32)
    }

    /// Returns the bytes of one encoded float.
    pub const fn size(self) -> usize {
        if self.rounds() { 2 } else { 4 }
    }

    /// Returns the type for a tensor of this role. Only parameters are rounded, all others are
    /// exchanged whole.
    pub const fn of(self, role: TensorRole) -> Self {
        match role {
            TensorRole::Parameter => self,
            TensorRole::State | TensorRole::Counter | TensorRole::Register | TensorRole::LossScale => {
                Self::F32
            }
        }
    }

    /// Returns whether a worker may sum up a node of the tree over `of` microbatches. The sum of a
    /// whole step is not rounded, so it does not travel in a 16-bit type: the ps makes it from its
    /// two halves. A step of one microbatch has no sum.
    pub fn worker_sums(self, node: Node, of: u32) -> bool {
        !self.rounds() || of == 1 || node != Node::root(of)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn workers_leave_the_sum_of_a_whole_step_to_the_ps() {
        for (wire, of, expected) in
            [(WireType::F32, 4, true), (WireType::Bf16, 4, false), (WireType::F16, 1, true)]
        {
            assert_eq!(wire.worker_sums(Node::root(of), of), expected, "{wire}, M = {of}");
        }
        assert!(WireType::Bf16.worker_sums(Node::new(0, 2), 4));
    }

    #[test]
    fn only_parameters_are_rounded() {
        assert_eq!(WireType::F16.of(TensorRole::Parameter), WireType::F16);
        assert_eq!(
            [TensorRole::State, TensorRole::Counter, TensorRole::Register].map(|role| WireType::F16.of(role)),
            [WireType::F32; 3]
        );
    }
}
