//! The agreement between two Ebbflow processes. No socket, file, clock or thread.
//!
//! | module | agreement |
//! | --- | --- |
//! | [`pb`], [`convert`] | the wire schema, and how its messages are checked |
//! | [`spec`], [`optimizer`] | a job's specification |
//! | [`column`] | the columns of records |
//! | [`metrics`] | what an evaluation counts, and how counts merge |
//! | [`worst`] | the records with the largest losses in an evaluation |
//! | [`plan`], [`random`] | the numbering of a job's work |
//! | [`tree`], [`wire`] | the order and the rounding of sums |
//! | [`placement`] | where parameters live |
//! | [`tensor`], [`parameters`] | values, and the calls that exchange them |
//! | [`checkpoint`] | how a job's state rests on a store |
//! | [`predictions`] | the parts of predictions, and their names |
//! | [`script`], [`bundle`] | scripts that travel to a cluster, their files |
//! | [`requirements`] | which requirements a script may have |
//! | [`tail`] | the newest lines of a process |
//! | [`status`], [`retry`] | what failures mean, and when to try again |

pub mod artifact;
pub mod bundle;
pub mod checkpoint;
pub mod column;
pub mod convert;
pub mod dtype;
pub mod duration;
pub mod error;
pub mod hint;
pub mod ids;
pub mod loss_scale;
mod metric;
pub mod metrics;
pub mod numerics;
pub mod optimizer;
pub mod parameters;
pub mod placement;
pub mod plan;
pub mod predictions;
pub mod random;
pub mod register;
pub mod requirements;
pub mod retry;
pub mod script;
pub mod secret;
pub mod selection;
pub mod size;
pub mod spec;
pub mod status;
pub mod tail;
pub mod tensor;
pub mod tree;
pub mod wire;
pub mod worst;

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

/// Returns whether a process of version `other` may join one of this version: equal major and minor
/// numbers.
pub fn compatible(other: &str) -> bool {
    let minor = |version: &str| version.split('.').take(2).map(str::to_owned).collect::<Vec<_>>();
    minor(other) == minor(PROGRAM_VERSION)
}
