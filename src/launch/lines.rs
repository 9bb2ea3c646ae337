//! Output of a process as lines, and the last lines of it. Pure.

use std::collections::VecDeque;

use proto::script::LINE_BYTES_MAX as LINE_MAX;

use crate::launch::redaction::Redaction;

/// Cuts a stream of bytes into lines.
///
/// A carriage return takes a line back, as a terminal shows it: of a progress bar that rewrites its
/// line, only the last state counts.
#[derive(Debug, Default)]
pub(crate) struct Lines {
    /// The begin of a line whose end has not come.
    begun: Vec<u8>,
    /// The last byte was a carriage return.
    returned: bool,
    /// Values through which no line is cut.
    secrets: Redaction,
}

impl Lines {
    /// Creates the lines of a process with these secrets.
    pub(crate) fn of(secrets: Redaction) -> Self {
        Self { secrets, ..Self::default() }
    }

    /// Takes further bytes, and gives each line that ends in them to `line`.
    pub(crate) fn push(&mut self, bytes: &[u8], mut line: impl FnMut(&str)) {
        for &byte in bytes {
            if byte == b'\n' {
                self.give(&mut line);
                continue;
            }
            if std::mem::take(&mut self.returned) {
                self.begun.clear();
            }
            if byte == b'\r' {
                self.returned = true;
                continue;
            }
            self.begun.push(byte);
            if self.begun.len() == LINE_MAX {
                let rest = self.begun.split_off(LINE_MAX - self.secrets.begun(&self.begun));
                self.give(&mut line);
                self.begun = rest;
            }
        }
    }

    /// Gives a last line that has no end to `line`.
    pub(crate) fn finish(&mut self, mut line: impl FnMut(&str)) {
        if !self.begun.is_empty() {
            self.give(&mut line);
        }
    }

    fn give(&mut self, line: &mut impl FnMut(&str)) {
        line(&String::from_utf8_lossy(&self.begun));
        self.begun.clear();
        self.returned = false;
    }
}

/// The last lines of an output.
#[derive(Debug)]
pub(crate) struct Last {
    lines: VecDeque<String>,
    count_max: usize,
}

impl Last {
    /// Creates a memory of at most `count_max` lines.
    pub(crate) fn new(count_max: usize) -> Self {
        Self { lines: VecDeque::new(), count_max }
    }

    /// Takes a line, and forgets the oldest one beyond the limit.
    pub(crate) fn push(&mut self, line: &str) {
        if self.lines.len() == self.count_max {
            self.lines.pop_front();
        }
        self.lines.push_back(line.to_owned());
    }

    /// Returns the lines, oldest first.
    pub(crate) fn lines(&self) -> Vec<String> {
        self.lines.iter().cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn cut(parts: &[&[u8]]) -> Vec<String> {
        let (mut lines, mut found) = (Lines::default(), Vec::new());
        parts.iter().for_each(|part| lines.push(part, |line| found.push(line.to_owned())));
        lines.finish(|line| found.push(line.to_owned()));
        found
    }

    #[test]
    fn lines_end_where_they_end_however_the_bytes_come() {
        assert_eq!(cut(&[b"one\ntw", b"o\n\nlast"]), ["one", "two", "", "last"]);
        assert_eq!(cut(&[b"dos\r\nnext\r", b"\n"]), ["dos", "next"]);
        assert_eq!(cut(&[b" 1%\r 50%\r100%\ndone\n"]), ["100%", "done"]);
        assert_eq!(cut(&[b"\xff\n"]), ["\u{fffd}"]);
        assert!(cut(&[b""]).is_empty());
    }

    #[test]
    fn a_line_without_an_end_takes_no_more_memory_than_the_longest() {
        let long = vec![b'x'; 2 * LINE_MAX + 1];
        assert_eq!(cut(&[&long]).iter().map(String::len).collect::<Vec<_>>(), [LINE_MAX, LINE_MAX, 1]);
        let mut lines = Lines::default();
        for _ in 0..LINE_MAX {
            lines.push(b"\r 42%", |line| panic!("no line has ended: {line}"));
        }
        assert!(lines.begun.len() <= LINE_MAX);
    }

    proptest! {
        #[test]
        fn cutting_does_not_depend_on_the_parts(bytes in "[a\r\n]{0,30}", at in 0usize..30) {
            let at = at.min(bytes.len());
            let (front, back) = bytes.as_bytes().split_at(at);
            prop_assert_eq!(cut(&[front, back]), cut(&[bytes.as_bytes()]));
        }

        #[test]
        fn the_last_lines_are_kept(count in 0usize..120) {
            let mut last = Last::new(50);
            (0..count).for_each(|number| last.push(&number.to_string()));
            let expected: Vec<_> = (count.saturating_sub(50)..count).map(|number| number.to_string()).collect();
            prop_assert_eq!(last.lines(), expected);
        }
    }
}
