//! [`Ps`]: every partition that this process holds, behind a handle that is cheap to clone.
//!
//! The gRPC service and, in one process, the workers themselves use it. Always true here: everything about a push is checked
//! before its first value is used, so a refused push leaves all state as it was; and the memory of pushes on their way in
//! is reserved before it is filled.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, OnceLock, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::Duration;

use net::channel::Dialer;
use net::memory::Memory;
use proto::checkpoint::PROBE;
use proto::convert::ChunkCheck;
use proto::ids::{Era, JobId, PartitionId, Step, Version};
use proto::parameters::{Address, Outcome, Parameters, Pull, Pulled, Push, Pushed, Take, Target};
use proto::status::{Failure, Kind};
use proto::tensor::Chunk;
use proto::wire::WireType;
use store::Stores;
use tokio::sync::watch;
use tokio::task::JoinHandle;

use crate::attached::Attachments;
use crate::checkpoint::{Reported, Reports};
use crate::checks;
use crate::config::Options;
use crate::error::{Error, Place, Result};
use crate::metrics::Metrics;
use crate::partition::norms::{Measured, Others};
use crate::partition::{Applied, Arrived, Life, Opening, Partition, Surroundings, restore};

/// A parameter server; clones are the same one.
#[derive(Clone, Debug)]
pub struct Ps(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    options: Options,
    metrics: Arc<Metrics>,
    stores: Stores,
    reports: Reports,
    /// Where the weights lie, for workers of this host; without it they are sent.
    memory: Option<Memory>,
    attachments: Attachments,
    /// Few and seldom changed: written by open and close, read by everything else.
    partitions: RwLock<BTreeMap<Place, Arc<Partition>>>,
    /// The master that this ps is registered with, or was last.
    master: Mutex<MasterStart>,
    /// Reaches the other ps of a job.
    dialer: OnceLock<Dialer>,
}

/// One start of a master.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MasterStart {
    /// Names its journal; 0 without a master.
    pub master: u64,
    /// How often a master has started with that journal.
    pub starts: u64,
}

impl Ps {
    /// A ps without partitions.
    ///
    /// # Errors
    /// [`Error::Options`] with everything that is wrong with the options.
    pub fn new(options: Options) -> Result<Self> {
        Self::with_stores(options, Stores::default())
    }

