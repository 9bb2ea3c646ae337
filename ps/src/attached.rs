//! Workers of this host that read this ps's memory, and whose memory it reads.
//!
//! Always true here: an attachment is known until its worker leaves or dies. What the aggregator
//! still holds of that worker's memory stays readable until it lets go. Of a worker's memory of the
//! device it holds nothing.

use std::collections::HashMap;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use net::memory::Memory;
use net::memory::attach::Attachment;
use proto::pb;

use crate::device::{DeviceMemory, Exported, Lent};

/// Attachments at once. One takes two descriptors and as much of the address space as the machine
/// has memory.
const ATTACHMENTS_MAX: usize = 1024;

/// How long the worker may take to give its descriptor: it waits for nothing else.
const TIMEOUT: Duration = Duration::from_secs(10);

/// The known attachments, which clones share.
#[derive(Clone, Debug)]
pub(crate) struct Attachments {
    known: Arc<Mutex<HashMap<Bytes, Attached>>>,
    /// Attachments at once.
    max: usize,
}

/// A worker that is attached. Clones are the same one.
#[derive(Clone, Debug)]
pub(crate) struct Attached {
    /// Memory of the device of this ps that the worker has exported. It is closed before the
    /// attachment ends: fields are dropped in order.
    exported: Option<Arc<Exported>>,
    attachment: Attachment,
}

impl Attached {
    /// Returns the bytes of a region of the worker's memory. `guard` is dropped with the last
    /// reference to them.
    ///
    /// # Errors
    /// The region is not inside the memory.
    pub(crate) fn share<G: Send + 'static>(
        &self,
        region: pb::Region,
        guard: G,
    ) -> proto::error::Result<Bytes> {
        self.attachment.share(region, guard)
    }

    /// Returns where a region of the worker's memory of the device lies. `None`: it has none.
    /// `guard` is dropped with the values. The attachment stays until then.
    ///
    /// # Errors
    /// The region is not inside the memory, or not aligned.
    pub(crate) fn region<G: Send + 'static>(
        &self,
        region: pb::Region,
        guard: G,
    ) -> proto::error::Result<Option<Lent>> {
        let Some(exported) = &self.exported else { return Ok(None) };
        exported.region(region, (guard, self.attachment.clone())).map(Some)
    }
}

impl Default for Attachments {
    fn default() -> Self {
        Self::bounded(ATTACHMENTS_MAX)
    }
}

impl Attachments {
    fn bounded(max: usize) -> Self {
        Self { known: Arc::default(), max }
    }

    /// Takes up a worker's offer, and lets it read `memory`. To be called in the runtime that has
    /// the ps's connections.
    pub(crate) async fn take_up(&self, name: Bytes, memory: &Memory) -> io::Result<()> {
        if self.lock().len() >= self.max {
            return Err(io::Error::other(format!("{} workers are attached already", self.max)));
        }
        let attachment = tokio::time::timeout(TIMEOUT, Attachment::take_up(name, memory)).await??;
        let attached = Attached { exported: None, attachment: attachment.clone() };
        self.lock().insert(attachment.name().clone(), attached);
        let known = self.clone();
        tokio::spawn(async move {
            attachment.ended().await;
            let gone = known.lock().remove(attachment.name());
            // Memory of the device is closed when what reads it has run.
            drop(tokio::task::spawn_blocking(move || drop(gone)));
        });
        Ok(())
    }

    /// Opens memory of the device that the worker with the attachment `name` has exported.
    ///
    /// # Errors
    /// The reason for which it stays closed, for the worker.
    pub(crate) async fn open(
        &self,
        name: &[u8],
        handle: Bytes,
        device: &Arc<DeviceMemory>,
    ) -> Result<(), String> {
        let device = device.clone();
        let opened = tokio::task::spawn_blocking(move || device.open(&handle).map(Arc::new)).await;
        let exported = opened.map_err(|error| error.to_string())??;
        match self.lock().get_mut(name) {
            Some(Attached { exported: known @ None, .. }) => {
                *known = Some(exported);
                Ok(())
            }
            Some(_) => Err("this attachment has memory of the device already".to_owned()),
            None => Err("no such attachment; attach first".to_owned()),
        }
    }

    /// Returns the one of that name.
    pub(crate) fn get(&self, name: &[u8]) -> Option<Attached> {
        self.lock().get(name).cloned()
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<Bytes, Attached>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use net::memory::attach::Offer;

    use super::*;

    /// Offers a worker's memory and takes it up.
    async fn offered(attachments: &Attachments, memory: &Memory) -> io::Result<Attachment> {
        let offer = Offer::new(memory)?;
        let name = offer.name();
        let (_, worker) = tokio::try_join!(attachments.take_up(name, memory), offer.taken())?;
        Ok(worker)
    }

    #[tokio::test]
    async fn a_worker_too_many_is_told_so_until_another_one_leaves() {
        let memory = Memory::with_bytes(1 << 20).unwrap();
        let attachments = Attachments::bounded(1);
        let first = offered(&attachments, &memory).await.unwrap();
        let failure = offered(&attachments, &memory).await.unwrap_err();
        assert_eq!(failure.to_string(), "1 workers are attached already");
        let known = attachments.get(first.name()).unwrap().attachment;
        first.leave();
        drop(first);
        known.ended().await;
        while attachments.get(known.name()).is_some() {
            tokio::task::yield_now().await;
        }
        offered(&attachments, &memory).await.unwrap();
    }

    #[tokio::test]
    async fn a_ps_on_the_host_opens_no_memory_of_a_device() {
        let memory = Memory::with_bytes(1 << 20).unwrap();
        let attachments = Attachments::default();
        let worker = offered(&attachments, &memory).await.unwrap();
        let handle = Bytes::from_static(&[7; 88]);
        let refused = attachments.open(worker.name(), handle, &Arc::default()).await.unwrap_err();
        assert!(refused.contains("the processor of the host"), "{refused}");
        let region = attachments.get(worker.name()).unwrap().region(pb::Region { offset: 0, bytes: 4 }, ());
        assert!(region.unwrap().is_none(), "it has no such memory");
    }
}
