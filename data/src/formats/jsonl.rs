//! JSON Lines: each line is an object, and each object a record. Lines without text are skipped.
//!
//! | value in the first line | column |
//! | --- | --- |
//! | number | `f64`, `[]` |
//! | `true`, `false` | `bool`, `[]` |
//! | string | its bytes (UTF-8), ragged `u8` |
//! | list of numbers, or empty | ragged `f64` |
//! | `null`, object, other list | none |
//!
//! Numbers are f64 even if all of a file are integers, because those of another file may not be. An
//! integer of 64 bits that f64 does not hold is refused. Columns are sorted by name, because the
//! keys of an object have no order. A value that the job does not use may be anything. A key that a
//! line lacks, or whose value is `null`, has no value there. A line with another kind of value than
//! the first line has, or one that is no object, is broken as a whole.

use std::fmt;
use std::path::Path;
use std::sync::Arc;

use proto::column::{ColumnSpec, ElementType};
use serde::de::{DeserializeSeed, Deserializer, Error as _, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Value};

use crate::column::Column;
use crate::cuts::{BLOCK_BYTES, Cuts};
use crate::error::{Result, malformed, wrong};
use crate::format::{Outline, Source};
use crate::object::{Content, Object};
use crate::observer::Observer;
use crate::pass::{Distinct, Learnt, Pass};
use crate::room;

/// Text that some editors write before the first line.
const BYTE_ORDER_MARK: &[u8] = b"\xEF\xBB\xBF";

/// Opens a file.
///
/// # Errors
/// There is no line, or the first one is no object with a column.
pub(crate) fn open(object: &Object, pass: Pass<'_>) -> Result<Box<dyn Source>> {
    let (mut cuts, mut numbers) = (Cuts::default(), Vec::new());
    let (mut columns, mut values) = (Vec::new(), None);
    let content = each_line(object, pass.observer, |number, begin, line| {
        if cuts.records().is_empty() {
            columns = columns_of(object.path(), number, line)?;
            values = pass.values(&columns);
        }
        cuts.add(begin);
        if numbers.len() < cuts.records().len() {
            numbers.push(number);
        }
        if let Some(values) = &mut values {
            let mut decoder = Decoder::new(vec![values.batch()]);
            decoder.add(line, number);
            values.add(&decoder.columns[0]);
        }
        Ok(())
    })?;
    if cuts.records().is_empty() {
        return wrong(object.path(), "no line, so that the columns are unknown; leave the file out");
    }
    let learnt = Learnt { content, values: values.and_then(Distinct::whole) };
    let outline = Outline { columns, blocks: cuts.records().to_vec() };
    Ok(Box::new(Jsonl { object: object.clone(), cuts, numbers, outline, learnt }))
}

/// Returns the columns of a file, sorted by name, as its first line with text has them.
///
/// # Errors
/// The line is no object with a column.
fn columns_of(path: &Path, number: usize, line: &[u8]) -> Result<Vec<ColumnSpec>> {
    let first: Map<String, Value> =
        serde_json::from_slice(line).map_err(|error| malformed(path, at_line(number, &error)))?;
    let mut columns: Vec<_> = first.iter().filter_map(|(name, value)| column(name, value)).collect();
    columns.sort_by(|a, b| a.name.cmp(&b.name));
    if columns.is_empty() {
        return wrong(
            path,
            "the first line has no number, no text and no list of numbers, so there are no columns",
        );
    }
    Ok(columns)
}

