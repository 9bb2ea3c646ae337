//! Content of a job's folder: complete checkpoints, damaged ones, and incomplete folders.

use std::collections::{BTreeMap, BTreeSet};

use proto::checkpoint::manifest::Manifest;
use proto::checkpoint::{Error, MANIFEST, MANIFEST_BYTES_MAX, Result, version_of};
use proto::ids::Version;

use crate::stores::Folder;

/// The checkpoints in a job's folder, by version.
#[derive(Clone, Debug, Default)]
pub struct Found {
    /// Checkpoints with an intact manifest. Their data files were not read.
    pub manifests: BTreeMap<Version, Manifest>,
    /// Checkpoints with a damaged manifest, and the errors.
    pub damaged: BTreeMap<Version, Error>,
    /// Folders without a manifest: in progress, or given up.
    pub incomplete: BTreeSet<Version>,
}

impl Found {
    /// Looks into a job's folder.
    ///
    /// # Errors
    /// The store cannot be read now. A damaged checkpoint is no error, see
    /// [`damaged`](Self::damaged).
    pub async fn look(job: &Folder) -> Result<Self> {
        let mut found = Self::default();
        for version in job.list().await?.iter().filter_map(|name| version_of(name)) {
            let folder = job.below(&proto::checkpoint::folder_name(version));
            match read(&folder, version).await {
                Ok(manifest) => drop(found.manifests.insert(version, manifest)),
                Err(Error::Missing { .. }) => drop(found.incomplete.insert(version)),
                Err(error) if error.is_retryable() => return Err(error),
                Err(error) => drop(found.damaged.insert(version, error)),
            }
        }
        Ok(found)
    }

    /// Returns whether there is no checkpoint, not even a damaged one.
    pub fn is_empty(&self) -> bool {
        self.manifests.is_empty() && self.damaged.is_empty()
    }

    /// Returns the versions that may be removed once `newest` of a run is complete: older
    /// checkpoints of that run, except the newest of them (`keep` stay in all) and the newest up to
    /// the version `best`, and older incomplete folders. It never returns newer versions, other
    /// runs or damaged checkpoints. It returns no complete checkpoint while `newest` itself cannot
    /// be read.
    pub fn superseded(&self, run: &str, newest: Version, keep: u32, best: Option<Version>) -> Vec<Version> {
        let complete = self.manifests.get(&newest).is_some_and(|manifest| manifest.run == run);
        let older = self.manifests.range(..newest).filter(|(_, manifest)| complete && manifest.run == run);
        let older = older.map(|(&version, _)| version).rev();
        // A job that loses its best version comes to it again from here.
        let best = best.filter(|best| *best < newest);
        let before_best = older.clone().find(|version| best.is_some_and(|best| *version <= best));
        let older = older.skip(keep.saturating_sub(1) as usize);
        let older = older.filter(|version| Some(*version) != before_best);
        let mut superseded: Vec<_> = older.chain(self.incomplete.range(..newest).copied()).collect();
        superseded.sort_unstable();
        superseded
    }
}

/// Reads the manifest in a checkpoint's folder, which must have that version.
///
/// # Errors
/// [`Error::Missing`], [`Error::Store`], or [`Error::Damaged`] with what is wrong.
pub async fn read(folder: &Folder, version: Version) -> Result<Manifest> {
    let name = folder.shown(MANIFEST);
    let manifest = Manifest::decode(&name, &folder.read(MANIFEST, MANIFEST_BYTES_MAX).await?)?;
    if manifest.version != version {
        let what = format!("it is of version {}, expected {version} by its folder's name", manifest.version);
        return Err(Error::Damaged { file: name, what });
    }
    Ok(manifest)
}

#[cfg(test)]
mod tests {
    use proto::ids::Era;
    use proto::optimizer::OptimizerKind;
    use proto::plan::Plan;
    use proto::spec::Order;

    use super::*;

    /// Returns the manifest of a complete checkpoint without files.
    fn manifest(version: Version, run: &str) -> Manifest {
        Manifest {
            job: "digits".to_owned(),
            run: run.to_owned(),
            digest: String::new(),
            version,
            oldest: version,
            era: Era(1),
            order: Order::Canonical,
            plan: Plan { records: 20, micro: 2, microbatches_per_step: 2, epochs: 4 },
            tensors: Vec::new(),
            optimizer: OptimizerKind::Adam,
            slots: Vec::new(),
            files: Vec::new(),
            script: None,
            numerics: Vec::new(),
            trained_on: None,
            selection: None,
            created_unix_secs: 0,
        }
    }

    fn found(runs: &[(u64, &str)], incomplete: &[u64]) -> Found {
        let manifest = |&(version, run): &(u64, &str)| (Version(version), manifest(Version(version), run));
        let incomplete = incomplete.iter().copied().map(Version).collect();
        Found { manifests: runs.iter().map(manifest).collect(), incomplete, ..Found::default() }
    }

    #[test]
    fn what_is_superseded_is_older_of_the_same_run_and_beyond_those_to_keep() {
        let found = found(&[(1, "a"), (2, "b"), (3, "a"), (4, "a"), (6, "a")], &[0, 5]);
        let superseded = |newest, keep| found.superseded("a", Version(newest), keep, None);
        assert_eq!(superseded(4, 2), [0, 1].map(Version));
        assert_eq!(superseded(4, 1), [0, 1, 3].map(Version));
        assert_eq!(superseded(6, 9), [0, 5].map(Version), "only what never became one");
    }

    #[test]
    fn the_newest_up_to_the_best_version_is_not_superseded() {
        let found = found(&[(1, "a"), (2, "b"), (3, "a"), (4, "a"), (6, "a")], &[]);
        let superseded = |best| found.superseded("a", Version(6), 1, Some(Version(best)));
        assert_eq!(superseded(3), [1, 4].map(Version));
        assert_eq!(superseded(2), [3, 4].map(Version), "version 2 is of another run");
        assert_eq!(superseded(0), [1, 3, 4].map(Version));
        assert_eq!(superseded(6), [1, 3, 4].map(Version), "the one that is complete has it");
    }

    #[test]
    fn nothing_complete_is_superseded_by_what_cannot_be_read() {
        let found = found(&[(1, "a"), (3, "a"), (4, "b")], &[2]);
        assert_eq!(found.superseded("a", Version(5), 1, None), [Version(2)], "it is not there");
        assert_eq!(found.superseded("a", Version(4), 1, None), [Version(2)], "it is of another run");
    }
}
