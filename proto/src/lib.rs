//! What two Ebbflow processes must agree on.
//!
//! The wire schema ([`pb`]), the job's specification ([`spec`]), the numbering of its work ([`plan`]), the order of
//! its sums ([`tree`]), where its parameters live ([`placement`]), how values travel ([`tensor`], [`wire`],
//! [`channel`], [`convert`]), how a job's state rests ([`checkpoint`]), who may do what ([`security`]), and what errors mean ([`status`],
//! [`retry`], [`failover`]). Roles meet here and nowhere else.

pub mod artifact;
pub mod bulk;
pub mod channel;
pub mod checkpoint;
pub mod convert;
pub mod duration;
pub mod error;
pub mod failover;
pub mod health;
pub mod hint;
pub mod ids;
pub mod memory;
pub mod metrics;
pub mod numerics;
pub mod optimizer;
pub mod parameters;
pub mod placement;
pub mod plan;
pub mod random;
pub mod retry;
pub mod security;
pub mod session;
pub mod spec;
pub mod status;
pub mod tensor;
pub mod timeline;
pub mod tree;
pub mod wire;

pub use error::{Error, Result};

/// The generated schema. Its fields are documented in `ebbflow/v1/*.proto`.
#[allow(
    missing_docs,
    unreachable_pub,
    clippy::all,
    reason = "generated; the .proto files are the documentation"
)]
pub mod pb {
    tonic::include_proto!("ebbflow.v1");

    /// The compiled schema, for gRPC reflection.
    pub const FILE_DESCRIPTOR_SET: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/descriptors.bin"));
}

/// Version of this program. Processes of another major or minor version are refused.
pub const PROGRAM_VERSION: &str = env!("CARGO_PKG_VERSION");

/// Whether a process of `other` version may join one of this version: equal major and minor numbers.
pub fn compatible(other: &str) -> bool {
    let minor = |version: &str| version.split('.').take(2).map(str::to_owned).collect::<Vec<_>>();
    minor(other) == minor(PROGRAM_VERSION)
}
