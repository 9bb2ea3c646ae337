//! The parameter server: holds partitions of any number of jobs and applies the optimizer to them.
//!
//! One gradient on its way through this crate: [`service`](server::serve) decodes it, [`Ps`] finds
//! its partition, which checks the header and reserves memory. The partition takes the chunks as
//! they come, offers their sums to the [`aggregator`] (which only decides), and lets the optimizer
//! of the crate `kernels` turn weights of version v into those of v + 1 in recycled [memory](pool).
//! The [`ledger`] writes down which steps are applied. Pulls wait for versions and share their
//! buffers; so do [checkpoints](checkpoint).
//!
//! [`server::run`] is a whole ps process. [`Ps`] also implements [`proto::parameters::Parameters`],
//! so that workers of the same process use it without a socket and without a copy.

mod admission;
pub mod aggregator;
mod attached;
pub mod checkpoint;
mod checks;
pub mod chunk;
pub mod config;
mod device;
pub mod error;
pub mod ledger;
pub mod metrics;
mod opening;
mod partition;
mod partitions;
pub mod pool;
pub mod server;
mod service;
mod versions;

pub use config::Options;
pub use error::{Error, Result};
pub use kernels::Device;
pub use opening::{Applied, Opening, Place};
pub use partitions::{MasterStart, Ps};
pub use server::run;
