//! One SVG for each part: a line for each row that has a ratio, with its samples, median and target over its limit or peer.

use super::rows::{Row, Target};
use std::fmt::Write as _;

const LINE: f64 = 22.0;
const TOP: f64 = 44.0;
const NAMES: f64 = 430.0;
const PLOT: f64 = 470.0;
const RIGHT: f64 = 90.0;

/// None when no row has a ratio.
pub(super) fn svg(title: &str, rows: &[Row]) -> Option<String> {
    let rows: Vec<_> = rows.iter().filter_map(Line::of).collect();
    let largest = rows.iter().map(Line::largest).reduce(f64::max)?;
    // Beyond it a sample is drawn at the edge.
    let end = (largest * 1.05).clamp(1.2, 3.0);
    let x = |ratio: f64| NAMES + ratio.clamp(0.0, end) / end * PLOT;
    let (width, height) = (NAMES + PLOT + RIGHT, TOP + rows.len() as f64 * LINE + 12.0);
    let mut text = format!(
        r##"<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" font-size="12">
<rect width="100%" height="100%" fill="white"/>
<text x="10" y="18" font-size="14" font-weight="bold">{}: of limit or peer</text>
<text x="10" y="36" fill="#555">dots: samples; bar: median; mark: target</text>
"##,
        escaped(title)
    );
    for tenth in
        (0..).step_by(if end > 2.0 { 5 } else { 2 }).take_while(|tenth| f64::from(*tenth) / 10.0 <= end)
    {
        let ratio = f64::from(tenth) / 10.0;
        let (x, color) = (x(ratio), if tenth == 10 { "#888" } else { "#ddd" });
        let _ = writeln!(
            text,
            r#"<line x1="{x:.1}" x2="{x:.1}" y1="{TOP}" y2="{height}" stroke="{color}"/><text x="{x:.1}" y="{}" text-anchor="middle" fill="{NUMBERS}">{ratio}</text>"#,
            TOP - 4.0
        );
    }
    for (number, row) in rows.iter().enumerate() {
        let y = TOP + (number as f64 + 0.5) * LINE;
        let (color, met) = if row.met == Some(false) { ("#c0392b", "missed") } else { ("#2a6fb0", "") };
        let _ = writeln!(
            text,
            r#"<text x="{}" y="{:.1}" text-anchor="end">{}</text><rect x="{NAMES}" y="{:.1}" width="{:.1}" height="8" fill="{color}" opacity="0.35"/><text x="{}" y="{:.1}" fill="{color}">{:.2} {met}</text>"#,
            NAMES - 8.0,
            y + 4.0,
            escaped(row.name),
            y - 4.0,
            x(row.median) - NAMES,
            NAMES + PLOT + 4.0,
            y + 4.0,
            row.median,
        );
        for sample in &row.samples {
            let _ = writeln!(
                text,
                r#"<circle cx="{:.1}" cy="{y:.1}" r="2.5" fill="{color}" opacity="0.6"/>"#,
                x(*sample)
            );
        }
        if let Some(target) = row.target {
            let x = x(target);
            let _ = writeln!(
                text,
                r#"<line x1="{x:.1}" x2="{x:.1}" y1="{:.1}" y2="{:.1}" stroke="black" stroke-width="2"/>"#,
                y - 8.0,
                y + 8.0
            );
        }
    }
    Some(text + "</svg>\n")
}

const NUMBERS: &str = "#555";

/// A row over its limit or peer.
struct Line<'a> {
    name: &'a str,
    median: f64,
    samples: Vec<f64>,
    target: Option<f64>,
    met: Option<bool>,
}

impl<'a> Line<'a> {
    fn of(row: &'a Row) -> Option<Self> {
        let limit = row.limit_or_peer.filter(|limit| *limit != 0.0)?;
        let (Some(Target::AtLeast(bound) | Target::Below(bound)), met) = (row.target, row.met()) else {
            return Some(Self { target: None, ..Self::plain(row, limit)? });
        };
        Some(Self { target: Some(bound / limit), met, ..Self::plain(row, limit)? })
    }

    fn plain(row: &'a Row, limit: f64) -> Option<Self> {
        let samples = row.samples.iter().map(|sample| sample / limit).collect();
        Some(Self { name: row.name.trim(), median: row.ratio?, samples, target: None, met: None })
    }

    fn largest(&self) -> f64 {
        self.samples.iter().copied().chain(self.target).fold(self.median, f64::max)
    }
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plot_has_each_sample_and_marks_what_missed() {
        let rows = [
            Row::ratio("pull <64 MiB>", vec![0.5, 0.6, 0.7], Some(0.95)),
            Row::new("no peer", "ms", vec![1.0], None),
            Row::ratio("push", vec![1.0], None),
        ];
        let svg = svg("data", &rows).unwrap();
        assert_eq!(svg.matches("<circle").count(), 4);
        assert!(svg.contains("pull &lt;64 MiB&gt;") && svg.contains("0.60 missed"), "{svg}");
        assert!(!svg.contains("no peer"));
    }

    #[test]
    fn without_ratios_there_is_no_plot() {
        assert_eq!(svg("data", &[Row::new("no peer", "ms", vec![1.0], None)]), None);
    }
}