    /// A ps without partitions whose checkpoints lie in these stores.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn with_stores(options: Options, stores: Stores) -> Result<Self> {
        Self::with(options, stores, None)
    }

    /// The same; its weights lie in `memory`, which workers of this host may read.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn with(options: Options, stores: Stores, memory: Option<Memory>) -> Result<Self> {
        options.validate()?;
        Ok(Self(Arc::new(Inner {
            stores: stores.patient_for(options.store_patience),
            options,
            metrics: Arc::default(),
            reports: Reports::default(),
            memory,
            attachments: Attachments::default(),
            partitions: RwLock::default(),
            master: Mutex::default(),
            dialer: OnceLock::new(),
        })))
    }

    /// What it was made with.
    pub fn options(&self) -> &Options {
        &self.0.options
    }

    /// The memory that workers of this host may read.
    pub(crate) fn memory(&self) -> Option<&Memory> {
        self.0.memory.as_ref()
    }

    /// The workers that may, and whose memory this ps reads.
    pub(crate) fn attachments(&self) -> &Attachments {
        &self.0.attachments
    }

    /// What it has counted.
    pub fn metrics(&self) -> &Metrics {
        &self.0.metrics
    }

    /// Writes a file to where the checkpoints of a job shall lie, by which the master sees that it lies in the store that it knows.
    ///
    /// # Errors
    /// [`Error::Probe`]: a name that is no probe's, or a store that cannot be written.
    pub async fn probe(&self, url: &str, job: &str, file: &str) -> Result<()> {
        let malformed = |reason: String| Error::Probe { failure: Failure::new(Kind::Malformed, reason) };
        let is_part = |part: char| part.is_ascii_alphanumeric() || part == '-';
        if !file.starts_with(PROBE) || file.len() > 128 || !file.chars().all(is_part) {
            let found = file.escape_debug();
            return Err(malformed(format!(
                "ProbeRequest.file: expected `probe-` and letters, digits or `-`, found `{found}`"
            )));
        }
        let folder = self.0.stores.open(url).map_err(|error| malformed(error.to_string()))?.below(job);
        let name = self.0.options.name.clone();
        let written = folder.write(file, name.into()).await;
        written.map_err(|error| Error::Probe { failure: Failure::new(Kind::Unavailable, error) })
    }

    /// Creates a partition, empty until version 0 is pushed or its checkpoint is loaded in the background; answers its version.
    /// Repeating an identical call changes nothing. A newer era replaces the partition by an empty one; so does another process
    /// start of the master, whose numbers of jobs begin anew, and another checkpoint when the one before cannot be loaded. In
    /// arrival order a partition that has weights keeps them, whatever checkpoint it is to begin with.
    ///
    /// # Panics
    /// With a checkpoint and outside a runtime.
    ///
    /// # Errors
    /// The request contradicts itself or what is open, or a limit is reached. Then nothing has changed.
    pub fn open(&self, opening: Opening) -> Result<Option<Version>> {
        self.check_opening(&opening)?;
        let address @ Address { job, partition, era } = opening.address;
        let place = Place { job, partition };
        let master = self.master().master;
        let mut partitions = self.partitions_mut();
        let held = |model: &&Arc<Partition>| model.master == master && !model.is_broken();
        let existing = partitions.get(&place).filter(held).cloned();
        if let Some(model) = &existing {
            let here = model.opening().address.era;
            if era < here {
                return Err(Error::Fenced { place, sender: era, here });
            }
            if era == here {
                let applied = model.applied();
                match difference(model.opening(), &opening) {
                    None => {
                        model.others().map_or(Ok(()), |others| others.live_at(&opening.homes))?;
                        return Ok(applied.version);
                    }
                    Some(CHECKPOINT) if applied.restore_error.is_some() => {}
                    // The master gave up waiting for a part that is here all the same. Its ledger says what it has, which is
                    // as good; in canonical order such a part is of an older era.
                    Some(CHECKPOINT) if applied.version.is_some() && model.keeps_arrivals() => {
                        return Ok(applied.version);
                    }
                    Some(what) => return Err(Error::Differs { place, what }),
                }
            }
        }
        let jobs_max = self.0.options.jobs_max;
        let mut jobs: Vec<JobId> = partitions.keys().map(|place| place.job).collect();
        jobs.dedup();
        if jobs.len() >= jobs_max && !jobs.contains(&job) {
            return Err(Error::JobsFull { job, jobs_max });
        }
        let Inner { options, metrics, stores, reports, memory, dialer, .. } = &*self.0;
        let others = Others::of(&opening, || dialer.get().cloned().unwrap_or_else(Dialer::tcp))?;
        let surroundings = Surroundings {
            metrics: metrics.clone(),
            stores: stores.clone(),
            reports: reports.clone(),
            memory: memory.clone(),
            others,
        };
        let model = Partition::new(opening, master, options, surroundings)?;
        let model = Arc::new(model);
        checks::opened(address);
        tracing::info!(%job, %partition, %era, bytes = model.bytes(), "partition opened");
        if let Some(checkpoint) = model.opening().restore.clone() {
            tokio::spawn(restore::run(model.clone(), stores.clone(), checkpoint));
        }
        match partitions.insert(place, model) {
            Some(before) if existing.is_some() => before.end(Life::Rewound(era)),
            Some(before) => before.end(Life::Closed),
            None => self.0.metrics.partitions.add(1),
        }
        Ok(None)
    }

    /// Begins a push: checks its header and reserves memory for its values.
    ///
    /// # Errors
    /// Whatever is wrong with the push apart from its values, or no memory for them now.
    pub(crate) fn admit(&self, address: Address, target: Target, wire: WireType) -> Result<Admission> {
        let model = self.model(address)?;
        model.check(address.era, target, wire)?;
        let reserved = Reserved::new(self, &model, target)?;
        Ok(Admission { model, era: address.era, target, wire, reserved })
    }

    /// Counts how a push ended.
    pub(crate) fn counted(&self, pushed: Result<Pushed>) -> Result<Pushed> {
        let metrics = &self.0.metrics;
        let counter = match &pushed {
            Err(error) => {
                checks::refused(error);
                &metrics.pushes_refused
            }
            Ok(Pushed { outcome: Outcome::Merged, .. }) => &metrics.pushes_merged,
            Ok(Pushed { outcome: Outcome::Completed, .. }) => &metrics.pushes_completed,
            Ok(Pushed { outcome: Outcome::Duplicate, .. }) => &metrics.pushes_duplicate,
        };
        counter.add(1);
        pushed
    }

    /// Reads a partition at a version, waiting until it exists: the weights themselves, in f32 whatever they may travel in; no copies.
    ///
    /// # Errors
    /// As [`pull_into`](Parameters::pull_into).
    #[tracing::instrument(level = "debug", skip_all, fields(job = %pull.address.job, partition = %pull.address.partition, want = ?pull.want))]
    pub async fn pull(&self, pull: Pull) -> Result<Pulled, Failure> {
        let pulled = self.pull_from(pull).await;
        Ok(pulled.inspect_err(|_| self.0.metrics.pulls_refused.add(1))?)
    }

    async fn pull_from(&self, pull: Pull) -> Result<Pulled> {
        let model = self.model(pull.address)?;
        proto::convert::check_wire("PullRequest", pull.wire, model.wire())?;
        let metrics = &self.0.metrics;
        metrics.pulls_waiting.add(1);
        let _waiting = Defer(|| metrics.pulls_waiting.sub(1));
        let pulled = model.pull(pull.address.era, pull.want, pull.wait).await.inspect_err(checks::refused)?;
        metrics.pulls.add(1);
        metrics.pull_bytes.add(model.layout().partition_bytes_in(pull.address.partition, pull.wire) as u64);
        Ok(pulled)
    }

    /// What a partition contributes to the norms of a step, for the other partitions of the job; waits for the step's sum.
    pub(crate) async fn squares(&self, address: Address, step: Step, wait: Duration) -> Result<Measured> {
        self.model(address)?.squares(address.era, step, wait).await.inspect_err(checks::refused)
    }

    /// What a job's partitions on this ps have applied, by partition.
    ///
    /// # Errors
    /// [`Error::UnknownJob`].
    pub fn ledger(&self, job: JobId) -> Result<Vec<Applied>> {
        let models = self.models(job)?;
        Ok(models.iter().map(|model| model.applied()).collect())
    }

    /// Asks for a checkpoint of a job at a coming version; says whether all its partitions here are below it.
    ///
    /// # Errors
    /// [`Error::UnknownJob`], [`Error::NoCheckpoints`].
    pub fn save(&self, job: JobId, version: Version) -> Result<bool> {
        self.models(job)?.iter().try_fold(true, |coming, model| Ok(model.save(version)? && coming))
    }

    /// How the writing of checkpoints ended, as far as the master has not taken it.
    pub fn reports(&self) -> watch::Receiver<Reported> {
        self.0.reports.changes()
    }

    /// The master has taken these reports.
    pub(crate) fn reports_taken(&self, numbers: &[u64]) {
        self.0.reports.taken(numbers);
    }

    /// Lets go of a job's versions of an era, up to `version`, that were kept for evaluation.
    ///
    /// # Errors
    /// [`Error::UnknownJob`].
    pub fn unpin(&self, job: JobId, era: Era, version: Version) -> Result<()> {
        let models = self.models(job)?;
        // What was measured before a rewind is measured again after it.
        models
            .iter()
            .filter(|model| model.opening().address.era == era)
            .for_each(|model| model.unpin(version));
        Ok(())
    }

    /// Drops the partitions of a job that has ended in `era`, as this start of a master says.
    ///
    /// # Errors
    /// A later start of the master is known, or the partitions are of another master or of a later era. Then nothing is dropped.
    pub fn close_ended(&self, job: JobId, era: Era, sender: MasterStart) -> Result<()> {
        let here = self.master();
        if sender.master == here.master && sender.starts < here.starts {
            return Err(Error::OldMaster { job, sender: sender.starts, here: here.starts });
        }
        for (&place, model) in self.partitions().range(job_range(job)) {
            let here = model.opening().address.era;
            if model.master != sender.master {
                return Err(Error::OtherMaster { place, sender: sender.master, here: model.master });
            }
            if era < here {
                return Err(Error::Fenced { place, sender: era, here });
            }
        }
        self.close(job);
        Ok(())
    }

    /// Drops a job's partitions; waiting pulls are answered that they are gone. Unknown jobs are fine.
    pub fn close(&self, job: JobId) {
        let closed: Vec<_> = {
            let mut partitions = self.partitions_mut();
            partitions.extract_if(job_range(job), |_, _| true).collect()
        };
        self.0.reports.forget(job);
        for (Place { partition, .. }, model) in closed {
            model.end(Life::Closed);
            self.0.metrics.partitions.sub(1);
            tracing::info!(%job, %partition, "partition closed");
        }
    }

    /// Every open job and the process start of the master that opened it.
    pub(crate) fn jobs(&self) -> BTreeMap<JobId, u64> {
        self.partitions().iter().map(|(place, model)| (place.job, model.master)).collect()
    }

    /// Whether it holds anything that a checkpoint could keep.
    pub(crate) fn has_something_to_save(&self) -> bool {
        self.partitions().values().any(|model| model.can_be_saved())
    }

    /// Other ps are reached through this; without it by TCP, without keys. Only the first call counts.
    pub(crate) fn dials_with(&self, dialer: Dialer) {
        self.0.dialer.get_or_init(|| dialer);
    }

    /// From now on jobs are opened and closed by this start of a master.
    pub fn registered_with(&self, master: MasterStart) {
        *self.0.master.lock().unwrap_or_else(PoisonError::into_inner) = master;
    }

    fn master(&self) -> MasterStart {
        *self.0.master.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn check_opening(&self, opening: &Opening) -> Result<()> {
        let Opening { address, partitions, tensors, plan, spec, homes, restore: _ } = opening;
        let place = Place { job: address.job, partition: address.partition };
        spec.validate()?;
        let contradiction = |what, expected: String, found: String| {
            if expected == found {
                Ok(())
            } else {
                Err(Error::Contradiction { place, what, expected, found })
            }
        };
        contradiction("number of partitions", spec.fleet.ps.to_string(), partitions.to_string())?;
        if asks_others(opening) {
            contradiction("homes of partitions", partitions.to_string(), homes.len().to_string())?;
        }
        contradiction("plan", format!("{:?}", spec.plan(plan.records)), format!("{plan:?}"))?;
        if address.partition.get() >= *partitions {
            let (expected, found) = (format!("a number below {partitions}"), address.partition.to_string());
            return Err(Error::Contradiction { place, what: "partition", expected, found });
        }
        // Before the layout lists its chunks: their number is bounded by this.
        let elements =
            |shape: &[usize]| shape.iter().fold(1u64, |all, &size| all.saturating_mul(size as u64));
        let bytes = tensors.iter().fold(0u64, |all, tensor| {
            all.saturating_add(elements(&tensor.shape).saturating_mul(tensor.dtype().size() as u64))
        });
        let (bytes, bytes_max) = (bytes / u64::from(*partitions), self.0.options.partition_bytes_max);
        if bytes > bytes_max { Err(Error::PartitionTooLarge { place, bytes, bytes_max }) } else { Ok(()) }
    }

    fn model(&self, address: Address) -> Result<Arc<Partition>> {
        let place = Place { job: address.job, partition: address.partition };
        self.partitions().get(&place).cloned().ok_or(Error::Unknown { place })
    }

    fn models(&self, job: JobId) -> Result<Vec<Arc<Partition>>> {
        let partitions = self.partitions();
        let held =
            partitions.range(job_range(job)).map(|(_, model)| model).filter(|model| !model.is_broken());
        let models: Vec<_> = held.cloned().collect();
        if models.is_empty() { Err(Error::UnknownJob { job }) } else { Ok(models) }
    }

    fn partitions(&self) -> RwLockReadGuard<'_, BTreeMap<Place, Arc<Partition>>> {
        self.0.partitions.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn partitions_mut(&self) -> RwLockWriteGuard<'_, BTreeMap<Place, Arc<Partition>>> {
        self.0.partitions.write().unwrap_or_else(PoisonError::into_inner)
    }
}