/// Calls `take` with each line with text, its number from 1, and its place in the file. Returns the
/// identity of the content, if the file is on another machine.
///
/// # Errors
/// The file cannot be read, or a line is longer than a file that must be in memory may be, or the
/// error of `take`.
fn each_line(
    object: &Object,
    observer: &dyn Observer,
    mut take: impl FnMut(usize, usize, &[u8]) -> Result<()>,
) -> Result<Option<Content>> {
    let (mut reader, mut begun) = (object.learning_reader(), Vec::new());
    let (mut number, mut begin, mut observed) = (0, 0, 0);
    let mut line = |line: &[u8]| {
        number += 1;
        let mark = if begin == 0 && line.starts_with(BYTE_ORDER_MARK) { BYTE_ORDER_MARK.len() } else { 0 };
        let place = begin + mark;
        begin += line.len();
        if begin - observed >= BLOCK_BYTES {
            observed = begin;
            observer.advance();
        }
        let text = &line[mark..];
        if text.trim_ascii().is_empty() { Ok(()) } else { take(number, place, text) }
    };
    loop {
        let window = reader.window()?;
        if window.is_empty() {
            break;
        }
        observer.advance();
        for part in window.split_inclusive(|&byte| byte == b'\n') {
            let is_whole = part.ends_with(b"\n");
            if begun.is_empty() && is_whole {
                line(part)?;
                continue;
            }
            begun.extend_from_slice(part);
            if is_whole {
                line(&begun)?;
                begun.clear();
            }
        }
        let bytes_max = room::bytes_max();
        if begun.len() as u64 > bytes_max {
            return wrong(
                object.path(),
                format!("a line of more than {bytes_max} bytes (data_memory); is this a JSON Lines file?"),
            );
        }
    }
    if !begun.is_empty() {
        line(&begun)?;
    }
    Ok(reader.content())
}

/// Returns the lines with text of a block, each with the number of lines before it.
fn lines(text: &[u8]) -> impl Iterator<Item = (usize, &[u8])> {
    let lines = text.split_inclusive(|&byte| byte == b'\n').enumerate();
    lines.filter(|(_, line)| !line.trim_ascii().is_empty())
}

/// Returns the column of a value of the first line.
fn column(name: &str, value: &Value) -> Option<ColumnSpec> {
    match value {
        Value::Number(_) => Some(ColumnSpec::fixed(name, ElementType::F64, [])),
        Value::Bool(_) => Some(ColumnSpec::fixed(name, ElementType::Bool, [])),
        Value::String(_) => Some(ColumnSpec::ragged(name, ElementType::U8, [])),
        Value::Array(items) if items.iter().all(Value::is_number) => {
            Some(ColumnSpec::ragged(name, ElementType::F64, []))
        }
        Value::Array(_) | Value::Object(_) | Value::Null => None,
    }
}

struct Jsonl {
    object: Object,
    cuts: Cuts,
    /// Number of the first line of each block, from 1.
    numbers: Vec<usize>,
    outline: Outline,
    learnt: Learnt,
}

impl Source for Jsonl {
    fn outline(&self) -> &Outline {
        &self.outline
    }

    /// Decodes columns. A line is broken if it is no object or has another kind of value than the
    /// first line.
    ///
    /// # Errors
    /// The file cannot be read, or its lines are others than when it was opened.
    fn read(&self, block: usize, columns: &[usize]) -> Result<Vec<Column>> {
        let range = self.cuts.range(block, self.object.len());
        let text = self.object.slice_to_keep(range.clone())?;
        let records = self.outline.blocks[block] as usize;
        let column = |&at: &usize| Column::with_capacity(self.outline.columns[at].clone(), records);
        let mut decoder = Decoder::new(columns.iter().map(column).collect());
        for (before, line) in lines(&text) {
            decoder.add(line, self.numbers[block] + before);
        }
        let out = decoder.columns;
        match out.iter().find(|column| column.records() != records) {
            Some(column) => wrong(
                self.object.path(),
                format!("a block of {records} lines has {} now; restore the file", column.records()),
            ),
            None => Ok(out),
        }
    }

    fn content(&self, object: &Object, content: Content, observer: &dyn Observer) -> Result<Content> {
        let known = self.learnt.content_after(content, object.len());
        known.map_or_else(|| object.hash(content, observer), Ok)
    }

