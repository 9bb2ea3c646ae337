//! What becomes of a script: whether it goes on, fails, or is over. Pure.

/// Where the jobs of a script are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    /// No process has joined a job yet.
    Unjoined,
    /// A job lives.
    Training,
    /// All jobs have ended.
    Ended,
}

/// What a script stands at.
#[derive(Clone, Copy, Debug)]
pub(super) struct Standing {
    pub(super) stage: Stage,
    /// Processes that agents run.
    pub(super) running: usize,
    /// Processes that are to run, and that no agent runs.
    pub(super) waiting: usize,
    /// The end is decided: by a user, or by a failure.
    pub(super) ends: bool,
    /// Agents live, and the script failed too often on each of them.
    pub(super) all_gave_up: bool,
    /// All jobs ended so long ago that no process may run any more.
    pub(super) lingers: bool,
    /// Agents of an earlier start of the master may still come back with processes.
    pub(super) settles: bool,
}

/// What becomes of a script.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// Its processes run, or are to run.
    GoesOn,
    /// It fails: no process is left.
    Fails,
    /// Nothing is left to do.
    Over,
}

impl Standing {
    pub(super) const fn verdict(self) -> Verdict {
        let Self { stage, running, waiting, ends, all_gave_up, lingers, settles } = self;
        match stage {
            // A job that is being cancelled is exported by a process.
            Stage::Training if ends => Verdict::GoesOn,
            _ if ends => Verdict::Over,
            Stage::Ended if lingers => Verdict::Over,
            _ if running > 0 || settles => Verdict::GoesOn,
            Stage::Ended => Verdict::Over,
            _ if waiting == 0 || all_gave_up => Verdict::Fails,
            _ => Verdict::GoesOn,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_script_goes_on_as_long_as_somebody_runs_or_may_run_it() {
        let waits = Standing {
            stage: Stage::Unjoined,
            running: 0,
            waiting: 2,
            ends: false,
            all_gave_up: false,
            lingers: false,
            settles: false,
        };
        let training = Standing { stage: Stage::Training, ..waits };
        let ended = Standing { stage: Stage::Ended, ..waits };
        for (standing, expected, why) in [
            (waits, Verdict::GoesOn, "an agent may come"),
            (training, Verdict::GoesOn, "an agent may come"),
            (Standing { all_gave_up: true, ..training }, Verdict::Fails, "no agent is left"),
            (Standing { all_gave_up: true, running: 1, ..training }, Verdict::GoesOn, "one process trains"),
            (Standing { waiting: 0, ..training }, Verdict::Fails, "all processes have drained"),
            (Standing { waiting: 0, ..waits }, Verdict::Fails, "no process has joined"),
            (Standing { running: 1, ..ended }, Verdict::GoesOn, "a process saves its model"),
            (Standing { running: 1, lingers: true, ..ended }, Verdict::Over, "it had time to save it"),
            (ended, Verdict::Over, "processes that wait are not needed any more"),
            (Standing { settles: true, ..ended }, Verdict::GoesOn, "an agent may say that one still runs"),
            (Standing { settles: true, waiting: 0, ..training }, Verdict::GoesOn, "an agent may say so"),
            (Standing { ends: true, running: 2, ..training }, Verdict::GoesOn, "its job is exported"),
            (Standing { ends: true, running: 2, ..ended }, Verdict::Over, "processes are ended"),
            (Standing { ends: true, ..waits }, Verdict::Over, "it never had a job"),
        ] {
            assert_eq!(standing.verdict(), expected, "{why}: {standing:?}");
        }
    }
}
