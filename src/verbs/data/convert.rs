//! `ebb data convert`: data files in another format.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context as _, Result, anyhow, bail, ensure};
use client::Shards;
use data::{Conversion, Converted, ShardSize, ShardStore};
use proto::spec::{DataSpec, FILES, FilesSpec, Format, data_url};
use serde_json::json;
use tempfile::TempDir;

use super::{named, reading};
use crate::app::App;
use crate::args;
use crate::terminal::bar::Bar;
use crate::terminal::report::count;

/// Bytes of a shard, if the user does not say.
const SHARD_BYTES: u64 = 128 << 20;

/// Most threads, if the user does not say.
const THREADS_MAX: usize = 8;

/// Most shards whose names are printed. The file `data.toml` has all of them.
const SHARDS_SHOWN: usize = 20;

/// Most bytes of decoded blocks that are kept for other threads.
const CACHE_BYTES_MAX: u64 = 1 << 30;

/// Column of a single file with one array whose column the user does not name.
const VALUES: &str = "values";

/// Returns whether all is converted. The user may have stopped it.
///
/// # Errors
/// A source cannot be read, the format cannot hold it, or the folder is not empty or cannot be
/// written.
pub(super) async fn run(args: args::DataConvert, app: &App) -> Result<bool> {
    let (shown, json) = (args.out.display().to_string(), args.json);
    let out = Out::of(&args.out, app)?;
    let (folder, store) = (out.folder.clone(), out.store.clone());
    data::limit_blocks(data::default_memory().min(CACHE_BYTES_MAX));
    let (bar, stop) = (Bar::new(app.screen.clone(), "records"), app.stop.token().clone());
    let convert = move || -> Result<Option<Converted>> {
        let order = Conversion { folder, store, ..order(&args)? };
        Ok(data::convert(&order, &|done, all| {
            bar.show(done, all);
            !stop.is_cancelled()
        })?)
    };
    let converted = tokio::task::spawn_blocking(convert).await.context("the conversion panicked")??;
    let Some(converted) = converted else {
        app.screen
            .line(&format!("stopped: {shown} has whole shards, but not all; --overwrite replaces them"));
        return Ok(false);
    };
    if json {
        let object = json!({
            "records": converted.records, "shards": converted.shards, "bytes": converted.bytes,
            "columns": converted.columns, "data": converted.data,
        });
        app.screen.print(&object.to_string())?;
    } else {
        app.screen.print(&text(&shown, &converted))?;
    }
    Ok(true)
}

/// Place of the shards.
struct Out {
    /// Folder to which they are written.
    folder: PathBuf,
    /// Folder of an object store to which they are copied.
    store: Option<Arc<dyn ShardStore>>,
    /// Removes the folder of shards on their way to a store.
    _staging: Option<TempDir>,
}

impl Out {
    /// Returns the place that a path or a URL names.
    ///
    /// # Errors
    /// The URL leads to no place for data files.
    fn of(out: &Path, app: &App) -> Result<Self> {
        let local = |folder| Self { folder, store: None, _staging: None };
        let Some((url, (scheme, rest))) = out.to_str().and_then(|url| Some((url, data_url::split(url)?)))
        else {
            return Ok(local(out.to_owned()));
        };
        let shown = data_url::shown(url);
        if !["file", "s3", "gs", "az"].contains(&scheme) {
            bail!(
                "--out {shown}: expected a folder, or a URL that begins with file://, s3://, gs:// or az://"
            );
        }
        // Jobs read the shards by their URLs.
        data_url::check(&format!("{}/data.toml", url.trim_end_matches('/')))
            .map_err(|reason| anyhow!("--out {shown}: {reason}"))?;
        if scheme == "file" {
            return Ok(local(PathBuf::from(&*data_url::decoded(rest))));
        }
        let shards = Shards::open(&app.environment.stores, url).with_context(|| format!("--out {shown}"))?;
        let staging = tempfile::tempdir().context("a folder for shards on their way to the store")?;
        let folder = staging.path().to_owned();
        Ok(Self { folder, store: Some(Arc::new(shards)), _staging: Some(staging) })
    }
}

/// Returns what the user wants. The call blocks.
///
/// # Errors
/// A format is unknown, sources do not fit the format, or no file fits a pattern.
fn order(args: &args::DataConvert) -> Result<Conversion> {
    let first = Path::new(args.sources.first().map_or("", String::as_str));
    let spec = reading(&args.reading, first)?;
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    Ok(Conversion {
        source: with_files(spec, &args.sources)?,
        format: named("--to", &args.to)?,
        folder: args.out.clone(),
        store: None,
        size: match args.records_per_shard {
            Some(records) => ShardSize::Records(records),
            None => ShardSize::Bytes(args.shard_bytes.unwrap_or(SHARD_BYTES)),
        },
        shuffle: args.shuffle,
        threads: args.threads.map_or(processors.min(THREADS_MAX), |threads| threads as usize),
        overwrite: args.overwrite,
    })
}

