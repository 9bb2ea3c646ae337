//! Norms of a step over the whole model: every chunk is measured where it is, and when a job has several partitions each asks the others
//! for what they have measured (ADR 13).
//!
//! Always true here:
//!
//! - A step is measured once its sum is complete and the steps before it are applied. The squares of an era's step are always the same
//!   bits, so asking and answering are safe to repeat.
//! - Whoever asks holds neither a lock nor a thread, and stops when the partition's life ends: a partition that is lost means a new
//!   era for all of them.
//! - No partition applies step s + 1 before this one has measured it, and thus applied s. So what it contributed to the step that is
//!   being applied and to the one before is all that anybody may ask for.

use std::pin::pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures::future::join_all;
use net::channel::{Channel, Dialer, MESSAGE_BYTES_MAX, Purpose};
use proto::ids::{ChunkId, Era, PartitionId, Step};
use proto::pb;
use proto::pb::parameters_client::ParametersClient;
use proto::placement::Layout;
use proto::retry::Retry;
use proto::status::{Failure, Kind};
use proto::tensor::Role;
use tokio::time::{Instant, timeout, timeout_at};

use super::update::Begun;
use super::{BreaksByPanic, Opening, Partition};
use crate::error::{Error, Result};
use crate::optim::Update;
use crate::optim::norm::Squares;
use crate::parallel;
use crate::partitions::asks_others;

/// Steps whose squares are kept: the one that is being applied, and the one before.
const KEPT: usize = 2;

/// What the parameter chunks of one partition contribute to the norms of a step, in the order of their ids.
pub(crate) type Measured = Arc<[Squares]>;

/// The other partitions of a job.
#[derive(Debug)]
pub(crate) struct Others {
    dialer: Dialer,
    homes: Mutex<Homes>,
}

/// Where they live, this one included.
#[derive(Debug, Default)]
struct Homes {
    urls: Vec<String>,
    clients: Vec<ParametersClient<Channel>>,
}

impl Others {
    /// Of a partition, when its steps need to know what they have measured.
    ///
    /// # Errors
    /// An address is no URL.
    pub(crate) fn of(opening: &Opening, dialer: impl FnOnce() -> Dialer) -> Result<Option<Self>> {
        if !asks_others(opening) {
            return Ok(None);
        }
        let others = Self { dialer: dialer(), homes: Mutex::default() };
        others.live_at(&opening.homes)?;
        Ok(Some(others))
    }

    /// From now on they live there.
    ///
    /// # Errors
    /// An address is no URL.
    pub(crate) fn live_at(&self, urls: &[String]) -> Result<()> {
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

    fn client(&self, partition: PartitionId) -> ParametersClient<Channel> {
        self.homes.lock().unwrap_or_else(PoisonError::into_inner).clients[partition.index()].clone()
    }
}

impl Partition {
    /// The other partitions, when it needs to know them.
    pub(crate) const fn others(&self) -> Option<&Others> {
        self.others.as_ref()
    }

    /// What this partition contributed to the norms of a step; waits until that is known.
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

    /// What this partition contributes to the norms of a step. Nothing is changed.
    pub(super) fn measure(&self, update: &Update, begun: &mut Begun) -> Measured {
        let slots = self.slots.lock().unwrap_or_else(PoisonError::into_inner);
        let mut squares = vec![None; slots.len()];
        let chunks = slots.iter().zip(begun.weights.iter()).zip(&mut begun.totals).zip(&mut squares);
        parallel::for_each(self.threads, chunks, |(((slots, weights), total), squares)| {
            total.add_up(weights.dtype(), &self.pool);
            *squares = slots.measure(update, weights, total);
        });
        squares.into_iter().flatten().collect()
    }

    /// The update of each chunk of this partition, from what all partitions have measured.
    pub(super) fn with_norms(&self, update: &Update, measured: Vec<Measured>) -> Vec<Update> {
        let of = |(partition, squares): (u32, Measured)| {
            parameters(&self.layout, PartitionId(partition)).zip(squares.to_vec()).collect::<Vec<_>>()
        };
        let mut squares: Vec<_> = (0..).zip(measured).flat_map(of).collect();
        squares.sort_unstable_by_key(|(id, _)| *id);
        update.with_norms(&self.layout, &squares, self.layout.members(self.opening.address.partition))
    }

