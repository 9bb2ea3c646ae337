//! The progress of a job for a user: one live line on a terminal, otherwise a few plain lines.
//!
//! The texts are pure functions of the events; only [`Progress::event`] writes. Epochs count from 1
//! for people, and from 0 in files.

use std::time::Duration;

use client::{Event, JobState, Kind};
use proto::pb;

use crate::terminal::report::{
    VALIDATION, count, duration, indexing, metrics, rate, state_with_reason, value, workers,
};
use crate::terminal::screen::Screen;

/// The progress of one job.
#[derive(Debug)]
pub(crate) struct Progress {
    screen: Screen,
    live: bool,
    /// A user holds the job. Steps that its workers had begun still come.
    paused: bool,
    /// The step from which the pace is measured: the first one, or the first after a change of
    /// state.
    first: Option<Mark>,
    /// The step of the newest plain line.
    shown: Option<Mark>,
    /// Time of the newest plain line about a state, or about indexed files.
    told_ms: u64,
}

/// Least time between two plain lines about indexed files, in milliseconds.
const INDEXING_MS: u64 = 5_000;

/// A step and its time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Mark {
    unix_ms: u64,
    step: u64,
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.screen.stop_live();
    }
}

impl Progress {
    /// Shows a job on `screen`, until it is dropped.
    pub(crate) fn new(screen: Screen) -> Self {
        let live = screen.start_live();
        Self { screen, live, paused: false, first: None, shown: None, told_ms: 0 }
    }

    /// Shows an event.
    pub(crate) fn event(&mut self, event: &Event) {
        let kind = &event.kind;
        if let Kind::Indexing(found) = kind {
            self.indexing(event.unix_ms, found);
            return;
        }
        let Kind::Train(train) = kind else {
            if let Some(text) = line(kind) {
                self.screen.line(&text);
            }
            if let Kind::State(state) = kind {
                // The bar of the files does not stay while the model is built.
                let done = (state.state() == JobState::Indexing).then_some((0, 1));
                self.screen.set_live(done, state_with_reason(state.state(), ""));
                self.told_ms = event.unix_ms;
                self.paused = state.state() == JobState::Paused;
                (self.first, self.shown) = (None, None);
            }
            return;
        };
        let now = Mark { unix_ms: event.unix_ms, step: train.step };
        let first = *self.first.get_or_insert(now);
        let mut text = training(train, time_left(first, now, train.steps));
        if self.paused {
            text.insert_str(0, "paused, ");
        }
        if self.live {
            self.screen.set_live(Some((train.step + 1, train.steps)), text);
        } else if self.shown.is_none_or(|shown| is_due(first, shown, now, train.steps)) {
            self.shown = Some(now);
            self.screen.line(&text);
        }
    }

    /// Shows how far the data files are indexed.
    fn indexing(&mut self, unix_ms: u64, found: &pb::Indexing) {
        let text = format!("{}: {}", JobState::Indexing.name(), indexing(found));
        if self.live {
            self.screen.set_live(Some((found.files_done, found.files)), text);
        } else if unix_ms.saturating_sub(self.told_ms) >= INDEXING_MS {
            self.told_ms = unix_ms;
            self.screen.line(&text);
        }
    }
}

/// Returns the state of training on one line. A narrow terminal cuts off the end, which matters
/// least.
fn training(train: &pb::TrainEvent, left: Option<Duration>) -> String {
    let left = left.map(|left| format!(", {} left", duration(left))).unwrap_or_default();
    format!(
        "epoch {}/{}, step {}/{}, loss {}{left}, {} samples/s, {}",
        train.epoch + 1,
        train.epochs,
        train.step + 1,
        train.steps,
        value(train.loss),
        rate(train.samples_per_second),
        workers(train.workers, train.workers_standby)
    )
}

/// Returns the name of the validation set that was measured.
fn set(evaluation: &pb::EvaluationEvent) -> &str {
    if evaluation.set.is_empty() { VALIDATION } else { &evaluation.set }
}

