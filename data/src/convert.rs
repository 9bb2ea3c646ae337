//! Conversion: the records of any files, in their order, as shards of another format.
//!
//! | file | what |
//! | --- | --- |
//! | `written.rs` | how columns lie in a format |
//! | `sink.rs` | a shard on its way, and the names of its files |
//! | `arrow.rs` to `tfrecord.rs` | one file for each format that can be written |
//! | `writers.rs` | the choice among them |
//! | `folder.rs`, `whole.rs` | the folder of the shards; files that are whole or not there |
//!
//! Each thread takes the next shard, reads its records one after the other, and writes them. So
//! memory holds for each thread the block at hand, a batch of records, and what the format collects
//! (a row group of Parquet), however large the data is. A source is opened twice: once to count its
//! records, and again when its turn comes.
//!
//! Shards for an object store are written to a folder of the disk, copied when they are whole, and
//! removed. Some formats write to places behind and before each other, which no store can do.

mod arrow;
mod folder;
mod jsonl;
mod npy;
mod safetensors;
mod sink;
mod tar;
#[cfg(test)]
mod tests;
mod tfrecord;
mod whole;
mod writers;
mod written;

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

use proto::column::{ColumnSpec, ElementType};
use proto::ids::Epoch;
use proto::plan::RecordOrder;
use proto::spec::{DataSpec, FILES, FilesSpec, Format, LABELS};

pub use self::folder::ShardStore;
use self::sink::Shard;
use self::whole::Whole;
use self::written::Written;
use crate::cast::cast;
use crate::column::Column;
use crate::error::{Error, Result, malformed, wrong};
use crate::packed::{Access, DECODERS_MAX};
use crate::pass::Pass;
use crate::pixels::Encoding;
use crate::sample;
use crate::table::{Place, Reader, Table};
use crate::tables;

/// Bytes of values that are collected before a sink gets them, about.
const BATCH_BYTES: usize = 4 << 20;

/// Most records that are collected before a sink gets them.
const BATCH_RECORDS: usize = 8192;

/// Most shards of a conversion.
const SHARDS_MAX: u64 = 100_000;

/// Most files of one thread that are open at the same time.
const OPEN_MAX: usize = 64;

/// Files and records of each that show how large a record is.
const FILES_SAMPLED: usize = 16;
const RECORDS_SAMPLED: u64 = 256;

/// Order to write files in another format.
#[derive(Clone, Debug)]
pub struct Conversion {
    /// Files to be read, as `train`, and how. All files have the same columns.
    pub source: DataSpec,
    /// Format of the shards.
    pub format: Format,
    /// Folder of the shards. It is created if missing.
    pub folder: PathBuf,
    /// Folder of an object store that gets the shards. Then `folder` has those on their way.
    pub store: Option<Arc<dyn ShardStore>>,
    /// Size of a shard.
    pub size: ShardSize,
    /// Seed of an order drawn from all records. `None`: they keep the order of the files.
    pub shuffle: Option<u64>,
    /// Number of threads, at least 1.
    pub threads: usize,
    /// Whether files of an earlier conversion in the folder are replaced.
    pub overwrite: bool,
}

/// Size of a shard. The last shard may be smaller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ShardSize {
    /// Number of records, at least 1.
    Records(u64),
    /// Bytes of the records' values, about. A file may be smaller by its encoding, or larger.
    Bytes(u64),
}

/// Result of a conversion.
#[derive(Clone, Debug, PartialEq)]
pub struct Converted {
    /// Number of records.
    pub records: u64,
    /// Number of shards.
    pub shards: usize,
    /// Bytes of all files.
    pub bytes: u64,
    /// Columns of a job that reads the shards.
    pub columns: Vec<ColumnSpec>,
    /// Section of a job that reads the shards.
    pub data: DataSpec,
}

