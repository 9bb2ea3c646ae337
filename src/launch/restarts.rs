//! Decides what follows when a process of a script ends. Pure, `now` an argument.

use std::collections::VecDeque;
use std::fmt;
use std::os::unix::process::ExitStatusExt as _;
use std::process::ExitStatus;
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Time in which a process may be started again [`RESTARTS_MAX`] times. A process that ran for so
/// long is started again as quickly as a new one.
const WINDOW: Duration = Duration::from_secs(600);

/// Largest number of restarts in [`WINDOW`].
const RESTARTS_MAX: usize = 3;

/// Wait before the first restart. Each further one doubles it.
const FIRST: Duration = Duration::from_secs(1);

/// Longest wait before a restart.
const LONGEST: Duration = Duration::from_secs(60);

/// How a process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Exit {
    /// It gave this code.
    Code(i32),
    /// This signal ended it.
    Signal(i32),
}

impl Exit {
    /// Returns whether the process says that all is well.
    pub(crate) const fn is_good(self) -> bool {
        matches!(self, Self::Code(0))
    }
}

impl From<ExitStatus> for Exit {
    fn from(status: ExitStatus) -> Self {
        match (status.code(), status.signal()) {
            (Some(code), _) => Self::Code(code),
            (None, signal) => Self::Signal(signal.unwrap_or_default()),
        }
    }
}

impl fmt::Display for Exit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Code(code) => write!(f, "ended with exit code {code}"),
            Self::Signal(signal) => write!(f, "was ended by signal {signal}"),
        }
    }
}

/// Where the jobs of the script are when one of its processes ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    /// No process has joined yet.
    Unjoined,
    /// A job lives.
    Training,
    /// All jobs have ended.
    Ended,
}

/// Why a process left and is not started again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Left {
    /// It ended well after the job.
    Finished,
    /// It ended well before the job: it drained.
    Drained,
    /// It ended, and no process had joined a job.
    Unjoined(Exit),
    /// It failed after the job had ended.
    FailedLate(Exit),
    /// It failed too often.
    GaveUp(Exit),
    /// The run was told to stop.
    Stopped,
}

/// What follows the end of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Decision {
    /// Start it again after this time.
    Restart(Duration),
    /// Do without it.
    Leave(Left),
}

/// The restarts of one process.
#[derive(Debug, Default)]
pub(crate) struct Restarts {
    /// Times of the restarts in the last [`WINDOW`], oldest first.
    recent: VecDeque<Duration>,
    /// Wait before the last restart.
    wait: Option<Duration>,
}

impl Restarts {
    /// Decides at `now` what follows the end of a process that `began` at that time.
    ///
    /// A script that fails before any process has joined is wrong itself, so it is not tried again.
    /// A signal comes from outside: such a process is started again at any stage before the end.
    pub(crate) fn decide(&mut self, exit: Exit, stage: Stage, began: Duration, now: Duration) -> Decision {
        match (stage, exit) {
            (Stage::Ended, exit) if exit.is_good() => Decision::Leave(Left::Finished),
            (Stage::Ended, exit) => Decision::Leave(Left::FailedLate(exit)),
            (Stage::Unjoined, Exit::Code(_)) => Decision::Leave(Left::Unjoined(exit)),
            (Stage::Training, exit) if exit.is_good() => Decision::Leave(Left::Drained),
            (Stage::Training, _) | (Stage::Unjoined, Exit::Signal(_)) => self.restart(exit, began, now),
        }
    }

    fn restart(&mut self, exit: Exit, began: Duration, now: Duration) -> Decision {
        while self.recent.front().is_some_and(|&at| now.saturating_sub(at) >= WINDOW) {
            self.recent.pop_front();
        }
        if self.recent.len() >= RESTARTS_MAX {
            return Decision::Leave(Left::GaveUp(exit));
        }
        let ran_long = now.saturating_sub(began) >= WINDOW;
        let wait = self.wait.filter(|_| !ran_long).map_or(FIRST, |wait| (2 * wait).min(LONGEST));
        self.recent.push_back(now);
        self.wait = Some(wait);
        Decision::Restart(wait)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CRASH: Exit = Exit::Code(1);
    const KILL: Exit = Exit::Signal(9);

    fn secs(secs: u64) -> Duration {
        Duration::from_secs(secs)
    }

    #[test]
    fn three_crashes_in_ten_minutes_are_forgiven_and_the_fourth_is_not() {
        let mut restarts = Restarts::default();
        let mut crash = |began, now| restarts.decide(CRASH, Stage::Training, secs(began), secs(now));
        assert_eq!(crash(0, 5), Decision::Restart(secs(1)));
        assert_eq!(crash(6, 7), Decision::Restart(secs(2)));
        assert_eq!(crash(9, 10), Decision::Restart(secs(4)));
        assert_eq!(crash(14, 604), Decision::Leave(Left::GaveUp(CRASH)));
        assert_eq!(crash(14, 605), Decision::Restart(secs(8)), "the first one is ten minutes ago");
    }

    #[test]
    fn waits_double_up_to_a_minute_and_a_long_life_resets_them() {
        let mut restarts = Restarts::default();
        // A life of five minutes: never more than three restarts in ten.
        let mut waits = Vec::new();
        for life in 1..=8 {
            let began = secs(300 * (life - 1));
            match restarts.decide(KILL, Stage::Training, began, secs(300 * life)) {
                Decision::Restart(wait) => waits.push(wait.as_secs()),
                other => panic!("{other:?}"),
            }
        }
        assert_eq!(waits, [1, 2, 4, 8, 16, 32, 60, 60]);
        let long = restarts.decide(KILL, Stage::Training, secs(2400), secs(3000));
        assert_eq!(long, Decision::Restart(secs(1)));
    }

    #[test]
    fn what_an_end_means_depends_on_the_job() {
        let decide = |exit, stage| Restarts::default().decide(exit, stage, secs(0), secs(1));
        let again = Decision::Restart(secs(1));
        let good = Exit::Code(0);
        for (exit, stage, expected) in [
            (good, Stage::Unjoined, Decision::Leave(Left::Unjoined(good))),
            (CRASH, Stage::Unjoined, Decision::Leave(Left::Unjoined(CRASH))),
            (KILL, Stage::Unjoined, again),
            (good, Stage::Training, Decision::Leave(Left::Drained)),
            (CRASH, Stage::Training, again),
            (KILL, Stage::Training, again),
            (good, Stage::Ended, Decision::Leave(Left::Finished)),
            (CRASH, Stage::Ended, Decision::Leave(Left::FailedLate(CRASH))),
            (KILL, Stage::Ended, Decision::Leave(Left::FailedLate(KILL))),
        ] {
            assert_eq!(decide(exit, stage), expected, "{exit:?} at {stage:?}");
        }
    }

    #[test]
    fn an_end_is_told_by_code_or_signal() {
        assert_eq!(Exit::from(ExitStatus::from_raw(3 << 8)).to_string(), "ended with exit code 3");
        assert_eq!(Exit::from(ExitStatus::from_raw(9)).to_string(), "was ended by signal 9");
    }
}
