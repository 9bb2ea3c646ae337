//! What this worker has lent to a ps of the same host, and whether the two are attached: regions of
//! shared memory, and parts of exported memory of a device.
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
use proto::parameters::Push;
use proto::pb;
use proto::status::{Failure, Kind};
use proto::tensor::Chunk;
use tokio::runtime::Handle;
use tracing::Instrument as _;

use super::exported::{Exported, Exporter, Part, bytes_of};
use crate::metrics::Metrics;

/// Pushes that one ps may still read. A ps keeps a push until its sibling comes, and its call stays
/// open; more are sent as bytes, so that calls are left for others.
const LENT_MAX: usize = 64;

/// How long a ps may take to attach.
const TIMEOUT: Duration = Duration::from_secs(10);

/// Attaches this worker and one ps to each other.
pub(super) struct Attaching {
    regions: Regions,
    /// The device of this worker, for a ps on it.
    exporter: Option<Arc<Exporter>>,
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
    /// UUID of the device of the ps. Empty: it is on the host.
    device: Bytes,
    exports: tokio::sync::Mutex<Exports>,
    /// What the ps may still read although its calls broke.
    lost: Mutex<Vec<Bytes>>,
    metrics: Arc<Metrics>,
}

/// Memory of the device that the ps of an attachment reads.
#[derive(Default)]
struct Exports {
    /// The first push has come.
    is_tried: bool,
    /// The ps may have opened it.
    exported: Option<Arc<Exported>>,
    /// Nothing was refused since.
    is_used: bool,
}

/// One push that lies in memory of the device, or room there for the answer to one pull.
pub(super) struct Placed {
    attached: Arc<Attached>,
    part: Part,
}

/// What one push says lies in this worker's memory.
pub(super) struct Lent {
    attached: Arc<Attached>,
    regions: Regions,
    kept: Mutex<Vec<Bytes>>,
    answered: AtomicBool,
}

impl Attaching {
    pub(super) fn new(regions: Regions, exporter: Option<Arc<Exporter>>, metrics: Arc<Metrics>) -> Self {
        Self { regions, exporter, metrics, state: tokio::sync::Mutex::new(State::Untried) }
    }

