//! One file to the store, at no more than the bandwidth that the job allows.

use std::time::Duration;

use proto::checkpoint::Result;
use proto::checkpoint::store::Folder;
use tokio::time::Instant;

use super::cut::Sealed;

/// Parts that may be on their way at once.
const PARTS_MAX: usize = 4;

/// Writes the file of a cut. When this fails there is no file under its name.
pub(super) async fn write(folder: &Folder, cut: &Sealed, bandwidth: Option<u64>) -> Result<()> {
    let mut upload = folder.upload(&cut.file_name()).await?;
    let (begin, mut bytes) = (Instant::now(), 0);
    for piece in cut.pieces() {
        bytes += piece.len() as u64;
        if let Err(error) = upload.put(piece, PARTS_MAX).await {
            upload.abort().await;
            return Err(error);
        }
        let wait = ahead(bytes, begin.elapsed(), bandwidth);
        if !wait.is_zero() {
            tokio::time::sleep(wait).await;
        }
    }
    upload.finish().await
}

/// How long to wait so that `bytes` after `elapsed` are no more than the bandwidth (bytes a second) allows.
fn ahead(bytes: u64, elapsed: Duration, bandwidth: Option<u64>) -> Duration {
    let due = bandwidth.map(|bandwidth| Duration::from_secs_f64(bytes as f64 / bandwidth as f64));
    due.unwrap_or_default().saturating_sub(elapsed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn writing_waits_for_its_bandwidth() {
        let second = Duration::from_secs(1);
        assert_eq!(ahead(3 << 20, second, Some(1 << 20)), 2 * second);
        assert_eq!(ahead(1 << 20, second, Some(2 << 20)), Duration::ZERO);
        assert_eq!(ahead(u64::MAX, second, None), Duration::ZERO);
    }
}
