//! Checkpoints as they lie on a store.
//!
//! ```text
//! <url>/<job name>/v0000001200/
//!     partition-00000-of-00003-0a1b2c3d.safetensors      written by each ps, for its partition
//!     partition-00001-of-00003-4e5f6071.safetensors
//!     partition-00002-of-00003-8293a4b5.safetensors
//!     manifest.json                                      written last, by the master
//! <url>/<job name>/script-<sha256>.pt                    the job's TorchScript module, if it has one: once for all versions
//! ```
//!
//! Always true here:
//!
//! - Without its [manifest](manifest::Manifest) a folder is no checkpoint; the manifest is written when every file that it names
//!   lies safe. So whatever dies on the way, what looks like a checkpoint is a whole one.
//! - A data file never changes: its name ends with the checksum of its header, and the header has the checksum of everything else.
//!   Writing it again writes the same bytes.
//! - The chain of checksums (CRC-32C) has no gap: the manifest's own, in it those of the headers, in them those of the values. A
//!   reader that needs one chunk checks that chunk. CRC-32C finds accidents, not forgery, and runs at memory speed where SHA-256
//!   would cost a core more than the disk does.
//! - Nothing in a data file depends on the clock, the era, or who was there: same tensors, same bytes.

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

/// What names of files begin with by which a ps and the master find that they see one store. They lie in the job's folder for a moment.
pub const PROBE: &str = "probe-";

/// Largest manifest that makes sense: it lists the tensors of a model.
pub const MANIFEST_BYTES_MAX: u64 = 256 << 20;

/// Folder of one checkpoint, below the store's URL.
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

/// Its name in the job's folder.
pub fn folder_name(version: Version) -> String {
    format!("v{:010}", version.get())
}

/// The version that a folder's name stands for; `None` for names that [`folder`] does not give.
pub fn version_of(name: &str) -> Option<Version> {
    let version = Version(name.strip_prefix('v')?.parse().ok()?);
    (folder_name(version) == name).then_some(version)
}

/// Name of a partition's data file, whose header has this checksum.
pub fn file_name(partition: PartitionId, partitions: u32, header_crc32c: u32) -> String {
    format!("{}-{header_crc32c:08x}.safetensors", file_stem(partition, partitions))
}

/// How the names of a partition's data files begin.
pub fn file_stem(partition: PartitionId, partitions: u32) -> String {
    format!("partition-{:05}-of-{partitions:05}", partition.get())
}

/// What offset, length and memory of a write must be multiples of, in bytes, so that every disk that we know of takes it as it is.
pub const ALIGNED: usize = 4096;

/// Which steps are applied: all below the watermark, and those above it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AppliedSteps {
    /// All steps below this one are applied, this one is not.
    pub watermark: Step,
    /// Applied steps above the watermark.
    pub above: BTreeSet<Step>,
}

impl AppliedSteps {
    /// Their number.
    pub fn version(&self) -> Version {
        Version(self.watermark.get().saturating_add(self.above.len() as u64))
    }

    /// Whether they can be what a ledger says at `version` of a job with `steps` steps.
    pub fn is_valid(&self, version: Version, steps: u64) -> bool {
        let above = self.above.first().is_none_or(|&first| first > self.watermark);
        let last = self.above.last().is_none_or(|last| last.get() < steps);
        above && last && self.watermark.get() <= steps && self.version() == version
    }
}