    /// The attachment to `ps`; makes one when it is a process of this host. `None`: use the socket.
    pub(super) async fn attached(&self, ps: &PsClient) -> Option<Arc<Attached>> {
        if !ps.channel().is_within_host() {
            return None;
        }
        let mut state = self.state.lock().await;
        if matches!(*state, State::Untried) {
            *state = match tokio::time::timeout(TIMEOUT, attach(self.regions.memory(), ps)).await {
                Ok(Ok((attachment, device))) => {
                    tracing::debug!("a ps of this host: by shared memory");
                    let (lost, exports, metrics) = (Mutex::default(), <_>::default(), self.metrics.clone());
                    State::Attached(Arc::new(Attached { attachment, device, exports, lost, metrics }))
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

    /// Copies a push into memory of the device that the ps reads. `None`: it goes through memory of
    /// the host, because there is no such memory, or no room.
    pub(super) async fn place(&self, attached: &Arc<Attached>, ps: &PsClient, push: &Push) -> Option<Placed> {
        let exporter = self.exporter.as_ref()?;
        // An empty chunk lies nowhere.
        if attached.device.is_empty() || push.chunks.iter().any(|chunk| chunk.values.is_empty()) {
            return None;
        }
        let bytes = bytes_of(&push.chunks);
        let part = attached.exported(exporter, ps, bytes).await?.part(bytes)?;
        let values: Vec<_> = push.chunks.iter().map(|chunk| chunk.values.clone()).collect();
        let written = tokio::task::spawn_blocking(move || part.write(&values).map(|()| part)).await.ok()?;
        match written {
            Ok(part) => Some(Placed { attached: attached.clone(), part }),
            Err(error) => {
                exporter.told(&error.to_string());
                attached.exports.lock().await.is_used = false;
                None
            }
        }
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

/// Attaches. Returns the UUID of the device of the ps, too.
async fn attach(memory: &Memory, ps: &PsClient) -> Result<(Attachment, Bytes), Failure> {
    let unavailable = |error| Failure::new(Kind::Unavailable, error);
    let offer = Offer::new(memory).map_err(unavailable)?;
    let request = pb::AttachRequest { name: offer.name(), device_memory: Bytes::new() };
    let asked = async {
        let asking = ps.call(TIMEOUT, |mut client| async move { client.attach(request).await });
        let unwilling = || std::io::Error::other("it has no memory to share, or cannot read this one's");
        let reply = asking.await?;
        if reply.attached { Ok(reply.device) } else { Err(unavailable(unwilling())) }
    };
    let taken = async { offer.taken().await.map_err(unavailable) };
    let (device, attachment) = tokio::try_join!(asked, taken)?;
    Ok((attachment, device))
}

impl Exports {
    fn known(&self) -> Option<Arc<Exported>> {
        self.exported.clone().filter(|_| self.is_used)
    }
}

impl Attached {
    /// Takes room in memory of the device for the answer to a pull. `None`: no push has gone there
    /// yet, something refused, or all of it is in use.
    pub(super) fn room(self: &Arc<Self>) -> Option<Placed> {
        // No pull waits for a push that exports.
        let exported = self.exports.try_lock().ok()?.known()?;
        // The ps says whether the answer fits.
        Some(Placed { attached: self.clone(), part: exported.part(0)? })
    }

    pub(super) const fn attachment(&self) -> &Attachment {
        &self.attachment
    }

    /// Returns the memory of the device that the ps reads, which the first push exports. `None`:
    /// something refuses.
    async fn exported(
        self: &Arc<Self>,
        exporter: &Arc<Exporter>,
        ps: &PsClient,
        bytes: usize,
    ) -> Option<Arc<Exported>> {
        {
            let exports = self.exports.lock().await;
            if exports.is_tried {
                return exports.known();
            }
        }
        let (this, exporter, ps) = (self.clone(), exporter.clone(), ps.clone());
        // In a task of its own: when the caller gives up, the ps may still open the memory.
        let exporting = async move {
            let mut exports = this.exports.lock().await;
            if !exports.is_tried {
                match this.export(&exporter, &ps, bytes, &mut exports.exported).await {
                    Ok(()) => exports.is_used = true,
                    Err(reason) => exporter.told(&reason),
                }
                exports.is_tried = true;
            }
            exports.known()
        };
        tokio::spawn(exporting.in_current_span()).await.ok()?
    }

    /// Exports memory to the ps. It is in `kept` from the moment at which the ps may open it.
    ///
    /// # Errors
    /// The reason, for people.
    async fn export(
        &self,
        exporter: &Arc<Exporter>,
        ps: &PsClient,
        bytes: usize,
        kept: &mut Option<Arc<Exported>>,
    ) -> Result<(), String> {
        let (exporter, uuid) = (exporter.clone(), self.device.clone());
        let exporting = tokio::task::spawn_blocking(move || exporter.export(&uuid, bytes));
        let (exported, handle) = exporting.await.map_err(|error| error.to_string())??;
        *kept = Some(Arc::new(exported));
        let name = self.attachment.name().clone();
        let request = pb::AttachRequest { name, device_memory: handle.into() };
        let asking = ps.call(TIMEOUT, |mut client| async move { client.attach(request).await });
        let reply = asking.await.map_err(|failure: Failure| failure.to_string())?;
        if reply.attached {
            tracing::debug!("a ps that reaches the device of this worker: by memory of the device");
            return Ok(());
        }
        // The ps has said that it has not opened the memory.
        *kept = None;
        Err(reply.refused)
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
        let exported = self.exports.get_mut().exported.take();
        // What is given back reads as zeros. A ps may add that up: so when nobody waits for it any
        // more, because this process is about to end, nothing is given back.
        let rests = !lost.is_empty() || exported.is_some();
        let resting = ManuallyDrop::new((lost, exported));
        if let (Ok(runtime), true) = (Handle::try_current(), rests) {
            let (attachment, metrics) = (self.attachment.clone(), self.metrics.clone());
            runtime.spawn(async move {
                attachment.ended().await;
                metrics.push_bytes_lost.sub(bytes(&resting.0));
                // Memory of the device is freed when the device has run what it was told.
                drop(tokio::task::spawn_blocking(move || drop(ManuallyDrop::into_inner(resting))));
            });
        }
    }
}

impl Placed {
    pub(super) fn attachment(&self) -> &Attachment {
        &self.attached.attachment
    }

    /// Returns what makes the messages for the chunks of the push, in their order.
    pub(super) fn lend(&mut self) -> impl FnMut(Chunk) -> pb::Chunk + Send + use<> {
        let (mut region, metrics) = (self.part.lend(), self.attached.metrics.clone());
        move |chunk| {
            let region = region(chunk.values.len());
            metrics.push_bytes_device.add(region.bytes);
            pb::Chunk { id: chunk.id.get(), values: Bytes::new(), region: Some(region) }
        }
    }

    /// Returns the room, of which the ps is told.
    pub(super) fn offer(&mut self) -> pb::Region {
        self.part.offer()
    }

    /// The ps has answered.
    pub(super) fn answered(&mut self) {
        self.part.answered();
    }

    /// Returns the part, to copy from it what the ps has written.
    pub(super) const fn part(&mut self) -> &mut Part {
        &mut self.part
    }

    /// Counts weights that the ps has written.
    pub(super) fn count(&self, bytes: usize) {
        self.attached.metrics.pull_bytes_device.add(bytes as u64);
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
        let mut values = chunk.values.into_host();
        let mut region = memory.find(&values);
        if region.is_none()
            && let Some(mut copy) = self.regions.take(values.len())
        {
            copy.copy_from_slice(&values);
            values = Bytes::from_owner(copy);
            region = memory.find(&values);
        }
        let Some(pb::Region { bytes, .. }) = region else {
            return pb::Chunk { id, values, region };
        };
        self.attached.metrics.push_bytes_shared.add(bytes);
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
