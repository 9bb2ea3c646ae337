//! Comma-separated text: a line is a record, one column is the label, all others are features in
//! their order.

use std::path::Path;

use csv::{ErrorKind, ReaderBuilder, StringRecord, Trim};

use crate::array::{Array, Element, Endian};
use crate::error::{Error, Result, malformed, wrong};

/// Reads a file's content into features (f32) and labels (f64, which holds class numbers exactly).
///
/// # Errors
/// Lines of different lengths, a cell that is no finite number, or no such label column; with line
/// and column.
pub(crate) fn read(path: &Path, text: &[u8], label: Option<&str>, header: bool) -> Result<(Array, Array)> {
    let broken = |error| broken(path, text, &error);
    let mut reader = ReaderBuilder::new().has_headers(header).trim(Trim::All).from_reader(text);
    // Without `has_headers` this is the first record, which is read again below.
    let first = reader.headers().map_err(broken)?.clone();
    let names = header.then_some(&first);
    let label = label_column(path, names, first.len(), label)?;

    let (mut features, mut labels) = (Vec::new(), Vec::new());
    let mut line = StringRecord::new();
    while reader.read_record(&mut line).map_err(broken)? {
        for (column, cell) in line.iter().enumerate() {
            let value = cell.parse::<f64>().ok().filter(|&value| (value as f32).is_finite());
            let Some(value) = value else { return Err(no_number(path, text, &line, names, column)) };
            if column == label {
                labels.extend(value.to_le_bytes());
            } else {
                features.extend((value as f32).to_le_bytes());
            }
        }
    }
    let records = labels.len() / Element::F64.size();
    let array = |shape, element, bytes| Array::new(path, shape, element, Endian::Little, bytes, 0);
    let features = array(vec![records, first.len() - 1], Element::F32, features)?;
    Ok((features, array(vec![records], Element::F64, labels)?))
}

/// Returns the label's column: by name if the columns have names, else by number. Without a label
/// it is the last one.
fn label_column(
    path: &Path,
    names: Option<&StringRecord>,
    columns: usize,
    label: Option<&str>,
) -> Result<usize> {
    if columns < 2 {
        return wrong(path, format!("{columns} columns; a record needs at least one feature and the label"));
    }
    let Some(label) = label else { return Ok(columns - 1) };
    let named = names.and_then(|names| names.iter().position(|name| name == label));
    let numbered = || label.parse().ok().filter(|&column| column < columns);
    named.or_else(numbered).map_or_else(
        || {
            let known = names.map_or("no header names the columns".to_owned(), |names| {
                let some: Vec<_> = names.iter().take(20).collect();
                format!("the header has {}{}", some.join(", "), if names.len() > 20 { ", .." } else { "" })
            });
            wrong(
                path,
                format!(
                    "data.label = \"{label}\": no such column; {known}, numbers go from 0 to {}",
                    columns - 1
                ),
            )
        },
        Ok,
    )
}

