//! How versions are given out, and the squares that other partitions ask for: both wait until they
//! are there.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use proto::ids::{ChunkId, Era, Step, Version};
use proto::parameters::{Pulled, Want};
use proto::pb;
use proto::tensor::Chunk;
use tokio::time::{Instant, timeout_at};

use super::dense::{Held, Measured};
use super::{Partition, State};
use crate::checks;
use crate::chunk::Weights;
use crate::device::Lent;
use crate::error::{Error, Result};
use crate::pool::Buffer;
use crate::versions::Kept;

/// What a pull brings that offers memory of the device.
#[derive(Debug)]
pub(crate) enum Given {
    /// The chunks lie in that memory, at these regions.
    OnDevice {
        /// Number of steps applied to the weights.
        version: Version,
        /// Ids and regions.
        chunks: Vec<pb::Chunk>,
    },
    /// The chunks lie on the host. Nothing was written to that memory.
    Here(Pulled),
}

/// What a pull of this process gives.
#[derive(Debug)]
pub(crate) enum Lies {
    /// The chunks lie on the device.
    There(Version, Vec<(ChunkId, Arc<Buffer>)>),
    /// The chunks are here, on the host.
    Here(Pulled),
}

impl Partition {
    /// Gives all chunks at a version to a worker of `era`; waits at most `wait` until there is one.
    /// The chunks share the partition's memory, and the version stays as it is until the last of
    /// them is dropped. A caller may drop the future at any time.
    ///
    /// # Errors
    /// [`Error::NotYet`] after `wait`, [`Error::Gone`] or [`Error::BeyondPlan`] for a version that
    /// will not come, [`Error::PullsFull`], or the worker's era is another one.
    pub(crate) async fn pull(self: &Arc<Self>, era: Era, want: Want, wait: Duration) -> Result<Pulled> {
        let (version, weights) = self.wanted(era, want, wait).await?;
        let chunks = self.share(version, weights).await?;
        Ok(Pulled { version, chunks })
    }

    /// Gives all chunks at a version to a worker of this process that takes them where they lie on
    /// the device. They stay as they are there until the device has done what it is told before
    /// they are dropped.
    ///
    /// # Errors
    /// The errors of [`pull`](Self::pull).
    pub(crate) async fn pull_there(self: &Arc<Self>, era: Era, want: Want, wait: Duration) -> Result<Lies> {
        let (version, weights) = self.wanted(era, want, wait).await?;
        if let Some(chunks) = self.dense.there(&weights) {
            return Ok(Lies::There(version, chunks));
        }
        let chunks = self.share(version, weights).await?;
        Ok(Lies::Here(Pulled { version, chunks }))
    }

    /// Gives all chunks at a version to a worker as [`pull`](Self::pull) does, but in memory of the
    /// device that the worker has exported, if the version lies on the device and finds room there.
    /// Nothing of the version is held then.
    ///
    /// # Errors
    /// The errors of [`pull`](Self::pull).
    pub(crate) async fn pull_to(
        self: &Arc<Self>,
        era: Era,
        want: Want,
        wait: Duration,
        to: Lent,
    ) -> Result<Given> {
        let (version, weights) = self.wanted(era, want, wait).await?;
        let (partition, copied) = (self.clone(), weights.clone());
        let copy = move || -> Result<Option<Vec<pb::Chunk>>> {
            let chunks = partition.dense.place(&copied, &to);
            if chunks.is_some() {
                partition.settle()?;
            }
            Ok(chunks)
        };
        let placed = if self.is_inline() { copy() } else { tokio::task::spawn_blocking(copy).await? };
        Ok(match placed? {
            Some(chunks) => Given::OnDevice { version, chunks },
            None => Given::Here(Pulled { version, chunks: self.share(version, weights).await? }),
        })
    }

