//! Report of a bench: a table for people, `target/bench/NAME.json` for programs, and its rows for
//! the report on all benches.

#![allow(dead_code, reason = "each bench uses a part of it")]

use std::fs;
use std::io::Write as _;
use std::path::Path;

use serde::Serialize;

/// One row.
#[derive(Debug, Serialize)]
pub(crate) struct Figure {
    pub(crate) name: &'static str,
    /// Median of the samples, or their largest one.
    value: f64,
    unit: &'static str,
    /// Value of the row if everything but the workers' compute were free.
    limit_or_peer: f64,
    /// Ratio `value / limit_or_peer`. `None` for a limit of 0.
    ratio: Option<f64>,
    target: Option<Target>,
    samples: Vec<f64>,
}

/// Bound that the value must meet.
#[derive(Clone, Copy, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Target {
    AtLeast(f64),
    Below(f64),
}

impl Figure {
    pub(crate) fn new(
        name: &'static str,
        unit: &'static str,
        samples: Vec<f64>,
        limit: f64,
        target: Option<Target>,
    ) -> Self {
        let value = median(&samples);
        let ratio = (limit != 0.0).then_some(value / limit);
        Self { name, value, unit, limit_or_peer: limit, ratio, target, samples }
    }

    /// Returns a row whose value is the largest sample, because each sample must meet the target.
    pub(crate) fn most(
        name: &'static str,
        unit: &'static str,
        samples: Vec<f64>,
        limit: f64,
        target: Option<Target>,
    ) -> Self {
        let most = samples.iter().copied().reduce(f64::max).unwrap_or(f64::NAN);
        let ratio = (limit != 0.0).then_some(most / limit);
        Self { value: most, ratio, ..Self::new(name, unit, samples, limit, target) }
    }

    /// Returns whether the value meets its target. Without target or samples it does.
    pub(crate) fn is_met(&self) -> bool {
        match self.target.filter(|_| !self.samples.is_empty()) {
            Some(Target::AtLeast(bound)) => self.value >= bound,
            Some(Target::Below(bound)) => self.value < bound,
            None => true,
        }
    }

    fn line(&self) -> String {
        let number = |value: f64| match self.unit {
            "ratio" => format!("{value:.3}"),
            _ => format!("{value:.1}"),
        };
        let target = match self.target {
            Some(Target::AtLeast(bound)) => format!(">= {}", number(bound)),
            Some(Target::Below(bound)) => format!("< {}", number(bound)),
            None => "-".to_owned(),
        };
        let extreme =
            |pick: fn(f64, f64) -> f64| self.samples.iter().copied().reduce(pick).unwrap_or(f64::NAN);
        format!(
            "{:<58} {:>9} {:>8} .. {:<8} {:<6} {:>8} {:>9} {:>3}  {}",
            self.name,
            number(self.value),
            number(extreme(f64::min)),
            number(extreme(f64::max)),
            self.unit,
            number(self.limit_or_peer),
            target,
            self.samples.len(),
            if self.is_met() { "" } else { "MISSED" },
        )
    }
}

pub(crate) fn print(figures: &[Figure]) {
    println!(
        "{:<58} {:>9} {:>8}    {:<8} {:<6} {:>8} {:>9} {:>3}",
        "", "median", "least", "most", "", "limit", "target", "n"
    );
    figures.iter().for_each(|figure| println!("{}", figure.line()));
    append(figures);
}

/// Appends the rows to the file that `EBB_BENCH_ROWS` names, one JSON object in each line. `cargo
/// xtask bench` collects them there.
#[expect(clippy::disallowed_methods, reason = "a bench is told by the environment where its rows go")]
fn append(figures: &[Figure]) {
    let Some(path) = std::env::var_os("EBB_BENCH_ROWS") else { return };
    let lines = figures.iter().map(|figure| serde_json::to_string(figure).expect("figures are JSON") + "\n");
    let file = fs::OpenOptions::new().create(true).append(true).open(path);
    let written = file.and_then(|mut file| file.write_all(lines.collect::<String>().as_bytes()));
    written.expect("the file of EBB_BENCH_ROWS can be written");
}

pub(crate) fn write(figures: &[Figure], path: &Path) {
    let json = serde_json::to_string_pretty(figures).expect("figures are JSON");
    fs::create_dir_all(path.parent().expect("a folder")).expect("the bench's folder can be made");
    fs::write(path, json + "\n").expect("the bench's results can be written");
    println!("{}", path.display());
}

/// Returns the median, or NaN without samples.
pub(crate) fn median(samples: &[f64]) -> f64 {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    match sorted.len() {
        0 => f64::NAN,
        odd if odd % 2 == 1 => sorted[middle],
        _ => f64::midpoint(sorted[middle - 1], sorted[middle]),
    }
}