#[async_trait::async_trait]
impl Parameters for Ps {
    async fn push(&self, push: Push) -> Result<Pushed, Failure> {
        let pushed = async {
            // Nothing travels: the values are what they are rounded to.
            let admission = self.admit(push.address, push.target, WireType::F32)?;
            let mut check = admission.check();
            push.chunks.iter().try_for_each(|chunk| check.check(chunk.id, WireType::F32, &chunk.values))?;
            check.finish()?;
            // Nothing has to be waited for: what meets its sibling is added up by all threads at once.
            let arrived = Arrived::at_once(push.target, push.chunks);
            admission.push(arrived).await
        };
        Ok(self.counted(pushed.await)?)
    }

    async fn pull_into(&self, pull: Pull, take: &mut Take<'_>) -> Result<Version, Failure> {
        let Pulled { version, chunks } = self.pull(Pull { wire: WireType::F32, ..pull }).await?;
        chunks.iter().try_for_each(|chunk| take(chunk.id, WireType::F32, &chunk.values))?;
        Ok(version)
    }
}

/// A push whose header was checked and whose memory is reserved.
#[derive(Debug)]
pub(crate) struct Admission {
    model: Arc<Partition>,
    /// Of the sender.
    era: Era,
    target: Target,
    /// As which the values of parameters come.
    wire: WireType,
    reserved: Reserved,
}

