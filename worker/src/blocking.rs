//! Code that may block, off the threads of the runtime.

use crate::config::Inline;
use crate::error::{Error, Result};

/// Runs `read` on a thread that may block.
pub(crate) async fn blocking<T, E, F>(inline: Option<&Inline>, read: F) -> Result<T>
where
    T: Send + 'static,
    E: Into<Error> + Send + 'static,
    F: FnOnce() -> Result<T, E> + Send + 'static,
{
    let panicked = |error| Error::Task { what: "a reading thread".to_owned(), reason: format!("{error}") };
    let reading = match inline.cloned() {
        None => tokio::task::spawn_blocking(read),
        // A task goes on without a waiter, as a thread would.
        Some(inline) => tokio::spawn(async move {
            inline.hang().await;
            read()
        }),
    };
    reading.await.map_err(panicked)?.map_err(Into::into)
}
