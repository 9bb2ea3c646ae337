//! Workers of this host that read this ps's memory, and whose memory it reads.
//!
//! Always true here: an attachment is known until its worker leaves or dies. What the aggregator still holds of that worker's memory
//! stays readable until it lets go.

use std::collections::HashMap;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use proto::memory::Memory;
use proto::memory::attach::Attachment;

/// Attachments at once. One takes two descriptors and as much of the address space as the machine has memory.
const ATTACHMENTS_MAX: usize = 1024;

/// How long the worker may take to give its descriptor: it waits for nothing else.
const TIMEOUT: Duration = Duration::from_secs(1);

/// Those that are known; clones are the same ones.
#[derive(Clone, Debug, Default)]
pub(crate) struct Attachments(Arc<Mutex<HashMap<Bytes, Attachment>>>);

impl Attachments {
    /// Takes up a worker's offer, and lets it read `memory`. To be called in the runtime that has the ps's connections.
    pub(crate) async fn take_up(&self, name: Bytes, memory: &Memory) -> io::Result<()> {
        if self.lock().len() >= ATTACHMENTS_MAX {
            return Err(io::Error::other(format!("{ATTACHMENTS_MAX} workers are attached already")));
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

    /// The one of that name.
    pub(crate) fn get(&self, name: &[u8]) -> Option<Attachment> {
        self.lock().get(name).cloned()
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<Bytes, Attachment>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