    /// Tells the other partitions what this one contributes, learns what they do, and then goes on with the update.
    pub(super) fn ask_others(self: &Arc<Self>, begun: Begun, update: Update, own: Measured) {
        let mut state = self.state();
        state.measured.push_back((begun.step, own.clone()));
        if state.measured.len() > KEPT {
            state.measured.pop_front();
        }
        drop(state);
        self.changed.notify_waiters();
        let model = self.clone();
        tokio::spawn(async move {
            let ended = model.ended.clone();
            let measured = tokio::select! {
                biased;
                () = ended.cancelled() => return,
                measured = model.ask_all(begun.step, own) => measured,
            };
            let inline = model.is_inline();
            let go_on = move || {
                let _breaks = BreaksByPanic(&model);
                let updates = model.with_norms(&update, measured);
                model.apply(begun, updates);
                model.apply_ready();
            };
            if inline {
                go_on();
            } else if let Err(error) = tokio::task::spawn_blocking(go_on).await {
                tracing::error!(%error, "the update ended; this is a bug");
            }
        });
    }

    /// What each partition contributes to a step, by partition.
    async fn ask_all(&self, step: Step, own: Measured) -> Vec<Measured> {
        let here = self.opening.address.partition;
        let others = (0..self.opening.partitions).map(PartitionId).filter(|partition| *partition != here);
        let mut measured = join_all(others.map(|partition| self.ask(partition, step))).await;
        measured.insert(here.index(), own);
        measured
    }

    /// What another partition contributes to a step: asks until it knows.
    async fn ask(&self, partition: PartitionId, step: Step) -> Measured {
        let others = self.others.as_ref().expect("who asks them knows them");
        let address = self.opening.address;
        let wait = self.opening.spec.limits.pull_timeout;
        let request = pb::SquaresRequest {
            job: address.job.get(),
            era: address.era.get(),
            partition: partition.get(),
            step: step.get(),
            wait_ms: u32::try_from(wait.as_millis()).unwrap_or(u32::MAX),
        };
        let mut attempt = 0;
        loop {
            let mut client = others.client(partition);
            let answer = timeout(2 * wait, client.squares(request)).await;
            let late = |_| Failure::new(Kind::Unavailable, format!("no answer within {:?}", 2 * wait));
            let reply = answer.map_err(late).and_then(|reply| Ok(reply?.into_inner()));
            let failure = match reply.and_then(|reply| self.check_squares(partition, &reply)) {
                Ok(measured) => return measured,
                // Waiting for the others' sums is the barrier, not a failure.
                Err(failure) if failure.kind == Kind::NotYet => continue,
                Err(failure) => failure,
            };
            if attempt == 0 {
                let place = self.place;
                tracing::warn!(%place, %partition, %step, reason = %failure, "no norms of that partition; asking again");
            }
            tokio::time::sleep(Retry::default().wait(attempt, step.get())).await;
            attempt += 1;
        }
    }

    fn check_squares(&self, partition: PartitionId, reply: &pb::SquaresReply) -> Result<Measured, Failure> {
        let (pairs, rest) = reply.squares.as_chunks();
        let expected = parameters(&self.layout, partition).count();
        if pairs.len() != expected || !rest.is_empty() {
            let found = reply.squares.len();
            let message = format!("SquaresReply.squares: expected {expected} pairs, found {found} numbers");
            return Err(Failure::new(Kind::Malformed, message));
        }
        Ok(pairs.iter().copied().map(Squares).collect())
    }
}

/// The chunks of a partition that have norms.
fn parameters(layout: &Layout, partition: PartitionId) -> impl Iterator<Item = ChunkId> {
    let members = layout.members(partition).iter().copied();
    members.filter(|&id| layout.tensor_of(id).role == Role::Parameter)
}
