//! The worker: leases pieces of the data, computes gradients, pushes them. It keeps nothing that it could not pull again.

pub mod data;
pub mod device;
pub mod engine;
pub mod error;
pub mod model;

pub use error::{Error, Result};
