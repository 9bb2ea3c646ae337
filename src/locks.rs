//! The keys of a role and its door: read, followed while it runs, with as many connections as the system has files for.

use anyhow::Result;
use futures::Stream;
use proto::channel::{Accepted, Io};
use proto::security::door::{self, Limits};
use proto::security::{self, Keys};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::net::TcpListener;

/// Open files that are no connections: the journal, artifacts, checkpoints, the log, connections to others.
const OTHER_FILES: u64 = 256;

/// The keys, read again whenever their files change, until the program ends.
///
/// # Errors
/// They cannot be read.
pub(crate) fn follow(options: security::Options) -> Result<Keys> {
    let keys = Keys::load(options)?;
    let followed = keys.clone();
    tokio::spawn(async move { followed.follow().await });
    Ok(keys)
}

/// The connections to `listener` that these keys let in.
pub(crate) fn door(
    listener: TcpListener,
    keys: Keys,
) -> impl Stream<Item = std::io::Result<Accepted<Box<dyn Io>>>> + Send {
    let files = raise_open_files();
    let limits = Limits::default();
    let connections_max = connections(files, limits.connections_max);
    if connections_max < limits.connections_max {
        tracing::info!(
            connections_max,
            "fewer connections than usual, as few files may be open; raise `ulimit -n`"
        );
    }
    door::open(listener, keys, Limits { connections_max, ..limits })
}

/// Lets this process open as many files as the system allows; `None`: without an end.
fn raise_open_files() -> Option<u64> {
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    match setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum }) {
        Ok(()) => maximum,
        Err(_) => current,
    }
}

/// Connections that fit, at most `wanted`.
fn connections(files: Option<u64>, wanted: usize) -> usize {
    let fit = files
        .map_or(wanted, |files| usize::try_from(files.saturating_sub(OTHER_FILES)).unwrap_or(usize::MAX));
    fit.clamp(1, wanted)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_leave_files_for_everything_else() {
        assert_eq!(connections(None, 10_000), 10_000);
        assert_eq!(connections(Some(1024), 10_000), 768);
        assert_eq!(connections(Some(100), 10_000), 1);
        assert_eq!(connections(Some(1 << 20), 10_000), 10_000);
    }
}