fn no_number(
    path: &Path,
    text: &[u8],
    line: &StringRecord,
    names: Option<&StringRecord>,
    column: usize,
) -> Error {
    let cell = &line[column];
    let line = line_number(text, line.position());
    let name = names.map(|names| format!(" (`{}`)", &names[column])).unwrap_or_default();
    let hint = match (line, names) {
        (1, None) => "; if the first line names the columns, set data.header = true",
        _ => "; mend it, or encode it as a number",
    };
    malformed(path, format!("line {line}, column {column}{name}: `{cell}` is no finite number{hint}"))
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

    fn values(array: &Array) -> Vec<Vec<f64>> {
        let row = |record| {
            let mut row = vec![0.0; array.width()];
            array.read(record, &mut row, |value| value);
            row
        };
        (0..array.records()).map(row).collect()
    }

    fn table(text: &str, label: Option<&str>, header: bool) -> (Vec<Vec<f64>>, Vec<Vec<f64>>) {
        let (features, labels) = read(Path::new("a.csv"), text.as_bytes(), label, header).unwrap();
        (values(&features), values(&labels))
    }

    fn error(text: &[u8], label: Option<&str>, header: bool) -> String {
        read(Path::new("a.csv"), text, label, header).unwrap_err().to_string()
    }

    #[test]
    fn the_label_is_the_last_column_or_the_one_named_or_numbered() {
        let text = "a, b ,c\n1,2.5,3\n-4,5e1,6\n";
        assert_eq!(
            table(text, None, true),
            (vec![vec![1.0, 2.5], vec![-4.0, 50.0]], vec![vec![3.0], vec![6.0]])
        );
        let first = (vec![vec![2.5, 3.0], vec![50.0, 6.0]], vec![vec![1.0], vec![-4.0]]);
        assert_eq!(table(text, Some("a"), true), first);
        assert_eq!(table(text, Some("0"), true), first);
        assert_eq!(table("1,2.5,3\r\n\r\n-4,50,6", Some("0"), false), first);
    }

    #[test]
    fn a_header_alone_has_no_records_but_columns() {
        let (features, labels) = read(Path::new("a.csv"), b"a,b,c\n", None, true).unwrap();
        assert_eq!((features.records(), features.width(), labels.records()), (0, 2, 0));
    }

    #[test]
    fn a_cell_that_is_no_number_has_line_and_column() {
        let message = error(b"a,b\n1,2\n\n3,x y\n", None, true);
        assert!(message.contains("a.csv: line 4, column 1 (`b`): `x y` is no finite number"), "{message}");
        assert!(error(b"1,2\n,4\n", None, false).contains("line 2, column 0: `` is no"));
        assert!(error(b"a,b\n1,2\n", None, false).contains("set data.header = true"));
        assert!(error(b"1,inf\n", None, false).contains("`inf`"));
        assert!(error(b"1,1e39\n", None, false).contains("`1e39`"));
    }

    #[test]
    fn ragged_lines_and_other_files_are_refused() {
        assert!(
            error(b"a,b\n1,2\n1,2,3\n", None, true).contains("line 3: 3 columns, the lines before have 2")
        );
        assert!(error(b"1,2\n\x80\xFF,2\n", None, false).contains("line 2: not UTF-8"));
        assert!(error(b"", None, true).contains("0 columns"));
        assert!(error(b"a\n1\n", None, true).contains("1 columns"));
    }

    #[test]
    fn a_label_column_that_is_not_there_is_named() {
        let message = error(b"a,b\n1,2\n", Some("y"), true);
        assert!(
            message.contains("\"y\": no such column; the header has a, b, numbers go from 0 to 1"),
            "{message}"
        );
        assert!(error(b"1,2\n", Some("2"), false).contains("no header"));
    }

    proptest! {
        #[test]
        fn what_is_written_is_read(
            records in proptest::collection::vec((any::<i32>(), -1e9f32..1e9, any::<u16>()), 1..9),
            header in any::<bool>(),
        ) {
            let mut text = if header { "a,b,label\n".to_owned() } else { String::new() };
            records.iter().for_each(|(a, b, label)| text += &format!("{a},{b},{label}\n"));
            let (features, labels) = table(&text, None, header);
            for (at, &(a, b, label)) in records.iter().enumerate() {
                prop_assert_eq!(&features[at], &[f64::from(a as f32), f64::from(b)]);
                prop_assert_eq!(&labels[at], &[f64::from(label)]);
            }
        }

        #[test]
        fn any_text_is_read_or_refused(text in "[-+.,0-9eE\"\n\r a]{0,60}", label in proptest::option::of("[0-3a]"), header in any::<bool>()) {
            if let Ok((features, labels)) = read(Path::new("a"), text.as_bytes(), label.as_deref(), header) {
                prop_assert_eq!(values(&features).len(), values(&labels).len());
            }
        }

        #[test]
        fn any_bytes_are_read_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..60), header in any::<bool>()) {
            let _ = read(Path::new("a"), &bytes, None, header);
        }
    }
}
