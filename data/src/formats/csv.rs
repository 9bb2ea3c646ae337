//! Text whose cells are separated by commas or tabs: a line is a record. All cells are numbers, as
//! f64, in the columns that a job uses. Other columns may hold anything. A cell that is empty or
//! `NA` has no value.

use std::io::{self, Read};
use std::path::Path;
use std::sync::Arc;

use csv::{ErrorKind, Reader, ReaderBuilder, StringRecord, Trim};
use proto::column::{ColumnSpec, ElementType};

use crate::column::Column;
use crate::cuts::{BLOCK_BYTES, Cuts};
use crate::error::{Error, Result, malformed, wrong};
use crate::format::{Outline, Source};
use crate::object::{Content, Object};
use crate::observer::Observer;
use crate::pass::{Distinct, Learnt, Pass};
use crate::room;

/// Cells without a value.
const MISSING: [&str; 2] = ["", "NA"];

/// Bytes that a reader takes at once. They may belong to several records.
const BUFFER_BYTES: usize = 8 << 10;

/// Characters of a cell that an error shows.
const CELL_SHOWN: usize = 60;

/// How a file is written.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Dialect {
    /// Whether the first line names the columns.
    pub(crate) header: bool,
    /// Byte between two cells.
    pub(crate) delimiter: u8,
}

impl Dialect {
    /// Says what to do about a file of one column.
    const fn hint(self) -> &'static str {
        match self.delimiter {
            b'\t' => "; cells are separated by tabs in the format `tsv`, by commas in `csv`",
            _ => "; cells are separated by commas in the format `csv`, by tabs in `tsv`",
        }
    }
}

/// Opens a file. Without a header the columns' names are their numbers, from 0.
///
/// # Errors
/// Lines of different lengths, bytes that are no text, less than two columns, or a record that does
/// not fit into `data_memory`.
pub(crate) fn open(object: &Object, dialect: Dialect, pass: Pass<'_>) -> Result<Box<dyn Source>> {
    open_within(object, dialect, pass, room::bytes_max())
}

/// Opens a file whose records have at most `record_bytes_max` bytes, or a few more.
fn open_within(
    object: &Object,
    dialect: Dialect,
    pass: Pass<'_>,
    record_bytes_max: u64,
) -> Result<Box<dyn Source>> {
    let bytes = object.learning_reader();
    let failure = bytes.failure();
    let broken = |error: csv::Error| {
        failure.or(|| match line_number(object, place(error.position())) {
            Ok(line) => broken(object.path(), line, &error),
            Err(error) => error,
        })
    };
    let mut reader = reader(Bounded::new(bytes, pass.observer, record_bytes_max), dialect);
    // Without `has_headers` this is the first record, which is read again below.
    let names = reader.headers().map_err(broken)?.clone();
    if names.len() < 2 {
        return wrong(
            object.path(),
            format!(
                "{} columns; a record needs at least one feature and the label{}",
                names.len(),
                dialect.hint()
            ),
        );
    }
    let name = |(at, name): (usize, &str)| if dialect.header { name.to_owned() } else { at.to_string() };
    let column = |name| ColumnSpec::fixed(name, ElementType::F64, []);
    let columns: Vec<_> = names.iter().enumerate().map(name).map(column).collect();
    let mut values = pass.values(&columns);
    let (mut cuts, mut lines, mut line) = (Cuts::default(), Vec::new(), StringRecord::new());
    reader.get_mut().renew();
    while reader.read_record(&mut line).map_err(broken)? {
        reader.get_mut().renew();
        cuts.add(place(line.position()));
        if lines.len() < cuts.records().len() {
            lines.push(line.position().map_or(1, |position| position.line() as usize));
        }
        if let Some(values) = &mut values {
            let mut value = values.batch();
            // Where a broken cell is, is said when the record is read.
            push(&mut value, line.get(values.column()).unwrap_or_default(), || "".into());
            values.add(&value);
        }
    }
    let learnt =
        Learnt { content: reader.get_ref().bytes.content(), values: values.and_then(Distinct::whole) };
    // A header alone is a file without records, which has its columns nevertheless.
    let blocks = if cuts.records().is_empty() { vec![0] } else { cuts.records().to_vec() };
    let outline = Outline { columns, blocks };
    Ok(Box::new(Csv { object: object.clone(), dialect, cuts, lines, outline, learnt }))
}

/// Appends a cell to a column. `describe` says where it is if it is broken.
fn push(column: &mut Column, cell: &str, describe: impl FnOnce() -> Arc<str>) {
    let value = cell.parse::<f64>().ok().filter(|&value| (value as f32).is_finite());
    match value {
        Some(value) => column.push(&value.to_le_bytes()),
        None if MISSING.contains(&cell) => column.push_missing(),
        None => column.push_broken(describe),
    }
}

