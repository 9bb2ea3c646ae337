//! One partition of a job: its weights and slots, the steps in progress, the ledger. `push` and
//! `pull` meet here.
//!
//! Always true here:
//!
//! - The lock is short and never held across an await or an addition: under it a push is offered to
//!   the aggregator, which only decides. Sums and updates are made outside.
//! - One update at a time. The push that completes a step applies it, and every other step that may
//!   be applied by then.
//! - Work that panics breaks the partition: from then on it is not held here, which workers learn
//!   and tell the master.
//! - A version appears whole, together with its entry in the ledger; then all waiting pulls look
//!   again.
//! - The order in which pushes come, the number of partitions, chunks and threads do not reach the
//!   bits in canonical order.
//!
//! The files of the folder add to [`Partition`], in the order of its life: `push` takes gradients
//! in, `update` makes versions of them (asking other partitions by `norms`), `pull` gives versions
//! out, `save` and `restore` exchange them with checkpoints. All work on values is in `dense`.

mod dense;
pub(crate) mod norms;
pub(crate) mod pull;
pub(crate) mod push;
mod restore;
mod save;
mod update;

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use net::memory::Memory;
use net::ps_client::PsClients;
use net::timeline::Mark;
use proto::ids::{Era, JobId, Step, Version};
use proto::parameters::Address;
use proto::spec::{Consistency, Order};
use proto::wire::WireType;
use store::Stores;
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

use self::dense::{Dense, Held, Kept, Measured, Summed, Totals};
use self::norms::Others;
use crate::admission::Admission;
use crate::aggregator::Aggregator;
use crate::checkpoint::{Reports, Saver};
use crate::chunk::Weights;
use crate::config::Options;
use crate::device::DeviceMemory;
use crate::error::{Error, Result};
use crate::ledger::Ledger;
use crate::metrics::Metrics;
use crate::opening::{Applied, Opening, Place};
use crate::versions::Versions;

/// One partition of a job on this ps.
#[derive(Debug)]
pub(crate) struct Partition {
    place: Place,
    opening: Opening,
    /// The master that opened it, as its session numbers it.
    pub(crate) master: u64,
    consistency: Consistency,
    steps_in_progress_max: usize,
    pulled_versions_max: usize,
    inline_bytes_max: usize,
    /// So many updates take from the pool what training needs; those after them take what was given
    /// back.
    settled_after: usize,
    metrics: Arc<Metrics>,
    admission: Admission,
    /// The tensors, with all operations on their values.
    dense: Dense,
    /// The device on which their values lie.
    device: Arc<DeviceMemory>,
    state: Mutex<State>,
    /// Something changed: waiting pulls look again, in the order in which they came.
    changed: Notify,
    /// Writes the checkpoints of a job that has any.
    saver: Option<Arc<Saver>>,
    /// The other partitions, in a job whose steps need what these have measured.
    others: Option<Others>,
    /// Cancelled when its life is not [`Life::Open`] any more.
    ended: CancellationToken,
}

/// What a partition shares with the others of its ps.
#[derive(Debug, Default)]
pub(crate) struct Surroundings {
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) stores: Stores,
    pub(crate) reports: Reports,
    /// What workers of this host may read.
    pub(crate) memory: Option<Memory>,
    /// The clients of the other ps; without them those are called by TCP, without keys.
    pub(crate) ps_clients: Option<PsClients>,
    /// Where the values lie.
    pub(crate) device: Arc<DeviceMemory>,
}

#[derive(Debug)]
struct State {
    life: Life,
    versions: Versions<Weights>,
    aggregator: Aggregator<Summed>,
    /// Complete steps that are not applied yet, with the number of their records.
    ready: BTreeMap<Step, (u64, Totals)>,
    updating: bool,
    /// Made since it was opened.
    updates: usize,
    /// Spans of the pushes of each step in progress, in the order in which they came; empty without
    /// a collector.
    marks: BTreeMap<Step, Vec<Mark>>,
    ledger: Ledger,
    /// What this partition contributed to the norms of the last steps, for the others.
    measured: VecDeque<(Step, Measured)>,
    /// The reason for which its checkpoint cannot be loaded.
    restore_error: Option<String>,
    /// Versions that were pulled: gone when nobody holds any value of them any more.
    pulled: BTreeMap<Version, Held>,
    /// The share of this partition in [`Metrics::push_bytes_held`].
    held_bytes: u64,
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum Life {
    /// Takes pushes and answers pulls.
    Open,
    /// The job is over.
    Closed,
    /// The job was rewound; a partition of the new era took its place.
    Rewound(Era),
    /// Work on it has panicked.
    Broken,
    /// Its device failed.
    Failed,
}

/// Held while the partition is worked on: a panic breaks it. Otherwise the step that was being
/// worked on would be lost without a word, and with it every later one.
struct BreaksByPanic<'a>(&'a Partition);

