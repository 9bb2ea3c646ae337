//! The exchange of a worker with all partitions of a job: a push or a pull becomes one call for
//! each partition, concurrently, with retries.
//!
//! How the values travel is the business of a carrier, behind the trait
//! [`Parameters`](proto::parameters::Parameters). The [`Connector`] chooses it:
//!
//! | carrier | for | copies of a push in the worker |
//! | --- | --- | --- |
//! | `embedded` | a ps of this process | none |
//! | `socket` | a ps behind gRPC | none; the kernel makes one |
//! | `shared_memory` | a ps of this host | none for gradients that lie in such memory, else one |
//! | the same | a ps on the CUDA device of this worker | one, to the device |
//!
//! A pull has one copy with every carrier: into the tensors of the caller. What a ps on the CUDA
//! device of this worker has placed there crosses to the host first.
//!
//! A sum may be pushed while it is made ([`ComingSum`], ADR 69). The socket sends its chunks as
//! they come, the other carriers wait until it is whole.
//!
//! A model on a CUDA device leaves its gradients there and takes its weights there (ADR 62). They
//! cross to the host only for a carrier that needs them there.

mod attached;
mod coming;
mod connector;
mod embedded;
mod exported;
mod fetched;
mod placed;
mod placing;
mod shared_memory;
mod socket;
#[cfg(test)]
mod tests;

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures::StreamExt as _;
use futures::future::try_join_all;
use model::weights::{Spare, Weights};
use net::retry::within;
use proto::convert::ChunkCheck;
use proto::ids::{ChunkId, Era, JobId, PartitionId};
use proto::parameters::{Address, GivenValues, Outcome, Parameters, Pull, Push, Pushed, Target, Want};
use proto::pb::{self, Phase};
use proto::placement::Layout;
use proto::retry::{Pause, Retry};
use proto::spec::LimitsSpec;
use proto::status::{Failure, Kind};
use proto::tensor::{Chunk, ChunkValues, Values};
use proto::wire::WireType;
use tokio::time::Instant;

pub use self::coming::{ComingSum, SumMaker};
use self::coming::{Failed, whole_or_not};
pub use self::connector::Connector;
use crate::error::{Error, Result};
use crate::metrics::Metrics;
use crate::progress::Progress;

/// All partitions of one job, as a worker reaches them. Clones share their carriers.
#[derive(Clone)]
pub struct Partitions {
    job: JobId,
    era: Era,
    layout: Arc<Layout>,
    partitions: Arc<[Partition]>,
    limits: LimitsSpec,
    seed: u64,
    /// What the job exchanges.
    wire: WireType,
    spare: Spare,
    /// The progress of the lease that they are called for.
    progress: Progress,
    /// Counts calls that fail.
    metrics: Arc<Metrics>,
}

/// A call that is repeated.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Repeated {
    Push,
    Pull,
}

impl Repeated {
    /// Words for messages, before the name of a partition.
    const fn words(self) -> &'static str {
        match self {
            Self::Push => "push to",
            Self::Pull => "pull from",
        }
    }

    /// The line about a failure that is not the last one. `PULL_FAILED` is IBM EDT's word.
    fn warning(self, partition: &str, budget: Duration) -> String {
        let code = match self {
            Self::Push => "PUSH_FAILED",
            Self::Pull => "PULL_FAILED",
        };
        format!("{code}: {} {partition}: trying again for {budget:?}", self.words())
    }
}

struct Partition {
    id: PartitionId,
    /// Name and URL, for messages.
    name: String,
    ps: Arc<dyn Parameters>,
}

impl fmt::Debug for Partitions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let partitions: Vec<_> = self.partitions.iter().map(|partition| &partition.name).collect();
        f.debug_struct("Partitions")
            .field("job", &self.job)
            .field("partitions", &partitions)
            .finish_non_exhaustive()
    }
}

