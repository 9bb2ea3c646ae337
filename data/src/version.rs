//! Versions of files: texts that tell a file from another one of the same size.
//!
//! A file on another machine has the version that its server says. A local file has the time of its
//! modification, and the host that said so: copies of one file on several hosts have times of their
//! own, so only times of one host are compared. A table of several files has a version for each,
//! with spaces between them. A file without a version has the empty text.

use std::sync::OnceLock;
use std::time::SystemTime;

/// Begin of a local file's version. A server's version is in quotes or a date.
const LOCAL: &str = "local/";

/// Returns the version of a local file. `None`: this host cannot be told from another one.
pub(crate) fn of_local(modified: SystemTime) -> Option<String> {
    let since = modified.duration_since(SystemTime::UNIX_EPOCH).ok()?;
    of_local_state(&format!("{}.{:09}", since.as_secs(), since.subsec_nanos()))
}

/// Returns the version of local files that are in this state, a text without spaces. `None`: this
/// host cannot be told from another one.
pub(crate) fn of_local_state(state: &str) -> Option<String> {
    Some(format!("{LOCAL}{}/{state}", host()?))
}

/// Returns a number that all processes and containers of this host have until it starts again.
fn host() -> Option<&'static str> {
    static HOST: OnceLock<Option<String>> = OnceLock::new();
    let read = || std::fs::read_to_string("/proc/sys/kernel/random/boot_id").ok();
    HOST.get_or_init(|| read().map(|id| id.trim().to_owned())).as_deref()
}

/// Returns the first file whose version is certainly another one: its version in `found` and in
/// `then`.
pub(crate) fn difference<'a>(found: &'a str, then: &'a str) -> Option<(&'a str, &'a str)> {
    let mut pairs = found.split(' ').zip(then.split(' '));
    pairs.find(|(found, then)| !found.is_empty() && !then.is_empty() && !may_be_equal(found, then))
}

fn may_be_equal(found: &str, then: &str) -> bool {
    let are_other_hosts = || Some(host_of(found)? != host_of(then)?);
    found == then || are_other_hosts().unwrap_or(false)
}

/// Returns the host of a local file's version.
fn host_of(version: &str) -> Option<&str> {
    Some(version.strip_prefix(LOCAL)?.split_once('/')?.0)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn times_of_one_host_are_compared_and_those_of_two_are_not() {
        let of = |nanos| of_local(SystemTime::UNIX_EPOCH + Duration::from_nanos(nanos)).unwrap();
        let (first, second) = (of(5), of(6));
        assert_eq!(difference(&first, &first), None);
        assert_eq!(difference(&second, &first), Some((&*second, &*first)));
        assert_eq!(difference("local/a/5.0", "local/b/6.0"), None);
        assert_eq!(difference("local/a/5.0", "local/a/6.0"), Some(("local/a/5.0", "local/a/6.0")));
    }

    #[test]
    fn any_file_of_a_table_may_differ() {
        assert_eq!(difference("\"1\" \"2\"", "\"1\" \"2\""), None);
        assert_eq!(difference("\"1\" \"2\"", "\"1\" \"3\""), Some(("\"2\"", "\"3\"")));
        assert_eq!(difference(" \"2\"", "\"1\" \"2\""), None);
        assert_eq!(difference("", "\"1\""), None);
        assert_eq!(difference("\"1\"", "local/a/5.0"), Some(("\"1\"", "local/a/5.0")));
    }
}