/// Returns the section with the sources as a job file has them, with files in place of patterns.
fn with_files(spec: DataSpec, sources: &[String]) -> Result<DataSpec> {
    let lists = lists(spec.format, sources)?;
    for file in lists.values().flatten() {
        data_url::check(file).map_err(|reason| anyhow!("{}: {reason}", data_url::shown(file)))?;
    }
    let spec = DataSpec { train: FilesSpec { records: None, lists }, ..spec };
    let spec = data::without_patterns(&spec, None)?;
    let files = &spec.train;
    let counts: Vec<_> =
        files.lists.iter().map(|(column, list)| format!("{} of `{column}`", list.len())).collect();
    let is_even = files.lists.values().all(|list| list.len() == files.len());
    ensure!(is_even, "{} files; each needs its partner in every column", counts.join(", "));
    Ok(spec)
}

/// Returns the sources of each column.
fn lists(format: Format, sources: &[String]) -> Result<BTreeMap<String, Vec<String>>> {
    let mut lists: BTreeMap<String, Vec<String>> = BTreeMap::new();
    if !format.has_one_column() {
        lists.insert(FILES.to_owned(), sources.to_vec());
        return Ok(lists);
    }
    for source in sources {
        // The query of a URL may have the sign in it.
        match source.split_once('=').filter(|(column, _)| data_url::split(column).is_none()) {
            Some((column, file)) if !column.is_empty() => {
                lists.entry(column.to_owned()).or_default().push(file.to_owned());
            }
            _ if sources.len() == 1 => drop(lists.insert(VALUES.to_owned(), sources.to_vec())),
            _ => {
                let shown = data_url::shown(source);
                bail!("{shown}: a file of {} has one column; name it, as COLUMN={shown}", format.name())
            }
        }
    }
    Ok(lists)
}

fn text(folder: &str, converted: &Converted) -> String {
    let records = count(converted.records, "record", "records");
    let shards = count(converted.shards as u64, "shard", "shards");
    let bytes = converted.bytes;
    let section = match converted.shards {
        0..=SHARDS_SHOWN => {
            format!("A job reads them with this section, also in data.toml:\n\n{}", converted.section())
        }
        _ => "A job reads them with the section in data.toml.".to_owned(),
    };
    format!("{folder}: {records} in {shards}, {bytes} bytes. {section}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lists(format: Format, sources: &[&str]) -> Result<BTreeMap<String, Vec<String>>> {
        let sources: Vec<_> = sources.iter().map(|&source| source.to_owned()).collect();
        Ok(with_files(DataSpec::of(format, FilesSpec::default()), &sources)?.train.lists)
    }

    fn map(lists: &[(&str, &[&str])]) -> BTreeMap<String, Vec<String>> {
        let owned = |files: &&[&str]| files.iter().map(|&file| file.to_owned()).collect();
        lists.iter().map(|(name, files)| ((*name).to_owned(), owned(files))).collect()
    }

    #[test]
    fn files_of_one_array_have_the_column_that_stands_before_them() {
        let found = lists(Format::Npy, &["x=1.npy", "y=2.npy", "x=a=b.npy", "y=4.npy"]).unwrap();
        assert_eq!(found, map(&[("x", &["1.npy", "a=b.npy"]), ("y", &["2.npy", "4.npy"])]));
        assert_eq!(lists(Format::Npy, &["x.npy"]).unwrap(), map(&[("values", &["x.npy"])]));
        let error = |sources: &[&str]| lists(Format::Idx, sources).unwrap_err().to_string();
        assert!(error(&["x", "y"]).contains("a file of idx has one column; name it, as COLUMN=x"));
        assert!(error(&["x=1", "x=2", "y=3"]).contains("2 of `x`, 1 of `y` files; each needs its partner"));
        let found = lists(Format::Csv, &["a=1.csv", "b.csv"]).unwrap();
        assert_eq!(found, map(&[("files", &["a=1.csv", "b.csv"])]));
    }

    #[test]
    fn sources_may_be_urls_without_secrets() {
        let found = lists(Format::Npy, &["https://host/x.npy?a=b"]).unwrap();
        assert_eq!(found, map(&[("values", &["https://host/x.npy?a=b"])]));
        let found = lists(Format::Npy, &["x=https://host/x.npy?a=b", "y=s3://bucket/y.npy"]).unwrap();
        assert_eq!(found, map(&[("x", &["https://host/x.npy?a=b"]), ("y", &["s3://bucket/y.npy"])]));
        let error = lists(Format::Csv, &["https://host/x.csv?token=a1b2"]).unwrap_err().to_string();
        assert!(error.contains("https://host/x.csv?..: its query has `token`"), "{error}");
        assert!(!error.contains("a1b2"), "{error}");
    }

    #[test]
    fn patterns_become_the_files_that_fit_them() {
        let folder = tempfile::tempdir().unwrap();
        for name in ["2.csv", "1.csv"] {
            std::fs::write(folder.path().join(name), "").unwrap();
        }
        let name = |name: &str| folder.path().join(name).display().to_string();
        let found = lists(Format::Csv, &[&name("*.csv")]).unwrap();
        assert_eq!(found, map(&[("files", &[&name("1.csv"), &name("2.csv")])]));
    }
}