impl Partitions {
    /// The partitions of `job` at `addresses`, by partition. They are connected to when they are
    /// first called; the carriers of partitions that stay where they were are used again.
    ///
    /// # Errors
    /// An address is no URL.
    pub fn new(
        connector: &Connector,
        job: JobId,
        layout: Arc<Layout>,
        addresses: &[pb::PartitionAddress],
        limits: LimitsSpec,
        seed: u64,
    ) -> Result<Self> {
        let connect = |(index, address): (usize, &pb::PartitionAddress)| {
            let name = format!("partition {index} on ps `{}` at {}", address.ps, address.url);
            let ps = connector
                .connect(job, &address.url)
                .map_err(|failure| Error::Call { what: name.clone(), failure })?;
            Ok(Partition { id: PartitionId(index as u32), name, ps })
        };
        let partitions = addresses.iter().enumerate().map(connect).collect::<Result<_>>()?;
        Ok(Self {
            job,
            era: Era(0),
            layout,
            partitions,
            limits,
            seed,
            wire: WireType::F32,
            spare: Spare::default(),
            progress: Progress::default(),
            metrics: Arc::default(),
        })
    }

    /// These partitions for a job that exchanges `wire`: pushed nodes and weights
    /// [pulled for training](Self::pull_rounded) travel in it.
    pub fn exchanging(self, wire: WireType) -> Self {
        Self { wire, ..self }
    }

    /// These partitions for a model on `device`: weights are pulled into its memory.
    pub fn on(self, device: kernels::Device) -> Self {
        Self { spare: Spare::on(device), ..self }
    }

    /// These partitions, called in `era`.
    pub(crate) fn at(&self, era: Era) -> Self {
        Self { era, ..self.clone() }
    }

    /// These partitions, with calls that fail counted in `metrics`.
    pub(crate) fn counting(self, metrics: Arc<Metrics>) -> Self {
        Self { metrics, ..self }
    }

    /// These partitions for one lease, telling `progress` how it gets on.
    pub(crate) fn saying(self, progress: &Progress) -> Self {
        Self { progress: progress.clone(), ..self }
    }

    /// These partitions, whose calls are not repeated after a failure.
    pub(crate) fn once(self) -> Self {
        Self { limits: LimitsSpec { pull_attempts_max: 0, ..self.limits }, ..self }
    }

    /// Sends the values of `target` to every partition. Nodes of a step travel in the type that the
    /// job exchanges, version 0 does not.
    ///
    /// Returns when every partition has acknowledged its part: [`Outcome::Duplicate`] if each of
    /// them had it before, else [`Outcome::Merged`].
    ///
    /// The values are not copied. They belong to the carriers, which drop them when the ps does not
    /// read them any more; with shared memory that may be after the return.
    ///
    /// A caller may drop the future. Each partition then has its whole part or nothing of it, and
    /// the push may be repeated.
    ///
    /// # Errors
    /// One partition refused, or stayed unreachable for `pull_attempts_max` times `pull_timeout`.
    /// The others may have their parts.
    pub async fn push(&self, target: Target, values: Vec<Values>) -> Result<Outcome> {
        self.push_coming(target, &ComingSum::whole(values)).await
    }

    /// Sends a sum that is still being made, as [`push`](Self::push) does. Each partition may get
    /// chunks as soon as they are made. None counts any of them before the sum is whole.
    ///
    /// # Errors
    /// The errors of [`push`](Self::push), or the maker of the sum has failed. Then no partition
    /// has anything of it.
    pub async fn push_coming(&self, target: Target, sum: &ComingSum) -> Result<Outcome> {
        let pushes = self.partitions.iter().map(async |partition| {
            match self.push_ahead(partition, target, sum).await {
                Some(pushed) => Ok(pushed),
                None => self.push_made(partition, target, sum).await,
            }
        });
        let pushed = try_join_all(pushes).await?;
        let made = sum.made().await.unwrap_or_default();
        self.metrics.push_bytes.add(made.iter().map(|values| values.len() as u64).sum());
        let all_repeated = pushed.iter().all(|pushed| pushed.outcome == Outcome::Duplicate);
        Ok(if all_repeated { Outcome::Duplicate } else { Outcome::Merged })
    }

