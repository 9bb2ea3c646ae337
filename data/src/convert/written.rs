//! How the columns of a source lie in the shards of another format.
//!
//! Values stay equal. Where a format lacks a type or a shape, a wider type or a list takes its
//! place:
//!
//! | format | numbers | fixed shapes | ragged |
//! | --- | --- | --- | --- |
//! | parquet, arrow | own type; bf16 as f32 | own | own |
//! | npy | own type; bf16 as f32 | own | refused |
//! | safetensors | own type | own | refused |
//! | tar | own type; bf16 as f32 | ragged in the first dimension | own |
//! | tfrecord | integers as i64, floats as f32 | a list | lists |
//! | jsonl | f64; bool without a shape | a list | lists |
//!
//! In a tar archive bytes stay as they are. An integer without a shape is a `.cls`, i64, and all
//! other numbers are `.npy`.

use proto::column::{ColumnSpec, ElementType};
use proto::spec::{FILES, Format};

use crate::pixels::Encoding;

/// A column of the source, and what a reader of the shards finds.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Written {
    /// The column with the type in which a shard gets it.
    pub(super) stored: ColumnSpec,
    /// The column in a shard, as its reader describes it.
    pub(super) found: ColumnSpec,
    /// Elements of each record, if the column has a fixed shape and a shard says ragged.
    pub(super) length: Option<usize>,
}

impl Written {
    /// Returns the column of a job that gives ragged columns their lengths.
    pub(super) fn column(&self) -> ColumnSpec {
        match self.length {
            Some(length) => self.found.clone().of_length(length),
            None => self.found.clone(),
        }
    }
}

/// Formats that can be written.
pub(super) const FORMATS: [Format; 7] = [
    Format::Parquet,
    Format::Arrow,
    Format::Npy,
    Format::Tar,
    Format::Tfrecord,
    Format::Jsonl,
    Format::Safetensors,
];

/// Longest name of a column that becomes a part of a file's or a member's name, in bytes.
const NAME_BYTES_MAX: usize = 72;

/// Returns how columns lie in shards of a format. `image` is the encoding of the first image of a
/// column named `image`.
///
/// # Errors
/// The format cannot be written, or cannot hold a column, and what to do.
pub(super) fn all(
    format: Format,
    columns: &[ColumnSpec],
    image: Option<Encoding>,
) -> Result<Vec<Written>, String> {
    if !FORMATS.contains(&format) {
        let names: Vec<_> = FORMATS.into_iter().map(Format::name).collect();
        return Err(format!("{} cannot be written; choose {}", format.name(), names.join(", ")));
    }
    let written = columns.iter().map(|column| {
        let of_column = |reason: String| format!("column {column}: {reason}");
        if column.width().is_none_or(|width| width == 0) {
            return Err(of_column("its records have no values".to_owned()));
        }
        one(format, column, image).map_err(of_column)
    });
    let written: Vec<Written> = written.collect::<Result<_, _>>()?;
    for (at, one) in written.iter().enumerate() {
        if let Some(before) = written[..at].iter().position(|other| other.found.name == one.found.name) {
            return Err(format!(
                "columns `{}` and `{}` would both be named `{}`; rename one of them in the source",
                columns[before].name, columns[at].name, one.found.name
            ));
        }
    }
    Ok(written)
}

fn one(format: Format, column: &ColumnSpec, image: Option<Encoding>) -> Result<Written, String> {
    let same = |stored: ColumnSpec| Written { found: stored.clone(), stored, length: None };
    match format {
        Format::Safetensors | Format::Npy if column.ragged => Err(format!(
            "{} has no ragged columns; give its length with --length {}=N if all records have the same, or choose \
             parquet, arrow, tar, tfrecord or jsonl",
            format.name(),
            column.name
        )),
        Format::Safetensors if column.name == "__metadata__" => {
            Err("safetensors uses this name itself; rename it in the source".to_owned())
        }
        Format::Safetensors => Ok(same(column.clone())),
        Format::Npy => {
            file_name(&column.name)?;
            match column.name.as_str() {
                FILES | "records" => {
                    Err("a job file has another use for this name; rename it in the source".to_owned())
                }
                _ => Ok(same(widened(column))),
            }
        }
        Format::Tar => tar(&widened(column), image),
        Format::Tfrecord => lists(column, ElementType::F32),
        Format::Jsonl => lists(column, ElementType::F64),
        _ => Ok(same(widened(column))),
    }
}

