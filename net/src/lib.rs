//! Transport between Ebbflow processes: connections, permissions, and memory that two processes of
//! a host share.
//!
//! | module | what |
//! | --- | --- |
//! | [`channel`] | connections, and the server that takes them |
//! | [`bulk`] | payloads past tonic's codec |
//! | [`security`] | certificates, tokens, and the table of calls |
//! | [`ps_client`] | one connection to each ps, and calls over it |
//! | [`relay`] | calls of a script's process by way of its agent |
//! | [`failover`] | which master leads |
//! | [`session`], [`retry`] | registration and heartbeats, repeated calls |
//! | [`memory`] | memory that other processes of this host read |
//! | [`health`], [`metrics`], [`timeline`] | a process's reports on itself, and traces of calls |

pub mod bulk;
pub mod channel;
#[cfg(target_os = "linux")]
mod descriptors;
pub mod failover;
pub mod health;
pub mod memory;
pub mod metrics;
pub mod ps_client;
pub mod relay;
pub mod retry;
pub mod security;
pub mod session;
pub mod timeline;
