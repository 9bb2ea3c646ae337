//! `ebb data`: looks at data files.

use anyhow::{Context as _, Result, bail};
use data::Inspected;
use proto::spec::Format;
use serde_json::json;

use crate::app::App;
use crate::args;
use crate::terminal::report::count;

/// # Errors
/// The file cannot be read, or its format is unknown.
pub(crate) async fn run(verb: args::Data, app: &App) -> Result<()> {
    match verb {
        args::Data::Inspect(args) => inspect(args, app).await,
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

/// Returns the format that the user names, or that the file's name stands for.
fn format(args: &args::DataInspect) -> Result<Format> {
    let Some(name) = &args.format else {
        let name = args.file.to_string_lossy();
        return Format::of_name(&name)
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
