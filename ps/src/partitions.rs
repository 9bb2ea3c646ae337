//! [`Ps`]: every partition that this process holds, behind a handle that is cheap to clone: opens,
//! finds and closes them.
//!
//! The gRPC service and, in one process, the workers themselves use it. Always true here: the lock
//! of the map is short and never held across an await; what a partition does, it does by itself.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, OnceLock, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::Duration;

use kernels::{Device, Squares, Storage, values};
use net::channel::Dialer;
use net::memory::Memory;
use net::ps_client::PsClients;
use net::timeline::Mark;
use proto::checkpoint::PROBE;
use proto::ids::{Era, JobId, Step, Version};
use proto::parameters::{Address, GivenValues, Outcome, Parameters, Pull, Pulled, Push, Pushed, Take};
use proto::status::{Failure, Kind};
use proto::wire::WireType;
use store::Stores;
use tokio::sync::watch;

use crate::admission;
use crate::attached::Attachments;
use crate::checkpoint::{Reported, Reports};
use crate::checks;
use crate::config::Options;
use crate::device::{DeviceMemory, Lent};
use crate::error::{Error, Result};
use crate::metrics::Metrics;
use crate::opening::{Applied, Opening, Place};
use crate::partition::pull::{Given, Lies};
use crate::partition::push::{Carrier, Header};
use crate::partition::{Life, Partition, Surroundings, norms};

/// A parameter server; clones share its partitions.
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
    /// Where the values of all partitions lie.
    device: Arc<DeviceMemory>,
    attachments: Attachments,
    /// Few and seldom changed: written by open and close, read by everything else.
    partitions: RwLock<BTreeMap<Place, Arc<Partition>>>,
    /// The master that this ps is registered with, or was last.
    master: Mutex<MasterStart>,
    /// The clients of the other ps.
    ps_clients: OnceLock<PsClients>,
}

/// One start of a master.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MasterStart {
    /// Identity of its journal; 0 without a master.
    pub master: u64,
    /// How often a master has started with that journal.
    pub starts: u64,
}

impl Ps {
    /// Creates a ps without partitions.
    ///
    /// # Errors
    /// [`Error::Options`] with everything that is wrong with the options.
    pub fn new(options: Options) -> Result<Self> {
        Self::with_stores(options, Stores::default())
    }

    /// Creates a ps without partitions whose checkpoints lie in these stores.
    ///
    /// # Errors
    /// The errors of [`new`](Self::new).
    pub fn with_stores(options: Options, stores: Stores) -> Result<Self> {
        Self::with(options, stores, None)
    }

    /// Creates a ps without partitions whose weights lie in `memory`, which workers of this host
    /// may read.
    ///
    /// # Errors
    /// The errors of [`new`](Self::new).
    pub fn with(options: Options, stores: Stores, memory: Option<Memory>) -> Result<Self> {
        Self::on(Device::default(), options, stores, memory)
    }

    /// Creates a ps without partitions whose weights, slots and sums lie on a device. Workers read
    /// copies of the weights on the host: in `memory`, as far as it has room.
    ///
    /// # Errors
    /// The errors of [`new`](Self::new), and a device that has less memory than the options say.
    pub fn on(device: Device, options: Options, stores: Stores, memory: Option<Memory>) -> Result<Self> {
        options.validate()?;
        let device = Arc::new(DeviceMemory::new(device, options.device_bytes_max)?);
        Ok(Self(Arc::new(Inner {
            stores: stores.patient_for(options.store_patience),
            options,
            metrics: Arc::default(),
            reports: Reports::default(),
            memory,
            device,
            attachments: Attachments::default(),
            partitions: RwLock::default(),
            master: Mutex::default(),
            ps_clients: OnceLock::new(),
        })))
    }

    /// Returns what it was made with.
    pub fn options(&self) -> &Options {
        &self.0.options
    }

    /// Returns the memory that workers of this host may read.
    pub(crate) fn memory(&self) -> Option<&Memory> {
        self.0.memory.as_ref()
    }

    /// Returns the workers of this host that read its weights where they lie, and whose gradients
    /// it reads where they lie.
    pub(crate) fn attachments(&self) -> &Attachments {
        &self.0.attachments
    }

    /// Returns the device of its partitions.
    pub(crate) fn device(&self) -> &Arc<DeviceMemory> {
        &self.0.device
    }

    /// Returns what it has counted.
    pub fn metrics(&self) -> &Metrics {
        &self.0.metrics
    }

    /// Writes a file to where the checkpoints of a job shall lie, by which the master sees that it
    /// lies in the store that it knows.
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

