//! Ctrl-C and SIGTERM: the first asks to leave cleanly, the second leaves at once.

use std::sync::Arc;
use std::sync::atomic::{AtomicI32, Ordering};

use anyhow::{Context as _, Result};
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

/// The user's request to leave, if there is one. Clones share it.
#[derive(Clone, Debug, Default)]
pub(crate) struct Stop {
    token: CancellationToken,
    signal: Arc<AtomicI32>,
}

impl Stop {
    /// Listens for both signals from now on.
    ///
    /// # Errors
    /// The system refuses.
    pub(crate) fn on_signals() -> Result<Self> {
        let stop = Self::default();
        let listen = |kind| signal(kind).context("listen for signals");
        let (mut interrupt, mut terminate) =
            (listen(SignalKind::interrupt())?, listen(SignalKind::terminate())?);
        let state = stop.clone();
        tokio::spawn(async move {
            loop {
                let number = tokio::select! {
                    _ = interrupt.recv() => SignalKind::interrupt(),
                    _ = terminate.recv() => SignalKind::terminate(),
                };
                if state.token.is_cancelled() {
                    std::process::exit(128 + number.as_raw_value());
                }
                state.signal.store(number.as_raw_value(), Ordering::Relaxed);
                state.token.cancel();
            }
        });
        Ok(stop)
    }

    /// Returns a token that the first signal cancels.
    pub(crate) const fn token(&self) -> &CancellationToken {
        &self.token
    }

    /// Exit code of a program that a signal ended: 130 after Ctrl-C, 143 after SIGTERM. `None`
    /// before any signal.
    pub(crate) fn exit_code(&self) -> Option<u8> {
        let signal = self.signal.load(Ordering::Relaxed);
        self.token.is_cancelled().then(|| u8::try_from(128 + signal).unwrap_or(1))
    }
}