impl Admission {
    /// Where the push goes.
    pub(crate) fn place(&self) -> Place {
        let Address { job, partition, .. } = self.model.opening().address;
        Place { job, partition }
    }

    /// Checks the push's chunks as they come.
    pub(crate) fn check(&self) -> ChunkCheck<'_> {
        ChunkCheck::new("push to", self.model.layout(), self.model.opening().address.partition)
    }

    /// For chunks that lie in memory already, in f32: nothing is gained by adding them up one after the other.
    pub(crate) fn kept(&self) -> Arriving {
        Arriving::Here { model: self.model.clone(), arrived: Arrived::at_once(self.target, Vec::new()) }
    }

    /// For the chunks of the push, as they come.
    pub(crate) fn arriving(&self) -> Arriving {
        let mut arrived = self.model.arriving(self.target, self.wire);
        if !arrived.is_worked_on() || self.model.is_inline() {
            return Arriving::Here { model: self.model.clone(), arrived };
        }
        let (model, (chunks, received)) = (self.model.clone(), std::sync::mpsc::channel());
        let adding = tokio::task::spawn_blocking(move || {
            received.into_iter().for_each(|chunk| model.arrive(&mut arrived, chunk));
            arrived
        });
        Arriving::Elsewhere { chunks, adding }
    }

    /// Takes up the push: all chunks of the partition, which were checked. Once begun it is finished, even when nobody waits for the
    /// answer.
    #[tracing::instrument(level = "debug", skip_all, fields(place = %self.place(), target = ?self.target))]
    pub(crate) async fn push(self, arrived: Arrived) -> Result<Pushed> {
        let Self { model, era, wire, reserved, .. } = self;
        let inline = model.is_inline();
        let take_up = move || {
            let pushed = model.push(era, arrived);
            let Address { partition, .. } = model.opening().address;
            reserved.metrics.push_bytes.add(model.layout().partition_bytes_in(partition, wire) as u64);
            pushed
        };
        if inline { take_up() } else { tokio::task::spawn_blocking(take_up).await? }
    }
}

