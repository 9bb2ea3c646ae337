//! The exchange between worker and ps as a Rust trait. The ps itself implements it, for workers of
//! the same process, and so do the worker's carriers for all others: socket and shared memory. Both
//! sides of the wire check what they receive in [`convert`](crate::convert).

use std::ops::Range;
use std::time::Duration;

use futures::TryStreamExt as _;
use futures::stream::BoxStream;

use crate::ids::{ChunkId, Era, JobId, PartitionId, Version};
use crate::status::Failure;
use crate::tensor::{Chunk, DeviceMemory};
use crate::tree::StepNode;
use crate::wire::WireType;

/// Receiver of a push or pull, with the sender's era.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Address {
    /// The job.
    pub job: JobId,
    /// Partition that the receiver holds.
    pub partition: PartitionId,
    /// Era of the sender. A ps refuses a call whose era is older than its own.
    pub era: Era,
}

/// Checkpoint from which a partition is opened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Restore {
    /// Folder of the checkpoint, with its manifest.
    pub url: String,
    /// Version of the checkpoint, at least 1.
    pub version: Version,
}

/// Content of a push.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// Initial weights: version 0.
    Initial,
    /// Sum below a node of a step's reduction tree.
    Node {
        /// Node of the tree.
        node: StepNode,
        /// Number of records below the node.
        samples: u64,
    },
}

/// One push: all chunks of a partition, in increasing order of their ids.
#[derive(Clone, Debug)]
pub struct Push {
    /// Receiver of the push.
    pub address: Address,
    /// Content of the push.
    pub target: Target,
    /// Type to which the values of parameters are rounded. They may travel in it.
    pub wire: WireType,
    /// Values of the chunks. Those of parameters are f32 here.
    pub chunks: Vec<Chunk>,
}

impl Push {
    /// Waits for all chunks, and returns the push with them.
    ///
    /// # Errors
    /// The failure of `coming`.
    pub async fn with(self, coming: ComingChunks) -> Result<Self, Failure> {
        let mut chunks = coming.try_concat().await?;
        chunks.sort_unstable_by_key(|chunk| chunk.id);
        Ok(Self { chunks, ..self })
    }
}

/// Chunks of a push whose values are still being made: some at a time, in any order, each once. The
/// last one comes only when the push shall count. A failure ends the stream before.
pub type ComingChunks = BoxStream<'static, Result<Vec<Chunk>, Failure>>;

/// Effect of a push.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The sum was added to its step, which still lacks other nodes.
    Merged,
    /// The push completed its step, or version 0.
    Completed,
    /// The push brought nothing new and was dropped.
    Duplicate,
}

/// Answer to a push.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pushed {
    /// Effect of the push.
    pub outcome: Outcome,
    /// Version of the partition after the push.
    pub version: Version,
}

/// Weights that a pull needs. A pull waits for them: this is the barrier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Want {
    /// Exactly this version (canonical order, evaluation, export).
    Exact(Version),
    /// The newest version, once all steps below this one are applied (arrival order).
    AtLeast(Version),
}

/// One pull of a whole partition.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pull {
    /// Receiver of the pull.
    pub address: Address,
    /// Weights that the pull needs.
    pub want: Want,
    /// Longest wait for the weights.
    pub wait: Duration,
    /// Type to which the receiver rounds the values of parameters. They may travel in it.
    pub wire: WireType,
    /// The receiver is a model on a device, and takes values where they lie there. Others get them
    /// in memory of the host.
    pub on_device: bool,
}

/// Answer to a pull: all chunks of the partition at one version.
#[derive(Clone, Debug)]
pub struct Pulled {
    /// Number of steps applied to the weights.
    pub version: Version,
    /// Chunks in increasing order of their ids.
    pub chunks: Vec<Chunk>,
}

/// Receives the chunks of a pull, one call each: chunk, type of the values, the values.
pub type Take<'a> = dyn FnMut(ChunkId, WireType, GivenValues<'_>) -> Result<(), Failure> + Send + 'a;

/// Values of a chunk that a pull hands over, where they lie.
#[derive(Clone, Debug)]
pub enum GivenValues<'a> {
    /// Little-endian bytes in memory of the host, which may be that of another process. They are
    /// valid only during the call.
    Host(&'a [u8]),
    /// These bytes of memory of a device. They stay as they are until what the call has told the
    /// device to do is done.
    Device(&'a dyn DeviceMemory, Range<usize>),
}

impl GivenValues<'_> {
    /// Returns the number of bytes of all values.
    pub fn len(&self) -> usize {
        match self {
            Self::Host(values) => values.len(),
            Self::Device(_, bytes) => bytes.len(),
        }
    }

    /// Returns whether there are no values.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// A ps as a worker sees it.
#[async_trait::async_trait]
pub trait Parameters: Send + Sync + 'static {
    /// Sends one node of a step's reduction tree, or version 0.
    ///
    /// A push that completes the next step returns after the update, or before it if the update
    /// needs norms of other partitions. Any other push returns as soon as its sum waits for its
    /// sibling. No push waits for other workers.
    ///
    /// The chunks are shared, not copied. The ps or the connection keeps them until their step is
    /// applied, they are added to others, or they are sent. Clones that the caller keeps stay
    /// valid.
    ///
    /// The caller may drop the future. The push then counts whole or not at all, and may be
    /// repeated: the ps acknowledges a repeat and drops it.
    ///
    /// # Errors
    /// [`Failure`] says whether a retry may help.
    async fn push(&self, push: Push) -> Result<Pushed, Failure>;

    /// Sends a push without chunks, whose chunks are `coming` while the call runs. It counts whole
    /// or not at all, and not before the last of them has come.
    ///
    /// Default: waits for all of them, then calls [`push`](Self::push). A carrier that can send
    /// some of them before the others are made saves that time.
    ///
    /// # Errors
    /// The errors of [`push`](Self::push), and the failure of `coming`.
    async fn push_coming(&self, push: Push, coming: ComingChunks) -> Result<Pushed, Failure> {
        self.push(push.with(coming).await?).await
    }

    /// Reads a partition at a version, and waits until that exists. Passes every chunk to `take` as
    /// it arrives, in increasing order of the ids, and returns the version.
    ///
    /// The pull returns when `take` has seen all chunks, or after the wait that `pull` allows. The
    /// values belong to the ps. They are valid only during the call of `take`, which copies what
    /// the caller needs. After an error, or when the caller drops the future, `take` may have seen
    /// some of them.
    ///
    /// # Errors
    /// - [`Kind::NotYet`](crate::status::Kind::NotYet): the version did not exist in time.
    /// - [`Kind::Gone`](crate::status::Kind::Gone): an exact version is no longer kept, so its
    ///   steps are applied.
    /// - Errors of `take`.
    async fn pull_into(&self, pull: Pull, take: &mut Take<'_>) -> Result<Version, Failure>;
}