/// Returns a column in a type that Arrow and NumPy have.
fn widened(column: &ColumnSpec) -> ColumnSpec {
    match column.dtype {
        ElementType::BF16 => ColumnSpec { dtype: ElementType::F32, ..column.clone() },
        _ => column.clone(),
    }
}

/// Checks a name that becomes a part of a file's name.
fn file_name(name: &str) -> Result<(), String> {
    let is_wrong = |letter: char| letter == '/' || letter.is_control();
    if name.is_empty() || name.len() > NAME_BYTES_MAX || name.contains(is_wrong) {
        return Err(format!(
            "its name becomes a part of a file's name, so it has 1 to {NAME_BYTES_MAX} bytes and no `/`; rename it in \
             the source"
        ));
    }
    Ok(())
}

/// Returns whether a column is the bytes of texts or files.
pub(super) fn is_bytes(column: &ColumnSpec) -> bool {
    column.ragged && column.dtype == ElementType::U8 && column.shape.is_empty()
}

/// Returns the members of a column. Their extension is the column's name, with an ending that says
/// what they are.
fn tar(column: &ColumnSpec, image: Option<Encoding>) -> Result<Written, String> {
    let name = column.name.to_lowercase();
    file_name(&name)?;
    let last = name.rsplit('.').next().unwrap_or_default();
    let stored = column.clone();
    if is_bytes(column) {
        if ["cls", "npy"].contains(&last) {
            return Err(format!("the ending `{last}` is for numbers; rename it in the source"));
        }
        let name = match image {
            Some(image) if name == "image" => image.ending().to_owned(),
            _ => name,
        };
        let found = ColumnSpec { name, ..stored.clone() };
        return Ok(Written { stored, found, length: None });
    }
    let is_class = !column.ragged
        && column.shape.is_empty()
        && !column.dtype.is_float()
        && column.dtype != ElementType::Bool;
    let with_ending = |ending: &str| if last == ending { name.clone() } else { format!("{name}.{ending}") };
    if is_class {
        // The class of a folder of images has the extension by which other programs know it.
        let name = if name == "class" { "cls".to_owned() } else { with_ending("cls") };
        let stored = ColumnSpec { dtype: ElementType::I64, ..stored };
        let found = ColumnSpec { name, ..stored.clone() };
        return Ok(Written { stored, found, length: None });
    }
    let name = with_ending("npy");
    let (found, length) = match (column.ragged, column.shape.split_first()) {
        (false, Some((&length, rest))) => (ColumnSpec::ragged(name, column.dtype, rest), Some(length)),
        _ => (ColumnSpec { name, ..stored.clone() }, None),
    };
    Ok(Written { stored, found, length })
}