/// Reads at most so many bytes for one record. A quote without its partner makes one record of all
/// that follows.
struct Bounded<'a, R> {
    bytes: R,
    observer: &'a dyn Observer,
    record_bytes_max: u64,
    /// Bytes that the record may still take.
    left: u64,
    /// Bytes since the last call of the observer.
    unobserved: usize,
}

impl<'a, R> Bounded<'a, R> {
    const fn new(bytes: R, observer: &'a dyn Observer, record_bytes_max: u64) -> Self {
        let left = record_bytes_max.saturating_add(BUFFER_BYTES as u64);
        Self { bytes, observer, record_bytes_max, left, unobserved: 0 }
    }

    /// Begins the next record.
    const fn renew(&mut self) {
        // The last bytes that were taken may belong to the records behind.
        self.left = self.record_bytes_max.saturating_add(BUFFER_BYTES as u64);
    }
}

impl<R: Read> Read for Bounded<'_, R> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        let bytes = self.bytes.read(out)?;
        let too_long = || {
            let most = self.record_bytes_max;
            io::Error::other(format!("a record of more than {most} bytes (data_memory); is a quote missing?"))
        };
        self.left = self.left.checked_sub(bytes as u64).ok_or_else(too_long)?;
        self.unobserved += bytes;
        if self.unobserved >= BLOCK_BYTES {
            self.unobserved = 0;
            self.observer.advance();
        }
        Ok(bytes)
    }
}

struct Csv {
    object: Object,
    dialect: Dialect,
    cuts: Cuts,
    /// Line in which each block begins, from 1.
    lines: Vec<usize>,
    outline: Outline,
    learnt: Learnt,
}

impl Source for Csv {
    fn outline(&self) -> &Outline {
        &self.outline
    }

