//! What an operator lets agents install for scripts, and the bounds of one install.

use std::fmt;
use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, Result};

use crate::terminal::report::duration;

/// Time between two looks at the size of an environment that grows.
const LOOK_EVERY: Duration = Duration::from_millis(250);

/// What the operator lets agents install.
#[derive(Clone, Debug)]
pub(crate) struct Allowed {
    /// URL of the index, the only one.
    pub(crate) index: String,
    /// Longest time for one environment.
    pub(crate) time: Duration,
    /// Largest size of one environment in bytes.
    pub(crate) disk: u64,
}

/// What the operator reads at the start.
impl fmt::Display for Allowed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { index, time, disk } = self;
        let time = duration(*time);
        write!(
            f,
            "requirements of scripts are installed from {index}, each list within {time} and {disk} bytes"
        )
    }
}

/// The bounds of one install.
#[derive(Debug)]
pub(super) struct Limit<'a> {
    pub(super) allowed: &'a Allowed,
    pub(super) folder: &'a Path,
    pub(super) until: tokio::time::Instant,
}

impl Limit<'_> {
    /// Returns once a bound is reached, and which one.
    pub(super) async fn reached(&self) -> String {
        let too_large = async {
            loop {
                // A folder that cannot be read now may be one later.
                if let Ok(Some(reason)) = self.size().await {
                    return reason;
                }
                tokio::time::sleep(LOOK_EVERY).await;
            }
        };
        tokio::select! {
            () = tokio::time::sleep_until(self.until) => format!(
                "it takes longer than the {} of --script-requirements-time; name fewer requirements, or ask the operator of \
                 the workers",
                duration(self.allowed.time)
            ),
            reason = too_large => reason,
        }
    }

    /// Returns that the environment is too large; `None`: it is not.
    pub(super) async fn size(&self) -> Result<Option<String>> {
        let (folder, disk) = (self.folder.to_owned(), self.allowed.disk);
        let measured = tokio::task::spawn_blocking(move || size(&folder));
        let bytes = measured.await.context("measure an environment")?;
        Ok((bytes > disk).then(|| {
            format!(
                "it takes more than the {disk} bytes of --script-requirements-disk; name fewer requirements, or ask the \
                 operator of the workers"
            )
        }))
    }
}

/// Returns the bytes of a folder on the disk. What vanishes meanwhile counts nothing.
fn size(folder: &Path) -> u64 {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let of_entry = |entry: fs::DirEntry| {
        // Of a link itself.
        let Ok(about) = entry.metadata() else { return 0 };
        let below = if about.is_dir() { size(&entry.path()) } else { 0 };
        about.blocks() * 512 + below
    };
    entries.map(of_entry).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_is_measured_with_all_that_is_in_it_and_no_more() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("a")).unwrap();
        fs::write(dir.path().join("a/b"), vec![1; 300_000]).unwrap();
        let bytes = size(dir.path());
        assert!((300_000..400_000).contains(&bytes), "{bytes}");
        let links = tempfile::tempdir().unwrap();
        std::os::unix::fs::symlink(dir.path(), links.path().join("link")).unwrap();
        assert!(size(links.path()) < 100_000);
        assert_eq!(size(&dir.path().join("no")), 0);
    }

    #[test]
    fn the_operator_reads_what_is_allowed() {
        let allowed = Allowed { index: "https://h/s".into(), time: Duration::from_secs(600), disk: 5 };
        let said = allowed.to_string();
        assert!(said.contains("from https://h/s, each list within 10 min 00 s and 5 bytes"), "{said}");
    }
}
