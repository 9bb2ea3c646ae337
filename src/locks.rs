//! The keys of a role, which are read again while it runs, and the doors of its ports. A door takes
//! as many connections as the system has files for.

use anyhow::Result;
use net::security::door::{Door, Limits};
use net::security::{self, Keys};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Open files that are not connections of clients: the journal, artifacts, checkpoints, the log.
const OTHER_FILES: u64 = 256;

/// Largest number of connections to a port that shows health or numbers.
const WATCHERS_MAX: usize = 512;

/// Largest number of connections among [`WATCHERS_MAX`] that have made no request yet.
const SILENT_WATCHERS_MAX: usize = 32;

/// Reads the keys, and reads them again whenever their files change, until the program ends.
///
/// # Errors
/// The keys cannot be read.
pub(crate) fn follow(options: security::Options) -> Result<Keys> {
    let keys = Keys::load(options)?;
    let followed = keys.clone();
    tokio::spawn(async move { followed.follow().await });
    Ok(keys)
}

/// Returns the door of a server with these keys.
pub(crate) fn door(keys: Keys) -> Door {
    let files = raise_open_files();
    let limits = Limits::default();
    let connections_max = connections(files, limits.connections_max);
    if connections_max < limits.connections_max {
        tracing::info!(
            connections_max,
            "fewer connections than usual, as few files may be open; raise `ulimit -n`"
        );
    }
    Door::new(keys, Limits { connections_max, ..limits })
}

/// Returns the door of a port that shows something to everybody.
pub(crate) fn watchers() -> Door {
    Door::new(
        Keys::default(),
        Limits { connections_max: WATCHERS_MAX, unproven_max: SILENT_WATCHERS_MAX, ..Limits::default() },
    )
}

/// Lets this process open as many files as the system permits. Returns their number, or `None` for
/// no limit.
fn raise_open_files() -> Option<u64> {
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    match setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum }) {
        Ok(()) => maximum,
        Err(_) => current,
    }
}

/// Returns the number of connections that fit into so many files, at most `wanted`.
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
