//! Norms of a step over the whole model: every chunk is measured where it is, and when a job has several partitions each asks the others
//! for what they have measured (ADR 13). Here is the asking.
//!
//! Always true here:
//!
//! - A step is measured once its sum is complete and the steps before it are applied. The squares of an era's step are always the same
//!   bits, so asking and answering are safe to repeat.
//! - A partition that asks holds neither a lock nor a thread, and stops when its life ends: a partition that is lost means a new era for
//!   all of them.
//! - No partition applies step s + 1 before this one has measured it, and thus applied s. So what it contributed to the step that is
//!   being applied and to the one before is all that anybody may ask for.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use futures::future::join_all;
use kernels::Squares;
use net::channel::{Channel, Dialer, MESSAGE_BYTES_MAX, Purpose};
use proto::ids::{PartitionId, Step};
use proto::parameters::Address;
use proto::pb;
use proto::pb::parameters_client::ParametersClient;
use proto::retry::Retry;
use proto::status::{Failure, Kind};
use tokio::time::timeout;

use super::dense::{Dense, Measured};
use crate::error::{Error, Result};
use crate::opening::{Opening, Place};

/// Steps whose squares are kept: the one that is being applied, and the one before.
pub(super) const KEPT: usize = 2;

/// The other partitions of a job, as one of them asks them.
#[derive(Debug)]
pub(super) struct Others {
    /// The partition that asks.
    address: Address,
    /// Number of partitions of the job.
    partitions: u32,
    /// The longest time that one call waits for a sum.
    wait: Duration,
    dialer: Dialer,
    homes: Mutex<Homes>,
}

/// Where the partitions live, by partition, the one that asks included.
#[derive(Debug, Default)]
struct Homes {
    urls: Vec<String>,
    clients: Vec<ParametersClient<Channel>>,
}

impl Others {
    /// The other partitions, when the steps of this one need what they have measured. Without a `dialer` they are called by TCP, without
    /// keys.
    ///
    /// # Errors
    /// An address is no URL.
    pub(super) fn of(opening: &Opening, dialer: Option<Dialer>) -> Result<Option<Self>> {
        if !opening.needs_others() {
            return Ok(None);
        }
        let others = Self {
            address: opening.address,
            partitions: opening.partitions,
            wait: opening.spec.limits.pull_timeout,
            dialer: dialer.unwrap_or_else(Dialer::tcp),
            homes: Mutex::default(),
        };
        others.live_at(&opening.homes)?;
        Ok(Some(others))
    }

    /// From now on the partitions live at `urls`.
    ///
    /// # Errors
    /// An address is no URL.
    pub(super) fn live_at(&self, urls: &[String]) -> Result<()> {
        let mut homes = self.homes.lock().unwrap_or_else(PoisonError::into_inner);
        if homes.urls != urls {
            let connect = |url: &String| -> Result<_, Failure> {
                let channel = self.dialer.channel(url, Purpose::Control)?;
                Ok(ParametersClient::new(channel).max_decoding_message_size(MESSAGE_BYTES_MAX))
            };
            let clients = urls.iter().map(connect).collect::<Result<_, _>>().map_err(Error::Home)?;
            *homes = Homes { urls: urls.to_vec(), clients };
        }
        Ok(())
    }

    /// What each partition contributes to a step, by partition: `own` and what the others answer. Returns when all have answered, however
    /// long that takes. The caller may drop the future at any time.
    pub(super) async fn ask_all(&self, dense: &Dense, step: Step, own: Measured) -> Vec<Measured> {
        let here = self.address.partition;
        let others = (0..self.partitions).map(PartitionId).filter(|partition| *partition != here);
        let mut measured = join_all(others.map(|partition| self.ask(dense, partition, step))).await;
        measured.insert(here.index(), own);
        measured
    }

    /// What another partition contributes to a step: asks until it knows.
    async fn ask(&self, dense: &Dense, partition: PartitionId, step: Step) -> Measured {
        let (address, wait) = (self.address, self.wait);
        let request = pb::SquaresRequest {
            job: address.job.get(),
            era: address.era.get(),
            partition: partition.get(),
            step: step.get(),
            wait_ms: u32::try_from(wait.as_millis()).unwrap_or(u32::MAX),
        };
        let mut attempt = 0;
        loop {
            let mut client = self.client(partition);
            let answer = timeout(2 * wait, client.squares(request)).await;
            let late = |_| Failure::new(Kind::Unavailable, format!("no answer within {:?}", 2 * wait));
            let reply = answer.map_err(late).and_then(|reply| Ok(reply?.into_inner()));
            let expected = dense.squares_of(partition);
            let failure = match reply.and_then(|reply| squares(&reply, expected)) {
                Ok(measured) => return measured,
                // Waiting for the others' sums is the barrier, not a failure.
                Err(failure) if failure.kind == Kind::NotYet => continue,
                Err(failure) => failure,
            };
            if attempt == 0 {
                let place = Place::from(address);
                tracing::warn!(%place, %partition, %step, reason = %failure, "no norms of that partition; asking again");
            }
            tokio::time::sleep(Retry::default().wait(attempt, step.get())).await;
            attempt += 1;
        }
    }

    fn client(&self, partition: PartitionId) -> ParametersClient<Channel> {
        self.homes.lock().unwrap_or_else(PoisonError::into_inner).clients[partition.index()].clone()
    }
}

/// The squares in a reply, which must be as many as the partition has chunks with norms.
fn squares(reply: &pb::SquaresReply, expected: usize) -> Result<Measured, Failure> {
    let (pairs, rest) = reply.squares.as_chunks();
    if pairs.len() != expected || !rest.is_empty() {
        let found = reply.squares.len();
        let message = format!("SquaresReply.squares: expected {expected} pairs, found {found} numbers");
        return Err(Failure::new(Kind::Malformed, message));
    }
    Ok(pairs.iter().copied().map(Squares).collect())
}
