//! Arithmetic on parameters: optimizer rules, sums of the reduction tree, casts between wire types,
//! norms, and the products of a dense layer.
//!
//! A caller works on [`Storage`], and no signature at this level says in which memory values lie: a
//! [`Device`] makes storage, and operations run where it lies. [`cpu`] has the kernels for memory
//! of the host, as functions on slices.
//!
//! | module | what it does |
//! | --- | --- |
//! | [`device`] | makes storage: the processor of the host, or a CUDA device |
//! | [`storage`] | values, whatever memory they lie in |
//! | [`merge`] | decodes received values; merges two nodes of the reduction tree |
//! | [`optimizer`] | works out the scalars of a step; its [`Update`] makes the next weights |
//! | [`groups`] | the optimizers of a model whose tensors have settings of their own |
//! | [`norm`] | what an update needs to know about the whole model first |
//! | [`levels`] | floats in place of bytes, for inputs of a model |
//! | [`dense`] | the products of a dense layer, for the pure engine |
//! | [`parallel`] | chunks spread over threads |
//! | [`cpu`] | the kernels for memory of the host |
//! | [`values`] | values that a worker passes on, on the host or on a device |
//! | [`telemetry`] | how busy, warm and well CUDA devices are |
//!
//! **Invariant:** the result of an operation does not depend on the implementation, the memory or
//! the number of threads: no bit of it. So a kernel never fuses a multiplication with an addition
//! and adds in one fixed order.

pub mod cpu;
#[cfg(any(test, feature = "cuda"))]
pub mod cuda;
pub mod dense;
pub mod device;
pub mod error;
pub mod groups;
pub mod levels;
pub mod merge;
pub mod norm;
pub mod optimizer;
pub mod parallel;
mod slot;
pub mod storage;
pub mod telemetry;
#[cfg(not(feature = "cuda"))]
mod unopened;
mod update;
pub mod values;

#[cfg(feature = "cuda")]
pub use cuda::{ForeignEvent, Opened, Part};
pub use device::Device;
pub use error::Error;
pub use groups::{Optimizers, Updates};
pub use levels::Levels;
pub use merge::Merge;
pub use norm::Squares;
pub use optimizer::{Optimizer, Update};
pub use storage::{Operand, Slot, Storage};
#[cfg(not(feature = "cuda"))]
pub use unopened::{ForeignEvent, Opened, Part};
pub use update::{Gradient, Measurement, Pass};