    fn distinct(&self, column: usize) -> Option<&Distinct> {
        self.learnt.values_of(column)
    }
}

/// Reads lines into the columns that are wanted.
struct Decoder {
    columns: Vec<Column>,
    /// Whether the line has a value of each column.
    seen: Vec<bool>,
    scratch: Vec<f64>,
}

impl Decoder {
    fn new(columns: Vec<Column>) -> Self {
        Self { seen: vec![false; columns.len()], columns, scratch: Vec::new() }
    }

    /// Appends the record of a line, which may be broken as a whole. `number` is that of the line.
    fn add(&mut self, line: &[u8], number: usize) {
        let Self { columns, seen, scratch } = self;
        let record = columns.first().map_or(0, Column::records);
        seen.fill(false);
        let mut json = serde_json::Deserializer::from_slice(line);
        let read = Line { columns, seen, scratch }.deserialize(&mut json).and_then(|()| json.end());
        let Err(error) = read else { return };
        let mut reason: Option<Arc<str>> = None;
        for column in columns {
            let describe = || reason.get_or_insert_with(|| at_line(number, &error).into()).clone();
            // Columns before the place of the error may have their value of this line.
            match column.records() == record {
                true => column.push_broken(describe),
                false => column.set_broken(record, describe),
            }
        }
    }
}

/// Says what is wrong with line `number` of a file.
fn at_line(number: usize, error: &serde_json::Error) -> String {
    let message = error.to_string();
    // The parser's own position counts from the begin of the line.
    let message = message.split(" at line ").next().unwrap_or_default();
    format!("line {number}, column {}: {message}; mend the line", error.column())
}

/// Reads one line into the columns that are wanted.
struct Line<'a> {
    columns: &'a mut [Column],
    /// Whether the line has a value of each column.
    seen: &'a mut [bool],
    scratch: &'a mut Vec<f64>,
}

impl<'de> DeserializeSeed<'de> for Line<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for Line<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object, {\"column\": value, ..}")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        while let Some(at) = map.next_key_seed(Key(self.columns))? {
            let Some(at) = at else {
                map.next_value::<IgnoredAny>()?;
                continue;
            };
            let column = &mut self.columns[at];
            if std::mem::replace(&mut self.seen[at], true) {
                return Err(A::Error::custom(format_args!("`{}` comes twice", column.spec().name)));
            }
            map.next_value_seed(Cell { column, scratch: self.scratch })?;
        }
        let absent = self.columns.iter_mut().zip(&*self.seen).filter(|(_, seen)| !**seen);
        absent.for_each(|(column, _)| column.push_missing());
        Ok(())
    }
}

/// Finds a key among the wanted columns.
struct Key<'a>(&'a [Column]);

impl<'de> DeserializeSeed<'de> for Key<'_> {
    type Value = Option<usize>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Option<usize>, D::Error> {
        deserializer.deserialize_str(self)
    }
}

impl Visitor<'_> for Key<'_> {
    type Value = Option<usize>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the name of a column")
    }

    fn visit_str<E>(self, name: &str) -> Result<Option<usize>, E> {
        Ok(self.0.iter().position(|column| column.spec().name == name))
    }
}

/// Appends one value to a column.
struct Cell<'a> {
    column: &'a mut Column,
    scratch: &'a mut Vec<f64>,
}

impl Cell<'_> {
    /// Returns whether the column has values of this type.
    fn takes(&self, dtype: ElementType, ragged: bool) -> bool {
        (self.column.spec().dtype, self.column.spec().ragged) == (dtype, ragged)
    }
}

impl<'de> DeserializeSeed<'de> for Cell<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        if self.takes(ElementType::F64, false) {
            let value = deserializer.deserialize_any(OrNull(Number(&self.column.spec().name)))?;
            match value {
                Some(value) => self.column.push(&value.to_le_bytes()),
                None => self.column.push_missing(),
            }
            return Ok(());
        }
        deserializer.deserialize_any(self)
    }
}