/// Where the chunks of a push go as they come.
#[derive(Debug)]
pub(crate) enum Arriving {
    /// They are kept as they are, or added up on the spot.
    Here {
        /// Where they belong.
        model: Arc<Partition>,
        /// Those that came.
        arrived: Arrived,
    },
    /// They are widened and added up by another thread, so that the socket is read meanwhile.
    Elsewhere {
        /// To that thread.
        chunks: std::sync::mpsc::Sender<Chunk>,
        /// Ends when there are no more.
        adding: JoinHandle<Arrived>,
    },
}

impl Arriving {
    /// Takes the next chunk, which was checked.
    pub(crate) fn take(&mut self, chunk: Chunk) {
        match self {
            Self::Here { model, arrived } => model.arrive(arrived, chunk),
            // A thread that is gone has panicked, which is told in the end.
            Self::Elsewhere { chunks, .. } => drop(chunks.send(chunk)),
        }
    }

    /// All of them have come.
    pub(crate) async fn finish(self) -> Result<Arrived> {
        match self {
            Self::Here { arrived, .. } => Ok(arrived),
            Self::Elsewhere { chunks, adding } => {
                drop(chunks);
                Ok(adding.await?)
            }
        }
    }
}

/// Memory for a push on its way in; given back when dropped.
#[derive(Debug)]
struct Reserved {
    metrics: Arc<Metrics>,
    bytes: u64,
}

