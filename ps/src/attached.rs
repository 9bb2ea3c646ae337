//! Workers of this host that read this ps's memory, and whose memory it reads.
//!
//! Always true here: an attachment is known until its worker leaves or dies. What the aggregator
//! still holds of that worker's memory stays readable until it lets go.

use std::collections::HashMap;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use net::memory::Memory;
use net::memory::attach::Attachment;

/// Attachments at once. One takes two descriptors and as much of the address space as the machine
/// has memory.
const ATTACHMENTS_MAX: usize = 1024;

/// How long the worker may take to give its descriptor: it waits for nothing else.
const TIMEOUT: Duration = Duration::from_secs(10);

/// The known attachments, which clones share.
#[derive(Clone, Debug)]
pub(crate) struct Attachments {
    known: Arc<Mutex<HashMap<Bytes, Attachment>>>,
    /// Attachments at once.
    max: usize,
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
        self.lock().insert(attachment.name().clone(), attachment.clone());
        let known = self.clone();
        tokio::spawn(async move {
            attachment.ended().await;
            known.lock().remove(attachment.name());
        });
        Ok(())
    }

    /// Returns the one of that name.
    pub(crate) fn get(&self, name: &[u8]) -> Option<Attachment> {
        self.lock().get(name).cloned()
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<Bytes, Attachment>> {
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
        let known = attachments.get(first.name()).unwrap();
        first.leave();
        drop(first);
        known.ended().await;
        while attachments.get(known.name()).is_some() {
            tokio::task::yield_now().await;
        }
        offered(&attachments, &memory).await.unwrap();
    }
}
