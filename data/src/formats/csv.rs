//! Comma-separated text: a line is a record. All cells are numbers, as f64, in the columns that a
//! job uses. Other columns may hold anything. A cell that is empty or `NA` has no value.

use std::path::Path;

use csv::{ErrorKind, Reader, ReaderBuilder, StringRecord, Trim};
use proto::column::{ColumnSpec, ElementType};

use crate::column::Column;
use crate::error::{Error, Result, malformed, wrong};
use crate::format::{Outline, Source};
use crate::object::Object;

/// Cells without a value.
const MISSING: [&str; 2] = ["", "NA"];

/// Characters of a cell that an error shows.
const CELL_SHOWN: usize = 60;

/// Opens a file. Without a header the columns' names are their numbers, from 0.
///
/// # Errors
/// Lines of different lengths, bytes that are no text, or less than two columns.
pub(crate) fn open(object: &Object, header: bool) -> Result<Box<dyn Source>> {
    let (path, text) = (object.path(), object.bytes());
    let broken = |error| broken(path, text, &error);
    let mut reader = reader(text, header);
    // Without `has_headers` this is the first record, which is read again below.
    let names = reader.headers().map_err(broken)?.clone();
    if names.len() < 2 {
        return wrong(
            path,
            format!("{} columns; a record needs at least one feature and the label", names.len()),
        );
    }
    let name = |(at, name): (usize, &str)| if header { name.to_owned() } else { at.to_string() };
    let column = |name| ColumnSpec::fixed(name, ElementType::F64, []);
    let columns = names.iter().enumerate().map(name).map(column).collect();
    let (mut records, mut line) = (0, StringRecord::new());
    while reader.read_record(&mut line).map_err(broken)? {
        records += 1;
    }
    let outline = Outline { columns, blocks: vec![records] };
    Ok(Box::new(Csv { object: object.clone(), header, outline }))
}

/// A file that is one block.
struct Csv {
    object: Object,
    header: bool,
    outline: Outline,
}

impl Source for Csv {
    fn outline(&self) -> &Outline {
        &self.outline
    }

    /// Decodes columns. A cell that is no number, or none that an f32 holds, is broken.
    ///
    /// # Errors
    /// The lines are others than when the file was opened.
    fn read(&self, _block: usize, columns: &[usize]) -> Result<Vec<Column>> {
        let (path, text) = (self.object.path(), self.object.bytes());
        let broken = |error| broken(path, text, &error);
        let records = self.outline.records() as usize;
        let column = |&at: &usize| Column::with_capacity(self.outline.columns[at].clone(), records);
        let mut out: Vec<_> = columns.iter().map(column).collect();
        let (mut reader, mut line) = (reader(text, self.header), StringRecord::new());
        while reader.read_record(&mut line).map_err(broken)? {
            for (out, &at) in out.iter_mut().zip(columns) {
                let value = line[at].parse::<f64>().ok().filter(|&value| (value as f32).is_finite());
                match value {
                    Some(value) => out.push(&value.to_le_bytes()),
                    None if MISSING.contains(&&line[at]) => out.push_missing(),
                    None => out.push_broken(|| self.no_number(&line, at).into()),
                }
            }
        }
        Ok(out)
    }
}

impl Csv {
    /// Says where a cell is that is no number.
    fn no_number(&self, line: &StringRecord, column: usize) -> String {
        let cell: String = line[column].chars().take(CELL_SHOWN).collect();
        let line = line_number(self.object.bytes(), line.position());
        let name = self.header.then(|| format!(" (`{}`)", self.outline.columns[column].name));
        let hint = match (line, self.header) {
            (1, false) => "; if the first line names the columns, set data.header = true",
            _ => "; mend it, or encode it as a number",
        };
        let name = name.unwrap_or_default();
        format!("line {line}, column {column}{name}: `{cell}` is no finite number{hint}")
    }
}

fn reader(text: &[u8], header: bool) -> Reader<&[u8]> {
    ReaderBuilder::new().has_headers(header).trim(Trim::All).from_reader(text)
}

fn broken(path: &Path, text: &[u8], error: &csv::Error) -> Error {
    let line = line_number(text, error.position());
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

/// Returns the line of a record, from 1. The reader's own count is that before the empty lines that
/// it skips.
fn line_number(text: &[u8], at: Option<&csv::Position>) -> usize {
    let byte = at.map_or(0, |at| at.byte() as usize).min(text.len());
    let is_empty = |&&byte: &&u8| byte == b'\r' || byte == b'\n';
    let start = byte + text[byte..].iter().take_while(is_empty).count();
    1 + text[..start].iter().filter(|&&byte| byte == b'\n').count()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::column::Fault;

    fn read(text: &[u8], header: bool) -> Result<Vec<Column>> {
        let source = open(&Object::copy(Path::new("a.csv"), text.to_vec()), header)?;
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
        let source = open(&Object::copy(Path::new("a.csv"), b"a,b\nAnn,2\n".to_vec()), true).unwrap();
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