    /// Sends a part of a sum while it is made, once. The deadline of the call begins when the sum
    /// is whole. `None`: the sum is whole already, the call failed, or the partition has no chunks,
    /// of which the last one could wait until the sum is whole.
    async fn push_ahead(&self, partition: &Partition, target: Target, sum: &ComingSum) -> Option<Pushed> {
        let (layout, id) = (self.layout.clone(), partition.id);
        let count = layout.members(id).len();
        if count == 0 || sum.is_whole() {
            return None;
        }
        let coming = sum.clone().told().map(move |told| {
            let chunks = |(tensor, values): (usize, ChunkValues)| chunks(&layout, id, tensor, &values);
            let failed = |Failed| Failure::new(Kind::Internal, NOT_MADE);
            told.map(|told| told.into_iter().flat_map(chunks).collect()).map_err(failed)
        });
        let coming = whole_or_not(coming.boxed(), count).boxed();
        let push = self.header(partition, target);
        let late = async {
            if sum.made().await.is_some() {
                tokio::time::sleep(self.deadline()).await;
            }
        };
        tokio::select! {
            biased;
            pushed = partition.ps.push_coming(push, coming) => {
                let failed = |reason: &Failure| {
                    tracing::debug!(%reason, partition = %partition.name, "a push ahead failed");
                };
                pushed.inspect_err(failed).ok()
            }
            () = late => None,
        }
    }

    /// Sends a part of a sum once it is whole, with retries.
    async fn push_made(&self, partition: &Partition, target: Target, sum: &ComingSum) -> Result<Pushed> {
        let not_made = || Error::Task { what: "push".to_owned(), reason: NOT_MADE.to_owned() };
        let tensors = sum.made().await.ok_or_else(not_made)?;
        let tensors = tensors.iter().enumerate();
        let chunks = tensors.flat_map(|(tensor, values)| chunks(&self.layout, partition.id, tensor, values));
        let push = Push { chunks: chunks.collect(), ..self.header(partition, target) };
        self.retry(partition, Repeated::Push, move || partition.ps.push(push.clone())).await
    }

    /// Returns a push to a partition, without chunks.
    fn header(&self, partition: &Partition, target: Target) -> Push {
        let wire = match target {
            Target::Initial => WireType::F32,
            Target::Node { .. } => self.wire,
        };
        Push { address: self.address(partition), target, wire, chunks: Vec::new() }
    }

    /// Reads the whole model as the ps keep it, for measuring and exporting. `None`: an exact
    /// version is gone, because its steps are applied.
    ///
    /// Returns when all partitions have what is wanted and all of it was copied; it waits for that
    /// as long as necessary.
    ///
    /// The weights belong to the caller. Their last clone gives the memory to the next pull.
    ///
    /// A caller may drop the future: nothing remains of the pull.
    ///
    /// # Errors
    /// One partition refused, or stayed unreachable for `pull_attempts_max` times `pull_timeout`.
    pub async fn pull(&self, want: Want) -> Result<Option<Weights>> {
        self.pull_as(WireType::F32, want).await
    }

    /// Reads the whole model for training: the values of parameters are rounded to what the job
    /// exchanges. All else is as in [`pull`](Self::pull).
    ///
    /// # Errors
    /// The errors of [`pull`](Self::pull).
    pub async fn pull_rounded(&self, want: Want) -> Result<Option<Weights>> {
        self.pull_as(self.wire, want).await
    }

    async fn pull_as(&self, wire: WireType, want: Want) -> Result<Option<Weights>> {
        // The partitions write different parts of it, one after the other: they are polled by one
        // task.
        let values = self.spare.take(&self.layout)?;
        let values = Mutex::new(values);
        let pulls = self.partitions.iter().map(async |partition| {
            let (address, wait) = (self.address(partition), self.limits.pull_timeout);
            let pull = Pull { address, want, wait, wire, on_device: self.spare.is_on_device() };
            loop {
                let fill = || self.fill(partition, pull, &values);
                match self.retry(partition, Repeated::Pull, fill).await {
                    // Waiting for the others' gradients is the barrier, not a failure.
                    Err(Error::Call { failure, .. }) if failure.kind == Kind::NotYet => {
                        // The lease of another job that this worker holds waits too, and must not
                        // count as hung.
                        self.progress.advance();
                        tracing::debug!(?want, partition = %partition.name, "still waiting for this version");
                    }
                    result => break result,
                }
            }
        });
        let pulled = try_join_all(pulls).await;
        let values = values.into_inner().unwrap_or_else(PoisonError::into_inner);
        match pulled {
            Ok(_) => Ok(Some(Weights::new(values, self.spare.clone()))),
            Err(error) => {
                self.spare.put(values);
                match error {
                    Error::Call { failure, .. } if failure.kind == Kind::Gone => Ok(None),
                    error => Err(error),
                }
            }
        }
    }