/// Writes the files of a source in another format. It calls `watch` with the number of records that
/// are written, and that of all; the latter is 0 while records are counted. The conversion stops
/// when `watch` returns false, and returns `None`. Then, and after an error, whole shards stay. The
/// call blocks.
///
/// # Errors
/// A file is missing or damaged, files have different columns, the format cannot hold a column, or
/// the folder is not empty or cannot be written.
pub fn convert(order: &Conversion, watch: &(dyn Fn(u64, u64) -> bool + Sync)) -> Result<Option<Converted>> {
    let Some(survey) = survey(order, watch)? else { return Ok(None) };
    let Survey { columns, starts, records, image, first } = &survey;
    let written = written::all(order.format, columns, *image);
    let written = written.map_err(|reason| malformed(&order.place(), reason))?;
    let each = match order.size {
        ShardSize::Records(records) => records.max(1),
        ShardSize::Bytes(bytes) => even(*records, bytes / record_bytes(order, columns, starts)?.max(1)),
    };
    let shards = records.div_ceil(each);
    if shards > SHARDS_MAX {
        return wrong(
            &order.place(),
            format!(
                "{records} records would be {shards} shards, at most {SHARDS_MAX}; give shards a larger size"
            ),
        );
    }
    let source = order.source.train.lists.values().flatten();
    let source: Vec<_> = source.map(|file| order.source.locate(file, None)).collect();
    order.prepare(&written, &source)?;

    let work = Work {
        order,
        columns,
        starts,
        written: &written,
        watch,
        all: *records,
        drawn: RecordOrder::new(
            *records,
            order.shuffle.unwrap_or_default(),
            Epoch(0),
            order.shuffle.is_some(),
        ),
        done: AtomicU64::new(0),
        next: AtomicUsize::new(0),
        stopped: AtomicBool::new(false),
    };
    let bytes = AtomicU64::new(0);
    let write = || -> Result<()> {
        let mut reader = Records { work: &work, open: BTreeMap::new() };
        while let Some((number, range)) = work.next_shard(each) {
            match reader.shard(number, range) {
                Ok(Some(written)) => {
                    bytes.fetch_add(written, Ordering::Relaxed);
                }
                Ok(None) => break,
                Err(error) => {
                    work.stopped.store(true, Ordering::Relaxed);
                    return Err(error);
                }
            }
        }
        Ok(())
    };
    // Threads beyond the decoders of a file would begin at its front for each shard.
    let threads_max = if first.is_packed() { DECODERS_MAX } else { usize::MAX };
    in_threads(order.threads.min(threads_max), write)?;
    if work.stopped.into_inner() {
        return Ok(None);
    }
    let converted = Converted {
        records: *records,
        shards: shards as usize,
        bytes: bytes.into_inner(),
        columns: written.iter().map(Written::column).collect(),
        data: section(order, &written, shards as usize),
    };
    let mut file = Whole::create(&order.folder, folder::SECTION)?;
    file.append(converted.section().as_bytes())?;
    order.keep(vec![file])?;
    Ok(Some(converted))
}

impl Converted {
    /// Returns the section of a job file that reads the shards, as text.
    pub fn section(&self) -> String {
        // A text of JSON is one of TOML.
        let quoted = |text: &str| serde_json::Value::from(text).to_string();
        let mut text = "[data]\n".to_owned();
        // A name may have an end of line in it, at which a comment ends.
        let plain = |column: &ColumnSpec| column.to_string().replace(char::is_control, " ");
        let columns = self.columns.iter().map(|column| format!("#     {}\n", plain(column)));
        text += &format!("# {} records of these columns:\n{}", self.records, columns.collect::<String>());
        text += &format!("format = {}\n", quoted(&self.data.format.name()));
        let lists: Vec<_> = self
            .data
            .train
            .lists
            .iter()
            .map(|(key, files)| {
                let files: String = files.iter().map(|file| format!("    {},\n", quoted(file))).collect();
                format!("{} = [\n{files}]", quoted(key))
            })
            .collect();
        text += &format!("train = {{ {} }}\n", lists.join(", "));
        let lengths = &self.data.lengths;
        if !lengths.is_empty() {
            let lengths: Vec<_> =
                lengths.iter().map(|(name, length)| format!("{} = {length}", quoted(name))).collect();
            text += &format!("lengths = {{ {} }}\n", lengths.join(", "));
        }
        match &self.data.label {
            Some(label) => text += &format!("label = {}\n", quoted(label)),
            None if self.columns.iter().any(|column| column.name == LABELS) => {}
            None => text += "# label = \"..\"      the column that the model learns\n",
        }
        text
    }
}

/// Returns the number of records of a shard so that all shards have about as many, at most `each`.
const fn even(records: u64, each: u64) -> u64 {
    let each = if each == 0 { 1 } else { each };
    let shards = records.div_ceil(each);
    records.div_ceil(if shards == 0 { 1 } else { shards })
}