impl Drop for BreaksByPanic<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let place = self.0.place;
            tracing::error!(%place, "work on a partition panicked, so it is dropped; this is a bug");
            self.0.end(Life::Broken);
        }
    }
}

impl Partition {
    /// Creates an empty partition. The caller has compared the parts of `opening` with each other.
    /// On a device it takes over the memory of the partition `before` it, if that one has the same
    /// values; the caller ends it.
    ///
    /// # Errors
    /// The other partitions have no URLs, the tensors cannot be placed or are too large, or the
    /// optimizer is no valid one.
    pub(crate) fn new(
        opening: Opening,
        master: u64,
        options: &Options,
        surroundings: Surroundings,
        before: Option<&Self>,
    ) -> Result<Self> {
        let Surroundings { metrics, stores, reports, memory, ps_clients, device } = surroundings;
        let others = Others::of(&opening, ps_clients)?;
        let place = Place::from(opening.address);
        let consistency = opening.spec.consistency.resolve();
        let newest = match consistency {
            // Another partition may be delay + 1 steps behind this one, and the step that it lacks
            // was computed from a version delay steps older still: to compute it again, all
            // partitions must have that version.
            Consistency { order: Order::Canonical, delay } => 2 * delay.unwrap_or(0) as usize + 2,
            Consistency { order: Order::Arrival, .. } => 1,
        };
        let evaluated = opening.spec.occasions(opening.plan);
        let saves = opening.spec.checkpoint.is_some();
        // An update makes the next version beside those that are kept; a checkpoint holds those
        // that the next steps need, until they are copied to the host.
        let saved = if saves { consistency.delay.unwrap_or(0) as usize + 1 } else { 0 };
        let kept = Kept {
            versions: newest.max(2) + usize::from(evaluated.is_some()) + saved,
            slots: 1 + usize::from(saves),
        };
        let is_same = |before: &&Self| {
            let (before, after) = (&before.opening, &opening);
            (before.partitions, &before.tensors, &before.spec)
                == (after.partitions, &after.tensors, &after.spec)
        };
        let before = before.filter(is_same).map(|before| &before.dense);
        let dense = Dense::new(&opening, options, memory, &device, kept, before)?;
        let state = State {
            life: Life::Open,
            versions: Versions::new(newest, evaluated),
            aggregator: Aggregator::default(),
            ready: BTreeMap::new(),
            updating: false,
            updates: 0,
            marks: BTreeMap::new(),
            ledger: Ledger::new(opening.plan, consistency.order),
            measured: VecDeque::new(),
            restore_error: None,
            pulled: BTreeMap::new(),
            held_bytes: 0,
        };
        let ended = CancellationToken::new();
        let saver = opening.spec.checkpoint.clone().map(|spec| {
            Arc::new(Saver {
                place,
                era: opening.address.era,
                job: opening.spec.name.clone(),
                spec,
                stores,
                reports,
                metrics: metrics.clone(),
                ended: ended.clone(),
                device: device.clone(),
                inline_bytes_max: options.inline_bytes_max,
                wishes: Mutex::default(),
            })
        });
        Ok(Self {
            place,
            opening,
            master,
            consistency,
            steps_in_progress_max: options.steps_in_progress_max,
            pulled_versions_max: options.pulled_versions_max,
            inline_bytes_max: options.inline_bytes_max,
            settled_after: newest + 2,
            admission: Admission::new(metrics.clone(), options.push_bytes_max),
            metrics,
            dense,
            device,
            state: Mutex::new(state),
            changed: Notify::new(),
            saver,
            others,
            ended,
        })
    }

    /// Returns what it was opened with.
    /// Checks that a call which an agent forwards for `script` may reach this partition.
    ///
    /// # Errors
    /// The partition is of no job of that script.
    pub(crate) fn check_script(&self, script: Option<JobId>) -> Result<()> {
        match script {
            Some(script) if self.opening.script != Some(script) => {
                Err(Error::OfAnotherScript { place: self.place(), script })
            }
            _ => Ok(()),
        }
    }

    pub(crate) const fn opening(&self) -> &Opening {
        &self.opening
    }

    /// Returns which partition it is.
    pub(crate) const fn place(&self) -> Place {
        self.place
    }

    /// Returns what the job exchanges.
    pub(crate) const fn wire(&self) -> WireType {
        self.opening.spec.exchange.dtype
    }

    /// Bytes of the weights, and in memory of each push.
    pub(crate) const fn bytes(&self) -> usize {
        self.dense.bytes()
    }

    /// Bytes of a push or a pull whose parameters travel as `wire`.
    pub(crate) fn bytes_in(&self, wire: WireType) -> usize {
        self.dense.bytes_in(wire)
    }