    /// Creates a partition, empty until version 0 is pushed or its checkpoint is loaded in the
    /// background; answers its version. Repeating an identical call changes nothing. A newer era
    /// replaces the partition by an empty one; so does another process start of the master, whose
    /// numbers of jobs begin anew, and another checkpoint when the one before cannot be loaded. In
    /// arrival order a partition that has weights keeps them, whatever checkpoint it is to begin
    /// with.
    ///
    /// # Panics
    /// With a checkpoint and outside a runtime.
    ///
    /// # Errors
    /// The request contradicts itself or what is open, or a limit is reached. Then nothing has
    /// changed.
    pub fn open(&self, opening: Opening) -> Result<Option<Version>> {
        admission::check(&opening, self.0.options.partition_bytes_max)?;
        let address @ Address { job, partition, era } = opening.address;
        let place = Place::from(address);
        let master = self.master().master;
        let mut partitions = self.partitions_mut();
        let held = |partition: &&Arc<Partition>| partition.master == master && !partition.is_broken();
        let existing = partitions.get(&place).filter(held).cloned();
        if let Some(existing) = &existing
            && let Some(applied) = stays(existing, &opening)?
        {
            return Ok(applied.version);
        }
        let jobs_max = self.0.options.jobs_max;
        let mut jobs: Vec<JobId> = partitions.keys().map(|place| place.job).collect();
        jobs.dedup();
        if jobs.len() >= jobs_max && !jobs.contains(&job) {
            return Err(Error::JobsFull { job, jobs_max });
        }
        let Inner { options, metrics, stores, reports, memory, ps_clients, device, .. } = &*self.0;
        let surroundings = Surroundings {
            metrics: metrics.clone(),
            stores: stores.clone(),
            reports: reports.clone(),
            memory: memory.clone(),
            ps_clients: ps_clients.get().cloned(),
            device: device.clone(),
        };
        let before = partitions.get(&place).map(AsRef::as_ref);
        let opened = Arc::new(Partition::new(opening, master, options, surroundings, before)?);
        checks::opened(address);
        tracing::info!(%job, %partition, %era, bytes = opened.bytes(), "partition opened");
        if let Some(checkpoint) = opened.opening().restore.clone() {
            tokio::spawn(opened.clone().restore(stores.clone(), checkpoint));
        }
        match partitions.insert(place, opened) {
            Some(before) if existing.is_some() => before.end(Life::Rewound(era)),
            Some(before) => before.end(Life::Closed),
            None => self.0.metrics.partitions.add(1),
        }
        Ok(None)
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

    /// Reads a partition at a version: waits until it exists, at most as long as `pull` says, and
    /// returns its chunks in f32, whatever type they may travel in. The chunks share the memory of
    /// the partition, which keeps the version unchanged until the last of them is dropped. A caller
    /// may drop the future at any time.
    ///
    /// # Errors
    /// The errors of [`pull_into`](Parameters::pull_into).
    #[tracing::instrument(level = "debug", skip_all, fields(job = %pull.address.job, partition = %pull.address.partition, want = ?pull.want))]
    pub async fn pull(&self, pull: Pull) -> Result<Pulled, Failure> {
        let Pull { address, want, wait, .. } = pull;
        let give = |partition: Arc<Partition>| async move { partition.pull(address.era, want, wait).await };
        self.counted_pull(pull, give).await
    }

    /// Reads a partition as [`pull`](Self::pull) does, where the version lies.
    async fn pull_there(&self, pull: Pull) -> Result<Lies, Failure> {
        let Pull { address, want, wait, .. } = pull;
        let give =
            |partition: Arc<Partition>| async move { partition.pull_there(address.era, want, wait).await };
        self.counted_pull(pull, give).await
    }

    /// Reads a partition as [`pull`](Self::pull) does, into memory of the device that a worker has
    /// exported, if the version lies on the device.
    #[tracing::instrument(name = "pull", level = "debug", skip_all, fields(job = %pull.address.job, partition = %pull.address.partition, want = ?pull.want))]
    pub(crate) async fn pull_to(&self, pull: Pull, to: Lent) -> Result<Given, Failure> {
        let Pull { address, want, wait, .. } = pull;
        let give =
            |partition: Arc<Partition>| async move { partition.pull_to(address.era, want, wait, to).await };
        self.counted_pull(pull, give).await
    }

    /// Finds the partition that gives what a pull asks for, and counts the pull.
    async fn counted_pull<T, F: Future<Output = Result<T>>>(
        &self,
        pull: Pull,
        give: impl FnOnce(Arc<Partition>) -> F,
    ) -> Result<T, Failure> {
        let metrics = &self.0.metrics;
        let pulled = async {
            let partition = self.find(pull.address)?;
            proto::convert::check_wire("PullRequest", pull.wire, partition.wire())?;
            metrics.pulls_waiting.add(1);
            let _waiting = Defer(|| metrics.pulls_waiting.sub(1));
            let given = give(partition.clone()).await.inspect_err(checks::refused)?;
            metrics.pulls.add(1);
            metrics.pull_bytes.add(partition.bytes_in(pull.wire) as u64);
            Ok(given)
        };
        let pulled: Result<T> = pulled.await;
        Ok(pulled.inspect_err(|_| metrics.pulls_refused.add(1))?)
    }

    /// Returns what a partition contributes to the norms of a step, for the other partitions of the
    /// job; waits for the step's sum, at most `wait`. A caller may drop the future at any time.
    pub(crate) async fn squares(
        &self,
        address: Address,
        step: Step,
        wait: Duration,
    ) -> Result<Arc<[Squares]>> {
        self.find(address)?.squares(address.era, step, wait).await.inspect_err(checks::refused)
    }

    /// Returns what a job's partitions on this ps have applied, by partition.
    ///
    /// # Errors
    /// [`Error::UnknownJob`].
    pub fn ledger(&self, job: JobId) -> Result<Vec<Applied>> {
        Ok(self.find_all(job)?.iter().map(|partition| partition.applied()).collect())
    }

    /// Asks for a checkpoint of a job at a coming version; says whether all its partitions here are
    /// below it.
    ///
    /// # Errors
    /// [`Error::UnknownJob`], [`Error::NoCheckpoints`].
    pub fn save(&self, job: JobId, version: Version) -> Result<bool> {
        let partitions = self.find_all(job)?;
        partitions.iter().try_fold(true, |coming, partition| Ok(partition.save(version)? && coming))
    }

    /// Returns how the writing of checkpoints ended, as far as the master has not taken it.
    pub fn reports(&self) -> watch::Receiver<Reported> {
        self.0.reports.changes()
    }

    /// Removes the reports with these numbers, which the master has taken.
    pub(crate) fn reports_taken(&self, numbers: &[u64]) {
        self.0.reports.taken(numbers);
    }

    /// Lets go of a job's versions of an era, up to `version`, that were kept for evaluation,
    /// except `best`. Version 0 is no best one.
    ///
    /// # Errors
    /// [`Error::UnknownJob`].
    pub fn unpin(&self, job: JobId, era: Era, version: Version, best: Version) -> Result<()> {
        let partitions = self.find_all(job)?;
        // What was measured before a rewind is measured again after it.
        let of_era = partitions.iter().filter(|partition| partition.opening().address.era == era);
        of_era.for_each(|partition| partition.unpin(version, best));
        Ok(())
    }

    /// Drops the partitions of a job that has ended in `era`, as this start of a master says.
    ///
    /// # Errors
    /// A later start of the master is known, or the partitions are of another master or of a later
    /// era. Then nothing is dropped.
    pub fn close_ended(&self, job: JobId, era: Era, sender: MasterStart) -> Result<()> {
        let here = self.master();
        if sender.master == here.master && sender.starts < here.starts {
            return Err(Error::OldMaster { job, sender: sender.starts, here: here.starts });
        }
        for (&place, partition) in self.partitions().range(Place::all_of(job)) {
            let here = partition.opening().address.era;
            if partition.master != sender.master {
                return Err(Error::OtherMaster { place, sender: sender.master, here: partition.master });
            }
            if era < here {
                return Err(Error::Fenced { place, sender: era, here });
            }
        }
        self.close(job);
        Ok(())
    }

    /// Drops a job's partitions; waiting pulls are answered that they are gone. Unknown jobs are
    /// fine. Returns at once; memory that pulls still read is freed when they end.
    pub fn close(&self, job: JobId) {
        let closed: Vec<_> = {
            let mut partitions = self.partitions_mut();
            partitions.extract_if(Place::all_of(job), |_, _| true).collect()
        };
        self.0.reports.forget(job);
        for (Place { partition, .. }, open) in closed {
            open.end(Life::Closed);
            self.0.metrics.partitions.sub(1);
            tracing::info!(%job, %partition, "partition closed");
        }
    }

    /// Returns every open job and the process start of the master that opened it.
    pub(crate) fn jobs(&self) -> BTreeMap<JobId, u64> {
        self.partitions().iter().map(|(place, partition)| (place.job, partition.master)).collect()
    }

    /// Returns whether it holds anything that a checkpoint could keep.
    pub(crate) fn has_something_to_save(&self) -> bool {
        self.partitions().values().any(|partition| partition.can_be_saved())
    }

    /// Returns the first failure of the device, when there is one. A caller may drop the future.
    pub(crate) async fn device_failure(&self) -> kernels::Error {
        self.0.device.failure().await
    }

    /// Sets the dialer for connections to other ps. Only the first call counts. Without a call they
    /// use TCP without keys.
    pub(crate) fn dials_with(&self, dialer: Dialer) {
        self.0.ps_clients.get_or_init(|| norms::clients(dialer));
    }

    /// Sets the start of a master that opens and closes jobs from now on.
    pub fn registered_with(&self, master: MasterStart) {
        *self.0.master.lock().unwrap_or_else(PoisonError::into_inner) = master;
    }

    fn master(&self) -> MasterStart {
        *self.0.master.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the partition that a worker or another partition speaks to.
    ///
    /// # Errors
    /// [`Error::Unknown`].
    pub(crate) fn find(&self, address: Address) -> Result<Arc<Partition>> {
        let place = Place::from(address);
        self.partitions().get(&place).cloned().ok_or(Error::Unknown { place })
    }

    fn find_all(&self, job: JobId) -> Result<Vec<Arc<Partition>>> {
        let partitions = self.partitions();
        let held = partitions.range(Place::all_of(job)).map(|(_, partition)| partition);
        let found: Vec<_> = held.filter(|partition| !partition.is_broken()).cloned().collect();
        if found.is_empty() { Err(Error::UnknownJob { job }) } else { Ok(found) }
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
    /// Takes up a push of a worker in this process, without a copy: this ps keeps the chunks until
    /// their step is applied or they are added to others. Returns when the push is merged, or the
    /// step that it completes is applied. A caller may drop the future: the push then either counts
    /// whole or not at all.
    async fn push(&self, push: Push) -> Result<Pushed, Failure> {
        let pushed = async {
            let Push { address, target, mut chunks, .. } = push;
            let partition = self.find(address)?;
            // Before anything counts, because the worker's device may fail.
            if !partition.is_on_device() && chunks.iter().any(|chunk| !chunk.values.is_on_host()) {
                let fetching = tokio::task::spawn_blocking(move || {
                    values::fetched(&chunks, WireType::F32).map(|fetched| fetched.unwrap_or(chunks))
                });
                chunks = fetching.await?.map_err(Error::SenderDevice)?;
            }
            // Nothing travels: the values are what they are rounded to.
            let (wire, carrier) = (WireType::F32, Carrier::Memory);
            let mut arriving = partition.receive(Header {
                era: address.era,
                target,
                wire,
                carrier,
                mark: Mark::current(),
            })?;
            chunks.into_iter().try_for_each(|chunk| arriving.take(chunk.id, chunk.values))?;
            arriving.finish().await
        };
        Ok(self.counted(pushed.await)?)
    }

    async fn pull_into(&self, pull: Pull, take: &mut Take<'_>) -> Result<Version, Failure> {
        let pull = Pull { wire: WireType::F32, ..pull };
        let lies = match pull.on_device {
            true => self.pull_there(pull).await?,
            false => Lies::Here(self.pull(pull).await?),
        };
        match lies {
            Lies::Here(Pulled { version, chunks }) => {
                let mut chunks = chunks.iter();
                chunks.try_for_each(|chunk| {
                    take(chunk.id, WireType::F32, GivenValues::Host(chunk.values.host()))
                })?;
                Ok(version)
            }
            Lies::There(version, chunks) => {
                let mut chunks = chunks.iter();
                chunks.try_for_each(|(id, buffer)| {
                    let storage: &Storage = buffer;
                    take(*id, WireType::F32, GivenValues::Device(storage, 0..storage.size()))
                })?;
                Ok(version)
            }
        }
    }
}

/// Returns what an open partition has applied, when it stays as it is although it is opened again:
/// because the two openings agree, or because it has weights in arrival order. `None` when an empty
/// one takes its place.
///
/// # Errors
/// The opening is of an earlier era, or differs from that of the partition.
fn stays(partition: &Partition, opening: &Opening) -> Result<Option<Applied>> {
    let (place, sender, here) = (partition.place(), opening.address.era, partition.opening().address.era);
    if sender < here {
        return Err(Error::Fenced { place, sender, here });
    }
    if sender > here {
        return Ok(None);
    }
    let applied = partition.applied();
    match partition.opening().difference(opening) {
        None => {
            partition.others_live_at(opening)?;
            Ok(Some(applied))
        }
        Some(Opening::CHECKPOINT) if applied.restore_error.is_some() => Ok(None),
        // The master gave up waiting for a part that is here all the same. Its ledger says what it
        // has, which is as good; in canonical order such a part is of an older era.
        Some(Opening::CHECKPOINT) if applied.version.is_some() && partition.keeps_arrivals() => {
            Ok(Some(applied))
        }
        Some(what) => Err(Error::Differs { place, what }),
    }
}

struct Defer<F: FnMut()>(F);

impl<F: FnMut()> Drop for Defer<F> {
    fn drop(&mut self) {
        (self.0)();
    }
}

#[cfg(test)]
mod tests;
