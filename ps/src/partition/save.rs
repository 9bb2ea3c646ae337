//! When a partition is cut for a checkpoint, and the memory that its first cut will need.

use std::sync::Arc;

use proto::checkpoint::manifest::oldest;
use proto::ids::Version;
use proto::spec::Consistency;

use super::{Partition, State};
use crate::checkpoint::{Cut, Saver};
use crate::error::{Error, Result};
use crate::versions::Kept;

impl Partition {
    /// Returns whether it has been trained, or restored, and can be saved.
    pub(crate) fn can_be_saved(&self) -> bool {
        !self.is_broken()
            && self.saver.is_some()
            && self.state().version().is_some_and(|version| version > Version(0))
    }

    /// Asks for a checkpoint at a coming version, or at the newest while no update is under way;
    /// says whether there will be one. Returns at once: the file is written in the background.
    ///
    /// # Errors
    /// [`Error::NoCheckpoints`].
    pub(crate) fn save(&self, version: Version) -> Result<bool> {
        let saver = self.saver.as_ref().ok_or(Error::NoCheckpoints { place: self.place })?;
        // Under the lock under which a new version is looked at, so that none passes unseen.
        let state = self.state();
        let here = state.version() == Some(version) && !state.updating;
        let coming = here || state.version().is_none_or(|now| now < version);
        if coming {
            saver.ask(version);
        }
        let cut = here.then(|| self.maybe_cut(&state)).flatten();
        drop(state);
        if let Some((saver, cut)) = cut {
            saver.save(cut);
        }
        Ok(coming)
    }

    /// Cuts the partition as it is now, when this version is to be saved. Only between two updates:
    /// the caller updates it, or nobody does.
    pub(super) fn maybe_cut(&self, state: &State) -> Option<(&Arc<Saver>, Cut)> {
        let (version, saver) = (state.version()?, self.saver.as_ref()?);
        if !saver.begins(&self.opening.plan, version) {
            return None;
        }
        let Consistency { order, delay } = self.consistency;
        let versions = (oldest(order, delay, version).get()..=version.get()).map(Version);
        let weights = versions.map(|version| match state.versions.get(version) {
            Kept::Here(weights) => (version, weights),
            other => panic!("version {version} is needed by the next steps, and {other:?}"),
        });
        let weights: Vec<_> = weights.collect();
        Some((saver, self.dense.cut(&weights, state.ledger.applied_steps())))
    }

    /// Takes the memory of the first checkpoint in the background, so that the step after its cut
    /// need not wait for it: for each chunk memory for its next slots, and for the version of its
    /// weights that the cut holds.
    pub(super) fn reserve(&self) {
        let Some(runtime) = tokio::runtime::Handle::try_current().ok().filter(|_| self.saver.is_some())
        else {
            return;
        };
        if !self.is_inline() {
            runtime.spawn_blocking(self.dense.reservation(self.ended.clone()));
        }
    }
}
