//! The progress of work whose size is known: one live line on a terminal, otherwise a few plain
//! lines.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::time::Instant;

use crate::terminal::report::{duration, rate};
use crate::terminal::screen::Screen;

/// Plain lines, one for each part of the work.
const PARTS: u64 = 10;

/// The progress of some work.
#[derive(Debug)]
pub(crate) struct Bar {
    screen: Screen,
    live: bool,
    /// What is counted, in the plural.
    what: &'static str,
    began: Instant,
    /// Plain lines that are written.
    shown: AtomicU64,
}

impl Drop for Bar {
    fn drop(&mut self) {
        self.screen.stop_live();
    }
}

impl Bar {
    /// Shows work on `screen`, until it is dropped.
    pub(crate) fn new(screen: Screen, what: &'static str) -> Self {
        let live = screen.start_live();
        Self { screen, live, what, began: Instant::now(), shown: AtomicU64::new(0) }
    }

    /// Shows that `done` of `all` is done. While `all` is 0, it is not known yet. Threads may call
    /// it at once.
    pub(crate) fn show(&self, done: u64, all: u64) {
        if self.live {
            let text = text(self.what, done, all, self.began.elapsed());
            return self.screen.set_live((all > 0).then_some((done, all)), text);
        }
        let Some(part) = (u128::from(done) * u128::from(PARTS)).checked_div(u128::from(all)) else { return };
        if self.shown.fetch_max(part as u64, Ordering::Relaxed) < part as u64 {
            self.screen.line(&text(self.what, done, all, self.began.elapsed()));
        }
    }
}

/// Returns the state of work that began some time ago.
fn text(what: &str, done: u64, all: u64, elapsed: Duration) -> String {
    if all == 0 {
        return format!("counting {what}");
    }
    let seconds = elapsed.as_secs_f64();
    let pace = if seconds > 0.0 { done as f64 / seconds } else { 0.0 };
    let left = match all.saturating_sub(done) {
        left if left > 0 && pace > 0.0 => {
            format!(", {} left", duration(Duration::from_secs_f64((left as f64 / pace).min(1e9))))
        }
        _ => String::new(),
    };
    format!("{done} of {all} {what}{left}, {} {what}/s", rate(pace))
}

#[cfg(test)]
mod tests {
    use std::sync::PoisonError;

    use super::*;

    #[test]
    fn a_line_has_what_is_done_and_the_time_that_is_left() {
        let text = |done, all, seconds| text("records", done, all, Duration::from_secs(seconds));
        assert_eq!(text(0, 0, 3), "counting records");
        assert_eq!(text(0, 10, 0), "0 of 10 records, 0.0 records/s");
        assert_eq!(text(200, 1000, 4), "200 of 1000 records, 16.0 s left, 50.0 records/s");
        assert_eq!(text(1000, 1000, 4), "1000 of 1000 records, 250 records/s");
    }

    #[test]
    fn plain_lines_come_at_each_tenth_and_none_while_the_whole_is_unknown() {
        let screen = Screen::default();
        let mut bar = Bar::new(screen.clone(), "records");
        bar.live = false;
        bar.show(0, 0);
        (0..=1000).for_each(|done| bar.show(done, 1000));
        // A thread that was late says nothing new.
        bar.show(500, 1000);
        let lines = screen.lines.lock().unwrap_or_else(PoisonError::into_inner).clone();
        assert_eq!(lines.len(), 10, "{lines:?}");
        assert!(lines[9].starts_with("1000 of 1000 records"), "{lines:?}");
    }
}
