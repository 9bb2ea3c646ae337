//! The newest lines of an output, numbered, within a limit of bytes. An agent has one for each
//! process, and the master another one.

use std::collections::VecDeque;

/// The newest lines.
#[derive(Clone, Debug)]
pub struct Tail {
    /// Lines that are kept, oldest first.
    lines: VecDeque<String>,
    /// Number of the newest line; lines are numbered from 1.
    newest: u64,
    /// Bytes of the lines that are kept, with the end of each line.
    bytes: usize,
    bytes_max: usize,
}

impl Tail {
    /// Creates a tail without lines, which keeps at most `bytes_max` bytes, and the newest line.
    pub fn new(bytes_max: usize) -> Self {
        Self { lines: VecDeque::new(), newest: 0, bytes: 0, bytes_max }
    }

    /// Appends a line, and forgets the oldest ones beyond the limit.
    pub fn push(&mut self, line: String) {
        self.bytes += line.len() + 1;
        self.newest += 1;
        self.lines.push_back(line);
        while self.bytes > self.bytes_max && self.lines.len() > 1 {
            let gone = self.lines.pop_front().map_or(0, |line| line.len() + 1);
            self.bytes -= gone;
        }
    }

    /// Returns the number of the newest line; 0: there is none.
    pub const fn newest(&self) -> u64 {
        self.newest
    }

    /// Returns lines with larger numbers than `after`, at most `bytes_max` bytes of them or one
    /// line, and the number of the first one.
    pub fn after(&self, after: u64, bytes_max: usize) -> (u64, Vec<String>) {
        let oldest = self.newest - self.lines.len() as u64 + 1;
        let first = (after + 1).max(oldest);
        let skip = usize::try_from(first - oldest).unwrap_or(usize::MAX);
        let (mut bytes, mut found) = (0, Vec::new());
        for line in self.lines.iter().skip(skip) {
            bytes += line.len() + 1;
            if bytes > bytes_max && !found.is_empty() {
                break;
            }
            found.push(line.clone());
        }
        (first, found)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_newest_lines_stay_with_their_numbers() {
        let mut tail = Tail::new(8);
        assert_eq!((tail.newest(), tail.after(0, 9)), (0, (1, vec![])));
        for line in ["one", "two", "three"] {
            tail.push(line.to_owned());
        }
        assert_eq!(tail.after(0, 99), (3, vec!["three".to_owned()]), "`two` and `three` take 10 bytes");
        assert_eq!(tail.after(3, 99), (4, vec![]));
        tail.push("a line that is longer than all".to_owned());
        assert_eq!(tail.after(0, 1).1.len(), 1);
    }

    proptest! {
        #[test]
        fn a_reader_that_keeps_up_misses_nothing(lines in proptest::collection::vec("[a-c]{0,6}", 0..40), at_once in 1usize..20) {
            let (mut tail, mut seen, mut after) = (Tail::new(1000), Vec::new(), 0);
            for line in &lines {
                tail.push(line.clone());
                let (first, found) = tail.after(after, at_once);
                prop_assert_eq!(first, after + 1);
                after += found.len() as u64;
                seen.extend(found);
            }
            prop_assert_eq!(after, tail.newest());
            prop_assert_eq!(seen, lines);
        }
    }
}
