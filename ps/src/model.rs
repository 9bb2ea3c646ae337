//! One job's partition: its weights and slots, the steps in progress, the ledger. `push` and `pull` meet here.
//!
//! Always true here:
//!
//! - The lock is short and never held across an await or an addition: under it a push is offered to the aggregator, which
//!   only decides. Sums and updates are made outside.
//! - One update at a time. Whoever completes a step applies it and every other step that may be applied by then.
//! - A version appears whole, together with its entry in the ledger; then all waiting pulls look again.
//! - The order in which pushes come, the number of partitions, chunks and threads do not reach the bits in canonical order.

pub(crate) mod norms;

use std::collections::{BTreeMap, VecDeque};
use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use proto::checkpoint::manifest::oldest;
use proto::checkpoint::store::Stores;
use proto::ids::{ChunkId, Era, PartitionId, Step, Version};
use proto::memory::Memory;
use proto::parameters::{Address, Outcome, Pulled, Pushed, Restore, Target, Want};
use proto::placement::Layout;
use proto::plan::Plan;
use proto::spec::{Consistency, JobSpec, Order};
use proto::tensor::{Chunk, Role, TensorSpec};
use proto::timeline::{self, Mark};
use proto::tree::{Node, StepNode};
use proto::wire::WireType;
use tokio::sync::Notify;
use tokio::time::{Instant, timeout_at};
use tokio_util::sync::CancellationToken;
use tracing::Span;

use crate::aggregator::{Aggregator, Offer};
use crate::checkpoint::restore::Restored;
use crate::checkpoint::{Cut, INLINE_BYTES_MAX, Reports, Saver};
use crate::checks;
use crate::chunk::{Advance, Merge, Slots, Sum, Total};
use crate::config::Options;
use crate::error::{Error, Place, Result};
use crate::ledger::Ledger;
use crate::metrics::Metrics;
use crate::model::norms::{Measured, Others};
use crate::optim::{Optimizer, Update};
use crate::parallel;
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

/// A partition of this size or more is written past the caches: when its last chunk has been written, its first is in none any more.
const STREAMED_BYTES_MIN: usize = 16 << 20;

/// The weights of one version, in the order of the partition's chunks.
pub(crate) type Weights = Arc<[Arc<Buffer>]>;

/// What a node says about each chunk of the partition.
type Sums = Vec<Sum>;

/// What a whole step says about each chunk of the partition.
type Totals = Vec<Total>;

/// The chunks of a push that have come.
#[derive(Debug)]
pub(crate) struct Arrived {
    target: Target,
    /// As which values of parameters come.
    wire: WireType,
    /// What they are added to as they come, and the node that the sums belong to.
    sibling: Option<(StepNode, Sums)>,
    sums: Sums,
    /// The push's span.
    mark: Option<Mark>,
}

/// One job's partition on this ps.
#[derive(Debug)]
pub(crate) struct Model {
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
    threads: usize,
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

impl Arrived {
    /// Whether its chunks are widened, or added to others, as they come.
    pub(crate) const fn is_worked_on(&self) -> bool {
        self.sibling.is_some() || self.wire.rounds()
    }

