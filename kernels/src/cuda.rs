//! Kernels for CUDA devices, and the memory that they work on.
//!
//! Each `.cu` file has the twin of the file of its name in [`cpu`](crate::cpu). NVRTC compiles all
//! of them as one text, when a device is opened. Tests compile the same text with the host's C++
//! compiler and compare the bits with the kernels of the host.
//!
//! Always true here:
//!
//! - A kernel gives the bits of its twin, a NaN's payload aside. The scalars of a step are one
//!   struct, which both twins take.
//! - Nothing here needs CUDA to build or to start. Without the feature `cuda`, only tests see this
//!   module.
//!
//! No kernel has run on a real device yet. ADR 30 says what is proven without one.

#[cfg(feature = "cuda")]
mod cache;
#[cfg(feature = "cuda")]
pub(crate) mod compiler;
#[cfg(feature = "cuda")]
pub(crate) mod dense;
#[cfg(feature = "cuda")]
mod device;
#[cfg(feature = "cuda")]
mod foreign;
#[cfg(test)]
mod host;
#[cfg(feature = "cuda")]
pub(crate) mod ipc;
pub(crate) mod launch;
#[cfg(feature = "cuda")]
pub(crate) mod levels;
#[cfg(feature = "cuda")]
pub(crate) mod memory;
#[cfg(feature = "cuda")]
pub(crate) mod nvml;
#[cfg(feature = "cuda")]
pub(crate) mod registered;
#[cfg(feature = "cuda")]
mod staging;
#[cfg(test)]
mod tests;
#[cfg(feature = "cuda")]
pub(crate) mod update;

#[cfg(feature = "cuda")]
pub use self::device::Device;
#[cfg(feature = "cuda")]
pub use self::foreign::ForeignEvent;
pub use self::ipc::{Handle, Opened, Part};
#[cfg(feature = "cuda")]
pub use crate::error::Error;

/// The text of all kernels. It includes no header.
pub const SOURCE: &str = concat!(
    include_str!("cuda/common.cuh"),
    include_str!("cuda/sgd.cu"),
    include_str!("cuda/momentum.cu"),
    include_str!("cuda/adam.cu"),
    include_str!("cuda/adagrad.cu"),
    include_str!("cuda/rmsprop.cu"),
    include_str!("cuda/adadelta.cu"),
    include_str!("cuda/ftrl.cu"),
    include_str!("cuda/lamb.cu"),
    include_str!("cuda/norm.cu"),
    include_str!("cuda/sum.cu"),
    include_str!("cuda/cast.cu"),
    include_str!("cuda/state.cu"),
    include_str!("cuda/fill.cu"),
    include_str!("cuda/dense.cu"),
    include_str!("cuda/levels.cu"),
);
