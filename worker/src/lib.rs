//! The worker: leases pieces of the data, computes gradients, pushes them. It keeps nothing that it could not pull again.
//!
//! [`run`] is the whole role. [`model::Model`] is the seam to the compute engines, and where a user's own network goes.

mod artifact;
mod compute;
pub mod config;
pub mod data;
pub mod device;
pub mod engine;
pub mod error;
pub mod export;
mod fetcher;
mod grpc_ps;
mod held;
mod in_flight;
mod initial;
mod job;
mod master_client;
pub mod metrics;
pub mod model;
mod near;
mod other_tasks;
mod progress;
pub mod ps_client;
mod reporter;
mod task_loop;
mod trainer;
pub mod weights;

pub use config::Options;
pub use error::{Error, Result};
pub use metrics::Metrics;
pub use ps_client::Connector;
pub use task_loop::{Watched, run};
