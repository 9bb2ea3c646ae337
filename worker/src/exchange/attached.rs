//! What this worker has lent to a ps of the same host, and whether the two are attached.
//!
//! Always true here: a region that a ps was told of is written to again only when the ps has ended
//! that call, which it does when it does not read the region any more. When the call breaks
//! instead, the region is *lost*: it rests until the ps has let go of this worker's memory
//! altogether, or is gone.

use std::mem::ManuallyDrop;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use net::memory::attach::{Attachment, Offer};
use net::memory::{Memory, Regions};
use net::ps_client::PsClient;
use proto::pb;
use proto::status::{Failure, Kind};
use proto::tensor::Chunk;
use tokio::runtime::Handle;

use crate::metrics::Metrics;

/// Pushes that one ps may still read. A ps keeps a push until its sibling comes, and its call stays
/// open; more are sent as bytes, so that calls are left for others.
const LENT_MAX: usize = 64;

/// How long a ps may take to attach.
const TIMEOUT: Duration = Duration::from_secs(10);

/// Attaches this worker and one ps to each other.
pub(super) struct Attaching {
    regions: Regions,
    metrics: Arc<Metrics>,
    state: tokio::sync::Mutex<State>,
}

enum State {
    /// Not tried since a call last failed.
    Untried,
    /// It does not want to.
    Refused,
    Attached(Arc<Attached>),
}

/// An attachment that this worker offered.
pub(super) struct Attached {
    attachment: Attachment,
    /// What the ps may still read although its calls broke.
    lost: Mutex<Vec<Bytes>>,
    metrics: Arc<Metrics>,
}

/// What one push says lies in this worker's memory.
pub(super) struct Lent {
    attached: Arc<Attached>,
    regions: Regions,
    kept: Mutex<Vec<Bytes>>,
    answered: AtomicBool,
}

impl Attaching {
    pub(super) fn new(regions: Regions, metrics: Arc<Metrics>) -> Self {
        Self { regions, metrics, state: tokio::sync::Mutex::new(State::Untried) }
    }

    /// The attachment to `ps`; makes one when it is a process of this host. `None`: use the socket.
    pub(super) async fn attached(&self, ps: &PsClient) -> Option<Arc<Attached>> {
        if !ps.channel().is_within_host() {
            return None;
        }
        let mut state = self.state.lock().await;
        if matches!(*state, State::Untried) {
            *state = match tokio::time::timeout(TIMEOUT, attach(self.regions.memory(), ps)).await {
                Ok(Ok(attachment)) => {
                    tracing::debug!("a ps of this host: by shared memory");
                    let metrics = self.metrics.clone();
                    State::Attached(Arc::new(Attached { attachment, lost: Mutex::default(), metrics }))
                }
                Ok(Err(reason)) => {
                    tracing::debug!(%reason, "no shared memory with a ps of this host");
                    State::Refused
                }
                Err(_) => {
                    tracing::debug!("no shared memory with a ps of this host: no answer within {TIMEOUT:?}");
                    State::Refused
                }
            };
        }
        match &*state {
            State::Attached(attached) => Some(attached.clone()),
            State::Untried | State::Refused => None,
        }
    }

    /// A call failed: there may be another ps now.
    pub(super) async fn forget(&self) {
        *self.state.lock().await = State::Untried;
    }

    /// What one push lends. `None`: the ps still reads too many pushes.
    pub(super) fn lend(&self, attached: &Arc<Attached>) -> Option<Arc<Lent>> {
        let room = Arc::strong_count(attached) <= LENT_MAX;
        room.then(|| {
            Arc::new(Lent {
                attached: attached.clone(),
                regions: self.regions.clone(),
                kept: Mutex::default(),
                answered: AtomicBool::new(false),
            })
        })
    }
}

async fn attach(memory: &Memory, ps: &PsClient) -> Result<Attachment, Failure> {
    let unavailable = |error| Failure::new(Kind::Unavailable, error);
    let offer = Offer::new(memory).map_err(unavailable)?;
    let request = pb::AttachRequest { name: offer.name() };
    let asked = async {
        let asking = ps.call(TIMEOUT, |mut client| async move { client.attach(request).await });
        let unwilling = || std::io::Error::other("it has no memory to share, or cannot read this one's");
        if asking.await?.attached { Ok(()) } else { Err(unavailable(unwilling())) }
    };
    let taken = async { offer.taken().await.map_err(unavailable) };
    let ((), attachment) = tokio::try_join!(asked, taken)?;
    Ok(attachment)
}

impl Attached {
    pub(super) const fn attachment(&self) -> &Attachment {
        &self.attachment
    }

    fn lose(&self, kept: Vec<Bytes>) {
        self.metrics.push_bytes_lost.add(bytes(&kept));
        self.lost.lock().unwrap_or_else(PoisonError::into_inner).extend(kept);
    }
}

impl Drop for Attached {
    fn drop(&mut self) {
        self.attachment.leave();
        let lost = std::mem::take(&mut *self.lost.lock().unwrap_or_else(PoisonError::into_inner));
        // What is given back reads as zeros. A ps may add that up: so when nobody waits for it any
        // more, because this process is about to end, nothing is given back.
        let lost = ManuallyDrop::new(lost);
        if let (Ok(runtime), false) = (Handle::try_current(), lost.is_empty()) {
            let (attachment, metrics) = (self.attachment.clone(), self.metrics.clone());
            runtime.spawn(async move {
                attachment.ended().await;
                metrics.push_bytes_lost.sub(bytes(&lost));
                drop(ManuallyDrop::into_inner(lost));
            });
        }
    }
}

impl Lent {
    pub(super) fn attachment(&self) -> &Attachment {
        &self.attached.attachment
    }

    /// The message for a chunk. It says where the chunk lies; a chunk that lies elsewhere is copied
    /// into the memory first. Where the memory has no room, the chunk is sent as it is.
    pub(super) fn lend(&self, chunk: Chunk) -> pb::Chunk {
        let id = chunk.id.get();
        let memory = self.regions.memory();
        let mut values = chunk.values;
        let mut region = memory.find(&values);
        if region.is_none()
            && let Some(mut copy) = self.regions.take(values.len())
        {
            copy.copy_from_slice(&values);
            values = Bytes::from_owner(copy);
            region = memory.find(&values);
        }
        if region.is_none() {
            return pb::Chunk { id, values, region };
        }
        self.kept.lock().unwrap_or_else(PoisonError::into_inner).push(values);
        pb::Chunk { id, values: Bytes::new(), region }
    }

    /// The ps has ended the call.
    pub(super) fn answered(&self) {
        self.answered.store(true, Ordering::Release);
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        let kept = std::mem::take(&mut *self.kept.lock().unwrap_or_else(PoisonError::into_inner));
        if !self.answered.load(Ordering::Acquire) && !kept.is_empty() {
            self.attached.lose(kept);
        }
    }
}

fn bytes(kept: &[Bytes]) -> u64 {
    kept.iter().map(|values| values.len() as u64).sum()
}
