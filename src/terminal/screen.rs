//! The terminal: facts go to stdout. On stderr one live line stands at the bottom, and everything
//! else above it. All output goes through this file, so that no line tears another one apart.

use std::fmt;
use std::io::{self, IsTerminal, Write};
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::Result;
use indicatif::{ProgressBar, ProgressStyle};

/// The reader of our stdout left, as `head` does. The program ends without a message, as others do.
#[derive(Debug)]
pub(crate) struct NobodyReads;

impl fmt::Display for NobodyReads {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("nobody reads the output")
    }
}

/// Returns the error of a failed write to stdout.
fn unwritten(error: io::Error) -> anyhow::Error {
    let nobody_reads = error.kind() == io::ErrorKind::BrokenPipe;
    let error = anyhow::Error::new(error);
    if nobody_reads { error.context(NobodyReads) } else { error.context("cannot write to stdout") }
}

/// The terminal. Clones share it.
#[derive(Clone, Debug, Default)]
pub(crate) struct Screen {
    live: Arc<Mutex<Option<ProgressBar>>>,
    /// The lines for stderr, which are not written in tests.
    #[cfg(test)]
    pub(crate) lines: Arc<Mutex<Vec<String>>>,
    /// The lines for stdout, which are not written in tests.
    #[cfg(test)]
    pub(crate) facts: Arc<Mutex<Vec<String>>>,
}

impl Screen {
    /// Writes a line, above the live one when there is one.
    pub(crate) fn line(&self, text: &str) {
        #[cfg(test)]
        self.lines.lock().unwrap_or_else(PoisonError::into_inner).push(text.to_owned());
        // A closed stderr is no reason to stop training.
        #[cfg(not(test))]
        self.above(|| drop(writeln!(io::stderr(), "{text}")));
    }

    /// Writes facts to stdout.
    ///
    /// # Errors
    /// [`NobodyReads`] them, or they cannot be written, e.g. into a file on a full disk.
    pub(crate) fn print(&self, text: &str) -> Result<()> {
        #[cfg(test)]
        self.facts.lock().unwrap_or_else(PoisonError::into_inner).push(text.to_owned());
        #[cfg(not(test))]
        self.above(|| {
            let mut stdout = io::stdout().lock();
            writeln!(stdout, "{}", text.trim_end()).and_then(|()| stdout.flush())
        })
        .map_err(unwritten)?;
        Ok(())
    }

    /// Starts the live line. Returns false if stderr is no terminal, and there is no live line.
    pub(crate) fn start_live(&self) -> bool {
        if !io::stderr().is_terminal() {
            return false;
        }
        let bar = ProgressBar::new(1);
        let style = ProgressStyle::with_template("{bar:10} {wide_msg}")
            .unwrap_or_else(|_| unreachable!("a constant"));
        bar.set_style(style);
        *self.live.lock().unwrap_or_else(PoisonError::into_inner) = Some(bar);
        true
    }

    /// Changes the live line, if there is one. `done` is a part and the whole; without it the bar
    /// stays.
    pub(crate) fn set_live(&self, done: Option<(u64, u64)>, text: String) {
        if let Some(bar) = &*self.live.lock().unwrap_or_else(PoisonError::into_inner) {
            if let Some((position, length)) = done {
                bar.set_length(length);
                bar.set_position(position);
            }
            bar.set_message(text);
        }
    }

    /// Removes the live line.
    pub(crate) fn stop_live(&self) {
        if let Some(bar) = self.live.lock().unwrap_or_else(PoisonError::into_inner).take() {
            bar.finish_and_clear();
        }
    }

    fn above<T>(&self, write: impl FnOnce() -> T) -> T {
        match &*self.live.lock().unwrap_or_else(PoisonError::into_inner) {
            Some(bar) => bar.suspend(write),
            None => write(),
        }
    }
}

/// The way of log lines to the terminal: one `write` is one line.
impl Write for Screen {
    fn write(&mut self, text: &[u8]) -> io::Result<usize> {
        self.above(|| io::stderr().write_all(text)).map(|()| text.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        io::stderr().flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_reader_that_left_is_no_error_worth_a_word() {
        let left = unwritten(io::ErrorKind::BrokenPipe.into());
        assert!(left.is::<NobodyReads>());
        let full = unwritten(io::ErrorKind::StorageFull.into());
        assert!(!full.is::<NobodyReads>());
        assert_eq!(full.to_string(), "cannot write to stdout");
    }
}