    /// All chunks of a push at once.
    pub(crate) fn at_once(target: Target, chunks: Vec<Chunk>) -> Self {
        let sums = chunks.into_iter().map(|chunk| Sum::Received(chunk.values)).collect();
        Self { target, wire: WireType::F32, sibling: None, sums, mark: Mark::current() }
    }
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
}

/// A step that is being applied.
#[derive(Debug)]
struct Begun {
    step: Step,
    /// Of the weights before it.
    version: Version,
    weights: Weights,
    totals: Totals,
    /// As the timeline shows it.
    span: Span,
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum Life {
    /// Takes pushes and answers pulls.
    Open,
    /// The job is over.
    Closed,
    /// The job was rewound; a partition of the new era took its place.
    Rewound(Era),
}

impl Model {
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
            threads: parallel::threads_for(bytes, options.threads),
            // The next version, a few sums in progress, and what a checkpoint holds.
            pool: Pool::new((4 + slots_saved) * bytes, memory),
            settled_after: newest + 2,
            metrics,
            state: Mutex::new(state),
            slots: Mutex::default(),
            changed: Notify::new(),
        })
    }

    /// Whether it has been trained, or restored, and can be saved.
    pub(crate) fn can_be_saved(&self) -> bool {
        self.saver.is_some() && self.state().version().is_some_and(|version| version > Version(0))
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
        if self.bytes as u64 <= INLINE_BYTES_MAX {
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
        self.state().life = life;
        self.ended.cancel();
        self.changed.notify_waiters();
    }

    /// Checks everything about a push but its values. Nothing is changed.
    pub(crate) fn check(&self, era: Era, target: Target, wire: WireType) -> Result<()> {
        proto::convert::check_push_wire(target, wire, self.wire)?;
        if let Target::Node { node, samples } = target {
            proto::convert::check_node(&self.opening.plan, node, samples)?;
        }
        let state = self.state();
        self.check_era(&state, era)?;
        self.check_progress(&state, target)
    }

    /// Takes up a push whose header and chunks were checked.
    pub(crate) fn push(self: &Arc<Self>, era: Era, arrived: Arrived) -> Result<Pushed> {
        match arrived.target {
            Target::Initial => self.push_initial(era, &arrived.sums),
            Target::Node { node, .. } => {
                let node = arrived.sibling.map_or(node, |(parent, _)| parent);
                self.push_node(era, node, arrived.sums, arrived.mark)
            }
        }
    }

    /// For the chunks of a push: they are added to the sibling's as they come, when it is here.
    pub(crate) fn arriving(&self, target: Target, wire: WireType) -> Arrived {
        let sibling = match target {
            Target::Initial => None,
            Target::Node { node, .. } => {
                let state = self.state();
                state.aggregator.sibling(node).map(|(parent, sums)| (parent, sums.clone()))
            }
        };
        Arrived { target, wire, sibling, sums: Vec::new(), mark: Mark::current() }
    }

    /// Takes the next chunk of a push, which was checked.
    pub(crate) fn arrive(&self, arrived: &mut Arrived, chunk: Chunk) {
        let index = arrived.sums.len();
        let wire = arrived.wire.of(chunk.role);
        let mut sum = match wire.rounds() {
            true => Sum::widened(&chunk.values, wire, &self.pool),
            false => Sum::Received(chunk.values),
        };
        if let Some((parent, sibling)) = &arrived.sibling {
            let merge = match parent.node == Node::root(parent.of) {
                true => Merge::root(chunk.role.dtype()),
                false => Merge::of(chunk.role, self.wire),
            };
            sum.merge(sibling[index].clone(), merge, &self.pool);
        }
        arrived.sums.push(sum);
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

    fn find(&self, era: Era, want: Want) -> Result<Option<(Version, Weights)>> {
        let state = self.state();
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
        if let Some((version, _)) = &found {
            checks::pulled(self.opening.address, era, want, *version, &state.ledger);
        }
        Ok(found)
    }

    fn check_era(&self, state: &State, sender: Era) -> Result<()> {
        let (place, here) = (self.place, self.opening.address.era);
        match state.life {
            Life::Closed => Err(Error::Unknown { place }),
            Life::Rewound(here) => Err(Error::Fenced { place, sender, here }),
            Life::Open if sender < here => Err(Error::Fenced { place, sender, here }),
            Life::Open if sender > here => Err(Error::EraAhead { place, sender, here }),
            Life::Open => Ok(()),
        }
    }

    /// Whether a step may be worked on now: the bound of the steps in progress.
    fn check_progress(&self, state: &State, target: Target) -> Result<()> {
        let Target::Node { node: StepNode { step, .. }, .. } = target else { return Ok(()) };
        let (place, steps_max) = (self.place, self.steps_in_progress_max);
        let Some(version) = state.version() else { return Err(Error::NoWeights { place, step }) };
        match self.consistency {
            // It was computed from version step - delay or a later one, which the sender pulled here.
            Consistency { order: Order::Canonical, delay } => {
                let ahead = step.get() > version.get() + u64::from(delay.unwrap_or(0));
                if ahead { Err(Error::StepAhead { place, step, version }) } else { Ok(()) }
            }
            Consistency { order: Order::Arrival, .. } => {
                let room = state.aggregator.steps() < steps_max
                    || state.aggregator.has(step)
                    || state.ledger.is_applied(step);
                if room { Ok(()) } else { Err(Error::StepsFull { place, step, steps_max }) }
            }
        }
    }

    fn push_initial(&self, era: Era, values: &[Sum]) -> Result<Pushed> {
        if let Some(repeated) = self.initial_repeated(era, &mut self.state())? {
            return Ok(repeated);
        }
        let members = || self.layout.members(self.opening.address.partition).iter();
        let weights: Weights = members()
            .zip(values)
            .map(|(&id, values)| {
                let (dtype, len) = (self.layout.tensor_of(id).dtype(), self.layout.chunk(id).len);
                let mut buffer = self.pool.take(Use::Weights, dtype, len);
                buffer.bytes_mut().copy_from_slice(values.bytes());
                Arc::new(buffer)
            })
            .collect();
        let slots = members()
            .map(|&id| {
                let (role, len) = (self.layout.tensor_of(id).role, self.layout.chunk(id).len);
                Slots::new(role, len, &self.optimizer, &self.pool)
            })
            .collect();
        let mut state = self.state();
        // Another one may have been faster. It brought the same values.
        if let Some(repeated) = self.initial_repeated(era, &mut state)? {
            return Ok(repeated);
        }
        *self.slots.lock().unwrap_or_else(PoisonError::into_inner) = slots;
        drop(state.versions.insert(Version(0), weights));
        drop(state);
        self.changed.notify_waiters();
        Ok(Pushed { outcome: Outcome::Completed, version: Version(0) })
    }

    fn initial_repeated(&self, era: Era, state: &mut State) -> Result<Option<Pushed>> {
        self.check_era(state, era)?;
        // A partition that loads a checkpoint gets its weights from there, and has no use for version 0.
        let restored = self.opening.restore.as_ref().map(|restore| restore.version);
        let Some(version) = state.version().or(restored) else { return Ok(None) };
        state.ledger.drop_duplicate();
        Ok(Some(Pushed { outcome: Outcome::Duplicate, version }))
    }

    fn push_node(
        self: &Arc<Self>,
        era: Era,
        node: StepNode,
        sums: Sums,
        mark: Option<Mark>,
    ) -> Result<Pushed> {
        let mut offer = {
            let mut state = self.state();
            self.check_era(&state, era)?;
            let delay = self.consistency.delay;
            checks::taken_up(self.opening.address, era, node.step, &state.ledger, delay);
            if state.ledger.is_applied(node.step) {
                Offer::Duplicate(sums)
            } else {
                let offer = state.aggregator.offer(node, sums);
                if let (Some(mark), false) = (mark, matches!(offer, Offer::Duplicate(_))) {
                    state.marks.entry(node.step).or_default().push(mark);
                }
                offer
            }
        };
        let outcome = loop {
            match offer {
                Offer::Duplicate(_) => {
                    self.state().ledger.drop_duplicate();
                    break Outcome::Duplicate;
                }
                Offer::Held | Offer::Superseded(_) => break Outcome::Merged,
                // The update adds them up, so nobody does before.
                Offer::Merge { parent, left, right } if parent.node == Node::new(0, parent.of) => {
                    let mut state = self.state();
                    self.check_era(&state, era)?;
                    let whole = state.aggregator.merged(parent, Sums::new());
                    drop(state);
                    if !matches!(whole, Offer::Complete(_)) {
                        break Outcome::Merged;
                    }
                    let halves = left.into_iter().zip(right).map(|(left, right)| Total::Halves(left, right));
                    self.complete(node.step, halves.collect());
                    break Outcome::Completed;
                }
                Offer::Merge { parent, left, right } => {
                    let sums = self.merge(left, right);
                    let mut state = self.state();
                    self.check_era(&state, era)?;
                    offer = state.aggregator.merged(parent, sums);
                }
                Offer::Complete(sums) => {
                    self.complete(node.step, sums.into_iter().map(Total::Sum).collect());
                    break Outcome::Completed;
                }
            }
        };
        let version = self.state().ledger.version();
        Ok(Pushed { outcome, version })
    }

    fn merge(&self, mut left: Sums, right: Sums) -> Sums {
        let members = self.layout.members(self.opening.address.partition).iter();
        let chunks = members.zip(left.iter_mut().zip(right));
        parallel::for_each(self.threads, chunks, |(&id, (left, right))| {
            left.merge(right, Merge::of(self.layout.tensor_of(id).role, self.wire), &self.pool);
        });
        left
    }

    /// A step's sum is there: it is applied by whoever is updating, and that is the caller when nobody is.
    fn complete(self: &Arc<Self>, step: Step, totals: Totals) {
        let mut state = self.state();
        state.ready.insert(step, totals);
        if !std::mem::replace(&mut state.updating, true) {
            drop(state);
            self.apply_ready();
        }
    }

    fn apply_ready(self: &Arc<Self>) {
        while let Some(mut begun) = self.begin() {
            let update = self.prepare(&begun);
            if !update.needs_norms() {
                let updates = vec![update; begun.totals.len()];
                self.apply(begun, updates);
                continue;
            }
            let span = begun.span.clone();
            let own = span.in_scope(|| self.measure(&update, &mut begun));
            if self.others.is_some() {
                // Goes on when it knows what they have measured; until then it is the update that is under way.
                return self.ask_others(begun, update, own);
            }
            let updates = self.with_norms(&update, vec![own]);
            self.apply(begun, updates);
        }
    }

    /// The next step that may be applied; when there is none, nobody updates any more.
    fn begin(&self) -> Option<Begun> {
        let mut state = self.state();
        let may_apply = |step: &Step| matches!(state.life, Life::Open) && state.ledger.may_apply(*step);
        let Some(step) = state.ready.keys().copied().find(may_apply) else {
            state.updating = false;
            return None;
        };
        let totals = state.ready.remove(&step).expect("found just now");
        let (version, weights) = state.versions.newest().expect("a step is taken up after version 0");
        let weights = weights.clone();
        let gone = state.versions.make_room();
        let marks = state.marks.remove(&step).unwrap_or_default();
        drop(state);
        // Their buffers become those of the next version.
        drop(gone);
        let span = self.apply_span(step, version);
        timeline::join(&span, marks);
        Some(Begun { step, version, weights, totals, span })
    }

    /// Makes the next version, unless the job ended or was rewound meanwhile: nobody may see it then.
    fn apply(&self, begun: Begun, updates: Vec<Update>) {
        let (step, version) = (begun.step, begun.version);
        let span = begun.span.clone();
        let next = span.in_scope(|| self.advance(begun, updates));

        let mut state = self.state();
        if !matches!(state.life, Life::Open) {
            return;
        }
        let gone = state.versions.insert(version.next(), next);
        state.ledger.apply(step);
        state.aggregator.forget(step);
        checks::applied(self.opening.address, step, version.next());
        let cut = self.maybe_cut(&state);
        state.updates += 1;
        let reserves = state.updates == self.settled_after;
        drop(state);
        self.changed.notify_waiters();
        if reserves {
            self.reserve();
        }
        if let Some((saver, cut)) = cut {
            saver.save(cut);
        }
        // Now, outside the lock, their buffers go back to the pool.
        drop(gone);
    }

    fn apply_span(&self, step: Step, version: Version) -> Span {
        let Address { job, partition, .. } = self.opening.address;
        let (job, partition, step) = (job.get(), partition.get(), step.get());
        tracing::debug_span!(
            target: timeline::TARGET, parent: None, "apply", job, partition, step, version = version.next().get()
        )
    }

    /// The partition as it is now, when this version is to be saved. Only between two updates: by whoever updates, or while nobody
    /// does.
    fn maybe_cut(&self, state: &State) -> Option<(&Arc<Saver>, Cut)> {
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
        let slots = self.slots.lock().unwrap_or_else(PoisonError::into_inner);
        let (partition, applied) = (self.opening.address.partition, state.ledger.applied_steps());
        let cut = Cut::new(&self.layout, partition, &weights, &slots, self.optimizer.slot_names(), applied);
        Some((saver, cut))
    }

    /// The scalars of a step's update.
    fn prepare(&self, begun: &Begun) -> Update {
        let scale = (1.0 / self.opening.plan.samples_of(begun.step) as f64) as f32;
        let update = self.optimizer.prepare(begun.version.get(), scale);
        if self.bytes < STREAMED_BYTES_MIN { update } else { update.past_the_caches() }
    }

    /// The update: weights of one version and what a step says in, weights of the next version out.
    fn advance(&self, begun: Begun, updates: Vec<Update>) -> Weights {
        let begin = Instant::now();
        let Begun { step, weights, totals, .. } = begun;
        let microbatches = self.opening.plan.of(step);
        let mut next: Vec<Option<Arc<Buffer>>> = weights.iter().map(|_| None).collect();
        let mut slots = self.slots.lock().unwrap_or_else(PoisonError::into_inner);
        let chunks = slots.iter_mut().zip(weights.iter()).zip(totals).zip(&mut next).zip(updates);
        // Each chunk's memory is taken when it is needed, and that of its sum is free again before the next chunk needs some.
        parallel::for_each(self.threads, chunks, |((((slots, weights), total), next), update)| {
            let advance = Advance { update, microbatches, pool: &self.pool };
            let mut buffer = self.pool.take(Use::Weights, weights.dtype(), weights.len());
            slots.advance(&advance, weights, total, &mut buffer);
            *next = Some(Arc::new(buffer));
        });
        self.metrics.updates.add(1);
        self.metrics.update_nanos.add(u64::try_from(begin.elapsed().as_nanos()).unwrap_or(u64::MAX));
        next.into_iter().map(|next| next.expect("every chunk was worked on")).collect()
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
