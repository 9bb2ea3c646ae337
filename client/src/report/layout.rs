//! The layout of `summary.json`: one line for each value, and one for each row of a matrix.

use std::io::{self, Write};

use serde::Serialize;
use serde_json::Serializer;
use serde_json::ser::{Formatter, PrettyFormatter};

/// Writes a list within a list on one line, and all else as [`PrettyFormatter`] does.
#[derive(Default)]
struct Layout {
    pretty: PrettyFormatter<'static>,
    /// Number of lists that are open.
    lists: usize,
}

impl Layout {
    /// Returns whether the innermost list is on one line.
    const fn is_row(&self) -> bool {
        self.lists > 1
    }
}

impl Formatter for Layout {
    fn begin_array<W: ?Sized + Write>(&mut self, to: &mut W) -> io::Result<()> {
        self.lists += 1;
        if self.is_row() { to.write_all(b"[") } else { self.pretty.begin_array(to) }
    }

    fn end_array<W: ?Sized + Write>(&mut self, to: &mut W) -> io::Result<()> {
        let is_row = self.is_row();
        self.lists -= 1;
        if is_row { to.write_all(b"]") } else { self.pretty.end_array(to) }
    }

    fn begin_array_value<W: ?Sized + Write>(&mut self, to: &mut W, first: bool) -> io::Result<()> {
        match (self.is_row(), first) {
            (true, true) => Ok(()),
            (true, false) => to.write_all(b", "),
            (false, first) => self.pretty.begin_array_value(to, first),
        }
    }

    fn end_array_value<W: ?Sized + Write>(&mut self, to: &mut W) -> io::Result<()> {
        if self.is_row() { Ok(()) } else { self.pretty.end_array_value(to) }
    }

    fn begin_object<W: ?Sized + Write>(&mut self, to: &mut W) -> io::Result<()> {
        self.pretty.begin_object(to)
    }

    fn end_object<W: ?Sized + Write>(&mut self, to: &mut W) -> io::Result<()> {
        self.pretty.end_object(to)
    }

    fn begin_object_key<W: ?Sized + Write>(&mut self, to: &mut W, first: bool) -> io::Result<()> {
        self.pretty.begin_object_key(to, first)
    }

    fn begin_object_value<W: ?Sized + Write>(&mut self, to: &mut W) -> io::Result<()> {
        self.pretty.begin_object_value(to)
    }

    fn end_object_value<W: ?Sized + Write>(&mut self, to: &mut W) -> io::Result<()> {
        self.pretty.end_object_value(to)
    }
}

/// Returns a value as JSON over several lines, with an end of line.
pub(super) fn to_text(value: &impl Serialize) -> String {
    let mut text = Vec::new();
    let mut to = Serializer::with_formatter(&mut text, Layout::default());
    value.serialize(&mut to).expect("plain fields");
    text.push(b'\n');
    String::from_utf8(text).expect("JSON is UTF-8")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn without_lists_in_lists_it_is_the_usual_layout() {
        for value in [json!({}), json!({ "a": 1, "b": [], "c": [{ "d": "x" }, 2], "e": { "f": null } })] {
            assert_eq!(to_text(&value), serde_json::to_string_pretty(&value).unwrap() + "\n");
        }
    }

    #[test]
    fn a_row_is_a_line() {
        assert_eq!(to_text(&json!([[1, 2], [], [3]])), "[\n  [1, 2],\n  [],\n  [3]\n]\n");
    }
}
