//! The worker leases pieces of the data, computes gradients and pushes them. It keeps nothing that
//! it could not pull again.
//!
//! [`run`] is the whole role. The crates `data` and `model` have the computation.

mod ahead;
mod artifact;
mod bad;
mod blocking;
mod compute;
pub mod config;
pub mod device;
pub mod error;
pub mod exchange;
mod fetcher;
mod held;
mod in_flight;
mod initial;
mod job;
mod master_client;
mod merging;
pub mod metrics;
mod other_tasks;
mod predict;
mod progress;
mod reporter;
mod task_loop;
mod tokenizers;
mod trainer;
mod training_weights;
mod waits;
mod work;
mod worst;

pub use config::{Options, ProgramDevice, ReadAhead};
pub use error::{Error, Result};
pub use exchange::Connector;
pub use metrics::Metrics;
pub use task_loop::{Watched, run};
