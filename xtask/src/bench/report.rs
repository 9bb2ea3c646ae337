//! What all parts found, for people (`report.md`), for programs (`report.json`), and as plots.

use super::{plot, rows::Row, rows::Target};
use crate::workspace;
use anyhow::{Context, Result};
use serde::Serialize;
use std::{fmt::Write as _, fs, path::Path, process::Command, time::Duration};

/// All that was found so far.
pub(super) struct Report {
    machine: String,
    quick: bool,
    parts: Vec<Section>,
}

/// What one part found, or why it failed.
struct Section {
    name: String,
    rows: Result<Vec<Row>, String>,
    took: Duration,
}

/// A row in `report.json`.
#[derive(Serialize)]
struct Entry<'a> {
    part: &'a str,
    #[serde(flatten)]
    row: &'a Row,
}

impl Report {
    pub(super) fn begin(quick: bool) -> Self {
        Self { machine: machine(), quick, parts: Vec::new() }
    }

    pub(super) fn add(&mut self, name: &str, rows: Result<Vec<Row>, String>, took: Duration) {
        self.parts.push(Section { name: name.to_owned(), rows, took });
    }

    /// Names of the parts that failed.
    pub(super) fn failed(&self) -> Vec<&str> {
        self.parts.iter().filter(|part| part.rows.is_err()).map(|part| &*part.name).collect()
    }

    /// Targets that were met and missed.
    pub(super) fn summary(&self) -> String {
        let rows = || self.parts.iter().flat_map(|part| part.rows.iter().flatten());
        let missed: Vec<_> = rows().filter(|row| row.met() == Some(false)).collect();
        let with_target = rows().filter(|row| row.target.is_some()).count();
        let mut text =
            format!("{} rows, {} of {with_target} targets met\n", rows().count(), with_target - missed.len());
        for row in missed {
            let _ = writeln!(
                text,
                "missed: {}: {}, target {}",
                row.name,
                number(row.value, &row.unit),
                target(row)
            );
        }
        text
    }

    pub(super) fn write(&self, folder: &Path) -> Result<()> {
        let put = |name: &str, text: String| {
            let path = folder.join(name);
            fs::write(&path, text).with_context(|| format!("write `{}`", path.display()))
        };
        for part in &self.parts {
            if let Some(svg) = part.rows.as_ref().ok().and_then(|rows| plot::svg(&part.name, rows)) {
                put(&format!("{}.svg", part.name), svg)?;
            }
        }
        let entries = |part: &Section| {
            let rows = part.rows.iter().flatten();
            rows.map(|row| serde_json::to_value(Entry { part: &part.name, row })).collect::<Vec<_>>()
        };
        let entries: Result<Vec<_>, _> = self.parts.iter().flat_map(entries).collect();
        put("report.json", serde_json::to_string_pretty(&entries?)? + "\n")?;
        put("report.md", self.markdown())
    }

    fn markdown(&self) -> String {
        let mut text = format!("# Benches\n\n{}\n\n", self.machine);
        if self.quick {
            text += "One round of everything: these numbers show that the benches work, and little else.\n\n";
        }
        let _ = writeln!(text, "{}", self.summary());
        for Section { name, rows, took } in &self.parts {
            let _ = writeln!(text, "## {name}\n");
            match rows {
                Err(error) => {
                    let _ = writeln!(text, "FAILED: {error}\n");
                }
                Ok(rows) => {
                    text += "| figure | median | limit or peer | ratio | target | least to most | n | |\n";
                    text += "| --- | --- | --- | --- | --- | --- | --- | --- |\n";
                    rows.iter().for_each(|row| text += &line(row));
                    if plot::svg(name, rows).is_some() {
                        let _ = write!(text, "\n![{name}: ratios]({name}.svg)\n");
                    }
                    let _ = writeln!(text, "\n{:.0} s\n", took.as_secs_f64());
                }
            }
        }
        text
    }
}