    /// Waits for a version, at most `wait`. Returns it with its number.
    async fn wanted(&self, era: Era, want: Want, wait: Duration) -> Result<(Version, Weights)> {
        let last = self.opening.plan.final_version();
        let (Want::Exact(version) | Want::AtLeast(version)) = want;
        if version > last {
            return Err(Error::BeyondPlan { place: self.place, want, last });
        }
        let start = Instant::now();
        let deadline = start.checked_add(wait).unwrap_or(start);
        loop {
            // Waits from here on, so that no change between looking and waiting is missed.
            let mut changed = pin!(self.changed.notified());
            changed.as_mut().enable();
            if let Some(found) = self.find(era, want)? {
                return Ok(found);
            }
            if timeout_at(deadline, changed).await.is_err() {
                let version = self.state().version();
                return Err(Error::NotYet { place: self.place, want, waited: wait, version });
            }
        }
    }

    /// Returns the chunks of a version, on the host. A copy from a device takes a thread that may
    /// block.
    async fn share(self: &Arc<Self>, version: Version, weights: Weights) -> Result<Vec<Chunk>> {
        if !self.dense.is_on_device() {
            return self.dense.share(&weights).map_err(|error| self.fails(error));
        }
        let partition = self.clone();
        let copy = move || {
            let chunks = partition.dense.share(&weights).map_err(|error| partition.fails(error))?;
            // From now on readers hold the copy, and the device's memory is free for other
            // versions.
            partition.state().pulled.extend(Held::of(&weights).map(|held| (version, held)));
            Ok(chunks)
        };
        if self.is_inline() { copy() } else { tokio::task::spawn_blocking(copy).await? }
    }

    fn find(&self, era: Era, want: Want) -> Result<Option<(Version, Weights)>> {
        let mut state = self.state();
        self.check_era(&state, era)?;
        let newest = state.versions.newest();
        let found = match (want, newest) {
            (_, None) => None,
            (Want::Exact(version), Some((newest, _))) => match state.versions.get(version) {
                Kept::Here(weights) => Some((version, weights)),
                Kept::Gone => return Err(Error::Gone { place: self.place, version, newest }),
                Kept::NotYet => None,
            },
            (Want::AtLeast(steps), Some((newest, weights))) => {
                let there = state.ledger.watermark().get() >= steps.get();
                there.then(|| (newest, weights.clone()))
            }
        };
        if let Some((version, weights)) = &found {
            self.may_pull(&mut state, *version, weights)?;
            checks::pulled(self.opening.address, era, want, *version, &state.ledger);
        }
        Ok(found)
    }

    /// Checks whether a pull may hold the memory of a version, and counts it as pulled.
    fn may_pull(&self, state: &mut State, version: Version, weights: &Weights) -> Result<()> {
        let State { pulled, versions, .. } = state;
        pulled.retain(|_, version| version.is_held());
        if !pulled.contains_key(&version) {
            let older =
                pulled.keys().filter(|&&version| !matches!(versions.get(version), Kept::Here(_))).count();
            if older >= self.pulled_versions_max {
                return Err(Error::PullsFull { place: self.place, versions: older });
            }
            pulled.extend(Held::of(weights).map(|held| (version, held)));
        }
        Ok(())
    }

    /// Returns what this partition contributed to the norms of a step; waits at most `wait` until
    /// that is known. The caller may drop the future at any time, and ask again.
    ///
    /// # Errors
    /// [`Error::NotMeasured`] after `wait`, [`Error::NormsGone`], or the asking partition has
    /// another era.
    pub(crate) async fn squares(&self, era: Era, step: Step, wait: Duration) -> Result<Measured> {
        let start = Instant::now();
        let deadline = start.checked_add(wait).unwrap_or(start);
        loop {
            let mut changed = pin!(self.changed.notified());
            changed.as_mut().enable();
            {
                let state = self.state();
                self.check_era(&state, era)?;
                if let Some((_, measured)) = state.measured.iter().find(|(of, _)| *of == step) {
                    return Ok(measured.clone());
                }
                if state.ledger.is_applied(step) {
                    return Err(Error::NormsGone { place: self.place, step });
                }
            }
            if timeout_at(deadline, changed).await.is_err() {
                return Err(Error::NotMeasured { place: self.place, step, waited: wait });
            }
        }
    }
}