/// Returns the line of any other event.
fn line(kind: &Kind) -> Option<String> {
    Some(match kind {
        // A warning says what was lost, and the next line of training where it stands.
        Kind::Train(_) | Kind::Rewind(_) | Kind::Indexing(_) => return None,
        Kind::State(state) => state_with_reason(state.state(), &state.reason),
        // No epoch ends at step 0: the job only evaluates.
        Kind::Evaluation(evaluation) if evaluation.step == 0 => format!(
            "{}: {} ({})",
            set(evaluation),
            metrics(&evaluation.metrics),
            count(evaluation.samples, "record", "records")
        ),
        Kind::Evaluation(evaluation) => format!(
            "epoch {}{}, {}: {} ({}, step {})",
            evaluation.epoch + 1,
            if evaluation.within_epoch { "" } else { " done" },
            set(evaluation),
            metrics(&evaluation.metrics),
            count(evaluation.samples, "record", "records"),
            evaluation.step
        ),
        Kind::Fleet(fleet) => {
            format!(
                "fleet: {}, {} ps: {}",
                count(fleet.workers.into(), "worker", "workers"),
                fleet.ps,
                fleet.reason
            )
        }
        Kind::Warning(warning) => format!("warning: {}", warning.message),
        Kind::Checkpoint(checkpoint) => {
            format!("checkpoint of version {} ({} bytes)", checkpoint.version, checkpoint.bytes)
        }
    })
}

/// Time until the end of training, at the mean pace since `first`.
fn time_left(first: Mark, now: Mark, steps: u64) -> Option<Duration> {
    let done = now.step.checked_sub(first.step).filter(|&done| done > 0)?;
    let left = steps.saturating_sub(now.step + 1);
    let elapsed_ms = now.unix_ms.saturating_sub(first.unix_ms) as f64;
    Some(Duration::from_secs_f64(elapsed_ms / 1e3 * left as f64 / done as f64))
}

/// True if a plain line is due: after a tenth of the steps, or after 5 s, and less often in a long
/// job.
fn is_due(first: Mark, shown: Mark, now: Mark, steps: u64) -> bool {
    let since = |mark: Mark| now.unix_ms.saturating_sub(mark.unix_ms);
    let tenth = (steps / 10).max(1);
    now.step.saturating_sub(shown.step) >= tenth
        || since(shown) >= 5_000.max(since(first) / 20)
        || now.step + 1 == steps
}

#[cfg(test)]
mod tests {
    use std::sync::PoisonError;

    use super::*;
    use crate::fake::{evaluation, event, state, train};

    fn mark(unix_ms: u64, step: u64) -> Mark {
        Mark { unix_ms, step }
    }

    #[test]
    fn the_training_line_has_everything_with_units() {
        let Kind::Train(train) = train(2).kind else { unreachable!() };
        assert_eq!(
            training(&train, Some(Duration::from_secs(90))),
            "epoch 2/2, step 3/4, loss 0.5000, 1 min 30 s left, 100 samples/s, 3 workers"
        );
    }

    #[test]
    fn the_training_line_names_who_stands_by() {
        let Kind::Train(mut train) = train(2).kind else { unreachable!() };
        train.workers_standby = 2;
        assert!(training(&train, None).ends_with(", 3 workers (+2 standing by)"));
    }

    #[test]
    fn a_pause_is_shown_and_does_not_slow_the_pace() {
        let screen = Screen::default();
        let mut progress = Progress::new(screen.clone());
        progress.live = false;
        let at = |mut event: Event, unix_ms: u64| {
            event.unix_ms = unix_ms;
            if let Kind::Train(train) = &mut event.kind {
                train.steps = 10;
            }
            event
        };
        for event in [
            at(train(0), 0),
            at(train(1), 1_000),
            at(state(4, JobState::Paused, "a user paused it"), 1_500),
            at(train(2), 2_000),
            at(state(6, JobState::Running, "workers train"), 3_600_000),
            at(train(3), 3_601_000),
            at(train(4), 3_602_000),
        ] {
            progress.event(&event);
        }
        let lines = screen.lines.lock().unwrap_or_else(PoisonError::into_inner).clone();
        assert_eq!(lines[2], "paused: a user paused it");
        assert!(lines[3].starts_with("paused, epoch 2/2, step 3/10"), "{lines:?}");
        assert_eq!(lines[4], "running: workers train");
        assert!(lines[6].contains("step 5/10") && lines[6].contains("5.0 s left"), "{lines:?}");
    }

