//! One row of the report, and where rows are read from.

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use std::path::Path;

/// What was measured of one thing, as the benches write it (`benches/support/report.rs`).
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub(super) struct Row {
    pub(super) name: String,
    /// Median of the samples; none of a bench that could not measure it.
    pub(super) value: Option<f64>,
    pub(super) unit: String,
    /// Worked out beforehand, or measured in the same run; 0 where there is none.
    pub(super) limit_or_peer: Option<f64>,
    /// Value of limit or peer.
    pub(super) ratio: Option<f64>,
    pub(super) target: Option<Target>,
    pub(super) samples: Vec<f64>,
}

/// What the value shall be.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Target {
    AtLeast(f64),
    Below(f64),
}

impl Row {
    /// Something in its own unit, beside a peer.
    pub(super) fn new(name: impl Into<String>, unit: &str, samples: Vec<f64>, peer: Option<f64>) -> Self {
        let value = median(&samples);
        let ratio = value.zip(peer).map(|(value, peer)| value / peer);
        Self {
            name: name.into(),
            value,
            unit: unit.to_owned(),
            limit_or_peer: peer,
            ratio,
            target: None,
            samples,
        }
    }

    /// Quotients of neighbours in time.
    pub(super) fn ratio(name: impl Into<String>, samples: Vec<f64>, at_least: Option<f64>) -> Self {
        Self { target: at_least.map(Target::AtLeast), ..Self::new(name, "ratio", samples, Some(1.0)) }
    }

    /// Whether it is what it shall be; none without a target.
    pub(super) fn met(&self) -> Option<bool> {
        let value = self.value.unwrap_or(f64::NAN);
        Some(match self.target? {
            Target::AtLeast(bound) => value >= bound,
            Target::Below(bound) => value < bound,
        })
    }
}

/// The rows of a bench: one JSON object a line.
pub(super) fn read(path: &Path) -> Result<Vec<Row>> {
    let text = super::read(path)?;
    let row =
        |line| serde_json::from_str(line).with_context(|| format!("a row of `{}`: {line}", path.display()));
    text.lines().map(row).collect()
}

/// None of nothing.
pub(super) fn median(samples: &[f64]) -> Option<f64> {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    match sorted.len() {
        0 => None,
        odd if odd % 2 == 1 => Some(sorted[middle]),
        _ => Some(f64::midpoint(sorted[middle - 1], sorted[middle])),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_read_as_the_benches_write_them() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let lines = r#"{"name":"a","value":2.0,"unit":"ms","limit_or_peer":4.0,"ratio":0.5,"target":{"below":3.0},"samples":[1.0,2.0,3.0]}
{"name":"b","value":null,"unit":"ratio","limit_or_peer":0.0,"ratio":null,"target":{"at_least":1.0},"samples":[]}
"#;
        std::fs::write(file.path(), lines).unwrap();
        let rows = read(file.path()).unwrap();
        assert_eq!((rows[0].met(), rows[0].target), (Some(true), Some(Target::Below(3.0))));
        assert_eq!((rows[1].met(), rows[1].value), (Some(false), None));
        let again: Vec<_> = rows.iter().map(|row| serde_json::to_string(row).unwrap() + "\n").collect();
        assert_eq!(again.concat(), lines);
    }

    #[test]
    fn median_of_an_even_number_lies_between_the_middle_two() {
        assert_eq!(
            [median(&[]), median(&[3.0, 1.0, 2.0]), median(&[4.0, 1.0])],
            [None, Some(2.0), Some(2.5)]
        );
    }
}
