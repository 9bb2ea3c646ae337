//! Processes that a script has left behind: they have left its process group, and their parent has
//! ended.
//!
//! The guard of scripts makes itself the parent of such processes, and ends them. Each process of a
//! script begins a session of its own, which no child can leave for that of another process of a
//! script. So a child of the guard is left behind if it is of no live session.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::rc::Rc;
use std::time::Duration;

use rustix::process::{Pid, Signal, WaitOptions, getpid, kill_process, waitpid};

/// Looks for processes that are left behind, at most. Each may show others, whose parents ended.
const LOOKS_MAX: usize = 1000;

/// Pause between two looks, in which killed processes end.
const PAUSE: Duration = Duration::from_millis(2);

/// The live sessions of a guard's processes. Clones share them.
#[derive(Clone, Debug, Default)]
pub(crate) struct Orphans(Rc<RefCell<BTreeSet<i32>>>);

impl Orphans {
    /// Makes this process the parent of those that its children leave behind. It must be the only
    /// one in this process, and see every child.
    ///
    /// # Errors
    /// The system refuses.
    pub(crate) fn adopt() -> io::Result<Self> {
        adopt()?;
        Ok(Self::default())
    }

    /// Adds the session of a new process. Nothing else may happen on this thread between its start
    /// and the call.
    pub(crate) fn begin(&self, session: Pid) {
        self.0.borrow_mut().insert(session.as_raw_nonzero().get());
    }

    /// Removes the session of a process that has ended, and ends all that it has left behind.
    /// Returns whether all of it has ended.
    pub(crate) async fn end(&self, session: Pid) -> bool {
        self.0.borrow_mut().remove(&session.as_raw_nonzero().get());
        until_none(|| look(&self.0.borrow())).await
    }
}

/// Makes this process the parent of those that its children leave behind.
///
/// # Errors
/// The system refuses.
pub(crate) fn adopt() -> io::Result<()> {
    #[cfg(target_os = "linux")]
    rustix::process::set_child_subreaper(Some(getpid()))?;
    Ok(())
}

/// Ends all processes below this one, which no longer starts any. Returns whether all have ended.
pub(crate) async fn end_all() -> bool {
    until_none(|| look(&BTreeSet::new())).await
}

/// Repeats `look` until it finds nothing. False: it still finds something.
async fn until_none(look: impl Fn() -> usize) -> bool {
    for _ in 0..LOOKS_MAX {
        if look() == 0 {
            return true;
        }
        tokio::time::sleep(PAUSE).await;
    }
    false
}

/// Kills the children of this process that are of no `live` session. Returns their number.
fn look(live: &BTreeSet<i32>) -> usize {
    let own = getpid().as_raw_nonzero().get();
    let is_left = |found: &Found| found.parent == own && !live.contains(&found.session);
    let left: Vec<_> = processes().filter(is_left).collect();
    for found in &left {
        let Some(process) = Pid::from_raw(found.process) else { continue };
        // It keeps its number until this process waits for it.
        let _ = kill_process(process, Signal::KILL);
        let _ = waitpid(Some(process), WaitOptions::NOHANG);
    }
    left.len()
}

/// A process as the system lists it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Found {
    process: i32,
    parent: i32,
    session: i32,
}

/// Returns all processes of this machine that can be seen.
fn processes() -> impl Iterator<Item = Found> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let numbers = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    numbers.filter_map(|process| parse(process, &fs::read_to_string(format!("/proc/{process}/stat")).ok()?))
}

/// Reads `PID (NAME) STATE PPID PGRP SESSION ..`. The name may have parentheses.
fn parse(process: i32, stat: &str) -> Option<Found> {
    let mut fields = stat.rsplit_once(") ")?.1.split(' ').skip(1);
    let parent = fields.next()?.parse().ok()?;
    let session = fields.nth(1)?.parse().ok()?;
    Some(Found { process, parent, session })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_read_whatever_its_name() {
        let found = Some(Found { process: 7, parent: 5, session: 3 });
        assert_eq!(parse(7, "7 (sh) S 5 4 3 0 -1 4194304"), found);
        assert_eq!(parse(7, "7 (a) R 1 1 1) S 5 4 3 0 -1"), found);
        assert_eq!(parse(7, "7 (sh"), None);
        let own = getpid().as_raw_nonzero().get();
        assert!(processes().any(|found| found.process == own));
    }
}
