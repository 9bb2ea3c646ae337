//! Arithmetic on parameters: optimizer rules, sums of the reduction tree, casts, norms.
//!
//! [`cpu`] has the kernels, as functions on slices of host memory.

pub mod cpu;
pub mod norm;
pub mod optimizer;
pub mod parallel;

pub use cpu::dispatch::Slot;
pub use norm::Squares;
pub use optimizer::{Optimizer, Update};
