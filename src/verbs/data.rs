//! `ebb data`: looks at data files, measures them, and writes them in another format.

mod convert;

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use client::Submission;
use client::results::write_whole;
use data::{ImageSizes, Inspected};
use proto::spec::{DataSpec, FilesSpec, Format, TokenType, TokensSpec, data_url};
use serde_json::json;

use crate::app::App;
use crate::args;
use crate::terminal::report::count;

/// Returns whether the verb came to its end. The user may have stopped it.
///
/// # Errors
/// The file cannot be read, or its format is unknown.
pub(crate) async fn run(verb: args::Data, app: &App) -> Result<bool> {
    match verb {
        args::Data::Inspect(args) => inspect(args, app).await?,
        args::Data::Convert(args) => return convert::run(args, app).await,
        args::Data::Bench(args) => bench(args, app).await?,
    }
    Ok(true)
}

async fn inspect(args: args::DataInspect, app: &App) -> Result<()> {
    let spec = DataSpec { label: args.label.clone(), ..reading(&args.reading, &args.file)? };
    let (file, records) = (args.file.clone(), args.records);
    let (spec_of_look, format) = (spec.clone(), spec.format);
    let look = move || data::inspect(&file, &spec_of_look, records);
    let found = tokio::task::spawn_blocking(look).await.context("the reader panicked")??;
    if args.json {
        let column = |spec: &proto::column::ColumnSpec| json!({ "name": spec.name, "dtype": spec.dtype.name(), "shape": spec.shape, "ragged": spec.ragged });
        let columns: Vec<_> = found.columns.iter().map(column).collect();
        let images: Vec<_> = found.images.iter().map(image_sizes).collect();
        let object = json!({
            "format": format.name(), "records": found.records, "blocks": found.blocks, "columns": columns,
            "first": found.first, "images": images,
        });
        app.screen.print(&object.to_string())?;
    } else {
        app.screen.print(&text(&args, format, &found))?;
    }
    match args.contact_sheet {
        Some(picture) => contact_sheet(args.file, spec, args.images as usize, &picture, app).await,
        None => Ok(()),
    }
}

/// Writes a picture with some images of a file.
async fn contact_sheet(
    file: PathBuf,
    spec: DataSpec,
    images: usize,
    picture: &Path,
    app: &App,
) -> Result<()> {
    let name = picture.file_name().and_then(|name| name.to_str());
    let name =
        name.with_context(|| format!("--contact-sheet {}: is no name of a file", picture.display()))?;
    let draw = move || data::contact_sheet(&file, &spec, images);
    let sheet = tokio::task::spawn_blocking(draw).await.context("the reader panicked")??;
    let folder = picture.parent().filter(|folder| !folder.as_os_str().is_empty());
    write_whole(folder.unwrap_or(Path::new(".")), name, &sheet.png)?;
    let damaged = match sheet.damaged {
        0 => String::new(),
        damaged => format!(", {damaged} of them damaged (grey)"),
    };
    let images = count(sheet.images as u64, "image", "images");
    app.screen.line(&format!("{}: {images}{damaged}", picture.display()));
    Ok(())
}

fn image_sizes(found: &ImageSizes) -> serde_json::Value {
    json!({
        "column": found.column, "sampled": found.sampled, "damaged": found.damaged, "smallest": found.smallest,
        "median": found.median, "largest": found.largest,
    })
}

async fn bench(args: args::DataBench, app: &App) -> Result<()> {
    let mut spec = Submission::read(&args.file.job, &args.file.overrides)?.spec;
    client::replace_patterns(&mut spec, args.data_root.as_deref()).await?;
    let options = worker::Options::default();
    let threads = args.data_threads.map_or(options.data_threads, |threads| threads as usize);
    let time = Duration::from_secs(args.seconds);
    data::limit_memory(args.data_memory.unwrap_or_else(data::default_memory));
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

/// Returns how the user wants files to be read that are like `file`.
///
/// # Errors
/// The format is unknown, or lacks an option.
fn reading(args: &args::Reading, file: &Path) -> Result<DataSpec> {
    let format = format(args, file)?;
    let tokens = match (&args.token_type, args.block) {
        (Some(name), Some(block)) => {
            let dtype: serde_json::Result<TokenType> = serde_json::from_value(name.as_str().into());
            let dtype = dtype.with_context(|| format!("--token-type {name}: expected u16 or u32"))?;
            Some(TokensSpec {
                dtype,
                block: block as usize,
                stride: args.stride.map(|stride| stride as usize),
            })
        }
        _ => None,
    };
    match (format, tokens) {
        (Format::Tokens, None) => bail!(
            "{}: token files have no header; add --token-type u16 (or u32) and --block N, the tokens of one record",
            file.display()
        ),
        (Format::Tokens, _) | (_, None) => {}
        (other, Some(_)) => {
            bail!("--token-type: it is for token files, and the format is {}; remove it", other.name())
        }
    }
    let lengths = args.lengths.iter().cloned().collect();
    let header = !args.no_header;
    Ok(DataSpec { header, lengths, tokens, ..DataSpec::of(format, FilesSpec::default()) })
}

/// Returns the format that the user names, or that the file stands for.
fn format(args: &args::Reading, file: &Path) -> Result<Format> {
    let Some(name) = &args.format else {
        if args.token_type.is_some() {
            return Ok(Format::Tokens);
        }
        if file.is_dir() {
            return Ok(Format::Images);
        }
        let name = file.to_string_lossy();
        // The query of a URL is no part of the file's name.
        let plain = data_url::split(&name).and_then(|_| name.split('?').next());
        return Format::of_name(plain.unwrap_or(&name))
            .with_context(|| format!("{name}: its name does not say which format it has; add --format"));
    };
    named("--format", name)
}

/// Returns the format of this name. `flag` names it in errors.
fn named(flag: &str, name: &str) -> Result<Format> {
    match serde_json::from_value(name.into()) {
        Ok(format) => Ok(format),
        Err(error) => bail!("{flag} {name}: {error}"),
    }
}

fn text(args: &args::DataInspect, format: Format, found: &Inspected) -> String {
    let Inspected { records, blocks, columns, first, images } = found;
    let mut lines = vec![format!(
        "{}: {}, {} in {}, {}",
        args.file.display(),
        format.name(),
        count(*records, "record", "records"),
        count(*blocks as u64, "block", "blocks"),
        count(columns.len() as u64, "column", "columns"),
    )];
    lines.extend(columns.iter().map(|column| format!("  {column}")));
    lines.extend(images.iter().map(sizes));
    for (number, values) in first.iter().enumerate() {
        let values: Vec<_> =
            columns.iter().zip(values).map(|(column, value)| format!("{} {value}", column.name)).collect();
        lines.push(format!("record {number}: {}", values.join(", ")));
    }
    lines.join("\n")
}

/// Returns a line about the images of a column.
fn sizes(found: &ImageSizes) -> String {
    let of = |name: &str, size: Option<(usize, usize)>| {
        size.map(|(width, height)| format!(", {name} {width} x {height}")).unwrap_or_default()
    };
    format!(
        "  {} of `{}` looked at, {} damaged{}{}{} (width x height in pixels)",
        count(found.sampled as u64, "image", "images"),
        found.column,
        found.damaged,
        of("smallest", found.smallest),
        of("median", found.median),
        of("largest", found.largest),
    )
}
