//! One job's partition: its weights and slots, the steps in progress, the ledger. `push` and `pull` meet here.
//!
//! Always true here:
//!
//! - The lock is short and never held across an await or an addition: under it a push is offered to the aggregator, which
//!   only decides. Sums and updates are made outside.
//! - One update at a time. Whoever completes a step applies it and every other step that may be applied by then.
//! - Work that panics breaks the partition: from then on it is not held here, which workers learn and tell the master.
//! - A version appears whole, together with its entry in the ledger; then all waiting pulls look again.
//! - The order in which pushes come, the number of partitions, chunks and threads do not reach the bits in canonical order.

pub(crate) mod norms;
mod push;
pub(crate) mod restore;
mod update;

use std::collections::{BTreeMap, VecDeque};
use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use net::memory::Memory;
use net::timeline::Mark;
use proto::ids::{ChunkId, Era, PartitionId, Step, Version};
use proto::parameters::{Address, Pulled, Restore, Target, Want};
use proto::placement::Layout;
use proto::plan::Plan;
use proto::spec::{Consistency, JobSpec, Order};
use proto::tensor::{Chunk, Role, TensorSpec};
use proto::wire::WireType;
use store::Stores;
use tokio::sync::Notify;
use tokio::time::{Instant, timeout_at};
use tokio_util::sync::CancellationToken;

use crate::aggregator::Aggregator;
use crate::checkpoint::{Reports, Saver};
use crate::checks;
use crate::chunk::{Slots, Sum, Total};
use crate::config::Options;
use crate::error::{Error, Place, Result};
use crate::ledger::Ledger;
use crate::metrics::Metrics;
use crate::optim::Optimizer;
use crate::parallel;
use crate::partition::norms::{Measured, Others};
pub(crate) use crate::partition::push::Arrived;
use crate::partition::restore::Restored;
use crate::pool::{Buffer, Pool, Use};
use crate::versions::{Kept, Versions};

/// What a partition is opened with.
#[derive(Clone, Debug, PartialEq)]
pub struct Opening {
    /// Job, partition and era.
    pub address: Address,
    /// Number of partitions of the job.
    pub partitions: u32,
    /// All tensors of the model, in the model's order.
    pub tensors: Vec<TensorSpec>,
    /// The job's sequence of microbatches.
    pub plan: Plan,
    /// Optimizer, consistency and checkpoints are read from it.
    pub spec: JobSpec,
    /// The checkpoint to load; without one, version 0 is pushed.
    pub restore: Option<Restore>,
    /// URL of the ps of each partition, for steps that need norms over the whole model.
    pub homes: Vec<String>,
}

/// What a partition has applied.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Applied {
    /// Which partition.
    pub partition: PartitionId,
    /// Era it works in.
    pub era: Era,
    /// Steps applied; `None` until version 0 is there, or the checkpoint is loaded.
    pub version: Option<Version>,
    /// The books.
    pub ledger: Ledger,
    /// Why the checkpoint cannot be loaded.
    pub restore_error: Option<String>,
}

/// The weights of one version, in the order of the partition's chunks.
pub(crate) type Weights = Arc<[Arc<Buffer>]>;

/// What a node says about each chunk of the partition.
type Sums = Vec<Sum>;

/// What a whole step says about each chunk of the partition.
type Totals = Vec<Total>;

/// One job's partition on this ps.
#[derive(Debug)]
pub(crate) struct Partition {
    place: Place,
    opening: Opening,
    /// The master that opened it, as its session numbers it.
    pub(crate) master: u64,
    layout: Layout,
    bytes: usize,
    consistency: Consistency,
    /// What is exchanged: the sums below the root of a step's tree are rounded to it.
    wire: WireType,
    optimizer: Optimizer,
    steps_in_progress_max: usize,
    pulled_versions_max: usize,
    threads: usize,
    inline_bytes_max: usize,
    pool: Pool,
    /// So many updates take from the pool what training needs; those after them take what was given back.
    settled_after: usize,
    metrics: Arc<Metrics>,
    state: Mutex<State>,
    /// Taken by the one update at a time; empty until version 0.
    slots: Mutex<Vec<Slots>>,
    /// Something changed: waiting pulls look again, in the order in which they came.
    changed: Notify,
    /// Of a job with checkpoints.
    saver: Option<Arc<Saver>>,
    /// Of a job whose steps need what other partitions have measured.
    others: Option<Others>,
    /// Cancelled when its life is not [`Life::Open`] any more.
    ended: CancellationToken,
}