    /// Decodes columns. A cell that is no number, or none that an f32 holds, is broken.
    ///
    /// # Errors
    /// The file cannot be read, or its lines are others than when it was opened.
    fn read(&self, block: usize, columns: &[usize]) -> Result<Vec<Column>> {
        let records = self.outline.blocks[block] as usize;
        let column = |&at: &usize| Column::with_capacity(self.outline.columns[at].clone(), records);
        let mut out: Vec<_> = columns.iter().map(column).collect();
        if records == 0 {
            return Ok(out);
        }
        let range = self.cuts.range(block, self.object.len());
        let text = self.object.slice_to_keep(range.clone())?;
        let number = |position: Option<&csv::Position>| self.lines[block] + lines_before(&text, position);
        let broken = |error: csv::Error| broken(self.object.path(), number(error.position()), &error);
        // The first line of a block is a record.
        let (mut reader, mut line) =
            (reader(&*text, Dialect { header: false, ..self.dialect }), StringRecord::new());
        while reader.read_record(&mut line).map_err(broken)? {
            for (out, &at) in out.iter_mut().zip(columns) {
                let cell = line.get(at).unwrap_or_default();
                push(out, cell, || self.no_number(cell, number(line.position()), at).into());
            }
        }
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

impl Csv {
    /// Says where a cell is that is no number.
    fn no_number(&self, cell: &str, line: usize, column: usize) -> String {
        let cell: String = cell.chars().take(CELL_SHOWN).collect();
        let name = self.dialect.header.then(|| format!(" (`{}`)", self.outline.columns[column].name));
        let hint = match (line, self.dialect.header) {
            (1, false) => "; if the first line names the columns, set data.header = true",
            _ => "; mend it, or encode it as a number",
        };
        let name = name.unwrap_or_default();
        format!("line {line}, column {column}{name}: `{cell}` is no finite number{hint}")
    }
}

fn reader<R: Read>(text: R, dialect: Dialect) -> Reader<R> {
    let mut builder = ReaderBuilder::new();
    builder.has_headers(dialect.header).delimiter(dialect.delimiter);
    builder.trim(Trim::All).buffer_capacity(BUFFER_BYTES).from_reader(text)
}

fn place(position: Option<&csv::Position>) -> usize {
    position.map_or(0, |position| position.byte() as usize)
}

/// Returns the error of a record in this line.
fn broken(path: &Path, line: usize, error: &csv::Error) -> Error {
    match error.kind() {
        ErrorKind::UnequalLengths { expected_len, len, .. } => {
            malformed(path, format!("line {line}: {len} columns, the lines before have {expected_len}"))
        }
        ErrorKind::Utf8 { .. } => {
            malformed(path, format!("line {line}: not UTF-8 text; is this a CSV file?"))
        }
        _ => malformed(path, error.to_string()),
    }
}

/// Returns how many lines of a block are before a record. The reader's own count is that before the
/// empty lines that it skips.
fn lines_before(block: &[u8], position: Option<&csv::Position>) -> usize {
    let Some(position) = position else { return 0 };
    let after = block.get(position.byte() as usize..).unwrap_or_default();
    position.line() as usize - 1 + empty(after).iter().filter(|&&byte| byte == b'\n').count()
}

/// Returns the line of a record that begins at `byte` of the file, from 1.
///
/// # Errors
/// The file cannot be read.
fn line_number(object: &Object, byte: usize) -> Result<usize> {
    let after = object.reader(byte.min(object.len())).window()?;
    object.line(byte + empty(&after).len())
}

/// Returns the ends of empty lines with which a text begins.
fn empty(text: &[u8]) -> &[u8] {
    let bytes = text.iter().take_while(|&&byte| byte == b'\r' || byte == b'\n').count();
    &text[..bytes]
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::column::Fault;

    const fn commas(header: bool) -> Dialect {
        Dialect { header, delimiter: b',' }
    }

    fn read(text: &[u8], header: bool) -> Result<Vec<Column>> {
        let source = open(&Object::copy(Path::new("a.csv"), text.to_vec()), commas(header), Pass::plain())?;
        let all: Vec<_> = (0..source.outline().columns.len()).collect();
        source.read(0, &all)
    }

    fn table(text: &[u8], header: bool) -> Result<Vec<(String, Vec<f64>)>> {
        let columns = read(text, header)?.into_iter();
        Ok(columns.map(|column| (column.spec().name.clone(), column.values().unwrap().to_vec())).collect())
    }

    /// Returns the first broken value of a file.
    fn broken(text: &[u8], header: bool) -> String {
        let columns = read(text, header).unwrap();
        let faults = columns.iter().flat_map(|column| (0..column.records()).map(move |at| column.fault(at)));
        let mut broken = faults.filter_map(|fault| match fault? {
            Fault::Broken(reason) => Some(reason.to_owned()),
            Fault::Missing => None,
        });
        broken.next().expect("a broken value")
    }

    fn error(text: &[u8], header: bool) -> String {
        table(text, header).unwrap_err().to_string()
    }

    #[test]
    fn columns_have_the_names_of_the_header_or_their_numbers() {
        let column = |name: &str, values: &[f64]| (name.to_owned(), values.to_vec());
        assert_eq!(
            table(b"a, b ,c\n1,2.5,3\n-4,5e1,6\n", true).unwrap(),
            [column("a", &[1.0, -4.0]), column("b", &[2.5, 50.0]), column("c", &[3.0, 6.0])]
        );
        assert_eq!(
            table(b"1,2.5\r\n\r\n-4,50", false).unwrap(),
            [column("0", &[1.0, -4.0]), column("1", &[2.5, 50.0])]
        );
    }

    #[test]
    fn cells_between_tabs_are_those_between_commas() {
        let tabs = Dialect { header: true, delimiter: b'\t' };
        let object = |text: &[u8]| Object::copy(Path::new("a.tsv"), text.to_vec());
        let source = open(&object(b"a\tb\tc,d\n1\t2.5\t\n-4\t 5e1\t3\n"), tabs, Pass::plain()).unwrap();
        let names: Vec<_> = source.outline().columns.iter().map(|column| column.name.as_str()).collect();
        assert_eq!(names, ["a", "b", "c,d"]);
        let columns = source.read(0, &[0, 1, 2]).unwrap();
        let values: Vec<_> = columns.iter().map(|column| column.values::<f64>().unwrap()).collect();
        assert_eq!(values, [[1.0, -4.0], [2.5, 50.0], [0.0, 3.0]]);
        assert_eq!(columns[2].fault(0), Some(Fault::Missing));
        let said = open(&object(b"a,b\n1,2\n"), tabs, Pass::plain()).map(drop).unwrap_err().to_string();
        assert!(said.contains("1 columns") && said.contains("by commas in `csv`"), "{said}");
    }

    #[test]
    fn a_header_alone_has_no_records_but_columns() {
        let columns = table(b"a,b,c\n", true).unwrap();
        assert_eq!((columns.len(), columns[0].1.len()), (3, 0));
    }

    #[test]
    fn a_cell_that_is_no_number_has_line_and_column() {
        let message = broken(b"a,b\n1,2\n\n3,x y\n", true);
        assert!(message.contains("line 4, column 1 (`b`): `x y` is no finite number"), "{message}");
        assert!(broken(b"a,b\n1,2\n", false).contains("set data.header = true"));
        for bad in ["inf", "NaN", "1e39", "null", "N/A"] {
            let message = broken(format!("1,{bad}\n").as_bytes(), false);
            assert!(message.contains(&format!("line 1, column 1: `{bad}` is no")), "{message}");
        }
        let long = broken(format!("1,{}\n", "é".repeat(100)).as_bytes(), false);
        assert!(long.contains(&format!("`{}` is no", "é".repeat(CELL_SHOWN))), "{long}");
    }

    #[test]
    fn a_broken_cell_of_a_later_block_has_its_line_in_the_file() {
        let long = "x".repeat(BLOCK_BYTES);
        let text = format!("a,b\n{long},1\n\n{long},2\r\n\r\n{long},y\n");
        let source =
            open(&Object::copy(Path::new("a.csv"), text.into_bytes()), commas(true), Pass::plain()).unwrap();
        assert_eq!(source.outline().blocks, [1, 1, 1]);
        let column = source.read(2, &[1]).unwrap().remove(0);
        let Some(Fault::Broken(reason)) = column.fault(0) else { panic!("{:?}", column.fault(0)) };
        assert!(reason.starts_with("line 6, column 1 (`b`): `y` is no"), "{reason}");
    }

    #[test]
    fn an_empty_cell_has_no_value() {
        let columns = read(b"a,b\n1,\nNA,2\n , NA \n3,4\n", true).unwrap();
        fn faults(column: &Column) -> Vec<Option<Fault<'_>>> {
            (0..column.records()).map(|at| column.fault(at)).collect()
        }
        assert_eq!(faults(&columns[0]), [None, Some(Fault::Missing), Some(Fault::Missing), None]);
        assert_eq!(faults(&columns[1]), [Some(Fault::Missing), None, Some(Fault::Missing), None]);
        assert_eq!(columns[0].values(), Some(&[1.0, 0.0, 0.0, 3.0][..]));
    }

    #[test]
    fn a_column_that_nobody_uses_may_hold_anything() {
        let source =
            open(&Object::copy(Path::new("a.csv"), b"a,b\nAnn,2\n".to_vec()), commas(true), Pass::plain())
                .unwrap();
        let column = source.read(0, &[1]).unwrap().remove(0);
        assert_eq!((column.values(), column.fault(0)), (Some(&[2.0][..]), None));
        assert!(source.read(0, &[0]).unwrap()[0].fault(0).is_some());
    }

    #[test]
    fn ragged_lines_and_other_files_are_refused() {
        assert!(error(b"a,b\n1,2\n1,2,3\n", true).contains("line 3: 3 columns, the lines before have 2"));
        assert!(error(b"1,2\n\x80\xFF,2\n", false).contains("line 2: not UTF-8"));
        assert!(error(b"", true).contains("0 columns"));
        assert!(error(b"a\n1\n", true).contains("1 columns"));
    }

    #[test]
    fn a_quote_without_its_partner_does_not_take_the_memory_of_the_whole_file() {
        let open = |text: &str| {
            let object = Object::copy(Path::new("a.csv"), text.as_bytes().to_vec());
            open_within(&object, commas(true), Pass::plain(), 100).map(|source| source.outline().records())
        };
        let lines = "1,2\n".repeat(20_000);
        assert_eq!(open(&format!("a,b\n{lines}")).unwrap(), 20_000);
        for begin in ["a,b\n1,\"2\n", "a,\"b\n"] {
            let said = open(&format!("{begin}{lines}")).unwrap_err().to_string();
            assert!(said.contains("a.csv: a record of more than 100 bytes (data_memory)"), "{said}");
            assert!(said.contains("is a quote missing?"), "{said}");
        }
    }

    proptest! {
        #[test]
        fn what_is_written_is_read(
            records in proptest::collection::vec((any::<i32>(), -1e9f32..1e9, any::<u16>()), 1..9),
            header in any::<bool>(),
        ) {
            let mut text = if header { "a,b,label\n".to_owned() } else { String::new() };
            records.iter().for_each(|(a, b, label)| text += &format!("{a},{b},{label}\n"));
            let found = table(text.as_bytes(), header).unwrap();
            for (at, &(a, b, label)) in records.iter().enumerate() {
                let row: Vec<f64> = found.iter().map(|(_, values)| values[at]).collect();
                prop_assert_eq!(row[0], f64::from(a));
                prop_assert_eq!(row[1] as f32, b);
                prop_assert_eq!(row[2], f64::from(label));
            }
        }

        #[test]
        fn any_text_is_read_or_refused(text in "[-+.,0-9eE\"\n\r a]{0,60}", header in any::<bool>()) {
            if let Ok(columns) = table(text.as_bytes(), header) {
                prop_assert!(columns.iter().all(|(_, values)| values.len() == columns[0].1.len()));
            }
        }

        #[test]
        fn any_bytes_are_read_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..60), header in any::<bool>()) {
            let _ = table(&bytes, header);
        }
    }
}