    #[test]
    fn indexed_files_have_a_plain_line_every_five_seconds() {
        let screen = Screen::default();
        let mut progress = Progress::new(screen.clone());
        progress.live = false;
        let mut begins = state(1, JobState::Indexing, "workers count");
        begins.unix_ms = 1_000;
        progress.event(&begins);
        for (files_done, unix_ms) in [(1, 2_000), (2, 6_000), (3, 10_900), (4, 11_000)] {
            let indexing = pb::Indexing { files_done, files: 9, bytes_done: files_done << 20 };
            let mut event = event(2, Kind::Indexing(indexing));
            event.unix_ms = unix_ms;
            progress.event(&event);
        }
        let lines = screen.lines.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let expected = ["indexing: 2 of 9 files, 2.0 MiB", "indexing: 4 of 9 files, 4.0 MiB"];
        assert_eq!(lines[1..], expected, "{lines:?}");
    }

    #[test]
    fn other_events_have_lines_of_their_own() {
        let text = |event: Event| line(&event.kind);
        assert_eq!(
            text(evaluation(0)).unwrap(),
            "epoch 1 done, validation: loss 0.2500, accuracy 0.7500 (20 records, step 2)"
        );
        let Kind::Evaluation(measured) = evaluation(0).kind else { unreachable!() };
        let once = Kind::Evaluation(pb::EvaluationEvent { step: 0, ..measured });
        assert_eq!(line(&once).unwrap(), "validation: loss 0.2500, accuracy 0.7500 (20 records)");
        let Kind::Evaluation(measured) = evaluation(0).kind else { unreachable!() };
        let set = "test".to_owned();
        let within = Kind::Evaluation(pb::EvaluationEvent { within_epoch: true, set, ..measured });
        assert_eq!(
            line(&within).unwrap(),
            "epoch 1, test: loss 0.2500, accuracy 0.7500 (20 records, step 2)"
        );
        assert_eq!(text(state(1, JobState::Running, "2 workers")).unwrap(), "running: 2 workers");
        let fleet = pb::FleetEvent { generation: 2, workers: 1, ps: 2, reason: "worker `b` died".into() };
        assert_eq!(text(event(1, Kind::Fleet(fleet))).unwrap(), "fleet: 1 worker, 2 ps: worker `b` died");
        assert_eq!(text(train(0)), None);
    }

    #[test]
    fn time_left_follows_the_mean_pace() {
        assert_eq!(time_left(mark(0, 0), mark(0, 0), 100), None);
        assert_eq!(time_left(mark(0, 9), mark(10_000, 19), 100), Some(Duration::from_secs(80)));
        assert_eq!(time_left(mark(0, 9), mark(10_000, 99), 100), Some(Duration::ZERO));
    }

    #[test]
    fn plain_lines_come_at_each_tenth_or_after_five_seconds_and_rarely_in_long_jobs() {
        let first = mark(0, 0);
        assert!(!is_due(first, mark(0, 0), mark(100, 99), 1000));
        assert!(is_due(first, mark(0, 0), mark(100, 100), 1000));
        assert!(is_due(first, mark(0, 0), mark(5_000, 3), 1000));
        let hour = 3_600_000;
        assert!(!is_due(first, mark(hour, 500), mark(hour + 60_000, 510), 1000));
        assert!(is_due(first, mark(hour, 500), mark(hour + 200_000, 510), 1000));
        assert!(is_due(first, mark(0, 998), mark(1, 999), 1000));
    }

    #[test]
    fn a_short_job_prints_few_lines() {
        let screen = Screen::default();
        let mut progress = Progress::new(screen.clone());
        progress.live = false;
        for step in 0..1000 {
            let mut event = train(step);
            event.unix_ms = step;
            if let Kind::Train(train) = &mut event.kind {
                train.steps = 1000;
            }
            progress.event(&event);
        }
        assert_eq!(screen.lines.lock().unwrap_or_else(PoisonError::into_inner).len(), 11);
    }
}