impl Reserved {
    fn new(ps: &Ps, model: &Partition, target: Target) -> Result<Self> {
        let (metrics, bytes) = (ps.0.metrics.clone(), model.bytes() as u64);
        let bytes_max = ps.0.options.push_bytes_max;
        let held = metrics.push_bytes_held.get();
        let room = bytes_max.saturating_sub(held);
        if metrics.push_bytes_in_flight.add_below(bytes, room)
            || (held > 0
                && model.is_needed_first(target)
                && metrics.push_bytes_in_flight.add_below(bytes, bytes_max))
        {
            return Ok(Self { metrics, bytes });
        }
        let Address { job, partition, .. } = model.opening().address;
        let in_flight_bytes = metrics.push_bytes_in_flight.get() + held;
        Err(Error::PushesFull { place: Place { job, partition }, bytes, in_flight_bytes, bytes_max })
    }
}

impl Drop for Reserved {
    fn drop(&mut self) {
        self.metrics.push_bytes_in_flight.sub(self.bytes);
    }
}

struct Defer<F: FnMut()>(F);

impl<F: FnMut()> Drop for Defer<F> {
    fn drop(&mut self) {
        (self.0)();
    }
}

fn job_range(job: JobId) -> std::ops::RangeInclusive<Place> {
    Place { job, partition: PartitionId(0) }..=Place { job, partition: PartitionId(u32::MAX) }
}

/// Whether its steps need to know what other partitions have measured.
pub(crate) fn asks_others(opening: &Opening) -> bool {
    opening.partitions > 1 && opening.spec.optimizer.needs_norms().is_some()
}

/// How [`difference`] calls the checkpoint that a partition is opened with.
const CHECKPOINT: &str = "checkpoint";

/// The first part of two openings that differs. Where the other partitions live may change.
fn difference(one: &Opening, other: &Opening) -> Option<&'static str> {
    let parts = [
        ("number of partitions", one.partitions == other.partitions),
        ("model", one.tensors == other.tensors),
        ("plan", one.plan == other.plan),
        ("specification", one.spec == other.spec),
        (CHECKPOINT, one.restore == other.restore),
    ];
    parts.into_iter().find(|(_, same)| !same).map(|(what, _)| what)
}

#[cfg(test)]
mod tests;
