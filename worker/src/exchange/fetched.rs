//! Gradients that a model left on a device, for a carrier that takes them from the host: they cross
//! in the type in which they travel on.

use kernels::values;
use proto::parameters::Push;
use proto::status::{Failure, Kind};
use proto::tensor::Chunk;
use proto::wire::WireType;

/// Returns a push whose values lie on the host, in f32.
///
/// # Errors
/// The device failed.
pub(super) async fn whole(push: Push) -> Result<Push, Failure> {
    let chunks = encoded(&push.chunks, WireType::F32).await?;
    Ok(Push { chunks: chunks.unwrap_or(push.chunks), ..push })
}

/// Returns chunks of a push with values on the host, encoded as `wire`. `None`: all lie on the
/// host already, and are as they were.
///
/// # Errors
/// The device failed.
pub(super) async fn encoded(chunks: &[Chunk], wire: WireType) -> Result<Option<Vec<Chunk>>, Failure> {
    if chunks.iter().all(|chunk| chunk.values.is_on_host()) {
        return Ok(None);
    }
    let chunks = chunks.to_vec();
    let fetching = tokio::task::spawn_blocking(move || values::fetched(&chunks, wire));
    let fetched = fetching.await.map_err(|error| Failure::new(Kind::Internal, error))?;
    fetched.map_err(|reason| Failure::new(Kind::Unavailable, reason))
}
