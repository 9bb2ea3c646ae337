//! The master: hands out data and knows who is alive. Training data and gradients never pass
//! through it.
//!
//! A pure core decides, an edge acts. The core is values and functions with the time as an
//! argument: the books of a master hold the fleet and its jobs, a job holds what is handed out of
//! its training. The edge holds the books under one short lock, takes calls, keeps files, and
//! speaks to ps.
//!
//! ```text
//! edge:   service/{jobs,fleet,..} --> shared (lock, clock, effects)
//!                                          --> ps_client, artifacts, journal
//! core:                            books = membership + jobs + scripts
//!                                          job = tasks + dispatcher + losses + evaluations
//! ```
//!
//! What must survive a restart is written to a journal before anybody outside hears of it: jobs,
//! placements, eras, events. Tasks and leases are not: the ledgers of the ps say what is done. Of
//! several masters with one journal in etcd one leads (`candidate`); whatever another one believes,
//! it can neither write (`etcd`) nor answer (`gate`).

mod applied;
mod artifacts;
mod asking;
mod books;
mod candidate;
mod checkpoints;
mod clock;
mod config;
mod device;
mod dispatcher;
mod ended;
mod error;
mod etcd;
mod events;
#[doc(hidden)]
pub mod fuzz;
mod gate;
mod incoming;
mod indexes;
mod job;
mod journal;
mod lease;
mod membership;
mod metrics;
mod owner;
mod patience;
mod progress;
mod ps_address;
mod ps_client;
mod scheduler;
mod scripts;
mod secrets;
mod server;
mod service;
mod shared;
mod speeds;
mod tasks;
mod why;

pub use candidate::{Outside, run_elected};
#[doc(hidden)]
pub use clock::Clock;
pub use config::{ElectionOptions, Options};
pub use error::{Error, Result, StoreError};
pub use journal::{Batch, Count, Entry, FileStore, MemoryStore, Store};
pub use metrics::Metrics;
pub use server::{Master, run};
