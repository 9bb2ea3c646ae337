//! The master: hands out data and knows who is alive. Training data and gradients never pass through it.
//!
//! A pure core decides, an edge acts. The core is values and functions with the time as an argument: the books of a
//! master hold the fleet and its jobs, a job holds what is handed out of its training. The edge holds the
//! books under one short lock, takes calls, keeps files, and speaks to ps.
//!
//! ```text
//!   service/{jobs,fleet}  --->  server (lock, clock, effects)  --->  ps_client, artifacts        the edge
//!                                  books = membership + jobs                                      the core
//!                                          job = tasks + dispatcher + losses + evaluations
//! ```
//!
//! Jobs live in memory in this version: a master that starts again knows none of the jobs of the one before, and workers and
//! ps let go of them. What they exported stays in the data folder.

mod applied;
mod artifacts;
mod books;
mod clock;
mod config;
mod dispatcher;
mod error;
mod events;
mod job;
mod lease;
mod membership;
mod metrics;
mod ps_client;
mod server;
mod service;
mod tasks;

#[doc(hidden)]
pub use clock::Clock;
pub use config::Options;
pub use error::{Error, Result};
pub use metrics::{Metric, Metrics};
pub use server::{Master, run};