/// Returns the section of a job that reads the shards.
fn section(order: &Conversion, written: &[Written], shards: usize) -> DataSpec {
    let folder = std::path::absolute(&order.folder).unwrap_or_else(|_| order.folder.clone());
    let mut lists: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for number in 0..shards {
        let names = order.shard(written, number, 0, 0).names();
        let path = |name: &String| match &order.store {
            Some(store) => store.url(name),
            None => folder.join(name).display().to_string(),
        };
        if order.format.has_one_column() {
            for (column, name) in written.iter().zip(&names) {
                lists.entry(column.found.name.clone()).or_default().push(path(name));
            }
        } else {
            lists.entry(FILES.to_owned()).or_default().extend(names.iter().map(path));
        }
    }
    let lengths = written.iter().filter_map(|column| Some((column.found.name.clone(), column.length?)));
    // A folder of images has its classes in its second column.
    let label = written.get(1).filter(|_| order.source.format == Format::Images);
    DataSpec {
        lengths: lengths.collect(),
        label: label.map(|column| column.found.name.clone()),
        ..DataSpec::of(order.format, FilesSpec { records: None, lists })
    }
}

impl Conversion {
    fn shard<'a>(&'a self, columns: &'a [Written], number: usize, first: u64, records: u64) -> Shard<'a> {
        Shard { folder: &self.folder, format: self.format, columns, number, first, records }
    }

    /// Returns where the shards will be, for errors.
    fn place(&self) -> PathBuf {
        self.store.as_ref().map_or_else(|| self.folder.clone(), |store| store.url("").into())
    }

    /// Prepares the folder of the shards.
    ///
    /// # Errors
    /// The folder cannot be written, or has something that has to stay.
    fn prepare(&self, columns: &[Written], sources: &[PathBuf]) -> Result<()> {
        let Some(store) = &self.store else {
            return folder::prepare(&self.folder, self.overwrite, sources);
        };
        let names = self.shard(columns, 0, 0, 0).names();
        if let Some(name) = names.iter().find(|name| !folder::is_plain(name)) {
            return wrong(
                &self.place(),
                format!(
                    "a file would be `{name}`, and in an object store names have letters without accents, digits, `-`, `_` \
                     and `.`; choose a format that has one file for all columns"
                ),
            );
        }
        folder::prepare(&self.folder, false, &[])?;
        folder::prepare_store(&**store, self.overwrite, sources)
    }

    /// Gives files their names where the shards are, and returns their bytes.
    ///
    /// # Errors
    /// A file cannot be written.
    fn keep(&self, files: Vec<Whole>) -> Result<u64> {
        let Some(store) = &self.store else { return whole::keep(files) };
        let paths: Vec<_> = files.iter().map(|file| file.path().to_owned()).collect();
        let bytes = whole::keep(files)?;
        for path in paths {
            store.write(&path.file_name().unwrap_or_default().to_string_lossy(), &path)?;
            std::fs::remove_file(&path).map_err(whole::failed(&path))?;
        }
        Ok(bytes)
    }

    /// Opens a file of the source, or finds it open.
    fn open(&self, file: usize) -> Result<Arc<Table>> {
        let access = if self.shuffle.is_some() { Access::Anywhere } else { Access::InSequence };
        let pass = Pass { access, ..Pass::plain() };
        tables::open(&self.source, &self.source.train, file, None, None, pass)
    }
}

/// What the files of a source have.
struct Survey {
    /// Columns, in the order of the first file.
    columns: Vec<ColumnSpec>,
    /// Number of each file's first record over all files.
    starts: Vec<u64>,
    /// Number of all records.
    records: u64,
    /// Encoding of the first image of a column `image`.
    image: Option<Encoding>,
    /// The first file, so that a source of one file is opened once.
    first: Arc<Table>,
}

/// Opens each file once. `None`: the caller stopped it.
///
/// # Errors
/// A file is missing or malformed, there is no record, or files have different columns.
fn survey(order: &Conversion, watch: &(dyn Fn(u64, u64) -> bool + Sync)) -> Result<Option<Survey>> {
    let files = order.source.train.len();
    let first = order.open(0)?;
    let columns: Vec<ColumnSpec> = first.columns().iter().map(|place| place.spec.clone()).collect();
    let counts = Mutex::new(vec![0; files]);
    let (next, stopped) = (AtomicUsize::new(0), AtomicBool::new(false));
    let count = || -> Result<()> {
        loop {
            let file = next.fetch_add(1, Ordering::Relaxed);
            if file >= files || stopped.load(Ordering::Relaxed) {
                return Ok(());
            }
            if !watch(0, 0) {
                stopped.store(true, Ordering::Relaxed);
                return Ok(());
            }
            let table = order.open(file)?;
            places(&table, &first, &columns)?;
            counts.lock().unwrap_or_else(PoisonError::into_inner)[file] = table.records();
        }
    };
    in_threads(order.threads, count)?;
    if stopped.into_inner() {
        return Ok(None);
    }
    let counts: Vec<u64> = counts.into_inner().unwrap_or_else(PoisonError::into_inner);
    let records: u64 = counts.iter().sum();
    if records == 0 {
        return wrong(first.path(), "the source has no records");
    }
    let starts = counts.iter().scan(0, |next, &records| Some(std::mem::replace(next, *next + records)));
    let image = encoding(&first)?;
    Ok(Some(Survey { starts: starts.collect(), columns, records, image, first }))
}

