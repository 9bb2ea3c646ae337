//! `ebb data`: looks at data files.

use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use client::Submission;
use data::Inspected;
use proto::spec::{Format, data_url};
use serde_json::json;

use crate::app::App;
use crate::args;
use crate::terminal::report::count;

/// # Errors
/// The file cannot be read, or its format is unknown.
pub(crate) async fn run(verb: args::Data, app: &App) -> Result<()> {
    match verb {
        args::Data::Inspect(args) => inspect(args, app).await,
        args::Data::Bench(args) => bench(args, app).await,
    }
}

async fn inspect(args: args::DataInspect, app: &App) -> Result<()> {
    let format = format(&args)?;
    let (file, header, records) = (args.file.clone(), !args.no_header, args.records);
    let look = move || data::inspect(&file, format, header, records);
    let found = tokio::task::spawn_blocking(look).await.context("the reader panicked")??;
    if args.json {
        let column = |spec: &proto::column::ColumnSpec| json!({ "name": spec.name, "dtype": spec.dtype.name(), "shape": spec.shape, "ragged": spec.ragged });
        let columns: Vec<_> = found.columns.iter().map(column).collect();
        let object = json!({
            "format": format.name(), "records": found.records, "blocks": found.blocks, "columns": columns,
            "first": found.first,
        });
        return app.screen.print(&object.to_string());
    }
    app.screen.print(&text(&args, format, &found))
}

async fn bench(args: args::DataBench, app: &App) -> Result<()> {
    let mut spec = Submission::read(&args.file.job, &args.file.overrides)?.spec;
    super::replace_patterns(&mut spec, args.data_root.as_deref()).await?;
    let options = worker::Options::default();
    let threads = args.data_threads.map_or(options.data_threads, |threads| threads as usize);
    let time = Duration::from_secs(args.seconds);
    let measure = move || data::measure(&spec, args.data_root.as_deref(), threads, time);
    let found = tokio::task::spawn_blocking(measure).await.context("the reader panicked")??;
    let steps: Vec<_> = found.steps.iter().map(|(name, time)| (name, time.as_secs_f64())).collect();
    let all: f64 = steps.iter().map(|(_, time)| time).sum();
    if args.json {
        let steps: Vec<_> =
            steps.iter().map(|(name, time)| json!({ "step": name, "seconds": time })).collect();
        let object = json!({
            "records": found.records, "opening_seconds": found.opening.as_secs_f64(), "steps": steps,
            "threads": found.threads, "records_per_second": found.rate,
        });
        return app.screen.print(&object.to_string());
    }
    let mut lines = vec![format!(
        "{}, opened in {:.3} s",
        count(found.records, "record", "records"),
        found.opening.as_secs_f64()
    )];
    lines.push(format!("{:40} {:>12} {:>7}", "one record in one thread", "us", "share"));
    let line =
        |name: &str, time: f64| format!("  {name:38} {:>12.1} {:>5.0} %", time * 1e6, 100.0 * time / all);
    lines.extend(steps.iter().map(|(name, time)| line(name, *time)));
    let threads = count(found.threads as u64, "thread", "threads");
    lines.push(format!("batches in {threads}: {:.0} records/s", found.rate));
    app.screen.print(&lines.join("\n"))
}

/// Returns the format that the user names, or that the file's name stands for.
fn format(args: &args::DataInspect) -> Result<Format> {
    let Some(name) = &args.format else {
        let name = args.file.to_string_lossy();
        // The query of a URL is no part of the file's name.
        let plain = if data_url::is_remote(&name) { name.split('?').next() } else { None };
        return Format::of_name(plain.unwrap_or(&name))
            .with_context(|| format!("{name}: its name does not say which format it has; add --format"));
    };
    match serde_json::from_value(name.as_str().into()) {
        Ok(format) => Ok(format),
        Err(error) => bail!("--format {name}: {error}"),
    }
}

fn text(args: &args::DataInspect, format: Format, found: &Inspected) -> String {
    let Inspected { records, blocks, columns, first } = found;
    let mut lines = vec![format!(
        "{}: {}, {} in {}, {}",
        args.file.display(),
        format.name(),
        count(*records, "record", "records"),
        count(*blocks as u64, "block", "blocks"),
        count(columns.len() as u64, "column", "columns"),
    )];
    lines.extend(columns.iter().map(|column| format!("  {column}")));
    for (number, values) in first.iter().enumerate() {
        let values: Vec<_> =
            columns.iter().zip(values).map(|(column, value)| format!("{} {value}", column.name)).collect();
        lines.push(format!("record {number}: {}", values.join(", ")));
    }
    lines.join("\n")
}
