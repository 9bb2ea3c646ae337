//! One file to the store, at no more than the bandwidth that the job allows.
//!
//! Its header has the checksums of all values and lies before them. An object store takes a file
//! from its beginning on, so they are worked out first; on a disk the beginning can come last, and
//! each of the values is read from memory by both in one go.

use std::sync::Arc;
use std::time::Duration;

use proto::checkpoint::Result;
use store::Folder;
use tokio::time::Instant;

use super::cut::{Cut, Header};

/// Parts that may be on their way at once.
const PARTS_MAX: usize = 4;

/// Writes the file of a cut. When this fails there is no file under its name.
pub(super) async fn write(
    folder: &Folder,
    cut: &Arc<Cut>,
    bandwidth: Option<u64>,
    inline_bytes_max: usize,
) -> Result<Header> {
    let mut pace = Pace { begin: Instant::now(), bytes: 0, bandwidth };
    if let Some(mut file) = folder.on_disk(&cut.file_stem(), cut.header_bytes())? {
        let mut checksums = Vec::new();
        for values in cut.values() {
            checksums.push(crc32c::crc32c(&values));
            let bytes = values.len();
            file.put(values).await?;
            pace.keep(bytes).await;
        }
        let header = cut.header(&checksums);
        file.finish(&header.file_name(), header.bytes()).await?;
        return Ok(header);
    }
    let header = cut.header(&cut.checksums(inline_bytes_max).await);
    let mut upload = folder.upload(&header.file_name()).await?;
    for piece in std::iter::once(header.bytes().clone()).chain(cut.values()) {
        let bytes = piece.len();
        if let Err(error) = upload.put(piece, PARTS_MAX).await {
            upload.abort().await;
            return Err(error);
        }
        pace.keep(bytes).await;
    }
    upload.finish().await?;
    Ok(header)
}

/// Since when so many bytes were written, and how many a second there may be.
struct Pace {
    begin: Instant,
    bytes: u64,
    bandwidth: Option<u64>,
}

impl Pace {
    /// Counts `bytes`, and waits until they may have been written.
    async fn keep(&mut self, bytes: usize) {
        self.bytes += bytes as u64;
        let wait = ahead(self.bytes, self.begin.elapsed(), self.bandwidth);
        if !wait.is_zero() {
            tokio::time::sleep(wait).await;
        }
    }
}

/// Returns how long to wait so that `bytes` after `elapsed` are no more than the bandwidth (bytes a
/// second) allows.
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
