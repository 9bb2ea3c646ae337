//! Fan-out over a job's partitions: one push or pull becomes one call to each, concurrently, with retries.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use futures::future::try_join_all;
use kernels::cpu::cast;
use model::Allocator;
use model::weights::{Spare, Weights};
use net::channel::{Dialer, Purpose};
use net::memory::{Memory, Regions};
use proto::convert::ChunkCheck;
use proto::ids::{ChunkId, Era, JobId, PartitionId};
use proto::parameters::{Address, Outcome, Parameters, Pull, Push, Target, Want};
use proto::pb::{self, Phase};
use proto::placement::Layout;
use proto::retry::Retry;
use proto::spec::LimitsSpec;
use proto::status::{Failure, Kind};
use proto::tensor::{Chunk, Values};
use proto::wire::WireType;
use tokio::time::Instant;

use crate::error::{Error, Result};
use crate::grpc_ps::GrpcPs;
use crate::metrics::Metrics;
use crate::near::Near;
use crate::progress::Progress;

/// Turns a ps's URL into a connection: gRPC, or the ps itself when it lives in this process.
#[derive(Clone)]
pub struct Connector {
    connect: Arc<Connect>,
    /// Memory that a ps of this host may read.
    memory: Option<Memory>,
}

type Connect = dyn Fn(&str) -> Result<Arc<dyn Parameters>, Failure> + Send + Sync;

impl fmt::Debug for Connector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Connector")
    }
}

impl Connector {
    /// A connector that asks `connect`.
    pub fn new(
        connect: impl Fn(&str) -> Result<Arc<dyn Parameters>, Failure> + Send + Sync + 'static,
    ) -> Self {
        Self { connect: Arc::new(connect), memory: None }
    }

    /// gRPC over bulk channels of `dialer`.
    pub fn grpc(dialer: Dialer) -> Self {
        Self::new(move |url| Ok(Arc::new(GrpcPs::new(dialer.channel(url, Purpose::Bulk)?, None))))
    }

    /// As [`grpc`](Self::grpc), and by `memory` to a ps of this host and this user, where `dialer` finds that it is one.
    pub fn near(dialer: Dialer, memory: Memory, metrics: Arc<Metrics>) -> Self {
        let regions = Regions::new(memory.clone());
        let connect = move |url: &str| {
            let near = Near::new(regions.clone(), metrics.clone());
            let ps: Arc<dyn Parameters> =
                Arc::new(GrpcPs::new(dialer.channel(url, Purpose::Bulk)?, Some(near)));
            Ok(ps)
        };
        Self { connect: Arc::new(connect), memory: Some(memory) }
    }

    /// Memory for a model's gradients that need no copy on their way to a ps of this host. What the model leaves goes back to the system.
    pub(crate) fn allocator(&self) -> Option<Box<dyn Allocator>> {
        let memory = self.memory.clone()?;
        Some(Box::new(Shared(Regions::new(memory))))
    }
}

/// Shared memory as a model sees it.
struct Shared(Regions);

impl Allocator for Shared {
    fn floats(&self, len: usize) -> Option<Values> {
        self.0.floats(len)
    }
}

/// All partitions of one job.
#[derive(Clone)]
pub struct PsClient {
    job: JobId,
    era: Era,
    layout: Arc<Layout>,
    partitions: Arc<[Partition]>,
    limits: LimitsSpec,
    seed: u64,
    /// What the job exchanges.
    wire: WireType,
    spare: Spare,
    /// The progress of the lease that this client is used for.
    progress: Progress,
}

struct Partition {
    id: PartitionId,
    /// Name and URL, for messages.
    name: String,
    ps: Arc<dyn Parameters>,
}

impl fmt::Debug for PsClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let partitions: Vec<_> = self.partitions.iter().map(|partition| &partition.name).collect();
        f.debug_struct("PsClient")
            .field("job", &self.job)
            .field("partitions", &partitions)
            .finish_non_exhaustive()
    }
}

