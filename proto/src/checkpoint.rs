//! Format of checkpoints on a store.
//!
//! ```text
//! <url>/<job name>/v0000001200/
//!     partition-00000-of-00003-0a1b2c3d.safetensors      written by each ps, for its partition
//!     partition-00001-of-00003-4e5f6071.safetensors
//!     partition-00002-of-00003-8293a4b5.safetensors
//!     manifest.json                                      written last, by the master
//! <url>/<job name>/script-<sha256>.pt                    TorchScript module, once for all versions
//! ```
//!
//! Always true here:
//!
//! - A folder without a [manifest](manifest::Manifest) is no checkpoint. The master writes the
//!   manifest after every file that it names is durable. So a crash never leaves a folder that
//!   looks like a checkpoint and is incomplete.
//! - A data file never changes: its name ends with the checksum of its header, and the header has
//!   the checksums of the values. Writing the file again writes the same bytes.
//! - The chain of checksums (CRC-32C) has no gap: the manifest has its own and those of the
//!   headers, and each header has those of its values. A reader that needs one chunk checks only
//!   that chunk. CRC-32C finds accidents, not forgery. It runs at memory speed, where SHA-256 would
//!   be slower than the disk.
//! - Nothing in a data file depends on the clock, the era or the fleet: equal tensors give equal
//!   bytes.

pub mod data;
mod error;
pub mod manifest;
pub mod trained_on;

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

pub use self::error::{Error, Result};
use crate::ids::{PartitionId, Step, Version};

/// Name of the manifest in a checkpoint's folder.
pub const MANIFEST: &str = "manifest.json";

/// Prefix of the probe files with which the master and a ps find out whether they see one store.
/// Probe files lie in the job's folder for a moment.
pub const PROBE: &str = "probe-";

/// Largest manifest that a reader accepts, in bytes. A manifest lists the tensors of a model.
pub const MANIFEST_BYTES_MAX: u64 = 256 << 20;

/// Returns the folder of one checkpoint, below the store's URL.
///
/// ```
/// use proto::checkpoint::{folder, version_of};
/// use proto::ids::Version;
///
/// assert_eq!(folder("digits", Version(1200)), "digits/v0000001200");
/// assert_eq!(version_of("v0000001200"), Some(Version(1200)));
/// ```
pub fn folder(job: &str, version: Version) -> String {
    format!("{job}/{}", folder_name(version))
}

/// Returns the name of a version's folder, below the job's folder.
pub fn folder_name(version: Version) -> String {
    format!("v{:010}", version.get())
}

/// Returns the version of the folder `name`, or `None` for a name that [`folder_name`] does not
/// give.
pub fn version_of(name: &str) -> Option<Version> {
    let version = Version(name.strip_prefix('v')?.parse().ok()?);
    (folder_name(version) == name).then_some(version)
}

/// Returns the name of a partition's data file whose header has the checksum `header_crc32c`.
pub fn file_name(partition: PartitionId, partitions: u32, header_crc32c: u32) -> String {
    format!("{}-{header_crc32c:08x}.safetensors", file_stem(partition, partitions))
}

/// Returns the prefix of the names of a partition's data files.
pub fn file_stem(partition: PartitionId, partitions: u32) -> String {
    format!("partition-{:05}-of-{partitions:05}", partition.get())
}

/// Alignment of direct writes, in bytes: offset, length and memory address are multiples of it. All
/// disks that we know accept 4096.
pub const ALIGNED: usize = 4096;

/// The applied steps of a partition: all below the watermark, and some above it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AppliedSteps {
    /// The first step that is not applied. All steps below it are.
    pub watermark: Step,
    /// Applied steps above the watermark.
    pub above: BTreeSet<Step>,
    /// Records of the applied steps that were left out, because they are bad.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub samples_skipped: u64,
    /// Number of the applied steps that overflowed, see
    /// [`LossScale`](crate::loss_scale::LossScale).
    #[serde(default, skip_serializing_if = "is_zero")]
    pub overflows: u64,
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
const fn is_zero(count: &u64) -> bool {
    *count == 0
}

impl AppliedSteps {
    /// Returns the number of applied steps.
    pub fn version(&self) -> Version {
        Version(self.watermark.get().saturating_add(self.above.len() as u64))
    }

    /// Returns whether a ledger can have these steps at `version` in a job of `steps` steps.
    pub fn is_valid(&self, version: Version, steps: u64) -> bool {
        let above = self.above.first().is_none_or(|&first| first > self.watermark);
        let last = self.above.last().is_none_or(|last| last.get() < steps);
        above && last && self.watermark.get() <= steps && self.version() == version
    }
}