fn line(row: &Row) -> String {
    let extreme = |pick: fn(f64, f64) -> f64| number(row.samples.iter().copied().reduce(pick), &row.unit);
    format!(
        "| {} | {} {} | {} | {} | {} | {} to {} | {} | {} |\n",
        row.name.trim(),
        number(row.value, &row.unit),
        if row.unit == "ratio" { "" } else { &row.unit },
        number(row.limit_or_peer.filter(|limit| *limit != 0.0), &row.unit),
        number(row.ratio, "ratio"),
        target(row),
        extreme(f64::min),
        extreme(f64::max),
        row.samples.len(),
        if row.met() == Some(false) { "MISSED" } else { "" },
    )
}

fn target(row: &Row) -> String {
    match row.target {
        Some(Target::AtLeast(bound)) => format!(">= {}", number(Some(bound), &row.unit)),
        Some(Target::Below(bound)) => format!("< {}", number(Some(bound), &row.unit)),
        None => "-".to_owned(),
    }
}

fn number(value: Option<f64>, unit: &str) -> String {
    match value {
        None => "-".to_owned(),
        Some(value) if unit == "ratio" => format!("{value:.3}"),
        Some(value) if value.abs() >= 100.0 => format!("{value:.0}"),
        Some(value) => format!("{value:.2}"),
    }
}

/// Processor, cores, memory, load, and what was built.
fn machine() -> String {
    let file = |path| fs::read_to_string(path).unwrap_or_default();
    let (processors, memory, load) = (file("/proc/cpuinfo"), file("/proc/meminfo"), file("/proc/loadavg"));
    let model = processors.lines().find_map(|line| line.strip_prefix("model name")?.split(": ").nth(1));
    let kib = memory.lines().find_map(|line| line.strip_prefix("MemTotal:")?.split_whitespace().next());
    let gib = kib.and_then(|kib| kib.parse::<f64>().ok()).map_or(0.0, |kib| kib / f64::from(1 << 20));
    let mut git = Command::new("git");
    git.args(["describe", "--always", "--dirty"]).current_dir(workspace::root());
    let commit = git.output().map(|output| String::from_utf8_lossy(&output.stdout).trim().to_owned());
    format!(
        "{} cores of {}, {gib:.0} GiB; load before it began {}; commit {}.",
        std::thread::available_parallelism().map_or(0, usize::from),
        model.unwrap_or(std::env::consts::ARCH),
        load.split(' ').next().unwrap_or("unknown"),
        commit.ok().filter(|commit| !commit.is_empty()).as_deref().unwrap_or("unknown"),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report() -> Report {
        let mut report = Report { machine: "2 cores".to_owned(), quick: false, parts: Vec::new() };
        let rows = vec![
            Row::ratio("pull, of raw TCP", vec![0.9, 0.8, 1.0], Some(0.95)),
            Row::new("raw TCP", "GiB/s", vec![3.0], None),
        ];
        report.add("data_plane", Ok(rows), Duration::from_secs(61));
        report.add("adam", Err("cargo bench: exit status 101".to_owned()), Duration::from_secs(1));
        report
    }

    #[test]
    fn missed_targets_and_failed_parts_are_in_the_report() {
        let report = report();
        let text = report.markdown();
        for line in [
            "2 rows, 0 of 1 targets met",
            "| pull, of raw TCP | 0.900  | 1.000 | 0.900 | >= 0.950 | 0.800 to 1.000 | 3 | MISSED |",
            "| raw TCP | 3.00 GiB/s | - | - | - | 3.00 to 3.00 | 1 |  |",
            "![data_plane: ratios](data_plane.svg)",
            "FAILED: cargo bench: exit status 101",
        ] {
            assert!(text.contains(line), "no `{line}` in\n{text}");
        }
        assert_eq!(report.failed(), ["adam"]);
    }

    #[test]
    fn files_are_a_list_of_rows_a_page_and_a_plot() {
        let folder = tempfile::tempdir().unwrap();
        report().write(folder.path()).unwrap();
        let list = fs::read_to_string(folder.path().join("report.json")).unwrap();
        let list: serde_json::Value = serde_json::from_str(&list).unwrap();
        assert_eq!(list.as_array().unwrap().len(), 2);
        assert_eq!(list[0]["part"], "data_plane");
        assert_eq!(list[0]["target"]["at_least"], 0.95);
        assert!(folder.path().join("report.md").exists() && folder.path().join("data_plane.svg").exists());
    }
}