/// What a partition shares with the others of its ps, and who holds the others of its job.
#[derive(Debug, Default)]
pub(crate) struct Surroundings {
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) stores: Stores,
    pub(crate) reports: Reports,
    /// What workers of this host may read.
    pub(crate) memory: Option<Memory>,
    /// Where norms over the whole model are known; none when this partition is alone, or needs none.
    pub(crate) others: Option<Others>,
}

#[derive(Debug)]
struct State {
    life: Life,
    versions: Versions<Weights>,
    aggregator: Aggregator<Sums>,
    /// Complete steps that are not applied yet.
    ready: BTreeMap<Step, Totals>,
    updating: bool,
    /// Made since it was opened.
    updates: usize,
    /// Spans of the pushes of each step in progress, in the order in which they came; empty without a collector.
    marks: BTreeMap<Step, Vec<Mark>>,
    ledger: Ledger,
    /// What this partition contributed to the norms of the last steps, for the others.
    measured: VecDeque<(Step, Measured)>,
    /// Why the checkpoint that it was opened with cannot be loaded.
    restore_error: Option<String>,
    /// Versions that were pulled: gone when nobody has anything of them any more.
    pulled: BTreeMap<Version, Weak<Buffer>>,
    /// What of [`Metrics::push_bytes_held`] is of this partition.
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
}

