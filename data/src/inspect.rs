//! A look at one file: its columns, and its first records as text.

use std::path::Path;

use proto::column::{ColumnSpec, ElementType};
use proto::spec::{DataSpec, FilesSpec, Format, data_url};

use crate::column::each_f64;
use crate::error::{Result, malformed, wrong};
use crate::format;
use crate::object::Object;
use crate::remote;

/// Values of one record that are shown.
const VALUES_SHOWN: usize = 8;

/// Characters of a text that are shown.
const CHARACTERS_SHOWN: usize = 60;

/// What a file has.
#[derive(Clone, Debug, PartialEq)]
pub struct Inspected {
    /// Number of records.
    pub records: u64,
    /// Number of blocks: parts that are decoded at once.
    pub blocks: usize,
    /// Columns, in the order of the file.
    pub columns: Vec<ColumnSpec>,
    /// The first records, each with one text for each column.
    pub first: Vec<Vec<String>>,
}

/// Looks at the file at `path`, which may be a URL. It decodes the blocks of its first `records`
/// records. `header` says whether the first line of a CSV file names the columns. The call blocks.
///
/// # Errors
/// The file is missing, or no file of this format.
pub fn inspect(path: &Path, format: Format, header: bool, records: u64) -> Result<Inspected> {
    let spec = DataSpec { header, ..DataSpec::of(format, FilesSpec::default()) };
    let located = match path.to_str() {
        Some(name) => {
            let shown = || Path::new(&data_url::shown(name)).to_owned();
            data_url::check(name).map_err(|reason| malformed(&shown(), reason))?;
            spec.locate(name, None)
        }
        None => path.to_owned(),
    };
    let path = located.as_path();
    let object = match format {
        Format::Images if remote::url(path).is_some() => {
            return wrong(path, "folders of images are local; look at a tar archive instead");
        }
        Format::Images => Object::copy(path, Vec::new()),
        _ => Object::open(path, &())?,
    };
    let source = format::open(&spec, &object, "values", path, &())?;
    let outline = source.outline();
    let all: Vec<usize> = (0..outline.columns.len()).collect();
    let (mut first, mut left) = (Vec::new(), records);
    for (block, &in_block) in outline.blocks.iter().enumerate() {
        if left == 0 {
            break;
        }
        let columns = source.read(block, &all)?;
        for record in 0..in_block.min(left) as usize {
            first.push(columns.iter().map(|column| shown(column.spec(), column.record(record))).collect());
        }
        left -= in_block.min(left);
    }
    Ok(Inspected {
        records: outline.records(),
        blocks: outline.blocks.len(),
        columns: outline.columns.clone(),
        first,
    })
}

/// Returns one record's values as text.
fn shown(spec: &ColumnSpec, values: &[u8]) -> String {
    let count = values.len() / spec.dtype.size();
    if spec.ragged && spec.dtype == ElementType::U8 {
        let text = std::str::from_utf8(values).ok();
        let text = text.filter(|text| !text.chars().any(|c| c.is_control() && !c.is_whitespace()));
        return match text {
            Some(text) => {
                let some: String = text.chars().take(CHARACTERS_SHOWN).collect();
                format!("{some:?}{}", if some.len() < text.len() { " .." } else { "" })
            }
            None => format!("{count} bytes"),
        };
    }
    let mut texts = Vec::new();
    let some = &values[..count.min(VALUES_SHOWN) * spec.dtype.size()];
    each_f64(spec.dtype, some, |value| {
        texts.push(if spec.dtype == ElementType::F32 {
            (value as f32).to_string()
        } else {
            value.to_string()
        });
    });
    if count == 1 && spec.shape.is_empty() && !spec.ragged {
        return texts.remove(0);
    }
    format!("[{}{}]", texts.join(", "), if count > VALUES_SHOWN { ", .." } else { "" })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_shows_its_columns_and_first_records() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.csv");
        std::fs::write(&path, "age,income\n30,1.5\n40,2\n50,3\n").unwrap();
        let found = inspect(&path, Format::Csv, true, 2).unwrap();
        assert_eq!((found.records, found.blocks), (3, 1));
        assert_eq!(found.columns[1].to_string(), "`income` f64[]");
        assert_eq!(found.first, [["30", "1.5"], ["40", "2"]]);
        assert!(inspect(&path, Format::Npy, true, 2).is_err());
    }

    #[test]
    fn values_are_shown_in_their_kind_and_not_without_end() {
        let text = |value: &[u8]| shown(&ColumnSpec::ragged("t", ElementType::U8, []), value);
        assert_eq!((text(b"Ann"), text(b"\x00\xFF")), ("\"Ann\"".to_owned(), "2 bytes".to_owned()));
        assert!(text("é".repeat(100).as_bytes()).ends_with("\" .."));
        let numbers = ColumnSpec::fixed("x", ElementType::U8, [3, 3]);
        assert_eq!(shown(&numbers, &[7; 9]), "[7, 7, 7, 7, 7, 7, 7, 7, ..]");
        let float = ColumnSpec::fixed("x", ElementType::F32, []);
        assert_eq!(shown(&float, &0.1f32.to_le_bytes()), "0.1");
        assert_eq!(shown(&ColumnSpec::ragged("x", ElementType::I32, []), &[]), "[]");
    }
}
