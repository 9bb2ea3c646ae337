//! What a job's folder has: complete checkpoints, damaged ones, and what never became one.

use std::collections::{BTreeMap, BTreeSet};

use super::manifest::Manifest;
use super::store::Folder;
use super::{Error, MANIFEST, MANIFEST_BYTES_MAX, Result, version_of};
use crate::ids::Version;

/// The checkpoints in a job's folder, by version.
#[derive(Clone, Debug, Default)]
pub struct Found {
    /// Those whose manifest is intact. Their data files were not looked at.
    pub manifests: BTreeMap<Version, Manifest>,
    /// Those whose manifest is not, and why.
    pub damaged: BTreeMap<Version, Error>,
    /// Folders without a manifest: being written, or given up.
    pub incomplete: BTreeSet<Version>,
}

impl Found {
    /// Looks into a job's folder.
    ///
    /// # Errors
    /// The store cannot be read now. What is wrong with one checkpoint is no error, see [`damaged`](Self::damaged).
    pub async fn look(job: &Folder) -> Result<Self> {
        let mut found = Self::default();
        for version in job.list().await?.iter().filter_map(|name| version_of(name)) {
            let folder = job.below(&super::folder_name(version));
            match read(&folder, version).await {
                Ok(manifest) => drop(found.manifests.insert(version, manifest)),
                Err(Error::Missing { .. }) => drop(found.incomplete.insert(version)),
                Err(error) if error.is_retryable() => return Err(error),
                Err(error) => drop(found.damaged.insert(version, error)),
            }
        }
        Ok(found)
    }

    /// Whether there is no checkpoint, not even a damaged one.
    pub fn is_empty(&self) -> bool {
        self.manifests.is_empty() && self.damaged.is_empty()
    }

    /// What need not be kept once `newest` of a run is complete: all but the `keep` newest of that run, and what never became
    /// a checkpoint. Newer versions, other runs and what cannot be read are nobody's to remove.
    pub fn superseded(&self, run: &str, newest: Version, keep: u32) -> Vec<Version> {
        let older = self.manifests.range(..newest).filter(|(_, manifest)| manifest.run == run);
        let older = older.map(|(&version, _)| version).rev().skip(keep.saturating_sub(1) as usize);
        let mut superseded: Vec<_> = older.chain(self.incomplete.range(..newest).copied()).collect();
        superseded.sort_unstable();
        superseded
    }
}

/// The manifest in a checkpoint's folder, which must be of that version.
///
/// # Errors
/// [`Error::Missing`], [`Error::Store`], or what is wrong with it.
pub async fn read(folder: &Folder, version: Version) -> Result<Manifest> {
    let name = folder.shown(MANIFEST);
    let manifest = Manifest::decode(&name, &folder.read(MANIFEST, MANIFEST_BYTES_MAX).await?)?;
    if manifest.version != version {
        let what = format!("it is of version {}, expected {version} by its folder's name", manifest.version);
        return Err(Error::Damaged { file: name, what });
    }
    Ok(manifest)
}