/// Returns the encoding of the first image in the column `image`, if there are some.
fn encoding(table: &Arc<Table>) -> Result<Option<Encoding>> {
    let is_image = |place: &&Place| place.spec.name == "image" && written::is_bytes(&place.spec);
    let Some(place) = table.columns().iter().find(is_image).filter(|_| table.records() > 0) else {
        return Ok(None);
    };
    let mut found = None;
    let mut reader = table.reader(std::slice::from_ref(place));
    reader.record(0, |_, column, row| found = Encoding::of(column.record(row)))?;
    Ok(found)
}

/// Returns the places of columns in a file, which must have these columns and no others.
///
/// # Errors
/// It has others.
fn places(table: &Table, first: &Table, columns: &[ColumnSpec]) -> Result<Vec<Place>> {
    let find = |column: &ColumnSpec| table.columns().iter().find(|place| place.spec == *column).cloned();
    let found: Option<Vec<Place>> = columns.iter().map(find).collect();
    match found.filter(|found| found.len() == table.columns().len()) {
        Some(found) => Ok(found),
        None => {
            let shown = |columns: &mut dyn Iterator<Item = &ColumnSpec>| {
                columns.take(20).map(ToString::to_string).collect::<Vec<_>>().join(", ")
            };
            wrong(
                table.path(),
                format!(
                    "its columns are {}; those of {} are {}; convert files with other columns by themselves",
                    shown(&mut table.columns().iter().map(|place| &place.spec)),
                    first.path().display(),
                    shown(&mut columns.iter())
                ),
            )
        }
    }
}

/// Returns about how many bytes the values of a record have.
///
/// # Errors
/// A file is damaged.
fn record_bytes(order: &Conversion, columns: &[ColumnSpec], starts: &[u64]) -> Result<u64> {
    let size = |column: &ColumnSpec| (column.width().unwrap_or_default() * column.dtype.size()) as u64;
    let fixed: u64 = columns.iter().filter(|column| !column.ragged).map(size).sum();
    if columns.iter().all(|column| !column.ragged) {
        return Ok(fixed);
    }
    let (mut bytes, mut records) = (0, 0);
    for file in sample::evenly(starts.len(), FILES_SAMPLED) {
        let table = order.open(file)?;
        let wanted = table.columns().iter().filter(|place| place.spec.ragged).cloned();
        let mut reader = table.reader(&wanted.collect::<Vec<_>>());
        for record in 0..table.records().min(RECORDS_SAMPLED) {
            reader.record(record, |_, column, row| bytes += column.record(row).len() as u64)?;
            records += 1;
        }
    }
    Ok(fixed + bytes / u64::max(records, 1))
}

/// Runs `work` in threads, and waits for all of them.
///
/// # Errors
/// The first error.
fn in_threads(threads: usize, work: impl Fn() -> Result<()> + Sync) -> Result<()> {
    thread::scope(|scope| {
        let threads: Vec<_> = (0..threads.max(1)).map(|_| scope.spawn(&work)).collect();
        let ended = threads
            .into_iter()
            .map(|thread| thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
        ended.fold(Ok(()), Result::and)
    })
}

/// A conversion that is under way.
struct Work<'a> {
    order: &'a Conversion,
    columns: &'a [ColumnSpec],
    starts: &'a [u64],
    written: &'a [Written],
    watch: &'a (dyn Fn(u64, u64) -> bool + Sync),
    /// Number of all records.
    all: u64,
    /// Record of the source at each place of the shards.
    drawn: RecordOrder,
    /// Number of records that are written.
    done: AtomicU64,
    /// Number of the next shard.
    next: AtomicUsize,
    /// Whether no further records are read: the caller stopped it, or a thread failed.
    stopped: AtomicBool,
}