    /// One attempt to pull a partition, each chunk into its place while the next is on its way.
    async fn fill(
        &self,
        partition: &Partition,
        pull: Pull,
        values: &Mutex<Vec<Values>>,
    ) -> Result<(), Failure> {
        let mut check = ChunkCheck::new(Repeated::Pull.words(), &self.layout, partition.id);
        let mut take = |id: ChunkId, wire: WireType, came: GivenValues<'_>| {
            check.check(id, wire, came.len())?;
            self.progress.advance();
            let (place, role) = (self.layout.chunk(id), self.layout.tensor_of(id).role);
            let mut values = values.lock().unwrap_or_else(PoisonError::into_inner);
            placing::place(&mut values[place.tensor], place, (wire, came), pull.wire.of(role))
        };
        partition.ps.pull_into(pull, &mut take).await?;
        Ok(check.finish()?)
    }

    /// Returns the longest time of one call.
    fn deadline(&self) -> Duration {
        self.limits.pull_timeout * 2
    }

    fn address(&self, partition: &Partition) -> Address {
        Address { job: self.job, partition: partition.id, era: self.era }
    }

    /// Repeats a call that may succeed later, for as long as the job's `pull_attempts_max`
    /// time-outs together. A ps that is full answers, so it is waited for without counting. "Not
    /// yet" is the caller's business: it is no failure.
    async fn retry<T, Fut>(&self, partition: &Partition, what: Repeated, call: impl Fn() -> Fut) -> Result<T>
    where
        Fut: Future<Output = Result<T, Failure>>,
    {
        let (deadline, budget) = (self.deadline(), self.limits.pull_timeout * self.limits.pull_attempts_max);
        let (mut since, mut said) = (Instant::now(), None);
        let judge = |failures, failure: Failure| {
            let call = || format!("{} {}", what.words(), partition.name);
            if failure.kind == Kind::Full {
                since = Instant::now();
            }
            if failure.kind == Kind::NotFound {
                return Err(Error::NotHeld { what: call(), partition: partition.id, failure });
            }
            if failure.kind == Kind::NotYet || !failure.is_retryable() {
                return Err(Error::Call { what: call(), failure });
            }
            if failure.kind != Kind::Full {
                match what {
                    Repeated::Push => self.metrics.push_failures.add(1),
                    Repeated::Pull => self.metrics.pull_failures.add(1),
                }
            }
            if since.elapsed() >= budget {
                return Err(Error::Call { what: call(), failure });
            }
            // Each refusal shows that the ps lives and answers.
            let waits = what == Repeated::Push && failure.kind == Kind::Full && self.progress.refused(call());
            if !waits && said != Some(Phase::Retrying) {
                self.progress.enter(Phase::Retrying, call());
            }
            said = Some(if waits { Phase::WaitingForRoom } else { Phase::Retrying });
            if failures == 0 {
                tracing::warn!(reason = %failure, "{}", what.warning(&partition.name, budget));
            }
            Ok(Pause::Growing)
        };
        let attempt = || within(deadline, call());
        Retry::unlimited().run(self.seed, tokio::time::sleep, judge, attempt).await
    }
}

/// Why a push has nothing to send.
const NOT_MADE: &str = "its gradients were not all made";

/// Returns the chunks of a tensor that a partition holds, in increasing order of their ids.
fn chunks(layout: &Layout, partition: PartitionId, tensor: usize, values: &ChunkValues) -> Vec<Chunk> {
    let members = layout.members(partition);
    let begin = members.partition_point(|&id| layout.chunk(id).tensor < tensor);
    let own = members[begin..].iter().take_while(|&&id| layout.chunk(id).tensor == tensor);
    let chunk = |&id: &ChunkId| {
        let (chunk, role) = (layout.chunk(id), layout.tensor_of(id).role);
        let size = role.dtype().size();
        let bytes = chunk.offset * size..(chunk.offset + chunk.len) * size;
        Chunk { id, role, values: values.slice(bytes) }
    };
    own.map(chunk).collect()
}
