//! The exchange between worker and ps as a Rust trait. The ps itself implements it, for workers of
//! the same process, and so do the worker's carriers for all others: socket and shared memory. Both
//! sides of the wire check what they receive in [`convert`](crate::convert).

use std::time::Duration;

use crate::ids::{ChunkId, Era, JobId, PartitionId, Version};
use crate::status::Failure;
use crate::tensor::Chunk;
use crate::tree::StepNode;
use crate::wire::WireType;

/// Who is spoken to, and in which era.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Address {
    /// The job.
    pub job: JobId,
    /// The receiver's part of it.
    pub partition: PartitionId,
    /// The sender's era; the receiver refuses an older one than its own.
    pub era: Era,
}

/// A checkpoint that a partition is opened with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Restore {
    /// Folder that has its manifest.
    pub url: String,
    /// Its version, at least 1.
    pub version: Version,
}

/// What a push brings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// Version 0.
    Initial,
    /// The sum below a node of a step's reduction tree, over `samples` records.
    Node {
        /// Which node.
        node: StepNode,
        /// Records below it.
        samples: u64,
    },
}

/// One push: all chunks of a partition, in increasing order of their ids.
#[derive(Clone, Debug)]
pub struct Push {
    /// Where to.
    pub address: Address,
    /// What for.
    pub target: Target,
    /// What the values of parameters are rounded to: they may travel in this type.
    pub wire: WireType,
    /// The values; those of parameters are f32 here.
    pub chunks: Vec<Chunk>,
}

/// What a push did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Added to its step, which still lacks others.
    Merged,
    /// Completed its step, or version 0.
    Completed,
    /// Brought nothing new; dropped.
    Duplicate,
}

/// Answer to a push.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pushed {
    /// What it did.
    pub outcome: Outcome,
    /// Version of the partition after it.
    pub version: Version,
}

/// Which weights a pull needs: this is the barrier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Want {
    /// Exactly this version (canonical order, evaluation, export).
    Exact(Version),
    /// The newest, once all steps below this one are applied (arrival order).
    AtLeast(Version),
}

/// One pull of a whole partition.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pull {
    /// Where from.
    pub address: Address,
    /// Which weights.
    pub want: Want,
    /// Longest time to wait for them.
    pub wait: Duration,
    /// What the receiver rounds the values of parameters to: they may travel in this type.
    pub wire: WireType,
}

/// Answer to a pull: all chunks of the partition at one version.
#[derive(Clone, Debug)]
pub struct Pulled {
    /// Number of steps applied to them.
    pub version: Version,
    /// The values, in increasing order of the ids.
    pub chunks: Vec<Chunk>,
}

/// Who gets the chunks of a pull, one after the other: the type that the values of parameters came in, and the values. They may be another
/// process's memory and are there only during the call.
pub type Take<'a> = dyn FnMut(ChunkId, WireType, &[u8]) -> Result<(), Failure> + Send + 'a;

/// A ps as a worker sees it.
#[async_trait::async_trait]
pub trait Parameters: Send + Sync + 'static {
    /// Sends one node of a step's reduction tree, or version 0.
    ///
    /// Returns when the ps has taken the node up: a push that completes the next step returns after the update (before it,
    /// when the update needs norms of other partitions), any other as soon as its sum waits for its sibling. It never waits for other
    /// workers.
    ///
    /// The chunks are shared, not copied: the ps or the connection keeps them until their step is applied, they are added to others, or
    /// they are sent. Clones that the caller keeps stay valid.
    ///
    /// A caller may drop the future. The push then counts whole or not at all, and may be repeated: the ps acknowledges a repeat and
    /// drops it.
    ///
    /// # Errors
    /// [`Failure`] says whether trying again can help.
    async fn push(&self, push: Push) -> Result<Pushed, Failure>;

    /// Reads a partition at a version, waiting until it exists: hands every chunk to `take` as it comes, in increasing order
    /// of the ids, then answers the version.
    ///
    /// Returns when `take` has seen all chunks, or after the wait that `pull` allows. The values belong to the ps: they are there only
    /// during the call of `take`, which copies what the caller needs. After an error, or when the caller drops the future, `take` may
    /// have seen some of them.
    ///
    /// # Errors
    /// [`Kind::NotYet`](crate::status::Kind::NotYet) when it did not come in time, [`Kind::Gone`](crate::status::Kind::Gone)
    /// when an exact version is no longer kept, which means that its steps are applied; and what `take` answers.
    async fn pull_into(&self, pull: Pull, take: &mut Take<'_>) -> Result<Version, Failure>;
}