impl Work<'_> {
    /// Returns the number and the records of the next shard, if there is one.
    fn next_shard(&self, each: u64) -> Option<(usize, Range<u64>)> {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let begin = (number as u64).checked_mul(each).filter(|&begin| begin < self.all)?;
        (!self.stopped.load(Ordering::Relaxed)).then(|| (number, begin..self.all.min(begin + each)))
    }

    /// Adds records that are written. Returns whether the conversion goes on.
    fn advance(&self, records: u64) -> bool {
        let done = self.done.fetch_add(records, Ordering::Relaxed) + records;
        if !(self.watch)(done, self.all) {
            self.stopped.store(true, Ordering::Relaxed);
        }
        !self.stopped.load(Ordering::Relaxed)
    }
}

/// The records of a source, for one thread.
struct Records<'a> {
    work: &'a Work<'a>,
    /// Files that are open, by their number. In the order of the files it is one at a time.
    open: BTreeMap<usize, Open>,
}

/// A file that is being read.
struct Open {
    table: Arc<Table>,
    reader: Reader,
}

impl Records<'_> {
    /// Writes a shard, and returns the bytes of its files. `None`: the conversion has stopped.
    ///
    /// # Errors
    /// A file cannot be read or written, or the format has no place for a value.
    fn shard(&mut self, number: usize, range: Range<u64>) -> Result<Option<u64>> {
        let work = self.work;
        let records = range.end - range.start;
        let mut sink = writers::open(&work.order.shard(work.written, number, range.start, records))?;
        let empty = || -> Vec<Column> {
            work.written.iter().map(|column| Column::with_capacity(column.stored.clone(), 0)).collect()
        };
        let (mut batch, mut bytes, mut collected, mut scratch) = (empty(), 0, 0, Vec::new());
        for place in range {
            let (record, mut fault) = (work.drawn.record(place), None);
            let file = self.read(record, |at, column, row| {
                if let Some(found) = column.fault(row) {
                    fault = Some((column.spec().name.clone(), found.to_string()));
                }
                let raw = column.record(row);
                bytes += raw.len();
                append(&mut batch[at], column.spec().dtype, raw, &mut scratch);
            })?;
            if let (Some((column, fault)), Some(open)) = (fault, self.open.get(&file)) {
                let record = record - work.starts[file];
                let what = format!(
                    "record {record}, column `{column}`: {fault}; a conversion keeps each value, so give it one or remove \
                     the record"
                );
                return wrong(open.table.path(), what);
            }
            collected += 1;
            if bytes >= BATCH_BYTES || collected >= BATCH_RECORDS {
                sink.add(&batch)?;
                if !work.advance(collected as u64) {
                    return Ok(None);
                }
                (batch, bytes, collected) = (empty(), 0, 0);
            }
        }
        if collected > 0 {
            sink.add(&batch)?;
        }
        // A file that changed meanwhile may have given records of both contents.
        self.open.values().try_for_each(|open| open.table.check())?;
        let written = work.order.keep(sink.finish()?)?;
        work.advance(collected as u64);
        Ok(Some(written))
    }

    /// Calls `take` with each column's block that has `record`, and the record's number there.
    /// Returns the number of its file.
    ///
    /// # Errors
    /// A file cannot be read, or has changed since its records were counted.
    fn read(&mut self, record: u64, take: impl FnMut(usize, &Column, usize)) -> Result<usize> {
        let Work { order, columns, starts, all, .. } = *self.work;
        let file = starts.partition_point(|&start| start <= record) - 1;
        if !self.open.contains_key(&file) {
            let most = if order.shuffle.is_some() { OPEN_MAX } else { 1 };
            while self.open.len() >= most
                && let Some((_, before)) = self.open.pop_first()
            {
                before.table.check()?;
            }
            let table = order.open(file)?;
            let expected = starts.get(file + 1).unwrap_or(&all) - starts[file];
            if table.records() != expected {
                return Err(Error::Changed {
                    path: table.path().to_owned(),
                    expected: (expected, table.bytes()),
                    found: (table.records(), table.bytes()),
                });
            }
            let reader = table.reader(&places(&table, &table, columns)?);
            self.open.insert(file, Open { table, reader });
        }
        let open = self.open.get_mut(&file).expect("opened above");
        open.reader.record(record - starts[file], take)?;
        Ok(file)
    }
}

/// Appends a record to a column whose type is at least as wide.
fn append(column: &mut Column, from: ElementType, raw: &[u8], scratch: &mut Vec<u8>) {
    let to = column.spec().dtype;
    if from == to {
        return column.push(raw);
    }
    scratch.clear();
    scratch.resize(raw.len() / from.size() * to.size(), 0);
    cast(from, raw, to, scratch).expect("the type of a shard holds each value of the source's");
    column.push(scratch);
}
