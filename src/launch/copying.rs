//! What a process says, on its way to whoever hears it, line by line.

use std::sync::Arc;

use tokio::io::AsyncReadExt as _;
use tokio::net::unix::pipe::Receiver;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use crate::launch::lines::Lines;
use crate::launch::redaction::Redaction;

/// Hears lines.
pub(crate) type Voice = Arc<dyn Fn(&str) + Send + Sync>;

/// A stream of a process that is being copied, until it is dropped.
#[derive(Debug)]
pub(crate) struct Copying {
    /// The process has ended.
    ended: CancellationToken,
    task: JoinHandle<()>,
}

impl Copying {
    /// Copies lines to `voice`, without `secrets`.
    pub(crate) fn start(mut from: Receiver, voice: Voice, secrets: Redaction) -> Self {
        let ended = CancellationToken::new();
        let is_over = ended.clone();
        let task = tokio::spawn(async move {
            let (mut lines, mut bytes) = (Lines::of(secrets.clone()), vec![0; 16 << 10]);
            loop {
                let count = tokio::select! {
                    biased;
                    count = from.read(&mut bytes) => count.unwrap_or(0),
                    // A process that left the group may hold the pipe open. What is in it now is
                    // all that counts.
                    () = is_over.cancelled() => rustix::io::read(&from, &mut bytes[..]).unwrap_or(0),
                };
                if count == 0 {
                    break;
                }
                lines.push(&bytes[..count], |line| voice(&secrets.apply(line)));
            }
            lines.finish(|line| voice(&secrets.apply(line)));
        });
        Self { ended, task }
    }

    /// Copies what is left in the pipe of a process that has ended.
    pub(crate) async fn finish(mut self) {
        self.ended.cancel();
        let _ = (&mut self.task).await;
    }
}

impl Drop for Copying {
    fn drop(&mut self) {
        self.task.abort();
    }
}