impl PsClient {
    /// Connects to the partitions of `placement` (lazily).
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
            let ps = (connector.connect)(&address.url)
                .map_err(|failure| Error::Call { what: name.clone(), failure })?;
            Ok(Partition { id: PartitionId(index as u32), name, ps })
        };
        let partitions = addresses.iter().enumerate().map(connect).collect::<Result<_>>()?;
        let (era, wire, spare, progress) = (Era(0), WireType::F32, Spare::default(), Progress::default());
        Ok(Self { job, era, layout, partitions, limits, seed, wire, spare, progress })
    }

    /// This client for a job that exchanges `wire`: pushed nodes and weights [pulled for training](Self::pull_rounded) travel in it.
    pub fn exchanging(self, wire: WireType) -> Self {
        Self { wire, ..self }
    }

    /// This client, calling in `era`.
    pub(crate) fn at(&self, era: Era) -> Self {
        Self { era, ..self.clone() }
    }

    /// This client for one lease, telling `progress` how it gets on.
    pub(crate) fn saying(self, progress: &Progress) -> Self {
        Self { progress: progress.clone(), ..self }
    }

    /// Sends the values of `target` to every partition; those of a node's parameters are rounded to what the job exchanges, version 0 is
    /// not. Ends when all have acknowledged: `Duplicate` only if all say so.
    ///
    /// # Errors
    /// One partition refused, or stayed unreachable for `pull_attempts_max` times `pull_timeout`.
    pub async fn push(&self, target: Target, values: Vec<Values>) -> Result<Outcome> {
        let wire = match target {
            Target::Initial => WireType::F32,
            Target::Node { .. } => self.wire,
        };
        let tensors: Vec<_> = values.into_iter().map(Values::into_bytes).collect();
        let pushes = self.partitions.iter().map(|partition| {
            let chunks = self.layout.members(partition.id).iter().map(|&id| {
                let chunk = self.layout.chunk(id);
                let role = self.layout.tensor_of(id).role;
                let size = role.dtype().size();
                let bytes = chunk.offset * size..(chunk.offset + chunk.len) * size;
                Chunk { id, role, values: tensors[chunk.tensor].slice(bytes) }
            });
            let push = Push { address: self.address(partition), target, wire, chunks: chunks.collect() };
            self.retry(partition, "push to", Phase::WaitingForRoom, move || partition.ps.push(push.clone()))
        });
        let pushed = try_join_all(pushes).await?;
        let all_repeated = pushed.iter().all(|pushed| pushed.outcome == Outcome::Duplicate);
        Ok(if all_repeated { Outcome::Duplicate } else { Outcome::Merged })
    }

    /// Reads the whole model as the ps keep it, for measuring and exporting; waits on each partition until it has what is wanted. `None`:
    /// an exact version is gone, its steps are applied.
    ///
    /// # Errors
    /// One partition refused, or stayed unreachable for `pull_attempts_max` times `pull_timeout`.
    pub async fn pull(&self, want: Want) -> Result<Option<Weights>> {
        self.pull_as(WireType::F32, want).await
    }

    /// Reads the whole model for training: the values of parameters are rounded to what the job exchanges. Else as [`pull`](Self::pull).
    ///
    /// # Errors
    /// As [`pull`](Self::pull).
    pub async fn pull_rounded(&self, want: Want) -> Result<Option<Weights>> {
        self.pull_as(self.wire, want).await
    }

    async fn pull_as(&self, wire: WireType, want: Want) -> Result<Option<Weights>> {
        // The partitions write different parts of it, one after the other: they are polled by one task.
        let values = Mutex::new(self.spare.take(&self.layout));
        let pulls = self.partitions.iter().map(async |partition| {
            let (address, wait) = (self.address(partition), self.limits.pull_timeout);
            let pull = Pull { address, want, wait, wire };
            loop {
                let fill = || self.fill(partition, pull, &values);
                match self.retry(partition, "pull from", Phase::Retrying, fill).await {
                    // Waiting for the others' gradients is the barrier, not a failure.
                    Err(Error::Call { failure, .. }) if failure.kind == Kind::NotYet => {
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
        let mut check = ChunkCheck::new("pull from", &self.layout, partition.id);
        let mut take = |id: ChunkId, came: WireType, bytes: &[u8]| {
            check.check(id, came, bytes)?;
            self.progress.advance();
            let (place, role) = (self.layout.chunk(id), self.layout.tensor_of(id).role);
            let mut values = values.lock().unwrap_or_else(PoisonError::into_inner);
            let values = &mut values[place.tensor];
            match values.as_f32_mut().filter(|_| pull.wire.of(role).rounds()) {
                Some(values) => {
                    let values = &mut values[place.offset..place.offset + place.len];
                    match came.rounds() {
                        true => cast::decode(came, bytes, values),
                        false => cast::round_to(pull.wire, bytes, values),
                    }
                }
                None => values.write_bytes(place.offset, bytes),
            }
            Ok(())
        };
        partition.ps.pull_into(pull, &mut take).await?;
        Ok(check.finish()?)
    }

    fn address(&self, partition: &Partition) -> Address {
        Address { job: self.job, partition: partition.id, era: self.era }
    }

    /// Repeats a call that may succeed later, for as long as the job's `pull_attempts_max` time-outs together. A ps that is
    /// full answers, so it is waited for without counting, in the phase `full`. "Not yet" is the caller's business: it is no failure.
    async fn retry<T, Fut>(
        &self,
        partition: &Partition,
        verb: &str,
        full: Phase,
        call: impl Fn() -> Fut,
    ) -> Result<T>
    where
        Fut: Future<Output = Result<T, Failure>>,
    {
        let (deadline, budget) =
            (self.limits.pull_timeout * 2, self.limits.pull_timeout * self.limits.pull_attempts_max);
        let (mut since, mut attempt, mut said) = (Instant::now(), 0, None);
        loop {
            let late = |_| Err(Failure::new(Kind::Unavailable, format!("no answer within {deadline:?}")));
            let failure = match tokio::time::timeout(deadline, call()).await.unwrap_or_else(late) {
                Ok(value) => return Ok(value),
                Err(failure) => failure,
            };
            if failure.kind == Kind::Full {
                since = Instant::now();
            }
            if failure.kind == Kind::NotFound {
                let (what, partition) = (format!("{verb} {}", partition.name), partition.id);
                return Err(Error::NotHeld { what, partition, failure });
            }
            if failure.kind == Kind::NotYet || !failure.is_retryable() || since.elapsed() >= budget {
                return Err(Error::Call { what: format!("{verb} {}", partition.name), failure });
            }
            let what = || format!("{verb} {}", partition.name);
            // Each refusal shows that the ps lives and answers.
            let waits =
                full == Phase::WaitingForRoom && failure.kind == Kind::Full && self.progress.refused(what());
            if !waits && said != Some(Phase::Retrying) {
                self.progress.enter(Phase::Retrying, what());
            }
            said = Some(if waits { Phase::WaitingForRoom } else { Phase::Retrying });
            if attempt == 0 {
                tracing::warn!(reason = %failure, "{verb} {}: trying again for {budget:?}", partition.name);
            }
            tokio::time::sleep(Retry::default().wait(attempt, self.seed)).await;
            attempt += 1;
        }
    }
}