    /// Returns whether steps are applied as they arrive, so that its ledger alone says what it has.
    pub(crate) fn keeps_arrivals(&self) -> bool {
        self.consistency.order == Order::Arrival
    }

    /// Returns whether its values lie on a device.
    pub(crate) fn is_on_device(&self) -> bool {
        self.dense.is_on_device()
    }

    /// Returns whether work on all of it is done where it comes up.
    const fn is_inline(&self) -> bool {
        self.dense.bytes() <= self.inline_bytes_max
    }

    /// Returns whether work on it has panicked or its device failed: nothing of it is held any
    /// more.
    pub(crate) fn is_broken(&self) -> bool {
        matches!(self.state().life, Life::Broken | Life::Failed)
    }

    /// Waits until everything is computed. If the device failed, the partition is lost.
    ///
    /// # Errors
    /// The device failed.
    fn settle(&self) -> Result<()> {
        self.device.settle().map_err(|error| self.fails(error))
    }

    /// Drops the partition because its device failed; the ps will end.
    fn fails(&self, error: kernels::Error) -> Error {
        let place = self.place;
        tracing::error!(%place, %error, "the device failed, so the partition is dropped");
        self.device.fails(&error);
        self.end(Life::Failed);
        Error::Device(error)
    }

    /// Returns the version and the ledger, at one moment.
    pub(crate) fn applied(&self) -> Applied {
        let state = self.state();
        let Address { partition, era, .. } = self.opening.address;
        let (version, ledger) = (state.version(), state.ledger.clone());
        Applied { partition, era, version, ledger, restore_error: state.restore_error.clone() }
    }

    /// Sets the addresses of the job's other partitions to those of an opening, if this partition
    /// exchanges norms and knows no later placement.
    ///
    /// # Errors
    /// An address is no URL.
    pub(crate) fn others_live_at(&self, opening: &Opening) -> Result<()> {
        self.others.as_ref().map_or(Ok(()), |others| others.live_at(opening))
    }

    /// Lets go of versions that were kept for evaluation, except the best one.
    pub(crate) fn unpin(&self, version: Version, best: Version) {
        let gone = self.state().versions.unpin(version, best);
        drop(gone);
    }

    /// Refuses everything from now on; waiting pulls learn it.
    pub(crate) fn end(&self, life: Life) {
        let mut state = self.state();
        state.life = life;
        self.metrics.push_bytes_held.sub(std::mem::take(&mut state.held_bytes));
        let over = self.dense.is_on_device().then(|| {
            (state.versions.clear(), std::mem::take(&mut state.aggregator), std::mem::take(&mut state.ready))
        });
        let updating = state.updating;
        drop(state);
        self.ended.cancel();
        self.changed.notify_waiters();
        drop(over);
        if !updating {
            self.release();
        }
    }

    /// Gives the slots of a partition that has ended back to its device, which the next partition
    /// may need at once. No update is under way.
    fn release(&self) {
        if self.dense.is_on_device() {
            self.dense.replace_slots(Vec::new());
        }
    }

    /// Loses slots, so that the next update panics.
    #[cfg(test)]
    pub(crate) fn spoil(&self) {
        self.dense.replace_slots(Vec::new());
    }

    /// Keeps the number of bytes that wait for others up to date. After each change of what the
    /// aggregator has.
    fn count_held(&self, state: &mut State) {
        if !matches!(state.life, Life::Open) {
            return;
        }
        let held_bytes = (state.aggregator.values() * self.dense.bytes()) as u64;
        self.metrics.push_bytes_held.add(held_bytes);
        self.metrics.push_bytes_held.sub(std::mem::replace(&mut state.held_bytes, held_bytes));
    }

    /// Waits until the partition ends, and returns how pushes of `sender` are refused from then on.
    pub(crate) async fn refusal(&self, sender: Era) -> Error {
        self.ended.cancelled().await;
        self.check_era(&self.state(), sender).err().unwrap_or(Error::Unknown { place: self.place })
    }

    fn check_era(&self, state: &State, sender: Era) -> Result<()> {
        let (place, here) = (self.place, self.opening.address.era);
        match state.life {
            Life::Closed => Err(Error::Unknown { place }),
            // The log has more, and the process ends.
            Life::Failed => Err(Error::Unknown { place }),
            Life::Broken => Err(Error::Broken { place }),
            Life::Rewound(here) => Err(Error::Fenced { place, sender, here }),
            Life::Open if sender < here => Err(Error::Fenced { place, sender, here }),
            Life::Open if sender > here => Err(Error::EraAhead { place, sender, here }),
            Life::Open => Ok(()),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// Steps applied; `None` until version 0 is there.
    fn version(&self) -> Option<Version> {
        self.versions.newest().map(|(version, _)| version)
    }
}

#[cfg(test)]
mod tests;