/// Reads a number, or `null`.
struct OrNull<'a>(Number<'a>);

impl Visitor<'_> for OrNull<'_> {
    type Value = Option<f64>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.expecting(f)
    }

    fn visit_unit<E>(self) -> Result<Option<f64>, E> {
        Ok(None)
    }

    fn visit_f64<E: serde::de::Error>(self, value: f64) -> Result<Option<f64>, E> {
        self.0.visit_f64(value).map(Some)
    }

    fn visit_i64<E: serde::de::Error>(self, value: i64) -> Result<Option<f64>, E> {
        self.0.visit_i64(value).map(Some)
    }

    fn visit_u64<E: serde::de::Error>(self, value: u64) -> Result<Option<f64>, E> {
        self.0.visit_u64(value).map(Some)
    }
}

impl<'de> Visitor<'de> for Cell<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = &self.column.spec().name;
        let kind = match self.column.spec().dtype {
            ElementType::Bool => "true or false",
            ElementType::U8 => "a text",
            _ => "a list of numbers",
        };
        write!(f, "{kind} in `{name}`, as in the first line")
    }

    fn visit_unit<E>(self) -> Result<(), E> {
        self.column.push_missing();
        Ok(())
    }

    fn visit_bool<E: serde::de::Error>(self, value: bool) -> Result<(), E> {
        if !self.takes(ElementType::Bool, false) {
            return Err(E::invalid_type(serde::de::Unexpected::Bool(value), &self));
        }
        self.column.push(&[u8::from(value)]);
        Ok(())
    }

    fn visit_str<E: serde::de::Error>(self, value: &str) -> Result<(), E> {
        if !self.takes(ElementType::U8, true) {
            return Err(E::invalid_type(serde::de::Unexpected::Str(value), &self));
        }
        self.column.push(value.as_bytes());
        Ok(())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<(), A::Error> {
        if !self.takes(ElementType::F64, true) {
            return Err(A::Error::invalid_type(serde::de::Unexpected::Seq, &self));
        }
        self.scratch.clear();
        while let Some(value) = list.next_element_seed(Number(&self.column.spec().name))? {
            self.scratch.push(value);
        }
        self.column.push(bytemuck::cast_slice(self.scratch));
        Ok(())
    }
}

/// Reads a number of the column of this name.
struct Number<'a>(&'a str);

impl<'de> DeserializeSeed<'de> for Number<'_> {
    type Value = f64;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<f64, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl Visitor<'_> for Number<'_> {
    type Value = f64;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a number in `{}`, as in the first line", self.0)
    }

    fn visit_f64<E>(self, value: f64) -> Result<f64, E> {
        Ok(value)
    }

    fn visit_i64<E: serde::de::Error>(self, value: i64) -> Result<f64, E> {
        exact(i128::from(value), self.0)
    }

    fn visit_u64<E: serde::de::Error>(self, value: u64) -> Result<f64, E> {
        exact(i128::from(value), self.0)
    }
}

