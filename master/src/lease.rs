//! What every lease has in common: a fresh id, a holder, a deadline, and the count of what went
//! wrong with its work.
//!
//! Three things end a grant before its work is done, and they are counted apart: a reported failure
//! (the work may be bad), the death of the holder (the machine may be bad), and a hand-back
//! (nothing is bad).

use std::fmt;
use std::time::Duration;

use proto::ids::{IncarnationId, LeaseId};

use crate::progress::Progress;

/// Leases of one kind that a worker holds at most: one to work on, one made ready meanwhile.
pub(crate) const HELD_MAX: usize = 2;

/// Numbers leases; never the same number twice.
#[derive(Debug)]
pub(crate) struct LeaseIds(u64);

impl LeaseIds {
    /// Numbers from `first` on.
    pub(crate) const fn starting_at(first: u64) -> Self {
        Self(first)
    }

    pub(crate) const fn fresh(&mut self) -> LeaseId {
        let id = LeaseId(self.0);
        self.0 += 1;
        id
    }
}

/// A worker that asks a job for work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Asker {
    pub(crate) worker: IncarnationId,
    /// Training leases of this job that the worker may hold: [`HELD_MAX`] less those that it holds
    /// of other jobs.
    pub(crate) room: usize,
}

impl Asker {
    /// Creates a worker that holds so many training leases of other jobs.
    pub(crate) const fn new(worker: IncarnationId, held_elsewhere: usize) -> Self {
        Self { worker, room: HELD_MAX.saturating_sub(held_elsewhere) }
    }
}

/// How long leases hold, and how often work may go wrong before its job fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Limits {
    /// Time without a heartbeat after which a lease expires.
    pub(crate) lease: Duration,
    /// Time until the first heartbeat after which a lease expires: the cost of a lost answer.
    pub(crate) claim: Duration,
    /// Number of reported failures at which a task fails for good.
    pub(crate) attempts_max: u32,
    /// Number of deaths of holders at which a task fails for good.
    pub(crate) deaths_max: u32,
    /// Time without progress at one place of the work after which the holder hangs.
    pub(crate) stall: Duration,
}

/// One grant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Grant {
    pub(crate) lease: LeaseId,
    pub(crate) worker: IncarnationId,
    pub(crate) granted: Duration,
    pub(crate) deadline: Duration,
    /// The holder has named it in a heartbeat, so it got our answer.
    pub(crate) claimed: bool,
    /// What the holder said last of how it gets on.
    pub(crate) progress: Progress,
}

impl Grant {
    pub(crate) fn new(now: Duration, lease: LeaseId, worker: IncarnationId, limits: &Limits) -> Self {
        let deadline = now + limits.lease.min(limits.claim);
        Self { lease, worker, granted: now, deadline, claimed: false, progress: Progress::granted(now) }
    }

    /// Records that the holder lives.
    pub(crate) fn renew(&mut self, now: Duration, limits: &Limits) {
        self.deadline = now + limits.lease;
        self.claimed = true;
    }

    pub(crate) fn is_overdue(&self, now: Duration) -> bool {
        self.deadline <= now
    }

    /// Returns what it means that the deadline passed.
    pub(crate) const fn overdue(&self) -> Ending {
        if self.claimed { Ending::Died } else { Ending::Unclaimed }
    }
}

/// How a grant ended without its work being done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Ending {
    /// The holder reported this failure.
    Failed(String),
    /// The holder died, or was silent for so long that it counts as dead.
    Died,
    /// The holder never got the answer.
    Unclaimed,
    /// The holder gave it back.
    Released,
}

/// What happened to a piece of work so far.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Attempts {
    /// Times it was handed out.
    pub(crate) grants: u32,
    pub(crate) failures: u32,
    pub(crate) deaths: u32,
    pub(crate) last_error: Option<String>,
}

impl Attempts {
    /// Counts an ending; says so when that was once too often.
    pub(crate) fn end(&mut self, ending: Ending, limits: &Limits) -> Option<Exhausted> {
        match ending {
            Ending::Failed(message) => {
                self.failures += 1;
                self.last_error = Some(message);
            }
            Ending::Died => self.deaths += 1,
            Ending::Unclaimed | Ending::Released => return None,
        }
        let exhausted = self.failures >= limits.attempts_max || self.deaths >= limits.deaths_max;
        exhausted.then(|| Exhausted { attempts: self.clone() })
    }
}

/// Work went wrong as often as the job allows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Exhausted {
    attempts: Attempts,
}

impl fmt::Display for Exhausted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Attempts { failures, deaths, last_error, .. } = &self.attempts;
        write!(
            f,
            "{failures} attempts failed (limits.attempts_max) and {deaths} workers died holding it (limits.deaths_max); "
        )?;
        match last_error {
            Some(error) => write!(f, "last error: {error}"),
            None => write!(f, "look at the workers' logs, too little memory is the usual cause"),
        }
    }
}

/// A lease that was taken from its holder, and whether that was once too often.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Lost {
    pub(crate) lease: LeaseId,
    pub(crate) worker: IncarnationId,
    /// The work, and why the job must fail; `None`: it may be tried again.
    pub(crate) exhausted: Option<String>,
}
