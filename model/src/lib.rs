//! The interface to compute engines, and the engines: from a batch and weights to gradients.
//!
//! | file | what |
//! | --- | --- |
//! | `model.rs` | [`Model`], which a user's own network implements too, and its inputs |
//! | `inputs.rs` | the inputs of a batch in memory of the device that computes |
//! | [`engines`] | Ebbflow's networks, their engines, and the [`Registry`] of a job's choices |
//! | [`metrics`] | what an evaluation counts of outputs and labels |
//! | [`device`] | devices that compute gradients |
//! | [`fault`] | what an engine's error says of a device |
//! | [`weights`] | weights in memory that the next pull uses again |
//! | [`export`] | a model's tensors as one file that PyTorch reads |

pub mod device;
pub mod engines;
pub mod error;
pub mod export;
pub mod fault;
mod inputs;
pub mod metrics;
mod model;
pub mod weights;

pub use device::Device;
pub use engines::{Registry, ScriptEngine};
pub use error::{Error, Result};
pub use inputs::Inputs;
pub use model::{Allocator, Context, Evaluation, Gradients, Model, OwnMemory, TakeGradient, Upcoming};
pub use weights::Weights;