/// Returns an integer as f64.
///
/// # Errors
/// f64 has no such integer.
fn exact<E: serde::de::Error>(value: i128, name: &str) -> Result<f64, E> {
    let float = value as f64;
    if float as i128 == value {
        return Ok(float);
    }
    Err(E::custom(format_args!(
        "`{name}` = {value} is an integer that 64-bit floats do not have; use a format with integers, such as Parquet"
    )))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use proptest::prelude::*;

    use super::*;
    use crate::column::Fault;

    fn source(text: &[u8]) -> Result<Box<dyn Source>> {
        open(&Object::copy(Path::new("a.jsonl"), text.to_vec()), Pass::plain())
    }

    fn read(text: &[u8]) -> Result<Vec<Column>> {
        let source = source(text)?;
        let all: Vec<_> = (0..source.outline().columns.len()).collect();
        let mut blocks = (0..source.outline().blocks.len()).map(|block| source.read(block, &all));
        blocks.next().expect("a file has a line")
    }

    fn error(text: &str) -> String {
        read(text.as_bytes()).unwrap_err().to_string()
    }

    /// Returns why record 1 of a file of two lines has no value of each column.
    fn second(text: &str) -> Vec<Option<String>> {
        let columns = read(text.as_bytes()).unwrap();
        let said = |fault: Fault<'_>| match fault {
            Fault::Missing => "missing".to_owned(),
            Fault::Broken(reason) => reason.to_owned(),
        };
        assert!(columns.iter().all(|column| (column.records(), column.fault(0)) == (2, None)));
        columns.iter().map(|column| column.fault(1).map(said)).collect()
    }

    #[test]
    fn the_first_line_gives_the_columns_and_they_are_sorted_by_name() {
        let text = r#"{"y": 1, "text": "né\n", "new": true, "x": [1, 2.5], "no": null, "deep": {"a": 1}}

            {"x": [], "new": false, "text": "", "y": -2e3, "more": [[1]]}"#;
        let columns = read(text.as_bytes()).unwrap();
        let specs: Vec<_> = columns.iter().map(|column| column.spec().to_string()).collect();
        assert_eq!(specs, ["`new` bool[]", "`text` u8[any]", "`x` f64[any]", "`y` f64[]"]);
        assert_eq!(columns[0].bytes(), [1, 0]);
        assert_eq!((columns[1].record(0), columns[1].record(1)), ("né\n".as_bytes(), &b""[..]));
        assert_eq!((columns[2].values(), columns[2].ends()), (Some(&[1.0, 2.5][..]), Some(&[2, 2][..])));
        assert_eq!(columns[3].values(), Some(&[1.0, -2000.0][..]));
    }

    #[test]
    fn a_line_that_differs_has_its_number() {
        let second =
            |line: &str| second(&format!("\n{{\"x\": 1, \"t\": \"a\", \"v\": [1], \"b\": true}}\n{line}\n"));
        let good = r#"{"x": 2, "t": "", "v": [], "b": false}"#;
        assert_eq!(second(good), [None, None, None, None]);
        for (from, to, expected) in [
            ("\"x\": 2", "\"x\": 2, \"x\": 3", "`x` comes twice"),
            ("2", "\"2\"", "invalid type: string \"2\", expected a number in `x`, as in the first line"),
            ("2", "9007199254740993", "`x` = 9007199254740993 is an integer that 64-bit floats do not have"),
            ("\"t\": \"\"", "\"t\": 3", "invalid type: integer `3`, expected a text in `t`"),
            ("\"t\": \"\"", "\"t\": [3]", "invalid type: sequence, expected a text in `t`"),
            ("[]", "[true]", "invalid type: boolean `true`, expected a number in `v`"),
            ("[]", "\"\"", "invalid type: string \"\", expected a list of numbers in `v`"),
            ("false", "0", "invalid type: integer `0`, expected true or false in `b`"),
            ("}", "} {}", "trailing characters"),
            ("}", "", "line 3"),
        ] {
            // The whole line is broken, because its end is not known.
            for reason in second(&good.replacen(from, to, 1)) {
                let reason = reason.expect("a broken line");
                assert!(reason.contains("line 3, column ") && reason.contains(expected), "{reason}");
            }
        }
        let reason = second("[1]").swap_remove(0).expect("a broken line");
        assert!(reason.contains("expected an object, {\"column\": value, ..}"), "{reason}");
    }

    #[test]
    fn null_and_a_key_that_a_line_lacks_are_missing_values() {
        let second =
            |line: &str| second(&format!("{{\"x\": 1, \"t\": \"a\", \"v\": [1], \"b\": true}}\n{line}\n"));
        let missing = || Some("missing".to_owned());
        assert_eq!(second(r#"{"t": "", "v": [2]}"#), [missing(), None, None, missing()]);
        assert_eq!(second(r#"{"x": null, "t": null, "v": null, "b": null}"#), [(); 4].map(|()| missing()));
        let reason = second(r#"{"v": [null], "x": 1}"#).swap_remove(0).expect("a broken line");
        assert!(reason.contains("invalid type: null, expected a number in `v`"), "{reason}");
    }

    #[test]
    fn a_value_that_nobody_uses_may_be_anything() {
        let source = source(b"{\"a\": 1, \"b\": 2}\n{\"b\": 3}\n{\"b\": 4, \"a\": []}").unwrap();
        assert_eq!(source.read(0, &[1]).unwrap()[0].values(), Some(&[2.0, 3.0, 4.0][..]));
        let column = source.read(0, &[0]).unwrap().remove(0);
        assert_eq!((column.fault(0), column.fault(1)), (None, Some(Fault::Missing)));
        assert!(matches!(column.fault(2), Some(Fault::Broken(_))));
    }

    #[test]
    fn large_files_have_several_blocks() {
        let line = format!("{{\"t\": \"{}\", \"n\": 1}}\n", "x".repeat(999_999));
        let source = source(line.repeat(11).as_bytes()).unwrap();
        assert_eq!(source.outline().blocks, [5, 5, 1]);
        for (block, &records) in source.outline().blocks.iter().enumerate() {
            assert_eq!(source.read(block, &[0]).unwrap()[0].records() as u64, records);
        }
        let broken = line.repeat(10) + "{\"n\": []}";
        let source = self::source(broken.as_bytes()).unwrap();
        let column = source.read(2, &[0]).unwrap().remove(0);
        let Some(Fault::Broken(reason)) = column.fault(0) else { panic!("{:?}", column.fault(0)) };
        assert!(reason.starts_with("line 11, column "), "{reason}");
    }

    #[test]
    fn files_without_columns_are_refused() {
        assert!(error("").contains("a.jsonl: no line"));
        assert!(error(" \n\t\r\n").contains("a.jsonl: no line"));
        assert!(error("\n{}").contains("there are no columns"));
        assert!(error("\n1\n").contains("line 2"));
        assert!(error("{\"x\":").contains("line 1, column 5: EOF"));
        assert_eq!(read(b"\xEF\xBB\xBF{\"x\":1}").unwrap()[0].records(), 1);
    }

    proptest! {
        #[test]
        fn what_is_written_is_read(
            rows in proptest::collection::vec(
                (-1e300f64..1e300, ".{0,9}", any::<bool>(), proptest::collection::vec(any::<i32>(), 0..4)),
                1..9,
            ),
        ) {
            let line = |(n, t, b, v): &(f64, String, bool, Vec<i32>)| {
                serde_json::json!({"n": n, "t": t, "b": b, "v": v}).to_string() + "\n"
            };
            let text: String = rows.iter().map(line).collect();
            let columns = read(text.as_bytes()).unwrap();
            for (at, (n, t, b, v)) in rows.iter().enumerate() {
                let v: Vec<f64> = v.iter().map(|&value| f64::from(value)).collect();
                prop_assert_eq!(columns[0].record(at), [u8::from(*b)]);
                prop_assert_eq!(columns[1].record(at), n.to_le_bytes());
                prop_assert_eq!(columns[2].record(at), t.as_bytes());
                prop_assert_eq!(columns[3].record(at), bytemuck::cast_slice::<f64, u8>(&v));
            }
        }

        #[test]
        fn any_text_is_read_or_refused(text in "(\\{\"[ab]\": ?[-0-9e.\"\\[\\],{}ab]{0,6}\\}?\n?){0,5}") {
            let _ = read(text.as_bytes());
        }

        #[test]
        fn any_bytes_are_read_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..60)) {
            let _ = read(&bytes);
        }
    }
}
