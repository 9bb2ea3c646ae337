//! Shards of JSON Lines: an object for each record.

use proto::column::ElementType;

use super::sink::{Shard, Sink};
use super::whole::Whole;
use super::written::is_bytes;
use crate::cast::each_i64;
use crate::column::{Column, each_f64};
use crate::error::{Result, malformed};

/// A shard of JSON Lines.
pub(super) struct Jsonl {
    file: Whole,
    /// Number of the next record over all shards.
    next: u64,
}

impl Jsonl {
    pub(super) fn open(shard: &Shard<'_>) -> Result<Self> {
        Ok(Self { file: shard.file()?, next: shard.first })
    }
}

impl Sink for Jsonl {
    fn add(&mut self, columns: &[Column]) -> Result<()> {
        let mut line = String::new();
        for row in 0..columns.first().map_or(0, Column::records) {
            line.clear();
            for (at, column) in columns.iter().enumerate() {
                line.push(if at == 0 { '{' } else { ',' });
                line.push_str(&quoted(&column.spec().name));
                line.push(':');
                value(column, row, &mut line).map_err(|reason| {
                    let (name, next) = (&column.spec().name, self.next);
                    malformed(
                        self.file.path(),
                        format!("column `{name}`, record {next} of the source: {reason}"),
                    )
                })?;
            }
            line.push_str("}\n");
            self.file.append(line.as_bytes())?;
            self.next += 1;
        }
        Ok(())
    }

    fn finish(self: Box<Self>) -> Result<Vec<Whole>> {
        Ok(vec![self.file])
    }
}

/// Returns a text as JSON has it.
fn quoted(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}

/// Appends the values of a record.
///
/// # Errors
/// JSON, or its reader, has no such value.
fn value(column: &Column, row: usize, line: &mut String) -> Result<(), String> {
    let (spec, values) = (column.spec(), column.record(row));
    if is_bytes(spec) {
        let text = std::str::from_utf8(values).map_err(|_| {
            "its bytes are no text (UTF-8), and JSON has only texts; choose parquet, arrow, tar or tfrecord".to_owned()
        })?;
        line.push_str(&quoted(text));
        return Ok(());
    }
    let is_list = spec.ragged || !spec.shape.is_empty();
    if is_list {
        line.push('[');
    }
    let (mut wrong, mut count) = (None, 0);
    let mut put = |number: Option<String>, value: f64| {
        if count > 0 {
            line.push(',');
        }
        count += 1;
        match number {
            Some(number) => line.push_str(&number),
            None => wrong = wrong.or(Some(value)),
        }
    };
    match spec.dtype {
        ElementType::Bool => put(Some((values != [0]).to_string()), 0.0),
        dtype if dtype.is_float() => each_f64(dtype, values, |value| {
            // The shortest text that reads as this number.
            put(serde_json::Number::from_f64(value).map(|number| number.to_string()), value);
        }),
        dtype => each_i64(dtype, values, |integer, value| {
            let is_exact = |integer: &i64| value as i128 == i128::from(*integer);
            put(integer.filter(is_exact).map(|integer| integer.to_string()), value);
        }),
    }
    if is_list {
        line.push(']');
    }
    match wrong {
        None => Ok(()),
        Some(value) => Err(format!(
            "{value} is no number of JSON Lines, which are finite, and integers up to 2^53; choose parquet, arrow or tar"
        )),
    }
}
