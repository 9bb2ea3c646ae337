//! Whether those who hold work get on with it: what each said last of the place in its process that
//! works. Pure.
//!
//! A heartbeat says that a process lives. That it works is said by the place that works: it goes
//! from phase to phase, and advances within one (records read, chunks pulled, microbatches
//! computed). A place that has not advanced for its phase's limit *hangs*. Nobody who hangs is
//! ended for it: the work is copied, and the worker is named.
//!
//! | phase | limit |
//! | --- | --- |
//! | computing, with a known time T per microbatch | 16 T, at least min(30 s, `limits.stall`) |
//! | waiting for room on a ps | `limits.stall`, at least 4 s |
//! | every other | `limits.stall` |
//!
//! A worker that waits for room repeats its push every 2 s, and each refusal is progress.

use std::fmt;
use std::time::Duration;

use proto::ids::{IncarnationId, JobId, LeaseId};
use proto::pb;

/// Computing hangs after this many microbatches' time.
const MICROBATCHES: u32 = 16;

/// No computation hangs sooner, unless the job says so.
const COMPUTING_MIN: Duration = Duration::from_secs(30);

/// Shortest limit of a worker that waits for room: twice the longest wait between two pushes.
const ROOM_MIN: Duration = Duration::from_secs(4);

/// Longest name of a file or place that is kept, in characters.
const WHAT_MAX: usize = 256;

/// What the holder of a lease said last.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Progress {
    pub(crate) phase: pb::Phase,
    /// The object of the phase: a file, a ps, records.
    pub(crate) what: String,
    /// Time at which it advanced last.
    pub(crate) since: Duration,
}

/// A worker that hangs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Hang {
    pub(crate) worker: IncarnationId,
    pub(crate) lease: LeaseId,
    pub(crate) progress: Progress,
    /// What the lease is for; empty when it has ended.
    pub(crate) work: String,
    /// Somebody else does it and gets on, or has done it.
    pub(crate) taken_over: bool,
}

/// Work for a lease that has ended, with which a worker is still busy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Lingering {
    pub(crate) job: JobId,
    pub(crate) lease: LeaseId,
    pub(crate) progress: Progress,
}

impl Progress {
    /// Returns the progress of a lease that was just granted.
    pub(crate) const fn granted(now: Duration) -> Self {
        Self { phase: pb::Phase::Unspecified, what: String::new(), since: now }
    }

    /// Takes up the progress in a heartbeat. A heartbeat with `PHASE_UNSPECIFIED` changes nothing.
    pub(crate) fn hear(&mut self, now: Duration, said: &pb::LeaseProgress) {
        if said.phase() != pb::Phase::Unspecified {
            self.phase = said.phase();
            self.what = said.what.chars().filter(|c| !c.is_control()).take(WHAT_MAX).collect();
            self.since = now.saturating_sub(Duration::from_millis(said.idle_ms));
        }
    }

    /// Returns when the holder begins to hang unless it advances; `known`: its time per microbatch.
    pub(crate) fn hangs_from(&self, known: Option<Duration>, stall: Duration) -> Duration {
        let limit = match (self.phase, known) {
            (pb::Phase::Computing, Some(known)) => {
                known.saturating_mul(MICROBATCHES).max(COMPUTING_MIN.min(stall))
            }
            (pb::Phase::WaitingForRoom, _) => stall.max(ROOM_MIN),
            _ => stall,
        };
        self.since + limit
    }
}

impl fmt::Display for Progress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.phase.doing())?;
        if self.what.is_empty() { Ok(()) } else { write!(f, " {}", self.what) }
    }
}

impl Lingering {
    /// Reads the message of a heartbeat; `None`: it lacks the place.
    pub(crate) fn heard(now: Duration, said: &pb::Lingering) -> Option<Self> {
        let place = said.place.as_ref()?;
        let mut progress = Progress::granted(now);
        progress.hear(now, place);
        Some(Self { job: JobId(said.job), lease: LeaseId(place.lease), progress })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn said(phase: pb::Phase, idle_ms: u64) -> pb::LeaseProgress {
        pb::LeaseProgress { phase: phase.into(), idle_ms, what: "x.gz".to_owned(), ..Default::default() }
    }

    #[test]
    fn a_heartbeat_alone_is_no_progress() {
        let mut progress = Progress::granted(10 * SECOND);
        let stall = 300 * SECOND;
        progress.hear(100 * SECOND, &pb::LeaseProgress::default());
        assert_eq!(progress.hangs_from(None, stall), 310 * SECOND);
        progress.hear(100 * SECOND, &said(pb::Phase::Reading, 0));
        assert_eq!(progress.hangs_from(None, stall), 400 * SECOND);
        // It reads on the same file for a minute, and heartbeats all the time.
        progress.hear(160 * SECOND, &said(pb::Phase::Reading, 60_000));
        assert_eq!(progress.hangs_from(None, stall), 400 * SECOND);
        assert_eq!((progress.phase, progress.what.as_str()), (pb::Phase::Reading, "x.gz"));
    }

    #[test]
    fn computing_has_a_limit_of_its_own_where_it_is_known_what_it_takes() {
        let mut progress = Progress::granted(Duration::ZERO);
        progress.hear(Duration::ZERO, &said(pb::Phase::Computing, 0));
        let from = |known, stall| progress.hangs_from(known, stall);
        assert_eq!(from(None, 300 * SECOND), 300 * SECOND);
        assert_eq!(from(Some(SECOND / 10), 300 * SECOND), 30 * SECOND);
        assert_eq!(from(Some(SECOND / 10), 2 * SECOND), 2 * SECOND);
        assert_eq!(from(Some(60 * SECOND), 300 * SECOND), 960 * SECOND);
        // A push that is refused is repeated every two seconds.
        progress.hear(Duration::ZERO, &said(pb::Phase::WaitingForRoom, 0));
        let from = |stall| progress.hangs_from(None, stall);
        assert_eq!((from(SECOND), from(300 * SECOND)), (4 * SECOND, 300 * SECOND));
    }
}