/// Returns a column in a format of lists of integers, floats and bytes. `float` is the type of its
/// floats.
fn lists(column: &ColumnSpec, float: ElementType) -> Result<Written, String> {
    if is_bytes(column) {
        return Ok(Written { stored: column.clone(), found: column.clone(), length: None });
    }
    if column.ragged && !column.shape.is_empty() {
        return Err("this format has lists of numbers, and no lists of lists; choose parquet, arrow or tar"
            .to_owned());
    }
    let is_json = float == ElementType::F64;
    let is_scalar = !column.ragged && column.shape.is_empty();
    let stored = match column.dtype {
        ElementType::Bool if is_json && is_scalar => ElementType::Bool,
        ElementType::F64 => ElementType::F64,
        dtype if dtype.is_float() => float,
        _ => ElementType::I64,
    };
    let found = match stored {
        ElementType::Bool => ElementType::Bool,
        ElementType::I64 if !is_json => ElementType::I64,
        _ => float,
    };
    let stored = ColumnSpec { dtype: stored, ..column.clone() };
    // A number of JSON stays a number. Everything else is a list.
    if is_json && is_scalar {
        return Ok(Written { found: ColumnSpec { dtype: found, ..column.clone() }, stored, length: None });
    }
    let length = (!column.ragged).then(|| column.shape.iter().product());
    Ok(Written { stored, found: ColumnSpec::ragged(&*column.name, found, []), length })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(format: Format, columns: &[ColumnSpec]) -> Result<Vec<String>, String> {
        let shown = |written: &Written| format!("{} {:?}", written.found, written.length);
        all(format, columns, Some(Encoding::Png)).map(|written| written.iter().map(shown).collect())
    }

    fn columns() -> Vec<ColumnSpec> {
        vec![
            ColumnSpec::fixed("class", ElementType::U8, []),
            ColumnSpec::fixed("new", ElementType::Bool, []),
            ColumnSpec::fixed("x", ElementType::BF16, [2, 3]),
            ColumnSpec::fixed("y", ElementType::F64, []),
            ColumnSpec::ragged("image", ElementType::U8, []),
            ColumnSpec::ragged("Tokens", ElementType::I32, []),
        ]
    }

    #[test]
    fn each_format_has_its_own_types_and_shapes() {
        let expected = [
            "`class` u8[] None",
            "`new` bool[] None",
            "`x` f32[2, 3] None",
            "`y` f64[] None",
            "`image` u8[any] None",
            "`Tokens` i32[any] None",
        ];
        assert_eq!(found(Format::Parquet, &columns()).unwrap(), expected);
        assert_eq!(found(Format::Npy, &columns()[..4]).unwrap(), expected[..4]);
        let expected = [
            "`cls` i64[] None",
            "`new.npy` bool[] None",
            "`x.npy` f32[any, 3] Some(2)",
            "`y.npy` f64[] None",
            "`png` u8[any] None",
            "`tokens.npy` i32[any] None",
        ];
        assert_eq!(found(Format::Tar, &columns()).unwrap(), expected);
        let expected = [
            "`class` i64[any] Some(1)",
            "`new` i64[any] Some(1)",
            "`x` f32[any] Some(6)",
            "`y` f32[any] Some(1)",
            "`image` u8[any] None",
            "`Tokens` i64[any] None",
        ];
        assert_eq!(found(Format::Tfrecord, &columns()).unwrap(), expected);
        let expected = [
            "`class` f64[] None",
            "`new` bool[] None",
            "`x` f64[any] Some(6)",
            "`y` f64[] None",
            "`image` u8[any] None",
            "`Tokens` f64[any] None",
        ];
        assert_eq!(found(Format::Jsonl, &columns()).unwrap(), expected);
        assert_eq!(found(Format::Safetensors, &columns()[2..3]).unwrap(), ["`x` bf16[2, 3] None"]);
    }

    #[test]
    fn columns_that_a_format_cannot_hold_say_what_to_do() {
        let refused = |format, column: ColumnSpec| found(format, &[column]).unwrap_err();
        let ragged = ColumnSpec::ragged("t", ElementType::I32, []);
        assert!(
            refused(Format::Npy, ragged.clone())
                .contains("column `t` i32[any]: npy has no ragged columns; give")
        );
        assert!(refused(Format::Safetensors, ragged).contains("--length t=N"));
        let nested = ColumnSpec::ragged("t", ElementType::I32, [2]);
        assert!(refused(Format::Jsonl, nested.clone()).contains("no lists of lists"));
        assert!(found(Format::Tar, &[nested]).is_ok());
        let named = |name: &str| ColumnSpec::fixed(name, ElementType::F32, [2]);
        assert!(refused(Format::Npy, named("records")).contains("another use for this name"));
        assert!(refused(Format::Npy, named("a/b")).contains("no `/`"));
        assert!(refused(Format::Tar, named("")).contains("1 to 72 bytes"));
        assert!(
            refused(Format::Tar, ColumnSpec::ragged("a.cls", ElementType::U8, [])).contains("is for numbers")
        );
        assert!(
            refused(Format::Parquet, ColumnSpec::fixed("x", ElementType::F32, [0])).contains("no values")
        );
        assert!(refused(Format::Idx, named("x")).contains("idx cannot be written; choose parquet, arrow"));
        let message = found(Format::Tar, &[named("x"), named("X")]).unwrap_err();
        assert!(message.contains("columns `x` and `X` would both be named `x.npy`"), "{message}");
    }
}