/// Held while the partition is worked on: a panic breaks it. Otherwise the step that was being worked on would be lost without a
/// word, and with it every later one.
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
    /// An empty partition. The caller has compared the parts of `opening` with each other.
    pub(crate) fn new(
        opening: Opening,
        master: u64,
        options: &Options,
        surroundings: Surroundings,
    ) -> Result<Self> {
        let Surroundings { metrics, stores, reports, memory, others } = surroundings;
        let Address { job, partition, .. } = opening.address;
        let place = Place { job, partition };
        let layout = Layout::new(opening.tensors.clone(), opening.partitions)?;
        let bytes = layout.partition_bytes(partition);
        let bytes_max = options.partition_bytes_max;
        if bytes as u64 > bytes_max {
            return Err(Error::PartitionTooLarge { place, bytes: bytes as u64, bytes_max });
        }
        let optimizer = Optimizer::new(&opening.spec.optimizer, opening.plan.steps())
            .map_err(|invalid| proto::Error::Invalid(invalid.violations))?;
        let consistency = opening.spec.consistency.resolve();
        let newest = match consistency {
            // Another partition may be delay + 1 steps behind this one, and the step that it lacks was computed from a
            // version delay steps older still: to compute it again, all partitions must have that version.
            Consistency { order: Order::Canonical, delay } => 2 * delay.unwrap_or(0) as usize + 2,
            Consistency { order: Order::Arrival, .. } => 1,
        };
        let data = &opening.spec.data;
        let evaluates = data.validation.is_some() || data.validation_fraction.is_some();
        let state = State {
            life: Life::Open,
            versions: Versions::new(newest, evaluates.then_some(opening.plan)),
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
        let (ended, wire) = (CancellationToken::new(), opening.spec.exchange.dtype);
        let slots_saved = opening.spec.checkpoint.as_ref().map_or(0, |_| optimizer.slots());
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
                inline_bytes_max: options.inline_bytes_max,
                wishes: Mutex::default(),
            })
        });
        Ok(Self {
            place,
            opening,
            saver,
            others,
            ended,
            master,
            layout,
            bytes,
            consistency,
            wire,
            optimizer,
            steps_in_progress_max: options.steps_in_progress_max,
            pulled_versions_max: options.pulled_versions_max,
            threads: parallel::threads_for(bytes, options.threads),
            inline_bytes_max: options.inline_bytes_max,
            // The next version, a few sums in progress, and what a checkpoint holds.
            pool: Pool::new((4 + slots_saved) * bytes, memory),
            settled_after: newest + 2,
            metrics,
            state: Mutex::new(state),
            slots: Mutex::default(),
            changed: Notify::new(),
        })
    }

    /// Whether work on it has panicked: nothing of it is held any more.
    pub(crate) fn is_broken(&self) -> bool {
        matches!(self.state().life, Life::Broken)
    }

    /// Loses slots, so that the next update panics.
    #[cfg(test)]
    pub(crate) fn spoil(&self) {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }

    /// Whether it has been trained, or restored, and can be saved.
    pub(crate) fn can_be_saved(&self) -> bool {
        !self.is_broken()
            && self.saver.is_some()
            && self.state().version().is_some_and(|version| version > Version(0))
    }

    /// What it was opened with.
    pub(crate) const fn opening(&self) -> &Opening {
        &self.opening
    }

    /// Which tensor is where.
    pub(crate) const fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Whether steps are applied as they arrive, so that its ledger alone says what it has.
    pub(crate) fn keeps_arrivals(&self) -> bool {
        self.consistency.order == Order::Arrival
    }

    /// What the job exchanges.
    pub(crate) const fn wire(&self) -> WireType {
        self.wire
    }

    /// Bytes of the weights, and in memory of each push.
    pub(crate) const fn bytes(&self) -> usize {
        self.bytes
    }

    /// Whether work on all of it is done where it comes up.
    pub(crate) const fn is_inline(&self) -> bool {
        self.bytes <= self.inline_bytes_max
    }

    /// The version and the ledger, at one moment.
    pub(crate) fn applied(&self) -> Applied {
        let state = self.state();
        let Address { partition, era, .. } = self.opening.address;
        let (version, ledger) = (state.version(), state.ledger.clone());
        Applied { partition, era, version, ledger, restore_error: state.restore_error.clone() }
    }

    /// Which partition it is.
    pub(crate) const fn place(&self) -> Place {
        self.place
    }

    /// Its update rule.
    pub(crate) const fn optimizer(&self) -> &Optimizer {
        &self.optimizer
    }

    /// Its memory.
    pub(crate) const fn pool(&self) -> &Pool {
        &self.pool
    }

    /// Cancelled when it takes no pushes and answers no pulls any more.
    pub(crate) const fn ended(&self) -> &CancellationToken {
        &self.ended
    }

    /// Asks for a checkpoint at a coming version, or at the newest while no update is under way; says whether there will be one.
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

    /// Takes up what its checkpoint has: it appears whole, and pulls that wait are answered.
    pub(crate) fn restored(&self, restored: Restored) {
        let Restored { weights, slots, applied } = restored;
        let mut state = self.state();
        *self.slots.lock().unwrap_or_else(PoisonError::into_inner) = slots;
        state.ledger = Ledger::restored(self.opening.plan, self.consistency.order, applied);
        for (version, weights) in weights {
            drop(state.versions.insert(version, weights));
        }
        checks::restored(self.opening.address, &state.ledger);
        drop(state);
        self.changed.notify_waiters();
    }

    /// Takes the memory of the first checkpoint in the background, so that the step after its cut need not wait for it: for each chunk
    /// what follows its slots in that step, and the version of the weights that is held.
    fn reserve(&self) {
        let Some(runtime) = tokio::runtime::Handle::try_current().ok().filter(|_| self.saver.is_some())
        else {
            return;
        };
        if self.is_inline() {
            return;
        }
        let slots = self.optimizer.slots();
        let members = self.layout.members(self.opening.address.partition).iter();
        let chunk = |&id| {
            let tensor = self.layout.tensor_of(id);
            let slots = if tensor.role == Role::Parameter { slots } else { 0 };
            (tensor.dtype(), self.layout.chunk(id).len, slots)
        };
        let chunks: Vec<_> = members.map(chunk).collect();
        let (pool, ended) = (self.pool.clone(), self.ended.clone());
        runtime.spawn_blocking(move || {
            for (dtype, len, slots) in chunks {
                if ended.is_cancelled() {
                    return;
                }
                pool.reserve(Use::Weights, dtype, len);
                (0..slots).for_each(|_| pool.reserve(Use::Own, dtype, len));
            }
        });
    }

    /// Its checkpoint cannot be loaded. It stays empty until it is opened with another one.
    pub(crate) fn restore_failed(&self, reason: String) {
        self.state().restore_error = Some(reason);
    }

    /// Lets go of versions that were kept for evaluation.
    pub(crate) fn unpin(&self, version: Version) {
        let gone = self.state().versions.unpin(version);
        drop(gone);
    }

    /// Refuses everything from now on; waiting pulls learn it.
    pub(crate) fn end(&self, life: Life) {
        let mut state = self.state();
        state.life = life;
        self.metrics.push_bytes_held.sub(std::mem::take(&mut state.held_bytes));
        drop(state);
        self.ended.cancel();
        self.changed.notify_waiters();
    }

    /// All chunks at a version; waits for it.
    pub(crate) async fn pull(&self, era: Era, want: Want, wait: Duration) -> Result<Pulled> {
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
            if let Some((version, weights)) = self.find(era, want)? {
                let members = self.layout.members(self.opening.address.partition).iter();
                let chunk = |(&id, buffer): (&ChunkId, &Arc<Buffer>)| Chunk {
                    id,
                    role: self.layout.tensor_of(id).role,
                    values: buffer.view(),
                };
                return Ok(Pulled { version, chunks: members.zip(weights.iter()).map(chunk).collect() });
            }
            if timeout_at(deadline, changed).await.is_err() {
                let version = self.state().version();
                return Err(Error::NotYet { place: self.place, want, waited: wait, version });
            }
        }
    }

    /// Keeps the number of bytes that wait for others up to date. After each change of what the aggregator has.
    fn count_held(&self, state: &mut State) {
        if !matches!(state.life, Life::Open) {
            return;
        }
        let held_bytes = (state.aggregator.values() * self.bytes) as u64;
        self.metrics.push_bytes_held.add(held_bytes);
        self.metrics.push_bytes_held.sub(std::mem::replace(&mut state.held_bytes, held_bytes));
    }

    /// Whether a push brings what its oldest step lacks first: it is taken also when there is much that waits, which ends that way. So is what
    /// is here already, which leaves nothing in memory and lets its sender go on to what is lacking.
    pub(crate) fn is_needed_first(&self, target: Target) -> bool {
        let Target::Node { node, .. } = target else { return true };
        let state = self.state();
        let oldest = state.ledger.watermark();
        node.step < oldest
            || (node.step == oldest && node.node.begin <= state.aggregator.first_missing(oldest))
    }

    /// A version is pulled: whether its memory may be held for that.
    fn may_pull(&self, state: &mut State, version: Version, weights: &Weights) -> Result<()> {
        let State { pulled, versions, .. } = state;
        pulled.retain(|_, first| first.strong_count() > 0);
        if !pulled.contains_key(&version) {
            let older =
                pulled.keys().filter(|&&version| !matches!(versions.get(version), Kept::Here(_))).count();
            if older >= self.pulled_versions_max {
                return Err(Error::PullsFull { place: self.place, versions: older });
            }
            pulled.extend(weights.first().map(|first| (version, Arc::downgrade(first))));
        }
        Ok(())
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

    fn check_era(&self, state: &State, sender: Era) -> Result<()> {
        let (place, here) = (self.place, self.opening.address.era);
        match state.life {
            Life::Closed => Err(Error::Unknown { place }),
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
