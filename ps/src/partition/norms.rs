//! Norms of a step over the whole model: every chunk is measured where it is, and when a job has
//! several partitions each asks the others for what they have measured (ADR 13). Here is the
//! asking.
//!
//! Always true here:
//!
//! - A step is measured once its sum is complete and the steps before it are applied. The squares
//!   of an era's step are always the same bits, so asking and answering are safe to repeat.
//! - A partition that asks holds neither a lock nor a thread, and stops when its life ends: a
//!   partition that is lost means a new era for all of them.
//! - No partition applies step s + 1 before this one has measured it, and thus applied s. So what
//!   it contributed to the step that is being applied and to the one before is all that anybody may
//!   ask for.

use std::convert::Infallible;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use futures::future::join_all;
use kernels::Squares;
use net::channel::{Channel, Dialer, Purpose};
use net::ps_client::{PsClient, PsClients};
use proto::ids::{PartitionId, Step};
use proto::parameters::Address;
use proto::pb;
use proto::pb::parameters_client::ParametersClient;
use proto::retry::{Pause, Retry};
use proto::status::{Failure, Kind};

use super::dense::{Dense, Measured};
use crate::error::{Error, Result};
use crate::opening::{Opening, Place};

/// Steps whose squares are kept: the one that is being applied, and the one before.
pub(super) const KEPT: usize = 2;

/// Returns the clients of a ps for the other ps. A connection is closed when no partition needs it.
pub(crate) fn clients(dialer: Dialer) -> PsClients {
    PsClients::new(dialer, Purpose::Control, Duration::ZERO)
}

/// The other partitions of a job, as one of them asks them.
#[derive(Debug)]
pub(super) struct Others {
    /// The partition that asks.
    address: Address,
    /// Number of partitions of the job.
    partitions: u32,
    /// The longest time that one call waits for a sum.
    wait: Duration,
    ps_clients: PsClients,
    homes: Mutex<Homes>,
}

/// Where the partitions live, by partition, the one that asks included.
#[derive(Debug, Default)]
struct Homes {
    /// Number of the placement that has them.
    placement: u64,
    urls: Vec<String>,
    clients: Vec<PsClient>,
}

impl Others {
    /// Returns the other partitions, when the steps of this one need what they have measured.
    /// Without `ps_clients` they are called by TCP, without keys.
    ///
    /// # Errors
    /// An address is no URL.
    pub(super) fn of(opening: &Opening, ps_clients: Option<PsClients>) -> Result<Option<Self>> {
        if !opening.needs_others() {
            return Ok(None);
        }
        let others = Self {
            address: opening.address,
            partitions: opening.partitions,
            wait: opening.spec.limits.pull_timeout,
            ps_clients: ps_clients.unwrap_or_else(|| clients(Dialer::tcp())),
            homes: Mutex::default(),
        };
        others.live_at(opening)?;
        Ok(Some(others))
    }

    /// Sets the addresses of the partitions to those of an opening, unless those of a later
    /// placement are known: an opening that was held up in the network arrives after them.
    ///
    /// # Errors
    /// An address is no URL.
    pub(super) fn live_at(&self, opening: &Opening) -> Result<()> {
        let (placement, urls) = (opening.placement, &opening.homes);
        let mut homes = self.homes.lock().unwrap_or_else(PoisonError::into_inner);
        if placement < homes.placement {
            return Ok(());
        }
        if homes.urls != *urls {
            let clients = urls.iter().map(|url| self.ps_clients.at(url));
            homes.clients = clients.collect::<Result<_, _>>().map_err(Error::Home)?;
            homes.urls.clone_from(urls);
        }
        homes.placement = placement;
        Ok(())
    }

    /// Returns what each partition contributes to a step, by partition: `own` and what the others
    /// answer. Returns when all have answered, however long that takes. The caller may drop the
    /// future at any time.
    pub(super) async fn ask_all(&self, dense: &Dense, step: Step, own: Measured) -> Vec<Measured> {
        let here = self.address.partition;
        let others = (0..self.partitions).map(PartitionId).filter(|partition| *partition != here);
        let mut measured = join_all(others.map(|partition| self.ask(dense, partition, step))).await;
        measured.insert(here.index(), own);
        measured
    }

    /// Returns what another partition contributes to a step: asks until it knows.
    async fn ask(&self, dense: &Dense, partition: PartitionId, step: Step) -> Measured {
        let (address, wait) = (self.address, self.wait);
        let request = pb::SquaresRequest {
            job: address.job.get(),
            era: address.era.get(),
            partition: partition.get(),
            step: step.get(),
            wait_ms: u32::try_from(wait.as_millis()).unwrap_or(u32::MAX),
        };
        let expected = dense.squares_of(partition);
        let ask = |mut client: ParametersClient<Channel>| async move { client.squares(request).await };
        let attempt = || {
            let client = self.client(partition);
            async move { squares(&client.call(2 * wait, ask).await?, expected) }
        };
        let judge = |failures, failure: Failure| {
            // Waiting for the others' sums is the barrier, not a failure.
            if failure.kind == Kind::NotYet {
                return Ok::<_, Infallible>(Pause::None);
            }
            if failures == 0 {
                let place = Place::from(address);
                tracing::warn!(%place, %partition, %step, reason = %failure, "no norms of that partition; asking again");
            }
            Ok(Pause::Growing)
        };
        let Ok(measured) = Retry::unlimited().run(step.get(), tokio::time::sleep, judge, attempt).await;
        measured
    }

    fn client(&self, partition: PartitionId) -> PsClient {
        self.homes.lock().unwrap_or_else(PoisonError::into_inner).clients[partition.index()].clone()
    }
}

/// Returns the squares in a reply, which must be as many as the partition has chunks with norms.
fn squares(reply: &pb::SquaresReply, expected: usize) -> Result<Measured, Failure> {
    let (pairs, rest) = reply.squares.as_chunks();
    if pairs.len() != expected || !rest.is_empty() {
        let found = reply.squares.len();
        let message = format!("SquaresReply.squares: expected {expected} pairs, found {found} numbers");
        return Err(Failure::new(Kind::Malformed, message));
    }
    Ok(pairs.iter().copied().map(Squares).collect())
}
